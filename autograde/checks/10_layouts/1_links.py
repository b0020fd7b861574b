"""What is checked of pipeline against ZeRO-3, and of which axis gets which link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograde.case import Case
from autograde.check import Check
from autograde.checks.planning import Placed, counted, links_by_rank, numbers, shapes
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Moved(Case):
    """Arguments of `pipeline_vs_zero3`: parameters, h, tokens, ranks, micro-batches, bytes a number."""

    sizes: tuple[tuple[float, int, int, int, int, int], ...]

    def __str__(self) -> str:
        return f"{len(self.sizes)} models"


class PipelineVsZero3(Check):
    exercise = "cost.pipeline_vs_zero3"
    points = {"pipeline": 1, "zero3": 2}

    def cases(self, seed: int, level: str) -> list[Moved]:
        known = ((1.75e11, 12288, 3145728, 384, 1, 2), (5.3e11, 20480, 4587520, 8, 1, 2), (1e9, 64, 1000, 3, 5, 4))
        k = 2 + seed % 5
        fresh = ((7e9 + k, 100 * k, 8192 * k, k, k, 2), (1.3e10, 5120, 4096, 7, 1, 4), (1e6, 8, 16, 1, 2, 2))
        known += ((1e6, 8, 16, 1, 1, 2), (1e6, 8, 16, 2, 1, 2))
        return [Moved(world_size=1, sizes=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Moved) -> dict:
        answers = [solution(*sizes[:4], num_microbatches=sizes[4], element_bytes=sizes[5]) for sizes in case.sizes]
        default = solution(1e9, 64, 1000, 4)
        return {
            "pipeline": [float(answer.pipeline) for answer in (*answers, default)],
            "zero3": [float(answer.zero3) for answer in (*answers, default)],
        }

    def judge(self, case: Moved, outcomes: list, ledger: Any) -> Iterator[Finding]:
        for i, (parameters, h, tokens, n, m, size) in enumerate((*case.sizes, (1e9, 64, 1000, 4, 1, 2))):
            over = f"{counted(n, 'rank')}, {counted(m, 'micro-batch', 'es')}"
            words = f"{parameters:.3g} parameters, h {h}, {tokens} tokens, {over}, {size} bytes"
            there_and_back = 0 if n == 1 else 2 * tokens * h * size
            yield numbers("pipeline", f"bytes of a pipeline rank: {words};", outcomes[0]["pipeline"][i], there_and_back)
            three = sum(parameters * (n - 1) / n * size for _ in range(3)) * m
            yield numbers("zero3", f"bytes of a ZeRO-3 rank: {words};", outcomes[0]["zero3"][i], three)


class Place(Check):
    exercise = "plan.place"
    points = {"axes": 2, "servers": 1, "experts": 1}

    def cases(self, seed: int, level: str) -> list[Placed]:
        if level == "hidden":
            some = tuple(_text(*shape) for number in range(seed, seed + 6) for shape in shapes(number * 37))
            return [Placed(world_size=1, layouts=some, gpus_per_server=size, seed=seed) for size in (4, 5, 6, 8)]
        whole = ("tp8", "tp16", "tp4,cp2", "tp4,cp4", "dp8", "dp2,tp8", "dp4,tp2", "pp2,tp4", "dp2,pp8,tp8", "dp1")
        odd = ("tp3,dp4", "tp6,pp2", "cp3,tp2,dp2", "tp2,pp3", "dp12", "cp5,tp2")
        experts = (
            "dp8,ep4",
            "dp4,cp2,tp2,ep4",
            "dp2,pp2,tp2,ep2",
            "dp4,pp2,ep2",
            "dp2,cp4,tp2,ep2",
            "dp8,tp4,ep2",
            "dp8,pp4,tp2,ep2",
        )
        apart = ("dp2,cp3,pp2,ep2", "dp4,tp3,ep2", "dp2,cp2,ep2")  # ep does not divide cp; the first group is inside
        kinds = (("axes", 8, whole), ("servers", 8, odd), ("servers", 4, odd), ("experts", 8, experts))
        kinds += (("experts", 4, apart),)
        return [
            Placed(world_size=1, layouts=layouts, gpus_per_server=size, properties=(kind,), seed=seed)
            for kind, size, layouts in kinds
        ]

    @staticmethod
    def program(solution: Any, case: Placed) -> dict:
        from fivefold.layout import Layout
        from fivefold.runtime.cluster import Cluster

        cluster = Cluster(gpus_per_server=case.gpus_per_server)
        names = {id(cluster.inside): "inside", id(cluster.between): "between"}
        found = {}
        for text in case.layouts:
            links = solution(Layout.parse(text), cluster)
            found[text] = {axis: names.get(id(link)) or _like(link, cluster) for axis, link in dict(links).items()}
        return found

    def judge(self, case: Placed, outcomes: list, ledger: Any) -> Iterator[Finding]:
        from fivefold.layout import Layout

        (kind,) = case.properties or ("axes",)
        for text in case.layouts:
            layout, got = Layout.parse(text), outcomes[0].get(text, {})
            wanted = links_by_rank(layout, case.gpus_per_server)
            for axis in dict.fromkeys((*wanted, *got)):
                what = kind if case.properties else "experts" if axis == "ep" else "servers"
                right = got.get(axis) == wanted.get(axis)
                seen = f"{axis} of {text} on servers of {case.gpus_per_server}: {_words(got, axis)}"
                wrong = f"{seen}, expected {_words(wanted, axis)}"
                yield Finding(what, right, f"{len(case.layouts)} layouts" if right else wrong)
        if not case.properties:
            yield Finding("axes", True, "in the hidden cases")


def _like(link: Any, cluster: Any) -> str:
    return "inside" if link == cluster.inside else "between" if link == cluster.between else repr(link)[:40]


def _words(links: dict, axis: str) -> str:
    return links.get(axis, "not there")


def _text(dp: int, cp: int, pp: int, tp: int, ep: int) -> str:
    return f"dp{dp},cp{cp},pp{pp},tp{tp},ep{ep if dp * cp % ep == 0 else 1}"
