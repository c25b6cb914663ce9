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
from .patches import untraced
from .proxy import _UNKNOWN, asks_shape
from .purity import effect

STATIC, STATE, EXAMPLE = _SOURCES = ("", "a parameter or buffer", "example inputs")
"""What a known value comes from; a shape of a parameter is as good as a literal."""


def known(tracer: Any, node: Node) -> tuple[Any, str]:
    """Return the value of a Node, or _UNKNOWN, and what it comes from."""
    table: dict[Node, tuple[Any, str]] = tracer._known
    todo = [node]
    with contextlib.ExitStack() as stack:
        for context in (untraced(), torch.no_grad(), torch.random.fork_rng(devices=[])):
            stack.enter_context(context)
        if tracer._fake_mode is not None:
            stack.enter_context(tracer._fake_mode)
        while todo:
            current = todo[-1]
            missing = [n for n in current._input_nodes if n not in table]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if current not in table:
                table[current] = _evaluate(tracer, current, table)
    return table[node]


def _evaluate(tracer: Any, node: Node, table: dict[Node, tuple[Any, str]]) -> tuple[Any, str]:
    """Run a Node on what is known of its inputs; whatever goes wrong, it is not known."""
    inputs, op, target = [table[n] for n in node._input_nodes], node._op, node._target
    if any(value is _UNKNOWN for value, _ in inputs):
        return _UNKNOWN, ""
    why = max((why for _, why in inputs), key=_SOURCES.index, default=STATIC)
    why = STATIC if why == STATE and asks_shape(node) else why
    try:
        if op == "placeholder":
            return tracer._examples[target], EXAMPLE
        kept = tracer.graph._constants
        if op == "get_attr":
            return kept[target] if target in kept else lookup(tracer.root, str(target)), STATE
        if effect(node, tracer.root) is not None:
            return _UNKNOWN, ""
        args = map_arg(node._args, lambda n: table[n][0])
        kwargs = map_arg(node._kwargs, lambda n: table[n][0])
        if op == "call_method":
            return getattr(args[0], str(target))(*args[1:], **kwargs), why
        function: Any = target if op == "call_function" else lookup(tracer.root, str(target))
        return function(*args, **kwargs), why
    except Exception:  # the caller says that it is not known
        return _UNKNOWN, ""
