"""How are ``x[i]`` and ``x[i] = y`` said in ONNX?

Converters (see `fxlab.backends.onnx`). Reading is slicing and gathering. Writing has no memory to
write to: it makes a new tensor that is ``y`` where ``i`` points and ``x`` elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fxlab.backends.converters_math import choose
from fxlab.backends.converters_shape import axis_of, reshape_to, slice_axes, within
from fxlab.backends.onnx import Builder, OnnxValue, SymbolicInt, Unsupported, converter
from fxlab.backends.writes import setitem_

__all__: list[str] = []

I64 = torch.int64
END = 2**63 - 1
_Tensors = (OnnxValue, torch.Tensor)


def _is_mask(item: Any) -> bool:
    return isinstance(item, _Tensors) and item.dtype in (torch.bool, torch.uint8)


def _items(index: Any, rank: int) -> list[Any]:
    """An index as a list with one entry for each axis, and None for each new axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.tensor(i) if isinstance(i, (list, bool)) else i for i in items]
    if any(isinstance(i, torch.Tensor) and i.dtype is torch.bool and not i.dim() for i in items):
        raise Unsupported("True or False as index")
    axes = sum(_axes(i) for i in items if i is not Ellipsis)
    fill = [slice(None)] * (rank - axes)
    place = next((k for k, i in enumerate(items) if i is Ellipsis), None)
    if place is None:
        return [*items, *fill]
    items[place : place + 1] = fill
    return [slice(None) if i is Ellipsis else i for i in items]


def _axes(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _is_mask(item) else 1


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and (
        item.start in (None, 0)
        and (item.stop is None or (isinstance(item.stop, int) and item.stop == END))
        and item.step in (None, 1)
    )


# Reading.


@converter(operator.getitem, "__getitem__")
def getitem(ctx: Builder, input: Any, index: Any) -> Any:
    """Numbers, slices, None, ``...`` and tensors of integers."""
    items = _items(index, input.dim())
    if any(_is_mask(item) for item in items):
        raise Unsupported("a boolean mask as index has a size that depends on values")
    tensors = [axis for axis, item in enumerate(items) if isinstance(item, _Tensors)]
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in items)):
        return _gather_points(ctx, input, items)
    cuts, gathers, removed, added = [], [], [], []
    axis = out_axis = 0
    for item in items:
        if item is None:
            added.append(out_axis)
            out_axis += 1
            continue
        if isinstance(item, slice):
            start = 0 if item.start is None else item.start
            stop = END if item.stop is None else item.stop
            step = 1 if item.step is None else int(item.step)
            if (start, stop, step) != (0, END, 1):
                cuts.append((axis, start, stop, step))
            out_axis += 1
        elif isinstance(item, (int, SymbolicInt)):
            place: Any = item
            end = END if isinstance(item, int) and item == -1 else place + 1
            cuts.append((axis, item, end, 1))
            removed.append(axis)
        else:
            gathers.append((axis, item))
            out_axis += item.dim()
        axis += 1
    x = slice_axes(ctx, input, cuts) if cuts else input
    for where, positions in gathers:
        x = ctx.op("Gather", x, ctx.cast(positions, I64), axis=where)
    if removed:
        x = ctx.op("Squeeze", x, ctx.const(removed, I64))
    if added:
        x = ctx.op("Unsqueeze", x, ctx.const(added, I64))
    return x if x is not input else ctx.op("Identity", input)


def _gather_points(ctx: Builder, x: Any, items: Sequence[Any]) -> OnnxValue:
    """``x[i, j, ...]`` with a tensor or number for each of the first axes and no other index."""
    points, _ = _points(ctx, x, items)
    return ctx.op("GatherND", x, points)


def _points(ctx: Builder, x: Any, items: Sequence[Any]) -> tuple[OnnxValue, list[int]]:
    """Coordinates along the first axes, stacked in a last axis, and their common shape."""
    first = items[: len(items) - len(_sizes_after(x, items))]
    shapes = [tuple(i.shape) for i in first if isinstance(i, _Tensors)]
    if any(isinstance(size, SymbolicInt) for shape in (*shapes, first) for size in shape):
        raise Unsupported("tensors as index whose size depends on the batch")
    shape = list(torch.broadcast_shapes(*shapes))
    columns = []
    for axis, item in enumerate(first):
        place = torch.as_tensor(item) if isinstance(item, int) else item.long()
        if ctx.backend == "openvino" or not isinstance(place, OnnxValue):
            place = place % x.shape[axis]
        place = within(ctx, place, x.shape[axis], negative=True)
        place = ctx.op("Expand", place, ctx.const(shape, I64))
        columns.append(ctx.op("Unsqueeze", place, ctx.const([-1], I64)))
    return ctx.op("Concat", *columns, axis=-1), shape


def _sizes_after(x: Any, items: Sequence[Any]) -> list[Any]:
    """Sizes of the axes behind those that tensors or numbers select from."""
    count = next((k for k, i in enumerate(items) if isinstance(i, slice)), len(items))
    if not count or None in [i for i in items if not isinstance(i, _Tensors)]:
        raise Unsupported("tensors as index, but not for the first axes")
    if not all(_is_whole(item) for item in items[count:]):
        raise Unsupported("tensors as index beside slices of other axes")
    return list(x.shape[count:])


