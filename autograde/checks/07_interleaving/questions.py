"""Questions of lesson 07."""

from autograde.question import Question

questions = [
    Question(
        id="07.gain",
        text="Somebody moves from GPipe to 1F1B, with p and m as they were. What do they gain?",
        answer="b",
        choices={
            "a": (
                "A smaller bubble: backwards start earlier.",
                "they start earlier, but the last one ends when it always did: both take (m+p−1)(T_F+T_B)",
            ),
            "b": (
                "Memory: a rank keeps at most p micro-batches, however many there are.",
                "yes. So m can grow, and it is the larger m that shrinks the bubble",
            ),
            "c": (
                "Fewer messages, since forward and backward share one.",
                "each value still travels once, each way; they only travel at other times",
            ),
            "d": (
                "Nothing without interleaving.",
                "the bubble is the same, but GPipe keeps m micro-batches on every rank and 1F1B at most p",
            ),
        },
    ),
    Question(
        id="07.kept",
        text="1F1B on **16 ranks** with **64 micro-batches**. How many micro-batches does the rank with **r = 5** keep "
        "at its peak?",
        answer=11,
        unit="micro-batches",
        tolerance=0.01,
        why="p − r: by the time its first gradient comes back it has done that many forwards",
        mistakes={
            10: "p − 1 − r is the warm-up; the first pair begins with one forward more",
            5: "that is r: the first ranks keep most, since their gradients are longest on the way",
            6: "that is r + 1, counted from the other end: the last rank keeps 1, the first keeps p",
            16: "that is the first rank's number; further down the pipe the way to the loss and back is shorter",
            64: "that is GPipe",
        },
    ),
    Question(
        id="07.chunks",
        text="p = 8, m = 32, and **v = 4** chunks on every rank. How many **percent of the ideal time** is the bubble?",
        answer=5.469,
        unit="%",
        tolerance=0.005,
        why="(p−1)/(vm) = 7/128",
        mistakes={
            21.875: "that is v = 1: a chunk is v times thinner, so the pipe fills v times faster",
            87.5: "that multiplies by v: the bubble is the time of p − 1 *chunks*, and these are thinner",
            5.185: "that is 7/135, the share of *total* time",
            17.95: "that is v = 1, and of total time",
            6.25: "that is 8/128: the last rank waits for p − 1 chunks",
        },
    ),
    Question(
        id="07.price",
        text="What does interleaving with v chunks cost, against 1F1B?",
        answer="d",
        choices={
            "a": (
                "v times the weights on every rank.",
                "a rank has the same layers' worth of weights, in v thin stages instead of a thick one",
            ),
            "b": (
                "Nothing: the bubble is v times smaller, and all else stays.",
                "every micro-batch crosses p·v−1 borders instead of p−1",
            ),
            "c": (
                "v times the activations on every rank.",
                "v times as many chunks, about, and each keeps 1/v as much: the factor is 1 + (p−1)/(pv), below 2",
            ),
            "d": (
                "A little more than v times the messages, and somewhat more activations on the first rank.",
                "yes: there are p·v−1 borders instead of p−1, so between two neighbouring ranks v·b·s·h travel instead "
                "of b·s·h; and 1 + (p−1)/(pv) times the activations. On slow links the messages can eat up what the "
                "bubble gave",
            ),
        },
    ),
    Question(
        id="07.tied",
        text="First and last stage share an embedding, and somebody forgets to add up the two gradients. What is seen?",
        answer="c",
        choices={
            "a": (
                "The first loss is wrong.",
                "both copies start equal, and a forward does not look at gradients: the first loss is right",
            ),
            "b": (
                "The run hangs: one rank waits for the other's gradient.",
                "somebody who forgets to add forgets it on both ranks: nobody waits",
            ),
            "c": (
                "The first loss is right; from the first step on, the two copies are two different weights.",
                "yes. The loss still falls, only not as in one process: a comparison of the second loss shows it",
            ),
            "d": (
                "Nothing: the embedding's gradient is sparse, the output layer's is not, so they do not meet.",
                "a row of the weight that is used in both places gets a gradient from both",
            ),
        },
    ),
]
