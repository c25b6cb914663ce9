"""How does one step look on paper: rows, marks and lanes, without a browser?

`rows_at` says what each line of a step shows (the same as `viewer.js` shows, a test compares them),
`sketch` lays it out as a few primitive shapes, and these become SVG text or, through matplotlib, a
PNG. README's picture, the static copy and `Timeline.to_svg` come from here.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fxlab.explorer.lanes import MAX_LANES, layout
from fxlab.explorer.sentences import cut

ROW, LANE, CHAR = 22, 16, 7.25  # pixels: height of a row, width of a lane, width of a character
LINE, SHAPE = 64, 26  # characters of a line and of a shape before they are elided
INK, DIM, EDGE = "#1a2233", "#566173", "#d3dae4"
MARKS = {"+": ("#0b6637", "#e3f5ea"), "-": ("#a8201a", "#fdeaea"), "~": ("#7a5200", "#fdf6dc")}
LANES = ("#2f6fd6", "#c2501f", "#2a8755", "#8a4fc9", "#b0307a", "#6e7683")
GLYPHS = {
    "P": "#4f5b6d",
    "G": "#7d5200",
    "F": "#17703f",
    ".": "#7435bd",
    "M": "#2058c0",
    "O": "#363f4c",
}
LEGEND = (
    "P placeholder · G get_attr · F call_function · . call_method · M call_module · O output",
    "+ created  \u2212 erased  ~ changed; pale: earlier in this pass",
)


@dataclass(slots=True)
class Line:
    """What one line of a step shows.

    Attributes:
        row: Row id.
        state: "live", "ghost" (erased earlier in the pass) or "empty" (a later step makes it).
        mark: "+", "-", "~" or "".
        strong: Whether the mark is this step's own; otherwise an earlier step's of the same pass.
        letter: Opcode letter.
        name: Name of the node at this step.
        text: The generated line.
        shape: Such as `f32[1, 64, 56, 56]`, or "".
        inputs: Row ids that it reads.
        inner: Whether it belongs to a part of a split program, shown beneath the call of the part.
    """

    row: int
    state: str
    mark: str
    strong: bool
    letter: str
    name: str
    text: str
    shape: str
    inputs: list[int]
    inner: bool = False


class Story:
    """View data (`view.py`) with every row's history at hand."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.steps: list[dict[str, Any]] = data["steps"]
        self.history: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        names = ("letter", "name", "line", "target", "ins", "shape")
        for row, *values in data["rows"]:
            self.history[row] = [(0, dict(zip(names, values[:6], strict=True)))]
        for index, step in enumerate(self.steps, 1):
            for row, change in step.get("ch", ()):
                past = self.history[row]
                past.append((index, {**past[-1][1], **change}))

    def at(self, row: int, index: int) -> dict[str, Any]:
        """The changing fields of a row after step `index`."""
        past = self.history[row]
        k = len(past) - 1
        while k > 0 and past[k][0] > index:
            k -= 1
        return past[k][1]

    def text(self, row: int, index: int) -> str:
        """A row's line after step `index`, names filled in."""
        parts = self.at(row, index)["line"]
        return "".join(p if isinstance(p, str) else self.at(p, index)["name"] for p in parts)

    def pass_at(self, index: int) -> int:
        """Index of the pass that a step belongs to; the start belongs to the first."""
        return self.steps[max(index, 1) - 1]["s"] if self.steps else 0

    def slots(self, span: int, program: int) -> list[list[Any]]:
        """The lines of a pass, `[row, born, died]` each, in an order no step of it changes."""
        never, spans = float("inf"), self.data["passes"]
        lines = spans[span]["slots"].get(str(program)) if span < len(spans) else None
        if lines is None:
            lines = self.data["programs"][program]["rows"] if self.data["programs"] else []
        triples = (one if isinstance(one, list) else [one, -1, 0] for one in lines)
        return [[row, born, died or never] for row, born, died in triples]

    def result_slots(self, index: int) -> list[list[Any]]:
        """Both programs of a pass that returned another one; rows that are paired come once."""
        never = float("inf")
        born = {0: -1, 1: index, 2: -1, 3: -1}
        return [
            [row, born[kind], index if kind == 2 else never, kind == 3]
            for row, kind in self.steps[index - 1]["rows"]
        ]

    def lines(self, index: int) -> list[Line]:
        """What every line shows after step `index`, slots of other steps included."""
        step = self.steps[index - 1] if index else None
        span = self.pass_at(index)
        is_result = step is not None and step["k"] == "result"
        slots = (
            self.result_slots(index) if is_result else self.slots(span, step["p"] if step else 0)
        )
        touched: dict[int, int] = {}
        first = self.data["passes"][span]["first"] if self.data["passes"] else 1
        for k in range(first, index + 1):
            touched.update(dict.fromkeys(self.steps[k - 1].get("m", ()), k))
        out = []
        for slot, born, died, *inner in slots:
            row = int(slot)
            state = "empty" if index < born else "ghost" if index >= died else "live"
            mark, strong = "", False
            if state == "ghost":
                mark, strong = "-", died == index
            elif state == "live" and born > 0 and (born == index or touched.get(row) != index):
                mark, strong = "+", born == index
            elif state == "live" and row in touched:
                mark, strong = "~", touched[row] == index
            now = self.at(row, index)
            out.append(
                Line(
                    row,
                    state,
                    mark,
                    strong,
                    now["letter"],
                    now["name"],
                    ("    " if any(inner) else "") + self.text(row, index),
                    now["shape"],
                    now["ins"],
                    any(inner),
                )
            )
        _signature(out)
        return out


