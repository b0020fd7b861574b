"""Self-check of lesson 09."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="09.room",
        text="A rank has **4,096 tokens**, and each goes to the top **6** of **64** experts. The capacity factor is "
        "**1.25**. How many of this rank's tokens does an expert take at most?",
        answer=480,
        why="4,096 · 6 / 64 is 384, and a quarter more is 480",
        mistakes={
            80: "that is with one expert a token: each takes six places",
            384: "that is the even share, with a factor of 1; a quarter more is allowed",
            64: "that is 4,096 / 64: one expert a token, and no factor",
            307.2: "that is divided by the factor; more factor is more room",
            30720: "that is for all 64 experts together",
        },
    ),
    Question(
        id="09.balance",
        text="Of **8** experts two get half of the tokens each (top 1), and the router gives the one that it chooses a "
        "probability of 1. What is the balance loss, without a weight?",
        answer=4,
        why="8 · (½ · ½ + ½ · ½): four times what an even load has",
        mistakes={
            0.5: "that is Σ f·P; it is multiplied by the number of experts, so that an even load gives 1",
            8: "that is the loss where one expert gets everything",
            1: "that is the loss where all eight get the same",
            2: "f and P are ½ each, so their product is ¼, and there are two of them",
            0.25: "that is f·P of one of the two experts",
        },
    ),
    Question(
        id="09.nothing",
        text="In one step, no token of any rank chooses an expert of rank 2. What does rank 2 do in this layer?",
        answer="d",
        choices={
            "a": (
                "Nothing: it skips the layer until somebody needs it.",
                "the others wait for it in the all-to-all; and its own tokens have chosen experts on other ranks",
            ),
            "b": (
                "It sends its own tokens, and leaves out the second all-to-all.",
                "its tokens come back in the second one; a collective needs every rank of the group",
            ),
            "c": (
                "It takes some tokens from the busiest rank.",
                "it does not have the weights of that expert; to spread the load is the router's work",
            ),
            "d": (
                "It takes part in every all-to-all: it sends its tokens out, gets no rows to work on, and receives "
                "its own results back.",
                "yes: a number of rows may be 0, and the gradient of its experts is 0 then, which it hands on as well",
            ),
        },
    ),
    Question(
        id="09.bytes",
        text="A rank has **4,096 tokens** of h = **7,168** numbers of 2 bytes, each goes to **8** experts, and the "
        "experts are spread evenly over **64 ranks**. How many **GB** does the rank send for this layer, forward and "
        "backward?",
        answer=1.8496,
        unit="GB",
        tolerance=0.005,
        why="4 · 4,096 · 8 · 7,168 · 63/64 numbers of 2 bytes: 452 kB for every token",
        mistakes={
            0.925: "that is half: either forward alone, or the numbers without their 2 bytes",
            1.879: "that is with every row leaving; one in 64 has its expert at home",
            0.2312: "that is one copy of each token; it goes to 8 experts",
            0.4624: "that is one all-to-all; there are two forward and two backward",
            0.2349: "that is one copy of each token, and with none at home; it goes to 8 experts",
        },
    ),
    Question(
        id="09.copies",
        text="The layout is DP **8** and CP **2**, with EP **4**. Over how many ranks is the gradient of one expert "
        "summed?",
        answer=4,
        why="16 ranks have tokens of their own, every 4 of them hold all experts once: so there are 4 copies of each",
        mistakes={
            16: "that is the router, which every rank has a copy of; expert 0 is not on every rank",
            2: "DP / EP would be 2, but experts are spread over the context-parallel ranks as well",
            8: "that is DP; experts are spread over DP × CP, every 4 ranks",
            1: "an expert would be on one rank alone if EP were 16",
            64: "there are 16 ranks; EP needs none of its own, it is folded over DP × CP",
        },
    ),
]
