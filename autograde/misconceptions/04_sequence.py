"""Misconceptions of lesson 04: sequence parallelism and recomputation."""

from __future__ import annotations

from autograde.misconception import Misconception

GATHER_TOKENS = [
    Misconception(
        exercise="sequence.gather_tokens",
        name="outside_autograd",
        hint="This looks like: the tokens are gathered, and autograd knows nothing of it, so x gets no gradient. "
        "What tells autograd how to go back through an exchange?",
        source="""
        def gather_tokens(x, group):
            return all_gather_tokens(x, group)
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="own_piece_backward",
        hint="This looks like: backward cuts this rank's tokens out of its own gradient. The other ranks used the same "
        "tokens in their parts of the matrices. Where does what they found go?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None",
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="sequences_mixed",
        hint="This looks like: the ranks' pieces are taken as they come, one after the other along the first "
        "dimension. With one sequence that is right. Where do the second sequence's tokens of rank 0 stand?",
        old="return all_gather_tokens(x, group)",
        new="""
        t, rows = group.size(), x.contiguous()
        pieces = [torch.empty_like(rows) for _ in range(t)]
        dist.all_gather(pieces, rows, group=group)
        return torch.stack(pieces).view(x.shape[0], t * x.shape[1], *x.shape[2:])
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="all_reduced_backward",
        hint="This looks like: backward adds up the gradients of all tokens on every rank, and then keeps its own. "
        "The numbers are right. How many of the sums that have travelled does a rank throw away?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="averaged_backward",
        hint="This looks like: the gradients are averaged over the ranks. "
        "A token that is used in four places has four gradients. What is the gradient of the token?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="return reduce_scatter_tokens(grad, ctx.group) / ctx.group.size(), None",
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="whole_world",
        hint="This looks like: the tokens of all ranks are gathered, whatever the group. "
        "Which ranks share these sequences?",
        old="ctx.group = group",
        new="ctx.group = group = dist.group.WORLD",
    ),
]

SCATTER_TOKENS = [
    Misconception(
        exercise="sequence.scatter_tokens",
        name="cut_without_a_sum",
        hint="This looks like: each rank keeps its tokens of its own part, and nobody adds the parts up. "
        "What did the second layer of the pair leave on each rank: results, or parts of a sum?",
        old="return reduce_scatter_tokens(x, group)",
        new="""
        if x.shape[1] % group.size():
            raise ValueError("cannot be split")
        return x.chunk(group.size(), 1)[group.rank()].clone()
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="all_reduce_then_cut",
        hint="This looks like: every rank gets the sums of all tokens, and then keeps its own. "
        "The numbers are right. What does a rank do with the sums of the others' tokens?",
        old="return reduce_scatter_tokens(x, group)",
        new="""
        if x.shape[1] % group.size():
            raise ValueError("cannot be split")
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(group.size(), 1)[group.rank()].clone()
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="zeros_for_the_others",
        hint="This looks like: backward puts the gradient of this rank's tokens in its place, with zeros around it. "
        "That undoes a cut. But this rank's numbers for the others' tokens: did they not go into a sum as well?",
        old="return all_gather_tokens(grad, ctx.group), None",
        new="""
        t, r = ctx.group.size(), ctx.group.rank()
        empty = torch.zeros_like(grad)
        return torch.cat([grad if piece == r else empty for piece in range(t)], 1), None
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="divided_backward",
        hint="This looks like: the gradient is divided by the number of ranks. "
        "Each part goes into the sum as it is: by how much does the sum change when one part does?",
        old="return all_gather_tokens(grad, ctx.group), None",
        new="return all_gather_tokens(grad, ctx.group) / ctx.group.size(), None",
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="averaged",
        hint="This looks like: the parts are averaged over the ranks. "
        "A matrix product split in pieces is the sum of the pieces. What does the division do to it?",
        old="return reduce_scatter_tokens(x, group)",
        new="return reduce_scatter_tokens(x, group) / group.size()",
    ),
]

REGION_RNG = [
    Misconception(
        exercise="sequence.region_rng",
        name="same_everywhere",
        hint="This looks like: all ranks draw the same numbers, also where they hold different tokens. "
        "Then token 0 and the first token of the next rank lose the same features, always. What could tell the ranks "
        "apart?",
        old="torch.manual_seed(seed + group.rank() if split else seed)",
        new="torch.manual_seed(seed)",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="different_everywhere",
        hint="This looks like: every rank draws numbers of its own, also where all hold the same values. "
        "What becomes of copies that are to be equal, when each drops something else?",
        old="torch.manual_seed(seed + group.rank() if split else seed)",
        new="torch.manual_seed(seed + group.rank())",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="one_fixed_seed",
        hint="This looks like: the seed is the same at every call, so each region, and each step of training, drops "
        "the same elements. From what could a seed follow that is new each time, and equal on all ranks?",
        old="seed = int(torch.randint(2**62, ()))",
        new="seed = 1234",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="seed_taken_back",
        hint="This looks like: the seed is drawn, and then the state from before is put back, so the next region draws "
        "the same one. What may the outside notice of a region, and what must it notice?",
        old="""
        seed = int(torch.randint(2**62, ()))
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
        """,
        new="""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            seed = int(torch.randint(2**62, ()))
            torch.manual_seed(seed + group.rank() if split else seed)
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="state_not_put_back",
        hint="This looks like: after the region, torch goes on with the region's numbers. "
        "They are unlike on the ranks. What happens at the next place where all have to draw the same?",
        old="""
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        torch.manual_seed(seed + group.rank() if split else seed)
        yield
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="not_put_back_after_an_error",
        hint="This looks like: the state is put back at the end, unless something goes wrong inside. "
        "Which of your lines is still reached when the region raises an exception?",
        old="""
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        state = torch.get_rng_state()
        torch.manual_seed(seed + group.rank() if split else seed)
        yield
        torch.set_rng_state(state)
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="counted_passes",
        hint="This looks like: a count of your own makes the passes differ. Recomputation puts torch's random state "
        "back and goes through the region again, to drop the same elements. What does your count say then?",
        source="""
        passes = 0


        @contextmanager
        def region_rng(group, split):
            global passes
            passes += 1
            seed = 1_000 * passes + 500 * split
            with torch.random.fork_rng([]):
                torch.manual_seed(seed + group.rank() if split else seed)
                yield
        """,
    ),
]