def _signature(lines: list[Line]) -> None:
    """Placeholders show their parameter: the first opens the signature, the last closes it."""
    given = [one for one in lines if one.state == "live" and one.letter == "P" and not one.inner]
    start = "def forward(self, "
    for line in given:
        line.text = (start if line is given[0] else " " * len(start)) + line.text
        line.text += "):" if line is given[-1] else ","


@dataclass(slots=True)
class Sketch:
    """Primitive shapes, in pixels: what SVG and PNG are both made from."""

    width: float
    height: float
    rects: list[tuple[float, float, float, float, str]] = field(default_factory=list)
    curves: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)
    glyphs: list[tuple[float, float, str, str, bool]] = field(default_factory=list)
    texts: list[tuple[float, float, str, str, str]] = field(default_factory=list)


def elide(text: str, room: int) -> str:
    """A text in at most `room` characters, cut in the middle: names first."""
    return cut(text.replace("\n", " ").replace("\r", " "), room, 0.4)


def sketch(
    story: Story, index: int, limit: int | None = None, caption: bool = True, line: int = LINE
) -> Sketch:
    """Lay out one step.

    Args:
        story: The story.
        index: The step, 0 for the start.
        limit: Show at most so many rows, around those that changed; the rest is counted.
        caption: Whether to write the sentence above the rows, and the legend beneath them.
        line: Characters of a code line.
    """
    lines = story.lines(index)
    position = {one.row: k for k, one in enumerate(lines) if one.state == "live"}
    inputs = [
        sorted({position[r] for r in one.inputs if r in position}) if one.state == "live" else None
        for one in lines
    ]
    lanes = layout(inputs, [one.letter in "PG" for one in lines])
    first, last = window(lines, limit)
    wide = min(lanes.width, MAX_LANES)
    left = LANE * (wide + 1.6)
    top = 12.0
    out = Sketch(left + 20 + (line + SHAPE + 2) * CHAR, 0)
    if caption:
        step = story.steps[index - 1] if index else None
        said = f"{step['c']}  {step['t']}" if step else f"start: {story.data['title']}"
        heads = [(text, INK) for text in textwrap.wrap(said, int(out.width / CHAR) - 2)[:3]]
        if step and step.get("wf"):
            wrong = elide(f"not well formed: {step['wf']}", int(out.width / CHAR) - 2)
            heads.append((wrong, MARKS["-"][0]))
        for text, color in heads:
            out.texts.append((8, top + 6, text, color, "bold"))
            top += 16
        top += 6
    if first > 0:
        out.texts.append((left, top + 11, f"{first} rows above", DIM, "italic"))
        top += ROW
    y = {k: top + (k - first + 0.5) * ROW for k in range(len(lines))}
    low, high = top, top + (last - first) * ROW

    def x(lane: int) -> float:
        return LANE * (min(lane, MAX_LANES) + 0.8)

    for k in range(last):
        if inputs[k] is None:
            continue
        lane, end = lanes.lane[k], lanes.end[k]
        color = LANES[lane % 6] if lane < MAX_LANES else DIM
        if end > k and end >= first:
            bend = 0.0 if lanes.lane[end] == lane else ROW * 0.8
            start, stop = max(y[k], low), min(max(y[k], y[end] - bend), high)
            if stop > start:
                out.curves.append((color, [(x(lane), start), (x(lane), stop)]))
        if k < first:
            continue
        for producer in inputs[k] or ():
            source = lanes.lane[producer]
            if producer < k and source != lane:
                tone = LANES[source % 6] if source < MAX_LANES else DIM
                a, b = x(source), x(lane)
                out.curves.append((tone, [(a, y[k] - ROW * 0.8), (a, y[k]), (b, y[k])]))
    ghosts = {one.row: k for k, one in enumerate(lines) if one.state == "ghost"}
    gone = [
        (k, ghosts[row])
        for k in range(first, last)
        for row in (lines[k].inputs if inputs[k] is not None else ())
        if row not in position and row in ghosts
    ]
    for reader, producer in [*gone, *lanes.back]:  # what is not well formed
        if first <= reader < last and first <= producer < last:
            a = x(wide if inputs[producer] is None else lanes.lane[producer])
            b = x(lanes.lane[reader])
            tilt = ROW if reader == producer else 0
            aside = 16 + tilt
            bow = [(a + aside, y[producer] - tilt), (b + aside, y[reader] + tilt)]
            out.curves.append((MARKS["-"][0], [(a, y[producer]), *bow, (b, y[reader])]))
    for k in range(first, last):
        one = lines[k]
        if one.state == "empty":
            continue
        if one.strong:
            out.rects.append((left, y[k] - ROW / 2, out.width - left, ROW, MARKS[one.mark][1]))
        ghost = one.state == "ghost"
        at = x(wide) if ghost else x(lanes.lane[k])
        color = MARKS["-"][0] if ghost else GLYPHS.get(one.letter, DIM)
        out.glyphs.append((at, y[k], one.letter, color, ghost))
        if one.mark:
            style = "bold" if one.strong else ""
            mark = "\u2212" if one.mark == "-" else one.mark
            out.texts.append((left + 3, y[k] + 4, mark, MARKS[one.mark][0], style))
        ink = INK if not ghost else MARKS["-"][0] if one.strong else DIM
        text = elide(one.text, line)
        out.texts.append((left + 18, y[k] + 4, text, ink, "strike" if ghost else ""))
        if one.shape and not ghost:
            place = left + 18 + (line + 1) * CHAR
            out.texts.append((place, y[k] + 4, elide(one.shape, SHAPE), DIM, ""))
    bottom = high
    if last < len(lines):
        out.texts.append((left, bottom + 15, f"{len(lines) - last} rows below", DIM, "italic"))
        bottom += ROW
    for text in LEGEND if caption else ():
        bottom += 17
        out.texts.append((8, bottom, elide(text, int(out.width / CHAR)), DIM, ""))
    out.height = bottom + 10
    return out


