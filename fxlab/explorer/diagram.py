"""How does the program look as the classic picture of boxes and arrows?

The explorer draws a graph beside its code; this is the other way, through the graphviz package, for
graphs of up to 2,000 nodes. The system's `dot` does the layout when there is one, otherwise the
program of the `graphviz-pure` wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxlab.core.node import target_text as text_of_target
from fxlab.display import shape_text
from fxlab.explorer.drawing import GLYPHS, elide
from fxlab.explorer.extras import missing
from fxlab.explorer.frames import LETTERS, rows_in_state
from fxlab.explorer.sentences import target_text

if TYPE_CHECKING:
    from graphviz import Digraph

    from fxlab.explorer.frames import Frame, State
    from fxlab.explorer.timeline import Timeline

LIMIT = 2_000
# What a step changed has a ground and a thick border; what it erased is dashed.
CHANGED = {
    kind: {"color": color, "fillcolor": ground, "style": f"rounded,filled,{line}", "penwidth": "4"}
    for kind, color, ground, line in (
        ("created", "#0b6637", "#e3f5ea", "solid"),
        ("changed", "#7a5200", "#fdf6dc", "solid"),
        ("erased", "#a8201a", "#fdeaea", "dashed"),
    )
}
SECONDS = 60
# No XML can hold these, and a terminal would obey them.
CONTROLS = dict.fromkeys([*range(10), *range(11, 32), *range(127, 160)], "\ufffd")
NO_PROGRAM = (
    "no graphviz program here; `pip install graphviz-pure` brings one, or install Graphviz itself"
)


def timeline_dot(timeline: Timeline, index: int) -> Digraph:
    """The program after step `index` as a graphviz graph.

    Args:
        timeline: The story.
        index: The step, 0 for the start.

    Raises:
        ValueError: The program has more than 2,000 nodes.
    """
    frame = timeline.frame(index)
    changes = _changes(timeline, index, frame) if index else {}
    erased = {row: state for row, (kind, state) in changes.items() if kind == "erased"}
    nodes = [
        (row, state.letter, state.name, target_text(state.op, state.target), timeline.shape(row))
        for row, state in {**frame.rows, **erased}.items()
    ]
    edges = [(source, row) for row in frame.rows for source in frame.inputs(row)]
    edges += [(source, row) for row, state in erased.items() for source in rows_in_state(state)]
    return _digraph(nodes, edges, {row: kind for row, (kind, _) in changes.items()})


def _changes(timeline: Timeline, index: int, frame: Frame) -> dict[int, tuple[str, State]]:
    """The rows that a step changed: created, erased (as they were) or changed."""
    out = {}
    for row, before, after in timeline.changes(index):
        state = after or before
        if state is not None:
            out[row] = "erased" if after is None else "changed" if before else "created", state
    edit = timeline.steps[index - 1].edit
    if edit.kind in ("module", "attr"):
        path = str(((edit.after or {}) | (edit.before or {})).get("path", ""))
        used = {path, path.rpartition(".")[0]}
        for row, state in frame.rows.items():
            if state.op in ("call_module", "get_attr") and state.target in used:
                out[row] = "changed", state
    return out


def graph_dot(graph: Any) -> Digraph:
    """A Graph or GraphModule (ours or torch.fx's) as a graphviz graph.

    Raises:
        ValueError: The graph has more than 2,000 nodes.
    """
    graph = getattr(graph, "graph", graph)
    nodes, edges = [], []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else _callable_name(node.target)
        shape = shape_text(node)
        letter = LETTERS.get(node.op, "?")
        nodes.append((node.name, letter, node.name, target_text(node.op, target), shape))
        edges += [(source.name, node.name) for source in node.all_input_nodes]
    return _digraph(nodes, edges, {})


def _callable_name(target: Any) -> str:
    return text_of_target(target) if callable(target) else repr(target)


def _digraph(nodes: list[tuple], edges: list[tuple], changes: dict[int, str]) -> Digraph:
    try:
        from graphviz import Digraph, escape, nohtml
    except ModuleNotFoundError as error:
        raise missing(error, "the classic picture") from error

    if len(nodes) > LIMIT:
        raise ValueError(f"{len(nodes)} nodes; the picture is drawn for up to {LIMIT}")
    dot = Digraph(node_attr={"fontname": "Helvetica", "fontsize": "11", "shape": "box"})
    place = {}
    for number, (key, letter, name, target, shape) in enumerate(nodes):
        place[key] = f"n{number}"
        lines = [f"{letter}  {elide(name, 40)}", elide(target, 48), elide(shape, 40)]
        text = "\n".join(line.translate(CONTROLS) for line in lines if line)
        plain = {"color": GLYPHS.get(letter, "#566173"), "style": "rounded", "penwidth": "1"}
        # escape() keeps backslashes, quotes and <...> of a model's names from meaning anything.
        dot.node(
            place[key],
            nohtml(escape(text).replace("\n", "\\n")),
            **{**plain, **CHANGED.get(changes.get(key, ""), {})},
        )
    for source, row in edges:
        if source in place and row in place:
            gone = "erased" in (changes.get(source), changes.get(row))
            dot.edge(
                place[source], place[row], color="#566173", style="dashed" if gone else "solid"
            )
    return dot


def timeline_svg(timeline: Timeline, index: int) -> str:
    """The classic picture of a step as SVG text.

    Raises:
        ValueError: The program has more than 2,000 nodes.
        OSError: No graphviz program is installed, or it failed.
    """
    return render(timeline_dot(timeline, index))


def render(dot: Digraph, form: str = "svg") -> str:
    """Lay a graphviz graph out, with `dot` or `graphviz-pure`, whichever is there.

    Args:
        dot: The graph.
        form: An output format in text, such as svg.

    Raises:
        OSError: No graphviz program is installed, or it failed.
    """
    program = layout_program()
    if program is None:
        raise OSError(NO_PROGRAM)
    done = subprocess.run(
        [program, f"-T{form}"],
        input=dot.source.encode("utf-8", "replace"),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{Path(program).name} failed: {done.stderr.decode(errors='replace')[:400]}")
    return done.stdout.decode("utf-8")


def layout_program() -> str | None:
    """The program that lays graphs out: the system's `dot`, else `graphviz-pure`, else None."""
    beside = Path(sys.executable).parent
    for name in ("dot", "graphviz-pure"):
        found = shutil.which(name) or shutil.which(name, path=str(beside))
        if found is not None:
            return found
    return None