BLOCK = [
    Misconception(
        exercise="sequence.Block",
        name="norm_of_all_tokens",
        hint="This looks like: the tokens are gathered before the norm, and every rank normalises all of them. "
        "The values are right. What was it that sequence parallelism was to save?",
        old="y = self.attention(self.attention_norm(x), *context)",
        new="""
        own = (lambda y: y.chunk(self.group.size(), 1)[self.group.rank()]) if self.split_tokens else (lambda y: y)
        whole = gather_tokens(x, self.group) if self.split_tokens else x
        y = self.attention(own(self.attention_norm(whole)), *context)
        """,
    ),
    Misconception(
        exercise="sequence.Block",
        name="norm_after_the_part",
        hint="This looks like: the norm stands after the attention or the MLP. "
        "The docstring writes the block as a formula: what is applied first, and what last?",
        old="y = self.attention(self.attention_norm(x), *context)",
        new="y = self.attention_norm(self.attention(x, *context))",
        also=(("y = self.mlp(self.mlp_norm(x))", "y = self.mlp_norm(self.mlp(x))"),),
    ),
    Misconception(
        exercise="sequence.Block",
        name="sum_with_the_normalised",
        hint="This looks like: what the part gives is added to the normalised x. "
        "What runs from the first layer to the last without any norm on its way?",
        old="y = self.attention(self.attention_norm(x), *context)",
        new="x = self.attention_norm(x)\ny = self.attention(x, *context)",
        also=(("y = self.mlp(self.mlp_norm(x))", "x = self.mlp_norm(x)\ny = self.mlp(x)"),),
    ),
    Misconception(
        exercise="sequence.Block",
        name="masks_alike",
        hint="This looks like: the ranks drop the same elements of different tokens. "
        "Which function knows what the ranks have in common, and what it has to be told?",
        old="x = x + dropout(y, p, self.group, self.split_tokens)",
        new="x = x + F.dropout(y, p)",
        also=(("return x + dropout(y, p, self.group, self.split_tokens)", "return x + F.dropout(y, p)"),),
    ),
    Misconception(
        exercise="sequence.Block",
        name="always_split",
        hint="This looks like: the dropouts always take the tokens to be split. "
        "In tensor parallelism alone, what do the ranks hold at this place, and what must their masks be?",
        old="x = x + dropout(y, p, self.group, self.split_tokens)",
        new="x = x + dropout(y, p, self.group, True)",
        also=(
            (
                "return x + dropout(y, p, self.group, self.split_tokens)",
                "return x + dropout(y, p, self.group, True)",
            ),
        ),
    ),
    Misconception(
        exercise="sequence.Block",
        name="drops_in_evaluation",
        hint="This looks like: elements are dropped after `block.eval()` as well. "
        "How does a module of torch know whether it is being trained?",
        old="p = self.p if self.training else 0.0",
        new="p = self.p",
    ),
]

