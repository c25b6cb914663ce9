"""What is the history of a program's changes, as plain data?

Section 6 of the paper argues that transforms on a small IR are easy to write; this file is how one
sees what they did. A `Timeline` is the recorded story of one or several programs: every row that
ever lived, every edit in order, the line of code that made it, and one sentence for each. It holds
no graph and no tensor, so it can be saved, sent and opened in another process.

JSON schema, version 1 (`to_json`, `from_json`). Keys not named here are refused::

    timeline  {"format": "fxlab.timeline", "version": 1, "title": text,
               "programs": [program], "rows": [row], "steps": [step], "passes": [pass],
               "places": [[file, line, function, source key or null]],
               "sources": {key: {"file": text, "line": first line, "text": text}},
               "notes": {step index as text: text}, "error": text or null}
    program   {"id": "p0", "title": text, "path": where it sits in its owner ("" for a root),
               "made_from": null or {"program": id, "how": "copy"|"trace"|"transform"|"split"},
               "first": [[row id, state]], in order: the program as the recording began,
               "modules": {path: text}, what the targets could name then: submodules, attributes}
    state     {"name", "op", "target": text, "args": [value], "kwargs": {text: value}, "type": text}
    value     null, true, false, number, text: themselves;  {"row": id}: a node
              [value]: a list;  {"tuple": [value]};  {"dict": [[value, value]]}
              {"slice": [value, value, value]};  {"text": shown form}: anything else, and
              {"text": shown form, "rows": [id]} for what is nested too deep
    row       {"id": int, "program": id, "shape": text, "made_by": pass name or "",
               "source": [place index], the user's line, innermost frame first,
               "stack": [[module path, type]], outermost first,
               "from": [{"row": id or null, "name", "op", "target"}], nearest ancestor first}
    step      {"index": from 1, "program": id, "pass": index, "sentence": text, "code": text,
               "where": [place index], innermost first, "problem": text or null,
               "edit": {"kind": kind, "row": id or null, "before": fields, "after": fields}}
    pass      {"name": text, "kind": "pass"|"trace"|"run", "program": id it began with,
               "result": id of the program it ended with, "first", "last": its steps
               (last < first: it changed nothing), "source": source key or null,
               "cost_before", "cost_after": {"nodes": {opcode: count}, "parameters", "flops",
               "bytes", "seconds": number or null} or null, "same_output": verdict or null,
               "lint": what is ill formed since this pass, or null, "sentence": text,
               "kept": [sentence], "report": any JSON,
               "shapes": {row id: text}, known at its end, "columns": {metric: {row id: number}}}
    verdict   {"verdict": "not checked"|"identical"|"rounding"|"different"|"refused",
               "error", "allowed": number or null, "row": first diverging row or null,
               "name": its name or "", "text": the words shown}, on the output of the program that
               the pass was given; and "first": null, or the same on that of the first program

`fields` is null or holds, by kind of edit::

    create    after  the state, and "position": the row before it (null: it is the first)
    erase     before the same
    move      both   {"position"}
    args      both   {"args", "kwargs"}
    target    both   {"op", "target"} (or {"type"}: the annotation was changed)
    rename    both   {"name"}
    reroute   before {"users": [[row, args, kwargs]]}, after {"to": row, "users": [row]}
              every mention of the edit's row in these users' arguments became `to`
    module    both   {"path", "value": null (there was none) or {"text": type, "tensors":
    attr              {name: [shape text, hash]}, "inner": [paths inside it]}}; a tensor's own
                      name is ""
    result    after  {"program": id, "pairs": [[old row, new row]],
                      "parts": [{"row": the call_module row, "program": id}]}
    value     after  {"shape", "dtype", "min", "mean", "max", "histogram": [16 counts],
                      "bytes", "live_bytes", "freed": [row], "seconds", "text", "thumbnail":
                      a PNG of at most 16 x 16 grey pixels in base64, or null}
    error     after  {"text": the whole message, "type": exception, "hints": [text]}
    snapshot  a change found by comparing, not by listening, has its own kind and
              {"by": "snapshot"} among the fields of `after`

Numbers that JSON cannot hold are the texts "inf", "-inf" and "nan" inside {"text": ...}.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fxlab.core.errors import TimelineError
from fxlab.explorer.frames import Change, Frame, Replay, Slot, State, slots_of
from fxlab.explorer.sentences import plural

__all__ = [
    "Change",
    "Edit",
    "Frame",
    "PassSpan",
    "Place",
    "Program",
    "Row",
    "Slot",
    "Source",
    "State",
    "Step",
    "Timeline",
]

FORMAT = "fxlab.timeline"
VERSION = 1
EDIT_KINDS = (
    "create",
    "erase",
    "move",
    "args",
    "target",
    "reroute",
    "rename",
    "module",
    "attr",
    "result",
    "value",
    "error",
)


class Place(NamedTuple):
    """One frame of a call stack: a relative file (or `In[7]`), a line, a function's name."""

    file: str
    line: int
    function: str


