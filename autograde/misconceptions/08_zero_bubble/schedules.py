"""Misconceptions of lesson 08, schedules."""

from __future__ import annotations

from autograde.misconception import Misconception

MARGINAL_IDLE = [
    Misconception(
        exercise="pipeline.marginal_idle",
        name="with_the_flush",
        hint="This looks like: one iteration alone, from an empty pipeline to an empty pipeline. "
        "How long does an iteration take that begins while the last one is still going out?",
        old="return tuple(run.makespan - before - busy / (few + 1) for busy in run.busy)",
        new="return simulate(schedule, durations).idle_by_makespan",
    ),
    Misconception(
        exercise="pipeline.marginal_idle",
        name="start_up_shared_out",
        hint="This looks like: the time of many iterations, divided by their number. The first start and the last end "
        "are in it, a small part of each. What changes when one iteration is added?",
        old="return tuple(run.makespan - before - busy / (few + 1) for busy in run.busy)",
        new="return tuple((run.makespan - busy) / (few + 1) for busy in run.busy)",
    ),
    Misconception(
        exercise="pipeline.marginal_idle",
        name="own_window",
        hint="This looks like: the idle time between a rank's own first and last action. For ZB-H2 it is the same "
        "number. What does a rank of 1F1B wait for before its own window begins again?",
        old="return tuple(run.makespan - before - busy / (few + 1) for busy in run.busy)",
        new="return simulate(schedule, durations).idle_in_window",
    ),
    Misconception(
        exercise="pipeline.marginal_idle",
        name="work_of_all_iterations",
        hint="This looks like: the time of one more iteration, and the work of all of them taken off. "
        "Of how many iterations is the busy time that the simulation gives?",
        old="return tuple(run.makespan - before - busy / (few + 1) for busy in run.busy)",
        new="return tuple(run.makespan - before - busy for busy in run.busy)",
    ),
    Misconception(
        exercise="pipeline.marginal_idle",
        name="stuck_unnoticed",
        hint="This looks like: a schedule in which ranks wait for each other for ever is timed as far as it came. "
        "How does the simulation tell you that it stopped?",
        old="""
        if run.waiting:
            raise ValueError(f"{schedule.name} cannot reach its end: find_faults tells why")
        before = max(event.end for events in run.events for event in events if event.iteration < few)
        """,
        new="before = simulate(schedule, durations, few).makespan",
    ),
]

WORDS_H1, WORDS_H2 = (
    f'words = [kind for step in range(m + {late}) for kind in "FIW" if 0 <= step - behind[kind] < m]'
    for late in ("p - 1", "2 * p - 2")
)

ZB_H1 = [
    Misconception(
        exercise="pipeline.zb_h1",
        name="not_split",
        hint="This looks like: 1F1B as it was, with whole backwards. "
        "Which part of a backward does the rank before wait for, and which can be done at any time?",
        old=WORDS_H1,
        new="""
        warmup = min(p - 1 - rank, m)
        words = ["F"] * warmup + ["F", "B"] * (m - warmup) + ["B"] * warmup
        """,
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="w_at_once",
        hint="This looks like: each weight gradient comes right after its input gradient. The bubble is smaller than "
        "that of 1F1B, and could be smaller still. At the end ranks wait for input gradients: with what could they "
        "fill that time, if they had kept some?",
        old='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}',
        new='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1 - rank}',
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="all_w_last",
        hint="This looks like: all weight gradients are left to the end. There is nothing to wait for any more, and "
        "what each W needs is kept for all micro-batches. How many W does a rank need to fill its own gap?",
        old=WORDS_H1,
        new="""
        words = [kind for step in range(m + p - 1) for kind in "FI" if 0 <= step - behind[kind] < m] + ["W"] * m
        """,
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="one_late",
        hint="This looks like: each rank has one forward more under way than 1F1B warms up with. "
        "How many activations are alive on a rank then, from F to W?",
        old='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}',
        new='behind = {"F": 0, "I": p - rank, "W": p}',
        also=((WORDS_H1, WORDS_H1.replace("m + p - 1", "m + p")),),
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="one_early",
        hint="This looks like: a rank warms up with one forward fewer than 1F1B. The first gradient has a longer way "
        "back than that. What does the rank do until it comes?",
        old='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}',
        new='behind = {"F": 0, "I": max(p - 2 - rank, 0), "W": p - 1}',
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="more_than_m",
        hint="This looks like: the warm-up is as long as the pipeline asks for, also where there are not so many "
        "micro-batches. How many forwards can a rank do before its first input gradient, at most?",
        old=WORDS_H1,
        new="""
        warmup = p - 1 - rank
        words = ["F"] * warmup
        for step in range(m):
            words += (["F"] if step < m - warmup else []) + ["I"] + (["W"] if step >= rank else [])
        words += ["W"] * min(rank, m)
        """,
    ),
    Misconception(
        exercise="pipeline.zb_h1",
        name="ranks_turned_round",
        hint="This looks like: the last rank warms up longest. "
        "From which rank does a micro-batch have the longest way to the loss and back?",
        old='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}',
        new='behind = {"F": 0, "I": rank, "W": p - 1}',
    ),
]

