"""2.2: dead code elimination: what may go, when a program has effects?

The kit's table of effects tells what must stay; the program is run before and after, so that an
effect that went missing shows in an input, in a buffer or in the random numbers that follow
(section 5.5). What else must stay is a rule (`RULES`), so that a graded course can draw another.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.passes.cleanup import dce
from fxlab.teach import judge, programs
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.variants import forms

STUB = '''def my_dce(gm):
    """Edit `gm` in place: erase every node that nobody reads and that has no effect; return `gm`.

    `fxlab.core.purity.effect(node)` is the reason why a node may not go, or None.
    """
'''


@dataclass(frozen=True)
class Rule:
    """What stays although nobody reads it.

    Attributes:
        condition: In Python, of a node that has an effect or not: it may go.
        text: The same in words, behind "erase every node that nobody reads and that".
        stays: Says why a node without effect stays, or "".
    """

    condition: str
    text: str
    stays: Callable[[Node], str]

    def reason(self, node: Node, gm: GraphModule) -> str:
        """Return why a node may not go, or ""."""
        return effect(node, gm) or self.stays(node)


EFFECTS = Rule("effect(node) is None", "has no effect", lambda node: "")
MODULES = Rule(
    'effect(node) is None and node.op != "call_module"',
    "has no effect and calls no module",
    lambda node: "it calls a module" if node.op == "call_module" else "",
)
WATCHED = Rule(
    'effect(node) is None and not node.name.startswith("watch")',
    "has no effect and no name that begins with `watch`",
    lambda node: "its name begins with watch" if node.name.startswith("watch") else "",
)


def entry(answer: Callable[[GraphModule], Any], gm: GraphModule) -> GraphModule:
    """Call the pass; it edits in place."""
    return judge.edited(answer, gm)


def judge_dce(args: tuple[Any, ...], value: Any, rule: Rule = EFFECTS) -> Finding | None:
    """Hold the result to the table of effects, to the rule, and to what the program does."""
    (gm,) = args

    def wrong(sentence: str, node: str = "") -> Finding:
        expected = dce(programs.copy_of(gm)) if rule is EFFECTS else None
        return Finding(sentence, node, expected=expected, actual=value, graph=gm)

    staying = [node for node in gm.graph.nodes if node.op != "output" and rule.reason(node, gm)]
    kept = judge.counts(value)
    for target, count in Counter(map(judge.target_of, staying)).items():
        if kept.get(target, 0) < count:
            node = next(n for n in staying if judge.target_of(n) == target)
            if node.op == "placeholder":
                return wrong(f"it erased the parameter {node.name}: a caller still passes it")
            if effect(node, gm):
                return wrong(
                    f"it erased {node.name}, which has an effect: {effect(node, gm)}. "
                    "That nobody reads a node is not enough: ask effect(node)",
                    node.name,
                )
            return wrong(f"it erased {node.name}, which stays: {rule.stays(node)}", node.name)
    text = judge.same_program(gm, value, programs.fresh_inputs(gm))
    if text:
        return wrong(f"the program does something else than before: {text}")
    for left in value.graph.nodes:
        if left.op != "output" and not left.users and not rule.reason(left, value):
            readers = judge.was_read(gm, left.name)
            why = (
                f"it was read only by dead nodes: when {readers} goes, it is dead too, so walk "
                "from the end: reversed(graph.nodes)"
                if readers
                else "nobody reads it and it has no effect"
            )
            return wrong(f"{left.name} is still there: {why}", left.name)
    return None


def fixed(
    behaviour: str,
    title: str,
    make: Callable[[Graph], None],
    rule: Rule,
    training: bool = False,
    **root: Any,
) -> Case:
    """A fixed case; `root` names modules by functions that make them."""

    def args() -> tuple[Any, ...]:
        owner = nn.Module()
        for name, module in root.items():
            owner.add_module(name, module())
        return (programs.built(make, owner, training),)

    return Case(behaviour, title, args, partial(judge_dce, rule=rule))


def one_dead(graph: Graph) -> None:
    """One node that nobody reads."""
    x = graph.placeholder("x")
    graph.call_function(torch.relu, (x,))
    graph.output(x)


def dead_chain(graph: Graph) -> None:
    """Two: the first is read by the second, which nobody reads."""
    x = graph.placeholder("x")
    graph.call_method("neg", (graph.call_function(torch.relu, (x,)),))
    graph.output(x)


def nothing_dead(graph: Graph) -> None:
    """All is read."""
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))


def dead_module(graph: Graph) -> None:
    """A module and an attribute that nobody reads."""
    x = graph.placeholder("x")
    graph.call_module("linear", (x,))
    graph.get_attr("linear.weight")
    graph.output(x)


def in_place_method(graph: Graph) -> None:
    """x.add_(1), result unread: x is another one afterwards."""
    x = graph.placeholder("x")
    graph.call_method("add_", (x, 1.0))
    graph.output(x)


def set_item(graph: Graph) -> None:
    """x[0] = 2."""
    x = graph.placeholder("x")
    graph.call_function(operator.setitem, (x, 0, 2.0))
    graph.output(x)


def in_place_flag(graph: Graph) -> None:
    """relu(x, inplace=True)."""
    x = graph.placeholder("x")
    graph.call_function(F.relu, (x,), {"inplace": True})
    graph.output(x)


def in_place_module(graph: Graph) -> None:
    """nn.ReLU(inplace=True)."""
    x = graph.placeholder("x")
    graph.call_module("relu", (x,))
    graph.output(x)


def random_number(graph: Graph) -> None:
    """A random number that nobody reads moves the random state."""
    x = graph.placeholder("x")
    graph.call_function(torch.rand_like, (x,))
    graph.output(x)


def batch_norm(graph: Graph) -> None:
    """A batch norm that nobody reads: in train mode it updates its statistics."""
    x = graph.placeholder("x")
    graph.call_module("bn", (x,))
    graph.output(x)


def watched(graph: Graph) -> None:
    """A node that somebody gave a name, behind one that nobody did."""
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    graph.create_node("call_method", "neg", (relu,), name="watch_me")
    graph.output(x)


def unread_parameter(graph: Graph) -> None:
    """A parameter that nobody reads."""
    x = graph.placeholder("x")
    graph.placeholder("y")
    graph.output(graph.call_function(torch.relu, (x,)))


def cases(rule: Rule) -> Iterator[Case | Property]:
    """The public cases, smallest first."""
    case = partial(fixed, rule=rule)
    judged = partial(judge_dce, rule=rule)
    linear: dict[str, Any] = {"linear": lambda: programs.layer("linear", "flat")}
    bn: dict[str, Any] = {"bn": lambda: programs.layer("bn", "flat")}
    relu: dict[str, Any] = {"relu": lambda: nn.ReLU(inplace=True)}
    yield case("dead nodes go", "one node that nobody reads", one_dead)
    yield case("dead nodes go", "nothing is dead", nothing_dead)
    yield case(
        "dead nodes go", "a module and an attribute that nobody reads", dead_module, **linear
    )
    yield case("dead nodes go", "a batch norm in eval mode", batch_norm, **bn)
    yield case("chains go", "a node that only a dead node reads", dead_chain)
    yield Property(
        "chains go",
        "generated programs without effects",
        lambda: judge.tuples(programs.programs(outputs=2)),
        judged,
    )
    yield case("effects stay", "x.add_(1), result unread", in_place_method)
    yield case("effects stay", "x[0] = 2", set_item)
    yield case("effects stay", "relu(x, inplace=True)", in_place_flag)
    yield case("effects stay", "nn.ReLU(inplace=True)", in_place_module, **relu)
    yield case("effects stay", "a random number that nobody reads", random_number)
    yield case("effects stay", "a batch norm in train mode", batch_norm, training=True, **bn)
    if rule is not EFFECTS:
        yield case("effects stay", "a node named watch_me", watched)
    yield Property(
        "effects stay",
        "generated programs with effects",
        lambda: judge.tuples(programs.programs(effects=True, outputs=2)),
        judged,
    )
    yield case("parameters stay", "a parameter that nobody reads", unread_parameter)


def make(rule: Rule = EFFECTS) -> Exercise:
    """Return the exercise with another rule of what stays."""
    return Exercise(
        id="2.2",
        title="Dead code elimination that keeps effects",
        level=2,
        minutes=30,
        idea="Without control flow, one walk from the end finds all dead code (section 5.5).",
        needs=("users", "reader", "effect", "pure", "dead code", "erase"),
        teaches=(),
        hints=(
            "A node is dead when nobody reads it and nobody could notice that it did not run. "
            "Lecture 12 steps through both halves: `node.users` and `effect(node)`.",
            "Walk over the nodes from the last to the first. Leave parameters and the output "
            "alone. Of the others, erase one when it has no users and no effect. When a node is "
            "erased its inputs lose a reader, and they come later in your walk.",
            "A list that is changed while it is walked skips elements: for numbers one would "
            "write `for n in reversed(list(numbers)): numbers.remove(n)`. The same holds for "
            "graph.nodes.",
        ),
        asks=(
            "fxlab.passes.cleanup.dce",
            "fxlab.core.graph.Graph.eliminate_dead_code",
            "torch.fx.Graph.eliminate_dead_code",
        ),
        parts=(
            Part(
                id="2.2",
                name="my_dce",
                points={
                    "dead nodes go": 1,
                    "chains go": 2,
                    "effects stay": 2,
                    "parameters stay": 1,
                },
                entry=entry,
                cases=partial(cases, rule),
                wrong={
                    "forward": "walk from the end",
                    "no_effects": "which has an effect: add_ writes into its input in place",
                    "calls_only": "is still there: nobody reads it",
                    "parameters": "it erased the parameter y",
                    "by_underscore": "it erased setitem, which has an effect",
                    "nothing": "is still there",
                },
                stub=STUB.replace("that has no effect", f"that {rule.text}"),
            ),
        ),
    )


EXERCISE = make()
_TEXT = "that has no effect"
VARIANTS = forms(
    make,
    {"effects": EFFECTS, "modules": MODULES, "watched": WATCHED},
    lambda rule: ((_TEXT, f"that {rule.text}"), (EFFECTS.condition, rule.condition)),
)


def _chain(count: int) -> tuple[GraphModule]:
    """A chain of about ``count`` nodes, every second of which is read by nobody."""

    def make(graph: Graph) -> None:
        node = graph.placeholder("x")
        for _ in range(count // 2):
            node = graph.call_function(torch.relu, (node,))
            graph.call_method("neg", (node,))
        graph.output(node)

    return (programs.built(make),)


COMPARE = {
    "2.2": Reference(
        kit=dce,
        small=lambda: (programs.built(dead_chain),),
        large=_chain,
        torch_fx=lambda gm: gm.graph.eliminate_dead_code(),
    )
}
