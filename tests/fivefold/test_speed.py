"""The figures behind tokens a second and MFU: operations and parameters of the model, and this device's best rate."""

from dataclasses import replace

import pytest
import torch
from fivefold import run, speed
from fivefold.model import GPTConfig
from fivefold.train import Job, Trainer
from torch.utils.flop_counter import FlopCounterMode

MODEL = GPTConfig(layers=3, hidden=24, heads=6, kv_heads=3, ffn=20, experts=3, top_k=3, vocabulary=67)


def counted(model):
    """Of one micro-batch's forward torch's own count of operations, and the number of parameters."""
    trainer = Trainer(Job(model=model, batch=2, num_microbatches=1, sequence=10, fused_attention=False))
    (stage,) = trainer.stages.values()
    tokens = torch.randint(model.vocabulary, (2, 10), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stage(tokens)
    return counter.get_total_flops(), sum(p.numel() for p in stage.parameters())


@pytest.mark.parametrize("changes", [{}, {"moe_every": 0, "tied": False}, {"moe_every": 1, "kv_heads": 6}])
def test_operations_and_parameters_are_those_that_torch_counts(changes):
    """Every token at every expert, so that torch counts no padding; a step is three forwards."""
    model = replace(MODEL, **changes)
    flops, parameters = run(counted, 1, model).results[0]
    assert speed.step_flops(model, 2, 10) == 3 * flops
    assert speed.num_parameters(model) == parameters


def test_the_rate_of_a_product_is_measured():
    """Larger than a thousandth and smaller than a thousand times of what a core does."""
    assert 1e8 < speed.matmul_rate("cpu", torch.float32, n=256, repeats=3) < 1e14
