"""Self-check questions of lesson 02."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="02.bytes",
        text="A model of **7.5 billion** parameters is trained with plain data parallelism on **64 ranks**; gradients "
        "are bf16 (2 bytes). How many **GB**, of 10⁹ bytes, does each rank send in a step?",
        answer=29.53,
        unit="GB",
        tolerance=0.005,
        why="15 GB of gradients, in an all-reduce that makes each rank send 2 · 63/64 of them",
        mistakes={
            14.77: "that is once round the ring; an all-reduce goes round twice, to sum and to hand out the sums",
            15: "that is the size of the gradients; an all-reduce makes each rank send 2(n−1)/n of it",
            30: "nearly: a rank does not send the piece that it ends up with. 2(n−1)/n · M, not 2M",
            59.06: "that is with 4 bytes a number; bf16 has 2",
            44.3: "that is stage 3, which gathers the parameters twice; plain data parallelism moves 2Ψ",
            7.38: "that is one byte a number, once round the ring; bf16 has 2, and an all-reduce goes round twice",
            27.5: "that is in GiB, of 2³⁰ bytes; 1 GB is 10⁹ bytes",
        },
    ),
    Question(
        id="02.mean",
        text="Rank 0 has 100 tokens with a mean loss of 3, rank 1 has 300 tokens with a mean loss of 2. What is the "
        "loss of the step?",
        answer=2.25,
        tolerance=1e-3,
        why="(100 · 3 + 300 · 2) / 400: each token counts once",
        mistakes={
            2.5: "that is the mean of the means: a token of rank 0 would count three times as much as one of rank 1",
            900: "that is the sum of the losses; it is still to be divided by the 400 tokens",
            2.75: "you weighed each rank by the other one's tokens",
            5: "means do not add up; sums do",
            450: "that is the sum over the number of ranks; divide by the tokens",
        },
    ),
    Question(
        id="02.fits",
        text="The states of a **70 billion** parameter model, in mixed-precision Adam (K = 12), are to fit into "
        "GPUs of **80 GB**. How many ranks does **stage 3** need at least? (Activations are not counted.)",
        answer=14,
        tolerance=1e-3,
        unit="ranks",
        why="16 bytes · 70 · 10⁹ are 1,120 GB, and 1,120/80 is 14. With stage 2 no number of ranks is enough: the "
        "parameters alone are 140 GB on each",
        mistakes={
            16: "16 is a usual number, and 14 are enough: nothing has to be a power of two",
            2: "that is for the parameters alone; gradients and the optimizer's states are seven times as much",
            11: "that is the optimizer's 12 bytes; parameters and gradients have 2 bytes each beside them",
            4: "that is for parameters and gradients; the optimizer's states are three quarters of all",
            13: "the product is 1,120 GB: 13 GPUs have 1,040",
            15: "one fewer is enough: 14 · 80 GB are exactly 1,120 GB",
            18: "K = 12 has the float32 copy of the parameters in it; do not count it twice",
        },
    ),
    Question(
        id="02.order",
        text="Bucket 2 has all its gradients, bucket 1 lacks one. Why does a rank not start bucket 2 at once?",
        answer="c",
        choices={
            "a": (
                "Because bucket 1 holds the later layers, whose gradients matter more.",
                "all gradients are needed before the step; none matters more",
            ),
            "b": (
                "Because two all-reduces cannot be under way at the same time.",
                "they can: that is what `async_op` is for. What must be the same everywhere is the order of the calls",
            ),
            "c": (
                "Because another rank may get bucket 1 ready first, and the two all-reduces would meet each other.",
                "yes: the k-th collective of a group on one rank is matched with the k-th on every other, whatever is "
                "in it",
            ),
            "d": (
                "Because p.grad of bucket 2 may still change in this backward.",
                "the hook runs when the gradient is whole; for bucket 2 nothing changes any more",
            ),
        },
    ),
    Question(
        id="02.floor",
        text="Stage 3 over 1,024 ranks leaves 0.12 GB of states of a 7.5B model on each. What does *no* stage of "
        "ZeRO make smaller?",
        answer="d",
        choices={
            "a": ("The float32 copy of the parameters.", "that is among the K bytes: split from stage 1 on"),
            "b": ("The gradients, while backward goes on.", "from stage 2 on: its pieces, and a bucket or two"),
            "c": ("The parameters of all layers.", "stage 3 gathers one module at a time"),
            "d": (
                "The activations of the rank's own sequences.",
                "yes: a sequence is on one rank, with all its activations. One sequence is the least that a rank can "
                "have. The next lessons cut that",
            ),
        },
    ),
]
