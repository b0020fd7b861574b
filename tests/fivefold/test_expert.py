"""Expert parallelism equals every expert in one process, and sends exactly what was routed."""

import itertools

import pytest
import torch
import torch.distributed as dist
from fivefold import expert, mesh, run
from fivefold.layout import Layout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

H, FF = 6, 8


def weights(num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_experts, H), (num_experts, FF, H), (num_experts, H, FF)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def tokens(rank, b, s, seed=1):
    return torch.randn(b, s, H, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def dense(x, router, w_in, w_out, top_k, limit=None):
    """Every expert on every token, masked; written from the definition, without the library."""
    flat = x.flatten(0, 1)
    probs = torch.softmax(flat @ router.T, -1)
    room = [limit if limit is not None else len(flat) * top_k] * len(router)
    weight = torch.zeros_like(probs)
    ranking = [sorted(range(len(router)), key=lambda e: (-probs[t, e].item(), e)) for t in range(len(flat))]
    for choice in range(top_k):
        for t in range(len(flat)):
            e = ranking[t][choice]
            if room[e] > 0:
                room[e] -= 1
                weight[t, e] = 1
    every = torch.stack([F.gelu(flat @ a.T) @ b.T for a, b in zip(w_in, w_out, strict=True)], 1)
    return (every * (probs * weight)[..., None]).sum(1).view_as(x), probs, weight


def layer(layout, num_experts, top_k, sizes, factor, balance):
    made = mesh.make_mesh(Layout.parse(layout))
    b, s = sizes[made.rank // made.layout.tp]
    groups = (made.dp_cp,)
    moe = expert.MoE(
        *weights(num_experts),
        top_k,
        made.ep,
        made.tp,
        capacity_factor=factor,
        balance_weight=balance,
        balance_groups=groups,
    )
    x = tokens(made.rank // made.layout.tp, b, s).requires_grad_()
    y = moe(x)
    (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()).sum().backward()
    for name in ("w_in", "w_out"):
        dist.all_reduce(getattr(moe, name).grad, group=made.ep_dp)
    dist.all_reduce(moe.router.grad, group=made.dp_cp)
    place = (made.expert_rank, made.coordinates.tp)
    return {"y": y, "x": x.grad, "router": moe.router.grad, "w_in": moe.w_in.grad, "w_out": moe.w_out.grad,
            "place": place, "balance": moe.balance}  # fmt: skip


LAYOUTS = [
    ("dp1", 4, 2, [(2, 5)], None),
    ("dp2,ep2", 4, 1, [(1, 5), (2, 3)], None),
    ("dp2,cp2,tp2,ep4", 4, 2, [(1, 3), (2, 2), (1, 1), (0, 4)], None),
    ("dp4,tp2,ep2", 6, 2, [(1, 7), (1, 2), (3, 1), (1, 4)], None),
    ("dp3,ep3", 6, 2, [(2, 5), (1, 9), (1, 6)], 0.75),
]


@pytest.mark.parametrize("layout, num_experts, top_k, sizes, factor", LAYOUTS, ids=[row[0] for row in LAYOUTS])
def test_moe_equals_every_expert_in_one_process(layout, num_experts, top_k, sizes, factor):
    """Outputs; gradients of tokens, router and experts; with the balance loss, capacity, and a rank without tokens."""
    balance = 0.3
    found = run(layer, Layout.parse(layout).world_size, layout, num_experts, top_k, sizes, factor, balance).results
    tp, ep = Layout.parse(layout).tp, Layout.parse(layout).ep
    router, w_in, w_out = (w.requires_grad_() for w in weights(num_experts))
    inputs = [tokens(i, *size).requires_grad_() for i, size in enumerate(sizes)]
    total, all_probs, all_chosen, outputs = 0, [], [], []
    for x in inputs:
        limit = None if factor is None else expert.capacity(x.shape[0] * x.shape[1], num_experts, top_k, factor)
        y, probs, weight = dense(x, router, w_in, w_out, top_k, limit)
        outputs.append(y)
        total = total + (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()).sum()
        all_probs.append(probs)
        everything = dense(x, router, w_in, w_out, top_k)[2]
        all_chosen.append(everything)
    probs, chosen = torch.cat(all_probs), torch.cat(all_chosen)
    share = chosen.sum(0) / chosen.sum()
    loss = num_experts * (share * probs.mean(0)).sum()
    (total + balance * loss).backward()
    for rank, out in enumerate(found):
        i = rank // tp
        torch.testing.assert_close(out["y"], outputs[i], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out["x"], inputs[i].grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out["router"], router.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out["balance"], loss.detach(), rtol=1e-12, atol=0)
        e, t = out["place"]
        mine = w_in.grad.chunk(ep, 0)[e].chunk(tp, 1)[t]
        torch.testing.assert_close(out["w_in"], mine, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out["w_out"], w_out.grad.chunk(ep, 0)[e].chunk(tp, 2)[t], rtol=1e-9, atol=1e-12)


def test_traffic_is_two_all_to_alls_each_way_with_the_bytes_that_were_routed():
    """Rows by pair as chosen; the counts before them; a rank's own rows are no traffic."""

    def program():
        x = tokens(dist.get_rank(), 1, 9)[0].requires_grad_()
        chosen = (torch.arange(18).view(9, 2) * 3 + dist.get_rank()) % 6
        rows, counts, plan = expert.dispatch(x, chosen, 6, dist.group.WORLD)
        expert.combine(rows, torch.ones(9, 2, dtype=x.dtype), plan, dist.group.WORLD).sum().backward()
        return chosen

    found = run(program, 3)
    for rank in range(3):
        chosen = found.results[rank].flatten() // 2
        rows = [8 * H * int((chosen == r).sum()) for r in range(3)]
        from_others = [8 * H * int((found.results[r].flatten() // 2 == rank).sum()) for r in range(3)]
        counts, there, back, grad_back, grad_there = found.ledger[rank].communications
        assert {call.op for call in found.ledger[rank].communications} == {"all_to_all"}
        assert [call.backward for call in found.ledger[rank].communications] == [False] * 3 + [True] * 2
        assert counts.bytes == 6 * 8
        assert list(there.splits) == list(grad_back.splits) == rows or rank is None
        assert list(back.splits) == from_others and sorted(grad_there.splits) == sorted(from_others)
        assert there.sent == sum(rows) - rows[rank]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.data())
def test_capacity_drops_second_choices_first_and_then_by_position(num_tokens, num_experts, data):
    """Against a loop over choices, then tokens."""
    top_k = data.draw(st.integers(1, num_experts))
    seed = data.draw(st.integers(0, 999))
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    chosen = scores.argsort(1)[:, :top_k]
    limit = data.draw(st.integers(0, 4))
    room, expected = [limit] * num_experts, torch.zeros(num_tokens, top_k, dtype=torch.bool)
    for k in range(top_k):
        for t in range(num_tokens):
            if room[chosen[t, k]] > 0:
                room[chosen[t, k]] -= 1
                expected[t, k] = True
    assert torch.equal(expert.within_capacity(chosen, num_experts, limit), expected)


def test_ties_go_to_the_expert_with_the_smaller_number():
    """torch.topk gives [2, 3] for four equal numbers."""
    assert expert.route(torch.zeros(3, 4), 2).experts.tolist() == [[0, 1]] * 3
    assert expert.route(torch.tensor([[0.0, 1.0, 1.0, 0.0]]), 3).experts.tolist() == [[1, 2, 0]]


def test_a_tie_of_servers_goes_to_the_smaller_numbers():
    """Servers first, then experts on them."""
    assert expert.route_within_servers(torch.zeros(2, 8), 3, 4, 2).experts.tolist() == [[0, 1, 2]] * 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_limited_routing_is_the_best_of_all_choices_of_servers(num_tokens, servers, each, data):
    """Against all sets of servers, tried one by one; with every server open it is `route`."""
    most = data.draw(st.integers(1, servers))
    top_k = data.draw(st.integers(1, most * each))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(num_tokens, servers * each, generator=generator, dtype=torch.float64)
    routing = expert.route_within_servers(logits, top_k, servers, most)
    best = -(-top_k // most)
    for row, own in zip(logits.softmax(1), routing.experts.tolist(), strict=True):
        blocks = row.view(servers, each)
        score = blocks.topk(min(best, each), dim=1).values.sum(1)
        opened = max(
            itertools.combinations(range(servers), most), key=lambda some, score=score: score[list(some)].sum()
        )
        allowed = [e for e in range(servers * each) if e // each in opened]
        assert own == sorted(allowed, key=lambda e, row=row: -row[e])[:top_k]
    torch.testing.assert_close(routing.gates, logits.softmax(1).gather(1, routing.experts))
    whole = expert.route_within_servers(logits, top_k, servers, servers)
    assert torch.equal(whole.experts, expert.route(logits, top_k).experts)


def test_all_to_all_is_torchs_own_with_its_gradient():
    """Uneven and empty pieces, against the differentiable all-to-all of torch."""

    def program():
        rank, table = dist.get_rank(), [[0, 2, 1], [3, 0, 0], [1, 0, 2]]
        sends, receives = table[rank], [row[rank] for row in table]
        numbers = torch.Generator().manual_seed(rank)
        x = torch.randn(sum(sends), 2, generator=numbers, dtype=torch.float64).requires_grad_()
        incoming = torch.randn(sum(receives), 2, generator=numbers, dtype=torch.float64)
        results = []
        for way in (
            lambda: expert.all_to_all(x, sends, receives, dist.group.WORLD),
            lambda: all_to_all_single_autograd(x, receives, sends, dist.group.WORLD),
        ):
            y = way()
            results.append((y.detach() + 0, *torch.autograd.grad(y, x, incoming)))
        return results

    for ours, theirs in run(program, 3).results:
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


def test_averaged_gradients_are_those_of_the_mean_of_all_losses():
    """Router and experts against every expert in one process, with two copies of each expert."""

    def program():
        made = mesh.make_mesh(Layout.parse("dp4,ep2"))
        moe = expert.MoE(*weights(4), 2, made.ep, made.tp)
        moe(tokens(made.rank, 1, 5)).square().mean().backward()
        expert.average_gradients(moe, made.dp_cp, made.ep_dp)
        return made.expert_rank, moe.router.grad, moe.w_in.grad, moe.w_out.grad

    router, w_in, w_out = (w.requires_grad_() for w in weights(4))
    sum(dense(tokens(rank, 1, 5), router, w_in, w_out, 2)[0].square().mean() / 4 for rank in range(4)).backward()
    for place, *grads in run(program, 4).results:
        wanted = router.grad, w_in.grad.chunk(2)[place], w_out.grad.chunk(2)[place]
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_balance_loss_is_1_when_even_and_counts_all_ranks_tokens():
    """Independent of how the same tokens are split over ranks; its gradient too."""

    def split(sizes):
        probs = torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
        mine = probs.softmax(1).split(sizes)[dist.get_rank()]
        chosen = mine.topk(2).indices
        loss = expert.balance_loss(mine, chosen, [dist.group.WORLD])
        loss.backward()
        dist.all_reduce(probs.grad)
        return loss, probs.grad

    (whole,) = run(split, 1, [12]).results
    for loss, grad in run(split, 3, [7, 0, 5]).results:
        torch.testing.assert_close(loss, whole[0], rtol=1e-13, atol=0)
        torch.testing.assert_close(grad, whole[1], rtol=1e-12, atol=1e-15)
    even = torch.full((8, 4), 0.25)
    assert run(lambda: expert.balance_loss(even, torch.arange(8).view(8, 1) % 4, [dist.group.WORLD]), 1).results[0] == 1


@pytest.mark.parametrize(
    "tokens_, experts, top_k, factor, expected",
    [(64, 8, 1, 1.0, 8), (64, 8, 2, 1.25, 20), (10, 4, 1, 1.0, 3), (0, 4, 2, 1, 0)],
)
def test_capacity_rounds_up(tokens_, experts, top_k, factor, expected):
    """ceil(tokens·k/E·CF)."""
    assert expert.capacity(tokens_, experts, top_k, factor) == expected


def test_wrong_numbers_are_one_clear_line():
    """Experts that ep does not divide; a top_k larger than their number."""
    with pytest.raises(ValueError, match="top_k is 5: choose 1 to 4"):
        expert.route(torch.zeros(1, 4), 5)
    for top_k, servers, most in ((3, 2, 1), (1, 3, 1), (1, 2, 3)):
        with pytest.raises(ValueError, match=f"{most} of {servers} servers"):
            expert.route_within_servers(torch.zeros(1, 4), top_k, servers, most)

    def program():
        expert.dispatch(torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.int64), 5, dist.group.WORLD)

    with pytest.raises(Exception, match="5 experts cannot be spread over ep2"):
        run(program, 2)
