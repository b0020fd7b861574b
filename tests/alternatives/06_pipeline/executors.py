"""Right solutions of lesson 06 that run a schedule in another way than the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.pipeline import (
    Forward,
    InputGradient,
    Receive,
    Send,
    Value,
    WeightGradient,
    find_faults,
    order_messages,
    split_backward,
)
from fivefold.runtime.ledger import work


def _refuse(schedule, stages, group):
    faults = find_faults(schedule)
    if faults:
        raise ValueError(str(faults[0]))
    if schedule.num_ranks != group.size() or set(stages) != set(schedule.stages_of(group.rank())):
        raise ValueError("another group or other stages")


class _Work:
    """What a rank does with its stages; where values come from and go to is the caller's."""

    def __init__(self, schedule, stages, inputs, loss):
        self.schedule, self.stages, self.inputs, self.loss = schedule, stages, inputs, loss
        self.kept, self.later, self.losses, self.here = {}, {}, {}, {}

    def do(self, step):
        stage, i = step.stage, step.microbatch
        with work(step.letter, microbatch=i):
            if isinstance(step, Forward):
                self.forward(stage, i)
            elif isinstance(step, WeightGradient):
                self.later.pop((stage, i))()
            else:
                self.backward(step, stage, i)

    def forward(self, stage, i):
        x = self.inputs[i] if stage == 0 else self.here.pop(Value("activation", stage - 1, i))
        if stage:
            x.requires_grad_(True)
        y = self.stages[stage](x)
        if stage == self.schedule.num_stages - 1:
            y = self.loss(y, i)
            self.losses[i] = y.detach().clone()
        self.kept[stage, i] = (x, y)
        self.here[Value("activation", stage, i)] = y.detach()

    def backward(self, step, stage, i):
        x, y = self.kept.pop((stage, i))
        grad = self.here.pop(Value("gradient", stage + 1, i)) if stage < self.schedule.num_stages - 1 else None
        if isinstance(step, InputGradient):
            x_grad, self.later[stage, i] = split_backward(y, x, grad)
        else:
            y.backward(grad)
            x_grad = x.grad
        if stage:
            self.here[Value("gradient", stage, i)] = x_grad


def run__blocking(schedule, stages, inputs, loss, group, template):
    """Sends and receives that block, in the order of the lists."""
    _refuse(schedule, stages, group)
    if not schedule.has_messages:
        schedule = order_messages(schedule)
    mine = _Work(schedule, stages, inputs, loss)
    for action in schedule.actions[group.rank()]:
        if isinstance(action, Send):
            dist.send(mine.here.pop(action.value).contiguous(), group=group, group_dst=action.peer)
        elif isinstance(action, Receive):
            mine.here[action.value] = torch.zeros_like(template)
            dist.recv(mine.here[action.value], group=group, group_src=action.peer)
        for step in action.steps:
            mine.do(step)
    return mine.losses


def run__tags(schedule, stages, inputs, loss, group, template):
    """No order of messages: each has a tag, is sent when it is made, and received when it is needed."""
    _refuse(schedule, stages, group)
    me, mine, leaving = group.rank(), _Work(schedule, stages, inputs, loss), []

    def tag(value):
        return (value.microbatch * schedule.num_stages + value.stage) * 2 + (value.kind == "gradient") + 1

    for action in schedule.actions[me]:
        for step in action.steps:
            for value in schedule.needs(step):
                source = schedule.rank_of(value.stage, value.microbatch)
                if source != me:
                    mine.here[value] = torch.empty_like(template)
                    dist.recv(mine.here[value], group=group, group_src=source, tag=tag(value))
        for step in action.steps:
            mine.do(step)
            value = schedule.makes(step)
            peer = None if value is None else schedule.receiver(value)
            if peer is not None:
                tensor = mine.here.pop(value).contiguous()
                leaving.append((tensor, dist.isend(tensor, group=group, group_dst=peer, tag=tag(value))))
    for _, message in leaving:
        message.wait()
    return mine.losses


class Values__at_once:  # noqa: N801
    """Every message is waited for where it begins."""

    def __init__(self, group, template):
        self.group, self.template, self.tensors = group, template, {}

    def put(self, value, tensor):
        self.tensors[value] = tensor

    def take(self, value):
        return self.tensors.pop(value)

    def receive(self, value, peer):
        tensor = torch.zeros_like(self.template)
        dist.recv(tensor, group=self.group, group_src=peer)
        self.tensors[value] = tensor

    def send(self, value, peer):
        dist.send(self.tensors.pop(value).contiguous(), group=self.group, group_dst=peer)

    def wait(self, values):
        pass

    def sent(self, peers):
        pass


class Values__pairs:  # noqa: N801
    """A tensor and its message stand together; new memory for each comes from a clone."""

    def __init__(self, group, template):
        self.group, self.template = group, template
        self.known, self.out = {}, {}

    def put(self, value, tensor):
        self.known[value] = (tensor, None)

    def take(self, value):
        self.wait([value])
        return self.known.pop(value)[0]

    def receive(self, value, peer):
        room = self.template.clone()
        self.known[value] = (room, dist.irecv(room, group=self.group, group_src=peer))

    def send(self, value, peer):
        self.sent([peer])
        tensor = self.take(value).contiguous()
        self.out[peer] = (tensor, dist.isend(tensor, group=self.group, group_dst=peer))

    def wait(self, values):
        for value in values:
            tensor, message = self.known.get(value, (None, None))
            if message is not None:
                message.wait()
                self.known[value] = (tensor, None)

    def sent(self, peers):
        for peer in peers:
            if peer in self.out:
                self.out.pop(peer)[1].wait()
