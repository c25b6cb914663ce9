"""How does a Graph become a Module that runs, and how does it stay in step with its Graph?

A `GraphModule` (paper, section 4.3) holds a Graph and the parameters and modules that it needs;
`forward` is generated from the Graph. Compilation is lazy: an edit only marks the code as stale,
and the next use of `forward` writes and compiles it once. So no code runs that the Graph does not
mean, and a thousand edits cost one compilation.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame

from . import errors, state
from .codegen import PythonCode
from .errors import CodegenError, RewriteError
from .graph import MISSING, Graph, until_left
from .pickling import why_not

_compiling = threading.RLock()
_next_number = itertools.count().__next__
_HOOKS = {"_replace_hooks": "replace_node", "_create_node_hooks": "create_node",
          "_erase_node_hooks": "erase_node", "_deepcopy_hooks": "deepcopy"}  # fmt: skip


class _LazyForward:
    """Stands in the class for `forward` while the code is stale; the first look compiles it.

    It is a non-data descriptor that puts the plain function in its own place, so that whoever
    looks (a call, `inspect.signature`, TorchScript, torch.compile, a replica in another thread)
    only ever gets a plain function. A second one guards `_call_impl`, which torch.compile looks
    at before it traces into a call and would otherwise trace into the compilation.
    """

    def __init__(self, module: GraphModule, name: str) -> None:
        self.module, self.name = weakref.ref(module), name

    def __get__(self, instance: GraphModule | None, owner: type) -> Any:
        module = instance if instance is not None else self.module()
        if module is None:
            raise CodegenError("the GraphModule of this class is gone, and so is its forward")
        module._compile()
        return getattr(owner if instance is None else instance, self.name)


def _own_class(gm: GraphModule) -> type[GraphModule]:
    """Return the class of this one instance, which somebody may have derived another one from."""
    return next(kind for kind in type(gm).__mro__ if "_of_one_instance" in vars(kind))


class _LaterCode:
    """What `recompile()` returns: the PythonCode, written when one looks at it."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module._python_code(), name)


