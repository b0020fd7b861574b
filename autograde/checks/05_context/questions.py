"""The self-check questions of lesson 05."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="05.balance",
        text="A causal mask, **16 ranks**, contiguous parts of a long sequence. At how many **percent** of the ideal "
        "speed does the attention go?",
        answer=100 * 16 / 31,
        unit="percent",
        tolerance=0.005,
        why="n/(2n − 1): the last rank has 31 of the work units that, shared evenly, would be 16 for each",
        mistakes={
            53.33: "that is with 8 ranks",
            50: "that is the limit for very many ranks",
            100: "that is with zig-zag",
            6.25: "that is one rank's share of the tokens, not of the speed: all compute at the same time",
            48.39: "that is what is lost: the rest is the speed",
        },
    ),
    Question(
        id="05.block",
        text="Ring attention in bf16 on A100s (312 TFLOPS), one in each server, with 400 Gb/s between them. From how "
        "many **tokens in a block** on is every transfer hidden in forward?",
        answer=312e12 / 50e9,
        unit="tokens",
        tolerance=0.01,
        why="FLOPS / bandwidth, with 400 Gb/s = 50 GB/s: 4dc² operations against 4cd bytes",
        mistakes={
            780: "400 Gb/s are gigabits: 50 GB in a second",
            37_440: "six blocks are what a rank needs memory for, the paper's smallest sequence; the block itself is a "
            "sixth of it",
            24_960: "that is on 12.5 GB/s, 100 Gb/s",
            12_480: "that is with 4 bytes a number; bf16 has 2",
            1_040: "that is NVLink's 300 GB/s; these GPUs are not in one server",
        },
    ),
    Question(
        id="05.bytes",
        text="One layer of Llama 3 405B with tensor parallelism over 8 ranks (TP 8) and context parallelism over 16 "
        "(CP 16), a sequence of 131,072 tokens: each rank has 8,192 of them, and 1 of the 8 key heads, of 128 numbers "
        "in bf16. How many **MB** does a rank send in forward, be it round a ring or in an all-gather?",
        answer=2 * 8192 * 128 * 15 * 2 / 1e6,
        unit="MB",
        tolerance=0.01,
        why="its K and its V visit the 15 other ranks: 2 · 8,192 · 128 · 15 numbers of 2 bytes",
        mistakes={
            67.11: "a block visits the 15 others, and need not be sent to its own rank",
            31.46: "both travel, K and V",
            503.3: "that is all 8 key heads: tensor parallelism has left this rank one of them",
            1006.6: "that is K and V as wide as the 16 query heads: they are not repeated before they travel",
            4.194: "that is one step of the ring; there are 15",
        },
    ),
    Question(
        id="05.labels",
        text="Somebody puts each sequence into zig-zag order over 8 ranks first, and then shifts it by one on each "
        "rank to get the labels: `inputs = part[:, :-1]`, `labels = part[:, 1:]`. What happens?",
        answer="c",
        choices={
            "a": (
                "The first step fails: the shapes no longer fit.",
                "they fit: both are one token shorter, on every rank",
            ),
            "b": (
                "The loss is right. Attention has the positions, and these say which token follows which.",
                "positions tell attention what a query may see; what it is to guess is what the labels say",
            ),
            "c": (
                "At the end of each early chunk but the last rank's, the model is taught that a far later token "
                "follows. The loss falls all the same.",
                "yes: two chunks that are no neighbours stand side by side. Nothing fails, and in one process all is "
                "right",
            ),
            "d": (
                "Every label is wrong, and the loss does not fall.",
                "inside a chunk the next token is the next one of the sequence: only at its end another one is",
            ),
        },
    ),
    Question(
        id="05.variant",
        text="The same layer as above: TP 8 has left each rank **16 query heads and 1 key head**. Its context is to be "
        "split over 16 ranks. Which way is *not* open?",
        answer="b",
        choices={
            "a": (
                "The ring: blocks of 8,192 tokens are too short to hide anything.",
                "too short for full speed perhaps, but never wrong: a transfer that does not hide is waited for",
            ),
            "b": (
                "All-to-all: there is one key head to share out over 16 ranks.",
                "yes: ranks get whole heads, so there cannot be more of them than key heads",
            ),
            "c": (
                "All-gather: K and V of 131,072 tokens do not fit beside the rest.",
                "with one key head they are 67 MB a layer; it is what Llama 3 does",
            ),
            "d": (
                "None: all three give the same numbers.",
                "they do where they can be used; one of them needs something that this layer does not have",
            ),
        },
    ),
]
