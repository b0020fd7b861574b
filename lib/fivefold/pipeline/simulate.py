"""Run a schedule on paper: when each action starts and ends, how long ranks stand idle, what they keep in memory.

Times are in any unit; the same numbers come out on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.pipeline.actions import (
    Action,
    AnyAction,
    Backward,
    Forward,
    InputGradient,
    Overlapped,
    Receive,
    Schedule,
    Send,
    Value,
    WeightGradient,
)


@dataclass(frozen=True)
class Durations:
    """How long actions take: one number for all stages, or a number for each stage.

    A whole backward takes input_gradient + weight_gradient. `overlapped` is the time of DualPipe's pair, the sum of its
    two parts where None. `communication` is the time from the end of an action to its value's arrival at another rank.
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    communication: float = 0.0
    overlapped: float | None = None

    def check(self, num_stages: int) -> None:
        """Raise ValueError where durations are given for another number of stages."""
        for durations in (self.forward, self.input_gradient, self.weight_gradient):
            if isinstance(durations, Sequence) and len(durations) != num_stages:
                raise ValueError(
                    f"durations of {len(durations)} stages for a schedule of {num_stages}: give {num_stages}"
                )

    def of(self, action: AnyAction) -> float:
        """The time that one action takes."""
        if isinstance(action, Send | Receive):
            return self.communication
        if isinstance(action, Overlapped) and self.overlapped is not None:
            return self.overlapped
        return sum(self._of_step(step) for step in action.steps)

    def _of_step(self, step: Action) -> float:
        forward, inputs, weights = (
            duration[step.stage] if isinstance(duration, Sequence) else duration
            for duration in (self.forward, self.input_gradient, self.weight_gradient)
        )
        return {Forward: forward, InputGradient: inputs, WeightGradient: weights, Backward: inputs + weights}[
            type(step)
        ]


@dataclass(frozen=True)
class Event:
    """One action's place in time; `index` counts a rank's actions from 0."""

    rank: int
    index: int
    action: AnyAction
    start: float
    end: float
    iteration: int = 0


@dataclass(frozen=True)
class Simulation:
    """What happened. Where the schedule cannot reach its end, `waiting` says which action each stopped rank is at."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # by rank, in order
    waiting: dict[int, int] = field(default_factory=dict)  # rank -> index of the action that cannot start

    @property
    def makespan(self) -> float:
        """From time 0 to the end of the last action of all."""
        return max((events[-1].end for events in self.events if events), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Each rank's time in computation."""
        return tuple(sum(e.end - e.start for e in events if e.action.steps) for events in self.events)

    @property
    def idle_by_makespan(self) -> tuple[float, ...]:
        """Each rank's idle time in the whole iteration: the time lost where every iteration ends with a flush."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle_in_window(self) -> tuple[float, ...]:
        """Each rank's idle time between the start of its own first action and the end of its own last one."""
        windows = (events[-1].end - events[0].start if events else 0.0 for events in self.events)
        return tuple(window - busy for window, busy in zip(windows, self.busy, strict=True))

    def memory(self, rank: int, m_b: float = 1.0, m_w: float = 1.0) -> list[tuple[float, float]]:
        """A rank's memory curve: pairs (time, amount), the amount holding from that time on.

        m_b: what one stage keeps of one micro-batch from its forward to its (input) gradient.
        m_w: what it keeps from the input gradient to the weight gradient.
        """
        curve, amount = [(0.0, 0.0)], 0.0
        for event in self.events[rank]:
            for step in event.action.steps:
                if isinstance(step, Forward):
                    amount += m_b
                    curve.append((event.start, amount))
            for step in event.action.steps:
                amount -= {Forward: 0.0, Backward: m_b, InputGradient: m_b - m_w, WeightGradient: m_w}[type(step)]
            if curve[-1][1] != amount:
                curve.append((event.end, amount))
        return curve

    def peak_memory(self, m_b: float = 1.0, m_w: float = 1.0) -> tuple[float, ...]:
        """Each rank's largest amount; with m_b and m_w 1, the live activations from forward to weight gradient."""
        return tuple(max(amount for _, amount in self.memory(r, m_b, m_w)) for r in range(len(self.events)))


