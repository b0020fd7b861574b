"""The self-check of lesson 10."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="10.crossing",
        text="A model of 530 billion parameters has h = 20,480 and is split over **560 ranks**, in a pipeline or by "
        "ZeRO-3 with one micro-batch. At how many **million tokens a step** do both move equally many bytes?",
        answer=38.75,
        unit="million tokens",
        tolerance=0.01,
        why="2·tokens·h = 3Ψ(n−1)/n; table 2's batch has 4.6 million, so the pipeline moves 8 times less",
        mistakes={
            25.83: "that is with two passes over the parameters: ZeRO-3 gathers twice and scatters once",
            77.50: "that is with one direction: activations go on, and their gradients come back",
            21699: "that is with a pipeline rank that passes on its 560th of the tokens: all pass a middle stage",
            0.0692: "that is with ZeRO-3's parameters divided by the ranks: each rank gathers all of them",
            19.37: "both are counted in bytes of 2 a number, or neither",
            21.31: "that is for the figure's model: here others are asked",
        },
    ),
    Question(
        id="10.order",
        text="Layout dp8,tp8 on 8 servers of 8 GPUs, ZeRO-1, with enough tokens that gradients hide. Somebody numbers "
        "the ranks the other way: **DP innermost, TP outermost**. Every rank sends as many bytes as before. The step …",
        answer="c",
        choices={
            "a": (
                "… gets shorter: gradients are the largest messages, and now have the fast link.",
                "they were hidden already, so their link gains little; what stood in the way before?",
            ),
            "b": (
                "… takes as long: not a byte more is sent.",
                "bytes are not seconds: the worked example sent the same bytes over two links",
            ),
            "c": (
                "… gets longer: what nothing hides now crosses the network.",
                "yes: TP's exchanges are exposed in each layer; what DP gains had been hidden anyway",
            ),
            "d": (
                "… does not end: all-reduces of TP deadlock between servers.",
                "they take longer there, no more; nothing in the order of the axes prevents a deadlock",
            ),
        },
    ),
    Question(
        id="10.interleaving",
        text="A pipeline of 16 stages works on **16 micro-batches** with 8 chunks a rank. What share of the *ideal* "
        "time "
        "is its bubble, in **percent**?",
        answer=11.72,
        unit="percent",
        tolerance=0.01,
        why="(p−1)/(v·m) = 15/128: Llama 3's on 16,384 GPUs",
        mistakes={
            93.75: "that is without interleaving: (p−1)/m",
            10.49: "that is of the total time; asked is the share of the ideal time, without the bubble",
            12.5: "p ranks wait for p−1 others, not for p",
            48.39: "that is of the total time, without interleaving",
            5.86: "that is with 32 micro-batches, as on 8,192 GPUs",
        },
    ),
    Question(
        id="10.zero2",
        text="A rank holds 5 billion parameters, each with 2 bytes of weight, 4 of gradient and 12 of Adam's states; "
        "**16 ranks** hold the same. A step is **one micro-batch**. How many **GB** does ZeRO-2 save beside ZeRO-1?",
        answer=18.75,
        unit="GB",
        tolerance=0.01,
        why="gradients of 4 bytes, of which 15/16 go: nothing is added up, since there is no second micro-batch",
        mistakes={
            0: "that is with two micro-batches or more, which are added up whole; what is added up here?",
            1.25: "that is what stays of the gradients, not what goes",
            20: "a rank keeps its own sixteenth",
            9.375: "that is with gradients of 2 bytes",
            28.125: "that is with the weights too, which stage 3 splits",
            75: "that is with Adam's states too: stage 1 has split them already",
        },
    ),
]
