"""What does a tracer know about a value before anything has run?

Shapes of parameters, values of buffers and, if example inputs were given, ranks and sizes of all
that depends on them. Worked out only when the traced program asks (paper, section 5.3: capture does
not specialize unless told to); example inputs run as fake tensors, so no arithmetic is done.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .node import Node, lookup, map_arg
from .proxy import _SHAPE_NAMES, _UNKNOWN

_RANK = {"static": 0, "value": 1, "example": 2}


def known(tracer: Any, node: Node) -> tuple[Any, str]:
    """Return (value, why) of a Node; why is static, value (of a parameter or buffer) or example."""
    table: dict[Node, tuple[Any, str]] = tracer._known
    todo = [node]
    with contextlib.ExitStack() as stack:
        from .patches import untraced

        stack.enter_context(untraced())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if tracer._fake_mode is not None:
            stack.enter_context(tracer._fake_mode)
        while todo:
            current = todo[-1]
            missing = [n for n in current._input_nodes if n not in table]
            if current in table:
                todo.pop()
            elif missing:
                todo.extend(missing)
            else:
                table[current] = _evaluate(tracer, current, table)
    return table[node]


def _evaluate(tracer: Any, node: Node, table: dict[Node, tuple[Any, str]]) -> tuple[Any, str]:
    inputs = [table[n] for n in node._input_nodes]
    if any(value is _UNKNOWN for value, _ in inputs):
        return _UNKNOWN, ""
    why = max((w for _, w in inputs), key=_RANK.__getitem__, default="static")
    if why == "value" and _asks_shape(node):
        why = "static"
    try:
        if node._op == "placeholder":
            return tracer._examples[node._target], "example"
        if node._op == "get_attr":
            path = str(node._target)
            constants = tracer.graph._constants
            return constants[path] if path in constants else lookup(tracer.root, path), "value"
        from .purity import effect

        if effect(node, tracer.root) is not None:
            return _UNKNOWN, ""
        args = map_arg(node._args, lambda n: table[n][0])
        kwargs = map_arg(node._kwargs, lambda n: table[n][0])
        if node._op == "call_function":
            return node._target(*args, **kwargs), why
        if node._op == "call_method":
            return getattr(args[0], str(node._target))(*args[1:], **kwargs), why
        return lookup(tracer.root, str(node._target))(*args, **kwargs), why
    except Exception:  # whatever goes wrong, the answer is "not known", and the caller says so
        return _UNKNOWN, ""


def _asks_shape(node: Node) -> bool:
    if node._op == "call_method":
        return node._target in _SHAPE_NAMES
    return node._target is getattr and node._args[1] in _SHAPE_NAMES
