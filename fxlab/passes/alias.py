"""Which values may share memory? What every pass must ask once a program writes in place.

The paper calls mutation undefined (section 5.6), and models write in place all the same. Two
values that hold equal numbers may be merged, or one computed ahead of time, only if nobody writes
into either of them. ``x.view(-1)`` and ``x`` are one piece of memory, ``x + 1`` is a new one: the
schemas of torch's operators say which, and what they do not say counts as shared.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect

__all__ = ["Memory", "makes_new_value"]

_OPERATORS = {
    getattr(operator, name): aten
    for name, aten in {
        "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
        "matmul": "matmul", "pow": "pow", "neg": "neg", "mod": "remainder", "and_": "bitwise_and",
        "or_": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "lt": "lt", "le": "le",
        "eq": "eq", "ne": "ne", "gt": "gt", "ge": "ge", "abs": "abs",
    }.items()
}  # fmt: skip
# Composite operators are made of others, so their schemas promise nothing; these compute.
_COMPOSITES_THAT_COMPUTE = frozenset(
    "linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "max_pool1d max_pool2d max_pool3d batch_norm layer_norm group_norm softmax log_softmax silu "
    "selu relu6 cross_entropy adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "avg_pool1d where std var zeros_like ones_like full_like scaled_dot_product_attention "
    "floor_divide normalize sum mean square arange zeros ones full gelu floor ceil".split()
)
_MODULES_THAT_COMPUTE = (
    "torch.nn.modules.activation",
    "torch.nn.modules.conv",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.normalization",
    "fxlab.passes.convolutions",
)


class Memory:
    """The values of one graph in classes that may share memory, and which are written to.

    Args:
        gm: The module; its graph must not change while the answers are used, except that nodes
            are erased or their uses rerouted within the rules that the answers give.

    Attributes:
        returned: Whether the output shares memory with a node: ``node in memory.returned``.
        written: Whether some node writes into memory that a node may share.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._parent: dict[Node, Node] = {}
        writers = []
        for node in gm.graph.nodes:
            self._parent[node] = node
            if effect(node, gm, impure_random=False) and node.op not in ("placeholder", "output"):
                writers.append(node)
            if node.op != "output" and not makes_new_value(node, gm):
                for source in node.all_input_nodes:
                    self._join(node, source)
        read = [n for n in gm.graph.nodes if n.op == "get_attr"]
        first: dict[Any, Node] = {}
        for node in read:  # two reads of one attribute are one piece of memory
            self._join(node, first.setdefault(node.target, node))
        written = {self._root(i) for writer in writers for i in writer.all_input_nodes}
        outputs = [n for n in gm.graph.nodes if n.op == "output"]
        output = {self._root(i) for n in outputs for i in n.all_input_nodes}
        self.written = {n for n in self._parent if self._root(n) in written}
        self.returned = {n for n in self._parent if self._root(n) in output}

        self._size: dict[Node, int] = {}
        for node in self._parent:
            root = self._root(node)
            self._size[root] = self._size.get(root, 0) + 1

    def alone(self, node: Node) -> bool:
        """Return True when no other value of the graph may share memory with ``node``."""
        return self._size[self._root(node)] == 1

    def _root(self, node: Node) -> Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]  # halve the path on the way
            node = self._parent[node]
        return node

    def _join(self, a: Node, b: Node) -> None:
        self._parent[self._root(a)] = self._root(b)


def makes_new_value(node: Node, gm: GraphModule) -> bool:
    """Return True when the value of ``node`` certainly shares memory with none of its inputs."""
    if node.op == "call_module":
        module = gm.get_submodule(node.target)
        if getattr(module, "inplace", False):
            return False
        return type(module) is nn.Linear or type(module).__module__ in _MODULES_THAT_COMPUTE
    if node.op == "call_method":
        return hasattr(torch.Tensor, node.target) and _computes(node.target)
    if node.op == "call_function":
        if node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True:
            return False
        target = node.target
        if target in _OPERATORS:
            return _computes(_OPERATORS[target])
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[-1]
            return name in _COMPOSITES_THAT_COMPUTE or _overload_computes(target)
        module = getattr(target, "__module__", None) or ""
        if module.startswith("torch") or isinstance(target, torch._ops.OpOverloadPacket):
            return _computes(target.__name__)
    return False


@functools.cache
def _computes(name: str) -> bool:
    """Say whether all overloads of the aten operator ``name`` return fresh memory."""
    if name in _COMPOSITES_THAT_COMPUTE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    # Overloads without a kernel work on lists and numbers only.
    tensor_overloads = [
        o
        for o in overloads
        if "out" not in o._overloadname and torch._C._dispatch_has_kernel(o.name())
    ]
    return all(map(_overload_computes, tensor_overloads)) and bool(tensor_overloads)


def _overload_computes(overload: Any) -> bool:
    if overload._schema.overload_name and not overload._schema.returns:
        return False
    aliases = any(value.alias_info is not None for value in overload._schema.returns)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), "CompositeImplicitAutograd"
    )
    return not aliases and not composite
