"""Solutions out of a notebook: what is odd has a name, costs no points by itself, and never raises."""

import random

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograde.solutions import Found, Task, find, tasks

SUM = "def sum_over(x):\n    ### BEGIN SOLUTION\n    return sum(x)\n    ### END SOLUTION"
LINEAR = "class Linear:\n    ### BEGIN SOLUTION\n    def __call__(self, x): return sum_over(x)\n    ### END SOLUTION"
HIDDEN = "\n### BEGIN HIDDEN TESTS\ncheck('x.y', z, hidden=True)\n### END HIDDEN TESTS"


def cell(source: str, name: str = "", points: float | None = None) -> NotebookNode:
    metadata = {"nbgrader": {"grade_id": name, "grade": points is not None, "points": points}} if name else {}
    return new_code_cell(source, metadata=metadata)


def reference() -> NotebookNode:
    return new_notebook(
        cells=[
            new_markdown_cell("# A lesson"),
            cell("import math\nworld_size = 4"),
            cell(SUM, "tensor-sum_over"),
            cell('check("tensor.sum_over", sum_over)' + HIDDEN, "check-tensor-sum_over", 3),
            cell(LINEAR, "tensor-Linear"),
            cell('check("tensor.Linear", Linear)' + HIDDEN, "check-tensor-Linear", 4),
            cell("answer = 2 * world_size", "03-size"),
            cell('check("03.size", answer)', "check-03-size", 1),
        ]
    )


def submission(*changes) -> NotebookNode:
    """The reference as a learner has it, changed by functions of its cells."""
    notebook = reference()
    for each in notebook.cells:
        each.source = each.source.split("\n### BEGIN HIDDEN")[0]
    for change in changes:
        change(notebook.cells)
    return notebook


def remove(name: str):
    def change(cells: list) -> None:
        cells[:] = [each for each in cells if each.metadata.get("nbgrader", {}).get("grade_id") != name]

    return change


def found(notebook: NotebookNode, name: str) -> Found:
    known = tasks(reference())
    return find(notebook, next(task for task in known if task.id == name), known)


def kinds(item: Found) -> list[str]:
    return [note.kind for note in item.notes]


def test_tasks_come_from_the_reference() -> None:
    """Ids, names and points, and the check as the learner gets it: without hidden tests."""
    assert tasks(reference()) == [
        Task("tensor.sum_over", "sum_over", 3, 'check("tensor.sum_over", sum_over)'),
        Task("tensor.Linear", "Linear", 4, 'check("tensor.Linear", Linear)'),
        Task("03.size", "answer", 1, 'check("03.size", answer)'),
    ]


def test_an_untouched_notebook_has_no_notes() -> None:
    """The source holds the definitions up to the check, named as Jupyter names the cells, and can be executed."""
    item = found(submission(), "tensor.Linear")
    assert item.notes == [] and item.problem == ""
    assert [label for label, _ in item.source.cells] == ["code cell 2", "code cell 4"]
    assert item.source.load()()([1, 2]) == 3
    assert found(submission(), "03.size").answer == 8


def test_nothing_is_executed() -> None:
    """A cell that would end this process does not, in any of its statements."""
    end = "import os; os._exit(3)\nx = os._exit(3)\nwhile True: os._exit(3)"
    notebook = submission(lambda cells: cells.insert(1, cell(end)))
    assert found(notebook, "tensor.sum_over").source.load()([2, 3]) == 5


def test_only_what_the_solution_is_made_of_travels() -> None:
    """Imports and helpers that it uses, however indirectly, and no others: a slow import costs no rank its time."""

    def change(cells: list) -> None:
        cells.insert(
            0, cell("import slow_to_import\nimport operator\nfrom functools import reduce\nstart = 0\nother = 1")
        )
        cells.insert(1, cell("def fold(x): return reduce(operator.add, x, start)\ndef unused(): return other"))
        cells[4].source = "def sum_over(x):\n    return fold(x)"

    item = found(submission(change), "tensor.Linear")
    assert item.source.load()()([1, 2, 3]) == 6
    text = "".join(code for _, code in item.source.cells)
    assert "unused" not in text and "other" not in text and "math" not in text and "slow_to_import" not in text


def test_a_lost_cell_is_named_and_others_go_on() -> None:
    """Without its definition an exercise cannot be graded; the next one gets the library's in its place."""
    notebook = submission(remove("tensor-sum_over"))
    item = found(notebook, "tensor.sum_over")
    assert item.source is None and "does not define sum_over" in item.problem and "missing" in kinds(item)
    linear = found(notebook, "tensor.Linear")
    assert linear.source.cells[0] == ("the library", "from fivefold.tensor import sum_over")


