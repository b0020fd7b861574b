"""Cutting layers into stages."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from fivefold.pipeline import partition_layers
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_smaller_largest_stage(costs, data):
    """Against every possible cut: contiguous, complete, no stage empty, the largest as small as can be."""
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = partition_layers(costs, num_stages)
    assert len(stages) == num_stages and all(stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[layer] for layer in stage) for stage in stages) == best


def test_a_large_model_with_a_heavy_last_layer():
    """126 layers and a loss on 16 ranks, in fractions: within the bound that holds for any cut."""
    costs = [random.Random(1).uniform(0.9, 1.1) for _ in range(126)] + [7.5]
    stages = partition_layers(costs, 16)
    largest = max(sum(costs[layer] for layer in stage) for stage in stages)
    assert sum(costs) / 16 <= largest < sum(costs) / 16 + 1.1
    assert len(stages[-1]) < len(stages[0])


@pytest.mark.parametrize(("layers", "num_stages"), [(3, 4), (0, 1), (3, 0)])
def test_impossible_numbers_of_stages(layers, num_stages):
    """More stages than layers, or none, is one clear line."""
    with pytest.raises(ValueError, match=f"^{layers} layers cannot be cut into {num_stages} stages"):
        partition_layers([1.0] * layers, num_stages)
