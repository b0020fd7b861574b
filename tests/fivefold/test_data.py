"""Data parallelism: the gradients of one process, in few messages that start early."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.cost import collective_bytes
from fivefold.data import accumulate, make_buckets, start_in_order, sync_gradients
from fivefold.runtime.cluster import H100, Cluster, Link
from fivefold.runtime.ledger import Communication, Computation, Wait
from fivefold.runtime.replay import replay
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn


class Odd(nn.Module):
    """Sizes that nothing divides, a weight used twice, a layer that some inputs do not use, one that none uses."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(3, 1)
        self.last, self.tied = nn.Linear(7, 5, bias=False), nn.Linear(5, 7)
        self.tied.weight = self.first.weight

    def forward(self, x, detour):
        x = torch.tanh(self.first(x))
        if detour:
            x = torch.tanh(self.sometimes(x))
        return self.last(torch.tanh(self.tied(self.last(x))))


def odd():
    torch.manual_seed(5)
    return Odd().double()


def samples(rank, rows=3):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


sizes = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float32, torch.float64])), max_size=12)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(0, 100), st.randoms())
def test_buckets_hold_every_parameter_once_from_back_to_front(sizes, limit, random):
    """Within the limit, one dtype each, none that the one before had room for; repeated and frozen ones aside."""
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size, dtype in sizes]
    frozen = nn.Parameter(torch.empty(4), requires_grad=False)
    buckets = make_buckets([*parameters, frozen, *random.sample(parameters, len(parameters) // 2)], limit)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(parameters)]
    filled = [sum(p.nbytes for p in bucket) for bucket in buckets]
    for i, bucket in enumerate(buckets):
        assert len({p.dtype for p in bucket}) == 1 and (filled[i] <= limit or len(bucket) == 1)
        if i:
            assert filled[i - 1] + bucket[0].nbytes > limit or bucket[0].dtype != buckets[i - 1][0].dtype


def synced(bucket_bytes):
    """The gradients that sync_gradients leaves, and those of torch's own data parallelism times the ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = odd()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    theirs(samples(rank), rank % 2).square().sum().backward()
    finish = sync_gradients(make_buckets(model.parameters(), bucket_bytes), dist.group.WORLD)
    model(samples(rank), rank % 2).square().sum().backward()
    finish()
    return [p.grad for p in model.parameters()], [p.grad * n for p in theirs.parameters() if p.grad is not None]


@pytest.mark.parametrize("n, bucket_bytes", [(1, 200), (2, 1), (3, 200), (5, 1e6)])
def test_gradients_are_those_of_one_process_and_of_ddp(n, bucket_bytes):
    """With a shared weight, one unused on some ranks, one on all; a bucket for each parameter, a few, one."""
    alone = odd()
    for rank in range(n):
        alone(samples(rank), rank % 2).square().sum().backward()
    results = run(synced, n, bucket_bytes).results
    used = [p for name, p in alone.named_parameters() if "never" not in name and p.grad is not None]
    for ours, theirs in results:
        for mine, p in zip(ours, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, torch.zeros_like(p) if p.grad is None else p.grad, atol=1e-12, rtol=1e-12)
        assert len(theirs) == len(used)
        for got, p in zip(theirs, used, strict=True):
            torch.testing.assert_close(got, p.grad, atol=1e-12, rtol=1e-12)


def in_other_orders():
    """Each rank goes through the layers in an order of its own, so gradients come in another order everywhere."""
    torch.manual_seed(1)
    n, rank = dist.get_world_size(), dist.get_rank()
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(n)]).double()
    finish = sync_gradients(make_buckets(layers.parameters(), 1), dist.group.WORLD)
    x = torch.ones(2, 4, dtype=torch.float64)
    for i in range(n):
        x = torch.tanh(layers[(rank + i) % n](x))
    x.sum().backward()
    finish()
    return [p.grad for p in layers.parameters()]


def test_ranks_that_finish_gradients_in_other_orders_agree_on_the_order_of_collectives():
    """Started as they come, all-reduces of one shape would meet the wrong ones: silently, without the watched group."""
    n = 3
    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(n)]).double()
    for rank in range(n):
        x = torch.ones(2, 4, dtype=torch.float64)
        for i in range(n):
            x = torch.tanh(layers[(rank + i) % n](x))
        x.sum().backward()
    for grads in run(in_other_orders, n).results:
        for mine, p in zip(grads, layers.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, atol=1e-13, rtol=1e-12)


def test_a_bucket_starts_when_it_and_all_before_it_are_ready():
    """And hooks are gone afterwards: a second backward starts nothing."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    log = []
    finish = start_in_order([[layer.weight] for layer in reversed(layers)], log.append)
    x = layers[1](layers[0](torch.ones(1, 2)))
    layers[3](x).sum().backward()  # layer 2, of bucket 1, is left out
    assert log == [0]
    finish()
    assert log == [0, 1, 2, 3]
    layers[3](torch.ones(1, 2)).sum().backward()
    assert log == [0, 1, 2, 3]


def deep(blocking):
    """Six layers, a bucket each; `blocking` does all communication after backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    buckets = make_buckets(model.parameters(), 64 * 64 * 4)
    x = torch.ones(32, 64, requires_grad=True)  # so that every layer's backward is two products
    if blocking:
        model(x).sum().backward()
        sync_gradients(buckets, dist.group.WORLD)()
    else:
        finish = sync_gradients(buckets, dist.group.WORLD)
        model(x).sum().backward()
        finish()


def test_all_reduces_start_while_backward_goes_on():
    """Program order in the ledger: each but the last is followed by backward work, and waited for after all of it."""
    ledger = run(deep, 3, False, measure=True).ledger
    for rank in range(3):
        entries = ledger[rank].entries
        calls = [e for e in entries if isinstance(e, Communication)]
        work = [e.index for e in entries if isinstance(e, Computation) and e.backward and e.flops]
        waits = [e.index for e in entries if isinstance(e, Wait)]
        assert len(calls) == 6 and all(call.op == "all_reduce" and call.asynchronous for call in calls)
        assert all(call.backward for call in calls) and all(call.bytes == 64 * 64 * 4 for call in calls)
        for call, following in zip(calls, calls[1:], strict=False):
            assert any(call.index < index < following.index for index in work)
        assert len(waits) == 6 and min(waits) > max(work)
        assert ledger[rank].memory.gradients == 6 * 64 * 64 * 4  # one copy of each gradient


def test_what_starts_early_is_hidden_on_a_cluster():
    """Where a bucket travels as long as a layer's backward computes, only the last one is exposed."""
    flops = 2 * 2 * 32 * 64 * 64  # backward of a layer: two products
    sent = collective_bytes("all_reduce", 3, 64 * 64 * 4)
    cluster = Cluster(H100, inside=Link("even", 0.0, sent / (flops / H100.flops)))
    times = {b: replay(run(deep, 3, b, measure=True).ledger, cluster) for b in (True, False)}
    exposed = [overlap.share for overlap in times[False].overlap("all_reduce")]
    assert all(share < 0.01 for share in exposed[:-1]) and exposed[-1] > 0.99
    assert all(overlap.share > 0.99 for overlap in times[True].overlap("all_reduce"))
    assert times[False].makespan < 0.75 * times[True].makespan


VOCABULARY = 11


def language_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()


def texts(rank, step):
    """Micro-batches of this rank, another number on each; of unequal token counts, one without a single token."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    found = []
    for i in range(1 + rank % 3):
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        targets = torch.randint(VOCABULARY, (2, 5), generator=generator)
        targets[torch.rand(2, 5, generator=generator) < 0.2 * (1 + (rank + i) % 4)] = -100
        found.append((tokens, targets.fill_(-100) if (rank, i) == (1, 0) else targets))
    return found


def loss_sum(model, micro_batch):
    tokens, targets = micro_batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


def trained():
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    buckets, losses = make_buckets(model.parameters(), 400), []
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        micro_batches = texts(dist.get_rank(), step)
        losses.append(accumulate(functools.partial(loss_sum, model), micro_batches, buckets, dist.group.WORLD))
        optimizer.step()
    return losses, list(model.state_dict().values()), [p.grad for p in model.parameters()], len(buckets)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_accumulated_gradients_are_those_of_the_mean_over_tokens(n):
    """One process that sees all tokens of a step at once: loss, gradients, weights after two steps."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        everything = [both for rank in range(n) for both in texts(rank, step)]
        tokens, targets = (torch.cat([pair[i] for pair in everything]) for i in (0, 1))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    for mine, weights, grads, _ in run(trained, n).results:
        torch.testing.assert_close(mine, losses, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(weights, list(model.state_dict().values()), atol=1e-10, rtol=1e-10)


def test_there_is_no_traffic_before_the_last_micro_batch():
    """One all-reduce a bucket, started in the last backward, and one of two numbers, whatever the micro-batches."""
    found = run(trained, 3, measure=True)
    buckets, parameters = found.results[0][3], language_model().parameters()
    assert buckets > 2
    total = sum(p.nbytes for p in parameters)
    for rank in range(3):
        entries = found.ledger[rank].entries
        calls = found.ledger[rank].communications
        assert [call.op for call in calls] == ["all_reduce"] * 2 * (buckets + 1)
        assert sum(call.bytes for call in calls) == 2 * (total + 16)
        passes = ["B" if e.backward else "F" for e in entries[: calls[0].index] if e.flops]
        turns = [kind for kind, before in zip(passes, ["", *passes], strict=False) if kind != before]
        assert turns == ["F", "B"] * len(texts(rank, 0))  # with nothing sent between them


def over_two_groups():
    """A dense layer is summed over all four ranks, an expert over the two that hold the same one."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks, group_desc="ep_dp") for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(3)
    dense, expert = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    handles = [
        sync_gradients(make_buckets(dense.parameters(), 1), dist.group.WORLD),
        sync_gradients(make_buckets(expert.parameters(), 1), groups[rank % 2]),
    ]
    x = torch.full((1, 3), rank + 1.0, dtype=torch.float64)
    (expert(dense(x)) if rank < 2 else dense(expert(x))).sum().backward()
    for finish in handles:
        finish()
    return [p.grad for p in dense.parameters()], [p.grad for p in expert.parameters()]


def test_different_parameters_are_summed_over_different_groups():
    """Dense over all, experts over their own; both armed at once, and backward in another order on some ranks."""
    torch.manual_seed(3)
    dense, expert = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    parameters = [*dense.parameters(), *expert.parameters()]
    own = []
    for rank in range(4):
        x = torch.full((1, 3), rank + 1.0, dtype=torch.float64)
        loss = (expert(dense(x)) if rank < 2 else dense(expert(x))).sum()
        own.append(torch.autograd.grad(loss, parameters))
    for rank, (of_dense, of_expert) in enumerate(run(over_two_groups, 4).results):
        for i, grad in enumerate(of_dense):
            torch.testing.assert_close(grad, sum(own[r][i] for r in range(4)))
        for i, grad in enumerate(of_expert):
            torch.testing.assert_close(grad, own[rank][2 + i] + own[(rank + 2) % 4][2 + i])
