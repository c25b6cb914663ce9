"""What do all three renderings of a timeline read?

The live widget, the stand-alone page and the static copy show the same facts, so the facts are put
together once, here: every row with its line in pieces, every step with its sentence, its source
line and what it changed, every pass with its costs and verdicts. `viewer.js` replays this data in
the browser; `static.py` reads it in Python. The explorer is the kit's answer to the question that
section 6 of the paper leaves to `print`: what did a transform do, edit by edit?

The data is plain JSON, one object::

    title, error    texts
    programs        [{title, rows: [row id] as the program begins}]
    rows            [[id, letter, name, line, target, inputs, shape, path, source, from]]
                    line: pieces, texts and row ids where a name stands; path: index in `paths` or
                    -1; source: indices of places; from: row ids, or texts of rows that are not here
                    (as the timeline begins; a row taken up later comes with the step, in `ch`)
    paths           [[parent path or -1, module path, type]]
    steps           [{p: program, s: pass, k: kind, r: row or null, t: sentence, c: code,
                      w: [index of place], wf: problem or null, m: [rows changed in place],
                      e: [c|x|m, row, row before or -1], created, erased, moved,
                      ch: [[row, {changed fields}]], b, a: texts before and after (state edits),
                      v: statistics (a run), n: how many steps from here on belong to one match,
                      was: program, rows: [[row, 0 kept | 1 new | 2 gone | 3 inside a part]]
                      (result steps)}]
    places          [[file, line, function, source or -1]]
    passes          [{name, kind, first, last, quiet, sentence, strip: [text], bad: text or "",
                      nodes: how many it began with,
                      same: verdict or null, kept: [text], slots: {program: the lines that no step
                      of the pass moves, [row | [row, its first step or -1, its last + 1 or 0]]}}]
    sources         [{file, line, text without its margin}]
    opening         the place whose source is shown before the first step, its line 0, or null
    width           characters of the longest shape, at most 25
    metrics         [{id, title, tip, unit, max, on, values: {row: number}}]
    keys            [[keys, what they do]]
    notes           {step: text}
    pictures        [[step, SVG in base64]]: classic pictures, in exported pages only
"""

from __future__ import annotations

import json
import re
import zlib
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from fxlab.explorer.frames import Replay, State, rows_in_state
from fxlab.explorer.sentences import expression, target_text
from fxlab.explorer.strip import formed, strip

if TYPE_CHECKING:
    from fxlab.explorer.timeline import PassSpan, Place, Timeline

UNITS = {"seconds": "s", "flops": "", "bytes": "B", "live_bytes": "B"}
TITLES = {"seconds": "time", "flops": "FLOPs", "bytes": "bytes", "live_bytes": "live bytes"}
TIPS = {
    "flops": "of convolutions and matrix products; element-wise work is not counted",
    "bytes": "read and written",
    "live_bytes": "held at once, inputs and parameters not counted",
}
KEYS = (
    ("Left, Right", "one step back, on"),
    ("Shift+Left, Right or PageUp, PageDown", "one pass back, on"),
    ("Home, End", "first, last step"),
    ("N, Shift+N", "next, previous change (of the selected row, if any)"),
    ("Up, Down", "along the rows"),
    ("I, U", "to the first input, the first user of the selected row"),
    ("Shift+I, Shift+U", "to its next input, its next user"),
    ("Enter", "open a fold, or fold the module of the selected row"),
    ("C", "close the gaps"),
    ("/", "search: name, target, opcode, shape, file:line, or the code of a step"),
    ("P", "predict the next edit"),
    ("W", "wall: fill the window"),
    ("?", "these keys"),
    ("Escape, Tab", "leave"),
)
SHAPE = 25  # characters of a shape that are shown
STRUCTURE = {"create": "c", "erase": "x", "move": "m"}


def view(timeline: Timeline) -> dict[str, Any]:
    """Everything that is shown of a timeline, as plain JSON data; linear in rows and steps.

    Args:
        timeline: Recorded or loaded.

    Returns:
        The data described in this module's docstring.
    """
    return _Builder(timeline).build()


def opening_step(timeline: Timeline) -> int:
    """Where a story opens: at an error, else after the trace that passes follow, else at 0."""
    if timeline.error:
        return len(timeline)
    first, *others = timeline.passes or [None]
    return first.last if first is not None and first.kind == "trace" and others else 0


