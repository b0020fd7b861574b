"""Recognise a wrong solution: do its outcomes carry the marks of a misconception of that exercise?

A misconception's marks are the facts in which its outcome on a case differs from the library's: a tensor on a rank, a
missing value, the traffic, the way a run failed. Where a wrong solution has all the marks of one, it is recognised,
even if it makes other mistakes besides.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from fivefold.runtime.errors import RankFailed, RunError

from autograde.compare import allowed, same_plain
from autograde.difference import close
from autograde.discover import check_of, misconceptions
from autograde.library import library_source
from autograde.misconception import Misconception
from autograde.rank import Sent
from autograde.traffic import fingerprint
from autograde.trial import Trial, attempt

if TYPE_CHECKING:
    from autograde.check import Check

Facts = dict[tuple, Any]
FAILURE = ("failure",)


def recognise(check: Check, trials: list[Trial]) -> Misconception | None:
    """The misconception that explains most of what is wrong in the trials that failed."""
    known = misconceptions(check.exercise)
    marks = dict.fromkeys(known, 0)
    for trial in trials:
        if not marks or not any(finding.passed is False for finding in trial.findings):
            continue
        right, wrong = _known_facts(check.exercise, trial.case)
        seen = facts(trial)
        for item in list(marks):
            number = _shared_marks(seen, right, wrong[item.name])
            if number is None:
                del marks[item]
            else:
                marks[item] += number
    best = max(marks, key=marks.get, default=None)  # the first of equals: the order in which they are written
    return best if best is not None and marks[best] else None


def facts(trial: Trial) -> Facts:
    """Everything about a trial that can be compared, by path."""
    if trial.error is not None:
        return {FAILURE: _failure(trial.error)}
    found: Facts = {("traffic",): fingerprint(trial.ledger)}
    for rank, outcome in enumerate(trial.outcomes):
        _flatten(outcome, (rank,), found)
        if trial.ledger[rank].memory.peak_saved:
            found["memory", rank] = trial.ledger[rank].memory.peak_saved
    return found


def _shared_marks(seen: Facts, right: Facts, wrong: Facts) -> int | None:
    """How many marks of the misconception are seen; None where one is not, or where only one of the two has failed."""
    if not _same(seen.get(FAILURE), wrong.get(FAILURE)):
        return None
    marks = [path for path in right | wrong if not _same(wrong.get(path), right.get(path))]
    if not all(_same(seen.get(path), wrong.get(path)) for path in marks):
        return None
    return len(marks)


@lru_cache(maxsize=256)
def _known_facts(exercise: str, case: Any) -> tuple[Facts, dict[str, Facts]]:
    """Facts of the library's version and of each misconception, by its name, on one case."""
    items = misconceptions(exercise)
    sent = [Sent(library_source(exercise)), *(Sent(item.program()) for item in items)]
    trials = attempt(check_of(exercise), sent, [(index, case) for index in range(len(sent))])
    right, *wrong = [facts(trial) for trial in sorted(trials, key=lambda trial: trial.solution)]
    return right, dict(zip((item.name for item in items), wrong, strict=True))


def _failure(error: RunError) -> Any:
    """How a run failed, without times and lines."""
    if isinstance(error, RankFailed):
        return [error.kind, error.message]
    if "disagree about a message" in str(error):
        return [type(error).__name__]  # of several that do not fit, which comes first is chance
    rows = [re.split(r"\s{2,}", line.strip())[:2] for line in str(error).splitlines() if line.startswith("  ")]
    return [type(error).__name__, rows]


def _flatten(value: Any, path: tuple, found: Facts) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        found[path] = value
        return
    for key, item in items:
        _flatten(item, (*path, key), found)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and close(one, other, allowed(other.dtype, "layers"))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-5 * max(abs(one), abs(other))
    return same_plain(one, other)
