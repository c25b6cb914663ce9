"""What is a captured program, and which edits does it know?

A `Graph` is the paper's IR (section 4.2): a doubly linked list of Nodes in an order in which they
can run. Everything that changes one goes through the primitives here and in `node.py` (create,
erase, move, set arguments, set target, reroute, rename). Each primitive counts `version` up and,
if somebody watches, tells what it did; that is all that lazy recompilation and the explorer need.
"""

# pyright: reportPrivateUsage=false, reportUnusedFunction=false
from __future__ import annotations

import builtins
import copy as copying
import functools
import inspect
import keyword
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .errors import LintError, RewriteError
from .node import Node, Target, add_ancestors, lookup, map_arg

if TYPE_CHECKING:
    from .codegen import PythonCode
    from .graph_module import GraphModule

Args = tuple[Any, ...] | None
Kwargs = dict[str, Any] | None
Listener = Callable[[str, "Graph", Any, Any, Any], None]
graph_created_hooks: list[Callable[[Graph], None]] = []
"""Called with every new Graph of the process; a hook that serves one thread asks for itself."""


class _Missing:
    """What stands for "nothing was there" in the events of a GraphModule's state."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
_illegal_names = frozenset((*keyword.kwlist, *dir(builtins)))
_illegal_chars = re.compile(r"[^0-9a-zA-Z_]+")
_builtin = vars(builtins).get
_snake = re.compile(r"(?<=[a-z])([A-Z])")
_makers = type("_Makers", (threading.local,), {"name": None})()  # fxlab.passes.base.made_by
_EMPTY = inspect.Parameter.empty


@functools.lru_cache(10_000)
def _short_name(name: str) -> str:
    stem = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return _snake.sub(r"_\1", stem).lower()


@functools.lru_cache(10_000)
def _legal_name(wish: str) -> tuple[str, str, str]:
    """Return a wish as an identifier, and that split before the number that it ends in."""
    name = wish.replace(".", "_")
    if ".." in wish or not (name.isidentifier() and name.isascii()):
        name = _illegal_chars.sub("_", wish) or "_unnamed"
        name = f"_{name}" if name[0].isdigit() else name
    base, _, digits = name.rpartition("_")
    return (name, base, digits) if base and digits.isdigit() else (name, name, "")


def _enter_region(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Enter a region such as `torch.no_grad()`; generated code prints the pair as `with`."""
    region = factory(*args, **kwargs)
    region.__enter__()
    return region


def _exit_region(region: Any) -> None:
    """Leave a region that `_enter_region` entered."""
    region.__exit__(None, None, None)


class _Namespace:
    """Gives each name once; torch.fx's rule: `relu`, `relu_1`, ..., never a keyword or builtin."""

    __slots__ = ("_used_names", "_base_count", "_obj_to_name")

    def __init__(self, names: Iterable[str] = (), counts: Iterable[tuple[str, int]] = ()) -> None:
        self._used_names, self._base_count = set(names), dict(counts)
        self._obj_to_name: dict[int, tuple[str, Any]] = {}  # the object lives as long as its id

    def create_name(self, candidate: str, obj: Any = None) -> str:
        """Return a free name like `candidate`; the same again for the same `obj`."""
        if obj is not None and id(obj) in self._obj_to_name:
            return self._obj_to_name[id(obj)][0]
        candidate, base, digits = _legal_name(candidate)
        used, counts = self._used_names, self._base_count
        number = int(digits) if digits and candidate not in used else counts.get(base, 0)
        reserved = candidate in _illegal_names and (obj is None or _builtin(candidate) is not obj)
        while reserved or candidate in used:
            number += 1
            candidate, reserved = f"{base}_{number}", False
        used.add(candidate)
        counts[base] = number
        if obj is not None:
            self._obj_to_name[id(obj)] = candidate, obj
        return candidate

    def known(self) -> tuple[set[str], list[tuple[str, int]]]:
        """Return what makes a namespace that knows the same names."""
        return self._used_names, list(self._base_count.items())


