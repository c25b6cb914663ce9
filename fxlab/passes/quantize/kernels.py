"""How does a CPU multiply integer codes, which kernel is the fastest here, and is it right?

The paper lowers to FBGEMM (section 6.2.1). A torch build holds several such libraries; this file
calls two, oneDNN and fbgemm, and holds a third that is nothing but integer arithmetic, to check
the other two against. All read and write plain ``uint8`` codes. For a layer with input codes x,
zero point z, scale a, weight codes w with one scale b an output channel, and bias c:

    acc = sum((x - z) * w)                 exact, in 32 bits
    y   = acc * (a * b) + c                the real value
    out = clamp(round(y / s) + t)          its code, with output scale s and zero point t

Libraries agree on acc. They round y differently, so a code may differ by one when y / s lies within
float32's precision of a tie; the tests hold them to that.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Codes",
    "Packed",
    "available_engines",
    "choose_engine",
    "dequantize",
    "look_up",
    "quantize",
    "weight_codes",
]

FEW_ROWS = 4
"""Up to so many rows, a product is a matter of reading the weights; another kernel may win."""

SOME_ROWS = 32
"""Up to so many rows, both reading and arithmetic count; beyond, arithmetic decides."""

CHUNK = 1 << 17
"""Elements looked up at a time, so that the indices stay in the cache."""

SMALL = 1 << 15
"""Up to so many bytes, what is done with them counts less than the calls that do it."""


class Codes(NamedTuple):
    """What an activation's codes mean: ``value = (code - zero_point) * scale``."""

    scale: float
    zero_point: int
    quant_max: int = 255

    def values(self) -> Tensor:
        """Return the value of each of the 256 bytes: f32[256]."""
        return (torch.arange(256) - self.zero_point).float() * self.scale


class Packed:
    """What a module derives from its state when first needed.

    Copying or pickling a module leaves it out, and loading weights drops it.

    Args:
        by_engine: (attribute) weights in the layout that a library wants, by engine; a
            convolution's by the size of its images.
        ready: (attribute) what a layer runs for an input of some shape, everything looked up.
    """

    def __init__(self) -> None:
        self.by_engine: dict[Any, Any] = {}
        self.ready: dict[torch.Size, Callable[[Tensor], Tensor]] = {}

    def __deepcopy__(self, memo: dict) -> Packed:
        return Packed()

    def __reduce__(self) -> tuple:
        return Packed, ()


@functools.cache
def available_engines() -> tuple[str, ...]:
    """Return the engines of this torch build: some of onednn, fbgemm, and always reference."""
    found: list[str] = []
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise"):
        found.append("onednn")
    if "fbgemm" in torch.backends.quantized.supported_engines:
        found.append("fbgemm")
    return (*found, "reference")


@functools.cache
def _settle() -> None:
    """Trigger, and swallow, torch's once-only notice on its quantized tensor types.

    We use them for nothing but reaching two kernels: quantizing, and fbgemm's product.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


def _as_bytes(q: Tensor) -> Tensor:
    """Return the codes of torch's quantized tensor ``q`` as uint8; large ones share its memory."""
    if q.numel() <= SMALL:  # a copy is one call
        return q.int_repr()
    out = torch.empty(0, dtype=torch.uint8)
    return out.set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


def _as_quint8(x: Tensor, codes: Codes) -> Tensor:
    """Return codes ``x`` as torch's quantized tensor, in the same memory."""
    _settle()
    scale, zero_point = codes.scale, codes.zero_point
    empty = torch._empty_affine_quantized  # pyright: ignore[reportPrivateImportUsage]
    q = empty([0], scale=scale, zero_point=zero_point, dtype=torch.quint8)
    return q.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def quantize(x: Tensor, codes: Codes) -> Tensor:
    """Return the codes of ``x``: u8, same shape; beyond the range they saturate."""
    _settle()
    x = x if x.dtype == torch.float32 else x.float()
    out = _as_bytes(torch.quantize_per_tensor(x, codes.scale, codes.zero_point, torch.quint8))
    return out if codes.quant_max == 255 else out.clamp_(max=codes.quant_max)


