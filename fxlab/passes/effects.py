"""Which nodes must keep their order although no value flows between them?

A Graph shows who reads whose value, not who overwrites it: ``x.add_(1)`` changes what every other
reader of ``x`` sees. Whoever moves nodes (splitting, partitioning, scheduling: sections 6.2.3 and
6.4 of the paper) needs these hidden edges too. This module finds the arguments a node writes to,
groups values that may share memory, and lists the ordering constraints; all of it in one walk.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.passes.alias import makes_new_value
from fxlab.passes.base import REGION_BORDERS

__all__ = ["AliasClasses", "mutated_inputs", "order_constraints"]

_INPLACE_NAMES = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("ilshift", "irshift", "imatmul", "iconcat", "setitem", "delitem"),
)
_INPLACE_OPERATORS = {getattr(operator, name) for name in _INPLACE_NAMES}
_INPLACE_DUNDERS = {f"__{op.__name__}__" for op in _INPLACE_OPERATORS}


def _module(node: Node, gm: GraphModule | None) -> torch.nn.Module | None:
    """The module that a ``call_module`` node calls, None where it cannot be resolved."""
    if gm is None or node.op != "call_module":
        return None
    try:
        return gm.get_submodule(str(node.target))
    except AttributeError:
        return None


@functools.lru_cache(maxsize=2048)
def _parameter_index(function: Any, name: str) -> int | None:
    """Position of parameter `name` of a Python function, None where it has no such parameter."""
    try:
        return list(inspect.signature(function).parameters).index(name)
    except (TypeError, ValueError):
        return None


def _argument(node: Node, name: str) -> Any:
    """The value given for parameter `name`, by keyword or by position; None when not given."""
    if name in node.kwargs:
        return node.kwargs[name]
    index = _parameter_index(node.target, name)
    return node.args[index] if index is not None and index < len(node.args) else None


def mutated_inputs(node: Node, gm: GraphModule | None = None) -> list[Node]:
    """List the input nodes whose tensor this node writes to (not the state of a called module).

    Args:
        node: any node.
        gm: owner of the graph, needed to know the ``inplace`` flag of a called module.

    Returns:
        Input nodes in argument order, usually none or one.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x).add_(1))
        >>> [mutated_inputs(n) for n in gm.graph.nodes if n.op == "call_method"]
        [[relu]]
    """
    written: list[Any] = []
    first = node.args[0] if node.args else node.kwargs.get("input")
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDERS:
            written.append(first)
    elif node.op == "call_module":
        if getattr(_module(node, gm), "inplace", False) is True:
            written.append(first)
    elif node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            for position, argument in enumerate(target._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = node.args[position : position + 1] or [node.kwargs.get(argument.name)]
                    written.extend(given)
        else:
            name = getattr(target, "__name__", "")
            inplace_name = name.endswith("_") and not name.endswith("__")
            if getattr(target, "__module__", None) == "_operator":
                inplace_name = False  # ``and_``, ``or_``: named so because of Python's keywords
            if target in _INPLACE_OPERATORS or inplace_name or _argument(node, "inplace") is True:
                written.append(first)
            if name == "batch_norm" and _argument(node, "training") is True:
                written += [_argument(node, "running_mean"), _argument(node, "running_var")]
    written.append(node.kwargs.get("out"))
    several = ([*v] if isinstance(v, (tuple, list)) else [v] for v in written)  # torch._foreach_*_
    return [value for values in several for value in values if isinstance(value, Node)]


class AliasClasses:
    """Groups of nodes whose values may share memory, by union-find over the graph in one walk.

    Unknown functions and modules are taken to return (a view of) each of their inputs, so two
    nodes of different classes surely do not share memory (inputs of the graph are taken to be
    different tensors).

    Args:
        gm: the program.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._parent: dict[Node, Node] = {}
        attributes: dict[str, Node] = {}
        for node in gm.graph.nodes:
            self._parent[node] = node
            if node.op == "get_attr":
                self._union(node, attributes.setdefault(str(node.target), node))
            elif node.op not in ("placeholder", "output"):
                same = mutated_inputs(node, gm)  # what writes in place returns what it wrote to
                if not same and not makes_new_value(node, gm):
                    same = node.all_input_nodes
                for other in same:
                    self._union(node, other)

    def find(self, node: Node) -> Node:
        """Return the node that stands for `node`'s class."""
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def _union(self, a: Node, b: Node) -> None:
        self._parent[self.find(a)] = self.find(b)


