"""What has to be swapped in the process while somebody traces, and how is it put back?

Tracing must see module calls, attribute reads, random factories, regions such as `torch.no_grad()`
and functions that were marked with `wrap`. These patches go in with the first trace of the process
and out with the last, under a lock; each asks for the tracer of the *calling thread*, so threads
that only run a model get the original behaviour.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx._symbolic_trace as torch_trace
from torch.nn import Module

from .errors import is_users, trace_state
from .graph import _enter_region, _exit_region
from .node import leaves
from .proxy import Proxy

_local = threading.local()
_lock = threading.RLock()
_undo: list[Callable[[], None]] = []
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

_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")
_FACTORIES = (*_RANDOM, "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye",
              "tensor", "as_tensor")  # fmt: skip
_REGIONS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    torch.no_grad: lambda r: (), torch.enable_grad: lambda r: (),
    torch.set_grad_enabled: lambda r: (r.mode,), torch.inference_mode: lambda r: (r.mode,),
    torch.autocast: lambda r: (r.device, r.fast_dtype, r._enabled, r._cache_enabled),
    torch.autograd.profiler.record_function: lambda r: (r.name, r.args),
}  # fmt: skip
"""The class of a region -> the arguments that make one like a given one."""


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
    """Set an item of a dict or an attribute of anything else, and note how to put it back.

    A function's code is swapped where it can be: unlike a new attribute of a class that
    invalidates no type's caches.
    """
    if type(owner) is dict:
        put, drop, old = owner.__setitem__, owner.__delitem__, owner.get(name, _NOT_THERE)
    else:
        put, drop = functools.partial(setattr, owner), functools.partial(delattr, owner)
        old = owner.__code__ if name == "__code__" else vars(owner).get(name, _NOT_THERE)
    _undo.append(functools.partial(*((drop, name) if old is _NOT_THERE else (put, name, old))))
    put(name, value)


@functools.cache
def _hand_over(handler: Callable[..., Any], like: types.CodeType) -> types.CodeType:
    """Return code with the signature of `like` that calls `handler`."""

    def one(self, name):
        h = "<handler>"
        return h(self, name)

    def many(self, *args, **kwargs):
        h = "<handler>"
        return h(self, *args, **kwargs)

    code = (many if like.co_flags & 4 else one).__code__
    consts = tuple(handler if c == "<handler>" else c for c in code.co_consts)
    return code.replace(co_consts=consts, co_name=like.co_name)


def _install() -> None:
    _set(torch_trace, "_is_fx_tracing_flag", True)
    _set(Module.__call__, "__code__", _hand_over(_patched_call, _call_code))
    _set(Module.__getattr__, "__code__", _hand_over(_patched_getattr, _getattr_code))
    _set(Module, "training", _training)
    _set(torch.Tensor, "__getitem__", recorder(torch.Tensor.__getitem__, operator.getitem))
    for name in _FACTORIES:
        _set(vars(torch), name, recorder(getattr(torch, name), random=name in _RANDOM))
    for kind in _REGIONS:
        _set(kind, "__enter__", _region_enter(kind.__enter__))
        _set(kind, "__exit__", _region_exit(kind.__exit__))
    for registry in (wrapped_names, torch_trace._wrapped_fns_to_patch):
        for (_, name), table in list(registry.items()):
            original = table.get(name, getattr(builtins, name, _NOT_THERE))
            if original is not _NOT_THERE and not hasattr(original, "__fxlab_original__"):
                _set(table, name, recorder(original, wrapped=True))
    for kind, name in list(torch_trace._wrapped_methods_to_patch):
        if kind is not torch.Tensor or name != "__getitem__":
            _set(kind, name, recorder(getattr(kind, name), name))


def patch_globals(table: dict[str, Any], ids: Any) -> None:
    """Replace, in a globals dict, the functions whose id is in `ids` by recording ones."""
    for name, function in [(n, f) for n, f in table.items() if id(f) in ids and callable(f)]:
        with _lock:
            _set(table, name, recorder(function, wrapped=True, auto=True))


@functools.cache
def recorder(function: Callable[..., Any], target: Any = None, *, wrapped: bool = False,
             auto: bool = False, random: bool = False) -> Callable[..., Any]:  # fmt: skip
    """Return a stand-in for a function that records calls with a Proxy among the arguments.

    Args:
        function: what is called otherwise.
        target: the target to record instead; a method's name makes it a call_method.
        wrapped: it was marked as a leaf, which its Nodes tell.
        auto: only tracers that know the function record it.
        random: it is recorded also without a Proxy, unless it has a generator of its own.
    """
    target = target or function
    op = "call_method" if isinstance(target, str) else "call_function"

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = getattr(_local, "tracer", None)
        if tracer is None or (auto and id(function) not in tracer._autowrap_function_ids):
            return function(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        if proxy is None and (not random or kwargs.get("generator") is not None):
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


def _patched_call(mod: Module, *args: Any, **kwargs: Any) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _call(mod, *args, **kwargs)
    kind = type(mod)
    if id(kind) not in tracer._searched:
        tracer._searched.add(id(kind))
        with contextlib.suppress(AttributeError):  # a scripted module's class has no forward
            tracer._search_globals(getattr(kind.forward, "__globals__", None))
    return tracer.call_module(mod, functools.partial(tracer._inline, tracer, mod), args, kwargs)


def _patched_getattr(mod: Module, name: str) -> Any:
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        return _getattr(mod, name)
    modules = mod.__dict__.get("_modules")
    if modules is not None and name in modules and not tracer._own_getattr:
        return modules[name]
    return tracer._read(mod, name, _getattr(mod, name))


class TrainingFlag(int):
    """`module.training` while tracing: true or false in a branch, a get_attr as an argument."""

    path: str

    def __bool__(self) -> bool:
        tracer = current_tracer()
        if tracer is not None and is_users(sys._getframe(1).f_code.co_filename):
            tracer.warn("training", f"a branch on {self.path} was fixed to {int(self) == 1}: "
                        "train() and eval() of the traced module do not change it")  # fmt: skip
        return int(self) == 1


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
def _region_enter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(region: Any) -> Any:
        value = original(region)
        tracer = getattr(_local, "tracer", None)
        if tracer is not None and _by_user():
            kind, arguments = next(kv for kv in _REGIONS.items() if isinstance(region, kv[0]))
            args, name = (kind, *arguments(region)), kind.__name__
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
            arg = (Proxy(node, tracer),)  # also when the program leaves by an exception
            tracer.create_proxy("call_function", _exit_region, arg, {}, f"{node._name}_exit")
        return original(region, *exc)

    return leave


def _by_user() -> bool:
    """Say whether a user's line, a decorator on their function or generated code did this."""
    file = sys._getframe(2).f_code.co_filename
    return is_users(file) or file.endswith("_contextlib.py") or file.startswith("<eval_with_key>")
