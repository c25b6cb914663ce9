"""What is one operation of a captured program, and how are its arguments kept?

The IR of the paper (section 4.2, appendix A) has six opcodes. A `Node` is one operation; an edge
of the graph is a Node that stands somewhere inside another Node's arguments. Everything that can
change about a Node goes through the setters of this file and the primitives of `Graph`, so that
code never goes stale and a recorder sees every edit.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from .errors import RewriteError

if TYPE_CHECKING:
    from .graph import Graph

Argument = Any
"""Node, number, text, None, dtype, device, any object, or tuple, list, dict, slice of those."""
Args = tuple[Argument, ...]
Kwargs = dict[str, Argument]
Target = Any
"""The function of a call_function, else text: which of the two, the opcode tells, not the type."""
base_types = (str, int, float, bool, complex, torch.dtype, torch.Tensor, torch.device,
              torch.memory_format, torch.layout)  # fmt: skip
OPCODES = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_legal_ops = frozenset((*OPCODES, "root"))
_new_id = itertools.count(1).__next__

_HOW_TO_CHANGE = """{what} of a Node cannot be changed in place: users would go stale.
  try: assign a changed copy
  wrong:
      {wrong}
  right:
      {right}"""


class _ImmutableError(TypeError, NotImplementedError):
    """A container of a Node was to be changed; torch.fx raised both, in its time."""


class immutable_list(list[Any]):  # torch.fx's name
    """A list inside a Node's arguments; every method that would change it says how to do it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return immutable_list, (list(self),)


class immutable_dict(dict[Any, Any]):  # torch.fx's name
    """A dict inside a Node's arguments; every method that would change it says how to do it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return immutable_dict, (dict(self),)


def _make_immutable(kind: type, base: type, methods: str, **how: str) -> None:
    """Refuse the methods that change a container, and make it known to pytree."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise _ImmutableError(_HOW_TO_CHANGE.format(**how))

    for name in methods.split():
        setattr(kind, name, refuse)
    plain = pytree.SUPPORTED_NODES[base]
    pytree.register_pytree_node(
        kind, plain.flatten_fn, lambda values, context: kind(plain.unflatten_fn(values, context)),
        serialized_type_name=f"fxlab.{kind.__name__}",
        flatten_with_keys_fn=plain.flatten_with_keys_fn)  # fmt: skip


_make_immutable(
    immutable_list, list, "__delitem__ __setitem__ __iadd__ __imul__ append clear extend insert "
    "pop remove reverse sort", what="A list in the arguments", wrong="node.args[0].append(value)",
    right="node.args = ([*node.args[0], value], *node.args[1:])")  # fmt: skip
_make_immutable(
    immutable_dict, dict, "__delitem__ __setitem__ __ior__ clear pop popitem setdefault update",
    what="A dict in the arguments", wrong="node.kwargs[name] = value",
    right="node.kwargs = {**node.kwargs, name: value}")  # fmt: skip
_NO_KWARGS = immutable_dict()
_LEAVES: set[type] = {  # types without parts, asked first because they are nearly all there is
    int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device,
    torch.memory_format, torch.layout, torch.Tensor, torch.nn.Parameter, types.FunctionType,
    types.BuiltinFunctionType}  # fmt: skip


def _children(a: Any) -> list[Any] | None:
    """Return the parts of an aggregate, or None when `a` is a leaf."""
    whole: Any = a
    if isinstance(a, (tuple, list)):
        return list(whole)
    if isinstance(a, dict):
        return list(whole.values())
    return [whole.start, whole.stop, whole.step] if isinstance(a, slice) else None


def leaves(*values: Any) -> Iterator[Any]:
    """Yield every leaf of nested tuples, lists, dicts and slices, in order."""
    stack = list(reversed(values))
    while stack:
        a = stack.pop()
        parts = None if type(a) in _LEAVES else _children(a)
        if parts is None:
            yield a
        else:
            stack.extend(reversed(parts))


