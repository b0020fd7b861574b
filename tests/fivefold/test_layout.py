import pytest
from fivefold.layout import AXES, Layout, LayoutError, check_sizes
from hypothesis import given
from hypothesis import strategies as st

DEGREES = st.integers(1, 6)


@given(DEGREES, DEGREES, DEGREES, DEGREES, st.data())
def test_text_round_trip(dp, cp, pp, tp, data):
    """A layout written and read again is the same layout, and its world is the product of four degrees."""
    ep = data.draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0]))
    layout = Layout(dp=dp, cp=cp, pp=pp, tp=tp, ep=ep)
    assert Layout.parse(str(layout)) == layout
    assert layout.world_size == dp * cp * pp * tp


def test_parse_any_order_and_defaults():
    """Axes may come in any order; one left out has degree 1."""
    assert Layout.parse("tp4, dp2,ep2") == Layout(dp=2, tp=4, ep=2)
    assert Layout.parse("dp1") == Layout()
    assert str(Layout()) == "dp1"
    assert str(Layout.parse("ep4,tp2,pp2,cp2,dp2")) == "dp2,cp2,pp2,tp2,ep4"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("dp2,xx3", "layout 'dp2,xx3': 'xx3' is not an axis and its degree: write it like dp2,cp2,pp2,tp2,ep2"),
        ("", "layout '': '' is not an axis and its degree: write it like dp2,cp2,pp2,tp2,ep2"),
        ("dp2,dp2", "layout 'dp2,dp2': dp stands twice: write it like dp2,cp2,pp2,tp2,ep2"),
        ("tp0", "tp is 0: a degree is a whole number, 1 or more"),
        ("dp2,cp2,ep3", "ep3 cannot be folded over dp2 x cp2: choose 1, 2 or 4"),
        ("dp3,ep2", "ep2 cannot be folded over dp3 x cp1: choose 1 or 3"),
    ],
)
def test_layouts_that_cannot_be(text, line):
    """A layout that cannot be is refused in one line that says what to write instead."""
    with pytest.raises(LayoutError) as error:
        Layout.parse(text)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("layout", "sizes", "line"),
    [
        (
            "dp2,cp2,pp3,tp2",
            {"ranks": 16},
            "layout dp2,cp2,pp3,tp2 needs 24 ranks, 16 were given: make the product of the degrees 16",
        ),
        ("tp5", {"heads": 12}, "12 heads cannot be split over tp5: choose 1, 2, 3, 4, 6 or 12"),
        ("tp4", {"heads": 12, "kv_heads": 2}, "2 kv heads cannot be split over tp4: choose 1 or 2"),
        ("tp2", {"ffn": 7}, "7 inner columns of the MLP cannot be split over tp2: choose 1 or 7"),
        ("dp4,cp2,ep4", {"experts": 6}, "6 experts cannot be split over ep4: choose 1 or 2"),
        ("pp4", {"layers": 3}, "3 layers cannot fill the 4 stages of pp4: take 4 layers or more"),
        (
            "pp4",
            {"layers": 7, "num_chunks": 2},
            "7 layers cannot fill the 8 stages of pp4 with 2 chunks a rank: take 8 layers or more",
        ),
        ("cp4", {"sequence": 100}, "a sequence of 100 tokens cannot be split over cp4: choose 96 or 104"),
        ("cp4", {"sequence": 4}, "a sequence of 4 tokens cannot be split over cp4: choose 8"),
        (
            "cp2,tp3",
            {"sequence": 8, "sequence_parallel": True},
            "a sequence of 8 tokens cannot be split over cp2 and tp3: choose 12",
        ),
        ("dp4", {"batch": 10}, "10 sequences a step cannot be split over dp4: choose 1, 2, 5 or 10"),
        (
            "dp2",
            {"batch": 12, "num_microbatches": 4},
            "6 sequences a rank cannot be split over 4 micro-batches: choose 1, 2, 3 or 6",
        ),
        ("tp2", {"heads": 0}, "0 heads cannot be split over tp2: choose a size of 1 or more"),
    ],
)
def test_sizes_that_do_not_fit(layout, sizes, line):
    """A layout that does not fit the model or the batch is refused in one line that names the number to change."""
    with pytest.raises(LayoutError) as error:
        check_sizes(Layout.parse(layout), **sizes)
    assert str(error.value) == line


def test_sizes_that_fit():
    """What fits passes: uneven layers too, an odd sequence where nothing cuts it, and a head count equal to tp."""
    layout = Layout.parse("dp2,cp2,pp2,tp2,ep4")
    check_sizes(layout, ranks=16, heads=4, kv_heads=2, ffn=6, experts=8, layers=5, num_chunks=2)
    check_sizes(layout, sequence=12, sequence_parallel=True, batch=12, num_microbatches=3)
    check_sizes(Layout(dp=3, tp=2), sequence=7, layers=1)


@pytest.mark.parametrize("axis", AXES)
def test_suggested_degrees_fit(axis):
    """Every degree that an error suggests is one that would have passed."""
    layout = Layout(**{"dp": 8, "cp": 5} | {axis: 5})
    sizes = {
        "dp": {"batch": 12},
        "tp": {"heads": 12},
        "pp": {"layers": 4},
        "ep": {"experts": 12},
        "cp": {"sequence": 12},
    }
    with pytest.raises(LayoutError) as error:
        check_sizes(layout, **sizes[axis])
    words = str(error.value).rpartition(":")[2].replace(",", " ").split()
    for number in (int(word) for word in words if word.isdigit()):
        if axis in ("pp", "cp"):
            check_sizes(layout, **dict.fromkeys(sizes[axis], number))
        else:
            check_sizes(Layout(**{"dp": 8, "cp": 5} | {axis: number}), **sizes[axis])
