"""Try solutions on cases: ship them to ranks, run them, and bring back outcomes, ledgers and failures.

Cases with the same number of ranks share one run, because starting ranks is most of the time that a check takes. Where
such a run fails, its cases are run again one by one, so that a failure belongs to the case that caused it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fivefold.runtime.errors import RankFailed, RunError
from fivefold.runtime.ledger import Ledger, RankLedger, Wait
from fivefold.runtime.parts import Source
from fivefold.runtime.pickling import dumps
from fivefold.runtime.ranks import run

from autograde.discover import lessons
from autograde.library import copies, definition, library_source
from autograde.rank import Answer, Sent, work
from autograde.verdict import Finding

if TYPE_CHECKING:
    from autograde.check import Check

Job = tuple[int, Any]  # index of the solution, case


@dataclass
class Trial:
    """One solution on one case: what every rank returned and the ledger, or the error that ended the run."""

    solution: int
    case: Any
    outcomes: list[Any] | None = None
    ledger: Ledger | None = None
    error: RunError | None = None
    printed: str = ""
    level: str = "visible"
    findings: list[Finding] = field(default_factory=list)

    @property
    def unsolved(self) -> bool:
        """The stub was called: the learner's, whose error says nothing, or the library's."""
        error = self.error
        stubbed = isinstance(error, RankFailed) and error.kind == "NotImplementedError"
        return stubbed and (not error.message or error.message.endswith(" is yours to write"))


def attempt(
    check: Check, solutions: Sequence[Sent], jobs: Sequence[Job], skip: Callable[[Any], bool] = lambda case: False
) -> Iterator[Trial]:
    """Run each job; a case for which `skip` has become true is left out. Ends after the first unsolved stub."""
    for group in _groups(check, jobs):
        group = [job for job in group if not skip(job[1])]
        if not group:
            continue
        trials = _run(check, solutions, group)
        if trials[0].error is not None and len(group) > 1 and not trials[0].unsolved:
            trials = (_run(check, solutions, [job])[0] for job in group if not skip(job[1]))
        for trial in trials:
            yield trial
            if trial.unsolved:
                return


def ship(exercise: str, solution: Any, library: dict[str, Any]) -> Sent:
    """Make a solution ready to travel, with the library's version in the place of each object in `library`.

    Raises TypeError, with a line that says why, for what cannot be a solution.
    """
    if isinstance(solution, Source):
        return Sent(solution, tuple(library))
    if not callable(solution):
        raise TypeError(f"{type(solution).__name__} is neither a function nor a class: give your {exercise}")
    try:
        return Sent(dumps(solution, {id(item): name for name, item in library.items()}))
    except Exception as error:
        raise TypeError(f"it cannot be sent to the ranks: {error}") from None


def other_exercises(exercise: str, solution: Any) -> dict[str, Any]:
    """The learner's own versions of this lesson's other exercises that the solution uses, by exercise id."""
    lesson = lessons().get(exercise)
    ids = [other for other, its in lessons().items() if its == lesson and other != exercise and not other[:1].isdigit()]
    if isinstance(solution, Source):
        return {} if solution == library_source(exercise) else _in_text(solution, ids)
    if not callable(solution):
        return {}
    module = sys.modules.get(getattr(solution, "__module__", ""))
    own = {other: vars(module or sys).get(other.rpartition(".")[2]) for other in ids}
    found = {o: item for o, item in own.items() if callable(item) and not _is_librarys(item) and item is not solution}
    plain = ship(exercise, solution, {}).body if found else b""
    return {other: item for other, item in found.items() if ship(exercise, solution, {other: item}).body != plain}


def _groups(check: Check, jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that can share a run. Memory is measured for a whole run, so measured ones run alone."""
    if check.measure:
        return [[job] for job in jobs]
    sizes = dict.fromkeys(job[1].world_size for job in jobs)
    return [[job for job in jobs if job[1].world_size == size] for size in sizes]


def _run(check: Check, solutions: Sequence[Sent], jobs: list[Job]) -> list[Trial]:
    """All jobs in one run; where it fails, one trial that holds the error."""
    where = definition(check.exercise)
    answer = Answer(check.exercise, where.helpers, str(where.path), copies())
    used = sorted({index for index, _ in jobs})  # ranks are not shown solutions that are not theirs to run
    sent, jobs_there = [solutions[index] for index in used], [(used.index(index), case) for index, case in jobs]
    plan = dumps((type(check).program, jobs_there))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            done = run(
                work, jobs[0][1].world_size, answer, plan, sent,
                timeout=check.timeout, parts={check.exercise: None}, measure=check.measure,
            )  # fmt: skip
    except RunError as error:
        return [Trial(*jobs[0], error=error, printed=printed.getvalue())]
    trials = []
    for number, (index, case) in enumerate(jobs):
        mine = [result[number] for result in done.results]
        ledger = done.ledger if len(jobs) == 1 else _part(done.ledger, mine)
        trials.append(Trial(index, case, [one["outcome"] for one in mine], ledger, printed=printed.getvalue()))
    return trials


def _part(ledger: Ledger, spans: list[dict]) -> Ledger:
    """The entries of one job, counted from 0."""
    ranks = []
    for rank, span in zip(ledger.ranks, spans, strict=True):
        first, entries = span["first"], []
        for entry in rank.entries[first : span["end"]]:
            moved = {"index": entry.index - first} | ({"of": entry.of - first} if isinstance(entry, Wait) else {})
            entries.append(replace(entry, **moved))
        ranks.append(RankLedger(rank.rank, entries, rank.memory))
    return Ledger(ranks)


def _is_librarys(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).partition(".")[0] == "fivefold"


def _in_text(solution: Source, ids: Sequence[str]) -> dict[str, Any]:
    """Of the exercises `ids`, those that the cells define and that the solution uses, itself or through others."""
    nodes = []
    for _, code in solution.cells:
        with contextlib.suppress(SyntaxError, ValueError):
            nodes += ast.parse(code).body
    defined = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used, new = set(), {solution.name}
    while new:
        used |= new
        parts = [part for name in new if name in defined for part in ast.walk(defined[name])]
        new = {part.id for part in parts if isinstance(part, ast.Name)} - used
    return {other: None for other in ids if other.rpartition(".")[2] in used & defined.keys()}
