"""Checks of lesson 02 that need no communication: buckets, when they start, and what is taken out of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare, compare_all
from autograde.verdict import Finding, in_words, numbered


@dataclass(frozen=True, kw_only=True)
class Parameters(Case):
    """Parameters of some sizes: `elements`, of float32, or of float64 where `wide` has their number.

    `frozen` need no gradient; `repeated` come a second time, at the end.
    """

    elements: tuple[int, ...]
    limit: float
    wide: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{numbered(len(self.elements), 'parameter')} in buckets of at most {self.limit:g} B"

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parameter."""
        return [number * (8 if i in self.wide else 4) for i, number in enumerate(self.elements)]

    def make(self) -> list[nn.Parameter]:
        kinds = [torch.float64 if i in self.wide else torch.float32 for i in range(len(self.elements))]
        pairs = zip(self.elements, kinds, strict=True)
        made = [nn.Parameter(torch.zeros(size, dtype=kind)) for size, kind in pairs]
        for i in self.frozen:
            made[i].requires_grad_(False)
        return made

    def expected(self) -> list[int]:
        """The numbers of the parameters, in the order in which they are to stand."""
        return [i for i in range(len(self.elements))[::-1] if i not in self.frozen]


class MakeBuckets(Check):
    exercise = "data.make_buckets"
    points = {"order": 1, "size": 1, "kind": 1}

    def cases(self, seed: int, level: str) -> list[Parameters]:
        plain, kinds = ("order", "size"), ("kind", "size")
        if level == "visible":
            plans = [
                ((2, 3, 1, 4, 2), 20, plain, {}),
                ((1, 30, 2, 0, 3, 25), 40, plain, {}),
                ((), 100, plain, {}),
                ((3, 2, 2, 5, 1, 4), 1000, kinds, {"wide": (2, 3), "frozen": (4,), "repeated": (1, 3)}),
                ((2, 1, 3, 1, 3, 3, 4), 30, kinds, {"wide": (1, 2), "frozen": (5,)}),
            ]
        else:
            k = 1 + seed % 5
            plans = [
                ((k, 4, k, k, 7, 1, 9), 12 + 4 * k, plain, {}),
                ((5, 5, 5, 5), 20, plain, {}),
                ((k, k, k), 0, plain, {}),
                ((k, 2, 6, 3), 64, kinds, {"wide": (0, 3), "frozen": (1,), "repeated": (0, 0)}),
                ((4, k), 64, kinds, {"frozen": (0, 1)}),
                ((k, 1, k, 9, 2, k), 12 * k, kinds, {"wide": (1, 2), "frozen": (3,)}),
            ]
        return [
            Parameters(world_size=1, elements=elements, limit=limit, properties=names, **more)
            for elements, limit, names, more in plans
        ]

    @staticmethod
    def program(solution: Any, case: Parameters) -> dict:
        made = case.make()
        given = iter([*made, *(made[i] for i in case.repeated)])  # as model.parameters(): to be gone through once
        found = solution(given, case.limit)
        number = {id(p): i for i, p in enumerate(made)}
        return {"buckets": [[number.get(id(p), -1) for p in bucket] for bucket in found]}

    def judge(self, case: Parameters, outcomes: list, ledger: Any) -> Iterator[Finding]:
        buckets = outcomes[0]["buckets"]
        flat, wanted = [i for bucket in buckets for i in bucket], case.expected()
        if "kind" in case.properties:
            kind = self._kind(case, buckets, flat, wanted)
            yield kind
            if kind.passed:
                yield self._size(case, buckets)
            return
        seen = f"parameters {flat}, expected {wanted}" if flat != wanted else "from back to front, each once"
        yield Finding("order", flat == wanted, seen, error=0.0)
        yield self._size(case, buckets)

    @staticmethod
    def _size(case: Parameters, buckets: list[list[int]]) -> Finding:
        """Within the limit, unless it is one parameter, and none that the bucket before had room for."""
        filled = [sum(case.sizes[i] for i in bucket) for bucket in buckets]
        for place, (bucket, size) in enumerate(zip(buckets, filled, strict=True)):
            if not bucket:
                return Finding("size", False, f"bucket {place} is empty")
            if size > case.limit and len(bucket) > 1:
                return Finding("size", False, f"bucket {place} has {size} B in {len(bucket)} parameters",
                               f"expected {case.limit:g} B at most")  # fmt: skip
            first, alike = case.sizes[bucket[0]], len({i in case.wide for i in (bucket[0], *buckets[place - 1])}) == 1
            if place and alike and filled[place - 1] + first <= case.limit:
                seen = f"bucket {place - 1} has {filled[place - 1]} B, and had room for the next parameter of {first} B"
                return Finding("size", False, seen, f"expected it to be filled up to {case.limit:g} B")
        return Finding("size", True, f"{numbered(len(buckets), 'bucket')}, as full as they may be", error=0.0)

    @staticmethod
    def _kind(case: Parameters, buckets: list[list[int]], flat: list[int], wanted: list[int]) -> Finding:
        for place, bucket in enumerate(buckets):
            if len({i in case.wide for i in bucket}) > 1:
                return Finding("kind", False, f"bucket {place} mixes float32 and float64")
        for i in case.frozen:
            if i in flat:
                return Finding("kind", False, f"parameter {i} needs no gradient, and is in a bucket")
        twice = [i for i in set(case.repeated) if flat.count(i) > 1]
        if twice:
            times = flat.count(twice[0])
            return Finding("kind", False, f"parameter {twice[0]} is shared, and stands in {times} places")
        if flat != wanted:
            return Finding("kind", False, f"parameters {flat}, expected {wanted}", "each where it comes first")
        turns = sum(a != b for a, b in zip(*([i in case.wide for i in wanted][k:] for k in (0, 1)), strict=False))
        if case.limit >= sum(case.sizes) and len(buckets) != (turns + 1 if wanted else 0):
            return Finding("kind", False, f"{numbered(len(buckets), 'bucket')}, expected one for each run of a dtype")
        return Finding("kind", True, "one dtype a bucket; none frozen, none twice", error=0.0)


