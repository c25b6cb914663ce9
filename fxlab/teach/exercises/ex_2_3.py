"""2.3: common subexpressions, when equal is the same and when it is not.

The judge asks two things of an answer: that no caller can notice the difference, and, where nothing
is written, that nothing is computed twice any more; the kit's own pass tells how many nodes that
leaves. Merging more than the kit does is right as long as nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.cleanup import cse, fingerprint
from fxlab.teach import judge
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.programs import built, copy_of, fill, fresh_inputs, programs

STUB = '''def my_cse(gm):
    """Edit `gm` in place: let equal computations be made once; return `gm`.

    Two nodes are equal when opcode, target, args and kwargs are. `effect(node)` from
    fxlab.core.purity is the reason why a node may not be merged with another, or None.
    """
'''


def entry(answer: Callable[[GraphModule], Any], gm: GraphModule) -> GraphModule:
    """Call the pass; it edits in place."""
    return judge.edited(answer, gm)


def judge_cse(args: tuple[Any, ...], value: Any) -> Finding | None:
    """Hold the result to the program before it and to the kit's own pass."""
    (gm,) = args
    writes = any(effect(node, gm) for node in gm.graph.nodes if node.op.startswith("call_"))
    return _judged(gm, value, fresh_inputs(gm), merged=not writes)


def judge_behind(args: tuple[Any, ...], value: Any) -> Finding | None:
    """The same for programs with effects in which something can be merged all the same."""
    return _judged(args[0], value, fresh_inputs(args[0]))


def judge_on_bools(args: tuple[Any, ...], value: Any) -> Finding | None:
    """The same on inputs of bools, whose type a constant decides about."""
    return _judged(args[0], value, [x > 0 for x in fresh_inputs(args[0])])


def _judged(
    gm: GraphModule, value: Any, inputs: list[torch.Tensor], merged: bool = True
) -> Finding | None:
    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node, cse(copy_of(gm)), value, gm)

    text = judge.same_program(gm, value, inputs, tolerance=0.0)
    if text:
        return wrong(f"{_why(gm, value)} ({text})")
    if not merged or len(value.graph.nodes) <= len(cse(copy_of(gm)).graph.nodes):
        return None
    seen: dict[Any, Node] = {}
    for node in value.graph.nodes:
        if effect(node, value):
            seen.clear()
            continue
        first = seen.setdefault(fingerprint(node), node)
        if first is not node and not node.users:
            sentence = f"{node.name} has no reader any more: erase it when its readers are turned"
            return wrong(sentence, node.name)
        if first is not node:
            return wrong(_twice(gm, first, node), node.name)
    return wrong("it has more nodes than are needed")


def _why(gm: GraphModule, value: GraphModule) -> str:
    """Say which two nodes were merged that are not the same, as far as names tell."""
    names = {node.name for node in value.graph.nodes}
    nodes = list(gm.graph.nodes)
    gone = [node for node in nodes if node.name not in names]
    for node in gone:
        before = nodes[: nodes.index(node)]
        alike = [n for n in before if (n.op, n.target) == (node.op, node.target)]
        if not alike:
            continue
        first = next((n for n in alike if fingerprint(n) == fingerprint(node)), alike[-1])
        pair = f"{node.name} was merged with {first.name}"
        if reason := effect(node, gm):
            return f"{pair}, but {reason}: each call counts"
        if fingerprint(first) != fingerprint(node):
            return _unequal(pair, first, node)
        between = before[before.index(first) :]
        writers = [n for n in between if n.op.startswith("call_") and effect(n, gm)]
        if writers:
            return f"{pair}, but {writers[0].name} stands between them and writes"
        return (
            f"{pair}, and one of them is written into afterwards: the other had memory of its own"
        )
    return "the program does something else than before"


def _unequal(pair: str, first: Node, node: Node) -> str:
    if first.kwargs != node.kwargs:
        return f"{pair}, but their keyword arguments differ"
    if first.args == node.args:
        return (
            f"{pair}, but {first.args} and {node.args} are equal only to Python: 1, 1.0 and True "
            "are three constants, so the type belongs in the key"
        )
    return f"{pair}, but they read other arguments: {first.args} and {node.args}"


def _twice(gm: GraphModule, first: Node, node: Node) -> str:
    before = {n.name: n for n in gm.graph.nodes}
    old, new = before.get(first.name), before.get(node.name)
    pair = f"{node.name} does what {first.name} does"
    if old is not None and new is not None and fingerprint(old) != fingerprint(new):
        return (
            f"{pair}: their arguments became equal when an earlier pair was merged, so walk "
            "forward and make each key when you come to the node"
        )
    return f"{pair}, and both are still computed"


def case(behaviour: str, title: str, program: Any, judge: Any = judge_cse) -> Case:
    """A fixed case: a function or module, traced in eval mode."""
    return Case(behaviour, title, lambda: (symbolic_trace(program).eval(),), judge)


