import pytest
import torch
import torch.nn.functional as F
from fivefold import cost
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

A100, H100 = 312e12, 989e12  # dense bf16 FLOPs a second

GPT3 = {"layers": 96, "h": 12288, "a": 96, "s": 2048}
MT_NLG = {"layers": 105, "h": 20480, "a": 128, "s": 2048}


def published(value, digit):
    """A printed number: right to within one unit of its last digit, since papers round or truncate."""
    return pytest.approx(value, abs=digit, rel=0)


@pytest.mark.parametrize(
    ("parameters", "ranks", "gigabytes", "digits"),
    [
        (7.5e9, 4, (120, 52.5, 41.3, 30), (1, 0.1, 0.1, 1)),
        (7.5e9, 16, (120, 35.6, 21.6, 7.5), (1, 0.1, 0.1, 0.1)),
        (7.5e9, 64, (120, 31.4, 16.6, 1.88), (1, 0.1, 0.1, 0.01)),
        (7.5e9, 1024, (120, 30.1, 15.1, 0.12), (1, 0.1, 0.1, 0.01)),
        (1e12, 1024, (16000, 4011, 2013, 15.6), (1, 1, 1, 0.1)),
    ],
)
def test_zero_bytes_of_the_paper(parameters, ranks, gigabytes, digits):
    """Table 1 of ZeRO: gigabytes a device by stage."""
    for stage, (expected, digit) in enumerate(zip(gigabytes, digits, strict=True)):
        assert cost.zero_bytes(parameters, ranks, stage) / 1e9 == published(expected, digit)


def test_zero_on_one_rank():
    """On one rank every stage is the same, and sends nothing; another optimizer costs its own bytes."""
    assert {cost.zero_bytes(10, 1, stage) for stage in range(4)} == {160}
    assert {cost.zero_traffic(10, 1, stage) for stage in range(4)} == {0}
    assert cost.zero_bytes(10, 2, 1, optimizer_bytes=8) == 10 * (4 + 8 / 2)


def test_zero_traffic_of_the_paper():
    """2Ψ, 2Ψ, 2Ψ and 3Ψ elements a step, up to the (n - 1)/n that the paper leaves out."""
    moved = [cost.zero_traffic(7.5e9, 1024, stage) / 7.5e9 for stage in range(4)]
    assert moved == pytest.approx([2, 2, 2, 3], rel=1 / 1000)
    assert cost.zero_traffic(100, 4, 3) == 225


@pytest.mark.parametrize(("model", "term", "saved", "flops"), [(GPT3, 80, 70, 2.7), (MT_NLG, 64, 65, 1.6)])
def test_selective_recomputation_of_the_paper(model, term, saved, flops):
    """Korthikanti: 5as/h is 80 and 64; selective recomputation saves 70% and 65% for 2.7% and 1.6% more FLOPs."""
    s, h, a = model["s"], model["h"], model["a"]
    assert 5 * a * s / h == term
    none = cost.activation_bytes(1, s, h, a, t=8, sequence_parallel=True)
    selective = cost.activation_bytes(1, s, h, a, t=8, sequence_parallel=True, recompute="selective")
    assert 100 * (1 - selective / none) == published(saved, 1)
    assert 100 * cost.attention_core_share(s, h) == published(flops, 0.1)


def test_activation_bytes_by_hand():
    """The paper's table, on numbers that a person can check: s·b·h = 64, 5as/h = 20."""
    size = {"b": 1, "s": 8, "h": 8, "a": 4}
    assert cost.activation_bytes(**size) == 64 * (34 + 20)
    assert cost.activation_bytes(**size, t=4) == 64 * (10 + 6 + 5)
    assert cost.activation_bytes(**size, t=4, sequence_parallel=True) == 64 / 4 * (34 + 20)
    assert cost.activation_bytes(**size, t=4, recompute="selective") == 64 * (10 + 6)
    assert cost.activation_bytes(**size, t=4, sequence_parallel=True, recompute="selective") == 34 * 64 / 4
    assert cost.activation_bytes(**size, t=4, sequence_parallel=True, recompute="full") == 2 * 64


