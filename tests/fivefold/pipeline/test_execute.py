"""Schedules on real ranks: the losses, gradients and weights of one process, and the memory and messages they say."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import pipeline, run
from fivefold.expert import with_loss
from fivefold.layout import Layout
from fivefold.mesh import make_mesh
from fivefold.pipeline import (
    Receive,
    Schedule,
    Send,
    dualpipe,
    gpipe,
    in_order,
    interleaved,
    naive,
    one_f_one_b,
    order_messages,
    partition_layers,
    simulate,
    straight,
    sum_copies,
    zb_h1,
    zb_h2,
    zb_v,
)
from fivefold.runtime.cluster import cluster
from fivefold.runtime.errors import RankFailed
from fivefold.runtime.replay import replay
from fivefold.tensor import ColumnLinear, RowLinear
from torch import nn
from torch.distributed import pipelining

HIDDEN, WORDS, LAYERS = 6, 11, 10
exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def random_like(name: str, *shape: int) -> nn.Parameter:
    seed = sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 2**31
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 3)


class Layer(nn.Module):
    """Layers do not weigh the same, and the odd ones add a loss of their own to what backward minimises."""

    def __init__(self, number: int):
        super().__init__()
        self.number, width = number, 4 + 3 * number
        self.up, self.down = random_like(f"{number} up", width, HIDDEN), random_like(f"{number} down", HIDDEN, width)
        self.gain = random_like(f"{number} gain", HIDDEN)

    def forward(self, x):
        y = F.gelu(F.rms_norm(x, (HIDDEN,), self.gain) @ self.up.T) @ self.down.T
        return x + (with_loss(y, 0.1 * y.square().mean()) if self.number % 2 else y)


class Part(nn.Module):
    """Some layers of a language model; the first part has the embedding, and the last uses it once more."""

    def __init__(self, layers: range, embedding: nn.Parameter):
        super().__init__()
        self.first, self.last = 0 in layers, LAYERS - 1 in layers
        self.layers = nn.ModuleDict({str(k): Layer(k) for k in layers})
        if self.first or self.last:
            self.embedding = embedding

    def forward(self, x):
        x = F.embedding(x, self.embedding) if self.first else x
        for layer in self.layers.values():
            x = layer(x)
        return x @ self.embedding.T if self.last else x


def batches(num_microbatches: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (num_microbatches, 2, 5), generator=torch.Generator().manual_seed(step))
    return words[..., :-1], words[..., 1:]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, total: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / total


def parts_of(schedule: Schedule, rank: int) -> dict[int, Part]:
    cut = partition_layers([4 + 3 * k for k in range(LAYERS)], schedule.num_stages)
    embedding = random_like("embedding", WORDS, HIDDEN)
    return {stage: Part(cut[stage], embedding) for stage in schedule.stages_of(rank)}


def named(parts: dict[int, Part]) -> dict[str, nn.Parameter]:
    return {name: p for part in parts.values() for name, p in part.named_parameters()}


def train(schedule: Schedule, steps: int = 2):
    """What a rank has after two steps of an optimizer: losses of each step, gradients of the last, weights."""
    group, losses = dist.group.WORLD, []
    parts = parts_of(schedule, group.rank())
    parameters = named(parts)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batches(schedule.num_microbatches, step)
        loss = lambda logits, i, targets=targets: cross_entropy(logits, targets[i], targets.numel())  # noqa: E731
        losses.append(pipeline.run(schedule, parts, inputs, loss, group, torch.empty(2, 4, HIDDEN).double()))
        sum_copies(schedule, parts, group, parameters.get("embedding"))
        optimizer.step()
    return losses, {name: p.grad for name, p in parameters.items()}, {n: p.detach() for n, p in parameters.items()}


def train_alone(num_microbatches: int, steps: int = 2):
    """The same on one process, without a pipeline."""
    model = Part(range(LAYERS), random_like("embedding", WORDS, HIDDEN))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batches(num_microbatches, step)
        each = [cross_entropy(model(x), y, targets.numel()) for x, y in zip(inputs, targets, strict=True)]
        sum(each).backward()
        losses.append({i: loss.detach() for i, loss in enumerate(each)})
        optimizer.step()
    parameters = dict(model.named_parameters())
    return losses, {name: p.grad for name, p in parameters.items()}, {n: p.detach() for n, p in parameters.items()}


SCHEDULES = [
    naive(2, 3),
    gpipe(3, 4),
    one_f_one_b(1, 3),
    one_f_one_b(2, 5),
    one_f_one_b(4, 2),
    interleaved(2, 4, 3),
    interleaved(3, 3, 2),
    interleaved(1, 2, 2),
    zb_h1(4, 5),
    zb_h1(3, 1),
    zb_h2(2, 4),
    zb_v(1, 2),
    zb_v(3, 6),
    dualpipe(2, 4),
    dualpipe(4, 8),
    order_messages(one_f_one_b(2, 4)),
]


def title(schedule: Schedule) -> str:
    messages = ", messages given" if schedule.has_messages else ""
    return f"{schedule.name} p={schedule.num_ranks} m={schedule.num_microbatches}{messages}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=title)
def test_trains_as_one_process(schedule):
    """In fp64, uneven layers, a tied embedding: each loss, and on every rank that holds it each gradient and weight."""
    expected_losses, expected_grads, expected_weights = train_alone(schedule.num_microbatches)
    results = run(train, schedule.num_ranks, schedule).results
    found = [{}, {}]
    for rank, (losses, grads, weights) in enumerate(results):
        for step, mine in enumerate(losses):
            assert not found[step].keys() & mine.keys()
            found[step] |= mine
            assert mine.keys() == {
                i for i in range(schedule.num_microbatches) if schedule.rank_of(schedule.num_stages - 1, i) == rank
            }
        exact(grads, {name: expected_grads[name] for name in grads})
        exact(weights, {name: expected_weights[name] for name in weights})
    exact(found, expected_losses)
    assert {name for _, grads, _ in results for name in grads} == expected_grads.keys()


def beside_torchs(kind: str, schedule: Schedule):
    """This rank's gradients and losses by torch's own schedule class, and by ours, on the same stages and batches."""
    group, m = dist.group.WORLD, schedule.num_microbatches
    ours = parts_of(schedule, group.rank())
    theirs = copy.deepcopy(ours)
    inputs, targets = batches(m, 0)
    last, losses = schedule.num_stages - 1, []
    stages = [
        pipelining.PipelineStage(part, stage, schedule.num_stages, torch.device("cpu"))
        for stage, part in theirs.items()
    ]
    loss = partial(cross_entropy, total=targets.numel())
    own = getattr(pipelining, kind)
    alone = issubclass(own, pipelining.schedules.PipelineScheduleSingle)
    steps = own(stages[0] if alone else stages, m, loss_fn=loss, scale_grads=False)
    arguments = {"target": targets.flatten(0, 1), "losses": losses} if last in theirs else {}
    steps.step(*([inputs.flatten(0, 1)] if 0 in theirs else []), **arguments)
    template = torch.empty(2, 4, HIDDEN).double()
    found = pipeline.run(schedule, ours, inputs, lambda y, i: loss(y, targets[i]), group, template)
    grads = ({name: p.grad for name, p in named(parts).items()} for parts in (ours, theirs))
    return [*found.values()], [loss.detach() for loss in losses], *grads


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("ScheduleGPipe", gpipe(4, 4)),
        ("Schedule1F1B", one_f_one_b(4, 6)),
        ("ScheduleInterleaved1F1B", interleaved(4, 4, 2)),
        ("ScheduleInterleavedZeroBubble", interleaved(2, 4, 2)),
        ("ScheduleZBVZeroBubble", zb_v(3, 6)),
    ],
)
def test_torchs_schedules_give_the_same(kind, schedule):
    """`torch.distributed.pipelining` in the same run: equal losses and gradients, before tied copies are summed."""
    for ours, theirs, our_grads, their_grads in run(beside_torchs, schedule.num_ranks, kind, schedule).results:
        exact(ours, theirs)
        exact(our_grads, their_grads)


class Tower(nn.Module):
    """Keeps three tensors like its input for backward: the inputs of two products and of the GELU between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.layers(x)


