"""Which layers go to which stage, where layers do not cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def partition_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut the layers into contiguous stages so that the largest stage is as small as it can be.

    costs: what each layer takes, in any unit, 0 or more, first layer first; the embedding and the loss may be layers.
    num_stages: how many stages, each with at least one layer.
    Returns one range of layer indices for each stage, in order. A pipeline is as slow as its slowest stage, so nothing
    but the largest sum counts; any cut that reaches it is right.
    Raises ValueError where there are fewer layers than stages, or no stage.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {num_stages} stages: choose from 1 to {len(costs)}")
    up_to = [0, *accumulate(costs)]  # up_to[k]: the cost of the first k layers

    @cache
    def best(end: int, stages: int) -> tuple[float, int]:
        """The largest stage of the best cut of layers 0..end-1, and where its last stage starts."""
        if stages == 1:
            return up_to[end], 0
        starts = range(stages - 1, end)
        return min((max(best(start, stages - 1)[0], up_to[end] - up_to[start]), start) for start in starts)

    cut, end = [], len(costs)
    for stages in range(num_stages, 0, -1):
        start = best(end, stages)[1]
        cut.insert(0, range(start, end))
        end = start
    return cut