def dequantize(x: Tensor, codes: Codes) -> Tensor:
    """Return the values that ``x`` stands for: f32, same shape."""
    return torch.dequantize(_as_quint8(x, codes))


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return ``table[code]`` for each code; any function of one byte is such a table.

    Args:
        table: u8[256] or f32[256].
        codes: u8 of any shape; the result has its shape and memory format.
    """
    order = None
    if not codes.is_contiguous():
        order = sorted(range(codes.dim()), key=lambda d: -codes.stride(d))
        codes = codes.permute(order).contiguous()
    flat = codes.reshape(-1)
    if flat.numel() <= 4 * CHUNK:
        out = torch.index_select(table, 0, flat.int())
    else:
        out = torch.empty(flat.shape, dtype=table.dtype)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].int()
            torch.index_select(table, 0, part, out=out[start : start + CHUNK])
    out = out.view(codes.shape)
    if order is None:
        return out
    return out.permute([order.index(d) for d in range(len(order))])


def weight_codes(weight: Tensor, scale: Tensor, quant_min: int, quant_max: int) -> Tensor:
    """Return i8 codes of a weight with one scale for each row (dimension 0).

    Works on some rows at a time, so that the temporaries are a megabyte each.
    """
    out = torch.empty(weight.shape, dtype=torch.int8)
    rows = max(1, (1 << 18) // max(1, weight[0].numel()))
    shape = [-1] + [1] * (weight.dim() - 1)
    for start in range(0, weight.shape[0], rows):
        some = slice(start, start + rows)
        scaled = weight[some].detach() * (1 / scale[some]).reshape(shape)
        out[some] = scaled.round_().clamp_(quant_min, quant_max).to(torch.int8)
    return out


# ---------------------------------------------------------------------------------- linear layers


def pack_linear(engine: str, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """Return what ``engine`` wants to be given for a weight i8[N, K] with scales f32[N]."""
    if engine == "onednn":
        zero_point = torch.zeros(weight.shape[0], dtype=torch.int32)
        return torch.ops.onednn.qlinear_prepack.default(weight, None), zero_point
    if engine == "fbgemm":
        _settle()
        zero_point = torch.zeros(weight.shape[0], dtype=torch.int64)
        q = torch._empty_per_channel_affine_quantized(  # pyright: ignore[reportPrivateImportUsage]
            [0, 0], scales=scale.double(), zero_points=zero_point, axis=0, dtype=torch.qint8
        )
        # The same memory: a copy would be the largest temporary of a conversion.
        q.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
        with _quantized_engine("fbgemm"):
            return torch.ops.quantized.linear_prepack(q, bias)
    return None


class _quantized_engine:
    """Make torch's global choice of engine for the time of a block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = torch.backends.quantized.engine
        torch.backends.quantized.engine = self.name

    def __exit__(self, *error: object) -> None:
        torch.backends.quantized.engine = self.before


def bind_linear(engine: str, layer: Any, packed: Any, reads_float: bool) -> Callable[..., Tensor]:
    """Return a function of one input that runs ``layer`` on ``engine``.

    All that the layer knows is looked up now. A call for one row takes as long as reading the
    weights, and then every line of Python counts, the more so as weights drive it from the cache.

    Args:
        engine: one of ``available_engines``.
        layer: an Int8Linear with codes u8[M, K] in, or f32[M, K] with ``reads_float``.
        packed: what ``pack_linear`` returned for ``engine``.
        reads_float: whether the input is float.
    """
    source, out = layer.input, layer.output
    inside = engine == "fbgemm" and reads_float and source.quant_max == 255
    if engine == "fbgemm" and out is None:
        return _bind_fbgemm_float(layer, packed)
    if engine == "fbgemm":
        run = _bind_fbgemm(layer, packed, inside)
    elif engine == "onednn":
        run = _bind_onednn(layer, packed)
    else:
        run = functools.partial(linear_reference, layer=layer)
    before = reads_float and not inside
    top = 255 if out is None else out.quant_max
    if not before and top == 255:
        return run

    def steps(x: Tensor) -> Tensor:
        y = run(quantize(x, source) if before else x)
        return y if top == 255 else y.clamp_(max=top)  # no kernel knows of fewer than 8 bits

    return steps


