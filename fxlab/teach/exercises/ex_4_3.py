"""4.3: does somebody see memory in a graph: (a) how much it needs, (b) which order needs less?

(a) is compared with the live ranges that the kit finds by running the program on fake tensors, (b)
with the order of the kit's ``lower_peak`` (paper, section 6.3). A new order must compute the same,
with effects: outputs, random numbers, what is written into inputs and state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, target_text
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.memory import live_ranges, lower_peak, peak_of
from fxlab.passes.shape_prop import shape_prop
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import edited, kind_of, same_program
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import fill, fresh_inputs, programs


def entry_a(answer: Any, gm: GraphModule, inputs: Any = ()) -> int:
    """Return the answer's peak of a program whose shapes are known.

    Raises:
        AnswerError: It returned no whole number.
    """
    shape_prop(gm, *inputs)
    peak = answer(gm)
    if isinstance(peak, bool) or not isinstance(peak, int):
        raise AnswerError("type", f"it returned {kind_of(peak)}: return a number of bytes, an int")
    return peak


def entry_b(answer: Any, gm: GraphModule, inputs: Any = ()) -> GraphModule:
    """Return the program with its nodes in the answer's order."""
    shape_prop(gm, *inputs)
    return edited(answer, gm)


def _peak(gm: GraphModule, inputs: Any) -> int:
    return peak_of(live_ranges(gm, *inputs), list(gm.graph.nodes))


def _judge_peak(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, inputs = args
    ranges = live_ranges(gm, *inputs)
    wanted = peak_of(ranges, list(gm.graph.nodes))
    if value == wanted:
        return None
    return Finding(
        f"{value} bytes, expected {wanted}{_slip(gm, inputs, value)}",
        expected="\n".join(f"{r.bytes} bytes from {r.first} to {r.last}" for r in ranges),
    )


def _slip(gm: GraphModule, inputs: Any, value: int) -> str:
    """Name the usual slip that gives this number, "" when it is none of them."""
    shape_prop(gm, *inputs)
    nodes = list(gm.graph.nodes)
    new = {r.first for r in live_ranges(gm, *inputs)}
    size = {n: n.meta["tensor_meta"].shape.numel() * n.meta["tensor_meta"].dtype.itemsize
            for n in nodes if hasattr(n.meta.get("tensor_meta"), "shape")}  # fmt: skip
    place = {n: k for k, n in enumerate(nodes)}

    def peak(counted: Any, last: Any, shift: int = 0) -> int:
        spans = [(place[n], max(last(n), place[n] + shift), size[n]) for n in nodes if counted(n)]
        alive = [sum(b for i, j, b in spans if i <= k <= j - shift) for k in range(len(nodes))]
        return max(alive, default=0)

    def end(n: Node) -> int:
        return max((through(u) for u in n.users), default=place[n])

    def through(u: Node) -> int:
        views = u.op.startswith("call_") and u not in new
        return max(place[u], end(u)) if views else place[u]

    def direct(n: Node) -> int:
        return max((place[u] for u in n.users), default=place[n])

    def sized(n: Node) -> bool:
        return n in size and n.op != "output"

    right = [
        (lambda n: n in new, lambda n: len(nodes),
         ". That is all of them together: a value is freed when its last reader is done"),
        (lambda n: n in new or (n.op == "placeholder" and n in size), end,
         ". The inputs are the caller's and not counted"),
        (lambda n: n in new or n.op == "get_attr", end,
         ". What get_attr reads is the module's and not counted"),
        (lambda n: sized(n) and n.op.startswith("call_"), direct,
         ". A view, and an operation in place, has no memory of its own: it keeps what it looks at "
         "alive"),
        (lambda n: n in new, direct,
         ". A view keeps what it looks at alive: the readers of the view are its readers, too"),
    ]  # fmt: skip
    for counted, last, sentence in right:
        if peak(counted, last) == value:
            return sentence
    spans = [(place[n], end(n), size[n]) for n in nodes if n in new and n in size]
    early = [sum(b for i, j, b in spans if i <= k < max(j, i + 1)) for k in range(len(nodes))]
    if max(early, default=0) == value:
        return ". While a node runs its inputs and its result are both there"
    return ""


def _judge_order(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, inputs = args
    calls = [Counter((n.op, target_text(n.target)) for n in g.graph.nodes) for g in (gm, value)]
    if calls[0] != calls[1]:
        changed = (calls[0] - calls[1]) or (calls[1] - calls[0])
        (_, target), _ = next(iter(changed.items()))
        return Finding(
            f"the program has other nodes than before ({target}): only their order may change",
            actual=value,
        )
    if text := same_program(gm, value, inputs, 0.0):
        return Finding(
            f"{text}: two nodes stand in another order that no value connects, and that one "
            "notices. order_constraints(gm) lists such pairs",
            actual=value,
        )
    return None


def _judge_lower(args: tuple[Any, ...], value: Any) -> Finding | None:
    if (found := _judge_order(args, value)) is not None:
        return found
    gm, inputs = args
    before, after = _peak(gm, inputs), _peak(value, inputs)
    if after >= before:
        return Finding(
            f"the peak was {before} bytes and is {after} now: use a large value up before the next "
            "one is made",
            actual=value,
        )
    return None


def _judge_kits(args: tuple[Any, ...], value: Any) -> Finding | None:
    if (found := _judge_order(args, value)) is not None:
        return found
    gm, inputs = args
    before, after = _peak(gm, inputs), _peak(value, inputs)
    kits = _peak(lower_peak(gm, *inputs), inputs)
    if after > kits:
        return Finding(
            f"the peak was {before} bytes and is {after} now; taking at each step the node after "
            f"which the least is alive gets {kits}",
            actual=value,
        )
    return None


# -- programs: (a) -----------------------------------------------------------------------------


def _one(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _chain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x).neg()).exp()


def _branches(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.relu(x), torch.tanh(x)
    return (a + b).neg() * a


def _sizes(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(5, 1).sum(0) + torch.relu(x).sum(0)


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.empty(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) @ self.weight)


def _view(x: torch.Tensor) -> torch.Tensor:
    turned = torch.relu(x).t()
    return torch.tanh(x).sum() + turned.exp().sum() + turned.sum()


def _chain_of_views(x: torch.Tensor) -> torch.Tensor:
    part = (x + 1).view(-1)[1:].reshape(7, 1)
    return torch.tanh(x).exp().sum() * part


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x).add_(1).mul_(2))


