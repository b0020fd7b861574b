"""Misconceptions of lesson 04: recomputation."""

from __future__ import annotations

from autograde.misconception import Misconception

SELECTIVE = [
    Misconception(
        exercise="recompute.selective",
        name="nothing_recomputed",
        hint="This looks like: autograd keeps all that the core computes on its way. "
        "In what mode does a forward leave nothing behind?",
        source="""
        def selective(core):
            def recomputed(q, k, v):
                return core(q, k, v)

            return recomputed
        """,
    ),
    Misconception(
        exercise="recompute.selective",
        name="other_masks_in_backward",
        hint="This looks like: the second computation drops other elements than the first, so the gradient belongs to "
        "an output that nobody saw. From where did the first one's random numbers start?",
        old="torch.set_rng_state(ctx.random_state)",
        new="",
    ),
    Misconception(
        exercise="recompute.selective",
        name="random_state_left_behind",
        hint="This looks like: after backward, torch's random state is the old one from forward. "
        "What will the next step of training draw?",
        old="with torch.random.fork_rng(ctx.devices), torch.enable_grad():",
        new="with torch.enable_grad():",
    ),
    Misconception(
        exercise="recompute.selective",
        name="on_into_the_layers_before",
        hint="This looks like: the second computation is tied to the graph that q, k and v came from, so going back "
        "through it goes on into the layers before. Where is this backward to begin, and where to end?",
        old="inputs = [x.detach().requires_grad_(needed) for x, needed in wanted]",
        new="inputs = [x for x, needed in wanted]",
    ),
    Misconception(
        exercise="recompute.selective",
        name="once_for_each_input",
        hint="This looks like: the core is computed again for q, once more for k, and once more for v. "
        "How many gradients does one backward give?",
        old="out = ctx.core(*inputs)",
        new="""
        for x in (x for x in inputs if x.requires_grad):
            torch.set_rng_state(ctx.random_state)
            x.grad = torch.autograd.grad(ctx.core(*inputs), x, grad)[0]
        """,
        also=(("torch.autograd.backward(out, grad)", ""),),
    ),
    Misconception(
        exercise="recompute.selective",
        name="output_kept_too",
        hint="This looks like: the core's output is kept beside q, k and v. "
        "Which of the four can be made from the other three?",
        old="""
        ctx.save_for_backward(*inputs)
        return core(*inputs)
        """,
        new="""
        out = core(*inputs)
        ctx.save_for_backward(*inputs, out)
        return out
        """,
        also=(
            (
                "wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)",
                "wanted = zip(ctx.saved_tensors[:-1], ctx.needs_input_grad[1:], strict=True)",
            ),
        ),
    ),
    Misconception(
        exercise="recompute.selective",
        name="state_taken_after_the_core",
        hint="This looks like: the random state is kept as it is when the core has run, so the second computation "
        "drops other elements than the first. With which state did the first one begin?",
        old="""
        ctx.core, ctx.random_state = core, torch.get_rng_state()
        ctx.devices, ctx.device_states = get_device_states(*inputs)  # those of GPUs
        ctx.save_for_backward(*inputs)
        return core(*inputs)
        """,
        new="""
        out = core(*inputs)
        ctx.core, ctx.random_state = core, torch.get_rng_state()
        ctx.devices, ctx.device_states = get_device_states(*inputs)  # those of GPUs
        ctx.save_for_backward(*inputs)
        return out
        """,
    ),
    Misconception(
        exercise="recompute.selective",
        name="output_on_the_context",
        hint="This looks like: the core's output is kept until backward. Which line of your backward needs it?",
        old="return core(*inputs)",
        new="""
        ctx.out = core(*inputs)
        return ctx.out
        """,
    ),
    Misconception(
        exercise="recompute.selective",
        name="always_three_runs",
        hint="This looks like: the core is computed again once for each of q, k and v, also where one needs no "
        "gradient. How many gradients does one backward give?",
        old="out = ctx.core(*inputs)",
        new="""
        for x in inputs:
            torch.set_rng_state(ctx.random_state)
            out = ctx.core(*inputs)
            if x.requires_grad:
                x.grad = torch.autograd.grad(out, x, grad)[0]
        """,
        also=(("torch.autograd.backward(out, grad)", ""),),
    ),
]

LATE = '''
class _RecomputedBlock(torch.autograd.Function):
    """Keeps x and the random state; backward computes the block again, and goes back through that."""

    @staticmethod
    def forward(ctx, x: Tensor, block: Callable[..., Tensor], context: tuple) -> Tensor:
        out = block(x, *context)
        ctx.block, ctx.context, ctx.random_state = block, context, torch.get_rng_state()
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            out = ctx.block(x, *ctx.context)
        torch.autograd.backward(out, grad)
        return x.grad, None, None


def full(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The block, parameters and communication and all, that keeps its input alone and is computed again in backward.

    `block(x, *context)` -> out. Returns a function with the same arguments, result, gradients and random numbers. It
    keeps 2·s·b·h bytes a layer in half precision (a t-th of it where x is this rank's tokens), and costs one more
    forward: about a third more FLOPs. The block's forward communication is made a second time too.
    """

    def recomputed(x: Tensor, *context: Any) -> Tensor:
        return _RecomputedBlock.apply(x, block, context)

    return recomputed
'''

FULL = [
    Misconception(
        exercise="recompute.full",
        name="state_taken_too_late",
        hint="This looks like: the second computation drops other elements than the first. "
        "At which moment is the random state what the first one began with?",
        source=LATE,
    ),
    Misconception(
        exercise="recompute.full",
        name="nothing_recomputed",
        hint="This looks like: autograd keeps all that the block computes on its way. What does backward need to have, "
        "if it can go through the block once more?",
        old="return checkpoint(block, x, *context, use_reentrant=False)",
        new="return block(x, *context)",
    ),
    Misconception(
        exercise="recompute.full",
        name="random_state_left_behind",
        hint="This looks like: after backward, torch's random state is the old one from forward. "
        "What will the next step of training draw?",
        source="""
        class _RecomputedBlock(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, block, context):
                ctx.block, ctx.context, ctx.random_state = block, context, torch.get_rng_state()
                ctx.save_for_backward(x)
                return block(x, *context)

            @staticmethod
            def backward(ctx, grad):
                x = ctx.saved_tensors[0].detach().requires_grad_()
                torch.set_rng_state(ctx.random_state)
                with torch.enable_grad():
                    out = ctx.block(x, *ctx.context)
                torch.autograd.backward(out, grad)
                return x.grad, None, None


        def full(block):
            def recomputed(x, *context):
                return _RecomputedBlock.apply(x, block, context)

            return recomputed
        """,
    ),
    Misconception(
        exercise="recompute.full",
        name="parameters_without_gradient",
        hint="This looks like: x gets its gradient and the block's parameters get none. "
        "Of what does the second computation's graph consist, and what does `torch.autograd.grad` hand back of it?",
        source="""
        class _RecomputedBlock(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, block, context):
                ctx.block, ctx.context, ctx.random_state = block, context, torch.get_rng_state()
                ctx.save_for_backward(x)
                return block(x, *context)

            @staticmethod
            def backward(ctx, grad):
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.random.fork_rng([]), torch.enable_grad():
                    torch.set_rng_state(ctx.random_state)
                    out = ctx.block(x, *ctx.context)
                return torch.autograd.grad(out, x, grad)[0], None, None


        def full(block):
            def recomputed(x, *context):
                return _RecomputedBlock.apply(x, block, context)

            return recomputed
        """,
    ),
]
