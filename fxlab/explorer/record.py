"""Who listens while a program is changed, and when does it stop a pass that runs away?

`record(gm)` watches every edit of a GraphModule: of its graph through the core's listeners, of its
modules and tensors through the GraphModule and torch's registration hooks, and what no hook tells
by comparing at pass boundaries. It notes live objects only; `history.py` turns them into a
`Timeline` when somebody looks, so that a pass runs at nearly its own speed. If the block raises,
graph and state are put back as they were.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fxlab.core import graph as core_graph
from fxlab.core.errors import EditLimitError, RewriteError, call_site
from fxlab.core.graph import MISSING, Graph
from fxlab.core.graph_module import GraphModule
from fxlab.explorer.events import (
    Boundary,
    Event,
    Span,
    Watched,
    born_now,
    born_of,
    is_lazy,
    known_value,
    measured_cost,
    measured_seconds,
    new_event,
    snapshot,
)
from fxlab.explorer.given import as_inputs, check_model, title_of
from fxlab.explorer.searches import Searches
from fxlab.explorer.sentences import article
from fxlab.explorer.sites import Sites, entry_name, place_of_edit
from fxlab.explorer.state import State, look_at, module_names, set_state
from fxlab.explorer.undo import undo

GRAPH_MODULES = (GraphModule, torch.fx.GraphModule)
MACHINERY = (contextlib.__file__, torch_module.__file__)
_makers = core_graph._makers
COPY_CODE = Graph.__deepcopy__.__code__


class Recorder:
    """Collects events for one recording. `record` is the way to use it."""

    def __init__(
        self,
        inputs: Sequence[Any] | None = None,
        max_edits: int = 100_000,
        max_growth: float = 50,
        max_seconds: float | None = None,
    ) -> None:
        one = isinstance(inputs, torch.Tensor)
        self.inputs = None if inputs is None else (inputs,) if one else tuple(inputs)
        self.max_edits, self.max_growth, self.max_seconds = max_edits, max_growth, max_seconds
        self.repeats = 0
        self.events: list[Event] = []
        self.watched: dict[Any, Watched] = {}
        self.spans: list[Span] = []
        self.open: Span | None = None
        # A bound method is a new object at each look; listeners are told apart by identity.
        self.listener, self.copy_listener = self.hear, self._hear_copy
        self.live = False
        self.paused = False
        self.undone_from: int | None = None
        self.error: BaseException | None = None
        self.states: dict[Any, State] = {}
        self.current: Any = None
        self.most = float("inf")
        self.ends_at: float | None = None
        self.thread = threading.get_ident()
        self.finished_with: Any = None
        self.reference: Any = None
        self.given: Any = None
        self.torch_hooks: list[Any] = []
        self.foreign: Any = None
        self.listens_foreign = False
        self.searches = Searches(self)
        self.sites = Sites()
        self.initial = Boundary(None)
        self.block: tuple[str, str] = ("", "")
        self.entries: dict[tuple[Any, ...], str] = {}
        self.orders: list[tuple[dict[str, Any], list[str]]] = []

    # -- begin and end ------------------------------------------------------------------------

    def start(self, gm: Any) -> None:
        """Begin to listen to `gm`."""
        self.attach(gm)
        for watched in self.watched.values():
            watched.original = True
        for module in self.states[gm].modules.values():
            for table in (module._modules, module._parameters, module._buffers, vars(module)):
                self.orders.append((table, list(table)))
        self.initial = self.boundary(gm)
        self.listen()

    def attach(self, gm: Any) -> None:
        """Make `gm` the module whose edits are told: its graph is the current program."""
        graph = gm.graph
        self.current = gm
        if graph not in self.watched:
            self.watch(graph, module=gm)
        if gm not in self.states or self.watched[graph].module is not gm:
            self.adopt(gm)
        self.most = self.max_growth * max(2, len(graph.nodes))
        for path, inner in self.states[gm].modules.items():
            if path and isinstance(inner, GRAPH_MODULES):
                if inner.graph not in self.watched:
                    self.watch(inner.graph, module=inner, path=path)
                self.watched[inner.graph].module, self.watched[inner.graph].path = inner, path
        if self.inputs is not None and self.reference is None:
            from fxlab.explorer.sameness import Reference

            with self.quiet():
                self.reference = self.given = Reference(gm, self.inputs, len(self.events))

    def watch(self, graph: Any, module: Any = None, path: str = "") -> Watched:
        """Note a graph as it is now and listen to it from here on."""
        first = snapshot(graph)
        watched = self.watched[graph] = Watched(graph, path, module, first)
        if self.live:
            self._add_listener(graph, self.listener)
            self._hear_foreign_too()
        return watched

    def _hear_foreign_too(self) -> None:
        """Wrap torch.fx's methods once one of its graphs is watched."""
        if not self.listens_foreign and any(isinstance(g, torch.fx.Graph) for g in self.watched):
            from fxlab.explorer.foreign import ForeignEdits

            self.foreign, self.listens_foreign = ForeignEdits(self), True
            self.foreign.listen()

    def listen(self) -> None:
        """Put the listeners in."""
        self.live = True
        self.thread = threading.get_ident()
        if self.max_seconds is not None:
            self.ends_at = time.monotonic() + self.max_seconds
        for graph in self.watched:
            self._add_listener(graph, self.listener)
        core_graph.graph_created_hooks.append(self._created)
        self.torch_hooks = [
            torch_module.register_module_module_registration_hook(self._hear_module),
            torch_module.register_module_parameter_registration_hook(self._hear_tensor),
            torch_module.register_module_buffer_registration_hook(self._hear_tensor),
        ]
        self.searches.listen()
        self._hear_foreign_too()

    def stop(self) -> None:
        """Take every listener out."""
        if not self.live:
            return
        self.live = False
        for graph in self.watched:
            if isinstance(graph, Graph):
                graph.remove_listener(self.listener)
                graph.remove_listener(self.copy_listener)
        core_graph.graph_created_hooks.remove(self._created)
        for hook in self.torch_hooks:
            hook.remove()
        self.searches.stop()
        self.sites.forget()
        if self.foreign is not None:
            self.foreign.stop()
            self.listens_foreign = False

    def _add_listener(self, graph: Any, listener: Callable[..., None]) -> None:
        if isinstance(graph, Graph):
            graph.add_listener(listener)

    # -- hearing ------------------------------------------------------------------------------

    def hear(self, kind: str, graph: Any, node: Any, before: Any, after: Any) -> None:
        """Note one edit of a graph, or of the state of its GraphModule."""
        if self.paused:
            return
        if kind == "create":
            born = born_now(node)
        elif kind in ("module", "attr"):
            self._hear_state(kind, graph, before, after)
            return
        else:
            born = None
        events = self.events
        maker = _makers.name
        where = self.sites.here(sys._getframe(2)) or place_of_edit()
        if where not in self.entries:
            self.entries[where] = entry_name(self.block, where)
        events.append(new_event((kind, graph, node, before, after, where, born, maker)))
        if len(events) > self.max_edits or graph._len > self.most or self.ends_at is not None:
            self._enough(graph)

    def _enough(self, graph: Any) -> None:
        where = self.events[-1].where
        size = len(graph.nodes)
        if len(self.events) > self.max_edits:
            what = f"the pass made more than {self.max_edits:,} edits"
        elif graph in self.watched and size > self.most and self.watched[graph].first:
            what = f"the graph grew from {len(self.watched[graph].first):,} to {size:,} nodes"
        elif self.ends_at is not None and time.monotonic() > self.ends_at:
            what = f"the pass edited for more than {self.max_seconds} seconds"
        else:
            return
        raise EditLimitError(
            f"{what}, so it was stopped and its edits are undone",
            where=where,
            hint=[
                "your loop visits the nodes it inserts: iterate over list(graph.nodes)",
                "if the pass is right, raise record(..., max_edits=, max_growth=, max_seconds=)",
            ],
            wrong="for node in gm.graph.nodes:",
            right="for node in list(gm.graph.nodes):",
        )

    def hear_foreign(self, event: Event) -> None:
        """Note one edit of a torch.fx graph."""
        self.events.append(event)
        if event.where not in self.entries:
            self.entries[event.where] = entry_name(self.block, event.where)
        if len(self.events) > self.max_edits or len(event.graph.nodes) > self.most or self.ends_at:
            self._enough(event.graph)

    def adopt(self, gm: Any) -> None:
        """Hear state edits of a GraphModule that was made meanwhile."""
        self.states[gm] = State(gm)
        watched = self.watched[gm.graph]
        names = module_names(gm, self.states[gm])
        watched.modules = {**names, **watched.modules}
        watched.module, watched.names_at = gm, watched.names_at or len(self.events)

    def _created(self, graph: Graph) -> None:
        """A new Graph: listen to it; whether it becomes a program shows later."""
        if self.paused or not self.live or threading.get_ident() != self.thread:
            return
        watched = self.watched[graph] = Watched(graph)
        frame, how = sys._getframe(2), None
        for _ in range(4):
            if frame is None:
                break
            how = {"__deepcopy__": "copy", "trace": "trace"}.get(frame.f_code.co_name, how)
            frame = frame.f_back
        watched.how = how
        self._add_listener(graph, self.copy_listener if how == "copy" else self.listener)

    def _hear_copy(self, kind: str, graph: Any, node: Any, before: Any, after: Any) -> None:
        """A graph that is being copied whole: its nodes are how it begins, and no edits."""
        if kind == "create" and sys._getframe(2).f_code is COPY_CODE:
            self.watched[graph].first.append(born_of(node))
            return
        graph.remove_listener(self.copy_listener)
        graph.add_listener(self.listener)
        self.hear(kind, graph, node, before, after)

    def _hear_state(self, kind: str, graph: Any, before: Any, after: Any) -> None:
        """An edit that a GraphModule tells of."""
        if graph not in self.watched:
            return
        gm = before["module"]
        if gm not in self.states:
            self.adopt(gm)
        self._note_state(kind, graph, before, after, None)

    def _note_state(self, kind: str, graph: Any, before: Any, after: Any, mark: Any) -> None:
        maker = _makers.name
        where = call_site(7)
        # The machinery of a state edit (a context manager, nn.Module's setter) is no pass's line.
        while where and where[0][0] in MACHINERY:
            where = where[1:]
        self.events.append(Event(kind, graph, mark, before, after, where[:4], None, maker))
        if where[:4] not in self.entries:
            self.entries[where[:4]] = entry_name(self.block, where)
        value = after["value"]
        self.states[before["module"]].note(after["path"], None if value is MISSING else value)
        if len(self.events) > self.max_edits:
            self._enough(graph)

    def _hear_module(self, module: nn.Module, name: str, value: Any) -> None:
        self._hear_registration("module", module, name, value, module._modules)

    def _hear_tensor(self, module: nn.Module, name: str, value: Any) -> None:
        table = module._parameters if name in module._parameters else module._buffers
        self._hear_registration("attr", module, name, value, table)

    def _hear_registration(
        self, kind: str, module: nn.Module, name: str, value: Any, table: dict[str, Any]
    ) -> None:
        """Torch is about to register something; told of modules inside the recorded one only."""
        if self.paused or threading.get_ident() != self.thread:
            return
        for gm, state in self.states.items():
            base = state.paths.get(id(module))
            if base is None or state.modules.get(base) is not module:
                continue
            old = table.get(name, MISSING)
            if old is value or "_editing" in vars(gm):
                return  # the GraphModule tells of this edit itself, once it is done
            path = f"{base}.{name}" if base else name
            before = {"path": path, "value": old, "module": gm}
            after = {"path": path, "value": value, "module": gm}
            self._note_state(kind, gm.graph, before, after, "hook")
            return

    # -- passes -------------------------------------------------------------------------------

    def begin(self, name: str, kind: str = "pass", function: Any = None) -> Span:
        """Open a span of steps; what was edited outside any pass becomes a span of its own."""
        done = self.done()
        if len(self.events) > done:
            loose = Span("", "pass", done, self.before(None), last=len(self.events))
            loose.end, loose.result = self.boundary(self.current), self.current
            self.judge(loose)  # else the next pass would be blamed
            self.spans.append(loose)
        self.open = Span(name, kind, len(self.events), self.boundary(self.current), function)
        self.spans.append(self.open)
        return self.open

    def done(self) -> int:
        """How many events belong to spans that have ended."""
        return next((span.last for span in reversed(self.spans) if span.last is not None), 0)

    def before(self, span: Span | None) -> Boundary:
        """What held before a span, or before the events that belong to none yet."""
        if span is not None:
            return span.start
        ends = (one.end for one in reversed(self.spans) if one.end is not None)
        return next((end for end in ends if end.graph is not None), self.initial)

    def name_of(self, event: Event) -> str:
        """The pass that made an edit: the function that the block called, or as it signed."""
        return self.entries.get(event.where) or event.maker or "edits"

    def close(self, span: Span, result: Any, ok: bool = True) -> None:
        """End a span: compare state, judge the output, note shapes and the report."""
        self.settle()
        span.result = result if result is not None else self.current
        same_program = span.result is self.current and span.result.graph is span.start.graph
        span.last = len(self.events)
        self.open = None
        self.sites.forget()
        graph = span.result.graph
        if graph not in self.watched:
            self.watch(graph, module=span.result)
        self.watched[graph].asked = True
        self.watched[graph].module = span.result
        if isinstance(graph, Graph):
            span.unmatched += self.searches.explain(span.result)
        span.report = getattr(span.result, "meta", {}).get("reports", {}).get(span.name)
        span.end = self.boundary(span.result, measure=ok)
        for node in [node for node in graph.nodes if "columns" in node.meta]:
            for metric, number in node.meta["columns"].items():
                span.columns.setdefault(metric, []).append((node, number))
        if ok:
            span.version = getattr(graph, "version", None)
            self.judge(span)
        if not same_program:
            self.attach(span.result)

    def judge(self, span: Span) -> None:
        """Hold what a span has made to what it was given, and to the first program."""
        if self.reference is None:
            return
        from fxlab.explorer.sameness import judge_pass

        with self.quiet():
            span.verdict = judge_pass(self, span)
        if span.end is not None:
            span.end.shapes = self.given.run.shapes or span.end.shapes

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Hear nothing meanwhile: the recorder itself copies and runs programs."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def boundary(self, gm: Any, measure: bool = True) -> Boundary:
        """What holds of a module now; what it costs too where inputs are known."""
        if gm is None:
            return Boundary(None)
        counts = dict(Counter([node.op for node in gm.graph.nodes]))
        known = [node for node in gm.graph.nodes if node.meta]
        shapes = [(node, value) for node in known if (value := known_value(node)) is not None]
        held = {id(one): one for one in look_at(gm)[1].values() if isinstance(one, nn.Parameter)}
        parameters = sum(one.numel() for one in held.values() if not is_lazy(one))
        cost = {"nodes": counts, "parameters": parameters, "flops": None, "bytes": None}
        cost["seconds"] = None
        columns: dict[str, list[tuple[Any, float]]] = {}
        if measure and self.reference is not None and self.reference.problem is None:
            with self.quiet():
                measured, columns = measured_cost(gm, self.reference.inputs)
                cost["seconds"] = measured_seconds(gm, self.reference.inputs, self.repeats)
            cost.update(measured)
        return Boundary(gm.graph, cost, shapes, columns)

    def settle(self) -> None:
        """Find by comparing what no listener told."""
        for gm in self.states:
            self.compare_state(gm)
        if self.foreign is not None:
            self.foreign.compare()

    def compare_state(self, gm: Any) -> None:
        """Find what no hook told: deletions, writes into tensors, entries set to None."""
        state, found = self.states[gm], len(self.events)
        for kind, path, old, new in state.differences():
            before = {"path": path, "value": old, "module": gm}
            after = {"path": path, "value": new, "module": gm}
            self.events.append(Event(kind, gm.graph, "snapshot", before, after, ()))
        for path, tensor in state.written():
            note = {"path": path, "value": tensor, "module": gm, "written": True}
            self.events.append(Event("attr", gm.graph, "snapshot", note, note, ()))
        if len(self.events) > found:
            state.look()

    # -- undo ---------------------------------------------------------------------------------

    def undo(self) -> None:
        """Put graphs and state back as they were at the start, newest edit first."""
        self._revert(0, {graph for graph, one in self.watched.items() if one.original})
        for table, order in self.orders:
            if list(table) != order and set(table) == set(order):
                kept = dict(table)
                table.clear()
                table.update((name, kept[name]) for name in order)

    def give_up(self, start: int) -> None:
        """End a pass that raised: undo the edits of the current program from event `start` on."""
        self.settle()
        if self.open is not None:
            self.open.last, self.open.end = len(self.events), Boundary(self.current.graph)
            self.open.result, self.open = self.current, None
        self._revert(start, {self.current.graph})

    def _revert(self, start: int, graphs: set[Any]) -> None:
        for event in reversed(self.events[start:]):
            if event.graph not in graphs or event.kind in ("value", "error"):
                continue
            if event.kind in ("module", "attr"):
                if not event.after.get("written"):
                    set_state(event.before["module"], event.before["path"], event.before["value"])
            elif isinstance(event.graph, Graph):
                undo(event.kind, event.graph, event.node, event.before, event.after)
            elif self.foreign is not None:
                self.foreign.undo(event)
        self.undone_from = start
        for graph in graphs:
            if self.watched[graph].module is not None:
                self.watched[graph].module.recompile()


