"""The check engine: what a solution is worth, whatever it does, and that the answer stays out of its reach."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fivefold.runtime.parts import Source

from autograde import bug, discover
from autograde.check import check, evaluate, mine
from autograde.exercise import ROOT
from autograde.library import definition, library_source
from autograde.recognise import _known_facts

SUM, COPY = "tensor.sum_over_ranks", "tensor.copy_to_ranks"

LESSON = '''
from dataclasses import dataclass
import torch
import torch.distributed as dist
from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare
from autograde.question import Question
from autograde.traffic import Calls, expect

@dataclass(frozen=True, kw_only=True)
class Size(Case):
    size: int

def rows(case):
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.world_size, case.size, generator=generator, dtype=torch.float64)

class Sum(Check):
    """The sum over the ranks; its gradient goes back as it is."""
    exercise = "tensor.sum_over_ranks"
    points = {"output": 1, "gradient": 2, "traffic": 1}
    timeout = 30.0

    def cases(self, seed, level):
        if level == "hidden":
            return [Size(world_size=3, size=2 + seed % 5, seed=seed)]
        small = Size(world_size=2, size=3, seed=seed)
        return [small, Size(world_size=2, size=5, seed=seed + 1, properties=("gradient",))]

    @staticmethod
    def program(solution, case):
        x = rows(case)[dist.get_rank()].requires_grad_()
        y = solution(x, dist.group.WORLD)
        (y * torch.arange(case.size)).sum().backward()
        return {"y": y, "x.grad": x.grad}

    def judge(self, case, outcomes, ledger):
        yield compare("output", "y", [o["y"] for o in outcomes], rows(case).sum(0))
        weight = torch.arange(case.size, dtype=torch.float64)
        yield compare("gradient", "x.grad", [o["x.grad"] for o in outcomes], weight)
        yield expect("traffic", ledger, Calls("all_reduce", forward=1, bytes=8 * case.size))

class Mean(Check):
    """The mean over the ranks, which a solution gets from the sum."""
    exercise = "tensor.copy_to_ranks"
    points = {"output": 2}

    def cases(self, seed, level):
        return [Size(world_size=2, size=3, seed=seed)]

    @staticmethod
    def program(solution, case):
        return {"y": solution(rows(case)[dist.get_rank()], dist.group.WORLD)}

    def judge(self, case, outcomes, ledger):
        yield compare("output", "y", [o["y"] for o in outcomes], rows(case).mean(0))

ONE_WAY = "That is one direction only."
QUESTIONS = [Question(id="03.bytes", text="How many?", answer=6, mistakes={3: ONE_WAY}, unit="MB")]
'''

MISTAKES = '''
from autograde.misconception import Misconception

ALL = [
    Misconception(
        exercise="tensor.sum_over_ranks", name="averaged", hint="This looks like: a mean. What was asked for?",
        old="dist.all_reduce(total, group=group)", new="dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)",
    ),
    Misconception(
        exercise="tensor.sum_over_ranks", name="twice",
        hint="This looks like: one all-reduce too many. What is it for?",
        old="dist.all_reduce(total, group=group)",
        new="dist.all_reduce(total, group=group)\\ndist.all_reduce(total.clone(), group=group)",
    ),
    Misconception(
        exercise="tensor.sum_over_ranks", name="alone",
        hint="This looks like: rank 0 leaves it to the others. Do they know?",
        source="""
        def sum_over_ranks(x, group):
            if dist.get_rank() > 0:
                dist.all_reduce(x.detach(), group=group)
            return x * 1
        """,
    ),
]
'''


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """A lesson of two exercises on two ranks, in the place of the course's own."""
    for folder, text in (("checks", LESSON), ("misconceptions", MISTAKES)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "03_small.py").write_text(text)
        monkeypatch.setattr(discover, folder.upper(), tmp_path / folder)
    discover.forget()
    _known_facts.cache_clear()
    yield tmp_path
    discover.forget()
    _known_facts.cache_clear()


def summed(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x.detach())


def source(body, name="sum_over_ranks"):
    head = "import os, torch\nimport torch.distributed as dist\n"
    text = f"{head}def {name}(x, group):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return Source((("cell [7]", text),), name)


TOTAL = "total = x.detach().clone()\ndist.all_reduce(total)\n"
RIGHT = TOTAL + "return x + (total - x.detach())"


def by_property(verdict):
    return {finding.property: finding for finding in verdict.findings}