def towers(schedule: Schedule) -> None:
    group = dist.group.WORLD
    stages = {stage: Tower() for stage in schedule.stages_of(group.rank())}
    inputs = [torch.randn(16, 8) for _ in range(schedule.num_microbatches)]  # not views of one large tensor
    pipeline.run(schedule, stages, inputs, lambda y, i: y.sum(), group, inputs[0])


@pytest.mark.parametrize(
    "schedule",
    [gpipe(2, 5), one_f_one_b(4, 6), interleaved(2, 4, 2), zb_h1(3, 6), zb_h2(3, 6), zb_v(2, 6), dualpipe(2, 6)],
    ids=title,
)
def test_keeps_what_is_alive(schedule):
    """Measured peaks are the simulation's: 3 tensors from the forward on, 2 from the input to the weight gradient."""
    ledger = run(towers, schedule.num_ranks, schedule, measure=True).ledger
    one = 16 * 8 * 4
    expected = simulate(schedule).peak_memory(m_b=3 * one, m_w=2 * one)
    assert tuple(rank.memory.peak_saved for rank in ledger.ranks) == expected


def test_1f1b_keeps_p_minus_r():
    """The number that everyone quotes, without our simulation: live activations of 1F1B on rank r of p are p - r."""
    ledger = run(towers, 4, one_f_one_b(4, 7), measure=True).ledger
    assert [rank.memory.peak_saved / (3 * 16 * 8 * 4) for rank in ledger.ranks] == [4, 3, 2, 1]