def pack(data: dict[str, Any]) -> bytes:
    """The data as compact JSON, deflated (zlib); the browser inflates it itself."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, default=str)
    return zlib.compress(writable(text).encode("utf-8"), 6)


def writable(text: str) -> str:
    """The text with `?` for what no file can hold: halves of characters (lone surrogates)."""
    return text.encode("utf-8", "replace").decode("utf-8")


class _Builder:
    """One walk over the steps, with every program's states kept up to date on the way."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.programs = timeline.programs
        self.index = {program.id: k for k, program in enumerate(self.programs)}
        self.replays = {p.id: Replay(p.first, p.id) for p in self.programs}
        self.paths: dict[tuple[int, str], int] = {}
        self.path_list: list[list[Any]] = []
        self.source_index: dict[str, int] = {}
        self.places: dict[Place, int] = {}
        self.place_list: list[list[Any]] = []
        self.first: dict[int, State] = {}
        self.module_rows: dict[tuple[str, str], dict[int, None]] = {}
        self.given = {"get_attr": "parameters"}
        firsts = [state.op for program in self.programs for state in program.first.values()]
        if firsts.count("placeholder") > 12:
            self.given["placeholder"] = "inputs"
        for program in self.programs:
            for row, state in program.first.items():
                self.first[row] = state
                self.watch(program.id, row, state)

    def build(self) -> dict[str, Any]:
        timeline = self.timeline
        timeline.check_all()
        self.spans = timeline.passes
        self.since = self.provenance()
        steps = [self.step(k + 1) for k in range(len(timeline.steps))]
        self.matches(steps)
        self.taken(steps)
        shapes = self.shapes(steps)
        return {
            "title": timeline.title,
            "error": timeline.error,
            "programs": [
                {"title": program.title, "rows": list(program.first)} for program in self.programs
            ],
            "rows": [self.row(row, state, shapes) for row, state in self.first.items()],
            "paths": self.path_list,
            "places": self.place_list,
            "steps": steps,
            "passes": [self.span(k, span, steps) for k, span in enumerate(self.spans)],
            "width": min(SHAPE, max((len(one) for one in self.shown_shapes(shapes)), default=0)),
            "opening": self.opening(steps),
            "sources": [
                {"file": source.file, "line": source.line, "text": dedent(source.text).rstrip()}
                for source in (timeline.sources[key] for key in self.source_index)
            ],
            "metrics": self.metrics(shapes),
            "keys": KEYS,
            "notes": {str(step): text for step, text in timeline.notes.items()},
        }

    def shown_shapes(self, shapes: dict[int, str]) -> list[str]:
        """Every shape text that may be shown."""
        return [
            *(shapes.get(row, self.timeline.rows[row].shape) for row in self.first),
            *(text for span in self.spans for text in span.shapes.values()),
        ]

    def opening(self, steps: list[dict[str, Any]]) -> list[Any] | None:
        """The code to show before the first step: the place of the first edit, without a line."""
        for step in steps:
            if step["w"]:
                file, _, function, source = self.place_list[step["w"][0]]
                return [file, 0, function, source]
        return None

    def watch(self, program: str, row: int, state: State) -> None:
        """Remember which rows use which module, for the marks of a state edit."""
        if state.op in ("call_module", "get_attr"):
            self.module_rows.setdefault((program, state.target), {})[row] = None

    def row(self, row: int, state: State, shapes: dict[int, str]) -> list[Any]:
        known = self.timeline.rows[row]
        return [
            row,
            *self.fields(row, state).values(),
            shapes.get(row, known.shape),
            self.path(known.stack, state),
            [self.place(place) for place in known.source],
            self.ancestors(row, 0),
        ]

    def ancestors(self, row: int, index: int) -> list[int | str]:
        """What a row comes from, as of step `index`: row ids, or names of rows not here."""
        return [
            one["row"] if one.get("row") is not None else str(one.get("name"))
            for one in self.timeline.rows[row].ancestors
            if self.since.get((one.get("row"), row), 0) <= index
        ]

    def provenance(self) -> dict[tuple[int | None, int], int]:
        """The step at which a row took up another, (that other, the row): the reroute to it.

        What the other had taken up itself came with it; where no edit tells, it was always so.
        """
        rerouted: dict[tuple[int | None, int], int] = {}
        for step in self.timeline.steps:
            if (
                step.edit.kind == "reroute"
                and (to := (step.edit.after or {}).get("to")) is not None
            ):
                rerouted[step.edit.row, to] = step.index
        since: dict[tuple[int | None, int], int] = {}
        for row in {to for _, to in rerouted}:
            nearer: list[tuple[int, set[Any]]] = []
            for one in self.timeline.rows[row].ancestors:
                old = one.get("row")
                through = [at for at, older in nearer if old is not None and old in older]
                since[old, row] = rerouted.get((old, row), min(through, default=0))
                known = self.timeline.rows[old].ancestors if old is not None else ()
                nearer.append((since[old, row], {other.get("row") for other in known}))
        return since

    def taken(self, steps: list[dict[str, Any]]) -> None:
        """Add to the steps what the rows come from once they have happened."""
        changes = {(index, row) for (_, row), index in self.since.items() if index}
        for index, row in sorted(changes):
            change = {"from": self.ancestors(row, index)}
            steps[index - 1].setdefault("ch", []).append([row, change])

    def fields(self, row: int, state: State) -> dict[str, Any]:
        """The parts of a row that an edit can change."""
        pieces = expression(state)
        named = state.op not in ("placeholder", "output")
        return {
            "letter": state.letter,
            "name": state.name,
            "line": [row, " = ", *pieces] if named else pieces,
            "target": target_text(state.op, state.target)
            if state.op == "call_function"
            else state.target,
            "ins": rows_in_state(state),
        }

    def path(self, stack: tuple[tuple[str, str], ...], state: State) -> int:
        """The module that a row stands in, as an index; the root and a leaf's own are left out."""
        parent = -1
        if not stack and state.op in self.given:
            stack = ((self.given[state.op], state.op),)  # a long list of parameters folds too
        for path, kind in stack:
            if not path or (state.op == "call_module" and path == state.target):
                continue
            key = (parent, path)
            if key not in self.paths:
                self.paths[key] = len(self.path_list)
                self.path_list.append([parent, path, kind.rpartition(".")[2]])
            parent = self.paths[key]
        return parent

    def place(self, place: Place) -> int:
        """A place as an index in the table of places."""
        if place not in self.places:
            found = self.timeline.source_of(place)
            at = -1
            if found is not None:
                at = self.source_index.setdefault(found[0], len(self.source_index))
            self.places[place] = len(self.place_list)
            self.place_list.append([place.file, place.line, place.function, at])
        return self.places[place]

    def step(self, index: int) -> dict[str, Any]:
        step = self.timeline.steps[index - 1]
        edit, program = step.edit, step.edit.program
        replay = self.replays.get(program)
        before, after = edit.before or {}, edit.after or {}
        out: dict[str, Any] = {
            "p": self.index.get(self.timeline.program_at(index), 0),
            "s": step.pass_index,
            "k": edit.kind,
            "r": edit.row,
            "t": step.sentence,
            "c": step.code,
            "w": [self.place(place) for place in step.where],
        }
        if step.problem:
            out["wf"] = step.problem
        if replay is not None:
            replay.apply(step)
        if edit.kind in STRUCTURE and edit.row is not None:
            position = after.get("position")
            out["e"] = [STRUCTURE[edit.kind], edit.row, -1 if position is None else position]
            if edit.kind == "create" and edit.row not in self.first:
                state = replay.states[edit.row] if replay else State(**after)
                self.first[edit.row] = state
                self.watch(program, edit.row, state)
            elif edit.kind == "create" and replay is not None:
                out["ch"] = [[edit.row, self.fields(edit.row, replay.states[edit.row])]]
        touched: list[int] = []
        if edit.kind == "reroute":
            touched = list(after.get("users", ()))
        elif edit.kind in ("args", "target", "rename", "type") and edit.row is not None:
            touched = [edit.row]
        if touched and replay is not None:
            out["m"] = touched
            out["ch"] = [
                [row, self.fields(row, replay.states[row])]
                for row in touched
                if row in replay.states
            ]
            if edit.kind == "target":
                self.watch(program, touched[0], replay.states[touched[0]])
        if edit.kind in ("module", "attr"):
            self.state_edit(out, program, before, after)
        elif edit.kind in ("value", "error"):
            out["v"] = {key: value for key, value in after.items() if value is not None}
            first, _, rest = str(after.get("text", "")).partition("\n")
            if edit.kind == "error" and first in step.sentence:  # which says it already
                out["v"]["text"] = rest
        elif edit.kind == "result":
            self.result(out, step.program, after)
        return out

    def state_edit(
        self, out: dict[str, Any], program: str, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        path = str(after.get("path", before.get("path", "")))
        owner = path.rpartition(".")[0]
        rows = dict.fromkeys(self.module_rows.get((program, path), ()))
        rows.update(dict.fromkeys(self.module_rows.get((program, owner), ()) if owner else ()))
        alive = self.replays[program].states if program in self.replays else {}
        out["m"] = [row for row in rows if row in alive]
        # A module goes after its rows: the last of them, a ghost, is what the step is about.
        users = out["m"] or [row for row in rows if row in self.first]
        if out["r"] is None and users:
            out["r"] = users[0 if out["m"] else -1]
        out["b"], out["a"] = state_lines(path, before.get("value"), after.get("value"))

    def result(self, out: dict[str, Any], old: str, after: dict[str, Any]) -> None:
        new = after.get("program", old)
        pairs: dict[int, int] = {b: a for a, b in after.get("pairs", ())}
        out["was"] = self.index.get(old, 0) if old != new else self.parent_of(new)
        parts = {part["row"]: part["program"] for part in after.get("parts", ())}
        out["rows"] = self.result_rows(self.programs[out["was"]].id, new, pairs, parts)
        states = {row: s for replay in self.replays.values() for row, s in replay.states.items()}
        names = {row: state.name for row, state in states.items()}
        lines = {}
        for fresh, former in pairs.items():
            for row in (fresh, former):
                if row in states:
                    lines[row] = "".join(
                        part if isinstance(part, str) else names.get(part, "?")
                        for part in expression(states[row])
                    )
        out["m"] = [a for a, b in pairs.items() if lines.get(a) != lines.get(b)]

    def result_rows(
        self, old: str, new: str, pairs: dict[int, int], parts: dict[int, str]
    ) -> list[list[int]]:
        """Both programs of a pass that returned another one; rows that are paired come once."""
        before = list(self.replays[old].order())
        place = {row: k for k, row in enumerate(before)}
        fresh: list[tuple[int, int]] = []
        for row in self.replays[new].order() if new in self.replays else ():
            fresh.append((row, 0 if row in pairs else 1))
            part = self.replays.get(parts.get(row, ""))
            fresh += [(inner, 3) for inner in (part.order() if part is not None else ())]
        kept = {pairs.get(row) for row, _ in fresh}
        out: list[list[int]] = []
        k = 0
        for row, kind in fresh:
            until = max(k, place.get(pairs.get(row, -1), k))
            out += [[gone, 2] for gone in before[k:until] if gone not in kept]
            out.append([row, kind])
            k = until
        return out + [[gone, 2] for gone in before[k:] if gone not in kept]

    def matches(self, steps: list[dict[str, Any]]) -> None:
        """Tell each step how many from it on belong to one match.

        A match ends before the pass comes back to a line that it has left.
        """
        ends: dict[int, int] = {}
        latest: dict[Any, int] = {}
        for j, step in enumerate(steps):
            line = (step["s"], tuple(self.place_list[step["w"][0]][1::2]) if step["w"] else None)
            if line in latest and latest[line] != j - 1:
                ends.setdefault(latest[line], j)
            latest[line] = j
        end = len(steps)
        for i in reversed(range(len(steps))):
            if i + 1 < len(steps) and steps[i + 1]["s"] != steps[i]["s"]:
                end = i + 1
            end = min(end, ends.get(i, end))
            steps[i]["n"] = end - i

    def parent_of(self, program: str) -> int:
        made_from = self.timeline.program(program).made_from or {}
        return self.index.get(made_from.get("program", ""), 0)

    def shapes(self, steps: list[dict[str, Any]]) -> dict[int, str]:
        """Shapes at the start; those that a pass made known become changes at its last step."""
        start = {row: self.timeline.rows[row].shape for row in self.first}
        now = dict(start)
        for span in self.spans:
            for row, text in span.shapes.items():
                if row not in now or now[row] == text:
                    continue
                if not now[row] or span.last < span.first:
                    start[row] = start[row] or text
                if span.last >= span.first and now[row]:
                    steps[span.last - 1].setdefault("ch", []).append([row, {"shape": text}])
                now[row] = text
        return start

    def metrics(self, shapes: dict[int, str]) -> list[dict[str, Any]]:
        columns: dict[str, dict[int, float]] = {}
        for span in self.spans:
            for metric, values in span.columns.items():
                columns.setdefault(metric, {}).update(values)
        sizes = {row: size for row, text in shapes.items() if (size := shape_bytes(text))}
        if sizes:
            columns.setdefault("bytes", dict(sizes))
        if sizes and "live_bytes" not in columns:
            columns["live_bytes"] = self.live_bytes(sizes)
        for step in self.timeline.steps:
            after = step.edit.after or {}
            if step.edit.kind == "value" and step.edit.row is not None:
                for key in ("seconds", "bytes", "live_bytes"):
                    if after.get(key) is not None:
                        columns.setdefault(key, {})[step.edit.row] = after[key]
        shown = "seconds" if "seconds" in columns else "flops"
        # Work that is not counted is no work of size 0.
        counted = {row: flops for row, flops in columns.pop("flops", {}).items() if flops}
        columns = {"flops": counted, **columns}
        return [_metric(name, values, name == shown) for name, values in columns.items() if values]

    def live_bytes(self, sizes: dict[int, int]) -> dict[int, float]:
        """Bytes alive at each row, as the programs end; erased rows as the programs began."""
        out: dict[int, float] = {}
        for program in self.programs:
            last = self.replays[program.id]
            for states in (program.first, {row: last.states[row] for row in last.order()}):
                end = {row: row for row in states}
                for row, state in states.items():
                    end.update(dict.fromkeys(rows_in_state(state), row))
                freed: dict[int, int] = {}
                total = 0
                for row in states:
                    size = sizes.get(row, 0)
                    freed[end[row]] = freed.get(end[row], 0) + size
                    total += size
                    out[row] = total
                    total -= freed.get(row, 0)
        return out

    def slots(self, k: int, program: str) -> list[Any]:
        """The lines of a program in a pass; most rows live all through it."""
        start = self.spans[k].first - 1
        return [
            row if first == start and last is None else
            [row, first if first > start else -1, 0 if last is None else last + 1]
            for row, first, last in self.timeline.slots(k, program)
        ]  # fmt: skip

    def count_before(self, k: int, steps: list[dict[str, Any]]) -> int:
        """How many nodes the program had that a pass was given."""
        first = self.spans[k].first
        p = steps[first - 1] if self.spans[k].changed else {"p": 0}
        return len(self.timeline.frame(first - 1, self.programs[p.get("was", p["p"])].id).rows)

    def span(self, k: int, span: PassSpan, steps: list[dict[str, Any]]) -> dict[str, Any]:
        shown = {}
        for step in steps[span.first - 1 : span.last]:
            shown.update(dict.fromkeys((step["p"], step.get("was", step["p"]))))
        same = span.same_output
        return {
            "name": span.name,
            "kind": span.kind,
            "first": span.first,
            "last": span.last,
            "quiet": span.last < span.first,
            "sentence": span.sentence or f"{span.name} changed nothing",
            "strip": [*formed(self.timeline, k), *strip(span)],
            "bad": " and ".join(
                ["not well formed"] * bool(span.lint)
                + ["another output"] * bool(same and same["verdict"] == "different")
            ),
            "same": {key: same.get(key) for key in ("verdict", "text", "row", "name")}
            if same
            else None,
            "kept": [str(text) for text in span.kept],
            "nodes": self.count_before(k, steps),
            "slots": {str(p): self.slots(k, self.programs[p].id) for p in sorted(shown)},
        }


def _metric(name: str, values: dict[int, float], shown: bool) -> dict[str, Any]:
    """One column; times are scaled so that they read as numbers of three digits."""
    top, scale = max(values.values()) or 1, 1.0
    unit = UNITS.get(name, "")
    if unit == "s" and top < 1:
        scale, unit = (1e3, "ms") if top >= 1e-3 else (1e6, "\u00b5s")
    return {
        "id": name,
        "title": TITLES.get(name, name),
        "tip": TIPS.get(name, ""),
        "unit": unit,
        "max": top * scale,
        "on": shown,
        "values": {str(row): value * scale for row, value in values.items()},
    }


def state_lines(path: str, before: Any, after: Any) -> tuple[list[str], list[str]]:
    """What a module or attribute was and is, a line for each tensor that differs."""
    if not before or not after:
        return (
            [f"self.{path}: {before['text']}"] if before else [],
            [f"self.{path}: {after['text']}"] if after else [],
        )
    old, new = before.get("tensors") or {}, after.get("tensors") or {}
    was, now = [], []
    if before.get("text") != after.get("text"):
        was.append(f"self.{path}: {before['text']}")
        now.append(f"self.{path}: {after['text']}")
    for name in [*old, *(name for name in new if name not in old)]:
        label = f"{path}.{name}" if name else path
        if old.get(name) == new.get(name):
            continue
        if name in old:
            was.append(f"{label} {old[name][0]}")
        if name in new:
            now.append(f"{label} {new[name][0]}" + (" (new values)" if name in old else ""))
    return was, now


def shape_bytes(text: str) -> int | None:
    """Bytes of a tensor whose shape reads `f32[1, 64]`; None when that is not known."""
    match = re.fullmatch(r"[a-z]+(\d+)?\w*\[([\d, ]*)\]", text)
    if match is None:
        return None
    size = int(match[1]) / 8 if match[1] else 1
    for one in filter(None, (part.strip() for part in match[2].split(","))):
        size *= int(one)
    return int(size)
