"""Right solutions of lesson 02 that are written in another way than the library's: buckets, formulas, partitions."""

from __future__ import annotations

import torch
from fivefold.cost import DataParallelLimits, collective_seconds


def make_buckets__front_to_back(parameters, bucket_bytes):
    """Filled from the other end of a list, one bucket at a time."""
    seen, left = set(), []
    for p in parameters:
        if p.requires_grad and id(p) not in seen:
            seen.add(id(p))
            left.append(p)
    buckets = []
    while left:
        bucket = [left.pop()]
        while left and left[-1].dtype == bucket[0].dtype:
            if sum(p.numel() * p.element_size() for p in [*bucket, left[-1]]) > bucket_bytes:
                break
            bucket.append(left.pop())
        buckets.append(bucket)
    return buckets


def make_buckets__recursive(parameters, bucket_bytes):
    """The last parameter's bucket, then the rest's."""
    unique = list({id(p): p for p in parameters if p.requires_grad}.values())

    def fill(rest):
        if not rest:
            return []
        room, number = bucket_bytes - rest[-1].nbytes, 1
        while number < len(rest) and rest[-number - 1].dtype is rest[-1].dtype and rest[-number - 1].nbytes <= room:
            number += 1
            room -= rest[-number].nbytes
        return [tuple(reversed(rest[-number:])), *fill(rest[:-number])]

    return tuple(fill(unique))


def start_in_order__counters(buckets, start):
    """A number of missing gradients for each bucket, and the next one to start."""
    missing = [len(bucket) for bucket in buckets]
    state = {"next": 0, "hooks": []}

    def watch(place):
        def arrived(_):
            missing[place] -= 1
            while state["next"] < len(missing) and missing[state["next"]] == 0:
                state["next"] += 1
                start(state["next"] - 1)

        return arrived

    for place, bucket in enumerate(buckets):
        state["hooks"] += [p.register_post_accumulate_grad_hook(watch(place)) for p in bucket]

    def finish():
        while state["hooks"]:
            state["hooks"].pop().remove()
        for i in range(state["next"], len(missing)):
            start(i)

    return finish


class start_in_order__class:  # noqa: N801
    """An object that is called after backward, with a generator that waits for the next bucket."""

    def __init__(self, buckets, start):
        self.buckets, self.start, self.arrived, self.place = list(buckets), start, set(), 0
        self.hooks = []
        for bucket in self.buckets:
            for p in bucket:
                self.hooks.append(p.register_post_accumulate_grad_hook(self.notice))

    def notice(self, p):
        self.arrived.add(id(p))
        self.go_on(lambda bucket: all(id(p) in self.arrived for p in bucket))

    def go_on(self, ready):
        while self.place < len(self.buckets) and ready(self.buckets[self.place]):
            self.place += 1
            self.start(self.place - 1)

    def __call__(self):
        [hook.remove() for hook in self.hooks]
        self.go_on(lambda bucket: True)


def take_gradients__filled(parameters, padding=0):
    """One buffer of zeros, filled slice by slice."""
    sizes = [p.numel() for p in parameters]
    flat, place = torch.zeros(sum(sizes) + padding, dtype=parameters[0].dtype), 0
    for p, size in zip(parameters, sizes, strict=True):
        if p.grad is not None:
            flat[place : place + size] = p.grad.reshape(-1)
            p.grad = None
        place += size
    return flat


def take_gradients__padded(parameters, padding=0):
    """Concatenate, then pad; gradients are deleted by name."""
    rows = []
    for p in parameters:
        rows.append(p.detach().new_zeros(p.numel()) if p.grad is None else p.grad.contiguous().view(-1))
        del p.grad
    return torch.nn.functional.pad(torch.cat(rows), (0, padding))


def partition__running(size, ranks):
    """Take from what is left, rank by rank."""
    length, begin, pieces = (size + ranks - 1) // ranks, 0, []
    for _ in range(ranks):
        end = begin + min(length, size - begin)
        pieces.append(range(begin, end))
        begin = end
    return pieces


def partition__sliced(size, ranks):
    """Slices of one range, which know where it ends."""
    whole, length = range(size), max(1, -(size // -ranks))
    return tuple(whole[r * length :][:length] for r in range(ranks))


def zero_bytes__table(parameters, ranks, stage, optimizer_bytes=12):
    """One line a stage, as in the paper."""
    psi, n, k = parameters, ranks, optimizer_bytes
    if stage == 0:
        return (2 + 2 + k) * psi
    if stage == 1:
        return 2 * psi + 2 * psi + k * psi / n
    if stage == 2:
        return 2 * psi + (2 + k) * psi / n
    if stage == 3:
        return (2 + 2 + k) * psi / n
    raise ValueError("0, 1, 2 or 3")


def zero_bytes__by_state(parameters, ranks, stage, optimizer_bytes=12):
    """Each of the three states is split from some stage on."""
    if stage not in range(4):
        raise ValueError(stage)
    from_stage = [(3, 2), (2, 2), (1, optimizer_bytes)]
    return sum(size * parameters / (ranks if stage >= first else 1) for first, size in from_stage)


def data_parallel_limits__collective(
    ranks, batch, parameters, sequence_activation_bytes, sequence_seconds, alpha, beta
):
    """The library's formula for a ring, and fields by name."""
    if ranks > batch:
        raise ValueError("more ranks than sequences")
    seconds = collective_seconds("all_reduce", ranks, 2 * parameters, alpha, beta, "ring")
    return DataParallelLimits(
        activation_bytes=float(sequence_activation_bytes),
        smallest_batch=ranks,
        sync_over_compute=seconds * ranks / (batch * sequence_seconds),
    )


def data_parallel_limits__by_rounds(ranks, batch, parameters, sequence_activation_bytes, sequence_seconds, alpha, beta):
    """The ring's rounds, one after the other."""
    if not batch // ranks:
        raise ValueError("a rank would be idle")
    own = batch * sequence_seconds / ranks
    rounds = [alpha + beta * (2 * parameters / ranks) for _ in range(2 * ranks - 2)]
    return DataParallelLimits(sequence_activation_bytes, ranks, sum(rounds) / own)
