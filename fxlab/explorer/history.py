"""How does what a recorder heard become a story?

`Writer` goes once over the noted events, keeps the state of every program as it goes, and writes
programs, rows, steps with their sentences, and passes. `RecordedTimeline` is the Timeline of the
recording process: it can also run passes, and hand out the live module of any step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxlab.core.graph import shape_text
from fxlab.core.node import Node
from fxlab.explorer import sentences
from fxlab.explorer.encode import Places, annotation, encode, scrubbed, state_json
from fxlab.explorer.frames import State, rows_in_state, substitute, substitute_kwargs
from fxlab.explorer.record import MISSING, Event, Recorder, Span, Watched, run_pass
from fxlab.explorer.sentences import value_sentence
from fxlab.explorer.timeline import Edit, PassSpan, Place, Program, Row, Step, Timeline

if TYPE_CHECKING:
    from fxlab.explorer.hunt import Bisection

NODES = (Node, torch.fx.Node)
NOTHING: dict[str, Any] = {}


class RecordedTimeline(Timeline):
    """A timeline whose recorder is in this process: `run`, `finish`, `module`, `bisect` work."""

    def __init__(self, title: str, recorder: Recorder) -> None:
        super().__init__(title)
        self.recorder = recorder
        self._seen: tuple[int, ...] | None = None
        self._writer: Writer | None = None
        self.failure: BaseException | None = None

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
            error = recorder.error
            self.error = None if error is None else scrubbed(f"{type(error).__name__}: {error}")

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
        """Say which module the block has made, when it is not the one edited last."""
        self.recorder.finished_with = gm

    def execute(self, *inputs: Any) -> Any:
        """Run the program as it is now, one step per executed node; return what it returns."""
        from fxlab.explorer.run import record_run

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


class Writer:
    """Turns the events of one recorder into the fields of a Timeline."""

    def __init__(self, timeline: Timeline, recorder: Recorder) -> None:
        self.timeline, self.recorder = timeline, recorder
        self.places = Places(timeline._places, timeline.sources)
        self.row_of: dict[Any, int] = {}
        self.node_of: list[Any] = []
        self.row_by_node_id: dict[int, int] = {}
        self.ids: dict[Any, str] = {}
        self.live: dict[str, dict[int, State]] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self.names: list[str] = []
        self.mentions: list[dict[str, int]] = []
        self.event_of_step: list[int | None] = []
        self.previous_file: str | None = None

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

    # -- programs and rows --------------------------------------------------------------------

    def _number(self, node: Any) -> int:
        row = self.row_of.get(node)
        if row is None:
            row = self.row_of[node] = len(self.node_of)
            self.node_of.append(node)
            self.names.append("")
            self.mentions.append({"row": row})
            self.row_by_node_id[node_id(node)] = row
        return row

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
        return Program(name, title, made_from, watched.path, first, dict(watched.modules))

    def _state(self, fields: tuple[Any, ...]) -> State:
        _, name, op, target, args, kwargs, annotated = fields[:7]
        return State(
            name,
            op,
            sentences.target_name(target),
            [self._encode(one) for one in args],
            {key: self._encode(one) for key, one in kwargs.items()} if kwargs else NOTHING,
            annotation(annotated),
        )

    def _encode(self, value: Any) -> Any:
        """A value of the schema; the many mentions of a node share one dict."""
        row = self.row_of.get(value) if isinstance(value, NODES) else None
        return encode(value, self._row) if row is None else self.mentions[row]

    def _row(self, node: Any) -> int:
        """The row of a node; one that was never heard of (another graph's) gets a row too."""
        row = self.row_of.get(node)
        if row is None:
            row = self._number(node)
            self.names[row] = node.name
            self.timeline._rows[row] = Row(row, "p0")
        return row

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
        first_shapes = {} if reference is None else dict(reference.first_shapes)
        for row, program in owners.items():
            meta = self.node_of[row].meta
            self.timeline._rows[row] = Row(
                row,
                program,
                first_shapes.get(self.node_of[row]) or shape_text(shapes.get(row)),
                meta.get("made_by") or "",
                self.places.cite_all(meta.get("source", ())),
                module_stack(meta),
                tuple(self._ancestor(one) for one in ancestors_of(meta)),
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

    def _enter(self, row: int, state: State) -> None:
        self.names[row] = state.name
        for source in rows_in_state(state):
            self.readers.setdefault(source, {})[row] = None

    def _leave(self, row: int, state: State) -> None:
        for source in rows_in_state(state):
            self.readers.get(source, {}).pop(row, None)

    def _set(self, program: str, row: int, state: State | None) -> None:
        old = self.live[program].get(row)
        if old is not None:
            self._leave(row, old)
        if state is None:
            self.live[program].pop(row, None)
        else:
            self.live[program][row] = state
            self._enter(row, state)

    def _name(self, row: int) -> str:
        return self.names[row]

    def _position(self, node: Any) -> int | None:
        return self.row_of.get(node)

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
        written.sentence = self._pass_sentence(written, len(before))

    def _verdict(self, verdict: dict[str, Any] | None) -> dict[str, Any] | None:
        """A verdict with its node as a row."""
        if verdict is None:
            return None
        node = verdict["node"]
        row = None if node is None else self.row_of.get(node)
        name = "" if node is None else node.name
        return {**{k: v for k, v in verdict.items() if k != "node"}, "row": row, "name": name}

    def _guess_name(self, events: Sequence[Event]) -> str:
        """The name of a pass that was called inside a block without `timeline.run`."""
        names: dict[str, None] = {}
        for event in events:
            name = self.recorder.name_of(event)
            if name:
                names[name] = None
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

    def _pass_sentence(self, span: PassSpan, before: int) -> str:
        steps = span.last - span.first + 1
        after = len(self.live.get(span.result, ()))
        if span.kind == "trace":
            return f"{span.name} recorded {plural(after, 'node')}"
        if span.kind == "run":
            return f"{span.name} executed {plural(steps, 'node')}"
        if span.changed:
            return f"{span.name}: {plural(steps, 'edit')}, {before} -> {plural(after, 'node')}"
        live = self.live.get(span.program, {})
        unread = [row for row, state in live.items()
                  if state.op not in ("output", "placeholder") and not self.readers.get(row)]  # fmt: skip
        if span.kept:
            return f"{span.name} changed nothing: {span.kept[0]}"
        if not unread:
            return f"{span.name} changed nothing: all {plural(before, 'node')} are read"
        named = sentences.named([self.names[row] for row in unread])
        return f"{span.name} changed nothing: {named} kept, though nothing reads them"

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
        pairs = pair_rows(self.timeline, self.live[old], self.live[new])
        parts = []
        for row, state in self.live[new].items():
            inner = submodule(span.result, state.target) if state.op == "call_module" else None
            part = self.ids.get(getattr(inner, "graph", None))
            if part is not None:
                parts.append({"row": row, "program": part})
                owner = self._program_called(part)
                owner.path = state.target
                owner.title = state.target
                owner.made_from = {"program": old, "how": "split"}
        after = {"program": new, "pairs": [list(pair) for pair in pairs], "parts": parts}
        gone = len(self.live[old]) - len(pairs)
        fresh = len(self.live[new]) - len(pairs)
        name = self.timeline._passes[pass_index].name
        text = (
            f"{name} returns another module: {plural(len(pairs), 'row')} "
            f"{'is' if len(pairs) == 1 else 'are'} kept, {gone} gone, {fresh} new"
        )
        if parts:
            text += f"; it calls {plural(len(parts), 'part')}"
            self._program_called(new).made_from = {"program": old, "how": "split"}
        edit = Edit("result", old, None, {"program": old}, after)
        self._add_step(edit, text, new, (), pass_index, None)

    def _program_called(self, name: str) -> Program:
        return next(one for one in self.timeline._programs if one.id == name)

    def _edit(self, event: Event, program: str) -> tuple[Edit, str, str] | None:
        kind = event.kind
        if kind in ("module", "attr"):
            return self._state_edit(event, program)
        if kind in ("value", "error"):
            row = self.row_of.get(event.node)
            name = "error" if row is None else self.names[row]
            fields, text = event.after["json"], event.after["text"]
            if kind == "value":
                freed = [self.row_of[one] for one in event.after["freed"] if one in self.row_of]
                fields = {**fields, "freed": freed}
                text = value_sentence(name, fields, [self.names[one] for one in freed])
            return Edit(kind, program, row, None, fields), text, name
        row = self.row_of.get(event.node)
        live = self.live[program]
        if row is None or (kind != "create" and row not in live):
            return None
        method = getattr(self, f"_edit_{kind}", None)
        if method is None:
            return None
        made = method(event, program, row)
        if event.after is not None and event.after.get("by") == "snapshot" and made[0].after:
            made[0].after["by"] = "snapshot"
        return made

    def _edit_create(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        assert event.born is not None
        state = self._state(event.born)
        self._set(program, row, state)
        position = self._position(event.after["prev"])
        code = sentences.text_of(sentences.expression(state), self._name)
        after = None if position is None else self.names[position]
        text = sentences.created(state, code, after)
        fields = {"position": position, **state._asdict()}
        return Edit("create", program, row, None, fields), text, state.name

    def _edit_erase(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        state = self.live[program][row]
        code = sentences.text_of(sentences.expression(state), self._name)
        readers = [self.names[one] for one in self.readers.get(row, {}) if one != row]
        self._set(program, row, None)
        fields = {"position": self._position(event.before["prev"]), **state._asdict()}
        text = sentences.erased(state.name, code, readers)
        return Edit("erase", program, row, fields, None), text, state.name

    def _edit_move(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        before = self._position(event.before["prev"])
        after = self._position(event.after["prev"])
        text = sentences.moved(
            self.names[row],
            None if before is None else self.names[before],
            None if after is None else self.names[after],
        )
        return (
            Edit("move", program, row, {"position": before}, {"position": after}),
            text,
            self.names[row],
        )

    def _edit_args(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(
            args=[self._encode(one) for one in event.after["args"]],
            kwargs={key: self._encode(one) for key, one in event.after["kwargs"].items()},
        )
        self._set(program, row, new)
        text = sentences.rewritten(old.name, old, new, self._name)
        before = {"args": old.args, "kwargs": old.kwargs}
        after = {"args": new.args, "kwargs": new.kwargs}
        return Edit("args", program, row, before, after), text, old.name

    def _edit_target(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        target = sentences.target_name(event.after["target"])
        new = old._replace(op=event.after["op"], target=target)
        self._set(program, row, new)
        before, after = {"op": old.op, "target": old.target}, {"op": new.op, "target": target}
        text = sentences.retargeted(old.name, old, new)
        return Edit("target", program, row, before, after), text, old.name

    def _edit_type(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(type=annotation(event.after["type"]))
        self._set(program, row, new)
        text = sentences.retargeted(old.name, old, new)
        edit = Edit("target", program, row, {"type": old.type}, {"type": new.type})
        return edit, text, old.name

    def _edit_rename(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        old = self.live[program][row]
        new = old._replace(name=event.after["name"])
        self._set(program, row, new)
        text = sentences.renamed(old.name, new.name)
        edit = Edit("rename", program, row, {"name": old.name}, {"name": new.name})
        return edit, text, new.name

    def _edit_reroute(self, event: Event, program: str, row: int) -> tuple[Edit, str, str]:
        to = self._row(event.after["to"])
        users, before = [], []
        for user, _, _ in event.before["users"]:
            one = self.row_of.get(user)
            if one is None or one not in self.live[program]:
                continue
            old = self.live[program][one]
            users.append(one)
            before.append([one, old.args, old.kwargs])
            self._set(program, one, old._replace(
                args=substitute(old.args, row, to), kwargs=substitute_kwargs(old.kwargs, row, to)
            ))  # fmt: skip
        left = [self.names[one] for one in self.readers.get(row, {})]
        text = sentences.rerouted(
            self.names[row], self.names[to], [self.names[one] for one in users], left
        )
        edit = Edit("reroute", program, row, {"users": before}, {"to": to, "users": users})
        return edit, text, self.names[row]

    def _state_edit(self, event: Event, program: str) -> tuple[Edit, str, str] | None:
        path = event.after["path"]
        old, new = event.before["value"], event.after["value"]
        before: dict[str, Any] = {"path": path, "value": live_json(old)}
        after: dict[str, Any] = {"path": path, "value": live_json(new)}
        if event.node == "snapshot":
            after["by"] = "snapshot"
        if event.after.get("written"):
            text = f"{sentences.path_text(path)}: its numbers were written over in place"
        else:
            text = sentences.restated(event.kind, before, after)
        return Edit(event.kind, program, None, before, after), text, path


def live_json(value: Any) -> dict[str, Any] | None:
    """`state_json`, with null for what was not there."""
    return None if value is MISSING else state_json(value)


def lint_text(graph: Any) -> str | None:
    """What `graph.lint()` complains of, or None."""
    try:
        graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        return str(error)
    return None


def node_id(node: Any) -> int:
    """A number for a node: its own `id`, or for torch.fx's nodes one that no fxlab node has."""
    own = getattr(node, "id", None)
    return own if isinstance(own, int) else -id(node)


def ancestors_of(meta: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The provenance of a node, whatever kind it is."""
    found = meta.get("from", ())
    return [one for one in found if isinstance(one, dict)] if isinstance(found, tuple) else []


def ancestor_ids(node: Any) -> list[int]:
    """The ids of a node's ancestors, nearest first."""
    found = [one["id"] for one in ancestors_of(node.meta) if "id" in one]
    origin = node.meta.get("fxlab_origin")
    return [*found, node_id(origin)] if origin is not None else found


def module_stack(meta: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """`nn_module_stack` as (path, type name) pairs, outermost first."""
    pairs = []
    stack = meta.get("nn_module_stack")
    for value in stack.values() if isinstance(stack, dict) else ():
        if isinstance(value, tuple) and len(value) == 2:
            kind = value[1]
            name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
            pairs.append((str(value[0]), name.rpartition(".")[2]))
    return tuple(pairs)


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


def pair_rows(
    timeline: Timeline, old: dict[int, State], new: dict[int, State]
) -> list[tuple[int, int]]:
    """Which row of the new program stands for which of the old: by ancestry, then by meaning."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for row in new:
        for one in timeline._rows[row].ancestors:
            if one["row"] in old and one["row"] not in taken:
                pairs[row] = one["row"]
                taken.add(one["row"])
                break
    by_meaning = {(s.name, s.op, s.target): row for row, s in old.items() if row not in taken}
    for row, state in new.items():
        other = by_meaning.pop((state.name, state.op, state.target), None)
        if row not in pairs and other is not None:
            pairs[row] = other
    return [(pairs[row], row) for row in new if row in pairs]


def plural(count: int, noun: str) -> str:
    """`1 node`, `12 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"
