"""Right solutions of lesson 11 that look different from the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold import context, pipeline, sequence, tensor, train, zero


def gradient_groups__cases(role, mesh, sequence_parallel):
    """Each case by itself."""
    if role.expert:
        return [mesh.ep_dp]
    if role.split is not None or not sequence_parallel:
        return [mesh.dp_cp]
    return [mesh.dp_cp, mesh.tp]


def gradient_groups__no_sum_of_one(role, mesh, sequence_parallel):
    """A group of one rank is left out, but for the first."""
    first = mesh.ep_dp if role.expert else mesh.dp_cp
    whole = role.split is None and not role.expert
    return [first, *([mesh.tp] if whole and sequence_parallel and mesh.tp.size() > 1 else [])]


def local_batches__by_index(tokens, num_microbatches, mesh):
    """Rows by their numbers, from the coordinates."""
    rows = tokens.shape[0] // num_microbatches // mesh.layout.dp
    found = []
    for i in range(num_microbatches):
        first = (i * mesh.layout.dp + mesh.coordinates.dp) * rows
        found.append(context.local_tokens(tokens[first : first + rows], mesh.cp))
    return found


def local_batches__reshaped(tokens, num_microbatches, mesh):
    """One view with a dimension for each cut; a generator."""
    cut = tokens.reshape(num_microbatches, mesh.dp.size(), -1, tokens.shape[1])
    return (context.local_tokens(part, mesh.cp) for part in cut[:, mesh.dp.rank()])


def loss_mean__float_count(labels, mesh, ignore_index=-100):
    """The count as a float64, the losses weighed before they are summed."""
    count = torch.stack([label.ne(ignore_index).sum() for label in labels]).sum().double()
    dist.all_reduce(count, group=mesh.dp_cp)

    def loss(logits, i):
        losses = tensor.vocab_cross_entropy(logits, labels[i], mesh.tp, ignore_index)
        return (losses / count).sum()

    return loss


def loss_mean__asynchronous(labels, mesh, ignore_index=-100):
    """The count travels while the first micro-batch is computed."""
    count = torch.cat([label.flatten() for label in labels]).ne(ignore_index).sum()
    work = dist.all_reduce(count, group=mesh.dp_cp, async_op=True)

    def loss(logits, i):
        total = tensor.vocab_cross_entropy(logits, labels[i], mesh.tp, ignore_index).sum()
        work.wait()
        return total / count

    return loss


def clip__by_hand(shards, copies, max_norm, mesh):
    """Without the function of lesson 02."""
    squares = sum((s.gradient.double() ** 2).sum() / n for s, n in zip(shards, copies, strict=True))
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for shard in shards:
        shard.gradient *= min(1.0, max_norm / (norm.item() + 1e-6))
    return norm


def clip__new_tensors(shards, copies, max_norm, mesh):
    """Gradients are replaced, and weighed before they are squared."""
    weighed = torch.cat([s.gradient.flatten() / n**0.5 for s, n in zip(shards, copies, strict=True)])
    square = weighed @ weighed
    dist.all_reduce(square, group=mesh.world)
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
    for shard in shards:
        shard.gradient = shard.gradient * scale
    return square.sqrt()


def step__in_another_order(trainer, tokens, lr=None):
    """Replicated gradients before copies; the loss of a step before its update."""
    job, mesh = trainer.job, trainer.mesh
    parts = train.local_batches(tokens, job.num_microbatches, mesh)
    loss = train.loss_mean([part.labels for part in parts], mesh)
    inputs = [part.inputs for part in parts]
    losses = pipeline.run(trainer.schedule, trainer.stages, inputs, loss, mesh.pp, trainer.template())
    total = trainer.total(losses)
    if job.sequence_parallel:
        whole = [p for p, role in trainer.roles.items() if role.split is None]
        sequence.sync_replicated_gradients(whole, mesh.tp)
    pipeline.sum_copies(trainer.schedule, trainer.stages, mesh.pp, trainer.tied)
    zero.reduce_gradients(trainer.shards)()
    norm = train.clip(trainer.shards, trainer.copies, job.max_norm, mesh)
    zero.step1(trainer.shards, lr or job.lr)
    return train.StepReport(total, norm.item())


def step__reduced_by_step1(trainer, tokens, lr=None):
    """Each shard is reduced at once, with no call in flight."""
    job, mesh = trainer.job, trainer.mesh
    parts = train.local_batches(tokens, job.num_microbatches, mesh)
    loss = train.loss_mean([part.labels for part in parts], mesh)
    losses = pipeline.run(
        trainer.schedule, trainer.stages, [part.inputs for part in parts], loss, mesh.pp, trainer.template()
    )
    pipeline.sum_copies(trainer.schedule, trainer.stages, mesh.pp, trainer.tied)
    for parameter, role in trainer.roles.items():
        if mesh.tp in train.gradient_groups(role, mesh, job.sequence_parallel) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.tp)
    for shard in trainer.shards:
        zero.reduce_gradients([shard])()
    norm = train.clip(trainer.shards, trainer.copies, job.max_norm, mesh)
    zero.step1(trainer.shards, job.lr if lr is None else lr)
    return train.StepReport(trainer.total(losses), float(norm))
