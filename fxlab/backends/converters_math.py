"""How are arithmetic, comparisons, reductions and matrix products said in ONNX?

Each function here is a converter (see `fxlab.backends.onnx`): its arguments are those of the torch
function it stands for, `ctx` is the builder, and `ctx.out` tells the shape and dtype of the result.
PyTorch promotes dtypes silently and ONNX never does, so the helpers insert the casts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.onnx import DTYPES, Builder, OnnxValue, SymbolicInt, Unsupported, converter

__all__ = ["choose", "elementwise", "register"]

I64 = torch.int64


def _plain(value: Any) -> Any:
    """What stands for a value in torch.result_type: only its dtype and rank matter."""
    if isinstance(value, OnnxValue):
        return torch.empty((1,) * min(value.dim(), 1), dtype=value.dtype)
    return 1 if isinstance(value, SymbolicInt) else value


def _common(*values: Any) -> torch.dtype:
    """The dtype in which PyTorch computes with these operands."""
    kind = torch.result_type(_plain(values[0]), _plain(values[1]))
    for value in values[2:]:
        kind = torch.result_type(torch.empty(1, dtype=kind), _plain(value))
    return kind


def elementwise(ctx: Builder, op: str, *values: Any, dtype: torch.dtype | None = None) -> Any:
    """`op` on operands cast to their common dtype (or `dtype`)."""
    kind = dtype or _common(*values)
    return ctx.op(op, *(ctx.cast(value, kind) for value in values))


def _floating(ctx: Builder, x: Any) -> Any:
    """`x` in the floating dtype of the result (integers become float32 as in PyTorch)."""
    return ctx.cast(x, ctx.out.dtype if ctx.out.dtype.is_floating_point else torch.float32)


def _unary_float(names: str, op: str) -> None:
    """Register converters of functions that turn integers into floats first."""

    def convert(ctx: Builder, input: Any, **_: Any) -> Any:
        return ctx.op(op, _floating(ctx, input))

    register(names, convert)


def _unary_same(names: str, op: str) -> None:
    def convert(ctx: Builder, input: Any, **_: Any) -> Any:
        return ctx.op(op, input)

    register(names, convert)


def register(names: str, convert: Callable[..., Any]) -> None:
    """Register a converter for the methods and the functions of torch with these names."""
    targets: list[Any] = []
    for name in names.split():
        targets.append(name)
        for home in (torch, torch.special, F):
            if hasattr(home, name):
                targets.append(getattr(home, name))
    converter(*targets)(convert)


for _names, _op in {
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin arcsin": "Asin",
    "acos arccos": "Acos",
    "atan arctan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "tanh": "Tanh",
    "asinh arcsinh": "Asinh",
    "acosh arccosh": "Acosh",
    "atanh arctanh": "Atanh",
    "erf": "Erf",
    "sigmoid expit": "Sigmoid",
    "reciprocal": "Reciprocal",
}.items():
    _unary_float(_names, _op)
for _names, _op in {"abs absolute": "Abs", "neg negative": "Neg"}.items():
    _unary_same(_names, _op)


@converter("sign", "sgn", torch.sign, torch.sgn)
def sign(ctx: Builder, input: Any) -> Any:
    y = ctx.op("Sign", input)
    if not input.is_floating_point():
        return y
    return ctx.op("Where", ctx.op("IsNaN", input), ctx.const(0.0, input.dtype), y)


converter(operator.neg)(lambda ctx, x: ctx.op("Neg", x))
converter(operator.abs)(lambda ctx, x: ctx.op("Abs", x))
converter(operator.pos, "positive", torch.positive)(lambda ctx, x: ctx.op("Identity", x))
converter("relu", torch.relu, F.relu)(lambda ctx, input, inplace=False: ctx.op("Relu", input))


def _round_like(name: str, op: str) -> None:
    def convert(ctx: Builder, input: Any, *, decimals: int = 0) -> Any:
        if not input.is_floating_point():
            return ctx.op("Identity", input)
        if decimals:
            scale = ctx.const(10.0**decimals, input.dtype)
            return ctx.op("Div", ctx.op(op, ctx.op("Mul", input, scale)), scale)
        return ctx.op(op, input)

    register(name, convert)


for _name, _op in {"ceil": "Ceil", "floor": "Floor", "round": "Round"}.items():
    _round_like(_name, _op)


@converter("trunc", "fix", torch.trunc, torch.fix)
def trunc(ctx: Builder, input: Any) -> Any:
    if not input.is_floating_point():
        return ctx.op("Identity", input)
    return ctx.op("Mul", ctx.op("Sign", input), ctx.op("Floor", ctx.op("Abs", input)))


@converter("frac", torch.frac)
def frac(ctx: Builder, input: Any) -> Any:
    return ctx.op("Sub", input, trunc(ctx, input))


def _composed(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of (ctx, x, one), x in the result's floating dtype, one a constant."""

    def keep(formula: Callable[..., Any]) -> Callable[..., Any]:
        def convert(ctx: Builder, input: Any) -> Any:
            x = _floating(ctx, input)
            return formula(ctx, x, lambda number: ctx.const(number, ctx.out.dtype))

        register(names, convert)
        return formula

    return keep