ZB_H2 = [
    Misconception(
        exercise="pipeline.zb_h2",
        name="warmed_up_once",
        hint="This looks like: ZB-H1. Between its first forward and its first input gradient a rank still waits. "
        "With what could that be filled, if there were room for it?",
        old='behind = {"F": 0, "I": 2 * (p - 1 - rank), "W": 2 * (p - 1)}',
        new='behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}',
    ),
    Misconception(
        exercise="pipeline.zb_h2",
        name="w_at_once",
        hint="This looks like: the warm-up is long enough, and each weight gradient comes right after its input "
        "gradient. What has the last rank to do while the last gradients go back?",
        old='behind = {"F": 0, "I": 2 * (p - 1 - rank), "W": 2 * (p - 1)}',
        new='behind = {"F": 0, "I": 2 * (p - 1 - rank), "W": 2 * (p - 1 - rank)}',
    ),
    Misconception(
        exercise="pipeline.zb_h2",
        name="all_w_last",
        hint="This looks like: all weight gradients are left to the end, and what they need is kept for all "
        "micro-batches. How far behind its I does a W have to be, on which rank?",
        old=WORDS_H2,
        new="""
        words = [kind for step in range(m + 2 * p - 2) for kind in "FI" if 0 <= step - behind[kind] < m] + ["W"] * m
        """,
    ),
    Misconception(
        exercise="pipeline.zb_h2",
        name="twice_p",
        hint="This looks like: every rank, the last one too, has two forwards more under way than needed. "
        "How long is the way from a rank to the last one and back, counted in stages?",
        old='behind = {"F": 0, "I": 2 * (p - 1 - rank), "W": 2 * (p - 1)}',
        new='behind = {"F": 0, "I": 2 * (p - rank), "W": 2 * p}',
        also=(
            (
                WORDS_H2,
                WORDS_H2.replace("m + 2 * p - 2", "m + 2 * p"),
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.zb_h2",
        name="more_than_m",
        hint="This looks like: the warm-up is as long as the pipeline asks for, also where there are not so many "
        "micro-batches. How many forwards can a rank do before its first input gradient, at most?",
        old=WORDS_H2,
        new="""
        warmup = 2 * (p - 1 - rank)
        words = ["F"] * warmup
        for step in range(m):
            words += (["F"] if step < m - warmup else []) + ["I"] + (["W"] if step >= 2 * rank else [])
        words += ["W"] * min(2 * rank, m)
        """,
    ),
]

ZB_V = [
    Misconception(
        exercise="pipeline.zb_v",
        name="loop_in_place_of_the_v",
        hint="This looks like: the second chunk of a rank is stage p + r, as in interleaved 1F1B. "
        "On which rank does a micro-batch turn round in a V, and on which does it end?",
        old="lists.append(in_order(words, stages=[r, 2 * p - 1 - r]))",
        new="lists.append(in_order(words, stages=[r, p + r]))",
        also=(
            (
                'return Schedule("ZB-V", m, v_shaped(p), lists)',
                'return Schedule("ZB-V", m, (2 * tuple(range(p)),), lists)',
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.zb_v",
        name="w_of_chunk_0_last",
        hint="This looks like: in the steady part the weight gradients of the first chunk are left for later. "
        "Nothing idles, and one more half stage is kept with each micro-batch. What pays the debt?",
        old="""
        + ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - 2 * p + r + 1)
        + ["I0", "W0", "F1", "I1", "W1"] * (p - r - 1)
        """,
        new="""
        + ["F0", "I0", "F1", "I1", "W1"] * (m - 2 * p + r + 1)
        + ["I0", "F1", "I1", "W1"] * (p - r - 1)
        """,
        also=(
            ('+ ["I0", "W0"] * (p - r)', '+ ["I0"] * (p - r)'),
            ('+ ["W0"] * r', '+ ["W0"] * m'),
        ),
    ),
    Misconception(
        exercise="pipeline.zb_v",
        name="no_debt_for_the_end",
        hint="This looks like: where two input gradients follow each other at the end, each is paid at once. "
        "Somebody waits for the second of them. What should a rank have left to do when there is nothing else?",
        old='+ ["I0", "I1"] * r',
        new='+ ["I0", "W0", "I1", "W1"] * r',
        also=(('+ ["W1"] * r', ""), ('+ ["W0"] * r', "")),
    ),
    Misconception(
        exercise="pipeline.zb_v",
        name="too_few_accepted",
        hint="This looks like: also fewer micro-batches than the first rank warms up with get a schedule. "
        "How often would its F0 have to be there?",
        old="""
        if m < 2 * p - 1:
            raise ValueError(f"ZB-V needs at least {2 * p - 1} micro-batches on {p} ranks, {m} were given")
        """,
        new="",
    ),
    Misconception(
        exercise="pipeline.zb_v",
        name="turning_rank_first",
        hint="This looks like: the ranks are counted from the other end: the one where the V turns warms up longest. "
        "Which rank sees a micro-batch first, and gets its gradient last?",
        old="for r in range(p):",
        new="for rank in range(p):\n    r = p - 1 - rank",
        also=(
            (
                "lists.append(in_order(words, stages=[r, 2 * p - 1 - r]))",
                "lists.append(in_order(words, stages=[rank, 2 * p - 1 - rank]))",
            ),
        ),
    ),
]

DUALPIPE = [
    Misconception(
        exercise="pipeline.dualpipe",
        name="not_overlapped",
        hint="This looks like: forwards and backwards take turns, and none of them run together. The order is right. "
        "Which of them could hide each other's communication?",
        old='steady = ["F0&B1", "F1&B0"] * (m // 2 - p + q + 1)',
        new='steady = ["F0", "B1", "F1", "B0"] * (m // 2 - p + q + 1)',
        also=(
            (
                """
                if q == half - 1:
                    steady[:1] = ["F0", "B1"]
                """,
                "",
            ),
            ('+ ["B1", "F1&B0"] * (half - q - 1)', '+ ["B1", "F1", "B0"] * (half - q - 1)'),
        ),
    ),
    Misconception(
        exercise="pipeline.dualpipe",
        name="never_split",
        hint="This looks like: the last backwards are whole ones. Then nothing is owed at the end, when ranks wait for "
        "each other. Which halves would somebody wait for there, and which could fill the time?",
        old="""
        + (["B1", "B0"] * (q + 1))[: q + 1]
        + (["I1", "I0"] * (q + 1))[q + 1 :]
        + ["W", "I0"] * (half - q - 1)
        + ["W"] * (q + 1)
        """,
        new="""
        + ["B1", "B0"] * (q + 1)
        + ["B0"] * (half - q - 1)
        """,
    ),
    Misconception(
        exercise="pipeline.dualpipe",
        name="first_half_twice",
        hint="This looks like: both ends of the pipeline begin with micro-batch 0. "
        "Which micro-batches enter at the last rank?",
        old="chunks = [(r, 0), (p - 1 - r, m // 2)]",
        new="chunks = [(r, 0), (p - 1 - r, 0)]",
    ),
    Misconception(
        exercise="pipeline.dualpipe",
        name="odd_accepted",
        hint="This looks like: sizes are taken that it is not for. Half of the micro-batches enter at each end, and "
        "each rank has one opposite: what becomes of an odd number of either?",
        old="if m % 2 or m < 2 * p:",
        new="if m < 2 * p:",
    ),
    Misconception(
        exercise="pipeline.dualpipe",
        name="other_end_not_mirrored",
        hint="This looks like: the ranks of the second half do what the first half's would do at their place, and not "
        "what their mirror images do. How far is the last rank from its nearer end?",
        old="half, q = p // 2, min(r, p - 1 - r)",
        new="half, q = p // 2, r % (p // 2)",
    ),
]
