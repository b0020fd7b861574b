"""Right solutions of lesson 06 about schedules, cuts and bubbles, written in another way than the library's."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from fivefold.pipeline import Backward, Forward, Schedule, straight


def naive__loops(num_ranks, num_microbatches):
    """Actions written out one by one."""
    lists = []
    for rank in range(num_ranks):
        actions = []
        for i in range(num_microbatches):
            actions.append(Forward(rank, i))
            actions.append(Backward(rank, i))
        lists.append(actions)
    return Schedule("one at a time", num_microbatches, [list(range(num_ranks))], lists)


def naive__last_micro_batch_first(num_ranks, num_microbatches):
    """In another order, the same on all ranks: still one at a time."""
    order = range(num_microbatches - 1, -1, -1)
    lists = [[kind(r, i) for i in order for kind in (Forward, Backward)] for r in range(num_ranks)]
    return Schedule("naive", num_microbatches, straight(num_ranks), lists)


def gpipe__backward_from_the_last(num_ranks, num_microbatches):
    """Backwards in the reverse order, as a stack gives them: just as fast."""
    lists = []
    for r in range(num_ranks):
        forwards = [Forward(r, i) for i in range(num_microbatches)]
        lists.append(forwards + [Backward(r, f.microbatch) for f in reversed(forwards)])
    return Schedule("GPipe", num_microbatches, straight(num_ranks), lists)


def gpipe__generator(num_ranks, num_microbatches):
    """One generator a rank."""

    def own(rank):
        yield from (Forward(rank, i) for i in range(num_microbatches))
        yield from (Backward(rank, i) for i in range(num_microbatches))

    return Schedule("GPipe", num_microbatches, straight(num_ranks), map(tuple, map(own, range(num_ranks))))


def partition_layers__every_cut(costs, num_stages):
    """All cuts are tried; lists of layers instead of ranges."""
    n = len(costs)
    if num_stages < 1 or num_stages > n:
        raise ValueError(f"{n} layers, {num_stages} stages")
    cuts = combinations(range(1, n), num_stages - 1)
    parts = [[list(range(a, b)) for a, b in zip((0, *cut), (*cut, n), strict=True)] for cut in cuts]
    return min(parts, key=lambda cut: max(sum(costs[k] for k in part) for part in cut))


def partition_layers__smallest_that_fits(costs, num_stages):
    """Try each possible size of the largest stage, smallest first, and fill stages up to it from the end."""
    n = len(costs)
    if not 1 <= num_stages <= n:
        raise ValueError("more stages than layers")
    for size in sorted({sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)}):
        cut, end = [], n
        while end and len(cut) < num_stages:
            left = num_stages - len(cut) - 1  # stages that still need a layer each
            start = end - 1
            while start > left and sum(costs[start - 1 : end]) <= size + 1e-12:
                start -= 1
            if sum(costs[start:end]) > size + 1e-12:
                break
            cut.insert(0, range(start, end))
            end = start
        if end == 0 and len(cut) == num_stages:
            return cut
    raise AssertionError


def bubble__counted(p, m, v=1, of="total"):
    """The idle time of p-1 thin micro-batches, in the time of one whole one."""
    if of not in {"total", "ideal"}:
        raise ValueError(of)
    idle, work = Fraction(p - 1, v), Fraction(m)
    return float(idle / (work + idle if of == "total" else work))


def bubble__from_the_other(p, m, v=1, of="total"):
    """The share of total from that of ideal time: x / (1 + x)."""
    share = (p - 1) / v / m
    if of == "ideal":
        return share
    if of == "total":
        return share / (1 + share)
    raise ValueError(f"{of}: total or ideal")
