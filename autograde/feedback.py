"""The graded notebook that a student gets back: what they handed in, with the verdicts in the place of the checks.

Made in the grader's process from parts that are trusted: cells and metadata of checks come from the reference, verdicts
from the grader. Of what the submission itself shows only text and pictures stay, so that feedback opened in a browser
runs nothing of theirs.
"""

from __future__ import annotations

from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode

from autograde.notebook import CannotRead, grade_id, parse_notebook
from autograde.submission import Result, check_id
from autograde.verdict import Finding, Verdict

PICTURES = ("image/png", "image/jpeg")
MOST_TEXT, MOST_PICTURE = 20_000, 4_000_000  # characters that stay of one output
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def graded_notebook(reference: NotebookNode, result: Result) -> NotebookNode:
    """The notebook that belongs into `autograded/`, for nbgrader to make feedback from. Where what was handed in is of
    a shape that nobody thought of, it has the verdicts alone."""
    try:
        return _graded(reference, result, _submitted(result))
    except Exception:
        return _graded(reference, result, nbformat.v4.new_notebook())


def _graded(reference: NotebookNode, result: Result, notebook: NotebookNode) -> NotebookNode:
    verdicts = {check_id(item["exercise"]): item for item in result.graded.get("exercises", ())}
    own = {grade_id(cell): cell for cell in reference.cells if grade_id(cell)}
    texts = {cell.source for cell in reference.cells}
    seen: set[str] = set()
    for cell in reversed(notebook.cells):
        name = grade_id(cell)
        _make_harmless(cell, texts)
        if name in own and name not in seen and cell.cell_type == own[name].cell_type:
            seen.add(name)
            cell.metadata["nbgrader"] = own[name].metadata["nbgrader"]
            if name in verdicts:
                cell.source, cell.outputs = own[name].source, [_output(verdicts[name])]
    missing = [name for name in verdicts if name in own and name not in seen]
    if missing:
        notebook.cells.append(_said("These checks were missing from the notebook that was handed in."))
    for name in missing:
        cell = nbformat.from_dict(own[name])
        cell.outputs = [_output(verdicts[name])]
        notebook.cells.append(cell)
    if result.said != "ok":
        notebook.cells.insert(0, _said(f"**When this notebook was run:** {_escaped(result.said)}"))
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    return _with_fresh_ids(notebook)


def verdict_of(item: dict[str, Any]) -> Verdict:
    """The verdict that a report's JSON holds."""
    findings = [Finding(**finding) for finding in item["findings"]]
    plain = {key: value for key, value in item.items() if key not in ("findings", "notes", "passed")}
    return Verdict(**plain, findings=findings)


def _submitted(result: Result) -> NotebookNode:
    """What was handed in, with its outputs where it could be run; empty where it cannot be read."""
    for data, keep_outputs in ((result.executed, True), (result.job.data, False)):
        try:
            return parse_notebook(data, result.job.lesson, keep_outputs)
        except CannotRead:
            continue
    return nbformat.v4.new_notebook()


def _make_harmless(cell: NotebookNode, texts: set[str]) -> None:
    cell.metadata = nbformat.from_dict({})
    cell.pop("attachments", None)
    if cell.cell_type == "code":
        cell.outputs = [_harmless(output) for output in cell.outputs]
    elif cell.source not in texts:
        cell.source = cell.source.replace("<", "&lt;")


def _harmless(output: NotebookNode) -> NotebookNode:
    if "data" in output:
        data = {kind: value for kind, value in output.data.items() if kind in PICTURES and len(value) < MOST_PICTURE}
        if "text/plain" in output.data:
            data["text/plain"] = _cut(output.data["text/plain"])
        output.data, output.metadata = nbformat.from_dict(data), nbformat.from_dict({})
    elif output.output_type == "stream":
        output.text = _cut(output.text)
    else:
        output.traceback = [_cut(line) for line in output.traceback[-50:]]
    return output


def _cut(text: Any) -> str:
    text = str(text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n… cut"


def _with_fresh_ids(notebook: NotebookNode) -> NotebookNode:
    """Cells of a copy can have the same id as those that were added."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.nbformat_minor = 5
    return notebook


def _output(item: dict[str, Any]) -> NotebookNode:
    verdict = verdict_of(item)
    notes = "".join(f"\nnote: {note['message']}" for note in item.get("notes", ()))
    data = {"text/plain": f"{verdict}{notes}", "text/html": verdict._repr_html_() + _escaped(notes)}
    return nbformat.v4.new_output("display_data", data)


def _said(text: str) -> NotebookNode:
    return nbformat.v4.new_markdown_cell(text)


def _escaped(text: str) -> str:
    return (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;").replace("\n", "<br>")
    )
