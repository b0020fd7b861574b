"""Your own run on machines that you do not have."""

from __future__ import annotations

from fivefold import plots
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.replay import replay
from fivefold.widgets.live import choice, explore, switch


def replayed(ledger: Ledger, widen: int = 64) -> None:
    """The timeline of a measured run, with controls for the GPU, the GPUs in a server and how wide the model is.

    `widen` multiplies the width of the model that was run, as in `replay`.
    """

    def draw(gpu: str, gpus_per_server: int, widen: int) -> plots.Figure:
        timeline = replay(ledger, cluster(gpu.lower(), gpus_per_server=gpus_per_server), widen=widen)
        servers = -(-len(ledger) // gpus_per_server)
        on = "one server" if servers == 1 else f"{servers} servers of {gpus_per_server}"
        shares = f"computes {timeline.share('busy'):.0%} of the time, stands still {timeline.share('exposed'):.0%}"
        return plots.timeline(timeline, title=f"On {on}, a rank {shares}")

    explore(
        draw,
        {
            "gpu": switch("GPU", ["H100", "A100", "H200"]),
            "gpus_per_server": choice("GPUs a server", [1, 2, 4, 8, 16], 8),
            "widen": choice("width ×", sorted({1, 4, 16, 64, 256} | {widen}), widen),
        },
    )