class _Memory:
    """Who wrote to one piece of memory last, and who has read it since."""

    def __init__(self) -> None:
        self.sure: Node | None = None  # the last node that surely wrote
        self.maybe: Node | None = None  # the last one after it that may have
        self.readers: list[Node] = []  # since the sure write; who may have written reads, too
        self.recent: list[Node] = []  # since any write

    def read(self, node: Node, hard: list[Any], soft: list[Any]) -> None:
        """Note that `node` comes after the writes before it."""
        inputs = node.all_input_nodes
        if self.sure is not None and self.sure not in inputs:
            hard.append((self.sure, node))
        if self.maybe is not None and self.maybe not in inputs:
            soft.append((self.maybe, node))

    def write(self, node: Node, surely: bool, hard: list[Any], soft: list[Any]) -> None:
        """Note that `node` comes after the reads before it."""
        if surely:
            hard.extend((reader, node) for reader in self.readers)
            self.sure, self.maybe, self.readers = node, None, []
        else:
            soft.extend((reader, node) for reader in self.recent)
            self.maybe = node
            self.readers.append(node)
        self.recent = []


def order_constraints(gm: GraphModule) -> tuple[list[tuple[Node, Node]], list[tuple[Node, Node]]]:
    """List the pairs of nodes whose order matters although no value flows between them.

    Args:
        gm: the program; it is left untouched.

    Returns:
        ``(hard, soft)``: pairs ``(before, after)``. Hard ones follow from writes to memory and
        from effects on the world (printing, state of a module); soft ones decide which random
        numbers a node draws, or hold if unknown code writes to its inputs. Linear in nodes and
        edges.

    Example:
        >>> import fxlab, torch
        >>> def f(x):
        ...     y = torch.relu(x)
        ...     z = y + 1
        ...     y.mul_(2)
        ...     return y, z
        >>> order_constraints(fxlab.symbolic_trace(f))[0]
        [(add, mul_)]
    """
    nodes = list(gm.graph.nodes)
    hard: list[tuple[Node, Node]] = []
    soft: list[tuple[Node, Node]] = []
    state = _state_read_directly(nodes)
    impure = _effects(nodes, gm, state)
    writes = {node: values for node, (_, values, _) in impure.items() if values}
    aliases = AliasClasses(gm) if writes else None
    memory: dict[Node, _Memory] = {}
    last_of: dict[str, Node] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target in REGION_BORDERS:
            continue
        chain, values, surely = impure.get(node, (None, (), True))
        if aliases is not None:
            written = {aliases.find(value) for value in values}
            touched = (*node.all_input_nodes, *state.get(node, ()))
            for place in {aliases.find(value): None for value in touched}:
                last = memory.setdefault(place, _Memory())
                last.read(node, hard, soft)
                if place in written:
                    last.write(node, surely, hard, soft)
                else:
                    last.readers.append(node)
                    last.recent.append(node)
        if chain is not None:
            if chain in last_of:
                (soft if chain == "random" else hard).append((last_of[chain], node))
            last_of[chain] = node
    return hard, soft


def _state_read_directly(nodes: list[Node]) -> dict[Node, list[Node]]:
    """Each call of a module -> the get_attr nodes that read its state, or a module around it."""
    exact: dict[str, list[Node]] = {}
    below: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "get_attr":
            exact.setdefault(str(node.target), []).append(node)
            for path in _owners(str(node.target)):
                below.setdefault(path, []).append(node)
    found: dict[Node, list[Node]] = {}
    for node in nodes if exact else ():
        if node.op == "call_module":
            path = str(node.target)
            state = list(below.get(path, ()))
            for around in (path, *_owners(path)):
                state += exact.get(around, ())
            if state:
                found[node] = state
    return found


def _owners(path: str) -> list[str]:
    """``"a.b.c"`` -> ``["a", "a.b"]``."""
    atoms = path.split(".")
    return [".".join(atoms[:i]) for i in range(1, len(atoms))]


def _effects(
    nodes: list[Node], gm: GraphModule, state: dict[Node, list[Node]]
) -> dict[Node, tuple[str | None, list[Node], bool]]:
    """Each impure node -> (the order it must keep, values it writes, whether it surely writes).

    The order is ``"world"`` (effects outside the graph), ``"random"`` or None. Code that is not
    known may write to its inputs or not.
    """
    found: dict[Node, tuple[str | None, list[Node], bool]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or effect(node, gm) is None:
            continue
        reason = effect(node, gm, impure_random=False)
        if values := mutated_inputs(node, gm):
            found[node] = (None, values, True)
        elif reason is None:
            found[node] = ("random", [], True)
        else:
            unknown = "not known to be pure" in reason
            inputs = node.all_input_nodes if unknown else ()
            found[node] = ("world", [*inputs, *state.get(node, ())], not unknown)
    return found
