"""Some hundreds of programs through torch.fx and fxlab: the same graph, code and results.

Where torch.fx cannot trace a program, fxlab traces it rightly or raises a TraceError that is also
of torch.fx's exception type. Where the two differ on purpose, the program is under the name of its
row in `differences.py`, and fxlab's result is held against eager execution.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import fxlab
from tests.differences import DIFFERENCES

Pair = namedtuple("Pair", "left right")

# ruff: noqa: E501 - a table of programs, many to a line
EXPRESSIONS = """
x + y | x - y | x * y | x / (y * y + 1) | x // 2 | x % 3 | x ** 2 | 2 ** x | 1 - x | 3 * x | 1 / (x * x + 1)
-x | +x | abs(x) | ~(x > 0) | x @ y | x > y | x >= 0 | x < y | x <= 0 | x == y | x != y
(x > 0) & (y > 0) | (x > 0) | (y > 0) ^ (x > 0) | (x > 0).int() << 2 | (x > 0).int() >> 1
divmod(x, 2)[0] if False else x | x[0] | x[:, 1] | x[..., 0] | x[None] | x[1:3] | x[::2, 1:] | x[x > 0] | x[[0, 2]]
x[torch.tensor([0, 1])] | x[0, 1] | x[-1] | x[:, None, :] | x[0][1] | x[(0, 1)] | x[slice(1, None)]
x.shape | x.shape[0] | x.size() | x.size(0) | x.dtype | x.device | x.T | x.ndim | x.requires_grad
x.view(-1) | x.view(x.size(0), -1) | x.reshape(2, 8) | x.permute(1, 0) | x.transpose(0, 1) | x.t() | x.flatten()
x.unsqueeze(0) | x.squeeze() | x.expand(2, 4, 4) | x.repeat(2, 1) | x.contiguous() | x.float() | x.double()
x.to(torch.float64) | x.to(dtype=torch.float16) | x.to("cpu") | x.to(y.dtype) | x.type_as(y) | x.clone() | x.detach()
x.sum() | x.sum(0) | x.sum(dim=1, keepdim=True) | x.mean(-1) | x.max() | x.max(1)[0] | x.max(dim=0).values | x.std()
x.argmax(1) | x.topk(2)[1] | x.sort(descending=True)[0] | x.cumsum(0) | x.norm() | x.clamp(0, 1) | x.clamp(min=0.5)
x.masked_fill(x > 0, 0.0) | x.where(x > 0, y) | x.softmax(-1) | x.relu() | x.sigmoid().tanh() | x.exp().log() | x.pow(2)
x.split(2) | x.chunk(2, dim=1)[0] | x.unbind(0)[1] | x.gather(1, (x > 0).long()) | x.index_select(0, torch.tensor([1]))
x.new_zeros(2, 2) | x.new_ones(x.size(0)) | x.numel() | x.dim() | x.item if False else x | x.eq(y) | x.matmul(y) | x.mm(y)
torch.add(x, y) | torch.add(x, y, alpha=2) | torch.sub(x, 1) | torch.mul(x, 2) | torch.div(x, 2, rounding_mode="floor")
torch.cat([x, y]) | torch.cat((x, y), dim=1) | torch.cat([x, y, x * 2], 0) | torch.stack([x, y], dim=-1) | torch.hstack((x, y))
torch.matmul(x, y) | torch.einsum("ij,jk->ik", x, y) | torch.bmm(x[None], y[None]) | torch.tensordot(x, y, dims=1)
torch.where(x > 0, x, y) | torch.maximum(x, y) | torch.clamp(x, -1, 1) | torch.relu(x) | torch.sigmoid(x) | torch.tanh(x)
torch.sum(x) | torch.sum(x, dim=(0, 1)) | torch.mean(x, 1, True) | torch.max(x, 0)[1] | torch.argmin(x) | torch.norm(x)
torch.flatten(x, 1) | torch.squeeze(x) | torch.unsqueeze(x, 1) | torch.reshape(x, (-1,)) | torch.permute(x, (1, 0))
torch.zeros_like(x) | torch.ones_like(x, dtype=torch.int64) | torch.full_like(x, 2.5) | torch.empty_like(x).zero_() if False else x
torch.split(x, [1, 3]) | torch.chunk(x, 2)[1] | torch.unbind(x)[0] | torch.meshgrid(x[0], y[0], indexing="ij")[0]
torch.nn.functional.pad(x, (1, 1)) | torch.diag(x) | torch.tril(x) | torch.triu(x, 1) | torch.roll(x, 1, 0) | torch.flip(x, [0])
torch.isnan(x) | torch.isfinite(x).all() | torch.eq(x, y).any() | torch.logical_and(x > 0, y > 0) | torch.allclose if False else x
torch.topk(x, 2).indices | torch.sort(x, dim=1)[0] | torch.cumsum(x, 1) | torch.linalg.norm(x) | torch.fft.fft(x).real
torch.complex(x, y).abs() | torch.view_as_real(torch.complex(x, y)) | torch.polar(abs(x), y).imag | torch.special.expit(x)
F.relu(x) | F.gelu(x) | F.softmax(x, dim=1) | F.log_softmax(x, -1) | F.leaky_relu(x, 0.1) | F.elu(x, alpha=0.5) | F.silu(x)
F.linear(x, y) | F.linear(x, y, y[0]) | F.layer_norm(x, (4,)) | F.normalize(x, dim=1) | F.mse_loss(x, y) | F.l1_loss(x, y)
F.dropout(x, 0.5, training=False) | F.pad(x, (0, 1), value=2.0) | F.pad(x, [1, 1, 1, 1], "constant", 0) | F.one_hot((x > 0).long())
F.max_pool2d(x[None], 2) | F.avg_pool2d(x[None], 2, stride=1) | F.adaptive_avg_pool2d(x[None], 1) | F.interpolate(x[None, None], scale_factor=2)
F.conv2d(x[None, None], y[None, None, :3, :3], padding=1) | F.conv1d(x[None], y[:, :, None]) | F.unfold(x[None, None], 2)
F.cross_entropy(x, y.softmax(1)) | F.binary_cross_entropy_with_logits(x, (y > 0).float()) | F.cosine_similarity(x, y)
F.glu(x) | F.hardtanh(x, -0.5, 0.5) | F.threshold(x, 0.1, 20.0) | F.softplus(x, 2) | F.pixel_shuffle(torch.stack([x, x, y, y]), 2) | F.embedding((x > 0).long(), y)
operator.add(x, y) | operator.getitem(x, 0) | operator.neg(x) | operator.matmul(x, y) | operator.truediv(x, 3) | operator.and_(x > 0, y > 0)
(x, y) | [x, y] | {"a": x, "b": [y, x + 1]} | (x, (y, {"c": x})) | (x, None, 3) | (x,) | [] | {} | None | 5 | "text" | x
{"a": {"b": {"c": x}}} | [x, [y, [x, [y]]]] | (x, 2.5, True, None, "s") | {1: x, 2: y} | {"x": (x, x)} | Pair(x, y) | Pair(left=x + 1, right=None)
x.view(*[2, 8]) | torch.cat([x for _ in range(3)]) | sum([x, y, x]) | torch.stack([x[i] for i in range(3)])
x + float("inf") | x * float("nan") | x * 1e-30 | x + 1e300 | x + 12345678901234567890 | x * -0.0 | x + True | x * (1 + 2j)
x.to(torch.bfloat16).float() | torch.zeros(2, 2, dtype=torch.float64) + x[:2, :2] | torch.arange(4) * x | torch.ones(4) + x
x.add(y).mul(2).sub(1).div(3) | (x + y) * (x - y) / 2 + x.sum() * 3 - y.mean() | ((x * 2 + y) * 2 + x) * 2 + y
x.masked_fill(mask=x > 0, value=1.0) | x.scatter(0, (x > 0).long(), 1.0) | x.index_fill(0, torch.tensor([0]), 9.0)
x.bool().any() | x.long() + 1 | x.int() // 2 | (x * 10).int() & 3 | (x * 10).int() | 1 | (x * 10).int() ^ 5 | 7 & (x * 10).int()
5 // (abs(x) + 1) | 5 % (abs(x) + 1) | 1 << (x > 0).int() | 4 >> (x > 0).int() | y.__radd__(x) | x.__add__(y) | x.__getitem__(0)
getattr(x, "shape") | getattr(x, "T") | len((x, y)) + x | max(3, 4) * x | min([1, 2]) + x | math.sqrt(4) * x | int(3.7) * x
torch.nn.functional.relu(input=x) | torch.sum(input=x, dim=0) | torch.cat(tensors=[x, y], dim=0) | x.sum(dim=[0, 1])
torch.ops.aten.add.Tensor(x, y) | torch.ops.aten.relu(x) | torch.ops.aten.sum.dim_IntList(x, [0]) | torch.ops.aten.mul.Scalar(x, 2)
torch._C._nn.gelu(x) | torch.rsub(x, 1) | torch.clone(x)
"""


def _split(text: str) -> list[str]:
    """Split a line of the table at bars that stand between two expressions."""
    parts, depth, current, quote = [], 0, "", ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "|" and depth == 0 and text[i - 1 : i + 2] == " | ":
            parts.append(current.strip())
            current = ""
            continue
        current += char
    return [*parts, current.strip()]


PROGRAMS: dict[str, Any] = {}
for _line in EXPRESSIONS.strip().splitlines():
    for _text in _split(_line):
        PROGRAMS.setdefault(_text, eval(f"lambda x, y: {_text}"))
PROGRAMS.pop("x", None)


# -- functions that need statements ---------------------------------------------------------------


def program(fn: Any) -> Any:
    PROGRAMS[fn.__name__ if hasattr(fn, "__name__") else type(fn).__name__] = fn
    return fn


@program
def unpacks_known_length(x, y):
    a, b, c, d = x.shape[0], x.shape[1], y.shape[0], y.shape[1]
    return x.view(a, b) + y.view(c, d)


@program
def unpacks_a_shape(x, y):
    n, c = x.shape
    return x.view(c, n) + y


@program
def unpacks_a_split(x, y):
    a, b = x.chunk(2)
    return a + b


@program
def loops_with_known_count(x, y):
    for i in range(3):
        x = x + y * i
    return x


@program
def branches_on_constants(x, y):
    mode = "sum"
    if mode == "sum":
        return x + y
    return x


@program
def uses_a_closure(x, y, factor=3):
    def inner(v):
        return v * factor

    return inner(x) + inner(y)


@program
def has_defaults(x, y=None, scale=2.0, name="add"):
    return (x + 1) * 2


@program
def has_varargs(x, *others):
    return x


@program
def has_kwargs(x, y, **options):
    return x - y


@program
def ignores_a_parameter(x, y):
    return x * 2


@program
def returns_its_input(x, y):
    return x


@program
def returns_one_value_twice(x, y):
    z = x + y
    return z, z


@program
def has_dead_code(x, y):
    _ = torch.exp(x)
    return x + y


@program
def reuses_names(x, y):
    add = x + y
    add_1 = add + x
    relu = torch.relu(add_1)
    return relu + add + add_1


@program
def shadows_builtins(x, y):
    max = torch.max(x)
    sum = torch.sum(y)
    input = max + sum
    return input


@program
def nests_calls(x, y):
    return torch.cat([torch.relu(x), torch.stack([y, torch.neg(y)]).sum(0)], dim=torch.Size([1])[0])


@program
def uses_dictionaries(x, y):
    table = {"a": x, "b": y}
    table["c"] = table["a"] + table["b"]
    return table


@program
def uses_many_numbers(x, y):
    return x * 1 + y * 2.5 - 3 + (x > 0.25) * 4e-3


@program
def calls_a_method_of_a_result(x, y):
    return x.max(dim=1).values.unsqueeze(1).expand_as(y).contiguous().view(-1)


@program
def slices_by_values(x, y):
    half = x.size(0) // 2
    return x[:half] + y[half:]


@program
def reads_attributes_of_results(x, y):
    return x.T.shape[0] * y.mT


@program
def has_a_long_chain(x, y):
    for _ in range(60):
        x = torch.tanh(x) + y
    return x


@program
def computes_with_sizes(x, y):
    n = x.size(0) * x.size(1) // 4
    return x.reshape(n, -1) * float(2)


@program
def a_lambda_in_a_container(x, y):
    return [f(x) for f in (torch.sin, torch.cos, lambda v: v * 2)]


# -- modules --------------------------------------------------------------------------------------


def module(name: str, build: Any, *shape: int) -> None:
    MODULES[name] = (build, shape or (4, 4))


MODULES: dict[str, Any] = {}
for _name in (
    "ReLU ReLU6 GELU SiLU Mish ELU CELU SELU Sigmoid Tanh Hardtanh Hardswish Hardsigmoid Softplus "
    "Softsign LogSigmoid Tanhshrink Softshrink Hardshrink LeakyReLU Identity Flatten"
).split():
    module(_name, getattr(nn, _name))
module("Softmax", lambda: nn.Softmax(dim=1))
module("LogSoftmax", lambda: nn.LogSoftmax(dim=1))
module("PReLU", nn.PReLU)
module("GLU", nn.GLU)
module("Dropout in eval", lambda: nn.Sequential(nn.Dropout(0.5)).eval())
module("Linear", lambda: nn.Linear(4, 3))
module("Linear without bias", lambda: nn.Linear(4, 3, bias=False))
module("Bilinear as leaf", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
module("LayerNorm", lambda: nn.LayerNorm(4))
module("GroupNorm", lambda: nn.GroupNorm(2, 4), 2, 4, 3)
module("BatchNorm1d in eval", lambda: nn.Sequential(nn.BatchNorm1d(4)).eval())
module("BatchNorm2d in eval", lambda: nn.Sequential(nn.BatchNorm2d(3)).eval(), 2, 3, 4, 4)
module("BatchNorm1d in train", lambda: nn.Sequential(nn.BatchNorm1d(4)))
module("Conv1d", lambda: nn.Conv1d(3, 2, 3), 2, 3, 5)
module("Conv2d", lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), 2, 3, 5, 5)
module("Conv2d with groups", lambda: nn.Conv2d(4, 4, 3, groups=2, bias=False), 2, 4, 5, 5)
module("ConvTranspose2d", lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 2)), 2, 3, 4, 4)
module("MaxPool2d", lambda: nn.MaxPool2d(2), 2, 3, 4, 4)
module("AvgPool2d", lambda: nn.AvgPool2d(2), 2, 3, 4, 4)
module("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(1), 2, 3, 4, 4)
module("Upsample", lambda: nn.Upsample(scale_factor=2), 2, 3, 4, 4)
module("PixelShuffle", lambda: nn.PixelShuffle(2), 2, 4, 3, 3)
module("ZeroPad2d", lambda: nn.ZeroPad2d(1), 2, 3, 4, 4)
module("Sequential", lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
module(
    "nested Sequential", lambda: nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()))
)
module("named Sequential", lambda: nn.Sequential(OrderedDict(first=nn.ReLU(), second=nn.Tanh())))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=False))
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))
        self.factor = 1.5

    def forward(self, x):
        return self.body(x) * self.weight + self.shift + x * self.factor


class _List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b b": nn.Linear(4, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"k": nn.Parameter(torch.ones(4))})

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = x * self.scales[0] + self.named["k"]
        return {key: head(x) for key, head in self.heads.items()}


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.tied = self.a.weight

    def forward(self, x):
        return self.a(x) + self.b(x) + F.linear(x, self.tied)


class _Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Residual()

    def helper(self, x, scale=1):
        return self.inner(x) * scale

    @property
    def twice(self):
        return 2

    def forward(self, x):
        return self.helper(self.helper(x), scale=self.twice)


class _Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return x + self.table.sum()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1)
        return weights @ v


class _Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.next = _Deep(depth - 1) if depth else nn.Linear(4, 4)

    def forward(self, x):
        return self.next(x) + 1


class _Called(nn.Module):
    """Calls one submodule several times, with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(dim=0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.act(input=self.fc(self.act(self.fc(x))))


class _Constant(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


for _kind in (_Residual, _List, _Shared, _Attention, _Called, _Constant):
    module(_kind.__name__, _kind)
module("_Deep", lambda: _Deep(12))

# -- programs under the name of a difference ------------------------------------------------------


def _adds_in_place(x, y):
    x += y
    return x * 2


def _assigns_an_item(x, y):
    x[0] = 1.0
    x[:, 1] = y[:, 0]
    return x


def _region(x, y):
    with torch.no_grad():
        z = x * 2
    return z + y


def _star_of_shape(x, y):
    return x.view(*x.shape) + y


def _factory(x, y):
    return x + torch.zeros(x.shape[0], 4) + torch.arange(x.size(1)) + torch.ones(x.shape)


def _ordered(x, y):
    return OrderedDict(a=x, b=y + 1)


DIFFERENT: dict[str, tuple[str, Any]] = {
    "adds in place": ("in-place operators", _adds_in_place),
    "assigns an item": ("item assignment", _assigns_an_item),
    "no_grad": ("regions", _region),
    "factory": ("factories of Proxies", _factory),
    "OrderedDict": ("containers in outputs", _ordered),
}

# -- programs that symbolic tracing cannot capture ------------------------------------------------

REFUSED: dict[str, Any] = {
    "if": lambda x, y: x if x.sum() > 0 else y,
    "and": lambda x, y: x.any() and y.any(),
    "not": lambda x, y: not x,
    "bool": lambda x, y: bool(x),
    "while": lambda x, y: [x for _ in iter(lambda: x.sum() > 0, False)],
    "range": lambda x, y: [x for _ in range(x.size(0))],
    "iteration": lambda x, y: [v + 1 for v in x],
    "star": lambda x, y: torch.cat([*x]),
    "list": lambda x, y: list(x),
    "enumerate": lambda x, y: [v for _, v in enumerate(x)],
    "zip": lambda x, y: [a + b for a, b in zip(x, y, strict=False)],
    "len": lambda x, y: len(x),
    "int": lambda x, y: int(x.sum()),
    "float": lambda x, y: float(x.sum()),
    "index": lambda x, y: [1, 2, 3][x.size(0)],
    "contains": lambda x, y: 3 in x,
    "dict key iteration": lambda x, y: {**x},
    "max of values": lambda x, y: max(x.sum(), y.sum()),
    "sorted": lambda x, y: sorted([x.sum(), y.sum()]),
    "chained comparison": lambda x, y: 0 < x < 1,
    "assert": lambda x, y: (_ for _ in ()).throw(AssertionError) if x.sum() > 0 else x,
    "complex": lambda x, y: complex(x.sum()),
    "hash of text": lambda x, y: "abc"[x.size(0)],
}


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(0))


def text(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def facts(gm: Any) -> list[tuple[Any, ...]]:
    return [
        (n.op, n.name, text(n.target), str(n.args), str(n.kwargs), sorted(map(str, n.users)))
        for n in gm.graph.nodes
    ]


def code(gm: Any) -> str:
    """Generated code without blank lines, in one spelling of quotes and of the operator module."""
    return (
        gm.code.replace("\n\n", "\n").replace("'", '"').replace("_operator_", "operator.").strip()
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.allclose(a, b, equal_nan=True)
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def count(fn: Any) -> int:
    code_ = fn.__code__
    return min(code_.co_argcount, 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_torch_fx_graph_code_and_eager_results(name: str) -> None:
    fn = PROGRAMS[name]
    args = (inputs(), inputs() + 0.5)[: count(fn)]
    theirs, ours = torch.fx.symbolic_trace(fn), fxlab.symbolic_trace(fn)
    ours.graph.lint()
    assert facts(ours) == facts(theirs)
    assert code(ours) == code(theirs)
    eager = fn(*args)
    assert same(ours(*args), eager)
    assert same(fxlab.Interpreter(ours).run(*args), eager)
    assert same(copy.deepcopy(ours)(*args), eager)


@pytest.mark.parametrize("name", MODULES)
def test_module_gives_torch_fx_graph_code_and_eager_results(name: str) -> None:
    build, shape = MODULES[name]
    torch.manual_seed(0)
    model = build()
    state = copy.deepcopy(model.state_dict())
    attributes = sorted(vars(model))
    x = inputs(*shape)
    theirs, ours = torch.fx.symbolic_trace(copy.deepcopy(model)), fxlab.symbolic_trace(model)
    ours.graph.lint()
    assert sorted(vars(model)) == attributes, "the user's model is left as it was"
    assert facts(ours) == facts(theirs)
    assert code(ours) == code(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    before = copy.deepcopy(ours)
    eager = copy.deepcopy(model)(x)
    assert same(ours(x), eager)
    assert same(before(x), eager)
    if not model.training or not any("num_batches" in k for k in state):
        assert same(fxlab.Transformer(ours).transform()(x), eager)


@pytest.mark.parametrize("name", DIFFERENT)
def test_where_torch_fx_is_wrong_fxlab_gives_eager_results(name: str) -> None:
    row, fn = DIFFERENT[name]
    assert row in {d.name for d in DIFFERENCES}
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxlab.TraceWarning)
        ours = fxlab.symbolic_trace(fn)
    ours.graph.lint()
    a, b = (inputs(), inputs() + 1), (inputs(), inputs() + 1)
    eager, result = fn(*a), ours(*b)
    assert same(result, eager)
    assert all(map(same, a, b)), "the same writes into the inputs"
    try:
        theirs = torch.fx.symbolic_trace(fn)
    except Exception:
        return
    c = (inputs(), inputs() + 1)
    differs = not same(theirs(*c), eager) or not all(map(same, a, c))
    assert differs or row == "regions", "no difference: move it to PROGRAMS"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_raises_a_trace_error_of_torch_fx_kind(name: str) -> None:
    fn = REFUSED[name]
    with pytest.raises(Exception) as theirs:
        torch.fx.symbolic_trace(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxlab.TraceWarning)
        with pytest.raises(fxlab.TraceError) as ours:
            fxlab.symbolic_trace(fn)
    kind = type(theirs.value)
    if kind is torch.fx.proxy.TraceError:
        kind = ValueError
    assert isinstance(ours.value, kind), f"{type(ours.value).__mro__} is no {kind}"
    message = str(ours.value)
    assert "test_parity.py" in message
    assert "try" in message


def _keyword_only(x, /, z=2, *others, y, flag: bool = True, **rest):
    return x + y * z


def test_signatures_keep_kinds_defaults_and_annotations() -> None:
    gm = fxlab.symbolic_trace(_keyword_only)
    assert str(inspect.signature(gm.forward)) == str(inspect.signature(_keyword_only)).replace(
        "'bool'", "bool"
    )
    assert same(gm(inputs(), y=inputs()), _keyword_only(inputs(), y=inputs()))


@pytest.mark.parametrize("build", [_Methods, _Buffer, _Constant, _Shared])
def test_state_that_changes_after_the_trace_is_read_when_the_module_runs(build: Any) -> None:
    model = build()
    ours = fxlab.symbolic_trace(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.mul_(2).add_(1)
    assert same(ours(inputs()), model(inputs()))


@pytest.mark.parametrize(
    "build",
    [lambda: nn.Dropout(0.5), lambda: nn.Sequential(nn.BatchNorm1d(4)), lambda: nn.RReLU()],
)
def test_train_and_eval_keep_their_meaning(build: Any) -> None:
    model = build()
    ours = fxlab.symbolic_trace(model, example_inputs=(inputs(),))
    for mode in (False, True, False):
        model.train(mode)
        ours.train(mode)
        torch.manual_seed(1)
        expected = copy.deepcopy(model)(inputs())
        torch.manual_seed(1)
        assert same(copy.deepcopy(ours)(inputs()), expected)


def test_star_calls_work_when_the_rank_is_known() -> None:
    ours = fxlab.symbolic_trace(_star_of_shape, example_inputs=(inputs(), inputs()))
    assert same(ours(inputs(), inputs()), inputs() * 2)


def test_the_table_is_some_hundreds_of_programs() -> None:
    assert len(PROGRAMS) + len(MODULES) + len(REFUSED) + len(DIFFERENT) > 380
    assert all(callable(p) for p in PROGRAMS.values())
    assert operator.add is not None
