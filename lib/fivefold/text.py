"""Real English text that needs no download: the language reference that ships inside Python, as bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

VOCABULARY = 256  # one token a byte


@cache
def corpus() -> Tensor:
    """The text of `pydoc_data.topics`, about 465 kB in the order of its topics: (n,) int64, each 0 to 255."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def split(held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """The corpus cut once: what a model trains on, and the last share `held_out` of it, on which it is tested."""
    text = corpus()
    cut = int(len(text) * (1 - held_out))
    return text[:cut], text[cut:]


def sequences(text: Tensor, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` random sequences of `length` tokens, and for each token the one that follows it.

    Returns inputs and labels, (count, length) each. The same seed gives the same sequences on every rank. Raises
    ValueError where the text is not longer than `length`.
    """
    if len(text) <= length:
        raise ValueError(f"the text has {len(text)} tokens: make the sequence shorter than that, it is {length}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)]  # (count, length + 1)
    return windows[:, :-1], windows[:, 1:]
