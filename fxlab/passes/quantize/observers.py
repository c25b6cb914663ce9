"""Which range of numbers does a tensor hold, and which scale and zero point follow from it?

The paper's first two phases (section 6.2.1): *prepare* puts observers into the graph, and
*calibrate* runs batches through them. An observer returns its input as it is and remembers
statistics; afterwards it answers with a scale and a zero point:

    code = clamp(round(value / scale) + zero_point, quant_min, quant_max)
    value ~ (code - zero_point) * scale

*Affine* codes use any zero point (activations, uint8 here); *symmetric* ones use zero point 0
(weights, int8). The range always includes 0, so that 0 (padding, the floor of a ReLU) is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxlab.core.errors import FxlabError

__all__ = [
    "QParams",
    "Observer",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "HistogramObserver",
    "PerChannelMinMaxObserver",
    "qparams_of_range",
]

SMALLEST_SCALE = 2.0**-100
"""A range narrower than this is that of a constant 0; it gets scale 1 and stays exact."""


@dataclass(frozen=True)
class QParams:
    """A scale and a zero point (one, or one a channel) and the integers they may map to.

    Args:
        scale: f32[] or f32[C], greater than 0.
        zero_point: i32[] or i32[C].
        quant_min: smallest code.
        quant_max: largest code.
        axis: the channel dimension, or None when there is one scale for the whole tensor.

    Example:
        >>> q = qparams_of_range(torch.tensor(-1.0), torch.tensor(1.55), 0, 255)
        >>> q.quantize(torch.tensor([-1.0, 0.0, 1.0, 9.0])).tolist()
        [0, 100, 200, 255]
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int
    axis: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """``torch.uint8`` when no code is negative, else ``torch.int8``."""
        return torch.uint8 if self.quant_min >= 0 else torch.int8

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value that has a code: f32[] or f32[C] each."""
        low = (self.quant_min - self.zero_point) * self.scale
        return low, (self.quant_max - self.zero_point) * self.scale

    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``, f32 of any shape (ties round to even, as the kernels do)."""
        scale, zero_point = self._along(x)
        codes = torch.round(x * (1 / scale)) + zero_point
        return codes.clamp(self.quant_min, self.quant_max).to(self.dtype)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the f32 values that ``codes`` stand for, in their shape."""
        scale, zero_point = self._along(codes)
        return (codes.float() - zero_point) * scale

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Return the representable value next to each of ``x``, f32 of any shape: no gradient."""
        return self.dequantize(self.quantize(x))

    def _along(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.axis is None:
            return self.scale, self.zero_point
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero_point.reshape(shape)


def qparams_of_range(
    low: Tensor,
    high: Tensor,
    quant_min: int,
    quant_max: int,
    *,
    symmetric: bool = False,
    axis: int | None = None,
) -> QParams:
    """Return the QParams whose codes cover ``[low, high]`` and 0.

    Args:
        low: f32[] or f32[C], smallest value.
        high: the same for the largest.
        quant_min: smallest code.
        quant_max: largest code.
        symmetric: zero point 0 (the middle of the codes when none is negative).
        axis: the channel dimension when there is one range a channel.

    A range that is 0 alone (a channel of zeros) gets scale 1: its code is the zero point, exactly.
    """
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if symmetric:
        middle = 0 if quant_min < 0 else (quant_min + quant_max + 1) // 2
        reach = min(quant_max - middle, middle - quant_min)
        scale = torch.maximum(-low, high) / reach
        zero_point = torch.full_like(scale, middle)
    else:
        scale = (high - low) / (quant_max - quant_min)
        safe = scale.clamp(min=SMALLEST_SCALE)
        zero_point = (quant_min - low / safe).round().clamp(quant_min, quant_max)
    scale = torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)
    return QParams(scale.float(), zero_point.int(), quant_min, quant_max, axis)


