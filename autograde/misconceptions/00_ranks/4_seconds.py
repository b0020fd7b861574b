"""Misconceptions of lesson 00: what a collective costs."""

from __future__ import annotations

from autograde.misconception import Misconception

SECONDS = [
    Misconception(
        exercise="cost.collective_seconds",
        name="whole_tensor_each_round",
        hint="This looks like: each message of the ring carries the whole tensor. "
        "Into how many pieces was it cut, and how many of them travel at a time?",
        old='("all_reduce", "ring"): (2 * (n - 1), num_bytes / n),',
        new='("all_reduce", "ring"): (2 * (n - 1), num_bytes),',
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="depth_rounded_down",
        hint="This looks like: the logarithm is rounded down. How many rounds does it take to reach 5 ranks, "
        "if two rounds reach 4?",
        old="depth = math.ceil(math.log2(n))",
        new="depth = math.floor(math.log2(n))",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="alpha_once",
        hint="This looks like: the start of a message is paid once for the whole collective. "
        "How many messages does a rank start, one after the other?",
        old="return rounds * (alpha + beta * message)",
        new="return alpha + rounds * beta * message",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="beta_is_a_bandwidth",
        hint="This looks like: bytes are divided by β. Is β bytes a second here, or seconds a byte?",
        old="return rounds * (alpha + beta * message)",
        new="return rounds * (alpha + message / beta)",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="a_step_for_every_rank",
        hint="This looks like: the ring makes n steps in each of its passes. "
        "A rank has one piece already: how many does it lack?",
        old='("all_reduce", "ring"): (2 * (n - 1), num_bytes / n),',
        new='("all_reduce", "ring"): (2 * n, num_bytes / n),',
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="unknown_pair_costs_nothing",
        hint="This looks like: a pair that is not in the table gets a number all the same. "
        "What will whoever misspells an algorithm make of it?",
        old="known = [way for way in table if way[0] == op and algorithm in (None, way[1])]",
        new="""
        known = [way for way in table if way[0] == op and algorithm in (None, way[1])] or [("send", "direct")]
        """,
    ),
]
