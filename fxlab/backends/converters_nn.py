"""How are the layers of neural networks said in ONNX?

Converters (see `fxlab.backends.onnx`) of convolutions, pooling and normalisation. Modules need none
of their own: the emitter runs a module's code, and the functions that it calls arrive here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.converters_shape import reshape_to
from fxlab.backends.onnx import Builder, OnnxValue, Unsupported, converter

__all__: list[str] = []

I64 = torch.int64


def _tuple(value: Any, count: int) -> list[int]:
    """`count` ints from one number or a sequence of one or `count` numbers."""
    values = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (values * count if len(values) == 1 else values)]


def _spatial(x: Any) -> list[int]:
    """Sizes after (batch, channel); they must be fixed."""
    return [int(size) for size in x.shape[2:]]


def _batched(ctx: Builder, x: Any, rank: int) -> tuple[Any, bool]:
    """`x` with a batch dimension, and whether one was added."""
    if x.dim() == rank:
        return x, False
    made = ctx.op("Unsqueeze", x, ctx.const([0], I64))
    made.fake = ctx.fake(x.fake.unsqueeze(0)) if x.fake is not None else None
    return made, True


def _unbatched(ctx: Builder, x: Any, added: bool) -> Any:
    return ctx.op("Squeeze", x, ctx.const([0], I64)) if added else x


# Convolutions.


def _convolution(
    ctx: Builder,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    count = weight.dim() - 2
    x, added = _batched(ctx, input, count + 2)
    kernel = [int(size) for size in weight.shape[2:]]
    dilations = _tuple(dilation, count)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads = [n // 2 for n in total] + [n - n // 2 for n in total]
    else:
        pads = _tuple(padding, count) * 2
    y = ctx.op(
        "Conv",
        x,
        weight,
        bias,
        kernel_shape=kernel,
        strides=_tuple(stride, count),
        pads=pads,
        dilations=dilations,
        group=groups,
    )
    return _unbatched(ctx, y, added)


converter(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(_convolution)


@converter("convolution", torch.convolution)
def convolution(
    ctx: Builder,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed:
        return _transposed(
            ctx, input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return _convolution(ctx, input, weight, bias, stride, padding, dilation, groups)


def _transposed(
    ctx: Builder,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    count = weight.dim() - 2
    extra, steps = _tuple(output_padding, count), _tuple(stride, count)
    if any(more >= step for more, step in zip(extra, steps, strict=True)):
        raise Unsupported("a transposed convolution whose output_padding is not below its stride")
    x, added = _batched(ctx, input, count + 2)
    y = ctx.op(
        "ConvTranspose",
        x,
        weight,
        bias,
        kernel_shape=[int(size) for size in weight.shape[2:]],
        strides=steps,
        pads=_tuple(padding, count) * 2,
        output_padding=extra,
        dilations=_tuple(dilation, count),
        group=groups,
    )
    return _unbatched(ctx, y, added)


converter(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)(_transposed)
converter(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)(_transposed)


# Pooling.


def _max_pool(count: int) -> Callable[..., Any]:
    def convert(
        ctx: Builder,
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices:
            return _pool_with_indices(ctx, input)
        x, added = _batched(ctx, input, count + 2)
        y = ctx.op(
            "MaxPool",
            x,
            kernel_shape=_tuple(kernel_size, count),
            strides=_tuple(stride if stride not in (None, []) else kernel_size, count),
            pads=_tuple(padding, count) * 2,
            dilations=_tuple(dilation, count),
            ceil_mode=int(ceil_mode),
        )
        return _unbatched(ctx, y, added)

    return convert


def _pool_with_indices(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
    raise Unsupported("max_pool with return_indices: ONNX counts indices otherwise")


def _average_pool(count: int) -> Callable[..., Any]:
    def convert(
        ctx: Builder,
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is not None:
            raise Unsupported("avg_pool with divisor_override")
        pads = _tuple(padding, count)
        if ceil_mode and count_include_pad and any(pads):
            raise Unsupported("avg_pool with ceil_mode over padding")
        x, added = _batched(ctx, input, count + 2)
        y = ctx.op(
            "AveragePool",
            x,
            kernel_shape=_tuple(kernel_size, count),
            strides=_tuple(stride if stride not in (None, []) else kernel_size, count),
            pads=pads * 2,
            ceil_mode=int(ceil_mode),
            count_include_pad=int(count_include_pad),
        )
        return _unbatched(ctx, y, added)

    return convert


def _adaptive_pool(count: int, whole: str, op: str) -> Callable[..., Any]:
    def convert(ctx: Builder, input: Any, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices:
            raise Unsupported("adaptive max_pool with return_indices")
        x, added = _batched(ctx, input, count + 2)
        asked = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size]
        asked = asked * count if len(asked) == 1 else asked
        sizes = _spatial(x) if x.fake is not None else []
        wanted = [n if n is not None else size for n, size in zip(asked, sizes, strict=True)]
        if all(n == 1 for n in wanted):
            return _unbatched(ctx, ctx.op(whole, x), added)
        if any(size % n for n, size in zip(wanted, sizes, strict=True)):
            return _unbatched(ctx, _uneven_pool(x, wanted, op == "MaxPool"), added)
        kernel = [size // n for n, size in zip(wanted, sizes, strict=True)]
        return _unbatched(ctx, ctx.op(op, x, kernel_shape=kernel, strides=kernel), added)

    return convert


def _uneven_pool(x: Any, wanted: Sequence[int], largest: bool) -> Any:
    """Adaptive pooling by windows of different sizes, one axis after the other."""
    for axis, count in enumerate(wanted, 2):
        size = int(x.shape[axis])
        windows = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        if largest:
            x = torch.cat([x.narrow(axis, a, b - a).amax(axis, True) for a, b in windows], axis)
            continue
        shares = torch.zeros(size, count, dtype=x.dtype)
        for column, (a, b) in enumerate(windows):
            shares[a:b, column] = 1 / (b - a)
        x = torch.matmul(x.transpose(axis, -1), shares).transpose(axis, -1)
    return x


for _count in (1, 2, 3):
    _names = [f"max_pool{_count}d", f"avg_pool{_count}d"]
    for _home in (torch, F):
        if hasattr(_home, _names[0]):
            converter(getattr(_home, _names[0]))(_max_pool(_count))
        if hasattr(_home, _names[1]):
            converter(getattr(_home, _names[1]))(_average_pool(_count))
    converter(_names[0])(_max_pool(_count))
    converter(getattr(F, f"{_names[0]}_with_indices"))(_pool_with_indices)
    converter(_names[1])(_average_pool(_count))
    converter(getattr(F, f"adaptive_avg_pool{_count}d"), f"adaptive_avg_pool{_count}d")(
        _adaptive_pool(_count, "GlobalAveragePool", "AveragePool")
    )
    converter(getattr(F, f"adaptive_max_pool{_count}d"), f"adaptive_max_pool{_count}d")(
        _adaptive_pool(_count, "GlobalMaxPool", "MaxPool")
    )
converter(torch.adaptive_avg_pool1d)(_adaptive_pool(1, "GlobalAveragePool", "AveragePool"))


# Normalisation.


@converter(F.batch_norm)
def batch_norm(
    ctx: Builder,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if running_mean is None:
        return _affine(ctx, _own_statistics(ctx, input, eps), weight, bias, input.dim())
    if training:
        raise Unsupported("batch norm that updates its running statistics; call eval() first")
    channels = int(input.shape[1])
    if weight is None:
        weight = ctx.const([1.0] * channels, input.dtype)
    if bias is None:
        bias = ctx.const([0.0] * channels, input.dtype)
    return ctx.op(
        "BatchNormalization", input, weight, bias, running_mean, running_var, epsilon=float(eps)
    )


@converter(torch.batch_norm)
def batch_norm_operator(
    ctx: Builder,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *args: Any,
) -> Any:
    return batch_norm(ctx, input, running_mean, running_var, weight, bias, *args)


@converter(torch.instance_norm)
def instance_norm_operator(
    ctx: Builder,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *args: Any,
) -> Any:
    return instance_norm(ctx, input, running_mean, running_var, weight, bias, *args)


def _own_statistics(ctx: Builder, x: Any, eps: float) -> OnnxValue:
    """Normalise each channel (axis 1) by the mean and variance of this very batch."""
    axes = ctx.const([axis for axis in range(x.dim()) if axis != 1], I64)
    centred = ctx.op("Sub", x, ctx.op("ReduceMean", x, axes))
    variance = ctx.op("ReduceMean", ctx.op("Mul", centred, centred), axes)
    spread = ctx.op("Sqrt", ctx.op("Add", variance, ctx.const(float(eps), x.dtype)))
    return ctx.op("Div", centred, spread)


@converter(F.layer_norm, torch.layer_norm)
def layer_norm(
    ctx: Builder,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if weight is None:
        weight = ctx.value(_ones(ctx, tuple(normalized_shape), input.dtype))
    return ctx.op(
        "LayerNormalization", input, weight, bias, axis=-len(normalized_shape), epsilon=float(eps)
    )


def _ones(ctx: Builder, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@converter(F.rms_norm, torch.rms_norm)
def rms_norm(
    ctx: Builder,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    axes = ctx.const([-1 - k for k in range(len(normalized_shape))], I64)
    mean = ctx.op("ReduceMean", ctx.op("Mul", input, input), axes)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    scale = ctx.op("Sqrt", ctx.op("Add", mean, ctx.const(eps, input.dtype)))
    y = ctx.op("Div", input, scale)
    return y if weight is None else ctx.op("Mul", y, weight)


@converter(F.group_norm, torch.group_norm)
def group_norm(
    ctx: Builder,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    flat = ctx.op("Reshape", input, ctx.const([0, num_groups, -1], I64))
    ones = ctx.const([1.0] * num_groups, input.dtype)
    zeros = ctx.const([0.0] * num_groups, input.dtype)
    normed = ctx.op("InstanceNormalization", flat, ones, zeros, epsilon=float(eps))
    y = reshape_to(ctx, normed, input.shape)
    return _affine(ctx, y, weight, bias, input.dim())


def _affine(ctx: Builder, y: Any, weight: Any, bias: Any, rank: int) -> Any:
    """Scale and shift per channel (axis 1)."""
    axes = ctx.const(list(range(1, rank - 1)), I64)
    if weight is not None:
        y = ctx.op("Mul", y, ctx.op("Unsqueeze", weight, axes) if rank > 2 else weight)
    if bias is not None:
        y = ctx.op("Add", y, ctx.op("Unsqueeze", bias, axes) if rank > 2 else bias)
    return y


@converter(F.instance_norm)
def instance_norm(
    ctx: Builder,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if not use_input_stats:
        return batch_norm(ctx, input, running_mean, running_var, weight, bias, eps=eps)
    channels = int(input.shape[1])
    if weight is None:
        weight = ctx.const([1.0] * channels, input.dtype)
    if bias is None:
        bias = ctx.const([0.0] * channels, input.dtype)
    return ctx.op("InstanceNormalization", input, weight, bias, epsilon=float(eps))


@converter(F.normalize)
def normalize(
    ctx: Builder, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    if p not in (1, 2):
        raise Unsupported(f"normalize with p={p}")
    axis = ctx.const([dim % input.dim()], I64)
    length = ctx.op("ReduceL2" if p == 2 else "ReduceL1", input, axis, keepdims=1)
    return ctx.op("Div", input, ctx.op("Max", length, ctx.const(eps, input.dtype)))


@converter(F.local_response_norm)
def local_response_norm(
    ctx: Builder, input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    if size % 2 == 0 or input.dim() != 4:
        raise Unsupported("local_response_norm over an even number of channels, or not of images")
    return ctx.op("LRN", input, size=size, alpha=float(alpha), beta=float(beta), bias=float(k))