class Observer(nn.Module):
    """Passes its input on and remembers what it saw; ``qparams()`` is the answer.

    Subclasses write ``observe(x)``, which updates ``low`` and ``high``; a subclass may also choose
    a narrower range in ``range()``.

    Args:
        bits: how many bits a code has (2 to 8); fewer than 8 are simulated in 8-bit storage.
        symmetric: zero point 0.
        signed: codes from ``-2**(bits-1)``; otherwise from 0.
        axis: observe each channel of this dimension on its own.

    Raises:
        FxlabError: ``bits`` is not 2 to 8.

    Buffers: ``low``, ``high`` (f32[] or f32[C]), ``count`` (elements seen), ``broken`` (elements
    that were NaN or infinite), so calibration survives ``state_dict``.
    """

    low: Tensor
    high: Tensor
    count: Tensor
    broken: Tensor

    def __init__(
        self,
        bits: int = 8,
        symmetric: bool = False,
        signed: bool = False,
        axis: int | None = None,
    ) -> None:
        super().__init__()
        if not 2 <= bits <= 8:
            raise FxlabError(f"an observer of {bits} bits", expected="2 to 8 bits a code")
        self.bits, self.symmetric, self.signed, self.axis = bits, symmetric, signed, axis
        self.quant_min = -(2 ** (bits - 1)) if signed else 0
        self.quant_max = self.quant_min + 2**bits - 1
        if signed and symmetric:
            self.quant_min += 1  # -127..127: as far down as up
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("broken", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """Observe ``x``, of any shape and float dtype, and return it unchanged."""
        with torch.no_grad():
            seen = x.detach()
            self.count += seen.numel()
            if seen.numel():
                if bool(torch.isfinite(seen.sum())) or bool(torch.isfinite(seen).all()):
                    self.observe(seen.float())
                else:
                    self.broken += int((~torch.isfinite(seen)).sum())
        return x

    def observe(self, x: Tensor) -> None:
        """Take ``x``, a batch of finite float32 values of any shape, into the statistics."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value that codes should reach: f32[] or f32[C]."""
        return self.low, self.high

    def problem(self) -> str | None:
        """Return why there is no answer yet, or None when there is one."""
        if int(self.broken):
            return f"it saw {int(self.broken)} values that are NaN or infinite"
        if not int(self.count):
            return "it saw no data"
        return None

    @property
    def constant(self) -> bool:
        """Whether every value seen was the same."""
        return bool(int(self.count)) and torch.equal(self.low, self.high)

    def qparams(self) -> QParams:
        """Return scale and zero point.

        Raises:
            FxlabError: it saw nothing, or something that is no number.
        """
        problem = self.problem()
        if problem:
            raise FxlabError(
                f"this observer has no range: {problem}",
                expected="at least one batch of finite numbers",
                hint="call prepared(batch) with a few typical batches before convert(prepared)",
            )
        low, high = self.range()
        return qparams_of_range(
            low,
            high,
            self.quant_min,
            self.quant_max,
            symmetric=self.symmetric,
            axis=self.axis,
        )

    def extra_repr(self) -> str:
        """Show the range seen so far."""
        kind = f"{self.bits} bits, {'symmetric' if self.symmetric else 'affine'}"
        if not int(self.count):
            return f"{kind}, nothing seen"
        return f"{kind}, [{float(self.low.min()):.4g}, {float(self.high.max()):.4g}]"

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for name in ("low", "high"):  # one value a channel has a shape only after the first batch
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, torch.empty_like(state_dict[f"{prefix}{name}"]))
        super()._load_from_state_dict(state_dict, prefix, *args)


