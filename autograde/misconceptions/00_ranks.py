"""Misconceptions of lesson 00: ranks and collectives."""

from __future__ import annotations

from autograde.misconception import Misconception

SEND_AND_RECEIVE = """
sending = dist.isend(x, group=group, group_dst=(rank + distance) % n)
dist.recv(received, group=group, group_src=(rank - distance) % n)
sending.wait()
"""

SHIFT = [
    Misconception(
        exercise="collectives.shift",
        name="everyone_sends_first",
        hint="This looks like: every rank sends first, and each send waits for its receiver. "
        "When does the first of them get to its receive?",
        old=SEND_AND_RECEIVE,
        new="""
        dist.send(x, group=group, group_dst=(rank + distance) % n)
        dist.recv(received, group=group, group_src=(rank - distance) % n)
        """,
    ),
    Misconception(
        exercise="collectives.shift",
        name="one_rank_receives_first",
        hint="This looks like: rank 0 receives first, and all the others send first. "
        "With a distance of 2, four ranks make two rings: who begins in the one without rank 0?",
        old=SEND_AND_RECEIVE,
        new="""
        if rank == 0:
            dist.recv(received, group=group, group_src=(rank - distance) % n)
        dist.send(x, group=group, group_dst=(rank + distance) % n)
        if rank != 0:
            dist.recv(received, group=group, group_src=(rank - distance) % n)
        """,
    ),
    Misconception(
        exercise="collectives.shift",
        name="odd_ranks_receive_first",
        hint="This looks like: even ranks send first and odd ones receive first. "
        "Over a distance of 2, is the receiver of an even rank odd?",
        old=SEND_AND_RECEIVE,
        new="""
        if rank % 2:
            dist.recv(received, group=group, group_src=(rank - distance) % n)
        dist.send(x, group=group, group_dst=(rank + distance) % n)
        if rank % 2 == 0:
            dist.recv(received, group=group, group_src=(rank - distance) % n)
        """,
    ),
    Misconception(
        exercise="collectives.shift",
        name="never_waits",
        hint="This looks like: the send is started, and nobody waits for its end. "
        "If the caller writes into x right after shift has returned, what may the receiver get?",
        old="sending.wait()",
        new="",
    ),
    Misconception(
        exercise="collectives.shift",
        name="receives_from_the_front",
        hint="This looks like: each rank waits for a message from the rank that it sends to. Who sends to rank 0?",
        old="dist.recv(received, group=group, group_src=(rank - distance) % n)",
        new="dist.recv(received, group=group, group_src=(rank + distance) % n)",
    ),
]

REDUCE_SCATTER = [
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="starts_with_its_own_piece",
        hint="This looks like: each rank ends with the piece of the rank after it. "
        "A piece makes n - 1 steps and ends at its owner: on which rank does it set out?",
        old="travelling = pieces[(rank - 1) % n]",
        new="travelling = pieces[rank]",
        also=(("own = pieces[(rank - step) % n]", "own = pieces[(rank - step + 1) % n]"),),
    ),
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="everything_goes_round",
        hint="This looks like: the whole of x goes round, and each rank cuts its piece out at the end. "
        "The numbers are right. How much of what a rank receives does it need?",
        old="""
        travelling = pieces[(rank - 1) % n]
        for step in range(2, n + 1):
            own = pieces[(rank - step) % n]
            travelling = own + shift(travelling, own.new_empty(own.shape), group)
        return travelling.clone()
        """,
        new="""
        total, travelling = x.clone(), x
        for _ in range(n - 1):
            travelling = shift(travelling, x.new_empty(x.shape), group)
            total += travelling
        return total.split(sizes)[rank].clone()
        """,
    ),
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="handed_on_without_adding",
        hint="This looks like: pieces are handed on as they come, and only their owner adds its own part. "
        "What has become of the parts of the ranks on the way?",
        old="travelling = own + shift(travelling, own.new_empty(own.shape), group)",
        new="travelling = shift(travelling, own.new_empty(own.shape), group)",
        also=(("return travelling.clone()", "return travelling + pieces[rank]"),),
    ),
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="adds_into_x",
        hint="This looks like: the sums are written into x itself. What does the caller find in x afterwards?",
        old="travelling = own + shift(travelling, own.new_empty(own.shape), group)",
        new="travelling = own.add_(shift(travelling, own.new_empty(own.shape), group))",
    ),
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="sizes_ignored",
        hint="This looks like: x is cut into equal pieces, whatever the sizes say. "
        "How many rows shall rank 1 have when the sizes are 3, 0, 1 and 2?",
        old="pieces = x.split(sizes)",
        new="pieces = x.tensor_split(n)",
    ),
]