def test_a_right_solution_gets_all_points(lesson):
    """An object and a text are both accepted, on fresh seeds and another number of ranks too."""
    verdict = evaluate(SUM, summed, hidden=True)
    assert verdict.passed and verdict.points == verdict.max_points == 4
    assert by_property(verdict)["output"].seen == "2 and 3 ranks, 3 cases"
    assert by_property(verdict)["hidden cases"].passed
    assert evaluate(SUM, library_source(SUM)).passed


def test_points_are_given_property_by_property(lesson):
    """A wrong gradient costs the gradient's points, and no other."""
    verdict = evaluate(
        SUM, source("total = x * 2 - x.detach()\nwith torch.no_grad(): dist.all_reduce(total.data)\nreturn total")
    )
    assert (verdict.state, verdict.points) == ("failed", 2)
    assert by_property(verdict)["gradient"].seen == "x.grad is 2.00 times the expected one on every rank"
    assert by_property(verdict)["hidden cases"].seen == "run after the visible ones pass"


def test_a_solution_that_knows_the_visible_cases_fails_the_hidden_ones(lesson):
    """Hidden cases have other seeds and sizes each time, run only when asked for, and take the points back."""
    body = "n = dist.get_world_size()\nif n > 2: return x * n\n" + RIGHT
    assert evaluate(SUM, source(body)).passed
    verdict = evaluate(SUM, source(body), hidden=True)
    assert verdict.points == 0 and "with a hidden case: 3 ranks" in by_property(verdict)["output"].detail
    assert evaluate(SUM, source(body), hidden=True).seed != verdict.seed


@pytest.mark.parametrize("stub", ["raise NotImplementedError", '"""Sum."""\nraise NotImplementedError'])
def test_an_unsolved_stub_is_not_a_failure(lesson, stub):
    """A stub has a verdict of its own: nothing to explain, no points."""
    verdict = evaluate(SUM, source(stub))
    assert (verdict.state, verdict.points, verdict.findings) == ("unsolved", 0, [])


def test_the_librarys_own_function_is_a_stub(lesson):
    """Handing in the library's object, or calling it by any way from inside, is no solution."""
    from fivefold import tensor

    assert evaluate(SUM, tensor.sum_over_ranks).state == "unsolved"
    assert evaluate(SUM, lambda x, group: tensor.sum_over_ranks(x, group)).state == "unsolved"
    assert (
        evaluate(SUM, source("from fivefold.tensor import sum_over_ranks as s\nreturn s(x, group)")).state == "unsolved"
    )


REACHES = """
def its_file(): return open(PATH).read()
def its_file_by_another_name(): os.symlink(PATH, "/tmp/fivefold-link")
def its_compiled_file(): return open(importlib.util.cache_from_source(PATH), "rb").read()
def its_loader(): return sys.modules[MODULE].__loader__.get_data(PATH)
def a_fresh_import():
    sys.modules.pop(MODULE)
    importlib.import_module(MODULE)
def its_checks(): return open(ROOT + "/autograde/checks/03_tensor/pair.py").read()
def its_solutions(): return open(ROOT + "/solutions/03_tensor.ipynb").read()
def its_history(): return open(ROOT + "/.git/HEAD").read()
def a_child(): subprocess.check_output(["cat", PATH])
def a_shell(): os.system("cat " + PATH)
def a_fork(): os.fork()
def memory(): gc.get_objects()
WAYS = [its_file, its_file_by_another_name, its_compiled_file, its_loader, a_fresh_import, its_checks, its_solutions,
        its_history, a_child, a_shell, a_fork, memory]
"""


def test_the_answer_cannot_be_read(lesson):
    """Neither the library's file, nor a copy of it, nor another program that could read it, is in reach of a rank."""
    path = definition(SUM).path
    head = f"PATH, ROOT, MODULE = {str(path)!r}, {str(ROOT)!r}, {'fivefold.tensor.' + path.stem!r}\n"
    head += "import gc, importlib, importlib.util, os, subprocess, sys, torch\nimport torch.distributed as dist\n"
    tries = (
        "def sum_over_ranks(x, group):\n"
        "    refused = []\n"
        "    for way in WAYS:\n"
        "        try:\n            way()\n"
        "        except PermissionError as error:\n            refused.append(str(error))\n"
        "    assert all('tensor.sum_over_ranks is yours to write' in line for line in refused)\n"
        "    assert len(refused) == len(WAYS), refused\n"
    )
    answer = "".join(f"    {line}\n" for line in RIGHT.splitlines())
    verdict = evaluate(SUM, Source((("cell [7]", head + REACHES + tries + answer),), "sum_over_ranks"))
    assert verdict.passed, str(verdict)


