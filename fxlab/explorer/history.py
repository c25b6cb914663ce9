"""How does what a recorder heard become a story?

`Writer` goes once over the noted events, keeps the state of every program as it goes, and writes
programs, rows, steps with their sentences, and passes. `RecordedTimeline` is the Timeline of the
recording process: it can also run passes, and hand out the live module of any step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fxlab.core.graph import MISSING
from fxlab.display import shape_text
from fxlab.explorer import sentences
from fxlab.explorer.ancestry import ancestor_ids, ancestors_of, module_stack, node_id, pair_rows
from fxlab.explorer.edits import EditWriter
from fxlab.explorer.encode import Places, scrubbed
from fxlab.explorer.events import Event, Span, Watched
from fxlab.explorer.record import Recorder
from fxlab.explorer.run import record_run, run_pass
from fxlab.explorer.sentences import plural
from fxlab.explorer.timeline import Edit, PassSpan, Place, Program, Row, Step, Timeline

if TYPE_CHECKING:
    from fxlab.explorer.hunt import Bisection


class RecordedTimeline(Timeline):
    """A timeline whose recorder is in this process: `run`, `finish`, `module`, `bisect` work.

    Args:
        title: What stands above the story.
        recorder: What listens to the edits.
    """

    def __init__(self, title: str, recorder: Recorder) -> None:
        super().__init__(title)
        self.recorder = recorder
        self._seen: tuple[int, ...] | None = None
        self._writer: Writer | None = None

    def _sync(self) -> None:
        recorder = self.recorder
        spans = recorder.spans
        seen = (len(recorder.events), len(spans), sum(s.last is not None for s in spans))
        if seen != self._seen:
            self._seen = seen
            self._replays.clear()
            self._checked = 0
            self._writer = Writer(self, recorder)
            self._writer.write()
            self._writer.write_lint()

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the recording, or None."""
        return self.recorder.error

    @failure.setter
    def failure(self, error: BaseException | None) -> None:
        self.recorder.error = error

    @property
    def error(self) -> str | None:
        """What ended the recording, or None."""
        error = self.recorder.error
        return None if error is None else scrubbed(f"{type(error).__name__}: {error}".rstrip(": "))

    @error.setter
    def error(self, text: str | None) -> None:
        """The recorder knows; what a plain timeline would be told is passed over."""

    @property
    def writer(self) -> Writer:
        """The writer of the present story; it knows which row is which live node."""
        self._sync()
        assert self._writer is not None
        return self._writer

    def run(self, pass_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one pass under its own name; return the module to go on with.

        Args:
            pass_: A function of a GraphModule: edits it in place, or returns another one, or a
                PassResult.
            *args: Handed on to the pass after the module.
            **kwargs: Handed on to the pass.
        """
        return run_pass(self.recorder, pass_, args, kwargs)

    def finish(self, gm: Any) -> None:
        """Say that the block has made ``gm``, when that is not the one edited last."""
        self.recorder.finished_with = gm

    def execute(self, *inputs: Any) -> Any:
        """Run the program on ``inputs``, one step per executed node; return what it returns."""
        return record_run(self.recorder, self.recorder.current, inputs)

    def bisect(self, check: Callable[[Any], Any]) -> Bisection:
        """Find the edit from which on a check never passes again.

        Args:
            check: Called with the GraphModule of each frame, state included; a frame fails if it
                returns something false (None counts as passed) or raises. Frames that are no
                valid graph are passed over.

        Returns:
            A `Bisection`: `.step` (None: nothing broke for good), `.last_good`, `.suspects`,
            `.healed`. Failing is not taken to be monotone: a right pass fails in mid-edit.
        """
        from fxlab.explorer.hunt import bisect

        return bisect(self, check)

    def module(self, index: int) -> Any:
        """The GraphModule as of step `index`, state included; a fresh one at each call.

        Submodules and tensors that no later step changed are shared with the recorded module.

        Raises:
            TimelineError: The program was not a valid graph then, or a tensor was written over
                since, so that its old numbers are gone.
        """
        from fxlab.explorer.rebuild import module_at

        return module_at(self, index)


class Writer(EditWriter):
    """Turns the events of one recorder into the fields of a Timeline."""

    def __init__(self, timeline: Timeline, recorder: Recorder) -> None:
        super().__init__(timeline)
        self.recorder = recorder
        self.places = Places(timeline._places, timeline.sources, recorder.sites.lines)
        self.ids: dict[Any, str] = {}
        self.event_of_step: list[int | None] = []
        self.previous_file: str | None = None
        self.to_check: list[PassSpan] = []

    def write(self) -> None:
        """Write everything anew."""
        timeline = self.timeline
        timeline._programs, timeline._steps, timeline._passes = [], [], []
        timeline._rows = {}
        for _graph, watched in self.recorder.watched.items():
            for fields in watched.first:
                self._number(fields[0])
        for event in self.recorder.events:
            if event.kind == "create":
                self._number(event.node)
        self._choose_programs()
        self._write_rows()
        spans = [span for span in self.recorder.spans if span.last is not None]
        done = 0
        for span in spans:
            assert span.last is not None
            self._write_span(span, span.first, span.last)
            done = span.last
        if done < len(self.recorder.events):
            opened = self.recorder.open
            name = opened.name if opened is not None else ""
            loose = Span(name, "pass", done, self.recorder.before(opened))
            self._write_span(loose, done, len(self.recorder.events))
        self.readers.clear()  # scratch, one dict a row
        self.live.clear()

    # -- programs and rows --------------------------------------------------------------------

    def _choose_programs(self) -> None:
        """A graph is a program if it was recorded from the start, or descends from one."""
        touched: dict[Any, list[Any]] = {}
        edited: set[Any] = set()
        for event in self.recorder.events:
            if event.kind not in ("module", "attr"):
                edited.add(event.graph)
            if event.kind == "create":
                touched.setdefault(event.graph, []).append(event.node)
        known: dict[int, str] = {}
        for position, (graph, watched) in enumerate(self.recorder.watched.items()):
            nodes = [fields[0] for fields in watched.first] + touched.get(graph, [])
            made_from = None
            if position > 0:
                if graph not in edited and not watched.asked:
                    continue
                parent = next((known[i] for node in nodes for i in ancestor_ids(node)
                               if i in known), None)  # fmt: skip
                if parent is None and not watched.asked and not watched.path:
                    continue
                if not watched.path:
                    made_from = {"program": parent or "p0", "how": watched.how or "transform"}
            name = f"p{len(self.ids)}"
            self.ids[graph] = name
            known.update({node_id(node): name for node in nodes})
            self.timeline._programs.append(self._program(name, watched, made_from))
            self.live[name] = dict(self.timeline._programs[-1].first)

    def _program(self, name: str, watched: Watched, made_from: Any) -> Program:
        first = {}
        for fields in watched.first:
            row = self.row_of[fields[0]]
            first[row] = self._state(fields)
            self._enter(row, first[row])
        title = self.timeline.title if name == "p0" else type_name(watched) or name
        names = dict(watched.modules)
        for event in reversed(self.recorder.events[: watched.names_at]):
            if event.kind in ("module", "attr") and event.graph is watched.graph:
                if event.before["value"] is MISSING:
                    names.pop(event.before["path"], None)
                else:
                    names.setdefault(event.before["path"], type(event.before["value"]).__name__)
        if not watched.original and self.timeline._programs:
            # It may call what it does not own yet: its owner takes that over when it is built.
            parent = made_from["program"] if made_from is not None else "p0"
            names = {**self._program_called(parent).modules, **names}
        return Program(name, title, made_from, watched.path, first, names)

    def _write_rows(self) -> None:
        owners: dict[int, str] = {}
        shapes: dict[int, Any] = {}
        for graph, watched in self.recorder.watched.items():
            if graph in self.ids:
                for fields in watched.first:
                    owners[self.row_of[fields[0]]] = self.ids[graph]
                    shapes[self.row_of[fields[0]]] = fields[7]
        for event in self.recorder.events:
            if event.kind == "create" and event.graph in self.ids:
                owners[self.row_of[event.node]] = self.ids[event.graph]
        reference = self.recorder.reference
        first_shapes = {} if reference is None else dict(reference.run.shapes)
        for row, program in owners.items():
            meta = self.node_of[row].meta
            self.timeline._rows[row] = Row(
                row,
                program,
                first_shapes.get(self.node_of[row]) or shape_text(shapes.get(row)),
                meta.get("made_by") or "",
                self.places.cite_all(meta.get("source", ())),
                module_stack(meta),
                tuple(self._ancestor(one) for one in ancestors_of(self.node_of[row])),
            )

    def _ancestor(self, fields: dict[str, Any]) -> dict[str, Any]:
        row = self.row_by_node_id.get(fields.get("id", -1))
        return {
            "row": row,
            "name": str(fields.get("name", "")),
            "op": str(fields.get("op", "")),
            "target": str(fields.get("target", "")),
        }

    # -- state while writing ------------------------------------------------------------------

    # -- passes and steps ---------------------------------------------------------------------

    def _write_span(self, span: Span, first: int, last: int) -> None:
        timeline = self.timeline
        self.previous_file = None
        events = self.recorder.events[first:last]
        name = span.name or self._guess_name(events)
        index = len(timeline._passes)
        begin = len(timeline._steps) + 1
        start_graph = span.start.graph
        program = self.ids.get(start_graph, "p0")
        before = list(self.live.get(program, ()))
        written = PassSpan(name, None, begin, begin - 1, kind=span.kind, program=program)
        timeline._passes.append(written)
        for offset, event in enumerate(events):
            if event.kind in ("module", "attr") and event.graph not in self.ids:
                event = event._replace(graph=self._heir(event.graph))
            if event.graph in self.ids:
                self._write_event(event, first + offset, index, span)
        result_graph = getattr(span.result, "graph", None)
        written.result = self.ids.get(result_graph, program)
        if written.result != program:
            self._write_result(index, program, written.result, span)
        written.last = len(timeline._steps)
        written.source = self.places.function_source(span.function) if span.function else None
        if written.source is None and written.changed and timeline._steps[begin - 1].where:
            written.source = timeline._places.get(timeline._steps[begin - 1].where[0])
        written.cost_before = span.start.cost
        if span.end is not None:
            written.cost_after = span.end.cost
            written.shapes = self._new_shapes(span.end.shapes)
            span.columns = {**span.end.columns, **span.columns}
        written.same_output = self._verdict(span.verdict)
        if span.version is not None and span.version == getattr(result_graph, "version", None):
            written.lint = lint_text(result_graph)
        elif span.kind == "pass" and not any(event.kind == "error" for event in events[-1:]):
            self.to_check.append(written)
        for metric, column in span.columns.items():
            written.columns[metric] = {
                self.row_of[node]: number for node, number in column if node in self.row_of
            }
        if span.report is None and span.result is not None:
            span.report = getattr(span.result, "meta", {}).get("reports", {}).get(name)
        if span.report is not None:
            written.report = json.loads(json.dumps(span.report, default=str))
            if isinstance(written.report, dict):
                written.kept = [str(one) for one in written.report.get("kept", ())]
        written.kept += span.unmatched
        written.sentence = self._pass_sentence(written, len(before), bool(span.name))

    def write_lint(self) -> None:
        """Say of each pass whether it turned a valid graph into one that is none.

        A graph that is still as a pass left it was asked itself; the others are known by replay.
        """
        timeline = self.timeline
        if not self.to_check and all(span.lint is None for span in timeline._passes):
            return
        timeline.check_all()
        latest: dict[str, str | None] = {}
        for span in timeline._passes:
            given = latest.get(span.program)
            for step in timeline._steps[span.first - 1 : span.last]:
                if step.edit.kind != "error":
                    latest[step.program] = step._problem
            if span.lint is not None or any(span is one for one in self.to_check):
                problem = latest.get(span.result) or span.lint
                latest[span.result] = problem
                span.lint = problem if given is None else None

    def _heir(self, graph: Any) -> Any:
        """The program that was copied from a graph which is none itself, or that graph."""
        for other, watched in self.recorder.watched.items():
            if other in self.ids and watched.origin is graph:
                return other
        return graph

    def _verdict(self, verdict: dict[str, Any] | None) -> dict[str, Any] | None:
        """A verdict, and that on the first program within it, with their nodes as rows."""
        if verdict is None:
            return None
        if verdict.get("first") is not None:
            verdict = {**verdict, "first": self._verdict(verdict["first"])}
        node = verdict["node"]
        row = None if node is None else self.row_of.get(node)
        name = "" if node is None else node.name
        return {**{k: v for k, v in verdict.items() if k != "node"}, "row": row, "name": name}

    def _guess_name(self, events: Sequence[Event]) -> str:
        """The name of a pass that was called inside a block without `timeline.run`."""
        names: dict[str, None] = {}
        for event in events:
            if event.where and event.kind != "error":
                names[self.recorder.name_of(event)] = None
        return " + ".join(list(names)[:3]) or "edits"

    def _new_shapes(self, shapes: Sequence[tuple[Any, Any]]) -> dict[int, str]:
        found = {}
        for node, value in shapes:
            row = self.row_of.get(node)
            if row is not None and row in self.timeline._rows:
                text = value if isinstance(value, str) else shape_text(value)
                if text and self.timeline._rows[row].shape == "":
                    self.timeline._rows[row].shape = text
                elif text and text != self.timeline._rows[row].shape:
                    found[row] = text
        return found

    def _pass_sentence(self, span: PassSpan, before: int, told: bool) -> str:
        steps, name = span.last - span.first + 1, sentences.short(span.name, 40)
        after = len(self.live.get(span.result, ()))
        if span.kind == "trace":
            return f"{name} recorded {plural(after, 'node')}"
        if span.kind == "run":
            return f"{name} executed {plural(steps, 'node')}"
        if span.changed:
            return f"{name}: {plural(steps, 'edit')}, {before} -> {plural(after, 'node')}"
        live = self.live.get(span.program, {})
        unread = [
            row
            for row, state in live.items()
            if state.op not in ("output", "placeholder") and not self.readers.get(row)
        ]
        if span.kept:
            what = f"{name} changed nothing" if told else "nothing was edited in this block"
            return f"{what}: {span.kept[0]}"
        if not told:
            return (
                "nothing was edited in this block; an analysis edits nothing, and a pass that ran "
                "before on this GraphModule finds nothing left: trace it anew"
            )
        none = (
            f"none of the {before:,} nodes was edited" if before != 1 else "its node is as it was"
        )
        named = sentences.named([self.names[row] for row in unread])
        return f"{name} changed nothing: {none}" + (f"; nothing reads {named}" if unread else "")

    def _write_event(self, event: Event, number: int, pass_index: int, span: Span) -> None:
        program = self.ids[event.graph]
        made = self._edit(event, program)
        if made is None:
            return
        edit, text, subject = made
        frames = event.where
        if span.kind == "trace" and event.node is not None:
            frames = getattr(event.node, "meta", {}).get("source", frames)
        self._add_step(edit, text, subject, self.places.cite_all(frames), pass_index, number)

    def _add_step(
        self,
        edit: Edit,
        text: str,
        subject: str,
        where: tuple[Place, ...],
        pass_index: int,
        number: int | None,
    ) -> Step:
        timeline = self.timeline
        index = len(timeline._steps) + 1
        prefix = ""
        if where:
            prefix = sentences.line_prefix(where[0].file, where[0].line, self.previous_file)
            self.previous_file = where[0].file
        code = f"{timeline._passes[pass_index].name}:{index}/{subject}"
        step = Step(
            index, edit.program, pass_index, edit, where, prefix + text, code, timeline
        )  # fmt: skip
        timeline._steps.append(step)
        self.event_of_step.append(number)
        return step

    def _write_result(self, pass_index: int, old: str, new: str, span: Span) -> None:
        parts = []
        rows = dict(self.live[new])
        for row, state in self.live[new].items():
            inner = submodule(span.result, state.target) if state.op == "call_module" else None
            part = self.ids.get(getattr(inner, "graph", None))
            if part is not None and part != new:
                parts.append({"row": row, "program": part})
                program = self._program_called(part)
                program.path = program.title = state.target
                program.made_from = {"program": old, "how": "split"}
                rows.update(self.live[part])
        pairs = pair_rows(self.timeline, self.live[old], rows)
        after = {"program": new, "pairs": [list(pair) for pair in pairs], "parts": parts}
        gone = len(self.live[old]) - len(pairs)
        inside = len(rows) - len(self.live[new])
        name = self.timeline._passes[pass_index].name
        what = "another module"
        if parts:
            what += f" with {plural(len(parts), 'part')} ({plural(inside, 'row')} in them)"
            self._program_called(new).made_from = {"program": old, "how": "split"}
        kept = f"{plural(len(pairs), 'row')} {'is' if len(pairs) == 1 else 'are'} kept"
        text = f"{name} returns {what}: {kept}, {gone} gone, {len(rows) - len(pairs)} new"
        edit = Edit("result", old, None, {"program": old}, after)
        self._add_step(edit, text, new, (), pass_index, None)

    def _program_called(self, name: str) -> Program:
        return next(one for one in self.timeline._programs if one.id == name)


def lint_text(graph: Any) -> str | None:
    """What `graph.lint()` complains of, or None."""
    try:
        graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        return str(error)
    return None


def type_name(watched: Watched) -> str:
    """What to call a program that was made while recording."""
    if watched.path:
        return watched.path
    module = watched.module or getattr(watched.graph, "owning_module", None)
    return "" if module is None else type(module).__name__


def submodule(root: Any, path: str) -> Any:
    """The module at a path below `root`, or None."""
    for atom in path.split("."):
        root = getattr(root, "_modules", {}).get(atom)
    return root
