"""A plan: everything that can be chosen about how a model is trained on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from fivefold.layout import Layout, LayoutError
from fivefold.plan.model import Model, Work

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")


@dataclass(frozen=True)
class Plan:
    """Degrees of the five axes, ZeRO stage, schedule with `chunks` of layers a rank, sequences a micro-batch, and what
    is computed again: "none", "selective" (the attention core) or "full" (each layer)."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 1
    schedule: str = "one_f_one_b"
    chunks: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True

    def num_microbatches(self, work: Work) -> int:
        """How many micro-batches each pipeline works on in a step."""
        return work.sequences // (self.layout.dp * self.micro_batch)

    def tokens(self, work: Work) -> int:
        """Tokens of one micro-batch that a rank has: of each sequence the part that CP leaves it."""
        return self.micro_batch * work.context // self.layout.cp

    def __str__(self) -> str:
        words = [str(self.layout), f"ZeRO-{self.zero}"]
        if self.layout.pp > 1:
            chunks = f" x{self.chunks}" if self.chunks > 1 else ""
            words.append(self.schedule.replace("one_f_one_b", "1F1B").replace("_", "-") + chunks)
        again = [] if self.recompute == "none" else [f"{self.recompute} recomputation"]
        return " ".join([*words, f"b{self.micro_batch}", *again])


def check(model: Model, plan: Plan, work: Work) -> None:
    """Raise LayoutError, one line that names the number to change, where the plan cannot be carried out."""
    layout = plan.layout
    heads, kv_heads, columns = model.heads, model.kv_heads, model.ffn
    if plan.schedule not in SCHEDULES:
        raise LayoutError(f"there is no schedule {plan.schedule!r}: choose {', '.join(SCHEDULES)}")
    if heads % layout.tp or columns % layout.tp or max(kv_heads, layout.tp) % min(kv_heads, layout.tp):
        sizes = f"{heads} heads, {kv_heads} K/V heads and {columns} columns of the MLP"
        raise LayoutError(f"{sizes} cannot be split over tp{layout.tp}")
    if layout.ep > 1 and (not model.experts or model.experts % layout.ep):
        raise LayoutError(f"{model.experts} experts cannot be split over ep{layout.ep}")
    if model.layers + 2 < layout.pp * plan.chunks:  # the ends, with embedding and output, may have one less
        stages = layout.pp * plan.chunks
        raise LayoutError(f"{model.layers} layers cannot fill {stages} stages: take a smaller pp or fewer chunks")
    if layout.cp > 1 and work.context % (2 * layout.cp):
        raise LayoutError(f"{work.context} tokens cannot be cut into the {2 * layout.cp} chunks of cp{layout.cp}")
    if work.sequences % (layout.dp * plan.micro_batch):
        raise LayoutError(
            f"{work.sequences} sequences cannot be shared by dp{layout.dp} in micro-batches of {plan.micro_batch}"
        )
    if plan.schedule == "interleaved" and (plan.chunks < 2 or plan.num_microbatches(work) % layout.pp):
        raise LayoutError(f"interleaving needs 2 chunks or more and a multiple of pp{layout.pp} micro-batches")


def stage_layers(model: Model, plan: Plan) -> tuple[int, int]:
    """Layers of a middle stage and of an end stage: where they do not divide, the ends, which have the embedding or the
    output layer too, have fewer (Llama 3 report, section 3.3.2)."""
    return _stage_layers(model.layers, plan.layout.pp, plan.chunks)


@cache
def _stage_layers(layers: int, p: int, chunks: int) -> tuple[int, int]:
    if p == 1:
        return layers, layers
    middle = -(-layers // (p * chunks)) * chunks
    missing = middle * p - layers
    return middle, max(0, middle - -(-missing // 2))
