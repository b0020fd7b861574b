"""Misconceptions of lesson 05: blocks of keys that are merged."""

from __future__ import annotations

from autograde.misconception import Misconception

MERGE = [
    Misconception(
        exercise="attention.merge",
        name="mean_of_the_outputs",
        hint="This looks like: the two outputs are averaged. One part may have seen keys of far larger scores than "
        "the other. Which of the two should then be heard more?",
        old="return weight_a * out_a + weight_b * out_b, lse",
        new="return (out_a + out_b) / 2, lse",
    ),
    Misconception(
        exercise="attention.merge",
        name="sum_of_the_outputs",
        hint="This looks like: the outputs are added up as they are. Each has been divided by its own sum already. "
        "What would the weights of all keys together add up to?",
        old="return weight_a * out_a + weight_b * out_b, lse",
        new="return out_a + out_b, lse",
    ),
    Misconception(
        exercise="attention.merge",
        name="overflows",
        hint="This looks like: exp is taken of the lse itself, and it is infinite from 710 on. "
        "Only the difference of two logarithms is needed. From what could both be measured?",
        old="lse = torch.logaddexp(lse_a, lse_b)",
        new="lse = torch.log(torch.exp(lse_a) + torch.exp(lse_b))",
    ),
    Misconception(
        exercise="attention.merge",
        name="nothing_is_nan",
        hint="This looks like: rows that have seen nothing in either part become NaN. "
        "What is minus infinity less minus infinity?",
        old="reference = lse.masked_fill(lse.isneginf(), 0.0)  # -inf - -inf would be NaN",
        new="reference = lse",
    ),
    Misconception(
        exercise="attention.merge",
        name="larger_lse",
        hint="This looks like: the lse of both is the larger of the two. Four keys of one score weigh more than two. "
        "What does the smaller part add?",
        old="lse = torch.logaddexp(lse_a, lse_b)",
        new="lse = torch.maximum(lse_a, lse_b)",
    ),
]

ONLINE_SOFTMAX = [
    Misconception(
        exercise="attention.online_softmax",
        name="sum_not_rescaled",
        hint="This looks like: the sum of the weights stays as it was where a block raises the largest score. "
        "From which score were the earlier weights measured, and from which the new ones?",
        old="total = total * rescale + weights.sum(dim=-1)",
        new="total = total + weights.sum(dim=-1)",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="output_not_rescaled",
        hint="This looks like: the weighted values stay as they were where a block raises the largest score, and only "
        "the sum is rescaled. What are the two divided by in the end, and by what was each multiplied?",
        old="weighted = weighted * rescale[..., None] + weights @ values",
        new="weighted = weighted + weights @ values",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="starts_from_zero",
        hint="This looks like: m starts from a number. What if every score is below it?",
        old="raised = torch.maximum(largest, scores.amax(dim=-1))",
        new="raised = torch.maximum(largest, scores.amax(dim=-1)).clamp(min=0)",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="starts_from_a_low_number",
        hint="This looks like: m starts from a number, and a low one. What if every score is below it?",
        old="raised = torch.maximum(largest, scores.amax(dim=-1))",
        new="raised = torch.maximum(largest, scores.amax(dim=-1)).clamp(min=-1e4)",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="no_maximum",
        hint="This looks like: exp is taken of the scores as they are. With scores of ordinary size that is right. "
        "What is exp(10000)?",
        old="raised = torch.maximum(largest, scores.amax(dim=-1))",
        new="raised = torch.zeros_like(largest)",
        also=(("return out, largest + torch.log(total)", "return out, torch.log(total)"),),
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="nothing_rescaled",
        hint="This looks like: neither sum is changed where a block raises the largest score. "
        "From which score was each of their terms measured?",
        old="weighted = weighted * rescale[..., None] + weights @ values",
        new="weighted = weighted + weights @ values",
        also=(("total = total * rescale + weights.sum(dim=-1)", "total = total + weights.sum(dim=-1)"),),
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="mean_of_the_blocks",
        hint="This looks like: each block has a softmax of its own, and the outputs are averaged. "
        "One block may have seen far larger scores than another. Which should then be heard more?",
        source="""
        def online_softmax(blocks):
            out, lse, number = 0, None, 0
            for scores, values in blocks:
                out = out + torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values
                part = torch.logsumexp(scores, dim=-1)
                lse = part if lse is None else torch.logaddexp(lse, part)
                number += 1
            return out / number, lse
        """,
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="largest_of_the_block",
        hint="This looks like: each block is measured from its own largest score, be it lower than before. Then the "
        "sums so far are multiplied with exp(old - new). What is that where scores fall from block to block?",
        old="raised = torch.maximum(largest, scores.amax(dim=-1))",
        new="raised = scores.amax(dim=-1)",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="nothing_is_nan",
        hint="This looks like: a row that sees nothing of the first block is NaN from then on. "
        "Its largest score is minus infinity: what is minus infinity less that?",
        old="reference = raised.masked_fill(raised.isneginf(), 0.0)",
        new="reference = raised",
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="blocks_kept",
        hint="This looks like: all blocks are collected, and one softmax is taken of them. The numbers are right. "
        "How much memory does a sequence of a million tokens take that way?",
        source="""
        def online_softmax(blocks):
            blocks = list(blocks)
            scores = torch.cat([scores for scores, _ in blocks], dim=-1)
            values = torch.cat([values for _, values in blocks], dim=-2)
            lse = torch.logsumexp(scores, dim=-1)
            return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values, lse
        """,
    ),
    Misconception(
        exercise="attention.online_softmax",
        name="a_softmax_of_each_block",
        hint="This looks like: each block has a softmax of its own, and the outputs are added up. "
        "Over which keys should the weights of a row add up to 1?",
        source="""
        def online_softmax(blocks):
            out, lse = 0, None
            for scores, values in blocks:
                out = out + torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values
                part = torch.logsumexp(scores, dim=-1)
                lse = part if lse is None else torch.logaddexp(lse, part)
            return out, lse
        """,
    ),
]