_composed("rsqrt")(lambda ctx, x, c: ctx.op("Reciprocal", ctx.op("Sqrt", x)))
_composed("exp2")(lambda ctx, x, c: ctx.op("Exp", ctx.op("Mul", x, c(math.log(2)))))


@_composed("expm1")
def expm1(ctx: Builder, x: Any, c: Callable[[float], Any]) -> Any:
    half = ctx.op("Mul", x, c(0.5))
    near = ctx.op("Mul", ctx.op("Mul", c(2.0), ctx.op("Sinh", half)), ctx.op("Exp", half))
    far = ctx.op("Sub", ctx.op("Exp", x), c(1.0))  # it would lose all digits near zero
    return ctx.op("Where", ctx.op("Less", ctx.op("Abs", x), c(1.0)), near, far)


_composed("log2")(lambda ctx, x, c: ctx.op("Mul", ctx.op("Log", x), c(1 / math.log(2))))
_composed("log10")(lambda ctx, x, c: ctx.op("Mul", ctx.op("Log", x), c(1 / math.log(10))))


@_composed("log1p")
def log1p(ctx: Builder, x: Any, c: Callable[[float], Any]) -> Any:
    small = ctx.op("Less", ctx.op("Abs", x), c(0.5))
    x_or_0 = ctx.op("Where", small, x, c(0.0))
    ratio = ctx.op("Div", x_or_0, ctx.op("Add", x_or_0, c(2.0)))
    near = ctx.op("Mul", c(2.0), ctx.op("Atanh", ratio))  # keeps the digits near zero
    return ctx.op("Where", small, near, ctx.op("Log", ctx.op("Add", x, c(1.0))))


_composed("erfc")(lambda ctx, x, c: ctx.op("Sub", c(1.0), ctx.op("Erf", x)))
_composed("deg2rad")(lambda ctx, x, c: ctx.op("Mul", x, c(math.pi / 180)))
_composed("rad2deg")(lambda ctx, x, c: ctx.op("Mul", x, c(180 / math.pi)))


@converter("square", torch.square)
def square(ctx: Builder, input: Any) -> Any:
    return ctx.op("Mul", input, input)


@converter("logit", torch.logit, torch.special.logit)
def logit(ctx: Builder, input: Any, eps: float | None = None) -> Any:
    x = _floating(ctx, input)
    if eps is not None:
        x = ctx.op("Clip", x, ctx.const(eps, ctx.out.dtype), ctx.const(1 - eps, ctx.out.dtype))
    return ctx.op("Log", ctx.op("Div", x, ctx.op("Sub", ctx.const(1.0, ctx.out.dtype), x)))


@converter("isnan", torch.isnan)
def isnan(ctx: Builder, input: Any) -> Any:
    return ctx.op("IsNaN", input)


def _as_float(ctx: Builder, x: Any) -> Any:
    return x if x.dtype is torch.float64 else ctx.cast(x, torch.float32)


@converter("isinf", torch.isinf)
def isinf(ctx: Builder, input: Any) -> Any:
    return ctx.op("IsInf", _as_float(ctx, input))


@converter("isfinite", torch.isfinite)
def isfinite(ctx: Builder, input: Any) -> Any:
    x = _as_float(ctx, input)
    return ctx.op("Not", ctx.op("Or", ctx.op("IsNaN", x), ctx.op("IsInf", x)))


