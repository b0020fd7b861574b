"""Sequence parallelism: what tensor parallelism leaves whole, split by tokens over the same group.

Between the split matrices of tensor parallelism lie norms, dropouts and residual sums, which every rank would compute
and keep for all tokens. Here each of t ranks has s/t of the s tokens there: x is (b, s/t, h), pieces in the order of
ranks. An all-gather before a pair of split layers and a reduce-scatter after it take the place of the all-reduce, and
move the same bytes (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single
from fivefold.tensor import shard


def all_gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens of all ranks: x (b, s/t, ...) -> (b, s, ...). The collective alone, without a gradient."""
    t = group.size()
    pieces = x.new_empty(t * x.shape[0], *x.shape[1:])  # (t·b, s/t, ...)
    all_gather_single(pieces, x.contiguous(), group=group)
    return pieces.unflatten(0, (t, -1)).transpose(0, 1).flatten(1, 2)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over ranks: x (b, s, ...) -> (b, s/t, ...). The collective alone, no gradient.

    Raises ValueError where t does not divide s.
    """
    s, t = x.shape[1], group.size()
    if s % t:
        raise ValueError(f"{s} tokens cannot be split over {t} ranks: choose a multiple of {t}")
    pieces = x.unflatten(1, (t, -1)).transpose(0, 1).flatten(0, 1).contiguous()  # (t·b, s/t, ...)
    own = x.new_empty(x.shape[0], s // t, *x.shape[2:])
    reduce_scatter_single(own, pieces, group=group)
    return own


class _GatherTokens(torch.autograd.Function):
    """g of figure 5: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_tokens(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(grad, ctx.group), None


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give every rank all tokens: the way into a pair of split layers (Korthikanti et al. 2022, figure 5, g).

    x (b, s/t, h), this rank's tokens -> (b, s, h), those of all t ranks in their order: one all-gather. Each rank then
    uses all tokens in its own part of the matrices. So, backward, the gradient of a token is the sum over ranks, and
    each rank needs it for its own tokens: one reduce-scatter.
    """
    return _GatherTokens.apply(x, group)


class _ScatterTokens(torch.autograd.Function):
    """ḡ of figure 5: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(grad, ctx.group), None


def scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up what the ranks hold, and leave each its own tokens: the way out of a pair of split layers (figure 5, ḡ).

    x (b, s, h), this rank's part of a sum over ranks -> (b, s/t, h), the sum for the r-th of t equal pieces of the
    tokens: one reduce-scatter. Backward, every rank's part of a token has the gradient of the sum, which one rank
    knows: one all-gather. Raises ValueError where t does not divide s.
    """
    return _ScatterTokens.apply(x, group)


@contextmanager
def region_rng(group: dist.ProcessGroup, split: bool) -> Iterator[None]:
    """Torch's random numbers for one region of the model: inside, they are this region's, and outside undisturbed.

        with region_rng(group, split=True):
            mask = torch.rand(x.shape) < 0.9

    `split`: whether the ranks of `group` hold different pieces there. Then their random numbers differ; where all hold
    the same values they are equal. Torch's random state must be equal on all ranks of the group
    at entry, and so it is again at exit. The region's seed is one random integer drawn from that state: so each
    region, and each pass through it, has numbers of its own, and who restores the state outside, as recomputation
    does, gets the same numbers inside (Korthikanti et al. 2022, section 4.2; Megatron-LM's random states).
    """
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + group.rank() if split else seed)
        yield


def dropout(x: Tensor, p: float, group: dist.ProcessGroup, split: bool) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1/(1 - p), with the region's random numbers.

    `split` as in `region_rng`. For backward it keeps one byte an element.
    """
    if p == 0:
        return x
    with region_rng(group, split):
        return torch.native_dropout(x, p, True)[0]


class Block(nn.Module):
    """A transformer block on this rank's tokens: x + attention(norm(x)), then x + mlp(norm(x)), with dropout on each.

    Norms, dropouts and residual sums work on s/t tokens, so they keep 1/t of the activations. `attention` and `mlp` are
    parts that take and give (b, s/t, h): in sequence parallelism, built with `enter=gather_tokens` and
    `leave=scatter_tokens`. The norms, and the biases added after `leave`, are whole on every rank but see its tokens
    only: their gradients need `sync_replicated_gradients` (Korthikanti et al. 2022, section 4.2.2, figure 5).
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        group: dist.ProcessGroup,
        p: float = 0.0,
        split: bool = True,
    ):
        """`attention(x, *context)` and `mlp(x)` are the parts, `attention_norm` and `mlp_norm` stand before them; `p`
        is the probability of dropout.

        `split` says whether x holds this rank's tokens, with a mask of its own, or all tokens, as in tensor parallelism
        alone, with the same mask on all ranks of `group`.
        """
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.group, self.p, self.split_tokens = group, p, split

    def forward(self, x: Tensor, *context: object) -> Tensor:
        """x (b, s/t, h) -> (b, s/t, h); `context`, such as a rotation of positions, is handed on to the attention."""
        p = self.p if self.training else 0.0
        y = self.attention(self.attention_norm(x), *context)
        x = x + dropout(y, p, self.group, self.split_tokens)
        y = self.mlp(self.mlp_norm(x))
        return x + dropout(y, p, self.group, self.split_tokens)


def sync_replicated_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum over `group` the gradients of parameters that are whole on every rank but saw its tokens only.

    Every token belongs to one rank, so the gradient over all tokens is the sum of the ranks' gradients, not their mean.
    `parameters`, in the same order on all ranks; their `.grad` is changed in place; those without one are left out. One
    all-reduce for all of them, after backward.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class _RegatheredLinear(torch.autograd.Function):
    """gather_tokens(x) weightᵀ + bias that keeps x instead of the gathered tokens."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_tokens(x, group), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_grad = reduce_scatter_tokens(grad @ weight, ctx.group)
        grad_rows = grad.flatten(0, -2)  # (b·s, out/t)
        weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)
        bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None


class RegatheringColumnLinear(nn.Module):
    """`ColumnLinear` with `enter=gather_tokens` that keeps 1/t of its input for backward, and gathers it again there.

    The same numbers for one more all-gather. With it in the place of `mlp.column` and `attention.qkv`, all of a block's
    activations are split by t (Korthikanti et al. 2022, section 4.2.2, the end).
    """

    split = {"weight": 0, "bias": 0}

    def __init__(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup):
        """The whole layer's `weight` (out, in) and `bias` (out), or None; what is kept is what `ColumnLinear` keeps."""
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(shard(weight, group))
        self.bias = None if bias is None else nn.Parameter(shard(bias, group))

    def forward(self, x: Tensor) -> Tensor:
        """x (b, s/t, in), this rank's tokens -> (b, s, out/t), this rank's piece of the output, for all tokens."""
        return _RegatheredLinear.apply(x, self.weight, self.bias, self.group)