def test_stripped_metadata_costs_nothing() -> None:
    """A tool that strips all metadata leaves the names, by which everything is found; both losses are told."""

    def strip(cells: list) -> None:
        for each in cells:
            each.metadata.clear()

    notebook = submission(strip)
    for name in ("tensor.sum_over", "tensor.Linear"):
        item = found(notebook, name)
        assert item.source is not None and kinds(item) == ["unlabelled", "missing"]
    assert found(notebook, "03.size").answer == 8


def test_a_copied_grade_cell_is_told_and_the_last_one_counts() -> None:
    """As in the running notebook: what stands last before the check is what is checked."""
    better = "def sum_over(x):\n    return 'the last'"
    notebook = submission(lambda cells: cells.insert(3, cell(better, "tensor-sum_over")))
    item = found(notebook, "tensor.sum_over")
    assert kinds(item) == ["duplicated"] and item.source.load()([]) == "the last"


def test_a_copied_check_is_told() -> None:
    """It changes neither what is found nor how often it is graded."""
    notebook = submission(lambda cells: cells.append(cells[3]))
    assert kinds(found(notebook, "tensor.sum_over")) == ["duplicated"]


@pytest.mark.parametrize("edited", ["None", 'check("tensor.sum_over", sum)', "check = lambda *a: 3", "", "(("])
def test_an_edited_check_is_told_and_not_used(edited: str) -> None:
    """The source of the solution is the same as with the check that the course gave."""

    def edit(cells: list) -> None:
        cells[3].source = edited

    item = found(submission(edit), "tensor.sum_over")
    assert kinds(item) == ["altered"] and item.source == found(submission(), "tensor.sum_over").source


def test_a_check_moved_to_the_top_hides_nothing() -> None:
    """The exercise below it still counts."""
    notebook = submission(lambda cells: cells.insert(0, cells.pop(3)))
    assert found(notebook, "tensor.sum_over").source.load()([2]) == 2


def test_a_stub_is_not_begun() -> None:
    """Told apart from a wrong solution, and from a missing one."""

    def empty(cells: list) -> None:
        cells[2].source = "def sum_over(x):\n    '''Sum.'''\n    raise NotImplementedError()"
        cells[6].source = "answer = None  # your answer"

    for name in ("tensor.sum_over", "03.size"):
        item = found(submission(empty), name)
        assert not item.attempted and item.source is None and item.notes == []


def test_a_cell_that_is_not_python_is_named() -> None:
    """Where it holds the solution it is the problem; elsewhere it is none."""

    def broken(cells: list) -> None:
        cells[2].source = "def sum_over(x):\n    return sum(x"
        cells.insert(0, cell("((("))

    item = found(submission(broken), "tensor.sum_over")
    assert item.problem.startswith("code cell 3 is not Python: line 2") and item.attempted
    assert found(submission(broken), "tensor.Linear").source is not None


@pytest.mark.parametrize("text", ["answer = print(8)", "answer = [i for i in range(8)]", "(answer, b) = 8, 9"])
def test_an_answer_that_a_program_computes_is_refused(text: str) -> None:
    """Its line says what to give."""

    def change(cells: list) -> None:
        cells[6].source = text

    item = found(submission(change), "03.size")
    assert item.answer is None and item.problem


def test_the_last_answer_counts() -> None:
    """A learner who changed their mind is graded on what the notebook ends with, before its check."""
    notebook = submission(lambda cells: cells.insert(7, cell("answer = 9")))
    assert found(notebook, "03.size").answer == 9


def test_no_notebook_makes_it_raise() -> None:
    """Notebooks cut, doubled, shuffled and mangled at random: always an answer, and never an exception."""
    rng = random.Random(5)
    for _ in range(300):
        notebook = submission()
        for _ in range(rng.randrange(1, 6)):
            cells = notebook.cells
            if not cells:
                break
            at = rng.randrange(len(cells))
            each = nbformat.from_dict(cells[at])
            match rng.randrange(6):
                case 0:
                    del cells[at]
                case 1:
                    cells.insert(rng.randrange(len(cells) + 1), each)
                case 2:
                    each.source = each.source[: rng.randrange(len(each.source) + 1)]
                    cells[at] = each
                case 3:
                    each.metadata = nbformat.from_dict({"nbgrader": rng.choice([None, 3, [], {"grade_id": 4}, {}])})
                    cells[at] = each
                case 4:
                    rng.shuffle(cells)
                case 5:
                    each.source = "".join(rng.sample(each.source, len(each.source)))
                    cells[at] = each
        for task in tasks(reference()):
            item = find(notebook, task, tasks(reference()))
            assert item.problem or item.source is not None or item.answer is not None
