"""Wrong solutions of lesson 02: buckets, when they start, and what is taken out of them."""

from __future__ import annotations

from autograde.misconception import Misconception

ORDERED = "for p in reversed([p for p in dict.fromkeys(parameters) if p.requires_grad]):"

MAKE_BUCKETS = [
    Misconception(
        exercise="data.make_buckets",
        name="registered_order",
        hint="This looks like: parameters stand in the order in which the model has them. Backward begins at the end. "
        "When would the first bucket be full?",
        old=ORDERED,
        new="for p in [p for p in dict.fromkeys(parameters) if p.requires_grad]:",
    ),
    Misconception(
        exercise="data.make_buckets",
        name="closed_when_over",
        hint="This looks like: a bucket is closed once it is over the limit. "
        "How large is it then, with the parameter that filled it?",
        old="if not buckets or size + p.nbytes > bucket_bytes or p.dtype != buckets[-1][0].dtype:",
        new="if not buckets or size > bucket_bytes or p.dtype != buckets[-1][0].dtype:",
    ),
    Misconception(
        exercise="data.make_buckets",
        name="elements_for_bytes",
        hint="This looks like: elements are counted, and the limit is in bytes. How many bytes has a float32?",
        old="""
        if not buckets or size + p.nbytes > bucket_bytes or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.nbytes
        """,
        new="""
        if not buckets or size + p.numel() > bucket_bytes or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel()
        """,
    ),
    Misconception(
        exercise="data.make_buckets",
        name="dtypes_mixed",
        hint="This looks like: a bucket may hold numbers of several dtypes. "
        "It is to travel as one tensor: what dtype would that have?",
        old="if not buckets or size + p.nbytes > bucket_bytes or p.dtype != buckets[-1][0].dtype:",
        new="if not buckets or size + p.nbytes > bucket_bytes:",
    ),
    Misconception(
        exercise="data.make_buckets",
        name="frozen_too",
        hint="This looks like: parameters that need no gradient are in buckets as well. "
        "When would such a bucket be ready?",
        old=ORDERED,
        new="for p in reversed(list(dict.fromkeys(parameters))):",
    ),
    Misconception(
        exercise="data.make_buckets",
        name="shared_twice",
        hint="This looks like: a parameter that appears twice is in two places. "
        "It has one gradient: what becomes of that when both places sum it?",
        old=ORDERED,
        new="for p in reversed([p for p in parameters if p.requires_grad]):",
    ),
    Misconception(
        exercise="data.make_buckets",
        name="four_bytes_each",
        hint="This looks like: every number is taken for a float32. "
        "How many bytes has one in double precision, and in half?",
        old="if not buckets or size + p.nbytes > bucket_bytes or p.dtype != buckets[-1][0].dtype:",
        new="if not buckets or size + 4 * p.numel() > bucket_bytes or p.dtype != buckets[-1][0].dtype:",
        also=(("size += p.nbytes", "size += 4 * p.numel()"),),
    ),
    Misconception(
        exercise="data.make_buckets",
        name="frozen_counted",
        hint="This looks like: a parameter that needs no gradient is left out, and its bytes are counted. "
        "What of it will travel?",
        old=ORDERED,
        new="""
        for p in reversed(list(dict.fromkeys(parameters))):
            if not p.requires_grad:
                size += p.nbytes
                continue
        """,
    ),
]

