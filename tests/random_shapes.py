"""Random programs whose shapes hang on sizes: broadcast, reshape, cat, matmul, slices.

Each runs on its own example. The same seed gives the same program.
"""

from __future__ import annotations

import math
import operator
import random

import torch
import torch.nn.functional as F
from torch import nn

import fxlab


class Layers(nn.Module):
    """What the programs call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.conv = nn.Conv1d(3, 4, 3, stride=2)
        self.pool = nn.MaxPool1d(2)
        self.table = nn.Parameter(torch.zeros(1, 5, 4))


def random_shapes(seed: int, *, size: int = 7) -> tuple[fxlab.GraphModule, list[torch.Tensor]]:
    """Return a program of about ``size`` operations, and the inputs that it was made with."""
    rng = random.Random(seed)
    graph, layers = fxlab.Graph(), Layers()
    inputs = [
        torch.zeros([rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(rng.choice((2, 2, 3)))])
        for _ in range(rng.choice((1, 2)))
    ]
    nodes = [graph.placeholder("xy"[i]) for i in range(len(inputs))]
    values = list(inputs)
    tries = 0
    while len(values) < len(inputs) + size and tries < 40 * size:
        tries += 1
        op, target, make = rng.choice(_OPERATIONS)
        try:
            picks = [max(rng.randrange(len(values)), rng.randrange(len(values))) for _ in "ab"]
            args, kwargs = make(rng, [nodes[i] for i in picks], [values[i] for i in picks])
            known = dict(zip(nodes, values, strict=True))
            real = fxlab.core.node.map_arg(args, known.__getitem__)
            with torch.no_grad():
                if op == "call_module":
                    value = getattr(layers, target)(*real, **kwargs)
                elif op == "call_method":
                    value = getattr(real[0], target)(*real[1:], **kwargs)
                elif op == "get_attr":
                    value = getattr(layers, target)
                else:
                    value = target(*real, **kwargs)
        except (RuntimeError, IndexError, ValueError):
            continue
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() < 5000 or value.dim() > 5:
            continue
        nodes.append(graph.create_node(op, target, args, kwargs))
        values.append(value)
    graph.output(tuple(nodes[-2:]))
    return fxlab.GraphModule(layers, graph), inputs


def _one(rng: random.Random, nodes: list, values: list) -> tuple:
    return (nodes[0],), {}


def _two(rng: random.Random, nodes: list, values: list) -> tuple:
    return tuple(nodes), {}


def _dim_first(rng: random.Random, nodes: list, values: list) -> tuple:
    return (nodes[0], rng.randrange(values[0].dim())), {}


def _pair_and_dim(rng: random.Random, nodes: list, values: list) -> tuple:
    return (tuple(nodes), rng.randrange(values[0].dim())), {}


def _reshape(rng: random.Random, nodes: list, values: list) -> tuple:
    count = values[0].numel()
    divisors = [d for d in range(1, min(count, 16) + 1) if count % d == 0]
    shapes = [(-1,), (rng.choice(divisors), -1), (-1, rng.choice(divisors))]
    first = rng.choice(divisors)
    second = rng.choice([d for d in divisors if count // first % d == 0])
    shapes += [(first, second, -1), (first, -1, second)]
    return (nodes[0], *rng.choice(shapes)), {}


def _slice(rng: random.Random, nodes: list, values: list) -> tuple:
    cuts = [slice(None, rng.randint(1, 4)), slice(rng.randint(1, 3), None), slice(None, None, 2),
            slice(-rng.randint(1, 3), None), slice(1, -1), 0, None]  # fmt: skip
    return (nodes[0], (slice(None),) * rng.randrange(values[0].dim()) + (rng.choice(cuts),)), {}


def _expand(rng: random.Random, nodes: list, values: list) -> tuple:
    return (nodes[0], rng.choice((2, 3)), *[-1] * values[0].dim()), {}


def _repeat(rng: random.Random, nodes: list, values: list) -> tuple:
    return (nodes[0], 2, *[1] * (values[0].dim() - 1)), {}


def _none(rng: random.Random, nodes: list, values: list) -> tuple:
    return (), {}


def _two_dims(rng: random.Random, nodes: list, values: list) -> tuple:
    dims = range(values[0].dim())
    return (nodes[0], rng.choice(dims), rng.choice(dims)), {}


_OPERATIONS: list[tuple] = [
    ("call_function", operator.add, _two), ("call_function", operator.mul, _two),
    ("call_function", operator.add, _two), ("call_function", torch.matmul, _two),
    ("call_function", torch.matmul, _two), ("call_function", torch.cat, _pair_and_dim),
    ("call_function", torch.cat, _pair_and_dim), ("call_function", torch.stack, _pair_and_dim),
    ("call_function", torch.maximum, _two), ("call_method", "reshape", _reshape),
    ("call_method", "reshape", _reshape), ("call_method", "view", _reshape),
    ("call_method", "flatten", _dim_first), ("call_method", "transpose", _two_dims),
    ("call_method", "squeeze", _one), ("call_method", "squeeze", _dim_first),
    ("call_method", "unsqueeze", _dim_first), ("call_method", "expand", _expand),
    ("call_method", "sum", _dim_first), ("call_method", "contiguous", _one),
    ("call_method", "expand_as", _two), ("call_method", "view_as", _two),
    ("call_method", "softmax", _dim_first), ("call_method", "repeat", _repeat),
    ("call_function", operator.getitem, _slice), ("call_function", operator.getitem, _slice),
    ("call_function", torch.tril, _one), ("call_function", F.relu, _one),
    ("call_module", "linear", _one), ("call_module", "conv", _one), ("call_module", "pool", _one),
    ("get_attr", "table", _none),
]  # fmt: skip


def random_sizes(rng: random.Random, example: dict[str, int]) -> dict[str, int]:
    """Return sizes near the example's, or anywhere among small ones; some of them equal."""
    way = rng.random()
    if way < 0.4:
        changed = rng.sample(sorted(example), rng.randint(1, len(example)))
        return {**example, **{name: rng.randint(1, 12) for name in changed}}
    if way < 0.6:
        both = rng.randint(1, 8)
        return {name: rng.choice((both, size)) for name, size in example.items()}
    return {name: rng.randint(1, 9) for name in example}


def named(inputs: list[torch.Tensor]) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
    """Return a name for each dimension of the inputs x and y, and the sizes that they have."""
    dynamic, sizes = {}, {}
    for letter, value in zip("xy", inputs, strict=False):
        dynamic[letter] = {dim: f"{letter.upper()}{dim}" for dim in range(value.dim())}
        sizes |= {f"{letter.upper()}{dim}": size for dim, size in enumerate(value.shape)}
    return dynamic, sizes


FUNCTIONS = {"max": max, "min": min, "ceil": math.ceil, "floor": math.floor}
"""What stands in guards and shapes beside the names of sizes."""