def _bind_onednn(layer: Any, packed: Any) -> Callable[[Tensor], Tensor]:
    """Codes u8[M, K] -> u8[M, N], or f32[M, N] when the layer emits float."""
    run, (weight, weight_zero_point) = torch.ops.onednn.qlinear_pointwise.default, packed
    scale, zero_point, _ = layer.input
    weight_scale, bias, relu = layer.weight_scale, layer.bias, "relu" if layer.relu else "none"
    out_scale, out_zero_point, _ = layer.output or Codes(1.0, 0)
    dtype = torch.float32 if layer.output is None else torch.uint8

    def call(x: Tensor) -> Tensor:
        return run(
            x,
            scale,
            zero_point,
            weight,
            weight_scale,
            weight_zero_point,
            bias,
            out_scale,
            out_zero_point,
            dtype,
            relu,
            [],
            "",
        )

    return call


def _bind_fbgemm(layer: Any, packed: Any, reads_float: bool) -> Callable[[Tensor], Tensor]:
    """Codes u8[M, K], or float f32[M, K] that it quantizes -> u8[M, N]."""
    ops = torch.ops.quantized
    run = (ops.linear_relu if layer.relu else ops.linear).default
    source, (scale, zero_point, _) = layer.input, layer.input
    out_scale, out_zero_point, _ = layer.output
    if reads_float:
        quantized, quint8 = torch.quantize_per_tensor, torch.quint8

        def call(x: Tensor) -> Tensor:
            x = x if x.dtype == torch.float32 else x.float()
            q = quantized(x, scale, zero_point, quint8)
            return _as_bytes(run(q, packed, out_scale, out_zero_point))

    else:

        def call(x: Tensor) -> Tensor:
            return _as_bytes(run(_as_quint8(x, source), packed, out_scale, out_zero_point))

    return call


def _bind_fbgemm_float(layer: Any, packed: Any) -> Callable[[Tensor], Tensor]:
    """Float f32[M, K] -> f32[M, N]: one kernel quantizes, multiplies and scales."""
    ops = torch.ops.quantized
    run = (
        ops.linear_with_input_q_dq_qweight_dq_relu_output_fp32
        if layer.relu
        else ops.linear_with_input_q_dq_qweight_dq_output_fp32
    ).default
    scale, zero_point, _ = layer.input
    return lambda x: run(x if x.dtype == torch.float32 else x.float(), scale, zero_point, packed)


def linear_reference(x: Tensor, layer: Any) -> Tensor:
    """Return ``layer`` of codes u8[M, K]: integer products and sums, one rounding in float64."""
    acc = (x.long() - layer.input.zero_point) @ layer.weight.long().t()  # (M, N)
    return _finish_reference(acc, layer, None)


def _finish_reference(acc: Tensor, layer: Any, other: Tensor | None) -> Tensor:
    """Scale integer sums (channels in dimension 1), add bias and residual, make codes."""
    shape = [1, -1] + [1] * (acc.dim() - 2)
    y = acc.double() * (layer.weight_scale.double() * layer.input.scale).reshape(shape)
    if layer.bias is not None:
        y += layer.bias.double().reshape(shape)
    if other is not None:
        y += (other.double() - layer.other.zero_point) * layer.other.scale
    if layer.relu:
        y = y.clamp(min=0)
    if layer.output is None:
        return y.float()
    codes = (y / layer.output.scale).round() + layer.output.zero_point
    return codes.clamp(0, layer.output.quant_max).to(torch.uint8)


# ----------------------------------------------------------------------------------- convolutions


