"""What checks of split layers share, against torch's own optimizer and layers."""

from __future__ import annotations

import torch
from torch import nn

from autograde.checks.layers import LayerCheck
from autograde.checks.training import RATE, Kind, Layer, kept_storages, train


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_training_is_that_of_an_optimizer_of_torch():
    """Gradients of the first step, weights after the last, as `torch.optim.SGD` has them."""
    ours, theirs = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    batches = [(randn(4, 3, seed=i), randn(4, 2, seed=9 + i)) for i in range(3)]
    done = train(ours, dict(ours.named_parameters()), batches)
    optimizer, first = torch.optim.SGD(theirs.parameters(), lr=RATE), None
    for x, incoming in batches:
        optimizer.zero_grad()
        theirs(x).backward(incoming)
        first = first if first is not None else theirs.weight.grad.clone()
        optimizer.step()
    torch.testing.assert_close(done["gradient"]["weight.grad"], first)
    torch.testing.assert_close(done["gradient"]["weight after 3 steps"], theirs.weight.detach())
    torch.testing.assert_close(done["gradient"]["bias after 3 steps"], theirs.bias.detach())


def test_an_output_of_another_shape_ends_the_training():
    """It is reported, instead of an error out of autograd."""
    layer = nn.Linear(3, 2, dtype=torch.float64)
    done = train(layer, dict(layer.named_parameters()), [(randn(4, 3, seed=1), randn(4, 1, seed=2))])
    assert done["output"]["the output"].shape == (4, 2) and done["gradient"] == {}


def test_kept_bytes_count_what_is_behind_a_view_and_what_is_no_parameter():
    """A copy counts as itself; a view as the whole; one in a list or a buffer counts; one seen twice counts once."""
    whole = randn(8, 5, seed=1)
    layer = nn.Module()
    layer.inner = nn.Module()
    layer.inner.weight = nn.Parameter(whole[:2].clone())
    assert sum(kept_storages(layer).values()) == 2 * 5 * 8
    layer.view = whole[:2]
    assert sum(kept_storages(layer).values()) == (2 + 8) * 5 * 8
    layer.again = [whole, {"x": whole.T}]
    assert sum(kept_storages(layer).values()) == (2 + 8) * 5 * 8
    layer.register_buffer("buffer", randn(3, seed=2))
    assert sum(kept_storages(layer).values()) == (2 + 8) * 5 * 8 + 3 * 8


class Check(LayerCheck):
    points = {"output": 1, "arguments": 1}
    kind = Kind(lambda case: {"weight": case.random(0, case.inner, case.h)}, {"weight": 0, "output": -1}, {})


def test_cases_tell_groups_sizes_and_seeds_apart():
    """In both levels: groups of unlike sizes, all ranks in one group once, every size divisible by its groups'."""
    check = Check()
    for level, seed in (("visible", 5), ("hidden", 11), ("hidden", 12), ("hidden", 13)):
        cases = check.cases(seed, level)
        assert any(len({len(ranks) for ranks in case.groups}) > 1 for case in cases)
        for case in cases:
            assert sorted(rank for ranks in case.groups for rank in ranks) == list(range(case.world_size))
            assert case.inner != case.h and all(case.inner % len(ranks) == 0 for ranks in case.groups)
        assert any(case.steps > 1 for case in cases) and len({case.seed for case in cases}) == len(cases)
    named = Layer(world_size=4, groups=((0, 1, 2), (3,)), tokens=(2, 3), h=5, inner=6, steps=2)
    assert str(named) == "4 ranks in groups [0, 1, 2] and [3], 6 tokens, h 5, inner 6, 2 steps"
