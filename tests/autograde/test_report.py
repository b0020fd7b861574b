"""The report in its four forms: the same answers in each, whatever text a submission puts into them."""

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autograde import report as reports
from autograde.grade import Graded, Report
from autograde.run import CRASHED, OK, RAISED, TIMED_OUT, UNREADABLE, Execution
from autograde.solutions import Note
from autograde.verdict import Finding, Verdict

EVIL = "<script>alert(1)</script> \x1b[31mred\x1b[0m \x00 \ud800 & \"quoted\" ]]> 'x' {{ 7 * 7 }}"


def verdict(name: str, state: str, points: float, seen: str = "bias.grad is 4.00 times the expected one") -> Verdict:
    findings = [Finding("output", True, "fine"), Finding("gradient", state == "passed", seen)]
    return Verdict(name, points, 4, [] if state == "unsolved" else findings, state, seconds=0.25)


@pytest.fixture
def report() -> Report:
    """Every state and every outcome, and hostile text wherever a submission can put some."""
    path = Path("notebooks/03_tensor.ipynb")
    mixed = Graded(path, "03_tensor", Execution(path, RAISED, f"code cell 3: {EVIL}", 12.0, 9, [(3, EVIL)]))
    mixed.verdicts = [
        verdict("tensor.copy_to_ranks", "passed", 4),
        verdict("tensor.RowLinear", "failed", 2, EVIL),
        verdict("tensor.MLP", "unsolved", 0),
        verdict("tensor.Attention", "timed out", 0, "the run took longer than 10 s"),
        verdict("tensor.VocabEmbedding", "crashed", 0, "rank 1 was killed by SIGSEGV"),
        verdict("03.bytes", "cannot be graded", 0, "the notebook does not set bytes_answer"),
    ]
    mixed.notes = {"tensor.RowLinear": [Note("duplicated", f"2 cells {EVIL}")]}
    others = [
        Graded(Path(f"{outcome}.ipynb"), "", Execution(Path("x"), outcome, f"because {outcome}"))
        for outcome in (OK, CRASHED, TIMED_OUT, UNREADABLE)
    ]
    others[0].verdicts = [verdict("mesh.rank", "passed", 4)]
    return Report([mixed, *others])


def test_the_table_has_a_line_for_each_task(report: Report) -> None:
    """Marks, points and the first thing that is wrong; the different kinds of zero are told apart."""
    text = reports.table(report)
    assert "✓ tensor.copy_to_ranks" in text and "✗ tensor.RowLinear" in text and "– tensor.MLP" in text
    for words in ("not solved yet", "timed out: gradient", "crashed: gradient", "cannot be graded: gradient"):
        assert words in text
    assert "6 of 24 points" in text and "10 of 28 points" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_json_holds_everything(report: Report, tmp_path: Path) -> None:
    """It can be read again, and its sums are those of its parts."""
    reports.write_json(report, tmp_path / "deep/report.json")
    data = json.loads((tmp_path / "deep/report.json").read_text())
    assert (data["passed"], data["points"], data["max_points"]) == (False, 10, 28)
    assert data["points"] == sum(e["points"] for n in data["notebooks"] for e in n["exercises"])
    states = [exercise["state"] for exercise in data["notebooks"][0]["exercises"]]
    assert states == ["passed", "failed", "unsolved", "timed out", "crashed", "cannot be graded"]
    assert [n["outcome"] for n in data["notebooks"]] == [RAISED, OK, CRASHED, TIMED_OUT, UNREADABLE]
    assert data["notebooks"][0]["exercises"][1]["notes"][0]["kind"] == "duplicated"


def test_junit_is_xml_that_counts_right(report: Report, tmp_path: Path) -> None:
    """A parser of the standard library reads it; failures, errors and skips are what they are called."""
    reports.write_junit(report, tmp_path / "junit.xml")
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    first = root.find("testsuite")
    assert {name: first.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7",
        "failures": "2",
        "errors": "3",
        "skipped": "1",
    }
    assert [error.get("type") for error in first.iter("error")] == ["timed out", "crashed", "cannot be graded"]
    assert [e.get("type") for suite in root[2:] for e in suite.iter("error")] == [CRASHED, TIMED_OUT, UNREADABLE]
    assert "2 of 4 points" in first.find("testcase[@name='tensor.RowLinear']/failure").get("message")


class Page(HTMLParser):
    """What is in a page: tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_no_code_of_others(report: Report, tmp_path: Path) -> None:
    """No script, nothing fetched, hostile text as text, a language, headings, headers with scope."""
    reports.write_html(report, tmp_path / "index.html")
    page = Page((tmp_path / "index.html").read_text())
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "onclick", "onerror")]
    assert "<script>alert(1)</script>" in page.text and "{{ 7 * 7 }}" in page.text and "49" not in page.text
    assert ("lang", "en") in page.attributes and ("scope", "row") in page.attributes
    assert page.tags.count("h1") == 1 and page.tags.count("h2") == 5
    for words in ("not right yet", "not solved yet", "timed out", "crashed", "cannot be graded", "Note (duplicated)"):
        assert words in page.text
    assert "prefers-color-scheme: dark" in (tmp_path / "index.html").read_text()


def test_states_do_not_depend_on_colour(report: Report, tmp_path: Path) -> None:
    """Each state of a task has a mark and a word of its own."""
    from autograde.page import WORDS

    assert len({mark for mark, _ in WORDS.values()}) == len({word for _, word in WORDS.values()}) == len(WORDS) == 6
