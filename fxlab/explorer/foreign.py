"""How are edits of torch.fx's own graphs heard, when its hooks miss most of them?

While a torch.fx GraphModule is recorded, the methods of `torch.fx.Graph` and `torch.fx.Node` that
edit (create_node, erase_node, argument and target setters, moves, replace_all_uses_with) are
wrapped. A wrapper only tells recorders of its own thread, and passes on at once otherwise. What
cannot be wrapped is found by comparing with a replay at pass boundaries, and marked as such.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.fx
from torch.fx.node import map_arg as foreign_map_arg

from fxlab.explorer.ancestry import foreign_ancestor
from fxlab.explorer.events import Event, Watched, born_of
from fxlab.explorer.sites import place_of_edit

if TYPE_CHECKING:
    from fxlab.explorer.record import Recorder

__all__ = ["ForeignEdits", "foreign_map_arg"]

FIELDS = {"args": "args", "kwargs": "args", "target": "target", "op": "target", "name": "rename",
          "type": "type"}  # fmt: skip
_lock = threading.Lock()
_active: list[ForeignEdits] = []
_originals: list[tuple[type, str, Any]] = []


class ForeignEdits:
    """Tells one recorder of the edits that its thread makes to torch.fx graphs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth = 0

    def listen(self) -> None:
        """Begin to hear; the first listener of the process puts the wrappers in."""
        with _lock:
            if not _active:
                _install()
            _active.append(self)

    def stop(self) -> None:
        """Hear no more; the last listener takes the wrappers out."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _uninstall()

    def hears(self) -> bool:
        """Whether an edit made now is to be told."""
        recorder = self.recorder
        mine = threading.get_ident() == recorder.thread
        return mine and recorder.live and not recorder.paused and self.depth == 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What an edit primitive does inside itself is part of that one edit."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def tell(self, kind: str, node: Any, before: Any, after: Any) -> None:
        """Hand one edit to the recorder, if its graph is watched."""
        if node.graph in self.recorder.watched:
            self.recorder.hear_foreign(
                Event(
                    kind,
                    node.graph,
                    node,
                    before,
                    after,
                    place_of_edit(),
                    born_of(node)[:7] if kind == "create" else None,
                )
            )

    def compare(self) -> None:
        """Find edits that no wrapper told of, in every watched torch.fx graph."""
        for graph, watched in list(self.recorder.watched.items()):
            if isinstance(graph, torch.fx.Graph):
                for event in difference(watched, self.recorder.events):
                    self.recorder.events.append(event)

    def undo(self, event: Event) -> None:
        """Revert one edit."""
        node, before = event.node, event.before
        kind = event.kind
        if kind == "create":
            node.graph.erase_node(node)
        elif kind == "erase":
            before["prev"]._next._prepend(node)
            node._erased = False
            node.graph._len += 1
            node._update_args_kwargs(before["args"], before["kwargs"])
            node.graph._find_nodes_lookup_table.insert(node)
        elif kind == "move":
            before["prev"]._next._prepend(node)
        elif kind == "args":
            node._update_args_kwargs(before["args"], before["kwargs"])
        elif kind == "reroute":
            for user, args, kwargs in before["users"]:
                user._update_args_kwargs(args, kwargs)
        else:
            for name, value in before.items():
                setattr(node, name, value)


def difference(watched: Watched, events: list[Event]) -> list[Event]:
    """The edits that lead from what was heard of a graph to what it is."""
    from fxlab.explorer.rebuild import LiveReplay

    replay = LiveReplay(watched)
    replay.play(events, len(events))
    actual = list(watched.graph.nodes)
    there = set(actual)
    found: list[Event] = []

    def add(kind: str, node: Any, before: Any, after: Any, born: Any = None) -> None:
        after = None if after is None else {**after, "by": "snapshot"}
        event = Event(kind, watched.graph, node, before, after, (), born)
        found.append(event)
        replay.play([event], 1, again=True)

    before: Any = None
    for node in actual:
        if node not in replay.fields:
            add("create", node, None, {"prev": before}, born_of(node)[:7])
        before = node
    for node in actual:
        name, op, target, args, kwargs, annotated = replay.fields[node]
        if not same(args, node.args) or not same(kwargs, node.kwargs):
            add("args", node, {"args": args, "kwargs": kwargs},
                {"args": node.args, "kwargs": node.kwargs})  # fmt: skip
        if op != node.op or (target is not node.target and target != node.target):
            add("target", node, {"op": op, "target": target},
                {"op": node.op, "target": node.target})  # fmt: skip
        if name != node.name:
            add("rename", node, {"name": name}, {"name": node.name})
        if annotated is not node.type and annotated != node.type:
            add("type", node, {"type": annotated}, {"type": node.type})
    for node in [node for node in replay.fields if node not in there]:
        fields = replay.fields[node]
        was = {"prev": replay.prev[node], "args": fields[3], "kwargs": fields[4]}
        add("erase", node, was, None)
    before = None
    for node in actual:
        if replay.prev[node] is not before:
            add("move", node, {"prev": replay.prev[node]}, {"prev": before})
        before = node
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; objects that cannot say so are compared by identity."""
    if one is other:
        return True
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # tensors and the like: not one truth value
        return False


