"""The questions of lesson 11."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="11.gpus",
        text="How many **GPUs** does DP 4 × CP 2 × PP 4 × TP 8 with EP 8 take, one rank on each?",
        answer=256,
        unit="GPUs",
        why="4 · 2 · 4 · 8; EP is folded over DP × CP and takes none of its own",
        mistakes={
            2048: "EP uses the ranks of DP × CP a second time: it takes none of its own",
            128: "that is without CP, which splits tokens over ranks of its own",
            32: "that is one copy of the model's layers and matrices, PP × TP; DP and CP multiply it",
            64: "that is PP × TP × CP: one of the four data-parallel copies",
            18: "degrees multiply: each rank has a place on every axis",
        },
    ),
    Question(
        id="11.copies",
        text="With DP 4 × CP 2 and EP 4, **how many ranks** add up the gradient of the same piece of the same expert?",
        answer=2,
        unit="ranks",
        why="DP × CP are 8 ranks, which hold each expert 8/4 = 2 times",
        mistakes={
            8: "these all hold a copy of a LayerNorm; each holds a quarter of the experts",
            4: "that is how many ranks one set of all experts takes; how often is the set there?",
            1: "with EP 8 it would be one: then no two ranks hold the same expert",
            32: "EP takes no ranks of its own: there are 8 here",
        },
    ),
    Question(
        id="11.second_loss",
        text="You turn on TP. The loss of step 1 is that of one process to six digits, that of step 2 differs in the "
        "third. Where do you look first?",
        answer="b",
        choices={
            "a": (
                "In the forward of the split layers: a sum over TP is missing.",
                "then the loss of step 1 would be wrong already: it comes from forward alone",
            ),
            "b": (
                "In the gradients and what becomes of them: a sum missing or one too many, the norm, the update.",
                "yes: the first forward was right, so it is the weights after the first update that are not",
            ),
            "c": (
                "In the text: the ranks have other tokens in the second step.",
                "possible, but the first step would show it as well, unless the seed changes from step to step",
            ),
            "d": (
                "Nowhere: float32 sums in another order give another loss.",
                "rounding moves the sixth digit after one step, not the third",
            ),
        },
    ),
    Question(
        id="11.norm",
        text="On TP 2, a split weight has the gradients (3) on rank 0 and (0) on rank 1. A LayerNorm's weight has the "
        "whole gradient (4) on both. What is the **norm** of the model's gradient?",
        answer=5,
        tolerance=0.01,
        why="√(3² + 0² + 4²): the LayerNorm's gradient counts once",
        mistakes={
            6.403: "that is √(9 + 16 + 16): the LayerNorm's gradient was counted on both ranks",
            7: "norms do not add up; squares do",
            4.123: "that is √(9 + 8): the LayerNorm's square was halved, and then only one of the two ranks counted it",
            3: "the whole parameters belong to the model too",
            4: "rank 1 alone would see that: it is not the model's norm",
        },
    ),
    Question(
        id="11.innermost",
        text="Why are the ranks of a TP group neighbours, and those of a DP group far apart?",
        answer="c",
        choices={
            "a": (
                "TP sends more bytes in a step than DP, in every model.",
                "with large models and few tokens a step DP's gradients are more; it is about when they must be there",
            ),
            "b": (
                "A collective over ranks that are not neighbours is not possible.",
                "any ranks can form a group; it is their links that differ",
            ),
            "c": (
                "TP's transfers stand in the way of the work in every layer, DP's can wait for the end of the step.",
                "yes: so TP gets the link of the server, and DP, which hides behind backward, the network",
            ),
            "d": (
                "A TP group has to have consecutive numbers for the matrices to be in order.",
                "a group keeps an order of its own, whatever the numbers of its ranks",
            ),
        },
    ),
]
