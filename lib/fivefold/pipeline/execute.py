"""Run a schedule on real ranks: each does its own list in order, and values travel between them as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.pipeline.actions import Action, Forward, InputGradient, Receive, Schedule, Send, Value, WeightGradient
from fivefold.pipeline.backward import split_backward
from fivefold.pipeline.messages import with_messages
from fivefold.pipeline.values import Values
from fivefold.runtime.ledger import work

Loss = Callable[[Tensor, int], Tensor]


class _Stages:
    """The stages of one rank, and what they keep of each micro-batch from one piece of work to the next."""

    def __init__(
        self, modules: Mapping[int, nn.Module], last: int, inputs: Sequence[Tensor], loss: Loss, values: Values
    ):
        self.modules, self.last, self.inputs, self.loss, self.values = modules, last, inputs, loss, values
        self.graphs: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}  # the input, and where backward begins
        self.owed: dict[tuple[int, int], Callable[[], None]] = {}  # weight gradients
        self.losses: dict[int, Tensor] = {}

    def do(self, step: Action) -> None:
        """One piece of work; the values that it needs are in `values`, and so is what it makes."""
        stage, i = step.stage, step.microbatch
        if isinstance(step, Forward):
            self.forward(stage, i)
        elif isinstance(step, WeightGradient):
            self.owed.pop((stage, i))()
        else:
            self.backward(stage, i, split=isinstance(step, InputGradient))

    def forward(self, stage: int, i: int) -> None:
        x = self.inputs[i] if stage == 0 else self.values.take(Value("activation", stage - 1, i)).requires_grad_()
        y = self.modules[stage](x)
        if stage == self.last:
            y = self.loss(y, i)
            self.losses[i] = y.detach()
        else:
            self.values.put(Value("activation", stage, i), y.detach())
        self.graphs[stage, i] = x, get_gradient_edge(y)  # of the output itself nothing is kept once it is sent

    def backward(self, stage: int, i: int, split: bool) -> None:
        x, end = self.graphs.pop((stage, i))
        grad = None if stage == self.last else self.values.take(Value("gradient", stage + 1, i))
        if split:
            x_grad, self.owed[stage, i] = split_backward(end, x, grad)
        else:
            torch.autograd.backward(end, grad)
            x_grad = x.grad
        if stage > 0:
            self.values.put(Value("gradient", stage, i), x_grad)


def _check(schedule: Schedule, stages: Mapping[int, nn.Module], group: dist.ProcessGroup) -> None:
    if schedule.num_ranks != group.size():
        raise ValueError(
            f"{schedule.name} is for {schedule.num_ranks} ranks, the group has {group.size()}: "
            f"make a schedule for {group.size()}"
        )
    wanted = schedule.stages_of(group.rank())
    if sorted(stages) != wanted:
        raise ValueError(
            f"rank {group.rank()} of {schedule.name} holds the stages {wanted}, {sorted(stages)} were given"
        )


def run(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    inputs: Sequence[Tensor],
    loss: Loss,
    group: dist.ProcessGroup,
    template: Tensor,
) -> dict[int, Tensor]:
    """Forward and backward of all micro-batches through the stages of all ranks of `group`, as `schedule` says.

    schedule: rank r of it is the r-th rank of `group`; without sends and receives in its lists, `with_messages` puts
    them in. stages: this rank's stages, by their number in the model; each takes one tensor and gives one. inputs: the
    micro-batches, used where the first stage is. loss: called where the last stage is, with its output and the number
    of the micro-batch; gives a scalar. template: a tensor of the shape, dtype and device of what goes from stage to
    stage; its numbers do not matter.
    Adds the gradients of the sum of all losses to the `.grad` of this rank's parameters. Returns the losses of the
    micro-batches whose last stage was on this rank, by micro-batch, without their graphs.
    Each rank does its actions strictly in the order of its list, so ranks that share a stage, with the same schedule,
    agree on the order of all communication inside it; each piece of work stands in a `work` block of its letter and
    micro-batch, so that a timeline can name it. Messages are asynchronous; nothing is sent but the values that another
    rank needs, each once. Of a micro-batch is kept what autograd saves, from the forward to the backward, or less from
    the input gradient to the weight gradient: not the outputs.
    Raises ValueError where the schedule is not valid, or not for this group and these stages.
    """
    me = group.rank()
    _check(schedule, stages, group)
    values = Values(group, template)
    mine = _Stages(stages, schedule.num_stages - 1, inputs, loss, values)
    for action in with_messages(schedule).actions[me]:
        if isinstance(action, Receive):
            values.receive(action.value, action.peer)
        elif isinstance(action, Send):
            values.send(action.value, action.peer)
        for step in action.steps:
            values.wait(schedule.needs(step))
        for step in action.steps:
            with work(step.letter, microbatch=step.microbatch, chunk=sorted(stages).index(step.stage)):
                mine.do(step)
    values.sent(range(group.size()))
    return mine.losses