ALL_GATHER = [
    Misconception(
        exercise="collectives.ring_all_gather",
        name="sizes_ignored",
        hint="This looks like: room is made for n pieces of this rank's size. "
        "Where do you learn how many rows the piece that comes next will have?",
        old="gathered = x.new_empty(sum(sizes), *x.shape[1:])",
        new="gathered = x.new_empty(n * x.shape[0], *x.shape[1:])",
        also=(("pieces = gathered.split(sizes)", "pieces = gathered.tensor_split(n)"),),
    ),
    Misconception(
        exercise="collectives.ring_all_gather",
        name="sends_its_own_again",
        hint="This looks like: each rank sends its own piece in every step. "
        "Then its neighbour gets the same piece again and again: what should it hand on in the second step?",
        old="shift(pieces[(rank - step) % n], pieces[(rank - step - 1) % n], group)",
        new="shift(pieces[rank], pieces[(rank - step - 1) % n], group)",
    ),
    Misconception(
        exercise="collectives.ring_all_gather",
        name="in_order_of_arrival",
        hint="This looks like: the pieces stand in the order in which they came. "
        "Rank 0 gets the piece of the last rank first: where does it belong?",
        old="""
        gathered = x.new_empty(sum(sizes), *x.shape[1:])
        pieces = gathered.split(sizes)
        pieces[rank].copy_(x)
        for step in range(n - 1):
            shift(pieces[(rank - step) % n], pieces[(rank - step - 1) % n], group)
        return gathered
        """,
        new="""
        pieces = [x]
        for step in range(n - 1):
            coming = x.new_empty(sizes[(rank - step - 1) % n], *x.shape[1:])
            pieces.append(shift(pieces[-1], coming, group))
        return torch.cat(pieces)
        """,
        also=(
            (
                "n, rank = group.size(), group.rank()",
                "import torch\nn, rank = group.size(), group.rank()",
            ),
        ),
    ),
    Misconception(
        exercise="collectives.ring_all_gather",
        name="everyone_to_everyone",
        hint="This looks like: each rank sends its piece to every other rank itself. It is right, and as many bytes. "
        "But which links does it use, and which does a ring need?",
        old="shift(pieces[(rank - step) % n], pieces[(rank - step - 1) % n], group)",
        new="shift(pieces[rank], pieces[(rank - step - 1) % n], group, step + 1)",
    ),
    Misconception(
        exercise="collectives.ring_all_gather",
        name="one_step_short",
        hint="This looks like: the ring ends a step too early, and one piece is missing on every rank. "
        "How many pieces does a rank lack at the beginning?",
        old="gathered = x.new_empty(sum(sizes), *x.shape[1:])",
        new="gathered = x.new_zeros(sum(sizes), *x.shape[1:])",
        also=(("for step in range(n - 1):", "for step in range(n - 2):"),),
    ),
]

