"""One trace from beginning to end: inputs, the run with Proxies, and putting everything back.

The signature of the traced function becomes placeholders (with kinds, defaults and annotations, so
that generated code has the same signature); the model's state is compared before and after, since a
forward that writes to `self` must not leave Proxies in the user's model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import patches
from .errors import TraceError, TraceRuntimeError, call_site, trace_state
from .graph import Graph, _enter_region, _exit_region
from .proxy import Proxy
from .tracer import PH, PHBase, Tracer, _assert_is_none

_EMPTY = inspect.Parameter.empty
_P = inspect.Parameter
_CONTAINERS = frozenset((dict, list, set))


def capture(tracer: Tracer, root: Any, concrete_args: Any, example_inputs: Any) -> Graph:
    """Do the work of `Tracer.trace`."""
    _refuse_wrappers(root)
    is_module = isinstance(root, torch.nn.Module)
    if is_module:
        tracer.root, tracer.root_module_name = root, root._get_name()
        fn = getattr(type(root), tracer.traced_func_name, None)
        if fn is None:
            raise TraceRuntimeError(
                f"{type(root).__name__} has no method {tracer.traced_func_name!r} to trace",
                hint="set traced_func_name of your Tracer")  # fmt: skip
    else:
        tracer.root, fn = torch.nn.Module(), root
    inner = inspect.unwrap(fn)
    if inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner):
        raise TraceError(f"{inner.__name__} is a generator or coroutine",
                         expected="a function that returns its values",
                         right=f"symbolic_trace(lambda x: list({inner.__name__}(x)))")  # fmt: skip
    graph = tracer.graph = Graph(tracer_cls=type(tracer))
    tracer._reset()
    leaves = [  # what was a leaf stays one when it is traced again
        n._target for m in tracer._paths() if isinstance(vars(m).get("_graph"), Graph)
        for n in m._graph.nodes if n.meta.get("is_wrapped")]  # fmt: skip
    tracer._autowrap_function_ids.update(patches.wrapped_functions)
    tracer._autowrap_function_ids.update({id(fn): fn for fn in leaves})
    tracer._inline = inline
    tracer._own_getattr = type(tracer).getattr is not Tracer.getattr
    tracer._retracing, tracer._tracing = hasattr(tracer.root, "_graph"), True
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is not None:
        names = ("co_name", "co_filename", "co_firstlineno")
        graph._co_fields = {name: getattr(code, name) for name in names}
    with _state_kept(tracer), patches.tracing(tracer):
        for module in tracer._autowrap_search:
            tracer._search_globals(module.__dict__)
        for function in (inspect.unwrap(fn), *patches.wrapped_functions.values()):
            tracer._search_globals(getattr(function, "__globals__", None))
        result, annotation = _run(tracer, fn, is_module, concrete_args, example_inputs)
        value = tracer.create_arg(result)
        output = tracer.create_node("output", "output", (value,), {}, None, annotation)
        output.meta["source"] = ()
        _warn_of_written_constants(tracer)
    _drop_empty_regions(graph)
    tracer.submodule_paths = None
    tracer._tracing = False
    graph._trace_warnings = tracer._emit_warnings()
    return graph


def inline(tracer: Tracer, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with Proxies; its Nodes come from here and from the call's line."""
    outer, retracing = trace_state.outer, tracer._retracing
    trace_state.outer = call_site(4, True)
    tracer._retracing = hasattr(module, "_graph")
    try:
        plain = not (module._forward_hooks or module._forward_pre_hooks or _global_hooks())
        run = module.forward if plain else functools.partial(patches._call, module)
        return run(*args, **kwargs)  # without hooks directly: fewer frames to look through
    finally:
        trace_state.outer, tracer._retracing = outer, retracing


def _global_hooks() -> bool:
    hooks = torch.nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def _refuse_wrappers(root: Any) -> None:
    parallel = isinstance(root, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))
    if parallel or hasattr(root, "_orig_mod"):
        inner = "module" if parallel else "_orig_mod"
        raise TraceError(
            f"a {type(root).__name__} only wraps the model: its own code is not the program",
            hint=f"trace what it wraps: symbolic_trace(model.{inner})")  # fmt: skip
    if not callable(root):
        raise TraceError(f"{root!r} can't be traced", expected="a module or a function")


