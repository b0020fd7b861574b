# %% [markdown]
# # Fivefold
#
# *A hands-on course in 5D parallelism: data, tensor, context, pipeline and expert*
#
# A school kitchen has 1,000 sandwiches to make by noon, and more cooks than tables. There are five ways to share the
# work: every cook makes whole sandwiches for some of the children; two make each sandwich together; a long sandwich is
# cut along its length; one spreads and the next folds; or each is the master of one filling. Each way passes other
# things between the cooks, and costs something else. Large models are trained in all five ways at once.
#
# You build each of them from scratch, on real processes, on this machine. No GPU is needed. The course is a library
# with its key functions taken out: you write them back, and the tests that guard the library check you. At the end the
# library that trains a mixture-of-experts model in five ways at once is your own.
#
# ## The map
#
# | | lesson | you build |
# | --- | --- | --- |
# | 0 | [Ranks and collectives](00.ipynb) | the collectives, from messages. **Begin here** |
# | 1 | [The work cube](01.ipynb) | ranks in a grid of five axes, and the groups along each |
# | 2 | [Data parallelism and ZeRO](02.ipynb) | gradients that are summed while backward goes on; sharded optimizers |
# | 3 | [Tensor parallelism](03.ipynb) | matrices in columns and rows, attention by heads |
# | 4 | [Sequence parallelism and recomputation](04.ipynb) | tokens split between the matrices; less to keep |
# | 5 | [Context parallelism](05.ipynb) | ring attention over long sequences |
# | 6 | [Pipeline parallelism 1: naive and GPipe](06.ipynb) | layers on different ranks, and micro-batches |
# | 7 | [Pipeline parallelism 2: 1F1B and interleaving](07.ipynb) | schedules that keep less and wait less |
# | 8 | [Pipeline parallelism 3: zero bubble and DualPipe](08.ipynb) | backward in two halves |
# | 9 | [Expert parallelism](09.ipynb) | a router, and tokens on their way to experts |
# | 10 | [Layouts: links, memory, Llama 3](10.ipynb) | a planner: which axis goes where |
# | 11 | [Five in one](11.ipynb) | all of it, training one model |
#
# They build on each other, but you can enter anywhere: what you have not written yet, a lesson takes from the library.
#
# ## How to work
#
# 1. Open a lesson and run its cells from top to bottom: **Shift + Enter** runs one and goes to the next.
# 2. An exercise is a function with its body taken out. Read what stands above it, then its docstring. Write the body
#    where it says `YOUR CODE HERE`, in the place of the line below that, and run the cell.
# 3. Run the check below it. It tries your function on several processes, and answers in about a second. Change
#    something, run both cells again. There is no limit.
# 4. Stuck? Most exercises have a hint to unfold. A question (a cell that ends in `# your answer`) explains each
#    wrong answer.
# 5. Save now and then (Ctrl + S, ⌘ + S on a Mac). Progress is read from the saved notebooks.
#
# To begin a notebook again, choose *Kernel → Restart Kernel and Clear Outputs*. Your code stays. Nothing that you run
# can leave processes behind, and nothing can hang for long: what waits for something that never comes is reported.
#
# ## How to read a verdict
#
# ```
# tensor.RowLinear                                               6 of 8 points
#   ✓ output        4 ranks, 2 cases                      largest error 1e-16
#   ✗ gradient      bias.grad is 0.25 times the expected one on every rank
#                   with 4 ranks, 6 tokens, h 5, inner 12
#                   expected 6.064, got 1.516 at [0] on rank 0; relative error
#                   0.75, allowed 9.1e-13
#   ✓ traffic       1 all-reduce forward, 0 backward      360 B a rank
#   ✓ memory        160 B of 520 B a rank
#   ✓ arguments     4 ranks, 1 case                       largest error 5e-17
#   – hidden cases  run after the visible ones pass
#
# This looks like: each rank adds 1/t of the bias before the sum. The output
# is right. How much of the gradient does each rank's bias get then?
# ```
#
# Right numbers are one *property* among several. A program that sends twice what it should, or keeps a whole matrix
# where a piece would do, is wrong too, and the verdict says so line by line: ✓ passed, ✗ failed, – not looked at yet.
# Each property is worth points of its own. After ✗ stands what was seen, and with which sizes. Where your mistake is a
# known one, the last lines name it and ask a question. *Hidden cases* are other sizes and other random numbers, tried
# when a notebook is graded.
#
# Two more reports look like this. Lesson 0 makes you cause both.
#
# ```
# Deadlock after 0.3 s: nobody can go on.
#   rank 0   send to rank 1   waits for rank 1 to receive   cell [12] line 4: dist.send(x, dst=right)
#   rank 1   send to rank 0   waits for rank 0 to receive   cell [12] line 4: dist.send(x, dst=right)
# Everyone sends first, so nobody receives. Let one rank receive first, or start both and wait for both.
# ```
#
# ```
# Ranks disagree about operation 3 in group tp [0, 1, 2, 3]:
#   ranks 0, 1, 3   all_reduce  float32 (8, 16)   cell [15] line 9: dist.all_reduce(y, group=tp)
#   rank 2          all_reduce  float32 (8, 12)   cell [15] line 9: dist.all_reduce(y, group=tp)
# ```

# %% [markdown]
# ## Your progress
#
# Run the cell below. It checks what stands in your saved notebooks; it does not run them. An exercise that begins with
# a faulty program has its ✗ from the start. The same in a terminal: `.venv/bin/autograde status`.

# %%
from autograde.status import status

print(status())

# %% [markdown]
# ## If something does not work
#
# `.venv/bin/fivefold doctor`, in a terminal, says what this machine can do, and what is missing. To grade a whole
# notebook, with the hidden cases, as a teacher would: `.venv/bin/autograde grade notebooks/00_ranks.ipynb`.
#
# Where did an idea come from? Every lesson ends with its papers, and says where the same thing stands in Megatron-LM,
# torchtitan or DeepSpeed. The library itself is written to be read: `lib/fivefold`.
