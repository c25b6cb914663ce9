"""How are reductions and matrix products said in ONNX?

Converters (see `fxlab.backends.onnx`). Reductions differ from PyTorch's in where the axes stand and
in what they do with integers and booleans; variance and norms are put together from parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.converters_math import elementwise, register
from fxlab.backends.converters_shape import axis_of
from fxlab.backends.onnx import Builder, OnnxValue, Unsupported, converter

__all__: list[str] = []

I64 = torch.int64


# Reductions.


def _dims(dim: Any, rank: int) -> list[int] | None:
    """Axes as non-negative ints; None for all."""
    if rank == 0 or dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return None
    axes = [dim] if isinstance(dim, int) else list(dim)
    return [axis % rank for axis in axes]


def _reduce(ctx: Builder, op: str, x: Any, dim: Any, keepdim: bool) -> OnnxValue:
    axes = _dims(dim, x.dim() if x.fake is not None else ctx.out.dim())
    if x.fake is not None and op not in ("ReduceSum", "ReduceProd"):
        sizes = x.fake.shape if axes is None else [x.fake.shape[axis] for axis in axes if x.dim()]
        if 0 in sizes:
            raise Unsupported(f"{op} of no numbers")
    given = None if axes is None else ctx.const(axes, I64)
    if op == "ReduceMean" and x.fake is not None and x.other is not None:
        count: Any = 1  # divided by: of no numbers it is not a number
        for axis in range(x.dim()) if axes is None else axes:
            count = count * x.shape[axis]
        if not isinstance(count, int):
            total = ctx.op("ReduceSum", x, given, keepdims=int(keepdim))
            return ctx.op("Div", total, ctx.cast(count, ctx.out.dtype))
    y = ctx.op(op, x, given, keepdims=int(keepdim))
    if op not in ("ReduceMax", "ReduceMin") or not _may_be_nan(ctx, x):
        return y
    return ctx.op("Where", _any_nan(ctx, x, given, keepdim), ctx.const(math.nan, x.dtype), y)


def _may_be_nan(ctx: Builder, x: Any) -> bool:
    """Say whether to ask for NaN, which a runtime's extremes pass by; OpenVINO carries none."""
    return ctx.backend != "openvino" and x.fake is not None and x.is_floating_point()


def _any_nan(ctx: Builder, x: Any, axes: Any, keepdim: bool) -> OnnxValue:
    found = ctx.op("Cast", ctx.op("IsNaN", x), to=6)  # 6: int32
    return ctx.op("Cast", ctx.op("ReduceMax", found, axes, keepdims=int(keepdim)), to=9)  # 9: bool


def _place(ctx: Builder, op: str, x: Any, axis: int, keepdim: bool) -> OnnxValue:
    """ArgMax or ArgMin; where there is NaN, its place."""
    place = ctx.op(op, x, axis=axis, keepdims=int(keepdim))
    if not _may_be_nan(ctx, x):
        return place
    found = ctx.op("Cast", ctx.op("IsNaN", x), to=6)
    first = ctx.op("ArgMax", found, axis=axis, keepdims=int(keepdim))
    return ctx.op("Where", _any_nan(ctx, x, ctx.const([axis], I64), keepdim), first, place)


def _rank(ctx: Builder, x: OnnxValue, like: OnnxValue) -> OnnxValue:
    """Give an intermediate of the same shape as `like` its shape."""
    if x.fake is None:
        x.fake, x.other = like.fake, like.other
    return x


