"""What a measured rank computes and keeps, against counts by hand and torch's own counters."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from fivefold.runtime import marks
from fivefold.runtime.ledger import Communication, Computation
from fivefold.runtime.meter import Meter
from fivefold.runtime.saved import SavedBytes
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

BYTES = 4  # float32
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class FakeRecorder:
    """What a rank's recorder offers the meter."""

    def __init__(self):
        self.entries, self.phase, self.before = [], "", None
        self._ticks = itertools.count()
        self.current_line = "line 1"

    def clock(self):
        return float(next(self._ticks))

    def line(self):
        return self.current_line

    def communicate(self, op="all_reduce"):
        if self.before:
            self.before()
        self.entries.append(Communication(len(self.entries), op, "world", (0,), 0, 0))


def measured(program):
    recorder = FakeRecorder()
    with Meter(recorder) as meter:
        program(recorder)
    return meter.memory, [entry for entry in recorder.entries if isinstance(entry, Computation)], recorder


def test_a_linear_saves_its_input_and_not_its_weight():
    """One saved activation, b·s·h numbers; the weight is a parameter, the output is not needed."""
    layer, x = torch.nn.Linear(5, 7), torch.randn(3, 5)
    memory, *_ = measured(lambda _: layer(x).sum().backward())
    assert memory.peak_saved == 3 * 5 * BYTES
    assert memory.parameters == (5 * 7 + 7) * BYTES
    assert memory.gradients == (5 * 7 + 7) * BYTES


