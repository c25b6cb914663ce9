"""One trace from beginning to end: inputs, the run with Proxies, and putting everything back.

The signature of the traced function becomes placeholders (with kinds, defaults and annotations, so
that generated code has the same signature). Whoever wants to stand around every trace, for example
to say what it lost, adds a context manager to `watchers`.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree

from . import patches
from .codegen import CodeGen
from .errors import TraceError, TraceRuntimeError, call_site, trace_state
from .graph import Graph
from .node import base_types
from .proxy import Proxy

if TYPE_CHECKING:
    from .tracer import Tracer

_EMPTY = inspect.Parameter.empty
_P = inspect.Parameter
_every: Any = torch.nn.modules.module
_HOOKS_OF_ALL: list[Any] = [_every._global_forward_hooks, _every._global_forward_pre_hooks]

watchers: list[Callable[[Tracer], contextlib.AbstractContextManager[None]]] = []
"""Entered around every trace, and left after its output Node is there."""


class Calls:
    """How a function is called with Proxies, and whether again when it raised (`once_more`)."""

    once_more: Callable[[Any, Exception], bool]  # fxlab/tracing sets it and the next
    without_stars: Callable[[Any], Any]
    by_keyword: Callable[[Any, list[str]], Any]


class PHBase:
    """A placeholder inside `concrete_args`; attributes that you set on it go to its Node."""

    def __repr__(self) -> str:
        return "PH"


PH = PHBase()


class PHWithMeta(PHBase):
    """A placeholder inside `concrete_args` with a key of your own, `ph_key`, for its Node."""

    def __init__(self, ph_key: str | None = None) -> None:
        self.ph_key = ph_key


def capture(tracer: Tracer, root: Any, concrete_args: Any, example_inputs: Any) -> Graph:
    """Do the work of `Tracer.trace`."""
    try:
        return _capture(tracer, root, concrete_args, example_inputs)
    except Exception as error:
        if not Calls.once_more(tracer, error):
            raise
    return _capture(tracer, root, concrete_args, example_inputs)


def _capture(tracer: Tracer, root: Any, concrete_args: Any, example_inputs: Any) -> Graph:
    fn, is_module = _function_of(tracer, root), isinstance(root, torch.nn.Module)
    graph = tracer.graph = Graph(tracer_cls=type(tracer))
    tracer._reset()
    tracer._examples, tracer.root_function = example_inputs, inspect.unwrap(fn)
    tracer._autowrap_function_ids.update(patches.wrapped_functions)
    tracer._retracing, tracer._tracing = hasattr(tracer.root, "_graph"), True
    with contextlib.ExitStack() as around:
        for watcher in watchers:
            around.enter_context(watcher(tracer))
        around.enter_context(patches.tracing(tracer))
        for module in tracer._autowrap_search:
            tracer._search_globals(module.__dict__)
        for function in (tracer.root_function, *patches.wrapped_functions.values()):
            tracer._search_globals(getattr(function, "__globals__", None))
        fn, args = tracer.create_args_for_root(fn, is_module, concrete_args)
        annotation = _annotations(fn, "return").get("return")
        hooked = is_module and (tracer.root._forward_hooks or tracer.root._forward_pre_hooks)
        if hooked and tracer.traced_func_name == "forward" and not hasattr(fn, "__fxlab_flat__"):
            fn = patches._call
        value = tracer.create_arg(fn(*args))
        output = tracer.create_node("output", "output", (value,), {}, None, annotation)
        output.meta["source"] = ()
    tracer.submodule_paths = None
    tracer._tracing = False
    graph._trace_warnings = tracer._emit_warnings()
    return graph


def _function_of(tracer: Tracer, root: Any) -> Any:
    """Return the function to trace, and set the tracer's root."""
    if not callable(root):
        raise TraceError(f"{root!r} can't be traced", expected="a module or a function")
    fn: Any = root
    tracer.root = torch.nn.Module()
    if isinstance(root, torch.nn.Module):
        tracer.root, tracer.root_module_name = root, root._get_name()
        fn = getattr(type(root), tracer.traced_func_name, None)
        if fn is None:
            raise TraceRuntimeError(
                f"{type(root).__name__} has no method {tracer.traced_func_name!r} to trace",
                hint="set traced_func_name of your Tracer")  # fmt: skip
    return fn