class MinMaxObserver(Observer):
    """The smallest and the largest value of all batches: one outlier stretches the range.

    Example:
        >>> observer = MinMaxObserver()
        >>> _ = observer(torch.tensor([-1.0, 0.5])), observer(torch.tensor([1.55]))
        >>> round(float(observer.qparams().scale), 4), int(observer.qparams().zero_point)
        (0.01, 100)
    """

    def observe(self, x: Tensor) -> None:
        """Widen the range to hold ``x``, float32 of any shape."""
        low, high = self.extremes(x)
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extremes of ``x``, float32 of any shape: f32[], or f32[C] with an axis."""
        if self.axis is None:
            low, high = torch.aminmax(x)
            return low, high
        return torch.aminmax(x.movedim(self.axis, 0).flatten(1), dim=1)


class PerChannelMinMaxObserver(MinMaxObserver):
    """The extremes of each channel: what weights want, whose channels differ widely.

    Args:
        bits, symmetric, signed, axis: as in Observer.
    """

    def __init__(self, bits: int = 8, symmetric: bool = True, signed: bool = True, axis: int = 0):
        super().__init__(bits=bits, symmetric=symmetric, signed=signed, axis=axis)


class MovingAverageMinMaxObserver(MinMaxObserver):
    """A running mean of each batch's extremes: for training, where ranges drift.

    Args:
        averaging: share of the newest batch in the mean, above 0 and at most 1.
        bits, symmetric, signed, axis: as in Observer.
    """

    def __init__(
        self,
        averaging: float = 0.01,
        bits: int = 8,
        symmetric: bool = False,
        signed: bool = False,
        axis: int | None = None,
    ) -> None:
        super().__init__(bits=bits, symmetric=symmetric, signed=signed, axis=axis)
        self.averaging = averaging

    def observe(self, x: Tensor) -> None:
        """Move the range a little to that of ``x``, float32 of any shape; the first sets it."""
        low, high = self.extremes(x)
        first = bool(torch.isinf(self.low).all())
        self.low = low if first else self.low + self.averaging * (low - self.low)
        self.high = high if first else self.high + self.averaging * (high - self.high)


class HistogramObserver(MinMaxObserver):
    """A histogram of all values, and the cut of its tails that costs the least squared error.

    The bins cover ``[-reach, reach]`` with ``reach`` a power of two. A value beyond doubles it and
    adds neighbouring bins together, so counts stay exact whatever the order of the batches.

    Args:
        bins: how many; a power of two.
        steps: how many cuts are tried at each end.
        bits, symmetric, signed: as in Observer.

    Buffers: ``counts`` (f64[bins]), ``reach`` (f64[]), ``zeros`` (how many values were exactly 0,
    as after a ReLU: those have no error at any scale).
    """

    counts: Tensor
    reach: Tensor
    zeros: Tensor

    def __init__(
        self,
        bins: int = 4096,
        steps: int = 64,
        bits: int = 8,
        symmetric: bool = False,
        signed: bool = False,
    ) -> None:
        super().__init__(bits=bits, symmetric=symmetric, signed=signed)
        self.bins, self.steps = bins, steps
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.float64))
        self.register_buffer("reach", torch.tensor(2.0**-60, dtype=torch.float64))
        self.register_buffer("zeros", torch.tensor(0))

    def observe(self, x: Tensor) -> None:
        """Add ``x``, float32 of any shape, to the histogram."""
        super().observe(x)
        furthest = max(-float(self.low), float(self.high))
        while float(self.reach) < furthest:
            self._double()
        reach = float(self.reach)
        self.counts += torch.histc(x, self.bins, -reach, reach).double()
        self.zeros += x.numel() - torch.count_nonzero(x)

    def _double(self) -> None:
        quarter = self.bins // 4
        pairs = self.counts.reshape(-1, 2).sum(1)
        self.counts = torch.zeros_like(self.counts)
        self.counts[quarter : self.bins - quarter] = pairs
        self.reach = self.reach * 2

    def centers(self) -> Tensor:
        """Return the middle of each bin: f64[bins]."""
        width = 2 * float(self.reach) / self.bins
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) * width - float(self.reach)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the cut with the least expected squared error, two f32[].

        Inside, rounding to steps of width d costs d*d/12 a value (Bennett 1948); a value x beyond
        the cut c costs (x - c)**2. Both are sums over the histogram, so that each of the
        ``steps * steps`` cuts is a look-up in running sums.
        """
        tries = torch.arange(1, self.steps + 1, dtype=torch.float64) / self.steps
        low, high = self.low.double().clamp(max=0), self.high.double().clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high) * tries
            low = -high
        else:
            low, high = (
                t.flatten() for t in torch.meshgrid(low * tries, high * tries, indexing="ij")
            )
        step = (high - low) / (self.quant_max - self.quant_min)
        rounded = float(self.counts.sum()) - float(self.zeros)
        above = self._beyond(high)
        below = self._beyond(low, flip=True)
        error = (rounded - above[0] - below[0]) * step**2 / 12 + above[1] + below[1]
        best = int(error.argmin())
        return low[best].float(), high[best].float()

    def _beyond(self, cut: Tensor, flip: bool = False) -> tuple[Tensor, Tensor]:
        """Return how many values lie beyond each cut and their squared distance to it."""
        counts = self.counts.flip(0) if flip else self.counts
        x = self.centers()  # the bins are symmetric, so flipping the counts mirrors the axis
        cut = -cut if flip else cut
        sums = torch.stack([counts, counts * x, counts * x * x])
        tails = sums.flip(1).cumsum(1).flip(1)
        tails = torch.cat([tails, torch.zeros(3, 1, dtype=torch.float64)], 1)
        first = torch.searchsorted(x, cut)
        n, s1, s2 = tails[:, first]
        return n, (s2 - 2 * cut * s1 + cut * cut * n).clamp(min=0)