def outputs_alive() -> list[int]:
    """On the first of two ranks: how many outputs of earlier forwards are still in memory when a forward begins."""
    group, made, alive = dist.group.WORLD, [], []

    class Watched(nn.Linear):
        def forward(self, x):
            alive.append(sum(output() is not None for output in made))
            y = super().forward(x)
            made.append(weakref.ref(y.untyped_storage()))
            return y

    schedule = gpipe(2, 8)
    inputs = torch.randn(8, 16, 4)
    pipeline.run(schedule, {group.rank(): Watched(4, 4)}, inputs, lambda y, i: y.sum(), group, inputs[0])
    return alive


def test_outputs_leave_with_their_message():
    """A rank that runs ahead keeps an output or two on their way, not one for each micro-batch; the last keeps none."""
    first, last = run(outputs_alive, 2).results
    assert max(first) <= 2
    assert max(last) == 0


@pytest.mark.parametrize("schedule", [naive(2, 2), one_f_one_b(3, 4), interleaved(2, 2, 2), zb_v(2, 3)], ids=title)
def test_sends_each_value_once_and_nothing_else(schedule):
    """Activations and gradients between stages on different ranks, in the order of the lists."""
    ledger = run(towers, schedule.num_ranks, schedule).ledger
    for rank, actions in enumerate(order_messages(schedule).actions):
        wanted = [a for a in actions if isinstance(a, Send | Receive)]
        found = ledger[rank].communications
        assert [(c.op, c.peer) for c in found] == [("send" if isinstance(a, Send) else "recv", a.peer) for a in wanted]
        assert all(c.bytes == (16 * 8 * 4 if c.op == "send" else 0) for c in found)
    sent = sum(c.op == "send" for rank in ledger.ranks for c in rank.communications)
    crossings = sum(a != b for a, b in zip(schedule.routes[0], schedule.routes[0][1:], strict=False))
    assert sent == 2 * crossings * schedule.num_microbatches


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [(gpipe(3, 4), 3 * 6), (one_f_one_b(3, 4), 3 * 6), (interleaved(2, 4, 2), 3 * 8 + 3), (zb_h1(3, 4), 3 * 4 + 2)],
    ids=lambda value: title(value) if isinstance(value, Schedule) else "",
)
def test_replayed_it_takes_the_time_of_the_formula(schedule, steps):
    """The ledger of a real run, with unit costs: m(F + B) and the bubble (p-1)(F + B), ZB-H1 (p-1)(F + I - W)."""
    ledger = run(towers, schedule.num_ranks, schedule, measure=True).ledger
    replayed = replay(ledger, cluster("h100"), {"F": 1, "B": 2, "I": 1, "W": 1})
    assert replayed.makespan == pytest.approx(steps, abs=1e-2)


