"""The two ends of a model, with the vocabulary split, against one dense process and loss_parallel, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.runtime.marks import phase
from fivefold.tensor import VocabEmbedding, VocabLogits, vocab_cross_entropy
from torch import nn

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # float64: hundreds of roundings, through two steps of AdamW
B, S, H = 2, 5, 7
SIZE = 8 * B * S * H  # bytes of an activation


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCE)


def train(model, tokens):
    """Losses and gradients of the first step, and the weights after two steps of AdamW, by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.01)
    first = None
    for _ in range(2):
        optimizer.zero_grad()
        losses = model(tokens)
        losses.square().sum().backward()
        if first is None:
            first = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters()}
            first["losses"] = losses.detach().clone()
        optimizer.step()
    return first | {name: p.detach().clone() for name, p in model.named_parameters()}


TOKENS = torch.tensor([[0, 3, 10, 4, 4], [7, 2, 9, 10, 1]])
TARGETS = torch.tensor([[3, 10, -100, 4, 7], [2, -100, 10, 0, 9]])


class Model(nn.Module):
    """Embedding, logits and loss, with `scale` to let the logits grow."""

    def __init__(self, embedding, logits, loss, scale):
        super().__init__()
        self.embedding, self.logits, self.loss, self.scale = embedding, logits, loss, scale

    def forward(self, tokens):
        return self.loss(self.logits(self.scale * self.embedding(tokens)))


def vocabulary(size, scale, tied):
    group = dist.group.WORLD
    w, w_out = randn(size, H, seed=11), randn(size, H, seed=12)
    logits = VocabLogits(w_out, group)
    tokens, targets = TOKENS % size, torch.where(TARGETS < 0, TARGETS, TARGETS % size)
    loss = lambda logits: vocab_cross_entropy(logits, targets, group)  # noqa: E731
    model = Model(VocabEmbedding(w, group), logits, loss, scale)
    if tied:
        logits.weight = model.embedding.weight
    return train(model, tokens)


@pytest.mark.parametrize(
    "world_size, size, scale, tied",
    [(1, 11, 1.0, False), (2, 11, 1.0, True), (3, 12, 1e3, False), (3, 11, 1e3, False), (4, 5, 1.0, True)],
)
def test_vocabulary_trains_as_one_process(world_size, size, scale, tied):
    """Losses of every token, gradients and weights after two steps, for sizes that the ranks do not divide, a rank that
    has padding only, ignored targets, growing logits and tied weights; no rank ever sends logits."""
    done = run(vocabulary, world_size, size, scale, tied)
    got = {"losses": done.results[0].pop("losses")}
    for result in done.results[1:]:
        assert torch.equal(result.pop("losses"), got["losses"])
    for name in done.results[0]:
        joined = torch.cat([result[name] for result in done.results])
        assert (joined[size:] == 0).all()
        got[name] = joined[:size]

    embedding, logits = nn.Embedding(size, H), nn.Linear(H, size, bias=False)
    embedding.weight = nn.Parameter(randn(size, H, seed=11))
    logits.weight = embedding.weight if tied else nn.Parameter(randn(size, H, seed=12))
    targets = torch.where(TARGETS < 0, TARGETS, TARGETS % size)
    loss = lambda logits: F.cross_entropy(logits.mT, targets, reduction="none")  # noqa: E731
    close(got, train(Model(embedding, logits, loss, scale), TOKENS % size))

    small = ("all_reduce", "forward", 8 * B * S)
    step = [("all_reduce", "forward", SIZE), small, small, small, ("all_reduce", "backward", SIZE)]
    for own in done.ledger:
        made = [(c.op, "backward" if c.backward else "forward", c.bytes) for c in own.communications]
        assert made == step * 2 * (world_size > 1)


def losses():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    world, mesh, rank = dist.group.WORLD, init_device_mesh("cpu", (3,)), dist.get_rank()
    targets, weight = TARGETS.flatten(), randn(B * S, seed=32)
    ours, theirs = (LOGITS.chunk(3, -1)[rank].clone().requires_grad_() for _ in range(2))
    loss = vocab_cross_entropy(ours, targets, world)
    (loss * weight).sum().backward()
    with loss_parallel():
        replicated = [DTensor.from_local(tensor, mesh, [Replicate()]) for tensor in (targets, weight)]
        expected = F.cross_entropy(DTensor.from_local(theirs, mesh, [Shard(1)]), replicated[0], reduction="none")
        expected.backward(replicated[1])
    half = vocab_cross_entropy(LOGITS.chunk(3, -1)[rank].bfloat16(), targets.where(targets >= 0, 4), world, 4)
    return loss.detach(), ours.grad, expected.to_local().detach(), theirs.grad, half


LOGITS = 20 * randn(B * S, 12, seed=31)


def test_cross_entropy_as_loss_parallel():
    """Losses, and gradients of each rank's logits, are those of torch's loss_parallel. Half precision is computed in
    float32, and a token of the vocabulary may be the one to ignore."""
    targets = TARGETS.flatten()
    expected_half = F.cross_entropy(
        LOGITS.bfloat16().float(), targets.where(targets >= 0, 4), ignore_index=4, reduction="none"
    )
    for loss, grad, expected, expected_grad, half in run(losses, 3).results:
        close(loss, expected)
        close(grad, expected_grad)
        torch.testing.assert_close(half, expected_half, rtol=1e-5, atol=1e-5)


def test_the_loss_keeps_its_own_logits_once():
    """For backward: one tensor as large as this rank's logits, and little for each token."""

    def program():
        logits = randn(B * S, 500, seed=dist.get_rank()).requires_grad_()
        with phase("loss"):
            vocab_cross_entropy(logits, TARGETS.flatten(), dist.group.WORLD)

    own = 8 * 500 * B * S
    for rank in run(program, 2, measure=True).ledger:
        assert own <= rank.memory.phases["loss"] <= 1.05 * own