def window(lines: Sequence[Line], limit: int | None) -> tuple[int, int]:
    """The rows to show: at most `limit`, those around this step's (else any) changes first."""
    if limit is None or len(lines) <= limit:
        return 0, len(lines)
    strong = [k for k, one in enumerate(lines) if one.strong]
    marked = strong or [k for k, one in enumerate(lines) if one.mark]
    middle = marked[0] if marked else 0
    first = max(0, min(middle - limit // 3, len(lines) - limit))
    return first, first + limit


def group(drawing: Sketch, dx: float = 0, dy: float = 0) -> str:
    """The shapes of a sketch as SVG elements; every text of a model is escaped."""

    def n(value: float) -> str:
        return f"{value:.1f}".rstrip("0").rstrip(".")

    out = [
        f'<rect x="{n(x)}" y="{n(y)}" width="{n(w)}" height="{n(h)}" fill="{color}"/>'
        for x, y, w, h, color in drawing.rects
    ]
    paths: dict[str, list[str]] = {}
    for color, ((x0, y0), *rest) in drawing.curves:
        kind = "-LQC"[len(rest)]
        ends = " ".join(f"{n(x)} {n(y)}" for x, y in rest)
        paths.setdefault(color, []).append(f"M{n(x0)} {n(y0)}{kind}{ends}")
    for color, d in paths.items():
        dash = ' stroke-dasharray="3 3"' if color == MARKS["-"][0] else ""
        out.append(f'<path d="{"".join(d)}" stroke="{color}"{dash}/>')
    glyphs: dict[tuple[str, bool], list[str]] = {}
    for x, y, _letter, color, ghost in drawing.glyphs:
        glyphs.setdefault((color, ghost), []).append(
            f"M{n(x - 7)} {n(y)}a7 7 0 1 1 14 0a7 7 0 1 1-14 0"
        )
    for (color, ghost), d in glyphs.items():
        style = (
            f'fill="#fff" stroke="{color}" stroke-dasharray="3 2"' if ghost else f'fill="{color}"'
        )
        out.append(f'<path d="{"".join(d)}" {style}/>')
    for x, y, letter, color, ghost in drawing.glyphs:
        fill = color if ghost else "#fff"
        out.append(
            f'<text class="g" x="{n(x)}" y="{n(y + 3.5)}" fill="{fill}">{_safe(letter)}</text>'
        )
    names = {"": "", "bold": ' class="b"', "italic": ' class="i"', "strike": ' class="s"'}
    for x, y, text, color, style in drawing.texts:
        fill = "" if color == INK else f' fill="{color}"'
        out.append(f'<text x="{n(x)}" y="{n(y)}"{names[style]}{fill}>{_safe(text)}</text>')
    move = f' transform="translate({n(dx)} {n(dy)})"' if dx or dy else ""
    return f"<g{move}>{''.join(out)}</g>" if move else "".join(out)


def _safe(text: str) -> str:
    """Text for XML: escaped, without the characters that XML forbids."""
    kept = "".join(c if c >= " " and not "\ud800" <= c <= "\udfff" else "\ufffd" for c in text)
    return html.escape(kept, quote=False)


STYLE = (
    "text{font:12px ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace;fill:#1a2233;"
    "white-space:pre}path{fill:none;stroke-width:1.8}.b{font-weight:700}.i{font-style:italic}"
    ".s{text-decoration:line-through}.g{font:700 9px sans-serif;text-anchor:middle}"
)


def svg(drawings: Sequence[Sketch], body: str, width: float, height: float, style: str = "") -> str:
    """A whole SVG document around a body."""
    # Attributes give way to style rules, so the colours of a text are set as rules by attribute.
    colors = sorted(
        {t[3] for d in drawings for t in d.texts} | {g[3] for d in drawings for g in d.glyphs}
    )
    rules = "".join(f'[fill="{color}"]{{fill:{color}}}' for color in [*colors, "#fff"])
    rules += "".join(f'[stroke="{c}"]{{stroke:{c}}}' for c in (*LANES, DIM, MARKS["-"][0]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><style>{STYLE}{rules}{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>'
    )


def still_svg(
    story: Story, index: int, limit: int | None = None, caption: bool = True, line: int = LINE
) -> str:
    """One step as an SVG picture."""
    drawing = sketch(story, index, limit, caption, line)
    return svg([drawing], group(drawing), drawing.width, drawing.height)


def strip_svg(story: Story, steps: Iterable[int], limit: int | None = 24) -> str:
    """Several steps as one still SVG picture, one below the other, for print."""
    drawings = [sketch(story, index, limit) for index in steps]
    body, y = [], 0.0
    for drawing in drawings:
        body.append(group(drawing, 0, y))
        y += drawing.height
    return svg(drawings, "".join(body), max((d.width for d in drawings), default=1), y)


def animated_svg(
    story: Story, steps: Iterable[int], limit: int | None = 40, seconds: float = 1.5
) -> str:
    """Several steps as one SVG picture that plays once and stays on the last; no script.

    Args:
        story: The story.
        steps: Which steps, in order.
        limit: Rows of each at most.
        seconds: How long each step is seen.
    """
    drawings = [sketch(story, index, limit) for index in steps]
    last = len(drawings) - 1
    rules = (
        "@keyframes on{0%,99.9%{visibility:visible}100%{visibility:hidden}}"
        "@keyframes stay{to{visibility:visible}}.f{visibility:hidden}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none!important}"
        ".last{visibility:visible}}"
    )
    body = []
    for k, drawing in enumerate(drawings):
        start = f"{k * seconds:g}s"
        how = (
            f"stay .01s {start} 1 forwards" if k == last else f"on {seconds:g}s step-end {start} 1"
        )
        kind = "f last" if k == last else "f"
        body.append(f'<g class="{kind}" style="animation:{how}">{group(drawing)}</g>')
    width = max((d.width for d in drawings), default=1)
    return svg(drawings, "".join(body), width, max((d.height for d in drawings), default=1), rules)


def png(story: Story, index: int, path: Any, limit: int | None = None, scale: float = 2.0) -> None:
    """Write one step as a PNG picture (through matplotlib).

    Args:
        story: The story.
        index: The step.
        path: Where to.
        limit: Rows at most.
        scale: Pixels of the file for each pixel of the drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, PathPatch, Rectangle
    from matplotlib.path import Path as Curve

    drawing = sketch(story, index, limit)
    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), dpi=100 * scale)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for x, y, width, height, color in drawing.rects:
        axes.add_patch(Rectangle((x, y), width, height, color=color, linewidth=0))
    kinds = {2: Curve.LINETO, 3: Curve.CURVE3, 4: Curve.CURVE4}
    for color, points in drawing.curves:
        curve = Curve(points, [Curve.MOVETO, *[kinds[len(points)]] * (len(points) - 1)])
        style = "--" if color == MARKS["-"][0] else "-"
        axes.add_patch(
            PathPatch(curve, fill=False, edgecolor=color, linewidth=1.3, linestyle=style)
        )
    for x, y, letter, color, ghost in drawing.glyphs:
        face = "white" if ghost else color
        axes.add_patch(Circle((x, y), 7, facecolor=face, edgecolor=color, zorder=3))
        ink = color if ghost else "white"
        axes.text(x, y, letter, color=ink, ha="center", va="center", fontsize=6.5, zorder=4)
    for x, y, text, color, style in drawing.texts:
        axes.text(
            x,
            y,
            _safe_for_matplotlib(text),
            color=color,
            fontsize=8.6,
            family="DejaVu Sans Mono",
            weight="bold" if style == "bold" else "normal",
            parse_math=False,
        )
        if style == "strike":
            axes.plot([x, x + len(text) * CHAR * 0.97], [y - 4, y - 4], color=color, linewidth=0.8)
    figure.savefig(path, format="png")


@lru_cache(maxsize=1)
def _forbidden() -> dict[int, str]:
    return dict.fromkeys([*range(32), *range(55296, 57344)], "�")


def _safe_for_matplotlib(text: str) -> str:
    return text.translate(_forbidden())