def holds_node(*values: Any) -> bool:
    """Say whether a Node stands anywhere inside some arguments, however deep."""
    return any(isinstance(leaf, Node) for leaf in leaves(*values))


def _rebuilt(a: Any, parts: list[Any], list_type: Any, dict_type: Any) -> Any:
    """Return an aggregate like `a` of other parts; an unchanged constant is kept as it is."""
    kind: type[Any] = type(a)  # pyright: ignore[reportUnknownVariableType]
    whole: Any = a
    if kind is tuple:
        return tuple(parts)
    common = kind in (list, dict) or kind.__name__ in ("immutable_list", "immutable_dict")
    if not common and all(map(operator.is_, parts, _children(a) or ())) and not holds_node(a):
        return whole
    if isinstance(a, tuple):
        named = hasattr(kind, "_fields")
        return kind(*parts) if named else tuple(parts)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(a, slice):
        return slice(*parts)
    return list_type(parts) if isinstance(a, list) else dict_type(zip(whole, parts, strict=True))


def _map(a: Any, fn: Callable[[Any], Any], list_type: Any = immutable_list,
         dict_type: Any = immutable_dict) -> Any:  # fmt: skip
    """Apply `fn` to every leaf of `a`, with a stack of its own: arguments may be nested deeply."""
    stack: list[tuple[Any, Iterator[Any], list[Any]]] = [(None, iter((a,)), [])]
    while True:
        whole, rest, done = stack[-1]
        for value in rest:
            parts = None if type(value) in _LEAVES else _children(value)
            if parts is None:
                done.append(fn(value))
            else:
                stack.append((value, iter(parts), []))
                break
        else:
            stack.pop()
            if not stack:
                return done[0]
            stack[-1][2].append(_rebuilt(whole, done, list_type, dict_type))


def map_aggregate(a: Argument, fn: Callable[[Argument], Argument]) -> Argument:
    """Apply a function to every leaf of nested tuples, lists, dicts and slices; keep the structure.

    Args:
        a: the structure; a value that is none of these is a leaf.
        fn: gets a leaf, returns what stands in its place.

    >>> map_aggregate((1, [2, {"k": 3}]), lambda v: v * 10)
    (10, [20, {'k': 30}])
    """
    return _map(a, fn)


def map_arg(a: Argument, fn: Callable[[Node], Argument]) -> Argument:
    """Apply a function to every Node inside an argument; other leaves stay as they are.

    Args:
        a: the argument, of any structure.
        fn: gets a Node, returns what stands in its place.

    Raises:
        RewriteError: `fn` is no function.
    """
    if not callable(fn):
        raise RewriteError(f"map_arg(a, fn) needs a function, got {fn!r}")
    return _map(a, lambda leaf: fn(leaf) if isinstance(leaf, Node) else leaf)


def _freeze(args: Args | Kwargs, inputs: dict[Node, None]) -> Any:
    """Return arguments with immutable aggregates, and collect the Nodes in them in order."""
    parts: Iterable[Any] = args.values() if isinstance(args, dict) else args
    for a in parts:
        kind: type[Any] = type(a)  # pyright: ignore[reportUnknownVariableType]
        if kind is Node:
            inputs[a] = None
        elif kind not in _LEAVES:
            break
    else:
        return immutable_dict(args) if isinstance(args, dict) else args

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            inputs[leaf] = None
        return leaf

    return _map(args, visit)


def _slot(name: str, setter: Callable[[Any, Any], None], doc: str) -> Any:
    """Make a property that reads a slot at C speed and writes through an edit primitive."""
    return property(operator.attrgetter(name), setter, None, doc)


