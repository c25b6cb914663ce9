"""What has to be swapped in the process while somebody traces, and how is it put back?

Tracing must see module calls, attribute reads, random factories, regions such as `torch.no_grad()`
and functions that were marked with `wrap`. These patches go in with the first trace of the process
and out with the last, under a lock; each asks for the tracer of the *calling thread*, so threads
that only run a model get the original behaviour.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx._symbolic_trace as torch_trace
from torch.nn import Module

from .errors import is_users, trace_state
from .graph import _enter_region, _exit_region
from .node import map_aggregate
from .proxy import Proxy

_local = threading.local()
_lock = threading.RLock()
_undo: list[Callable[[], None]] = []
_depth = 0
_call_code = Module.__call__.__code__
_getattr_code = Module.__getattr__.__code__
_call = types.FunctionType(_call_code, Module.__call__.__globals__, "__call__")
_getattr = types.FunctionType(_getattr_code, Module.__getattr__.__globals__, "__getattr__")
_getitem = torch.Tensor.__getitem__
_NOT_THERE = object()

wrapped_names: dict[tuple[int, str], dict[str, Any]] = {}
"""(id of a globals dict, name) -> that dict: what `wrap` registered by name."""
wrapped_functions: dict[int, Callable[..., Any]] = {}
"""id -> function: what `wrap` registered by function; recorded wherever a trace meets it."""

_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")
_FACTORIES = (*_RANDOM, "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye",
              "tensor", "as_tensor")  # fmt: skip
_REGIONS: dict[type, tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]]]] = {
    torch.no_grad: (torch.no_grad, lambda r: ()),
    torch.enable_grad: (torch.enable_grad, lambda r: ()),
    torch.set_grad_enabled: (torch.set_grad_enabled, lambda r: (r.mode,)),
    torch.inference_mode: (torch.inference_mode, lambda r: (r.mode,)),
    torch.autocast: (
        torch.autocast, lambda r: (r.device, r.fast_dtype, r._enabled, r._cache_enabled),
    ),
    torch.autograd.profiler.record_function: (
        torch.autograd.profiler.record_function, lambda r: (r.name, r.args),
    ),
}  # fmt: skip


def current_tracer() -> Any:
    """Return the tracer that traces in this thread, or None."""
    return getattr(_local, "tracer", None)


@contextmanager
def untraced() -> Iterator[None]:
    """Run code of the tracer itself as if nobody traced."""
    outer, _local.tracer = current_tracer(), None
    try:
        yield
    finally:
        _local.tracer = outer


@contextmanager
def tracing(tracer: Any) -> Iterator[None]:
    """Let `tracer` see what this thread does; patches are in place at least that long."""
    global _depth
    with _lock:
        try:
            if _depth == 0:
                _install()
        except BaseException:
            _remove()
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
                _remove()


def _remove() -> None:
    failures = []
    while _undo:
        try:
            _undo.pop()()
        except Exception as error:  # one that fails must not keep the others in
            failures.append(error)
    if failures:
        raise failures[0]


def _set(owner: Any, name: str, value: Any) -> None:
    """Set a class or module attribute and remember how to put it back."""
    old = owner.__dict__.get(name, _NOT_THERE)
    _undo.append(lambda: delattr(owner, name) if old is _NOT_THERE else setattr(owner, name, old))
    setattr(owner, name, value)


def _set_code(function: Any, code: types.CodeType) -> None:
    """Swap a function's code: unlike a new class attribute it invalidates no type's caches."""
    old = function.__code__
    _undo.append(lambda: setattr(function, "__code__", old))
    function.__code__ = code


@functools.cache
def _hand_over(handler: Callable[..., Any], like: types.CodeType) -> types.CodeType:
    """Return code with the signature of `like` that calls `handler`."""

    def one(self, name):  # noqa: ANN001, ANN202 - only its code is used
        h = "<handler>"
        return h(self, name)

    def many(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
        h = "<handler>"
        return h(self, *args, **kwargs)

    code = (many if like.co_flags & 4 else one).__code__
    consts = tuple(handler if c == "<handler>" else c for c in code.co_consts)
    return code.replace(co_consts=consts, co_name=like.co_name)


def _set_item(table: dict[str, Any], name: str, value: Any) -> None:
    old = table.get(name, _NOT_THERE)
    _undo.append(
        lambda: table.pop(name, None) if old is _NOT_THERE else table.__setitem__(name, old)
    )
    table[name] = value


def _install() -> None:
    flag = torch_trace._is_fx_tracing_flag
    _undo.append(lambda: setattr(torch_trace, "_is_fx_tracing_flag", flag))
    torch_trace._is_fx_tracing_flag = True
    _set_code(Module.__call__, _hand_over(_patched_call, _call_code))
    _set_code(Module.__getattr__, _hand_over(_patched_getattr, _getattr_code))
    _set(Module, "training", _training)
    _set(torch.Tensor, "__getitem__", _patched_getitem)
    for name in _FACTORIES:
        _set_item(torch.__dict__, name, _factory(getattr(torch, name), name in _RANDOM))
    for kind in _REGIONS:
        _set(kind, "__enter__", _region_enter(kind.__enter__))
        _set(kind, "__exit__", _region_exit(kind.__exit__))
    for registry in (wrapped_names, torch_trace._wrapped_fns_to_patch):
        for (_, name), table in list(registry.items()):
            original = table.get(name, getattr(builtins, name, _NOT_THERE))
            if original is not _NOT_THERE and not hasattr(original, "__fxlab_original__"):
                _set_item(table, name, recorder(original, always=True))
    for kind, name in list(torch_trace._wrapped_methods_to_patch):
        if kind is not torch.Tensor or name != "__getitem__":
            _set(kind, name, _method_recorder(getattr(kind, name), name))


def patch_globals(table: dict[str, Any], ids: Any) -> None:
    """Replace, in a globals dict, the functions whose id is in `ids` by recording ones."""
    for name, function in [(n, f) for n, f in table.items() if id(f) in ids and callable(f)]:
        with _lock:
            _set_item(table, name, recorder(function))


@functools.cache
def _recorder(function: Callable[..., Any], always: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or not (always or id(function) in tracer._autowrap_function_ids):
            return function(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        if proxy is None:
            return function(*args, **kwargs)
        made = proxy.tracer.create_proxy("call_function", function, args, kwargs)
        made.node.meta["is_wrapped"] = True
        return made

    wrapped.__fxlab_original__ = function  # type: ignore[attr-defined]
    return wrapped


def recorder(function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
    """Return a stand-in that records calls with a Proxy among the arguments."""
    return _recorder(function, always)


@functools.cache
def _method_recorder(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        proxy = find_proxy(args, kwargs) if current_tracer() is not None else None
        if proxy is None:
            return original(*args, **kwargs)
        return proxy.tracer.create_proxy("call_method", name, args, kwargs)

    return method


def find_proxy(*values: Any) -> Proxy | None:
    """Return a Proxy that stands somewhere inside `values`, or None."""
    found: list[Proxy] = []

    def visit(a: Any) -> Any:
        if isinstance(a, Proxy):
            found.append(a)
        return a

    map_aggregate(values, visit)
    return found[0] if found else None


def _patched_call(mod: Module, *args: Any, **kwargs: Any) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _call(mod, *args, **kwargs)
    return tracer._called(mod, args, kwargs)


def _patched_getattr(mod: Module, name: str) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _getattr(mod, name)
    modules = mod.__dict__.get("_modules")
    if modules is not None and name in modules and not tracer._own_getattr:
        return modules[name]
    return tracer._read(mod, name, _getattr(mod, name))


def _patched_getitem(tensor: torch.Tensor, index: Any) -> Any:
    if getattr(_local, "tracer", None) is not None:
        proxy = find_proxy(index)
        if proxy is not None:
            return proxy.tracer.create_proxy(
                "call_function", operator.getitem, (tensor, index), {}
            )
    return _getitem(tensor, index)


class TrainingFlag(int):
    """`module.training` while tracing: true or false in a branch, a get_attr as an argument."""

    path: str


def _get_training(mod: Module) -> Any:
    fields = mod.__dict__
    if "training" not in fields:
        raise AttributeError("training")
    tracer = getattr(_local, "tracer", None)
    return fields["training"] if tracer is None else tracer._training_of(mod, fields["training"])


def _set_training(mod: Module, value: Any) -> None:
    mod.__dict__["training"] = bool(value) if type(value) is TrainingFlag else value


_training = property(_get_training, _set_training, lambda mod: mod.__dict__.pop("training"))


@functools.cache
def _factory(original: Callable[..., Any], random: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        tracer = getattr(_local, "tracer", None)
        if tracer is None:
            return original(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        if proxy is not None:
            tracer = proxy.tracer
        elif not random or kwargs.get("generator") is not None:
            return original(*args, **kwargs)
        return tracer.create_proxy("call_function", original, args, kwargs)

    factory.__fxlab_original__ = original  # type: ignore[attr-defined]
    return factory


@functools.cache
def _region_enter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(region: Any) -> Any:
        value = original(region)
        tracer = getattr(_local, "tracer", None)
        if tracer is not None and _by_user():
            factory, arguments = next(v for k, v in _REGIONS.items() if isinstance(region, k))
            args = (factory, *arguments(region))
            name = factory.__name__
            node = tracer.create_proxy("call_function", _enter_region, args, {}, name).node
            tracer._regions.append((region, node))
        return value

    return enter


@functools.cache
def _region_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(region: Any, *exc: Any) -> Any:
        tracer = getattr(_local, "tracer", None)
        if tracer is not None and tracer._regions and tracer._regions[-1][0] is region:
            _, node = tracer._regions.pop()
            if exc[:1] in ((), (None,)):
                arg = (Proxy(node, tracer),)
                tracer.create_proxy("call_function", _exit_region, arg, {}, f"{node._name}_exit")
        return original(region, *exc)

    return leave


def _by_user() -> bool:
    """Say whether a region was opened by a user's line, or by a decorator on their function."""
    file = sys._getframe(2).f_code.co_filename
    return is_users(file) or file.endswith("_contextlib.py")