def test_a_parameter_that_is_transposed_or_multiplied_directly_is_not_an_activation():
    """The input needs a gradient here, so the weight is saved: directly, as a view, by an autograd function."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    w, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(6, 4, requires_grad=True)
    for product in (torch.matmul, lambda x, w: x @ w.t(), lambda x, w: F.linear(x, w), Product.apply):
        memory, *_ = measured(lambda _, product=product: product(x, w).sum().backward())
        assert memory.peak_saved == 6 * 4 * BYTES


def test_views_and_shared_storages_count_once_and_whole():
    """Two halves of one tensor and the tensor itself, all saved: one storage."""

    def program(_):
        x = torch.randn(8, 6, requires_grad=True) * 1
        left, right = x.chunk(2, dim=-1)
        (left * right).sum().backward()

    memory, *_ = measured(program)
    assert memory.peak_saved == 8 * 6 * BYTES
    assert memory.saved_at_peak[0].count == 1


def test_saved_tensors_are_freed_by_backward_and_by_dropping_the_graph():
    """Two graphs one after the other have the peak of one; two alive together that of both."""
    x = torch.randn(10, requires_grad=True)

    def one_after_the_other(_):
        for _ in range(3):
            y = x.exp().sum()
            y.backward()
        z = x.exp().sum()  # never sent backward
        del z
        x.exp().sum().backward()

    def together(_):
        losses = [x.exp().sum() for _ in range(3)]
        sum(losses).backward()

    assert measured(one_after_the_other)[0].peak_saved == 10 * BYTES
    assert measured(together)[0].peak_saved == 3 * 10 * BYTES


def test_a_graph_that_is_dropped_leaves_no_cycle():
    """An output saved by its own node must die with it, without the garbage collector."""
    x = torch.randn(10, requires_grad=True)
    recorder = FakeRecorder()
    gc.disable()
    try:
        with Meter(recorder) as meter:
            y = x.exp()
            del y
            assert meter.memory.timeline[-1][1] == 0
    finally:
        gc.enable()


def test_what_is_saved_at_the_peak_is_told_by_line():
    """The largest line first; what was freed before the peak is left out."""
    x = torch.randn(10, requires_grad=True)

    def program(recorder):
        recorder.current_line = "freed"
        x.exp().sum().backward()
        recorder.current_line = "first"
        a = x.exp()
        recorder.current_line = "second"
        b = torch.cat([a, a]).exp()
        b.sum().backward()

    memory, *_ = measured(program)
    assert [(s.line, s.bytes, s.count) for s in memory.saved_at_peak] == [("second", 80, 1), ("first", 40, 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_inputs_and_counts_what_it_recomputes(reentrant):
    """Four layers of exp: without recomputation 4 outputs; with it 4 inputs, and then one layer at a time again."""
    n, layers = 50, 4

    def layer(x):
        return (x.exp() + 1).sin()  # saves exp's output and sin's input

    def program(recorder, recompute):
        x = torch.randn(n, requires_grad=True)
        with marks.phase("forward"):
            for _ in range(layers):
                x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        with marks.phase("backward"):
            x.sum().backward()

    plain = measured(lambda r: program(r, False))[0]
    less = measured(lambda r: program(r, True))[0]
    assert plain.phases == {"forward": 2 * layers * n * BYTES, "backward": 2 * layers * n * BYTES}
    assert less.phases == {"forward": layers * n * BYTES, "backward": (layers + 2) * n * BYTES}
    assert less.timeline[-1][1] == 0


def test_an_input_of_a_checkpoint_is_not_counted_after_it_was_used():
    """The caller still holds the input, which the recomputation saved again: after backward it is no activation."""
    x = torch.randn(5, requires_grad=True) * 1
    memory, *_ = measured(lambda _: checkpoint(torch.sin, x, use_reentrant=False).sum().backward())
    assert memory.peak_saved == 5 * BYTES
    assert memory.timeline[-1][1] == 0


def test_what_checkpoint_holds_counts_longer_than_what_is_saved_of_it():
    """Recomputed and saved again: one storage, counted until the last of the two holders lets go."""
    counted = SavedBytes(lambda: "", lambda storage: False, lambda: None)
    tensor = torch.randn(6)
    counted._seen_by_checkpoint(lambda tensor: None)(tensor)
    kept = counted.pack(tensor)
    assert counted.current == 6 * BYTES
    del kept
    assert counted.current == 6 * BYTES
    del tensor
    assert counted.current == 0


def test_a_second_derivative_through_a_checkpoint_counts_to_the_end():
    """What is recomputed is saved once more, for the next derivative: in the end everything is freed."""
    x = torch.randn(5, requires_grad=True)

    def program(_):
        y = checkpoint(lambda x: (x.exp() + 1).sin(), x, use_reentrant=False)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        del y
        first.pow(2).sum().backward()

    memory, *_ = measured(program)
    assert memory.timeline[-1][1] == 0
    assert memory.peak_saved > 2 * 5 * BYTES


def test_activations_of_a_transformer_layer_follow_the_formula():
    """Korthikanti et al. 2022, section 4.1, counted in numbers: 16sh + as², and LayerNorm's mean and deviation.

    The paper's sbh(34 + 5as/h) bytes are 2 bytes for each of 16sbh + 2as²b numbers, and masks of 2sbh + as²b bytes.
    Without dropout there are no masks, and one as²b fewer: the softmax's output is also what the next product takes.
    """
    s, h, a = 12, 16, 4
    attention = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
    mlp = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)
    norms = torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)
    x = torch.randn(s, h, requires_grad=True)

    def program(_):
        y = norms[0](x * 1)
        q, k, v = (t.view(s, a, h // a).transpose(0, 1) for t in attention[0](y).chunk(3, dim=-1))
        weights = torch.softmax(q @ k.transpose(1, 2), dim=-1)
        y = x + attention[1]((weights @ v).transpose(0, 1).reshape(s, h))
        z = mlp[1](F.gelu(mlp[0](norms[1](y))))
        (y + z).sum().backward()

    memory, *_ = measured(program)
    assert memory.peak_saved == (16 * s * h + a * s * s + 2 * 2 * s) * BYTES


def test_optimizer_state_is_two_numbers_a_parameter_for_adam_and_none_for_sgd():
    """Adam's two moments, 8 bytes a float32 parameter; the scalar step count is left out."""
    for kind, moments in ((torch.optim.Adam, 2), (torch.optim.SGD, 0)):
        layer = torch.nn.Linear(3, 5, bias=False)

        def program(_, layer=layer, kind=kind):
            optimizer = kind(layer.parameters(), lr=0.1)
            layer(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        memory, *_ = measured(program)
        assert memory.optimizer == moments * 15 * BYTES
        assert memory.gradients == 15 * BYTES


def test_what_a_program_keeps_elsewhere_is_counted_while_it_lives():
    """`keep` counts a shard once however often it is named, and not after it has been freed."""

    def program(_):
        for _ in range(3):
            shard = torch.zeros(7)
            marks.keep("optimizer", shard)
            marks.keep("optimizer", shard[:3])

    assert measured(program)[0].optimizer == 7 * BYTES


def test_flops_agree_with_torchs_counter():
    """Linear layers on a batch of sequences, forward and backward: the same total as FlopCounterMode."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x = torch.randn(2, 9, 6)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    _, computations, _ = measured(lambda _: model(x).sum().backward())
    assert sum(c.flops for c in computations) == counter.get_total_flops() > 0


def test_flops_of_fused_attention_and_of_matrix_times_vector():
    """Attention on the CPU's fused kernel: 4·b·h·s²·d forward, 5/2 of that backward; a matrix times a vector 2mn."""
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    _, computations, _ = measured(lambda _: F.scaled_dot_product_attention(q, q, q).sum().backward())
    forward = 4 * 2 * 3 * 8 * 8 * 4
    assert [c.flops for c in computations if not c.backward] == [forward]
    assert sum(c.flops for c in computations if c.backward) == forward * 5 // 2
    _, computations, _ = measured(lambda _: torch.randn(5, 7) @ torch.randn(7))
    assert computations[0].flops == 2 * 5 * 7


def test_inference_mode_counts_a_linear():
    """Under inference mode a linear layer stays one operator; it is counted all the same."""

    def program(_):
        with torch.inference_mode():
            F.linear(torch.randn(2, 3), torch.randn(4, 3))

    assert measured(program)[1][0].flops == 2 * 2 * 3 * 4


def test_computations_stand_between_communications_in_program_order():
    """Work before, between and after two communications gives three entries, in place, with their own FLOPs."""
    a = torch.randn(2, 2)

    def program(recorder):
        a @ a
        recorder.communicate()
        a @ a @ a
        recorder.communicate()
        a @ a

    _, _, recorder = measured(program)
    kinds = [type(entry).__name__ for entry in recorder.entries]
    assert kinds == ["Computation", "Communication", "Computation", "Communication", "Computation"]
    assert [entry.flops for entry in recorder.entries if isinstance(entry, Computation)] == [16, 32, 16]
    assert [entry.index for entry in recorder.entries] == list(range(5))


def test_backward_and_phases_divide_the_work():
    """Forward and backward never share an entry, and a phase's work carries its name."""
    w = torch.randn(3, 3, requires_grad=True)

    def program(recorder):
        with marks.phase("forward"):
            loss = (torch.randn(2, 3) @ w).sum()
        assert recorder.phase == ""
        loss.backward()

    _, computations, _ = measured(program)
    assert [(c.phase, c.backward) for c in computations if c.flops] == [("forward", False), ("", True)]


def test_named_work_has_its_kind_and_number_even_without_operators():
    """A pipeline's action is one entry, with what a timeline writes on it."""

    def program(recorder):
        with marks.work("F", microbatch=3):
            recorder.communicate("recv")
        with marks.work("B", microbatch=0, chunk=1):
            torch.randn(2, 2) @ torch.randn(2, 2)

    _, computations, recorder = measured(program)
    assert [(c.kind, c.label, c.flops) for c in computations] == [("F", "3", 0), ("B", "0.1", 16)]
    assert recorder.entries[0].op == "recv"


def test_marks_are_harmless_outside_a_run():
    """The same program runs on its own."""
    with marks.phase("forward"), marks.work("F", microbatch=1):
        marks.keep("optimizer", torch.zeros(3))
    assert marks.now.phase == marks.now.kind == ""
    with pytest.raises(ValueError, match="choose F, B, I or W"), marks.work("forward"):
        pass


def test_a_change_in_place_of_a_saved_tensor_is_still_an_error():
    """Autograd's own check is off where there are hooks: the meter must not turn an error into a wrong gradient."""

    def program(_):
        x = torch.randn(3, requires_grad=True) * 1
        y = x * x
        x.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="changed in place"):
        measured(program)