@dataclass(frozen=True, kw_only=True)
class Layers(Case):
    """Linear layers of one weight, a bucket for each of `buckets`; forward uses the layers of `path`, in this order.

    Where there are two passes, the gradients of the first are there already when the second is watched.
    """

    path: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    passes: int = 1

    def __str__(self) -> str:
        more = ", gradients there already" if self.passes > 1 else ""
        return f"forward through layers {list(self.path)}, buckets {[list(b) for b in self.buckets]}{more}"

    def layers(self) -> list[nn.Linear]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return [nn.Linear(3, 3, bias=False).double() for _ in range(1 + max(max(b) for b in self.buckets))]

    def forward(self, layers: list[nn.Linear]) -> Tensor:
        x = torch.ones(2, 3, dtype=torch.float64)
        for i in self.path:
            x = torch.tanh(layers[i](x))
        return x.square().sum()

    def starts(self) -> dict[int, int]:
        """For each bucket that starts in backward: the layer whose gradient was the last that it waited for."""
        last_use = {i: place for place, i in list(enumerate(self.path))[::-1]}  # the first use is the last in backward
        missing, found, waiting = set(last_use), {}, list(enumerate(self.buckets))
        for layer in sorted(last_use, key=last_use.get, reverse=True):
            missing.discard(layer)
            while waiting and not any(i in missing or i not in last_use for i in waiting[0][1]):
                found[waiting.pop(0)[0]] = layer
        return found


