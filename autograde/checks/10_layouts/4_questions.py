"""The self-check of lesson 10."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="10.crossing",
        text="A model of 175 billion parameters has h = 12,288 and is split over **384 ranks**, in a pipeline or by "
        "ZeRO-3 with one micro-batch. At how many **million tokens a step** do both move equally many bytes?",
        answer=21.31,
        unit="million tokens",
        tolerance=0.01,
        why="2·tokens·h = 3Ψ(n−1)/n; table 2's batch has 3.1 million, so the pipeline moves 7 times less",
        mistakes={
            14.20: "that is with two passes over the parameters: ZeRO-3 gathers twice and scatters once",
            42.61: "that is with one direction: activations go on, and their gradients come back",
            8182: "that is with a pipeline rank that passes on its 384th of the tokens: all pass a middle stage",
            0.0555: "that is with ZeRO-3's parameters divided by the ranks: each rank gathers all of them",
            10.65: "both are counted in bytes of 2 a number, or neither",
        },
    ),
    Question(
        id="10.order",
        text="Why is tensor parallelism innermost, and data parallelism outermost?",
        answer="c",
        choices={
            "a": (
                "TP moves the most bytes in all.",
                "with many micro-batches often, but a large model's gradients can be more; what matters is when they "
                "move",
            ),
            "b": (
                "TP has the smallest degree, so it fits into a server.",
                "its degree is small because it must fit: this is the consequence, not the reason",
            ),
            "c": (
                "TP's exchanges are exposed in every layer; DP's come once a step and can hide.",
                "yes: what stands in the way of computing gets the fast link",
            ),
            "d": (
                "All-reduces over the network deadlock where all-gathers do not.",
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
        text="A pipeline rank works on 32 micro-batches a step, and adds their gradients up in float32. What does "
        "ZeRO-2 "
        "save in memory beside ZeRO-1, if gradients are summed over the ranks **once a step**?",
        answer="a",
        choices={
            "a": (
                "Nothing: until the last micro-batch every rank adds up whole gradients.",
                "yes: only by summing after every micro-batch could it drop what is not its own, at 32 times the "
                "traffic",
            ),
            "b": (
                "The gradients of all but 1/n of the parameters.",
                "after the sum, yes; but the peak comes before it, when the rank's own sums are whole",
            ),
            "c": (
                "Half: 2 bytes a parameter in the place of 4.",
                "that is the size of a number, which no stage changes",
            ),
            "d": (
                "All parameters but 1/n.",
                "that is stage 3, which gathers parameters again for every micro-batch",
            ),
        },
    ),
]