@dataclass(slots=True)
class Source:
    """The text of one function, or of the part of a file that was cited."""

    file: str
    line: int
    text: str


@dataclass(slots=True)
class Program:
    """One graph with a history: `p0` is the one recorded, others were made from it."""

    id: str
    title: str
    made_from: dict[str, str] | None = None
    path: str = ""
    first: dict[int, State] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """One node for its whole life. Its changing fields (name, arguments, ...) are in the frames."""

    id: int
    program: str
    shape: str = ""
    made_by: str = ""
    source: tuple[Place, ...] = ()
    stack: tuple[tuple[str, str], ...] = ()
    ancestors: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class Edit:
    """One call of an edit primitive; `before` and `after` hold JSON only (module docstring)."""

    kind: str
    program: str
    row: int | None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


@dataclass(slots=True)
class Step:
    """One edit, the line that made it, one sentence, and whether the graph was well formed.

    Attributes:
        index: Counts from 1; `timeline.frame(index)` is the program after this step.
        code: `pass name:index/row name`, to paste into a chat (`timeline.goto`).
        where: Up to four frames, innermost first; the first is the pass's (or the model's) line.
    """

    index: int
    program: str
    pass_index: int
    edit: Edit
    where: tuple[Place, ...]
    sentence: str
    code: str
    _timeline: Timeline | None = field(default=None, repr=False, compare=False)
    _problem: str | None = field(default=None, repr=False, compare=False)

    @property
    def well_formed(self) -> bool:
        """Whether the program was a valid graph after this step. Says nothing about its result."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """What was wrong with the graph after this step, such as `relu reads bn1, ...`."""
        if self._timeline is not None:
            self._timeline.check_all()
        return self._problem


@dataclass(slots=True, repr=False)
class PassSpan:
    """The steps of one pass (or of a trace, or of a run), and what held at its two ends.

    `last < first` when the pass changed nothing.
    """

    name: str
    source: str | None
    first: int
    last: int
    cost_before: dict[str, Any] | None = None
    cost_after: dict[str, Any] | None = None
    same_output: dict[str, Any] | None = None
    report: Any = None
    kind: str = "pass"
    program: str = "p0"
    result: str = "p0"
    lint: str | None = None
    sentence: str = ""
    kept: list[str] = field(default_factory=list)
    shapes: dict[int, str] = field(default_factory=dict)
    columns: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether the pass made any edit."""
        return self.last >= self.first

    def __repr__(self) -> str:
        """One line: its name, its steps, what it did to the node count, the verdict."""
        told = f"steps {self.first} to {self.last}" if self.changed else "changed nothing"
        before, after = ((c or {}).get("nodes") or {} for c in (self.cost_before, self.cost_after))
        if before and after and self.changed:
            told += f", {sum(before.values())} -> {sum(after.values())} nodes"
        if self.lint:
            told += ", not well formed at the end"
        if self.same_output:
            told += f"; same output: {self.same_output['text']}"
        return f"<PassSpan {self.name!r}: {told}>"


