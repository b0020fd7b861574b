"""What is checked of the search: that what it says is so, and how near its best is to the best there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold import plan
from fivefold.layout import LayoutError

from autograde.check import Check
from autograde.checks.planning import Searched, counted, work_for
from autograde.verdict import Finding

NEAR = 1.10  # the best that a search finds may take so many times as long as the best of all
SHOWN = 200  # entries of an answer that are looked at: its first ones

WIDE = plan.Model(48, 8192, 64, 8, 22016, 64000, name="48 wide layers")
HUGE = plan.Model(96, 16384, 128, 8, 53248, 128256, name="96 huge layers")
EXPERTS = plan.Model(24, 4096, 32, 8, 8192, 50000, experts=16, top_k=2, name="16 experts a layer")
SMALL = plan.Model(16, 2048, 16, 4, 8192, 128256, name="16 layers")
NARROW = plan.Model(16, 2048, 16, 4, 8192, 8000, name="16 layers for one GPU")
MANY = plan.Model(4, 4096, 32, 8, 8192, 50000, experts=64, top_k=2, name="64 experts a layer")
LONG = plan.Model(28, 3072, 24, 8, 8192, 128000, name="28 layers on long sequences")


class Search(Check):
    exercise = "plan.search"
    points = {"fits": 1, "GPUs": 1, "true": 1, "order": 1, "fast": 3, "nothing": 1}

    def cases(self, seed: int, level: str) -> list[Searched]:
        a100, h100 = plan.cluster("a100"), plan.cluster("h100")

        def case(
            model: plan.Model, sequences: int, context: int, gpus: int, cluster: Any, *kinds: str, **more: Any
        ) -> Searched:
            work = work_for(model, sequences, context)
            return Searched(
                world_size=1, model=model, work=work, gpus=gpus, cluster=cluster, properties=kinds, seed=seed, **more
            )

        few = plan.Options(zero=(1,), schedules=("one_f_one_b",), micro_batch=(2,), recompute=("full",), most_tp=4)
        spread = plan.Options(zero=(1,), recompute=("full",), most_tp=1)  # and then nothing fits without EP

        some = ("fits", "GPUs", "true", "order", "fast")
        if level == "hidden":
            layers = 24 + 8 * (seed % 4)
            fresh = plan.Model(layers, 6144, 48, 8, 16384 + 2048 * (seed % 3), 100_352, name=f"{layers} layers")
            return [
                case(fresh, 64, 4096, 32, a100, *some), case(LONG, 16, 65536, 32, h100, *some),
            ]  # fmt: skip
        return [
            case(SMALL, 64, 2048, 8, h100, *some), case(WIDE, 64, 4096, 64, a100, *some),
            case(HUGE, 64, 8192, 1024, h100, *some), case(LONG, 8, 131072, 32, h100, *some),
            case(EXPERTS, 32, 4096, 16, h100, *some), case(NARROW, 2, 131072, 1, a100, *some),
            case(WIDE, 64, 4096, 64, a100, *some, software=plan.MEGATRON_2021),
            case(WIDE, 64, 4096, 64, a100, *some, options=few), case(MANY, 32, 4096, 8, h100, *some, options=spread),
            case(WIDE, 16, 4096, 2, a100, "nothing"),
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Searched) -> dict:
        found = list(solution(case.model, case.work, case.gpus, case.cluster, case.software, case.options))
        shown = [
            {
                "plan": vars(choice.plan) | {"layout": vars(choice.plan.layout)},
                "seconds": float(sum(choice.seconds)), "bytes": float(choice.memory.total),
            }
            for choice in found[:SHOWN]
        ]  # fmt: skip
        times = [float(sum(choice.seconds)) for choice in found]
        return {"count": len(found), "shown": shown, "sorted": times == sorted(times)}

    def judge(self, case: Searched, outcomes: list, ledger: Any) -> Iterator[Finding]:
        got, best = outcomes[0], plan.search(*_task(case))
        if case.properties == ("nothing",):
            seen = (
                f"{case}: {counted(got['count'], 'plan')}, expected none: nothing fits"
                if got["count"]
                else "an empty list"
            )
            yield Finding("nothing", not got["count"] and not best, seen)
            return
        if not got["count"]:
            yield Finding("fast", False, f"{case}: no plan, and {len(best):,} fit", "What was not tried?")
            return
        for number, entry in enumerate(got["shown"], start=1):
            yield from self._entry(case, number, entry)
        yield Finding("order", got["sorted"], "the fastest first" if got["sorted"] else f"{case}: not in order of time")
        one, wanted = _plan(got["shown"][0]), best[0].seconds.total
        time = plan.step_seconds(case.model, one, case.work, case.cluster, case.software).total
        seen = f"{case}: {time:.3f} s with {one}, {time / wanted:.3f} times the best there is"
        near = time <= NEAR * wanted
        look = f"{NEAR:.3f} times would do. Which of the three steps has something faster?"
        if not got["sorted"]:
            look = "The list is not in order. Where in it is the fastest?"
        yield Finding(
            "fast", near, f"within {NEAR - 1:.0%} of the best there is" if near else seen, look if not near else ""
        )

    def _entry(self, case: Searched, number: int, entry: dict) -> Iterator[Finding]:
        one = _plan(entry)
        words, gpus = f"{case}: entry {number}, {one},", one.layout.world_size
        wrong = f"{words} uses {gpus} GPUs, expected {case.gpus}"
        yield Finding("GPUs", gpus == case.gpus, "every one in use" if gpus == case.gpus else wrong)
        try:
            plan.check(case.model, one, case.work)
        except LayoutError as error:
            yield Finding("fits", False, f"{words} cannot be: {error}")
            return
        beyond = _beyond(one, case.options) if case.options else ""
        if beyond:
            yield Finding("fits", False, f"{words} has {beyond}, which the options leave out")
        memory = plan.fits(case.model, one, case.work, case.cluster, case.software)
        room = f"{memory.total / 1e9:.1f} GB of {memory.limit / 1e9:.1f} GB"
        yield Finding("fits", memory.fits, "all that are given" if memory.fits else f"{words} needs {room}")
        seconds = plan.step_seconds(case.model, one, case.work, case.cluster, case.software).total
        right = abs(entry["seconds"] / seconds - 1) < 1e-9 and abs(entry["bytes"] / memory.total - 1) < 1e-9
        wrong = f"{words} is given with other seconds or bytes than `step_seconds` and `fits` say"
        yield Finding("true", right, "seconds and bytes as stated" if right else wrong)


def _task(case: Searched) -> tuple:
    return case.model, case.work, case.gpus, case.cluster, case.software, case.options


def _beyond(one: plan.Plan, options: plan.Options) -> str:
    """What of a plan the options leave out. One rank has no ZeRO to choose, and one stage no schedule."""
    layout, wrong = one.layout, []
    if layout.dp * layout.cp > 1 and one.zero not in options.zero:
        wrong.append(f"ZeRO-{one.zero}")
    if layout.pp > 1 and one.schedule not in options.schedules:
        wrong.append(f"schedule {one.schedule}")
    if one.micro_batch not in options.micro_batch:
        wrong.append(f"micro-batches of {one.micro_batch}")
    if one.recompute not in options.recompute:
        wrong.append(f"recomputation {one.recompute}")
    if layout.tp > options.most_tp:
        wrong.append(f"TP {layout.tp}")
    if layout.cp > options.most_cp:
        wrong.append(f"CP {layout.cp}")
    if one.chunks > options.most_chunks:
        wrong.append(f"{one.chunks} chunks")
    return ", ".join(wrong)


def _plan(entry: dict) -> plan.Plan:
    from fivefold.layout import Layout

    return plan.Plan(**entry["plan"] | {"layout": Layout(**entry["plan"]["layout"])})
