"""Which nodes go to the device, and in how few pieces?

Section 6.4 of the paper lowers what TensorRT supports and leaves the rest to PyTorch. That needs a
cut without a cycle: no part may wait for a node that waits for the part. Here each node gets a
*phase*: how often the longest path to it goes from an unsupported node into a supported one.
Supported nodes of one phase form a part. Values never flow to an earlier phase, so there is no
cycle, and a path with k phases needs k parts, so no cut has fewer. One walk over nodes and edges.
"""

from __future__ import annotations

import abc
import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.passes import split
from fxlab.passes.effects import order_constraints

__all__ = [
    "CapabilityBasedPartitioner",
    "OpSupports",
    "OperatorSupport",
    "OperatorSupportBase",
    "Partition",
    "any_chain",
    "chain",
    "create_op_support",
    "get_node_target",
]

_CALLABLE_OPS = ("call_module", "call_function", "call_method")
Predicate = Callable[[Mapping[str, torch.nn.Module], Node], bool]


def _qualified_name(function: Any) -> str:
    if isinstance(function, types.BuiltinFunctionType):
        return _builtin_name(function)
    return _name_of(function)


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None) or "torch"
    if getattr(torch, name, None) is function:
        module = "torch"
    elif getattr(torch.nn.functional, name, None) is function:
        module = "torch.nn.functional"
    return f"{module.replace('torch._ops', 'torch.ops')}.{name}"


_builtin_name = functools.lru_cache(maxsize=4096)(_name_of)


def get_node_target(submodules: Mapping[str, torch.nn.Module], node: Node) -> str:
    """Return the name of what a node calls: a qualified function, a method, or a module's class.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg() + 1)
        >>> [get_node_target({}, n) for n in gm.graph.nodes if n.op.startswith("call")]
        ['torch.relu', 'neg', '_operator.add']
    """
    if node.op == "call_module":
        return _qualified_name(type(submodules[str(node.target)]))
    return str(node.target) if node.op == "call_method" else _qualified_name(node.target)


def _meta_of(node: Node) -> Any:
    return next((node.meta[k] for k in ("tensor_meta", "val") if k in node.meta), None)


def _dtype(value: Any) -> torch.dtype | None:
    return getattr(_meta_of(value), "dtype", None) if isinstance(value, Node) else None


