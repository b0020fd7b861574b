"""Misconceptions of lesson 01: the groups of an axis, and those of experts."""

from __future__ import annotations

from autograde.misconception import Misconception

GROUPS = [
    Misconception(
        exercise="mesh.groups",
        name="ranks_in_a_row",
        hint="This looks like: a group is so many ranks in a row, whatever the axis. For which axis is that true?",
        old="others = tuple(place[axis] for axis in place if axis not in axes)",
        new="others = (r // math.prod(getattr(layout, axis) for axis in axes),)",
    ),
    Misconception(
        exercise="mesh.groups",
        name="equal_on_the_axis",
        hint="This looks like: ranks are together that are at the same place on the axis. Over whom does an all-reduce "
        "along the axis go?",
        old="others = tuple(place[axis] for axis in place if axis not in axes)",
        new="others = tuple(place[axis] for axis in place if axis in axes)",
    ),
    Misconception(
        exercise="mesh.groups",
        name="first_axis_only",
        hint="This looks like: of several axes, only the first is looked at. Of how many ranks is a group over two "
        "axes?",
        old="others = tuple(place[axis] for axis in place if axis not in axes)",
        new="others = tuple(place[axis] for axis in place if axis != axes[0])",
    ),
    Misconception(
        exercise="mesh.groups",
        name="one_axis_after_the_other",
        hint="This looks like: the groups of each axis stand one after the other. In how many groups is a rank then?",
        old="""
        found: dict[tuple[int, ...], list[int]] = {}
        for r in range(layout.world_size):
            place = coordinates(r, layout)._asdict()
            others = tuple(place[axis] for axis in place if axis not in axes)
            found.setdefault(others, []).append(r)
        return list(found.values())
        """,
        new="""
        found: dict[tuple, list[int]] = {}
        for axis in axes:
            for r in range(layout.world_size):
                place = coordinates(r, layout)._asdict()
                place.pop(axis)
                found.setdefault((axis, *place.values()), []).append(r)
        return list(found.values())
        """,
    ),
    Misconception(
        exercise="mesh.groups",
        name="any_name_is_taken",
        hint="This looks like: a name that is no axis changes nothing. What does the caller believe to have got?",
        old="""
        for axis in axes:
            if axis not in Coordinates._fields:
                raise LayoutError(f"{axis!r} is not one of dp, cp, pp and tp; for ep see expert_groups")
        """,
        new="",
    ),
]

ROWS = 'return sorted(ranks[i : i + ep] for ranks in groups(layout, ("dp", "cp")) for i in range(0, len(ranks), ep))'
COLUMNS = 'return sorted(ranks[i::ep] for ranks in groups(layout, ("dp", "cp")) for i in range(ep))'

EXPERT_GROUPS = [
    Misconception(
        exercise="mesh.expert_groups",
        name="ranks_in_a_row",
        hint="This looks like: every ep ranks in a row are a group, whatever stands between them. Do ranks of one TP "
        "group "
        "have other tokens?",
        old=ROWS,
        new="return [list(range(i, i + ep)) for i in range(0, layout.world_size, ep)]",
    ),
    Misconception(
        exercise="mesh.expert_groups",
        name="over_data_alone",
        hint="This looks like: experts are spread over DP. What about ranks that have other tokens of the same "
        "sequence?",
        old=ROWS,
        new='return sorted(ranks[i : i + ep] for ranks in groups(layout, "dp") for i in range(0, len(ranks), ep))',
    ),
    Misconception(
        exercise="mesh.expert_groups",
        name="every_so_many",
        hint="This looks like: of a DP x CP group, ranks far from each other are together. Which of them are in a row?",
        old=ROWS,
        new="""
        found = []
        for ranks in groups(layout, ("dp", "cp")):
            found += [ranks[i :: len(ranks) // ep] for i in range(len(ranks) // ep)]
        return sorted(found)
        """,
    ),
    Misconception(
        exercise="mesh.expert_groups",
        name="all_of_data_and_context",
        hint="This looks like: a group is all of DP x CP. Of how many ranks should it be?",
        old=ROWS,
        new='return groups(layout, ("dp", "cp"))',
    ),
    Misconception(
        exercise="mesh.expert_groups",
        name="listed_by_data_and_context",
        hint="This looks like: the groups are right, and stand in another order. Would every part of a program list "
        "them "
        "alike?",
        old=ROWS,
        new=ROWS.replace("sorted(", "list("),
    ),
]

EXPERT_DATA_GROUPS = [
    Misconception(
        exercise="mesh.expert_data_groups",
        name="over_data",
        hint="This looks like: expert gradients are added up over DP, as other gradients are. Which experts do these "
        "ranks "
        "hold?",
        old=COLUMNS,
        new='return groups(layout, "dp")',
    ),
    Misconception(
        exercise="mesh.expert_data_groups",
        name="over_data_and_context",
        hint="This looks like: expert gradients are added up over all of DP x CP. Does every rank there hold the same "
        "experts?",
        old=COLUMNS,
        new='return groups(layout, ("dp", "cp"))',
    ),
    Misconception(
        exercise="mesh.expert_data_groups",
        name="expert_groups_again",
        hint="This looks like: the gradients of unlike experts are added up. Which ranks have the same place in their "
        "expert groups?",
        old=COLUMNS,
        new=ROWS,
    ),
    Misconception(
        exercise="mesh.expert_data_groups",
        name="copies_in_a_row",
        hint="This looks like: the copies of an expert are neighbours. How far is it from a rank to the next that has "
        "the "
        "same place in its expert group?",
        old=COLUMNS,
        new="""
        found = []
        for ranks in groups(layout, ("dp", "cp")):
            copies = len(ranks) // ep
            found += [ranks[i : i + copies] for i in range(0, len(ranks), copies)]
        return sorted(found)
        """,
    ),
    Misconception(
        exercise="mesh.expert_data_groups",
        name="listed_by_data_and_context",
        hint="This looks like: the groups are right, and stand in another order. Would every part of a program list "
        "them alike?",
        old=COLUMNS,
        new=COLUMNS.replace("sorted(", "list("),
    ),
]
