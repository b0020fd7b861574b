"""Collectives from messages: equal to torch.distributed's own, with the messages and the bytes of the formulas."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.collectives import (
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    shift,
    tree_broadcast,
)
from fivefold.cost import collective_bytes, collective_messages

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def numbers(rank, *shape, dtype=torch.float64, seed=0):
    """Small whole numbers, so that a sum is exact in every dtype and in every order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def sends(ledger, rank):
    return [call for call in ledger[rank].communications if call.op == "send"]


def shifted():
    n, group = dist.get_world_size(), dist.group.WORLD
    rank, out = group.rank(), []
    for distance in (1, 2, -1, n, 0, n + 1):
        x = numbers(rank, rank % 2, 3)  # of unequal sizes, some empty
        received = torch.empty((rank - distance) % n % 2, 3, dtype=torch.float64)
        assert shift(x, received, group, distance) is received
        out.append((distance, received))
    out.append((1, shift(numbers(rank, 2, 3).t(), torch.empty(3, 2, dtype=torch.float64), group)))
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_shift_moves_everything_around_the_ring(n):
    """Any distance, one message each unless it stays; unequal, empty and transposed tensors."""
    found = run(shifted, n)
    for rank, out in enumerate(found.results):
        *shifts, (_, transposed) = out
        for distance, received in shifts:
            source = (rank - distance) % n
            assert torch.equal(received, numbers(source, source % 2, 3))
        assert torch.equal(transposed, numbers((rank - 1) % n, 2, 3).t())
        assert len(sends(found.ledger, rank)) == sum(distance % n != 0 for distance, _ in out)


def sizes_for(n, size):
    return [len(piece) for piece in torch.arange(size).tensor_split(n)]


