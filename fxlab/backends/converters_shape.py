"""How are views, slices, joins, gathers and casts said in ONNX?

Converters (see `fxlab.backends.onnx`). Sizes may depend on the batch: `ctx.ints` builds the shape
operand of an ONNX node from fixed and dynamic sizes alike.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.onnx import Builder, OnnxValue, SymbolicInt, Unsupported, converter

__all__: list[str] = []

I64 = torch.int64
END = 2**63 - 1


def _sizes(args: Sequence[Any]) -> list[Any]:
    """Sizes given one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)):
        return list(args[0])
    return list(args)


def _axis(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


# Shape.


def reshape_to(ctx: Builder, x: Any, sizes: Sequence[Any]) -> OnnxValue:
    """Reshape to sizes, of which one may be -1 and some may depend on the batch."""
    empty = any(size == 0 for size in sizes if isinstance(size, int))
    return ctx.op("Reshape", x, ctx.ints(sizes), allowzero=1 if empty else None)


@converter("view", "reshape", "view_as", "reshape_as", torch.reshape)
def reshape(ctx: Builder, input: Any, *shape: Any, **kwargs: Any) -> Any:
    shape = shape or tuple(kwargs.values())
    if isinstance(shape[0], torch.dtype):
        raise Unsupported("view with a dtype reinterprets memory")
    if isinstance(shape[0], OnnxValue):
        shape = shape[0].shape
    return reshape_to(ctx, input, _sizes(shape))


@converter("flatten", torch.flatten)
def flatten(ctx: Builder, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    rank = input.dim()
    if rank == 0:
        return reshape_to(ctx, input, [1])
    first, last = _axis(start_dim, rank), _axis(end_dim, rank)
    sizes = list(input.shape)
    middle: Any = 1
    for size in sizes[first : last + 1]:
        middle = middle * size
    others = [*sizes[:first], *sizes[last + 1 :]]
    if not any(isinstance(size, SymbolicInt) for size in others) and isinstance(
        middle, SymbolicInt
    ):
        middle = -1
    return reshape_to(ctx, input, [*sizes[:first], middle, *sizes[last + 1 :]])


@converter("unflatten", torch.unflatten)
def unflatten(ctx: Builder, input: Any, dim: int, sizes: Sequence[Any]) -> Any:
    axis = _axis(dim, input.dim())
    return reshape_to(ctx, input, [*input.shape[:axis], *sizes, *input.shape[axis + 1 :]])


@converter("squeeze", torch.squeeze)
def squeeze(ctx: Builder, input: Any, dim: Any = None) -> Any:
    wanted = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = [_axis(d, input.dim()) for d in wanted]
    axes = [d for d in axes if input.fake.shape[d] == 1]
    if input.other is not None and any(input.other.shape[d] != 1 for d in axes):
        raise Unsupported("squeeze of a dimension that depends on the batch")
    return ctx.op("Squeeze", input, ctx.const(axes, I64)) if axes else ctx.op("Identity", input)


@converter("unsqueeze", torch.unsqueeze)
def unsqueeze(ctx: Builder, input: Any, dim: int) -> Any:
    return ctx.op("Unsqueeze", input, ctx.const([dim % (input.dim() + 1)], I64))


@converter("permute", torch.permute)
def permute(ctx: Builder, input: Any, *dims: Any) -> Any:
    return ctx.op("Transpose", input, perm=[_axis(d, input.dim()) for d in _sizes(dims)])


@converter("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims)
def transpose(ctx: Builder, input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.dim()))
    if not order:
        return ctx.op("Identity", input)
    a, b = _axis(dim0, input.dim()), _axis(dim1, input.dim())
    order[a], order[b] = order[b], order[a]
    return ctx.op("Transpose", input, perm=order)


@converter("t", torch.t)
def t(ctx: Builder, input: Any) -> Any:
    return ctx.op("Transpose" if input.dim() == 2 else "Identity", input)


@converter("movedim", "moveaxis", torch.movedim, torch.moveaxis)
def movedim(ctx: Builder, input: Any, source: Any, destination: Any) -> Any:
    rank = input.dim()
    sources = [_axis(d, rank) for d in ([source] if isinstance(source, int) else source)]
    targets = [
        _axis(d, rank) for d in ([destination] if isinstance(destination, int) else destination)
    ]
    order: list[int | None] = [None] * rank
    for a, b in zip(sources, targets, strict=True):
        order[b] = a
    rest = iter(d for d in range(rank) if d not in sources)
    return ctx.op("Transpose", input, perm=[next(rest) if d is None else d for d in order])


@converter("expand", "broadcast_to", torch.broadcast_to)
def expand(ctx: Builder, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    wanted = _sizes(sizes)
    shift = len(wanted) - input.dim()
    one = [1 if isinstance(size, int) and size == -1 else size for size in wanted]
    if any(isinstance(s, int) and s == -1 and axis < shift for axis, s in enumerate(wanted)):
        raise Unsupported("expand with -1 for a new dimension")
    return ctx.op("Expand", input, ctx.ints(one))


@converter("expand_as")
def expand_as(ctx: Builder, input: Any, other: Any) -> Any:
    return expand(ctx, input, *other.shape)


@converter("repeat", "tile", torch.tile)
def repeat(ctx: Builder, input: Any, *repeats: Any) -> Any:
    counts = _sizes(repeats)
    counts = [1] * (input.dim() - len(counts)) + counts
    lead = len(counts) - input.dim()
    if lead:
        input = ctx.op("Unsqueeze", input, ctx.const(list(range(lead)), I64))
    return ctx.op("Tile", input, ctx.ints(counts))


@converter("repeat_interleave", torch.repeat_interleave)
def repeat_interleave(ctx: Builder, input: Any, repeats: Any, dim: int | None = None) -> Any:
    if not isinstance(repeats, int):
        raise Unsupported("repeat_interleave with a tensor of counts has a size of values")
    sizes = list(input.shape)
    if dim is None:
        input, sizes, dim = reshape_to(ctx, input, [-1]), [-1], 0
    axis = dim % len(sizes)
    wide = ctx.op("Unsqueeze", input, ctx.const([axis + 1], I64))
    counts = [1] * (len(sizes) + 1)
    counts[axis + 1] = repeats
    tiled = ctx.op("Tile", wide, ctx.const(counts, I64))
    sizes[axis] = -1 if sizes == [-1] else sizes[axis] * repeats
    return reshape_to(ctx, tiled, sizes)


@converter("contiguous", "clone", "detach", "cpu", "alias", torch.clone, torch.detach)
def same(ctx: Builder, input: Any, *_: Any, **__: Any) -> Any:
    return input


@converter("to", "type", "type_as")
def to(ctx: Builder, input: Any, *args: Any, **kwargs: Any) -> Any:
    return ctx.cast(input, ctx.out.dtype)


for _name in [
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "short",
    "bool",
    "char",
    "byte",
]:
    converter(_name)(to)


# Join and cut.


@converter("cat", torch.cat, torch.concat, torch.concatenate)
def cat(ctx: Builder, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    axis = _axis(kwargs.get("axis", dim), ctx.out.dim())
    empty = [v for v in tensors if not (len(v.shape) == 1 and v.shape[0] == 0)]
    return ctx.op("Concat", *(ctx.cast(v, ctx.out.dtype) for v in empty), axis=axis)


@converter(torch.stack)
def stack(ctx: Builder, tensors: Sequence[Any], dim: int = 0) -> Any:
    axis = _axis(dim, ctx.out.dim())
    where = ctx.const([axis], I64)
    wide = [ctx.op("Unsqueeze", ctx.cast(v, ctx.out.dtype), where) for v in tensors]
    return ctx.op("Concat", *wide, axis=axis)


@converter(torch.hstack)
def hstack(ctx: Builder, tensors: Sequence[Any]) -> Any:
    return ctx.op("Concat", *tensors, axis=0 if tensors[0].dim() == 1 else 1)


def _pieces(ctx: Builder, x: Any, lengths: Sequence[int], axis: int) -> tuple[Any, ...]:
    if len(lengths) == 1:
        return (ctx.op("Identity", x),)
    return ctx.op("Split", x, ctx.const(list(lengths), I64), axis=axis, outputs=len(lengths))


@converter("split", torch.split)
def split(ctx: Builder, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    axis = _axis(dim, tensor.dim())
    lengths = split_size_or_sections
    if isinstance(lengths, int):
        lengths = [piece.shape[axis] for piece in ctx.out]
    if isinstance(tensor.shape[axis], SymbolicInt):
        raise Unsupported("split along the batch")
    return _pieces(ctx, tensor, [int(n) for n in lengths], axis)


@converter("split_with_sizes", torch.split_with_sizes)
def split_with_sizes(ctx: Builder, tensor: Any, split_sizes: Any, dim: int = 0) -> Any:
    return split(ctx, tensor, list(split_sizes), dim)


@converter("chunk", torch.chunk, "tensor_split", torch.tensor_split)
def chunk(ctx: Builder, input: Any, chunks: Any, dim: int = 0) -> Any:
    axis = _axis(dim, input.dim())
    return split(ctx, input, [piece.shape[axis] for piece in ctx.out], axis)


@converter("unbind", torch.unbind)
def unbind(ctx: Builder, input: Any, dim: int = 0) -> Any:
    axis = _axis(dim, input.dim())
    pieces = split(ctx, input, [1] * len(ctx.out), axis)
    return tuple(ctx.op("Squeeze", piece, ctx.const([axis], I64)) for piece in pieces)


@converter("narrow", torch.narrow)
def narrow(ctx: Builder, input: Any, dim: int, start: int, length: int) -> Any:
    return _slice(ctx, input, [(_axis(dim, input.dim()), start, start + length, 1)])


@converter("select", torch.select)
def select(ctx: Builder, input: Any, dim: int, index: int) -> Any:
    return ctx.op("Gather", input, ctx.const(index, I64), axis=_axis(dim, input.dim()))


def _slice(ctx: Builder, x: Any, cuts: Sequence[tuple[int, Any, Any, int]]) -> OnnxValue:
    axes, starts, ends, steps = (list(column) for column in zip(*cuts, strict=True))
    return ctx.op(
        "Slice", x, ctx.ints(starts), ctx.ints(ends), ctx.const(axes, I64), ctx.const(steps, I64)
    )


@converter(operator.getitem, "__getitem__")
def getitem(ctx: Builder, input: Any, index: Any) -> Any:
    """Basic indexing: numbers, slices, None, ``...``, and at most one tensor of integers."""
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [i for i in items if isinstance(i, (OnnxValue, torch.Tensor, list))]
    if any(getattr(i, "dtype", None) is torch.bool for i in tensors):
        raise Unsupported("a boolean mask as index has a size that depends on values")
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in items)):
        raise Unsupported("several tensors as index")
    plain = [i for i in items if i is not None and i is not Ellipsis]
    if Ellipsis in [i for i in items if not isinstance(i, (OnnxValue, torch.Tensor))]:
        place = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[place : place + 1] = [slice(None)] * (input.dim() - len(plain))
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
            gathers.append((axis, torch.tensor(item) if isinstance(item, list) else item))
            out_axis += gathers[-1][1].dim()
        axis += 1
    x = _slice(ctx, input, cuts) if cuts else input
    for where, positions in gathers:
        x = ctx.op("Gather", x, ctx.cast(positions, I64), axis=where)
    if removed:
        x = ctx.op("Squeeze", x, ctx.const(removed, I64))
    if added:
        x = ctx.op("Unsqueeze", x, ctx.const(added, I64))
    return x if x is not input else ctx.op("Identity", input)


# Gather and scatter.


@converter("index_select", torch.index_select)
def index_select(ctx: Builder, input: Any, dim: int, index: Any) -> Any:
    return ctx.op("Gather", input, index, axis=_axis(dim, input.dim()))


@converter("gather", torch.gather)
def gather(ctx: Builder, input: Any, dim: int, index: Any, **_: Any) -> Any:
    axis = _axis(dim, input.dim())
    return ctx.op("GatherElements", _trimmed(ctx, input, index, axis), index, axis=axis)


def _trimmed(ctx: Builder, x: Any, index: Any, axis: int) -> Any:
    """ONNX wants equal sizes off the axis, PyTorch lets the index be smaller."""
    for d, size in enumerate(index.shape):
        if d != axis and not isinstance(size, SymbolicInt) and size != x.shape[d]:
            x = _rank(ctx.op("Gather", x, torch.arange(size), axis=d), x)
    return x


def _rank(value: OnnxValue, like: Any) -> OnnxValue:
    """Give an intermediate the number of dimensions of `like` (its sizes are not looked at)."""
    value.fake = like.fake
    return value


@converter("take_along_dim", torch.take_along_dim)
def take_along_dim(ctx: Builder, input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        raise Unsupported("take_along_dim of the flattened tensor")
    return gather(ctx, input, dim, indices)


@converter("scatter", torch.scatter)
def scatter(
    ctx: Builder,
    input: Any,
    dim: int,
    index: Any,
    src: Any = None,
    *,
    value: Any = None,
    reduce: str | None = None,
) -> Any:
    source = src if src is not None else value
    if not isinstance(source, (OnnxValue, torch.Tensor)):
        source = ctx.op("Expand", ctx.cast(source, input.dtype), ctx.ints(index.shape))
    else:
        cuts = [(d, 0, size, 1) for d, size in enumerate(index.shape) if size != source.shape[d]]
        source = _slice(ctx, source, cuts) if cuts else source
    mode = {None: None, "add": "add", "multiply": "mul"}[reduce]
    return ctx.op(
        "ScatterElements", input, index, source, axis=_axis(dim, input.dim()), reduction=mode
    )


@converter("scatter_add", torch.scatter_add)
def scatter_add(ctx: Builder, input: Any, dim: int, index: Any, src: Any) -> Any:
    return scatter(ctx, input, dim, index, src, reduce="add")


@converter("index_add", torch.index_add)
def index_add(ctx: Builder, input: Any, dim: int, index: Any, source: Any, **_: Any) -> Any:
    axis = _axis(dim, input.dim())
    shape = [1] * source.dim()
    shape[axis] = -1
    wide = ctx.op("Expand", reshape_to(ctx, index, shape), ctx.ints(source.shape))
    return ctx.op("ScatterElements", input, wide, source, axis=axis, reduction="add")


@converter("topk", torch.topk)
def topk(
    ctx: Builder, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    axis = _axis(dim, input.dim())
    count = ctx.const([int(k)], I64)
    return ctx.op("TopK", input, count, axis=axis, largest=int(largest), outputs=2)


@converter("sort", torch.sort)
def sort(
    ctx: Builder, input: Any, dim: int = -1, descending: bool = False, stable: bool = False
) -> Any:
    return topk(ctx, input, input.shape[dim], dim, descending)


@converter("argsort", torch.argsort)
def argsort(ctx: Builder, input: Any, dim: int = -1, descending: bool = False) -> Any:
    return topk(ctx, input, input.shape[dim], dim, descending)[1]


@converter("flip", torch.flip)
def flip(ctx: Builder, input: Any, *dims: Any) -> Any:
    cuts = [(_axis(d, input.dim()), -1, -END, -1) for d in _sizes(dims)]
    return _slice(ctx, input, cuts)


@converter("roll", torch.roll)
def roll(ctx: Builder, input: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None:
        raise Unsupported("roll of the flattened tensor")
    pairs = zip(*(([v] if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        axis = _axis(dim, ctx.out.dim())
        cut = -(shift % int(ctx.out.shape[axis]))
        if cut:
            parts = (_slice(ctx, input, [c]) for c in ((axis, cut, END, 1), (axis, 0, cut, 1)))
            input = ctx.op("Concat", *parts, axis=axis)
    return input


@converter("tril", torch.tril)
def tril(ctx: Builder, input: Any, diagonal: int = 0) -> Any:
    return ctx.op("Trilu", input, ctx.const(diagonal, I64), upper=0)


@converter("triu", torch.triu)
def triu(ctx: Builder, input: Any, diagonal: int = 0) -> Any:
    return ctx.op("Trilu", input, ctx.const(diagonal, I64), upper=1)


@converter("diff", torch.diff)
def diff(ctx: Builder, input: Any, n: int = 1, dim: int = -1) -> Any:
    axis = _axis(dim, input.dim())
    for _ in range(n):
        later = _slice(ctx, input, [(axis, 1, END, 1)])
        input = ctx.op("Sub", later, _slice(ctx, input, [(axis, 0, -1, 1)]))
    return input


# Made from sizes.


def _filled(ctx: Builder, sizes: Sequence[Any], value: Any) -> OnnxValue:
    return ctx.op("Expand", ctx.cast(value, ctx.out.dtype), ctx.ints(sizes))


@converter(torch.zeros, "new_zeros", torch.zeros_like)
def zeros(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    return _filled(ctx, _wanted(ctx, args), 0)


@converter(torch.ones, "new_ones", torch.ones_like)
def ones(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    return _filled(ctx, _wanted(ctx, args), 1)


@converter(torch.full, "new_full", torch.full_like)
def full(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    sizes = args if "fill_value" in kwargs else args[:-1]
    return _filled(ctx, _wanted(ctx, sizes), value)


def _wanted(ctx: Builder, args: Sequence[Any]) -> list[Any]:
    """Sizes asked for: of a tensor (``*_like``), or the rest after one (``new_*``), or given."""
    if isinstance(args[0], OnnxValue):
        return _sizes(args[1:]) if len(args) > 1 else list(args[0].shape)
    return _sizes(args)


@converter(torch.arange)
def arange(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    numbers = (ctx.cast(v, ctx.out.dtype) for v in (start, end, step))
    return ctx.op("Range", *numbers)


@converter(F.one_hot)
def one_hot(ctx: Builder, tensor: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise Unsupported("one_hot without num_classes has a size that depends on values")
    values = ctx.const([0, 1], I64)
    return ctx.op("OneHot", tensor, ctx.const([num_classes], I64), values, axis=-1)


@converter(F.pad)
def pad(
    ctx: Builder, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    rank = input.dim()
    before, after = [0] * rank, [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k], after[rank - 1 - k] = pad[2 * k], pad[2 * k + 1]
    if mode == "circular":  # ONNX has "wrap", but not every runtime
        for axis in range(rank):
            if before[axis] or after[axis]:
                ends = [_slice(ctx, input, [(axis, -before[axis], END, 1)])] * bool(before[axis])
                starts = [_slice(ctx, input, [(axis, 0, after[axis], 1)])] * bool(after[axis])
                input = ctx.op("Concat", *ends, input, *starts, axis=axis)
        return input
    kinds = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    amounts = ctx.ints([*before, *after])
    fill = ctx.cast(value or 0, input.dtype) if mode == "constant" else None
    return ctx.op("Pad", input, amounts, fill, mode=kinds[mode])


@converter("unfold")
def unfold(ctx: Builder, input: Any, dimension: int, size: int, step: int) -> Any:
    axis = _axis(dimension, input.dim())
    count = (int(input.shape[axis]) - size) // step + 1
    rows = torch.arange(count)[:, None] * step + torch.arange(size)[None, :]
    windows = ctx.op("Gather", input, rows, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, input.dim() + 1), axis + 1]
    return ctx.op("Transpose", windows, perm=order)