class Node:
    """One operation of a Graph, with one of six opcodes (appendix A of the paper).

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

    Args:
        graph: the Graph whose Node it is.
        name: unique in it.
        op: one of the opcodes above.
        target: as above.
        args: positional arguments.
        kwargs: keyword arguments.
        return_type: the annotation for generated code; None for none.

    Raises:
        RewriteError: there is no such opcode, or the target is of the wrong kind for it.
    """

    __slots__ = ("graph", "id", "_op", "_target", "_name", "_args", "_kwargs", "_type", "users",
                 "_input_nodes", "meta", "_prev", "_next", "_erased", "_key", "_repr_fn",
                 "__dict__", "__weakref__")  # fmt: skip

    format_node: Callable[..., str | None]  # fxlab/display, as is the next
    stack_trace: Any
    normalized_arguments: Callable[..., Any]  # fxlab/passes/normalize
    graph: Graph
    _target: Any
    _key: float
    users: dict[Node, None]
    meta: dict[str, Any]
    _input_nodes: tuple[Node, ...]

    def __init__(self, graph: Graph, name: str, op: str, target: Target, args: Args,
                 kwargs: Kwargs, return_type: Any = None) -> None:  # fmt: skip
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
        self._input_nodes = tuple(inputs)
        for node in inputs:
            node.users[self] = None

    # -- the edit primitives of a single Node ------------------------------------------------

    def _set_args(self, args: Any, kwargs: Any) -> None:
        """Give new arguments and keep the users of old and new inputs right; no event."""
        inputs: dict[Node, None] = {}
        self._args = _freeze(tuple(args), inputs)
        self._kwargs = _freeze(kwargs, inputs) if kwargs else _NO_KWARGS
        for node in self._input_nodes:
            if node not in inputs:
                node.users.pop(self, None)
        for node in inputs:
            node.users[self] = None
        self._input_nodes = tuple(inputs)

    def _swap(self, old: Node, new: Node) -> None:
        """Read `new` wherever this Node reads `old`; no event."""
        if old is new or self not in old.users:
            return

        def swap(a: Any) -> Any:
            if type(a) is immutable_list and _LEAVES.issuperset(map(type, a)):  # most of them
                return immutable_list([new if e is old else e for e in a])
            return _map(a, lambda e: new if e is old else e)

        args = [new if a is old else a if type(a) in _LEAVES else swap(a) for a in self._args]
        self._args = tuple(args)
        if self._kwargs:
            self._kwargs = immutable_dict({k: swap(a) for k, a in self._kwargs.items()})
        inputs = [new if n is old else n for n in self._input_nodes]
        self._input_nodes = tuple(dict.fromkeys(inputs) if self in new.users else inputs)
        old.users.pop(self, None)
        new.users[self] = None

    def _edit_args(self, args: Any, kwargs: Any, change: Callable[..., None] | None = None) -> None:
        """Do `_set_args`, or another change of the arguments, as one edit."""
        graph, before = self.graph, {"args": self._args, "kwargs": self._kwargs}
        (change or self._set_args)(args, kwargs)
        graph._edited("args", self, before, {"args": self._args, "kwargs": self._kwargs})

    def _edit_field(self, kind: str, **fields: Any) -> None:
        """Set one or two of op, target, type, name as one edit."""
        if fields.get("op", self._op) not in _legal_ops:
            _refuse_target(self._name, fields["op"], self._target)
        before = {key: getattr(self, "_" + key) for key in fields}
        for key, value in fields.items():
            setattr(self, "_" + key, value)
        self.graph._edited(kind, self, before, fields)

    def _set_name(self, name: str) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RewriteError(f"a name must be text, got {name!r}", node=self)
        for user in self.users:
            self._tell_hooks(name, user)
        self.graph._graph_namespace._used_names.add(name)
        self._edit_field("rename", name=name)

    def _tell_hooks(self, new: str, user: Node) -> None:
        """Call torch.fx's replace hooks: `user` is about to read `new` instead of this Node."""
        for hook in getattr(self.graph.owning_module, "_replace_hooks", ()):
            hook(old=self, new=new, user=user)

    args: Args = _slot("_args", lambda self, args: self._edit_args(args, self._kwargs),
                       "Positional arguments; assign a whole new tuple.")  # fmt: skip
    kwargs: Kwargs = _slot("_kwargs", lambda self, kwargs: self._edit_args(self._args, kwargs),
                           "Keyword arguments; assign a whole new dict.")  # fmt: skip
    op: str = _slot("_op", lambda self, op: self._edit_field("target", op=op, target=self._target),
                    "The opcode.")  # fmt: skip
    target: Target = _slot(
        "_target", lambda self, target: self._edit_field("target", op=self._op, target=target),
        "What is called or read; see the class.")  # fmt: skip
    type: Any = _slot("_type", lambda self, kind: self._edit_field("type", type=kind),
                      "The annotation of the value in generated code, or None.")  # fmt: skip
    name: str = _slot("_name", _set_name, "The value's name, unique in its graph.")

    # -- torch.fx's conveniences, all built on the primitives above -----------------------------

    next: Any = property(operator.attrgetter("_next"), doc="The following Node of the list.")
    prev: Any = property(operator.attrgetter("_prev"), doc="The Node before this one in the list.")

    @property
    def all_input_nodes(self) -> list[Node]:
        """The Nodes in `args` and `kwargs`, in order, each once."""
        return list(self._input_nodes)

    def prepend(self, x: Node) -> None:
        """Move `x`, a Node of the same graph, to just before this one."""
        self.graph._move(x, self._prev, self)

    def append(self, x: Node) -> None:
        """Move `x`, a Node of the same graph, to just behind this one."""
        self.graph._move(x, self, self._next)

    def update_arg(self, idx: int, arg: Argument) -> None:
        """Replace the positional argument at `idx` by `arg`."""
        args = list(self._args)
        args[idx] = arg
        self._edit_args(args, self._kwargs)

    def insert_arg(self, idx: int, arg: Argument) -> None:
        """Insert `arg` among the positional arguments, before position `idx`.

        Raises:
            RewriteError: there is no such position.
        """
        if not 0 <= idx <= len(self._args):
            raise RewriteError(f"insert_arg index {idx} is out of range", node=self,
                               expected=f"0 to {len(self._args)}")  # fmt: skip
        self._edit_args((*self._args[:idx], arg, *self._args[idx:]), self._kwargs)

    def update_kwarg(self, key: str, arg: Argument) -> None:
        """Set the keyword argument `key` to `arg`."""
        self._edit_args(self._args, {**self._kwargs, key: arg})

    def replace_input_with(self, old_input: Node, new_input: Argument) -> None:
        """Read `new_input`, a Node or a value, wherever this Node reads `old_input`."""
        if isinstance(new_input, Node):
            old_input._tell_hooks(new_input._name, self)
            return self._edit_args(old_input, new_input, self._swap)
        read = (self._args, self._kwargs)
        self._edit_args(*map_arg(read, lambda node: new_input if node is old_input else node))

    def replace_all_uses_with(
        self, replace_with: Argument, delete_user_cb: Callable[[Node], bool] | None = None, *,
        propagate_meta: bool = False) -> list[Node]:  # fmt: skip
        """Make every user of this Node read `replace_with` instead: one edit, the reroute.

        Args:
            replace_with: the Node to read from now on; its `meta["from"]` tells what it replaces.
                Or a value, such as a number or a tuple of Nodes: then each user is one edit.
            delete_user_cb: called for each user; a false answer leaves that user alone.
            propagate_meta: copy this Node's meta to `replace_with`, which must have none.

        Returns:
            The users that were changed. A user that is `replace_with` itself is changed too, as in
            torch.fx: pass `delete_user_cb=lambda user: user is not new` to avoid a Node that reads
            itself.

        Raises:
            RewriteError: `propagate_meta` is asked for and `replace_with` has meta of its own.
        """
        new = replace_with if isinstance(replace_with, Node) else None
        if propagate_meta:
            kept = {"source", "nn_module_stack", "from", "made_by"}
            if new is None or set(new.meta) - kept:
                raise RewriteError("propagate_meta=True needs a node without meta of its own",
                                   node=new or self, hint="copy the keys by hand")  # fmt: skip
            new.meta.update(self.meta)
        before: list[tuple[Node, Any, Any]] = []
        for user in list(self.users):
            if delete_user_cb is None or delete_user_cb(user):
                before.append((user, user._args, user._kwargs))
                if new is None:
                    user.replace_input_with(self, replace_with)
                else:
                    self._tell_hooks(new._name, user)
                    user._swap(self, new)
        changed = [user for user, _, _ in before]
        if new is not None:
            if new is not self:
                add_ancestors(new, [self])
            self.graph._edited("reroute", self, {"users": before}, {"to": new, "users": changed})
        return changed

    def is_impure(self, impure_random: bool = True) -> bool:
        """Say whether erasing or repeating this Node could be noticed; see `fxlab.core.purity`.

        Args:
            impure_random: whether drawing random numbers counts.
        """
        from .purity import effect

        return effect(self, impure_random=impure_random) is not None

    def _rename(self, candidate: str) -> None:
        if candidate != self._name:
            self.name = self.graph._graph_namespace.create_name(candidate, None)

    # -- order and text --------------------------------------------------------------------------

    def __lt__(self, other: Node) -> bool:
        self.graph._number()
        return self._key < other._key

    def __le__(self, other: Node) -> bool:
        return not other < self

    def __repr__(self) -> str:
        return self._repr_fn(self) if self._repr_fn else self._name

    _pretty_print_target: Any = staticmethod(lambda target: target_text(target))  # pyright: ignore


