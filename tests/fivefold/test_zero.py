"""ZeRO: the weights of one process and of torch's own, with the traffic and the memory of the paper."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.cost import zero_bytes, zero_traffic
from fivefold.data import make_buckets
from fivefold.runtime.ledger import Communication, Computation
from fivefold.zero import Shard, clip_grad_norm, gather_parameters, partition, reduce_gradients, step1
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

STAGES = (1, 2, 3)
ADAMW = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width + 2), nn.Linear(width + 2, width)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding that is the head as well, blocks with a parameter that nothing uses, a gain of one element."""

    def __init__(self, vocabulary=7, width=5, blocks=2):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.gain, self.head = nn.Parameter(torch.ones(1)), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.gain * x)


def tokens(rank, step=0, vocabulary=7, rows=2):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(vocabulary, (rows, 6), generator=generator)


def loss_of(model, text):
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), reduction="sum")


def units(model):
    """The modules that are gathered one by one, in the order of backward, and the parameters each has for itself."""
    blocks = [(block, list(block.parameters())) for block in reversed(model.blocks)]
    taken = {p for _, parameters in blocks for p in parameters}
    return [*blocks, (model, [p for p in model.parameters() if p not in taken])]


def make_shards(model, stage, bucket_bytes, group, **options):
    if stage < 3:
        return [Shard(bucket, group, **options) for bucket in make_buckets(model.parameters(), bucket_bytes)]
    found = units(model)
    shards = [Shard(parameters, group, stage=3, **options) for _, parameters in found]
    for (module, _), shard in zip(found, shards, strict=True):
        gather_parameters(module, shard)
    return shards


def step(model, shards, stage, texts, lr, max_norm=None):
    """One step on one or more micro-batches. Returns the norm before clipping, where it was asked for."""
    norm = None
    for text in texts:
        finish = reduce_gradients(shards) if stage > 1 else None
        loss_of(model, text).backward()
        if finish:
            finish()
    if max_norm is not None:
        if stage == 1:
            reduce_gradients(shards)()
        norm = clip_grad_norm([shard.gradient for shard in shards], max_norm, dist.group.WORLD)
    if stage < 3:
        step1(shards, lr)
    for shard in shards if stage == 3 else []:
        shard.update(lr)
    return norm


def whole(model, shards):
    """All weights of a model whose parameters may be released."""
    for shard in shards:
        shard.allocate()
        dist.all_gather(list(shard.full.chunk(shard.group.size())), shard.piece.clone(), group=shard.group)
    return [p.detach().clone() for p in model.parameters()]


def trained(stage, bucket_bytes, max_norm, micro_batches):
    model = Model().double()
    shards = make_shards(model, stage, bucket_bytes, dist.group.WORLD, **ADAMW)
    norms = []
    for number in range(2):
        texts = [tokens(dist.get_rank(), 5 * number + i) for i in range(micro_batches)]
        norms.append(step(model, shards, stage, texts, lr=0.05, max_norm=max_norm))
    return whole(model, shards), norms


def alone(n, max_norm, micro_batches):
    """torch's AdamW in one process. Gradients that nothing makes are zero, not absent."""
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **ADAMW)
    norms = []
    for number in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(n):
            for i in range(micro_batches):
                loss_of(model, tokens(rank, 5 * number + i)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm) if max_norm else None)
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "n, bucket_bytes, max_norm, micro_batches", [(1, 300, 0.5, 1), (2, 300, None, 2), (3, 1, 0.5, 2), (5, 1e6, 1e9, 1)]
)
def test_every_stage_ends_with_the_weights_of_one_process(stage, n, bucket_bytes, max_norm, micro_batches):
    """Two steps of AdamW, with clipping that bites and that does not, and norms; many shards are short or empty."""
    expected, expected_norms = alone(n, max_norm, micro_batches)
    for weights, norms in run(trained, n, stage, bucket_bytes, max_norm, micro_batches).results:
        torch.testing.assert_close(weights, expected, atol=1e-10, rtol=1e-10)
        for norm, other in zip(norms, expected_norms, strict=True):
            assert (norm is None) == (other is None)
            if norm is not None:
                torch.testing.assert_close(norm, other, atol=1e-12, rtol=1e-12)