def _returned_early(x: torch.Tensor) -> tuple:
    first = torch.relu(x)
    return first, torch.tanh(x).neg().exp()


def _traced(program: Any, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    program = fill(program) if isinstance(program, nn.Module) else program
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    return symbolic_trace(program), [x]


def _no_effects() -> Any:
    """Make a strategy of programs without effects, and with views."""
    views = [("call_method", "view", (2, 4), {}), ("call_method", "detach", (), {})]
    strategy = programs(most=7, outputs=2, choices=views)
    return strategy.map(_read).map(lambda gm: (gm, fresh_inputs(gm, "flat")))


def _read(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _cases_a() -> Iterator[Case | Property]:
    chain, caller, views, returned = "a chain", "what the caller owns", "views", "what is returned"
    for behaviour, title, make in (
        (chain, "one operation", lambda: _traced(_one, 2, 4)),
        (chain, "four in a row", lambda: _traced(_chain, 2, 4)),
        (chain, "float64", lambda: _traced(_chain, 2, 4, dtype=torch.float64)),
        ("branches", "a value that is read twice", lambda: _traced(_branches, 2, 4)),
        ("branches", "values of several sizes", lambda: _traced(_sizes, 2, 4)),
        (caller, "an input", lambda: _traced(_one, 3, 4)),
        (caller, "parameters", lambda: _traced(_Weighted(), 2, 4)),
        (views, "a transpose", lambda: _traced(_view, 2, 4)),
        (views, "a view of a view", lambda: _traced(_chain_of_views, 2, 4)),
        (views, "in place", lambda: _traced(_in_place, 2, 4)),
        (
            returned,
            "a value that is returned lives to the end",
            lambda: _traced(_returned_early, 4),
        ),
    ):
        yield Case(behaviour, title, make, _judge_peak)
    yield Property("branches", "any program", _no_effects, _judge_peak, examples=15)


# -- programs: (b) -----------------------------------------------------------------------------


def _two(x: torch.Tensor) -> torch.Tensor:
    a, b = x.repeat(8), x.repeat(8)
    return a.sum() + b.sum()


def _ladder(x: torch.Tensor) -> torch.Tensor:
    rungs = [x.repeat(4 + k) * (k + 1) for k in range(4)]
    return torch.stack([torch.tanh(rung).sum() for rung in rungs]).sum()


def _tree(x: torch.Tensor) -> torch.Tensor:
    level = [torch.sin(x * k) for k in range(8)]
    while len(level) > 1:
        level = [torch.maximum(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _views_of_large(x: torch.Tensor) -> torch.Tensor:
    large, other = x.repeat(20), x.repeat(20)
    heads = large[:4].sum(), other[:4].sum()
    return heads[0] + heads[1] + large.view(-1).max() + other.view(-1).max()


def _writes(x: torch.Tensor) -> torch.Tensor:
    a, b = x.repeat(8), x.repeat(8)
    before = x.sum()
    x.add_(1)
    return a.sum() + b.sum() + before * x.sum()


def _draws(x: torch.Tensor) -> torch.Tensor:
    large, other = x.repeat(20), x.repeat(20)
    a, b = torch.rand_like(x.repeat(3)), torch.rand_like(x)
    return large.sum() + other.sum() + a.sum() - b.sum()


class _Running(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.repeat(8) + self.seen.sum(), x.repeat(9)
        self.seen.mul_(2)
        c = x.repeat(5) * self.seen.mean()
        self.seen.add_(x)
        return a.sum() + b.sum() + c.sum()


def _any_effects() -> Any:
    """Make a strategy of programs with effects."""
    strategy = programs(most=8, effects=True, state=True, outputs=2)
    return strategy.map(lambda gm: (gm, fresh_inputs(gm, "flat")))


def _cases_b() -> Iterator[Case | Property]:
    lower, effects, kits = "a lower peak", "effects stay in order", "the kit's peak"
    for behaviour, title, program, judge in (
        (lower, "two large values", _two, _judge_lower),
        (lower, "a ladder", _ladder, _judge_lower),
        (effects, "the input is written to", _writes, _judge_lower),
        (effects, "random numbers are drawn", _draws, _judge_lower),
        (effects, "a buffer is read, written, read", _Running, _judge_lower),
        (kits, "two large values", _two, _judge_kits),
        (kits, "a ladder", _ladder, _judge_kits),
        (kits, "a tree", _tree, _judge_kits),
        (kits, "views of large values", _views_of_large, _judge_kits),
    ):
        make = program() if isinstance(program, type) else program
        yield Case(behaviour, title, lambda make=make: _traced(make, 4), judge)
    yield Property(effects, "any program with effects", _any_effects, _judge_order, examples=25)


EXERCISE = Exercise(
    id="4.3",
    title="Peak memory by live ranges, and an order that lowers it",
    level=4,
    minutes=75,
    idea="A value lives from the node that makes it to its last reader; the order of the nodes "
    "decides how many live at one time, and within limits it is free (section 6.3).",
    needs=("live range", "peak memory", "effect", "reader", "meta"),
    teaches=("list schedule",),
    hints=(
        "The lanes of the explorer are the live ranges: each begins at the row that makes a value "
        "and ends at the last row that reads it. Weight each with its bytes; the row where most "
        "bytes pass is the peak. Lecture 09, 'Is it right?', measures the same.",
        "(a) Walk from the end: a value's last moment is that of its latest reader, and where a "
        "reader is a view, the view's last moment. Then add its bytes to all rows of its range. "
        "(b) Count for each node what must run before it. Of the nodes that may run now take the "
        "one with the least (bytes it makes - bytes it frees); then look again.",
        "Moving nodes, on another example: node.append(other) puts `other` right behind `node`, "
        "so `for a, b in itertools.pairwise(order): a.append(b)` brings the nodes of the list "
        "`order` into its order. And order_constraints(gm) returns two lists of pairs (before, "
        "after): keep to both.",
    ),
    asks=("fxlab.passes.memory.lower_peak",),
    parts=(
        Part(
            id="4.3a",
            name="my_peak",
            points={
                "a chain": 2,
                "branches": 1,
                "what the caller owns": 1,
                "views": 2,
                "what is returned": 1,
            },
            entry=entry_a,
            cases=_cases_a,
            wrong={
                "never_freed": "That is all of them together",
                "freed_before": "While a node runs its inputs and its result are both there",
                "inputs_counted": "The inputs are the caller's",
                "views_counted": "has no memory of its own",
                "base_freed": "the readers of the view are its readers, too",
            },
            stub="def my_peak(gm):\n"
            '    """Return the most bytes that one call holds at one moment.\n'
            "\n"
            "    Counted is what the call allocates: not inputs, parameters or buffers. While a\n"
            "    node runs, what it reads and its result are both there. ``shape_prop`` has been\n"
            '    run: ``node.meta["tensor_meta"]`` has shape and dtype.\n'
            '    """',
            asks=(
                "fxlab.passes.cost",
                "fxlab.passes.memory.live_ranges",
                "fxlab.passes.memory.peak_of",
                "fxlab.passes.memory.lower_peak",
            ),
        ),
        Part(
            id="4.3b",
            name="my_order",
            points={"a lower peak": 2, "effects stay in order": 3, "the kit's peak": 4},
            entry=entry_b,
            cases=_cases_b,
            wrong={
                "unchanged": "the peak was",
                "values_only": "order_constraints(gm) lists such pairs",
                "depth_first": "taking at each step the node after which the least is alive",
                "breadth_first": "the peak was",
            },
            stub="def my_order(gm):\n"
            '    """Edit ``gm`` in place: move its nodes so that the peak of memory is lower.\n'
            "\n"
            "    Nodes are moved, and nothing else; effects keep their order. ``shape_prop`` has\n"
            "    been run.\n"
            '    """',
        ),
    ),
)


def _long_ladder(count: int) -> tuple[Any, ...]:
    """Return a program of about ``count`` nodes that makes all its values before it uses one."""
    graph = Graph()
    x = graph.placeholder("x")
    rungs = [graph.call_method("repeat", (x, 8)) for _ in range(count // 3)]
    total = x
    for rung in rungs:
        total = graph.call_function(torch.add, (total, graph.call_method("sum", (rung,))))
    graph.output(total)
    return GraphModule(nn.Module(), graph), [torch.ones(4)]


def _kits_order(gm: GraphModule) -> GraphModule:
    values = [n.meta["tensor_meta"] for n in gm.graph.find_nodes(op="placeholder")]
    return lower_peak(gm, *(torch.empty(v.shape, dtype=v.dtype) for v in values))


COMPARE = {"4.3b": Reference(_kits_order, lambda: _traced(_ladder, 4), _long_ladder)}