def test_a_cell_may_import_the_course(lesson):
    """A notebook's own `from autograde import check, mine` does no harm on a rank, and checks nothing there."""
    text = (
        "from autograde import check, mine\n"
        + source(RIGHT).cells[0][1]
        + "check('tensor.sum_over_ranks', sum_over_ranks)\n"
    )
    assert evaluate(SUM, Source((("cell [7]", text),), "sum_over_ranks")).passed


def test_what_belongs_to_the_answer_is_gone_from_memory(lesson):
    """Its private helpers are neither in the module nor among the subclasses of what they derive from."""
    body = (
        "import fivefold.tensor.linear as t\n"
        "named = [n for n in vars(t) if 'SumOver' in n]\n"
        "alive = [c for c in torch.autograd.Function.__subclasses__() if 'SumOver' in c.__name__]\n"
        "assert not named and not alive, (named, alive)\n"
        "assert hasattr(t, '_CopyToRanks')\n" + RIGHT
    )
    assert evaluate(SUM, source(body)).passed


LIAR = "class Liar(torch.Tensor):\n    def __eq__(self, other): return True\nreturn x.as_subclass(Liar)"
FAULTS = {
    "one raises": ("if dist.get_rank(): 1 / 0\ndist.all_reduce(x)", "failed", "ZeroDivisionError on rank 1"),
    "all raise": ("raise KeyError('w')", "failed", "KeyError on every rank: 'w'"),
    "no Python": ("return (", "failed", "SyntaxError on every rank"),
    "nothing": ("return None", "failed", "TypeError on every rank"),
    "a deadlock": ("if dist.get_rank(): dist.all_reduce(x.detach())\nreturn x", "failed", "Deadlock after"),
    "other shapes": ("dist.all_reduce(torch.zeros(1 + dist.get_rank()))\nreturn x", "failed", "Ranks disagree"),
    "no end": ("while True: pass", "timed out", "The run took longer than 2 s"),
    "a crash": (
        "if dist.get_rank(): os.kill(os.getpid(), 9)\nreturn x",
        "crashed",
        "rank 1 of 2 was killed by SIGKILL",
    ),
    "leaving": ("if dist.get_rank(): os._exit(0)\nreturn x", "crashed", "rank 1 of 2 left with exit code 0"),
    "a liar": (LIAR, "failed", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_verdict_with_its_own_words(lesson, monkeypatch, fault):
    """Whatever a solution does, the grader answers, names what happened and goes on."""
    if fault == "no end":
        monkeypatch.setattr(discover.checks()[SUM], "timeout", 2.0)
    body, state, words = FAULTS[fault]
    verdict = evaluate(SUM, source(body))
    assert verdict.state == state and verdict.points < verdict.max_points
    assert verdict.findings[0].seen.startswith(words), verdict.findings[0]
    assert "/autograde/" not in str(verdict)


def test_a_failure_shows_the_learners_line_and_not_the_checks(lesson):
    """The traceback has the cell's label and line, and no frame of the grader."""
    verdict = evaluate(SUM, source("y = x * 2\nraise ValueError('no')"))
    assert 'File "cell [7]", line 5, in sum_over_ranks' in verdict.findings[0].detail
    assert "program" not in verdict.findings[0].detail and "autograde" not in verdict.findings[0].detail


def test_a_failure_belongs_to_the_case_that_caused_it(lesson):
    """A case that looks at one property takes only that one down, though both cases share a run."""
    body = "if x.numel() == 5: raise ValueError('five')\n" + RIGHT
    verdict = evaluate(SUM, source(body))
    found = by_property(verdict)
    assert found["output"].passed and found["traffic"].passed and verdict.points == 2
    assert found["gradient"].seen.startswith("ValueError") and "size 5" in found["gradient"].detail


@pytest.mark.parametrize("thing", [None, 3, "sum_over_ranks", torch.ones(2), [summed], ...])
def test_what_is_no_solution_is_refused(lesson, thing):
    """Neither a value nor a lock-holding object crashes the grader."""
    verdict = evaluate(SUM, thing)
    assert verdict.points == 0 and "neither a function nor a class" in verdict.findings[0].seen


def test_what_cannot_travel_is_refused(lesson):
    """A function that holds something unpicklable is told so."""
    import threading

    lock = threading.Lock()
    verdict = evaluate(SUM, lambda x, group: lock and x)
    assert "cannot be sent to the ranks" in verdict.findings[0].seen


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [None, None],
        [{}, {}],
        [{"y": 1}, {"y": 2}],
        [{"y": torch.ones(3), "x.grad": None}] * 2,
        ["a", 3],
        [{"y": []}] * 2,
    ],
)
def test_odd_outcomes_never_pass_and_never_raise(lesson, outcomes):
    """A judge that stumbles over an outcome is a failed finding."""
    from autograde.findings import judge
    from autograde.trial import Trial

    its_check = discover.check_of(SUM)
    trial = Trial(0, its_check.cases(5, "visible")[0], outcomes, None)
    findings = judge(its_check, trial)
    assert findings and not any(finding.passed for finding in findings)


