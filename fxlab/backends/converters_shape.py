"""How are views, slices, joins, gathers and casts said in ONNX?

Converters (see `fxlab.backends.onnx`). Sizes may depend on the batch: `ctx.ints` builds the shape
operand of an ONNX node from fixed and dynamic sizes alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.onnx import Builder, OnnxValue, SymbolicInt, Unsupported, converter

__all__ = ["axis_of", "reshape_to", "slice_axes", "within"]

I64 = torch.int64
END = 2**63 - 1


def _sizes(args: Sequence[Any]) -> list[Any]:
    """Sizes given one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)):
        return list(args[0])
    return list(args)


def axis_of(dim: int, rank: int) -> int:
    """Return a dimension of a tensor of that rank, counted from the front.

    Raises:
        Unsupported: the tensor has none; ONNX knows no axis 0 of a number.
    """
    if rank == 0:
        raise Unsupported("along an axis of a tensor of no dimensions")
    return dim % rank


# Shape.


def reshape_to(ctx: Builder, x: Any, sizes: Sequence[Any]) -> OnnxValue:
    """Reshape to sizes, of which one may be -1 and some may depend on the batch."""
    if not sizes:  # a Reshape of a product to no dimensions ends OpenVINO's process
        return ctx.op("Squeeze", x, None)
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
    first, last = axis_of(start_dim, rank), axis_of(end_dim, rank)
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
    axis = axis_of(dim, input.dim())
    return reshape_to(ctx, input, [*input.shape[:axis], *sizes, *input.shape[axis + 1 :]])


@converter("squeeze", torch.squeeze)
def squeeze(ctx: Builder, input: Any, dim: Any = None) -> Any:
    wanted = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = [axis_of(d, input.dim()) for d in wanted]
    axes = [d for d in axes if input.fake.shape[d] == 1]
    if input.other is not None and any(input.other.shape[d] != 1 for d in axes):
        raise Unsupported("squeeze of a dimension that depends on the batch")
    return ctx.op("Squeeze", input, ctx.const(axes, I64)) if axes else ctx.op("Identity", input)


@converter("unsqueeze", torch.unsqueeze)
def unsqueeze(ctx: Builder, input: Any, dim: int) -> Any:
    return ctx.op("Unsqueeze", input, ctx.const([dim % (input.dim() + 1)], I64))


@converter("permute", torch.permute)
def permute(ctx: Builder, input: Any, *args: Any, dims: Any = ()) -> Any:
    order = [axis_of(d, input.dim()) for d in _sizes(args or dims)]
    return ctx.op("Transpose", input, perm=order) if order else ctx.op("Identity", input)


@converter("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims)
def transpose(ctx: Builder, input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.dim()))
    if not order:
        return ctx.op("Identity", input)
    a, b = axis_of(dim0, input.dim()), axis_of(dim1, input.dim())
    order[a], order[b] = order[b], order[a]
    return ctx.op("Transpose", input, perm=order)


@converter("t", torch.t)
def t(ctx: Builder, input: Any) -> Any:
    return ctx.op("Transpose" if input.dim() == 2 else "Identity", input)


