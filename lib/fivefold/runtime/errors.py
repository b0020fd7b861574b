"""The ways in which a run can fail, each with a class of its own.

Every one is a `RunError`; its text is the report that a learner reads, so `print(error)` says all there is to say.
"""

from __future__ import annotations


class RunError(RuntimeError):
    """A run did not come to its end."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints: the report alone, without the frames of the launcher, which are not the learner's."""
        return str(self).splitlines()


class LaunchError(RunError, ValueError):
    """The run could not start: wrong arguments, or a function that cannot be sent to the ranks."""


class RankFailed(RunError):
    """An exception on a rank: the first real one, with that rank's traceback.

    `rank` raised first, `ranks` are all that raised the same, `kind` is the name of the exception's class, `traceback`
    its text.
    """

    def __init__(self, rank: int, kind: str, message: str, traceback: str, ranks: tuple[int, ...]):
        self.rank, self.kind, self.message, self.traceback, self.ranks = rank, kind, message, traceback, ranks
        where = f"rank {rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}; this is rank {rank}"
        super().__init__(f"{kind} on {where}\n\n{traceback.rstrip()}")

    def __reduce__(self):
        return type(self), (self.rank, self.kind, self.message, self.traceback, self.ranks)


class RankKilled(RunError):
    """A rank ended without a word: by a signal, or by leaving the interpreter."""

    def __init__(self, rank: int, signal: str, text: str):
        self.rank, self.signal = rank, signal
        super().__init__(text)

    def __reduce__(self):
        return type(self), (self.rank, self.signal, str(self))


class Deadlock(RunError):
    """Every unfinished rank waits for something that no other rank will do."""


class Mismatch(RunError):
    """Ranks disagree about an operation: its kind, group, shape, dtype, root or split sizes."""


class RunTimeout(RunError):
    """The run took longer than its time limit."""


class BadResult(RunError):
    """A rank returned something that is neither plain data nor a tensor."""
