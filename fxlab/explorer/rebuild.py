"""What did the program, with its weights, look like after step i?

`module_at` builds the GraphModule of any step of a recording from the live objects that the
recorder kept: the nodes' targets and arguments, and the modules and tensors that edits replaced. It
is what numeric checks and `bisect` run.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxlab.core.errors import TimelineError
from fxlab.core.graph import Graph
from fxlab.core.node import map_arg
from fxlab.explorer.events import Event, Watched
from fxlab.explorer.foreign import foreign_map_arg
from fxlab.explorer.state import set_state

if TYPE_CHECKING:
    from fxlab.explorer.history import RecordedTimeline
    from fxlab.explorer.record import Recorder


class LiveReplay:
    """The live fields of one program's nodes, played forwards event by event."""

    def __init__(self, watched: Watched) -> None:
        self.graph = watched.graph
        self.fields: dict[Any, list[Any]] = {}
        self.next: dict[Any, Any] = {None: None}
        self.prev: dict[Any, Any] = {None: None}
        self.done = 0
        before = None
        for node, *rest in watched.first:
            self._insert(node, before, rest[:6])
            before = node

    def _insert(self, node: Any, before: Any, fields: list[Any]) -> None:
        self._link(node, before)
        self.fields[node] = list(fields)

    def _link(self, node: Any, before: Any) -> None:
        if before not in self.next:
            before = None
        after = self.next[before]
        self.next[before], self.prev[node] = node, before
        self.next[node], self.prev[after] = after, node

    def _unlink(self, node: Any) -> None:
        before, after = self.prev.pop(node), self.next.pop(node)
        self.next[before], self.prev[after] = after, before

    def order(self) -> list[Any]:
        """The nodes in order."""
        nodes, node = [], self.next[None]
        while node is not None:
            nodes.append(node)
            node = self.next[node]
        return nodes

    def play(self, events: list[Event], count: int, again: bool = False) -> None:
        """Play forwards until `count` events are done; `again`: play these from the first."""
        for event in events[0 if again else self.done : count]:
            if event.graph is self.graph and event.kind not in ("module", "attr"):
                self._play(event)
        self.done = max(self.done, count)

    def _play(self, event: Event) -> None:
        node, kind = event.node, event.kind
        if kind == "create":
            assert event.born is not None
            self._insert(node, event.after["prev"], list(event.born[1:7]))
        elif node not in self.fields:
            return
        elif kind == "erase":
            self._unlink(node)
            del self.fields[node]
        elif kind == "move":
            self._unlink(node)
            self._link(node, event.after["prev"])
        elif kind == "args":
            self.fields[node][3:5] = [event.after["args"], event.after["kwargs"]]
        elif kind == "target":
            self.fields[node][1:3] = [event.after["op"], event.after["target"]]
        elif kind == "rename":
            self.fields[node][0] = event.after["name"]
        elif kind == "type":
            self.fields[node][5] = event.after["type"]
        elif kind == "reroute":
            new = event.after["to"]
            for user, args, kwargs in event.before["users"]:
                if user in self.fields:
                    self.fields[user][3:5] = [_swap(args, node, new), _swap(kwargs, node, new)]


def _swap(value: Any, old: Any, new: Any) -> Any:
    if isinstance(old, torch.fx.Node):
        return foreign_map_arg(value, lambda one: new if one is old else one)
    return map_arg(value, lambda one: new if one is old else one)


def module_at(timeline: RecordedTimeline, index: int) -> Any:
    """The GraphModule as of step `index`; see `RecordedTimeline.module`."""
    steps = timeline.steps
    if not 0 <= index <= len(steps):
        raise IndexError(f"step {index}: this timeline has steps 1 to {len(steps)}")
    if index and not steps[index - 1].well_formed:
        raise TimelineError(
            f"step {index} left a graph that cannot run: {steps[index - 1].problem}",
            hint="choose a step whose well_formed is True",
        )
    writer = timeline.writer
    program = timeline.program_at(index)
    graph = next(graph for graph, name in writer.ids.items() if name == program)
    return rebuild(timeline.recorder, graph, events_up_to(timeline, index))[0]


