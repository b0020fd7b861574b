"""The widget of lesson 02: what ZeRO leaves on a rank, by stage and number of ranks."""

from __future__ import annotations

from fivefold import plots
from fivefold.widgets.live import choice, explore, switch

DEGREES = [1, 4, 16, 64, 256, 1024]
MODELS = {"1.5B": 1.5e9, "7.5B": 7.5e9, "70B": 70e9, "175B": 175e9, "1T": 1e12}
OPTIMIZERS = {"AdamW": 12.0, "SGD with momentum": 8.0, "AdamW in 8 bits": 6.0}  # with a float32 copy of 4 bytes
GPUS = {"40 GB": 40e9, "80 GB": 80e9, "141 GB": 141e9}
STAGES = {"no ZeRO": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}


def zero_memory(ranks: int = 64) -> None:
    """Show what a rank keeps of a model's states, with controls for stage, ranks, model, optimizer and GPU."""

    def draw(stage: str, ranks: int, parameters: float, optimizer_bytes: float, gpu_bytes: float) -> plots.Figure:
        return plots.zero_memory(parameters, ranks, STAGES[stage], optimizer_bytes, gpu_bytes, DEGREES)

    stages = switch("", list(STAGES))
    stages.value = "stage 2"
    controls = {
        "ranks": choice("ranks N", DEGREES, ranks),
        "parameters": choice("model Ψ", MODELS, MODELS["7.5B"]),
        "optimizer_bytes": choice("optimizer K", OPTIMIZERS, 12.0),
        "gpu_bytes": choice("GPU", GPUS, 80e9),
        "stage": stages,
    }
    explore(draw, controls)
