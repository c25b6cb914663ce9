"""How is a function with *args and **kwargs called with one Proxy for each of them?

In a graph (paper, section 4.2) `*args` is one placeholder whose value is a tuple. While tracing no
length is known, so no call could spread it: the same code runs as a function whose stars are plain
keyword parameters, through decorators, methods and `functools.partial`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from fxlab.core.capture import Calls
from fxlab.core.errors import TraceError

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def install() -> None:
    """Let every trace call what it traces through here."""
    Calls.without_stars, Calls.by_keyword = without_stars, by_keyword


def without_stars(fn: Any) -> Any:
    """Return a function whose *args and **kwargs are keyword parameters, to be given Proxies."""
    if isinstance(fn, functools.partial):
        signature = inspect.signature(fn.func)
        fixed = signature.bind_partial(*fn.args, **fn.keywords).arguments
        if not any(signature.parameters[name].kind in _STARRED for name in fixed):
            return functools.partial(without_stars(fn.func), *fn.args, **fn.keywords)
    inner, cells = getattr(fn, "__wrapped__", None), getattr(fn, "__closure__", None) or ()
    old = [c for c in cells if c.cell_contents is inner]
    method = fn if inspect.ismethod(fn) else fn.__call__
    if inspect.ismethod(method):  # or an object that can be called
        return functools.partial(without_stars(method.__func__), method.__self__)
    if not isinstance(fn, types.FunctionType) or not (inner is None or old):
        raise TraceError(
            f"the *args or **kwargs of {fn!r} cannot become inputs: what it calls with them is "
            "hidden in it", hint="trace the function that is inside, or one of yours that calls it",
            right="symbolic_trace(lambda x, y: fn(x, y))")  # fmt: skip
    code = fn.__code__
    if inner is not None:  # a decorator's function: the same one around the new inner one
        new = types.CellType(without_stars(inner))
        cells = tuple(new if c in old else c for c in cells)
    else:
        stars = code.co_flags & _STARS
        count = code.co_kwonlyargcount + stars.bit_count()
        code = code.replace(co_flags=code.co_flags & ~_STARS, co_kwonlyargcount=count)
    return functools.update_wrapper(
        types.FunctionType(code, fn.__globals__, fn.__name__, None, cells), fn)  # fmt: skip


def by_keyword(fn: Any, keywords: list[str]) -> Callable[..., Any]:
    """Return a function that gives its last arguments to `fn` under these names."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        cut = len(args) - len(keywords)
        return fn(*args[:cut], **dict(zip(keywords, args[cut:], strict=True)))

    return call
