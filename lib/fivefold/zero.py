"""ZeRO: data parallelism in which each rank keeps only its share of what training needs (Rajbhandari et al. 2020).

Stage 1 shares out the optimizer's state, stage 2 the gradients too, stage 3 the parameters as well. The unit of all
three is a `Shard`: one rank's share of a bucket of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.data import start_in_order, take_gradients
from fivefold.runtime.marks import keep
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single


def partition(size: int, ranks: int) -> list[range]:
    """Cut `size` elements into `ranks` contiguous pieces, in order: a range of elements for each rank.

    Each has ⌈size/ranks⌉ elements, as long as there are so many left; the next is shorter, and those after it are
    empty. So with padding at the end all pieces are of one length, as collectives want them. 10 elements on 4 ranks are
    0-2, 3-5, 6-8 and 9; 5 on 4 are 0-1, 2-3, 4 and none.
    """
    length = -(-size // ranks)
    return [range(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]


class Shard:
    """One rank's share of a bucket of parameters, and the state of AdamW for it.

    The bucket's values stand one after the other in one tensor, which is padded with zeros to n·length elements and cut
    into n pieces; the parameters become views of it. With stage 3 that tensor is empty until `allocate` and a gather.

    full: (n·length,) the padded values of the bucket. piece: (length,) this rank's piece of them; a view of `full`,
    but a tensor of its own in stage 3. own: the range of the bucket's elements in the piece; the rest of it is padding.
    gradient: (length,) the sum over ranks of the piece's gradient, None before there is one. master: (length,) the
    piece in float32, which AdamW updates; the piece itself where parameters are not in half precision.

    Raises ValueError for parameters of several dtypes.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, stage: int = 1,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    ):  # fmt: skip
        if len({p.dtype for p in parameters}) != 1:
            raise ValueError("a shard needs parameters of one dtype: let make_buckets sort them")
        self.parameters, self.group = list(parameters), group
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        sizes = [p.numel() for p in parameters]
        pieces = partition(sum(sizes), group.size())
        self.own, self.length = pieces[group.rank()], len(pieces[0])
        self.padding = group.size() * self.length - sum(sizes)
        values = [p.detach().flatten() for p in parameters]
        self.full = torch.cat([*values, values[0].new_zeros(self.padding)])
        for p, place in zip(parameters, self.full.split([*sizes, self.padding]), strict=False):
            p.data = place.view(p.shape)
        self.piece = self.full.view(group.size(), self.length)[group.rank()]
        if stage == 3:
            self.piece = self.piece.clone()
            self.release()
        self.gradient: Tensor | None = None
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        self.master = self.piece.to(torch.promote_types(self.piece.dtype, torch.float32))
        self.momentum, self.variance = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = 0
        keep("parameters", self.full, self.piece)
        keep("optimizer", self.momentum, self.variance, *([] if self.master is self.piece else [self.master]))

    def take_gradients(self) -> Tensor:
        """Move the bucket's gradients out of the parameters, into one tensor laid out as `full`: (n·length,)."""
        return take_gradients(self.parameters, self.padding)

    def add_gradient(self, piece: Tensor) -> None:
        """Add a sum over ranks to the `gradient` that this shard already has."""
        self.gradient = piece if self.gradient is None else self.gradient + piece
        keep("gradients", self.gradient)

    def update(self, lr: float) -> None:
        """One step of AdamW on this rank's piece; its gradient is used up (Loshchilov and Hutter 2019, algorithm 2).

        Other ranks learn of it when the pieces are gathered: at once in stages 1 and 2, before the next forward in 3.
        """
        (beta1, beta2), gradient = self.betas, self.gradient.to(self.master.dtype)
        self.steps += 1
        self.momentum.lerp_(gradient, 1 - beta1)
        self.variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (self.variance / (1 - beta2**self.steps)).sqrt_().add_(self.eps)
        self.master.mul_(1 - lr * self.weight_decay)
        self.master.addcdiv_(self.momentum, deviation, value=-lr / (1 - beta1**self.steps))
        self.piece.copy_(self.master)
        self.gradient = None

    def allocate(self) -> None:
        """Give `full` its memory back; what stands in it is not said."""
        self.full.untyped_storage().resize_(self.full.nbytes)

    def release(self) -> None:
        """Free the memory of `full`, and so of the parameters: they keep their shapes, and must not be read."""
        self.full.untyped_storage().resize_(0)