def _run(tracer: Tracer, fn: Any, is_module: bool, concrete_args: Any,
         example_inputs: Any) -> tuple[Any, Any]:  # fmt: skip
    """Make the placeholders and call the function; its result and return annotation."""
    fn, args = tracer.create_args_for_root(fn, is_module, concrete_args)
    if example_inputs is not None:
        _note_examples(tracer, example_inputs)
    annotation = _annotations(fn).get("return")
    hooked = is_module and (tracer.root._forward_hooks or tracer.root._forward_pre_hooks)
    if hooked and tracer.traced_func_name == "forward" and not hasattr(fn, "__fxlab_flat__"):
        return patches._call(*args), annotation
    return fn(*args), annotation


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
    star = [p for p in parameters if p.kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)]
    if isinstance(concrete_args, tuple):
        if concrete_args and len(star) == len(parameters):
            for i, value in enumerate(concrete_args):
                args.append(tracer.create_proxy("placeholder", f"input_{i}", (), {}))
                _transfer(value, args[-1])
            return root_fn, args
        plain = [p.name for p in parameters if p not in star]
        if len(plain) != len(concrete_args):
            raise TraceRuntimeError(f"concrete_args has {len(concrete_args)} values",
                                     expected=f"{len(plain)}: {', '.join(plain)}")  # fmt: skip
        concrete_args = dict(zip(plain, concrete_args, strict=True))
    notes, fixed = _annotations(inner), concrete_args or {}
    names = [p.name for p in parameters]
    unknown = [key for key in fixed if key.lstrip("*") not in names]
    if unknown:
        raise TraceRuntimeError(f"concrete_args names {unknown[0]!r}, which is no argument",
                                 expected=", ".join(names))  # fmt: skip
    for p in parameters:
        if p.name in fixed:
            args.append(pytree.tree_map(_concrete(tracer, p), fixed[p.name]))
        else:
            args.append(_placeholder(tracer, p, p.name, notes.get(p.name)))
    keywords = [p.name for p in parameters if p.kind is _P.KEYWORD_ONLY]
    call = root_fn
    if star:
        call = _with_plain_arguments(root_fn, names, is_module)
    elif keywords:
        call = _by_keyword(root_fn, keywords)
    flat, spec = pytree.tree_flatten(tuple(args))
    if all(child.is_leaf() for child in spec.children()):
        return call, args
    return _flattened(tracer, call, spec, ["self"] * is_module + names), flat


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
        text = f"{p.name} has been specialized to have value {value} but got another value"
        if value is None:
            tracer.create_proxy("call_function", _assert_is_none, (proxy, text), {})
        elif isinstance(value, (str, int, float, bool, complex)):
            torch._assert(proxy == value, text)
        else:
            tracer.warn("unchecked", f"the fixed value of {p.name} ({type(value).__name__}) is not "
                                     "compared at run time")  # fmt: skip
        return value

    return leaf


def _transfer(value: Any, proxy: Proxy) -> None:
    if isinstance(value, PHBase) and value is not PH:
        for name, entry in vars(value).items():
            setattr(proxy.node, name, entry)


def _with_plain_arguments(fn: Any, names: list[str], is_module: bool) -> Any:
    """Return a function whose *args and **kwargs are ordinary parameters, to be given Proxies."""
    if not isinstance(fn, types.FunctionType):
        fn = inspect.unwrap(fn)
    code, skip = fn.__code__, int(is_module)
    flags = code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    plain = code.replace(co_flags=flags, co_argcount=len(names) + skip, co_posonlyargcount=0,
                         co_kwonlyargcount=0)  # fmt: skip
    new = types.FunctionType(plain, fn.__globals__, fn.__name__, None, fn.__closure__)
    order = [names.index(n) + skip for n in code.co_varnames[skip : len(names) + skip]]

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return new(*args[:skip], *(args[i] for i in order))

    return call


def _by_keyword(fn: Any, keywords: list[str]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        cut = len(args) - len(keywords)
        return fn(*args[:cut], **dict(zip(keywords, args[cut:], strict=True)))

    return call


def _flattened(tracer: Tracer, fn: Any, spec: Any, names: list[str]) -> Callable[..., Any]:
    """Return `fn` on flat inputs and outputs; generated code flattens and rebuilds them."""
    from .codegen import _PyTreeCodeGen, _PyTreeInfo

    codegen = tracer.graph._codegen = _PyTreeCodeGen(_PyTreeInfo(names, spec, None))

    def flat(*values: Any) -> Any:
        result = fn(*pytree.tree_unflatten(list(values), spec))
        leaves, out_spec = pytree.tree_flatten(result)
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)
        return leaves

    flat.__fxlab_flat__ = True  # type: ignore[attr-defined]
    flat.__annotations__ = {}
    return flat


def _annotations(fn: Any) -> dict[str, Any]:
    """Return a function's annotations; text is resolved where it can be, else stays text."""
    fn = inspect.unwrap(fn)
    notes = dict(getattr(fn, "__annotations__", None) or {})
    for name, note in notes.items():
        if isinstance(note, str):
            with contextlib.suppress(Exception):
                notes[name] = eval(note, dict(getattr(fn, "__globals__", {})))
    return notes