class OperatorSupportBase(abc.ABC):
    """Says which nodes a device can run, and why not; combine with ``&``, ``|`` and ``~``."""

    @abc.abstractmethod
    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        """Return whether the device runs `node`; `submodules` maps path to module."""

    def reason(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        """Return why `node` of a module with `submodules` is left out, None when it is not.

        `is_node_supported` decides, so that a subclass need override nothing else.
        """
        if self.is_node_supported(submodules, node):
            return None
        what = get_node_target(submodules, node) if node.op in _CALLABLE_OPS else node.name
        return self._refusal(submodules, node) or f"{what} is not supported"

    def _refusal(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        """Return what these rules by themselves have against `node`, in words."""
        return None

    def __and__(self, other: OperatorSupportBase) -> OperatorSupportBase:
        return chain(self, other)

    def __or__(self, other: OperatorSupportBase) -> OperatorSupportBase:
        return any_chain(self, other)

    def __invert__(self) -> OperatorSupportBase:
        return create_op_support(lambda modules, n: not self.is_node_supported(modules, n))


class OperatorSupport(OperatorSupportBase):
    """Supports the operators of a table, and of these only some dtypes where the table says so.

    Args:
        support_dict: name (as `get_node_target` gives it) or the function, module class or method
            name itself -> None (any dtype), or ``(dtypes per positional argument, dtypes per
            keyword)``; None in place of a list of dtypes lets that argument pass.

    Example:
        >>> import fxlab, torch
        >>> support = OperatorSupport({torch.relu: None})
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
        >>> [support.reason({}, n) for n in gm.graph.nodes if n.op == "call_function"]
        [None, '_operator.add is not in the support table']
    """

    def __init__(self, support_dict: Mapping[Any, Any] | None = None) -> None:
        self._support_dict: dict[str, Any] = {
            key if isinstance(key, str) else _qualified_name(key): value
            for key, value in (support_dict or {}).items()
        }

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        """Say whether the table has the node's target, found in `submodules`, with these dtypes."""
        return self._refusal(submodules, node) is None

    def _refusal(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        if node.op not in _CALLABLE_OPS:
            return None
        target = get_node_target(submodules, node)
        if target not in self._support_dict:
            return f"{target} is not in the support table"
        if self._support_dict[target] is None:
            return None
        by_position, by_name = self._support_dict[target]
        checks = [*zip(range(len(node.args)), node.args, by_position, strict=False)]
        checks += [(key, node.kwargs[key], by_name[key]) for key in by_name if key in node.kwargs]
        for where, value, allowed in checks:
            if allowed is not None and isinstance(value, Node) and _dtype(value) not in allowed:
                return f"{target}: argument {where} is {_dtype(value)}, supported: {list(allowed)}"
        return None


class _Functional(OperatorSupportBase):
    def __init__(
        self,
        predicate: Predicate,
        reason: Callable[[Mapping[str, torch.nn.Module], Node], str | None] | None = None,
    ) -> None:
        self._predicate, self._reason = predicate, reason

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return self._predicate(submodules, node)

    def reason(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        if self._reason is not None:
            return self._reason(submodules, node)
        return super().reason(submodules, node)


def create_op_support(is_node_supported: Predicate) -> OperatorSupportBase:
    """Make an OperatorSupportBase of a function.

    Args:
        is_node_supported: ``(submodules, node) -> bool``, where ``submodules`` maps the dotted
            paths of the program's modules to them.
    """
    return _Functional(is_node_supported)


def chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Support what all of some support; the first refusal gives the reason.

    Args:
        *op_support: what is asked, in this order.
    """

    def reason(modules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        return next((r for s in op_support if (r := s.reason(modules, node)) is not None), None)

    return _Functional(
        lambda modules, node: all(s.is_node_supported(modules, node) for s in op_support), reason
    )


def any_chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Support what at least one of some supports.

    Args:
        *op_support: what is asked, in this order.
    """

    def reason(modules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        found = [s.reason(modules, node) for s in op_support]
        return None if None in found else "; ".join(dict.fromkeys(str(r) for r in found))

    return _Functional(
        lambda modules, node: any(s.is_node_supported(modules, node) for s in op_support), reason
    )


class OpSupports:
    """Small rules to combine with others."""

    @classmethod
    def decline_if_input_dtype(cls, dtype: torch.dtype) -> OperatorSupportBase:
        """Refuse nodes that read a value of `dtype`."""

        def reason(modules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
            found = [value.name for value in node.all_input_nodes if _dtype(value) == dtype]
            return f"input {found[0]} is {dtype}" if found else None

        return _Functional(lambda modules, node: reason(modules, node) is None, reason)

    @classmethod
    def decline_if_node_in_names(cls, disallow_set: Collection[str]) -> OperatorSupportBase:
        """Refuse the nodes whose names are in ``disallow_set``."""

        def reason(modules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
            return "named as one to leave out" if node.name in disallow_set else None

        return _Functional(lambda modules, node: node.name not in disallow_set, reason)

    @classmethod
    def decline_if_rank_above(cls, rank: int) -> OperatorSupportBase:
        """Refuse nodes that read or make a tensor of more than `rank` dimensions."""

        def reason(modules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
            for value in (*node.all_input_nodes, node):
                shape = getattr(_meta_of(value), "shape", ())
                if len(shape) > rank:
                    return f"{value.name} has {len(shape)} dimensions, supported: up to {rank}"
            return None

        return _Functional(lambda modules, node: reason(modules, node) is None, reason)


class Partition:
    """Nodes that become one part, each with its place counted from the end of the graph."""

    def __init__(
        self,
        id: int | None = None,
        nodes: Iterable[Node] | None = None,
        node_orders: Iterable[int] | None = None,
    ) -> None:
        self.id = id
        names = list(nodes or ())
        orders = list(node_orders) if node_orders is not None else [None] * len(names)
        self.nodes: dict[Node, int | None] = dict(zip(names, orders, strict=True))

    def __repr__(self) -> str:
        return str(self.nodes)

    def add_node(self, node: Node, node_order: int | None = None) -> None:
        """Add a node."""
        self.nodes[node] = node_order

    def remove_node(self, node: Node) -> None:
        """Take a node out."""
        del self.nodes[node]

    def size(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)


class CapabilityBasedPartitioner:
    """Cut a program into the parts that a device supports and the nodes that it does not.

    Args:
        graph_module: the program; never edited.
        operator_support: what the device supports.
        allows_single_node_partition: keep parts with one computing node.
        non_compute_ops: qualified names of functions that do not count as computing.
        allowed_single_node_partition_ops: qualified names that are worth a part alone.
        skip_horizontal_fusion: do not merge parts of one phase that share no value.
        min_partition_size: leave parts with fewer computing nodes to PyTorch.

    Attributes:
        reasons: after `propose_partitions`, node name -> why it is in no part.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x).exp().sin().exp() + 1)
        >>> support = OpSupports.decline_if_node_in_names({"sin"})
        >>> partitioner = CapabilityBasedPartitioner(gm, support)
        >>> fused = partitioner.partition_and_fuse()
        >>> [n.name for n in fused.graph.nodes]
        ['x', 'fused_0', 'sin', 'fused_1', 'output']
        >>> partitioner.reasons
        {'sin': 'named as one to leave out'}
    """

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
        *,
        min_partition_size: int = 0,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops = set(allowed_single_node_partition_ops or ())
        self.skip_horizontal_fusion = skip_horizontal_fusion
        self.min_partition_size = min_partition_size
        self.reasons: dict[str, str] = {}
        self._constraints: tuple[int, Any] = (-1, None)

    def propose_partitions(self) -> list[Partition]:
        """Return the parts, first to be called first; `reasons` says why nodes are in none."""
        nodes = list(self.graph_module.graph.nodes)
        modules = dict(self.graph_module.named_modules(remove_duplicate=False))
        supported = self._supported(nodes, modules)
        phase, component = self._phases(nodes, supported)
        groups: dict[Any, list[Node]] = {}
        for node in nodes:
            if node in supported:
                groups.setdefault((phase[node], component(node)), []).append(node)
        order = {node: len(nodes) - 1 - index for index, node in enumerate(nodes)}
        partitions: list[Partition] = []
        for key in sorted(groups, key=lambda k: k[0]):
            members = groups[key]
            if (why := self._too_small(members)) is not None:
                self.reasons.update((node.name, why) for node in members)
            else:
                partitions.append(
                    Partition(len(partitions), members, (order[node] for node in members))
                )
        return partitions

    def _supported(self, nodes: list[Node], modules: dict[str, Any]) -> set[Node]:
        self.reasons = {}
        supported: set[Node] = set()
        for node in nodes:
            if node.op not in _CALLABLE_OPS:
                continue
            producer = node.args[0] if node.args else None
            if (
                node.target is operator.getitem
                and isinstance(producer, Node)
                and producer.op in _CALLABLE_OPS
                and all(user.target is operator.getitem for user in producer.users)
            ):  # the items of a tuple stay with the node that makes it
                if producer in supported:
                    supported.add(node)
                else:
                    self.reasons[node.name] = f"an item of {producer.name}, which is left out"
                continue
            if (why := self.operator_support.reason(modules, node)) is None:
                supported.add(node)
            else:
                self.reasons[node.name] = why
        return supported

    def _phases(
        self, nodes: list[Node], supported: set[Node]
    ) -> tuple[dict[Node, int], Callable[[Node], Any]]:
        """Phase of each node, and the connected component of supported nodes of one phase."""
        hidden: dict[Node, list[Node]] = {}
        constraints = order_constraints(self.graph_module)
        self._constraints = (self.graph_module.graph.version, constraints)
        for before, after in itertools.chain(*constraints):
            hidden.setdefault(after, []).append(before)
        phase: dict[Node, int] = {}
        parent: dict[Node, Node] = {node: node for node in supported}

        def find(node: Node) -> Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for node in nodes:
            inside = node in supported
            here = 0 if inside else -1  # -1: nothing supported comes before
            inputs = (*node.all_input_nodes, *hidden.get(node, ()))
            for value in inputs:
                here = max(here, phase[value] + (inside and value not in supported))
            phase[node] = here
            if inside:
                for value in inputs:
                    if value in supported and phase[value] == here:
                        parent[find(value)] = find(node)
        return phase, find if self.skip_horizontal_fusion else lambda node: None

    def _too_small(self, members: list[Node]) -> str | None:
        free = {"torch.ops.aten.view", "_operator.getitem", *self.non_compute_ops}
        names = [
            "" if node.op != "call_function" else _qualified_name(node.target) for node in members
        ]
        count = sum(name not in free for name in names)
        count += sum(name in self.allowed_single_node_partition_ops for name in names)
        least = max(self.min_partition_size, 0 if self.allows_single_node_partition else 2)
        if count >= least:
            return None
        return f"supported, but alone: its part has {count} computing nodes, at least {least} asked"

    def fuse_partitions(
        self, partitions: list[Partition], prefix: str = "fused_", *, report_as: str = "partition"
    ) -> GraphModule:
        """Return a new module in which each of `partitions` is a submodule ``<prefix><index>``.

        Args:
            partitions: the parts, from `propose_partitions` or by hand.
            prefix: of the submodules' names.
            report_as: under which name the report is kept.

        Raises:
            RewriteError: parts (edited by hand) need each other in a cycle.
        """
        part_of = {}
        for index, partition in enumerate(partitions):
            part = split.Partition(str(index), f"{prefix}{index}")
            part_of.update(dict.fromkeys(partition.nodes, part))
        version, constraints = self._constraints
        fused = split.split_nodes(
            self.graph_module,
            part_of,
            report_as=report_as,
            constraints=constraints if version == self.graph_module.graph.version else None,
        )
        report = fused.meta["reports"][report_as]
        left = {n.name for n in self.graph_module.graph.nodes if n not in part_of}
        report["kept"] += [f"{name} left: {why}" for name, why in self.reasons.items()]
        report["reasons"] = {name: why for name, why in self.reasons.items() if name in left}
        return fused

    def remove_bookend_non_compute_ops(self, partitions: list[Partition]) -> None:
        """Take nodes of `non_compute_ops` off the borders of `partitions`, in place."""
        free = set(self.non_compute_ops)
        for partition in partitions:
            names = {node: _qualified_name(node.target) for node in partition.nodes}
            candidates = [n for n in partition.nodes if n.op == "call_function"]
            candidates = [n for n in candidates if names[n] in free]
            for ordered, neighbours in (
                (candidates, lambda n: n.all_input_nodes),
                (reversed(candidates), lambda n: n.users),
            ):
                for node in ordered:
                    if node in partition.nodes and not any(
                        other in partition.nodes and other.op != "placeholder"
                        for other in neighbours(node)
                    ):
                        partition.remove_node(node)

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        """Return `fuse_partitions` of `propose_partitions`, with this ``prefix``."""
        return self.fuse_partitions(self.propose_partitions(), prefix)