def with_torchs_own():
    """The same two steps by ZeroRedundancyOptimizer (stage 1) and by FSDP2 (stage 3), with its clipping."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = Model().double()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, **ADAMW)
    for number in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        loss_of(model, tokens(rank, 5 * number)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    redundancy = [p.detach() for p in model.parameters()]
    model, norms = Model().double(), []
    mesh = init_device_mesh("cpu", (n,))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **ADAMW)
    for number in range(2):
        optimizer.zero_grad()
        (n * loss_of(model, tokens(rank, 5 * number))).backward()  # FSDP averages
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
    return redundancy, [p.full_tensor().detach() for p in model.parameters()], norms


def test_torchs_own_end_with_the_same_weights():
    """ZeroRedundancyOptimizer against stage 1, FSDP2 with its clipping against stage 3."""
    n = 3
    redundancy, sharded, norms = run(with_torchs_own, n).results[0]
    torch.testing.assert_close(run(trained, n, 1, 300, None, 1).results[0][0], redundancy, atol=1e-10, rtol=1e-10)
    weights, own_norms = run(trained, n, 3, 300, 0.5, 1).results[0]
    torch.testing.assert_close(weights, sharded, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(own_norms, norms, atol=1e-12, rtol=1e-12)


@given(st.integers(0, 200), st.integers(1, 20))
def test_a_partition_is_torchs_chunk_with_empty_pieces_added(size, ranks):
    """Every element once, in order, a piece for each rank."""
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(ranks)] if size else []
    pieces = partition(size, ranks)
    assert [len(piece) for piece in pieces] == chunks + [0] * (ranks - len(chunks))
    assert [i for piece in pieces for i in piece] == list(range(size))


def tiny():
    """A bucket of one element over all ranks: all but one have nothing."""
    p = nn.Parameter(torch.tensor([2.0]))
    shard = Shard([p], dist.group.WORLD, weight_decay=0.0)
    p.grad = torch.tensor([3.0])
    reduce_gradients([shard])()
    own, norm = len(shard.own), clip_grad_norm([shard.gradient[: len(shard.own)]], 1.0, dist.group.WORLD)
    step1([shard], lr=0.5)
    return own, norm.item(), p.item(), p.grad


def test_ranks_without_a_single_element_take_part():
    """The sum of four gradients of 3 is 12; Adam's first step is lr."""
    results = run(tiny, 4).results
    assert [own for own, *_ in results] == [1, 0, 0, 0]
    for _, norm, value, grad in results:
        assert norm == 12.0 and value == pytest.approx(1.5, abs=1e-6) and grad is None


def of_half_precision():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    wide = copy.deepcopy(model).float()
    shard = Shard(list(model.parameters()), dist.group.WORLD)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        for p, own in zip(wide.parameters(), model.parameters(), strict=True):
            p.grad = own.grad.float()
        optimizer.step()
        step1([shard], 1e-3)
    return shard.master[: len(shard.own)], list(model.parameters()), torch.cat([p.flatten() for p in wide.parameters()])


def test_half_precision_is_trained_on_a_wide_copy():
    """Against torch's AdamW in float32, fed the same gradients: steps too small for bf16 are not lost."""
    master, parameters, expected = run(of_half_precision, 1).results[0]
    torch.testing.assert_close(master, expected)
    torch.testing.assert_close(torch.cat([p.flatten() for p in parameters]), master.bfloat16(), atol=0, rtol=0)


def linear(i, n, dtype):
    """Layer i of six: n divides its elements, so that there is no padding."""
    return nn.Linear(*((8 * n, 8) if i % 2 else (8, 8 * n)), bias=False, dtype=dtype)


def one_step(stage, dtype):
    """In stage 3 each layer is sharded as soon as it is made, so that the model never stands there whole."""
    n, layers, shards = dist.get_world_size(), [], []
    for i in range(6):
        layers.append(linear(i, n, dtype))
        shards.insert(0, Shard(list(layers[i].parameters()), dist.group.WORLD, stage))
        if stage == 3:
            gather_parameters(layers[i], shards[0])
    model = nn.Sequential(*layers)
    finish = reduce_gradients(shards) if stage > 1 else None
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    if finish:
        finish()
    if stage < 3:
        step1(shards, 0.1)
    for shard in shards if stage == 3 else []:
        shard.update(0.1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [2, 3])
def test_traffic_and_memory_are_those_of_the_paper(stage, n):
    """2Ψ, 2Ψ, 3Ψ elements, (n-1)/n of them sent; bytes kept, in bf16, to within the one bucket that is whole."""
    size = 6 * 8 * 8 * n
    ledger = run(one_step, n, stage, torch.bfloat16, measure=True).ledger
    for rank in range(n):
        sent = sum(call.sent for call in ledger[rank].communications)
        assert sent == pytest.approx(2 * zero_traffic(size, n, stage), rel=1e-12)
        kinds = {call.op for call in ledger[rank].communications}
        assert kinds == {"reduce_scatter", "all_gather"}
        memory, bucket = ledger[rank].memory, 2 * size / 6
        assert memory.optimizer == 12 * size / n
        expected = {"parameters": 2 * size / (n if stage == 3 else 1), "gradients": 2 * size / (n if stage > 1 else 1)}
        for what, kept in expected.items():
            assert kept <= getattr(memory, what) <= kept + (bucket if kept < 2 * size else bucket / n)
        total = sum(expected.values()) + memory.optimizer
        assert total == pytest.approx(zero_bytes(size, n, stage), rel=1e-12)