def _note_examples(tracer: Tracer, example_inputs: Any) -> None:
    """Keep example inputs as fake tensors by the placeholder's target."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = [str(n._target) for n in tracer.graph.nodes if n._op == "placeholder"]
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, dict):
        leaves = list(example_inputs)
        if len(leaves) > len(names):
            leaves = pytree.tree_leaves(leaves)
        example_inputs = dict(zip(names, leaves, strict=False))
    mode = tracer._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer._examples = {
        name: pytree.tree_map_only(torch.Tensor, mode.from_tensor, value)
        for name, value in example_inputs.items()
    }


@contextlib.contextmanager
def _state_kept(tracer: Tracer) -> Iterator[None]:
    """Put back what the traced program changed on the model, and say so."""
    before = []
    for m, path in tracer._paths().items():
        parts = vars(m)
        if tracer.is_leaf_type(type(m)):
            before.append((m, path, parts.copy(), (), ()))
            continue
        kept = [(v, v.copy()) for v in parts.values() if type(v) in _CONTAINERS]
        held = [(k, t, t._version, t.clone()) for k, t in parts.items() if type(t) is torch.Tensor]
        before.append((m, path, parts.copy(), kept, held))
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        for m, path, fields, kept, held in before:
            for name, tensor, version, value in held:
                if tensor._version != version:
                    with torch.no_grad():
                        tensor.copy_(value)
                    where = f"{path}.{name}" if path else name
                    tracer.warn("written", f"the program writes into the tensor {where}, which is "
                                "no buffer; it was put back, and the graph does not write: use "
                                "register_buffer")  # fmt: skip
            if not (_equal(vars(m), fields) and all(_equal(now, old) for now, old in kept)):
                _restore(tracer, m, path, fields, kept)
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
            tracer.warn("grad", "the program switched gradients on or off for good; the graph "
                                "does not: use `with torch.no_grad():`")  # fmt: skip


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
    tracer.warn("state", f"the program writes to {names} of the model; the model was put back, and "
                         "the graph does not do it", place)  # fmt: skip


def _warn_of_written_constants(tracer: Tracer) -> None:
    """Say where a tensor that the program made is written to: the graph has one for all calls."""
    from .purity import effect

    for node in tracer.graph.nodes:
        for user in node.users if node._target in tracer.graph._constants else ():
            if user._args[:1] == (node,) and "writes" in (effect(user, tracer.root) or ""):
                place = (*user.meta.get("source", ()), None)[0]
                tracer.warn("constant", f"{user._name} writes into a tensor that was made while "
                            "tracing: all calls of the graph share it, and what was computed of it "
                            "before is fixed; begin with x.new_zeros(...), torch.zeros_like(x)",
                            place)  # fmt: skip


def _drop_empty_regions(graph: Graph) -> None:
    """Erase pairs of enter and exit with nothing between them."""
    for node in list(graph.nodes):
        enter = node._prev
        if node._target is _exit_region and enter._target is _enter_region:
            graph.erase_node(node)
            graph.erase_node(enter)


def check_against(root: Any, gm: Any, inputs: tuple[Any, ...]) -> None:
    """Compare a traced module with the original; name the first Node that differs.

    Raises:
        TraceError: they differ.
    """
    from .interpreter import Interpreter

    seen: dict[str, list[Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for path, module in root.named_modules() if isinstance(root, torch.nn.Module) else ():
            hook = lambda m, a, out, path=path: seen.setdefault(path, []).append(out)  # noqa: E731
            stack.callback(module.register_forward_hook(hook).remove)
        wanted = root(*inputs)
    first: list[Any] = []

    class Compare(Interpreter):
        def run_node(self, n: Any) -> Any:
            value = super().run_node(n)
            outs = seen.get(n.target) if n.op == "call_module" else None
            if outs and not first and not _close(outs.pop(0), value):
                first.append(n)
            return value

    with torch.random.fork_rng(devices=[]):
        got = Compare(gm).run(*inputs)
    if first or not _close(wanted, got):
        raise TraceError(
            "the traced program computes something else than the original on the check inputs",
            node=first[0] if first else gm.graph.output_node(),
            hint="something was fixed while tracing: see gm.meta['trace_warnings']")  # fmt: skip


def _close(a: Any, b: Any) -> bool:
    def same(x: Any, y: Any) -> bool:
        tensors = isinstance(x, torch.Tensor), isinstance(y, torch.Tensor)
        if all(tensors):
            return x.shape == y.shape and torch.allclose(x, y, 1e-4, 1e-5, equal_nan=True)
        return not any(tensors) and x == y

    xs, ys = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(xs) == len(ys) and all(map(same, xs, ys))
