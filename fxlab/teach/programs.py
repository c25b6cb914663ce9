"""Small programs for checking an answer: where do the counterexamples come from?

`programs` makes a hypothesis strategy of GraphModules that shrink to the fewest nodes: every value
has the same shape, so any node may read any earlier one, and a program that is made smaller is
still a program. `fresh_inputs` gives random, non-uniform inputs for it.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node

SHAPES = {"flat": (2, 4), "image": (2, 3, 5, 5)}
_UNARY = [
    ("call_function", torch.relu), ("call_method", "neg"), ("call_function", torch.sigmoid),
    ("call_function", torch.tanh), ("call_method", "abs"),
]  # fmt: skip
_BINARY = [("call_function", operator.add), ("call_function", torch.mul), ("call_method", "sub")]
_EFFECTS = [
    ("call_method", "add_", (1.0,), {}), ("call_function", torch.rand_like, (), {}),
    ("call_function", operator.setitem, (0, 2.0), {}), ("call_method", "relu_", (), {}),
    ("call_function", F.relu, (), {"inplace": True}),
    ("call_function", F.dropout, (0.5,), {"training": True}),
]  # fmt: skip
_KWARGS = [
    ("call_function", torch.clamp, (), {"min": -0.5, "max": 0.5}),
    ("call_function", F.gelu, (), {"approximate": "tanh"}),
    ("call_function", F.leaky_relu, (), {"negative_slope": 0.3}),
]


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give parameters and buffers random numbers, batch norm's statistics positive variances."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.5)
    return module


def layer(kind: str, shape: str = "image", seed: int = 0, **options: Any) -> nn.Module:
    """A layer that keeps the shape: "conv", "bn", "linear", "relu", "dropout".

    Args:
        kind: Which.
        shape: "image" or "flat", see SHAPES.
        seed: Of its numbers.
        **options: Handed to the constructor.
    """
    width = SHAPES[shape][1]
    if kind == "conv":
        options = {"kernel_size": 3, "padding": 1, **options}
        module: nn.Module = nn.Conv2d(width, width, **options)
    elif kind == "bn":
        module = (nn.BatchNorm2d if shape == "image" else nn.BatchNorm1d)(width, **options)
    elif kind == "linear":
        module = nn.Linear(SHAPES[shape][-1], SHAPES[shape][-1], **options)
    else:
        module = {"relu": nn.ReLU, "dropout": nn.Dropout}[kind](**options)
    return fill(module, seed)


def copy_of(gm: GraphModule) -> GraphModule:
    """A copy with tensors of its own."""
    return copy.deepcopy(gm)


def fresh_inputs(gm: GraphModule, shape: str = "flat", seed: int = 0) -> list[torch.Tensor]:
    """Random inputs, one tensor for each placeholder."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(node.op == "placeholder" for node in gm.graph.nodes)
    return [torch.randn(SHAPES[shape], generator=generator) for _ in range(count)]


def programs(
    *,
    most: int = 7,
    shape: str = "flat",
    inputs: int = 1,
    outputs: int = 1,
    effects: bool = False,
    state: bool = False,
    kwargs: bool = False,
    repeats: bool = False,
    layers: tuple[str, ...] = (),
    shared: bool = False,
    training: bool = False,
    choices: list[tuple[Any, ...]] | None = None,
) -> Any:
    """Make a strategy of small GraphModules.

    Args:
        most: How many operations at most. Some may be read by nobody: they are dead code.
        shape: Shape of every value, a key of SHAPES.
        inputs: How many placeholders.
        outputs: How many outputs at most; more than one are returned as a tuple.
        effects: Operations that write in place or draw random numbers may be among them.
        state: get_attr nodes of a parameter and a buffer may be among them.
        kwargs: Operations with keyword arguments may be among them.
        repeats: A node may be the same call as an earlier one.
        layers: Kinds of `layer` that are called as modules.
        shared: The same module may be called more than once.
        training: Whether the module is in train mode.
        choices: More operations: `(op, target, more args, kwargs)`, the value read comes first.

    Returns:
        A hypothesis strategy. Its programs are in eval mode unless `training`.
    """
    from hypothesis import strategies as st

    table: list[tuple[Any, ...]] = [(op, target, (), {}) for op, target in _UNARY]
    table += choices or []
    table += _KWARGS if kwargs else []
    kinds = ["unary", "binary", *(["effect"] if effects else []), *(["state"] if state else [])]
    kinds += ["repeat"] if repeats else []
    kinds += ["layer"] * (2 if layers else 0)

    @st.composite
    def program(draw: Any) -> GraphModule:
        graph, root = Graph(), nn.Module()
        values: list[Node] = [graph.placeholder("xyz"[k]) for k in range(inputs)]
        made: list[str] = []
        if state:
            root.weight = nn.Parameter(torch.empty(SHAPES[shape]))
            root.register_buffer("offset", torch.empty(SHAPES[shape]))
            fill(root, 5)

        def pick() -> Node:
            # 0 is the value made last: a smaller draw is a plainer chain.
            return values[-1 - draw(st.integers(0, len(values) - 1))]

        for _ in range(draw(st.integers(1, most))):
            kind = draw(st.sampled_from(kinds))
            if kind == "unary":
                op, target, more, named = draw(st.sampled_from(table))
                values.append(graph.create_node(op, target, (pick(), *more), dict(named)))
            elif kind == "binary":
                op, target = draw(st.sampled_from(_BINARY))
                values.append(graph.create_node(op, target, (pick(), pick())))
            elif kind == "effect":
                op, target, more, named = draw(st.sampled_from(_EFFECTS))
                node = graph.create_node(op, target, (pick(), *more), dict(named))
                if target is not operator.setitem:
                    values.append(node)
            elif kind == "state":
                values.append(graph.get_attr(draw(st.sampled_from(["weight", "offset"]))))
            elif kind == "repeat":
                old = values[-1 - draw(st.integers(0, len(values) - 1))]
                if old.op != "placeholder":
                    values.append(graph.create_node(old.op, old.target, old.args, old.kwargs))
            else:
                again = shared and made and draw(st.booleans())
                if again:
                    name = draw(st.sampled_from(made))
                else:
                    what = draw(st.sampled_from(list(layers)))
                    name = f"{what}{len(made)}"
                    root.add_module(name, layer(what, shape, seed=len(made)))
                    made.append(name)
                values.append(graph.call_module(name, (pick(),)))
        count = draw(st.integers(1, outputs))
        results = [pick() for _ in range(count)]
        graph.output(results[0] if count == 1 else tuple(results))
        root.train(training)
        gm = GraphModule(root, graph)
        gm.train(training)
        return gm

    return program()


def built(make: Any, root: nn.Module | None = None, training: bool = False) -> GraphModule:
    """A GraphModule from a function that fills a Graph, for fixed cases.

    Example:
        >>> def fill_in(graph):
        ...     x = graph.placeholder("x")
        ...     graph.output(graph.call_function(torch.relu, (x,)))
        >>> built(fill_in)(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    graph = Graph()
    make(graph)
    gm = GraphModule(root if root is not None else nn.Module(), graph)
    gm.train(training)
    return gm
