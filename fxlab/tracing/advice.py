"""Which ways out has somebody whose program cannot be traced at this line?

Python insists on knowing a traced value now: a branch, a loop, a size (paper, section 5.3). What
helps depends on what the value is made of: example inputs for a size, `concrete_args` for a
setting, `torch.where` for a choice between tensors. The error's "try" lines come from here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import traceback
import types
from collections.abc import Iterator
from typing import Any, cast

import torch

from fxlab.core import errors
from fxlab.core.capture import watchers
from fxlab.core.errors import TraceError, TraceTypeError
from fxlab.core.node import Node
from fxlab.core.patches import find_proxy
from fxlab.core.proxy import advisers, asks_shape
from fxlab.core.tracer import Tracer
from fxlab.tracing.questions import expression, value_of

LEAF = (
    "move these lines into a function and mark it with fxlab.wrap: its call is recorded, its body "
    "is not traced"
)
_COMPARISONS = frozenset(
    getattr(operator, name) for name in "eq ne lt le gt ge not_ and_ or_".split()
)


def install() -> None:
    """Let every refusal of a Proxy ask here for its hints."""
    if ways_out not in advisers:
        advisers.append(ways_out)
        watchers.append(watch)


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Refuse what is no program; tell as ours, with lines, what refuses a Proxy in other words."""
    root, fn = tracer.root, tracer.root_function
    parallel = isinstance(root, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))
    if parallel or hasattr(root, "_orig_mod"):
        inner = "module" if parallel else "_orig_mod"
        raise TraceError(
            f"{type(root).__name__} only wraps the model: its own code is not the program",
            hint=f"trace what it wraps: symbolic_trace(model.{inner})",
        )
    made: Any = fn.func if isinstance(fn, functools.partial) else fn
    if isinstance(made, type):
        given = "" if made is fn and not _needs_arguments(made) else "..."
        raise TraceError(
            f"{made.__name__} is a class: calling it builds an instance, which is no traced value",
            expected="an instance of it, or a function",
            hint="instantiate it",
            wrong=f"symbolic_trace({made.__name__})",
            right=f"symbolic_trace({made.__name__}({given}))",
        )
    if inspect.isgeneratorfunction(made) or inspect.iscoroutinefunction(made):
        raise TraceError(
            f"{made.__name__} is a generator or coroutine",
            expected="a function that returns its values",
            right=f"symbolic_trace(lambda x: list({made.__name__}(x)))",
        )
    try:
        yield
    except Exception as error:
        if isinstance(error, errors.FxlabError):
            raise
        where, inside = _places(error)
        given = [value for frame in inside for value in frame.f_locals.values()]
        proxy = find_proxy(*(given if inside else _given(error)))
        if proxy is None and "Proxy" not in str(error):
            raise
        kind = next((k for k in _KINDS if isinstance(error, k.__bases__[-1])), TraceTypeError)
        name = inside[-1].f_code.co_name if inside else ""
        by = f" ({type(error).__name__} in torch's {name})" if inside else ""
        hints = [LEAF] if proxy is None else ways_out(proxy.node, tracer, "")
        raise kind(
            f"what was called here wants a value and got a Proxy: {error}{by}",
            where=where or None,
            hint=hints,
        ) from error
    tracer._raised = [error for error in tracer._raised if not _of_a_parser(error)]


def _of_a_parser(error: TraceError) -> bool:
    """Say whether torch's C code asked for an index, and gave the call to the Proxy then."""
    asked: Any = error.__traceback__
    inner = asked is None or asked.tb_frame.f_code.co_name == "method"
    return inner and type(error) is errors.TraceIndexError


def _given(error: Exception) -> list[Any]:
    """Return the variables in the call of a function in C that raised an error in a user's line."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    call = expression(frame)
    with contextlib.suppress(LookupError, AttributeError):
        function = value_of(call.func, frame) if isinstance(call, ast.Call) else _given
        if inspect.isbuiltin(function) or not getattr(function, "__flags__", _HEAP) & _HEAP:
            names = {node.id for node in ast.walk(cast(Any, call)) if isinstance(node, ast.Name)}
            return [frame.f_locals[name] for name in names & frame.f_locals.keys()]
    return []


_HEAP = 1 << 9  # a class that is written in Python
_KINDS = (
    errors.TraceNotImplementedError,
    errors.TraceIndexError,
    errors.TraceAttributeError,
    errors.TraceRuntimeError,
)


def _needs_arguments(kind: type) -> bool:
    """Say whether a class cannot be called without arguments, as far as it tells."""
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return True
    return False


def _places(error: Exception) -> tuple[list[errors.Frame], list[types.FrameType]]:
    """Return the user's lines that led to an error, innermost first, and torch's below them."""
    where: list[errors.Frame] = []
    inside: list[types.FrameType] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if errors.is_users(file):
            where.insert(0, (file, line, frame.f_code.co_name))
            inside = []
        elif errors.is_torchs(file):
            inside.append(frame)
    return where[:4], inside


def ways_out(node: Node, tracer: Any, what: str) -> list[str]:
    """Return the remedies that apply to this Node, the likeliest first.

    Args:
        node: what was asked.
        tracer: the one that traces.
        what: the name of the protocol: "bool", "iter", "len", "int", ...; or "" for an error
            of torch's own.
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
    kind = type(tracer.root)
    if kind is not torch.nn.Module and Tracer.is_leaf_type(kind):
        hints.append(
            f"torch's own {kind.__name__} is recorded as one call where it is part of a model: "
            "symbolic_trace(torch.nn.Sequential(module))"
        )
    if shaped and tracer._examples is None:
        hints.append(
            "give the tracer example inputs, which make ranks and sizes known: "
            "symbolic_trace(model, example_inputs=(x,))"
        )
    if (
        what
        and inputs
        and all(n.op == "placeholder" or n.target in _COMPARISONS for n in ancestors)
    ):
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
