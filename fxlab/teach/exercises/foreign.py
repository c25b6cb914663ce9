"""Three passes by somebody else, for exercise 3.3: each is meant to leave what a program computes.

Each docstring says what its pass promises; where each breaks the promise is the exercise.
``program`` gives a program for each.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.teach.programs import fill


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


class Scaled(nn.Module):
    """Layers with a factor behind them; ``order`` says which layer comes when."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f64[n, 4] for f64[n, 4]."""
        for number, name in enumerate(self.order):
            x = torch.tanh(getattr(self, name)(x) * (0.5 + number))
        return x


def limited(x: torch.Tensor) -> torch.Tensor:
    """Say some things twice."""
    a = torch.sigmoid(x) + torch.sigmoid(x)
    b = torch.clamp(x, min=-4) * torch.clamp(x, min=-4)
    c = torch.clamp(x, max=4) - torch.clamp(x, min=-4, max=4)
    return a + b + c + torch.sigmoid(x)


class Counting(nn.Module):
    """Leave something behind at each call."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.empty(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f64[n, 4] for f64[n, 4]."""
        y = torch.relu(x) + self.shift
        torch.sigmoid(x).sum()
        self.shift.add_(0.25)
        torch.tanh(y)
        y.abs()
        return y * 2


def program(part: str) -> tuple[GraphModule, torch.Tensor]:
    """Return the program that part "a", "b" or "c" is first tried on, and an input for it."""
    return made({"a": Scaled("abcdc"), "b": limited, "c": Counting()}[part])


def made(model: nn.Module | Callable[..., Any]) -> tuple[GraphModule, torch.Tensor]:
    """Return the traced model in float64, with the same numbers each time, and an input for it."""
    if isinstance(model, nn.Module):
        fill(model, 3).double()
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return symbolic_trace(model), x
