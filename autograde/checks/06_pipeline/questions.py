"""Questions of lesson 06."""

from autograde.question import Question

questions = [
    Question(
        id="06.share",
        text="A pipeline of **8 ranks** runs GPipe with **32 micro-batches**. For how many **percent of the total "
        "time** of a step does a rank idle?",
        answer=17.95,
        unit="%",
        tolerance=0.005,
        why="(p−1)/(m+p−1) = 7/39: the idle time is that of 7 micro-batches, the total that of 39",
        mistakes={
            21.875: "that is 7/32, the share of *ideal* time; the total has the bubble in it: 32 + 7",
            20: "that is 8/40: the last rank waits for 7 forwards before its first, not for 8",
            25: "that is 8/32: the pipe fills for p − 1 micro-batches, and the total has the bubble in it",
            82.05: "that is the share in which a rank works; the bubble is the rest",
            17.5: "that is 7/40: the total is that of m + p − 1 micro-batches, 39",
        },
    ),
    Question(
        id="06.papers",
        text="For p = 8 and m = 32, one paper writes that the bubble is 17.9%, another that it is 21.9%. Which one is "
        "wrong?",
        answer="b",
        choices={
            "a": (
                "The first: idle time has to be compared with useful work.",
                "that is one of the two ways to put it, and no law: the first divides by all of the time",
            ),
            "b": (
                "Neither: they divide the same idle time by different times.",
                "yes: 7/39 is of the total time, 7/32 of the work alone. A number without its denominator says little",
            ),
            "c": (
                "The second: a share of idle time can never count the work alone.",
                "it can, and may be above 100%: with m = 1 and p = 8 it is 700%",
            ),
            "d": (
                "Both: without T_F and T_B the bubble cannot be known.",
                "idle time and work both are a number of (T_F + T_B), so the share does not depend on them",
            ),
        },
    ),
    Question(
        id="06.enough",
        text="You have **16 ranks** and GPipe. How many **micro-batches** do you need at the least, so that a rank "
        "idles for no more than **10% of the total time**?",
        answer=135,
        unit="micro-batches",
        tolerance=0.002,
        why="15/(m + 15) ≤ 1/10 means m + 15 ≥ 150",
        mistakes={
            150: "that makes 15/150 of the *ideal* time; of the total it is 15/165, 9.1%. Fewer are enough",
            144: "the pipe fills for p − 1 = 15 micro-batches, not for 16",
            160: "that is 16/160 of ideal time: the pipe fills for 15, and the total has the bubble in it",
            16: "with m = p the bubble is 15/31, nearly half of the time",
        },
    ),
    Question(
        id="06.memory",
        text="To shrink the bubble you cut the same batch into twice as many micro-batches, each half as large. What "
        "happens to the activations that a rank of GPipe keeps at its peak?",
        answer="c",
        choices={
            "a": ("They double: twice as many are alive.", "twice as many, but each is half as large"),
            "b": (
                "They halve: each is half as large.",
                "each is half as large, but all of them are alive before the first backward",
            ),
            "c": (
                "Nothing: all of the batch is alive before the first backward, however it is cut.",
                "yes: and this is what the next lesson mends, with the same bubble",
            ),
            "d": (
                "They shrink with the bubble, since ranks wait less.",
                "waiting keeps nothing; what is kept is decided by the order of forwards and backwards",
            ),
        },
    ),
    Question(
        id="06.slowest",
        text="Four stages cost **3, 3, 5 and 3**. There are so many micro-batches that the bubble can be forgotten. "
        "For how many **percent of the time** does the first rank work?",
        answer=60,
        unit="%",
        tolerance=0.005,
        why="a micro-batch leaves the slowest stage every 5, and the first rank needs 3 of these",
        mistakes={
            100: "the first rank would be ahead of the third by more and more; but it waits for gradients",
            70: "that is the mean over the ranks, 14/20; the first rank works for 3 of every 5",
            21.43: "that is the first stage's share of the whole cost, 3/14; the four ranks work at the same time",
            85.71: "that is 3 over the mean cost of 3.5; the pipe moves at the speed of the slowest stage",
            75: "that counts ranks, not time",
        },
    ),
]