class _State(nn.Module):
    """Has a parameter and a layer that programs read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.empty(4))


class _ReadTwice(_State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.linear.weight[0] + x * self.linear.weight[0]


class _CalledTwice(_State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.linear(x).neg()


def _written_between(x: torch.Tensor) -> torch.Tensor:
    before = torch.relu(x)
    x.add_(1)
    return before + torch.relu(x)


def _written_into(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x + 1, x + 1
    a.mul_(2)
    return a, b


def _written_through_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x + 1, x + 1
    a.view(-1).mul_(2)
    return a, b


def _behind_random(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x) + torch.rand_like(x)
    return noise + torch.relu(x) + torch.relu(x)


def _behind_the_write(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.relu(x) + torch.relu(x)


def _added_twice(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x.add_(1)
    return x


def _cases() -> Iterator[Case | Property]:
    yield case("equal calls are one", "a function twice", lambda x: torch.relu(x) + torch.relu(x))
    yield case("equal calls are one", "nothing twice", lambda x: torch.relu(x) + torch.tanh(x))
    yield case("equal calls are one", "a chain twice",
               lambda x: torch.relu(x).neg() + torch.relu(x).neg())  # fmt: skip
    yield case("equal calls are one", "a module twice", fill(_CalledTwice()))
    yield case("equal calls are one", "an attribute twice", fill(_ReadTwice()))
    yield Property(
        "equal calls are one",
        "generated programs that write nothing",
        lambda: judge.tuples(programs(repeats=True, state=True, outputs=2)),
        judge_cse,
        examples=15,
    )
    yield case("arguments", "other keyword arguments",
               lambda x: x.clamp(min=0.5) + x.clamp(max=0.5))  # fmt: skip
    yield case("arguments", "the same ones in another order", lambda x: (x - 1) * (1 - x))
    yield case("arguments", "a list", lambda x: torch.cat([x, x]) + torch.cat([x, x]))
    yield case("arguments", "a slice", lambda x: x[1:] + x[1:])
    yield case("arguments", "other slices", lambda x: x[1:] + x[:1])
    yield case("constants have types", "x * 1, x * 1.0 and x * True",
               lambda x: (x * 1, x * 1.0, x * True, x * 1), judge_on_bools)  # fmt: skip
    yield case("effects", "two random numbers",
               lambda x: torch.rand_like(x) + torch.rand_like(x))  # fmt: skip
    yield case("effects", "two random numbers, then two relus", _behind_random, judge_behind)
    yield case("effects", "x.add_(1), twice", _added_twice)
    yield case("writes", "x is written between two relus", _written_between)
    yield case("writes", "x is written before two relus", _behind_the_write, judge_behind)
    yield case("writes", "one of two equal values is written afterwards", _written_into)
    yield case("writes", "... through a view", _written_through_a_view)
    yield Property(
        "writes",
        "generated programs that write",
        lambda: judge.tuples(programs(repeats=True, effects=True, outputs=2)),
        judge_cse,
        examples=15,
    )


EXERCISE = Exercise(
    id="2.3",
    title="Common subexpressions",
    level=3,
    minutes=40,
    idea="In a graph without control flow a value that was computed once is there for the rest of "
    "the program, so whoever computes it again can read it instead (section 5.5).",
    needs=("effect", "pure", "common subexpression", "reroute", "erase", "reader"),
    teaches=(),
    hints=(
        "Lecture 12, 'Common subexpressions' and 'When equal is not the same', has every case of "
        "this exercise. A dictionary from what a node computes to the first node that computed it "
        "is all the state that you need.",
        "Walk forward. Leave placeholders, the output and whatever has an effect alone. Of the "
        "others make a key; if the dictionary has it, turn the readers to the first node and erase "
        "this one, else put it in. With a write in the program the simplest safe rule is: merge "
        "only nodes that come after the last write.",
        "Slices may have no hash, and equal numbers need not be the same constant. On "
        "another example: repr([1, 1.0, slice(2, None)]) is '[1, 1.0, slice(2, None, None)]', a "
        "text, which has a hash and tells 1 from 1.0. The text of a node is its name.",
    ),
    asks=("fxlab.passes.cleanup.cse", "fxlab.passes.cleanup.fingerprint",
          "torch.fx.passes.dialect.common.cse_pass.CSEPass.call"),
    parts=(
        Part(
            id="2.3",
            name="my_cse",
            points={"equal calls are one": 3, "arguments": 2, "constants have types": 1,
                    "effects": 2, "writes": 2},
            entry=entry,
            cases=_cases,
            wrong={
                "without_kwargs": "but their keyword arguments differ",
                "python_equality": "are equal only to Python",
                "effects_too": "draws random numbers: each call counts",
                "across_writes": "stands between them and writes",
                "written_into": "and one of them is written into afterwards",
                "keys_first": "walk forward and make each key when you come to the node",
                "left_dead": "has no reader any more: erase it",
            },
            stub=STUB,
        ),
    ),
)  # fmt: skip


def _chain(count: int) -> tuple[GraphModule]:
    """A chain of about ``count`` nodes, every step of which is computed twice."""

    def make(graph: Graph) -> None:
        node = graph.placeholder("x")
        for _ in range(count // 3):
            twice = [graph.call_function(torch.relu, (node,)) for _ in range(2)]
            node = graph.call_function(torch.add, tuple(twice))
        graph.output(node)

    return (built(make),)


def _theirs(gm: torch.fx.GraphModule) -> None:
    from torch.fx.passes.dialect.common.cse_pass import CSEPass

    CSEPass()(gm)


COMPARE = {
    "2.3": Reference(
        kit=cse,
        small=lambda: (symbolic_trace(lambda x: torch.relu(x).neg() + torch.relu(x).neg()),),
        large=_chain,
        torch_fx=_theirs,
    )
}