START_IN_ORDER = [
    Misconception(
        exercise="data.start_in_order",
        name="as_they_come",
        hint="This looks like: a bucket starts as soon as it is ready itself, whatever is missing before it. "
        "Another rank may have another bucket ready first. Which of them meet in one all-reduce?",
        old="""
        for _, missing in waiting:
            missing.discard(p)
        while waiting and not waiting[0][1]:
            start(waiting.popleft()[0])
        """,
        new="""
        for bucket in list(waiting):
            bucket[1].discard(p)
            if not bucket[1]:
                waiting.remove(bucket)
                start(bucket[0])
        """,
    ),
    Misconception(
        exercise="data.start_in_order",
        name="one_for_each_gradient",
        hint="This looks like: a gradient that arrives starts one bucket at most. "
        "What if the bucket that all waited for comes last?",
        old="while waiting and not waiting[0][1]:\n    start(waiting.popleft()[0])\n",
        new="if waiting and not waiting[0][1]:\n    start(waiting.popleft()[0])\n",
        also=(("while waiting:", "while len(waiting):"),),
    ),
    Misconception(
        exercise="data.start_in_order",
        name="hooks_stay",
        hint="This looks like: hooks are still there after finish. What will they do in the next backward?",
        old="for hook in hooks:\n    hook.remove()",
        new="hooks.clear()",
    ),
    Misconception(
        exercise="data.start_in_order",
        name="rest_forgotten",
        hint="This looks like: what backward did not make ready is never started. "
        "A rank that did not use a layer: what do the other ranks wait for?",
        old="while waiting:\n    start(waiting.popleft()[0])",
        new="waiting.clear()",
    ),
    Misconception(
        exercise="data.start_in_order",
        name="before_it_is_added",
        hint="This looks like: the hook runs when the gradient arrives, before it is added to p.grad. "
        "What does a bucket hold that is taken at this moment?",
        old="hooks = [p.register_post_accumulate_grad_hook(accumulated) for bucket in buckets for p in bucket]",
        new="hooks = [p.register_hook(lambda _, p=p: accumulated(p)) for bucket in buckets for p in bucket]",
    ),
    Misconception(
        exercise="data.start_in_order",
        name="old_gradients_count",
        hint="This looks like: a bucket is taken for ready when each of its parameters has a gradient. "
        "With several micro-batches, who says that it is one of this backward?",
        old="""
        for _, missing in waiting:
            missing.discard(p)
        while waiting and not waiting[0][1]:
            start(waiting.popleft()[0])
        """,
        new="""
        while waiting and all(q.grad is not None for q in buckets[waiting[0][0]]):
            start(waiting.popleft()[0])
        """,
    ),
]

TAKE_GRADIENTS = [
    Misconception(
        exercise="data.take_gradients",
        name="gradients_stay",
        hint="This looks like: the gradients are copied, and stay where they were. "
        "Backward adds the next ones to what it finds. What is summed over the ranks the second time?",
        old="""
        for p in parameters:
            p.grad = None
        keep("gradients", flat)
        """,
        new="""
        keep("gradients", flat)
        """,
    ),
    Misconception(
        exercise="data.take_gradients",
        name="zeroed_not_freed",
        hint="This looks like: the gradients are set to zero, and their memory stays. "
        "For how long does a rank of stage 2 hold whole gradients then?",
        old="""
        for p in parameters:
            p.grad = None
        """,
        new="""
        for p in parameters:
            if p.grad is not None:
                p.grad = torch.zeros_like(p)
        """,
    ),
    Misconception(
        exercise="data.take_gradients",
        name="missing_left_out",
        hint="This looks like: a parameter without a gradient has no place in the tensor. "
        "Another rank has used it. Do the two tensors still fit together?",
        old="grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]",
        new="grads = [p.grad.flatten() for p in parameters if p.grad is not None]",
    ),
    Misconception(
        exercise="data.take_gradients",
        name="padding_in_front",
        hint="This looks like: the zeros that fill up the tensor stand at its beginning. "
        "Whose piece would the first gradient be in?",
        old="flat = torch.cat([*grads, parameters[0].new_zeros(padding)])",
        new="flat = torch.cat([parameters[0].new_zeros(padding), *grads])",
    ),
    Misconception(
        exercise="data.take_gradients",
        name="no_padding",
        hint="This looks like: no zeros follow. A reduce-scatter cuts the tensor into n pieces of one length. "
        "What if n does not divide it?",
        old="flat = torch.cat([*grads, parameters[0].new_zeros(padding)])",
        new="flat = torch.cat(grads)",
    ),
]