def in_a_corner(schedule: Schedule, layout: Layout):
    """A pipeline in each of two groups of every other rank; its stages are split over the ranks that stand beside."""
    mesh = make_mesh(layout)
    place = mesh.coordinates.pp
    stages = {}
    for stage in schedule.stages_of(place):
        up, down = random_like(f"{stage} up", 8, HIDDEN), random_like(f"{stage} down", HIDDEN, 8)
        stages[stage] = nn.Sequential(ColumnLinear(up, None, mesh.tp), nn.Tanh(), RowLinear(down, None, mesh.tp))
    inputs = torch.randn(schedule.num_microbatches, 3, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    losses = pipeline.run(schedule, stages, inputs, lambda y, i: y.square().sum(), mesh.pp, inputs[0])
    grads = {stage: [p.grad for p in module.parameters()] for stage, module in stages.items()}
    return mesh.coordinates.tp, sum(losses.values(), torch.zeros(())), grads


@pytest.mark.parametrize("schedule", [interleaved(2, 4, 2), zb_h1(2, 3), dualpipe(2, 4)], ids=title)
def test_in_a_subgroup_with_tensor_parallel_stages(schedule):
    """Ranks [0, 2] and [1, 3] are pipelines, [0, 1] and [2, 3] share stages: gradients are shards of the whole ones."""
    weights = [
        [random_like(f"{s} up", 8, HIDDEN), random_like(f"{s} down", HIDDEN, 8)] for s in range(schedule.num_stages)
    ]
    x = torch.randn(schedule.num_microbatches, 3, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    for up, down in weights:
        x = (x @ up.T).tanh() @ down.T
    x.square().sum().backward()
    results = run(in_a_corner, 4, schedule, Layout.parse("pp2,tp2")).results
    for tp in (0, 1):
        mine = [(loss, grads) for place, loss, grads in results if place == tp]
        exact(sum(loss for loss, _ in mine), x.square().sum().detach())
        for stage, (up, down) in enumerate(weights):
            copies = [grads[stage] for _, grads in mine if stage in grads]
            assert len(copies) == len(schedule.ranks_of(stage))
            exact(
                [sum(parts) for parts in zip(*copies, strict=True)], [up.grad.chunk(2)[tp], down.grad.chunk(2, 1)[tp]]
            )


BROKEN = Schedule("broken", 2, straight(1), [in_order("F B B F".split(), [0])])


@pytest.mark.parametrize(
    ("schedule", "stages", "message"),
    [
        (gpipe(2, 2), [0], "GPipe is for 2 ranks, the group has 1: make a schedule for 1"),
        (interleaved(1, 2, 2), [0], r"rank 0 of interleaved 1F1B holds the stages \[0, 1\], \[0\] were given"),
        (BROKEN, [0], "broken is not valid: rank 0, action 2: backward of micro-batch 1 before its forward"),
    ],
)
def test_refuses_what_does_not_fit(schedule, stages, message):
    """One line that says what is wrong, before anything is sent."""

    def program():
        inputs = torch.zeros(2, 1, 4)
        modules = {stage: nn.Linear(4, 4) for stage in stages}
        pipeline.run(schedule, modules, inputs, lambda y, i: y.sum(), dist.group.WORLD, inputs[0])

    with pytest.raises(RankFailed, match=message):
        run(program, 1)
