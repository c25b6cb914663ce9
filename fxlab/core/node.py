"""What is one operation of a captured program, and how are its arguments kept?

The IR of the paper (section 4.2, appendix A) has six opcodes. A `Node` is one operation; an edge
of the graph is a Node that stands somewhere inside another Node's arguments. Everything that can
change about a Node goes through the setters of this file and the primitives of `Graph`, so that
code never goes stale and a recorder sees every edit.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from .errors import RewriteError

if TYPE_CHECKING:
    from .graph import Graph

Argument = Any
"""Node, number, text, None, ..., dtype, device, any object, or tuple, list, dict, slice of those."""
Target = Callable[..., Any] | str
base_types = (str, int, float, bool, complex, torch.dtype, torch.Tensor, torch.device,
              torch.memory_format, torch.layout)  # fmt: skip
OPCODES = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_legal_ops = frozenset((*OPCODES, "root"))
_new_id = itertools.count(1).__next__

_HOW_TO_CHANGE = """{what} of a Node cannot be changed in place: users would go stale.
  try: copy it, change the copy, assign the whole argument tuple
  wrong:
      node.{field}[0].append(value)
  right:
      new = list(node.args[0])
      new.append(value)
      node.args = (new, *node.args[1:])"""


def _no_change(what: str, field: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_HOW_TO_CHANGE.format(what=what, field=field))

    return refuse


class immutable_list(list):  # noqa: N801 - torch.fx's name
    """A list inside a Node's arguments; every method that would change it says how to do it."""

    __hash__ = lambda self: hash(tuple(self))  # type: ignore[assignment]  # noqa: E731

    def __reduce__(self) -> tuple[Any, ...]:
        return immutable_list, (list(self),)


class immutable_dict(dict):  # noqa: N801 - torch.fx's name
    """A dict inside a Node's arguments; every method that would change it says how to do it."""

    __hash__ = lambda self: hash(frozenset(self.items()))  # type: ignore[assignment]  # noqa: E731

    def __reduce__(self) -> tuple[Any, ...]:
        return immutable_dict, (dict(self),)


for _name in ("__delitem__ __iadd__ __imul__ __setitem__ append clear extend insert pop remove "
              "reverse sort").split():  # fmt: skip
    setattr(immutable_list, _name, _no_change("A list in the arguments", "args"))
for _name in "__delitem__ __setitem__ __ior__ clear pop popitem setdefault update".split():
    setattr(immutable_dict, _name, _no_change("A dict in the arguments", "kwargs"))

for _kind, _rebuild in ((immutable_list, list), (immutable_dict, dict)):
    _base = pytree.SUPPORTED_NODES[_rebuild]
    pytree.register_pytree_node(
        _kind,
        _base.flatten_fn,
        lambda values, context, kind=_kind, base=_base: kind(base.unflatten_fn(values, context)),
        serialized_type_name=f"fxlab.{_kind.__name__}",
        flatten_with_keys_fn=_base.flatten_with_keys_fn,
    )

_LEAVES = frozenset((int, float, bool, str, complex, type(None), type(...), torch.dtype,
                     torch.device, torch.memory_format, torch.layout, torch.Tensor,
                     torch.nn.Parameter, types.FunctionType, types.BuiltinFunctionType))  # fmt: skip
_DEEP = 40
_PENDING = object()


def _children(a: Any) -> list[Any] | None:
    """Return the parts of an aggregate, or None when `a` is a leaf."""
    if isinstance(a, (tuple, list)):
        return None if isinstance(a, torch.Size) and not _has_node(a) else list(a)
    if isinstance(a, dict):
        return list(a.values())
    if isinstance(a, slice):
        return [a.start, a.stop, a.step]
    return None


def _has_node(a: Any) -> bool:
    return any(isinstance(x, Node) for x in a)


def _rebuilt(a: Any, parts: list[Any]) -> Any:
    """Return an aggregate like `a` with other parts; lists and dicts become immutable."""
    if isinstance(a, list):
        return immutable_list(parts)
    if isinstance(a, tuple):
        return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
    if isinstance(a, slice):
        return slice(*parts)
    return immutable_dict(zip(a, parts, strict=True))


