"""Which tokens a rank holds: zig-zag, the positions and labels that go with the tokens, and the work that follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.attention import causal_mask
from fivefold.layout import Layout, check_sizes


def zigzag(x: Tensor, num_ranks: int, dim: int = 1) -> Tensor:
    """Reorder whole sequences so that, cut evenly over n ranks, each has an early and a late chunk of them.

    x has s tokens in `dim`. They are cut into 2n chunks, 0 to 2n - 1; rank i's part of the result is chunk i followed
    by chunk 2n - 1 - i. Returns a tensor of x's shape. Under a causal mask a late token sees more keys than an early
    one, so that with contiguous parts the last rank has the most to do; with these, all have the same. One rank: the
    order stays as it is. Raises a ValueError, here LayoutError, where 2n does not divide s (Llama 3, section 3.3.2).
    """
    check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])
    chunks = x.tensor_split(2 * num_ranks, dim)
    return torch.cat([chunks[c] for i in range(num_ranks) for c in (i, 2 * num_ranks - 1 - i)], dim)


def unzigzag(x: Tensor, num_ranks: int, dim: int = 1) -> Tensor:
    """Put whole sequences back into their order: the inverse of `zigzag`.

    x holds in `dim` the parts of rank 0, rank 1, ... one after the other, each chunk i followed by chunk 2n - 1 - i.
    Returns a tensor of x's shape, in the order of the sequence. Raises a ValueError, here LayoutError, where 2n does
    not divide s.
    """
    check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])
    chunks = x.tensor_split(2 * num_ranks, dim)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


def token_positions(num_tokens: int, num_ranks: int) -> Tensor:
    """Where in the sequence the tokens of each rank stand, in zig-zag order: integers (n, s/n), row r for rank r.

    8 tokens over 2 ranks: [[0, 1, 6, 7], [2, 3, 4, 5]]. Contiguous parts would be torch.arange(s).view(n, s/n). Raises
    LayoutError where 2n does not divide the number of tokens.
    """
    return zigzag(torch.arange(num_tokens), num_ranks, dim=0).view(num_ranks, -1)


class LocalTokens(NamedTuple):
    """One rank's part of a batch."""

    inputs: Tensor  # (b, s/n)
    labels: Tensor  # (b, s/n): the token that follows each input in the sequence
    positions: Tensor  # (s/n,): where each input stands in the sequence


def local_tokens(tokens: Tensor, group: dist.ProcessGroup) -> LocalTokens:
    """This rank's inputs, with the labels and the positions that belong to them, in zig-zag order.

    Returns `inputs` and `labels` (b, s/n), `positions` (s/n,). tokens: integers (b, s + 1), whole sequences, equal on
    all ranks of `group`; each of the first s tokens is an input, and the token after it is its label. Labels are
    shifted while the sequence is whole: the token after the last one of a chunk is on another rank. Positions count
    from the start of the sequence, not of the chunk. No communication. Raises a ValueError, here LayoutError, where
    twice the ranks do not divide s.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = token_positions(inputs.shape[1], group.size())[group.rank()].to(tokens.device)
    return LocalTokens(inputs[:, positions], labels[:, positions], positions)


def causal_work(positions: Tensor) -> Tensor:
    """How many pairs of a query and a key each rank computes under a causal mask: integers (n,).

    positions: (n, s/n), the tokens of each rank, as from `token_positions`. A rank computes its own queries, each over
    every key that it may see, whichever rank holds the key; a pair costs 4·d FLOPs for each head. The ranks wait for
    the one with the most work, so mean/max is the share of the ideal speed: for long sequences n/(2n - 1) with
    contiguous parts (53.3% at 8 ranks), and 1 with zig-zag.
    """
    return (positions + 1).sum(dim=1)


def block_mask(positions: Tensor | None, rank: int, source: int) -> Tensor | None:
    """Which keys of rank `source` the queries of `rank` see: (s/n, s/n), true where the key does not stand after.

    positions: (n, s/n). None where there are none: every query sees every key.
    """
    return None if positions is None else causal_mask(positions[rank], positions[source])


def check_positions(positions: Tensor | None, group: dist.ProcessGroup, num_tokens: int) -> None:
    """Raise ValueError where `positions` is no table of the group's ranks and of this rank's number of tokens."""
    expected = (group.size(), num_tokens)
    if positions is not None and tuple(positions.shape) != expected:
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}: give {expected}, a row for each rank of the group, "
            "as many columns as a rank has tokens"
        )
