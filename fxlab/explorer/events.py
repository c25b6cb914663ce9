"""What does a recorder note while a pass runs?

Plain records of live objects: one `Event` per edit, one `Boundary` per end of a pass, one `Span`
per pass and one `Watched` per graph. They are kept cheap, since a pass waits for them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import parameter as torch_parameter

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node


class Event(NamedTuple):
    """One edit as it was heard; all fields are live objects."""

    kind: str
    graph: Any
    node: Any
    before: Any
    after: Any
    where: tuple[tuple[str, int, str], ...]
    born: tuple[Any, ...] | None = None
    maker: str | None = None


LAZY = (torch_parameter.UninitializedParameter, torch_parameter.UninitializedBuffer)
new_event = functools.partial(tuple.__new__, Event)  # skips the named arguments: half the time


@dataclass
class Boundary:
    """What held at one end of a pass: the node count by opcode, known shapes, the verdict."""

    graph: Any
    cost: dict[str, Any] | None = None
    shapes: list[tuple[Any, Any]] = field(default_factory=list)
    columns: dict[str, list[tuple[Any, float]]] = field(default_factory=dict)


@dataclass
class Span:
    """One pass while it is recorded; `first` and `last` count events."""

    name: str
    kind: str
    first: int
    start: Boundary
    function: Any = None
    last: int | None = None
    end: Boundary | None = None
    result: Any = None
    verdict: dict[str, Any] | None = None
    version: int | None = None
    unmatched: list[str] = field(default_factory=list)
    report: Any = None
    columns: dict[str, list[tuple[Any, float]]] = field(default_factory=dict)


@dataclass
class Watched:
    """A graph with a history: its nodes as the recording began, who owns it, how it was made."""

    graph: Any
    path: str = ""
    module: Any = None
    first: list[tuple[Any, ...]] = field(default_factory=list)
    how: str | None = None
    modules: dict[str, str] = field(default_factory=dict)
    names_at: int = 0
    origin: Any = None
    asked: bool = False
    original: bool = False


def born_now(node: Any) -> tuple[Any, ...]:
    """A node's fields as it is created: (node, name, op, target, args, kwargs, type)."""
    return (
        node,
        node._name,
        node._op,
        node._target,
        node._args,
        node._kwargs,
        node._type,
    )


def born_of(node: Any) -> tuple[Any, ...]:
    """A node's fields as they are now, of either kit: `born_now` and the value that is known."""
    if isinstance(node, Node):
        return (*born_now(node), known_value(node))
    fields = (node.name, node.op, node.target, node.args, node.kwargs, node.type)
    return (node, *fields, known_value(node))


def snapshot(graph: Any) -> list[tuple[Any, ...]]:
    """`born_of` for every node of a graph, in order; in one go, since recordings begin with it."""
    if not isinstance(graph, Graph):
        return [born_of(node) for node in graph.nodes]
    return [
        (
            n,
            n._name,
            n._op,
            n._target,
            n._args,
            n._kwargs,
            n._type,
            known_value(n) if n.meta else None,
        )
        for n in graph.nodes
    ]


def known_value(node: Any) -> Any:
    """What an analysis has left on a node about its value: it has shape and dtype."""
    meta = node.meta
    if not meta:
        return None
    return meta.get("tensor_meta", meta.get("val", meta.get("example_value")))


def measured_cost(
    gm: Any, inputs: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, list[tuple[Any, float]]]]:
    """FLOPs and bytes of one call, in sum and by node; nothing where they can't be told."""
    from fxlab.passes import cost

    if not isinstance(gm, GraphModule):
        return {}, {}
    from fxlab.explorer.sameness import private_copy

    try:
        result = cost(private_copy(gm, None), *inputs)
    except Exception:  # an analysis that does not know the program is no reason to stop a pass
        return {}, {}
    nodes = {node.name: node for node in gm.graph.nodes}
    columns: dict[str, list[tuple[Any, float]]] = {"flops": [], "bytes": [], "live_bytes": []}
    for row in result.rows:
        if row.name in nodes:
            columns["flops"].append((nodes[row.name], row.flops))
            columns["bytes"].append((nodes[row.name], row.bytes_moved))
            columns["live_bytes"].append((nodes[row.name], row.live_bytes))
    moved = result.bytes_read + result.bytes_written
    return {"flops": result.flops, "bytes": moved}, columns


def measured_seconds(gm: Any, inputs: Sequence[Any], repeats: int) -> float | None:
    """The median seconds of so many runs of a copy; None for 0 runs, or where it can't run."""
    if repeats < 1:
        return None
    from fxlab.explorer.sameness import private_copy

    tensors = (*gm.parameters(), *gm.buffers())
    devices = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
    times = []
    try:
        copy = private_copy(gm, None)
        with torch.random.fork_rng(devices), torch.no_grad():
            for _ in range(repeats + 1):  # the first warms up
                start = time.perf_counter()
                copy(*inputs)
                for device in devices:
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
    except Exception:  # as in measured_cost
        return None
    return sorted(times[1:])[repeats // 2]


def is_lazy(parameter: Any) -> bool:
    """Whether a parameter has no shape yet."""
    return isinstance(parameter, LAZY)
