"""How are activations, attention, resizing and quantization said in ONNX?

Converters (see `fxlab.backends.onnx`). Modules need none of their own: the emitter runs a module's
code, and the functions that it calls arrive here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.converters_reduce import linear
from fxlab.backends.converters_shape import axis_of, reshape_to, within
from fxlab.backends.onnx import Builder, OnnxValue, SymbolicInt, Unsupported, converter

__all__: list[str] = []

I64 = torch.int64


# Activations.


def _activation(names: str, convert: Callable[..., Any]) -> None:
    for name in names.split():
        converter(*(getattr(h, name) for h in (torch, F) if hasattr(h, name)), name)(convert)


def _c(ctx: Builder, number: float) -> OnnxValue:
    return ctx.const(number, ctx.out.dtype)


def _celu(ctx: Builder, input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    low = ctx.op("Min", input, _c(ctx, 0.0))
    curve = ctx.op("Mul", _c(ctx, alpha), _expm1(ctx, ctx.op("Div", low, _c(ctx, alpha))))
    return ctx.op("Add", ctx.op("Relu", input), curve)


def _expm1(ctx: Builder, x: Any) -> Any:
    return ctx.op("Sub", ctx.op("Exp", x), _c(ctx, 1.0))


def _elu(ctx: Builder, input: Any, alpha: float = 1.0, *_: Any, inplace: bool = False) -> Any:
    return ctx.op("Elu", input, alpha=float(alpha))


def _selu(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return ctx.op("Selu", input)


def _gelu(ctx: Builder, input: Any, approximate: str = "none") -> Any:
    return ctx.op("Gelu", input, approximate=approximate)


def _silu(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return ctx.op("Mul", input, ctx.op("Sigmoid", input))


def _mish(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return ctx.op("Mish", input)


def _softplus(ctx: Builder, input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = input if beta == 1 else ctx.op("Mul", input, _c(ctx, beta))
    y = ctx.op("Softplus", scaled)
    y = y if beta == 1 else ctx.op("Div", y, _c(ctx, beta))
    if threshold >= 20:  # there it is the identity within float32
        return y
    return ctx.op("Where", ctx.op("Greater", scaled, _c(ctx, threshold)), input, y)


def _hardtanh(
    ctx: Builder, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    return ctx.op("Clip", input, _c(ctx, min_val), _c(ctx, max_val))


def _relu6(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return _hardtanh(ctx, input, 0.0, 6.0)


def _hardsigmoid(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return ctx.op("HardSigmoid", input, alpha=1 / 6, beta=0.5)


def _hardswish(ctx: Builder, input: Any, inplace: bool = False) -> Any:
    return ctx.op("HardSwish", input)


def _leaky_relu(
    ctx: Builder, input: Any, negative_slope: float = 0.01, inplace: bool = False
) -> Any:
    return ctx.op("LeakyRelu", input, alpha=float(negative_slope))


def _prelu(ctx: Builder, input: Any, weight: Any) -> Any:
    if input.dim() == 0:
        weight = weight.reshape(())
    if weight.numel() > 1 and input.dim() > 2:
        weight = ctx.op("Unsqueeze", weight, ctx.const(list(range(1, input.dim() - 1)), I64))
    return ctx.op("PRelu", input, weight)


def _threshold(
    ctx: Builder, input: Any, threshold: float, value: float, inplace: bool = False
) -> Any:
    below = ctx.op("LessOrEqual", input, _c(ctx, threshold))  # what is not a number is not
    return ctx.op("Where", below, _c(ctx, value), input)


def _softshrink(ctx: Builder, input: Any, lambd: float = 0.5) -> Any:
    nearer = ctx.op("Sub", input, ctx.op("Mul", ctx.op("Sign", input), _c(ctx, lambd)))
    return ctx.op("Where", _inside(ctx, input, lambd), _c(ctx, 0.0), nearer)


def _hardshrink(ctx: Builder, input: Any, lambd: float = 0.5) -> Any:
    return ctx.op("Where", _inside(ctx, input, lambd), _c(ctx, 0.0), input)


def _inside(ctx: Builder, x: Any, limit: float) -> Any:
    """Where numbers are at most that far from 0: not where there are none (no Shrink, then)."""
    return ctx.op("LessOrEqual", ctx.op("Abs", x), _c(ctx, limit))


def _logsigmoid(ctx: Builder, input: Any) -> Any:
    return ctx.op("Neg", ctx.op("Softplus", ctx.op("Neg", input)))


def _tanhshrink(ctx: Builder, input: Any) -> Any:
    return ctx.op("Sub", input, ctx.op("Tanh", input))


def _softsign(ctx: Builder, input: Any) -> Any:
    return ctx.op("Softsign", input)


def _glu(ctx: Builder, input: Any, dim: int = -1) -> Any:
    axis = dim % input.dim()
    half = int(input.shape[axis]) // 2
    left, gate = ctx.op("Split", input, ctx.const([half, half], I64), axis=axis, outputs=2)
    return ctx.op("Mul", left, ctx.op("Sigmoid", gate))


for _names, _convert in {
    "celu": _celu,
    "elu": _elu,
    "selu": _selu,
    "gelu": _gelu,
    "silu": _silu,
    "mish": _mish,
    "softplus": _softplus,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "threshold": _threshold,
    "softshrink": _softshrink,
    "hardshrink": _hardshrink,
    "logsigmoid": _logsigmoid,
    "tanhshrink": _tanhshrink,
    "softsign": _softsign,
    "glu": _glu,
}.items():
    _activation(_names, _convert)


def _softmax_like(op: str, negate: bool = False) -> Callable[..., Any]:
    def convert(
        ctx: Builder, input: Any, dim: int | None = None, *_: Any, dtype: Any = None, **__: Any
    ) -> Any:
        if dim is None:
            dim = 0 if input.dim() in (0, 1, 3) else 1
        x = ctx.op("Neg", input) if negate else input
        x = ctx.cast(x, ctx.out.dtype)
        return ctx.op(op, x, axis=axis_of(dim, input.dim()))

    return convert


_activation("softmax", _softmax_like("Softmax"))
_activation("log_softmax", _softmax_like("LogSoftmax"))
_activation("softmin", _softmax_like("Softmax", negate=True))


def _dropout(
    ctx: Builder, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training and p > 0:
        raise Unsupported("dropout in training draws random numbers; call eval() first")
    return input


converter(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)(_dropout)
converter(F.feature_alpha_dropout, torch.dropout)(_dropout)


# Embedding, attention, resizing.


@converter(F.embedding, torch.embedding)
def embedding(ctx: Builder, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(input, torch.Tensor) or input.dtype.is_floating_point:
        input, weight = weight, input  # torch.embedding takes them the other way round
    if (args[1:2] and args[1] is not None) or kwargs.get("max_norm") is not None:
        raise Unsupported("embedding with max_norm writes to its weight")
    return ctx.op("Gather", weight, within(ctx, input, weight.shape[0]), axis=0)


@converter(F.scaled_dot_product_attention)
def attention(
    ctx: Builder,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p or enable_gqa:
        raise Unsupported("attention with dropout or grouped queries")
    kind = query.dtype
    factor = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale
    rank = key.dim()
    turned = ctx.op("Transpose", key, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = ctx.op("MatMul", ctx.op("Mul", query, ctx.const(factor, kind)), turned)
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        if isinstance(rows, SymbolicInt) or isinstance(columns, SymbolicInt):
            raise Unsupported("causal attention over a dynamic length")
        attn_mask = torch.ones(rows, columns, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = ctx.op("Where", attn_mask, scores, ctx.const(-math.inf, kind))
    elif attn_mask is not None:
        scores = ctx.op("Add", scores, attn_mask)
    return ctx.op("MatMul", _attention_weights(ctx, scores, kind, attn_mask), value)


def _attention_weights(ctx: Builder, scores: Any, kind: torch.dtype, *masks: Any) -> Any:
    """Softmax of each row; 0 in one of which everything is masked."""
    if not any(map(_may_hide_a_row, masks)):
        return ctx.op("Softmax", scores, axis=-1)
    zero = ctx.const(0.0, kind)
    top = ctx.op("ReduceMax", scores, ctx.const([-1], I64), keepdims=1)
    # OpenVINO's largest of minus infinities is the smallest number there is.
    hidden = ctx.op("LessOrEqual", top, ctx.const(torch.finfo(kind).min, kind))
    weights = ctx.op("Softmax", ctx.op("Where", hidden, zero, scores), axis=-1)
    return ctx.op("Where", hidden, zero, weights)


def _may_hide_a_row(mask: Any) -> bool:
    if isinstance(mask, torch.Tensor):
        shown = mask if mask.dtype is torch.bool else mask > -math.inf
        return not bool(shown.any(-1).all())
    return mask is not None


@converter(F.multi_head_attention_forward)
def multi_head_attention(
    ctx: Builder,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Attention of inputs (length, batch, features); see torch.nn.MultiheadAttention."""
    unusual = (bias_k, bias_v, static_k, static_v)
    if any(v is not None for v in unusual) or add_zero_attn or query.dim() != 3:
        raise Unsupported("multi-head attention with added keys or without batch")
    if training and dropout_p:
        raise Unsupported("dropout in training draws random numbers; call eval() first")
    width, head = embed_dim_to_check, embed_dim_to_check // num_heads
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        weights = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))

    def heads(x: Any, weight: Any, bias: Any, perm: list[int]) -> Any:
        y = linear(ctx, x, weight.detach(), None if bias is None else bias.detach())
        y = reshape_to(ctx, y, [x.shape[0], x.shape[1], num_heads, head])
        return ctx.op("Transpose", y, perm=perm)

    to_rows, to_columns = [1, 2, 0, 3], [1, 2, 3, 0]  # (batch, heads, length, head), turned
    q = heads(query, weights[0], biases[0], to_rows)
    k = heads(key, weights[1], biases[1], to_columns)
    v = heads(value, weights[2], biases[2], to_rows)
    scale = ctx.const(1 / math.sqrt(head), query.dtype)
    scores = ctx.op("MatMul", ctx.op("Mul", q, scale), k)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unsqueeze(1).unsqueeze(2)
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.dtype is torch.bool:
            scores = ctx.op("Where", mask, ctx.const(-math.inf, query.dtype), scores)
        elif mask is not None:
            scores = ctx.op("Add", scores, mask)
    # Without weights, PyTorch takes the function above.
    hides = any(mask is not None for mask in (attn_mask, key_padding_mask)) and not need_weights
    weights_out = _attention_weights(ctx, scores, query.dtype, query if hides else None)
    mixed = ctx.op("Transpose", ctx.op("MatMul", weights_out, v), perm=[2, 0, 1, 3])
    joined = reshape_to(ctx, mixed, [query.shape[0], query.shape[1], width])
    joined.fake = query.fake
    out = linear(ctx, joined, out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    if average_attn_weights:
        weights_out = ctx.op("ReduceMean", weights_out, ctx.const([1], I64), keepdims=0)
    return out, weights_out


@converter(F.interpolate)
def interpolate(
    ctx: Builder,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    kinds = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "bicubic": "cubic"}
    kinds |= {"trilinear": "linear", "nearest-exact": "nearest"}
    if mode == "area":
        sizes = ctx.out_sizes(2)
        return getattr(F, f"adaptive_avg_pool{len(sizes)}d")(input, sizes)
    if mode not in kinds or antialias:
        raise Unsupported(f"interpolate with mode={mode!r}, antialias={antialias}")
    if align_corners:
        where = "align_corners"
    else:
        where = "asymmetric" if mode == "nearest" else "pytorch_half_pixel"
    if mode != "nearest" and not align_corners:
        where = "half_pixel"
    options: dict[str, Any] = {
        "mode": kinds[mode],
        "coordinate_transformation_mode": where,
        "nearest_mode": {"nearest": "floor", "nearest-exact": "round_prefer_ceil"}.get(mode),
        "cubic_coeff_a": -0.75 if mode == "bicubic" else None,
    }
    count = input.dim() - 2
    if size is None and not recompute_scale_factor:
        factors = [scale_factor] * count if isinstance(scale_factor, (int, float)) else scale_factor
        scales = ctx.const([1.0, 1.0, *(float(f) for f in factors)], torch.float32)
        return ctx.op("Resize", input, None, scales, **options)
    sizes = ctx.ints([*input.shape[:2], *ctx.out_sizes(2)])
    return ctx.op("Resize", input, None, None, sizes, **options)


def _upsample(mode: str) -> Callable[..., Any]:
    """The operator that interpolate calls, as an exported program has it."""

    def convert(ctx: Builder, input: Any, output_size: Any, *args: Any) -> Any:
        corners, factors = args if len(args) > 1 else (None, *args)
        return F.interpolate(input, output_size, factors, mode, corners)

    return convert


for _name, _mode in {
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
    "upsample_trilinear3d": "trilinear",
}.items():
    converter(getattr(torch.ops.aten, _name).vec)(_upsample(_mode))


@converter(F.pixel_shuffle, torch.pixel_shuffle, "pixel_shuffle")
def pixel_shuffle(ctx: Builder, input: Any, upscale_factor: int) -> Any:
    return ctx.op("DepthToSpace", input, blocksize=upscale_factor, mode="CRD")


@converter(F.pixel_unshuffle, torch.pixel_unshuffle, "pixel_unshuffle")
def pixel_unshuffle(ctx: Builder, input: Any, downscale_factor: int) -> Any:
    n, r = input.shape, downscale_factor
    channels, height, width = (int(size) for size in n[1:])
    split = reshape_to(ctx, input, [n[0], channels, height // r, r, width // r, r])
    turned = ctx.op("Transpose", split, perm=[0, 1, 3, 5, 2, 4])
    return reshape_to(ctx, turned, [n[0], channels * r * r, height // r, width // r])


@converter(F.grid_sample)
def grid_sample(
    ctx: Builder,
    input: Any,
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    kinds = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
    return ctx.op(
        "GridSample",
        input,
        grid,
        mode=kinds[mode],
        padding_mode=padding_mode,
        align_corners=int(bool(align_corners)),
    )


# Quantization: the result stays an integer value that carries its scale and zero point.


def quantize(
    ctx: Builder, x: Any, scale: Any, zero_point: Any, dtype: torch.dtype, axis: int | None = None
) -> OnnxValue:
    """QuantizeLinear of a float value.

    Args:
        ctx: the builder.
        x: float value.
        scale: number or 1-D tensor.
        zero_point: number or 1-D tensor.
        dtype: ``torch.uint8`` or ``torch.int8`` (quint8 and qint8 mean the same).
        axis: the channel axis, None per tensor.
    """
    kind = {torch.quint8: torch.uint8, torch.qint8: torch.int8}.get(dtype, dtype)
    if kind not in (torch.uint8, torch.int8):
        raise Unsupported(f"quantization to {dtype}")
    scales, zeros = _quantization_parameters(ctx, scale, zero_point, kind)
    value = ctx.op("QuantizeLinear", ctx.cast(x, torch.float32), scales, zeros, axis=axis)
    value.scale, value.zero_point, value.axis = scales, zeros, axis
    return value


def _quantization_parameters(
    ctx: Builder, scale: Any, zero_point: Any, kind: torch.dtype
) -> tuple[OnnxValue, OnnxValue]:
    pair = []
    for number, dtype in ((scale, torch.float32), (zero_point, kind)):
        if isinstance(number, OnnxValue):
            raise Unsupported("a scale or zero point that is computed when the program runs")
        tensor = torch.as_tensor(number).detach().to(dtype)
        pair.append(ctx.const(tensor.tolist(), dtype))
    return pair[0], pair[1]


def dequantize(ctx: Builder, x: OnnxValue) -> OnnxValue:
    """DequantizeLinear of a value made by `quantize`."""
    if x.scale is None:
        raise Unsupported("dequantize of a value whose scale is not known")
    return ctx.op("DequantizeLinear", x, x.scale, x.zero_point, axis=x.axis)


@converter(torch.quantize_per_tensor)
def quantize_per_tensor(
    ctx: Builder, input: Any, scale: Any, zero_point: Any, dtype: torch.dtype
) -> Any:
    return quantize(ctx, input, scale, zero_point, dtype)


@converter(torch.quantize_per_channel)
def quantize_per_channel(
    ctx: Builder, input: Any, scales: Any, zero_points: Any, axis: int, dtype: torch.dtype
) -> Any:
    return quantize(ctx, input, scales, zero_points, dtype, axis)


@converter("dequantize", torch.dequantize)
def dequantize_value(ctx: Builder, input: Any) -> Any:
    return dequantize(ctx, input)


def _integer_type(low: int, high: int) -> torch.dtype:
    if (low, high) == (-128, 127):
        return torch.int8
    if (low, high) == (0, 255):
        return torch.uint8
    raise Unsupported(f"quantization to the range [{low}, {high}]")


@converter(torch.fake_quantize_per_tensor_affine)
def fake_quantize(
    ctx: Builder, input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Any:
    kind = _integer_type(quant_min, quant_max)
    return dequantize(ctx, quantize(ctx, input, scale, zero_point, kind))


@converter(torch.fake_quantize_per_channel_affine)
def fake_quantize_channels(
    ctx: Builder,
    input: Any,
    scale: Any,
    zero_point: Any,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Any:
    kind = _integer_type(quant_min, quant_max)
    return dequantize(ctx, quantize(ctx, input, scale, zero_point, kind, axis))
