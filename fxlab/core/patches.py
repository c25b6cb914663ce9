"""What has to be swapped in the process while somebody traces, and how is it put back?

Tracing must see module calls, attribute reads, random factories, regions such as `torch.no_grad()`
and functions that were marked with `wrap`. These patches go in with the first trace of the process
and out with the last, under a lock; each asks for the tracer of the *calling thread*, so threads
that only run a model get the original behaviour.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import builtins
import functools
import gc
import operator
import threading
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.fx._symbolic_trace as torch_trace
from torch.nn import Module

from .errors import trace_state
from .graph import Graph
from .node import Node, leaves
from .proxy import Proxy

_local = threading.local()
_lock = threading.RLock()
_undo: list[tuple[Any, ...]] = []
_depth = 0
_call_code = Module.__call__.__code__
_getattr_code = Module.__getattr__.__code__
_call = types.FunctionType(_call_code, Module.__call__.__globals__, "__call__")
_getattr = types.FunctionType(_getattr_code, Module.__getattr__.__globals__, "__getattr__")
_NOT_THERE = object()

wrapped_names: dict[tuple[int, str], dict[str, Any]] = {}
"""(id of a globals dict, name) -> that dict: what `wrap` registered by name."""
wrapped_functions: dict[int, Callable[..., Any]] = {}
"""id -> function: what `wrap` registered by function; recorded wherever a trace meets it."""

installers: list[Callable[[], None]] = []
"""Called when the first trace begins; they make further patches by `_set`."""


def current_tracer() -> Any:
    """Return the tracer that traces in this thread, or None."""
    return getattr(_local, "tracer", None)


@contextmanager
def tracing(tracer: Any) -> Generator[None]:
    """Let `tracer` see what this thread does; patches are in place at least that long."""
    global _depth
    with _lock:
        try:
            if _depth == 0:
                _install()
        except BaseException:
            _put_back()
            raise
        _depth += 1
    outer, _local.tracer = current_tracer(), tracer
    frames, trace_state.outer = getattr(trace_state, "outer", None), ()
    try:
        yield
    finally:
        _local.tracer, trace_state.outer = outer, frames
        with _lock:
            _depth -= 1
            if _depth == 0:
                _put_back()


def _put_back() -> None:
    try:
        while _undo:
            function, *arguments = _undo.pop()
            function(*arguments)
    finally:
        if _undo:
            _put_back()


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and note how to put it back.

    A function's code is swapped where it can be: unlike a new attribute of a class that
    invalidates no type's caches.
    """
    old = owner.__code__ if name == "__code__" else owner.__dict__.get(name, _NOT_THERE)
    _undo.append((delattr, owner, name) if old is _NOT_THERE else (setattr, owner, name, old))
    setattr(owner, name, value)


def replace(table: dict[str, Any], new: dict[str, Any]) -> None:
    """Set items of a dict of globals, and note how to put them back."""
    with _lock:
        old = {name: table[name] for name in new if name in table}
        _undo.extend((table.pop, name, None) for name in new.keys() - old.keys())
        _undo.append((table.update, old))
        table.update(new)


@functools.cache
def _hand_over(handler: Callable[..., Any], like: types.CodeType) -> types.CodeType:
    """Return code to be swapped into a method of nn.Module: it calls `handler`."""

    def method(*args: Any, **kwargs: Any) -> Any:
        h: Any = "<handler>"
        return h(*args, **kwargs)

    def read(self: Any, name: str) -> Any:  # the way of nearly all, without stars
        h: Any = "<handler>"
        return h(self, name)

    code = (read if like is _getattr_code else method).__code__
    consts = tuple(handler if c == "<handler>" else c for c in code.co_consts)
    return code.replace(co_consts=consts, co_name=like.co_name, co_freevars=like.co_freevars)


