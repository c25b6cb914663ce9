"""How does a story leave the notebook? As one HTML page that steps by itself, with no network.

The page carries the viewer that the widget uses, the timeline's data deflated, and the static copy
for readers without JavaScript. Its content security policy allows this one script and nothing else,
so that no text of a model can ever run or fetch anything.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxlab.core import errors
from fxlab.explorer.drawing import Story, animated_svg, elide, png, still_svg, strip_svg
from fxlab.explorer.sentences import quantity
from fxlab.explorer.static import opening, pass_lines, static_html
from fxlab.explorer.view import opening_step, pack, view, writable

if TYPE_CHECKING:
    from fxlab.explorer.timeline import Timeline

HERE = Path(__file__).parent
PICTURES, PICTURED = 8, 300  # pictures of a page, nodes of a picture


@cache
def viewer_source() -> tuple[str, str]:
    """The viewer's JavaScript and CSS as they are sent: without comment lines and indentation."""
    script = (HERE / "viewer.js").read_text(encoding="utf-8")
    style = (HERE / "viewer.css").read_text(encoding="utf-8")
    return _squeeze(script, "//"), _squeeze(style, "/*")


def _squeeze(text: str, comment: str) -> str:
    """Drop whole-line comments, blank lines and indentation."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(comment))


def html_page(
    data: dict[str, Any],
    *,
    title: str = "",
    values: dict[str, Any] | None = None,
    notice: str = "",
) -> str:
    """A whole HTML document that shows a timeline, steps by keyboard and needs no network.

    Args:
        data: View data (`view.view(timeline)`).
        title: Title of the page; the timeline's own by default.
        values: Traits to begin with: `step`, `selection`, `wall`, `predict`.
        notice: A line shown above the explorer, such as what was left out of a public copy.

    Returns:
        The document as text (UTF-8).
    """
    script, style = viewer_source()
    packed = base64.b64encode(pack(data)).decode("ascii")
    given = base64.b64encode(json.dumps(values or {}).encode()).decode("ascii")
    # The script ends up in a <script> element: only its own text, never a model's, stands there.
    boot = (
        f"{script}\n"
        'const story = document.getElementById("story");\n'
        'const root = document.getElementById("fxl");\n'
        'document.getElementById("static").hidden = true;\n'
        "root.replaceChildren();\n"
        "open(root, story.dataset.story, "
        "JSON.parse(atob(story.dataset.values)))"
        ".then((viewer) => viewer.grid.focus());\n"
    )
    body_style = "body{margin:12px;font-family:system-ui,sans-serif}.fxl{--h:62vh}" + (
        "@media(prefers-color-scheme:dark){body{background:#0e1116;color:#e6eaf0}"
        "#static img{filter:invert(.9) hue-rotate(180deg)!important}}"
    )
    style = f"{body_style}\n{style}"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src 'sha256-{_digest(boot)}'; style-src 'unsafe-inline'"
    )
    name = html.escape(writable(title or data["title"] or "fxlab"))
    note = f"<p>{html.escape(writable(notice))}</p>" if notice else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}</title>\n<style>{style}</style></head><body>\n"
        f'{note}<div id="fxl" class="fxl">{_plain(data, name)}</div>\n'
        f'<div id="static">{static_html(data, closed=False)}</div>\n'
        f'<div id="story" hidden data-story="{packed}" data-values="{given}"></div>\n'
        f'<script type="module">{boot}</script></body></html>\n'
    )


def _plain(data: dict[str, Any], name: str) -> str:
    """What stands where the viewer will, for a reader who runs no JavaScript."""
    lines = (html.escape(writable(elide(line, 300))) for line in pass_lines(data))
    listed = "".join(f"<li>{line}</li>" for line in lines)
    return (
        f'<div style="padding:0 12px"><h1>{name}</h1><ul>{listed}</ul>'
        "<p>This page needs JavaScript to step; a picture and the steps follow below.</p></div>"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


PUBLIC = "Public copy: relative paths, no user name, no tensor values."


def write_html(
    timeline: Timeline, path: str | Path, *, share: str | None = None, **values: Any
) -> Path:
    """Write a timeline as one HTML page that needs no network and no kernel.

    Args:
        timeline: The story.
        path: Where to.
        share: "public" leaves out what a run computed (values and their statistics) and says so on
            the page; paths are relative and free of user names in either case.
        values: What the page opens with: `step` (by default `view.opening_step(timeline)`),
            `selection`, `wall`, `predict`.

    Returns:
        The path that was written.

    Raises:
        ValueError: `share` or a value is not known.
    """
    if share not in (None, "public"):
        raise ValueError(f'share={share!r}: leave it out, or say share="public"')
    unknown = sorted(set(values) - {"step", "selection", "wall", "predict"})
    if unknown:
        known = "step, selection, wall, predict"
        raise ValueError(f"to_html does not know {', '.join(unknown)}; it knows {known}")
    data = {**view(timeline), "pictures": pictures(timeline)}
    if share == "public":
        data = without_values(data)
    if values.get("step") is None:
        values["step"] = opening_step(timeline)
    out = Path(path)
    notice = PUBLIC if share else ""
    out.write_text(html_page(data, values=values, notice=notice), encoding="utf-8")
    return out


def pictures(timeline: Timeline) -> list[tuple[int, str]]:
    """The classic picture (graphviz) of the start and of each pass's end, for a page to show.

    Returns:
        (step, SVG in base64) in order; none of a program of more than 300 nodes, none at all where
        no graphviz program is installed.
    """
    from fxlab.explorer import diagram

    if importlib.util.find_spec("graphviz") is None or diagram.layout_program() is None:
        return []
    found: list[tuple[int, str]] = []
    ends = {0, *(span.last for span in timeline.passes if span.changed)}
    for index in sorted(ends)[:PICTURES]:
        if 0 < len(timeline.frame(index).rows) <= PICTURED:
            with contextlib.suppress(OSError, ValueError):  # a page without this picture
                drawn = diagram.timeline_svg(timeline, index)
                found.append((index, base64.b64encode(drawn.encode("utf-8")).decode("ascii")))
    return found


def without_values(data: dict[str, Any]) -> dict[str, Any]:
    """View data without anything that was computed from a user's tensors.

    The texts of the kit's own errors stay, since they quote the program only; what another error
    says may hold a value, so its type alone is kept.
    """
    steps = [_public_step(step) for step in data["steps"]]
    passes = []
    for span in data["passes"]:
        same = span["same"] and {**span["same"], "text": _public_text(span["same"]["text"])}
        passes.append({**span, "same": same, "strip": [_public_text(one) for one in span["strip"]]})
    error = data["error"]
    if error and not _is_ours(error.partition(":")[0]):
        error = error.partition(":")[0]
    return {**data, "steps": steps, "passes": passes, "error": error}


def _public_step(step: dict[str, Any]) -> dict[str, Any]:
    values = step.get("v", {})
    if step["k"] == "value":
        kept = ("shape", "dtype", "bytes", "live_bytes", "freed")
        shape, live = values.get("shape", ""), quantity(values.get("live_bytes", 0), "B")
        said = f"{step['c'].rpartition('/')[2]} is {shape or 'no tensor'}; {live} live"
        return {**step, "v": {key: values[key] for key in kept if key in values}, "t": said}
    kind = values.get("type", "")
    if step["k"] == "error" and not _is_ours(kind):
        place = step["t"].partition("stops:")[0]
        return {**step, "v": {"type": kind}, "t": f"{place}stops: {kind or 'an error'}"}
    return step


def _is_ours(kind: str) -> bool:
    return isinstance(found := getattr(errors, kind, None), type) and issubclass(found, Exception)


def _public_text(text: str) -> str:
    """A verdict without the values that it quotes: results that are no tensors, errors' texts."""
    if re.search(r"it returns \S*\[[\d, ]*\] where \S*\[[\d, ]*\] was returned", text) is None:
        text = re.sub(r"it returns .* where .* was returned", "it returns another value", text)
    return re.sub(r"\((\w+(?:Error|Exception)): .*\)", r"(\1)", text)


