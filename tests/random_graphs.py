"""Random programs for testing clean-ups: views, writes in place, random numbers, constants.

Every value is a 4x4 float tensor, so that any may go anywhere. The same seed gives the same
program.
"""

from __future__ import annotations

import operator
import random

import torch
import torch.nn.functional as F
from torch import nn

import fxlab


class State(nn.Module):
    """What the programs read and call."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.register_buffer("b", torch.randn(4, 4, generator=generator))
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.relu = nn.ReLU()
        self.relu_in_place = nn.ReLU(inplace=True)
        self.identity = nn.Identity()


UNARY = [
    ("call_function", torch.relu), ("call_function", torch.sigmoid), ("call_function", torch.t),
    ("call_function", operator.neg), ("call_method", "clone"), ("call_method", "t"),
    ("call_method", "contiguous"), ("call_method", "neg"), ("call_module", "linear"),
    ("call_module", "relu"), ("call_module", "identity"), ("call_function", F.gelu),
]  # fmt: skip
BINARY = [operator.add, operator.mul, operator.sub, torch.maximum, torch.matmul, torch.add]
CONSTANTS = [1, 1.0, True, -0.0, 0.0, 2]
IN_PLACE = [
    ("call_method", "relu_", ()), ("call_method", "add_", (1,)), ("call_method", "mul_", (0.5,)),
    ("call_function", operator.iadd, (1.0,)), ("call_function", torch.relu_, ()),
    ("call_module", "relu_in_place", ()), ("call_method", "zero_", ()),
]  # fmt: skip
RANDOM = [
    ("call_function", torch.rand_like),
    ("call_function", F.dropout),
    ("call_module", "dropout"),
]


def random_program(seed: int, *, size: int = 18) -> fxlab.GraphModule:
    """Return a GraphModule of about ``size`` operations on two inputs."""
    rng = random.Random(seed)
    writes = rng.random() < 0.6  # a third of the programs is purely functional
    graph = fxlab.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]

    def pick() -> fxlab.Node:
        # Recent values more often, so that chains form; all may be picked again.
        return values[max(rng.randrange(len(values)), rng.randrange(len(values)))]

    for _ in range(size):
        if len(values) > 3 and rng.random() < 0.3:
            # The same again, with the same arguments, perhaps after a write into one of them.
            old = rng.choice(values[2:])
            if old.op == "get_attr":
                values.append(graph.get_attr(old.target))
            else:
                values.append(graph.create_node(old.op, old.target, old.args, old.kwargs))
            continue
        kind = rng.random()
        if kind < 0.15:
            values.append(graph.get_attr(rng.choice(["w", "b"])))
        elif kind < 0.2:
            values.append(graph.call_function(torch.ones, (4, 4)))
        elif kind < 0.25:
            values.append(graph.call_function(torch.full, ((4, 4), rng.choice([0.5, 2.0]))))
        elif kind < 0.5:
            op, target = rng.choice(UNARY)
            values.append(graph.create_node(op, target, (pick(),)))
        elif kind < 0.68:
            values.append(graph.call_function(rng.choice(BINARY), (pick(), pick())))
        elif kind < 0.78:
            values.append(graph.call_function(operator.mul, (pick(), rng.choice(CONSTANTS))))
        elif kind < 0.84:
            values.append(graph.call_function(operator.getitem, (pick(), slice(None))))
        elif kind < 0.88:
            op, target = rng.choice(RANDOM)
            values.append(graph.create_node(op, target, (pick(),)))
        elif writes:
            op, target, rest = rng.choice(IN_PLACE)
            values.append(graph.create_node(op, target, (pick(), *rest)))
        if writes and rng.random() < 0.05:
            graph.call_function(operator.setitem, (pick(), 0, rng.choice(CONSTANTS)))
    graph.output(tuple(pick() for _ in range(rng.randint(1, 3))))
    gm = fxlab.GraphModule(State(), graph)
    return gm.eval() if rng.random() < 0.7 else gm.train()


def run(gm: fxlab.GraphModule, seed: int) -> list[torch.Tensor]:
    """Return the bits of the outputs of one call, and of the inputs and state it may write to."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(4, 4, generator=generator) for _ in range(2)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = gm(*inputs)
    state = [gm.state_dict()[name] for name in ("w", "b") if name in gm.state_dict()]
    return [t.contiguous().view(torch.int32).clone() for t in (*outputs, *inputs, *state)]
