"""Data parallelism: every rank has the whole model and its own sequences; gradients are summed over the ranks.

Gradients travel in buckets, each as soon as backward has made it, while backward goes on (Li et al. 2020, PyTorch
Distributed, section 3.2). A model whose parameters are summed over different groups, such as experts over fewer ranks,
has buckets for each group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fivefold.runtime.marks import keep


def make_buckets(parameters: Iterable[Parameter], bucket_bytes: float) -> list[list[Parameter]]:
    """Sort parameters into buckets, in the order in which backward will probably finish their gradients.

    That is the reverse of the order in which they are registered, which all ranks share: not the order in which
    gradients arrive, which need not be the same everywhere. A bucket takes the next parameter as long as it stays
    within `bucket_bytes` and is of the same dtype; one that is larger by itself has a bucket of its own. A parameter
    that appears twice is taken where it is given first; one without requires_grad is left out and not counted. Returns
    a list of buckets, each a list of parameters; none where there are no parameters.
    """
    buckets: list[list[Parameter]] = []
    size = 0
    for p in reversed([p for p in dict.fromkeys(parameters) if p.requires_grad]):
        if not buckets or size + p.nbytes > bucket_bytes or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.nbytes
    return buckets


def start_in_order(buckets: Sequence[Sequence[Parameter]], start: Callable[[int], Any]) -> Callable[[], None]:
    """Call start(0), start(1), …, each as early in the next backward as its bucket allows. Returns `finish`.

    A bucket is ready when backward has accumulated the gradients of all its parameters, which a parameter's
    `register_post_accumulate_grad_hook` tells. Ranks may get theirs ready in different orders, but must start
    collectives in one order: so bucket i is started when it is ready *and* all before it have been started.

    `finish()` is called after backward. It removes the hooks and starts what is left: buckets with a parameter that
    this backward did not use, and those that come after them.
    """
    waiting = deque((i, set(bucket)) for i, bucket in enumerate(buckets))

    def accumulated(p: Parameter) -> None:
        for _, missing in waiting:
            missing.discard(p)
        while waiting and not waiting[0][1]:
            start(waiting.popleft()[0])

    hooks = [p.register_post_accumulate_grad_hook(accumulated) for bucket in buckets for p in bucket]

    def finish() -> None:
        for hook in hooks:
            hook.remove()
        while waiting:
            start(waiting.popleft()[0])

    return finish


def take_gradients(parameters: Sequence[Parameter], padding: int = 0) -> Tensor:
    """Move the gradients of a bucket into one flat tensor, one after the other; each `p.grad` is None afterwards.

    A parameter without a gradient counts as one whose gradient is zero. `padding` more zeros follow.
    """
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    flat = torch.cat([*grads, parameters[0].new_zeros(padding)])
    for p in parameters:
        p.grad = None
    keep("gradients", flat)
    return flat


def sync_gradients(buckets: Sequence[Sequence[Parameter]], group: dist.ProcessGroup) -> Callable[[], None]:
    """Sum gradients over `group` while the next backward goes on. Returns `finish`, to be called after it.

        finish = sync_gradients(buckets, group)
        loss.backward()
        finish()

    As soon as backward lets a bucket start (`start_in_order`), its gradients are taken into one flat tensor
    (`take_gradients`) and an all-reduce of it begins, which nobody waits for yet: one all-reduce a bucket. `finish()`
    starts the rest, waits for each, and gives every parameter its part of the sum as `p.grad`, in the parameter's
    shape. What was accumulated in earlier backwards is in the sum. A parameter that some ranks did not use, or all of
    them, counts as zero there.
    """
    started: list[tuple[Tensor, dist.Work]] = []

    def start(i: int) -> None:
        flat = take_gradients(buckets[i])
        started.append((flat, dist.all_reduce(flat, group=group, async_op=True)))

    start_rest = start_in_order(buckets, start)

    def finish() -> None:
        start_rest()
        for bucket, (flat, work) in zip(buckets, started, strict=True):
            work.wait()
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view_as(p)

    return finish


def accumulate(
    loss_sum: Callable[[Any], tuple[Tensor, int]],
    micro_batches: Sequence[Any],
    buckets: Sequence[Sequence[Parameter]],
    group: dist.ProcessGroup,
) -> Tensor:
    """The gradients of a mean over *all* tokens, those of every micro-batch on every rank of `group`; the mean itself.

    loss_sum(micro_batch) runs forward: it answers with the sum of the losses of the micro-batch's tokens, and with how
    many there are, which may be another number each time, also 0. micro_batches: at least one, and each rank may have
    another number of them. Gradients are None or zero before; afterwards each `p.grad` of `buckets` is that of the mean
    loss, equal on all ranks. Returns the mean loss, without a graph.

    A mean of the micro-batches' means would weigh a token by the company it keeps. So sums are added up, of losses, of
    gradients and of tokens, and divided once, at the end. Gradients are summed over ranks in the last micro-batch only,
    by `sync_gradients` while its backward goes on; then sums of losses and tokens take one small all-reduce. Ranks may
    use different layers, and start their buckets at different moments, but all call the collectives in one order.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=buckets[0][0].device)  # loss, tokens
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, tokens = loss_sum(micro_batch)
        totals[0] += loss.detach()
        totals[1] += tokens
        if number == len(micro_batches):
            finish = sync_gradients(buckets, group)
        loss.backward()
    finish()
    dist.all_reduce(totals, group=group)
    for p in (p for bucket in buckets for p in bucket):
        p.grad /= totals[1]
    return totals[0] / totals[1]
