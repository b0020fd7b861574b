"""What checks of attention over split tokens share: the cases, what a rank does in them, and one process's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from fivefold.context import fast_ring_attention
from fivefold.runtime.group import WatchedGroup
from fivefold.runtime.ledger import Computation, Wait, phase
from fivefold.runtime.marks import now
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autograde.checks.tokens import Tokens, group_of

NUMBER = 8  # bytes of a float64
NAMES = "q", "k", "v"
IN_USE = {"forward": 3, "backward": 5}  # blocks of others that a rank may hold: in use, on their way, named by a loop
MEASURED = "forward"  # the phase in which the check looks at what is kept


@dataclass(frozen=True, kw_only=True)
class Heads(Tokens):
    """Queries (b, heads, s, d), keys and values (b, kv_heads, s, d), whose s tokens are split over each group.

    `order` is "full", where every query sees every key, or a causal mask with tokens "contiguous", in "zigzag" or
    "shuffled" over the ranks. `logits` are "ordinary", "rising" from -1e4 to 1e4 with the keys, or all "lifted" to near
    1e4. `twice` takes the output as the queries of a second attention over the same keys. `half` gives everything in
    bfloat16, `wrong_table` positions of another shape.
    """

    heads: int = 2
    kv_heads: int = 1
    d: int = 4
    order: str = "full"
    logits: str = "ordinary"
    twice: bool = False
    half: bool = False
    wrong_table: bool = False

    def __str__(self) -> str:
        mask = {"full": "no mask", "contiguous": "causal", "zigzag": "causal, zig-zag", "shuffled": "causal, shuffled"}
        large = "" if self.logits == "ordinary" else ", logits of 1e4"
        if self.wrong_table:
            return f"{super().__str__()}, positions of another shape"
        words = f"{large}{', two in a row' if self.twice else ''}{', in bfloat16' if self.half else ''}"
        return f"{super().__str__()}, {mask[self.order]}{words}"

    @property
    def tolerance(self) -> str:
        return "layers" if self.logits == "ordinary" else "large logits"

    def whole(self, rank: int) -> list[Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence of the rank's group."""
        place = 10 * self.place(rank)[0]
        widths = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, incoming = (self.random(place + i, self.b, n, self.s, self.d) for i, n in enumerate(widths))
        if self.logits != "ordinary":
            levels = -(-self.s // 3)  # three keys of each, so that a row's largest weights are shared
            rising = torch.linspace(-100, 100, levels, dtype=torch.float64).repeat_interleave(3)[: self.s]
            q[..., -1], k[..., -1] = 100 * self.d**0.5, rising if self.logits == "rising" else 100.0
        return [q, k, v, incoming]

    def table(self, rank: int) -> Tensor | None:
        """Where the tokens of each rank of the group stand, as an attention takes it."""
        return None if self.order == "full" else self.held(rank)

    def held(self, rank: int) -> Tensor:
        """The same where there is no mask: then ranks hold contiguous parts."""
        n = len(self.place(rank)[1])
        if self.order == "zigzag":
            chunks = torch.arange(self.s).tensor_split(2 * n)
            return torch.stack([torch.cat([chunks[i], chunks[-1 - i]]) for i in range(n)])
        if self.order == "shuffled":
            return torch.randperm(self.s, generator=torch.Generator().manual_seed(self.seed)).view(n, -1)
        return torch.arange(self.s).view(n, -1)

    def part(self, rank: int, x: Tensor) -> Tensor:
        """The rank's tokens of a whole (b, heads, s, d)."""
        return x[:, :, self.held(rank)[self.place(rank)[2]]]

    def tokens_of(self, rank: int) -> int:
        return self.s // len(self.place(rank)[1])

    def block(self, rank: int) -> int:
        """Bytes of a rank's keys and values together."""
        return 2 * NUMBER * self.b * self.kv_heads * self.tokens_of(rank) * self.d

    def kept(self, rank: int) -> int:
        """Bytes that a ring keeps for backward: q, k and v of the rank's tokens, their output and log-sum-exps."""
        return 2 * self.queries(rank) + self.block(rank) + NUMBER * self.b * self.heads * self.tokens_of(rank)

    def queries(self, rank: int) -> int:
        """Bytes of a rank's queries, or of its output."""
        return NUMBER * self.b * self.heads * self.tokens_of(rank) * self.d


def try_attention(solution: Callable, case: Heads) -> dict:
    """On a rank: the output for its tokens, the gradients of its q, k and v, and what its arguments are afterwards."""
    _shut(fast_ring_attention)
    group, rank = group_of(case), dist.get_rank()
    positions = case.table(rank)
    *given, incoming = (_strided(case.part(rank, x)) for x in case.whole(rank))
    qkv = [x.requires_grad_() for x in given]
    with phase(MEASURED):
        out = solution(*qkv, group, positions)
        if case.twice:
            out = solution(out, *qkv[1:], group, positions)
    found = {"output": out.detach().clone(), "gradient": {f"{name}.grad": None for name in NAMES}}
    if out.requires_grad and out.shape == incoming.shape:
        torch.autograd.backward([out], [incoming])
        found["gradient"] = {f"{name}.grad": x.grad for name, x in zip(NAMES, qkv, strict=True)}
    after = {name: x.detach() for name, x in zip(NAMES, qkv, strict=True)} | {"the incoming gradient": incoming}
    return found | {"after": after | ({} if positions is None else {"positions": positions})}


def try_half(solution: Callable, case: Heads) -> dict:
    """On a rank: the output in bfloat16."""
    _shut(fast_ring_attention)
    group, rank = group_of(case), dist.get_rank()
    q, k, v, _ = (case.part(rank, x).bfloat16().contiguous() for x in case.whole(rank))
    return {"half": solution(q, k, v, group, case.table(rank))}


def try_wrong_tables(solution: Callable, case: Heads) -> dict:
    """What is raised for positions of one row more than the group has ranks, and of one column more than tokens."""
    _shut(fast_ring_attention)
    group, rank = group_of(case), dist.get_rank()
    q, k, v, _ = (case.part(rank, x).contiguous() for x in case.whole(rank))
    n, raised = group.size(), "ValueError"
    for shape in ((n + 1, case.tokens_of(rank)), (n, case.tokens_of(rank) + 1)):
        if raised == "ValueError":  # after another error, messages may still be under way
            raised = refused(solution, q, k, v, group, torch.arange(math.prod(shape)).view(shape))
    return {"refused": raised}


def refused(solution: Callable, *arguments: Any) -> str:
    """What a call raises: "" for nothing, "ValueError" for that or a kind of it."""
    try:
        solution(*arguments)
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return ""


def try_measured(solution: Callable, case: Heads) -> dict:
    """The same, with an eye on every tensor that is made: how much more there is of what others have than is needed.

    A loop's variable may still name the block before, and the runtime the last one that came: these are not counted.
    """
    group, rank = group_of(case), dist.get_rank()
    *given, incoming = (case.part(rank, x).contiguous() for x in case.whole(rank))
    qkv = [x.requires_grad_() for x in given]
    _shut(fast_ring_attention)
    with Watch() as watch:
        with phase(MEASURED):
            out = solution(*qkv, group, case.table(rank))
        block, forward = case.block(rank), watch.most_received
        kept, watch.most_received = watch.alive() - block - case.kept(rank), 0
        if out.requires_grad and out.shape == incoming.shape:
            out.backward(incoming)
    most = {"forward": (forward, IN_USE["forward"]), "backward": (watch.most_received, IN_USE["backward"])}
    extra = {f"blocks too many {way}": max(0, received / block - used) for way, (received, used) in most.items()}
    return extra | {"kept too much": max(0, kept), "largest": watch.largest} | _waited_idly()


def _waited_idly() -> dict[str, int]:
    """How many messages the rank received forward and backward without computing anything while they were under way."""
    entries = now.recorder.entries
    waits = {entry.of: entry.index for entry in entries if isinstance(entry, Wait)}
    work = [entry.index for entry in entries if isinstance(entry, Computation) and entry.flops]
    found = {"idle waits forward": 0, "idle waits backward": 0}
    for call in entries:
        if getattr(call, "op", "") == "recv":
            end = waits.get(call.index, call.index)
            idle = not any(call.index < index < end for index in work)
            found[f"idle waits {'backward' if call.backward else 'forward'}"] += idle
    return found


class Watch(TorchDispatchMode):
    """Sees every tensor that operators make: the largest, how many bytes live, and of those how many were received."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most_received = 0  # numbers in the largest; bytes received that lived at one time
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._received: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator loads the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in tensors)])
        _note(self._made, tensors)
        return out

    def __enter__(self) -> Watch:
        """Messages are no operators: what is received is seen where the rank's groups are asked for it."""
        receive, watch = WatchedGroup.recv, self

        def recv(group: WatchedGroup, tensors: Any, *arguments: Any) -> Any:
            _note(watch._received, tensors)
            watch.most_received = max(watch.most_received, _alive(watch._received))
            return receive(group, tensors, *arguments)

        WatchedGroup.recv, self._receive = recv, receive
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        WatchedGroup.recv = self._receive
        super().__exit__(*error)

    def alive(self) -> int:
        return _alive(self._made)


def _note(table: dict, tensors: Any) -> None:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        table[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


def _alive(table: dict) -> int:
    for key in [key for key, (reference, _) in table.items() if reference.expired()]:
        del table[key]
    return sum(size for _, size in table.values())


def _strided(x: Tensor) -> Tensor:
    """Heads are views of a projection's output: (b, heads, s, d) is not contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _shut(function: Any) -> None:
    """The library's other ring is an answer too, whoever took it from its module before."""

    def closed(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("fast_ring_attention is another answer to this exercise: write your own")

    function.__code__ = closed.__code__


@lru_cache(maxsize=64)
def one_process(case: Heads) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """For each rank its part of what one process gets: the output, and the gradients of q, k and v."""
    outputs: list[Tensor] = [torch.empty(0)] * case.world_size
    gradients: list[dict[str, Tensor]] = [{}] * case.world_size
    for ranks in case.groups:
        q, k, v, incoming = case.whole(ranks[0])
        for x in (q, k, v):
            x.requires_grad_()
        out = dense(q, k, v, case.order != "full")
        if case.twice:
            out = dense(out, k, v, case.order != "full")
        out.backward(incoming)
        for rank in ranks:
            outputs[rank] = case.part(rank, out.detach())
            gradients[rank] = {
                f"{name}.grad": case.part(rank, x.grad) for name, x in zip(NAMES, (q, k, v), strict=True)
            }
    return outputs, gradients


def in_half(case: Heads) -> list[Tensor]:
    """For each rank its part of one process's output, computed wide from inputs in bfloat16, and rounded at the end."""
    outputs = []
    for rank in range(case.world_size):
        q, k, v, _ = (x.bfloat16().double() for x in case.whole(rank))
        outputs.append(case.part(rank, dense(q, k, v, case.order != "full")).bfloat16())
    return outputs


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention as it is written in a textbook, all scores at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(dim=-1) @ v


def given(case: Heads) -> Iterator[dict[str, Tensor]]:
    """What the arguments of each rank are to be afterwards: what they were."""
    for rank in range(case.world_size):
        names = (*NAMES, "the incoming gradient")
        own = {name: case.part(rank, x) for name, x in zip(names, case.whole(rank), strict=True)}
        table = case.table(rank)
        yield own if table is None else own | {"positions": table}
