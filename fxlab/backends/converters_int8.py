"""How is a quantized program said in ONNX?

The int8 modules of `fxlab.passes.quantize` read and write codes (uint8). In ONNX each becomes
dequantize, the float operation, quantize: the "QDQ" form, which a runtime fuses back into its own
int8 kernel (section 6.2.1 of the paper lowered by the means of 6.4). A lookup table stays one.
"""

from __future__ import annotations

from typing import Any

import torch

from fxlab.backends.converters_act import dequantize, quantize
from fxlab.backends.onnx import Builder, OnnxValue, converter
from fxlab.passes.quantize.kernels import Codes
from fxlab.passes.quantize.modules import (
    Dequantize,
    Int8Add,
    Int8Cat,
    Int8Conv,
    Int8Embedding,
    Int8Linear,
    Int8MaxPool2d,
    Quantize,
    Table,
)

__all__: list[str] = []

I64 = torch.int64


def _codes(ctx: Builder, x: OnnxValue, codes: Codes | None) -> OnnxValue:
    """`x` as codes, or as it is when the module writes float."""
    if codes is None:
        return x
    made = quantize(ctx, x, codes.scale, codes.zero_point, torch.uint8)
    if codes.quant_max != 255:
        made = ctx.op("Min", made, ctx.const(codes.quant_max, torch.uint8))
    return made


def _values(ctx: Builder, x: OnnxValue, codes: Codes | None) -> OnnxValue:
    """What the codes `x` stand for; `x` itself when it is float."""
    if codes is None:
        return x
    coded = OnnxValue(ctx, x.name, x.fake, x.other)
    coded.scale = ctx.const(codes.scale, torch.float32)
    coded.zero_point = ctx.const(codes.zero_point, torch.uint8)
    return dequantize(ctx, coded)


def _weight(ctx: Builder, weight: torch.Tensor, scale: torch.Tensor) -> OnnxValue:
    """The float weight: int8 codes with a scale for each output channel (axis 0)."""
    zeros = ctx.const([0] * weight.shape[0], torch.int8)
    return ctx.op("DequantizeLinear", weight, scale, zeros, axis=0)


@converter(Quantize)
def quantize_module(ctx: Builder, module: Quantize, x: Any) -> Any:
    return _codes(ctx, ctx.cast(x, torch.float32), module.output)


@converter(Dequantize)
def dequantize_module(ctx: Builder, module: Dequantize, codes: Any) -> Any:
    return _values(ctx, codes, module.input)


@converter(Table)
def table(ctx: Builder, module: Table, codes: Any) -> Any:
    return ctx.op("Gather", module.table, ctx.op("Cast", codes, to=6), axis=0)  # 6: int32


@converter(Int8Linear)
def linear(ctx: Builder, module: Int8Linear, codes: Any) -> Any:
    weight = _weight(ctx, module.weight, module.weight_scale)
    turned = ctx.op("Transpose", weight, perm=[1, 0])
    if module.reads_float:
        codes = _codes(ctx, ctx.cast(codes, torch.float32), module.input)
    y = ctx.op("MatMul", _values(ctx, codes, module.input), turned)
    if module.bias is not None:
        y = ctx.op("Add", y, module.bias)
    return _codes(ctx, ctx.op("Relu", y) if module.relu else y, module.output)


@converter(Int8Conv)
def convolution(ctx: Builder, module: Int8Conv, codes: Any, other: Any = None) -> Any:
    unbatched = codes.dim() == module.weight.dim() - 1
    x = _values(ctx, codes, module.input)
    axis = ctx.const([0], I64)
    y = ctx.op(
        "Conv",
        ctx.op("Unsqueeze", x, axis) if unbatched else x,
        _weight(ctx, module.weight, module.weight_scale),
        module.bias,
        kernel_shape=list(module.weight.shape[2:]),
        strides=list(module.stride),
        pads=list(module.padding) * 2,
        dilations=list(module.dilation),
        group=module.groups,
    )
    y = ctx.op("Squeeze", y, axis) if unbatched else y
    if other is not None:
        y = ctx.op("Add", y, _values(ctx, other, module.other))
    return _codes(ctx, ctx.op("Relu", y) if module.relu else y, module.output)


@converter(Int8Add)
def add(ctx: Builder, module: Int8Add, a: Any, b: Any) -> Any:
    y = ctx.op("Add", _values(ctx, a, module.left), _values(ctx, b, module.right))
    return _codes(ctx, ctx.op("Relu", y) if module.relu else y, module.output)


@converter(Int8MaxPool2d)
def max_pool(ctx: Builder, module: Int8MaxPool2d, codes: Any) -> Any:
    pool = torch.nn.functional.max_pool2d
    values = _values(ctx, codes, module.input)
    values.fake = ctx.fake(torch.empty(codes.fake.shape, device="meta"))
    out = ctx.fake(torch.empty(ctx.out.shape, device="meta"))
    pooled = ctx.call("call_function", pool, (values,), module.options, out)
    return _codes(ctx, pooled, module.input)


@converter(Int8Cat)
def cat(ctx: Builder, module: Int8Cat, tensors: Any) -> Any:
    same = [
        table(ctx, scale, codes) if isinstance(scale, Table) else codes
        for scale, codes in zip(module.scales, tensors, strict=True)
    ]
    return ctx.op("Concat", *same, axis=module.dim % ctx.out.dim())


@converter(Int8Embedding)
def embedding(ctx: Builder, module: Int8Embedding, index: Any) -> Any:
    rows = ctx.op("Cast", ctx.op("Gather", module.weight, index, axis=0), to=1)  # 1: float32
    scales = ctx.op("Gather", module.weight_scale, index, axis=0)
    return ctx.op("Mul", rows, ctx.op("Unsqueeze", scales, ctx.const([-1], I64)))
