"""Misconceptions of lesson 01: blocks of work, servers, and process groups."""

from __future__ import annotations

from autograde.misconception import Misconception

BLOCK = """
Block(
    _piece(sequences, layout.dp, at.dp),
    _piece(tokens, layout.cp, at.cp),
    _piece(layers, layout.pp, at.pp),
)
"""
PIECE = """
short, longer = divmod(size, pieces)
start = index * short + min(index, longer)
return range(start, start + short + (index < longer))
"""

BLOCKS_OF_WORK = [
    Misconception(
        exercise="mesh.blocks_of_work",
        name="tensor_cuts_tokens",
        hint="This looks like: TP cuts the tokens as well. What does TP cut, and does a rank of it see all of its "
        "tokens?",
        old=BLOCK,
        new="""
        Block(
            _piece(sequences, layout.dp, at.dp),
            _piece(tokens, layout.cp * layout.tp, at.cp * layout.tp + at.tp),
            _piece(layers, layout.pp, at.pp),
        )
        """,
    ),
    Misconception(
        exercise="mesh.blocks_of_work",
        name="data_and_context_exchanged",
        hint="This looks like: DP cuts the tokens, and CP the sequences. Which of them may read only a part of a "
        "sequence?",
        old=BLOCK,
        new="""
        Block(
            _piece(sequences, layout.cp, at.cp),
            _piece(tokens, layout.dp, at.dp),
            _piece(layers, layout.pp, at.pp),
        )
        """,
    ),
    Misconception(
        exercise="mesh.blocks_of_work",
        name="rest_to_the_last",
        hint="This looks like: what does not divide goes to the last piece. How much longer than the others can it "
        "get?",
        old=PIECE,
        new="""
        short = size // pieces
        return range(index * short, size if index == pieces - 1 else (index + 1) * short)
        """,
    ),
    Misconception(
        exercise="mesh.blocks_of_work",
        name="rest_left_out",
        hint="This looks like: what does not divide belongs to nobody. Who works on it?",
        old=PIECE,
        new="""
        short = size // pieces
        return range(index * short, (index + 1) * short)
        """,
    ),
    Misconception(
        exercise="mesh.blocks_of_work",
        name="rounded_up",
        hint="This looks like: every piece is as long as the longest, until nothing is left. What do the last ranks "
        "get?",
        old=PIECE,
        new="""
        long = -(-size // pieces)
        return range(min(index * long, size), min((index + 1) * long, size))
        """,
    ),
    Misconception(
        exercise="mesh.blocks_of_work",
        name="each_block_once",
        hint="This looks like: a block is listed once, however many ranks work on it. Where does a rank look up its "
        "own?",
        old="return blocks",
        new="return list(dict.fromkeys(blocks))",
    ),
]

INSIDE = "return all(ranks[0] // gpus_per_server == ranks[-1] // gpus_per_server for ranks in spread)"

INSIDE_SERVER = [
    Misconception(
        exercise="mesh.inside_server",
        name="degree_fits",
        hint="This looks like: the degree is compared with the server's size. Where does the second group of 3 ranks, "
        "and "
        "the third, begin and end?",
        old=INSIDE,
        new="return len(spread[0]) <= gpus_per_server",
    ),
    Misconception(
        exercise="mesh.inside_server",
        name="first_group",
        hint="This looks like: it is asked whether one group fits, as the first one does. Where in a server do the "
        "second group and the third begin, and where do they end?",
        old=INSIDE,
        new="return spread[0][0] // gpus_per_server == spread[0][-1] // gpus_per_server",
    ),
    Misconception(
        exercise="mesh.inside_server",
        name="neighbours_only",
        hint="This looks like: a group stays inside when its first two ranks do. Where is its last one?",
        old=INSIDE,
        new="return all(ranks[0] // gpus_per_server == ranks[:2][-1] // gpus_per_server for ranks in spread)",
    ),
    Misconception(
        exercise="mesh.inside_server",
        name="tensor_whatever_is_asked",
        hint="This looks like: the answer is that for TP, whatever the axis. Whose groups were asked for?",
        old='spread = expert_groups(layout) if axis == "ep" else groups(layout, axis)',
        new='spread = groups(layout, "tp")',
    ),
    Misconception(
        exercise="mesh.inside_server",
        name="experts_as_data",
        hint="This looks like: for experts, the groups of DP x CP are taken. Over how many of those ranks is EP "
        "spread?",
        old='spread = expert_groups(layout) if axis == "ep" else groups(layout, axis)',
        new='spread = groups(layout, ("dp", "cp") if axis == "ep" else axis)',
    ),
]

LOOP = """
for ranks in lists:
    group = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else alone
"""

MAKE_MESH = [
    Misconception(
        exercise="mesh.make_mesh",
        name="own_group_first",
        hint="This looks like: ranks make their groups in different orders. What does rank 0 make first, and rank 2?",
        old=LOOP,
        new="""
        for ranks in sorted(lists, key=lambda ranks: me not in ranks):  # its own first: that one is in a hurry
            group = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else alone
        """,
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="own_groups_only",
        hint="This looks like: a rank makes the groups that it is a member of, and no others. Who waits for it in "
        "the others?",
        old="""
        for ranks in lists:
            group = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else alone
            if me in ranks:
                mine[name] = group
        """,
        new="""
        for ranks in lists:
            if me in ranks:
                mine[name] = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else alone
        """,
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="experts_summed_like_the_rest",
        hint="This looks like: ep_dp is the group of all of DP x CP. Which of those ranks hold the same experts?",
        old='lists["ep_dp"] = expert_data_groups(layout)',
        new='lists["ep_dp"] = groups(layout, ("dp", "cp"))',
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="experts_exchanged",
        hint="This looks like: the two expert groups are exchanged. In which do tokens travel, and in which gradients?",
        old="""
        lists["ep"] = expert_groups(layout)
        lists["ep_dp"] = expert_data_groups(layout)
        """,
        new="""
        lists["ep"] = expert_data_groups(layout)
        lists["ep_dp"] = expert_groups(layout)
        """,
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="last_group_wins",
        hint="This looks like: a rank keeps the last group that was made, its own or not. Which of them is it a member "
        "of?",
        old="""
        if me in ranks:
            mine[name] = group
        """,
        new="mine[name] = group",
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="nameless",
        hint="This looks like: the groups carry no names. How would a traffic table tell them apart?",
        old=LOOP,
        new="""
        for ranks in lists:
            group = dist.new_group(ranks) if len(ranks) > 1 else alone
        """,
    ),
    Misconception(
        exercise="mesh.make_mesh",
        name="any_number_of_ranks",
        hint="This looks like: groups are made for ranks that are not there. Who should say so, and when?",
        old="check_sizes(layout, ranks=dist.get_world_size())",
        new="",
    ),
]
