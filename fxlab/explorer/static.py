"""What does a reader see who runs no JavaScript: GitHub, nbviewer, an untrusted notebook, print?

The static copy is HTML that every sanitizer lets through: one `<img>` whose picture is a data URI,
one `<details>` for each pass with a table of its steps, inline styles only, at most 24 KB. The same
facts also come as a text table. Every text of a model is escaped.
"""

from __future__ import annotations

import base64
import html
from typing import Any

from fxlab.explorer.drawing import LEGEND, Story, elide, still_svg
from fxlab.explorer.sentences import plural
from fxlab.explorer.view import writable

LIMIT = 24_000
"""Bytes of a static copy, so that twenty of them leave a notebook small."""
LEFT = 'style="text-align:left"'  # notebooks align cells to the right
VERDICTS = ("well formed: ", "not well formed", "same output: ")
SAME = "same output: identical"
EXPORT = 'timeline.to_html("story.html")'
# A picture can't ask whether its page is dark, but it reads a number that the themes of JupyterLab
# and Notebook 7 set: 0 in light ones, more in dark ones. Elsewhere the picture stays light.
DARK = "min(1,var(--jp-shadow-base-lightness,0))"
ADAPT = f"filter:invert(calc(.9*{DARK})) hue-rotate(calc(180deg*{DARK}))"


def opening(data: dict[str, Any], step: int | None = None) -> int:
    """The step that the static copy pictures: the one given, else the end of the first change."""
    if step:
        return step
    last = next((span["last"] for span in data["passes"] if not span["quiet"]), 0)
    return min(last, len(data["steps"]))


def verdicts(data: dict[str, Any], index: int) -> tuple[str, str]:
    """The two verdicts on a step, in words: is it well formed, does it compute the same.

    Args:
        data: View data.
        index: The step, from 1.

    Returns:
        Such as `("yes", "not checked inside a pass")`. Never one verdict for both.
    """
    step = data["steps"][index - 1]
    span = data["passes"][step["s"]]
    formed = f"no: {step['wf']}" if step.get("wf") else "yes"
    if index != span["last"]:
        return formed, "not checked inside a pass"
    return formed, span["same"]["text"] if span["same"] else "not checked"


def where(data: dict[str, Any], step: dict[str, Any]) -> str:
    """File and line of the code that made a step."""
    if not step["w"]:
        return ""
    file, line, *_ = data["places"][step["w"][0]]
    return f"{file}:{line}"


def static_html(data: dict[str, Any], step: int | None = None, closed: bool = True) -> str:
    """The static copy, at most 24 KB.

    Args:
        data: View data (`view.view(timeline)`).
        step: The step to picture; by default the end of the first pass that changed something.
        closed: Whether all of it stands in a closed `<details>`, as beneath a widget.

    Returns:
        HTML with inline styles only: no script, no `<style>`, no address but the data URI.
    """
    story = Story(data)
    index = opening(data, step)
    picture = ""
    for rows in (60, 44, 30, 18, 8):
        picture = _picture(story, index, rows)
        if len(picture.encode()) < LIMIT * 0.7:
            break
    said = "<br>".join(_safe(elide(text, 400)) for text in _headline(data, index))
    head = f"<p>{said}</p>{picture}"
    room = LIMIT - len(head.encode()) - 400
    tables = _tables(data, room)
    note = _safe(LEGEND[0]) + "<br>" + _safe(LEGEND[1])
    body = f'{head}<p style="font-size:85%">{note}</p>{tables}'
    if not closed:
        return f'<div class="fxlab-static">{body}</div>'
    title = _safe(elide(data["title"] or "program", 80))
    return (
        f'<details class="fxlab-static"><summary>static copy: {title}, '
        f"{plural(len(data['steps']), 'step')}</summary>{body}</details>"
    )


def _headline(data: dict[str, Any], index: int) -> list[str]:
    """What a step did and what the viewer says of it: the sentence, and the two verdicts."""
    if not index:
        return [f"{data['title']}: start"]
    step = data["steps"][index - 1]
    formed, same = verdicts(data, index)
    facts = [] if step["k"] in ("value", "error") else [f"well formed: {formed}"]
    if data["passes"][step["s"]]["kind"] == "pass":
        facts.append(f"same output: {same}")
    said = [f"step {index} of {len(data['steps'])} ({step['c']}). {step['t']}", "; ".join(facts)]
    return [text for text in said if text]