@converter("nan_to_num", torch.nan_to_num)
def nan_to_num(
    ctx: Builder,
    input: Any,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Any:
    limits = torch.finfo(input.dtype)
    x = ctx.op("Where", ctx.op("IsNaN", input), ctx.const(float(nan or 0), input.dtype), input)
    high = ctx.const(limits.max if posinf is None else posinf, input.dtype)
    low = ctx.const(limits.min if neginf is None else neginf, input.dtype)
    whole = _as_float(ctx, input)
    x = ctx.op("Where", ctx.op("IsInf", whole, detect_negative=0), high, x)
    return ctx.op("Where", ctx.op("IsInf", whole, detect_positive=0), low, x)


# Two operands.


@converter("add", torch.add, operator.add)
def add(ctx: Builder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    kind = _common(input, other)
    if kind is torch.bool:
        return ctx.op("Or", input, ctx.cast(other, kind))
    if alpha != 1:
        other = ctx.op("Mul", ctx.cast(other, kind), ctx.const(alpha, kind))
        return ctx.op("Add", ctx.cast(input, kind), other)
    return elementwise(ctx, "Add", input, other)


@converter("sub", "subtract", torch.sub, torch.subtract, operator.sub)
def sub(ctx: Builder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    kind = _common(input, other)
    other = ctx.cast(other, kind)
    if alpha != 1:
        other = ctx.op("Mul", other, ctx.const(alpha, kind))
    return ctx.op("Sub", ctx.cast(input, kind), other)


@converter("rsub", torch.rsub)
def rsub(ctx: Builder, input: Any, other: Any, *, alpha: float = 1) -> Any:
    return sub(ctx, other, input, alpha=alpha)


@converter("mul", "multiply", torch.mul, torch.multiply, operator.mul)
def mul(ctx: Builder, input: Any, other: Any) -> Any:
    if _common(input, other) is torch.bool:
        return ctx.op("And", input, ctx.cast(other, torch.bool))
    return elementwise(ctx, "Mul", input, other)


@converter("div", "divide", "true_divide", torch.div, torch.divide, operator.truediv)
@converter(torch.true_divide)
def div(ctx: Builder, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return elementwise(ctx, "Div", input, other, dtype=ctx.out.dtype)
    if rounding_mode == "floor":
        return floor_divide(ctx, input, other)
    kind = _common(input, other)
    if not kind.is_floating_point:
        return ctx.op("Div", *_whole(ctx, input, other, kind))
    quotient = elementwise(ctx, "Div", input, other, dtype=kind)
    sign = ctx.op("Sign", quotient)
    return ctx.op("Mul", sign, ctx.op("Floor", ctx.op("Abs", quotient)))


@converter("floor_divide", torch.floor_divide, operator.floordiv)
def floor_divide(ctx: Builder, input: Any, other: Any) -> Any:
    """As PyTorch: from the exact remainder, for a quotient that rounds up is one too many."""
    kind = _common(input, other)
    if not kind.is_floating_point:
        a, b = _whole(ctx, input, other, kind)
        off = ctx.op(
            "Cast", _other_sign(ctx, ctx.op("Mod", a, b, fmod=1), b, kind), to=DTYPES[kind]
        )
        return ctx.op("Sub", ctx.op("Div", a, b), off)
    a, b = ctx.cast(input, kind), ctx.cast(other, kind)
    zero, one = ctx.const(0.0, kind), ctx.const(1.0, kind)
    rest, plain = _fmod(ctx, a, b, kind), ctx.op("Div", a, b)
    y = ctx.op("Div", ctx.op("Sub", a, rest), b)
    y = ctx.op("Where", _other_sign(ctx, rest, b, kind), ctx.op("Sub", y, one), y)
    low = ctx.op("Floor", y)
    up = ctx.op("Greater", ctx.op("Sub", y, low), ctx.const(0.5, kind))
    low = ctx.op("Where", up, ctx.op("Add", low, one), low)
    low = ctx.op("Where", ctx.op("Equal", y, zero), ctx.op("Mul", plain, zero), low)
    return ctx.op("Where", ctx.op("Equal", b, zero), plain, low)


def _other_sign(ctx: Builder, rest: Any, b: Any, kind: torch.dtype) -> Any:
    """Where a remainder that has the dividend's sign is not 0 and has another than the divisor."""
    zero = ctx.const(0, kind)
    signs = ctx.op("Xor", ctx.op("Less", rest, zero), ctx.op("Less", b, zero))
    return ctx.op("And", signs, ctx.op("Not", ctx.op("Equal", rest, zero)))


def _fmod(ctx: Builder, a: Any, b: Any, kind: torch.dtype) -> Any:
    if ctx.backend == "openvino":
        raise Unsupported("openvino computes remainders of floats from a rounded quotient")
    return ctx.op("Mod", a, b, fmod=1)


def _whole(ctx: Builder, input: Any, other: Any, kind: torch.dtype) -> tuple[Any, Any]:
    """Dividend and divisor, whole numbers, of which the divisor is known not to be 0."""
    fixed = isinstance(other, (int, torch.Tensor))
    if isinstance(other, SymbolicInt) or (fixed and torch.as_tensor(other).all()):
        return ctx.cast(input, kind), ctx.cast(other, kind)
    raise Unsupported("division of whole numbers: only PyTorch raises when one is 0")


@converter("remainder", torch.remainder, operator.mod)
def remainder(ctx: Builder, input: Any, other: Any) -> Any:
    kind = _common(input, other)
    if not kind.is_floating_point:
        return ctx.op("Mod", *_whole(ctx, input, other, kind))
    a, b = ctx.cast(input, kind), ctx.cast(other, kind)
    rest = _fmod(ctx, a, b, kind)
    return ctx.op("Where", _other_sign(ctx, rest, b, kind), ctx.op("Add", rest, b), rest)


@converter("fmod", torch.fmod)
def fmod(ctx: Builder, input: Any, other: Any) -> Any:
    kind = _common(input, other)
    if not kind.is_floating_point:
        return ctx.op("Mod", *_whole(ctx, input, other, kind), fmod=1)
    return _fmod(ctx, ctx.cast(input, kind), ctx.cast(other, kind), kind)


@converter("pow", torch.pow, operator.pow, "float_power", torch.float_power)
def pow(ctx: Builder, input: Any, exponent: Any) -> Any:
    kind = ctx.out.dtype
    if isinstance(exponent, (int, float)) and exponent == 2:
        x = ctx.cast(input, kind)
        return ctx.op("Mul", x, x)
    if not kind.is_floating_point:  # ONNX's runtimes go through floats
        if not isinstance(exponent, int) or not 0 < exponent <= 16:
            raise Unsupported("a power of whole numbers, but for small fixed exponents")
        x = y = ctx.cast(input, kind)
        for _ in range(exponent - 1):
            y = ctx.op("Mul", y, x)
        return y
    if isinstance(exponent, float) and exponent == 0.5:
        return ctx.op("Sqrt", ctx.cast(input, kind))
    return elementwise(ctx, "Pow", input, exponent, dtype=kind)


for _name, _op in {"maximum": "Max", "minimum": "Min"}.items():
    register(_name, lambda ctx, input, other, op=_op: elementwise(ctx, op, input, other))


def _comparison(names: str, function: Any, op: str, negate: bool = False) -> None:
    def convert(ctx: Builder, input: Any, other: Any) -> Any:
        kind = _common(input, other)
        if kind is torch.bool and op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
            kind = torch.int32
        answer = elementwise(ctx, op, input, other, dtype=kind)
        return ctx.op("Not", answer) if negate else answer

    register(names, convert)
    converter(function)(convert)


_comparison("eq", operator.eq, "Equal")
_comparison("ne not_equal", operator.ne, "Equal", negate=True)
_comparison("gt greater", operator.gt, "Greater")
_comparison("ge greater_equal", operator.ge, "GreaterOrEqual")
_comparison("lt less", operator.lt, "Less")
_comparison("le less_equal", operator.le, "LessOrEqual")


def _logical(names: str, function: Any, op: str, bitwise: str | None) -> None:
    def convert(ctx: Builder, input: Any, other: Any) -> Any:
        kind = torch.bool if bitwise is None else _common(input, other)
        if kind is torch.bool:
            return elementwise(ctx, op, input, other, dtype=torch.bool)
        return elementwise(ctx, str(bitwise), input, other, dtype=kind)

    register(names, convert)
    if function is not None:
        converter(function)(convert)


_logical("logical_and", None, "And", None)
_logical("logical_or", None, "Or", None)
_logical("logical_xor", None, "Xor", None)
_logical("bitwise_and", operator.and_, "And", "BitwiseAnd")
_logical("bitwise_or", operator.or_, "Or", "BitwiseOr")
_logical("bitwise_xor", operator.xor, "Xor", "BitwiseXor")


@converter("logical_not", torch.logical_not)
def logical_not(ctx: Builder, input: Any) -> Any:
    return ctx.op("Not", ctx.cast(input, torch.bool))


@converter("bitwise_not", torch.bitwise_not, operator.invert)
def bitwise_not(ctx: Builder, input: Any) -> Any:
    return ctx.op("Not" if input.dtype is torch.bool else "BitwiseNot", input)


_where = torch.ops.aten.where  # as the function, not as the method


def choose(ctx: Builder, condition: Any, a: Any, b: Any, kind: torch.dtype) -> OnnxValue:
    """`a` where the condition holds, else `b`, as `kind`; with types that every runtime takes."""
    condition = ctx.cast(condition, torch.bool)
    if kind is torch.bool:
        yes = ctx.op("And", condition, ctx.cast(a, kind))
        return ctx.op("Or", yes, ctx.op("And", ctx.op("Not", condition), ctx.cast(b, kind)))
    wide = torch.int32 if kind in (torch.int8, torch.int16) else kind
    chosen = ctx.op("Where", condition, ctx.cast(a, wide), ctx.cast(b, wide))
    return chosen if wide is kind else ctx.cast(chosen, kind)


@converter(torch.where, *(getattr(_where, name) for name in _where.overloads()))
def where(ctx: Builder, condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None:
        raise Unsupported("where with one argument has a size that depends on values")
    return choose(ctx, condition, input, other, ctx.out.dtype)


@converter("where")
def where_method(ctx: Builder, input: Any, condition: Any, other: Any) -> Any:
    return choose(ctx, condition, input, other, ctx.out.dtype)


@converter("masked_fill", torch.masked_fill)
def masked_fill(ctx: Builder, input: Any, mask: Any, value: Any) -> Any:
    return choose(ctx, mask, value, input, input.dtype)


@converter("clamp", "clip", torch.clamp, torch.clip)
def clamp(ctx: Builder, input: Any, min: Any = None, max: Any = None) -> Any:
    kind = ctx.out.dtype
    x = ctx.cast(input, kind)
    if min is not None:
        x = ctx.op("Max", x, ctx.cast(min, kind))
    if max is not None:
        x = ctx.op("Min", x, ctx.cast(max, kind))
    return x


@converter("clamp_min", torch.clamp_min)
def clamp_min(ctx: Builder, input: Any, min: Any) -> Any:
    return clamp(ctx, input, min)


@converter("clamp_max", torch.clamp_max)
def clamp_max(ctx: Builder, input: Any, max: Any) -> Any:
    return clamp(ctx, input, None, max)


@converter("addcmul", torch.addcmul)
def addcmul(ctx: Builder, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    product = ctx.op("Mul", ctx.op("Mul", tensor1, tensor2), ctx.const(value, ctx.out.dtype))
    return ctx.op("Add", input, product)


@converter("addcdiv", torch.addcdiv)
def addcdiv(ctx: Builder, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    quotient = ctx.op("Mul", ctx.op("Div", tensor1, tensor2), ctx.const(value, ctx.out.dtype))
    return ctx.op("Add", input, quotient)


@converter("lerp", torch.lerp)
def lerp(ctx: Builder, input: Any, end: Any, weight: Any) -> Any:
    step = ctx.op("Mul", ctx.op("Sub", end, input), ctx.cast(weight, ctx.out.dtype))
    return ctx.op("Add", input, step)


@converter("hypot", torch.hypot)
def hypot(ctx: Builder, input: Any, other: Any) -> Any:
    sizes = [ctx.op("Abs", x) for x in (input, other)]
    top, low, one = ctx.op("Max", *sizes), ctx.op("Min", *sizes), ctx.const(1.0, ctx.out.dtype)
    normal = ctx.op("And", ctx.op("Greater", top, ctx.const(0.0, ctx.out.dtype)),
                    ctx.op("Less", top, ctx.const(math.inf, ctx.out.dtype)))  # fmt: skip
    ratio = ctx.op("Div", low, ctx.op("Where", normal, top, one))
    return ctx.op("Mul", top, ctx.op("Sqrt", ctx.op("Add", ctx.op("Mul", ratio, ratio), one)))


@converter("logaddexp", torch.logaddexp)
def logaddexp(ctx: Builder, input: Any, other: Any) -> Any:
    top = ctx.op("Max", input, other)
    parts = [ctx.op("Exp", ctx.op("Sub", x, top)) for x in (input, other)]
    y = ctx.op("Add", top, ctx.op("Log", ctx.op("Add", *parts)))
    endless = ctx.op("Equal", ctx.op("Abs", top), ctx.const(math.inf, ctx.out.dtype))
    return ctx.op("Where", endless, top, y)