def pack_conv(layer: Any, shape: torch.Size) -> Any:
    """Return what oneDNN wants to be given for a convolution's weight i8[N, C / groups, ...].

    The best layout depends on the size of the images, not on their number. In another one the
    result is the same, but every call moves the weights, which can take 40 times as long.

    Args:
        layer: an Int8Conv.
        shape: of the codes u8[B, C, ...] that it will be called with.
    """
    packed = torch.ops.onednn.qconv_prepack.default(
        layer.weight,
        layer.weight_scale,
        layer.input.scale,
        layer.input.zero_point,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
        [1, *shape[1:]],
    )
    return packed, torch.zeros(layer.weight.shape[0], dtype=torch.int32)


def conv_onednn(x: Tensor, layer: Any, packed: Any, other: Tensor | None) -> Tensor:
    """Return ``layer`` of codes u8[N, C, ...], plus ``other`` when it has a fused addition."""
    weight, zero_point = packed
    out = layer.output
    head = (x, layer.input.scale, layer.input.zero_point, weight, layer.weight_scale, zero_point)
    geometry = (layer.stride, layer.padding, layer.dilation, layer.groups)
    target = (
        1.0 if out is None else out.scale,
        0 if out is None else out.zero_point,
        torch.float32 if out is None else torch.uint8,
    )
    after = "relu" if layer.relu else "none"
    if x.dim() == 5:  # oneDNN's 3d kernel has no fused ReLU: hold the codes above that of 0
        run = torch.ops.onednn.qconv3d_pointwise.default
        y = run(*head, layer.bias, *geometry, *target, "none", [], "")
        return y.clamp_(min=target[1]) if layer.relu else y
    if other is None:
        ops = torch.ops.onednn
        run = (ops.qconv1d_pointwise if x.dim() == 3 else ops.qconv2d_pointwise).default
        return run(*head, layer.bias, *geometry, *target, after, [], "")
    scale, zero_point_of_other = layer.other.scale, layer.other.zero_point
    if out is None:  # the kernel adds what it writes: float to float
        total = dequantize(other, layer.other).contiguous(memory_format=torch.channels_last)
        scale, zero_point_of_other = 1.0, 0
    else:
        total = other.clone(memory_format=torch.channels_last)  # it may be written into
    return torch.ops.onednn.qconv2d_pointwise.binary(
        *head,
        total,
        layer.bias,
        *geometry,
        *target,
        scale,
        zero_point_of_other,
        "sum",
        1.0,
        after,
        [],
        "",
    )


def conv_reference(x: Tensor, layer: Any, other: Tensor | None) -> Tensor:
    """Return what oneDNN should.

    The sums are integers below 2**53 held in float64, where they are exact: torch has no integer
    convolution.
    """
    run = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    shifted = x.double() - layer.input.zero_point
    acc = run(
        shifted,
        layer.weight.double(),
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
    )
    return _finish_reference(acc, layer, other)


# -------------------------------------------------------------------------------------- additions


def add_codes(a: Tensor, b: Tensor, layer: Any) -> Tensor:
    """Return the codes of the sum of two tensors of codes of one shape.

    This is torch's own kernel: oneDNN's ``qadd`` of torch 2.13 is wrong for uint8 (its result is
    that of signed bytes).
    """
    left, right, out = layer.left, layer.right, layer.output
    run = torch.ops.quantized.add_relu if layer.relu else torch.ops.quantized.add
    total = run.default(_as_quint8(a, left), _as_quint8(b, right), out.scale, out.zero_point)
    return _as_bytes(total)


def add_reference(a: Tensor, b: Tensor, layer: Any) -> Tensor:
    """Return what ``add_codes`` should, for any two shapes that broadcast."""
    y = (a.double() - layer.left.zero_point) * layer.left.scale
    y = y + (b.double() - layer.right.zero_point) * layer.right.scale
    y = y.clamp(min=0) if layer.relu else y
    codes = (y / layer.output.scale).round() + layer.output.zero_point
    return codes.clamp(0, layer.output.quant_max).to(torch.uint8)


