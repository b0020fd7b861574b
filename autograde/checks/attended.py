"""Judge attention over split tokens: values and gradients, blocks that went round a ring, what was kept, what hid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fivefold.runtime.cluster import GPU, Cluster, Link
from fivefold.runtime.ledger import Communication, Ledger
from fivefold.runtime.replay import replay

from autograde.checks.attention import IN_USE, MEASURED, NUMBER, Heads, given, in_half, one_process
from autograde.compare import compare, compare_all
from autograde.traffic import NOUNS, sent_in_words, size_in_words
from autograde.verdict import Finding, numbered

TRANSFER = 0.3  # of a block's computation in forward, on the cluster of the replay: short enough to hide
EXPOSED = 0.05  # of one block's transfer that may be seen all the same


def judge_values(case: Heads, outcomes: Sequence[Any], look: str, look_q: str = "") -> Iterator[Finding]:
    """Output and gradients against one process; the arguments are as they were.

    `look` is for a wrong gradient, `look_q` for that of q, where another question leads to it.
    """
    outputs, gradients = one_process(case)
    yield compare("output", "the output", [o["output"] for o in outcomes], outputs, case.tolerance)
    after, before = [o["after"] for o in outcomes], list(given(case))
    finding = compare_all("output", after, before, "exact", look="Backward, and others, may still need it as it was.")
    if not finding.passed:
        yield finding
    for names, question in ((("q.grad",), look_q or look), (("k.grad", "v.grad"), look)):
        got, wanted = (
            [{name: row[name] for name in names} for row in rows]
            for rows in ([o["gradient"] for o in outcomes], gradients)
        )
        yield compare_all("gradient", got, wanted, case.tolerance, question)


def judge_half(case: Heads, outcomes: Sequence[Any]) -> Finding:
    """The output in bfloat16, as q is."""
    return compare("output", "the output of bfloat16", [o["half"] for o in outcomes], in_half(case), "layers")


def judge_table(case: Heads, outcomes: Sequence[Any]) -> Finding:
    """A ValueError for positions of another shape."""
    raised = outcomes[0]["refused"]
    done = f"raise {raised}" if raised else "are taken without a word"
    return Finding(
        "output", raised == "ValueError", f"positions of another shape {done}", "expected a ValueError", error=0.0
    )


def judge_ring(case: Heads, ledger: Ledger) -> Finding:
    """Messages to one neighbour: n - 1 blocks of K and V forward; backward as many, and as many of their gradients."""
    times = 2 if case.twice else 1
    for ranks in case.groups:
        n = len(ranks)
        for rank in ranks:
            calls = ledger[rank].communications
            problem = _foreign(rank, calls) or _astray(rank, ranks, calls)
            for way, passes in (("forward", 1), ("backward", 2)):
                wanted = times * passes * (n - 1)
                problem = problem or _blocks(rank, calls, way, wanted, case.block(rank))
            if problem:
                look = "Which blocks must a rank hand on, and which are already where they belong?"
                return Finding("traffic", False, problem, _where(calls), look)
    n = max(map(len, case.groups))
    return Finding("traffic", True, f"{n - 1} blocks forward, {2 * (n - 1)} backward", sent_in_words(ledger))


def judge_bytes(case: Heads, ledger: Ledger, expected: dict[tuple[str, str], Any], words: str, calls: int) -> Finding:
    """Whether each rank sent, by (operation, way), the bytes that `expected` gives for a rank, in `calls` at most."""
    for rank in range(case.world_size):
        made, ranks = ledger[rank].communications, case.place(rank)[1]
        if len(ranks) == 1:
            made = [call for call in made if call.sent]
        for call in made:
            if (call.op, _way(call)) not in expected:
                seen = f"{_article(call)} {_way(call)} on rank {rank} that should not be there"
                return Finding("traffic", False, seen, _where([call]))
            if sorted(call.ranks) != sorted(ranks):
                seen = f"{_article(call)} in ranks {list(call.ranks)} on rank {rank}, expected {list(ranks)}"
                return Finding("traffic", False, seen, _where([call]))
        for (op, way), wanted in expected.items():
            held = [call for call in made if (call.op, _way(call)) == (op, way)]
            sent, most = sum(call.sent for call in held), wanted(rank)
            if abs(sent - most) > 0.5:
                seen = f"rank {rank} sends {size_in_words(sent)} in {NOUNS[op]}s {way}, expected {size_in_words(most)}"
                times = f" ({sent / most:.3g} times)" if most else ""
                return Finding("traffic", False, seen + times, _where(held))
            if len(held) > calls:
                return Finding(
                    "traffic", False, f"{len(held)} {NOUNS[op]}s {way} on rank {rank}, expected {calls} at most"
                )
    return Finding("traffic", True, words, sent_in_words(ledger))


def judge_memory(case: Heads, outcomes: Sequence[Any], ledger: Ledger) -> Finding:
    """Kept for backward: q, k, v, the output and its log-sum-exps. Never more than one block on its way."""
    for rank, outcome in enumerate(outcomes):
        block, queries, tokens = case.block(rank), case.queries(rank), case.tokens_of(rank)
        kept = case.kept(rank)
        saved = max(_saved(ledger, rank), outcome["kept too much"] + kept * bool(outcome["kept too much"]))
        if saved > kept:
            seen = f"rank {rank} keeps {size_in_words(saved)} for backward, expected {size_in_words(kept)}"
            look = "What of the other ranks is still there when forward has ended?"
            return Finding("memory", False, f"{seen} ({saved / kept:.3g} times)", look=look)
        for way, most in IN_USE.items():
            if extra := outcome[f"blocks too many {way}"]:
                seen = f"{way}, rank {rank} holds {extra + most:.3g} blocks of other ranks at a time"
                look = "One is in use, one on its way, and one may still have a name"
                look += "; one gradient comes, and one goes." if way == "backward" else "."
                look += " What are the others for?"
                return Finding("memory", False, f"{seen}, expected {most} at most", look=look)
        scores = case.b * case.heads * tokens**2
        largest = 2 * max(scores, block // NUMBER, queries // NUMBER)
        if outcome["largest"] > largest:
            seen = f"rank {rank} makes a tensor of {outcome['largest']:,} numbers"
            detail = f"the scores of one block are {scores:,}, its keys and values {block // NUMBER:,}"
            return Finding("memory", False, seen, detail, "Which tensor grows with the whole sequence?")
    return Finding("memory", True, f"{size_in_words(_saved(ledger, 0))} kept, one block in flight")


def judge_overlap(case: Heads, ledger: Ledger) -> Finding:
    """Replayed where a transfer is shorter than a block's computation: all hide, but the last gradient's way home."""
    rank = case.groups[0][0]
    seconds = 4 * case.b * case.heads * case.tokens_of(rank) ** 2 * case.d / 1e12
    link = Link("the check's link", 0.0, case.block(rank) / (TRANSFER * seconds))
    timed = replay(ledger, Cluster(GPU("the check's GPU", 1e12, 1e12, 1e12), link, link, gpus_per_server=64))
    stood = {(way, rank): 0.0 for way in ("forward", "backward") for rank in range(case.world_size)}
    for operation in timed.operations:
        for rank, exposed in operation.exposed.items():
            stood[_way(operation.calls[0]), rank] += exposed / (TRANSFER * seconds)
    look = "What is there to compute between the start of a transfer and the wait for it?"
    for (way, rank), blocks in stood.items():
        allowed = (way == "backward") + EXPOSED
        if blocks > allowed:
            seen = f"{way}, rank {rank} stands still for {blocks:.3g} transfers of a block"
            return Finding("overlap", False, f"{seen}, expected {allowed - EXPOSED:g} at most", look=look)
    most = max(blocks for (_, _), blocks in stood.items())
    return Finding(
        "overlap",
        True,
        f"all hidden but {most:.2g} of {3 * (len(case.groups[0]) - 1)} transfers, on {len(case.groups[0])} ranks",
    )


def _foreign(rank: int, calls: list[Communication]) -> str:
    for call in calls:
        if call.op not in ("send", "recv"):
            return f"rank {rank} calls {_article(call)}: a ring is made of messages"
    return ""


def _astray(rank: int, ranks: Sequence[int], calls: list[Communication]) -> str:
    """A ring may go round either way, but one way only: a rank has one neighbour to send to."""
    place, n = list(ranks).index(rank), len(ranks)
    peers = sorted({call.peer for call in calls if call.op == "send"})
    if len(peers) <= 1 and {ranks[(place + 1) % n], ranks[place - 1]}.issuperset(peers):
        return ""
    return f"rank {rank} sends to {' and '.join(f'rank {peer}' for peer in peers)}: in a ring it has one neighbour"


def _blocks(rank: int, calls: list[Communication], way: str, wanted: int, block: int) -> str:
    sends = [call for call in calls if call.op == "send" and _way(call) == way]
    blocks = sum(call.bytes for call in sends) / block
    what = "K and V" if way == "forward" else "K and V, and of their gradients,"
    if abs(blocks - wanted) > 1e-6:
        return f"rank {rank} sends {blocks:.3g} blocks of {what} {way}, expected {wanted}"
    if len(sends) > 2 * wanted:
        return f"rank {rank} sends {numbered(len(sends), 'message')} {way}, expected {wanted}"
    return ""


def _saved(ledger: Ledger, rank: int) -> int:
    return ledger[rank].memory.phases.get(MEASURED, 0)


def _article(call: Communication) -> str:
    noun = NOUNS.get(call.op, call.op)
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _way(call: Communication) -> str:
    return "backward" if call.backward else "forward"


def _where(calls: list[Communication]) -> str:
    lines = list(dict.fromkeys(call.line for call in calls if call.line))
    return f"called at {', '.join(lines[:3])}" if lines else ""
