"""Questions of lesson 00."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="00.sum",
        text="**Five** ranks each hold their own number: 0, 1, 2, 3 and 4. All of them call `dist.all_reduce` on it. "
        "Which number does rank 3 hold afterwards?",
        answer=10,
        why="0 + 1 + 2 + 3 + 4, on every rank",
        mistakes={
            3: "that is what it held before; an all-reduce overwrites it with the sum",
            6: "that is the sum over ranks 0 to 3; there are five ranks, and the last one is rank 4",
            15: "ranks are counted from 0: the five are 0, 1, 2, 3 and 4",
            2: "that is the mean; without another word an all-reduce sums",
            4: "that is the largest; without another word an all-reduce sums",
        },
    ),
    Question(
        id="00.missing",
        text="Four ranks train. The data of rank 2 runs out one step earlier, so it leaves the loop while the others "
        "call `dist.all_reduce` once more. What happens?",
        answer="c",
        choices={
            "a": (
                "The others get the sum over three ranks.",
                "an all-reduce is over the whole group; torch does not know that rank 2 has nothing to say",
            ),
            "b": ("Rank 2 raises an error.", "rank 2 has done nothing wrong on its own: it has ended well"),
            "c": (
                "The others wait for rank 2, for ever or until a time limit. Here it is reported at once.",
                "yes: a collective is a promise of every rank. With torch alone the limit is 30 minutes",
            ),
            "d": (
                "Rank 2 is called back for the step that it missed.",
                "nothing runs on a rank but its own program, from top to bottom",
            ),
        },
    ),
    Question(
        id="00.bytes",
        text="A model has 2 GB of gradients. **8 ranks** all-reduce them around a ring. How many **GB** does each rank "
        "send?",
        answer=3.5,
        unit="GB",
        tolerance=0.01,
        why="2 · 7/8 · 2 GB: two passes, each of seven pieces of an eighth",
        mistakes={
            1.75: "that is one pass, a reduce-scatter; the sums have to come back to everybody",
            4: "that is 2M; a rank never sends the piece that it ends up with, so it is 2 · 7/8 · M",
            14: "that is the whole tensor to each of seven others; a ring sends a piece at a time",
            28: "that is the whole tensor in each of the 14 steps; a step carries an eighth of it",
            2: "that is M, as if everybody sent to one place; then one rank would send seven times as much",
            0.25: "that is one message; a rank sends 14 of them",
        },
    ),
    Question(
        id="00.rounds",
        text="A checkpoint is read by one rank and broadcast to **100 ranks** in all, by a tree. How many **rounds** "
        "does that take?",
        answer=7,
        why="after k rounds 2ᵏ ranks have it: 64 after six, 128 after seven",
        mistakes={
            99: "that is the root sending to each, one after the other; those who have it already can help",
            6: "after six rounds 64 ranks have it; 36 are still waiting",
            50: "that would be a chain from both ends; in a round everyone who has it sends",
            8: "after seven rounds 128 ranks could have it: that is enough",
        },
    ),
    Question(
        id="00.small",
        text="**64 ranks** all-reduce a single number, such as the loss. A message takes α = 5 µs to start; 4 bytes "
        "take no time worth counting. How many **times as long** as by a tree does it take by a ring?",
        answer=10.5,
        tolerance=0.01,
        why="126 messages one after the other against 12: for small tensors the start is everything",
        mistakes={
            10.67: "a ring makes 2(n−1) = 126 steps, not 128: a rank does not lack its own piece",
            5.25: "the tree makes two trips of 6 rounds: one to collect the sum, one to spread it",
            21: "the ring makes two passes of 63 steps; you have the tree with one trip of 6 rounds",
            1: "per byte they are close; but here only the number of messages counts",
            0.095: "that is the other way round: the tree over the ring",
        },
    ),
]