class _node_list:  # torch.fx's name
    """The Nodes of a Graph in order; erasing or adding Nodes while iterating is allowed."""

    __slots__ = ("graph", "direction")

    def __init__(self, graph: Graph, direction: str = "_next") -> None:
        self.graph, self.direction = graph, direction

    def __len__(self) -> int:
        return self.graph._len

    def __iter__(self) -> Iterator[Node]:
        root, step = self.graph._root, attrgetter(self.direction)
        node = step(root)
        while node is not root:
            if not node._erased:
                yield node
            node = step(node)

    def __reversed__(self) -> _node_list:
        return _node_list(self.graph, "_prev" if self.direction == "_next" else "_next")

    def __getitem__(self, index: Any) -> Any:
        return list[Any](self)[index]

    def __repr__(self) -> str:
        return repr(list(self))


def until_left(undo: Callable[[], None]) -> ExitStack:
    """Return a context that calls `undo` when its `with` block is left."""
    (context := ExitStack()).callback(undo)
    return context


class Graph:
    """A program as a list of Nodes.

    Args:
        owning_module: the GraphModule that uses it, if there is one already.
        tracer_cls: the class of the tracer that fills it; a pickle keeps it.
        tracer_extras: for that tracer; kept as they are.

    >>> import torch
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> relu = graph.call_function(torch.relu, (x,))
    >>> _ = graph.output(graph.call_method("neg", (relu,)))
    >>> print(graph)
    graph():
        %x : [num_users=1] = placeholder[target=x]
        %relu : [num_users=1] = call_function[target=torch.relu](args = (%x,), kwargs = {})
        %neg : [num_users=1] = call_method[target=neg](args = (%relu,), kwargs = {})
        return neg

    `version` counts edits; `owning_module` is the GraphModule that uses it. Several GraphModules
    may share one Graph. What makes a Node takes `type_expr`, the annotation for generated code;
    what makes a call takes `args` and `kwargs`, in which a Node stands for its value.
    """

    __str__: Callable[[Graph], str]  # fxlab/display, as is the next
    print_tabular: Callable[..., str]
    eliminate_dead_code: Callable[..., bool]  # fxlab/passes/cleanup

    def __init__(self, owning_module: GraphModule | None = None, tracer_cls: type | None = None,
                 tracer_extras: dict[str, Any] | None = None) -> None:  # fmt: skip
        from .codegen import CodeGen

        self.version = self._len = 0
        self._watched = self._compiled = self._numbered = False
        self._listeners: tuple[Listener, ...] = ()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._root = Node(self, "", "root", "", (), {})
        self._anchor, self._after = self._root, False
        self._graph_namespace = _Namespace()
        self.owning_module: Any = owning_module
        self._tracer_cls, self._tracer_extras = tracer_cls, tracer_extras
        self._codegen: Any = CodeGen()
        self._constants: dict[str, Any] = {}
        self._trace_warnings: list[str] = []
        for hook in graph_created_hooks:
            hook(self)

    # -- who uses and who watches this graph --------------------------------------------------

    def _attach(self, module: Any) -> None:
        self._owners.add(module)
        self.owning_module = module

    def _detach(self, module: Any) -> None:
        self._owners.discard(module)
        if self.owning_module is module:
            self.owning_module = next(iter(self._owners), None)

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(kind, graph, node, before, after)` after each edit of this Graph."""
        self._listeners = (*self._listeners, listener)
        self._watched = True

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling `listener`; one that is not there is no error."""
        self._listeners = tuple(x for x in self._listeners if x != listener)
        self._watched = bool(self._compiled or self._listeners)

    def _edited(self, kind: str, node: Node, before: Any, after: Any) -> None:
        """Count one edit of a Node, and tell it if somebody wants to know."""
        self.version += 1
        if self._watched:
            self._changed(kind, node, before, after)

    def _changed(self, kind: str, node: Any, before: Any, after: Any) -> None:
        """Tell that one edit was done: generated code goes stale, listeners are called."""
        if kind not in ("module", "attr"):
            self._touch()
        for listener in self._listeners:
            listener(kind, self, node, before, after)

    def _touch(self) -> None:
        """Say that generated code is stale for a reason that is no edit of a Node."""
        self.version += 1
        if self._compiled:
            self._compiled, self._watched = False, bool(self._listeners)
            for owner in list(self._owners):
                owner._code_is_stale()

    # -- edit primitives ----------------------------------------------------------------------

    def create_node(self, op: str, target: Target, args: Args = None, kwargs: Kwargs = None,
                    name: str | None = None, type_expr: Any = None) -> Node:  # fmt: skip
        """Add a Node at the insertion point (the end unless `inserting_before/after` is active).

        Args:
            op: one of the six opcodes; see `Node`.
            target: function, method name, or dotted path.
            args: positional arguments; Nodes in them must belong to this Graph.
            kwargs: keyword arguments.
            name: wish for its name; made unique.
            type_expr: annotation for generated code.

        Raises:
            RewriteError: `args` is no tuple, `kwargs` no dict, or the target does not fit `op`.
        """
        args, kwargs = args or (), kwargs or {}
        if not (isinstance(args, tuple) and isinstance(kwargs, dict)):  # pyright: ignore
            raise RewriteError(
                f"args of a node must be a tuple and kwargs a dict, got {type(args).__name__} and "
                f"{type(kwargs).__name__}", hint="a single argument needs its comma: (x,)",
                wrong="graph.call_function(torch.relu, (x))",
                right="graph.call_function(torch.relu, (x,))")  # fmt: skip
        if name is None:
            name = _short_name(target) if type(target) is str else self._target_to_str(target)
        name = self._graph_namespace.create_name(name)
        node = Node(self, name, op, target, args, kwargs, type_expr)
        anchor, after = self._anchor, self._after
        while anchor._erased:
            anchor = anchor._prev if after else anchor._next
        prev = anchor if after else anchor._prev
        self._anchor = node if after else anchor
        self._link(node, prev)
        if _makers.name is not None:
            node.meta["made_by"] = _makers.name
        self.version += 1
        if self._watched:
            self._changed("create", node, None, {"prev": prev})
        return node

    def _link(self, node: Node, prev: Node) -> None:
        following = prev._next
        node._prev, node._next = prev, following
        prev._next = following._prev = node
        self._len += 1
        if self._numbered:  # a number between the neighbours', while there is one
            first, last = prev is self._root, following is self._root
            low = prev._key if not first else 0 if last else following._key - 2
            high = low + 2 if last else following._key
            node._key = (low + high) / 2
            self._numbered = low < node._key < high

    def _unlink(self, node: Node) -> None:
        node._prev._next, node._next._prev = node._next, node._prev
        self._len -= 1

    def erase_node(self, to_erase: Node) -> None:
        """Take `to_erase`, a Node that nobody reads, out of the Graph.

        Raises:
            RewriteError: it still has users, or belongs to another Graph.
        """
        if to_erase.graph is not self:
            raise RewriteError("tried to erase a node of another graph", node=to_erase,
                               hint="call erase_node on node.graph")  # fmt: skip
        if to_erase.users:
            readers = ", ".join(user._name for user in list(to_erase.users)[:5])
            raise RewriteError(
                f"tried to erase {to_erase._name}, which {len(to_erase.users)} node(s) still read: "
                f"{readers}", node=to_erase, expected="a node without users",
                hint="make its users read something else first", wrong="graph.erase_node(node)",
                right="node.replace_all_uses_with(new)\ngraph.erase_node(node)")  # fmt: skip
        if to_erase._erased:
            warnings.warn(f"{to_erase._name} was erased before: nothing is done", stacklevel=2)
            return
        prev = to_erase._prev
        self._unlink(to_erase)
        to_erase._erased = True
        for node in to_erase._input_nodes:
            node.users.pop(to_erase, None)
        to_erase._input_nodes = ()
        before = {"prev": prev, "args": to_erase._args, "kwargs": to_erase._kwargs}
        self._edited("erase", to_erase, before, None)

    def _move(self, node: Node, prev: Node, following: Node) -> None:
        """Put `node` between two neighbours: what `Node.prepend` and `append` do."""
        if node.graph is not self or node._erased or prev.graph is not self:
            raise RewriteError("tried to move a node into a graph that it does not belong to",
                               node=node, hint="copy it with graph.node_copy")  # fmt: skip
        if node is prev or node is following:
            return
        old = node._prev
        self._unlink(node)
        self._link(node, prev)
        self._edited("move", node, {"prev": old}, {"prev": prev})

    # -- creators -------------------------------------------------------------------------------

    def placeholder(self, name: str, type_expr: Any = None, default_value: Any = ...) -> Node:
        """Add an input called `name`; `default_value` makes it optional."""
        args = () if default_value is ... or default_value is _EMPTY else (default_value,)
        return self.create_node("placeholder", name, args, type_expr=type_expr)

    def get_attr(self, qualified_name: str, type_expr: Any = None) -> Node:
        """Add a read of a parameter, buffer or other attribute at the path `qualified_name`."""
        self._warn_missing(qualified_name, "get_attr")
        return self.create_node("get_attr", qualified_name, type_expr=type_expr)

    def call_module(self, module_name: str, args: Args = None, kwargs: Kwargs = None,
                    type_expr: Any = None) -> Node:  # fmt: skip
        """Add a call of the sub-module at the dotted path `module_name`."""
        self._warn_missing(module_name, "call_module")
        return self.create_node("call_module", module_name, args, kwargs, type_expr=type_expr)

    def call_method(self, method_name: str, args: Args = None, kwargs: Kwargs = None,
                    type_expr: Any = None) -> Node:  # fmt: skip
        """Add a call of `args[0].method_name(...)`."""
        return self.create_node("call_method", method_name, args, kwargs, type_expr=type_expr)

    def call_function(
        self, the_function: Callable[..., Any], args: Args = None, kwargs: Kwargs = None,
        type_expr: Any = None, name: str | None = None) -> Node:  # fmt: skip
        """Add a call of `the_function`; `name` is a wish for the Node's name."""
        return self.create_node("call_function", the_function, args, kwargs, name, type_expr)

    def output(self, result: Any, type_expr: Any = None) -> Node:
        """Add the return statement; `result` may be a nested structure of Nodes."""
        return self.create_node("output", "output", (result,), type_expr=type_expr)

    def node_copy(self, node: Node,
                  arg_transform: Callable[[Node], Any] = lambda x: x) -> Node:  # fmt: skip
        """Copy a Node of another Graph to the insertion point of this one.

        Args:
            node: the Node to copy; its meta comes along.
            arg_transform: returns for each Node in its arguments the one to use here.
        """
        args, kwargs = map_arg(node._args, arg_transform), map_arg(node._kwargs, arg_transform)
        new = self.create_node(node._op, node._target, args, kwargs, node._name, node._type)
        new.meta = {**node.meta, **new.meta}
        add_ancestors(new, [node])
        return new

    def graph_copy(self, g: Graph, val_map: dict[Node, Node],
                   return_output_node: bool = False) -> Any:  # fmt: skip
        """Copy all of `g`'s Nodes but its output to the insertion point.

        Args:
            g: the Graph to copy from.
            val_map: filled with old Node -> new Node; what is in it already is not copied.
            return_output_node: return (value, output Node of `g`) instead of the value.

        Returns:
            What `g` returns, in Nodes of this Graph, or None if `g` has no output.
        """
        for node in g.nodes:
            if node in val_map:
                continue
            if node._op == "output":
                value = map_arg(node._args[0], val_map.__getitem__)
                return value if not return_output_node else (value, node)
            val_map[node] = self.node_copy(node, val_map.__getitem__)
        return None

    def inserting_before(self, n: Node | None = None) -> ExitStack:
        """Create Nodes before `n` (default: at the beginning) inside a `with` block.

        Raises:
            RewriteError: `n` belongs to another Graph.
        """
        return self._insert_at(self._root._next if n is None else n, False)

    def inserting_after(self, n: Node | None = None) -> ExitStack:
        """Create Nodes behind `n` (default: at the end), one behind the other.

        Raises:
            RewriteError: `n` belongs to another Graph.
        """
        return self._insert_at(self._root._prev if n is None else n, True)

    def _insert_at(self, anchor: Node, after: bool) -> ExitStack:
        if anchor.graph is not self:
            raise RewriteError("the insertion point is a node of another graph", node=anchor)
        outer = self._anchor, self._after
        self._anchor, self._after = anchor, after

        def back() -> None:
            self._anchor, self._after = outer

        return until_left(back)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def nodes(self) -> _node_list:
        """All Nodes in order; `len`, `reversed` and edits while iterating work."""
        return _node_list(self)

    def output_node(self) -> Node:
        """Return the output Node, which is the last one.

        Raises:
            LintError: the last Node is no output, or there is none.
        """
        node = self._root._prev
        if node._op != "output":
            raise LintError("the graph does not end with an output", node=node,
                            hint="add graph.output(value)")  # fmt: skip
        return node

    def find_nodes(self, *, op: str, target: Target | None = None, sort: bool = True) -> list[Node]:
        """Return the Nodes with `op` and `target` (any, if None), in order without `sort` too."""
        return [n for n in self.nodes if n._op == op and (target is None or n._target == target)]

    def _number(self) -> None:
        """Give every Node a number that grows along the list, for `<` between Nodes."""
        if not self._numbered:
            for i, node in enumerate(self.nodes):
                node._key = i
            self._numbered = True

    @staticmethod
    def _target_to_str(target: Any) -> str:
        name = target if isinstance(target, str) else getattr(target, "__name__", None)
        return _short_name(name or type(target).__name__)

    def _warn_missing(self, path: str, what: str) -> None:
        module = self.owning_module
        if module is not None and lookup(module, path, MISSING) is MISSING:
            warnings.warn(f"{what} {path!r} names nothing in {type(module).__name__} yet: add it "
                          "(add_submodule, ...) before it is run", stacklevel=3)  # fmt: skip

    # -- the whole --------------------------------------------------------------------------------

    def lint(self) -> None:
        """Check that this Graph is well formed; `fxlab.core.lint` holds the rules.

        Raises:
            LintError: naming the first Node that breaks a rule, and the rule.
        """
        from .lint import lint

        lint(self)

    def process_inputs(self, *args: Any) -> Any:
        """Turn `args` of `forward` into one value per placeholder."""
        return self._codegen.process_inputs(*args)

    def process_outputs(self, out: Any) -> Any:
        """Turn `out`, the output Node's value, into what `forward` returns."""
        return self._codegen.process_outputs(out)

    def set_codegen(self, codegen: Any) -> None:
        """Use `codegen`, another `CodeGen`, from now on."""
        self._codegen = codegen
        self._touch()

    def on_generate_code(self, make_transformer: Callable[[Any], Any]) -> Any:
        """Transform the lines of generated code; returns a context that undoes the registration.

        Args:
            make_transformer: gets the present transformer (or None), returns the new one: a
                function from the list of body lines to the list of body lines.
        """
        codegen, old = self._codegen, self._codegen._body_transformer
        codegen._body_transformer = new = make_transformer(old)
        self._touch()

        def undo() -> None:
            codegen._body_transformer = old
            if codegen._recompiled_with is not new:  # else the code stays, as in torch.fx
                self._touch()

        return until_left(undo)

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        """Return this Graph as Python source, with the globals that the source needs.

        Args:
            root_module: how generated code calls the module, usually "self".
            options: passed to `CodeGen`, e.g. `verbose=True`.
        """
        return self._codegen._gen_python_code(self.nodes, root_module, _Namespace(), **options)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Graph:
        """Copy the Graph itself: names, order, types, meta (one level deep), code generator."""
        memo = {} if memo is None else memo
        new = memo[id(self)] = Graph(tracer_cls=self._tracer_cls, tracer_extras=self._tracer_extras)
        made: dict[Node, Node] = {}
        for node in self.nodes:
            args, kwargs = (map_arg(a, made.__getitem__) for a in (node._args, node._kwargs))
            copy = Node(new, node._name, node._op, node._target, args, kwargs, node._type)
            copy.meta, copy._repr_fn = dict(node.meta), node._repr_fn
            copy.__dict__.update(node.__dict__)
            add_ancestors(copy, [node])
            made[node] = memo[id(node)] = copy
            new._link(copy, new._root._prev)
            if new._watched:
                new._changed("create", copy, None, {"prev": copy._prev})
        new._graph_namespace = _Namespace(*self._graph_namespace.known())
        new._codegen = copying.deepcopy(self._codegen, memo)
        new._constants, new._trace_warnings = dict(self._constants), list(self._trace_warnings)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle names, order, types and meta as plain data, not a re-trace of the source."""
        from .pickling import graph_from_state, graph_to_state

        return graph_from_state, (graph_to_state(self),)
