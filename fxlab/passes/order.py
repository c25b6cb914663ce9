"""In which order can parts be called, and in which ``with`` block does each node stand?

Two things that everybody who cuts a program needs (sections 6.2.3 and 6.4 of the paper): a
topological order that changes as little as possible and names a cycle when there is one, and the
regions (no_grad, autocast, ...) that a node must not be taken out of.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fxlab.core.errors import RewriteError
from fxlab.core.graph import Graph
from fxlab.core.node import Node
from fxlab.passes.base import REGION_BORDERS

__all__ = ["RegionWriter", "Regions", "topological_order", "unit_name"]


class Regions:
    """Which regions (``with`` blocks) are open at each node.

    Borders belong to no part: whoever copies nodes into a graph opens and closes regions there as
    the nodes need them, so a part never runs outside the blocks that its nodes stood in.

    Attributes:
        at: node -> the borders that opened the regions around it, outermost first.
        setters: raw switches of the grad mode, which hold until the next one.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.borders = {n for n in nodes if n.op == "call_function" and n.target in REGION_BORDERS}
        self.exit_of: dict[Node, Node] = {}
        self.at: dict[Node, tuple[Node, ...]] = {}
        self.setters = [n for n in self.borders if n.target is torch._C._set_grad_enabled]
        if not self.borders:
            return
        stack: tuple[Node, ...] = ()
        for node in nodes:
            if node not in self.borders:
                if stack:
                    self.at[node] = stack
            elif node in self.setters:
                stack = (*(n for n in stack if n not in self.setters), node)
            elif node.args and node.args[0] in stack:
                self.exit_of[node.args[0]] = node
                stack = tuple(n for n in stack if n is not node.args[0])
            else:
                stack = (*stack, node)


class RegionWriter:
    """Copies nodes into one graph, opening and closing regions as they need them."""

    def __init__(self, graph: Graph, regions: Regions, env: dict[Node, Node]) -> None:
        self.graph, self.regions, self.env = graph, regions, env
        self._opened: list[tuple[Node, Node]] = []

    def copy(self, node: Node) -> Node:
        """Copy one node, inside the regions that it stood in."""
        wanted, opened = self.regions.at.get(node, ()), self._opened
        same = 0
        while same < min(len(wanted), len(opened)) and opened[same][0] is wanted[same]:
            same += 1
        self.close(same)
        for opener in wanted[same:]:
            opened.append((opener, self.graph.node_copy(opener, self.env.__getitem__)))
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return self.env[node]

    def close(self, count: int = 0) -> None:
        """Close all open regions but the outermost `count`."""
        while len(self._opened) > count:
            opener, copy = self._opened.pop()
            if opener in self.regions.exit_of:
                self.env[opener] = copy
                self.graph.node_copy(self.regions.exit_of[opener], self.env.__getitem__)


def topological_order(
    units: Sequence[Any], edges: dict[Any, dict[Any, tuple[Node, Node]]]
) -> list[Any]:
    """Order units along edges, otherwise as given; RewriteError names a cycle."""
    position = {unit: index for index, unit in enumerate(units)}
    waiting = dict.fromkeys(units, 0)
    for followers in edges.values():
        for follower in followers:
            waiting[follower] += 1
    ready = [position[unit] for unit in units if waiting[unit] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        unit = units[heapq.heappop(ready)]
        order.append(unit)
        for follower in edges.get(unit, ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, position[follower])
    if len(order) < len(units):
        stuck = {unit for unit in units if waiting[unit] > 0}
        steps = _cycle(stuck, edges)
        text = "; ".join(
            f"{unit_name(a)} gives {edges[a][b][0].name} to {edges[a][b][1].name} in {unit_name(b)}"
            for a, b in steps
        )
        reader = edges[steps[0][0]][steps[0][1]][1]
        raise RewriteError(
            f"cycle exists between partitions! {text}",
            node=reader,
            where=reader.meta.get("source"),  # the model's line; the split itself is not at fault
            expected="parts that can be called one after the other",
            hint="give the nodes between two parts of the cycle the identifier of one of them",
        )
    return order


def unit_name(unit: Any) -> str:
    """Return what to call a part or a node in a message."""
    return getattr(unit, "submod_name", None) or unit.name


def _cycle(stuck: set[Any], edges: dict[Any, dict[Any, Any]]) -> list[tuple[Any, Any]]:
    """Walk backwards inside `stuck` until a unit repeats; every stuck unit has a stuck input."""
    before: dict[Any, Any] = {}
    for unit in stuck:
        for follower in edges.get(unit, ()):
            if follower in stuck:
                before.setdefault(follower, unit)
    unit = next(iter(before))
    seen: dict[Any, int] = {}
    path = []
    while unit not in seen:
        seen[unit] = len(path)
        path.append(unit)
        unit = before[unit]
    path = [*path[seen[unit] :], unit]
    path.reverse()
    return list(itertools.pairwise(path))