def rings():
    """Our three against torch's own, on the same numbers, for even, odd, uneven and empty sizes."""
    n, group = dist.get_world_size(), dist.group.WORLD
    rank, wrong = group.rank(), []
    for size, dtype in [*product((0, 1, n - 1, n, 2 * n + 1, 24), DTYPES[:1]), *product((7,), DTYPES)]:
        x = numbers(rank, size, dtype=dtype)
        before, expected = x.clone(), x.clone()
        dist.all_reduce(expected)
        if not torch.equal(ring_all_reduce(x, group), expected) or not torch.equal(x, before):
            wrong.append(("all_reduce", size, dtype))
    for sizes in (sizes_for(n, 2 * n + 1), [3 * (r % 2) for r in range(n)], [r == n - 1 for r in range(n)]):
        sizes = [int(size) for size in sizes]
        x = numbers(rank, sum(sizes), 2, seed=1)
        expected = torch.empty(sizes[rank], 2, dtype=x.dtype)
        dist.reduce_scatter(expected, [piece.clone() for piece in x.split(sizes)])
        piece = ring_reduce_scatter(x, sizes, group)
        total = x.clone()
        dist.all_reduce(total)
        if not torch.equal(piece, expected) or not torch.equal(ring_all_gather(piece, sizes, group), total):
            wrong.append(("sizes", sizes))
    scalar, grid = ring_all_reduce(torch.tensor(rank + 1.0), group), ring_all_reduce(torch.ones(3, 2).t(), group)
    return wrong, scalar.item(), grid


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_rings_equal_the_collectives_of_torch(n):
    """Every dtype, sizes that n does not divide, pieces of which some or all but one are empty."""
    for wrong, scalar, grid in run(rings, n).results:
        assert wrong == [] and scalar == n * (n + 1) / 2 and torch.equal(grid, torch.full((2, 3), float(n)))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_ring_sends_what_the_formula_says(n):
    """2(n-1) messages and 2(n-1)/n·M bytes a rank, half of each for the two halves, in that order."""
    size = 3 * n

    def program():
        x = numbers(dist.get_rank(), size)
        sizes = [3] * n
        ring_all_reduce(x, dist.group.WORLD)
        ring_all_gather(ring_reduce_scatter(x, sizes, dist.group.WORLD), sizes, dist.group.WORLD)

    ledger = run(program, n).ledger
    for rank in range(n):
        calls = sends(ledger, rank)
        both, parts = calls[: len(calls) // 2], calls[len(calls) // 2 :]
        assert len(both) == len(parts) == collective_messages("all_reduce", n) == 2 * (n - 1)
        assert sum(c.bytes for c in both) == pytest.approx(collective_bytes("all_reduce", n, 8 * size))
        assert sum(c.bytes for c in parts[: n - 1]) == pytest.approx(collective_bytes("reduce_scatter", n, 8 * size))
        assert sum(c.bytes for c in parts[n - 1 :]) == pytest.approx(collective_bytes("all_gather", n, 8 * size))
        assert {c.peer for c in calls} == {(rank + 1) % n}


def test_all_ranks_hold_the_same_bits():
    """Sums of floats depend on their order; each piece is summed once, on one way around the ring."""

    def program():
        x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank())) * 10.0 ** dist.get_rank()
        return ring_all_reduce(x, dist.group.WORLD)

    results = run(program, 3).results
    expected = sum(torch.randn(1001, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(3))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


def broadcasts():
    group, wrong = dist.group.WORLD, []
    n, rank = group.size(), group.rank()
    for root, dtype in [*product(range(n), DTYPES[:1]), *product((n - 1,), DTYPES)]:
        for shape in ((), (2, 3), (0,)):
            x = numbers(rank, *shape, dtype=dtype)
            if tree_broadcast(x, root, group) is not x or not torch.equal(x, numbers(root, *shape, dtype=dtype)):
                wrong.append((root, dtype, shape))
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_broadcast_reaches_everyone_from_any_root(n):
    """Each root, each dtype, a scalar and an empty tensor."""
    assert run(broadcasts, n).results == [[]] * n


def rounds_of(ledger):
    """The rounds that the messages take where a rank sends or receives one message a round, in program order."""
    free, known = [0] * len(ledger), {}
    calls = [list(rank.communications) for rank in ledger.ranks]
    while any(calls):
        for rank, own in enumerate(calls):
            while own and (own[0].op == "send" or (own[0].peer, rank) in known):
                call = own.pop(0)
                if call.op == "send":
                    free[rank] += 1
                    known[rank, call.peer] = free[rank]
                else:
                    free[rank] = max(free[rank], known[call.peer, rank])
    return max(free)


@pytest.mark.parametrize("n, root", [(2, 1), (3, 0), (5, 3), (6, 1), (8, 7)])
def test_a_tree_takes_the_logarithm_of_rounds(n, root):
    """⌈log₂ n⌉ rounds and n - 1 messages of the whole tensor, counted from the ledger."""
    ledger = run(lambda: tree_broadcast(torch.ones(4), root, dist.group.WORLD), n).ledger
    messages = [call for rank in range(n) for call in sends(ledger, rank)]
    assert rounds_of(ledger) == math.ceil(math.log2(n))
    assert len(messages) == n - 1 and {call.bytes for call in messages} == {16}


def tables(n):
    """Rows from rank i to rank j: even, uneven with zeros, everything to one rank, nothing at all."""
    return [
        [[2] * n for _ in range(n)],
        [[(3 * i + 2 * j) % 4 for j in range(n)] for i in range(n)],
        [[3 * (j == n - 1) for j in range(n)] for i in range(n)],
        [[0] * n for _ in range(n)],
    ]


def exchanges():
    group, wrong = dist.group.WORLD, []
    n, rank = group.size(), group.rank()
    for table, dtype in [*product(tables(n), DTYPES[:1]), *product(tables(n)[1:2], DTYPES)]:
        out, into = table[rank], [table[source][rank] for source in range(n)]
        x = numbers(rank, sum(out), 2, dtype=dtype)
        expected = torch.empty(sum(into), 2, dtype=dtype)
        dist.all_to_all_single(expected, x, into, out)
        if not torch.equal(pairwise_all_to_all(x, out, into, group), expected):
            wrong.append((table, dtype))
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_to_all_equals_torchs(n):
    """Uneven and zero splits, every dtype."""
    assert run(exchanges, n).results == [[]] * n


def test_all_to_all_sends_one_message_to_each_other_rank():
    """Bytes as the splits say, without what stays on the rank."""
    n = 4
    table = tables(n)[1]

    def program():
        rank = dist.get_rank()
        x = numbers(rank, sum(table[rank]))
        pairwise_all_to_all(x, table[rank], [table[source][rank] for source in range(n)], dist.group.WORLD)

    ledger = run(program, n).ledger
    for rank in range(n):
        assert {c.peer: c.bytes for c in sends(ledger, rank)} == {p: 8 * table[rank][p] for p in range(n) if p != rank}


def test_a_group_of_some_ranks_counts_within_itself():
    """Ranks and roots are those of the group, whatever they are in the world."""

    def program():
        groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2, 4])]
        rank = dist.get_rank()
        group = groups[rank in (1, 2, 4)]
        x = torch.tensor([float(rank), 10.0 + rank])
        n, own = group.size(), [1] * group.size()
        swapped = pairwise_all_to_all(torch.full((n,), float(rank)), own, own, group)
        return ring_all_reduce(x, group), tree_broadcast(x.clone(), 1, group), swapped

    for rank, (total, root, swapped) in enumerate(run(program, 5).results):
        ranks = [0, 3] if rank in (0, 3) else [1, 2, 4]
        assert total.tolist() == [sum(ranks), sum(10 + r for r in ranks)]
        assert root.tolist() == [ranks[1], 10 + ranks[1]] and swapped.tolist() == ranks
