"""The report as one page of HTML: no script, no font, no request, readable in light, in dark and in print."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from autograde.grade import Report

WORDS = {
    "passed": ("✓", "right"),
    "failed": ("✗", "not right yet"),
    "unsolved": ("–", "not solved yet"),
    "timed out": ("…", "timed out"),
    "crashed": ("!", "crashed"),
    "cannot be graded": ("?", "cannot be graded"),
}

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ score(data.points, data.max_points) }} · Fivefold</title>
<style>
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --good: #00704f; --bad: #b03a00; --grey: #5c5c5c; }
@media (prefers-color-scheme: dark) { :root { --good: #4fd1a5; --bad: #ff9a66; --grey: #b0b0b0; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2.5rem 0 0.2rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin-top: 0.6rem; }
caption { text-align: left; padding-bottom: 0.3rem; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.7rem 0.35rem 0; }
th, td { border-bottom: 1px solid var(--line); }
td.number { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: 0.7rem; margin: 0.4rem 0; }
.passed, .ok { color: var(--good); } .unsolved, .quiet { color: var(--grey); }
.failed, .error { color: var(--bad); } .state { white-space: nowrap; font-weight: 600; }
.bar { height: 0.6rem; background: var(--soft); border: 1px solid var(--line); border-radius: 0.3rem; }
.bar div { height: 100%; background: var(--good); }
@media print { details > * { display: block; } }
</style>
</head>
<body>
<main>
<h1>{{ score(data.points, data.max_points) }}</h1>
<p class="quiet">{{ data.notebooks | length }} notebook{{ "" if data.notebooks | length == 1 else "s" }},
{{ "all passed" if data.passed else "not all passed" }}</p>
<div class="bar" role="img" aria-label="{{ score(data.points, data.max_points) }}"><div style="width:
{{- (100 * data.points / data.max_points) | round(1) if data.max_points else 0 }}%"></div></div>
{% for graded in notebooks %}
{% set ok = graded.execution.outcome in ("ok", "not run") %}
<section>
<h2>{{ graded.path.name }}</h2>
<p class="{{ "ok" if ok else "error" }}">{{ ran(graded) }}</p>
{% if graded.verdicts %}
<table>
<caption class="quiet">{{ graded.path }}: {{ score(graded.points, graded.max_points) }}</caption>
<thead><tr>
<th scope="col">State</th><th scope="col">Exercise</th><th scope="col">Points</th><th scope="col">What was seen</th>
</tr></thead>
<tbody>
{% for verdict in graded.verdicts %}
{% set mark, word = words.get(verdict.state, ("?", verdict.state)) %}
<tr>
<td class="state {{ verdict.state if verdict.state in ("passed", "failed", "unsolved") else "error" }}">
<span aria-hidden="true">{{ mark }}</span> {{ word }}</td>
<th scope="row"><code>{{ verdict.exercise }}</code></th>
<td class="number">{{ "%g" | format(verdict.points) }} of {{ "%g" | format(verdict.max_points) }}</td>
<td>{% if verdict.state == "passed" %}<details><summary>all properties hold</summary><pre>{{ verdict }}</pre></details>
{%- elif verdict.state != "unsolved" %}{{ problem(verdict) }}
<details><summary>the whole verdict</summary><pre>{{ verdict }}</pre></details>{% endif %}
{% for note in graded.notes.get(verdict.exercise, ()) %}
<p class="quiet">Note ({{ note.kind }}): {{ note.message }}</p>
{% endfor %}
</td>
</tr>
{% endfor %}
</tbody>
</table>
{% endif %}
{% if graded.execution.raised %}
<details><summary>cells that raised: {{ graded.execution.raised | length }}</summary>
<ul>
{% for cell, message in graded.execution.raised %}
<li>code cell {{ cell }}: <code>{{ message }}</code></li>
{% endfor %}
</ul>
</details>
{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>
"""


def render(report: Report, data: dict[str, Any], **functions: Callable[..., str]) -> str:
    """The page of a report; `functions` put scores, runs and problems into the same words as elsewhere."""
    template = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        TEMPLATE
    )
    return template.render(data=data, notebooks=report.notebooks, words=WORDS, **functions)
