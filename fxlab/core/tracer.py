"""How does a Python program become a Graph?

Symbolic tracing (paper, sections 4.1, 5.1, 5.2): run the program once with Proxies for its inputs;
`Tracer`'s methods decide what is recorded and can be overridden. The user's model is left exactly
as it was; what cannot be kept in a graph is said by a `TraceWarning` with its line.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

from . import capture, errors, patches
from .capture import PH as PH
from .capture import PHBase as PHBase
from .capture import PHWithMeta as PHWithMeta
from .errors import Frame, TraceError, TraceNameError, TraceRuntimeError, TraceWarning, call_site
from .graph import Graph
from .node import Args, Argument, Kwargs, Node, Target, add_ancestors, base_types
from .proxy import UNKNOWN, Attribute, ParameterProxy, Proxy, answers, refuse
from .purity import effect

_PLAIN = frozenset((*base_types, type(None), type(...))) - {torch.Tensor}
_CONSTANTS = {torch.Tensor: "_tensor_constant", torch.ScriptObject: "_torchbind_obj",
              pytree.TreeSpec: "_tree_spec_constant"}  # fmt: skip
_NOWHERE: Frame = ("<unknown>", 0, "?")
_HOOKS = ("create_node", "create_proxy", "call_module")
Root = torch.nn.Module | Callable[..., Any]
Fixed = dict[str, Any] | tuple[Any, ...] | None
Examples = tuple[Any, ...] | dict[str, Any] | None
recorded: list[Callable[[Any, Node], None]] = []
"""Told of each Node that is recorded in a trace that has constants: (tracer, node)."""


class Scope(NamedTuple):
    """The module whose forward is being traced: its dotted path and its class."""

    module_path: str
    module_type: Any


def assert_fn(x: Any) -> None:
    """Stands in a graph for an `assert` of the traced program (`Tracer.trace_asserts`)."""
    if not x:
        raise AssertionError("Assertion failed")


class TracerBase:
    """What every tracer can do: turn values into arguments, Nodes and Proxies."""

    graph: Graph
    record_stack_traces = check_mutable_operations = trace_asserts = proxy_buffer_attributes = False
    traced_func_name: str = "forward"
    root: Any = None
    root_function = _examples = cast(Any, None)
    _inline = staticmethod(capture.inline)
    _tracing = _retracing = False
    _top = Scope("", None)

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Begin like new: what the trace before found out is forgotten."""
        self.module_stack: dict[str, tuple[str, Any]] = {}
        self.num_calls: dict[str, int] = {}
        self.submodule_paths: dict[torch.nn.Module, str] | None = None
        self.tensor_attrs: dict[int, str] | None = None
        self._parameter_proxies: dict[str, Proxy] = {}
        self._searched, self._texts = set[int](), set[str]()
        self._raised: list[TraceError] = []
        self._notes, self._fresh = dict[str, Any](), dict[str, int]()
        self._warnings: dict[tuple[Any, ...], tuple[str, Frame]] = {}
        hooks: Any = (vars(kind).get(name) for kind in type(self).__mro__ for name in _HOOKS)
        self._hooks = {*map(id, patches.called), *(id(getattr(h, "__code__", None)) for h in hooks)}

    scope: Any = property(lambda self: Scope(*[self._top, *self.module_stack.values()][-1]),
                          lambda self, to: setattr(self, "_top", to), None,
                          "The module whose forward is traced; settable for the root.")  # fmt: skip

    @property
    def node_name_to_scope(self) -> dict[str, tuple[str, Any]]:
        """Name of each Node -> path and class of the module in whose forward it was made."""
        stacks = ((n.name, n.meta.get("nn_module_stack", {})) for n in self.graph.nodes)
        return {name: [self._top, *stack.values()][-1] for name, stack in stacks}

    def create_node(self, kind: str, target: Target, args: Args, kwargs: Kwargs,
                    name: str | None = None, type_expr: Any = None) -> Node:  # fmt: skip
        """Put a Node into the graph; override it to check or change what is recorded.

        Args:
            kind: the opcode.
            target: as in `Graph.create_node`, like the others.
            args: arguments that a Node can have.
            kwargs: likewise.
            name: wish for its name.
            type_expr: annotation.

        Raises:
            TraceError: the Node writes into a tensor, and `check_mutable_operations` is set.
        """
        node = self.graph.create_node(kind, target, args, kwargs, name, type_expr)
        if self.check_mutable_operations:
            self._check_mutable(node)
        if self._tracing:
            # Hooks and overrides of them are no lines of the program, nor a module's patched call.
            at, skip = cast(Any, sys._getframe(1)), 2
            while id(at.f_code) in self._hooks:
                at, skip = at.f_back, skip + 1
            node.meta["source"] = call_site(4, True, skip)
            if self.module_stack:
                node.meta["nn_module_stack"] = self.module_stack
            origin = errors.running_node() if self._retracing else None
            if origin is not None:
                add_ancestors(node, [origin])
        return node

    def _check_mutable(self, node: Node) -> None:
        reason = effect(node, self.root, impure_random=False) if "call" in node._op else None
        if reason is not None and "writes" in reason:
            self.graph.erase_node(node)
            raise TraceRuntimeError(f"a mutable operation was traced: {reason}", node=node,
                                     hint="use its out-of-place form")  # fmt: skip

    def proxy(self, node: Node) -> Proxy:
        """Return the Proxy for `node`; override it to use a class of your own."""
        return Proxy(node, self)

    def create_proxy(
        self, kind: str, target: Target, args: Args, kwargs: Kwargs, name: str | None = None,
        type_expr: Any = None, proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Proxy:  # fmt: skip
        """Record one operation and return the Proxy of its value.

        Args:
            kind: the opcode.
            target: what is called or read.
            args: as the program gave them, Proxies among them.
            kwargs: likewise.
            name: wish for the Node's name.
            type_expr: annotation.
            proxy_factory_fn: makes the Proxy instead of `self.proxy`.
        """
        args, kwargs = self.create_arg(args), self.create_arg(kwargs) if kwargs else {}
        node = self.create_node(kind, target, args, kwargs, name, type_expr)
        if self.graph._constants and self._tracing:
            for look in recorded:
                look(self, node)
        return self.proxy(node) if proxy_factory_fn is None else proxy_factory_fn(node)

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the traced program into something that can stand in a Node's arguments.

        Tensors and modules become get_attr Nodes while a module is traced. A tensor that is no
        attribute of the model is kept on the new GraphModule, never on the user's model.

        Raises:
            TraceError: a value that no graph can hold.
        """
        kind: Any = type(a)  # pyright: ignore[reportUnknownVariableType]
        if kind is Proxy:
            return a.__dict__["node"]
        if kind in _PLAIN:
            if kind is str and self._texts and any(part in a for part in self._texts):
                self.warn("text", f"text made from a Proxy became an argument: {a[:60]!r}")
            return a
        if kind is tuple:
            return tuple(map(self.create_arg, a))
        if kind is list:
            return [self.create_arg(e) for e in a]
        if kind is dict and all(type(key) is str for key in a):
            return {key: self.create_arg(value) for key, value in a.items()}
        if issubclass(kind, Proxy):
            return a.node
        constant = self._constant(a)
        if constant is not None:
            return constant
        if hasattr(a, "__fx_create_arg__"):
            return a.__fx_create_arg__(self)
        if issubclass(kind, slice):
            return slice(*(self.create_arg(e) for e in (a.start, a.stop, a.step)))
        if issubclass(kind, (range, enum.Enum, *base_types)):
            return a
        parts: Any
        if issubclass(kind, tuple):
            parts = tuple(self.create_arg(e) for e in a)
            if not hasattr(a, "_fields"):
                return a if all(map(operator.is_, parts, a)) else parts
            return self.create_node("call_function", cast(Any, type(a)), parts, {})
        if issubclass(kind, dict):
            for key in a:
                proxy = None if type(key) is str else patches.find_proxy(key)
                if proxy is not None:
                    raise errors.TraceNotImplementedError(
                        f"the traced value {proxy} is a key", node=proxy.node,
                        expected="keys that are known while tracing")  # fmt: skip
            parts = {key: self.create_arg(value) for key, value in a.items()}
            if kind is dict:
                return parts
        elif issubclass(kind, (list, set, frozenset)):
            parts = [self.create_arg(e) for e in a]
        elif dataclasses.is_dataclass(kind):
            fields = {f.name: self.create_arg(getattr(a, f.name)) for f in dataclasses.fields(a)}
            return self.create_node("call_function", cast(Any, type(a)), (), fields)
        elif issubclass(kind, (type, torch.nn.Module)) or (patches.find_hidden(a) is None):
            return a
        else:
            raise errors.TraceNotImplementedError(
                f"a {kind.__module__}.{kind.__qualname__} that holds traced values cannot stand in "
                "a graph", expected="numbers, text, tensors, tuples, lists, dicts, dataclasses",
                hint="return its parts as a tuple or dict, or give the class a method "
                "__fx_create_arg__(self, tracer)")  # fmt: skip
        # An OrderedDict, set or other subclass is built by a Node, so that its type is kept.
        factory = (a.default_factory,) if hasattr(a, "default_factory") else ()
        return self.create_node("call_function", cast(Any, type(a)), (*factory, parts), {})

    def _constant(self, a: Any) -> Node | None:
        """Return a get_attr Node for a tensor, module or other object of the traced module."""

    def to_bool(self, obj: Proxy) -> bool:
        """Answer `if obj:` for a Proxy; override it to choose a branch."""
        known = self.concrete(obj, "a branch")
        return bool(known) if known is not UNKNOWN else refuse(obj, "bool")

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Answer `iter(obj)` where the number of values is not plain from the code."""
        known = self.concrete(obj, "its length")
        if known is UNKNOWN:
            # For `**proxy` Python would put a TypeError of its own in the place of one of ours.
            return refuse(obj, "keys" if obj.node.target == "keys" else "iter")
        if issubclass(type(known), (tuple, list, torch.Tensor)):
            return iter([cast(Any, obj)[i] for i in range(len(known))])
        return iter(known)

    def keys(self, obj: Proxy) -> Any:
        """Answer `obj.keys()`, which Python calls for `**obj`."""
        return Attribute(obj, "keys")()

    def concrete(self, obj: Proxy, what: str) -> Any:
        """Return the value behind a Proxy if one of `answers` tells it, else UNKNOWN.

        Args:
            obj: the Proxy that is asked.
            what: for the TraceWarning that says what was fixed.
        """
        given = (answer(self, obj, what) for answer in answers)
        return next((value for value in given if value is not UNKNOWN), UNKNOWN)

    def warn(self, kind: str, message: str, place: Frame | None = None) -> None:
        """Note a TraceWarning; emitted when the trace is done.

        Args:
            kind: of one kind there is one warning for a line.
            message: its text.
            place: the user's line; by default the one that runs now.
        """
        place = place or (*call_site(1, True), _NOWHERE)[0]
        self._warnings.setdefault((kind, *place[:2]), (message, place))


class GraphAppendingTracer(TracerBase):
    """The tracer behind a hand-made `Proxy(node)`: it appends to that Node's graph.

    Args:
        graph: where it appends.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph


class Tracer(TracerBase):
    """The class behind `symbolic_trace`; override its methods to change what is captured.

    Args:
        autowrap_modules: Python modules whose functions are recorded, not run, on Proxies.
        autowrap_functions: single functions to treat the same way, wherever they are used.
        param_shapes_constant: answer a parameter's shape at once instead of recording it.

    >>> import torch
    >>> class KeepAll(Tracer):
    ...     def is_leaf_module(self, m, module_qualified_name):
    ...         return True
    >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()))
    >>> [node.name for node in KeepAll().trace(model).nodes]
    ['input_1', '_0', 'output']
    """

    def __init__(
        self, autowrap_modules: tuple[types.ModuleType, ...] = (math,), autowrap_functions:
        tuple[Callable[..., Any], ...] = (), param_shapes_constant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._autowrap_search = list(autowrap_modules)
        functions = [f for m in autowrap_modules for n, f in vars(m).items() if n[0] != "_"]
        functions = [*filter(callable, functions), *autowrap_functions]
        self._autowrap_function_ids = {id(f): f for f in functions}
        self.param_shapes_constant = param_shapes_constant
        self.root, self.root_module_name = torch.nn.Module(), ""

    # -- hooks --------------------------------------------------------------------------------

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Say whether a module is recorded as one call_module; by default torch.nn's are.

        Args:
            m: the module.
            module_qualified_name: its dotted path from the root.
        """
        return self.is_leaf_type(type(m))

    @staticmethod
    def is_leaf_type(kind: type) -> bool:
        """Say whether `kind` is one of torch.nn's that a trace does not look into by default."""
        of_torch = kind.__module__.startswith(("torch.nn", "torch.ao.nn"))
        return of_torch and not issubclass(kind, torch.nn.Sequential)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        """Return the dotted path of the module `mod` from the root.

        Raises:
            TraceError: (also a NameError) it is no sub-module of the root.
        """
        path = (self.submodule_paths or self._paths()).get(mod)
        if path is None:
            raise TraceNameError(
                f"a {type(mod).__name__} was called that is no sub-module of "
                f"{type(self.root).__name__}", hint="assign it to an attribute of the model in "
                "__init__ (a plain Python list or dict hides modules: use ModuleList, ModuleDict)",
                wrong="self.layers = [Linear(2, 2)]",
                right="self.layers = ModuleList([Linear(2, 2)])")  # fmt: skip
        return path

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Args,
                    kwargs: Kwargs) -> Any:  # fmt: skip
        """Record a leaf module's call, or run another module's forward with Proxies.

        Args:
            m: the called module.
            forward: runs it.
            args: of the call.
            kwargs: of the call.
        """
        path, kind, stack = self.path_of_module(m), type(m), self.module_stack
        calls = self.num_calls.get(path, 0)
        self.num_calls[path] = calls + 1
        self.module_stack = {**stack, f"{path}@{calls}" if calls else path: (path, kind)}
        try:
            if self.is_leaf_module(m, path):
                return self.create_proxy("call_module", path, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self.module_stack = stack

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """Answer the reading of a module's attribute: a Proxy for parameters and buffers.

        Args:
            attr: the attribute's name.
            attr_val: its value.
            parameter_proxy_cache: dotted path -> Proxy that was made before.
        """
        is_tensor = isinstance(attr_val, torch.Tensor)
        path = self._tensor_paths().get(id(attr_val)) if is_tensor else None
        if path is None:
            return attr_val
        if path not in parameter_proxy_cache:
            proxy = self.create_proxy("get_attr", path, (), {})
            if self.param_shapes_constant or not isinstance(attr_val, torch.nn.Parameter):
                proxy = ParameterProxy(self, proxy.node, path, attr_val)
            parameter_proxy_cache[path] = proxy
        return parameter_proxy_cache[path]

    def get_fresh_qualname(self, prefix: str) -> str:
        """Return the first of `{prefix}0`, `{prefix}1`, ... that the root does not have."""
        i = self._fresh.get(prefix, 0)  # those before are taken
        while hasattr(self.root, f"{prefix}{i}") or f"{prefix}{i}" in self.graph._constants:
            i += 1
        self._fresh[prefix] = i
        return f"{prefix}{i}"

    def _constant(self, a: Any) -> Node | None:
        prefix = next((p for k, p in _CONSTANTS.items() if isinstance(a, k)), None)
        if prefix is not None:
            path = self._tensor_paths().get(id(a))
            if path is None and isinstance(a, torch.nn.Parameter):
                raise TraceNameError("a parameter was used that is no member of the traced module",
                                     hint="assign it to an attribute of the model")  # fmt: skip
            if path is None:
                path = self._tensor_paths()[id(a)] = self._keep_constant(prefix, a)
        elif isinstance(a, torch.nn.Module):
            path = self._paths().get(a)
        else:
            return None
        return self.create_node("get_attr", path, (), {}) if path else None

    def _keep_constant(self, prefix: str, a: Any) -> str:
        name = self.get_fresh_qualname(prefix)
        self.graph._constants[name] = a
        return name

    # -- the trace ------------------------------------------------------------------------------

    def trace(self, root: Root, concrete_args: Fixed = None, *,
              example_inputs: Examples = None) -> Graph:  # fmt: skip
        """Run `root` with Proxies and return the Graph of what it did.

        Args:
            root: a module or function.
            concrete_args: values to fix, by name or for all arguments in order; `PH` inside a
                structure leaves that place open.
            example_inputs: tensors (their values do not matter) that make ranks and sizes known
                where the program asks for them now.

        Raises:
            TraceError: the program asked a Proxy for something that only a run can tell.
        """
        return capture.capture(self, root, concrete_args, example_inputs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None,
    ) -> tuple[Callable[..., Any], list[Any]]:  # fmt: skip
        """Make one placeholder per parameter of `root_fn`.

        Args:
            root_fn: the function to trace.
            is_module: its first parameter is `self`.
            concrete_args: values to fix.

        Returns:
            A function that takes plain positional arguments, and those arguments.
        """
        return capture.arguments(self, root_fn, is_module, concrete_args)

    def _search_globals(self, table: dict[str, Any] | None) -> None:
        """Patch the functions that are to be recorded in a dict of globals, once per trace."""
        if table is not None and id(table) not in self._searched:
            self._searched.add(id(table))
            patches.patch_globals(table, self._autowrap_function_ids)

    def _paths(self) -> dict[torch.nn.Module, str]:
        """Return module -> its first dotted path: `named_modules`, without its cost by depth."""
        if self.submodule_paths is None:
            found = self.submodule_paths = dict[torch.nn.Module, str]()
            todo: list[tuple[str, torch.nn.Module]] = [("", self.root)]
            while todo:
                path, module = todo.pop()
                if module not in found:
                    found[module], parts = path, module._modules
                    if parts:
                        dot, parts = f"{path}." if path else "", reversed(parts.items())
                        todo += [(dot + name, part) for name, part in parts if part is not None]
        return self.submodule_paths

    def _tensor_paths(self) -> dict[int, str]:
        """Return id -> dotted path of each tensor that the root holds, and of kept constants."""
        if self.tensor_attrs is None:
            ids: dict[int, str] = {}
            kinds = tuple(_CONSTANTS)
            for module, path in self._paths().items():
                dot = path + "." if path else ""
                for table in (module._parameters, module._buffers, module.__dict__):
                    for name, value in table.items():
                        if isinstance(value, kinds):
                            ids.setdefault(id(value), dot + name)
            self.tensor_attrs = ids
        return self.tensor_attrs

    def _emit_warnings(self) -> list[str]:
        """Emit each noted TraceWarning once; return their texts."""
        for error in self._raised:
            text = f"the program caught this and went on another way: {error.message}"
            self.warn("caught", text, (*error.where, _NOWHERE)[0])
        texts: list[str] = []
        for message, place in self._warnings.values():
            texts.append(f"{message}\n  at {errors.quote(place)}")
            warnings.warn_explicit(texts[-1], TraceWarning, place[0], max(place[1], 1))
        return texts


def wrap(fn_or_name: Any) -> Any:
    """Mark a function as a leaf: a trace records its call and does not look inside.

    Works at module level, in a function body and in a notebook cell; as a decorator or with a name.

    Args:
        fn_or_name: the function, or the name under which the calling file knows it.

    Raises:
        TraceError: it is neither.

    >>> import fxlab
    >>> @fxlab.wrap
    ... def scale(x):
    ...     return x * 2 if x.sum() > 0 else x
    >>> fxlab.symbolic_trace(lambda x: scale(x)).graph.find_nodes(op="call_function", target=scale)
    [scale]
    """
    if callable(fn_or_name):
        fn = inspect.unwrap(fn_or_name, stop=lambda f: not hasattr(f, "__fxlab_original__"))
        patches.wrapped_functions[id(fn)] = fn
    elif isinstance(fn_or_name, str):
        table = sys._getframe(1).f_globals
        patches.wrapped_names[(id(table), fn_or_name)] = table
    else:
        raise TraceRuntimeError(f"wrap got {fn_or_name!r}", expected="a function or its name")
    return fn_or_name


def is_fx_tracing() -> bool:
    """Say whether a trace, fxlab's or torch.fx's, is running in this process."""
    return patches.torch_trace._is_fx_tracing_flag


def is_fx_symbolic_tracing() -> bool:
    """Say whether a symbolic trace is running and torch.compile is not."""
    return is_fx_tracing() and not torch.compiler.is_compiling()


def symbolic_trace(root: Root, concrete_args: Fixed = None, *,
                   example_inputs: Examples = None) -> Any:  # fmt: skip
    """Trace a module or function and return it as a GraphModule; see `Tracer.trace`.

    Raises:
        TraceError: it cannot be traced.
    """
    from .graph_module import GraphModule

    tracer = Tracer()
    graph = tracer.trace(root, concrete_args, example_inputs=example_inputs)
    named = type(root) if isinstance(root, torch.nn.Module) else root
    name = getattr(named, "__name__", type(root).__name__)
    gm = GraphModule(tracer.root, graph, name if name.isidentifier() else "GraphModule")
    gm.meta["trace_warnings"] = list(graph._trace_warnings)
    return gm
