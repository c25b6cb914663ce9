"""Which ways out has somebody whose program cannot be traced at this line?

Python insists on knowing a traced value now: a branch, a loop, a size (paper, section 5.3). What
helps depends on what the value is made of: example inputs for a size, `concrete_args` for a
setting, `torch.where` for a choice between tensors. The error's "try" lines come from here.
"""

from __future__ import annotations

import operator
from typing import Any

from fxlab.core.node import Node
from fxlab.core.proxy import LEAF, advisers, asks_shape

_COMPARISONS = frozenset(
    getattr(operator, name) for name in "eq ne lt le gt ge not_ and_ or_".split()
)


def install() -> None:
    """Let every refusal of a Proxy ask here for its hints."""
    if ways_out not in advisers:
        advisers.append(ways_out)


def ways_out(node: Node, tracer: Any, what: str) -> list[str]:
    """Return the remedies that apply to this Node, the likeliest first.

    Args:
        node: what was asked.
        tracer: the one that traces.
        what: the name of the protocol: "bool", "iter", "len", "int", ...
    """
    ancestors, todo = {node: None}, [node]
    while todo and len(ancestors) < 200:
        for source in todo.pop().all_input_nodes:
            if source not in ancestors:
                ancestors[source] = None
                todo.append(source)
    inputs = [n for n in ancestors if n.op == "placeholder"]
    shaped = any(map(asks_shape, ancestors))
    hints = []
    if shaped and not tracer._examples:
        hints.append(
            "give the tracer example inputs, which make ranks and sizes known: "
            "symbolic_trace(model, example_inputs=(x,))"
        )
    if inputs and all(n.op == "placeholder" or n.target in _COMPARISONS for n in ancestors):
        hints.append(
            f"if {inputs[0].name} is a setting and no tensor, fix its value: "
            f"symbolic_trace(model, concrete_args={{{str(inputs[0].target)!r}: ...}})"
        )
    if what == "bool" and not shaped:
        hints.append("compute both sides and choose: torch.where(condition, a, b)")
    if what in ("iter", "len") and not shaped:
        hints.append("index it instead: x[0], x[1]; or a, b = x, which records as many reads")
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        hints.append(
            f"keep the module {path} ({getattr(kind, '__name__', kind)}) whole: "
            "is_leaf_module of your Tracer returns True for it"
        )
    return [*hints, LEAF]
