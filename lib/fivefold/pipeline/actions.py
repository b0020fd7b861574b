"""What one rank does in a pipeline, as small dataclasses, and the `Schedule` that holds every rank's list.

A schedule runs nothing. It is data: it can be printed, compared, simulated, drawn, and executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class Value(NamedTuple):
    """A tensor that one action makes and a later one needs: the activation or the gradient that leaves a stage."""

    kind: str  # "activation" goes to stage + 1, "gradient" to stage - 1
    stage: int  # the stage that made it
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Action:
    """One stage's work on one micro-batch; `stage` counts over the whole model, from its first layers."""

    stage: int
    microbatch: int
    letter: ClassVar[str] = "?"
    title: ClassVar[str] = "action"

    @property
    def steps(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


class Forward(Action):
    """Runs the stage on one micro-batch and keeps what its backward needs; waits for the activation before it."""

    letter, title = "F", "forward"


class Backward(Action):
    """Runs the whole backward, input and weights; waits for the gradient from the stage after it."""

    letter, title = "B", "backward"


class InputGradient(Action):
    """Runs the half of the backward that the stage before waits for; waits for the gradient from the stage after."""

    letter, title = "I", "input gradient"


class WeightGradient(Action):
    """Runs the other half, which no other rank waits for; never waits."""

    letter, title = "W", "weight gradient"


@dataclass(frozen=True)
class Overlapped:
    """Runs the forward of one micro-batch and the backward of another as one piece of work; waits for both inputs."""

    forward: Forward
    backward: Backward

    @property
    def steps(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


@dataclass(frozen=True)
class Send:
    """Hands a value to the rank `peer`; blocks until that rank receives it."""

    value: Value
    peer: int
    steps: ClassVar[tuple[Action, ...]] = ()

    def __str__(self) -> str:
        return f"{self.value.stage}{self.value.kind[0]}{self.value.microbatch}>{self.peer}"


@dataclass(frozen=True)
class Receive:
    """Takes a value from the rank `peer`; blocks until that rank sends it."""

    value: Value
    peer: int
    steps: ClassVar[tuple[Action, ...]] = ()

    def __str__(self) -> str:
        return f"{self.value.stage}{self.value.kind[0]}{self.value.microbatch}<{self.peer}"


AnyAction = Action | Overlapped | Send | Receive
KINDS = (Forward, Backward, InputGradient, WeightGradient)


def is_computation(action: object) -> bool:
    """Whether this is one of the four kinds of work, or a forward and a backward overlapped."""
    if isinstance(action, Overlapped):
        return type(action.forward) is Forward and type(action.backward) in (Backward, InputGradient)
    return type(action) in KINDS


@dataclass(frozen=True)
class Schedule:
    """Every rank's list of actions, and where the stages live.

    `routes` holds, for each way through the pipeline, the rank of every stage. Most schedules have one route.
    With two, the first half of the micro-batches takes routes[0] and the second half routes[1].
    """

    name: str = field(compare=False)
    num_microbatches: int
    routes: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[AnyAction, ...], ...]  # by rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "routes", tuple(tuple(route) for route in self.routes))
        object.__setattr__(self, "actions", tuple(tuple(actions) for actions in self.actions))
        if self.num_microbatches < 1:
            raise ValueError(f"a pipeline needs at least 1 micro-batch, {self.num_microbatches} were given")
        if not self.actions:
            raise ValueError("a pipeline needs at least 1 rank, 0 were given")
        used = 1 + max((rank for route in self.routes for rank in route), default=-1)
        if len(self.actions) != used:
            raise ValueError(f"the stages are on {used} ranks, but there are lists for {len(self.actions)}")

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives stand in the lists; without them a value travels by itself."""
        return any(isinstance(action, Send | Receive) for actions in self.actions for action in actions)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.routes[0])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank on which this stage treats this micro-batch."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches][stage]

    def stages_of(self, rank: int) -> list[int]:
        """The stages whose parameters this rank holds, in the order of the model."""
        return [s for s in range(self.num_stages) if any(route[s] == rank for route in self.routes)]

    def ranks_of(self, stage: int) -> list[int]:
        """The ranks that hold a copy of this stage's parameters: one, or two where there are two routes."""
        return sorted({route[stage] for route in self.routes})

    def holds(self, rank: int, action: object) -> bool:
        """Whether this is computation on stages and micro-batches that exist and are on this rank."""
        return is_computation(action) and all(
            step.stage in range(self.num_stages)
            and step.microbatch in range(self.num_microbatches)
            and self.rank_of(step.stage, step.microbatch) == rank
            for step in action.steps
        )

    def needs(self, step: Action) -> list[Value]:
        """The values that must be on the rank before this step can start."""
        stage, i = step.stage, step.microbatch
        if isinstance(step, Forward):
            return [Value("activation", stage - 1, i)] if stage > 0 else []
        if isinstance(step, WeightGradient):
            return [Value("gradient", stage, i)]
        from_above = [Value("gradient", stage + 1, i)] if stage + 1 < self.num_stages else []
        return [Value("activation", stage, i), *from_above]

    def makes(self, step: Action) -> Value | None:
        """The value that exists when this step is done; a weight gradient makes none."""
        if isinstance(step, WeightGradient):
            return None
        return Value("activation" if isinstance(step, Forward) else "gradient", step.stage, step.microbatch)

    def receiver(self, value: Value) -> int | None:
        """The other rank that needs this value, or None where it stays on the rank that made it."""
        stage = value.stage + (1 if value.kind == "activation" else -1)
        if not 0 <= stage < self.num_stages:
            return None
        peer = self.rank_of(stage, value.microbatch)
        return None if peer == self.rank_of(value.stage, value.microbatch) else peer

    def to_csv(self) -> str:
        """The lists in the form that torch's `_PipelineScheduleRuntime._load_csv` reads, one line a rank."""
        return "\n".join(",".join(_torch_name(action) for action in actions) for actions in self.actions) + "\n"

    def __str__(self) -> str:
        head = f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches"
        return "\n".join([head] + [f"rank {r}  " + " ".join(map(str, a)) for r, a in enumerate(self.actions)])


def _torch_name(action: AnyAction) -> str:
    if isinstance(action, Overlapped):
        return f"({action.forward};{action.backward})OVERLAP_F_B"
    return str(action)


def straight(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """One stage a rank: stage s is on rank s."""
    return (tuple(range(num_ranks)),)


def looped(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """`num_chunks` stages a rank, dealt out in turn: stage s is on rank s mod p. ValueError below 1 of either."""
    if num_ranks < 1 or num_chunks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank and 1 chunk, {num_ranks} and {num_chunks} were given")
    return (tuple(range(num_ranks)) * num_chunks,)


def v_shaped(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Two stages a rank, down and up again: rank r has the stages r and 2p-1-r."""
    return (tuple(range(num_ranks)) + tuple(reversed(range(num_ranks))),)


def both_ways(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Two copies of the model, in opposite directions: rank r has stage r of one and stage p-1-r of the other."""
    return (tuple(range(num_ranks)), tuple(reversed(range(num_ranks))))


def in_order(words: Iterable[str], stages: Sequence[int], first: Sequence[int] | None = None) -> list[AnyAction]:
    """Turn one rank's list in the papers' notation into actions, micro-batches in order.

    words: "F0" is a forward of the stage stages[0] on the next micro-batch that it has not seen, "B0" the next whole
    backward, "I0" the next input gradient, "W0" the oldest weight gradient still owed; "W" the oldest of any stage.
    "F0&B1" is the overlapped pair. Where the rank has one stage the digit may be left out.
    first: the micro-batch that each of `stages` begins with, 0 where not given.
    Raises ValueError for a "W" with no input gradient before it.
    """
    kinds = {kind.letter: kind for kind in (Forward, Backward, InputGradient)}
    count = {(way, stage): i for way in "FB" for stage, i in zip(stages, first or [0] * len(stages), strict=True)}
    owed: list[InputGradient] = []

    def next_action(word: str) -> Action:
        if word[0] == "W":
            return _pay(owed, word, {stages[int(word[1:])]} if word[1:] else set(stages))
        stage, way = stages[int(word[1:] or 0)], "F" if word[0] == "F" else "B"
        action = kinds[word[0]](stage, count[way, stage])
        count[way, stage] += 1
        if isinstance(action, InputGradient):
            owed.append(action)
        return action

    return [Overlapped(*map(next_action, word.split("&"))) if "&" in word else next_action(word) for word in words]


def _pay(owed: list[InputGradient], word: str, stages: set[int]) -> WeightGradient:
    oldest = next((action for action in owed if action.stage in stages), None)
    if oldest is None:
        raise ValueError(f"{word} has no input gradient before it: put the I of its micro-batch first")
    owed.remove(oldest)
    return WeightGradient(oldest.stage, oldest.microbatch)
