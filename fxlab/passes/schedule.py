"""When should each operation run?

Section 6.2.3 of the paper: a blocking call to a parameter server becomes a call that returns at
once and a separate wait; the call moves as early as its inputs allow and the wait as late as its
readers allow, so that other work runs meanwhile. The paper reports up to 9 % more queries a second.
`balanced_stages` answers the neighbouring question of pipelining: where to cut a program so that
several processes have equal work.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import functools
import heapq
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fxlab.core.errors import RewriteError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect, has_side_effect
from fxlab.passes.base import REGION_BORDERS, as_pass, copy_sharing_tensors, regions, report
from fxlab.passes.cost import cost
from fxlab.passes.effects import order_constraints
from fxlab.passes.shape_prop import shape_prop
from fxlab.passes.split import value_bytes

__all__ = ["balanced_stages", "hoist_async", "start_call", "wait_for"]

_lock = threading.Lock()
_workers: dict[tuple[int, ...], _Workers] = {}
_here = threading.local()  # `depth`: of how many calls in threads this thread is one inside another


class _Workers(ThreadPoolExecutor):
    """Threads that wait for slow calls."""

    def __init__(self, count: int) -> None:
        super().__init__(count, thread_name_prefix="fxlab-async")
        self.free = count

    def start(self, call: Callable[[], Any]) -> Future:
        """Run ``call`` in a thread; return once it has begun, or queued if all are at work.

        Whoever went on at once would keep the interpreter lock, and the call would begin late.
        """
        begun = threading.Event()

        def run() -> Any:
            begun.set()
            return call()

        with _lock:
            self.free -= 1
            at_once = self.free >= 0
        future = self.submit(run)
        future.add_done_callback(self._ended)
        if at_once:
            begun.wait()
        return future

    def _ended(self, future: Future) -> None:
        with _lock:
            self.free += 1


def _pool(workers: int, depth: int) -> _Workers:
    """The threads that wait for slow calls; a forked child gets its own.

    So do calls that such a call starts: waiting for a thread of one's own would never end.
    """
    with _lock:
        key = (os.getpid(), workers, depth)
        if key not in _workers:
            _workers[key] = _Workers(workers)
        return _workers[key]


@has_side_effect
def start_call(function: Callable[..., Any], workers: int, *args: Any, **kwargs: Any) -> Future:
    """Start ``function(*args, **kwargs)`` in a thread and return when it has begun.

    The call sees the gradient mode, autocast, default device and context variables of its caller.
    With one worker, calls run in the order in which they were started.

    Args:
        function: what to call; it should let go of the interpreter lock while it waits (a remote
            call does).
        workers: how many such calls may run at one time.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Example:
        >>> wait_for(start_call(max, 1, 3, 4))
        4
    """
    modes: list[Callable[[], Any]] = [
        functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(functools.partial(torch.autocast, kind, dtype))
    device = torch.get_default_device()
    if device != torch.device("cpu"):
        modes.append(lambda: device)
    depth = getattr(_here, "depth", 0)

    def call() -> Any:
        _here.depth = depth + 1
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return function(*args, **kwargs)

    return _pool(workers, depth).start(functools.partial(contextvars.copy_context().run, call))


@has_side_effect
def wait_for(handle: Future) -> Any:
    """Return the result of a call that `start_call` started; raise what it raised."""
    return handle.result()


@as_pass
def hoist_async(
    gm: GraphModule,
    function: Callable[..., Any] | str,
    *,
    start: Callable[..., Any] | None = None,
    wait: Callable[[Any], Any] | None = None,
    workers: int = 1,
) -> GraphModule:
    """Edit in place: each blocking call of `function` becomes a start, early, and a wait, late.

    The start moves, with the pure nodes that it needs, before everything else; the wait moves
    behind all work that does not read its result. Nothing crosses a border of a region, an effect
    keeps its place among effects, and a write to memory that the call reads stays on its side. A
    call that raises does so at its wait: what stands before the wait now has happened by then.

    Args:
        gm: the program.
        function: the target of the blocking calls, or the path of a submodule. It must not write
            to its arguments, nor draw from torch's global random numbers.
        start: ``start(*args, **kwargs) -> handle`` that returns at once; by default the call runs
            in a thread (`start_call`).
        wait: ``wait(handle) -> result``; by default `wait_for`.
        workers: how many calls may run at one time (with the default start).

    Returns:
        `gm`. Its report says for each call where start and wait stand now.

    Raises:
        RewriteError: the program does not call `function`, or only one of start and wait is given.

    Example:
        >>> import fxlab, torch
        >>> def fetch(key):
        ...     return key * 2
        >>> def program(x, key):
        ...     y = torch.relu(x)
        ...     with_keys = fetch(key)
        ...     return y.exp() + with_keys
        >>> with fxlab.wrapped(fetch):
        ...     gm = fxlab.symbolic_trace(program)
        >>> _ = hoist_async(gm, fetch)
        >>> [n.name for n in gm.graph.nodes]
        ['x', 'key', 'fetch_start', 'relu', 'exp', 'fetch_wait', 'add', 'output']
    """
    if (start is None) != (wait is None):
        raise RewriteError("give both start and wait, or neither")
    graph = gm.graph
    calls = [
        n for n in graph.nodes if n.op in ("call_function", "call_module") and n.target == function
    ]
    if not calls:
        name = getattr(function, "__name__", function)
        raise RewriteError(
            f"the program does not call {name}",
            hint="trace with fxlab.wrap or autowrap_functions, so that the call stays one node",
        )
    hard, soft = order_constraints(gm)
    blocking = set(calls)

    def counts(one: Node, other: Node) -> bool:
        """`one` promises to write nothing; unknown code may write what it reads."""
        if one not in blocking:
            return True
        return other not in blocking and effect(other, gm, impure_random=False) is not None

    order = [*hard, *((a, b) for a, b in soft if counts(a, b) and counts(b, a))]
    if workers > 1:  # calls may overlap, so their own order is given up
        order = [(a, b) for a, b in order if not (a in blocking and b in blocking)]
    held = _held_back(order, blocking, gm)
    starts: dict[Node, Node] = {}
    waits: dict[Node, Node] = {}
    for call in calls:
        starts[call], waits[call] = _replace(graph, call, start, wait, workers)
    after = {call: waits[call] for call in calls}
    pairs = [
        (starts[a] if b in blocking and a in blocking else after.get(a, a), starts.get(b, b))
        for a, b in order
    ]
    moved = _reorder(gm, set(starts.values()), set(waits.values()), pairs)
    changed, kept = [], held
    position = {node: index for index, node in enumerate(graph.nodes)}
    for call in calls:
        between = position[waits[call]] - position[starts[call]] - 1
        text = f"{call.name}: {between} nodes run between {starts[call].name} and its wait"
        (changed if between else kept).append(text)
    gm.graph.lint()
    report(gm, "hoist_async", changed, kept, moved=moved)
    return gm


def _held_back(
    order: Sequence[tuple[Node, Node]], blocking: set[Node], gm: GraphModule
) -> list[str]:
    """Say what a start or a wait may not pass, and why."""
    held = []
    for before, after in order:
        if after in blocking and before not in blocking:
            held.append(f"{after.name}: its start stays behind {before.name}: {effect(before, gm)}")
        elif before in blocking and after not in blocking:
            held.append(f"{before.name}: its wait stays before {after.name}: {effect(after, gm)}")
    return held


def _replace(
    graph: Any,
    call: Node,
    start: Callable[..., Any] | None,
    wait: Callable[[Any], Any] | None,
    workers: int,
) -> tuple[Node, Node]:
    """Put a start and a wait where the call stands, and erase the call."""
    with graph.inserting_before(call):
        target: Any = call.target
        if call.op == "call_module":
            target = graph.get_attr(call.target)
        head = () if start is not None and call.op == "call_function" else (target,)
        if start is None:
            head = (target, workers)
        started = graph.create_node(
            "call_function",
            start or start_call,
            (*head, *call.args),
            dict(call.kwargs),
            name=f"{call.name}_start",
        )
        waited = graph.create_node(
            "call_function", wait or wait_for, (started,), {}, name=f"{call.name}_wait"
        )
    for node in (started, waited):
        for key in ("source", "nn_module_stack"):
            if key in call.meta:
                node.meta[key] = call.meta[key]
    call.replace_all_uses_with(waited)
    graph.erase_node(call)
    return started, waited


def _reorder(
    gm: GraphModule, starts: set[Node], waits: set[Node], pairs: Sequence[tuple[Node, Node]]
) -> int:
    """Move nodes to a topological order: starts and what they need first, waits last.

    Returns:
        How many nodes were moved; no set of moves with fewer gives this order.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    region = regions(gm)
    needed = set(starts)  # starts, and what leads to them without a wait between
    for node in reversed(nodes):
        if node in needed and node not in waits:
            needed.update(v for v in node.all_input_nodes if v not in waits)
    followers: dict[Node, list[Node]] = {}
    waiting = dict.fromkeys(nodes, 0)
    edges = [(v, n) for n in nodes for v in n.all_input_nodes if v in waiting]
    for before, after in (*edges, *pairs):
        if before in waiting and after in waiting and before is not after:
            followers.setdefault(before, []).append(after)
            waiting[after] += 1
    place = {node: index for index, node in enumerate(nodes)}

    def key(node: Node) -> tuple[int, int, int]:
        if node.target in REGION_BORDERS and node.op == "call_function":
            return region[node], -1, place[node]
        rank = 0 if node in needed else 2 if node in waits else 1
        return region[node], rank, place[node]

    ready = [key(node) for node in nodes if waiting[node] == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[2]]
        order.append(node)
        for follower in followers.get(node, ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, key(follower))
    return _move(gm, order, place)


