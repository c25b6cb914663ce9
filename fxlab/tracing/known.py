"""What does a tracer know about a value before anything has run?

Shapes of parameters, values of buffers and, if example inputs were given, ranks and sizes of all
that depends on them. Worked out only when the traced program asks (paper, section 5.3: capture does
not specialize unless told to); example inputs run as fake tensors, so no arithmetic is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fxlab.core import patches
from fxlab.core.node import Node, leaves, lookup, map_arg
from fxlab.core.proxy import UNKNOWN, Proxy, answers, asks_shape
from fxlab.core.purity import _argument, effect
from fxlab.core.tracer import TracerBase

STATIC, STATE, EXAMPLE = _SOURCES = ("", "a parameter or buffer", "example inputs")
"""What a known value comes from; a shape of a parameter is as good as a literal."""


def install() -> None:
    """Let every tracer ask here when Python insists on knowing a value now."""
    if answer not in answers:
        answers.append(answer)


def answer(tracer: TracerBase, proxy: Proxy, what: str) -> Any:
    """Return the value behind a Proxy if parameters, buffers or example inputs tell it.

    Args:
        tracer: the one that traces.
        proxy: who is asked.
        what: for the TraceWarning that says what was fixed.
    """
    value, why = (UNKNOWN, "") if _is_reshaped(proxy.node) else known(tracer, proxy.node)
    if what != "its length" and isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):  # it knows its value only if the program wrote it down
            value = UNKNOWN if value.constant is None else value.constant
        elif value.is_meta:
            value = UNKNOWN
    if value is not UNKNOWN and why and (what != "its length" or why == STATE):
        with untraced():  # a tensor's text is made by operations
            text = f"{value!r:.60}"
        tracer.warn("fixed", f"{what} of {proxy} was fixed to {text}, known from {why}")
    return value


def known(tracer: TracerBase, node: Node) -> tuple[Any, str]:
    """Return the value of a Node, or UNKNOWN, and what it comes from."""
    table: dict[Any, Any] = tracer._notes.setdefault("known", {})
    todo = [node]
    with untraced(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        if tracer._examples is not None and _EXAMPLES not in table:
            table[_EXAMPLES] = _as_fake(tracer)
        while todo:
            current = todo[-1]
            missing = [n for n in current.all_input_nodes if n not in table]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if current not in table:
                table[current] = _evaluate(tracer, current, table)
    return table[node]


@contextlib.contextmanager
def untraced() -> Generator[None]:
    """Run what a tracer wants to know as if nobody traced."""
    outer, patches._local.tracer = patches.current_tracer(), None
    try:
        yield
    finally:
        patches._local.tracer = outer


_EXAMPLES = "examples"


def _as_fake(tracer: TracerBase) -> tuple[FakeTensorMode, dict[str, Any]]:
    """Return a fake mode and the example inputs in it, by the placeholder's target."""
    given = tracer._examples
    names = [str(n.target) for n in tracer.graph.nodes if n.op == "placeholder"]
    given = (given,) if isinstance(given, torch.Tensor) else given
    if not isinstance(given, dict):
        leaves = list(given)
        leaves = pytree.tree_leaves(leaves) if len(leaves) > len(names) else leaves
        given = dict(zip(names, leaves, strict=False))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode, pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)


def _evaluate(tracer: TracerBase, node: Node, table: dict[Any, Any]) -> tuple[Any, str]:
    """Run a Node on what is known of its inputs; whatever goes wrong, it is not known."""
    inputs, op, target = [table[n] for n in node.all_input_nodes], node.op, node.target
    if any(value is UNKNOWN for value, _ in inputs):
        return UNKNOWN, ""
    if any(map(_is_reshaped, node.all_input_nodes)):
        return UNKNOWN, ""
    if not asks_shape(node) and any(_is_written(tracer, n) for n in node.all_input_nodes):
        return UNKNOWN, ""
    why = max((why for _, why in inputs), key=_SOURCES.index, default=STATIC)
    why = STATIC if why == STATE and asks_shape(node) else why
    try:
        if op == "placeholder":
            return table[_EXAMPLES][1][str(target)], EXAMPLE
        kept = tracer.graph._constants
        if op == "get_attr":
            path = str(target)
            return kept[path] if path in kept else lookup(tracer.root, path), STATE
        if effect(node, tracer.root) is not None:
            return UNKNOWN, ""
        args = map_arg(node.args, lambda n: table[n][0])
        kwargs = map_arg(node.kwargs, lambda n: table[n][0])
        if op == "call_method":
            function: Any = getattr(args[0], str(target))
            args = args[1:]
        else:
            function = target if op == "call_function" else lookup(tracer.root, str(target))
        # What comes from parameters and buffers alone has a value, not only a shape.
        with table[_EXAMPLES][0] if why == EXAMPLE else contextlib.nullcontext():
            return function(*args, **kwargs), why
    except Exception:  # the caller says that it is not known
        return UNKNOWN, ""


_RESHAPES = frozenset(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ set_".split()
)


def _is_reshaped(node: Node) -> bool:
    """Say whether some node changes the shape of a value in place: which one holds is not known."""
    return any(
        user.args[:1] == (node,)
        and (user.target in _RESHAPES or (user.target is setattr and user.args[1:2] == ("data",)))
        for user in node.users
    )


def _is_written(tracer: TracerBase, node: Node) -> bool:
    """Say whether some node writes into a value, so that it is no longer what it was."""
    return any(writes_into(user, node, tracer.root) for user in node.users)


def writes_into(node: Node, value: Node, root: Any) -> bool:
    """Say whether a Node writes into the value of another, or is user code that might.

    Args:
        node: the one that may write; operators are asked for their schema, lists included.
        value: what it may write into.
        root: the module in which targets are looked up.
    """
    reason = effect(node, root)
    if reason is None:
        return False
    target: Any = node.target
    places: list[Any] = [node.kwargs.get("out")]
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        names = target.overloads() if isinstance(target, OpOverloadPacket) else ()
        for overload in [getattr(target, n) for n in names] or [target]:
            for i, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    places += [*node.args[i : i + 1], node.kwargs.get(argument.name)]
    elif "running statistics" in reason and node.op == "call_function":
        places += [_argument(node, name) for name in ("running_mean", "running_var")]
    elif "max_norm" in reason and node.op == "call_function":
        places.append(_argument(node, "weight"))
    elif "is user code" in reason and node.op == "call_function":
        places += [node.args, node.kwargs]
    elif "writes" in reason:
        places += [*node.args[:1], node.kwargs.get("input"), node.kwargs.get("self")]
    return any(leaf is value for leaf in leaves(*places))
