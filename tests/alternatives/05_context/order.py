"""Right solutions of lesson 05 that are written in another way than the library's: the order of tokens."""

from __future__ import annotations

import torch


def zigzag__index(x, num_ranks, dim=1):
    """Token by token."""
    s = x.shape[dim]
    chunk, rest = divmod(s, 2 * num_ranks)
    if num_ranks == 1:
        return x.clone()
    if rest:
        raise ValueError(f"{s} tokens: choose a multiple of {2 * num_ranks}")
    places = []
    for rank in range(num_ranks):
        places += range(rank * chunk, (rank + 1) * chunk)
        places += range(s - (rank + 1) * chunk, s - rank * chunk)
    return x.index_select(dim, torch.tensor(places))


def zigzag__halves(x, num_ranks, dim=1):
    """The first half beside the second one, whose chunks are mirrored."""
    if num_ranks == 1:
        return x
    assert_even(x.shape[dim], num_ranks)
    y = x.movedim(dim, 0).unflatten(0, (2, num_ranks, -1))
    return torch.stack((y[0], y[1].flip(0)), dim=1).flatten(0, 2).movedim(0, dim)


def assert_even(s, num_ranks):
    if s % (2 * num_ranks) != 0:
        raise ValueError("choose another length")


def unzigzag__argsort(x, num_ranks, dim=1):
    """Undo a permutation by sorting it."""
    if num_ranks == 1:
        return x
    assert_even(x.shape[dim], num_ranks)
    chunks = torch.arange(x.shape[dim]).view(2 * num_ranks, -1)
    order = torch.cat([torch.cat((chunks[i], chunks[-1 - i])) for i in range(num_ranks)])
    return x.index_select(dim, order.argsort())


def unzigzag__filled(x, num_ranks, dim=1):
    """Each chunk is copied to where it belongs."""
    if num_ranks > 1:
        assert_even(x.shape[dim], num_ranks)
    out = torch.empty_like(x)
    size = x.shape[dim] // (2 * num_ranks)
    if num_ranks == 1:
        return out.copy_(x)
    for place in range(2 * num_ranks):
        chunk = place // 2 if place % 2 == 0 else 2 * num_ranks - 1 - place // 2
        out.narrow(dim, chunk * size, size).copy_(x.narrow(dim, place * size, size))
    return out


def causal_work__mask(positions):
    """Count the true places of each rank's rows of the mask."""
    everyone = positions.reshape(-1)
    return torch.stack([(everyone[None, :] <= row[:, None]).sum() for row in positions])


def causal_work__loop(positions):
    """Number by number."""
    return torch.tensor([sum(place + 1 for place in row) for row in positions.tolist()])


def local_tokens__windows(tokens, group):
    """Each token with the one after it, put in order together."""
    n, s = group.size(), tokens.shape[1] - 1
    if n > 1:
        assert_even(s, n)
        chunks = torch.arange(s).split(s // (2 * n))
        own = torch.cat((chunks[group.rank()], chunks[2 * n - 1 - group.rank()]))
    else:
        own = torch.arange(s)
    pairs = tokens.unfold(1, 2, 1)[:, own]
    return pairs[..., 0], pairs[..., 1], own


def local_tokens__zigzag(tokens, group):
    """All three reordered by one function, and the rank's part cut out."""
    n, r = group.size(), group.rank()
    s = tokens.shape[1] - 1

    def cut(x):
        return zigzag__index(x, n).chunk(n, dim=1)[r]

    return [cut(tokens[:, :s]), cut(tokens[:, 1:]), cut(torch.arange(s)[None])[0]]