def _reduction(name: str, op: str, integers_to: torch.dtype | None = None) -> None:
    def convert(
        ctx: Builder,
        input: Any,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        return _reduce(ctx, op, _rank(ctx, ctx.cast(input, ctx.out.dtype), input), dim, keepdim)

    register(name, convert)


for _name, _op in {"sum": "ReduceSum", "mean": "ReduceMean", "prod": "ReduceProd"}.items():
    _reduction(_name, _op)
for _name, _op in {"amax": "ReduceMax", "amin": "ReduceMin"}.items():
    _reduction(_name, _op)


def _extreme(name: str, reduce: str, arg: str, pairwise: str) -> None:
    def convert(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[k] for k in ("other", "dim") if k in kwargs)]
        if not given:
            return _reduce(ctx, reduce, input, None, False)
        if not isinstance(given[0], int):
            return elementwise(ctx, pairwise, input, given[0])
        keepdim = bool(given[1] if len(given) > 1 else kwargs.get("keepdim", False))
        axis = axis_of(given[0], input.dim())
        values = _reduce(ctx, reduce, input, axis, keepdim)
        return values, _place(ctx, arg, input, axis, keepdim)

    register(name, convert)


_extreme("max", "ReduceMax", "ArgMax", "Max")
_extreme("min", "ReduceMin", "ArgMin", "Min")


