"""Does the traced program compute what the original computes?

A trace keeps one path through a program (paper, section 5.3). `check=` runs the original and the
graph on inputs and, if they differ, names the first Node that does, with its line.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.core import tracer as core
from fxlab.core.errors import TraceError
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node


def symbolic_trace(
    root: core.Root,
    concrete_args: core.Fixed = None,
    *,
    example_inputs: core.Examples = None,
    check: tuple[Any, ...] | None = None,
) -> GraphModule:
    """Trace a module or function and return it as a GraphModule.

    Args:
        root: the module or function; it is left exactly as it was.
        concrete_args: values to fix, by name or for all arguments in order; `PH` inside a
            structure leaves that place open.
        example_inputs: tensors (their values do not matter) that make ranks and sizes known where
            the program asks for them now.
        check: inputs on which the result is compared with `root`.

    Raises:
        TraceError: it cannot be traced, or (with `check`) computes something else; the text names
            the first Node that differs.

    >>> import torch
    >>> gm = symbolic_trace(lambda x: torch.relu(x).neg())
    >>> [(node.op, node.name) for node in gm.graph.nodes][1:3]
    [('call_function', 'relu'), ('call_method', 'neg')]
    """
    gm = core.symbolic_trace(root, concrete_args, example_inputs=example_inputs)
    if check is not None:
        check_against(root, gm, check)
    return gm


def check_against(root: Any, gm: GraphModule, inputs: tuple[Any, ...]) -> None:
    """Compare a traced module with the original; name the first Node that differs.

    Random numbers are drawn from the same state on both sides; the generator is put back.

    Raises:
        TraceError: they differ.
    """
    seen: dict[str, list[Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for path, module in root.named_modules() if isinstance(root, torch.nn.Module) else ():
            hook = lambda m, a, out, path=path: seen.setdefault(path, []).append(out)  # noqa: E731
            stack.callback(module.register_forward_hook(hook).remove)
        wanted = root(*inputs)
    first: list[Node] = []

    class Compare(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            outs = seen.get(str(n.target)) if n.op == "call_module" else None
            if outs and not first and not _close(outs.pop(0), value):
                first.append(n)
            return value

    with torch.random.fork_rng(devices=[]):
        got = Compare(gm).run(*inputs)
    if first or not _close(wanted, got):
        raise TraceError(
            "the traced program computes something else than the original on the check inputs",
            node=first[0] if first else gm.graph.output_node(),
            hint="something was fixed while tracing: see gm.meta['trace_warnings']",
        )


def _close(a: Any, b: Any) -> bool:
    def same(x: Any, y: Any) -> bool:
        tensors = isinstance(x, torch.Tensor), isinstance(y, torch.Tensor)
        if all(tensors):
            return x.shape == y.shape and torch.allclose(x, y, 1e-4, 1e-5, equal_nan=True)
        return not any(tensors) and x == y

    xs, ys = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(xs) == len(ys) and all(map(same, xs, ys))