def _hearing() -> ForeignEdits | None:
    """The listener of this thread that started last."""
    for listener in reversed(_active):
        if listener.hears():
            return listener
    return None


def _install() -> None:
    for owner, name, make in (
        (torch.fx.Graph, "__init__", _graph_init),
        (torch.fx.Graph, "__deepcopy__", _graph_copy),
        (torch.fx.Graph, "create_node", _create),
        (torch.fx.Graph, "node_copy", _node_copy),
        (torch.fx.Graph, "erase_node", _erase),
        (torch.fx.Node, "__setattr__", _set),
        (torch.fx.Node, "insert_arg", _args_edit),
        (torch.fx.Node, "replace_input_with", _args_edit),
        (torch.fx.Node, "prepend", _move),
        (torch.fx.Node, "append", _move),
        (torch.fx.Node, "replace_all_uses_with", _reroute),
        (torch.fx.GraphModule, "__init__", _module_init),
    ):
        original = owner.__dict__[name]
        _originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))


def _uninstall() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _graph_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        listener = _hearing()
        original(self, *args, **kwargs)
        if listener is not None:
            listener.recorder.watched[self] = Watched(self)

    return __init__


def _graph_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def __deepcopy__(self: Any, memo: Any = None) -> Any:
        listener = _hearing()
        if listener is None:
            return original(self, memo)
        with listener.inside():
            new = original(self, memo)
        for node, old in zip(new.nodes, self.nodes, strict=False):
            foreign_ancestor(node, old)
        first = [born_of(node) for node in new.nodes]
        listener.recorder.watched[new] = Watched(new, first=first, how="copy", origin=self)
        return new

    return __deepcopy__


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _hearing()
        if listener is None:
            return original(self, *args, **kwargs)
        with listener.inside():
            node = original(self, *args, **kwargs)
        listener.tell("create", node, None, {"prev": node._prev})
        return node

    return create_node


def _node_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def node_copy(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        new = original(self, node, *args, **kwargs)
        if _hearing() is not None:
            foreign_ancestor(new, node)
        return new

    return node_copy


def _erase(original: Callable[..., Any]) -> Callable[..., Any]:
    def erase_node(self: Any, to_erase: Any) -> None:
        listener = _hearing()
        if listener is None or to_erase._erased:
            original(self, to_erase)
            return
        before = {"prev": to_erase._prev, "args": to_erase.args, "kwargs": to_erase.kwargs}
        with listener.inside():
            original(self, to_erase)
        listener.tell("erase", to_erase, before, None)

    return erase_node


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        kind = FIELDS.get(name)
        listener = _hearing() if kind is not None else None
        if listener is None or kind is None or not hasattr(self, "_input_nodes"):
            original(self, name, value)
            return
        fields = [one for one, its_kind in FIELDS.items() if its_kind == kind]
        before = {one: getattr(self, one, None) for one in fields}
        with listener.inside():
            original(self, name, value)
        listener.tell(kind, self, before, {one: getattr(self, one, None) for one in fields})

    return __setattr__


def _args_edit(original: Callable[..., Any]) -> Callable[..., Any]:
    def edit(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _hearing()
        if listener is None:
            return original(self, *args, **kwargs)
        before = {"args": self.args, "kwargs": self.kwargs}
        with listener.inside():
            result = original(self, *args, **kwargs)
        listener.tell("args", self, before, {"args": self.args, "kwargs": self.kwargs})
        return result

    return edit


def _move(original: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: Any, x: Any) -> None:
        listener = _hearing()
        if listener is None or x._erased:
            original(self, x)
            return
        before = x._prev
        with listener.inside():
            original(self, x)
        if x._prev is not before:
            listener.tell("move", x, {"prev": before}, {"prev": x._prev})

    return move


def _reroute(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace_all_uses_with(self: Any, replace_with: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _hearing()
        if listener is None:
            return original(self, replace_with, *args, **kwargs)
        before = {user: (user.args, user.kwargs) for user in self.users}
        with listener.inside():
            changed = original(self, replace_with, *args, **kwargs)
        foreign_ancestor(replace_with, self)
        users = [(user, *before[user]) for user in changed if user in before]
        listener.tell("reroute", self, {"users": users}, {"to": replace_with, "users": changed})
        return changed

    return replace_all_uses_with


def _module_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        listener = _hearing()
        if listener is not None and self.graph in listener.recorder.watched:
            listener.recorder.adopt(self)

    return __init__
