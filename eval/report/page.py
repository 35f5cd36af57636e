"""A run as one HTML file that needs nothing else: tables, picture, and every setting's answers side by side."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from latent_santa.eval.report import screen, tables
from latent_santa.eval.run.store import Prompt, Store

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } div { overflow-x: auto; margin: 1rem 0 } img { max-width: 100% }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top }
th:first-child, td:first-child, .words th, .words td { text-align: left } th { cursor: pointer }
td:not(:first-child) { white-space: nowrap } .words td { white-space: normal; overflow-wrap: anywhere }
th[data-sign="1"]::after { content: " \\25B2" } th[data-sign="-1"]::after { content: " \\25BC" }
.words { width: 100% } .words td:last-child { width: 60% }
mark { background: #bde5bd } .none { color: #a33 } .lead { font-size: 1.15rem } small { color: #666 }
"""
# a click on a column's head sorts its table by it, and the next click the other way round; texts stand behind numbers
SCRIPT = """
const key = (row, place) => {
  const text = row.cells[place].textContent, number = parseFloat(text);
  return isNaN(number) ? text : number;
};
const order = (a, b) => typeof a !== typeof b ? (typeof a === "number" ? -1 : 1) : a < b ? -1 : a > b ? 1 : 0;
for (const head of document.querySelectorAll("th")) {
  head.title = "sort";
  head.onclick = () => {
    const sign = head.dataset.sign == 1 ? -1 : 1, place = head.cellIndex;
    for (const other of head.parentNode.cells) delete other.dataset.sign;
    head.dataset.sign = sign;
    const rows = [...head.closest("table").rows].slice(1);
    rows.sort((a, b) => sign * order(key(a, place), key(b, place)));
    for (const row of rows) row.parentNode.append(row);
  };
}
"""
PROMPTS_PER_TASK = 3
END_OF_PROMPT = 400  # characters


def page(store: Store, summary: dict[str, Any], picture: bytes | None) -> str:
    """The whole page. picture: a PNG, or None to leave it out."""
    parts = [f"<p class=lead>{escape(screen.meaning(summary))}</p>", f"<p>Prompts: {escape(summary['data'])}.</p>"]
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<p><img alt="accuracy against rows read" src="data:image/png;base64,{encoded}"></p>')
    for column in tables.columns_of(summary):
        parts.append(f"<h2>{escape(tables.title(summary, column))}</h2>")
        parts.append(
            _table(tables.header(summary), [tables.cells(summary, item, column) for item in summary["conditions"]])
        )
    parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in tables.notes(summary)) + "</ul>")
    parts.append(f"<h2>Answers</h2><p>The first {PROMPTS_PER_TASK} prompts of each task, under every setting. What was "
                 "wanted is marked where an answer has it.</p>")  # fmt: skip
    results = [
        (item["name"] + (f" S={item['S']}" if item["S"] else ""), store.results(item["slug"]))
        for item in summary["conditions"]
    ]
    for task in summary["tasks"]:
        parts.append(f"<h3>{escape(task)}</h3>")
        prompts = [prompt for prompt in store.prompts() if prompt.sample.task == task]
        parts += [_answers(prompt, results) for prompt in prompts[:PROMPTS_PER_TASK]]
    title = escape(f"{summary['model']} at {summary['length']} tokens")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n" for line in lines)
    return f"<div><table><tr>{head}</tr>\n{body}</table></div>"


def _answers(prompt: Prompt, results: Sequence[tuple[str, dict[str, dict[str, Any]]]]) -> str:
    sample = prompt.sample
    lines = []
    for name, found in results:
        result = found.get(sample.id, {})
        if "output" in result:
            score, text = f"{100 * result['score']:.0f}", marked(result["output"].strip(), sample.findable)
        else:
            score, text = "-", f"<span class=none>{escape(result.get('error', 'no result yet'))}</span>"
        lines.append(f"<tr><td>{escape(name)}</td><td>{score}</td><td>{text}</td></tr>\n")
    end = sample.input[-END_OF_PROMPT:]
    if len(end) < len(sample.input):  # the word that the cut falls into is left out
        end = f"... {end.partition(' ')[2] or end}"
    return (
        f"<p><b>{escape(sample.id)}</b>, {prompt.n_tokens:,} tokens, ends in:<br><small>{escape(end)}</small><br>"
        f"wanted: {escape(sample.wanted)}</p>\n<div><table class=words><tr><th>setting</th><th>score</th>"
        f"<th>answer</th></tr>\n{''.join(lines)}</table></div>"
    )


def marked(text: str, references: Sequence[str]) -> str:
    """The text as HTML, with every reference in it marked; case does not matter, as in scoring."""
    lower, spans = text.lower(), []
    if len(lower) == len(text):  # some letters are longer in lower case; nothing is marked then
        for reference in references:
            start = lower.find(reference.lower())
            if start >= 0:
                spans.append((start, start + len(reference)))
    shown, done = "", 0
    for start, stop in sorted(spans):
        start = max(start, done)
        if stop > start:
            shown += f"{escape(text[done:start])}<mark>{escape(text[start:stop])}</mark>"
            done = stop
    return shown + escape(text[done:])


def write(store: Store, summary: dict[str, Any]) -> Path:
    """Write report.html into the run's directory, with the picture where there is one; returns its path."""
    from latent_santa.eval.report import plots
    from latent_santa.eval.run.store import write_atomic

    try:
        picture = plots.access_accuracy(summary)
    except plots.NoPicture:
        picture = None
    path = store.directory / "report.html"
    write_atomic(path, page(store, summary, picture))
    return path