ALL_REDUCE = [
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="one_collects",
        hint="This looks like: rank 0 receives every x, adds them up, and sends the sum to each. "
        "It is right. What do the others do while rank 0 works, and what if there are a thousand of them?",
        source="""
        def ring_all_reduce(x, group):
            n, total, part = group.size(), x.clone(), x.new_empty(x.shape)
            if group.rank() == 0:
                for source in range(1, n):
                    dist.recv(part, group=group, group_src=source)
                    total += part
                for target in range(1, n):
                    dist.send(total.contiguous(), group=group, group_dst=target)
            else:
                total = total.contiguous()
                dist.send(total, group=group, group_dst=0)
                dist.recv(total, group=group, group_src=0)
            return total
        """,
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="everything_goes_round",
        hint="This looks like: the whole of x makes n - 1 steps around the ring, and every rank adds up all of it. "
        "What does each rank compute that another one has computed as well?",
        source="""
        def ring_all_reduce(x, group):
            total, travelling = x.clone(), x
            for _ in range(group.size() - 1):
                travelling = shift(travelling, x.new_empty(x.shape), group)
                total += travelling
            return total
        """,
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="pieces_by_chunk",
        hint="This looks like: torch.chunk cuts the pieces, and it may cut fewer than it was asked for. "
        "How many pieces does it make of 5 numbers, when you ask for 4?",
        old="sizes = [len(piece) for piece in flat.tensor_split(group.size())]",
        new="sizes = [len(piece) for piece in flat.chunk(group.size())]",
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="rest_left_out",
        hint="This looks like: every piece has len(x) // n numbers, and those that are left over go nowhere. "
        "Which piece takes them?",
        old="sizes = [len(piece) for piece in flat.tensor_split(group.size())]",
        new="""
        sizes = [len(flat) // group.size()] * group.size()
        x = flat = flat[: sum(sizes)]
        """,
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="averaged",
        hint="This looks like: the sum is divided by the number of ranks. Who asked for a mean?",
        old="return ring_all_gather(piece, sizes, group).view(x.shape)",
        new="return ring_all_gather(piece / group.size(), sizes, group).view(x.shape)",
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="in_place",
        hint="This looks like: the sum is written into x, as dist.all_reduce does. "
        "What does the docstring say about x?",
        old="return ring_all_gather(piece, sizes, group).view(x.shape)",
        new="return x.copy_(ring_all_gather(piece, sizes, group).view(x.shape))",
    ),
]

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
        hint="This looks like: what a rank has for itself does not arrive. Which distance would that part travel?",
        old="for distance in range(n):",
        new="received.zero_()\nfor distance in range(1, n):",
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

SECONDS = [
    Misconception(
        exercise="cost.collective_seconds",
        name="whole_tensor_each_round",
        hint="This looks like: each message of the ring carries the whole tensor. "
        "Into how many pieces was it cut, and how many of them travel at a time?",
        old='("all_reduce", "ring"): (2 * (n - 1), num_bytes / n),',
        new='("all_reduce", "ring"): (2 * (n - 1), num_bytes),',
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="depth_rounded_down",
        hint="This looks like: the logarithm is rounded down. How many rounds does it take to reach 5 ranks, "
        "if two rounds reach 4?",
        old="depth = math.ceil(math.log2(n))",
        new="depth = math.floor(math.log2(n))",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="alpha_once",
        hint="This looks like: the start of a message is paid once for the whole collective. "
        "How many messages does a rank start, one after the other?",
        old="return rounds * (alpha + beta * message)",
        new="return alpha + rounds * beta * message",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="beta_is_a_bandwidth",
        hint="This looks like: bytes are divided by β. Is β bytes a second here, or seconds a byte?",
        old="return rounds * (alpha + beta * message)",
        new="return rounds * (alpha + message / beta)",
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="a_step_for_every_rank",
        hint="This looks like: the ring makes n steps in each of its passes. "
        "A rank has one piece already: how many does it lack?",
        old='("all_reduce", "ring"): (2 * (n - 1), num_bytes / n),',
        new='("all_reduce", "ring"): (2 * n, num_bytes / n),',
    ),
    Misconception(
        exercise="cost.collective_seconds",
        name="unknown_pair_costs_nothing",
        hint="This looks like: a pair that is not in the table gets a number all the same. "
        "What will whoever misspells an algorithm make of it?",
        old="known = [way for way in table if way[0] == op and algorithm in (None, way[1])]",
        new="""
        known = [way for way in table if way[0] == op and algorithm in (None, way[1])] or [("send", "direct")]
        """,
    ),
]