def test_gradients_and_second_derivatives_are_those_of_an_unmeasured_run():
    """Packing must not change what backward computes, also when it is itself differentiated."""
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def double(_=None):
        (first,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        found.append(second)

    found = []
    double()
    measured(double)
    torch.testing.assert_close(found[0], found[1])


def test_hooks_of_the_program_still_work():
    """A program's own pair of hooks is called, and what it packs is counted instead of the original."""
    x = torch.randn(8, requires_grad=True)

    def program(_):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            x.exp().sum().backward()

    assert measured(program)[0].peak_saved == 8 * 2


def test_the_curve_rises_and_falls_to_zero():
    """Turning points of the bytes saved: up to the peak, back to nothing."""
    x = torch.randn(16, requires_grad=True)
    memory, *_ = measured(lambda _: (x.exp() + 1).sin().sum().backward())
    heights = [size for _, size in memory.timeline]
    assert max(heights) == memory.peak_saved == 2 * 16 * BYTES
    assert heights[0] == heights[-1] == 0


def test_real_ranks_measure_what_one_process_does():
    """A product and its backward around an all-reduce, on 2 ranks; replayed, the closed form of its time."""
    from fivefold import run
    from fivefold.runtime.cluster import cluster
    from fivefold.runtime.replay import replay

    def program(n, h):
        import torch.distributed as dist
        from fivefold.runtime import marks

        w, x = torch.nn.Parameter(torch.ones(h, h)), torch.ones(n, h)
        with marks.phase("forward"), marks.work("F", microbatch=2):
            y = x @ w
            dist.all_reduce(y.detach())
        with marks.phase("backward"):
            y.exp().sum().backward()

    n, h = 3, 5
    ledger = run(program, 2, n, h, measure=True).ledger
    machine = cluster("h100")
    result = replay(ledger, machine)
    for rank in range(2):
        memory, entries = ledger[rank].memory, ledger[rank].entries
        assert memory.phases == {"forward": n * h * BYTES, "backward": 2 * n * h * BYTES}
        assert memory.parameters == memory.gradients == h * h * BYTES
        forward = [e for e in entries if isinstance(e, Computation) and e.phase == "forward"]
        assert [(e.label, e.kind) for e in forward] == [("2", "F")]
        assert ledger[rank].flops == 2 * 2 * n * h * h
        assert result.busy(rank) == pytest.approx(4 * n * h * h / machine.gpu.flops)
        step = machine.inside.alpha + n * h * BYTES / 2 / machine.inside.bandwidth
        assert result.exposed(rank) == pytest.approx(2 * step)


def test_dtensor_counts_what_each_rank_does_and_keeps():
    """PyTorch's own tensor parallelism: FLOPs and saved bytes of the local shards, whatever DTensor asks of shapes."""
    from fivefold import run

    def program(b, h):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        mlp = torch.nn.Sequential(torch.nn.Linear(h, 2 * h), torch.nn.GELU(), torch.nn.Linear(2 * h, h))
        parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mlp(torch.randn(b, h, requires_grad=True)).sum().backward()

    b, h = 3, 8
    ledger = run(program, 2, b, h, measure=True).ledger
    for rank in range(2):
        assert ledger[rank].flops == 3 * 2 * (2 * b * h * h)
        assert ledger[rank].memory.peak_saved == 3 * b * h * BYTES
        assert ledger[rank].memory.gradients == (2 * h * h + h + h) * BYTES
