"""Parts stand in for the library's functions on every rank, before anything else can take the library's version."""

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime.errors import RankFailed
from fivefold.runtime.parts import Program, Source

CELLS = (
    ("cell [1]", "import fivefold\nFACTOR = 3\n"),
    ("cell [2]", "def coordinates(rank, layout):\n    return FACTOR * rank\n"),
)


def calls_the_library():
    from fivefold import mesh

    return mesh.coordinates(5, None), mesh.rank.__module__


def test_a_part_is_used_wherever_the_library_uses_its_function():
    """An object of the caller's, installed on all ranks."""

    def coordinates(rank, layout):
        return 7 * rank

    found = run(calls_the_library, 2, parts={"mesh.coordinates": coordinates})
    assert found.results == [(35, "fivefold.mesh")] * 2


def inner_user():
    from fivefold import mesh
    from fivefold.layout import Layout

    return mesh.groups(Layout(dp=2), "dp")


def test_the_librarys_other_functions_call_the_part():
    """Not only those who import it by name: the module's own globals too."""

    def coordinates(rank, layout):
        raise ArithmeticError("the part was called")

    with pytest.raises(RankFailed, match="the part was called"):
        run(inner_user, 1, parts={"mesh.coordinates": coordinates})


def test_without_a_part_there_is_a_stub():
    """While an exercise is checked, its answer is out of reach, by whichever way it is imported."""

    def look():
        from fivefold.mesh import coordinates

        return coordinates(1, None)

    for program in (look, calls_the_library, inner_user):
        with pytest.raises(RankFailed, match="mesh.coordinates is yours to write") as caught:
            run(program, 2, parts={"mesh.coordinates": None})
        assert caught.value.kind == "NotImplementedError"


def test_a_function_that_a_cell_imported_is_the_part_too():
    """What a program refers to is looked up on the ranks after the parts are in place."""
    from fivefold.mesh import coordinates

    def use():
        return coordinates(2, None)

    assert run(use, 1, parts={"mesh.coordinates": lambda rank, layout: 11 * rank}).results == [22]
    with pytest.raises(RankFailed, match="mesh.coordinates is yours to write"):
        run(use, 1, parts={"mesh.coordinates": None})


def test_a_source_is_executed_on_the_ranks_only_and_shows_its_lines():
    """The text of cells stands in for a function; errors name the cell."""

    def use(source):
        return source.load()(dist.get_rank() + 1, None)

    assert run(use, 2, Source(CELLS, "coordinates")).results == [3, 6]
    broken = Source((("cell [9]", "x = 1\ndef f():\n    return x / 0\n"),), "f")
    with pytest.raises(RankFailed, match=r'File "cell \[9\]", line 3, in f\n +return x / 0'):
        run(lambda source: source.load()(), 1, broken)


def test_a_source_can_be_given_other_versions_of_its_globals():
    """Earlier exercises are replaced by the library's after the cells ran."""
    source = Source((("cell [1]", "def helper():\n    return 1\ndef f():\n    return helper()\n"),), "f")
    assert source.load()() == 1
    assert source.load({"helper": lambda: 2})() == 2
    with pytest.raises(NameError, match="does not define g"):
        Source(source.cells, "g").load()


def test_a_part_of_a_module_that_does_not_exist_is_said():
    """A wrong name is one line."""

    def use():
        import fivefold.nowhere

        return fivefold.nowhere

    with pytest.raises(RankFailed, match="there is no module fivefold.nowhere"):
        run(use, 1, parts={"nowhere.f": torch.sum})


def groups_made():
    from fivefold import mesh
    from fivefold.layout import Layout

    return mesh.groups(Layout(dp=2), "dp")


@pytest.mark.parametrize("first", ["mesh.coordinates", "mesh.groups"])
def test_parts_use_each_other_in_whatever_order_they_come(first):
    """A part that is text imports another from the library; what it gets is that other part."""
    cells = {
        "groups": "from fivefold.mesh import coordinates\ndef groups(layout, _):\n    return coordinates(5, layout)\n",
        "coordinates": "def coordinates(rank, layout):\n    return 13 * rank\n",
    }
    parts = {f"mesh.{name}": Program(Source((("cell [1]", code),), name)) for name, code in cells.items()}
    ordered = {first: parts[first]} | parts
    assert run(groups_made, 1, parts=ordered).results == [65]