def rebuild(recorder: Recorder, graph: Any, count: int) -> tuple[Any, dict[Any, Any]]:
    """The GraphModule of `graph` after `count` events, and which of its nodes stands for which.

    Returns:
        The module, and a dict from live node of the recording to node of the module.

    Raises:
        TimelineError: A tensor was written over since.
    """
    for event in recorder.events[count:]:
        if event.kind == "attr" and event.after.get("written"):
            raise TimelineError(
                f"{event.after['path']} was written over in place later: the numbers that it held "
                "then are gone",
                hint="a pass should install a new tensor instead of writing into one",
            )
    replay = LiveReplay(recorder.watched[graph])
    replay.play(recorder.events, count)
    owner = recorder.watched[graph].module or getattr(graph, "owning_module", None)
    root = state_at(recorder, count, owner)
    return assemble(replay, root, owner)


def events_up_to(timeline: RecordedTimeline, index: int) -> int:
    """How many events had happened after step `index`."""
    numbers = timeline.writer.event_of_step[:index]
    return next((number + 1 for number in reversed(numbers) if number is not None), 0)


def state_at(recorder: Recorder, count: int, owner: Any) -> nn.Module:
    """A copy of `owner`'s module tree, tensors shared, as it was after `count` events."""
    root = tree_copy(owner)
    events = recorder.events
    # `owner` holds the state after so many events: all of them, unless a failed pass was undone.
    now = len(events) if recorder.undone_from is None else recorder.undone_from
    for event in reversed(events[count:now]):
        put_back(root, event, event.before, owner)
    for event in events[now:count]:
        put_back(root, event, event.after, owner)
    return root


def put_back(root: nn.Module, event: Event, side: dict[str, Any], owner: Any) -> None:
    """Set in `root` what one side of a state edit held, if it was an edit of `owner`."""
    mine = event.kind in ("module", "attr") and side.get("module") is owner
    if mine and not side.get("written"):
        value = side["value"]
        set_state(root, side["path"], tree_copy(value) if isinstance(value, nn.Module) else value)


def tree_copy(module: nn.Module) -> Any:
    """A copy of a module tree whose own dictionaries are new and whose tensors are the same.

    A GraphModule at the root becomes a plain Module; calls go to the same classes otherwise.
    """
    copies: dict[int, nn.Module] = {}
    for one in module.modules():
        copies[id(one)] = bare_copy(one, plain=one is module and hasattr(one, "graph"))
    for one in copies.values():
        for name, child in one._modules.items():
            if child is not None:
                one._modules[name] = copies[id(child)]
    return copies[id(module)]


def bare_copy(module: nn.Module, plain: bool) -> nn.Module:
    """One module with dictionaries of its own."""
    if hasattr(module, "graph") and not plain:
        return module
    new = nn.Module() if plain else module.__class__.__new__(module.__class__)
    skipped = ("_graph", "_code", "meta") if plain else ()
    for name, value in vars(module).items():
        if name not in skipped:
            own = name.startswith("_") and isinstance(value, dict)
            object.__setattr__(new, name, copy.copy(value) if own else value)
    return new


def assemble(replay: LiveReplay, root: nn.Module, owner: Any) -> tuple[Any, dict[Any, Any]]:
    """A new GraphModule from live fields, and the map from recorded node to its node."""
    foreign = not isinstance(replay.graph, Graph)
    old = replay.graph
    graph: Any = torch.fx.Graph() if foreign else Graph()
    made: dict[Any, Any] = {}
    mapped = foreign_map_arg if foreign else map_arg
    for node in replay.order():
        name, op, target, args, kwargs, annotated = replay.fields[node]
        new = graph.create_node(
            op,
            target,
            mapped(args, made.__getitem__),
            mapped(kwargs, made.__getitem__),
            name=name,
            type_expr=annotated,
        )
        new.meta = dict(node.meta)
        made[node] = new
    graph._codegen = copy.deepcopy(old._codegen)
    if foreign:
        gm: Any = torch.fx.GraphModule(root, graph)
    else:
        from fxlab.core.graph_module import GraphModule

        gm = GraphModule(root, graph)
    gm.training = getattr(owner, "training", True)
    return gm, made