def _map(a: Any, fn: Callable[[Any], Any], depth: int = 0) -> Any:
    """Apply `fn` to every leaf of `a`; recursive while shallow, with a stack of its own beyond."""
    kind = type(a)
    if kind is Node or kind in _LEAVES:
        return fn(a)
    parts = _children(a)
    if parts is None:
        return fn(a)
    if depth >= _DEEP:
        return _map_deep(a, fn)
    return _rebuilt(a, [_map(part, fn, depth + 1) for part in parts])


def _map_deep(a: Any, fn: Callable[[Any], Any]) -> Any:
    stack: list[tuple[Any, Iterator[Any], list[Any]]] = []
    value = a
    while True:
        parts = _children(value)
        if parts is None:
            result = fn(value)
        else:
            stack.append((value, iter(parts), []))
            result = _PENDING
        while stack:
            whole, rest, done = stack[-1]
            if result is not _PENDING:
                done.append(result)
                result = _PENDING
            value = next(rest, _PENDING)
            if value is not _PENDING:
                break
            result = _rebuilt(whole, done)
            stack.pop()
        else:
            return result


def map_aggregate(a: Argument, fn: Callable[[Argument], Argument]) -> Argument:
    """Apply `fn` to every leaf of nested tuples, lists, dicts and slices; keep the structure.

    >>> map_aggregate((1, [2, {"k": 3}]), lambda v: v * 10)
    (10, [20, {'k': 30}])
    """
    return _map(a, fn)


def map_arg(a: Argument, fn: Callable[[Node], Argument]) -> Argument:
    """Apply `fn` to every Node inside an argument; other leaves stay as they are."""
    if not callable(fn):
        raise RewriteError(f"map_arg(a, fn) needs a function, got {fn!r}")
    return _map(a, lambda leaf: fn(leaf) if isinstance(leaf, Node) else leaf)


def _freeze(args: Any, inputs: dict[Node, None]) -> Any:
    """Return arguments with immutable aggregates, and collect the Nodes in them in order."""
    values = args if type(args) is tuple else args.values() if isinstance(args, dict) else args
    for a in values:
        kind = type(a)
        if kind is Node:
            inputs[a] = None
        elif kind not in _LEAVES:
            break
    else:
        return args if type(args) is tuple else immutable_dict(args) if args else _NO_KWARGS

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            inputs[leaf] = None
        return leaf

    return _map(args, visit)


_NO_KWARGS = immutable_dict()


def _slot(name: str, setter: Callable[[Any, Any], None], doc: str) -> property:
    """Make a property that reads a slot at C speed and writes through an edit primitive."""
    return property(attrgetter(name), setter, None, doc)


