"""The check engine: is this solution of an exercise right, property by property?

    evaluate("tensor.RowLinear", RowLinear)     # -> Verdict
    check("tensor.RowLinear", RowLinear)        # in a notebook: shows the verdict, gives the points

A check is a subclass of `Check` in `checks/NN_name.py`. Only its `program` meets the solution, and only on the ranks;
what is right is computed here.
"""

from __future__ import annotations

import secrets
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from fivefold.runtime.ledger import Ledger
from fivefold.runtime.parts import Source

from autograde import bug, discover
from autograde.case import Case
from autograde.findings import judge, merge, state_of
from autograde.library import library_object
from autograde.rank import Sent
from autograde.recognise import recognise
from autograde.traffic import table
from autograde.trial import Trial, attempt, other_exercises, ship
from autograde.verdict import Finding, Score, Verdict, in_words, numbered

VISIBLE_SEED = 5
HIDDEN_ROW = "hidden cases"
FOLDED_LINES = 60


class Check:
    """Decides about one exercise. `points` maps each property to what it is worth: the one place where points stand."""

    exercise: ClassVar[str] = ""
    points: ClassVar[dict[str, float]] = {}
    timeout: ClassVar[float] = 20.0  # seconds for a run; most end in a tenth of one, but a machine may be busy
    measure: ClassVar[bool] = False  # whether the ledger is to hold memory and computation

    def cases(self, seed: int, level: str) -> Sequence[Case]:
        """What to try. `level` is "visible", or "hidden": a fresh seed, other world sizes, uneven sizes."""
        raise NotImplementedError

    @staticmethod
    def program(solution: Any, case: Any) -> Any:
        """Runs on each rank and returns tensors and plain data. Torch's seed is set to the case's before."""
        raise NotImplementedError

    def judge(self, case: Any, outcomes: list[Any], ledger: Ledger) -> list[Finding]:
        """Findings from what every rank returned and sent; computes the expected values itself."""
        raise NotImplementedError


def evaluate(exercise: str, solution: Any, hidden: bool = False, seed: int | None = None) -> Verdict:
    """The verdict on a solution: an object, or a `Source` that is executed on the ranks only; or a question's answer.

    With `hidden`, cases with fresh seeds and other sizes run after the visible ones pass; `seed` repeats such cases.
    Other exercises of the lesson that the solution uses are the library's versions; where the solution does better with
    the learner's own, it gets that verdict. Raises ValueError for an unknown exercise, never for what a solution does.
    """
    if exercise in discover.questions():
        return discover.questions()[exercise].grade(solution)
    check = discover.check_of(exercise)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning on stderr costs a learner all points in nbgrader
        verdict = _with_either(check, solution, hidden, seed)
        _withhold(verdict, solution)
    verdict.seconds = time.monotonic() - began
    return verdict


def evaluate_alone(exercise: str, source: Source, hidden: bool = False) -> Verdict:
    """The verdict on a text that brings all it needs, such as the library's own module: nothing in it is replaced."""
    check, began = discover.check_of(exercise), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, trials = examine(check, Sent(source), hidden)
        _explain(check, verdict, trials)
        _withhold(verdict, source)
    verdict.seconds = time.monotonic() - began
    return verdict


def examine(check: Check, sent: Sent, hidden: bool = False, seed: int | None = None) -> tuple[Verdict, list[Trial]]:
    """The verdict on a solution as it is sent, and the trials that led to it; recognises no misconception."""
    hidden_seed = secrets.randbits(31) if seed is None else seed
    levels = {"visible": VISIBLE_SEED} | ({"hidden": hidden_seed} if hidden else {})
    trials: list[Trial] = []
    failed: set[str] = set()

    def useless(case: Case) -> bool:
        return failed.issuperset(case.properties or check.points)

    for level, its_seed in levels.items():
        jobs = [(0, case) for case in check.cases(its_seed, level)]
        for trial in attempt(check, [sent], jobs, skip=useless):
            trial.level, trial.findings = level, judge(check, trial)
            failed.update(finding.property for finding in trial.findings if not finding.passed)
            trials.append(trial)
        if failed:
            break
    findings = merge(check.points, trials)
    points = sum(check.points[finding.property] for finding in findings if finding.passed)
    state = state_of(findings, trials)
    if state == "unsolved":
        return Verdict(check.exercise, 0, sum(check.points.values()), state=state), trials
    findings.append(_hidden_row(trials, hidden))
    verdict = Verdict(
        check.exercise, points, sum(check.points.values()), findings, state, seed=hidden_seed if hidden else None
    )
    return verdict, trials


def check(exercise: str, solution: Any, hidden: bool = False) -> Score:
    """Check a solution in a notebook: show the verdict, and give the points as a number that nbgrader can read."""
    verdict = evaluate(exercise, solution, hidden)
    _checked[exercise] = (solution, verdict.passed)
    _show(verdict)
    return Score(verdict.points)


