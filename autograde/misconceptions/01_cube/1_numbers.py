"""Misconceptions of lesson 01: servers, coordinates and ranks."""

from __future__ import annotations

from autograde.misconception import Misconception

SERVERS = [
    Misconception(
        exercise="mesh.servers",
        name="rounded_down",
        hint="This looks like: full servers are counted. Where do the GPUs that are left over stand?",
        old="return math.ceil(layout.world_size / gpus_per_server)",
        new="return layout.world_size // gpus_per_server",
    ),
    Misconception(
        exercise="mesh.servers",
        name="one_more",
        hint="This looks like: one server is added for what is left over. How many are there when nothing is left "
        "over?",
        old="return math.ceil(layout.world_size / gpus_per_server)",
        new="return layout.world_size // gpus_per_server + 1",
    ),
    Misconception(
        exercise="mesh.servers",
        name="experts_take_gpus",
        hint="This looks like: the expert degree is multiplied in. Over which GPUs are experts spread?",
        old="return math.ceil(layout.world_size / gpus_per_server)",
        new="return math.ceil(layout.world_size * layout.ep / gpus_per_server)",
    ),
    Misconception(
        exercise="mesh.servers",
        name="always_eight",
        hint="This looks like: a server has 8 GPUs, whatever the argument says. Does every server?",
        old="return math.ceil(layout.world_size / gpus_per_server)",
        new="return math.ceil(layout.world_size / 8)",
    ),
]

PLACES = """
rest, tp = divmod(rank, layout.tp)
rest, cp = divmod(rest, layout.cp)
dp, pp = divmod(rest, layout.pp)
"""

COORDINATES = [
    Misconception(
        exercise="mesh.coordinates",
        name="pipeline_inside_context",
        hint="This looks like: TP changes first, and then PP. Which of PP and CP has more to send, and which comes "
        "first "
        "in the docstring?",
        old=PLACES,
        new="""
        rest, tp = divmod(rank, layout.tp)
        rest, pp = divmod(rest, layout.pp)
        dp, cp = divmod(rest, layout.cp)
        """,
    ),
    Misconception(
        exercise="mesh.coordinates",
        name="tensor_outermost",
        hint="This looks like: DP changes from one rank to the next, and TP last. Who should be neighbours?",
        old=PLACES,
        new="""
        rest, dp = divmod(rank, layout.dp)
        rest, pp = divmod(rest, layout.pp)
        tp, cp = divmod(rest, layout.cp)
        """,
    ),
    Misconception(
        exercise="mesh.coordinates",
        name="pipeline_outermost",
        hint="This looks like: the slowest axis is PP, as in some other programs. Which one is it here?",
        old="dp, pp = divmod(rest, layout.pp)",
        new="pp, dp = divmod(rest, layout.dp)",
    ),
    Misconception(
        exercise="mesh.coordinates",
        name="fields_in_another_order",
        hint="This looks like: the four numbers are right, and stand in another order. In which order are the fields?",
        old="return Coordinates(dp, pp, cp, tp)",
        new="return Coordinates(tp, cp, pp, dp)",
    ),
    Misconception(
        exercise="mesh.coordinates",
        name="any_rank_is_taken",
        hint="This looks like: a rank that does not exist gets a place as well. What should a caller hear who is one "
        "rank "
        "too far?",
        old="""
        if not 0 <= rank < layout.world_size:
            raise LayoutError(f"rank {rank} is outside layout {layout}: its ranks go from 0 to {layout.world_size - 1}")
        """,
        new="",
    ),
]

RANK = [
    Misconception(
        exercise="mesh.rank",
        name="context_and_pipeline_exchanged",
        hint="This looks like: CP and PP have changed places. What does `coordinates` say of rank tp, the first rank "
        "with "
        "tp = 0 after rank 0?",
        old="return ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp",
        new="return ((dp * layout.cp + cp) * layout.pp + pp) * layout.tp + tp",
    ),
    Misconception(
        exercise="mesh.rank",
        name="tensor_outermost",
        hint="This looks like: TP is the slowest axis. Which ranks should be neighbours?",
        old="return ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp",
        new="return ((tp * layout.cp + cp) * layout.pp + pp) * layout.dp + dp",
    ),
    Misconception(
        exercise="mesh.rank",
        name="own_degree",
        hint="This looks like: each coordinate is multiplied by the degree of its own axis. How many ranks further is "
        "it "
        "from one place on the axis to the next?",
        old="return ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp",
        new="return dp * layout.dp + pp * layout.pp + cp * layout.cp + tp",
    ),
    Misconception(
        exercise="mesh.rank",
        name="below_zero_is_taken",
        hint="This looks like: a coordinate that is too large is refused, and one below zero is not. What does -1 "
        "give?",
        old="if not 0 <= place < getattr(layout, axis):",
        new="if place >= getattr(layout, axis):",
    ),
]