def _picture(story: Story, index: int, rows: int) -> str:
    drawn = still_svg(story, index, limit=rows, caption=False)
    live = [line for line in story.lines(index) if line.state == "live"]
    said = elide(". ".join(_headline(story.data, index)), 300)
    first = "; ".join(elide(line.text.strip(), 60) for line in live[:6])
    more = f"; and {len(live) - 6} more rows" if len(live) > 6 else ""
    alt = html.escape(f"{said}. Code: {first}{more}", quote=True)
    packed = base64.b64encode(drawn.encode("utf-8")).decode("ascii")
    return (
        f'<img alt="{_flat(alt)}" style="max-width:100%;{ADAPT}" '
        f'src="data:image/svg+xml;base64,{packed}">'
    )


def _tables(data: dict[str, Any], room: int) -> str:
    """One `<details>` for each pass; every pass gets its share of what is left of the room."""
    out: list[str] = []
    passes = data["passes"]
    for k, span in enumerate(passes):
        left = room - sum(len(part.encode()) for part in out)
        if left < 700 and k < len(passes):
            out.append(f"<p>{len(passes) - k} more passes: {html.escape(EXPORT)} has them all.</p>")
            break
        out.append(_table(data, span, max(500, left // (len(passes) - k))))
    return "".join(out)


def _table(data: dict[str, Any], span: dict[str, Any], room: int) -> str:
    count = max(0, span["last"] - span["first"] + 1)
    facts = "; ".join([*span["strip"], *span["kept"][:3]])
    if len(span["kept"]) > 3:
        facts += f"; and {len(span['kept']) - 3} more notes"
    sentence = f"<p>{_safe(elide(span['sentence'], 300))}</p>" if span["quiet"] else ""
    head = (
        f"<details><summary><b>{_safe(elide(span['name'], 80))}</b>: "
        f"{plural(count, 'step')}</summary>"
        f"{sentence}<p>{_safe(elide(facts, 500))}</p>"
    )
    rows: list[str] = []
    used = len(head.encode()) + 420
    for index in range(span["first"], span["last"] + 1):
        step = data["steps"][index - 1]
        wrong = f" <b>not well formed: {_safe(elide(step['wf'], 120))}</b>" if "wf" in step else ""
        row = (
            f"<tr><td {LEFT}>{_safe(elide(step['c'], 60))}</td>"
            f"<td {LEFT}>{_safe(elide(step['t'], 200))}{wrong}</td>"
            f"<td {LEFT}>{_safe(elide(where(data, step), 60))}</td></tr>"
        )
        used += len(row.encode())
        if used > room:
            break
        rows.append(row)
    end = ""
    if len(rows) < count:
        end = (
            f"<p>{plural(count - len(rows), 'more step')}: {html.escape(EXPORT)} has them all.</p>"
        )
    table = ""
    if rows:
        heads = "".join(f"<th {LEFT}>{name}</th>" for name in ("code", "what it does", "where"))
        table = f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
    return f"{head}{table}{end}</details>"


def _safe(text: str) -> str:
    return _flat(html.escape(text))


def _flat(text: str) -> str:
    """On one line and without control characters and halves of characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def pass_lines(data: dict[str, Any]) -> list[str]:
    """A line for each pass: its name, how many steps, what it did to the program."""
    out = []
    for span in data["passes"]:
        count = plural(max(0, span["last"] - span["first"] + 1), "step")
        said = f"{_flat(elide(span['name'], 80))}: {count}. {'; '.join(span['strip'])}"
        if span["quiet"]:
            told = [fact for fact in span["strip"] if fact.startswith(VERDICTS) and fact != SAME]
            said = "; ".join([elide(span["sentence"], 160), *told])
        out.append(_flat(said))
    return out


def text_table(data: dict[str, Any], limit: int = 40) -> str:
    """The story as text: a line for each pass, and its steps.

    Args:
        data: View data.
        limit: Steps shown of each pass; the rest is counted.

    Returns:
        Lines of text.
    """
    out = [f"{_flat(elide(data['title'], 100))}: {plural(len(data['steps']), 'step')}"]
    for span, line in zip(data["passes"], pass_lines(data), strict=True):
        count = max(0, span["last"] - span["first"] + 1)
        out.append(line)
        for index in range(span["first"], min(span["last"], span["first"] + limit - 1) + 1):
            step = data["steps"][index - 1]
            formed, _ = verdicts(data, index)
            wrong = "" if formed == "yes" else f"  [well formed: {formed}]"
            out.append(_flat(f"  {index:>4}  {elide(step['t'], 160)}{wrong}"))
        if count > limit:
            out.append(f"        and {count - limit} more")
    if data["error"]:
        out.append(elide(data["error"], 2000))
    return writable("\n".join(line.rstrip() for line in out))
