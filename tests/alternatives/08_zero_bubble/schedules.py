"""Right solutions of lesson 08, schedules, that are written in another way than the library's."""

from __future__ import annotations

from fivefold.pipeline import (
    Backward,
    Forward,
    InputGradient,
    Overlapped,
    Schedule,
    WeightGradient,
    both_ways,
    in_order,
    simulate,
    straight,
    v_shaped,
)


def marginal_idle__difference(schedule, durations=None):
    """The difference of two simulations."""
    few, more = (simulate(schedule, durations, n) for n in (20, 21))
    if few.waiting or more.waiting:
        raise ValueError("it never ends")
    return [more.makespan - few.makespan - busy for busy in simulate(schedule, durations).busy]


def marginal_idle__many_more(schedule, durations=None):
    """The mean of many further iterations, as numbers of a dict's values."""
    run = simulate(schedule, durations, 8)
    if run.waiting:
        raise ValueError(f"rank {min(run.waiting)} waits for ever")
    ends = [max(e.end for events in run.events for e in events if e.iteration <= n) for n in range(8)]
    return tuple((ends[7] - ends[3]) / 4 - busy / 8 for busy in run.busy)


def zb_h1__in_phases(num_ranks, num_microbatches):
    """Warm-up, alternation, and what is left, written out with counters."""
    lists = []
    for rank in range(num_ranks):
        f = i = w = 0
        own = []
        for _ in range(min(num_ranks - 1 - rank, num_microbatches)):
            own.append(Forward(rank, f))
            f += 1
        while i < num_microbatches:
            if f < num_microbatches:
                own.append(Forward(rank, f))
                f += 1
            own.append(InputGradient(rank, i))
            i += 1
            if i > rank:
                own.append(WeightGradient(rank, w))
                w += 1
        own += [WeightGradient(rank, k) for k in range(w, num_microbatches)]
        lists.append(own)
    return Schedule("ZB-H1", num_microbatches, straight(num_ranks), lists)


def zb_h1__words_of_1f1b(num_ranks, num_microbatches):
    """1F1B's own list, each B an I, and W put in wherever one is owed beyond r."""
    p, m = num_ranks, num_microbatches
    lists = []
    for rank in range(p):
        warmup, words, owed = min(p - rank, m) - 1, [], 0
        for word in ["F"] * warmup + ["F", "B"] * (m - warmup) + ["B"] * warmup:
            words.append("I" if word == "B" else "F")
            owed += word == "B"
            if owed > rank and word == "B":
                words.append("W")
                owed -= 1
        lists.append(in_order([*words, *owed * ["W"]], [rank]))
    return Schedule("mine", m, straight(p), lists)


def zb_h2__in_phases(num_ranks, num_microbatches):
    """Slices of three long lists, one for each kind."""
    p, m, lists = num_ranks, num_microbatches, []
    for rank in range(p):
        ahead, owed = min(2 * (p - 1 - rank), m), min(2 * rank, m)
        words = ["F"] * ahead
        for step in range(m):
            words += ["F"] if ahead + step < m else []
            words += ["I"]
            words += ["W"] if step >= owed else []
        lists.append(in_order(words + ["W"] * owed, [rank]))
    return Schedule("ZB-H2", m, straight(p), lists)


def zb_h2__staircase(num_ranks, num_microbatches):
    """One loop over time steps; which micro-batch each kind is at follows from the step."""
    p, m = num_ranks, num_microbatches
    lists = [[] for _ in range(p)]
    for step in range(m + 2 * p - 2):
        for rank, own in enumerate(lists):
            for kind, late in ((Forward, 0), (InputGradient, 2 * (p - 1 - rank)), (WeightGradient, 2 * (p - 1))):
                if late <= step < late + m:
                    own.append(kind(rank, step - late))
    return Schedule("", m, straight(p), lists)


def zb_v__counters(num_ranks, num_microbatches):
    """The phases as loops that append actions, with a counter for each kind and chunk."""
    p, m = num_ranks, num_microbatches
    if 2 * p > m + 1:
        raise ValueError("too few micro-batches")
    kinds, lists = {"F": Forward, "I": InputGradient, "W": WeightGradient}, []
    for r in range(p):
        stages, counts, own = (r, 2 * p - 1 - r), {}, []

        def add(text, times=1, stages=stages, counts=counts, own=own):
            for _ in range(times):
                for word in text.split():
                    number = counts[word] = counts.get(word, -1) + 1
                    own.append(kinds[word[0]](stages[int(word[1])], number))

        add("F0", 2 * (p - r) - 1)
        add("F1 F0", r)
        add("F1 I1 W1", p - r)
        while counts["F1"] < m - 1:
            if counts["F0"] < m - 1:
                add("F0")
            add("I0 W0 F1 I1 W1")
        add("I0 I1", r)
        add("I0 W0", p - r)
        add("W1", m - 1 - counts.get("W1", -1))
        add("W0", m - 1 - counts.get("W0", -1))
        lists.append(own)
    return Schedule("ZB-V", m, v_shaped(p), lists)