def _move(gm: GraphModule, order: Sequence[Node], place: dict[Node, int]) -> int:
    """Bring the nodes into `order`, leaving a longest increasing subsequence where it is."""
    tails: list[int] = []
    last: list[Node] = []
    before: dict[Node, Node | None] = {}
    for node in order:
        where = bisect.bisect_left(tails, place[node])
        before[node] = last[where - 1] if where else None
        tails[where : where + 1] = [place[node]]
        last[where : where + 1] = [node]
    kept = set()
    node = last[-1] if last else None
    while node is not None:
        kept.add(node)
        node = before[node]
    arguments = [n for n in gm.graph.nodes if n.op == "placeholder"]
    previous = arguments[-1] if arguments else None
    for node in order:
        if node not in kept:
            if previous is None:
                next(iter(gm.graph.nodes)).prepend(node)
            else:
                previous.append(node)
        previous = node
    return len(order) - len(kept)


def balanced_stages(gm: GraphModule, inputs: Sequence[Any], count: int) -> dict[Node, int]:
    """Cut a program in node order into stages whose work is as equal as can be.

    The work of a node is its floating-point operations plus its bytes moved, by `cost`. Among cuts
    that are as good within 3 %, the ones with the fewest bytes crossing are taken.

    Args:
        gm: the program; not edited.
        inputs: example inputs.
        count: number of stages.

    Returns:
        Computing node -> stage, from 0.

    Raises:
        RewriteError: there are fewer computing nodes than stages.

    Example:
        >>> import fxlab, torch
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        >>> gm = fxlab.symbolic_trace(torch.nn.Sequential(*layers))
        >>> list(balanced_stages(gm, [torch.ones(8, 64)], 2).values())
        [0, 0, 1, 1]
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    if not 1 <= count <= len(nodes):
        raise RewriteError(
            f"{len(nodes)} computing nodes cannot be cut into {count} stages",
            expected=f"a number of stages from 1 to {len(nodes)}",
        )
    copy = copy_sharing_tensors(gm)  # neither shapes nor a report are left on `gm`
    shape_prop(copy, *inputs)
    sizes = {node.name: value_bytes(node) or 1 for node in copy.graph.nodes}
    rows = {row.name: row for row in cost(copy, *inputs).rows}
    work = [
        rows[n.name].flops + rows[n.name].bytes_moved + 1 if n.name in rows else 1 for n in nodes
    ]
    total = [0]
    for amount in work:
        total.append(total[-1] + amount)
    crossing = _crossing_bytes(nodes, sizes)
    cuts = [0]
    for stage in range(1, count):
        goal = total[-1] * stage / count
        low, high = cuts[-1] + 1, len(nodes) - (count - stage)
        best = min(max(bisect.bisect_left(total, goal), low), high)
        best = min((best, max(best - 1, low)), key=lambda c: abs(total[c] - goal))
        slack = abs(total[best] - goal) + 0.03 * total[-1] / count
        near = range(
            max(low, bisect.bisect_left(total, goal - slack)),
            min(high, bisect.bisect_right(total, goal + slack) - 1) + 1,
        )
        cuts.append(min(near, key=lambda c: (crossing[c], abs(total[c] - goal)), default=best))
    return {node: bisect.bisect_right(cuts, index) - 1 for index, node in enumerate(nodes)}


def _crossing_bytes(nodes: Sequence[Node], sizes: dict[str, int]) -> list[int]:
    """Bytes of the values alive between node i - 1 and node i, for each i."""
    place = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        last = max((place.get(user, len(nodes)) for user in node.users), default=index)
        size = sizes[node.name]
        change[index + 1] += size
        change[last + 1] -= size
    crossing, alive = [], 0
    for difference in change[: len(nodes) + 1]:
        alive += difference
        crossing.append(alive)
    return crossing
