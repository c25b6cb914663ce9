"""How does a Graph survive pickle? As itself: names, order, types and meta, as plain data.

A re-trace of generated source would lose all of that. Callables go by qualified name; what cannot be
pickled is named with its Node. The state carries a version, so that a later fxlab can say no.
"""

from __future__ import annotations

import importlib
import pickle
import warnings
from typing import Any

import torch

from .errors import CodegenError
from .graph import Graph
from .node import Node, _map, qualified_name

VERSION = 1
_SAFE = frozenset((int, float, bool, str, complex, type(None), type(...), bytes, torch.dtype,
                   torch.device, torch.memory_format, torch.layout, torch.Size, torch.Tensor,
                   torch.nn.Parameter))  # fmt: skip


class _Ref:
    """Stands for the Node at an index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ref, (self.index,)


class _Name:
    """Stands for a callable or class that can be imported by its dotted path."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Name, (self.path,)


def by_name(path: str) -> Any:
    """Return what a dotted path names, importing as much of it as needed.

    Raises:
        CodegenError: there is nothing of that name here.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        try:
            for part in parts[cut:]:
                value = getattr(value, part)
        except AttributeError:
            continue
        return value
    builtin = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
    if path in builtin:
        return builtin[path]
    raise CodegenError(
        f"a pickled graph calls {path}, which does not exist here",
        hint="import the module that defines it, or install the version that made the pickle",
    )


_names: dict[Any, _Name | None] = {}


def _name_of(value: Any) -> _Name | None:
    try:
        return _names[value]
    except (KeyError, TypeError):
        pass
    name = None
    try:
        path = qualified_name(value)
        name = _Name(path) if by_name(path) is value else None
    except Exception:  # no name, no import: pickle has to manage by itself
        name = None
    if name is not None:
        _names[value] = name
    return name


def _encode(value: Any, index: dict[Node, int], node: Node, what: str) -> Any:
    """Return `value` with Nodes and callables replaced by their stand-ins."""

    def leaf(a: Any) -> Any:
        if isinstance(a, Node):
            return _Ref(index[a])
        if type(a) in _SAFE:
            return a
        if callable(a) or isinstance(a, type):
            name = _name_of(a)
            if name is not None:
                return name
        try:
            pickle.dumps(a)
        except Exception as error:
            raise CodegenError(
                f"{what} of {node._name} cannot be pickled: {type(a).__name__} {a!r:.80} ({error})",
                node=node, hint="use a function or class that a module defines by name",
            ) from None  # fmt: skip
        return a

    return leaf(value) if callable(value) or isinstance(value, Node) else _map(value, leaf)


def _decode(value: Any, nodes: list[Node]) -> Any:
    def leaf(a: Any) -> Any:
        if type(a) is _Ref:
            return nodes[a.index]
        return by_name(a.path) if type(a) is _Name else a

    return _map(value, leaf)


def _meta_state(node: Node, lost: dict[str, int]) -> dict[str, Any]:
    """Return the meta that can be pickled; count what cannot."""
    kept: dict[str, Any] = {}
    for key, value in node.meta.items():
        if key in ("source", "from", "made_by", "param_kind", "is_wrapped"):
            kept[key] = value
        elif key == "nn_module_stack":
            kept[key] = {k: (p, _name_of(t) or qualified_name(t) if isinstance(t, type) else t)
                         for k, (p, t) in value.items()}  # fmt: skip
        else:
            try:
                pickle.dumps(value)
                kept[key] = value
            except Exception:  # an analysis' private object; said below
                lost[key] = lost.get(key, 0) + 1
    return kept


def graph_to_state(graph: Graph) -> dict[str, Any]:
    """Return a Graph as plain data for pickle.

    Raises:
        CodegenError: naming the Node whose target or argument cannot be pickled.
    """
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    lost: dict[str, int] = {}
    rows = []
    for node in nodes:
        rows.append((
            node._name, node._op, _encode(node._target, index, node, "the target"),
            _encode(node._args, index, node, "an argument"),
            _encode(node._kwargs, index, node, "a keyword argument") if node._kwargs else {},
            _encode(node._type, index, node, "the annotation") if node._type is not None else None,
            _meta_state(node, lost), dict(node.__dict__),
        ))  # fmt: skip
    if lost:
        text = ", ".join(f"meta[{key!r}] of {count} nodes" for key, count in lost.items())
        warnings.warn(f"left out of the pickle, since it cannot be pickled: {text}", stacklevel=3)
    codegen = graph._codegen
    return {
        "version": VERSION,
        "nodes": rows,
        "codegen": codegen if type(codegen).__name__ != "CodeGen" else None,
        "tracer": _name_of(graph._tracer_cls) if graph._tracer_cls is not None else None,
        "constants": graph._constants,
        "co_fields": graph._co_fields,
        "names": (graph._graph_namespace._used_names, graph._graph_namespace._base_count),
    }


def graph_from_state(state: dict[str, Any]) -> Graph:
    """Return the Graph that `graph_to_state` described.

    Raises:
        CodegenError: it was made by a later fxlab, or names something that is not here.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CodegenError(
            f"this pickle of a graph has version {found!r}; this fxlab reads version {VERSION}",
            hint="make it again with this version of fxlab, or use the version that made it",
        )
    tracer = state["tracer"]
    graph = Graph(tracer_cls=by_name(tracer.path) if tracer is not None else None)
    nodes: list[Node] = []
    for name, op, target, args, kwargs, kind, meta, fields in state["nodes"]:
        target = by_name(target.path) if type(target) is _Name else target
        node = Node(graph, name, op, target, _decode(args, nodes),
                    _decode(kwargs, nodes) if kwargs else {}, _decode(kind, nodes))  # fmt: skip
        stack = meta.get("nn_module_stack")
        if stack:
            meta["nn_module_stack"] = {
                k: (p, by_name(t.path) if type(t) is _Name else t) for k, (p, t) in stack.items()
            }
        node.meta = meta
        if fields:
            node.__dict__.update(fields)
        graph._link(node, graph._root._prev)
        nodes.append(node)
    if state["codegen"] is not None:
        graph._codegen = state["codegen"]
    graph._constants = state["constants"]
    graph._co_fields = state["co_fields"]
    used, counts = state["names"]
    graph._graph_namespace._used_names, graph._graph_namespace._base_count = used, counts
    return graph
