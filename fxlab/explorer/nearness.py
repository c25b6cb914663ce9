"""How far is one value from another, and how far may it be?

Values are nests of tensors; errors are relative to the largest number. What is allowed follows from
the type that decided, and from whether weights were made anew.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxlab.display import shape_text

STRICT = 1e-9  # relative, in float64, as long as no weight was made anew in a narrower type
# Relative, in float64, once weights were made anew: each was rounded once, which depth adds up to a
# few machine epsilons of the weights' type (2e-7 in resnet50); a forgotten eps is 5e-5 and more.
EPSILONS = 100


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that a dtype's rounding is allowed: 1e4 machine epsilons, 1e-3 in f32."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return min(0.1, torch.finfo(dtype).eps * 1e4)


def rounded_once(*modules: nn.Module) -> float:
    """The relative error, in float64, of programs whose weights were rounded to their type once."""
    tensors = [one for gm in modules for one in (*gm.parameters(), *gm.buffers())]
    widths = [torch.finfo(one.dtype).eps for one in tensors if one.is_floating_point()]
    eps = max(widths, default=torch.finfo(torch.float32).eps)
    return min(0.1, max(STRICT, EPSILONS * eps))


def relative(old: Any, new: Any, dtypes: bool = False) -> float:
    """The largest error relative to the largest number; infinity for another structure."""
    problem, error, _ = compare(old, new, dtypes)
    if problem is not None:
        return math.inf
    return error / max(largest(old), 1e-300) if error else 0.0


def largest(value: Any) -> float:
    """The largest finite magnitude among all tensors of a value."""
    found = 0.0
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            size = leaf.detach() if leaf.dtype == torch.bool else leaf.detach().abs()
            finite = torch.nan_to_num(size.to(torch.float64), 0.0, 0.0, 0.0)
            found = max(found, float(finite.max()))
    return found


def compare(old: Any, new: Any, dtypes: bool = False) -> tuple[str | None, float, float]:
    """Compare two values of any structure.

    Args:
        old: Tensors and other values.
        new: What stands in their place.
        dtypes: Whether tensors must have the same types too. In a run in float64 they can't: what
            `x.float()` returns depends on whether it is there.

    Returns:
        What is wrong with the structure (None: nothing), the largest absolute error, and the error
        that the dtype's rounding is allowed.
    """
    olds = pytree.tree_leaves(old)
    news = pytree.tree_leaves(new)
    if len(olds) != len(news):
        return f"it returns {len(news)} values where {len(olds)} were returned", math.inf, 0.0
    error, allowed = 0.0, 0.0
    for one, other in zip(olds, news, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or (is_plain(one) and one != other):
                return f"it returns {other!r:.60} where {one!r:.60} was returned", math.inf, 0.0
            continue
        if one.shape != other.shape or (dtypes and one.dtype != other.dtype):
            text = f"it returns {shape_text(other)} where {shape_text(one)} was returned"
            return text, math.inf, 0.0
        if without_data((one, other)):
            return "it returns a tensor without numbers (meta or fake)", math.inf, 0.0
        if one.numel() == 0:
            continue
        scale = largest(one)
        allowed = max(allowed, tolerance(one.dtype) * scale)
        error = max(error, distance(one, other))
    return None, error, allowed


def without_data(value: Any) -> bool:
    """Whether a tensor among a value's parts has a shape but no numbers: meta and fake tensors."""
    return any(
        isinstance(leaf, torch.Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor))
        for leaf in pytree.tree_leaves(value)
    )


def is_plain(value: Any) -> bool:
    """A value whose equality means something."""
    return isinstance(value, bool | int | float | str | bytes | type(None))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; equal infinities and NaNs are no difference."""
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    if one.is_quantized or other.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    a, b = one.detach().to(wide), other.detach().to(wide)
    alike = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(alike, torch.zeros_like(a), a - b).abs()
    worst = float(gap.max())
    return math.inf if math.isnan(worst) else worst


def error_text(value: float) -> str:
    """An error in few characters: `4e-5`, `0.3`, `0`, `inf`."""
    if value == 0 or 0.01 <= value < 1000 or not math.isfinite(value):
        return f"{float(f'{value:.1g}'):g}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
