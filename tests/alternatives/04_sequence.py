"""Right solutions of lesson 04 that are written in another way than the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.sequence import all_gather_tokens, dropout, reduce_scatter_tokens
from fivefold.tensor import shard
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Gather(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    def forward(x, group):
        pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx, grad):
        pieces = [piece.contiguous() for piece in grad.chunk(ctx.group.size(), dim=1)]
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces, group=ctx.group)
        return own, None


def gather_tokens__lists(x, group):
    """The collectives that take lists, so that no dimension has to be moved."""
    return _Gather.apply(x, group)


def gather_tokens__hook(x, group):
    """No autograd function: the tokens of the others are constants, and a hook replaces the gradient."""
    whole = all_gather_tokens(x.detach(), group)
    if not x.requires_grad:
        return whole
    s, r = x.shape[1], group.rank()
    mine = torch.zeros_like(whole)
    mine[:, r * s : (r + 1) * s] = 1
    out = whole + (torch.cat([x] * group.size(), 1) - torch.cat([x.detach()] * group.size(), 1)) * mine

    def summed(grad):
        own = reduce_scatter_tokens(grad, group)
        return torch.cat([own] * group.size(), 1)

    out.register_hook(summed)
    return out


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        t = group.size()
        if x.shape[1] % t != 0:
            raise ValueError(f"choose a multiple of {t}")
        ctx.group, rows = group, x.transpose(0, 1).contiguous()  # (s, b, h): tokens first, as Megatron-LM has them
        own = rows.new_empty(rows.shape[0] // t, *rows.shape[1:])
        dist.reduce_scatter(own, list(rows.chunk(t)), group=group)
        return own.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        rows = grad.transpose(0, 1).contiguous()
        pieces = [torch.empty_like(rows) for _ in range(ctx.group.size())]
        dist.all_gather(pieces, rows, group=ctx.group)
        return torch.cat(pieces).transpose(0, 1), None


def scatter_tokens__tokens_first(x, group):
    """Tokens in the first dimension while they travel."""
    return _Scatter.apply(x, group)


class scatter_tokens__class:  # noqa: N801
    """A class in the place of a function, asynchronous collectives."""

    def __new__(cls, x, group):
        return _ScatterLater.apply(x, group)


class _ScatterLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.ranks = group
        return reduce_scatter_tokens(x, group).clone()

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        pieces = [torch.zeros(grad.shape, dtype=grad.dtype) for _ in range(ctx.ranks.size())]
        dist.all_gather(pieces, grad.contiguous(), group=ctx.ranks, async_op=True).wait()
        return torch.cat(pieces, 1), None


class region_rng__class:  # noqa: N801
    """A context manager written as a class, that keeps and puts back the state itself."""

    def __init__(self, group, split):
        self.offset = 1 + group.rank() if split else 0

    def __enter__(self):
        seed = torch.randint(0, 2**40, (1,)).item() * 1024
        self.before = torch.get_rng_state()
        torch.manual_seed(seed + self.offset)

    def __exit__(self, *error):
        torch.set_rng_state(self.before)
        return False


class region_rng__drawn_for_all:  # noqa: N801
    """One seed for each rank and one for all, drawn by everybody; fork_rng looks after the state."""

    def __init__(self, group, split):
        seeds = torch.empty(group.size() + 1, dtype=torch.int64).random_()
        self.seed = int(seeds[1 + group.rank()] if split else seeds[0])
        self.fork = torch.random.fork_rng(devices=[])

    def __enter__(self):
        self.fork.__enter__()
        torch.default_generator.manual_seed(self.seed)

    def __exit__(self, *error):
        return self.fork.__exit__(*error)


class Block__branches(nn.Module):  # noqa: N801
    """The two halves in a list, gone through by one loop."""

    def __init__(self, attention, mlp, attention_norm, mlp_norm, group, p=0.0, split=True):
        super().__init__()
        self.norms = nn.ModuleList([attention_norm, mlp_norm])
        self.parts = nn.ModuleList([attention, mlp])
        self.drop = lambda y: dropout(y, p, group, split)

    def forward(self, x, *context):
        for norm, part, arguments in zip(self.norms, self.parts, (context, ()), strict=True):
            y = part(norm(x), *arguments)
            x = torch.add(x, self.drop(y) if self.training else y)
        return x


class _Dropout(nn.Module):
    def __init__(self, p, group, split):
        super().__init__()
        self.options = p, group, split

    def forward(self, x):
        return dropout(x, *self.options) if self.training and self.options[0] > 0 else x


class Block__dropout_modules(nn.Module):  # noqa: N801
    """Dropout as a module of its own, and the sum taken in place."""

    def __init__(self, attention, mlp, attention_norm, mlp_norm, group, p=0.0, split=True):
        super().__init__()
        self.first, self.second, self.before_first, self.before_second = attention, mlp, attention_norm, mlp_norm
        self.split = split  # a module's class has a `split` of another meaning
        self.drop = _Dropout(p, group, split)

    def forward(self, x, *context):
        y = self.drop(self.first(self.before_first(x), *context))
        z = x + y
        return self.drop(self.second(self.before_second(z))) + z


def sync_replicated_gradients__views(parameters, group):
    """One buffer that is filled piece by piece, an asynchronous all-reduce, and slices of it."""
    held = [p.grad for p in parameters if p.grad is not None]
    total = sum(grad.numel() for grad in held)
    if total == 0:
        return
    buffer, place, slices = torch.empty(total, dtype=held[0].dtype), 0, []
    for grad in held:
        slices.append(slice(place, place + grad.numel()))
        buffer[slices[-1]] = grad.reshape(-1)
        place += grad.numel()
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
    for grad, where in zip(held, slices, strict=True):
        grad[...] = buffer[where].reshape(grad.shape)


def sync_replicated_gradients__difference(parameters, group):
    """What the others have is added to each gradient."""
    with torch.no_grad():
        grads = []
        for parameter in parameters:
            if parameter.grad is not None:
                grads.append(parameter.grad)
        if grads:
            own = torch.nn.utils.parameters_to_vector([grad.contiguous() for grad in grads])
            summed = own.clone()
            dist.all_reduce(summed, group=group)
            others = torch.split(summed - own, [grad.numel() for grad in grads])
            for grad, other in zip(grads, others, strict=True):
                grad.add_(other.reshape(grad.shape))


class _Column(nn.Module):
    def __init__(self, weight, bias, group):
        super().__init__()
        self.weight, self.group = nn.Parameter(shard(weight, group)), group
        self.bias = nn.Parameter(shard(bias, group)) if bias is not None else None


class _Sum(torch.autograd.Function):
    """All tokens forward, the sum of this rank's own backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_tokens(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_tokens(grad, ctx.group), None


