"""The two ends of a language model, with the vocabulary split over a group of ranks (Megatron-LM, section 3).

Rank r of t keeps the r-th piece of ceil(V/t) rows of the vocabulary V. Where t does not divide V, rows of zeros fill
the last pieces: they belong to no token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.tensor.linear import Exchange, copy_to_ranks, shard, sum_over_ranks


class VocabEmbedding(nn.Module):
    """The embedding of tokens, with its rows split over `group`.

    Each rank looks up the tokens whose rows it keeps and gives zeros for the others; the sum over ranks is the
    embedding: one all-reduce forward, none backward.
    """

    split = {"weight": 0}

    def __init__(self, weight: Tensor, group: dist.ProcessGroup, leave: Exchange | None = None):
        """`weight` (V, h) is the whole embedding. self.weight (ceil(V/t), h), an `nn.Parameter`, is this rank's part.

        Rank r keeps the rows from r·ceil(V/t) on, and rows of zeros where V has no more. `leave(rows, group)` is what
        the rows pass: `sum_over_ranks` where None is given.
        """
        super().__init__()
        self.group, self.leave = group, leave or sum_over_ranks
        self.weight = nn.Parameter(shard(F.pad(weight, (0, 0, 0, -len(weight) % group.size())), group))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (b, s), numbers from 0 to V - 1, equal on all ranks -> (b, s, h), equal on all ranks."""
        local = tokens - self.group.rank() * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(mine, 0), self.weight)  # (b, s, h)
        return self.leave(rows.masked_fill(~mine[..., None], 0), self.group)


class VocabLogits(nn.Module):
    """The output layer: the logits of this rank's piece of the vocabulary. The whole logits exist nowhere.

    For tied embeddings set its `weight` to that of the `VocabEmbedding`.
    """

    split = {"weight": 0}

    def __init__(self, weight: Tensor, group: dist.ProcessGroup, enter: Exchange | None = None):
        """`weight` (V, h) is that of the whole layer; self.weight (ceil(V/t), h) is this rank's part.

        `enter(x, group)` is what the input passes first: `copy_to_ranks` where None is given.
        """
        super().__init__()
        self.group, self.enter = group, enter or copy_to_ranks
        self.weight = nn.Parameter(shard(F.pad(weight, (0, 0, 0, -len(weight) % group.size())), group))
        padding = torch.arange(len(self.weight)) + group.rank() * len(self.weight) >= len(weight)
        never = torch.zeros(len(self.weight), dtype=weight.dtype).masked_fill(padding, -torch.inf)
        # A bias of -inf costs no copy of the logits, and gives padding the probability 0 and no gradient.
        self.register_buffer("padding", never.to(weight.device) if padding.any() else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., h), equal on all ranks -> (..., ceil(V/t)), with -inf in the columns that belong to no token."""
        return F.linear(self.enter(x, self.group), self.weight, self.padding)


def vocab_cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup, ignore_index: int = -100) -> Tensor:
    """The loss of each token, log(sum(exp(logits))) - logits[target], from logits whose vocabulary is split over ranks.

    `logits` (..., V/t): this rank's piece, pieces in the order of ranks and of one size; -inf where a column belongs to
    no token. `targets` (...): numbers in the whole vocabulary, equal on all ranks. Returns (...), equal on all ranks;
    where the target is `ignore_index`, the loss is 0, and so is its gradient. Half precision is computed in float32.

    The logits never travel. Three all-reduces of one number a token do: the largest logit, so that no exponential
    overflows; the sum of exponentials; the logit of the target, which one rank has. Backward, no communication: the
    gradient of this rank's logits is softmax minus one-hot on every rank, also where the target is elsewhere
    (Megatron-LM, section 3).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(dim=-1)  # (...)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest[..., None]
    total = sum_over_ranks(logits.exp().sum(dim=-1), group)
    local = targets - group.rank() * logits.shape[-1]
    mine = (local >= 0) & (local < logits.shape[-1])
    rows = torch.arange(local.numel(), device=logits.device)  # `gather` would keep all logits for backward
    own = logits.reshape(-1, logits.shape[-1])[rows, local.where(mine, 0).flatten()].view(local.shape)
    target_logit = sum_over_ranks(own.masked_fill(~mine, 0), group)
    return (total.log() - target_logit).masked_fill(targets == ignore_index, 0)