class Layer(torch.nn.Module):
    """A transformer layer in plain PyTorch, as Korthikanti et al. draw it, with dropout masks of one byte."""

    def __init__(self, h, a, recompute, dropout, dtype):
        super().__init__()
        self.heads, self.recompute, self.dropout = a, recompute, dropout
        self.ln1, self.ln2 = torch.nn.LayerNorm(h, dtype=dtype), torch.nn.LayerNorm(h, dtype=dtype)
        self.qkv, self.proj = torch.nn.Linear(h, 3 * h, dtype=dtype), torch.nn.Linear(h, h, dtype=dtype)
        self.up, self.down = torch.nn.Linear(h, 4 * h, dtype=dtype), torch.nn.Linear(4 * h, h, dtype=dtype)

    def drop(self, x):
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x

    def core(self, q, k, v):
        scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        return torch.bmm(self.drop(torch.softmax(scores, -1)), v)

    def forward(self, x):
        s, b, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(s, b * self.heads, -1).transpose(0, 1).chunk(3, dim=-1)
        selective = self.recompute == "selective"
        core = checkpoint(self.core, q, k, v, use_reentrant=True) if selective else self.core(q, k, v)
        x = x + self.drop(self.proj(core.transpose(0, 1).reshape(s, b, h)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_activation_bytes_of_a_real_layer(recompute):
    """Autograd really keeps the formula's bytes for a layer in 16 bits; LayerNorm's statistics add less than 1%."""
    b, s, h, a = 2, 24, 128, 4
    layer = Layer(h, a, recompute, dropout=0.1, dtype=torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    expected = cost.activation_bytes(b, s, h, a, recompute=recompute)
    assert expected <= sum(size for _, size in kept.values()) < 1.01 * expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_step_flops_of_a_real_model(recompute):
    """PyTorch's counter, on a real GPT forward and backward, counts exactly the formula's FLOPs."""
    batch, s, layers, h, vocabulary = 2, 12, 3, 32, 50
    model = torch.nn.ModuleList(Layer(h, 4, recompute, dropout=0, dtype=torch.float32) for _ in range(layers))
    x = torch.randn(s, batch, h, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=True) if recompute == "full" else layer(y)
        F.linear(y, torch.randn(vocabulary, h, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(cost.step_flops(batch, s, layers, h, vocabulary, recompute))


def test_step_flops_is_the_papers():
    """The two forms in which Narayanan and Korthikanti write it, each with V/(16lh) or V/(12lh)."""
    batch, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    base = batch * s * layers * h**2
    full = 96 * base * (1 + s / (6 * h) + v / (16 * layers * h))
    none = 72 * base * (1 + s / (6 * h) + v / (12 * layers * h))
    assert cost.step_flops(batch, s, layers, h, v) == pytest.approx(full)
    assert cost.step_flops(batch, s, layers, h, v, recompute="none") == pytest.approx(none)


NARAYANAN = [
    # billions of parameters, layers, hidden
    (1.7, 24, 2304),
    (3.6, 30, 3072),
    (7.5, 36, 4096),
    (18.4, 40, 6144),
    (39.1, 48, 8192),
    (76.1, 60, 10240),
    (145.6, 80, 12288),
    (310.1, 96, 16384),
    (529.6, 105, 20480),
    (1008.0, 128, 25600),
]


@pytest.mark.parametrize(("billions", "layers", "h"), NARAYANAN)
def test_parameters_of_the_paper(billions, layers, h):
    """Table 1 of Narayanan et al. 2021: billions of parameters from layers and hidden size."""
    assert cost.gpt_parameters(layers, h, 51200, 2048) / 1e9 == published(billions, 0.1)


@pytest.mark.parametrize(
    ("layers", "h", "batch", "gpus", "seconds", "percent"),
    [
        (48, 6144, 4, 8, 1.10, 41.5),
        (96, 12288, 64, 64, 13.75, 51.4),
        (105, 20480, 280, 280, 37.83, 56.0),
        (128, 25600, 512, 512, 71.49, 56.3),
        (105, 20480, 2240, 2240, 39.15, 54.2),
    ],
)
def test_utilisation_of_the_paper(layers, h, batch, gpus, seconds, percent):
    """Korthikanti's MFU from its seconds a step (three or four digits); the last row is 530B on 2,240 A100."""
    flops = cost.step_flops(batch, 2048, layers, h, 51200, recompute="none")
    assert 100 * cost.utilisation(flops, seconds, gpus, A100) == published(percent, 0.2)


@pytest.mark.parametrize(
    ("tflops", "peak", "percent"), [(430, H100, 43), (400, H100, 41), (380, H100, 38), (163, A100, 52)]
)
def test_utilisation_of_published_rates(tflops, peak, percent):
    """Llama 3's and Megatron-LM's share of the peak from their TFLOPS a GPU, to within a point."""
    assert 100 * cost.utilisation(tflops * 1e12, 1.0, 1, peak) == published(percent, 1)


def test_interleaving_multiplies_activations():
    """1F1B keeps all layers' bytes on the first rank, interleaving 1 + (p - 1)/(pv) times as many."""
    assert cost.pipeline_activation_bytes(10.0, 96, 8) == 960
    for p, v in [(4, 2), (8, 3), (35, 3)]:
        chunks, layers = (v + 1) * p - 1, p * v * 2
        assert cost.pipeline_activation_bytes(10.0, layers, p, v) == pytest.approx(chunks * 2 * 10.0)
        assert cost.peak_activations("interleaved", p, 1000, v) == pytest.approx(chunks / v)


@pytest.mark.parametrize(
    ("schedule", "peak"), [("gpipe", 20), ("one_f_one_b", 8), ("zb_h1", 8), ("zb_h2", 15), ("zb_v", 8), ("dualpipe", 9)]
)
def test_peaks_of_the_table(schedule, peak):
    """Peak activations by schedule, p = 8 and m = 20; never more than there are micro-batches."""
    assert cost.peak_activations(schedule, 8, 20) == peak
    assert cost.peak_activations(schedule, 8, 3) == 3


@pytest.mark.parametrize(
    ("op", "sent", "messages"),
    [
        ("all_reduce", 1500, 6),
        ("reduce_scatter", 750, 3),
        ("all_gather", 750, 3),
        ("all_to_all", 750, 3),
        ("send", 1000, 1),
    ],
)
def test_ring_traffic(op, sent, messages):
    """Bytes and messages from each of 4 ranks for 1,000 bytes."""
    assert cost.collective_bytes(op, 4, 1000) == sent
    assert cost.collective_messages(op, 4) == messages


@pytest.mark.parametrize("n", range(1, 18))
def test_rounds_are_those_of_a_simulation(n):
    """A ring and a doubling broadcast, played message by message, end after the rounds that the formula counts."""
    held, rounds = [{r} for r in range(n)], 0
    travelling = list(range(n))
    while any(len(pieces) < n for pieces in held):
        travelling = [travelling[r - 1] for r in range(n)]
        for r in range(n):
            held[r].add(travelling[r])
        rounds += 1
    assert cost.collective_seconds("all_gather", n, 0, 1.0, 0.0) == rounds == cost.collective_messages("all_gather", n)
    assert cost.collective_seconds("all_reduce", n, 0, 1.0, 0.0) == 2 * rounds
    informed, doublings = 1, 0
    while informed < n:
        informed, doublings = min(n, 2 * informed), doublings + 1
    assert cost.collective_seconds("broadcast", n, 0, 1.0, 0.0) == doublings
    assert cost.collective_seconds("all_reduce", n, 0, 1.0, 0.0, "tree") == 2 * doublings


def test_collective_seconds_by_hand():
    """1 GB all-reduced over NVLink 3 (300 GB/s) by 8 ranks takes 5.83 ms; small tensors want a tree."""
    beta = 1 / 300e9
    assert cost.collective_seconds("all_reduce", 8, 1e9, 0, beta) == pytest.approx(5.833e-3, rel=1e-3)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"):
        assert cost.collective_seconds(op, 6, 1e6, 0, 2.0) == pytest.approx(2 * cost.collective_bytes(op, 6, 1e6))
    assert cost.collective_seconds("broadcast", 6, 100, 1.0, 0.5, "flat") == 5 * (1 + 50)
    small, large = (64, 1e9)
    for size, faster, slower in ((small, "tree", "ring"), (large, "ring", "tree")):
        assert cost.collective_seconds("all_reduce", 64, size, 5e-6, beta, faster) < cost.collective_seconds(
            "all_reduce", 64, size, 5e-6, beta, slower
        )


def test_tensor_traffic():
    """8bsh(t - 1)/t elements a layer: four all-reduces, or with sequence parallelism four pairs, of b·s·h elements."""
    b, s, h, t = 2, 16, 8, 4
    assert (
        cost.tensor_traffic(b, s, h, t)
        == 8 * b * s * h * 3 / 4
        == 4 * cost.collective_bytes("all_reduce", t, b * s * h)
    )
    pair = cost.collective_bytes("reduce_scatter", t, b * s * h) + cost.collective_bytes("all_gather", t, b * s * h)
    assert cost.tensor_traffic(b, s, h, t) == 4 * pair
    assert cost.tensor_traffic(b, s, h, 1) == 0


def test_pipeline_and_expert_traffic():
    """bsh a boundary, v times that interleaved; four all-to-alls for a mixture of experts."""
    assert cost.pipeline_traffic(2, 16, 8) == 256
    assert cost.pipeline_traffic(2, 16, 8, v=3) == 768
    assert cost.expert_traffic(32, 8, 2, 4) == 4 * cost.collective_bytes("all_to_all", 4, 32 * 2 * 8)
    assert cost.expert_traffic(32, 8, 2, 1) == 0


def test_context_traffic():
    """Ulysses 4Nh/P against Megatron's 4Nh; a ring sends what an all-gather of K and V does."""
    tokens, h, ranks = 4096, 64, 8
    assert cost.ulysses_traffic(tokens, h, ranks) == 4 * tokens * h / ranks
    assert cost.megatron_sequence_traffic(tokens, h) / cost.ulysses_traffic(tokens, h, ranks) == ranks
    gathered = cost.collective_bytes("all_gather", ranks, 2 * tokens * 16)
    assert cost.ring_attention_traffic(tokens, 16, ranks) == gathered


@pytest.mark.parametrize(
    ("flops", "bandwidth", "block", "sequence", "error"),
    [
        (312e12, 300e9, 1.0e3, 6.2e3, 0.05e3),  # A100 NVLink
        (312e12, 12.5e9, 24.5e3, 149.5e3, 0.5e3),  # A100 InfiniBand: 312/12.5 is 24.96
        (123e12, 112e9, 1.1e3, 6.6e3, 0.05e3),  # TPUv3
        (275e12, 268e9, 1.0e3, 6.2e3, 0.05e3),  # TPUv4
    ],
)
def test_ring_overlap_of_the_paper(flops, bandwidth, block, sequence, error):
    """Table 2 of Ring Attention: the smallest block and sequence that hide the transfers."""
    assert cost.min_ring_block(flops, bandwidth) == published(block, error)
    assert cost.min_ring_sequence(flops, bandwidth) == published(sequence, error)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_causal_balance_is_counted(ranks):
    """The share of the ideal is what counting each rank's visible blocks, step by step, gives."""
    half = [
        [0.5 if q == k else float(k < q) for k in range(2 * ranks)] for q in range(2 * ranks)
    ]  # work of half blocks
    for zigzag in (False, True):
        chunks = [(r, 2 * ranks - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(ranks)]
        steps = []
        for step in range(ranks):
            work = [sum(half[q][k] for q in chunks[r] for k in chunks[(r - step) % ranks]) for r in range(ranks)]
            steps.append(max(work))
        total = sum(map(sum, half))
        assert cost.causal_balance(ranks, zigzag) == pytest.approx(total / ranks / sum(steps))
    assert 100 * cost.causal_balance(8) == published(53.3, 0.1)


def test_bubble_of_both_papers():
    """p = 8, m = 32: 17.9% of total time (GPipe), 21.9% of ideal time (Narayanan)."""
    assert 100 * cost.bubble(8, 32) == published(17.9, 0.1)
    assert 100 * cost.bubble(8, 32, of="ideal") == published(21.9, 0.1)
    assert cost.bubble(8, 32, v=4, of="ideal") == 7 / 128
    assert cost.bubble(1, 5) == 0


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (8, 32, 1), (3, 2, 1), (4, 8, 2), (8, 16, 3)])
def test_bubble_is_idle_over_work(p, m, v):
    """Both shares follow from the idle seconds and the m·(f + b + w) seconds of work, whatever f, b and w."""
    f, b, w = 1.0, 1.3, 0.6
    idle, work = cost.bubble_seconds("interleaved", p, f, b, w, v), m * (f + b + w)
    assert cost.bubble(p, m, v, of="ideal") == pytest.approx(idle / work)
    assert cost.bubble(p, m, v) == pytest.approx(idle / (idle + work))


@pytest.mark.parametrize(
    ("schedule", "idle"), [("gpipe", 9), ("one_f_one_b", 9), ("zb_h1", 3), ("zb_h2", 0), ("zb_v", 0), ("dualpipe", 2)]
)
def test_bubbles_of_the_table(schedule, idle):
    """Idle seconds by schedule at p = 4 and unit times: 9 for 1F1B, 3 for ZB-H1."""
    assert cost.bubble_seconds(schedule, 4, 1, 1, 1) == idle


def test_dualpipe_overlaps():
    """DualPipe's bubble counts the overlapped pair as long as it takes, B being the full backward."""
    assert cost.bubble_seconds("dualpipe", 8, 1.0, 1.5, 0.5, overlapped=2.5) == (8 / 2 - 1) * (2.5 + 2.0 - 1.5)


def test_data_parallel_limits():
    """More ranks leave activations alone, ask for a larger batch, and make the sync weigh more."""
    fixed = {"parameters": 1e9, "sequence_activation_bytes": 5e9, "sequence_seconds": 0.5, "alpha": 1e-5, "beta": 1e-11}
    two = cost.data_parallel_limits(2, 64, **fixed)
    assert two.activation_bytes == 5e9 and two.smallest_batch == 2
    assert two.sync_over_compute == pytest.approx(2 * (1e-5 + 1e-11 * 1e9) / (32 * 0.5))
    shares = [cost.data_parallel_limits(n, 64, **fixed).sync_over_compute for n in (1, 2, 4, 8, 16, 32, 64)]
    assert shares[0] == 0 and shares == sorted(set(shares))
    assert {cost.data_parallel_limits(n, 64, **fixed).activation_bytes for n in (1, 8, 64)} == {5e9}


def test_pipeline_vs_zero3():
    """The pipeline moves bytes by tokens, ZeRO-3 by parameters; they cross where the docstring says."""
    parameters, h, ranks = 175e9, 12288, 16
    crossing = 3 * parameters * (ranks - 1) / ranks / (2 * h)
    for tokens, fewer in ((int(crossing * 0.99), "pipeline"), (int(crossing * 1.01), "zero3")):
        moved = cost.pipeline_vs_zero3(parameters, h, tokens, ranks)
        assert min(moved._asdict(), key=moved._asdict().get) == fewer
    moved = cost.pipeline_vs_zero3(1000, 8, 16, 4, num_microbatches=2)
    assert moved == (2 * 2 * cost.pipeline_traffic(1, 16, 8), 2 * 2 * cost.zero_traffic(1000, 4, 3))
    assert cost.pipeline_vs_zero3(1000, 8, 16, 1) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cost.zero_bytes(1, 1, 4),
        lambda: cost.zero_traffic(1, 1, -1),
        lambda: cost.activation_bytes(1, 1, 1, 1, recompute="some"),
        lambda: cost.step_flops(1, 1, 1, 1, 1, recompute="some"),
        lambda: cost.peak_activations("zb", 4, 8),
        lambda: cost.bubble_seconds("zb", 4, 1, 1, 1),
        lambda: cost.bubble_seconds("zb_v", 4, 1, 2, 1),
        lambda: cost.bubble(4, 8, of="time"),
        lambda: cost.collective_bytes("reduce_all", 4, 1),
        lambda: cost.collective_messages("reduce_all", 4),
        lambda: cost.collective_seconds("all_reduce", 4, 1, 0, 0, "flat"),
        lambda: cost.data_parallel_limits(8, 4, 1, 1, 1, 0, 0),
    ],
)
def test_what_has_no_formula(wrong):
    """An unknown stage, schedule, op or option is refused in one line that says what to choose."""
    with pytest.raises(ValueError) as error:
        wrong()
    assert "\n" not in str(error.value) and len(str(error.value)) > 20
