"""The operators that a converted program calls: modules that read and write integer codes.

These are what the paper calls swapping in quantized operators with scale and zero point embedded
(section 6.2.1). Between them flow plain uint8 tensors. Each module keeps its weights as int8
buffers, so ``state_dict``, ``copy.deepcopy`` and pickle work as for any module; the packed forms
that the libraries want are made when first needed and never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from fxlab.passes.quantize import kernels
from fxlab.passes.quantize.kernels import Codes, Packed

__all__ = [
    "Quantize",
    "Dequantize",
    "Int8Linear",
    "Int8Conv",
    "Int8Add",
    "Int8MaxPool2d",
    "Int8Cat",
    "Int8Embedding",
    "Table",
]

SHAPES = 64
"""For so many shapes of the input a layer remembers what to run."""


class CodesModule(nn.Module):
    """A module whose scales and zero points are part of its ``state_dict``.

    ``CODES`` names the attributes that are a Codes, or None for float.
    """

    CODES: tuple[str, ...] = ()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the scales and zero points as plain numbers."""
        values = {name: getattr(self, name) for name in self.CODES}
        return {name: None if c is None else list(c) for name, c in values.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over scales and zero points; what was derived is made anew."""
        for name, codes in state.items():
            setattr(self, name, None if codes is None else Codes(*codes))
        if hasattr(self, "packed"):
            self.packed = Packed()

    def extra_repr(self) -> str:
        """Show what the codes mean."""
        return ", ".join(f"{name}={_text(getattr(self, name))}" for name in self.CODES)


def _text(codes: Codes | None) -> str:
    return "float" if codes is None else f"{codes.scale:.4g}*(code-{codes.zero_point})"


class Quantize(CodesModule):
    """f32[...] -> u8[...]: make codes; values beyond the range saturate."""

    CODES = ("output",)

    def __init__(self, output: Codes) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``."""
        return kernels.quantize(x, self.output)


class Dequantize(CodesModule):
    """u8[...] -> f32[...]: the values that codes stand for."""

    CODES = ("input",)

    def __init__(self, input: Codes) -> None:
        super().__init__()
        self.input = input

    def forward(self, codes: Tensor) -> Tensor:
        """Return the values of ``codes``."""
        return kernels.dequantize(codes, self.input)


class Table(CodesModule):
    """u8[...] -> u8[...] or f32[...]: any function of one element, as its 256 values.

    A code has 256 values, so has a function of it. Looking it up is exact: it gives the very
    number that computing it would, and costs the same for selu as for sigmoid.

    Args:
        name: the function's name, for printing.
        table: u8[256] or f32[256].
        input: what the codes read mean.
        output: what the codes written mean; None for float.
    """

    CODES = ("input", "output")
    table: Tensor

    def __init__(self, name: str, table: Tensor, input: Codes, output: Codes | None) -> None:
        super().__init__()
        self.name, self.input, self.output = name, input, output
        self.register_buffer("table", table)

    @classmethod
    def of(cls, name: str, function: Any, input: Codes, output: Codes | None) -> Table:
        """Return the table of ``function``, evaluated in float32 on the values of all codes."""
        with torch.no_grad():
            values = function(input.values())
        table = values if output is None else kernels.quantize(values, output)
        return cls(name, table, input, output)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the table's entry for each code."""
        return kernels.look_up(self.table, codes)

    def extra_repr(self) -> str:
        """Show the function and what the codes mean."""
        return f"{self.name}, {super().extra_repr()}"


class Int8Layer(CodesModule):
    """What linear layers and convolutions share: int8 weights with one scale an output channel.

    Args:
        weight: i8[N, ...].
        weight_scale: f32[N].
        bias: f32[N] or None.
        input: what the codes read mean.
        output: what the codes written mean; None to write float.
        relu: whether a ReLU is fused.
        engine: "auto" or the name of an engine.
    """

    CODES = ("input", "output")
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input: Codes,
        output: Codes | None,
        relu: bool = False,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.input, self.output, self.relu, self.engine = input, output, relu, engine
        self.packed = Packed()

    def dequantized_weight(self) -> Tensor:
        """Return the weight that the codes stand for: f32, the shape of the layer's weight."""
        shape = [-1] + [1] * (self.weight.dim() - 1)
        return self.weight.float() * self.weight_scale.reshape(shape)

    def clamp(self, out: Tensor) -> Tensor:
        """Hold codes of fewer than 8 bits to their range, which no kernel knows of."""
        if self.output is None or self.output.quant_max == 255:
            return out
        return out.clamp_(max=self.output.quant_max)

    def extra_repr(self) -> str:
        """Show the weight's shape and what the codes mean."""
        shape = "x".join(str(n) for n in self.weight.shape)
        return f"i8 {shape}, {super().extra_repr()}{', relu' if self.relu else ''}"


class Int8Linear(Int8Layer):
    """A linear layer of codes: u8[..., K] -> u8[..., N], or f32[..., N] when ``output`` is None.

    With ``reads_float`` it makes the codes of its input itself: f32[..., K] comes in.
    """

    reads_float = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of ``x``, on the engine that is fastest for so many rows."""
        run = self.packed.ready.get(x.shape)
        return run(x) if run is not None else self._first(x)

    def _first(self, x: Tensor) -> Tensor:
        """Return the layer of ``x``, and keep what to run for its shape."""
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        with no_dispatch():  # measuring and packing are no part of what somebody may be counting
            auto = self.engine == "auto"
            run = self.bind(kernels.engine_of(self, x.shape[0]) if auto else self.engine)
        ready = self.packed.ready
        if len(ready) >= SHAPES:
            ready.clear()
        ready[x.shape] = run
        return run(x)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and drop what was derived from its old value."""
        super().__setattr__(name, value)
        if name not in ("training", "packed") and "packed" in self.__dict__:
            self.packed = Packed() if name in self._buffers else self.packed
            self.packed.ready.clear()

    def pack(self, rows: int) -> None:
        """Make packed weights for a batch of ``rows`` rows now instead of at the first call.

        They are for the engine that is best on this machine in general. The first call may find
        that another is better for this layer, and make its own.
        """
        auto = self.engine == "auto"
        self.bind(kernels.engine_of(self, rows, measure=False) if auto else self.engine)

    def bind(self, engine: str, reads_float: bool | None = None) -> Callable[[Tensor], Tensor]:
        """Return the layer as a function of two-dimensional inputs, on a given engine.

        Args:
            engine: fbgemm, onednn or reference. Fbgemm goes from codes to codes and from float to
                float; for codes to float the next engine is taken.
            reads_float: whether float or codes come in; None for what the layer reads.
        """
        reads_float = self.reads_float if reads_float is None else reads_float
        fused = reads_float and self.input.quant_max == 255
        if engine == "fbgemm" and self.output is None and not fused:
            engine = next(e for e in kernels.available_engines() if e != engine)
        found = self.packed.by_engine
        packed = found.get(engine)
        if packed is None:
            packed = kernels.pack_linear(engine, self.weight, self.weight_scale, self.bias)
            found[engine] = packed
        return kernels.bind_linear(engine, self, packed, reads_float)

    def run(self, codes: Tensor, engine: str) -> Tensor:
        """Return the layer of codes u8[M, K] on a given engine."""
        return self.bind(engine, reads_float=False)(codes)

    def extra_repr(self) -> str:
        """Show the weight's shape, what the codes mean, and whether float comes in."""
        return super().extra_repr() + (", quantizes its input" if self.reads_float else "")


class Int8Conv(Int8Layer):
    """A convolution of codes over 1 to 3 dimensions, with an addition and a ReLU fused if asked.

    Args:
        weight, weight_scale, bias, input, output, relu, engine: as in Int8Layer.
        stride, padding, dilation: one number a dimension.
        groups: as in nn.Conv2d.
        other: what the codes of the second input mean, when an addition is fused.
    """

    CODES = ("input", "output", "other")

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input: Codes,
        output: Codes | None,
        relu: bool = False,
        engine: str = "auto",
        *,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int = 1,
        other: Codes | None = None,
    ) -> None:
        super().__init__(weight, weight_scale, bias, input, output, relu, engine)
        self.stride, self.padding, self.dilation = list(stride), list(padding), list(dilation)
        self.groups, self.other = groups, other

    def forward(self, codes: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the convolution of ``codes``, plus ``other``; channels last in memory."""
        engine = self.engine if self.engine != "auto" else kernels.available_engines()[0]
        unbatched = codes.dim() == self.weight.dim() - 1
        if unbatched:
            codes = codes.unsqueeze(0)
            other = None if other is None else other.unsqueeze(0)
        out = self.run(codes, "onednn" if engine == "fbgemm" else engine, other)
        return out.squeeze(0) if unbatched else out

    def run(self, codes: Tensor, engine: str, other: Tensor | None = None) -> Tensor:
        """Return the layer of u8[B, C, ...] on a given engine."""
        if engine != "onednn" or "onednn" not in kernels.available_engines():
            return kernels.conv_reference(codes, self, other)
        if codes.dim() == 4:
            codes = codes.contiguous(memory_format=torch.channels_last)
        return self.clamp(kernels.conv_onednn(codes, self, self._packed(codes.shape), other))

    def _packed(self, shape: torch.Size) -> Any:
        """Return the weights packed for images of this size; the last two sizes are kept."""
        found, size = self.packed.by_engine, shape[2:]
        packed = found.get(size)
        if packed is None:
            for old in list(found)[:-1]:
                found.pop(old, None)
            packed = found[size] = kernels.pack_conv(self, shape)
        return packed


class Int8Add(CodesModule):
    """The sum of two tensors of codes, as codes, with a ReLU fused if asked."""

    CODES = ("left", "right", "output")

    def __init__(self, left: Codes, right: Codes, output: Codes, relu: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.output, self.relu = left, right, output, relu

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the codes of the sum."""
        if a.shape != b.shape or a.stride() != b.stride() or self.output.quant_max != 255:
            return kernels.add_reference(a, b, self)
        return kernels.add_codes(a, b, self)


class Int8MaxPool2d(CodesModule):
    """Max pooling of codes, which keep their meaning.

    Args:
        input: what the codes mean.
        **options: kernel_size, stride, padding, dilation, ceil_mode of ``F.max_pool2d``.
    """

    CODES = ("input",)

    def __init__(self, input: Codes, **options: Any) -> None:
        super().__init__()
        self.input, self.options = input, options

    def forward(self, codes: Tensor) -> Tensor:
        """Return the pooled codes."""
        return kernels.max_pool2d(codes, self.input, self.options)

    def extra_repr(self) -> str:
        """Show the options."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class Int8Cat(CodesModule):
    """Concatenation of codes that mean different things: each is looked up in a table first.

    Args:
        inputs: what the codes of each tensor mean.
        output: what the codes written mean.
        dim: the dimension along which they are put together.
    """

    CODES = ("output",)

    def __init__(self, inputs: list[Codes], output: Codes, dim: int = 0) -> None:
        super().__init__()
        self.output, self.dim = output, dim
        self.scales = nn.ModuleList(
            nn.Identity() if codes == output else Table.of("rescale", lambda x: x, codes, output)
            for codes in inputs
        )

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """Return the tensors side by side, all in the codes of the output."""
        same = [scale(t) for scale, t in zip(self.scales, tensors, strict=True)]
        return torch.cat(same, self.dim)


class Int8Embedding(CodesModule):
    """An embedding with int8 rows, one scale a row: a quarter of the memory, float out.

    Args:
        weight: i8[V, D].
        weight_scale: f32[V].
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)

    def dequantized_weight(self) -> Tensor:
        """Return the table that the codes stand for: f32[V, D]."""
        return self.weight.float() * self.weight_scale[:, None]

    def forward(self, index: Tensor) -> Tensor:
        """Return f32[..., D]."""
        rows = F.embedding(index, self.weight).float()
        return rows * self.weight_scale[index].unsqueeze(-1)