def step1(shards: Sequence[Shard], lr: float) -> None:
    """One step of ZeRO stage 1: every rank updates its own pieces only, and so keeps AdamW's state of these only.

    It begins with each rank's own gradients in `p.grad`, and ends with the new values in every parameter of every rank
    and no gradients. For each shard: take the gradients, reduce-scatter them over shard.group, so that each rank gets
    the sum of its piece (`add_gradient`); `update` it; all-gather the new pieces into shard.full. That is one
    reduce-scatter and one all-gather, the traffic of one all-reduce (ZeRO, section 7.1).

    A shard that has its gradient already, since `reduce_gradients` ran, is not reduced again: this is also the step of
    stage 2.
    """
    for shard in shards:
        if shard.gradient is None:
            full = shard.take_gradients()  # (n·length,)
            piece = full.new_empty(shard.length)
            reduce_scatter_single(piece, full, group=shard.group)
            shard.add_gradient(piece)
        shard.update(lr)
        all_gather_single(shard.full, shard.piece, group=shard.group)


def reduce_gradients(shards: Sequence[Shard]) -> Callable[[], None]:
    """Leave each rank the sum of its pieces' gradients, while the next backward goes on: ZeRO stage 2.

        finish = reduce_gradients(shards)
        loss.backward()
        finish()

    As soon as backward lets a shard start (`start_in_order`, on the shards' parameters), its gradients are taken, which
    frees them, and a reduce-scatter over shard.group begins, which nobody waits for yet. It is waited for when the next
    one is about to start, so that one bucket of whole gradients is on its way at most; then the piece is added to what
    the shard has (`add_gradient`). `finish()` starts the rest and waits. With several micro-batches, each backward of
    them needs a call, and pieces add up. Called without a backward in between, it reduces the gradients that there are.
    """
    travelling: list[tuple[Shard, Tensor, dist.Work]] = []

    def arrive() -> None:
        while travelling:
            shard, piece, work = travelling.pop()
            work.wait()
            shard.add_gradient(piece)

    def start(i: int) -> None:
        arrive()
        full = shards[i].take_gradients()  # (n·length,)
        piece = full.new_empty(shards[i].length)
        work = reduce_scatter_single(piece, full, group=shards[i].group, async_op=True)
        travelling.append((shards[i], piece, work))

    start_rest = start_in_order([shard.parameters for shard in shards], start)

    def finish() -> None:
        start_rest()
        arrive()

    return finish


def gather_parameters(module: nn.Module, shard: Shard) -> None:
    """Let a module have its parameters only while it runs: ZeRO stage 3. Registers hooks, and returns nothing.

    `module` returns one tensor; `shard` (made with stage=3) holds parameters that `module` uses and nothing outside it
    does. They are gathered, by `allocate` and an all-gather of the pieces into shard.full, before the module's forward,
    and again before its backward, which is when the gradient of its output has been computed (`register_hook` of the
    output). They are released after forward, and in backward when all of them have accumulated their gradients
    (`register_post_accumulate_grad_hook`). Two all-gathers a step: with the reduce-scatter of the gradients, three
    passes over the parameters (ZeRO, section 7.2.2). The step is `shard.update(lr)`: the next forward gathers what is
    new.

    All ranks run the same modules in the same order. Where backward leaves one of the shard's parameters out, they stay
    gathered until the next forward has ended.
    """
    missing: set[nn.Parameter] = set()

    def gather(*_: object) -> None:
        shard.allocate()
        all_gather_single(shard.full, shard.piece, group=shard.group)

    def before_backward(_: Tensor) -> None:
        gather()
        missing.update(shard.parameters)

    def after_forward(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        shard.release()
        if output.requires_grad:
            output.register_hook(before_backward)

    def accumulated(p: nn.Parameter) -> None:
        missing.discard(p)
        if not missing:
            shard.release()

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(after_forward)
    for p in shard.parameters:
        p.register_post_accumulate_grad_hook(accumulated)


def clip_grad_norm(
    gradients: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup, copies: Sequence[int] | None = None
) -> Tensor:
    """Scale the gradients so that their norm over all ranks of `group` is `max_norm` at most; that norm before.

    gradients: this rank's, of any shapes, changed in place; at least one, which may be empty. copies: for each, how
    many ranks of `group` hold this very gradient: 1 for a piece that no other rank has, the size of the group for one
    that is replicated on all; without it, 1 for each. A replicated gradient counts once. All ranks scale by the same
    number, max_norm/(norm + 1e-6) where that is below 1, as `torch.nn.utils.clip_grad_norm_` does. Returns the norm, a
    scalar in float64. One all-reduce of one number: of squares, since norms of pieces do not add up.
    """
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient, number in zip(gradients, copies or [1] * len(gradients), strict=True):
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / number
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
