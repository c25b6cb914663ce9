"""How much memory does a program hold, and would another order hold less (section 6.3)?

A value lives from the node that makes it to the last node that reads it: its live range. These are
the lanes of the explorer, weighted with bytes. The sum over the ranges that cross a node is what
the run holds there, and the largest sum is what a device must have. Nothing in a graph says that
its nodes must run in the order in which they were captured, so a pass may look for a better one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.passes.base import REGION_BORDERS, as_pass, regions, report, undisturbed
from fxlab.passes.effects import order_constraints
from fxlab.passes.schedule import _move
from fxlab.passes.shape_prop import ShapeError, need_graph, quiet_fakes

__all__ = ["LiveRange", "live_ranges", "lower_peak", "peak_of"]


@dataclass(frozen=True)
class LiveRange:
    """One piece of memory: the node that makes it, the last that reads it, and its bytes.

    A view has no range of its own: whoever reads it reads the memory that it looks at. What the
    caller owns (inputs, parameters, buffers) has none either.

    Attributes:
        first: The node that makes it.
        last: The last node that reads it.
        bytes: Its size.
    """

    first: Node
    last: Node
    bytes: int


@dataclass
class _Memory:
    """Which pieces of memory each node makes and which it touches; pieces are numbers."""

    made: dict[Node, list[int]] = field(default_factory=dict)
    touched: dict[Node, set[int]] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)


def live_ranges(gm: GraphModule, *inputs: Any) -> list[LiveRange]:
    """Return the live range of each piece of memory that one call allocates (``gm`` is not edited).

    Args:
        gm: The program. It is run once on fake tensors, so nothing is computed.
        *inputs: Example inputs, for their shapes and dtypes.

    Raises:
        ShapeError: A node does not run on these inputs, or asks for the data of a tensor.

    Example:
        >>> import fxlab
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1).t())
        >>> [(r.first.name, r.last.name, r.bytes) for r in live_ranges(gm, torch.ones(2, 3))]
        [('add', 'relu', 24), ('relu', 'output', 24)]
    """
    return _ranges(_trace_memory(gm, inputs), gm.graph.nodes)


def peak_of(ranges: Iterable[LiveRange], order: Sequence[Node]) -> int:
    """Return the most bytes alive while one node runs: its inputs and its result count both.

    Args:
        ranges: What `live_ranges` returned.
        order: All nodes of the graph, in the order in which they run.

    Example:
        >>> import fxlab
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1).t())
        >>> peak_of(live_ranges(gm, torch.ones(2, 3)), list(gm.graph.nodes))
        48
    """
    place = {node: index for index, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for one in ranges:
        change[place[one.first]] += one.bytes
        change[place[one.last] + 1] -= one.bytes
    alive = peak = 0
    for difference in change:
        alive += difference
        peak = max(peak, alive)
    return peak


@as_pass
def lower_peak(gm: GraphModule, *inputs: Any) -> GraphModule:
    """Edit in place: move nodes so that the run holds less memory at its peak; return ``gm``.

    A greedy list schedule: of the nodes that may run next, take the one after which the least is
    alive. That is not always the best order (finding that one is NP-hard), so when the peak does
    not come out lower, nothing is moved. Effects keep their order, a node stays on its side of a
    write to memory that it reads, and nothing crosses a border of a region.

    The report has ``peak_bytes_before`` and ``peak_bytes_after``.

    Args:
        gm: The program.
        *inputs: Example inputs, for their shapes and dtypes.

    Raises:
        ShapeError: A node does not run on these inputs.

    Example:
        >>> import fxlab
        >>> def program(x):
        ...     a, b = x.repeat(8), x.repeat(8) + 1
        ...     return a.sum() + b.sum()
        >>> gm = lower_peak(fxlab.symbolic_trace(program), torch.ones(4))
        >>> [node.name for node in gm.graph.nodes if node.op == "call_method"]
        ['repeat', 'sum_1', 'repeat_1', 'sum_2']
    """
    memory = _trace_memory(gm, inputs)
    nodes = list(gm.graph.nodes)
    body = [n for n in nodes if n.op not in ("placeholder", "output")]
    order = _with_attributes(_greedy(gm, body, memory))
    head = [n for n in nodes if n.op == "placeholder"]
    new = [*head, *order, *(n for n in nodes if n.op == "output")]
    before, after = (peak_of(_ranges(memory, which), which) for which in (nodes, new))
    changed, kept = [], []
    if after < before:
        moved = _move(gm, order, {node: index for index, node in enumerate(body)})
        changed.append(f"moved {moved} nodes: the peak falls from {before} to {after} bytes")
    else:
        kept.append(f"no better order found: the peak stays at {before} bytes")
        after = before
    gm.graph.lint()
    report(gm, "lower_peak", changed, kept, peak_bytes_before=before, peak_bytes_after=after)
    return gm


def _trace_memory(gm: GraphModule, inputs: Sequence[Any]) -> _Memory:
    from torch._subclasses.fake_tensor import FakeTensorMode

    need_graph(gm)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    walk = _MemoryWalk(gm, fake)
    with undisturbed(gm, inputs) as given, torch.no_grad(), fake, quiet_fakes():
        walk.run(*pytree.tree_map_only(torch.Tensor, fake.from_tensor, given))
    return walk.memory


class _MemoryWalk(Interpreter):
    """Run each node on fake tensors and note whose storage its result has."""

    def __init__(self, gm: GraphModule, fake: Any) -> None:
        super().__init__(gm)
        self.fake = fake
        self.memory = _Memory()
        self.number: dict[int, int] = {}  # storage -> number of the piece; -1 is the caller's
        self.pieces: dict[Node, set[int]] = {}
        self.kept: list[Any] = []  # a storage that is freed could be taken for a later one

    def run_node(self, n: Node) -> Any:
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
        )

        try:
            result = super().run_node(n)
        except Exception as error:
            asks = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
            why = "it asks for the data of a tensor, and here are shapes only" if asks else error
            raise ShapeError(f"{n.name} does not run on these inputs: {why}", node=n) from error
        if n.op == "get_attr":
            result = pytree.tree_map_only(torch.Tensor, self.fake.from_tensor, result)
        self.kept.append(result)
        memory, mine = self.memory, set()
        memory.made[n] = []
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.number:
                theirs = n.op in ("placeholder", "get_attr")
                self.number[storage._cdata] = -1 if theirs else len(memory.bytes)
                if not theirs:
                    memory.made[n].append(len(memory.bytes))
                    memory.bytes.append(storage.nbytes())
            mine.add(self.number[storage._cdata])
        self.pieces[n] = mine - {-1}
        reads = (self.pieces[i] for i in n.all_input_nodes)
        memory.touched[n] = set().union(*reads)
        return result


def _greedy(gm: GraphModule, body: Sequence[Node], memory: _Memory) -> list[Node]:
    """Order the nodes but get_attr: always the one after which the least is alive."""
    nodes = [n for n in body if n.op != "get_attr"]
    place = {node: index for index, node in enumerate(nodes)}
    region = regions(gm)
    followers: dict[Node, list[Node]] = {}
    waiting = dict.fromkeys(nodes, 0)
    hard, soft = order_constraints(gm)
    for before, after in (*((i, n) for n in nodes for i in n.all_input_nodes), *hard, *soft):
        if before in waiting and after in waiting:
            followers.setdefault(before, []).append(after)
            waiting[after] += 1
    readers: dict[int, set[Node]] = {}  # of each piece: who has yet to run
    for node in gm.graph.nodes:
        for piece in memory.touched[node]:
            readers.setdefault(piece, set()).add(node)

    def key(node: Node) -> tuple[int, bool, int, int]:
        touched = memory.touched[node]
        freed = sum(memory.bytes[p] for p in touched if len(readers[p]) == 1)
        made = sum(memory.bytes[p] for p in memory.made[node] if p in readers)
        # A border of a region stands before everything in it.
        border = node.op == "call_function" and node.target in REGION_BORDERS
        return region[node], not border, made - freed, place[node]

    ready = [key(node) for node in nodes if waiting[node] == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    done: set[Node] = set()
    while ready:
        node = nodes[heapq.heappop(ready)[3]]
        if node in done:  # it stood in the heap twice, with its price before and after
            continue
        order.append(node)
        done.add(node)
        cheaper = []
        for piece in memory.touched[node]:
            readers[piece].discard(node)
            if len(readers[piece]) == 1:
                cheaper += [n for n in readers[piece] if waiting.get(n) == 0]
        for follower in followers.get(node, ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                cheaper.append(follower)
        for other in cheaper:
            heapq.heappush(ready, key(other))
    return order


def _with_attributes(order: Sequence[Node]) -> list[Node]:
    """Put each get_attr before its first reader; one that nobody reads goes to the front."""
    seen: set[Node] = set()
    full: list[Node] = []
    for node in order:
        reads = [i for i in node.all_input_nodes if i.op == "get_attr" and i not in seen]
        seen.update(reads)
        full += [*reads, node]
    if not order:
        return full
    attributes = order[0].graph.find_nodes(op="get_attr")
    return [*(n for n in attributes if n not in seen), *full]


def _ranges(memory: _Memory, order: Iterable[Node]) -> list[LiveRange]:
    """Return the ranges that the pieces have when the nodes run in this order."""
    last: dict[int, Node] = {}
    for node in order:
        for piece in (*memory.made[node], *memory.touched[node]):
            last[piece] = node
    return [
        LiveRange(node, last[piece], memory.bytes[piece])
        for node, pieces in memory.made.items()
        for piece in pieces
    ]
