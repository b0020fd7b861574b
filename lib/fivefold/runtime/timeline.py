"""A timeline: who did what from when to when. Neutral ground between what is simulated and what is drawn.

`replay` makes one from a ledger, a pipeline simulation makes one from a schedule, `plots.timeline` draws either, and
Perfetto opens what `save_chrome_trace` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Span:
    """One stretch of time on one rank.

    What the rank itself does has the lane "rank": computation, and the time in which it stands still for a transfer.
    What a link does for the rank has the lane "link": the transfer from its first to its last byte.
    """

    rank: int
    begin: float
    end: float
    kind: str  # F forward, B backward, I input gradient, W weight gradient, "compute" other work, "comm" a transfer
    label: str = ""  # what is written on it: a micro-batch number
    axis: str = ""  # of a transfer: the group it belongs to, such as "tp"
    lane: str = "rank"
    chunk: int = 0  # of a rank that holds several stages: which one
    detail: str = ""  # for the trace: the operation, its bytes, the learner's line

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Timeline:
    """Spans of `num_ranks` ranks, from 0 to `makespan`, in `unit` ("s", or "" for abstract steps)."""

    spans: list[Span] = field(default_factory=list)
    num_ranks: int = 0
    makespan: float = 0.0
    unit: str = "s"

    def busy(self, rank: int) -> float:
        """Time in which `rank` computes."""
        return sum(span.seconds for span in self._own(rank) if span.kind != "comm")

    def exposed(self, rank: int) -> float:
        """Time in which `rank` stands still because a transfer that it needs is under way or waits for its link."""
        return sum(span.seconds for span in self._own(rank) if span.kind == "comm")

    def idle(self, rank: int) -> float:
        """What is left of the makespan: waiting for others, and the time after the rank's own end."""
        return self.makespan - self.busy(rank) - self.exposed(rank)

    def share(self, what: str) -> float:
        """The mean over ranks of "busy", "exposed" or "idle", as a share of the makespan."""
        if what not in ("busy", "exposed", "idle"):
            raise ValueError(f"no share called {what!r}: choose busy, exposed or idle")
        whole = self.makespan * self.num_ranks
        if not whole:
            return 0.0
        own = [span for span in self.spans if span.lane == "rank"]
        exposed = sum(span.seconds for span in own if span.kind == "comm") / whole
        busy = sum(span.seconds for span in own if span.kind != "comm") / whole
        return {"busy": busy, "exposed": exposed, "idle": 1 - busy - exposed}[what]

    def to_chrome_trace(self) -> dict:
        """The timeline in the Trace Event Format: a process for each rank, a thread for it and one for its links.

        Times are microseconds; an abstract step is drawn as a millisecond. (Trace Event Format, "complete events".)
        """
        scale = 1e6 if self.unit == "s" else 1e3
        events = [event for rank in range(self.num_ranks) for event in _names(rank)]
        events += [_event(span, scale) for span in self.spans]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_chrome_trace(self, path: str | Path) -> Path:
        """Write the trace as JSON; open it at https://ui.perfetto.dev or in chrome://tracing."""
        path = Path(path)
        path.write_text(json.dumps(self.to_chrome_trace()), encoding="utf-8")
        return path

    def _own(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank and span.lane == "rank"]


LANES = {"rank": 0, "link": 1}


def _names(rank: int) -> list[dict]:
    titles = {"rank": "computes, or waits for a transfer", "link": "transfers"}
    process = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    threads = [
        {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": titles[lane]}}
        for lane, tid in LANES.items()
    ]
    return [process, *threads]


def _event(span: Span, scale: float) -> dict:
    name = f"{span.kind}{span.label}" if span.kind != "comm" else span.label or span.axis
    return {
        "ph": "X", "pid": span.rank, "tid": LANES[span.lane], "ts": span.begin * scale, "dur": span.seconds * scale,
        "name": name, "cat": span.axis or span.kind, "args": {"detail": span.detail},
    }  # fmt: skip