@converter("movedim", "moveaxis", torch.movedim, torch.moveaxis)
def movedim(ctx: Builder, input: Any, source: Any, destination: Any) -> Any:
    rank = input.dim()
    sources = [axis_of(d, rank) for d in ([source] if isinstance(source, int) else source)]
    targets = [
        axis_of(d, rank) for d in ([destination] if isinstance(destination, int) else destination)
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
def repeat_interleave(
    ctx: Builder, input: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Any:
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
    axis = axis_of(kwargs.get("axis", dim), ctx.out.dim())
    empty = [v for v in tensors if not (len(v.shape) == 1 and v.shape[0] == 0)]
    return ctx.op("Concat", *(ctx.cast(v, ctx.out.dtype) for v in empty), axis=axis)


@converter(torch.stack)
def stack(ctx: Builder, tensors: Sequence[Any], dim: int = 0) -> Any:
    axis = axis_of(dim, ctx.out.dim())
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
    axis = axis_of(dim, tensor.dim())
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
    axis = axis_of(dim, input.dim())
    return split(ctx, input, [piece.shape[axis] for piece in ctx.out], axis)


@converter("unbind", torch.unbind)
def unbind(ctx: Builder, input: Any, dim: int = 0) -> Any:
    axis = axis_of(dim, input.dim())
    pieces = split(ctx, input, [1] * len(ctx.out), axis)
    return tuple(ctx.op("Squeeze", piece, ctx.const([axis], I64)) for piece in pieces)


@converter("narrow", torch.narrow)
def narrow(ctx: Builder, input: Any, dim: int, start: int, length: int) -> Any:
    return slice_axes(ctx, input, [(axis_of(dim, input.dim()), start, start + length, 1)])


@converter(torch.ops.aten.slice.Tensor)
def slice_operator(
    ctx: Builder, input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    start, end = 0 if start is None else start, END if end is None else end
    return slice_axes(ctx, input, [(axis_of(dim, input.dim()), start, end, step)])


@converter("select", torch.select)
def select(ctx: Builder, input: Any, dim: int, index: int) -> Any:
    return ctx.op("Gather", input, ctx.const(index, I64), axis=axis_of(dim, input.dim()))


def slice_axes(ctx: Builder, x: Any, cuts: Sequence[tuple[int, Any, Any, int]]) -> OnnxValue:
    """Take a slice of some axes; ``cuts`` are (axis, start, end, step)."""
    axes, starts, ends, steps = (list(column) for column in zip(*cuts, strict=True))
    return ctx.op(
        "Slice", x, ctx.ints(starts), ctx.ints(ends), ctx.const(axes, I64), ctx.const(steps, I64)
    )


# Gather and scatter.


def within(ctx: Builder, index: Any, size: Any, negative: bool = False) -> Any:
    """Positions along an axis of that size, moved past its end where PyTorch raises.

    There onnxruntime raises, too, and OpenVINO, which looks at no position, reads something.

    Args:
        ctx: the builder.
        index: whole numbers.
        size: of the axis.
        negative: whether PyTorch counts negative ones from the end.
    """
    if ctx.backend == "openvino" or not isinstance(index, OnnxValue):
        return index
    kind = index.dtype
    end, zero = ctx.cast(size, kind), ctx.const(0, kind)
    if negative:
        index = ctx.op("Where", ctx.op("Less", index, zero), ctx.op("Add", index, end), index)
    return ctx.op("Where", ctx.op("Less", index, zero), end, index)


@converter("index_select", torch.index_select)
def index_select(ctx: Builder, input: Any, dim: int, index: Any) -> Any:
    axis = axis_of(dim, input.dim())
    return ctx.op("Gather", input, within(ctx, index, input.shape[axis]), axis=axis)


@converter("gather", torch.gather)
def gather(ctx: Builder, input: Any, dim: int, index: Any, **_: Any) -> Any:
    axis = axis_of(dim, input.dim())
    places = within(ctx, index, input.shape[axis])
    return ctx.op("GatherElements", _trimmed(ctx, input, index, axis), places, axis=axis)


def _trimmed(ctx: Builder, x: Any, index: Any, axis: int) -> Any:
    """ONNX wants equal sizes off the axis, PyTorch lets the index be smaller."""
    for d, (size, whole) in enumerate(zip(index.shape, x.shape, strict=True)):
        if d != axis and size != whole:  # no Slice: OpenVINO's clean-up loses it here
            if isinstance(size, SymbolicInt):
                raise Unsupported("gather by a smaller index whose size depends on the batch")
            x = ctx.op("Gather", x, torch.arange(size), axis=d)
    return x


@converter("take_along_dim", torch.take_along_dim)
def take_along_dim(ctx: Builder, input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return gather(ctx, input.reshape(-1), 0, indices.reshape(-1))
    axis = axis_of(dim, input.dim())
    sizes = ctx.out_sizes()
    sizes[axis] = input.shape[axis]
    return gather(ctx, input.expand(sizes), dim, indices.expand(ctx.out_sizes()))


_REDUCTIONS = {
    None: None,
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}


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
        source = slice_axes(ctx, source, cuts) if cuts else source
    axis = axis_of(dim, input.dim())
    places = within(ctx, index, input.shape[axis])
    mode = _REDUCTIONS[reduce]
    return ctx.op("ScatterElements", input, places, source, axis=axis, reduction=mode)


@converter("scatter_add", torch.scatter_add)
def scatter_add(ctx: Builder, input: Any, dim: int, index: Any, src: Any) -> Any:
    return scatter(ctx, input, dim, index, src, reduce="add")


@converter("scatter_reduce", torch.scatter_reduce)
def scatter_reduce(
    ctx: Builder,
    input: Any,
    dim: int,
    index: Any,
    src: Any,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if reduce not in _REDUCTIONS or not include_self:
        raise Unsupported(f"scatter_reduce with {reduce!r}, include_self={include_self}")
    return scatter(ctx, input, dim, index, src, reduce=reduce)


def _along(
    ctx: Builder, x: Any, dim: int, index: Any, source: Any, reduction: str | None = None
) -> OnnxValue:
    """`source` put to the places `index` (1-D) of one axis of `x`."""
    axis = axis_of(dim, x.dim())
    sizes = list(x.shape)
    sizes[axis] = index.numel()
    shape = [1] * x.dim()
    shape[axis] = -1
    places = within(ctx, index, x.shape[axis])
    wide = ctx.op("Expand", reshape_to(ctx, places, shape), ctx.ints(sizes))
    source = ctx.op("Expand", ctx.cast(source, x.dtype), ctx.ints(sizes))
    return ctx.op("ScatterElements", x, wide, source, axis=axis, reduction=reduction)


@converter("index_add", torch.index_add)
def index_add(
    ctx: Builder, input: Any, dim: int, index: Any, source: Any, *, alpha: float = 1
) -> Any:
    return _along(ctx, input, dim, index, source if alpha == 1 else source * alpha, "add")


@converter("index_copy", torch.index_copy)
def index_copy(ctx: Builder, input: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(ctx, input, dim, index, source)


@converter("index_fill", torch.index_fill)
def index_fill(ctx: Builder, input: Any, dim: int, index: Any, value: Any) -> Any:
    return _along(ctx, input, dim, index, value)


@converter("topk", torch.topk)
def topk(
    ctx: Builder, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    axis = axis_of(dim, input.dim())
    count = ctx.const([int(k)], I64)
    return ctx.op("TopK", input, count, axis=axis, largest=int(largest), outputs=2)


@converter("sort", torch.sort)
def sort(
    ctx: Builder, input: Any, dim: int = -1, descending: bool = False, stable: bool = False
) -> Any:
    return topk(ctx, input, input.shape[dim], dim, descending)


@converter("argsort", torch.argsort)
def argsort(
    ctx: Builder, input: Any, dim: int = -1, descending: bool = False, stable: bool = False
) -> Any:
    return topk(ctx, input, input.shape[dim], dim, descending)[1]


@converter("flip", torch.flip)
def flip(ctx: Builder, input: Any, *args: Any, dims: Any = ()) -> Any:
    cuts = [(axis_of(d, input.dim()), -1, -END, -1) for d in _sizes(args or dims)]
    return slice_axes(ctx, input, cuts) if cuts else ctx.op("Identity", input)


@converter("roll", torch.roll)
def roll(ctx: Builder, input: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None or dims == ():
        return input.reshape(-1).roll(shifts, 0).reshape(input.shape)
    pairs = zip(*(([v] if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        axis = axis_of(dim, ctx.out.dim())
        cut = -(shift % ctx.out_sizes(axis)[0])
        if cut:
            parts = (slice_axes(ctx, input, [c]) for c in ((axis, cut, END, 1), (axis, 0, cut, 1)))
            input = ctx.op("Concat", *parts, axis=axis)
    return input


@converter("tril", torch.tril)
def tril(ctx: Builder, input: Any, diagonal: int = 0) -> Any:
    return ctx.op("Trilu", input, ctx.const(diagonal, I64), upper=0)


@converter("triu", torch.triu)
def triu(ctx: Builder, input: Any, diagonal: int = 0) -> Any:
    return ctx.op("Trilu", input, ctx.const(diagonal, I64), upper=1)


@converter("diff", torch.diff)
def diff(
    ctx: Builder, input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Any:
    if n == 0:
        return ctx.op("Identity", input)
    axis = axis_of(dim, input.dim())
    parts = [x for x in (prepend, input, append) if x is not None]
    input = torch.cat(parts, axis) if len(parts) > 1 else input
    for _ in range(n):
        lead = (slice(None),) * axis
        later, earlier = input[(*lead, slice(1, None))], input[(*lead, slice(None, -1))]
        input = later ^ earlier if later.dtype is torch.bool else later - earlier
    return input


# Made from sizes.


def _filled(ctx: Builder, sizes: Sequence[Any], value: Any) -> OnnxValue:
    return ctx.op("Expand", ctx.cast(value, ctx.out.dtype), ctx.ints(sizes))


@converter(torch.zeros, "new_zeros", torch.zeros_like)
@converter(torch.empty, "new_empty", torch.empty_like)  # whatever it is, the program writes over it
def zeros(ctx: Builder, *args: Any, size: Any = None, **kwargs: Any) -> Any:
    return _filled(ctx, _wanted(args, size), 0)


@converter(torch.ones, "new_ones", torch.ones_like)
def ones(ctx: Builder, *args: Any, size: Any = None, **kwargs: Any) -> Any:
    return _filled(ctx, _wanted(args, size), 1)


@converter(torch.full, "new_full", torch.full_like)
def full(ctx: Builder, *args: Any, size: Any = None, **kwargs: Any) -> Any:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    sizes = args if "fill_value" in kwargs else args[:-1]
    return _filled(ctx, _wanted(sizes, size), value)


@converter("fill_", torch.fill_, torch.fill)
def fill(ctx: Builder, input: Any, value: Any) -> Any:
    return _filled(ctx, input.shape, value)


@converter("zero_", torch.zero_)
def zero_(ctx: Builder, input: Any) -> Any:
    return _filled(ctx, input.shape, 0)


@converter("copy_")
def copy_(ctx: Builder, input: Any, src: Any, non_blocking: bool = False) -> Any:
    return _filled(ctx, input.shape, src)


@converter("new_tensor")
def new_tensor(ctx: Builder, input: Any, data: Any, **_: Any) -> Any:
    return ctx.value(torch.tensor(data, dtype=ctx.out.dtype))


def _wanted(args: Sequence[Any], size: Any) -> list[Any]:
    """Sizes asked for: of a tensor (``*_like``), or the rest after one (``new_*``), or given."""
    given = [size] if size is not None else args
    if args and isinstance(args[0], OnnxValue):
        rest = [size] if size is not None else args[1:]
        return _sizes(rest) if rest else list(args[0].shape)
    return _sizes(given)


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
    if ctx.backend != "openvino":  # OneHot has zeros for what is outside; reading a place raises
        tensor = ctx.op("Gather", torch.arange(num_classes), within(ctx, tensor, num_classes))
    return ctx.op("OneHot", tensor, ctx.const([num_classes], I64), values, axis=-1)


@converter(F.pad, torch.ops.aten.pad.default, torch.ops.aten.constant_pad_nd.default)
def pad(
    ctx: Builder, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    rank = input.dim()
    before, after = [0] * rank, [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k], after[rank - 1 - k] = pad[2 * k], pad[2 * k + 1]
    negative = [n for n in pad if isinstance(n, int) and n < 0]
    if negative:  # it cuts off, whatever the mode
        for axis in range(rank):
            first, last = max(0, -before[axis]), max(0, -after[axis])
            if not isinstance(rest := input.shape[axis] - first - last, SymbolicInt) and rest < 1:
                raise Unsupported("padding that cuts all of an axis off")
            input = input.narrow(axis, first, rest)
        before, after = ([max(0, n) for n in side] for side in (before, after))
    if mode == "circular":  # ONNX has "wrap", but not every runtime
        for axis in range(rank):
            if before[axis] or after[axis]:
                ends = [slice_axes(ctx, input, [(axis, -before[axis], END, 1)])] * bool(
                    before[axis]
                )
                starts = [slice_axes(ctx, input, [(axis, 0, after[axis], 1)])] * bool(after[axis])
                input = ctx.op("Concat", *ends, input, *starts, axis=axis)
        return input
    kinds = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    amounts = ctx.ints([*before, *after])
    fill = ctx.cast(value or 0, input.dtype) if mode == "constant" else None
    return ctx.op("Pad", input, amounts, fill, mode=kinds[mode])


@converter("unfold")
def unfold(ctx: Builder, input: Any, dimension: int, size: int, step: int) -> Any:
    axis = axis_of(dimension, input.dim())
    count = (int(input.shape[axis]) - size) // step + 1
    rows = torch.arange(count)[:, None] * step + torch.arange(size)[None, :]
    windows = ctx.op("Gather", input, rows, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, input.dim() + 1), axis + 1]
    return ctx.op("Transpose", windows, perm=order)