def zb_v__debts_in_turn(num_ranks, num_microbatches):
    """At the end the debts are paid in the order in which they were made, whatever their chunk."""
    p, m = num_ranks, num_microbatches
    if m < 2 * p - 1:
        raise ValueError("too few")
    lists = []
    for r in range(p):
        words = ["F0"] * (2 * (p - r) - 1) + "F1 F0".split() * r + "F1 I1 W1".split() * (p - r)
        words += "F0 I0 W0 F1 I1 W1".split() * (m - 2 * p + r + 1) + "I0 W0 F1 I1 W1".split() * (p - r - 1)
        words += "I0 I1".split() * r + "I0 W0".split() * (p - r) + ["W"] * (2 * r)
        lists.append(in_order(words, [r, 2 * p - 1 - r]))
    return Schedule("V", m, v_shaped(p), lists)


def dualpipe__mirrored(num_ranks, num_microbatches):
    """The first half of the ranks, and their mirror images made of them."""
    p, m, h = num_ranks, num_microbatches, num_ranks // 2
    if p % 2 or m % 2 or m < 2 * p:
        raise ValueError("sizes")

    def mirror(action):
        if isinstance(action, Overlapped):
            return Overlapped(mirror(action.forward), mirror(action.backward))
        return type(action)(action.stage, (action.microbatch + m // 2) % m)

    lists = []
    for q in range(h):
        far = h - q - 1
        words = "F0 " * (2 * far) + "F0 F1 " * (q + 1) + "I1 W F1 " * far
        pairs = ("F0&B1 F1&B0 " * (m // 2 - p + q + 1)).split()
        words = words.split() + (["F0", "B1", *pairs[1:]] if far == 0 else pairs) + ("B1 F1&B0 " * far).split()
        for number in range(2 * (q + 1)):
            words.append(("B" if number <= q else "I") + ("1" if number % 2 == 0 else "0"))
        words += ("W I0 " * far + "W " * (q + 1)).split()
        lists.append(in_order(words, [q, p - 1 - q], [0, m // 2]))
    return Schedule("D", m, both_ways(p), lists + [[mirror(a) for a in own] for own in reversed(lists)])


def dualpipe__actions(num_ranks, num_microbatches):
    """Actions made by hand, with iterators over micro-batches."""
    p, m, h = num_ranks, num_microbatches, num_ranks // 2
    if p % 2 == 1 or m % 2 == 1 or m < 2 * p:
        raise ValueError("sizes")
    lists = []
    for r in range(p):
        near, q = r < h, min(r, p - 1 - r)
        halves = (range(m // 2), range(m // 2, m)) if near else (range(m // 2, m), range(m // 2))
        stage = (q, p - 1 - q)
        f, b, owed, own = [iter(i) for i in halves], [iter(i) for i in halves], [], []

        def forward(chunk, stage=stage, f=f):
            return Forward(stage[chunk], next(f[chunk]))

        def backward(chunk, stage=stage, b=b):
            return Backward(stage[chunk], next(b[chunk]))

        def inputs(chunk, stage=stage, b=b, owed=owed):
            action = InputGradient(stage[chunk], next(b[chunk]))
            owed.append(WeightGradient(action.stage, action.microbatch))
            return action

        far = h - 1 - q
        own += [forward(0) for _ in range(2 * far)]
        for _ in range(q + 1):
            own += [forward(0), forward(1)]
        for _ in range(far):
            own += [inputs(1), owed.pop(0), forward(1)]
        for number in range(m // 2 - p + q + 1):
            first = forward(0), backward(1)
            own += first if number == 0 and far == 0 else [Overlapped(*first)]
            own.append(Overlapped(forward(1), backward(0)))
        for _ in range(far):
            own += [backward(1), Overlapped(forward(1), backward(0))]
        for number in range(2 * q + 2):
            own.append((inputs if number > q else backward)((number + 1) % 2))
        for _ in range(far):
            own += [owed.pop(0), inputs(0)]
        lists.append(own + owed)
    return Schedule("DualPipe", m, both_ways(p), lists)