def _arg(name: str, op: str) -> None:
    def convert(ctx: Builder, input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or input.dim() == 0:
            found = _place(ctx, op, input.reshape(-1), 0, False)
            shape = ctx.const([1] * ctx.out.dim(), I64)
            return ctx.op("Reshape", found, shape) if keepdim else found
        return _place(ctx, op, input, dim % input.dim(), keepdim)

    register(name, convert)


_arg("argmax", "ArgMax")
_arg("argmin", "ArgMin")


def _var(ctx: Builder, x: Any, dim: Any, correction: float, keepdim: bool) -> OnnxValue:
    axes = _dims(dim, x.dim())
    mean = _reduce(ctx, "ReduceMean", x, axes, True)
    centred = ctx.op("Sub", x, mean)
    squares = _rank(ctx, ctx.op("Mul", centred, centred), x)
    count: Any = 1
    for axis in range(x.dim()) if axes is None else axes:
        count = count * x.shape[axis]
    total = _reduce(ctx, "ReduceSum", squares, axes, keepdim)
    divisor = count - (int(correction) if correction == int(correction) else correction)
    if isinstance(divisor, (int, float)):
        divisor = max(0, divisor)  # too few numbers: not a number, as eager says
    return ctx.op("Div", total, ctx.cast(divisor, x.dtype))


def _variance_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    """(dim, correction, keepdim) of var and std, whose first positional may be `unbiased`."""
    args = list(args)
    unbiased = kwargs.get("unbiased")
    dim = kwargs.get("dim")
    if args and isinstance(args[0], bool):
        unbiased = args.pop(0)
    elif args:
        dim = args.pop(0)
        if args:
            unbiased = args.pop(0)
    keepdim = args.pop(0) if args else kwargs.get("keepdim", False)
    correction = kwargs.get("correction", 1 if unbiased in (None, True) else 0)
    return dim, 1 if correction is None else correction, keepdim


@converter("var", torch.var)
def var(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
    return _var(ctx, input, *_variance_arguments(args, kwargs))


@converter("std", torch.std)
def std(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
    return ctx.op("Sqrt", _var(ctx, input, *_variance_arguments(args, kwargs)))


@converter(torch.var_mean)
def var_mean(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
    dim, correction, keepdim = _variance_arguments(args, kwargs)
    mean = _reduce(ctx, "ReduceMean", input, dim, keepdim)
    return _var(ctx, input, dim, correction, keepdim), mean


@converter("norm", torch.norm, torch.linalg.vector_norm)
def norm(
    ctx: Builder, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    p = kwargs.get("ord", p)
    if p in (2, "fro", None):
        return _reduce(ctx, "ReduceL2", input, dim, keepdim)
    if p == 1:
        return _reduce(ctx, "ReduceL1", input, dim, keepdim)
    size = _rank(ctx, ctx.op("Abs", input), input)
    if p in (math.inf, -math.inf):
        return _reduce(ctx, "ReduceMax" if p > 0 else "ReduceMin", size, dim, keepdim)
    if not isinstance(p, (int, float)) or p == 0:
        raise Unsupported(f"norm with p={p!r}")
    powers = _rank(ctx, ctx.op("Pow", size, ctx.const(float(p), input.dtype)), input)
    total = _reduce(ctx, "ReduceSum", powers, dim, keepdim)
    return ctx.op("Pow", total, ctx.const(1.0 / p, input.dtype))


@converter("logsumexp", torch.logsumexp, torch.special.logsumexp)
def logsumexp(ctx: Builder, input: Any, dim: Any, keepdim: bool = False) -> Any:
    return _reduce(ctx, "ReduceLogSumExp", input, dim, keepdim)


def _quantifier(name: str, op: str) -> None:
    def convert(ctx: Builder, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        truth = ctx.cast(input, torch.bool)
        numbers = ctx.op("Cast", truth, to=6)  # 6: int32
        numbers.fake, numbers.other = input.fake.int(), input.other
        return ctx.op("Cast", _reduce(ctx, op, numbers, dim, keepdim), to=9)  # 9: bool

    register(name, convert)


_quantifier("all", "ReduceMin")
_quantifier("any", "ReduceMax")


@converter("count_nonzero", torch.count_nonzero)
def count_nonzero(ctx: Builder, input: Any, dim: Any = None) -> Any:
    numbers = ctx.op("Cast", ctx.cast(input, torch.bool), to=7)  # 7: int64
    return _reduce(ctx, "ReduceSum", _rank(ctx, numbers, input), dim, False)


@converter("cumsum", torch.cumsum)
def cumsum(ctx: Builder, input: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if input.dim() == 0:
        return ctx.op("Identity", ctx.cast(input, ctx.out.dtype))
    axis = ctx.const(dim % input.dim(), I64)
    return ctx.op("CumSum", ctx.cast(input, ctx.out.dtype), axis)


# Matrix products.


@converter("matmul", "mm", "bmm", "mv", "dot", "__matmul__", operator.matmul)
@converter(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.dot)
def matmul(ctx: Builder, input: Any, other: Any = None, **named: Any) -> Any:
    (second,) = named.values() or (other,)  # mm calls it mat2, mv vec, dot tensor
    return ctx.op("MatMul", input, second)


@converter(F.linear)
def linear(ctx: Builder, input: Any, weight: Any, bias: Any = None) -> Any:
    if input.dim() == 2 and bias is not None and input.dtype.is_floating_point:
        return ctx.op("Gemm", input, weight, bias, transB=1)
    transposed = weight.t() if isinstance(weight, torch.Tensor) else ctx.op("Transpose", weight)
    product = ctx.op("MatMul", input, _kept(ctx, weight, transposed))
    return product if bias is None else ctx.op("Add", product, bias)


def _kept(ctx: Builder, weight: Any, transposed: Any) -> Any:
    """One transposed copy per weight, however often it is used."""
    if not isinstance(weight, torch.Tensor):
        return transposed
    return ctx.derived(weight, "t", transposed)


@converter("addmm", torch.addmm)
def addmm(
    ctx: Builder, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    given = input if beta else None  # times 0 it must not matter, even if it is not a number
    return ctx.op("Gemm", mat1, mat2, given, alpha=float(alpha), beta=float(beta))


@converter("baddbmm", "addmv", torch.baddbmm, torch.addmv)
def baddbmm(
    ctx: Builder, input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    product = ctx.op("MatMul", batch1, batch2)
    if alpha != 1:
        product = ctx.op("Mul", product, ctx.const(alpha, ctx.out.dtype))
    if beta == 0:
        return ctx.op("Expand", product, ctx.ints(ctx.out_sizes()))
    if beta != 1:
        input = ctx.op("Mul", input, ctx.const(beta, ctx.out.dtype))
    return ctx.op("Add", input, product)


@converter("outer", "ger", torch.outer, torch.ger)
def outer(ctx: Builder, input: Any, vec2: Any) -> Any:
    column = ctx.op("Unsqueeze", input, ctx.const([1], I64))
    return ctx.op("Mul", column, ctx.op("Unsqueeze", vec2, ctx.const([0], I64)))


@converter(torch.einsum)
def einsum(ctx: Builder, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise Unsupported("einsum with lists of axes; write the equation as text")
    return ctx.op("Einsum", *operands, equation=equation.replace(" ", ""))