class Node:
    """One operation of a Graph. The six opcodes (appendix A of the paper):

    ============== ===================== ============================ ==========================
    `op`           means                 `target`                     `args`, `kwargs`
    ============== ===================== ============================ ==========================
    placeholder    a function's input    its name, with `*` or `**`   (), or (default,)
    get_attr       read an attribute     dotted path from the module  ()
    call_function  call a free function  the function itself          as in the call
    call_method    call a method         the method's name            args[0] is self
    call_module    call a sub-module     dotted path of the module    as in the call, no self
    output         return                "output"                     (the returned value,)
    ============== ===================== ============================ ==========================

    A value is named by `name`, which is unique in its graph. `users` is the ordered set of Nodes
    that read it (one entry for `x + x`); `all_input_nodes` are the Nodes that it reads. `meta` is
    a dict for analyses; the tracer fills `source` and `nn_module_stack`, a pass `from`.
    `id` is an integer that no other Node of this process has or had.
    """

    __slots__ = ("graph", "id", "_op", "_target", "_name", "_args", "_kwargs", "_type", "users",
                 "_input_nodes", "meta", "_prev", "_next", "_erased", "_key", "_repr_fn",
                 "__dict__", "__weakref__")  # fmt: skip

    graph: Graph
    users: dict[Node, None]
    meta: dict[str, Any]
    _input_nodes: tuple[Node, ...] | dict[Node, None]  # a tuple while small, for its size

    def __init__(
        self, graph: Graph, name: str, op: str, target: Target, args: tuple[Argument, ...], kwargs:
        dict[str, Argument], return_type: Any = None,
    ) -> None:  # fmt: skip
        """Make a Node that is in no list yet; use `Graph.create_node` and its kin instead."""
        if type(target) is not str:
            if op != "call_function" or not callable(target):
                _refuse_target(name, op, target)
        elif op == "call_function" or op not in _legal_ops:
            _refuse_target(name, op, target)
        self.graph, self.id, self._name, self._type = graph, _new_id(), name, return_type
        self._op, self._target = op, target
        self.users, self.meta, self._erased, self._repr_fn = {}, {}, False, None
        self._prev = self._next = self
        inputs: dict[Node, None] = {}
        self._args = _freeze(args, inputs)
        self._kwargs = _freeze(kwargs, inputs) if kwargs else _NO_KWARGS
        self._input_nodes = tuple(inputs) if len(inputs) < 9 else inputs
        for node in inputs:
            node.users[self] = None

    # -- the edit primitives of a single Node ------------------------------------------------

    def _set_args(self, args: Any, kwargs: Any) -> None:
        """Give new arguments and keep the users of old and new inputs right; no event."""
        old = self._input_nodes
        inputs: dict[Node, None] = {}
        self._args = _freeze(tuple(args), inputs)
        self._kwargs = _freeze(dict(kwargs), inputs) if kwargs else _NO_KWARGS
        self._input_nodes = tuple(inputs) if len(inputs) < 9 else inputs
        for node in old:
            if node not in inputs:
                node.users.pop(self, None)
        for node in inputs:
            node.users[self] = None

    def _edit_args(self, args: Any, kwargs: Any) -> None:
        graph, before = self.graph, {"args": self._args, "kwargs": self._kwargs}
        self._set_args(args, kwargs)
        graph.version += 1
        if graph._watched:
            after = {"args": self._args, "kwargs": self._kwargs}
            graph._changed("args", self, before, after)

    def _edit_field(self, kind: str, fields: dict[str, Any]) -> None:
        """Set one or two of op, target, type, name as one edit."""
        graph = self.graph
        before = {key: getattr(self, "_" + key) for key in fields}
        for key, value in fields.items():
            setattr(self, "_" + key, value)
        graph.version += 1
        if graph._watched:
            graph._changed(kind, self, before, fields)

    def _set_args_property(self, args: tuple[Argument, ...]) -> None:
        self._edit_args(args, self._kwargs)

    def _set_kwargs_property(self, kwargs: dict[str, Argument]) -> None:
        self._edit_args(self._args, kwargs)

    def _set_op(self, op: str) -> None:
        if op not in _legal_ops:
            _refuse_target(self._name, op, self._target)
        self._edit_field("target", {"op": op, "target": self._target})

    def _set_target(self, target: Target) -> None:
        self._edit_field("target", {"op": self._op, "target": target})

    def _set_type(self, type_: Any) -> None:
        self._edit_field("type", {"type": type_})

    def _set_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise RewriteError(f"a name must be text, got {name!r}", node=self)
        for hook in getattr(self.graph.owning_module, "_replace_hooks", ()):
            for user in self.users:
                hook(old=self, new=name, user=user)
        self.graph._graph_namespace._used_names.add(name)
        self._edit_field("rename", {"name": name})

    args = _slot("_args", _set_args_property, "Positional arguments; assign a whole new tuple.")
    kwargs = _slot("_kwargs", _set_kwargs_property, "Keyword arguments; assign a whole new dict.")
    op = _slot("_op", _set_op, "The opcode.")
    target = _slot("_target", _set_target, "What is called or read; see the class.")
    type = _slot("_type", _set_type, "The annotation of the value in generated code, or None.")
    name = _slot("_name", _set_name, "The value's name, unique in its graph.")

    # -- torch.fx's conveniences, all built on the primitives above -----------------------------

    @property
    def next(self) -> Node:
        """The following Node of the list."""
        return self._next

    @property
    def prev(self) -> Node:
        """The Node before this one in the list."""
        return self._prev

    @property
    def all_input_nodes(self) -> list[Node]:
        """The Nodes in `args` and `kwargs`, in order, each once."""
        return list(self._input_nodes)

    @property
    def stack_trace(self) -> str | None:
        """The place in the user's source that made this Node, as text; outermost frame first."""
        kept = self.meta.get("stack_trace")
        frames = self.meta.get("source")
        if kept is not None or not frames:
            return kept
        return "\n".join(f'  File "{f}", line {n}, in {fn}' for f, n, fn in reversed(frames))

    @stack_trace.setter
    def stack_trace(self, trace: str | None) -> None:
        self.meta["stack_trace"] = trace

    def prepend(self, x: Node) -> None:
        """Move `x`, a Node of the same graph, to just before this one."""
        self.graph._move(x, self._prev, self)

    def append(self, x: Node) -> None:
        """Move `x`, a Node of the same graph, to just behind this one."""
        self.graph._move(x, self, self._next)

    def update_arg(self, idx: int, arg: Argument) -> None:
        """Replace the positional argument at `idx`."""
        args = list(self._args)
        args[idx] = arg
        self._edit_args(args, self._kwargs)

    def insert_arg(self, idx: int, arg: Argument) -> None:
        """Insert a positional argument before position `idx`."""
        if not 0 <= idx <= len(self._args):
            raise RewriteError(
                f"insert_arg index {idx} is out of range", node=self,
                expected=f"0 to {len(self._args)}",
            )  # fmt: skip
        self._edit_args((*self._args[:idx], arg, *self._args[idx:]), self._kwargs)

    def update_kwarg(self, key: str, arg: Argument) -> None:
        """Set the keyword argument `key`."""
        self._edit_args(self._args, {**self._kwargs, key: arg})

    def replace_input_with(self, old_input: Node, new_input: Node) -> None:
        """Read `new_input` wherever this Node reads `old_input`."""
        for hook in getattr(self.graph.owning_module, "_replace_hooks", ()):
            hook(old=old_input, new=new_input.name, user=self)
        self._edit_args(*self._swapped(old_input, new_input))

    def _swapped(self, old: Node, new: Argument) -> tuple[Any, Any]:
        """Return args and kwargs with `new` in the place of `old`."""
        args, kwargs = self._args, self._kwargs
        if old not in self._input_nodes:
            return args, kwargs

        def swap(leaf: Any) -> Any:
            return new if leaf is old else leaf

        if all(type(a) is Node or type(a) in _LEAVES for a in args):
            args = tuple([new if a is old else a for a in args])
        else:
            args = _map(args, swap)
        return args, _map(kwargs, swap) if kwargs else kwargs

    def replace_all_uses_with(
        self, replace_with: Node, delete_user_cb: Callable[[Node], bool] | None = None, *,
        propagate_meta: bool = False,
    ) -> list[Node]:  # fmt: skip
        """Make every user of this Node read `replace_with` instead: one edit, the reroute.

        Args:
            replace_with: the Node to read from now on; it is told (`meta["from"]`) what it replaces.
            delete_user_cb: called for each user; a false answer leaves that user alone.
            propagate_meta: copy this Node's meta to `replace_with`, which must have none.

        Returns:
            The users that were changed. A user that is `replace_with` itself is changed too, as in
            torch.fx: pass `delete_user_cb=lambda user: user is not new` to avoid a Node that reads
            itself.
        """
        if propagate_meta:
            if set(replace_with.meta) - {"source", "nn_module_stack", "from", "made_by"}:
                raise RewriteError(
                    "propagate_meta=True needs a replacement without meta of its own",
                    node=replace_with,
                    expected="an empty meta", hint="copy the keys that you want by hand",
                )  # fmt: skip
            replace_with.meta.update(self.meta)
        graph = self.graph
        hooks = getattr(graph.owning_module, "_replace_hooks", None)
        changed: list[Node] = []
        before: list[tuple[Node, Any, Any]] = []
        for user in list(self.users):
            if delete_user_cb is not None and not delete_user_cb(user):
                continue
            for hook in hooks or ():
                hook(old=self, new=replace_with._name, user=user)
            before.append((user, user._args, user._kwargs))
            user._set_args(*user._swapped(self, replace_with))
            changed.append(user)
        if replace_with is not self:
            add_ancestors(replace_with, [self])
        graph.version += 1
        if graph._watched:
            graph._changed(
                "reroute", self, {"users": before}, {"to": replace_with, "users": changed}
            )
        return changed

    def is_impure(self, impure_random: bool = True) -> bool:
        """Say whether erasing or repeating this Node could be noticed; see `fxlab.core.purity`.

        Args:
            impure_random: whether drawing random numbers counts.
        """
        from .purity import effect

        return effect(self, impure_random=impure_random) is not None

    def normalized_arguments(
        self, root: torch.nn.Module, arg_types: tuple[Any, ...] | None = None, kwarg_types:
        dict[str, Any] | None = None, normalize_to_only_use_kwargs: bool = False,
    ) -> Any:  # fmt: skip
        """Return (args, kwargs) in the order of the callee's signature, or None if it has none.

        Args:
            root: the module in which `call_module` targets are looked up.
            arg_types, kwarg_types: types that choose between several signatures.
            normalize_to_only_use_kwargs: name every argument.
        """
        from torch.fx.operator_schemas import normalize_function, normalize_module

        args, kwargs, only = self._args, dict(self._kwargs), normalize_to_only_use_kwargs
        if self._op == "call_function":
            kinds = (arg_types, kwarg_types)
            return normalize_function(self._target, args, kwargs, *kinds,
                                      normalize_to_only_use_kwargs=only)  # fmt: skip
        if self._op == "call_module":
            return normalize_module(root, self._target, args, kwargs,
                                    normalize_to_only_use_kwargs=only)  # fmt: skip
        return None

    def _rename(self, candidate: str) -> None:
        if candidate != self._name:
            self.name = self.graph._graph_namespace.create_name(candidate, None)

    # -- order and text --------------------------------------------------------------------------

    @property
    def _sort_key(self) -> tuple[int, ...]:
        self.graph._number()
        return (self._key,)

    def __lt__(self, other: Node) -> bool:
        return self._sort_key < other._sort_key

    def __gt__(self, other: Node) -> bool:
        return self._sort_key > other._sort_key

    def __repr__(self) -> str:
        return self._repr_fn(self) if self._repr_fn else self._name

    _pretty_print_target = staticmethod(lambda target: target_text(target))

    def format_node(
        self, placeholder_names: list[str] | None = None, maybe_return_typename: list[str] | None =
        None, *, include_tensor_metadata: bool = False,
    ) -> str | None:  # fmt: skip
        """Return the line that `print(graph)` shows for this Node.

        Args:
            placeholder_names: when given, a placeholder's text is appended there, None is returned.
            maybe_return_typename: when given, an output's annotation is written to its element 0.
            include_tensor_metadata: show dtype and shape from `meta` where known.
        """
        kind = f"{type_text(self._type)} " if self._type is not None else ""
        head = f"%{self._name} : {kind}[num_users={len(self.users)}] = {self._op}"
        if self._op == "placeholder":
            if placeholder_names is not None:
                placeholder_names.append(str(self._target) + (f": {kind[:-1]}" if kind else ""))
                return None
            default = f"(default={self._args[0]})" if self._args else ""
            return f"{head}[target={self._target}]{default}"
        if self._op == "get_attr":
            return f"{head}[target={self._target}]"
        if self._op == "output":
            if self._type is not None and maybe_return_typename:
                maybe_return_typename[0] = f" -> {kind[:-1]}"
            return f"return {self._args[0] if self._args else None}"
        if include_tensor_metadata:
            from .graph import shape_text

            head = head.replace(f" : {kind}", f" : {shape_text(self) or kind}".rstrip() + " ", 1)
        args = f"args = {_format_arg(self._args)}, kwargs = {_format_arg(self._kwargs)}"
        return f"{head}[target={target_text(self._target)}]({args})"