class StartInOrder(Check):
    exercise = "data.start_in_order"
    points = {"order": 1, "early": 1, "rest": 1, "hooks": 1}

    def cases(self, seed: int, level: str) -> list[Layers]:
        if level == "visible":
            plans = [
                ((0, 1, 2, 3), ((3,), (2,), (1, 0)), 1),
                ((0, 3, 1, 2), ((3,), (2,), (1,), (0,)), 1),
                ((0, 1, 3), ((3,), (2,), (1, 0)), 1),
                ((0, 1, 0, 2), ((2,), (0,), (1,)), 2),
            ]
        else:
            a, b = seed % 3, (seed + 1) % 3
            plans = [
                ((a, b, 3), ((3, 2), (1,), (0,)), 1),
                ((3, b, a, b), ((a, b), (3,)), 2),
                ((2, 1, 0), ((0, 1, 2),), 1),
                ((0, 1, 2, 3, 4), ((0,), (4,), (3, 1), (2,)), 2),
            ]
        return [
            Layers(world_size=1, path=path, buckets=buckets, passes=passes, seed=seed + i)
            for i, (path, buckets, passes) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Layers) -> dict:
        layers, log, taken = case.layers(), [], {}
        for _ in range(case.passes - 1):
            case.forward(layers).backward()
        watched = [  # these come before the solution's hooks
            layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"layer {i}"))
            for i, layer in enumerate(layers)
        ]

        def start(i: int) -> None:
            log.append(f"start {i}")
            grads = [layers[k].weight.grad for k in case.buckets[i]]
            taken[i] = [None if grad is None else grad.clone() for grad in grads]

        finish = solution([[layers[k].weight for k in bucket] for bucket in case.buckets], start)
        case.forward(layers).backward()
        log.append("finish")
        finish()
        done, hooks = len(log), [len(layer.weight._post_accumulate_grad_hooks or ()) for layer in layers]
        for hook in watched:
            hook.remove()
        case.forward(layers).backward()
        return {"log": log[:done], "later": log[done:], "taken": taken, "hooks": [n - 1 for n in hooks]}

    def judge(self, case: Layers, outcomes: list, ledger: Any) -> Iterator[Finding]:
        log, wanted = outcomes[0]["log"], case.starts()
        order = [int(entry.split()[1]) for entry in log if entry.startswith("start")]
        every, end = list(range(len(case.buckets))), log.index("finish")
        first = order[: len(every)]
        seen = f"started in the order {in_words(order) if order else 'none'}, expected {in_words(every)}"
        look = "Other ranks may get theirs ready in another order. What do all ranks agree on?"
        right = first == sorted(first)
        seen, look = ("0, 1, 2, … whatever is ready first", "") if right else (seen, look)
        yield Finding("order", right, seen, look=look)
        yield self._early(case, log[:end], wanted, outcomes[0]["taken"])
        missing = [i for i in every if order.count(i) != 1]
        seen = f"bucket {missing[0]} is started {numbered(order.count(missing[0]), 'time')}" if missing else ""
        yield Finding("rest", not missing, seen or "what is left starts in finish")
        left, later = sum(outcomes[0]["hooks"]), outcomes[0]["later"]
        seen = f"after finish, another backward calls {later[0]}" if later else f"{numbered(left, 'hook')} still there"
        yield Finding("hooks", not left and not later, seen if left or later else "gone after finish")

    @staticmethod
    def _early(case: Layers, log: list[str], wanted: dict[int, int], taken: dict[int, list]) -> Finding:
        """Each bucket starts at the layer that it waited for last, and has whole gradients then."""
        when, at = "", {}
        for entry in log:
            kind, number = entry.split()
            if kind == "layer":
                when = int(number)
            elif int(number) not in at:
                at[int(number)] = when
        for i in range(len(case.buckets)):
            if i in at and i not in wanted:
                seen = f"bucket {i} is started in backward, expected in finish"
                return Finding("early", False, seen, "too early: a parameter of it, or before it, had no gradient")
            if i in wanted and i not in at:
                return Finding("early", False, f"bucket {i} is not started in backward",
                               f"it could be when layer {wanted[i]} had its gradient")  # fmt: skip
            if i in wanted and at[i] != wanted[i]:
                early = [k for k in range(i) if k not in list(at)[: list(at).index(i)]][:1]
                early = "".join(f"too early: bucket {k} had not been started; " for k in early)
                return Finding("early", False, f"bucket {i} is started after the gradient of layer {at[i]}",
                               f"{early}expected right after that of layer {wanted[i]}")  # fmt: skip
        layers = case.layers()
        for _ in range(case.passes):
            case.forward(layers).backward()
        for i in wanted:
            whole = [layers[k].weight.grad for k in case.buckets[i]]
            for got, one in zip(taken.get(i, ()), whole, strict=False):
                found = compare("early", f"a gradient of bucket {i} at its start", [got], [one])
                if not found.passed:
                    return found
        return Finding("early", True, "each as soon as its gradients are whole")


