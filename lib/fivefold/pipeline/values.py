"""The values on one rank of a pipeline: those that it made, and those that come from other ranks and go to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.pipeline.actions import Value


class Values:
    """Activations and gradients on one rank, by `Value`, from when they are made or asked for until they are used.

    Messages are asynchronous: a rank computes while they travel, and waits for one where it needs it. One at a time is
    under way to each other rank: the next send waits until it has been received, so that a fast rank does not pile up
    what a slow one has no room for. That is less waiting than with blocking sends, so what holds for the order of those
    holds here.
    """

    def __init__(self, group: dist.ProcessGroup, template: Tensor):
        """group: the ranks of the pipeline, by their places in it. template: a tensor like each of the values."""
        self.group, self.template = group, template
        self.here: dict[Value, Tensor] = {}
        self.arriving: dict[Value, dist.Work] = {}
        self.leaving: dict[int, dist.Work] = {}  # by the rank that they go to

    def put(self, value: Value, tensor: Tensor) -> None:
        self.here[value] = tensor

    def take(self, value: Value) -> Tensor:
        """The tensor, which is no longer kept here then; waits until it has arrived."""
        self.wait([value])
        return self.here.pop(value)

    def receive(self, value: Value, peer: int) -> None:
        """Start to receive it from the rank `peer`."""
        self.here[value] = torch.empty_like(self.template)
        self.arriving[value] = dist.irecv(self.here[value], group=self.group, group_src=peer)

    def send(self, value: Value, peer: int) -> None:
        """Start to send it to the rank `peer`, once that has received the one before; it is no longer kept here."""
        tensor = self.take(value).contiguous()
        self.sent([peer])
        self.leaving[peer] = dist.isend(tensor, group=self.group, group_dst=peer)

    def wait(self, values: Iterable[Value]) -> None:
        """Wait for those of these values that are on their way here."""
        for value in values:
            if value in self.arriving:
                self.arriving.pop(value).wait()

    def sent(self, peers: Iterable[int]) -> None:
        """Wait until these ranks have received what is on its way to them."""
        for peer in peers:
            if peer in self.leaving:
                self.leaving.pop(peer).wait()