class GraphModule(nn.Module):
    """A Module whose `forward` is generated from a Graph.

    Args:
        root: the Module (or dict from dotted path to value) that has what the Graph reads and
            calls. Only that is taken over; parameters and modules are shared, not copied.
        graph: the Graph; it may be shared by several GraphModules.
        class_name: the name that `repr` and error messages show.

    Raises:
        RewriteError: `root` is neither, or `graph` is no Graph.

    `meta` is a dict for passes (reports, warnings of the trace). Attributes and methods that the
    traced model has and this Module lacks can be read through it; `original_type` is its type.

    >>> import torch
    >>> graph = Graph()
    >>> _ = graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    >>> gm = GraphModule(nn.Module(), graph)
    >>> gm(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    >>> print(gm.code.strip())
    def forward(self, x):
        relu = torch.relu(x);  x = None
        return relu
    """

    _code: Any = None
    _edition = 0
    __constants__ = ("_edition",)  # TorchScript compiles anew what has another constant
    __jit_unused_properties__ = ("graph", "code", "original_type")
    print_readable: Callable[..., str]  # fxlab/display, as is the next
    to_folder: Callable[..., None]
    delete_all_unused_submodules: Callable[..., None]  # fxlab/passes/cleanup

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphModule:
        """Give each instance a class of its own, since `forward` belongs to a class."""
        base = next(c for c in cls.__mro__ if "_of_one_instance" not in vars(c))
        names = {"_of_one_instance": True, "__module__": base.__module__}
        self = super().__new__(type(cls.__name__, (base,), names))  # type: ignore[arg-type]
        self.__dict__.update({hooks: [] for hooks in _HOOKS}, meta={}, _original=(None, {}))
        return self

    def __init__(self, root: nn.Module | dict[str, Any], graph: Graph,
                 class_name: str = "GraphModule") -> None:  # fmt: skip
        super().__init__()
        type(self).__name__ = type(self).__qualname__ = class_name
        if isinstance(root, nn.Module):
            self.training = root.training
            state.copy_from_module(root, self, graph)
            self.__dict__["_original"] = state.look_at(root)
        elif isinstance(root, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            state.copy_from_dict(root, self, graph)
        else:
            raise RewriteError(f"a GraphModule can't take its state from a {type(root).__name__}",
                               expected="a Module, or a dict from path to value")  # fmt: skip
        self.graph = graph

    # -- code -----------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The Graph. Assigning another one makes `forward` follow it."""
        return self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RewriteError(f"gm.graph must be a Graph, got {type(graph).__name__}")
        old = self.__dict__.get("_graph")
        if old is not None:
            old._detach(self)
            old.remove_listener(self._hear)
        self.__dict__["_graph"] = graph
        graph._attach(self)
        if self._create_node_hooks or self._erase_node_hooks:
            graph.add_listener(self._hear)
        self._code_is_stale()

    @property
    def code(self) -> str:
        """The Python source of `forward`."""
        return self._python_code().src

    def recompile(self) -> Any:
        """Mark the code as stale. Edits do so themselves; the next use of `forward` compiles.

        Returns:
            The PythonCode, written when one of its fields is read.
        """
        self._code_is_stale()
        codegen = self._graph._codegen
        if codegen._body_transformer is not None:  # it may be registered for this call only
            codegen._recompiled_with = codegen._body_transformer
            self._compile()
        return _LaterCode(self)

    def _code_is_stale(self) -> None:
        cls = _own_class(self)
        with _compiling:
            if type(vars(cls).get("forward")) is not _LazyForward:
                cls._call_impl = _LazyForward(self, "_call_impl")  # type: ignore[assignment]
                cls.forward = _LazyForward(self, "forward")  # type: ignore[assignment]
                cls._edition = _next_number()

    def _python_code(self) -> PythonCode:
        return self._compile() and self._code

    def _compile(self) -> Any:
        """Return the plain function `forward`; write and compile it if it is stale."""
        with _compiling:
            cls, graph = _own_class(self), self._graph
            function = vars(cls).get("forward")
            if function is not None and type(function) is not _LazyForward:
                return function
            version, code = graph.version, graph.python_code("self")
            self.__dict__.update(graph._codegen.module_fields())
            function = _run_source(code, graph._codegen._func_name)
            cls._code, cls.forward = code, function
            # A derived class's own, or Module's; never the stand-in of another instance.
            calls = (vars(kind).get("_call_impl") for kind in cls.mro()[1:])
            cls._call_impl = next(call for call in calls if callable(call))
            graph._compiled = graph._watched = True
            if graph.version != version:
                self._code_is_stale()
            return function

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self._edition < 0:  # never; but so torch.compile, where it traces a call, guards on it
            raise AssertionError
        try:
            return super()._call_impl(*args, **kwargs)  # pyright: ignore - torch has no types here
        except Exception as error:
            _explain(error)
            raise

    # -- state ----------------------------------------------------------------------------------

    @contextmanager
    def _edit(self, path: str) -> Generator[None, None, None]:
        """Do one edit of the state at `path` inside: it counts, and listeners are told once."""
        fields = self.__dict__
        graph = None if path in ("graph", "meta") else fields.get("_graph")
        if graph is None or "_editing" in fields or "_is_replica" in fields:
            yield
            return
        before = state.peek(self, path) if graph._listeners else None
        fields["_editing"] = True
        try:
            yield
        finally:
            del fields["_editing"]
        graph.version += 1
        if graph._listeners:
            after = state.peek(self, path)
            if after is not before:
                module = isinstance(before, nn.Module) or isinstance(after, nn.Module)
                old, new = ({"path": path, "value": v, "module": self} for v in (before, after))
                graph._changed("module" if module else "attr", None, old, new)

    def add_submodule(self, target: str, m: nn.Module) -> bool:
        """Add `m` at the dotted path `target`, with empty Modules on the way where none are.

        Returns:
            Whether it could be added: False if something on the way is no Module.
        """
        *prefix, name = target.split(".")
        module: nn.Module = self
        for i, part in enumerate(prefix, 1):
            if getattr(module, part, None) is None:
                with self._edit(".".join(prefix[:i])):
                    module.add_module(part, nn.Module())
            module = getattr(module, part)
            if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                return False
        with self._edit(target):
            module.add_module(name, m)
        return True

    def delete_submodule(self, target: str) -> bool:
        """Delete the sub-module at the dotted path `target`; False if there is none."""
        if not isinstance(state.peek(self, target), nn.Module):
            return False
        prefix, _, name = target.rpartition(".")
        with self._edit(target):
            delattr(state.peek(self, prefix) if prefix else self, name)
        return True

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__
        if name in fields.get("_modules", ()):
            return fields["_modules"][name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            original: Any = fields.get("_original", (None, {}))
            static, (kind, attributes) = inspect.getattr_static, original
            if name[:1] == "_" or static(type(self), name, None) is not None:
                raise
            found = attributes.get(name, static(kind, name, MISSING))
            plain = found is not MISSING and not hasattr(found.__class__, "__get__")
            if plain or name in attributes:
                return found
            if isinstance(found, types.FunctionType):
                return types.MethodType(found, self)
            if isinstance(found, (staticmethod, classmethod)):
                return getattr(kind, name)
            raise

    @property
    def original_type(self) -> type | None:
        """The type of the Module that was traced, or None."""
        return self._original[0]

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            if name not in ("_graph", "_original"):
                new.__dict__[name] = copy.deepcopy(value, memo)
        new.__dict__["_original"] = self._original
        new.graph = copy.deepcopy(self._graph, memo)
        for hook in self._deepcopy_hooks:
            hook(new)
        return new

    def __copy__(self) -> GraphModule:
        """Return a GraphModule that shares the Graph, the tensors and the modules that it calls."""
        new = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = value.copy() if type(value) in (dict, set) else value
        new._modules.clear()
        del new.__dict__["_graph"]
        state.copy_from_module(self, new, self._graph)
        for name, module in self._modules.items():
            new._modules.setdefault(name, module)
        new.graph = self._graph
        return new

    def _replicate_for_data_parallel(self) -> GraphModule:
        replica = object.__new__(type(self))
        for name, value in self.__dict__.items():
            replica.__dict__[name] = value.copy() if name in ("_buffers", "_modules") else value
        replica.__dict__.update(_parameters={}, _is_replica=True)
        return replica

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the Graph itself, not a re-trace of its source."""
        fields = {k: v for k, v in self.__dict__.items() if k not in ("_in_spec", "_out_spec")}
        kind, held = self._original
        held = {name: value for name, value in held.items() if not why_not(value)}
        kept = pickle.dumps((None if why_not(kind) else kind, held))
        fields.update({hooks: [] for hooks in _HOOKS}, _original=(None, {}), _kept=kept)
        base = type(self).__mro__[1]
        return base.__new__, (base,), (type(self).__name__, fields)

    def __setstate__(self, named: tuple[str, dict[str, Any]]) -> None:
        type(self).__name__ = type(self).__qualname__ = named[0]
        graph = named[1].pop("_graph")
        super().__setstate__(named[1])  # pyright: ignore - torch has no types here
        with suppress(Exception):  # where the traced model's class is not to be had, it runs too
            self.__dict__["_original"] = pickle.loads(self.__dict__.pop("_kept", b""))
        self.graph = graph

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.code}"

    # -- torch.fx's node hooks ------------------------------------------------------------------

    def _hear(self, kind: str, graph: Graph, node: Any, before: Any, after: Any) -> None:
        if kind in ("create", "erase"):
            for hook in list(self.__dict__[f"_{kind}_node_hooks"]):
                hook(node)

    def _change_hooks(self, hooks: str, change: str, f: Callable[..., Any]) -> None:
        getattr(self.__dict__[hooks], change)(f)
        self.graph = self._graph  # which is listened to if there is a hook for that

    def _set_replace_hook(self, f: Callable[..., Any]) -> ExitStack:
        self._change_hooks("_replace_hooks", "append", f)
        return until_left(lambda: self._change_hooks("_replace_hooks", "remove", f))


# torch.compile is to see the generated function, whose code is one edition's of one module, and not
# this call, which all share; and nothing of what compiles that function.
_skip, _go_on = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
for _function, _inside in ((GraphModule._call_impl, _go_on), (_LazyForward.__get__, _skip)):
    _strategy = eval_frame._FrameExecStrategy(_skip, _inside)
    eval_frame.set_code_exec_strategy(_function.__code__, _strategy)


def _as_one_edit(name: str) -> Callable[..., Any]:
    """Return a method of nn.Module as one edit of the state that its first argument names."""
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def method(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        with self._edit(args[0] if args else kwargs.get("name") or kwargs["target"]):
            return original(self, *args, **kwargs)

    return method


for _name in ("__setattr__", "__delattr__", "add_module", "register_buffer", "register_parameter",
              "set_submodule"):  # fmt: skip
    setattr(GraphModule, _name, _as_one_edit(_name))
for _list, _name in _HOOKS.items():
    for _verb, _change in (("register", "append"), ("unregister", "remove")):
        _method = functools.partialmethod(GraphModule._change_hooks, _list, _change)
        setattr(GraphModule, f"_{_verb}_{_name}_hook", _method)


def _run_source(code: PythonCode, function_name: str) -> Any:
    """Compile generated source; return its function, known to tracebacks, linecache and `where`."""
    file = f"{errors.GENERATED}{_next_number()}"
    scope = dict(code.globals)
    exec(compile(code.src, file, "exec", dont_inherit=True), scope)
    function = scope.pop(function_name)
    errors.register_generated(file, code, function)
    spec, defaults = function.__code__, function.__defaults__ or ()
    names = spec.co_varnames[spec.co_argcount - len(defaults) : spec.co_argcount]
    # The very objects that the user wrote, not equal ones that a literal made.
    function.__defaults__ = tuple(map(code.defaults.get, names, defaults)) or None
    keyword: dict[str, Any] = function.__kwdefaults__ or {}
    keyword.update({name: code.defaults.get(name, value) for name, value in keyword.items()})
    return function


def _explain(error: BaseException) -> None:
    """Add to an error from generated code the line that failed and whose source it stands for."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = errors.generated_code.get(frame.f_code.co_filename)
        if code is not None:
            errors.add_run_note(error, code.node_at(line), code.src.splitlines()[line - 1])
            return
