"""Questions of lesson 03."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="03.bytes",
        text="An MLP with h = 4,096 is split over **8 ranks**. 2,048 tokens go through at once, numbers are bf16 (2 "
        "bytes). How many **MB**, of 10⁶ bytes, does each rank send for this MLP in a step, forward and backward?",
        answer=58.72,
        unit="MB",
        tolerance=0.01,
        why="2,048 · 4,096 · 2 bytes are 16.8 MB; an all-reduce over 8 ranks sends 2 · 7/8 of that, and there are two",
        mistakes={
            29.36: "that is one all-reduce; there is one forward and one backward. Or it is two, but with each rank "
            "sending (t−1)/t of the tensor: an all-reduce goes round the ring twice",
            33.55: "that is the tensor once each way; an all-reduce makes each rank send 2(t−1)/t of it",
            56: "that is in MiB, of 2²⁰ bytes; 1 MB is 10⁶ bytes",
            67.11: "that is 2 · M each way; a rank does not send the piece that it ends up with: 2(t−1)/t · M",
            117.44: "that is with 4 bytes a number; bf16 has 2",
            14.68: "that is one pass round the ring, one way; an all-reduce makes two passes, and there are two of it",
            7.34: "that is what 1/8 of the ranks would have to send; the tensor that travels is not split",
        },
    ),
    Question(
        id="03.order",
        text="Why is the first matrix of the pair cut by columns, and the second by rows?",
        answer="b",
        choices={
            "a": (
                "Because a column of A is shorter than a row of it, so that a rank has fewer numbers to keep.",
                "both cuts leave 1/t of the matrix on a rank; memory does not tell them apart",
            ),
            "b": (
                "Because a column of A gives a finished number to the GELU, a row a part of a sum.",
                "yes: and what the columns give is what the rows take, so nothing travels in between",
            ),
            "c": (
                "Because PyTorch stores a weight as (out, in).",
                "that decides which dimension of the tensor you cut, not which cut lets the GELU work on its own",
            ),
            "d": (
                "It does not matter: rows first would send as many bytes.",
                "rows first needs a sum before the GELU, of 4h numbers a token, and leaves the output in pieces",
            ),
        },
    ),
    Question(
        id="03.without_f",
        text="You forget *f*: the input goes straight into the `ColumnLinear`. Before the MLP there is an embedding, "
        "of which every rank has a copy. What happens on 4 ranks?",
        answer="c",
        choices={
            "a": (
                "The loss of the first step is wrong, and on every rank it is another one.",
                "forward, *f* does nothing, so the first loss is right to the last digit: that is what makes it hard",
            ),
            "b": (
                "The run hangs in backward, in the all-reduce of the embedding's gradient.",
                "a rank hangs when others wait for it in an all-reduce; here nobody calls one",
            ),
            "c": (
                "The embedding's copies get unlike gradients, and drift apart.",
                "yes, and the first loss is right: each rank knows what its own columns want of the input. Only a "
                "check of gradients sees it",
            ),
            "d": (
                "Nothing: autograd adds up the gradients of all the copies of x.",
                "autograd sees one process. That the same x is used on three other ranks is known to you alone",
            ),
        },
    ),
    Question(
        id="03.stays",
        text="Which of these does tensor parallelism *not* make smaller on a rank?",
        answer="d",
        choices={
            "a": ("The weights of the two matrices.", "a rank has 1/t of each"),
            "b": ("Their optimizer state.", "it follows the weights: 1/t"),
            "c": (
                "The inner activations, X·A and its GELU, kept for backward.",
                "a rank has its own columns of them: 1/t",
            ),
            "d": (
                "The input X of the pair, kept for backward.",
                "yes: every rank keeps every token of it. Lesson 04 cuts that as well",
            ),
        },
    ),
    Question(
        id="03.server",
        text="Four ranks share a layer with large matrices. In one server they have NVLink, a link between its GPUs "
        "of 450 GB/s each way. Placed in four servers they have one 400 Gb/s network card each. By bandwidth alone, "
        "without latency, how many **times as long** does the all-reduce take there?",
        answer=9,
        tolerance=0.02,
        why="400 Gb/s are 50 GB/s, and 450/50 is 9; the bytes that each rank sends are the same. The replay above has "
        "a little less: before every message stands a latency, which does not grow as much",
        mistakes={
            8.15: "that is what the replay shows, latencies included; by bandwidth alone it is a little more",
            1.125: "b is not B: 400 Gb/s are gigabits; in bytes that is an eighth",
            18: "900 GB/s is NVLink in both directions together, and the card's 50 GB/s are one direction",
            36: "each rank has a card of its own; they do not share one",
            72: "you divided the card's speed by 8 twice",
        },
    ),
]
