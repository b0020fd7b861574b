"""Misconceptions of lesson 04: a block and the gradients of what is whole."""

from __future__ import annotations

from autograde.misconception import Misconception

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
    Misconception(
        exercise="sequence.Block",
        name="first_of_the_context",
        hint="This looks like: of what comes after x, not everything reaches the attention. "
        "How many things may come after x?",
        old="y = self.attention(self.attention_norm(x), *context)",
        new="y = self.attention(self.attention_norm(x), *context[:1])",
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
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="other_memory",
        hint="This looks like: `.grad` is the same tensor as before with other memory under it. A bucket of data "
        "parallelism holds a view of the old memory. What does it see of the sum?",
        old="grad.copy_(total.view_as(grad))",
        new="grad.data = total.view_as(grad)",
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="generator_used_up",
        hint="This looks like: the list of gradients is empty where it is summed. Are "
        "there none, as on some ranks, or is `parameters` gone through twice, the second time from its end?",
        old="grads = [parameter.grad for parameter in parameters if parameter.grad is not None]",
        new="""
        if sum(parameter.grad is not None for parameter in parameters) == 0:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        """,
        also=(
            (
                """
                if not grads:
                    return
                """,
                "",
            ),
        ),
    ),
    Misconception(
        exercise="sequence.sync_replicated_gradients",
        name="generator_begun",
        hint="This looks like: a look at whether there is any gradient takes the first of the generator away, and the "
        "sum does without it. What can be gone through as often as you like?",
        old="grads = [parameter.grad for parameter in parameters if parameter.grad is not None]",
        new="""
        if not any(parameter.grad is not None for parameter in parameters):
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        """,
    ),
]
