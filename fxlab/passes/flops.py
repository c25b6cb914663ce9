"""FLOP of kernels that torch's table of formulas does not know.

``torch.utils.flop_counter`` knows matrix products, convolutions and attention. A whole layer that
runs as one kernel (an LSTM, the fast path of a transformer's layer in eval mode) is none of them,
and torch counts 0 for it. What such a kernel multiplies is known from its weights' shapes, so it
is counted here; a kernel that is neither there nor here is named instead (`uncounted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, sdpa_flop_count

__all__ = ["formula_of", "uncounted"]

aten = torch.ops.aten
_Formula = Callable[[tuple[Any, ...], Any], int]


def formula_of(func: Any) -> _Formula | None:
    """Return the formula of an operator: FLOP from its arguments and its result.

    Args:
        func: As a dispatch mode is given it: ``torch.ops.aten.mv.default``.

    Example:
        >>> formula_of(torch.ops.aten.mv.default)((torch.ones(3, 4), torch.ones(4)), None)
        24
    """
    if func.name().startswith("mkldnn::_convolution_pointwise"):
        return _packed_convolution
    return _FORMULAS.get(getattr(func, "overloadpacket", func))


def uncounted(func: Any) -> str:
    """Return why 0 FLOP of ``func`` say nothing; empty if it works element by element.

    Args:
        func: An operator that neither torch nor `formula_of` has a formula for.
    """
    space, _, name = func.name().partition("::")
    name = name.partition(".")[0]
    if space in ("aten", "prim", "prims"):
        known = name not in _PRODUCTS and not name.startswith(_FAMILIES)
        known |= name == "_linalg_check_errors"
        return "" if known else f"{name} is a kernel without a formula"
    return "" if space in _MOVES else f"{space}::{name} is a kernel without a formula"


_PRODUCTS = frozenset(
    "_cdist_forward cholesky cholesky_inverse cholesky_solve geqrf ormqr orgqr lu_unpack lu_solve "
    "triangular_solve miopen_rnn _sparse_addmm _sparse_mm sspaddmm hspmm".split()
)
_FAMILIES = (
    "linalg_",
    "_linalg_",
    "_fft_",
    "_sparse_semi_structured",
    "_weight_int",
    "_mixed_dtypes",
)
_MOVES = ("c10d", "_c10d_functional", "c10d_functional", "profiler", "debugprims", "rngprims")


def _rows(x: torch.Tensor) -> int:
    """Vectors that a weight is multiplied with: one for each element of batch and time."""
    return math.prod(x.shape[:-1])


def _lstm_layer(args: tuple[Any, ...], out: Any) -> int:
    """One direction of one layer: each step multiplies input and state by all four gates."""
    x, w_input, w_hidden = args[:3]
    return 2 * _rows(x) * (w_input.numel() + w_hidden.numel())


def _cudnn_layers(args: tuple[Any, ...], out: Any) -> int:
    """All layers and directions of an LSTM, GRU or RNN on a GPU: the sum over their weights."""
    return 2 * _rows(args[0]) * sum(w.numel() for w in args[1] if w.dim() == 2)


def _attention(query: torch.Tensor, key: torch.Tensor) -> int:
    """Scores, and the values that they weigh: two products, whatever the number of heads."""
    batch, length, width = query.shape
    return 4 * batch * length * key.shape[1] * width


def _tiled_attention(args: tuple[Any, ...], out: Any) -> int:
    """F.scaled_dot_product_attention on a CPU; torch has this formula for GPUs' kernels only."""
    return sdpa_flop_count(*(t.shape for t in args[:3]))


def _fast_attention(args: tuple[Any, ...], out: Any) -> int:
    """Query, key and value are projected by one weight, the result by another."""
    query, key = args[:2]
    return 2 * _rows(query) * (args[5].numel() + args[7].numel()) + _attention(query, key)


def _fast_layer(args: tuple[Any, ...], out: Any) -> int:
    """Attention's two weights and the two of the network after it, for each token."""
    x, width, weights = args[0], args[1], [args[i] for i in (3, 5, 14, 16)]
    size = sum(w.numel() for w in weights)
    if x.is_nested:  # sequences of several lengths, without what pads them
        lengths = [part.shape[0] for part in x.unbind()]
        return sum(2 * n * size + 4 * n * n * width for n in lengths)
    return 2 * _rows(x) * size + _attention(x, x)


def _bilinear(args: tuple[Any, ...], out: Any) -> int:
    """For each output: the first input times its matrix, and that times the second input."""
    x, weight = args[:2]
    outputs, first, second = weight.shape
    return 2 * x.shape[0] * outputs * second * (first + 1)


def _matrix(position: int) -> _Formula:
    return lambda args, out: 2 * args[position].numel()


def _packed_convolution(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Count oneDNN's packed kernels; their weight is the one in its layout."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    weight = next(t for t in tensors if t.layout != torch.strided)
    return conv_flop_count(list(out.shape), list(weight.shape), list(out.shape))


_FORMULAS: dict[Any, _Formula] = {
    aten.mkldnn_rnn_layer: _lstm_layer,
    aten._cudnn_rnn: _cudnn_layers,
    aten._scaled_dot_product_flash_attention_for_cpu: _tiled_attention,
    aten._native_multi_head_attention: _fast_attention,
    aten._transformer_encoder_layer_fwd: _fast_layer,
    aten._trilinear: _bilinear,
    aten.mv: _matrix(0),
    aten.addmv: _matrix(1),
    aten.dot: _matrix(0),
    aten.vdot: _matrix(0),
    aten.addr: lambda args, out: 2 * out.numel(),
}
