"""Right solutions of lesson 07 about schedules and messages, written in another way than the library's."""

from __future__ import annotations

from fivefold.pipeline import Backward, Forward, Receive, Schedule, Send, looped, simulate, straight


def one_f_one_b__counted(num_ranks, num_microbatches):
    """At each point a forward where fewer than p - r are alive, else a backward."""
    lists = []
    for rank in range(num_ranks):
        forwards = backwards = 0
        actions = []
        while backwards < num_microbatches:
            if forwards < num_microbatches and forwards - backwards < num_ranks - rank:
                actions.append(Forward(rank, forwards))
                forwards += 1
            else:
                actions.append(Backward(rank, backwards))
                backwards += 1
        lists.append(actions)
    return Schedule("1F1B", num_microbatches, straight(num_ranks), lists)


def one_f_one_b__three_parts(num_ranks, num_microbatches):
    """Warm-up, pairs, the rest, each by its micro-batch numbers."""
    m = num_microbatches

    def own(r):
        w = min(num_ranks - 1 - r, m)
        yield from (Forward(r, i) for i in range(w))
        for i in range(w, m):
            yield Forward(r, i)
            yield Backward(r, i - w)
        yield from (Backward(r, i) for i in range(m - w, m))

    return Schedule("one forward, one backward", m, [range(num_ranks)], [list(own(r)) for r in range(num_ranks)])


def interleaved__by_number(num_ranks, num_microbatches, num_chunks):
    """The k-th forward and backward of a rank by formulas, as Megatron-LM has them."""
    p, m, v = num_ranks, num_microbatches, num_chunks
    if m % p != 0:
        raise ValueError(f"{m} micro-batches on {p} ranks")

    def step(kind, rank, k):
        group, place = divmod(k, p * v)
        chunk, i = divmod(place, p)
        chunk = chunk if kind is Forward else v - 1 - chunk
        return kind(chunk * p + rank, group * p + i)

    lists = []
    for rank in range(p):
        warmup = min((p - rank - 1) * 2 + (v - 1) * p, m * v)
        actions = [step(Forward, rank, k) for k in range(warmup)]
        for k in range(m * v - warmup):
            actions += [step(Forward, rank, warmup + k), step(Backward, rank, k)]
        actions += [step(Backward, rank, k) for k in range(m * v - warmup, m * v)]
        lists.append(actions)
    return Schedule("interleaved", m, looped(p, v), lists)


def interleaved__fewer_alive(num_ranks, num_microbatches, num_chunks):
    """The same order, with what is alive as the rule; with one chunk it is plain 1F1B, which keeps less."""
    p, m, v = num_ranks, num_microbatches, num_chunks
    if m % p:
        raise ValueError("no whole number of rounds")
    forwards = [(c, g * p + i) for g in range(m // p) for c in range(v) for i in range(p)]
    backwards = [(c, g * p + i) for g in range(m // p) for c in reversed(range(v)) for i in range(p)]
    lists = []
    for rank in range(p):
        most = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1
        actions, f = [], 0
        for b, (chunk, i) in enumerate(backwards):
            while f < len(forwards) and f - b < most:
                actions.append(Forward(forwards[f][0] * p + rank, forwards[f][1]))
                f += 1
            actions.append(Backward(chunk * p + rank, i))
        lists.append(actions)
    return Schedule("interleaved", m, looped(p, v), lists)


def interleaved__shorter_warm_up(num_ranks, num_microbatches, num_chunks):
    """Where messages take no time, a shorter warm-up is as fast, and keeps less."""
    p, m, v = num_ranks, num_microbatches, num_chunks
    if m % p:
        raise ValueError("no whole number of rounds")
    forwards = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]
    backwards = [(v - 1 - chunk, i) for chunk, i in forwards]
    lists = []
    for rank in range(p):
        warmup = min(p - rank - 1 + (v - 1) * p, m * v)
        order = [*forwards[:warmup], *(x for pair in zip(forwards[warmup:], backwards, strict=False) for x in pair)]
        kinds = [Forward] * warmup + [Forward, Backward] * (m * v - warmup) + [Backward] * warmup
        order += backwards[m * v - warmup :]
        lists.append([kind(chunk * p + rank, i) for kind, (chunk, i) in zip(kinds, order, strict=True)])
    return Schedule("interleaved", m, looped(p, v), lists)


def order_messages__by_time(schedule):
    """Simulated in unit times: whatever ends, earliest first, writes its messages at that moment."""
    run = simulate(schedule)
    if run.waiting:
        raise ValueError(f"rank {min(run.waiting)} waits for ever")
    lists = [[] for _ in schedule.actions]
    for event in sorted((e for own in run.events for e in own), key=lambda e: (e.end, e.start, e.rank)):
        lists[event.rank].append(event.action)
        for step in event.action.steps:
            value = schedule.makes(step)
            peer = None if value is None else schedule.receiver(value)
            if peer is not None:
                lists[event.rank].append(Send(value, peer))
                lists[peer].append(Receive(value, event.rank))
    return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)


def order_messages__one_action_at_a_time(schedule):
    """The highest rank that can go on does one action, again and again."""
    left = [list(reversed(own)) for own in schedule.actions]
    lists, there = [[] for _ in left], [set() for _ in left]
    while any(left):
        for rank in reversed(range(len(left))):
            if left[rank] and there[rank].issuperset(v for step in left[rank][-1].steps for v in schedule.needs(step)):
                break
        else:
            raise ValueError("nobody can go on")
        action = left[rank].pop()
        lists[rank].append(action)
        for value in [schedule.makes(step) for step in action.steps]:
            there[rank].add(value)
            if value is not None and schedule.receiver(value) is not None:
                peer = schedule.receiver(value)
                there[peer].add(value)
                lists[rank].append(Send(value, peer))
                lists[peer].append(Receive(value, rank))
    return Schedule("with messages", schedule.num_microbatches, schedule.routes, lists)