class Timeline:
    """The recorded story of a program: rows, steps, passes, sources. Made by `fxlab.record`.

    Read `steps`, `passes`, `programs` and `rows`; ask for a whole program with `frame`.

    Args:
        title: What stands above the story.
    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.error: str | None = None
        self.notes: dict[int, str] = {}
        self.sources: dict[str, Source] = {}
        self._programs: list[Program] = []
        self._rows: dict[int, Row] = {}
        self._steps: list[Step] = []
        self._passes: list[PassSpan] = []
        self._places: dict[Place, str | None] = {}
        self._replays: dict[str, Replay] = {}
        self._checked = 0
        self._checker: Any = None

    def _sync(self) -> None:
        """Take in what a live recorder has heard since; a loaded timeline has nothing to do."""

    @property
    def programs(self) -> list[Program]:
        """Every program, p0 first."""
        self._sync()
        return self._programs

    @property
    def rows(self) -> dict[int, Row]:
        """Every row that ever lived, by its id."""
        self._sync()
        return self._rows

    @property
    def steps(self) -> list[Step]:
        """Every step in order; `steps[i - 1].index == i`."""
        self._sync()
        return self._steps

    @property
    def passes(self) -> list[PassSpan]:
        """Every pass, trace and run in order."""
        self._sync()
        return self._passes

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    def __repr__(self) -> str:
        """One line: the title, how many steps, which passes."""
        names = []
        for span in self.passes:
            steps = plural(span.last - span.first + 1, "step") if span.changed else "no change"
            names.append(f"{span.name} {steps}")
        told = ", ".join(names) or "no pass"
        return f"<Timeline {self.title!r}: {plural(len(self.steps), 'step')}; {told}>"

    def _repr_html_(self) -> str:
        """The static copy: what a notebook shows for a timeline by itself."""
        from fxlab.explorer.static import static_html
        from fxlab.explorer.view import view

        return static_html(view(self))

    def ill_formed_since(self, index: int) -> int | None:
        """The pass (its index in `passes`) since which the program has been no valid graph.

        Args:
            index: The pass at whose end that is asked.

        Returns:
            `index` itself if that pass broke it, an earlier one, or None: it is well formed.
        """
        for k in range(index, -1, -1):
            span = self.passes[k]
            if span.lint is not None:
                return k
            steps = self.steps[span.first - 1 : span.last]
            last = next((step for step in reversed(steps) if step.program == span.result), None)
            if last is not None and last.well_formed:
                return None
        return None

    def program(self, program: str) -> Program:
        """The program with this id.

        Raises:
            KeyError: No program of this timeline has it.
        """
        for one in self.programs:
            if one.id == program:
                return one
        raise KeyError(program)

    def program_at(self, index: int) -> str:
        """The id of the program to show at step `index` (0: the start)."""
        if index <= 0 or not self.steps:
            return self.programs[0].id if self.programs else "p0"
        step = self.steps[index - 1]
        if step.edit.kind == "result":
            return (step.edit.after or {}).get("program", step.program)
        return step.program

    def frame(self, index: int, program: str | None = None) -> Frame:
        """The program after step `index`; 0 is the start.

        Args:
            index: 0 to `len(self)`.
            program: Which program; by default the one that the step is about.

        Raises:
            IndexError: There is no such step.
            TypeError: `index` is no number.
        """
        steps = self.steps
        if not hasattr(index, "__index__"):
            raise TypeError(
                f"frame takes the number of a step, 0 to {len(steps)}, not {index!r:.60}; "
                "timeline.goto(code)[0] is the number of a step code"
            )
        index = operator.index(index)
        if not 0 <= index <= len(steps):
            raise IndexError(f"frame {index}: this timeline has frames 0 to {len(steps)}")
        chosen = program or self.program_at(index)
        replay = self._replays.get(chosen)
        if replay is None:
            replay = self._replays[chosen] = Replay(self.program(chosen).first, chosen)
        return replay.at(steps, index)

    def changes(self, index: int) -> list[Change]:
        """Which rows step `index` changed: `(row, state before, state after)`.

        A state is None where the row did not exist. A moved row has equal states.
        """
        step = self.steps[index - 1]
        if step.edit.kind in ("result", "value", "error", "module", "attr"):
            return []
        before = self.frame(index - 1, step.program)
        after = self.frame(index, step.program)
        touched = [] if step.edit.row is None else [step.edit.row]
        if step.edit.kind == "reroute":
            touched = list((step.edit.after or {}).get("users", ()))
        return [Change(row, before.rows.get(row), after.rows.get(row)) for row in touched]

    def slots(self, pass_index: int | None, program: str) -> list[Slot]:
        """The fixed lines of a pass: one slot per row, two for a row that was moved.

        A slot is live in frames `first` to `last`; before it is empty, after it holds a ghost.

        Args:
            pass_index: Index in `passes`; None for the whole timeline.
            program: The id of the program.
        """
        if pass_index is None:
            first, last = 1, len(self.steps)
        else:
            first, last = self.passes[pass_index].first, self.passes[pass_index].last
        start = self.frame(first - 1, program)
        return slots_of(list(start.rows), self.steps[first - 1 : last], first - 1, program)

    def name(self, row: int, index: int | None = None) -> str:
        """The name of a row at step `index`, or the last that it had."""
        if index is not None:
            state = self.frame(index, self.rows[row].program).rows.get(row)
            if state is not None:
                return state.name
        self._sync()
        return self._last_names().get(row, f"row {row}")

    def _last_names(self) -> dict[int, str]:
        names = {row: s.name for p in self._programs for row, s in p.first.items()}
        for step in self._steps:
            if step.edit.kind in ("create", "rename") and step.edit.row is not None:
                names[step.edit.row] = (step.edit.after or {}).get("name", "")
        return names

    def shape(self, row: int, index: int | None = None) -> str:
        """The shape text of a row (`f32[1, 64, 56, 56]`), as known at step `index`."""
        text = self.rows[row].shape
        for span in self.passes:
            if index is not None and span.last > index:
                break
            text = span.shapes.get(row, text)
        return text

    def source_of(self, place: Place) -> tuple[str, Source] | None:
        """The stored source (and its key) in which a place lies, or None."""
        key = self._places.get(place)
        return None if key is None else (key, self.sources[key])

    def pass_of(self, index: int) -> PassSpan | None:
        """The pass that made step `index`."""
        return self.passes[self.steps[index - 1].pass_index] if index > 0 else None

    def goto(self, code: str) -> tuple[int, int | None]:
        """The step index and the row that a step code names.

        Args:
            code: `pass name:index/row name`; the row name may be missing.

        Raises:
            ValueError: It is no code of this timeline.
        """
        match = re.fullmatch(r"\s*(?P<name>.*?):(?P<index>\d+)(?:/(?P<row>.*))?\s*", code, re.S)
        if match is None:
            raise ValueError(f"{code!r} is no step code; one looks like fuse_conv_bn:12/bn1")
        index = int(match["index"])
        if not 0 < index <= len(self.steps):
            raise ValueError(f"{code!r}: this timeline has steps 1 to {len(self.steps)}")
        wanted = match["row"]
        if wanted is None:
            return index, self.steps[index - 1].edit.row
        program = self.steps[index - 1].program
        for frame in (self.frame(index, program), self.frame(index - 1, program)):
            for row, state in frame.rows.items():
                if state.name == wanted:
                    return index, row
        return index, self.steps[index - 1].edit.row

    def note(self, step: int | Step, text: str) -> None:
        """Pin a note, ``text``, to a step; it is shown beneath it and saved with the story.

        Raises:
            IndexError: There is no such step.
        """
        index = step.index if isinstance(step, Step) else step
        if not 0 <= index <= len(self.steps):
            raise IndexError(f"step {index}: this timeline has steps 1 to {len(self.steps)}")
        self.notes[index] = text

    def module(self, index: int) -> Any:
        """The GraphModule as of step `index`; see `RecordedTimeline.module`.

        Raises:
            TimelineError: This timeline comes from a file, which holds no tensors.
        """
        raise self._needs_recording("module")

    def bisect(self, check: Any) -> Any:
        """Find the edit that broke a check for good; see `RecordedTimeline.bisect`.

        Raises:
            TimelineError: This timeline comes from a file, which holds no tensors.
        """
        raise self._needs_recording("bisect")

    def _needs_recording(self, what: str) -> TimelineError:
        return TimelineError(
            f"timeline.{what} needs the tensors of the recording; a timeline from a file has none",
            hint="call it in the process that recorded the timeline",
        )

    def diff(self, other: Timeline) -> Any:
        """Compare this history with ``other``, of an edited pass; printing the result tells how.

        Rows are matched by name. The result has `first` (the first step that differs, here and
        there), `only_here`, `only_there` (steps) and `lines` (of the last programs).
        """
        from fxlab.explorer.hunt import diff

        return diff(self, other)

    def to_html(self, path: str | Path, *, share: str | None = None, **values: Any) -> Path:
        """Write the story as one HTML page with the viewer inside, needing no network.

        Args:
            path: Where to.
            share: "public" leaves out every value and says so on the page.
            **values: See `fxlab.explorer.page.write_html`.
        """
        from fxlab.explorer.page import write_html

        return write_html(self, path, share=share, **values)

    def to_svg(
        self,
        path: str | Path,
        step: int | None = None,
        *,
        steps: Iterable[int] | None = None,
        animate: bool = False,
        limit: int | None = None,
    ) -> Path:
        """Write one step, or a finite animation of several, as SVG without script.

        Args:
            path: The file to write.
            step: Which step; the last when None.
            steps: Several steps instead, one picture after the other.
            animate: Show them in turn, a second or so each, in one picture.
            limit: The most rows drawn; a note says how many are left out.
        """
        from fxlab.explorer.page import write_svg

        return write_svg(self, path, step, steps=steps, animate=animate, limit=limit)

    def to_png(
        self, path: str | Path, step: int | None = None, *, limit: int | None = None
    ) -> Path:
        """Write one step as a PNG picture at ``path``, of ``limit`` rows at most."""
        from fxlab.explorer.page import write_png

        return write_png(self, path, step, limit=limit)

    def check_all(self) -> None:
        """Compute `problem` for every step not yet checked, in time linear in the steps."""
        from fxlab.explorer.wellformed import check_steps

        check_steps(self)

    def first_ill_formed(self) -> Step | None:
        """The first step after which the program was not a valid graph."""
        return next((step for step in self.steps if not step.well_formed), None)

    def walk(self, steps: Iterable[int] | None = None) -> Iterator[tuple[Step, Frame]]:
        """Each step with the program after it."""
        for index in steps if steps is not None else range(1, len(self.steps) + 1):
            yield self.steps[index - 1], self.frame(index)

    def to_json(self, path: str | Path | None = None, *, indent: int | None = None) -> str:
        """The story as JSON text, ``indent`` spaces a level; written to `path` too when given."""
        from fxlab.explorer.story import dump

        text = dump(self, indent)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Timeline:
        """Read a story back.

        Args:
            source: A path, or the JSON text itself (it begins with a brace).

        Raises:
            TimelineError: The file is broken, not a timeline, or from a later version.
        """
        from fxlab.explorer.story import load

        return load(source)
