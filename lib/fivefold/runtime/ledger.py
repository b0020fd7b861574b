"""The ledger: the record of one run, rank by rank, in program order.

A rank's ledger is a list of entries in the order in which its program made them: a `Communication` for each call of
`torch.distributed`, a `Wait` where the program waited for an asynchronous one, and, where the run was measured, a
`Computation` for the work between two calls. Everything here is plain data; who writes it down is `group` and `meter`,
who times it on other machines is `replay`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from fivefold.runtime.marks import keep as keep  # what a program says of itself goes to the ledger: `ledger.phase`
from fivefold.runtime.marks import phase as phase
from fivefold.runtime.marks import work as work
from fivefold.runtime.traffic import Traffic


@dataclass(slots=True)
class Communication:
    """One call of `torch.distributed` on one rank.

    `bytes` is the size of what this rank hands in: the whole tensor for an all-reduce, a broadcast, a send; its own
    shard for an all-gather; the whole input, all n pieces, for a reduce-scatter and an all-to-all; 0 for a receive.
    """

    index: int  # position among this rank's entries
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, …
    group: str  # name of the group: "world", or the name it was given
    ranks: tuple[int, ...]  # global ranks of the group, in the group's order
    sequence: int  # collectives: its number in the group; messages: its number among those of this pair and tag
    bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    peer: int | None = None  # global rank: the other end of a message, the root of a rooted collective
    tag: int = 0
    splits: tuple[int, ...] = ()  # all-to-all: bytes for each rank of the group; empty elsewhere
    own: int = 0  # all-to-all: the bytes of `splits` that stay on this rank
    asynchronous: bool = False  # the call returned before the operation had ended
    backward: bool = False  # called while autograd ran backward
    phase: str = ""
    line: str = ""  # where in the learner's program, "cell [12] line 4: dist.send(x, dst=right)"
    begin: float = 0.0  # seconds since the run began
    end: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that leave this rank, with ring algorithms: see `sent_bytes`."""
        return sent_bytes(self)


@dataclass(slots=True)
class Wait:
    """The program waited here until the asynchronous communication at `of` had ended."""

    index: int
    of: int  # index of the Communication
    begin: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class Computation:
    """Work between two communications."""

    index: int
    flops: int = 0
    bytes: int = 0  # bytes read and written by the counted operators, 0 where not measured
    seconds: float = 0.0  # as measured on this machine
    phase: str = ""
    backward: bool = False
    label: str = ""  # what a timeline writes on it, such as a micro-batch number
    kind: str = ""  # "F", "B", "I", "W" where the program said so, else ""
    block: int = 0  # the `work` block it belongs to, from 1; 0 outside one


@dataclass(slots=True)
class Saved:
    """Tensors kept for backward at the moment of the peak, by the line that made them."""

    line: str
    bytes: int
    count: int


@dataclass(slots=True)
class Memory:
    """Bytes that one rank kept."""

    peak_saved: int = 0  # peak of bytes saved for backward
    saved_at_peak: list[Saved] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    phases: dict[str, int] = field(default_factory=dict)  # peak of bytes saved for backward, by phase
    timeline: list[tuple[int, int]] = field(default_factory=list)  # (index of entry, bytes saved for backward)


@dataclass(slots=True)
class RankLedger:
    rank: int
    entries: list[Communication | Wait | Computation] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)

    @property
    def communications(self) -> list[Communication]:
        return [entry for entry in self.entries if isinstance(entry, Communication)]

    @property
    def flops(self) -> int:
        return sum(entry.flops for entry in self.entries if isinstance(entry, Computation))

    def to_dict(self) -> dict:
        entries = [{"kind_of_entry": type(entry).__name__, **asdict(entry)} for entry in self.entries]
        return {"rank": self.rank, "entries": entries, "memory": asdict(self.memory)}

    @classmethod
    def from_dict(cls, data: dict) -> RankLedger:
        entries = [_entry(dict(item)) for item in data["entries"]]
        memory = dict(data["memory"])
        memory["saved_at_peak"] = [Saved(**item) for item in memory["saved_at_peak"]]
        memory["timeline"] = [tuple(item) for item in memory["timeline"]]
        return cls(data["rank"], entries, Memory(**memory))


@dataclass(slots=True, repr=False)
class Ledger:
    """What every rank of one run sent, received, waited for, computed and kept in memory."""

    ranks: list[RankLedger] = field(default_factory=list)

    def __repr__(self) -> str:
        calls = sum(len(rank.communications) for rank in self.ranks)
        return f"<ledger of {len(self.ranks)} ranks, {calls} calls; print(ledger.traffic()) shows them>"

    def traffic(self) -> Traffic:
        """The table of operations and bytes, by operation and group."""
        return Traffic.of(self)

    def __getitem__(self, rank: int) -> RankLedger:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)


def sent_bytes(call: Communication) -> float:
    """Bytes that leave one rank of n, for M bytes handed in, with ring algorithms (Thakur et al. 2005).

    all-reduce 2(n-1)/n·M; reduce-scatter (n-1)/n·M; all-gather (n-1)·M, M being one shard; all-to-all what is meant for
    others; a message M. Rooted ones: broadcast, gather and reduce (n-1)/n·M as the mean over ranks; scatter the same of
    the root's whole input.
    """
    n, m = len(call.ranks), call.bytes
    if call.op == "all_reduce":
        return 2 * (n - 1) / n * m
    if call.op == "all_gather":
        return (n - 1) * m
    if call.op == "all_to_all":
        return m - call.own
    if call.op == "send":
        return m
    if call.op in ("recv", "barrier"):
        return 0
    return (n - 1) / n * m


def _entry(data: dict) -> Communication | Wait | Computation:
    kind = {"Communication": Communication, "Wait": Wait, "Computation": Computation}[data.pop("kind_of_entry")]
    for name in ("ranks", "shape", "splits"):
        if name in data:
            data[name] = tuple(data[name])
    return kind(**data)
