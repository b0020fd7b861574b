"""Misconceptions of lesson 00: a message to the next rank."""

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
        name="never_waits_for_what_comes",
        hint="This looks like: the receive is started, and nobody waits for it. Is `received` filled when shift "
        "returns?",
        old=SEND_AND_RECEIVE,
        new="""
        dist.irecv(received, group=group, group_src=(rank - distance) % n)
        dist.send(x, group=group, group_dst=(rank + distance) % n)
        """,
    ),
    Misconception(
        exercise="collectives.shift",
        name="receives_from_the_front",
        hint="This looks like: each rank waits for a message from the rank that it sends to. Who sends to rank 0?",
        old="dist.recv(received, group=group, group_src=(rank - distance) % n)",
        new="dist.recv(received, group=group, group_src=(rank + distance) % n)",
    ),
]