SYNC_REPLICATED_GRADIENTS = [
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="averaged",
        hint="This looks like: the gradients are averaged over the ranks. Each rank has the gradient of its own "
        "tokens, and the loss is already a mean over all of them. What is left to divide?",
        old="dist.all_reduce(flat, group=group)",
        new="dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)",
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="one_by_one",
        hint="This looks like: an all-reduce for each gradient. The sums are right. "
        "A model has hundreds of small vectors: what does each message cost, however small it is?",
        old="""
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
        """,
        new="""
        for grad in grads:
            total = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            grad.copy_(total)
        """,
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="sum_goes_nowhere",
        hint="This looks like: the sums are computed, and the gradients are as they were. `torch.cat` makes a new "
        "tensor, and a generator can be gone through once: who writes the sums back, and where to?",
        old="""
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
        """,
        new="",
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="new_tensors",
        hint="This looks like: `.grad` becomes a new tensor, and whoever held the old one, such as a bucket of data "
        "parallelism, still has this rank's part. How is a tensor given other numbers?",
        old="grads = [parameter.grad for parameter in parameters if parameter.grad is not None]",
        new="""
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in parameters]
        """,
        also=(
            (
                """
                for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(total.view_as(grad))
                """,
                """
                for parameter, total in zip(parameters, flat.split([grad.numel() for grad in grads]), strict=True):
                    parameter.grad = total.view_as(parameter)
                """,
            ),
        ),
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="whole_world",
        hint="This looks like: the gradients of all ranks are added up, whatever the group. "
        "Which ranks had the other tokens of the same sequences?",
        old="dist.all_reduce(flat, group=group)",
        new="dist.all_reduce(flat)",
    ),
]

REGATHERING_COLUMN_LINEAR = [
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="own_tokens_only",
        hint="This looks like: the gradient of the weight is made of this rank's tokens alone. "
        "These rows of the weight are on no other rank. How many tokens did they work for?",
        old="weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)",
        new="""
        own_rows = grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].flatten(0, -2)  # (b·s/t, out/t)
        weight_grad = own_rows.T @ x.flatten(0, -2)
        """,
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="input_gradient_not_summed",
        hint="This looks like: the gradient of x is this rank's part of it. "
        "Every rank multiplied these tokens with rows of its own. Who adds up what they found?",
        old="x_grad = reduce_scatter_tokens(grad @ weight, ctx.group)",
        new="x_grad = (grad @ weight).chunk(ctx.group.size(), 1)[ctx.group.rank()]",
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="gathered_tokens_kept",
        hint="This looks like: the gathered tokens are kept until backward. The numbers are right. "
        "What is this layer for, if not to keep 1/t of them?",
        old="""
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_tokens(x, group), weight, bias)
        """,
        new="""
        whole = all_gather_tokens(x, group)
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)
        """,
        also=(
            (
                "weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)",
                "weight_grad = grad_rows.T @ x.flatten(0, -2)",
            ),
        ),
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="bias_of_own_tokens",
        hint="This looks like: the gradient of the bias counts this rank's tokens alone. "
        "To how many tokens was it added?",
        old="bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None",
        new="""
        own = grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]
        bias_grad = own.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        """,
    ),
]

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

ACTIVATION_BYTES = [
    Misconception(
        exercise="cost.activation_bytes",
        name="everything_split",
        hint="This looks like: without sequence parallelism all 34 bytes are split by t. "
        "Which of a layer's activations does every rank have for all tokens, in tensor parallelism alone?",
        old="replicated = 10 / t if sequence_parallel else 10",
        new="replicated = 10 / t",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="core_not_split",
        hint="This looks like: the attention core is counted whole on every rank. Who has the scores of which heads?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="return s * b * h * (replicated + 24 / t + core)",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="selective_keeps_nothing_of_attention",
        hint="This looks like: with selective recomputation the whole attention is computed again, 11 bytes of it too. "
        "What does `recompute.selective` take, and what does it keep?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="""
        attention = 8 / t if recompute == "selective" else 0
        return s * b * h * (replicated + 24 / t + core / t - attention)
        """,
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="full_input_split",
        hint="This looks like: with full recomputation the layer's input is split by t. With split tokens a program "
        "can do that, and yours does. What does the paper's table say, which this function is to give?",
        old="return 2 * s * b * h",
        new="return 2 * s * b * h / (t if sequence_parallel else 1)",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="one_byte_for_a_probability",
        hint="This looks like: scores, probabilities and their dropout are counted with other sizes than 16-bit "
        "numbers and masks of one byte. How many bytes do you get for one pair of tokens and one head?",
        old='core = 0 if recompute == "selective" else 5 * a * s / h',
        new='core = 0 if recompute == "selective" else 3 * a * s / h',
    ),
]
