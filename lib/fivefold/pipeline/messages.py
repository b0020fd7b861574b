"""From a schedule of computation to one with its messages in it."""

from __future__ import annotations

from functools import lru_cache

from fivefold.pipeline.actions import Receive, Schedule, Send
from fivefold.pipeline.validate import validate


@lru_cache(maxsize=32)
def with_messages(schedule: Schedule) -> Schedule:
    """A schedule that can be executed: `schedule` as it is where it holds messages, else what `order_messages` gives.

    Raises InvalidSchedule, a ValueError, where it breaks a rule. What was found out of a schedule is remembered, so
    that training pays for it once and not in each step.
    """
    validate(schedule)
    return schedule if schedule.has_messages else order_messages(schedule)


def order_messages(schedule: Schedule) -> Schedule:
    """Put every send and receive into the lists, so that blocking sends never deadlock, on 2 ranks as on many.

    schedule: lists of computation only.
    Returns a Schedule with the same computation in the same order on each rank, and for each value that another rank
    needs one Send after the action that makes it and one Receive before the action that needs it. From each rank to
    each other rank sends and receives come in the same order, and where a send blocks until its receive is reached all
    ranks still come to their ends.
    The way: go through the schedule in an order in which it could run. Whenever an action is done, write its message at
    that moment into both lists. Of all messages that are left, the one written first can then always happen.
    Raises ValueError where the schedule cannot reach its end.
    """
    lists = [[] for _ in schedule.actions]
    done = [0] * schedule.num_ranks
    there = [set() for _ in schedule.actions]  # the values on each rank

    def can_start(rank: int) -> bool:
        if done[rank] == len(schedule.actions[rank]):
            return False
        return all(there[rank].issuperset(schedule.needs(step)) for step in schedule.actions[rank][done[rank]].steps)

    while ready := [rank for rank in range(schedule.num_ranks) if can_start(rank)]:
        actions = [schedule.actions[rank][done[rank]] for rank in ready]
        for rank, action in zip(ready, actions, strict=True):
            lists[rank].append(action)
            done[rank] += 1
        for rank, action in zip(ready, actions, strict=True):
            for value in filter(None, map(schedule.makes, action.steps)):
                there[rank].add(value)
                peer = schedule.receiver(value)
                if peer is not None:
                    lists[rank].append(Send(value, peer))
                    lists[peer].append(Receive(value, rank))
                    there[peer].add(value)
    if done != [len(actions) for actions in schedule.actions]:
        raise ValueError(f"{schedule.name} cannot reach its end, so its messages have no order: find_faults tells why")
    return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)
