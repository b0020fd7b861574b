"""Right solutions of lesson 07 for copies of a weight, written in another way than the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _holders(schedule, stages, parameter, tied):
    """The ranks that hold a parameter."""
    if parameter is tied:
        return set(schedule.ranks_of(0)) | set(schedule.ranks_of(schedule.num_stages - 1))
    return {rank for n, stage in stages.items() if any(parameter is p for p in stage.parameters()) for rank in
            schedule.ranks_of(n)}  # fmt: skip


def _by_peer(schedule, stages, group, tied):
    """The parameters shared with each other rank, each once."""
    found = {}
    for _, stage in sorted(stages.items()):
        for parameter in stage.parameters():
            for peer in _holders(schedule, stages, parameter, tied) - {group.rank()}:
                own = found.setdefault(peer, [])
                if not any(parameter is other for other in own):
                    own.append(parameter)
    return found


def _grad(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def sum_copies__lower_rank_first(schedule, stages, group, tied=None):
    """Blocking messages: the lower of two ranks sends first."""
    for peer, parameters in sorted(_by_peer(schedule, stages, group, tied).items()):
        mine = torch.cat([_grad(p).reshape(-1) for p in parameters])
        other = torch.zeros_like(mine)
        if group.rank() < peer:
            dist.send(mine, group=group, group_dst=peer)
            dist.recv(other, group=group, group_src=peer)
        else:
            dist.recv(other, group=group, group_src=peer)
            dist.send(mine, group=group, group_dst=peer)
        for parameter, part in zip(parameters, other.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = _grad(parameter) + part.view(parameter.shape)


def sum_copies__started_then_waited(schedule, stages, group, tied=None):
    """All messages are started, then waited for; gradients change in place."""
    under_way = []
    for peer, parameters in _by_peer(schedule, stages, group, tied).items():
        for parameter in parameters:
            parameter.grad = _grad(parameter)
        mine = torch.cat([p.grad.flatten() for p in parameters])
        other = torch.empty_like(mine)
        works = [dist.isend(mine, group=group, group_dst=peer), dist.irecv(other, group=group, group_src=peer)]
        under_way.append((works, parameters, other))
    for works, parameters, other in under_way:
        for work in works:
            work.wait()
        at = 0
        for parameter in parameters:
            parameter.grad += other[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
