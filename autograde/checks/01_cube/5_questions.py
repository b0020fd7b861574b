"""Questions of lesson 01."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="01.gpus",
        text="How many **GPUs** does Data 8, Context 2, Pipeline 4, Tensor 8, Expert 16 need?",
        answer=512,
        why="8 · 2 · 4 · 8. Experts are spread over the 16 ranks of DP × CP, which are there anyway",
        mistakes={
            8192: "that has EP multiplied in; experts take no GPUs of their own",
            38: "degrees multiply: each GPU has a place on every axis",
            64: "that is the number of servers of 8, or of different blocks of work",
            256: "that leaves CP out: it cuts the tokens, and takes GPUs for it",
        },
    ),
    Question(
        id="01.stage",
        text="Llama 3 405B was trained on 16,384 GPUs with TP 8, CP 1, PP 16, DP 128, in the order of this lesson. On "
        "which **pipeline stage**, counted from 0, is rank 1000?",
        answer=13,
        why="1000 = 8 · 125 is at tp 0, and 125 = 7 · 16 + 13 is at dp 7, pp 13",
        mistakes={
            125: "that is pp and dp still in one number; PP has 16 stages, so divide once more",
            7: "that is its dp; the rest of that division is its stage",
            8: "that is the rest by 16 of the rank itself; first TP, the faster axis, has to go",
            0: "that is with DP inside PP; here DP is the slowest axis",
            12: "stages are counted from 0",
            14: "stages are counted from 0",
        },
    ),
    Question(
        id="01.spill",
        text="Tensor 6, Data 4, on servers of 8 GPUs. How many of the four TP **groups** are in two servers?",
        answer=2,
        why="ranks 6 to 11 and 12 to 17 have a server's edge, before 8 and before 16, inside them",
        mistakes={
            0: "6 is less than 8, but a second group of 6 begins at rank 6, and only two more fit into that server",
            1: "there are two edges between the three servers, before rank 8 and before rank 16; is each in a group?",
            3: "the last group, ranks 18 to 23, fills the end of the third server",
            4: "the first group, ranks 0 to 5, is in the first server",
        },
    ),
    Question(
        id="01.copies",
        text="Data 8, Context 2, Tensor 4, Expert 4, and 64 experts. Each matrix of an expert is cut over the TP "
        "group. Over how many **ranks** is the gradient of one such piece of an expert added up?",
        answer=4,
        why="8 · 2 ranks of DP × CP hold all 64 experts in groups of 4, so there are 16/4 = 4 copies of each",
        mistakes={
            16: "that is all of DP × CP; three quarters of them hold other experts",
            8: "that is DP; DP × CP has 16 ranks, and EP is folded over all of them",
            2: "that is DP over EP; CP has its part in it too: DP × CP has 16 ranks",
            64: "the other ranks of the TP group hold other pieces of the matrix",
            1: "EP 4 makes groups of 4 ranks that hold every expert once; in 16 ranks there is room for more than one",
        },
    ),
    Question(
        id="01.order",
        text="Why do the ranks of a TP group get neighbouring numbers?",
        answer="c",
        choices={
            "a": (
                "Because `new_group` wants ranks that follow one another.",
                "it takes any ranks: the DP groups here are 8 or more apart",
            ),
            "b": (
                "Because their blocks of work are next to each other in the cube.",
                "they share one block; it is the ranks of CP, PP and DP whose blocks are neighbours",
            ),
            "c": (
                "Because neighbours share a server, and TP sends most, with everyone standing still meanwhile.",
                "yes: an all-reduce twice in every layer each way, and the layer cannot go on before it is done",
            ),
            "d": (
                "Because the sum would be wrong in another order.",
                "an all-reduce gives the same sum wherever its ranks stand; it would only take longer",
            ),
        },
    ),
]