def inline(tracer: Tracer, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with Proxies; its Nodes come from here and from the call's line."""
    outer, retracing = trace_state.outer, tracer._retracing
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none
    tracer._search_globals(getattr(forward, "__globals__", None))
    trace_state.outer = call_site(4, True, 2)
    tracer._retracing = hasattr(module, "_graph")
    hooked: Any = module._forward_hooks or module._forward_pre_hooks  # pyright: ignore
    try:
        if hooked or any(_HOOKS_OF_ALL):
            return patches._call(module, *args, **kwargs)
        return module.forward(*args, **kwargs)  # directly: fewer frames to look through
    finally:
        trace_state.outer, tracer._retracing = outer, retracing


def arguments(tracer: Tracer, root_fn: Any, is_module: bool,
              concrete_args: Any = None) -> tuple[Callable[..., Any], list[Any]]:  # fmt: skip
    """Do the work of `Tracer.create_args_for_root`."""
    inner = inspect.unwrap(root_fn)
    try:
        parameters = list(inspect.signature(inner).parameters.values())
    except (TypeError, ValueError):
        raise TraceError(
            f"{inner!r} has no signature that Python can tell",
            hint="trace a function of yours that calls it",
            right="symbolic_trace(lambda x: fn(x))") from None  # fmt: skip
    args: list[Any] = []
    if is_module:
        if not parameters or parameters[0].kind is _P.VAR_POSITIONAL:
            raise TraceRuntimeError("`self` cannot be part of *args of a forward that is traced")
        args.append(tracer.root)
        parameters = parameters[1:]
    names = [p.name for p in parameters]
    star = [p.name for p in parameters if p.kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)]
    given: Any = concrete_args
    if isinstance(given, tuple):
        values = cast(tuple[Any, ...], given)
        if values and star == names:
            for i, value in enumerate(values):
                args.append(tracer.create_proxy("placeholder", f"input_{i}", (), {}))
                _transfer(value, args[-1])
            return root_fn, args
        plain = [name for name in names if name not in star]
        if len(plain) != len(values):
            raise TraceRuntimeError(f"concrete_args has {len(values)} values",
                                     expected=f"{len(plain)}: {', '.join(plain)}")  # fmt: skip
        given = dict(zip(plain, values, strict=True))
    codegen: Any = getattr(getattr(tracer.root, "_graph", None), "_codegen", None)
    opened = codegen.open_inputs(names) if isinstance(codegen, CodeGen) else {}
    notes, fixed = _annotations(inner, *names), given or opened
    unknown = [key for key in fixed if key.lstrip("*") not in names]
    if unknown:
        raise TraceRuntimeError(f"concrete_args names {unknown[0]!r}, which is no argument",
                                 expected=", ".join(names))  # fmt: skip
    for p in parameters:
        if p.name in fixed:
            args.append(pytree.tree_map(_concrete(tracer, p), fixed[p.name]))
        else:
            args.append(_placeholder(tracer, p, p.name, notes.get(p.name)))
    call = Calls.without_stars(root_fn) if star else root_fn
    keywords = [p.name for p in parameters if p.kind > _P.POSITIONAL_OR_KEYWORD]
    if keywords:
        call = Calls.by_keyword(call, keywords)
    flat, spec = pytree.tree_flatten(tuple(args) if fixed else ())
    if all(child.is_leaf() for child in spec.children()):
        return call, args
    return CodeGen.structured(tracer, call, spec, ["self"] * is_module + names), flat


def _placeholder(tracer: Tracer, p: inspect.Parameter, name: str, annotation: Any = None) -> Proxy:
    stars = {_P.VAR_POSITIONAL: "*", _P.VAR_KEYWORD: "**"}.get(p.kind, "")
    proxy = tracer.create_proxy("placeholder", stars + name, (), {}, None, annotation)
    node = proxy.node
    node.meta["source"] = ()
    if p.kind is not _P.POSITIONAL_OR_KEYWORD:
        node.meta["param_kind"] = p.kind.name
    if p.default is not _EMPTY:  # not through create_arg: the object itself is the default
        node._set_args((p.default,), {})
        if node._args[0] is not p.default:
            node.meta["param_default"] = p.default
    return proxy


def _concrete(tracer: Tracer, p: inspect.Parameter) -> Callable[[Any], Any]:
    """Return what makes a placeholder for each leaf of a fixed value, and checks it at run time."""
    count = itertools.count(1)

    def leaf(value: Any) -> Any:
        proxy = _placeholder(tracer, p, f"{p.name}_{next(count)}")
        if isinstance(value, PHBase):
            _transfer(value, proxy)
            return proxy
        if isinstance(value, (type(None), *base_types)) and not isinstance(value, torch.Tensor):
            text = f"{p.name} has been specialized to have value {value} but got another value"
            same = operator.is_ if value is None else operator.eq
            cast(Any, torch)._assert(
                tracer.create_proxy("call_function", same, (proxy, value), {}), text
            )
        else:
            tracer.warn("unchecked", f"the fixed value of {p.name} ({type(value).__name__}) is not "
                                     "compared at run time")  # fmt: skip
        return value

    return leaf


def _transfer(value: Any, proxy: Proxy) -> None:
    if isinstance(value, PHBase) and value is not PH:
        for name in vars(value).keys() - set(dir(proxy.node)):  # what the Node has, it keeps
            setattr(proxy.node, name, vars(value)[name])


def _annotations(fn: Any, *names: str) -> dict[str, Any]:
    """Return some annotations of a function; text is resolved where it can be, else stays text."""
    fn = inspect.unwrap(fn)
    given: dict[str, Any] = getattr(fn, "__annotations__", None) or {}
    notes = {name: given[name] for name in names if name in given}
    for name, note in notes.items():
        if isinstance(note, str):
            with contextlib.suppress(Exception):
                notes[name] = eval(_compiled(note), dict(getattr(fn, "__globals__", {})))
    return notes


_compiled = functools.lru_cache(1000)(functools.partial(compile, filename="<note>", mode="eval"))
