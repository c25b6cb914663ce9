"""What does a trace lose, and who says so?

A graph holds operations on traced values. What the program does besides is not in it; the paper
leaves that undefined (section 5.6). Around every trace stand here, in turn, `keeping.py` (writes
into the model), `outside.py` (globals, random numbers) and `asking.py` (questions that were
answered for a Proxy): each loss becomes a `TraceWarning` with its line.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from fxlab.core.capture import watchers
from fxlab.core.errors import is_users
from fxlab.core.tracer import Tracer
from fxlab.tracing import asking, keeping
from fxlab.tracing.outside import Outside
from fxlab.tracing.questions import reachable


def install() -> None:
    """Stand around every trace."""
    if watch not in watchers:
        keeping.install()
        asking.install()
        watchers.append(watch)


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Put back what the traced program changed, and say so."""
    modules = keeping.inlined(tracer)
    forwards: dict[type, Any] = {}
    for kind in map(type, modules):
        if kind not in forwards:  # before `keep`: it compiles a GraphModule, which may set fields
            forwards[kind] = inspect.unwrap(getattr(kind, "forward", watch))
    kept = keeping.keep(tracer, modules)
    called = [(f, type(part.module)) for part in kept for f in part.others]
    methods = [(forward, kind) for kind, forward in forwards.items()]
    shown = reachable(*methods, *called, (tracer.root_function, object))
    code = [facts for facts in shown.values() if facts.names & keeping.MEMBERS]
    members = keeping.members(tracer) if code else []
    tracer._notes["held"] = keeping.copies(kept, shown.values()) | keeping.copies(members, code)
    tracer._notes["asks_is"] = {f: facts.truth for f, facts in shown.items() if facts.truth}
    outside = Outside(shown, [used for part in kept for used in part.others], forwards)
    tracer._notes["generators"] = list(outside.generators)
    try:
        yield
        outside.warn_of_draws(tracer)
        asking.warn_of_code(tracer, shown, [tracer.root_function, *forwards.values()])
        _warn_of_root(tracer)
    finally:
        keeping.put_back(tracer, kept + members)
        outside.put_back(tracer)


def _warn_of_root(tracer: Tracer) -> None:
    """Say what of a call of the model is not in its class's forward, of which the graph is."""
    root: Any = tracer.root
    call, own = type(root).__call__, vars(root).get("forward")
    if call is not Module.__call__ and is_users(getattr(call, "__code__", _CODE).co_filename):
        tracer.warn(
            "call",
            f"{type(root).__name__} has a __call__ of its own, and the graph has only its forward: "
            "trace a module that holds it",
            keeping.first_line(call),
        )
    if own is not None:
        tracer.warn(
            "forward",
            f"the {type(root).__name__} has an attribute forward, and the graph is that of its "
            "class: trace the attribute, or a module that holds the model",
            keeping.first_line(own),
        )


_CODE = Module.__call__.__code__
