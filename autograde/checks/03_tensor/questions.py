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
        id="03.heads",
        text="A model has 32 query heads and 8 key heads: each of these is read by 4 query heads. Its h is 4,096. Over "
        "how many **ranks** at most can you split its attention, if no rank keeps a copy of what another has?",
        answer=8,
        unit="ranks",
        why="a rank with one key head, its value head and the four query heads that read it needs nobody",
        mistakes={
            32: "a rank with one query head needs a key head as well, and three other ranks need the same one. (Some "
            "programs do that: they keep copies of key heads, and sum up the gradients of the copies)",
            16: "two ranks would have half of a key head each, and a score needs all of its numbers",
            4: "that is how many query heads share a key head; there are 8 key heads",
            128: "that is the size of a head. Heads are dealt out whole: a score is a sum over all of their numbers",
            48: "queries, keys and values of a head need each other: a rank has them all of its heads",
            40: "keys have no ranks of their own: a score needs a query and a key on the same rank",
            2: "2 ranks can share it, and so can more: a rank needs one key head at least",
        },
    ),
    Question(
        id="03.logits",
        text="A vocabulary of 128,256 words is split over **8 ranks**; 8,192 tokens go through at once. Logits are "
        "bf16, the loss is computed in float32 (4 bytes). How many **kB** (10³ bytes) does a rank send for the loss?",
        answer=172.03,
        unit="kB",
        tolerance=0.01,
        why="three all-reduces of 8,192 · 4 bytes, each sends 2 · 7/8 of them; nothing in backward",
        mistakes={
            57.34: "that is one all-reduce: largest logit, sum of exponentials and the target's logit make three",
            114.69: "that is two all-reduces. Which number of a token is missing?",
            86.02: "that is with 2 bytes a number; the three are computed in float32",
            98.30: "that is each tensor once; an all-reduce makes each rank send 2(t−1)/t of it",
            196.61: "that is 2 · M; a rank does not send the piece that it ends up with: 2(t−1)/t · M",
            344.06: "backward sends nothing: every rank has what the gradient of its logits needs",
            1_838_678: "that is what each rank would send to put the logits together",
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
