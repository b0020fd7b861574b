"""Misconceptions of lesson 00: a broadcast and an all-to-all."""

from __future__ import annotations

from autograde.misconception import Misconception

BROADCAST = [
    Misconception(
        exercise="collectives.tree_broadcast",
        name="root_sends_to_all",
        hint="This looks like: the root sends to every rank itself, one after the other. "
        "After its first message two ranks have x: what could the second of them do meanwhile?",
        source="""
        def tree_broadcast(x, root, group):
            for target in range(group.size()):
                if target != root and group.rank() == root:
                    dist.send(x, group=group, group_dst=target)
                elif target != root and group.rank() == target:
                    dist.recv(x, group=group, group_src=root)
            return x
        """,
    ),
    Misconception(
        exercise="collectives.tree_broadcast",
        name="chain",
        hint="This looks like: x is handed from rank to rank around the ring. "
        "After three rounds of that four ranks have it. How many could?",
        source="""
        def tree_broadcast(x, root, group):
            n, rank = group.size(), group.rank()
            if rank != root:
                dist.recv(x, group=group, group_src=(rank - 1) % n)
            if (rank + 1) % n != root:
                dist.send(x, group=group, group_dst=(rank + 1) % n)
            return x
        """,
    ),
    Misconception(
        exercise="collectives.tree_broadcast",
        name="root_is_rank_0",
        hint="This looks like: x comes from rank 0, whatever the root. Where does the root stand in your tree?",
        old="place = (group.rank() - root) % n  # the root stands at place 0",
        new="root = 0\nplace = group.rank()",
    ),
    Misconception(
        exercise="collectives.tree_broadcast",
        name="powers_of_two_only",
        hint="This looks like: in the last round ranks send to places that are not there. "
        "With 3 ranks, two have x after the first round: how many of them have somebody left to send to?",
        old="if place < have and place + have < n:",
        new="if place < have:",
    ),
    Misconception(
        exercise="collectives.tree_broadcast",
        name="two_children",
        hint="This looks like: every rank sends to two others and then no more. With 7 ranks, who has nothing to do "
        "in the last rounds, though it has x?",
        source="""
        def tree_broadcast(x, root, group):
            n = group.size()
            place = (group.rank() - root) % n
            if place:
                dist.recv(x, group=group, group_src=(root + (place - 1) // 2) % n)
            for child in (2 * place + 1, 2 * place + 2):
                if child < n:
                    dist.send(x, group=group, group_dst=(root + child) % n)
            return x
        """,
    ),
    Misconception(
        exercise="collectives.tree_broadcast",
        name="torch_does_it",
        hint="This looks like: torch's own broadcast does the work. What does it do, message by message?",
        source="""
        def tree_broadcast(x, root, group):
            dist.broadcast(x, group=group, group_src=root)
            return x
        """,
    ),
]

ALL_TO_ALL = [
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="sizes_exchanged",
        hint="This looks like: the sizes of what is sent and of what is received have changed places. "
        "Which of the two lists must add up to the rows of x?",
        old="received = x.new_empty(sum(receive_sizes), *x.shape[1:])",
        new="received = x.new_empty(sum(send_sizes), *x.shape[1:])",
        also=(
            (
                "outgoing, incoming = x.split(send_sizes), received.split(receive_sizes)",
                "outgoing, incoming = x.split(receive_sizes), received.split(send_sizes)",
            ),
        ),
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="own_part_forgotten",
        hint="This looks like: the rows for this rank itself are nowhere in the result. Which distance would they "
        "travel?",
        old="for distance in range(n):",
        new="for distance in range(1, n):",
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="own_part_is_zero",
        hint="This looks like: where the rows for this rank itself belong, there are zeros. Which distance would they "
        "travel?",
        old="for distance in range(n):",
        new="received.zero_()\nfor distance in range(1, n):",
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="two_dimensions_only",
        hint="This looks like: the result has rows and columns, whatever x has. What comes after the rows in an x "
        "of one dimension, or of three?",
        old="received = x.new_empty(sum(receive_sizes), *x.shape[1:])",
        new="received = x.new_empty((sum(receive_sizes), x.shape[1]))",
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="everyone_sends_first",
        hint="This looks like: every rank sends all its parts before it receives any. "
        "Whom does rank 0 wait for in its first send, and whom does that one wait for?",
        old="""
        for distance in range(n):
            shift(outgoing[(rank + distance) % n], incoming[(rank - distance) % n], group, distance)
        """,
        new="""
        incoming[rank].copy_(outgoing[rank])
        for distance in range(1, n):
            dist.send(outgoing[(rank + distance) % n].contiguous(), group=group, group_dst=(rank + distance) % n)
        for distance in range(1, n):
            dist.recv(incoming[(rank - distance) % n], group=group, group_src=(rank - distance) % n)
        """,
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="in_order_of_arrival",
        hint="This looks like: what arrives is put down in the order in which it comes. "
        "In step 1 rank 2 receives from rank 1: whose place is that?",
        old="shift(outgoing[(rank + distance) % n], incoming[(rank - distance) % n], group, distance)",
        new="shift(outgoing[(rank + distance) % n], incoming[distance], group, distance)",
    ),
    Misconception(
        exercise="collectives.pairwise_all_to_all",
        name="handed_along_the_ring",
        hint="This looks like: parts reach far ranks through their neighbours, a step at a time. "
        "How often is a part for the last rank sent then, and how often would it have to be?",
        old="""
        for distance in range(n):
            shift(outgoing[(rank + distance) % n], incoming[(rank - distance) % n], group, distance)
        """,
        new="""
        for distance in range(n):
            part = outgoing[(rank + distance) % n]
            for step in range(distance):
                rows = [0] * n
                dist.all_gather_object(rows, len(part), group=group)
                part = shift(part, x.new_empty(rows[(rank - 1) % n], *x.shape[1:]), group)
            incoming[(rank - distance) % n].copy_(part)
        """,
    ),
]