def test_gradients_are_reduced_while_backward_goes_on():
    """Stage 2, program order: reduce-scatters start between backward's computations. Stage 3 gathers there too."""
    for stage in (2, 3):
        ledger = run(one_step, 2, stage, torch.float32, measure=True).ledger
        entries = ledger[0].entries
        work = [e.index for e in entries if isinstance(e, Computation) and e.backward and e.flops]
        calls = [e for e in entries if isinstance(e, Communication)]
        reduces = [call for call in calls if call.op == "reduce_scatter"]
        assert len(reduces) == 6 and all(call.asynchronous and call.backward for call in reduces)
        assert [call.index < max(work) for call in reduces] == [True] * 5 + [False]
        if stage == 3:
            gathers = [call for call in calls if call.op == "all_gather"]
            assert [call.backward for call in gathers] == [False] * 6 + [True] * 6
            for gather, reduce in zip(gathers[6:], reduces, strict=True):
                assert gather.index < reduce.index


def held_after(stage):
    model = Model().double()
    shards = make_shards(model, stage, 1, dist.group.WORLD)
    empty = [[p.untyped_storage().nbytes() == 0 for p in model.parameters()]]
    loss = loss_of(model, tokens(0))
    empty.append([p.untyped_storage().nbytes() == 0 for p in model.parameters()])
    finish = reduce_gradients(shards)
    loss.backward()
    finish()
    used = [p for name, p in model.named_parameters() if "block" not in name]
    return empty, [p.untyped_storage().nbytes() == 0 for p in used], [p.grad for p in model.parameters()]


def test_stage_3_keeps_nothing_between_uses():
    """Not before forward, not between forward and backward, not after it; whole gradients are gone in stage 2 too."""
    (empty, after, grads), *_ = run(held_after, 2, 3).results
    assert all(map(all, empty)) and all(after) and grads == [None] * len(grads)
    assert run(held_after, 2, 2).results[0][2] == [None] * len(grads)


def replicated():
    """Rank r has a piece of its own of size r, one that all four hold, and one that it shares with its neighbour."""
    rank = dist.get_rank()
    own = torch.arange(rank, dtype=torch.float64) + 1
    both, everyone = torch.full((2, 3), 1.0 + rank // 2), torch.full((5,), 7.0, dtype=torch.bfloat16)
    gradients = [own, both, everyone]
    norm = clip_grad_norm(gradients, 1.0, dist.group.WORLD, copies=[1, 2, 4])
    return norm, gradients


def test_a_replicated_gradient_counts_once_in_the_norm():
    """Unequal, empty, replicated on some and on all, in three dtypes: as one process with each of them once."""
    everything = [torch.arange(rank, dtype=torch.float64) + 1 for rank in range(4)]
    everything += [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0), torch.full((5,), 7.0)]
    norm = math.sqrt(sum(g.double().square().sum() for g in everything))
    for rank, (got, gradients) in enumerate(run(replicated, 4).results):
        assert got.item() == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(gradients[0], everything[rank] / (norm + 1e-6), rtol=1e-12, atol=0)
        assert [g.dtype for g in gradients] == [torch.float64, torch.float32, torch.bfloat16]


def over_two_groups():
    """Experts are sharded over the ranks that hold the same ones, the dense layer over all."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(3)
    dense, experts = nn.Linear(3, 3).double(), [nn.Linear(3, 3).double() for _ in range(2)]
    expert = experts[rank % 2]
    shards = [Shard(list(expert.parameters()), groups[rank % 2]), Shard(list(dense.parameters()), dist.group.WORLD)]
    for number in range(2):
        finish = reduce_gradients(shards)
        expert(dense(torch.full((1, 3), rank + 1.0 + number, dtype=torch.float64))).square().sum().backward()
        finish()
        clip_grad_norm([shard.gradient for shard in shards], 2.0, dist.group.WORLD)
        step1(shards, 0.1)
    return list(dense.parameters()), list(expert.parameters())


def test_experts_and_dense_layers_are_sharded_over_their_own_groups():
    """One list of shards, one norm, against one process that has both experts."""
    torch.manual_seed(3)
    dense, experts = nn.Linear(3, 3).double(), [nn.Linear(3, 3).double() for _ in range(2)]
    parameters = [p for layer in (dense, *experts) for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        for rank in range(4):
            x = torch.full((1, 3), rank + 1.0 + number, dtype=torch.float64)
            experts[rank % 2](dense(x)).square().sum().backward()
        nn.utils.clip_grad_norm_(parameters, 2.0)
        optimizer.step()
    for rank, (of_dense, of_expert) in enumerate(run(over_two_groups, 4).results):
        torch.testing.assert_close(of_dense, list(dense.parameters()), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(of_expert, list(experts[rank % 2].parameters()), atol=1e-10, rtol=1e-10)


def test_a_shard_of_several_dtypes_is_refused():
    """One line that says what to do."""
    with pytest.raises(ValueError, match="let make_buckets sort them"):
        Shard([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).double())], None)
