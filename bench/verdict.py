"""How long a learner waits from an edit to the verdict: each exercise's check, with the reference solution.

Each check runs six times in one process, as in a notebook; the table gives the median of the last five, in seconds of
wall clock. A busy machine makes them longer: the load stands beside them.

    python bench/verdict.py [EXERCISE …] [--json FILE]
"""

import argparse
import statistics
import time
from pathlib import Path

import machine

from autograde import discover
from autograde.check import evaluate_alone
from autograde.library import library_source

ROUNDS = 6


def seconds(exercise: str) -> list[float]:
    """Each round's seconds, the first with it; raises where the reference does not pass."""
    solution, found = library_source(exercise), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        verdict = evaluate_alone(exercise, solution)
        found.append(time.perf_counter() - began)
        if not verdict.passed:
            raise SystemExit(f"{exercise}: the reference solution does not pass:\n{verdict}")
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("exercise", nargs="*", help="all, where none is named")
    options.add_argument("--json", help="write the figures to this file")
    given = options.parse_args()
    rows = {name: seconds(name) for name in given.exercise or discover.checks()}
    print(f"{'exercise':40}{'median':>9}{'slowest':>9}{'first':>9}")
    for name, (first, *rest) in rows.items():
        print(f"{name:40}{statistics.median(rest):7.2f} s{max(rest):7.2f} s{first:7.2f} s")
    print(f"load: {machine.origin()['load']}")
    if given.json:
        machine.write(Path(given.json), {"seconds": rows})


if __name__ == "__main__":
    main()
