"""Misconceptions of lesson 00: what goes around a ring."""

from __future__ import annotations

from autograde.misconception import Misconception

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
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="steps_from_zero",
        hint="This looks like: each rank returns a piece that is not finished. Which rank sends piece r last, and "
        "which one holds its whole sum?",
        old="""
        travelling = pieces[(rank - 1) % n]
        for step in range(2, n + 1):
            own = pieces[(rank - step) % n]
            travelling = own + shift(travelling, own.new_empty(own.shape), group)
        return travelling.clone()
        """,
        new="""
        sums = [piece.clone() for piece in pieces]
        for step in range(n - 1):
            growing = sums[(rank - step - 1) % n]
            growing += shift(sums[(rank - step) % n], growing.new_empty(growing.shape), group)
        return sums[rank]
        """,
    ),
    Misconception(
        exercise="collectives.ring_reduce_scatter",
        name="own_parts_travel",
        hint="This looks like: in each step a rank sends its own part of a piece, and not the sum that it has just "
        "made. What has become of the parts of the ranks before?",
        old="travelling = own + shift(travelling, own.new_empty(own.shape), group)",
        new="travelling = own + shift(pieces[(rank - step + 1) % n], own.new_empty(own.shape), group)",
    ),
]

ALL_GATHER = [
    Misconception(
        exercise="collectives.ring_all_gather",
        name="two_dimensions_only",
        hint="This looks like: the result has rows and columns, whatever x has. What comes after the rows in an x "
        "of one dimension, or of three?",
        old="gathered = x.new_empty(sum(sizes), *x.shape[1:])",
        new="gathered = x.new_empty(sum(sizes), x.shape[1])",
    ),
    Misconception(
        exercise="collectives.ring_all_gather",
        name="always_float32",
        hint="This looks like: room is made without a word about the dtype. Of which dtype are the pieces that come?",
        old="gathered = x.new_empty(sum(sizes), *x.shape[1:])",
        new="gathered = torch.empty(sum(sizes), *x.shape[1:])",
        also=(
            (
                "n, rank = group.size(), group.rank()",
                "import torch\nn, rank = group.size(), group.rank()",
            ),
        ),
    ),
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
        old="for step in range(n - 1):",
        new="for step in range(n - 2):",
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
        name="cut_by_rows",
        hint="This looks like: x is cut by rows. How many rows has a single number?",
        old="flat = x.flatten()",
        new="flat = x",
        also=(
            (
                "sizes = [len(piece) for piece in flat.tensor_split(group.size())]",
                """
                rows, n = x.shape[0], group.size()
                sizes = [rows // n + (r < rows % n) for r in range(n)]
                """,
            ),
        ),
    ),
    Misconception(
        exercise="collectives.ring_all_reduce",
        name="rest_to_the_last",
        hint="This looks like: what n does not divide goes to the last piece. With 7 numbers and 4 ranks, how long "
        "is that one, and how long need the longest be?",
        old="sizes = [len(piece) for piece in flat.tensor_split(group.size())]",
        new="""
        short, n = len(flat) // group.size(), group.size()
        sizes = [short] * (n - 1) + [len(flat) - short * (n - 1)]
        """,
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
