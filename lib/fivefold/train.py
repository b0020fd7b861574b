"""The five-way trainer: the GPT on DP x CP x PP x TP with EP folded in, as one process would train it.

The rule that holds it together: the loss of a step is one number, the mean over all tokens of the global batch. Each
rank adds its share of that number's gradient, already divided; whatever is summed over ranks is summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import context, data, pipeline, tensor, text, zero
from fivefold.layout import Layout, check_sizes
from fivefold.mesh import Mesh, make_mesh
from fivefold.model import GPTConfig, Options, Role, Stage
from fivefold.pipeline import (
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    partition_layers,
    sum_copies,
    zb_h1,
    zb_h2,
    zb_v,
)
from fivefold.runtime.ledger import phase
from fivefold.sequence import sync_replicated_gradients

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": lambda p, m, v: naive(p, m),
    "gpipe": lambda p, m, v: gpipe(p, m),
    "1f1b": lambda p, m, v: one_f_one_b(p, m),
    "interleaved": interleaved,
    "zb-h1": lambda p, m, v: zb_h1(p, m),
    "zb-h2": lambda p, m, v: zb_h2(p, m),
    "zb-v": lambda p, m, v: zb_v(p, m),
    "dualpipe": lambda p, m, v: dualpipe(p, m),
}


@dataclass(frozen=True)
class Job:
    """What to train, and how. Raises LayoutError or ValueError, one line, where the numbers do not go together."""

    layout: Layout = field(default_factory=Layout)
    model: GPTConfig = field(default_factory=GPTConfig)
    schedule: str = "1f1b"
    num_chunks: int = 2  # stages a rank, for the interleaved schedule
    num_microbatches: int = 4
    batch: int = 8  # sequences a step, over all DP ranks and micro-batches
    sequence: int = 64  # tokens of each
    lr: float = 3e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0
    bucket_bytes: float = 1 << 20
    sequence_parallel: bool = False
    recomputation: str = "none"
    fused_attention: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {self.schedule!r}: choose {', '.join(SCHEDULES)}")
        self.model.check(self.layout, self.make_schedule().num_stages // self.layout.pp)
        check_sizes(
            self.layout, sequence=self.sequence, sequence_parallel=self.sequence_parallel,
            batch=self.batch, num_microbatches=self.num_microbatches,
        )  # fmt: skip

    def make_schedule(self) -> Schedule:
        return SCHEDULES[self.schedule](self.layout.pp, self.num_microbatches, self.num_chunks)

    @property
    def options(self) -> Options:
        return Options(self.sequence_parallel, self.recomputation, self.fused_attention, self.num_microbatches)


def gradient_groups(role: Role, mesh: Mesh, sequence_parallel: bool) -> list[dist.ProcessGroup]:
    """Over which groups the gradient of a parameter is summed, one after the other; in the first, ZeRO shares it out.

    A parameter's gradient is complete when every token of the step has had its say once. Data and context parallelism
    split tokens, so the first group is `mesh.dp_cp`; the tokens of other ranks came to an expert by dispatch, so for an
    expert it is the ranks that hold the same expert, `mesh.ep_dp`. In sequence parallelism the ranks of `mesh.tp` see
    different tokens where a parameter is whole (`role.split` is None), so for these it is the second group; without it
    they see the same tokens, and their gradients are equal and complete. Experts are always split.
    """
    groups = [mesh.ep_dp if role.expert else mesh.dp_cp]
    if sequence_parallel and role.split is None:
        groups.append(mesh.tp)
    return groups


def local_batches(tokens: Tensor, num_microbatches: int, mesh: Mesh) -> list[context.LocalTokens]:
    """This rank's share of a step's tokens, micro-batch by micro-batch.

    tokens: (b, s + 1), the same on every rank. It is cut by sequences into `num_microbatches` equal micro-batches, each
    of which into dp equal parts, one for each place in `mesh.dp`; of its part a rank has the tokens that
    `context.local_tokens` gives it in `mesh.cp`. So ranks that differ in their place in `mesh.tp` or `mesh.pp` alone
    have the same tokens, and every token is with one place of DP x CP, once. No communication.
    """
    place, dp = mesh.dp.rank(), mesh.dp.size()
    return [context.local_tokens(part.chunk(dp)[place], mesh.cp) for part in tokens.chunk(num_microbatches)]


def loss_mean(labels: Sequence[Tensor], mesh: Mesh, ignore_index: int = -100) -> Callable[[Tensor, int], Tensor]:
    """The loss function of a step, whose values over all micro-batches and ranks add up to the mean over all tokens.

    labels: this rank's, (b, s/c) for each micro-batch; `ignore_index` counts as no token, and ranks and micro-batches
    may have different numbers of tokens. Returns `loss(logits, i)`: for the logits (b, s/c, V/t) of micro-batch i a
    scalar, the sum of its tokens' losses divided by the number of tokens in the step, those of every micro-batch on
    every rank of `mesh.dp_cp`. One all-reduce of one number, here; `loss` itself has those of `vocab_cross_entropy`.
    """
    tokens = sum((label != ignore_index).sum() for label in labels)
    dist.all_reduce(tokens, group=mesh.dp_cp)

    def loss(logits: Tensor, i: int) -> Tensor:
        return tensor.vocab_cross_entropy(logits, labels[i], mesh.tp, ignore_index).sum() / tokens

    return loss


def clip(shards: Sequence[zero.Shard], copies: Sequence[int], max_norm: float, mesh: Mesh) -> Tensor:
    """Scale the gradients of a step so that their norm over the whole model is `max_norm` at most; the norm before.

    shards: this rank's, with the pieces of gradients that ZeRO left it, no two ranks of a shard's group the same piece.
    copies: for each shard, how many ranks of the world hold that very piece: `mesh.tp.size()` where its parameters are
    whole on the TP ranks, twice as many where two pipeline stages share it. Each piece counts once. One all-reduce of
    one number over the world, and all ranks scale by the same, max_norm/(norm + 1e-6) where that is below 1.
    """
    return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world, copies)


@dataclass
class StepReport:
    """What a step says of itself, the same on all ranks."""

    loss: float  # mean over the tokens of the global batch
    norm: float  # of the gradient, before it was clipped


class Trainer:
    """One rank's part of the model and of the optimizer's state. All ranks are made from the same job."""

    def __init__(self, job: Job):
        self.job, self.schedule = job, job.make_schedule()
        self.mesh = make_mesh(job.layout)
        self.positions = context.token_positions(job.sequence, job.layout.cp)
        with phase("build"):
            self.stages = {stage: self._stage(stage) for stage in self.schedule.stages_of(self.mesh.pp.rank())}
        self.tied = self._tie()
        self.roles = {p: role for stage in self.stages.values() for p, role in stage.roles().items()}
        self.shards, self.copies = self._shards()

    def _stage(self, stage: int) -> Stage:
        layers = partition_layers([1.0] * self.job.model.layers, self.schedule.num_stages)[stage]
        ends = stage == 0, stage == self.schedule.num_stages - 1
        made = Stage(self.job.model, layers, self.mesh, self.positions, *ends, self.job.options)
        return made.to(self.job.device)

    def _tie(self) -> nn.Parameter | None:
        """The tied embedding on the ranks that have it; one parameter where a rank has both ends."""
        first, last = self.stages.get(0), self.stages.get(self.schedule.num_stages - 1)
        if not self.job.model.tied or (first or last) is None:
            return None
        if first and last:
            last.head.weight = first.embedding.weight
        return first.embedding.weight if first else last.head.weight

    def _shards(self) -> tuple[list[zero.Shard], list[int]]:
        """ZeRO stage 1: buckets of parameters that are summed over the same group and exist equally often.

        A tied weight is in no bucket with others, which differ between its two stages: so both cut it and add it up in
        the same order, and its copies stay equal to the bit.
        """
        kinds: dict[tuple[dist.ProcessGroup, bool, int], list[nn.Parameter]] = {}
        for parameter, role in self.roles.items():
            group = gradient_groups(role, self.mesh, self.job.sequence_parallel)[0]
            kinds.setdefault((group, role.tied, self._copies(parameter, role)), []).append(parameter)
        shards, copies = [], []
        for (group, _, number), parameters in kinds.items():
            for bucket in data.make_buckets(parameters, self.job.bucket_bytes):
                shards.append(zero.Shard(bucket, group, weight_decay=self.job.weight_decay))
                copies.append(number)
        return shards, copies

    def _copies(self, parameter: nn.Parameter, role: Role) -> int:
        """How many ranks hold the same piece of a parameter's gradient once ZeRO has shared it out."""
        return len(self.holders(parameter, role)) * (1 if role.split is not None else self.mesh.tp.size())

    def holders(self, parameter: nn.Parameter, role: Role) -> set[int]:
        """The ranks of this pipeline that hold a parameter: one, or two where there are two copies of it."""
        on = {stage for stage, module in self.stages.items() if parameter in set(module.parameters())}
        if role.tied:
            on |= {0, self.schedule.num_stages - 1}
        return {rank for stage in on for rank in self.schedule.ranks_of(stage)}

    def template(self) -> Tensor:
        """A tensor like those that go from stage to stage."""
        job = self.job
        length = job.sequence // job.layout.cp // (job.layout.tp if job.sequence_parallel else 1)
        rows = job.batch // job.num_microbatches // job.layout.dp
        return torch.empty(rows, length, job.model.hidden, dtype=job.model.dtype, device=job.device)

    def total(self, losses: dict[int, Tensor]) -> float:
        """The loss of the step on every rank, from the shares on those that hold the last stage."""
        wide = torch.promote_types(self.job.model.dtype, torch.float32)  # as vocab_cross_entropy computes
        share = sum(losses.values(), torch.zeros((), dtype=wide, device=self.job.device))
        dist.all_reduce(share, group=self.mesh.dp_cp)
        dist.all_reduce(share, group=self.mesh.pp)
        return share.item()


