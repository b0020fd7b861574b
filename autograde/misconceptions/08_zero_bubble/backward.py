"""Misconceptions of lesson 08, the backward in two halves."""

from __future__ import annotations

from autograde.misconception import Misconception

SPLIT_BACKWARD = [
    Misconception(
        exercise="pipeline.split_backward",
        name="all_at_once",
        hint="This looks like: the first half does everything, and nothing is left for the second. The gradients are "
        "right, and the rank before waits as long as ever. Which of them does it wait for?",
        source="""
        def split_backward(output, input, grad=None):
            if isinstance(output, GradientEdge):
                torch.autograd.backward([output], [grad])
            else:
                torch.autograd.backward(output, grad)
            return (None if input is None else input.grad), lambda: None
        """,
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="computed_early_added_late",
        hint="This looks like: the first half computes every gradient, and the second only adds them to .grad. The "
        "rank before waits for all of it. What can be left uncomputed until the second half?",
        source="""
        def split_backward(output, input, grad=None):
            parts = take_apart(output, input)
            weights = [*parts.early, *(weight for entrance in parts.entrances for weight in entrance.weights)]
            inputs = [] if input is None or not input.requires_grad else [input]
            found = list(torch.autograd.grad(output, [*inputs, *weights], grad, allow_unused=True))
            input_grad = found.pop(0) if inputs else None

            def weight_gradients():
                for weight, one in zip(weights, found, strict=True):
                    if one is not None:
                        weight.grad = one if weight.grad is None else weight.grad + one

            return input_grad, weight_gradients
        """,
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="twice_through_the_stage",
        hint="This looks like: the second half starts at the output again, and goes through the whole stage to reach "
        "its weights. The gradients are right. What does that cost in work, in memory, and with ranks that share a "
        "stage in messages?",
        source="""
        def split_backward(output, input, grad=None):
            parts, input_grad = take_apart(output, input), None
            weights = [*parts.early, *(weight for entrance in parts.entrances for weight in entrance.weights)]
            if input is not None and input.requires_grad:
                (input_grad,) = torch.autograd.grad(output, [input], grad, retain_graph=True)

            def weight_gradients():
                torch.autograd.backward([output], [grad], inputs=weights)

            return input_grad, weight_gradients
        """,
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="nothing_released",
        hint="This looks like: what all operations saved stays until the second half is done, also what no weight "
        "needs. Then a micro-batch that waits for its W is as heavy as one that waits for its I. Which operations have "
        "nothing left to do?",
        old="""
        for node in parts.passed:
            release(node)
        """,
        new="",
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="written_over",
        hint="This looks like: a weight's gradient is set, and what was there before is gone. Micro-batches take "
        "turns. What should be in .grad after the second of them?",
        old="_add_gradients(entrance.results, grads, entrance.weights)",
        new="""
        for weight in entrance.weights:
            weight.grad = None
        _add_gradients(entrance.results, grads, entrance.weights)
        """,
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="first_stage_learns_nothing",
        hint="This looks like: where the input needs no gradient, there is nothing to do, in either half. "
        "On the first stage nobody waits for a gradient. But who learns there?",
        old="parts = take_apart(output, input)",
        new="""
        if input is None or not input.requires_grad:
            return None, lambda: None
        parts = take_apart(output, input)
        """,
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="early_ones_left_out",
        hint="This looks like: weights that cannot wait get no gradient at all. They are in no entrance. "
        "In which half is it their turn?",
        old="_add_gradients(early, [next(arrived) for _ in early], None)",
        new="[next(arrived) for _ in early]",
    ),
    Misconception(
        exercise="pipeline.split_backward",
        name="last_entrance_for_all",
        hint="This looks like: each of the functions that were made in a loop computes the last entrance's gradients. "
        "When does a function look up the names in it: where it is made, or where it is called?",
        old="""
        owed = [(entrance, [next(arrived) for _ in entrance.results]) for entrance in parts.entrances]
        """,
        new="""
        owed = []
        for entrance in parts.entrances:
            grads = [next(arrived) for _ in entrance.results]
            owed.append(lambda: _add_gradients(entrance.results, grads, entrance.weights))
        """,
        also=(
            (
                """
                entrance, grads = owed.pop(0)
                _add_gradients(entrance.results, grads, entrance.weights)
                """,
                "owed.pop(0)()",
            ),
        ),
    ),
]

TAKE_APART = [
    Misconception(
        exercise="pipeline.graph.take_apart",
        name="every_use_an_entrance",
        hint="This looks like: a weight that is used twice is asked for at each of its uses. "
        "Between one use and the other nothing stops the gradient. Which uses does the first question reach?",
        old="""
        for weight, nodes in enters.items():
            if len(nodes) > 1 or not can_be_split(nodes[0]):
                early.append(weight)
            else:
                entrances.setdefault(nodes[0], Entrance(results[nodes[0]], [])).weights.append(weight)
        """,
        new="""
        for weight, nodes in enters.items():
            for node in nodes:
                if can_be_split(node):
                    entrances.setdefault(node, Entrance(results[node], [])).weights.append(weight)
                else:
                    early.append(weight)
        """,
    ),
    Misconception(
        exercise="pipeline.graph.take_apart",
        name="one_use_only",
        hint="This looks like: a weight is taken to enter at one operation, also where it is used twice. "
        "A gradient is a sum over all uses. Where is the other one asked for?",
        old="""
        if len(nodes) > 1 or not can_be_split(nodes[0]):
            early.append(weight)
        else:
            entrances.setdefault(nodes[0], Entrance(results[nodes[0]], [])).weights.append(weight)
        """,
        new="""
        node = nodes[-1]  # the last that was found on the way from the output
        if can_be_split(node):
            entrances.setdefault(node, Entrance(results[node], [])).weights.append(weight)
        else:
            early.append(weight)
        """,
    ),
    Misconception(
        exercise="pipeline.graph.take_apart",
        name="all_early",
        hint="This looks like: every weight gets its gradient in the first half. That is exact, and nothing is split "
        "any more. Which weights can wait?",
        old="if len(nodes) > 1 or not can_be_split(nodes[0]):",
        new="if True:",
    ),
    Misconception(
        exercise="pipeline.graph.take_apart",
        name="own_functions_as_well",
        hint="This looks like: also an operation that computes all its gradients at once, whatever it is asked for, "
        "is asked a second time. How often does it run then, with all that it computes and sends?",
        old="if len(nodes) > 1 or not can_be_split(nodes[0]):",
        new="if len(nodes) > 1:",
    ),
    Misconception(
        exercise="pipeline.graph.take_apart",
        name="shared_weights_left_out",
        hint="This looks like: a weight that is used twice is on neither list. In which half does it get its gradient?",
        old="""
        if len(nodes) > 1 or not can_be_split(nodes[0]):
            early.append(weight)
        """,
        new="""
        if len(nodes) > 1:
            continue
        if not can_be_split(nodes[0]):
            early.append(weight)
        """,
    ),
]
