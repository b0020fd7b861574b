"""How long a replay of 32 ranks takes on this machine: prints one table.

100,000 entries once, 100,000 operations once. CPU seconds are those of this process, whatever else the machine does.

python bench/replay.py
"""

from __future__ import annotations

import platform
import time

from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Communication, Computation, Ledger, RankLedger, Wait
from fivefold.runtime.replay import replay


def training_like(world: int, entries: int) -> Ledger:
    """Tensor parallelism in groups of 8 with a gradient all-reduce over the other axis every third layer."""
    return Ledger([_rank(rank, world, entries) for rank in range(world)])


def pipeline_like(world: int, entries: int) -> Ledger:
    """One line of ranks; each micro-batch goes down it, and asynchronous sends are waited for a round later."""
    ranks = []
    for rank in range(world):
        own: list = []
        while len(own) < entries:
            if rank:
                own.append(Communication(len(own), "recv", "pp", (), 0, 0, peer=rank - 1))
            own.append(Computation(len(own), flops=10**9))
            if rank < world - 1:
                own.append(Communication(len(own), "send", "pp", (), 0, 10**6, peer=rank + 1, asynchronous=True))
        ranks.append(RankLedger(rank, own))
    rounds = min(sum(isinstance(entry, Computation) for entry in own.entries) for own in ranks)
    return Ledger([RankLedger(own.rank, _first_rounds(own.entries, rounds)) for own in ranks])


def _rank(rank: int, world: int, entries: int) -> RankLedger:
    tp, dp = tuple(range(rank // 8 * 8, rank // 8 * 8 + 8)), tuple(range(rank % 8, world, 8))
    own: list = []
    layer = 0
    while len(own) < entries:
        own.append(Computation(len(own), flops=10**9))
        own.append(Communication(len(own), "all_reduce", "tp", tp, layer, 10**6))
        if layer % 3 == 0:
            own.append(Communication(len(own), "all_reduce", "dp", dp, layer // 3, 10**7, asynchronous=True))
            own.append(Computation(len(own), flops=10**9))
            own.append(Wait(len(own), len(own) - 2))
        layer += 1
    return RankLedger(rank, own)


def _first_rounds(entries: list, rounds: int) -> list:
    kept, done = [], 0
    for entry in entries:
        if done == rounds and not (isinstance(entry, Communication) and entry.op == "send"):
            break
        kept.append(entry)
        done += isinstance(entry, Computation)
    return kept


def main() -> None:
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print(f"{'ledger':<16}{'ranks':>6}{'entries':>10}{'operations':>12}{'seconds':>9}{'CPU':>7}")
    for name, make, length in (("tp8 x dp4", training_like, 3125), ("pp32", pipeline_like, 9700)):
        ledger = make(32, length)
        began, worked = time.perf_counter(), time.process_time()
        result = replay(ledger, cluster("h100"))
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        entries = sum(len(rank.entries) for rank in ledger.ranks)
        print(f"{name:<16}{len(ledger):>6}{entries:>10,}{len(result.operations):>12,}{seconds:>9.2f}{cpu:>7.2f}")


if __name__ == "__main__":
    main()
