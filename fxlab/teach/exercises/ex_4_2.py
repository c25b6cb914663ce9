"""4.2: does somebody who counts FLOPs and bytes by hand count what the machine will do?

The answer's rows are compared with the kit's ``cost``, which watches the operators that torch
dispatches (paper, section 6.3), on products, convolutions, element by element work and views; the
roofline is compared with ``Device``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.cost import cost
from fxlab.passes.roofline import Device
from fxlab.passes.shape_prop import shape_prop
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import fill

KEYS = ("flops", "bytes", "intensity", "attainable")
PEAK, TRAFFIC = 1e9, 1e8  # FLOP a second, bytes a second: the ridge is at 10 FLOP a byte


def entry(answer: Any, gm: GraphModule, inputs: Any = (), *device: float) -> list[list[float]]:
    """Let the answer cost a program whose shapes are known.

    Returns:
        [flops, bytes, intensity, attainable] for each node, in graph order.

    Raises:
        AnswerError: It returned no such list.
    """
    shape_prop(gm, *inputs)
    rows = answer(gm, *(device or (PEAK, TRAFFIC)))
    count = len(gm.graph.nodes)
    if not isinstance(rows, list) or len(rows) != count:
        what = f"{len(rows)} rows" if isinstance(rows, list) else kind_of(rows)
        raise AnswerError(
            "type", f"it returned {what}: return a list with one dict for each of the {count} nodes"
        )
    for node, row in zip(gm.graph.nodes, rows, strict=True):
        if not isinstance(row, Mapping) or not set(KEYS) <= set(row):
            raise AnswerError("type", f"the row of {node.name} is no dict with the keys {KEYS}")
    return [[float(row[key]) for key in KEYS] for row in rows]


def _nodes(args: tuple[Any, ...]) -> tuple[GraphModule, list[Node], list[Any]]:
    gm, inputs, *_ = args
    rows = cost(gm, *inputs).rows
    shape_prop(gm, *inputs)
    return gm, list(gm.graph.nodes), rows


def _judge_flops(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, nodes, rows = _nodes(args)
    for node, right, (flops, *_) in zip(nodes, rows, value, strict=True):
        if flops == right.flops:
            continue
        said = f"{node.name} ({right.kind}, {right.shape}): {flops:,.0f} FLOPs, expected "
        said += f"{right.flops:,}"
        why = ""
        layer = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        if right.flops == 0:
            why = ". Element by element work and views count 0, as in torch's own counter"
        elif flops * 2 == right.flops:
            why = ". A multiplication and an addition are two"
        elif isinstance(layer, nn.Conv2d) and flops == right.flops * layer.groups:
            why = f". With {layer.groups} groups an output channel reads in_channels / groups"
        elif isinstance(layer, nn.Linear) and flops == 2 * layer.weight.numel():
            why = ". That is for one row: each row of the input costs as much"
        elif flops == 0:
            why = ". It is a product of matrices, in whatever words"
        return Finding(said + why, node=node.name)
    return None


def _judge_bytes(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, nodes, rows = _nodes(args)
    for node, right, (_, moved, *_) in zip(nodes, rows, value, strict=True):
        if moved == right.bytes_moved:
            continue
        said = f"{node.name} ({right.kind}, {right.shape}): {moved:,.0f} bytes, expected "
        said += f"{right.bytes_moved:,}"
        layer = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        owned = sum(p.nbytes for p in layer.parameters()) if layer is not None else 0
        meta = node.meta.get("tensor_meta")
        size = getattr(getattr(meta, "dtype", None), "itemsize", 4)
        why = ""
        if node.op in ("placeholder", "get_attr", "output"):
            why = f". A {node.op} names a value; who reads it moves it"
        elif right.bytes_moved == 0:
            why = ". A view moves nothing: it is the same memory under other sizes"
        elif owned and moved == right.bytes_moved - owned:
            why = ". Its parameters are read, too"
        elif moved * size == right.bytes_moved:
            why = f". That is elements: each has {size} bytes here"
        elif moved * size == right.bytes_moved * 4:
            why = f". An element has {size} bytes here, not 4: ask its dtype"
        elif moved in (right.bytes_read, right.bytes_written):
            why = ". What is read counts, and what is written"
        return Finding(said + why, node=node.name)
    return None


def _judge_roofline(args: tuple[Any, ...], value: Any) -> Finding | None:
    _, nodes, rows = _nodes(args)
    device = Device("of the case", *args[2:], memory_bytes=1e9)
    for node, right, (flops, moved, intensity, attainable) in zip(nodes, rows, value, strict=True):
        if right.flops and not (flops and moved):
            return Finding(f"{node.name}: {flops:,.0f} FLOPs and {moved:,.0f} bytes", node.name)
        # Judged by the answer's own numbers: a slip in counting is told elsewhere.
        wanted = flops / moved if moved else 0.0
        if abs(intensity - wanted) > 1e-6 * max(1.0, wanted):
            return Finding(
                f"{node.name}: intensity {intensity:g}, and {flops:,.0f} FLOPs for {moved:,.0f} "
                f"bytes are {wanted:g} FLOP a byte; 0 where nothing is moved",
                node=node.name,
            )
        roof = min(device.flops_per_second, wanted * device.bytes_per_second)
        if abs(attainable - roof) > 1e-6 * max(1.0, roof):
            side = "under the slope: the memory brings"
            if wanted >= device.ridge:
                side = "under the flat part: the arithmetic does"
            return Finding(
                f"{node.name}: {attainable:.4g} FLOP/s attainable at {wanted:.4g} FLOP a byte. "
                f"It is {side} at most {roof:.4g} FLOP/s (the ridge is at {device.ridge:g})",
                node=node.name,
            )
    return None


def _halved(x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x) @ x.t()) * 0.5


def _batched(x: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, x.transpose(1, 2))


def _views(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.view(2, 6).t()[1:]).t()


class Attention(nn.Module):
    """Products in three spellings, and a parameter that is read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8, bias=False)
        self.mix = nn.Parameter(torch.empty(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f32[n, 3, 8] for f32[n, 3, 4]."""
        weight = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), dim=-1)
        return torch.matmul(weight, self.mix).matmul(self.query(x))


def _made(
    program: Any, *shape: int, dtype: torch.dtype = torch.float32, peak: float = PEAK
) -> tuple[Any, ...]:
    if isinstance(program, nn.Module):
        program = fill(program).to(dtype).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return symbolic_trace(program), [x], peak, TRAFFIC


def _seq(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def _convolutions() -> Any:
    """Make a strategy of one convolution of any settings."""
    from hypothesis import strategies as st

    def build(groups: int, inner: int, outer: int, kernel: int, stride: int, bias: bool) -> Any:
        conv = nn.Conv2d(
            groups * inner, groups * outer, kernel, stride, padding=1, groups=groups, bias=bias
        )
        return _made(_seq(conv), 2, groups * inner, 6, 6)

    small = st.integers(1, 3)
    return st.builds(
        build, st.integers(1, 2), small, small, small, st.integers(1, 2), st.booleans()
    )


def _cases() -> Iterator[Case | Property]:
    products, convs, moved = "products", "convolutions", "bytes"
    linear = lambda *shape, **more: _made(_seq(nn.Linear(4, 3)), *shape, **more)  # noqa: E731
    grouped = lambda: _seq(nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.ReLU())  # noqa: E731
    flat = lambda: _seq(nn.Flatten(), nn.Linear(12, 2))  # noqa: E731
    for behaviour, title, make, judge in (
        (products, "a Linear", lambda: linear(2, 4), _judge_flops),
        (products, "a Linear on f32[2, 5, 4]", lambda: linear(2, 5, 4), _judge_flops),
        (products, "@ and element by element work", lambda: _made(_halved, 2, 3), _judge_flops),
        (products, "batches of matrices", lambda: _made(_batched, 2, 3, 4), _judge_flops),
        (products, "attention", lambda: _made(Attention(), 2, 3, 4), _judge_flops),
        (convs, "one", lambda: _made(_seq(nn.Conv2d(3, 2, 3)), 1, 3, 5, 5), _judge_flops),
        (convs, "groups and stride", lambda: _made(grouped(), 2, 4, 7, 7), _judge_flops),
        (moved, "a ReLU", lambda: _made(_seq(nn.ReLU()), 2, 3), _judge_bytes),
        (moved, "a Linear", lambda: linear(2, 4), _judge_bytes),
        (moved, "a convolution", lambda: _made(grouped(), 2, 4, 7, 7), _judge_bytes),
        (moved, "attention", lambda: _made(Attention(), 2, 3, 4), _judge_bytes),
        ("views", "view, t, a slice", lambda: _made(_views, 3, 4), _judge_bytes),
        ("views", "a Flatten", lambda: _made(flat(), 2, 3, 4), _judge_bytes),
        ("dtypes", "float64", lambda: linear(2, 4, dtype=torch.float64), _judge_bytes),
        ("dtypes", "bfloat16", lambda: linear(2, 4, dtype=torch.bfloat16), _judge_bytes),
        ("roofline", "under the slope", lambda: linear(2, 4), _judge_roofline),
        ("roofline", "under the flat part", lambda: linear(2, 4, peak=1e6), _judge_roofline),
        ("roofline", "attention", lambda: _made(Attention(), 2, 3, 4), _judge_roofline),
    ):
        yield Case(behaviour, title, make, judge)
    yield Property(convs, "any convolution", _convolutions, _judge_flops, examples=8)


EXERCISE = Exercise(
    id="4.2",
    title="FLOPs, bytes, arithmetic intensity per node; draw the roofline",
    level=3,
    minutes=45,
    idea="Three numbers of a node and two of a device say how fast it can be at best, before there "
    "is a device (section 6.3).",
    needs=("FLOP", "bytes read and written", "arithmetic intensity", "roofline", "meta"),
    teaches=("ridge",),
    hints=(
        "Lecture 09, 'FLOPs and bytes' and 'A device that you have not got', has what is counted "
        "and the formula. After shape_prop each node's meta['tensor_meta'] has shape and dtype.",
        "FLOPs: an output element of a product of matrices costs 2 k, where k is the length of the "
        "sum behind it: in_features of a Linear, the last size of the left matrix, "
        "in_channels / groups times the kernel's size. Bytes: what the node reads, its parameters "
        "included, and its result; 0 for a view. attainable: the lower of two roofs.",
        "How many bytes a value has, on another example: m = node.meta['tensor_meta']; "
        "m.shape.numel() * m.dtype.itemsize. And fxlab.passes.alias.makes_new_value(node, gm), of "
        "lecture 12, says of an operation whether its result is new memory.",
    ),
    asks=(
        "fxlab.passes.cost",
        "fxlab.passes.roofline.Device",
        "torch.utils.flop_counter.FlopCounterMode",
    ),
    parts=(
        Part(
            id="4.2",
            name="my_roofline",
            points={
                "products": 3,
                "convolutions": 2,
                "bytes": 3,
                "views": 1,
                "dtypes": 1,
                "roofline": 2,
            },
            entry=entry,
            cases=_cases,
            wrong={
                "macs": "A multiplication and an addition are two",
                "one_row": "each row of the input costs as much",
                "no_groups": "With 2 groups an output channel reads",
                "no_parameters": "Its parameters are read, too",
                "views_move": "A view moves nothing",
                "four_bytes": "ask its dtype",
                "modules_only": "It is a product of matrices, in whatever words",
                "no_roof": "under the flat part",
            },
            stub="def my_roofline(gm, flops_per_second, bytes_per_second):\n"
            '    """Return one dict for each node of ``gm``, in graph order.\n'
            "\n"
            "    flops: of Linear, Conv2d, ``@`` and ``matmul``; 0 for everything else.\n"
            "    bytes: read and written; 0 for views, placeholder, get_attr and output.\n"
            "    intensity: FLOP for each byte; 0 where nothing is moved.\n"
            "    attainable: the FLOP a second that the device reaches at best there.\n"
            "\n"
            '    ``shape_prop`` has been run: ``node.meta["tensor_meta"]`` has shape and dtype.\n'
            '    """',
        ),
    ),
)