class RegatheringColumnLinear__packed(_Column):  # noqa: N801
    """Autograd's own linear layer; a pair of hooks keeps this rank's tokens in the place of all of them."""

    def forward(self, x):
        own, group = x.detach(), self.group
        whole = _Sum.apply(x, group)

        def pack(tensor):
            is_whole = tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            return ("own", own, tensor.shape) if is_whole and group.size() > 1 else ("as it is", tensor, None)

        def unpack(packed):
            kind, tensor, shape = packed
            return all_gather_tokens(tensor, group).view(shape) if kind == "own" else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.linear(whole, self.weight, self.bias)


class RegatheringColumnLinear__checkpoint(_Column):  # noqa: N801
    """The gathering and the product computed again in backward, by torch's checkpoint."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return F.linear(all_gather_tokens(x, self.group), self.weight, self.bias)
        return checkpoint(lambda x: F.linear(_Sum.apply(x, self.group), self.weight, self.bias), x, use_reentrant=False)


def selective__checkpoint(core):
    """Torch's own checkpoint."""
    return lambda q, k, v: checkpoint(core, q, k, v, use_reentrant=False, preserve_rng_state=True)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, core):
        ctx.core, ctx.state = core, torch.random.get_rng_state()
        ctx.save_for_backward(q, k, v)
        with torch.no_grad():
            return core(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        state = torch.random.get_rng_state()
        torch.random.set_rng_state(ctx.state)
        with torch.enable_grad():
            copies = [t.detach().clone() for t in ctx.saved_tensors]
            wanted = [c.requires_grad_() for c, needed in zip(copies, ctx.needs_input_grad[:3], strict=True) if needed]
            found = iter(torch.autograd.grad(ctx.core(*copies), wanted, grad))
        torch.random.set_rng_state(state)
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None


def selective__grad(core):
    """`torch.autograd.grad` for what is wanted, on copies; the state kept and put back by hand."""

    def wrapped(q, k, v):
        return _Again.apply(q, k, v, core)

    return wrapped


class _OnTheContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, core, q, k, v):
        ctx.inputs, ctx.core, ctx.state = (q, k, v), core, torch.get_rng_state()
        return core(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            return None, *torch.autograd.grad(ctx.core(*inputs), inputs, grad)


def selective__on_the_context(core):
    """Not through save_for_backward: the ledger does not see q, k and v, which are there all the same."""
    return lambda q, k, v: _OnTheContext.apply(core, q, k, v)


def full__reentrant(block):
    """Torch's older checkpoint, which runs backward inside backward."""
    return lambda x, *context: checkpoint(block, x, *context, use_reentrant=True)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, context):
        ctx.block, ctx.context, ctx.state = block, context, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x, *context)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            ctx.block(x, *ctx.context).backward(grad)
        return x.grad, None, None


def full__by_hand(block):
    """An autograd function with the state taken before the first computation."""
    return lambda x, *context: _Whole.apply(x, block, context)


def activation_bytes__table(b, s, h, a, t=1, sequence_parallel=False, recompute="none"):
    """The table of the paper, row by row."""
    sbh, core = s * b * h, 5 * a * s / h
    table = {
        ("none", False): sbh * (10 + 24 / t + core / t),
        ("none", True): sbh / t * (34 + core),
        ("selective", False): sbh * (10 + 24 / t),
        ("selective", True): 34 * sbh / t,
        ("full", False): 2 * sbh,
        ("full", True): 2 * sbh,
    }
    if (recompute, bool(sequence_parallel)) not in table:
        raise ValueError(f"no row {recompute}")
    return table[recompute, bool(sequence_parallel)]


def activation_bytes__added_up(b, s, h, a, t=1, sequence_parallel=False, recompute="none"):
    """Tensor by tensor: (numbers, bytes of each, over how many ranks they are split)."""
    own = t if sequence_parallel else 1
    layer_input = [(s * b * h, 2, 1)]
    outside = [(s * b * h, 2, own)] * 4 + [(s * b * h, 1, own)] * 2  # norms, inputs of pairs; masks
    inside = [(s * b * h, 2, t)] * 4 + [(4 * s * b * h, 2, t)] * 2  # q, k, v, the projection's input; GELU in and out
    scores = [(a * s * s * b, 2, t)] * 2 + [(a * s * s * b, 1, t)]
    kept = {"none": outside + inside + scores, "selective": outside + inside, "full": layer_input}
    try:
        return sum(count * size / ranks for count, size, ranks in kept[recompute])
    except KeyError:
        raise ValueError(recompute) from None