_LEAVES.add(Node)


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
    meta = node.meta
    found = {a["id"]: a for a in meta.get("from", ())}
    for source in sources:
        if source.id not in found:
            found[source.id] = ancestor(source)
    for source in sources:
        for a in source.meta.get("from", ()):
            found.setdefault(a["id"], a)
    found.pop(node.id, None)
    meta["from"] = tuple(found.values())[:8]
    for key in ("source", "nn_module_stack"):
        if key not in meta and sources and key in sources[0].meta:
            meta[key] = sources[0].meta[key]


def qualified_name(func: Callable[..., Any]) -> str:
    """Return the dotted name under which a function can be found, e.g. `torch.relu`."""
    name = getattr(func, "__name__", None) or getattr(type(func), "__name__", "callable")
    if getattr(builtins, name, None) is func:
        return name
    if getattr(torch.Tensor, name, None) is func:
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    if module is None:
        homes = [h for h in (torch, torch.nn.functional) if getattr(h, name, None) is func]
        module = homes[0].__name__ if homes else type(func).__module__
    module = {"_operator": "operator"}.get(module, module).replace("torch._ops", "torch.ops")
    qualname = getattr(func, "__qualname__", name)
    return f"{module}.{qualname if inspect.isclass(func) and '<' not in qualname else name}"


def target_text(target: Any) -> str:
    """Return a target as every text of the kit shows it."""
    if isinstance(target, str):
        return target
    return (_builtin_text if type(target) is types.BuiltinFunctionType else _text_of)(target)


def _text_of(target: Any) -> str:
    builtin = getattr(target, "__module__", None) == "builtins" and hasattr(target, "__name__")
    return f"builtins.{target.__name__}" if builtin else qualified_name(target)


_builtin_text = functools.lru_cache(maxsize=4096)(_text_of)


def lookup(module: Any, path: str, *default: Any) -> Any:
    """Return what a dotted path leads to, or `default` if one is given.

    Raises:
        AttributeError: naming the part that is missing.
    """
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        if default:
            return default[0]
        raise