def _refuse_target(name: str, op: str, target: Any) -> NoReturn:
    if op not in _legal_ops:
        raise RewriteError(f"{op!r} is no opcode", node=name, expected=" | ".join(OPCODES))
    wanted = "a callable" if op == "call_function" else "a str (a name or a dotted path)"
    raise _TargetError(
        f"the target of a {op} node must be {wanted}, got {target!r} of type "
        f"{torch.typename(target)}", node=name,
        hint="call_function takes the function itself, call_method and call_module its name",
        wrong='graph.call_function("relu", (x,))', right="graph.call_function(torch.relu, (x,))",
    )  # fmt: skip


class _TargetError(RewriteError, ValueError):
    """A Node was given a target that its opcode cannot have."""


def ancestor(node: Node) -> dict[str, Any]:
    """Return a Node as plain data: what `meta["from"]` holds of it."""
    return {"id": node.id, "name": node._name, "op": node._op, "target": target_text(node._target)}


def add_ancestors(node: Node, sources: list[Node]) -> None:
    """Note in `node.meta["from"]` that it stands for `sources`; nearest first, at most 8."""
    old = node.meta.get("from", ())
    found = {a["id"]: a for a in old}
    found.pop(node.id, None)
    for source in sources:
        if source is not node:
            found.setdefault(source.id, ancestor(source))
    for source in sources:
        for a in source.meta.get("from", ()):
            if a["id"] != node.id:
                found.setdefault(a["id"], a)
    node.meta["from"] = tuple(found.values())[:8]
    for key in ("source", "nn_module_stack"):
        if key not in node.meta and sources and key in sources[0].meta:
            node.meta[key] = sources[0].meta[key]