def simulate(schedule: Schedule, durations: Durations | None = None, iterations: int = 1) -> Simulation:
    """Time a schedule: every rank does its actions in order, each as soon as the values that it needs are there.

    Without Send and Receive in the lists a value travels by itself and blocks nobody. With them, a send and its receive
    start together, when both ranks have come to them.
    durations: unit times where None. iterations: runs the lists so many times, with no flush in between.
    A schedule that cannot reach its end is run as far as it goes; the result then has `waiting`.
    Raises ValueError where durations do not fit the number of stages.
    """
    durations = durations or Durations()
    durations.check(schedule.num_stages)
    run = _Run(schedule, durations, iterations)
    while any([run.advance(rank) for rank in range(schedule.num_ranks)]):
        pass
    waiting = {r: k % len(schedule.actions[r]) for r, k in enumerate(run.position) if k < run.length(r)}
    return Simulation(schedule, tuple(map(tuple, run.events)), waiting)


def marginal_idle(schedule: Schedule, durations: Durations | None = None) -> tuple[float, ...]:
    """Each rank's idle time in one more iteration, where iterations follow each other with no flush.

    schedule: lists of any kind. durations: unit times where None; the idle time is in their unit.
    Returns a number for each rank: by how much the end of all is later with one iteration more, less what the rank
    works in it. Where every rank is busy from one iteration to the next, it is 0.
    Raises ValueError where the schedule cannot reach its end.
    """
    few = 2 * schedule.num_ranks  # by then the start-up has died away
    run = simulate(schedule, durations, few + 1)
    if run.waiting:
        raise ValueError(f"{schedule.name} cannot reach its end: find_faults tells why")
    before = max(event.end for events in run.events for event in events if event.iteration < few)
    return tuple(run.makespan - before - busy / (few + 1) for busy in run.busy)


class _Run:
    """The state of a simulation: where each rank is, and when each value is on it."""

    def __init__(self, schedule: Schedule, durations: Durations, iterations: int) -> None:
        self.schedule, self.durations, self.iterations = schedule, durations, iterations
        self.travels = not schedule.has_messages
        self.position = [0] * schedule.num_ranks
        self.clock = [0.0] * schedule.num_ranks
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self.arrived: list[dict[tuple[int, Value], float]] = [{} for _ in schedule.actions]

    def length(self, rank: int) -> int:
        return len(self.schedule.actions[rank]) * self.iterations

    def head(self, rank: int) -> AnyAction | None:
        """The action that the rank has come to."""
        actions = self.schedule.actions[rank]
        return actions[self.position[rank] % len(actions)] if self.position[rank] < self.length(rank) else None

    def advance(self, rank: int) -> bool:
        """Do what this rank can do now, in order; False where that is nothing."""
        before = self.position[rank]
        while (action := self.head(rank)) is not None:
            done = self.meet(rank, action) if isinstance(action, Send | Receive) else self.compute(rank, action)
            if not done:
                break
        return self.position[rank] > before

    def iteration(self, rank: int) -> int:
        return self.position[rank] // len(self.schedule.actions[rank])

    def compute(self, rank: int, action: AnyAction) -> bool:
        if not self.schedule.holds(rank, action):
            return False
        iteration, arrived = self.iteration(rank), self.arrived[rank]
        needed = [(iteration, value) for step in action.steps for value in self.schedule.needs(step)]
        if not all(key in arrived for key in needed):
            return False
        start = max([self.clock[rank], *(arrived[key] for key in needed)])
        self.record(rank, action, start)
        for step in action.steps:
            self.deliver(rank, iteration, self.schedule.makes(step))
        return True

    def deliver(self, rank: int, iteration: int, value: Value | None) -> None:
        if value is None:
            return
        self.arrived[rank][iteration, value] = self.clock[rank]
        peer = self.schedule.receiver(value) if self.travels else None
        if peer is not None:
            self.arrived[peer][iteration, value] = self.clock[rank] + self.durations.communication

    def meet(self, rank: int, action: Send | Receive) -> bool:
        """A send and its receive happen at once, or not yet."""
        other = Receive(action.value, rank) if isinstance(action, Send) else Send(action.value, rank)
        if not 0 <= action.peer < len(self.clock) or action.peer == rank or self.head(action.peer) != other:
            return False
        source, target = (rank, action.peer) if isinstance(action, Send) else (action.peer, rank)
        iteration = self.iteration(source)
        if (iteration, action.value) not in self.arrived[source]:
            return False
        start = max(self.clock[rank], self.clock[action.peer])
        self.record(rank, action, start)
        self.record(action.peer, other, start)
        self.arrived[target][iteration, action.value] = self.clock[target]
        return True

    def record(self, rank: int, action: AnyAction, start: float) -> None:
        end = start + self.durations.of(action)
        index, iteration = self.position[rank] % len(self.schedule.actions[rank]), self.iteration(rank)
        self.events[rank].append(Event(rank, index, action, start, end, iteration))
        self.clock[rank] = end
        self.position[rank] += 1