def max_pool2d(x: Tensor, codes: Codes, options: dict[str, Any]) -> Tensor:
    """Return the codes of the largest values: order is kept by codes, so no scale is needed.

    Torch's max_pool2d of plain bytes counts positions in bytes too, and refuses images of more
    than 255; its quantized one does not.
    """
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return _as_bytes(F.max_pool2d(_as_quint8(x, codes), **options))


# ------------------------------------------------------------------------- the choice of an engine


@functools.cache
def choose_engine(few: bool) -> str:
    """Return the fastest engine for linear layers on this machine, measured once a process.

    Args:
        few: for at most ``FEW_ROWS`` rows (reading weights decides) or for many (arithmetic does).
    """
    engines = available_engines()[:-1]
    if len(engines) < 2:
        return (*engines, "reference")[0]
    from fxlab.passes.quantize.modules import Int8Linear

    # For few rows the weight must not fit the cache of the core, or reading it costs nothing.
    width, out, rows = (2048, 4096, 1) if few else (2048, 512, 64)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (out, width), dtype=torch.int8, generator=generator)
    x = torch.randn(rows, width, generator=generator)
    layer = Int8Linear(weight, torch.full((out,), 1e-3), None, Codes(0.02, 128), None)
    layer.reads_float = True
    best = _race(layer, engines, x, 12)
    if few:
        # Read from memory alone, oneDNN ties with it; on a busy core it fell to half the speed.
        best["fbgemm"] *= 0.75
    return min(best, key=lambda engine: best[engine])


@functools.cache
def _measured() -> dict[tuple, str]:
    """Return the engines found by ``engine_of``, by what decides."""
    return {}


def engine_of(layer: Any, rows: int, measure: bool = True) -> str:
    """Return the fastest engine for ``layer`` and an input of so many rows.

    A small layer's time is that of calling it, which is the least for fbgemm. For few rows the
    engine is the machine's. Else it depends on the shape: one library's time grows with the width
    of the input, another's with the rows and the output. So the layer itself is run on each, once
    a process for layers of one shape; the loser's weights are dropped again.

    Args:
        layer: an Int8Linear whose engine is "auto".
        rows: of its input.
        measure: whether to run the layer; else the answer is the machine's for many rows, too.
    """
    fused = layer.reads_float and layer.input.quant_max == 255
    engines = [engine for engine in available_engines()[:-1] if engine != "fbgemm"]
    if "fbgemm" in available_engines() and (fused or layer.output is not None):
        engines.insert(0, "fbgemm")  # it goes from codes to codes, float to float
    if len(engines) < 2 or layer.weight.numel() <= SMALL:
        return (*engines, "reference")[0]
    if rows <= FEW_ROWS or not measure:
        return choose_engine(rows <= FEW_ROWS)
    shape, some = tuple(layer.weight.shape), rows <= SOME_ROWS
    key = (shape, some, layer.reads_float, layer.output is None, torch.get_num_threads())
    if key not in _measured():
        found = layer.packed.by_engine
        made = [engine for engine in engines if engine not in found]
        dtype = torch.float32 if layer.reads_float else torch.uint8
        typical = SOME_ROWS if some else 4 * SOME_ROWS  # the same, whichever call comes first
        best = _race(layer, engines, torch.zeros(typical, shape[1], dtype=dtype), 6)
        winner = _measured()[key] = min(best, key=lambda engine: best[engine])
        for engine in made:
            if engine != winner:
                found.pop(engine, None)
    return _measured()[key]


def _race(layer: Any, engines: Sequence[str], x: Tensor, attempts: int) -> dict[str, float]:
    """Return the least seconds that ``layer`` took for ``x`` on each engine, run in turns.

    They are seconds of this thread on a CPU: on a busy machine, waiting for one would decide.
    """
    runs = {engine: layer.bind(engine) for engine in engines}
    best = dict.fromkeys(engines, 9e9)
    for attempt in range(attempts):
        for engine, run in runs.items():
            start = time.thread_time()
            run(x)
            if attempt:  # the first warms up
                best[engine] = min(best[engine], time.thread_time() - start)
    return best
