import warnings

import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single


def both():
    warnings.simplefilter("error")
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered, mine = torch.empty(2 * n, 3), torch.empty(1, 3)
    all_gather_single(gathered, torch.full((2, 3), float(rank)), group=dist.group.WORLD)
    work = reduce_scatter_single(mine, torch.arange(3.0 * n).view(n, 3) + rank, group=dist.group.WORLD, async_op=True)
    work.wait()
    return gathered, mine


def test_renamed_collectives():
    """Rows come in the order of ranks, sums go to their rank, and no torch warns of a name."""
    n = 3
    for rank, (gathered, mine) in enumerate(run(both, n).results):
        assert gathered.tolist() == [[r] * 3 for r in range(n) for _ in range(2)]
        assert mine.tolist() == [[n * (3 * rank + i) + sum(range(n)) for i in range(3)]]
