"""The convolutions that `optimize_for_inference` chooses from, for float32 on a CPU.

* `PackedConv2d`: oneDNN's kernel with weights in its blocked layout.
* `WinogradConv2d`: a 3 x 3 filter with a quarter of the multiplications. It is Winograd's minimal
  filtering, as Lavin and Gray use it for networks ("Fast Algorithms for Convolutional Neural
  Networks", CVPR 2016). A filter over a tile is a product of polynomials, known from their values
  at the points 0, 1, -1, 2, -2 and infinity: in each direction six multiplications give what twelve
  gave, in two directions 36 what 144 gave. Tile, filter and sums are moved between values and
  coefficients by small constant matrices; in between stands one matrix product over the channels
  for each point. The price is rounding: results are off by about 1e-5 of the largest value, where
  a direct convolution is by 1e-6.

Each takes and returns values with the channels last, adds a second tensor (optional), and ends with
a ReLU (optional). Their weights are no parameters: they are for inference only, ``state_dict`` is
empty, and there is no gradient.

What is no finite number comes out otherwise than in eager: oneDNN's fused ReLU makes 0 of NaN, and
Winograd's way makes NaN of infinity, in whole tiles, since it adds and subtracts all that a tile
reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxlab.core.errors import FxlabError, call_site
from fxlab.passes.shape_prop import DTYPE_TEXT, shape_text

__all__ = ["KernelError", "PackedConv2d", "WinogradConv2d"]

_TILE = 4
_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0)
_AT_ONE = 1 * (len(_POINTS) + 1) + 1
"""The place of the point (1, 1): what is added there is added to every output of its tile."""
_CHUNK = 1 << 14
"""Tiles times channels that are worked on at once: 36 floats for each, which a cache holds."""


def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float64 matrices for a tile (36, 36), a filter (36, 9) and a sum (16, 36)."""
    points = torch.tensor(_POINTS, dtype=torch.float64)
    inputs = len(_POINTS) + 1

    def values(width: int) -> torch.Tensor:
        """Coefficients of a polynomial -> its values at the points, and its highest at infinity."""
        rows = points[:, None] ** torch.arange(width, dtype=torch.float64)
        infinity = torch.zeros(1, width, dtype=torch.float64)
        infinity[0, -1] = 1
        return torch.cat([rows, infinity])

    # A product of polynomials is the transpose of a filter (the sums over its places change
    # roles): values of the filter, values read backwards for the sums, their inverse for a tile.
    tile, filt, total = torch.linalg.inv(values(inputs)).T, values(3), values(_TILE).T
    return tuple(torch.kron(m, m) for m in (tile, filt, total))  # pyright: ignore[reportReturnType]


class KernelError(FxlabError, RuntimeError):
    """A kernel was given what it was not packed for, or was asked for a gradient."""


def _callers() -> list[tuple[str, int, str]]:
    return [frame for frame in call_site(8, skip_torch=True) if frame[0] != __file__][:4]


@functools.cache
def _give_shape_rules() -> None:
    """Tell fake tensors (`cost`, `shape_prop`, `live_ranges`) what torch has no rule for."""
    rules: dict[str, Callable[..., torch.Tensor]] = {
        "mkldnn::_convolution_pointwise.binary": lambda x, other, *_: torch.empty_like(other),
        "mkldnn::_convolution_pointwise_.binary": lambda other, *_: other,
    }
    for name, rule in rules.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            torch.library.register_fake(name, rule)


class _WithoutGradient(torch.autograd.Function):
    """A call where gradients are recorded: oneDNN's operators would leave theirs out silently."""

    @staticmethod
    def forward(
        ctx: Any, kernel: _Kernel, x: torch.Tensor, other: torch.Tensor | None, relu: bool
    ) -> torch.Tensor:
        return kernel._compute(x, other, relu, inplace=False)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise KernelError(
            "the kernels of optimize_for_inference have no gradient",
            where=_callers(),
            hint="take the gradient of the model that was optimized, or of a trace of it",
        )


