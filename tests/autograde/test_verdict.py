"""A verdict reads the same as text, as HTML and as JSON, and its score is a number for nbgrader."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbgrader.utils import determine_grade

from autograde.verdict import COLOURS, Finding, Score, Verdict, as_html, as_text

HINT = (
    "This looks like: the bias is added on every rank before the sum. The all-reduce then adds it up n times. "
    "Who should add it, and when?"
)


def sample(**changes):
    findings = [
        Finding("output", True, "4 ranks, 3 cases", "largest error 3e-16", error=3e-16),
        Finding("gradient", False, "bias.grad is 4.00 times the expected one on every rank", "expected 1, got 4 <b>"),
        Finding("traffic", True, "1 all-reduce forward, 0 backward", "6.1 kB a rank"),
        Finding("hidden cases", None, "run after the visible ones pass"),
    ]
    fields = {"exercise": "tensor.RowLinear", "points": 2, "max_points": 4, "findings": findings, "hint": HINT}
    return Verdict(**fields | changes)


def test_text_is_the_sample_of_the_style_guide():
    """One line a property with mark, name and what was seen; the failing one says more below; the hint is last."""
    assert as_text(sample()).splitlines() == [
        "tensor.RowLinear                                               2 of 4 points",
        "  ✓ output        4 ranks, 3 cases                      largest error 3e-16",
        "  ✗ gradient      bias.grad is 4.00 times the expected one on every rank",
        "                  expected 1, got 4 <b>",
        "  ✓ traffic       1 all-reduce forward, 0 backward      6.1 kB a rank",
        "  – hidden cases  run after the visible ones pass",
        "",
        "This looks like: the bias is added on every rank before the sum. The",
        "all-reduce then adds it up n times. Who should add it, and when?",
    ]


def test_a_report_keeps_its_layout():
    """Tables and tracebacks below a finding are not wrapped."""
    report = (
        "  rank 0   send to rank 1        waits for rank 1 to receive     cell [12] line 4:  dist.send(x, dst=right)"
    )
    text = as_text(sample(findings=[Finding("output", False, "Deadlock", report)]))
    assert report in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("unsolved", "not solved yet · 4 points"),
        ("timed out", "timed out · 0 of 4 points"),
        ("crashed", "crashed · 0 of 4 points"),
        ("cannot be graded", "cannot be graded · 0 of 4 points"),
    ],
)
def test_states_are_told_apart(state, words):
    """Unsolved, failed, timed out, crashed and ungraded are different answers, and none of them passes."""
    verdict = sample(state=state, points=0)
    assert words in as_text(verdict) and words in as_html(verdict)
    assert not verdict.passed


def test_html_says_the_same_without_script_or_fixed_colours():
    """Every word of the text is in the HTML; markup in a finding is escaped; only marks have a colour of their own."""
    verdict = sample(folded={"All communication": "rank 0 <script>alert(1)</script>"})
    html = as_html(verdict)
    words = _Words()
    words.feed(html)
    for finding in verdict.findings:
        assert finding.seen in words.text and finding.detail in words.text
    assert HINT in words.text and "2 of 4 points" in words.text
    assert words.tags <= {"div", "strong", "code", "table", "tbody", "tr", "td", "p", "details", "summary", "pre"}
    assert all("color: inherit" in style for tag, style in words.styles if tag in ("td", "table", "pre"))
    assert words.open == []


@pytest.mark.parametrize("colour", COLOURS.values())
def test_marks_are_readable_on_white_and_on_black(colour):
    """Contrast of at least 4.3 : 1 on both, by the WCAG formula: large and bold text needs 3 : 1."""
    light = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in light)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    assert 1.05 / (luminance + 0.05) > 4.3 and (luminance + 0.05) / 0.05 > 4.3


def test_json_holds_everything_but_what_is_folded():
    """`to_dict` survives JSON, and has the findings row by row."""
    plain = json.loads(json.dumps(sample(misconception="bias_on_every_rank", seconds=0.5).to_dict()))
    assert plain["misconception"] == "bias_on_every_rank" and plain["hint"] == HINT and plain["passed"] is False
    assert [row["property"] for row in plain["findings"]] == ["output", "gradient", "traffic", "hidden cases"]


@pytest.mark.parametrize("points", [0, 1, 2.5, 4])
def test_nbgrader_reads_the_score(points):
    """The result of a check cell is partial credit for nbgrader's own grader, whatever was displayed before it."""
    data, _ = InteractiveShell.instance().display_formatter.format(Score(points))
    shown = nbformat.v4.new_output("display_data", {"text/plain": "4 of 4 points"})
    result = nbformat.v4.new_output("execute_result", data)
    cell = nbformat.v4.new_code_cell("check(...)", outputs=[shown, result])
    cell.metadata.nbgrader = {"grade": True, "solution": False, "points": 4, "grade_id": "check-tensor-RowLinear"}
    assert determine_grade(cell) == (points, 4)
    assert Score(points) == points and "points" not in data["text/html"]


class _Words(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.tags, self.styles, self.open = "", set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.styles.append((tag, dict(attributes).get("style", "")))
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_verdict_loads_no_torch():
    """Reports and cases use verdicts where torch is not wanted."""
    code = "import sys, autograde.verdict, autograde.case; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