@dataclass(frozen=True, kw_only=True)
class Bucket(Case):
    """Parameters of some shapes; those of `without` have no gradient."""

    shapes: tuple[tuple[int, ...], ...]
    without: tuple[int, ...] = ()
    padding: int = 0
    dtype: str = "float64"

    def __str__(self) -> str:
        number, missing = numbered(len(self.shapes), "parameter"), len(self.without)
        return f"{number}, {missing} without a gradient, padding {self.padding}"

    def gradients(self, number: int) -> list[Tensor | None]:
        """Those of one backward, not all of them contiguous."""
        found, generator = [], torch.Generator().manual_seed(10 * self.seed + number)
        for i, shape in enumerate(self.shapes):
            grad = torch.randn(shape[::-1], generator=generator, dtype=torch.float64).to(getattr(torch, self.dtype))
            found.append(None if i in self.without else grad.permute(*range(grad.dim())[::-1]))
        return found

    def flat(self, number: int) -> Tensor:
        zeros = torch.zeros(self.padding, dtype=getattr(torch, self.dtype))
        shapes = [torch.zeros(shape, dtype=zeros.dtype) for shape in self.shapes]
        pairs = zip(self.gradients(number), shapes, strict=True)
        return torch.cat([*((zero if grad is None else grad).reshape(-1) for grad, zero in pairs), zeros])


class TakeGradients(Check):
    exercise = "data.take_gradients"
    points = {"values": 1, "freed": 1, "second": 1}

    def cases(self, seed: int, level: str) -> list[Bucket]:
        if level == "visible":
            plans = [(((2, 3), (4,), (3, 2)), (), 0), (((3,), (2, 2), (1, 5)), (1,), 3)]
        else:
            k = 1 + seed % 4
            plans = [(((k, 2), (), (0, 3), (3,)), (1, 3), k), (((k,),), (0,), 0), (((2, k), (k, 3)), (), 1)]
        kinds = "float64", "float32", "bfloat16"
        return [
            Bucket(world_size=1, shapes=shapes, without=without, padding=padding, dtype=kinds[i % 3], seed=seed + i)
            for i, (shapes, without, padding) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Bucket) -> dict:
        dtype = getattr(torch, case.dtype)
        parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in case.shapes]
        found, freed = [], []
        for number in (0, 1):
            for p, grad in zip(parameters, case.gradients(number), strict=True):
                if grad is not None:  # as backward does it: added to what is there
                    p.grad = grad.clone() if p.grad is None else p.grad + grad
            flat = solution(parameters, case.padding) if case.padding else solution(parameters)
            found.append(flat.clone())
            freed.append([p.grad is None for p in parameters])
        return {"flat": found, "freed": freed, "parameters": [p.detach() for p in parameters]}

    def judge(self, case: Bucket, outcomes: list, ledger: Any) -> Iterator[Finding]:
        flats, freed = outcomes[0]["flat"], outcomes[0]["freed"]
        yield compare("values", "the flat tensor", [flats[0]], [case.flat(0)], "exact")
        yield compare_all("values", [named_ones(case, outcomes[0]["parameters"])], [named_ones(case)], "exact")
        left = [i for i, gone in enumerate(freed[0]) if not gone]
        look = "A whole gradient that stays in p.grad is memory that stage 2 set out to save. Who still needs it?"
        seen = f"parameter {left[0]} still has its gradient" if left else "no parameter has a gradient afterwards"
        yield Finding("freed", not left, seen, look=look if left else "")
        look = "Backward adds to what p.grad holds. What did it hold when the second one began?"
        yield compare("second", "the flat tensor of the next backward", [flats[1]], [case.flat(1)], "exact", look)


def named_ones(case: Bucket, tensors: list[Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters, which are all ones, by name."""
    ones = tensors or [torch.ones(shape, dtype=getattr(torch, case.dtype)) for shape in case.shapes]
    return {f"parameter {i} afterwards": one for i, one in enumerate(ones)}
