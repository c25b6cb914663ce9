"""What else is recorded as one call, besides torch's modules and functions marked with `wrap`?

Functions for the time of a `with` block, autograd Functions, those that were leaves of a module
that is traced again, and classes whose instances are built from traced values (paper, section 4.1:
the author of a model decides where tracing stops).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

from fxlab.core import patches
from fxlab.core.capture import watchers
from fxlab.core.errors import is_users
from fxlab.core.graph import Graph
from fxlab.core.tracer import Tracer

_function: Any = Function.apply
_apply_code = _function.__func__.__code__
_apply = types.FunctionType(
    _apply_code, _function.__func__.__globals__, closure=_function.__func__.__closure__
)


def install() -> None:
    """Stand around every trace."""
    if watch not in watchers:
        watchers.append(watch)
        patches.installers.append(_install)


def _install() -> None:
    code = patches._hand_over(_applied, _apply_code)
    patches._set(_function.__func__, "__code__", code)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the call of a user's autograd Function, whose backward is in no operation."""
    proxy = patches.find_proxy(args, kwargs)
    code = getattr(cls.forward, "__code__", _apply_code)
    if proxy is None or patches.current_tracer() is None or not is_users(code.co_filename):
        return _apply(cls, *args, **kwargs)
    tracer = proxy.tracer
    return tracer.create_proxy("call_function", cls.apply, args, kwargs, cls.__name__.lower())


@contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Let what was a leaf of a GraphModule stay one when that is traced again."""
    for graph in [m.__dict__["_graph"] for m in tracer._paths() if "_graph" in m.__dict__]:
        for node in graph.nodes if isinstance(graph, Graph) else ():
            if node.meta.get("is_wrapped"):
                tracer._autowrap_function_ids[id(node.target)] = node.target
    yield


@contextmanager
def wrapped(*functions: Callable[..., Any]) -> Generator[None]:
    """Treat functions as leaves for the traces inside a `with` block, as `wrap` does for good.

    Args:
        *functions: recorded by a trace, not looked into.
    """
    new = {id(f): f for f in functions if id(f) not in patches.wrapped_functions}
    patches.wrapped_functions.update(new)
    try:
        yield
    finally:
        for key in new:
            patches.wrapped_functions.pop(key, None)


def _as_constant(instance: Any, tracer: Any) -> Any:
    """Let an instance that was built without Proxies stand in a graph: the GraphModule keeps it."""
    keep = getattr(tracer, "_keep_constant", None)
    if keep is None:
        return instance
    path = keep(f"_{type(instance).__name__}_constant_", instance)
    return tracer.create_node("get_attr", path, (), {})


class ProxyableClassMeta(type):
    """Metaclass of classes that may be built from Proxies inside a trace: the call is recorded.

    Args:
        name, bases, attrs: as for any metaclass.
    """

    def __init__(cls, name: str, bases: Any, attrs: Any) -> None:
        super().__init__(name, bases, attrs)
        if not hasattr(cls, "__fx_create_arg__"):
            cls.__fx_create_arg__ = _as_constant

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the instance, or record the building if a Proxy goes in."""
        instance: Any = cls.__new__(cls)  # type: ignore[call-overload]
        if not isinstance(instance, cls):
            return instance
        proxy = patches.find_proxy(args, kwargs)
        if proxy is not None and patches.current_tracer() is not None:
            return proxy.tracer.create_proxy("call_function", cls, args, kwargs)
        cls.__init__(instance, *args, **kwargs)  # type: ignore[misc]
        return instance