def mine(exercise: str, solution: Any) -> Any:
    """The learner's own solution where it, and those that it uses, have passed their checks in this session.

    Else the library's version; says which.
    """
    name = exercise.rpartition(".")[2]
    why = _unready(exercise, solution)
    for other, item in other_exercises(exercise, solution).items() if not why else ():
        if not why and (reason := _unready(other, item)):
            why = f"uses your {other.rpartition('.')[2]}, which {reason}"
    if not why:
        print(f"Using your {name}.")
        return solution
    print(f"Using the library's {name}: yours {why}.")
    return library_object(exercise)


def _unready(exercise: str, solution: Any) -> str:
    """Why a solution is not to be relied on yet; empty where its last check passed."""
    checked, passed = _checked.get(exercise, (None, False))
    if checked is not solution:
        return "has not been checked since it was written"
    return "" if passed else "does not pass its check yet"


_checked: dict[str, tuple[Any, bool]] = {}  # exercise id -> the object that was last checked, and whether it passed


def _with_either(check: Check, solution: Any, hidden: bool, seed: int | None) -> Verdict:
    """A mistake costs once: with the library's versions of other exercises first, then with the learner's own."""
    try:
        others = other_exercises(check.exercise, solution)
        verdict, trials = examine(check, ship(check.exercise, solution, others), hidden, seed)
    except TypeError as error:
        return _refused(check, str(error))
    names = in_words(sorted(other.rpartition(".")[2] for other in others)) if others else ""
    if others and verdict.state != "unsolved":
        verb = "is" if len(others) == 1 else "are"
        verdict.note = f"Inside this check, {names} {verb} the library's, so that a mistake counts once."
    if others and verdict.state not in ("passed", "unsolved"):
        own, own_trials = examine(check, ship(check.exercise, solution, {}), hidden, seed)
        if own.points > verdict.points:
            own.note = f"Graded with your own {names}: with the library's it earns {verdict.points:g}."
            verdict, trials = own, own_trials
    _explain(check, verdict, trials)
    _fold(verdict, trials)
    return verdict


def _explain(check: Check, verdict: Verdict, trials: list[Trial]) -> None:
    if verdict.state in ("passed", "unsolved"):
        return
    try:
        found = recognise(check, trials)
    except Exception:
        return  # a hint is an extra; what is wrong with a misconception, `prove` tells those who can mend it
    if found is not None:
        verdict.misconception, verdict.hint = found.name, found.hint


def _withhold(verdict: Verdict, solution: Any) -> None:
    """No points, and no hint either, while the bug is there that the exercise is to find."""
    if not verdict.passed and bug.is_there(verdict.exercise, solution, verdict.misconception):
        verdict.points, verdict.hint, verdict.note = 0, "", bug.NOTE


def _fold(verdict: Verdict, trials: list[Trial]) -> None:
    shown = next((t for t in trials if any(f.passed is False for f in t.findings)), trials[0] if trials else None)
    if shown is None:
        return
    if shown.ledger is not None:
        verdict.folded[f"All communication, by the size of its tensors, with {shown.case}"] = _cut(table(shown.ledger))
    if shown.printed.strip():
        verdict.folded["What the ranks printed"] = _cut(shown.printed)


def _cut(text: str) -> str:
    lines = text.rstrip().splitlines()
    more = len(lines) - FOLDED_LINES
    return "\n".join([*lines[:FOLDED_LINES], f"… and {more} lines more"] if more > 0 else lines)


def _refused(check: Check, why: str) -> Verdict:
    first, *rest = check.points
    findings = [Finding(first, False, why), *(Finding(name, None, "not reached") for name in rest)]
    return Verdict(check.exercise, 0, sum(check.points.values()), findings)


def _hidden_row(trials: list[Trial], wanted: bool) -> Finding:
    held = [trial for trial in trials if trial.level == "hidden"]
    if held:
        passed = all(finding.passed for trial in held for finding in trial.findings)
        sizes = sorted({trial.case.world_size for trial in held})
        ranks = numbered(sizes[0], "rank") if len(sizes) == 1 else f"{in_words(sizes)} ranks"
        return Finding(HIDDEN_ROW, passed, f"{ranks}, {len(held)} more" if passed else "see above")
    visible = all(finding.passed for trial in trials for finding in trial.findings)
    if visible and not wanted:
        return Finding(HIDDEN_ROW, None, "run when the notebook is graded, with `autograde grade`")
    return Finding(HIDDEN_ROW, None, "run after the visible ones pass")


def _show(verdict: Verdict) -> None:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        print(verdict)
        return
    from IPython.display import display

    display({"text/html": verdict._repr_html_(), "text/plain": str(verdict)}, raw=True)