LIBRARYS = "Inside this check, sum_over_ranks is the library's, so that a mistake counts once."


def test_a_mistake_in_an_earlier_exercise_costs_once(lesson):
    """A later exercise is graded with the library's version of an earlier one, and says so."""
    wrong = "def sum_over_ranks(x, group):\n    return x\n"
    mean = "def copy_to_ranks(x, group):\n    return sum_over_ranks(x, group) / dist.get_world_size(group)\n"
    text = "import torch.distributed as dist\n" + wrong + mean
    assert evaluate(SUM, Source((("cell [1]", text),), "sum_over_ranks")).points < 4
    verdict = evaluate(COPY, Source((("cell [1]", text),), "copy_to_ranks"))
    assert verdict.passed and verdict.note == LIBRARYS
    learner = _module(lesson, text)
    verdict = evaluate(COPY, learner.copy_to_ranks)
    assert verdict.passed and verdict.note == LIBRARYS
    assert learner.sum_over_ranks(1, None) == 1


def test_a_learners_own_earlier_exercise_counts_where_it_does_better(lesson):
    """An own version with another signature is right with its own caller, and the verdict says whose was used."""
    text = (
        "import torch.distributed as dist\n"
        "def sum_over_ranks(group, x):\n    x = x.clone()\n    dist.all_reduce(x, group=group)\n    return x\n"
        "def copy_to_ranks(x, group):\n    return sum_over_ranks(group, x) / dist.get_world_size(group)\n"
    )
    for solution in (_module(lesson, text).copy_to_ranks, Source((("cell [1]", text),), "copy_to_ranks")):
        verdict = evaluate(COPY, solution)
        assert verdict.passed and verdict.note.startswith("Graded with your own sum_over_ranks")
    assert evaluate(COPY, summed).note == ""


@pytest.mark.parametrize("name", ["averaged", "twice", "alone"])
def test_a_misconception_is_recognised_in_another_hand(lesson, name):
    """A wrong value, traffic too much and a deadlock are recognised in programs written differently."""
    bodies = {
        "averaged": TOTAL + "return x + (total / dist.get_world_size() - x.detach())",
        "twice": TOTAL + "dist.all_reduce(torch.ones_like(total))\nreturn x + (total - x.detach())",
        "alone": "if dist.get_rank() == 0: return x\n" + RIGHT,
    }  # fmt: skip
    verdict = evaluate(SUM, source(bodies[name]))
    assert verdict.misconception == name and verdict.hint.startswith("This looks like")


def test_a_misconception_is_recognised_beside_another_mistake(lesson):
    """A mean that also spoils the gradient is still recognised as a mean; a mistake of its own kind is not."""
    both = TOTAL + "return 3 * x + (total / dist.get_world_size() - 3 * x.detach())"
    verdict = evaluate(SUM, source(both))
    assert verdict.points == 1 and verdict.misconception == "averaged"
    assert (
        evaluate(
            SUM, source("y = x.detach().clone()\ndist.all_reduce(y)\nreturn x + (7 * y - x.detach())")
        ).misconception
        is None
    )


