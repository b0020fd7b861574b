"""Right solutions of lesson 02 that are written in another way than the library's: ZeRO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.data import start_in_order


def step1__lists(shards, lr):
    """The collectives that take lists; all shards are reduced, then all updated, then all gathered."""
    for shard in shards:
        if shard.gradient is not None:
            continue
        pieces = list(shard.take_gradients().chunk(shard.group.size()))
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces, group=shard.group)
        shard.add_gradient(own)
    for shard in shards:
        shard.update(lr)
    for shard in shards:
        pieces = [torch.empty_like(shard.piece) for _ in range(shard.group.size())]
        dist.all_gather(pieces, shard.piece.clone(), group=shard.group)
        shard.full.copy_(torch.cat(pieces))


def step1__asynchronous(shards, lr):
    """Every exchange is started at once; the optimizer works while others travel."""
    from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single

    under_way = []
    for shard in shards:
        if shard.gradient is None:
            whole = shard.take_gradients()
            own = whole.new_zeros(shard.length)
            under_way.append((shard, own, whole, reduce_scatter_single(own, whole, group=shard.group, async_op=True)))
    for shard, own, _, work in under_way:
        work.wait()
        shard.add_gradient(own)
    gathers = []
    for shard in shards:
        shard.update(lr)
        gathers.append(all_gather_single(shard.full, shard.piece, group=shard.group, async_op=True))
    for gather in gathers:
        gather.wait()


def reduce_gradients__lists(shards):
    """The reduce-scatter that takes a list, and one place for what is under way."""
    last = []

    def arrive():
        if last:
            shard, own, work = last.pop()
            work.wait()
            shard.add_gradient(own)

    def start(i):
        arrive()
        pieces = list(shards[i].take_gradients().chunk(shards[i].group.size()))
        own = torch.empty_like(pieces[0])
        last.append((shards[i], own, dist.reduce_scatter(own, pieces, group=shards[i].group, async_op=True)))

    rest = start_in_order([s.parameters for s in shards], start)
    return lambda: (rest(), arrive(), None)[-1]


def reduce_gradients__kept_whole(shards):
    """The flat tensor stays in the list until its reduce-scatter has been waited for."""
    from fivefold.runtime.renamed import reduce_scatter_single

    under_way = []

    def end():
        for shard, own, _, work in under_way:
            work.wait()
            shard.add_gradient(own)
        under_way.clear()

    def begin(i):
        end()
        whole, own = shards[i].take_gradients(), torch.empty(shards[i].length, dtype=shards[i].full.dtype)
        work = reduce_scatter_single(own, whole, group=shards[i].group, async_op=True)
        under_way.append((shards[i], own, whole, work))

    start_rest = start_in_order([shard.parameters for shard in shards], begin)

    def finish():
        start_rest()
        end()

    return finish


class reduce_gradients__class:  # noqa: N801
    """An object with hooks of its own, that is called after backward."""

    def __init__(self, shards):
        self.shards, self.next, self.work = list(shards), 0, None
        self.missing = [{id(p) for p in shard.parameters} for shard in shards]
        self.hooks = [p.register_post_accumulate_grad_hook(self.arrived) for s in shards for p in s.parameters]

    def arrived(self, p):
        for one in self.missing:
            one.discard(id(p))
        while self.next < len(self.shards) and not self.missing[self.next]:
            self.start()

    def start(self):
        from fivefold.runtime.renamed import reduce_scatter_single

        self.wait()
        shard = self.shards[self.next]
        whole = shard.take_gradients()
        own = torch.zeros(shard.length, dtype=whole.dtype)
        self.work = shard, own, reduce_scatter_single(own, whole, group=shard.group, async_op=True)
        self.next += 1

    def wait(self):
        if self.work is not None:
            shard, own, work = self.work
            work.wait()
            shard.add_gradient(own)
            self.work = None

    def __call__(self):
        for hook in self.hooks:
            hook.remove()
        while self.next < len(self.shards):
            self.start()
        self.wait()


def gather_parameters__lists(module, shard):
    """The all-gather that takes a list, copied into `full`; gradients that have come are counted."""
    count = [0]

    def gather(*_):
        pieces = [torch.empty_like(shard.piece) for _ in range(shard.group.size())]
        dist.all_gather(pieces, shard.piece, group=shard.group)
        shard.allocate()
        shard.full.copy_(torch.cat(pieces))

    def again(grad):
        count[0] = len(shard.parameters)
        gather()
        return grad

    def let_go(*_):
        count[0] -= 1
        if count[0] == 0:
            shard.release()

    def done(_, inputs, output):
        shard.release()
        if torch.is_grad_enabled():
            output.register_hook(again)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(done)
    for p in shard.parameters:
        p.register_post_accumulate_grad_hook(let_go)


def gather_parameters__backward_hooks(module, shard):
    """A module's own hook before backward, and started asynchronously."""
    from fivefold.runtime.renamed import all_gather_single

    left = set()

    def gather(*_):
        shard.allocate()
        work = all_gather_single(shard.full, shard.piece, group=shard.group, async_op=True)
        work.wait()

    def before(*_):
        gather()
        left.update(map(id, shard.parameters))

    def after(p):
        left.discard(id(p))
        if len(left) == 0:
            shard.release()

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(lambda *_: shard.release())
    module.register_full_backward_pre_hook(before)
    for p in shard.parameters:
        p.register_post_accumulate_grad_hook(after)


def clip_grad_norm__foreach(gradients, max_norm, group, copies=None):
    """All gradients in one vector, weighed by the root of their copies."""
    counts = copies if copies is not None else [1 for _ in gradients]
    parts = [gradient.double().flatten() / count**0.5 for gradient, count in zip(gradients, counts, strict=True)]
    total = torch.cat(parts).pow(2).sum().reshape(1)
    dist.all_reduce(total, group=group)
    norm = total[0] ** 0.5
    if max_norm < norm + 1e-6:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).item())
    return norm


def clip_grad_norm__python(gradients, max_norm, group, copies=None):
    """Plain numbers, and an asynchronous sum."""
    total = 0.0
    for i, gradient in enumerate(gradients):
        total += sum(float(x) ** 2 for x in gradient.reshape(-1).tolist()) / (copies[i] if copies else 1)
    box = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(box, group=group, async_op=True).wait()
    norm = box.sqrt()
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for gradient in gradients:
        gradient.copy_(gradient * factor)
    return norm