def _install() -> None:
    _set(torch_trace, "_is_fx_tracing_flag", True)
    _set(Module.__call__, "__code__", _hand_over(_patched_call, _call_code))
    _set(Module.__getattr__, "__code__", _hand_over(_patched_getattr, _getattr_code))
    for name in ("getitem", "setitem"):
        method = getattr(torch.Tensor, f"__{name}__")
        _set(torch.Tensor, f"__{name}__", recorder(method, getattr(operator, name)))
    for installer in installers:
        installer()
    for registry in (wrapped_names, torch_trace._wrapped_fns_to_patch):
        for (_, name), table in list(registry.items()):
            original = table.get(name, getattr(builtins, name, _NOT_THERE))
            if original is not _NOT_THERE and not hasattr(original, "__fxlab_original__"):
                replace(table, {name: recorder(original, wrapped=True)})
    for kind, name in list(torch_trace._wrapped_methods_to_patch):
        if kind is not torch.Tensor or name != "__getitem__":
            _set(kind, name, recorder(getattr(kind, name), name))


def patch_globals(table: dict[str, Any], ids: Any) -> None:
    """Replace, in a globals dict, the functions whose id is in `ids` by recording ones."""
    found = [(n, f) for n, f in table.items() if id(f) in ids and callable(f)]
    if found:
        replace(table, {n: recorder(f, wrapped=True, auto=True) for n, f in found})


@functools.cache
def recorder(function: Callable[..., Any], target: Any = None, *, wrapped: bool = False,
             auto: bool = False, always: bool = False) -> Callable[..., Any]:  # fmt: skip
    """Return a stand-in for a function that records calls with a Proxy among the arguments.

    Args:
        function: what is called otherwise.
        target: the target to record instead; a method's name makes it a call_method.
        wrapped: it was marked as a leaf, which its Nodes tell.
        auto: only tracers that know the function record it.
        always: it is recorded also without a Proxy among the arguments.
    """
    target = target or function
    op = "call_method" if isinstance(target, str) else "call_function"

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = getattr(_local, "tracer", None)
        if tracer is None or (auto and id(function) not in tracer._autowrap_function_ids):
            return function(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        if proxy is None and not always:
            return function(*args, **kwargs)
        tracer = tracer if proxy is None else proxy.tracer
        made = tracer.create_proxy(op, target, args, kwargs)
        if wrapped:
            made.node.meta["is_wrapped"] = True
        return made

    stand_in.__fxlab_original__ = function  # type: ignore[attr-defined]
    return stand_in


def find_proxy(*values: Any) -> Proxy | None:
    """Return a Proxy that stands somewhere inside `values`, or None."""
    return next((leaf for leaf in leaves(*values) if isinstance(leaf, Proxy)), None)


def find_hidden(a: Any) -> Proxy | None:
    """Return a Proxy that an object of any kind holds (an iterator, a closure, slots), or None."""
    seen, todo = {id(a)}, [a]
    for value in todo:  # grows meanwhile: the nearest first
        kind = cast(Any, type(value))
        if issubclass(kind, Proxy):
            return value
        if issubclass(kind, types.FunctionType):
            parts: Any = [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif issubclass(kind, types.FrameType):
            parts = value.f_locals.values()
        else:
            parts = () if issubclass(kind, _NO_HOLDERS) else gc.get_referents(value)
        new = {id(part): part for part in parts if id(part) not in seen}
        seen.update(new)
        todo += new.values() if len(todo) < 5000 else ()
    return None


_NO_HOLDERS = (type, types.ModuleType, types.CodeType, Module, torch.Tensor, Graph, Node)


def _patched_call(mod: Module, *args: Any, **kwargs: Any) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _call(mod, *args, **kwargs)
    return tracer.call_module(mod, functools.partial(tracer._inline, tracer, mod), args, kwargs)


def _patched_getattr(mod: Module, name: str) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _getattr(mod, name)
    return tracer.getattr(name, _getattr(mod, name), tracer._parameter_proxies)


called = (_patched_call.__code__, _hand_over(_patched_call, _call_code))
"""The code that `Module.__call__` runs while somebody traces."""
