"""What does a trace lose, and who says so?

A graph holds operations on traced values. What the program does besides (writing into the model,
into plain tensors or tensors that it made itself, switching gradients off) is not in it; the paper
leaves that undefined (section 5.6). Here the user's model is put back as it was, and each loss
becomes a `TraceWarning` with its line.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import operator
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from fxlab.core.capture import watchers
from fxlab.core.proxy import Proxy, probes
from fxlab.core.tracer import Tracer, TracerBase

_EMPTY = inspect.Parameter.empty
_CONTAINERS = frozenset((dict, list, set))
_KINDS = re.compile("Tensor|int|float|bool|Number|complex")


def install() -> None:
    """Stand around every trace."""
    if watch not in watchers:
        watchers.append(watch)
        probes.append(probe)


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
    for m, path in tracer._paths().items():
        parts = vars(m)
        if tracer.is_leaf_type(type(m)):
            before.append((m, path, parts.copy(), (), ()))
            continue
        kept = [(v, v.copy()) for v in parts.values() if type(v) in _CONTAINERS]
        held = [(k, t, t._version, t.clone()) for k, t in parts.items() if type(t) is torch.Tensor]
        before.append((m, path, parts.copy(), kept, held))
    try:
        yield
    finally:
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
                _restore(tracer, m, path, fields, kept)


def _equal(a: Any, b: Any) -> bool:
    """Say whether two containers hold the same objects (not equal ones: `==` would be recorded)."""
    if type(a) is dict:
        same = len(a) == len(b) and all(map(operator.is_, a.values(), b.values()))
        return same and list(a) == list(b)
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
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    place = (code.co_filename, code.co_firstlineno, code.co_name) if code is not None else None
    tracer.warn(
        "state",
        f"the program writes to {names} of the model; the model was put back, and the graph does "
        "not do it",
        place,
    )