@converter(torch.ops.aten.index.Tensor)
def index(ctx: Builder, input: Any, indices: Any) -> Any:
    return getitem(ctx, input, tuple(slice(None) if i is None else i for i in indices))


@converter("take", torch.take)
def take(ctx: Builder, input: Any, index: Any) -> Any:
    return ctx.op("Gather", reshape_to(ctx, input, [-1]), index, axis=0)


# Writing.


@converter(setitem_)
def setitem(ctx: Builder, x: Any, index: Any, value: Any) -> Any:
    """Numbers, slices, None, ``...``, one mask, or tensors of integers."""
    items = _items(index, x.dim())
    is_tensor = isinstance(value, _Tensors)
    value = value.to(x.dtype) if is_tensor else torch.as_tensor(value, dtype=x.dtype)
    if any(_is_mask(item) for item in items):
        return _fill_mask(ctx, x, items, value)
    if any(isinstance(i, OnnxValue) or (isinstance(i, torch.Tensor) and i.dim()) for i in items):
        return _scatter(ctx, x, items, value)
    return _replace(ctx, x, items, value)


@converter("index_put", torch.index_put)
def index_put(ctx: Builder, input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    index = tuple(slice(None) if i is None else i for i in indices)
    if not accumulate:
        return setitem(ctx, input, index, values)
    items = _items(index, input.dim())
    if any(_is_mask(item) for item in items):
        raise Unsupported("a sum through a mask")
    return _scatter(ctx, input, items, values, "add")


def _fill_mask(ctx: Builder, x: Any, items: Sequence[Any], value: Any) -> OnnxValue:
    """``x[mask] = v``, where ``v`` is the same for each place that the mask selects."""
    place = next(k for k, item in enumerate(items) if _is_mask(item))
    mask, rest = items[place], items[place + 1 :]
    if not all(_is_whole(item) for item in (*items[:place], *rest)):
        raise Unsupported("a write through a mask beside another index")
    if value.dim() > len(rest):
        if value.dim() == len(rest) + 1 and value.shape[0] == 1:
            value = value.squeeze(0)
        elif value.numel() == 1:
            value = value.reshape(())
        else:
            raise Unsupported("a write of as many numbers as a mask has entries")
    for _ in rest:
        mask = mask.unsqueeze(-1)
    return choose(ctx, mask, value, x, x.dtype)


def _scatter(
    ctx: Builder, x: Any, items: Sequence[Any], value: Any, reduction: str | None = None
) -> OnnxValue:
    points, shape = _points(ctx, x, items)
    wide = ctx.op("Expand", value, ctx.ints([*shape, *_sizes_after(x, items)]))
    return ctx.op("ScatterND", x, points, wide, reduction=reduction)


def _replace(ctx: Builder, x: Any, items: Sequence[Any], value: Any) -> OnnxValue:
    """Spread `value` over the places that numbers and slices select; elsewhere it is `x`.

    What is selected is a product of a choice for each axis, so a gather for each axis brings
    `value` to its places, and a mask decides between it and `x`.
    """
    items = [int(i) if isinstance(i, torch.Tensor) else i for i in items]
    rank = sum(not isinstance(i, int) for i in items)  # of x[index]
    for _ in range(value.dim() - rank):
        value = value.squeeze(0)
    for _ in range(rank - value.dim()):
        value = value.unsqueeze(0)
    mask = torch.ones([1] * x.dim(), dtype=torch.bool)
    axis = 0  # of x, and of value, which gets an axis for each number and loses the new ones
    for item in items:
        if item is None:
            value = value.squeeze(axis)
            continue
        if isinstance(item, int):
            value = value.unsqueeze(axis)
        if not _is_whole(item):
            if isinstance(x.shape[axis], SymbolicInt):
                raise Unsupported("a write to some rows of the batch")
            places = torch.arange(x.shape[axis])[item].reshape(-1)
            if not len(places):
                return ctx.op("Identity", x)
            chosen = torch.zeros(x.shape[axis], dtype=torch.bool)
            chosen[places] = True
            mask = mask & chosen.reshape([-1 if a == axis else 1 for a in range(x.dim())])
            if value.shape[axis] != 1:
                source = torch.zeros(x.shape[axis], dtype=I64)
                source[places] = torch.arange(len(places))
                value = torch.index_select(value, axis, source)
        axis += 1
    return choose(ctx, mask, value, x, x.dtype)


@converter("select_scatter", torch.select_scatter)
def select_scatter(ctx: Builder, input: Any, src: Any, dim: int, index: int) -> Any:
    axis = axis_of(dim, input.dim())
    return setitem(ctx, input, (*[slice(None)] * axis, index), src)


@converter("slice_scatter", torch.slice_scatter)
def slice_scatter(
    ctx: Builder,
    input: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    axis = axis_of(dim, input.dim())
    return setitem(ctx, input, (*[slice(None)] * axis, slice(start, end, step)), src)
