"""Checks of lesson 02 on formulas: what ZeRO keeps on a rank, and what data parallelism cannot get past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class States(Case):
    """Arguments of `zero_bytes`: Ψ, N, and K where it is given."""

    trainings: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        return f"{len(self.trainings)} trainings"


class ZeroBytes(Check):
    exercise = "cost.zero_bytes"
    points = {"stage 0": 1, "stage 1": 1, "stage 2": 1, "stage 3": 1}

    def cases(self, seed: int, level: str) -> list[States]:
        k = 1 + seed % 7
        known = ((7.5e9, 64), (7.5e9, 4), (1e12, 1024), (7.5e9, 1), (1.5e9, 3, 8), (1_000_003, 5, 6))
        fresh = ((1e9 * k, 8 * k), (123_457, 7), (1e8, 16, 4 + k), (k, 1, 0))
        return [States(world_size=1, trainings=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: States) -> dict:
        values = {}
        for i, (parameters, ranks, *k) in enumerate(case.trainings):
            for stage in range(4):
                given = {"optimizer_bytes": k[0]} if k else {}
                values[f"{stage} {i}"] = solution(parameters, ranks, stage, **given)
        return {"values": values, "refused": {stage: _refusal(solution, stage) for stage in (4, -1)}}

    def judge(self, case: States, outcomes: list, ledger: Any) -> Iterator[Finding]:
        for i, (parameters, ranks, *k) in enumerate(case.trainings):
            size = k[0] if k else 12
            shared = {0: (4 + size, 0), 1: (4, size), 2: (2, 2 + size), 3: (0, 4 + size)}
            for stage, (whole, split) in shared.items():
                wanted = parameters * whole + parameters * split / ranks
                words = f"Ψ {parameters:g}, N {ranks}{f', K {size:g}' if k else ''}, stage {stage}"
                yield _number(f"stage {stage}", words, outcomes[0]["values"][f"{stage} {i}"], wanted)
        for stage, refused in outcomes[0]["refused"].items():
            if refused != "ValueError":
                seen = f"stage {stage} raises {refused or 'nothing'}, expected a ValueError"
                yield Finding("stage 3", False, seen)


@dataclass(frozen=True, kw_only=True)
class Trainings(Case):
    """Arguments of `data_parallel_limits`, in its order."""

    trainings: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        return f"{len(self.trainings)} trainings"


class DataParallelLimits(Check):
    exercise = "cost.data_parallel_limits"
    points = {"activations": 1, "batch": 1, "sync": 2}

    def cases(self, seed: int, level: str) -> list[Trainings]:
        k = 1 + seed % 7
        known = (
            (64, 512, 7.5e9, 34e9, 0.23, 4e-6, 1 / 50e9),
            (512, 512, 7.5e9, 34e9, 0.23, 4e-6, 1 / 50e9),
            (1, 3, 1e9, 1e9, 0.5, 4e-6, 1 / 25e9),
            (3, 10, 1e6, 2e6, 0.001, 1e-3, 0.0),
        )
        fresh = (
            (8 * k, 24 * k, 1e9 * k, 1e10, 0.1 * k, 1e-5, 1e-11),
            (5, 5 + k, 3.5e8, 7e8, 0.02, 0.0, 1e-10 * k),
        )
        return [Trainings(world_size=1, trainings=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Trainings) -> dict:
        found = []
        for ranks, batch, *rest in case.trainings:
            limits = solution(int(ranks), int(batch), *rest)
            found.append([limits.activation_bytes, limits.smallest_batch, limits.sync_over_compute])
        refused = ""
        try:
            solution(8, 7, 1e9, 1e9, 1.0, 0.0, 1e-9)
        except NotImplementedError:
            raise
        except Exception as error:
            refused = type(error).__name__
        return {"found": found, "refused": refused}

    def judge(self, case: Trainings, outcomes: list, ledger: Any) -> Iterator[Finding]:
        for (n, batch, psi, activations, seconds, alpha, beta), got in zip(
            case.trainings, outcomes[0]["found"], strict=True
        ):
            words = f"{n} ranks, {batch} sequences"
            yield _number("activations", f"activation_bytes with {words}", got[0], activations)
            yield _number("batch", f"smallest_batch with {words}", got[1], n)
            rounds, message = 2 * (n - 1), 2 * psi / n
            sync = rounds * alpha + rounds * message * beta
            yield _number("sync", f"sync_over_compute with {words}", got[2], sync * n / (batch * seconds))
        refused = outcomes[0]["refused"]
        if refused != "ValueError":
            seen = f"7 sequences for 8 ranks raise {refused or 'nothing'}, expected a ValueError"
            yield Finding("batch", False, seen)


def _refusal(solution: Any, stage: int) -> str:
    try:
        solution(1e9, 8, stage)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return ""


def _number(property: str, words: str, got: Any, wanted: float) -> Finding:
    """Compared as a float, whatever number it is."""
    plain = isinstance(got, int | float) and not isinstance(got, bool)
    return compare(property, f"the result for {words}", [float(got) if plain else got], [float(wanted)], "layers")
