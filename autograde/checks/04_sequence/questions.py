"""The questions of lesson 04."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="04.kept",
        text="A layer of GPT-3 has h = 12,288 and 96 heads. One sequence of **4,096** tokens goes through it, split "
        "over **4 ranks**, tokens too; the attention core is computed again, and the gathered tokens are gathered "
        "again. How many **MB** does each rank keep of this layer for backward (16-bit numbers)?",
        answer=427.8,
        unit="MB",
        tolerance=0.01,
        why="34 · s·b·h / 4, with s·b·h = 50.3 million",
        mistakes={
            2441: "that is with the scores and probabilities kept: (34 + 160)/4; the core is computed again",
            805.3: "that is without sequence parallelism: its 10 bytes are split here as well",
            1711: "that is what all 4 ranks keep together",
            100.7: "that is the layer's input alone, 2 bytes a number, as full recomputation keeps it",
            25.17: "that is a rank's tokens of the input alone, as full recomputation with split tokens keeps it",
            578.8: "that is with the inputs of the two pairs kept whole: a layer that gathers again keeps 1/4 of them",
            213.9: "that is for half of the tokens, or for twice as many ranks",
            106.95: "that is for 2,048 tokens on 8 ranks",
            4.278e8: "that is in bytes; the answer is in MB",
            408.0: "that is in MiB, of 2²⁰ bytes; the answer is in MB, of 10⁶",
        },
    ),
    Question(
        id="04.bytes",
        text="All tokens are split, and the first layer of each pair gathers its input a second time in backward. "
        "How many **times** as many bytes does a rank send in a step as with tensor parallelism alone (t = 8)?",
        answer=1.25,
        tolerance=0.01,
        why="a layer had 4 all-reduces, which are 8 passes round the ring; now there are 10",
        mistakes={
            1: "so it is as long as every rank keeps what it has gathered: here it gathers twice more in a step",
            1.5: "an all-gather goes round the ring once, an all-reduce twice",
            1.125: "a layer has two pairs, and each gathers again",
            2: "only the gathered input travels again, and that in backward only",
            0.5: "an all-reduce became two exchanges, of half its bytes each",
        },
    ),
    Question(
        id="04.norms",
        text="Somebody leaves `sync_replicated_gradients` out. Tokens are split over 4 ranks; there is no data "
        "parallelism. What happens?",
        answer="b",
        choices={
            "a": (
                "The run hangs in the second step.",
                "a rank hangs when others wait for it; nobody calls anything here that the others do not",
            ),
            "b": (
                "The first loss is right. Each rank's norms learn from its own tokens, and the copies drift apart.",
                "yes: every token of a sequence belongs to one rank, and so does its part of the gradient",
            ),
            "c": (
                "The norms learn four times too slowly, and all alike.",
                "that would be the mean in the place of the sum; without any exchange the four gradients differ",
            ),
            "d": (
                "Nothing: the reduce-scatter in backward has summed their gradients.",
                "it sums the gradients of *activations*; those of the norms' weights are made after it, on each rank",
            ),
        },
    ),
    Question(
        id="04.masks",
        text="A dropout stands inside the attention core, on probabilities (b, a/t, s, s), in a model with **tensor "
        "parallelism alone**. Should the masks of the ranks be equal?",
        answer="c",
        choices={
            "a": (
                "Equal: without sequence parallelism, every rank has all tokens.",
                "all tokens, and of each its own heads: these numbers are on no other rank",
            ),
            "b": (
                "It does not matter: a mask is random either way.",
                "with equal masks head 0 and head a/t lose the same pairs of tokens in every step, for all of training",
            ),
            "c": (
                "Different: each rank has other heads there.",
                "yes: what decides is whether ranks hold pieces or copies, and not what they are pieces of",
            ),
            "d": (
                "Equal, or the sum over ranks after the projection would be wrong.",
                "that sum adds up what different heads give; it asks nothing of their masks",
            ),
        },
    ),
    Question(
        id="04.flops",
        text="Selective recomputation computes the attention core once more: 4·b·s²·h operations. A layer's whole step "
        "takes 72·b·s·h² and 12·b·s²·h. By how many **percent** does the step grow for s = 8,192 and h = 12,288?",
        answer=3.333,
        unit="percent",
        tolerance=0.04,
        why="s/(18h) is 3.70%, and 3.33% with the core itself in what it is compared with",
        mistakes={
            10: "that is the core's share of *one forward*, as the paper states it; a step is three forwards long",
            11.1: "that is s/(6h), the core beside the rest of *one forward*; a step is three forwards long",
            3.704: "that is s/(18h): the step that it is compared with has the core in it as well",
            33.3: "that is full recomputation: the whole forward once more",
            0.0333: "that is the ratio; times 100 it is percent",
            4.76: "that is this lesson's small model, where s is as large as h",
            0.90: "that is for 2,048 tokens, a sixth of h",
            70: "that is what it saves in memory",
        },
    ),
]
