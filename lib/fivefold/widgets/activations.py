"""The widget of lesson 04: activation memory by number of ranks, with tokens split and with recomputation."""

from __future__ import annotations

from fivefold import plots
from fivefold.plots.activations import RECOMPUTED, TOKENS, Layer
from fivefold.widgets.live import choice, explore, switch

DEGREES = [1, 2, 4, 8, 16]
MODELS = {"22B": (6144, 64), "GPT-3": (12288, 96), "MT-NLG": (20480, 128), "1T": (25600, 160)}  # h, a


def activation_memory(t: int = 8) -> None:
    """Show what a rank keeps of one layer, with controls for ranks, model, tokens, and what is computed again.

    The models are those of Korthikanti et al. 2022, table 3, of 22, 175, 530 and 1,000 billion parameters, with a
    micro-batch of one sequence.
    """

    def draw(t: int, model: tuple[int, int], s: int, tokens: str, recompute: str) -> plots.Figure:
        h, a = model
        return plots.activation_memory(t, Layer(1, s, h, a), tokens, recompute, DEGREES)

    controls = {
        "t": choice("ranks t", DEGREES, t),
        "model": choice("model", MODELS, MODELS["GPT-3"]),
        "s": choice("tokens s", [1024, 2048, 4096, 8192, 32768], 2048),
        "tokens": switch("tokens", list(TOKENS), "10em"),
        "recompute": switch("recompute", list(RECOMPUTED)),
    }
    explore(draw, controls)