def write_svg(
    timeline: Timeline,
    path: str | Path,
    step: int | None = None,
    *,
    steps: Iterable[int] | None = None,
    animate: bool = False,
    limit: int | None = None,
) -> Path:
    """Write one step, or several, as an SVG picture without script.

    Args:
        timeline: The story.
        path: Where to.
        step: The step; by default the end of the first pass that changed something.
        steps: Several steps, one below the other for print, or one after the other.
        animate: Play the steps once, one after the other, and stay on the last.
        limit: Rows shown of each step at most; the rest is counted.

    Returns:
        The path that was written.
    """
    data = view(timeline)
    story = Story(data)
    out = Path(path)
    last = len(data["steps"])
    if steps is None and not animate:
        text = still_svg(story, _known(opening(data, step), last), limit)
    else:
        chosen = [_known(index, last) for index in (range(last + 1) if steps is None else steps)]
        draw = animated_svg if animate else strip_svg
        text = draw(story, chosen, limit)
    out.write_text(text, encoding="utf-8")
    return out


def write_png(
    timeline: Timeline, path: str | Path, step: int | None = None, *, limit: int | None = None
) -> Path:
    """Write one step as a PNG picture; needs matplotlib.

    Args:
        timeline: The story.
        path: Where to.
        step: The step; by default the end of the first pass that changed something.
        limit: Rows shown at most; the rest is counted.

    Returns:
        The path that was written.
    """
    data = view(timeline)
    out = Path(path)
    png(Story(data), _known(opening(data, step), len(data["steps"])), out, limit)
    return out


def _known(index: int, last: int) -> int:
    if not 0 <= index <= last:
        raise IndexError(f"step {index}: this timeline has steps 0 (the start) to {last}")
    return index
