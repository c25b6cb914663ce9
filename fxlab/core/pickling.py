"""How does a Graph survive pickle? As itself: names, order, types and meta, as plain data.

A re-trace of generated source would lose all of that. Callables go by qualified name; what cannot
be pickled is named with its Node. The state carries a version, so that a later fxlab can say no.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import inspect
import pickle
import pkgutil
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .codegen import CodeGen
from .errors import CodegenError
from .graph import Graph, _Namespace
from .node import _LEAVES, Node, _map, qualified_name

VERSION = 1
_SAFE = (_LEAVES | {bytes, torch.Size}) - {Node, types.FunctionType, types.BuiltinFunctionType}
_names: dict[Any, _Ref] = {}


@dataclass(slots=True)
class _Ref:
    """Stands for the Node at an index, or for what can be imported by its dotted path."""

    to: int | str


def by_name(path: str) -> Any:
    """Return what a dotted path names, importing as much of it as needed.

    Raises:
        CodegenError: there is nothing of that name here.
    """
    try:
        return vars(builtins).get(path) or pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        raise CodegenError(
            f"a pickled graph calls {path}, which does not exist here", hint="import the module "
            "that defines it, or install the version that made the pickle") from None  # fmt: skip


def _named(value: Any) -> _Ref | None:
    """Return what stands for a callable or class, or None if no name leads to it."""
    try:
        if value not in _names:
            name = _Ref(qualified_name(value))
            if by_name(str(name.to)) is not value:
                return None
            _names[value] = name
        return _names[value]
    except Exception:  # no name, no import, no hash: pickle has to manage by itself
        return None


def why_not(value: Any) -> str:
    """Return why a value cannot be pickled, or "" if it can."""
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever its own pickling raises, it cannot come along
        return f"it cannot be pickled: {error}"
    return ""


def _encode(node: Node, index: dict[Node, int]) -> Any:
    """Return what a Node holds, with Nodes and callables replaced by their stand-ins."""

    def leaf(a: Any) -> Any:
        if isinstance(a, Node):
            return _Ref(index[a])
        if type(a) in _SAFE:
            return a
        name = _named(a) if callable(a) else None
        problem = why_not(a) if name is None else ""
        if problem:
            what = "the target" if a is node._target else "an argument or annotation"
            raise CodegenError(
                f"{what} of {node._name} is a {type(a).__name__}, {a!r:.80}: {problem}", node=node,
                hint="use a function or class that a module defines by name")  # fmt: skip
        return a if name is None else name

    return _map((node._target, node._args, node._kwargs, node._type), leaf)


def _decode(value: Any, nodes: list[Node]) -> Any:
    def leaf(a: Any) -> Any:
        if type(a) is not _Ref:
            return a
        return nodes[a.to] if isinstance(a.to, int) else by_name(a.to)

    return _map(value, leaf)


def _meta_state(node: Node, lost: dict[str, int]) -> dict[str, Any]:
    """Return the meta that can be pickled; count what cannot."""
    kept: dict[str, Any] = {}
    for key, value in node.meta.items():
        if key == "nn_module_stack":  # a class that may not be there where it is read: as text
            kept[key] = {k: (path, qualified_name(kind) if inspect.isclass(kind) else kind)
                         for k, (path, kind) in value.items()}  # fmt: skip
        elif key in ("source", "from", "made_by", "is_wrapped") or not why_not(value):
            kept[key] = value
        else:
            lost[key] = lost.get(key, 0) + 1
    return kept


def graph_to_state(graph: Graph) -> dict[str, Any]:
    """Return a Graph as plain data for pickle.

    Raises:
        CodegenError: naming the Node whose target or argument cannot be pickled.
    """
    index: dict[Node, int] = {node: i for i, node in enumerate(graph.nodes)}
    lost: dict[str, int] = {}
    rows = [(n._name, n._op, _encode(n, index), _meta_state(n, lost), dict(vars(n))) for n in index]
    if lost:
        text = ", ".join(f"meta[{key!r}] of {count} nodes" for key, count in lost.items())
        warnings.warn(f"left out of the pickle, since it cannot be pickled: {text}", stacklevel=3)
    return {
        "version": VERSION, "nodes": rows,
        "codegen": graph._codegen if type(graph._codegen) is not CodeGen else None,
        "constants": graph._constants, "names": graph._graph_namespace.known(),
    }  # fmt: skip


def graph_from_state(state: dict[str, Any]) -> Graph:
    """Return the Graph that `graph_to_state` described.

    Raises:
        CodegenError: it was made by a later fxlab, or names something that is not here.
    """
    if state["version"] != VERSION:
        raise CodegenError(
            f"this pickle of a graph has version {state['version']!r}; this fxlab reads version "
            f"{VERSION}", hint="make it again, or use the fxlab that made it")  # fmt: skip
    graph = Graph()
    nodes: list[Node] = []
    for name, op, held, node_meta, fields in state["nodes"]:
        node = Node(graph, name, op, *_decode(held, nodes))
        node.meta = node_meta
        node.__dict__.update(fields)
        graph._link(node, graph._root._prev)
        nodes.append(node)
    graph._codegen = state["codegen"] or graph._codegen
    graph._constants = state["constants"]
    graph._graph_namespace = _Namespace(*state["names"])
    return graph
