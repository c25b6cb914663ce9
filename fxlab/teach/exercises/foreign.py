"""Three passes by somebody else, for exercise 3.3: each is meant to leave what a program computes.

Each docstring says what its pass promises. Where each breaks the promise is the exercise.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node


def fold_scales(gm: GraphModule) -> None:
    """Edit in place: a Linear followed by a multiplication with a number takes the number over."""
    for mul in list(gm.graph.nodes):
        if mul.op != "call_function" or mul.target is not operator.mul:
            continue
        linear, factor = mul.args
        if not isinstance(factor, (int, float)) or linear.op != "call_module":
            continue
        layer = gm.get_submodule(linear.target)
        if not isinstance(layer, nn.Linear) or len(linear.users) > 1:
            continue
        scaled = copy.deepcopy(layer)
        scaled.weight = nn.Parameter(layer.weight.detach() * factor)
        if layer.bias is not None:
            scaled.bias = nn.Parameter(layer.bias.detach() * factor)
        gm.set_submodule(linear.target, scaled)
        mul.replace_all_uses_with(linear)
        gm.graph.erase_node(mul)
    gm.graph.lint()


def merge_repeats(gm: GraphModule) -> None:
    """Edit in place: of two calls that compute the same, the second goes."""
    first: dict[Hashable, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        key = (node.op, node.target, tuple(node.args))
        known = first.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            gm.graph.erase_node(node)
    gm.graph.lint()


def drop_unread(gm: GraphModule) -> None:
    """Edit in place: a call whose result nobody reads, and that changes nothing, goes."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.target in (torch.manual_seed, print):
            continue
        gm.graph.erase_node(node)
    gm.graph.lint()