def test_a_check_in_a_notebook_says_nothing_on_stderr_and_gives_a_number(lesson):
    """Text on stderr is zero points in nbgrader: a check writes none, warnings of learner and judge included."""
    code = (
        "import sys, warnings\nfrom pathlib import Path\nfrom autograde import discover, check\n"
        f"discover.CHECKS = Path({str(lesson / 'checks')!r})\n"
        "from fivefold.runtime.parts import Source\n"
        "text = '''import sys, warnings\ndef sum_over_ranks(x, group):\n"
        "    warnings.warn('w'); print('e', file=sys.stderr)\n    return x'''\n"
        "print(repr(check('tensor.sum_over_ranks', Source((('cell [1]', text),), 'sum_over_ranks'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("tensor.sum_over_ranks") and done.stdout.splitlines()[-1] == "2"


def test_mine_is_the_learners_object_once_it_has_passed(lesson, capsys):
    """Worked examples use a learner's solution exactly when its last check passed, and say which they use."""
    from fivefold import tensor

    assert mine(SUM, summed) is tensor.sum_over_ranks
    assert check(SUM, summed) == 4.0
    assert mine(SUM, summed) is summed
    assert mine(SUM, lambda x, group: x) is tensor.sum_over_ranks
    assert check(SUM, torch.sum) < 4
    assert mine(SUM, torch.sum) is tensor.sum_over_ranks
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Using")]
    assert said[1] == "Using your sum_over_ranks." and said[3].endswith("yours does not pass its check yet.")


def test_mine_is_the_librarys_where_it_uses_what_has_not_passed(lesson, capsys, monkeypatch):
    """A function that passed, on the library's version of another, is not handed out with the learner's broken one."""
    from fivefold import tensor

    monkeypatch.setattr(sys.modules[__name__], "sum_over_ranks", lambda x, group: x, raising=False)
    assert check(COPY, mean_of_ranks) == 2.0
    assert mine(COPY, mean_of_ranks) is tensor.copy_to_ranks
    assert "yours uses your sum_over_ranks, which has not been checked since it was written." in capsys.readouterr().out
    monkeypatch.setattr(sys.modules[__name__], "sum_over_ranks", summed)
    check(SUM, summed)
    assert mine(COPY, mean_of_ranks) is mean_of_ranks


def mean_of_ranks(x, group):
    return sum_over_ranks(x, group) / group.size()  # noqa: F821


def test_the_faulty_program_of_a_find_the_bug_exercise_earns_nothing(lesson, monkeypatch):
    """As it is given; it is not explained, for it is to be found. With that mistake mended, what is right counts."""
    monkeypatch.setattr(bug, "bug_of", lambda exercise: "twice" if exercise == SUM else "")
    untouched = evaluate(SUM, source(TOTAL + "dist.all_reduce(total.clone())\nreturn x + (total - x.detach())"))
    assert by_property(untouched)["output"].passed and by_property(untouched)["gradient"].passed
    assert (untouched.points, untouched.misconception, untouched.hint) == (0, "twice", "")
    assert "still in it" in untouched.note
    other = evaluate(SUM, source("return x * 1"))
    assert other.points > 0 and other.misconception != "twice"


def test_questions_are_checked_by_the_same_name(lesson):
    """An answer gets a verdict with the explanation of its own mistake."""
    assert evaluate("03.bytes", 6.0).passed and evaluate("03.bytes", None).state == "unsolved"
    assert evaluate("03.bytes", 3).findings[0].seen == "3 MB: That is one direction only."


def test_an_unknown_exercise_is_refused_with_the_nearest(lesson):
    """A wrong id is the caller's mistake: one line with the right one."""
    with pytest.raises(
        ValueError, match='no exercise is called "tensor.sum_over_rank": did you mean "tensor.sum_over_ranks"'
    ):
        evaluate("tensor.sum_over_rank", summed)


def test_a_property_that_nothing_was_said_about_earns_nothing(lesson):
    """A judge that skips a property does not thereby pass it."""

    class Silent(type(discover.check_of(SUM))):
        def judge(self, case, outcomes, ledger):
            return [finding for finding in super().judge(case, outcomes, ledger) if finding.property != "gradient"]

    from autograde.check import examine
    from autograde.rank import Sent

    verdict, _ = examine(Silent(), Sent(library_source(SUM)))
    assert verdict.points == 2 and by_property(verdict)["gradient"].seen == "not reached"
    assert not verdict.passed


def test_a_ledger_is_cut_case_by_case(lesson):
    """Cases that share a run are judged on their own traffic: each rank made one call in each."""
    from autograde.rank import Sent
    from autograde.trial import attempt

    its_check = discover.check_of(SUM)
    jobs = [(0, case) for case in its_check.cases(5, "visible")]
    trials = list(attempt(its_check, [Sent(library_source(SUM))], jobs))
    assert [[call.bytes for call in trial.ledger[1].communications] for trial in trials] == [[24], [40]]
    assert all(entry.index == i for trial in trials for i, entry in enumerate(trial.ledger[0].entries))


def _module(folder: Path, text: str):
    """A learner's file as a module of this process, as a notebook's cells are."""
    path = folder / f"learner_{time.monotonic_ns()}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