def step(trainer: Trainer, tokens: Tensor, lr: float | None = None) -> StepReport:
    """One step of training on a global batch: tokens (batch, sequence + 1), the same on every rank.

    Forward and backward of all micro-batches by the schedule (`pipeline.run`); then every gradient is made whole: of
    parameters that two stages share (`sum_copies`), of those whole on the TP ranks in sequence parallelism
    (`sync_replicated_gradients`), and over the ranks that saw other tokens, of which each keeps its piece
    (`zero.reduce_gradients`). The whole gradient is clipped (`clip`), and each rank updates its piece and gathers the
    others' (`zero.step1`), with the learning rate `lr` or the job's. Returns the loss and the norm, equal on all ranks.
    """
    job, mesh = trainer.job, trainer.mesh
    micro_batches = local_batches(tokens.to(job.device), job.num_microbatches, mesh)
    loss = loss_mean([part.labels for part in micro_batches], mesh)
    inputs = [part.inputs for part in micro_batches]
    with phase("pipeline"):
        losses = pipeline.run(trainer.schedule, trainer.stages, inputs, loss, mesh.pp, trainer.template())
    with phase("gradients"):
        sum_copies(trainer.schedule, trainer.stages, mesh.pp, trainer.tied)
        groups = {p: gradient_groups(role, mesh, job.sequence_parallel) for p, role in trainer.roles.items()}
        sync_replicated_gradients([p for p, over in groups.items() if mesh.tp in over], mesh.tp)
        zero.reduce_gradients(trainer.shards)()
        norm = clip(trainer.shards, trainer.copies, job.max_norm, mesh)
    with phase("optimizer"):
        zero.step1(trainer.shards, job.lr if lr is None else lr)
    return StepReport(trainer.total(losses), norm.item())


def batches(job: Job, steps: int, first: int = 0) -> Iterator[Tensor]:
    """The global batches of steps `first` to `steps` - 1: (batch, sequence + 1) tokens of the training text."""
    train, _ = text.split()
    for number in range(first, steps):
        inputs, labels = text.sequences(train, job.batch, job.sequence, seed=job.seed * 1_000_003 + number)
        yield torch.cat([inputs, labels[:, -1:]], dim=1)


def train(job: Job, steps: int) -> list[StepReport]:
    """Train for `steps` steps; to be run on job.layout.world_size ranks."""
    trainer = Trainer(job)
    return [step(trainer, tokens) for tokens in batches(job, steps)]