class record:
    """Watch everything that a block of code does to a GraphModule.

    Args:
        gm: A GraphModule, fxlab's or torch.fx's.
        inputs: Example inputs; with them each pass is judged: does it return what the program
            that it was given returned.
        max_edits: A pass is stopped at its next edit beyond so many.
        max_growth: ... or when the graph grows beyond this many times its size.
        max_seconds: ... or at its first edit after so many seconds.
        repeats: With inputs: time the program before and after each pass, the median of so many
            runs, in seconds; 0 measures nothing.

    Returns:
        A context manager; its target is the `Timeline`, which can be read inside the block too.

    Raises:
        EditLimitError: A limit was passed. As after any exception of the block, the edits of graph
            and module are undone, the timeline keeps its steps, and the exception goes on.
        RewriteError: ``gm`` is no GraphModule.

    Example:
        >>> import torch, fxlab
        >>> gm = fxlab.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        >>> with fxlab.record(gm) as timeline:
        ...     relu = list(gm.graph.nodes)[2]
        ...     relu.name = "act"
        >>> [(step.edit.kind, step.edit.after) for step in timeline.steps]
        [('rename', {'name': 'act'})]
    """

    def __init__(
        self,
        gm: Any,
        inputs: Sequence[Any] | None = None,
        *,
        max_edits: int = 100_000,
        max_growth: float = 50,
        max_seconds: float | None = None,
        repeats: int = 0,
    ) -> None:
        check_model(gm, "fxlab.symbolic_trace")
        graph = getattr(gm, "graph", None)
        if not isinstance(graph, (Graph, torch.fx.Graph)):
            raise RewriteError(
                f"record needs a GraphModule, got {article(type(gm).__name__)}",
                where=call_site(),
                hint="trace the model first: gm = fxlab.symbolic_trace(model); or let "
                "fxlab.explore(model, passes=[...]) do it all",
            )
        self.gm = gm
        self.recorder = Recorder(as_inputs(gm, inputs), max_edits, max_growth, max_seconds)
        self.recorder.repeats = repeats

    def __enter__(self) -> Any:
        from fxlab.explorer.history import RecordedTimeline

        recorder = self.recorder
        recorder.start(self.gm)
        caller = sys._getframe(1).f_code
        recorder.block = (caller.co_filename, caller.co_name)
        return RecordedTimeline(title_of(self.gm), recorder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finish_block(self.recorder, error)


def finish_block(recorder: Recorder, error: BaseException | None) -> None:
    """End a recording: close what is open, undo everything if the block raised."""
    from fxlab.explorer.trace import add_undone

    recorder.error = error
    told = error is None
    if recorder.open is not None:
        recorder.close(recorder.open, None, ok=False)
        told = told or add_undone(recorder, error)
    done = recorder.done()
    rest = len(recorder.events) > done or recorder.finished_with is not None or not told
    if rest or not recorder.spans:
        span = Span("", "pass", done, recorder.before(None))
        recorder.spans.append(span)
        result = recorder.finished_with or last_edited(recorder, done)
        if error is None:
            recorder.close(span, result)
        else:
            recorder.settle()
            if not told:
                add_undone(recorder, error)
            span.last, span.end = len(recorder.events), Boundary(None)
            span.result = recorder.current
    recorder.stop()
    if error is not None:
        recorder.undo()


def last_edited(recorder: Recorder, start: int) -> Any:
    """The module of the program that was edited last: what the block is taken to have made."""
    for event in reversed(recorder.events[start:]):
        owner = getattr(event.graph, "owning_module", None)
        if owner is not None and event.kind not in ("module", "attr"):
            return owner if recorder.watched[event.graph].path == "" else recorder.current
    return recorder.current
