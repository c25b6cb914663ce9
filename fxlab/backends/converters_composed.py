"""Which operations are best said in terms of others?

Converters (see `fxlab.backends.onnx`) that write no ONNX of their own: each is a formula in
PyTorch. The value that is being lowered takes the place of a tensor (section 4.1 of the paper: what
a Proxy does), so each call in the formula is converted in turn.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.converters_math import register
from fxlab.backends.onnx import SymbolicInt, Unsupported, converter

__all__ = ["composed"]


def composed(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, which computes what `targets` do, as their converter.

    Args:
        targets: functions; a name stands for the method and for the functions of torch so called.

    Example:
        >>> import fxlab, torch
        >>> @composed(torch.special.entr)
        ... def entr(input):
        ...     return -input * input.log()
        >>> from fxlab.backends import explain
        >>> print(explain(fxlab.symbolic_trace(lambda x: torch.special.entr(x)), [torch.ones(2)]))
        1 of 1 nodes can be lowered
    """

    def keep(formula: Callable[..., Any]) -> Callable[..., Any]:
        def convert(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            return formula(*args, **kwargs)

        converter(*(t for t in targets if not isinstance(t, str)))(convert)
        register(" ".join(t for t in targets if isinstance(t, str)), convert)
        return formula

    return keep


# Element by element.

composed("heaviside")(
    lambda input, values: torch.where(input == 0, values, (input > 0).to(input.dtype))
)
composed("isneginf")(lambda input: input == -math.inf)
composed("isposinf")(lambda input: input == math.inf)
composed("ldexp")(lambda input, other: input * 2.0**other)
composed("bitwise_left_shift", operator.lshift)(lambda input, other: input * 2**other)
composed("bitwise_right_shift", operator.rshift)(lambda input, other: input // 2**other)
composed("nansum")(lambda input, *args, **kwargs: input.nan_to_num(0, math.inf, -math.inf).sum(
    *args, **kwargs))  # fmt: skip


@composed("atan2", "arctan2")
def atan2(input: Any, other: Any) -> Any:
    turn = torch.where(_is_negative(input), -math.pi, math.pi)
    back = torch.where(_is_negative(other), turn, 0.0)
    endless = (input.abs() == math.inf) & (other.abs() == math.inf)
    a, b = (torch.where(endless, x.sign(), x) for x in (input, other))
    b = torch.where((a == 0) & (b == 0), 1.0, b)
    at_zero = torch.where(_is_negative(other), turn, input)
    return torch.where(input == 0, at_zero, a.div(b).atan() + back)


def _is_negative(x: Any) -> Any:
    """Negative numbers, and the zero that has a sign."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


@composed("copysign")
def copysign(input: Any, other: Any) -> Any:
    size = input.abs() if input.is_floating_point() else input.abs().float()
    if isinstance(other, (int, float)):
        return -size if math.copysign(1, other) < 0 else size
    return torch.where(_is_negative(other), -size, size)


@composed("fmax")
def fmax(input: Any, other: Any) -> Any:
    if not (input.is_floating_point() and other.is_floating_point()):
        return torch.maximum(input, other)
    larger = torch.where(input.isnan(), other, torch.maximum(input, other))
    return torch.where(other.isnan(), input, larger)


@composed("fmin")
def fmin(input: Any, other: Any) -> Any:
    if not (input.is_floating_point() and other.is_floating_point()):
        return torch.minimum(input, other)
    return -fmax(-input, -other)


@composed("sinc")
def sinc(input: Any) -> Any:
    x = input * math.pi
    return torch.where(x == 0, 1.0, x.sin() / x)


@composed("xlogy")
def xlogy(input: Any, other: Any) -> Any:
    product = input * (other if isinstance(other, (int, float)) else other.log())
    return torch.where(input == 0, 0.0, product)


@composed("logaddexp2")
def logaddexp2(input: Any, other: Any) -> Any:
    top = torch.maximum(input, other)
    y = top + torch.log2(torch.exp2(input - top) + torch.exp2(other - top))
    return torch.where(top.abs() == math.inf, top, y)


@composed("isclose")
def isclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    near = (input - other).abs() <= atol + (other * rtol).abs()
    answer = (input == other) | (near & other.isfinite())
    return answer | (input.isnan() & other.isnan()) if equal_nan else answer


@composed("isin")
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    found = (elements.unsqueeze(-1) == test_elements.reshape(-1)).any(-1)
    return ~found if invert else found


@composed(torch.bucketize)
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    above = input.unsqueeze(-1) < boundaries if right else input.unsqueeze(-1) <= boundaries
    return (~above).sum(-1).to(torch.int32 if out_int32 else torch.int64)


@composed(torch.searchsorted)
def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None or sorted_sequence.dim() != 1:
        raise Unsupported("searchsorted in many sequences, or by a sorter")
    return bucketize(input, sorted_sequence, out_int32=out_int32, right=right or side == "right")


# Joined, turned and picked.


composed(torch.atleast_1d)(lambda x: x.reshape(1) if x.dim() == 0 else x)
composed(torch.atleast_2d)(lambda x: x.reshape(1, -1) if x.dim() < 2 else x)
composed(torch.atleast_3d)(
    lambda x: x.reshape(1, -1, 1) if x.dim() < 2 else x.unsqueeze(-1) if x.dim() == 2 else x
)


@composed(torch.vstack, torch.row_stack)
def vstack(tensors: Any) -> Any:
    return torch.cat([x.reshape(1, -1) if x.dim() < 2 else x for x in tensors])


@composed(torch.column_stack)
def column_stack(tensors: Any) -> Any:
    return torch.cat([x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors], 1)


@composed(torch.dstack)
def dstack(tensors: Any) -> Any:
    wide = [x.reshape(1, -1, 1) if x.dim() < 2 else x for x in tensors]
    return torch.cat([x.unsqueeze(-1) if x.dim() == 2 else x for x in wide], 2)


@composed(torch.meshgrid)
def meshgrid(*given: Any, indexing: str = "ij") -> Any:
    tensors = list(given[0] if isinstance(given[0], (tuple, list)) else given)
    if indexing == "xy":
        first, second, *rest = meshgrid(tensors[1], tensors[0], *tensors[2:])
        return second, first, *rest
    sizes = [x.numel() for x in tensors]
    places = [[-1 if a == axis else 1 for a in range(len(sizes))] for axis in range(len(sizes))]
    return tuple(x.reshape(p).expand(sizes) for x, p in zip(tensors, places, strict=True))


@composed(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Any:
    if any(isinstance(size, SymbolicInt) for x in tensors for size in x.shape):
        raise Unsupported("broadcast_tensors of sizes that depend on the batch")
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


composed("fliplr")(lambda input: input.flip(1))
composed("flipud")(lambda input: input.flip(0))
composed("ravel")(lambda input: input.reshape(-1))
composed("adjoint")(lambda input: input.transpose(-2, -1))
composed("narrow_copy")(lambda *args, **kwargs: torch.narrow(*args, **kwargs))
composed("vsplit")(lambda input, parts: input.tensor_split(parts, 0))
composed("hsplit")(lambda input, parts: input.tensor_split(parts, 0 if input.dim() == 1 else 1))
composed("dsplit")(lambda input, parts: input.tensor_split(parts, 2))
composed("unsafe_chunk")(lambda *args, **kwargs: torch.chunk(*args, **kwargs))
composed("unsafe_split")(lambda *args, **kwargs: torch.split(*args, **kwargs))
composed("msort")(lambda input: input.sort(0)[0])


@composed("rot90")
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    a, b = dims
    if k % 4 == 2:
        return input.flip(a, b)
    if k % 4 == 0:
        return input.clone()
    return input.flip(b if k % 4 == 1 else a).transpose(a, b)


@composed("diagonal", torch.linalg.diagonal)
def diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    x = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = int(x.shape[-2]), int(x.shape[-1])
    places = torch.arange(rows * columns).reshape(rows, columns).diagonal(offset)
    return x.flatten(-2).index_select(-1, places.clone())


@composed("diag_embed")
def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    here = torch.ones(int(input.shape[-1]), dtype=torch.bool).diag_embed(offset)
    filled = F.pad(input, (0, abs(offset))).unsqueeze(-1 if offset >= 0 else -2)
    return torch.where(here, filled, 0).movedim((-2, -1), (dim1, dim2))


@composed("diag")
def diag(input: Any, diagonal: int = 0) -> Any:
    return input.diag_embed(diagonal) if input.dim() == 1 else input.diagonal(diagonal)


composed("trace")(lambda input: input.diagonal().sum())


@composed("kthvalue")
def kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    found = tuple(x.narrow(dim, k - 1, 1) for x in input.sort(dim))
    return found if keepdim else tuple(x.squeeze(dim) for x in found)


@composed("median")
def median(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return kthvalue(input.reshape(-1), (int(input.numel()) + 1) // 2)[0]
    return kthvalue(input, (int(input.shape[dim]) + 1) // 2, dim, keepdim)


composed("aminmax")(
    lambda input, *, dim=None, keepdim=False: (
        input.amin(() if dim is None else dim, keepdim),
        input.amax(() if dim is None else dim, keepdim),
    )
)
composed(torch.std_mean)(
    lambda input, *args, **kwargs: tuple(
        x.sqrt() if k == 0 else x for k, x in enumerate(torch.var_mean(input, *args, **kwargs))
    )
)


@composed("nanmean")
def nanmean(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.nansum(*args, **kwargs) / (~input.isnan()).sum(*args, **kwargs)


# Products.

composed("inner")(
    lambda input, other: (
        input * other
        if not (input.dim() and other.dim())
        else torch.matmul(input, other.transpose(-2, -1) if other.dim() > 1 else other)
    )
)
composed("vdot")(lambda input, other: (input * other).sum())
composed(torch.linalg.vecdot)(lambda x, y, *, dim=-1: (x * y).sum(dim))
composed(torch.linalg.matmul)(lambda input, other: torch.matmul(input, other))
composed("dist")(lambda input, other, p=2: (input - other).reshape(-1).norm(p))


def _added(input: Any, product: Any, beta: float, alpha: float) -> Any:
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then it must not matter, even if it is not a number
        return product
    return product + (input if beta == 1 else input * beta)


@composed("addr")
def addr(input: Any, vec1: Any, vec2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _added(input, torch.outer(vec1, vec2), beta, alpha)


@composed("addbmm")
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _added(input, torch.bmm(batch1, batch2).sum(0), beta, alpha)


@composed(torch.linalg.norm)
def linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x = A if dtype is None else A.to(dtype)
    flat = ord in (None, "fro") or isinstance(dim, int) or (dim is None and x.dim() == 1)
    if not flat:
        raise Unsupported(f"norm of matrices with ord={ord!r}")
    return torch.linalg.vector_norm(x, 2 if ord in (None, "fro") else ord, dim, keepdim)


@composed(torch.linalg.matrix_norm)
def matrix_norm(
    A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord != "fro":
        raise Unsupported(f"norm of matrices with ord={ord!r}")
    return linalg_norm(A, ord, tuple(dim), keepdim, dtype=dtype)


@composed(torch.linalg.multi_dot, torch.chain_matmul)
def multi_dot(*tensors: Any) -> Any:
    product, *others = tensors[0] if len(tensors) == 1 else tensors
    for other in others:
        product = torch.matmul(product, other)
    return product


@composed("cross", torch.linalg.cross)
def cross(input: Any, other: Any, dim: int | None = None) -> Any:
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(other.shape))
    if dim is None:
        raise Unsupported("cross without dim")
    a, b = input.expand(shape), other.expand(shape)
    return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)


@composed(torch.tensordot)
def tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    left = [[axis % x.dim() for axis in axes] for x, axes in zip((a, b), dims, strict=True)]
    rest = [
        [d for d in range(x.dim()) if d not in out] for x, out in zip((a, b), left, strict=True)
    ]
    shape = [*(a.shape[d] for d in rest[0]), *(b.shape[d] for d in rest[1])]
    count = math.prod(int(a.shape[d]) for d in left[0])
    product = torch.matmul(
        a.permute(*rest[0], *left[0]).reshape(-1, count),
        b.permute(*left[1], *rest[1]).reshape(count, -1),
    )
    return product.reshape(shape)


@composed(F.bilinear, torch.bilinear)
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    rows = torch.matmul(input1.unsqueeze(-2).unsqueeze(-2), weight).squeeze(-2)
    y = (rows * input2.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias


@composed(torch.cdist)
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, -1)


@composed(F.cosine_similarity)
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    if x1.shape != x2.shape:
        x1, x2 = torch.broadcast_tensors(x1, x2)
    lengths = [torch.linalg.vector_norm(x, 2, dim).clamp(min=eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (lengths[0] * lengths[1])


@composed(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return (x1 - x2 + eps).norm(p, -1, keepdim)


# Layers.


@composed(F.upsample)
def upsample(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Any:
    return F.interpolate(input, size, scale_factor, mode, align_corners)


composed(F.upsample_nearest)(
    lambda input, size=None, scale_factor=None: F.interpolate(input, size, scale_factor)
)
composed(F.upsample_bilinear)(
    lambda input, size=None, scale_factor=None: F.interpolate(
        input, size, scale_factor, "bilinear", True
    )
)


@composed(F.channel_shuffle, torch.channel_shuffle, F.native_channel_shuffle)
def channel_shuffle(input: Any, groups: int) -> Any:
    batch, channels, *sizes = input.shape
    split = input.reshape(batch, groups, int(channels) // groups, *sizes)
    return split.transpose(1, 2).reshape(batch, channels, *sizes)


@composed(F.embedding_bag)
def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if offsets is not None or max_norm is not None or padding_idx is not None:
        raise Unsupported("embedding_bag with offsets, max_norm or padding_idx")
    rows = F.embedding(input, weight)  # (bags, length, features)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)


@composed(F.rrelu, torch.rrelu)
def rrelu(
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if training:
        raise Unsupported("rrelu in training draws random numbers; call eval() first")
    return F.leaky_relu(input, (lower + upper) / 2)


def _lp_pool(count: int) -> Callable[..., Any]:
    def convert(
        input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> Any:
        sizes = [kernel_size] * count if isinstance(kernel_size, int) else list(kernel_size)
        pool = getattr(F, f"avg_pool{count}d")
        mean = pool(input**norm_type, kernel_size, stride, 0, ceil_mode)
        return (torch.sign(mean) * mean.abs().relu() * math.prod(sizes)) ** (1.0 / norm_type)

    return convert


for _count in (1, 2, 3):
    composed(getattr(F, f"lp_pool{_count}d"))(_lp_pool(_count))


def _pairs(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _windows(channels: int, kernel: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A grouped convolution's weight that only takes windows apart: one output for each place."""
    count = math.prod(kernel)
    one = torch.eye(count, dtype=dtype).reshape(count, 1, *kernel)
    return one.repeat(channels, 1, 1, 1)


@composed(F.unfold)
def unfold(
    input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Any:
    x = input if input.dim() == 4 else input.unsqueeze(0)
    channels = int(x.shape[1])
    weight = _windows(channels, _pairs(kernel_size), input.dtype)
    y = F.conv2d(x, weight, None, stride, padding, dilation, channels).flatten(2)
    return y if input.dim() == 4 else y.squeeze(0)


@composed(F.fold)
def fold(
    input: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Any:
    x = input if input.dim() == 3 else input.unsqueeze(0)
    kernel, steps = _pairs(kernel_size), _pairs(stride)
    rows, spread, extra = [], _pairs(dilation), []
    for axis, size in enumerate(_pairs(output_size)):
        left = size + 2 * _pairs(padding)[axis] - spread[axis] * (kernel[axis] - 1) - 1
        rows.append(left // steps[axis] + 1)
        extra.append(left % steps[axis])
    channels = int(x.shape[1]) // math.prod(kernel)
    weight = _windows(channels, kernel, input.dtype)
    y = F.conv_transpose2d(
        x.unflatten(-1, rows), weight, None, stride, padding, extra, channels, dilation
    )
    return y if input.dim() == 3 else y.squeeze(0)


@composed(F.affine_grid)
def affine_grid(theta: Any, size: Any, align_corners: bool | None = None) -> Any:
    sizes = [int(n) for n in size[2:]]
    lines = [torch.linspace(-1, 1, n) * (1 if align_corners else (n - 1) / n) for n in sizes]
    grids = torch.meshgrid(*lines, indexing="ij")
    base = torch.stack([*reversed(grids), torch.ones(sizes)], -1).reshape(1, -1, len(sizes) + 1)
    return torch.matmul(base.to(theta.dtype), theta.transpose(1, 2)).reshape(
        theta.shape[0], *sizes, len(sizes)
    )
