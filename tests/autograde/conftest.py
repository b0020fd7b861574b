"""A course of one small lesson, whose library needs no torch: what the tests of the build are about."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from autograde import discover
from autograde.misconception import Misconception
from autograde.question import Question

LIBRARY = '''\
"""What the toy lesson teaches."""

import math
from functools import lru_cache


def round_up(x: float) -> int:
    """The next integer."""
    return math.ceil(x)


def _shared(x: float) -> float:
    return x + 1


def _half(x: float) -> float:
    """Half of `x`."""
    return x / 2


# Between the ends.
@lru_cache(maxsize=None)
def middle(low: float, high: float) -> float:
    """The number in the middle.

    Raises ValueError where `low` is above `high`.
    """
    # Whoever gets this wrong returns half the width.
    if low > high:
        raise ValueError("low is above high")

    return low + _half(high - low)
    # The sum is exact for small integers.


class Counter:
    """Counts in steps."""

    step: int = 2

    def __init__(self, start: int = 0):
        self.now = start

    def advance(self) -> int:
        """Go one step on; returns where that is."""

        def after(now: int) -> int:
            return now + self.step

        self.now = after(self.now)
        return self.now


def uses_shared(x: float) -> float:
    return _shared(x)
'''

LESSON = '''\
# %% [markdown]
# # 3 · Toy
# Made for tests.

# %% tags=["parameters"]
world_size = 4

# %%
import math
from functools import lru_cache


def check(exercise, solution, hidden=False):
    """Stands in for the course's check, which this lesson can do without."""
    try:
        right = {
            "toy.middle": lambda: (solution(2, 8) == 5) * 3,
            "toy.Counter": lambda: (solution(3).advance() == 5) * 2,
            "toy.round_up": lambda: (solution(2.5) == 3 and solution(2) == 2) * 2,
            "03.double": lambda: (solution == 12) * 1,
            "03.which": lambda: (solution == "b") * 1,
        }[exercise]
        return float(right())
    except NotImplementedError:
        return 0.0


# %% exercise="toy.middle"
from fivefold.toy import middle

# %% check="toy.middle"
check("toy.middle", middle)

# %% [markdown]
# Now a class.

# %% exercise="toy.Counter"
from fivefold.toy import Counter

# %%
counter = Counter

# %% check="toy.Counter"
check("toy.Counter", Counter)

# %% exercise="toy.round_up" bug="rounds_down"
from fivefold.toy import round_up

# %% check="toy.round_up"
check("toy.round_up", round_up)

# %% question="03.double"
six = 6
double_answer = 2 * six

# %% check="03.double"
check("03.double", double_answer)

# %% question="03.which"
which_answer = "b"

# %% check="03.which"
check("03.which", which_answer)

# %% [markdown]
# The end.
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A project with `lib/fivefold/toy.py` and `lessons/03_toy.py`; its parts can be changed before it is built."""
    library, lesson = tmp_path / "lib/fivefold/toy.py", tmp_path / "lessons/03_toy.py"
    for path, text in ((library, LIBRARY), (lesson, LESSON)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    checks = {
        "toy.middle": SimpleNamespace(points={"output": 1, "error": 2}),
        "toy.Counter": SimpleNamespace(points={"output": 2}),
        "toy.round_up": SimpleNamespace(points={"output": 2}),
    }
    questions = {
        "03.double": Question("03.double", "What is twice six?", 12, unit="eggs"),
        "03.which": Question("03.which", "Which?", "b", choices={"a": ("this", "no"), "b": ("that", "yes")}),
    }
    edits = [Misconception("toy.round_up", "rounds_down", "?", old="return math.ceil(x)", new="return math.floor(x)")]
    monkeypatch.setattr(discover, "checks", lambda: checks)
    monkeypatch.setattr(discover, "questions", lambda: questions)
    monkeypatch.setattr(discover, "misconceptions", lambda name: tuple(e for e in edits if e.exercise == name))
    return SimpleNamespace(
        root=tmp_path, library=library, lesson=lesson, checks=checks, questions=questions, edits=edits
    )
