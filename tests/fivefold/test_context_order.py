from types import SimpleNamespace

import pytest
import torch
from fivefold import context, cost
from fivefold.layout import LayoutError
from hypothesis import given
from hypothesis import strategies as st


def stand_in(n, rank=0):
    """What a function that does not communicate asks of a group."""
    return SimpleNamespace(size=lambda: n, rank=lambda: rank)


sizes = st.tuples(st.integers(1, 9), st.integers(1, 4))


@given(sizes, st.sampled_from([0, 1, 2, -1]))
def test_zigzag(size, dim):
    """Along any dimension rank i's part is chunk i and chunk 2n - 1 - i, and unzigzag puts everything back."""
    n, chunk = size
    x = torch.arange(2 * n * chunk).view([-1 if i == dim % 3 else 1 for i in range(3)])
    x = x + 1000 * torch.arange(3).view([3 if i == (dim + 1) % 3 else 1 for i in range(3)])
    mixed = context.zigzag(x, n, dim)
    for i, part in enumerate(mixed.chunk(n, dim)):
        places = [*range(i * chunk, (i + 1) * chunk), *range((2 * n - 1 - i) * chunk, (2 * n - i) * chunk)]
        assert torch.equal(part, x.index_select(dim, torch.tensor(places)))
    assert torch.equal(context.unzigzag(mixed, n, dim), x)


@given(sizes)
def test_work(size):
    """Work is the number of true places in each rank's rows of the mask; with zig-zag it is the same for all ranks."""
    n, chunk = size
    mask = torch.ones(2 * n * chunk, 2 * n * chunk).tril()
    contiguous = torch.arange(len(mask)).view(n, -1)
    for positions in (contiguous, contiguous.T.reshape(n, -1), context.token_positions(len(mask), n)):
        counted = [int(mask[row].sum()) for row in positions]
        assert context.causal_work(positions).tolist() == counted
    assert len(set(context.causal_work(context.token_positions(len(mask), n)).tolist())) == 1


def test_work_of_8_ranks():
    """The share of the ideal speed: 53.3% with contiguous parts, as in cost, and 100% with zig-zag."""
    tables = torch.arange(65536).view(8, -1), context.token_positions(65536, 8)
    contiguous, zigzag = (float(work.mean() / work.max()) for work in (context.causal_work(t).double() for t in tables))
    assert contiguous == pytest.approx(cost.causal_balance(8), abs=1e-4) and round(contiguous, 3) == 0.533
    assert zigzag == 1


@given(sizes, st.integers(1, 3))
def test_labels_and_positions_follow_their_tokens(size, b):
    """Every rank's label is the token after its input in the whole sequence; the ranks hold each token once."""
    n, chunk = size
    tokens = torch.randint(256, (b, 2 * n * chunk + 1), generator=torch.Generator().manual_seed(n))
    seen = []
    for rank in range(n):
        inputs, labels, positions = context.local_tokens(tokens, stand_in(n, rank))
        assert inputs.shape == labels.shape == (b, 2 * chunk)
        for column, place in enumerate(positions.tolist()):
            assert inputs[:, column].tolist() == tokens[:, place].tolist()
            assert labels[:, column].tolist() == tokens[:, place + 1].tolist()
        assert torch.equal(positions, context.token_positions(2 * n * chunk, n)[rank])
        seen += positions.tolist()
    assert sorted(seen) == list(range(2 * n * chunk))


def test_one_rank_takes_any_length():
    """Alone, a sequence of odd length is left in its order."""
    assert context.token_positions(7, 1).tolist() == [list(range(7))]
    assert context.unzigzag(torch.arange(7)[None], 1).tolist() == [list(range(7))]


def test_lengths_that_cannot_be_split():
    """A sequence that 2n does not divide is refused in one line that names the lengths to choose."""
    line = "^a sequence of 30 tokens cannot be split over cp4: choose 24 or 32$"
    for call in (
        lambda: context.zigzag(torch.zeros(2, 30), 4),
        lambda: context.unzigzag(torch.zeros(2, 30), 4),
        lambda: context.token_positions(30, 4),
        lambda: context.local_tokens(torch.zeros(2, 31), stand_in(4)),
    ):
        with pytest.raises(LayoutError, match=line):
            call()
