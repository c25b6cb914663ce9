"""What does a trace lose, and who says so?

A graph holds operations on traced values. What the program does besides (writing into the model,
into plain tensors or globals) is not in it; the paper leaves that undefined (section 5.6). Here the
user's model is put back as it was, and each loss becomes a `TraceWarning` with its line.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import operator
import random
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module

from fxlab.core import patches
from fxlab.core.capture import watchers
from fxlab.core.errors import Frame
from fxlab.core.node import Node
from fxlab.core.proxy import Proxy, probes
from fxlab.core.state import peek
from fxlab.core.tracer import Tracer, TracerBase
from fxlab.tracing.questions import Facts, facts, reachable

_EMPTY = inspect.Parameter.empty
_CONTAINERS = frozenset((dict, list, set))
_DRAWS = re.compile(
    r"\w*rand\w*|choices?|shuffle|sample|uniform_?|gauss|normal_?|bernoulli_?|\w*dropout\w*|init"
).fullmatch
_setattr, _delattr = (
    types.FunctionType(f.__code__, f.__globals__, closure=f.__closure__)
    for f in (Module.__setattr__, Module.__delattr__)
)
_KINDS = re.compile("Tensor|int|float|bool|Number|complex")


def install() -> None:
    """Stand around every trace."""
    if watch not in watchers:
        patches.installers.append(_install)
        watchers.append(watch)
        probes.append(probe)


def _install() -> None:
    for method, handler in ((Module.__setattr__, _set_attribute), (Module.__delattr__, _drop)):
        patches._set(method, "__code__", patches._hand_over(handler, method.__code__))


def _touch(module: Module) -> None:
    """Keep what a module held before a trace first sets one of its attributes."""
    tracer = patches.current_tracer()
    if tracer is not None:
        tracer._notes.setdefault("touched", {}).setdefault(module, vars(module).copy())


def _set_attribute(module: Module, name: str, value: Any) -> None:
    _touch(module)
    _setattr(module, name, value)


def _drop(module: Module, name: str) -> None:
    _touch(module)
    _delattr(module, name)


def probe(tracer: TracerBase, proxy: Proxy, name: str, frame: types.FrameType) -> None:
    """Say what a line of the user's found out about a Proxy that it would not of the value.

    Args:
        tracer: the one that traces.
        proxy: who is asked.
        name: of an attribute that no tensor has; "" if its class is asked for.
        frame: the one that asks.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if name:
        if re.search(rf"hasattr\(.*{name}", line):
            tracer.warn(
                "hasattr",
                f"hasattr({proxy}, {name!r}) is true for a Proxy and false for a tensor, and that "
                "answer is fixed in the graph",
            )
    elif frame.f_code.co_name == "is_tensor" or ("isinstance" in line and _KINDS.search(line)):
        tracer.warn(
            "isinstance",
            f"isinstance on {proxy} answers for the Proxy, not for the value, and that answer is "
            "fixed in the graph",
        )


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Put back what the traced program changed, and say so."""
    before: list[Any] = []
    forward_of: dict[type, Any] = {}
    for m, path in tracer._paths().items():
        parts = vars(m)
        if tracer.is_leaf_type(type(m)):
            continue  # its code does not run; `_set_attribute` sees what others set
        # Looked at now: that compiles a GraphModule, whose code may have fields on the module.
        forward_of[type(m)] = inspect.unwrap(getattr(type(m), "forward", watch))
        kept = [(v, v.copy()) for v in parts.values() if type(v) in _CONTAINERS]
        held = [(k, t, t._version, t.clone()) for k, t in parts.items() if type(t) is torch.Tensor]
        before.append((m, path, parts.copy(), kept, held))
    forwards = list(forward_of.values())
    methods = [(forward, kind) for kind, forward in forward_of.items()]
    functions = list(reachable(tracer.root_function, *methods))
    outside = list(_globals(functions))
    draws = any(_DRAWS(name) for f in functions for name in facts(f).names)
    drawn = _random_states() if draws else {}
    try:
        yield
        for name, old in drawn.items():
            if _random_states()[name] != old:
                tracer.warn(
                    "random " + name,
                    f"the program draws random numbers from {name} that are fixed in the graph: "
                    "take them from torch.rand and the like, which are recorded",
                    _first_line(tracer.root_function),
                )
        for name, place in ((n, p) for f in functions for n, p in facts(f).truth.items()):
            if "train" in name and tracer._notes.get("flags"):
                tracer.warn(
                    "training",
                    f"`{name} is True` or `is False` does not hold for a training flag while "
                    f"tracing, and that answer is fixed in the graph: say `if {name}`",
                    place,
                )
        _warn_of_questions(tracer, [f for f in (tracer.root_function, *forwards) if f in functions])
    finally:
        changed: list[Any] = []
        for m, path, fields, kept, held in before:
            for name, tensor, version, value in held:
                if tensor._version != version:
                    with torch.no_grad():
                        tensor.copy_(value)
                    where = f"{path}.{name}" if path else name
                    tracer.warn(
                        "written",
                        f"the program writes into the tensor {where}, which is no buffer; it was "
                        "put back, and the graph does not write: use register_buffer",
                    )
            if not (_equal(vars(m), fields) and all(_equal(now, old) for now, old in kept)):
                changed.append((m, path, fields, kept))
        for m, fields in tracer._notes.get("touched", {}).items():
            path = tracer._paths().get(m)
            known = any(m is other for other, *_ in before)
            if path is not None and not known and not _equal(vars(m), fields):
                changed.append((m, path, fields, ()))
        reads = _tensors_read(tracer) if changed else []
        for part in changed:
            _restore(tracer, *part)
        for (node, value), (_, now) in zip(
            reads, _tensors_read(tracer) if reads else (), strict=True
        ):
            if now is not value and isinstance(value, torch.Tensor):  # made by the program: kept
                node.target = tracer._keep_constant("_tensor_constant", value)
        for known in outside:
            _look_at_global(tracer, *known)


def _tensors_read(tracer: Tracer) -> list[tuple[Node, Any]]:
    """Return the Nodes that read an attribute of the model, each with what it is now."""
    nodes = tracer.graph.find_nodes(op="get_attr")
    return [
        (n, peek(tracer.root, str(n.target)))
        for n in nodes
        if n.target not in tracer.graph._constants
    ]


def _random_states() -> dict[str, Any]:
    """Return the state of each global generator of random numbers, to be compared."""
    states: dict[str, Any] = {"random": random.getstate()}
    states["torch"] = torch.random.get_rng_state().numpy().tobytes()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), rest)
    return states


def _first_line(function: Any) -> Frame | None:
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def _globals(functions: list[types.FunctionType]) -> Iterator[tuple[Any, ...]]:
    """Yield (function, name, value, copy) for what these functions could change of their globals.

    A name that they assign, or a list, dict or set that they read.
    """
    for function in functions:
        shown, table = facts(function), function.__globals__
        for name in shown.names & table.keys():
            value = table[name]
            if type(value) in _CONTAINERS:
                yield function, name, value, value.copy()
            elif name in shown.stored:
                yield function, name, value, None


def _look_at_global(
    tracer: Tracer, function: types.FunctionType, name: str, value: Any, copy: Any
) -> None:
    table = function.__globals__
    now = table.get(name, _EMPTY)
    if now is value and (copy is None or _equal(value, copy)):
        return
    text = f"the program writes to the global {name}, and the graph does not do it"
    if patches.find_proxy(list(now) if isinstance(now, set) else now) is not None:
        text += "; it was put back, since it held a Proxy"
        table[name] = value
        if copy is not None:
            value.clear()
            value.extend(copy) if type(value) is list else value.update(copy)
    tracer.warn("global " + name, text, _first_line(function))


def _warn_of_questions(tracer: Tracer, functions: list[Any]) -> None:
    """Say which questions of the code were answered for a Proxy, and not for the value."""
    inputs = {str(n.target): n for n in tracer.graph.find_nodes(op="placeholder")}
    optional = {name for name, node in inputs.items() if node.args == (None,)}
    for function in functions:
        shown = facts(function) if isinstance(function, types.FunctionType) else Facts()
        for name in optional & shown.none.keys():
            tracer.warn(
                "none",
                f"whether {name} is None was answered for a given {name}, and that answer is fixed "
                f"in the graph although its default is None: fix it, concrete_args={{{name!r}: "
                "None}, or give the parameter no default",
                shown.none[name],
            )
        asked = shown.type if function is not tracer.root_function else shown.type.keys() & inputs
        for name in asked:
            tracer.warn(
                "type",
                f"type({name}) is the type of a Proxy while tracing, and what follows from that is "
                "fixed in the graph",
                shown.type[name],
            )


def _equal(a: Any, b: Any) -> bool:
    """Say whether two containers hold the same objects (not equal ones: `==` would be recorded)."""
    if type(a) is dict:
        return [*a] == [*b] and all(map(operator.is_, a.values(), b.values()))
    return a == b if type(a) is set else len(a) == len(b) and all(map(operator.is_, a, b))


def _restore(tracer: Tracer, module: Any, path: str, fields: Any, kept: Any) -> None:
    now = vars(module)
    changed = [k for k in (*now, *fields) if now.get(k, _EMPTY) is not fields.get(k, _EMPTY)]
    now.clear()
    now.update(fields)
    for value, copy in kept:
        if not _equal(value, copy):
            changed += [k for k, v in fields.items() if v is value]
            value.clear()
            value.extend(copy) if type(value) is list else value.update(copy)
    names = ", ".join(f"{path}.{k}" if path else k for k in dict.fromkeys(changed))
    tracer.warn(
        "state",
        f"the program writes to {names} of the model; the model was put back, and the graph does "
        "not do it",
        _first_line(getattr(type(module), "forward", None)),
    )
