"""What does a program compute when nothing is written in place?

An engine has values, no memory, so section 6.4's lowering needs each write as a new value. Here
every read after ``y.add_(1)`` is made to read the call's result, and ``y[:, 0] = z`` becomes a
call that returns ``y``. Run by PyTorch the program does what it did: both are the same tensor. What
may become a new value is decided later (`fxlab.backends.lowering`): a write that another view of
the memory shows stays a write.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fxlab.backends.registry import functional_form
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, map_arg
from fxlab.core.purity import has_side_effect
from fxlab.passes.effects import mutated_inputs

__all__ = ["is_tensor", "name_writes", "setitem_"]

SHAPES = ("tensor_meta", "other_tensor_meta")


@has_side_effect
def setitem_(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``x[index] = value`` as a call that returns ``x``.

    Example:
        >>> setitem_(torch.zeros(3), 1, 5.0)
        tensor([0., 5., 0.])
    """
    x[index] = value
    return x


def name_writes(gm: GraphModule) -> None:
    """Edit in place: what reads a tensor after a write reads the result of the writing call.

    Args:
        gm: the program; its nodes know their shapes (see `with_shapes`).
    """
    latest: dict[Node, Node] = {}  # tensor -> the call that wrote to it last
    first: dict[Node, Node] = {}  # a call that wrote -> the tensor it wrote to

    def now(value: Node) -> Node:
        original = first.get(value, value)
        return latest.get(original, original)

    for made in list(gm.graph.nodes):
        if any(now(value) is not value for value in made.all_input_nodes):
            made.args = map_arg(made.args, now)
            made.kwargs = map_arg(made.kwargs, now)
        node = _as_store(made)
        written = mutated_inputs(node, gm)
        if len(written) == 1 and _returns(node, written[0], gm):
            first[node] = first.get(written[0], written[0])
            latest[first[node]] = node


def is_tensor(value: Any) -> bool:
    """Say whether ``value`` is a Node that is known to stand for one tensor."""
    return isinstance(value, Node) and hasattr(value.meta.get("tensor_meta"), "dtype")


def _returns(node: Node, written: Node, gm: GraphModule) -> bool:
    """Say whether a call returns the very tensor that it writes to."""
    if not (is_tensor(node) and is_tensor(written)):
        return False  # ``n += 1`` of a size makes a new number
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__module__.startswith("torch.nn.")
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    home = getattr(node.target, "__module__", None) or "torch"
    return home.split(".")[0] in ("torch", "_operator") or node.target is setitem_


def _as_store(node: Node) -> Node:
    """Turn ``x[i] = y``, ``x[i] += y`` and ``x[i].add_(y)`` into a `setitem_`; return that."""
    if node.target is operator.setitem and is_tensor(node.args[0]):
        _add_out_of_place(node)
        node.target = setitem_
        return _like(node, node.args[0])
    if node.op != "call_method" or node.users or not _is_view(node.args[0]):
        return node
    read, *rest = node.args
    if len(read.users) > 1 or node.kwargs:
        return node
    value: Any = {"zero_": [0], "fill_": rest, "copy_": rest[:1]}.get(str(node.target))
    graph = node.graph
    if value is None:
        form = functional_form(node.op, node.target)
        if form is None or not hasattr(torch.Tensor, form[1]) or _only_shape(str(node.target)):
            return node
        node.target = form[1]
        with graph.inserting_after(node):
            store = graph.create_node("call_function", setitem_, (*read.args, node))
        store.meta.update({k: v for k, v in node.meta.items() if k not in SHAPES})
        return _like(store, read.args[0])
    with graph.inserting_after(node):
        store = graph.create_node("call_function", setitem_, (*read.args, *value), name=node.name)
    store.meta.update({k: v for k, v in node.meta.items() if k not in SHAPES})
    graph.erase_node(node)
    return _like(store, read.args[0])


def _only_shape(name: str) -> bool:
    """Say whether a method such as ``t_`` changes how its tensor sees memory, not what is there."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return any(torch.Tag.inplace_view in overload.tags for overload in overloads)


def _like(node: Node, tensor: Node) -> Node:
    node.meta.update({key: tensor.meta.get(key) for key in (*SHAPES, "type")})
    return node


def _is_view(node: Any) -> bool:
    """Say whether a node is ``x[i]`` of a tensor, by numbers and slices: a view, no copy."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return False
    x, index = node.args
    items = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, type(None), type(Ellipsis))
    return is_tensor(x) and all(isinstance(i, plain) and not isinstance(i, bool) for i in items)


def _add_out_of_place(store: Node) -> None:
    """In ``x[i] += y`` (get, add in place, set) add out of place: the result is stored anyway."""
    made = store.args[2]
    if not isinstance(made, Node) or made is not store.prev or len(made.users) > 1:
        return
    form = functional_form(made.op, made.target)
    read = made.args[0] if made.args else None
    if form is None or made.op != "call_function" or not isinstance(read, Node):
        return
    if read.target is operator.getitem and read.args == store.args[:2] and len(read.users) == 1:
        made.target = form[1]
