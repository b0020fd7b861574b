"""Right solutions of lesson 02 that are written in another way than the library's: gradients summed over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.data import sync_gradients, take_gradients


def sync_gradients__own_hooks(buckets, group):
    """Hooks of its own, buffers that are filled, and views of them as gradients."""
    buffers = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype) for bucket in buckets]
    missing = [{id(p) for p in bucket} for bucket in buckets]
    works, hooks = [], []

    def begin():
        bucket, buffer, place = buckets[len(works)], buffers[len(works)], 0
        for p in bucket:
            if p.grad is not None:
                buffer[place : place + p.numel()] = p.grad.flatten()
            place += p.numel()
        works.append(dist.all_reduce(buffer, group=group, async_op=True))

    def arrived(p):
        for one in missing:
            one.discard(id(p))
        while len(works) < len(buckets) and not missing[len(works)]:
            begin()

    for bucket in buckets:
        hooks += [p.register_post_accumulate_grad_hook(arrived) for p in bucket]

    def finish():
        for hook in hooks:
            hook.remove()
        while len(works) < len(buckets):
            begin()
        for bucket, buffer, work in zip(buckets, buffers, works, strict=True):
            work.wait()
            place = 0
            for p in bucket:
                p.grad = buffer[place : place + p.numel()].view(p.shape)
                place += p.numel()

    return finish


class sync_gradients__one_on_its_way:  # noqa: N801
    """An object; each all-reduce is waited for when the next one is about to start, and copied into p.grad."""

    def __init__(self, buckets, group):
        from fivefold.data import start_in_order

        self.buckets, self.group, self.under_way = buckets, group, None
        self.start_rest = start_in_order(buckets, self.start)

    def start(self, i):
        self.arrive()
        flat = take_gradients(self.buckets[i])
        self.under_way = i, flat, dist.all_reduce(flat, group=self.group, async_op=True)

    def arrive(self):
        if self.under_way is None:
            return
        i, flat, work = self.under_way
        work.wait()
        for p in self.buckets[i]:
            own, flat = flat[: p.numel()], flat[p.numel() :]
            p.grad = own.clone().reshape(p.shape)
        self.under_way = None

    def __call__(self):
        self.start_rest()
        self.arrive()


def accumulate__scaled_at_the_end(loss_sum, micro_batches, buckets, group):
    """All but the last in a loop of their own; the totals travel before the last backward's sums are waited for."""
    *most, last = micro_batches
    total, count = 0.0, 0
    for micro_batch in most:
        loss, tokens = loss_sum(micro_batch)
        loss.backward()
        total, count = total + loss.item(), count + tokens
    loss, tokens = loss_sum(last)
    finish = sync_gradients(buckets, group)
    loss.backward()
    finish()
    sums = torch.tensor([total + loss.item(), count + tokens], dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    for bucket in buckets:
        for p in bucket:
            p.grad = p.grad / sums[1]
    return sums[0] / sums[1]


def accumulate__totals_first(loss_sum, micro_batches, buckets, group):
    """The small sum starts first and travels beside the buckets; it is waited for before the division."""
    sums = torch.zeros(2, dtype=torch.float64)
    for i in range(len(micro_batches)):
        loss, tokens = loss_sum(micro_batches[i])
        sums += torch.tensor([loss.item(), tokens], dtype=torch.float64)
        if i + 1 < len(micro_batches):
            loss.backward()
    small = dist.all_reduce(sums, group=group, async_op=True)
    finish = sync_gradients(buckets, group)
    loss.backward()
    finish()
    small.wait()
    torch._foreach_div_([p.grad for bucket in buckets for p in bucket], sums[1].item())
    return (sums[0] / sums[1]).item()