def type_text(kind: Any) -> str:
    """Return an annotation as text, short for classes."""
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        builtin = kind.__module__ == "builtins"
        return kind.__qualname__ if builtin else f"{kind.__module__}.{kind.__qualname__}"
    if kind is ...:
        return "..."
    return kind.__name__ if isinstance(kind, types.FunctionType) else str(kind)


def qualified_name(func: Callable[..., Any]) -> str:
    """Return the dotted name under which a function can be found, e.g. `torch.nn.functional.relu`."""
    name = getattr(func, "__name__", None) or getattr(type(func), "__name__", "callable")
    if getattr(builtins, name, None) is func:
        return name
    if getattr(torch.Tensor, name, None) is func:
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    if module is None:
        guesses = (torch, torch.nn.functional, torch.Tensor)
        owner = next((g for g in guesses if getattr(g, name, None) is func), None)
        module = owner.__name__ if owner is not None else type(func).__module__
    if name == "<lambda>":
        return f"{module}.<lambda>"
    module = {"_operator": "operator"}.get(module, module).replace("torch._ops", "torch.ops")
    qualname = getattr(func, "__qualname__", name)
    name = qualname if inspect.isclass(func) and "<locals>" not in qualname else name
    return f"{module}.{name}"


def target_text(target: Any) -> str:
    """Return a target as every text of the kit shows it."""
    if isinstance(target, str):
        return target
    if type(target) is types.BuiltinFunctionType and (
        target.__self__ is None or type(target.__self__) is types.ModuleType
    ):
        return _builtin_text(target)  # these live for ever, so their texts may as well
    return _text_of(target)


def _text_of(target: Any) -> str:
    if getattr(target, "__module__", None) == "builtins" and hasattr(target, "__name__"):
        return f"builtins.{target.__name__}"
    return qualified_name(target)


_builtin_text = functools.lru_cache(maxsize=4096)(_text_of)


def _format_arg(arg: Any, limit: float = float("inf")) -> str:
    """Return an argument as `print(graph)` shows it: Nodes with a %; long lists cut at `limit`."""

    def leaf(a: Any) -> Any:
        custom = getattr(a, "_custom_fx_repr_fn", None)
        return _Text(f"%{a}" if isinstance(a, Node) else custom() if custom else str(a))

    if isinstance(arg, (list, tuple)) and len(arg) > limit:
        shown = ", ".join(_format_arg(a, limit) for a in arg[: int(limit)])
        text = f"{shown}, ...[total_len={len(arg)}]"
        return f"[{text}]" if isinstance(arg, list) else f"({text})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k}: {_format_arg(v, limit)}" for k, v in arg.items()) + "}"
    if not isinstance(arg, (list, tuple, slice)):
        return str(leaf(arg))
    return repr(_map(arg, leaf))


class _Text(str):
    """Text that shows without quotes inside a container's repr."""

    __repr__ = str.__str__
