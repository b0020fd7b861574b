"""What a check answers: points, one finding for each property, and the misconception where one was recognised.

The same verdict as text, as HTML for a notebook (no script, no colour that a theme could hide), and as a dict for JSON.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

WIDTH = 76  # characters of a verdict's first line
COLUMN = 36  # characters of what was seen, where a detail stands beside it
MARKS = {True: "✓", False: "✗", None: "–"}
PLAIN = "color: inherit; background: transparent; vertical-align: top"
BOX = (
    "width: fit-content; min-width: 44em; max-width: 100%; box-sizing: border-box; overflow-x: auto; margin: 0.4em 0; "
    "padding: 0.6em 1em; border: 1px solid rgba(128, 128, 128, 0.45); border-radius: 4px"
)
# Mid tones: about 4.5 : 1 on white and on black alike, so they hold in a light and in a dark theme.
COLOURS = {True: "#1c8651", False: "#c5512c", None: "#767676"}


@dataclass(frozen=True)
class Finding:
    """What was seen of one property; `passed` is None where it was not looked at, which earns nothing.

    `detail` says more: beside `seen` where the property passed, below it where it failed. `look` is where to look next.
    `error` is the largest relative error, where numbers were compared.
    """

    property: str
    passed: bool | None
    seen: str
    detail: str = ""
    look: str = ""
    error: float | None = None


@dataclass
class Verdict:
    """The answer of a check.

    `state` is "passed", "failed", "unsolved", "timed out", "crashed" or "cannot be graded". `note` says on whose
    versions of other exercises the solution was graded. `folded` are texts, by title, that a reader can open.
    """

    exercise: str
    points: float
    max_points: float
    findings: list[Finding] = field(default_factory=list)
    state: str = "failed"
    misconception: str | None = None
    hint: str = ""
    note: str = ""
    seconds: float = 0.0
    seed: int | None = None
    folded: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.state == "passed"

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        keys = (
            "exercise",
            "passed",
            "state",
            "points",
            "max_points",
            "misconception",
            "hint",
            "note",
            "seconds",
            "seed",
        )
        plain = {key: getattr(self, key) for key in keys}
        rows = ("property", "passed", "seen", "detail", "look", "error")
        plain["findings"] = [{key: getattr(finding, key) for key in rows} for finding in self.findings]
        return plain

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


class Score(float):
    """Points as a notebook cell's result: a number for nbgrader, nothing to look at beside the verdict above it."""

    def __repr__(self) -> str:
        return f"{float(self):g}"

    def _repr_html_(self) -> str:
        return "<span></span>"


def as_text(verdict: Verdict) -> str:
    """The verdict in at most 76 columns, tracebacks apart."""
    earned = earned_in_words(verdict)
    lines = [f"{verdict.exercise}{earned:>{max(WIDTH - len(verdict.exercise), len(earned) + 2)}}"]
    name = max((len(f.property) for f in verdict.findings), default=0) + 2
    for finding in verdict.findings:
        lines += _finding_lines(finding, name)
    for text in (verdict.hint, verdict.note):
        lines += ["", *_wrap(text, WIDTH)] if text else []
    return "\n".join(lines)


def as_html(verdict: Verdict) -> str:
    """The verdict as a fragment of HTML with inline styles."""
    rows = "".join(_row(finding) for finding in verdict.findings)
    edge = COLOURS[None if verdict.state == "unsolved" else verdict.passed]
    parts = [
        f'<div style="{BOX}; border-left: 4px solid {edge}; {PLAIN}">',
        '<div style="display: flex; justify-content: space-between; gap: 2em">'
        f"<strong><code>{escape(verdict.exercise)}</code></strong><strong>{earned_in_words(verdict)}</strong></div>",
        f'<table style="border-collapse: collapse; margin: 0.5em 0 0; {PLAIN}"><tbody>{rows}</tbody></table>',
    ]
    if verdict.hint:
        parts.append(f'<p style="margin: 0.7em 0 0; max-width: 56em">{escape(verdict.hint)}</p>')
    if verdict.note:
        parts.append(f'<p style="margin: 0.7em 0 0; opacity: 0.75">{escape(verdict.note)}</p>')
    parts += [_fold(title, text) for title, text in verdict.folded.items()]
    return "".join([*parts, "</div>"])


def earned_in_words(verdict: Verdict) -> str:
    """`2 of 4 points`, `not solved yet`, or what went wrong."""
    if verdict.state == "unsolved":
        return f"not solved yet · {verdict.max_points:g} {_points(verdict.max_points)}"
    earned = f"{verdict.points:g} of {verdict.max_points:g} {_points(verdict.max_points)}"
    return earned if verdict.state in ("passed", "failed") else f"{verdict.state} · {earned}"


def numbered(count: int, noun: str) -> str:
    """`1 case`, `3 cases`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_words(items: Iterable[object]) -> str:
    """`2`, `2 and 4`, `2, 3 and 4`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def _points(number: float) -> str:
    return "point" if number == 1 else "points"


def _finding_lines(finding: Finding, name: int) -> list[str]:
    start = f"  {MARKS[finding.passed]} {finding.property.ljust(name)}"
    if finding.passed is not False:
        seen = f"{finding.seen.ljust(COLUMN)}  {finding.detail}" if finding.detail else finding.seen
        return [f"{start}{seen}".rstrip()]
    margin = " " * len(start)
    seen = _wrap(finding.seen, WIDTH - len(start))
    lines = [start + seen[0], *(margin + line for line in seen[1:])]
    for text in (finding.detail, finding.look):
        lines += [
            f"{margin}{line}".rstrip() for given in text.splitlines() for line in _wrap(given, WIDTH - len(margin))
        ]
    return lines


def _wrap(line: str, width: int) -> list[str]:
    """Prose in lines of at most `width`; a line of a traceback or a table as it is."""
    if _is_laid_out(line):
        return [line]
    return textwrap.wrap(line, max(width, 40), break_on_hyphens=False) or [""]


def _is_laid_out(line: str) -> bool:
    return line != line.lstrip() or "  " in line


def _row(finding: Finding) -> str:
    seen, beside = escape(finding.seen), escape(finding.detail)
    if finding.passed is False:
        seen, beside = f"<strong>{seen}</strong>{_below(finding.detail)}{_below(finding.look)}", ""
    mark = f'<strong style="color: {COLOURS[finding.passed]}">{MARKS[finding.passed]}</strong>'
    cells = [_cell(mark), _cell(escape(finding.property), "white-space: nowrap")]
    cells += [_cell(seen), _cell(beside, "opacity: 0.75")] if beside else [_cell(seen, span=2)]
    return f'<tr style="background: transparent">{"".join(cells)}</tr>'


def _cell(content: str, style: str = "", span: int = 1) -> str:
    spans = f' colspan="{span}"' if span > 1 else ""
    return f'<td{spans} style="padding: 0.15em 0.9em 0.15em 0; text-align: left; {PLAIN}; {style}">{content}</td>'


def _below(text: str) -> str:
    if not text:
        return ""
    if any(_is_laid_out(line) for line in text.splitlines()):
        return f'<pre style="margin: 0.3em 0; {PLAIN}">{escape(text)}</pre>'
    return "".join(f'<div style="max-width: 52em; {PLAIN}">{escape(line)}</div>' for line in text.splitlines())


def _fold(title: str, text: str) -> str:
    body = f'<pre style="margin: 0.3em 0; {PLAIN}">{escape(text)}</pre>'
    return f'<details style="margin-top: 0.5em"><summary>{escape(title)}</summary>{body}</details>'