class _Kernel(nn.Module):
    """A convolution, an addition (optional) and a ReLU (optional).

    Attributes:
        add: Whether ``forward`` gets a second tensor that is added before the ReLU.
        relu: Whether a ReLU follows.
        inplace: Whether the sum is written into the second tensor, which nobody reads any more.
        dtype: Of weights and values.
        channels: Of the input and of the result.
        padding: Of height and width.
        stride: Of height and width.
        least: Height and width of the smallest image that gives a pixel.
        weight: In the kernel's own layout.
        bias: f32[K], or None.
    """

    weight: torch.Tensor

    def __init__(self, conv: nn.Conv2d, add: bool, relu: bool) -> None:
        super().__init__()
        self.add, self.relu, self.inplace = add, relu, False
        self.dtype, self.channels = conv.weight.dtype, (conv.in_channels, conv.out_channels)
        self.padding, self.stride = tuple(map(int, conv.padding)), conv.stride
        filters = zip(conv.kernel_size, conv.dilation, self.padding, strict=True)
        self.least = tuple(dilation * (taps - 1) + 1 - 2 * pad for taps, dilation, pad in filters)
        self.bias = None if conv.bias is None else conv.bias.detach()

    def _pack(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Return relu(conv(x) + other), channels last; f32[N, C, H, W] -> f32[N, K, H', W'].

        Under autocast it computes in float32 all the same.

        Raises:
            KernelError: ``x`` is no batch of images that this kernel is for.
            TypeError: The second tensor is missing.
        """
        if torch.is_autocast_enabled("cpu"):
            wide = [t if t is None else t.to(self.dtype) for t in (x, other)]
            with torch.autocast("cpu", enabled=False):
                return self.forward(*wide)  # pyright: ignore[reportArgumentType]
        shape = self._result_shape(x)
        if not self.add:
            return self._call(x, None, self.relu)
        if other is None:
            raise TypeError("this kernel adds a second tensor, which was not given")
        if other.shape == shape and other.dtype == self.dtype:
            other = other.contiguous(memory_format=torch.channels_last)
            return self._call(x, other, self.relu)
        # Of one shape in the example; now one is broadcast, as a batch of one beside a larger one.
        y = self._call(x, None, False) + other
        return y.relu_() if self.relu else y

    def _call(self, x: torch.Tensor, other: torch.Tensor | None, relu: bool) -> torch.Tensor:
        recorded = x.requires_grad or (other is not None and other.requires_grad)
        if recorded and torch.is_grad_enabled():
            return _WithoutGradient.apply(self, x, other, relu)  # pyright: ignore[reportReturnType]
        return self._compute(x, other, relu, self.inplace)

    def _compute(
        self, x: torch.Tensor, other: torch.Tensor | None, relu: bool, inplace: bool
    ) -> torch.Tensor:
        """Return relu(conv(x) + other); ``other`` has the result's shape and the channels last."""
        raise NotImplementedError

    def _result_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return (N, K, H', W'), or raise KernelError."""
        sizes, (inputs, outputs) = x.shape, self.channels
        known = x.dtype == self.dtype and x.device.type == "cpu"
        if not known or len(sizes) != 4 or sizes[1] != inputs:
            raise self._refusal(x)
        (high, wide), (down, across) = self.least, self.stride
        height, width = (sizes[2] - high) // down + 1, (sizes[3] - wide) // across + 1
        if height < 1 or width < 1:
            raise self._refusal(x)
        return sizes[0], outputs, height, width

    def _refusal(self, x: torch.Tensor) -> KernelError:
        high, wide = (max(size, 1) for size in self.least)
        images = f"{DTYPE_TEXT[self.dtype]}[N, {self.channels[0]}, H, W]"
        return KernelError(
            f"a kernel of optimize_for_inference was given {shape_text(x)} on {x.device}",
            where=_callers(),
            expected=f"{images} on cpu, of at least {high} x {wide} pixels",
            hint="convert, move or change the model, then call optimize_for_inference again",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the weight in torch's own layout, so that it copies and pickles."""
        return {**self.__dict__, "weight": self.weight.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and pack the weight again."""
        super().__setstate__(state)
        self._pack(self.__dict__.pop("weight"))

    def extra_repr(self) -> str:
        """Say what is fused and where the sum goes."""
        return f"add={self.add}, relu={self.relu}, inplace={self.inplace}"


class PackedConv2d(_Kernel):
    """A Conv2d as oneDNN's kernel, its weight in the blocked layout chosen for this input shape.

    Other shapes work too.

    Args:
        conv: The convolution: float32, on a CPU, padded with zeros.
        input_shape: The shape (N, C, H, W) to choose the layout for.
        add: Whether ``forward`` gets a second tensor that is added before the ReLU.
        relu: Whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, input_shape: Sequence[int], add: bool, relu: bool) -> None:
        super().__init__(conv, add, relu)
        self.geometry = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        self.input_shape = list(input_shape)
        self._pack(conv.weight.detach())

    def _pack(self, weight: torch.Tensor) -> None:
        _give_shape_rules()
        pack = torch.ops.mkldnn._reorder_convolution_weight
        self.weight = pack(weight.contiguous(), *self.geometry, self.input_shape)

    def _compute(
        self, x: torch.Tensor, other: torch.Tensor | None, relu: bool, inplace: bool
    ) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        weights = (self.weight, self.bias, *self.geometry)
        if other is None:
            last = ("relu" if relu else "none", [], "")
            return torch.ops.mkldnn._convolution_pointwise(x, *weights, *last)
        last = ("add", 1.0, "relu" if relu else None, [], None)
        if inplace:
            return torch.ops.mkldnn._convolution_pointwise_.binary(other, x, *weights, *last)
        return torch.ops.mkldnn._convolution_pointwise.binary(x, other, *weights, *last)


class WinogradConv2d(_Kernel):
    """A 3x3 Conv2d with stride 1 by Winograd's filtering.

    The weight is kept as its values at the 36 points, four times the floats of the filter.

    Args:
        conv: The convolution: 3x3, stride 1, dilation 1, one group, padded with zeros.
        add: Whether ``forward`` gets a second tensor that is added before the ReLU.
        relu: Whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, add: bool, relu: bool) -> None:
        super().__init__(conv, add, relu)
        tile, filt, total = _matrices()
        taps = conv.weight.detach().flatten(2).permute(2, 1, 0)  # [K, C, 3, 3] -> [9, C, K]
        self.tile, self.total = tile.to(taps), total.to(taps)
        self._pack((filt.to(taps) @ taps.flatten(1)).view(-1, *taps.shape[1:]))  # [36, C, K]

    @staticmethod
    def fits(conv: nn.Conv2d) -> bool:
        """Say whether ``conv`` has the form that this kernel computes."""
        form = (conv.kernel_size, conv.stride, conv.dilation, conv.groups)
        return form == ((3, 3), (1, 1), (1, 1), 1) and not isinstance(conv.padding, str)

    def _compute(
        self, x: torch.Tensor, other: torch.Tensor | None, relu: bool, inplace: bool
    ) -> torch.Tensor:
        n, c, h, w = x.shape
        _, k, height, width = self._result_shape(x)
        top, left = self.padding
        down, across = -(-height // _TILE), -(-width // _TILE)  # tiles
        padded = x.new_zeros(n, down * _TILE + 2, across * _TILE + 2, c)
        padded[:, top : top + h, left : left + w] = x.permute(0, 2, 3, 1)
        image, row, column, _ = padded.stride()
        strides = (row, column, image, _TILE * row, _TILE * column, 1)
        out = x.new_empty(n, down, _TILE, across, _TILE, k)
        for images, rows in self._chunks(n, down, across * c):
            size = (6, 6, images.stop - images.start, rows.stop - rows.start, across, c)
            start = images.start * image + rows.start * _TILE * row
            got = self._filter(padded.as_strided(size, strides, start))
            got = got.view(_TILE, _TILE, *size[2:5], k)
            out[images, rows].copy_(got.permute(2, 3, 0, 4, 1, 5))
        y = out.view(n, down * _TILE, across * _TILE, k)[:, :height, :width].permute(0, 3, 1, 2)
        y = y.contiguous(memory_format=torch.channels_last)
        if other is not None:
            y = other.add_(y) if inplace else y.add_(other)
        return y.relu_() if relu else y

    def _filter(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each tile: f32[6, 6, ..., C] -> f32[16, tiles * K].

        No value has a name for longer than it is needed: the next one takes its place in the cache.
        """
        values = self.tile @ tiles.reshape(36, -1)
        sums = torch.bmm(values.view(36, -1, tiles.shape[-1]), self.weight)
        del values
        if self.bias is not None:
            sums[_AT_ONE] += self.bias
        return self.total @ sums.flatten(1)

    @staticmethod
    def _chunks(images: int, rows: int, floats: int) -> Iterator[tuple[slice, slice]]:
        """Split images and rows of tiles, of which one has so many floats a point."""
        if isinstance(images * rows * floats, torch.SymInt):
            yield slice(0, images), slice(0, rows)  # nothing is computed but shapes
            return
        high = max(1, min(rows, _CHUNK // max(1, floats)))
        many = max(1, _CHUNK // max(1, floats * rows)) if high == rows else 1
        for i in range(0, images, many):
            for j in range(0, rows, high):
                yield slice(i, min(i + many, images)), slice(j, min(j + high, rows))


KERNELS = (PackedConv2d, WinogradConv2d)
