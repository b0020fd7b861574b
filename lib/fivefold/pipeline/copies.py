"""Parameters that two ranks of a pipeline hold: DualPipe's stages, and an embedding tied to the output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fivefold.pipeline.actions import Schedule


def _add_that_of(peer: int, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    mine = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    other = torch.empty_like(mine)
    # In one batch: on NCCL, two ranks that both send first would wait for ever.
    ways = ((dist.isend, mine), (dist.irecv, other))
    for work in dist.batch_isend_irecv([dist.P2POp(way, x, group=group, group_peer=peer) for way, x in ways]):
        work.wait()
    totals = (mine + other).split([p.numel() for p in parameters])
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total.view_as(parameter)


def sum_copies(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    group: dist.ProcessGroup,
    tied: nn.Parameter | None = None,
) -> None:
    """Add up the gradients of each parameter that two ranks hold, so that both have its whole gradient.

    To be called after `run`, whose schedule, stages and group these are. tied: the parameter that the first
    and the last stage share, on ranks that hold one of them, else None; on a rank that holds both, the two modules have
    the same `nn.Parameter`, and its `.grad` has both parts already.
    Each copy has seen some micro-batches only, or one of the weight's two uses: the gradient is the sum, not the mean.
    The two ranks send each other theirs, all parameters in one message. Nothing is sent for what one rank alone holds.
    """
    me, last = group.rank(), schedule.num_stages - 1
    shared: dict[int, dict[nn.Parameter, None]] = {}  # by the other rank
    for stage in sorted(stages):
        for parameter in stages[stage].parameters():
            at = {stage} if parameter is not tied else {0, last}
            for peer in {rank for s in at for rank in schedule.ranks_of(s)} - {me}:
                shared.setdefault(peer, {})[parameter] = None
    for peer, parameters in shared.items():
        _add_that_of(peer, list(parameters), group)
