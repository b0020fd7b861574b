"""From trials to findings: let the check judge each, turn failures into words, and make one row a property."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.runtime.errors import BadResult, LaunchError, RankFailed, RankKilled, RunError, RunTimeout
from fivefold.runtime.link import LIBRARY, RUNTIME

from autograde.difference import which_ranks
from autograde.verdict import Finding, in_words, numbered

if TYPE_CHECKING:
    from autograde.check import Check
    from autograde.trial import Trial

NOT_OWN = (
    *LIBRARY,
    str(Path(RUNTIME).parent),
    str(Path(__file__).parent),
    *map(sysconfig.get_path, ("stdlib", "purelib")),
)
FRAMES = 4  # of a longer traceback these first and these last frames are shown
OUTSIDE = "The check stumbled over what your solution gave back. Is it of the kind that the docstring says?"


def judge(check: Check, trial: Trial) -> list[Finding]:
    """The check's findings; where a trial has no outcome, or one that cannot be judged, all its properties fail."""
    asked = tuple(trial.case.properties or check.points)
    if trial.error is not None:
        seen, detail = report(trial.error, trial.case.world_size, type(check).program.__code__.co_filename)
        backward = isinstance(trial.error, RankFailed) and "_engine_run_backward" in trial.error.traceback
        return _stopped(asked, seen, detail, "gradient" if backward else asked[0])
    try:
        findings = list(check.judge(trial.case, trial.outcomes, trial.ledger))
    except Exception as error:
        return _stopped(asked, "what came back could not be judged", f"{type(error).__name__}: {error}")
    unknown = [finding.property for finding in findings if finding.property not in check.points]
    if unknown:
        raise ValueError(f"{type(check).__name__} judged {unknown[0]}, which has no points")
    return findings


def report(error: RunError, world_size: int, check_file: str) -> tuple[str, str]:
    """A failed run as a headline and what there is below it, without the lines of the check itself."""
    if isinstance(error, RankFailed):
        message = f": {error.message.splitlines()[0]}" if error.message else ""
        own = _own_frames(error.traceback, (check_file, *NOT_OWN))
        detail = own if 'File "' in own else OUTSIDE
        return f"{error.kind} on {which_ranks(error.ranks, world_size)}{message}", detail
    text = (
        re.sub(r"result\[\d+\]\['outcome'\]", "the outcome", str(error)) if isinstance(error, BadResult) else str(error)
    )
    headline, _, rest = text.partition("\n")
    return headline, rest


def merge(points: Mapping[str, float], trials: Iterable[Trial]) -> list[Finding]:
    """One finding a property: the first that failed, or what all of them say together."""
    trials = list(trials)
    return [_merged(name, [(t, f) for t in trials for f in t.findings if f.property == name]) for name in points]


def state_of(findings: list[Finding], trials: list[Trial]) -> str:
    """The verdict's state."""
    if any(trial.unsolved for trial in trials):
        return "unsolved"
    if all(finding.passed for finding in findings):
        return "passed"
    errors = [trial.error for trial in trials if trial.error is not None]
    for kind, state in ((LaunchError, "cannot be graded"), (RunTimeout, "timed out"), (RankKilled, "crashed")):
        if any(isinstance(error, kind) for error in errors):
            return state
    return "crashed" if any(type(error) is RunError for error in errors) else "failed"


def _merged(name: str, rows: list[tuple[Trial, Finding]]) -> Finding:
    for trial, finding in rows:
        if finding.passed is False:
            hidden = "a hidden case: " if trial.level == "hidden" else ""
            detail = "\n".join(filter(None, [f"with {hidden}{trial.case}", finding.detail]))
            return Finding(name, False, finding.seen, detail, finding.look, finding.error)
    if not rows:
        return Finding(name, None, "not reached")
    if any(finding.passed is None for _, finding in rows):
        return next(finding for _, finding in rows if finding.passed is None)
    errors = [finding.error for _, finding in rows if finding.error is not None]
    if not errors:
        return rows[0][1]
    cases = {id(trial): trial.case for trial, _ in rows}
    sizes = sorted({case.world_size for case in cases.values()})
    worst = max(errors)
    detail = f"largest error {worst:.0e}" if worst else "exact"
    ranks = numbered(sizes[0], "rank") if len(sizes) == 1 else f"{in_words(sizes)} ranks"
    return Finding(name, True, f"{ranks}, {numbered(len(cases), 'case')}", detail, error=worst)


def _stopped(asked: tuple[str, ...], seen: str, detail: str, at: str = "") -> list[Finding]:
    """The failure stands at one property, the first if `at` is not asked for; the others are not reached."""
    failed = at if at in asked else asked[0]
    return [Finding(n, False, seen, detail) if n == failed else Finding(n, None, "not reached") for n in asked]


def _own_frames(traceback: str, not_own: tuple[str, ...]) -> str:
    """A traceback with the learner's frames alone; of very many, those of an endless recursion, the outer ones."""
    kept, inside = [], False
    for line in traceback.rstrip().splitlines():
        if line.startswith('  File "'):
            file = line[len('  File "') :].partition('", line')[0]
            inside = file.startswith(not_own)
        elif not line.startswith("    "):
            inside = False
        if not inside:
            kept.append(line)
    starts = [number for number, line in enumerate(kept) if line.startswith('  File "')]
    if len(starts) > 2 * FRAMES + 1:
        left_out = f"  … {len(starts) - 2 * FRAMES} more frames …"
        kept[starts[FRAMES] : starts[-FRAMES]] = [left_out]
    return "\n".join(kept)
