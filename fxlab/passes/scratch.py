"""How much memory does a kernel hold for its time only, which no value of the program shows?

A convolution may unfold its input into columns, oneDNN copies operands into a layout of its own,
an LSTM keeps all its gates. What stands here was found by reading the kernels (torch's
``aten/src/ATen/native``, oneDNN's ``src/cpu``) and by looking at the profiler's memory events, and
`tests/test_scratch.py` holds it against those events for random shapes. Where a kernel's memory
follows no rule that is known here, a `Scratch` says so: its bytes are then the least there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Scratch", "has_rule", "scratch_of"]

aten = torch.ops.aten
_PAGE = 4096


class Scratch(NamedTuple):
    """The memory of one kernel beyond its operands and results.

    Attributes:
        bytes: The most that it holds at one moment.
        caveat: Why that is a lower bound; empty where it is the number.
        kept: Bytes that the storage of its result has, where these are more than the result's.
    """

    bytes: int = 0
    caveat: str = ""
    kept: int = 0


# LAPACK and these take copies whose number depends on the values, the sizes or the build.
_UNKNOWN = {
    "_cdist_forward",
    "_euclidean_dist",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "masked_select",
}

_Rule = Callable[[tuple[Any, ...], Any], Scratch]
_RULES: dict[Any, _Rule] = {}


def scratch_of(packet: Any, args: tuple[Any, ...], out: Any) -> Scratch:
    """Return what the operator ``packet`` holds beside ``args`` and ``out``, on a CPU.

    Args:
        packet: ``torch.ops.aten.convolution``, without its overload.
        args: Its arguments; of tensors only shapes, strides and dtypes are looked at.
        out: Its result.

    Example:
        >>> x, w = torch.empty(2, 3, 8, 8, dtype=torch.float64), torch.empty(4, 3, 3, 3)
        >>> args = (x, w.double(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        >>> scratch_of(torch.ops.aten.convolution, args, torch.empty(2, 4, 6, 6)).bytes
        15552
    """
    rule = _RULES.get(packet)
    if rule is not None:
        return rule(args, out)
    name = packet.__name__
    unknown = name in _UNKNOWN or name.startswith(("linalg_", "_linalg_"))
    return Scratch(0, f"what {name} copies is not known here") if unknown else Scratch()


def has_rule(packet: Any) -> bool:
    """Say whether ``packet`` is one kernel for the purpose of memory, whatever it decomposes to."""
    return packet in _RULES


def _rule(*packets: Any) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(packets, rule))
        return rule

    return register


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _up(value: int, step: int) -> int:
    """Round up to a multiple of ``step``."""
    return -(-value // step) * step


def _last(t: torch.Tensor) -> torch.memory_format:
    return torch.channels_last_3d if t.dim() == 5 else torch.channels_last


def _channels_last(t: torch.Tensor) -> bool:
    """Say whether torch takes ``t`` for one with channels last; with one channel it may be both."""
    return t.dim() > 3 and t.stride(1) == 1 and t.is_contiguous(memory_format=_last(t))


def _block() -> int:
    """Channels in a block of oneDNN's: the floats of one register."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _size(value: Any) -> int:
    """Bytes of all tensors of a list, or of one."""
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return sum(_bytes(t) for t in tensors if isinstance(t, torch.Tensor))


# Convolutions


class _Convolution(NamedTuple):
    """The arguments of aten.convolution, and the sizes that its kernels reckon with."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def taps(self) -> int:
        """Elements of the window."""
        return math.prod(self.weight.shape[2:])

    @property
    def pointwise(self) -> bool:
        """Whether it is a matrix product of the input as it stands."""
        return self.taps == 1 and set(self.stride) == {1} and not any(self.padding)

    def columns(self, out: torch.Tensor) -> int:
        """Bytes of one sample of one group, each window unfolded."""
        side = self.x if self.transposed else out
        channels = self.weight.shape[1]  # of a group: of the input, transposed of the result
        return channels * self.taps * math.prod(side.shape[2:]) * self.x.element_size()


@_rule(aten.convolution, aten._convolution)
def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    conv = _Convolution(*args[:9])
    if conv.x.device.type != "cpu":
        where = conv.x.device.type
        return Scratch(0, f"the workspace of a convolution on {where} is chosen when it runs")
    if not out.numel():
        return Scratch()
    select = getattr(torch._C, "_select_conv_backend", None)
    if select is None:
        return Scratch(0, "this torch does not say which kernel it takes for a convolution")
    sizes = [out.shape[1]] if conv.bias is not None else None
    # One enumerator has no name in Python; it prints as "???" and is oneDNN's transposed one.
    name = str(select(*conv, sizes)).rpartition(".")[2]
    slow = _SLOW.get(name)
    if slow is not None:
        found = _one_group_after_the_other(conv, out, slow)
        return found._replace(bytes=found.bytes + _copied(conv, name))
    if name not in ("Mkldnn", "???"):
        return Scratch(0, f"nothing is known here of the kernel {name}")
    if conv.x.dtype != torch.float32:
        return Scratch(0, f"oneDNN's layouts for {conv.x.dtype} are not known here")
    if conv.transposed:
        return _onednn_transposed(conv, out)
    return _onednn_grouped(conv, out) if conv.groups > 1 else _onednn(conv, out)


def _copied(conv: _Convolution, name: str) -> int:
    """What torch's own kernels copy because it lies otherwise than they read it."""
    x, weight = conv.x, conv.weight
    if name.endswith("2d") and _channels_last(x):
        return 0 if weight.is_contiguous(memory_format=_last(weight)) else _bytes(weight)
    return 0 if x.is_contiguous() else _bytes(x)


def _unfolded(conv: _Convolution, out: torch.Tensor) -> Scratch:
    return Scratch(0 if conv.pointwise else conv.x.shape[0] * conv.columns(out))


def _unfolded_one(conv: _Convolution, out: torch.Tensor) -> Scratch:
    return Scratch(conv.columns(out))


def _unfolded_back(conv: _Convolution, out: torch.Tensor) -> Scratch:
    return Scratch(conv.x.shape[0] * conv.columns(out))


def _unfolded_back_3d(conv: _Convolution, out: torch.Tensor) -> Scratch:
    """The result begins as large as the input and grows, so that both are there for a moment."""
    given, made = _bytes(conv.x), _bytes(out)
    ones = 0 if conv.bias is None else made // (out.shape[0] * out.shape[1])
    storage = max(given, made)
    while_growing = given if made > given else 0
    beyond = storage - made + conv.columns(out) + ones
    return Scratch(max(while_growing, beyond), kept=storage)


_SLOW: dict[str, Callable[[_Convolution, torch.Tensor], Scratch]] = {
    "Slow2d": _unfolded,
    "Slow3d": _unfolded,
    "SlowDilated2d": _unfolded_one,
    "SlowDilated3d": _unfolded_one,
    "SlowTranspose2d": _unfolded_back,
    "SlowTranspose3d": _unfolded_back_3d,
}


def _one_group_after_the_other(
    conv: _Convolution, out: torch.Tensor, kernel: Callable[[_Convolution, torch.Tensor], Scratch]
) -> Scratch:
    """Kernels of torch's own do one group; the groups' results are joined at the end."""
    if conv.groups == 1:
        return kernel(conv, out)
    x, parts = conv.x, conv.groups
    if kernel is _unfolded and x.dim() == 5:  # but for this one, which unfolds all groups
        return Scratch(x.shape[0] * parts * conv.columns(out))
    part = conv._replace(x=x[:, : x.shape[1] // parts], groups=1)
    made = out[:, : out.shape[1] // parts]
    one = kernel(part, made)
    copied = _bytes(part.x) if x.shape[0] > 1 else 0
    more = max(0, one.kept - _bytes(made))  # of each group's result, until all are joined
    return Scratch(max((parts - 1) * more + copied + one.bytes, parts * more + _bytes(out)))


def _onednn(conv: _Convolution, out: torch.Tensor) -> Scratch:
    """Input, weights and result stand there once more, in blocks of channels."""
    x, weight = conv.x, conv.weight
    block = _block()
    c_in, c_out = x.shape[1], out.shape[1]
    if _channels_last(x):
        copied = 0 if weight.is_contiguous(memory_format=_last(weight)) else _bytes(weight)
        packed = c_in * _up(c_out, block) * conv.taps * 4
        return Scratch(
            copied + packed, "how much oneDNN gathers of channels-last is not known here"
        )
    reach = [d * (k - 1) for d, k in zip(conv.dilation, weight.shape[2:], strict=True)]
    if any(p > r for p, r in zip(conv.padding, reach, strict=True)):
        return Scratch(max(_gemm_columns(conv, out), _bytes(out)))
    # A window of one element is a product of matrices, if every element of the input is reached.
    sizes = zip(out.shape[2:], conv.stride, x.shape[2:], strict=True)
    one_tap = conv.taps == 1 and all(o * s == i for o, s, i in sizes)
    one_tap = one_tap and (x.dim() < 5 or set(conv.stride) == {1})
    as_it_is = c_in < block and not one_tap
    given = 0 if as_it_is else _bytes(x) // c_in * _up(c_in, block)
    made = _bytes(out) // c_out * _up(c_out, block)
    per_output = c_in if as_it_is else _up(c_in, block)
    packed = _up(c_out, block) * per_output * conv.taps * 4
    rows = 0
    if one_tap and set(conv.stride) != {1}:  # each thread gathers the rows that it needs
        rows = torch.get_num_threads() * conv.columns(out) // c_in * _up(c_in, block)
    return Scratch(max(rows + given + packed + made - _bytes(out), made))


def _onednn_grouped(conv: _Convolution, out: torch.Tensor) -> Scratch:
    x, groups, made = conv.x, conv.groups, _bytes(out)
    c_in, c_out = x.shape[1] // groups, out.shape[1] // groups
    block = _block()
    if _channels_last(x):
        return Scratch(0, "oneDNN's grouped kernels for channels-last are not known here")
    if c_in == c_out == 1 and (x.dim() < 5 or set(conv.dilation) == {1}):
        packed = _up(groups, block) * conv.taps * 4
        if x.dim() == 5:  # channels last, there and back
            return Scratch(max(_bytes(x) + packed, 2 * made))
        given, blocked = (_bytes(t) // groups * _up(groups, block) for t in (x, out))
        return Scratch(max(given + packed + blocked - made, blocked))
    packed = _bytes(conv.weight)
    if c_in % 4 == 0 and c_out % 4 == 0:
        return Scratch(max(_bytes(x) + packed, made))
    if x.shape[1] < 8 and c_out % 8 == 0:
        return Scratch(max(packed, made))
    return Scratch(max(_gemm_columns(conv, out), made))


def _gemm_columns(conv: _Convolution, out: torch.Tensor) -> int:
    """Columns of one sample and group for each thread; of volumes one slice at a time."""
    if conv.pointwise:
        return 0
    side = conv.x if conv.transposed else out
    slices = side.shape[2] if side.dim() == 5 else 1
    threads = min(torch.get_num_threads(), conv.x.shape[0] * conv.groups)
    return threads * conv.columns(out) // slices


def _onednn_transposed(conv: _Convolution, out: torch.Tensor) -> Scratch:
    """The gradient of a convolution; a bias is added to a result of its own."""
    x, groups, made, block = conv.x, conv.groups, _bytes(out), _block()
    c_in, c_out = x.shape[1] // groups, out.shape[1] // groups
    strided, dilated = set(conv.stride) != {1}, set(conv.dilation) != {1}
    depthwise = groups > 1 and c_in == c_out == 1
    fours = c_in % 4 == 0 and c_out % 4 == 0
    blocks = groups == 1 or (fours and (conv.taps > 1 or not strided))
    wide = groups == 1 or (c_in % block == 0 and c_out % block == 0)
    biased = conv.bias is not None
    if _channels_last(x):
        return Scratch(0, "oneDNN's transposed kernels for channels-last are not known here")
    if groups > 1 and c_in % block == 0 and (strided or not wide):
        return Scratch(made, "oneDNN's transposed kernels for wide groups are not known here")
    one_by_one = depthwise and x.dim() < 5 and not dilated
    if (strided and dilated) or not (blocks or one_by_one):
        return Scratch(max(biased * made + _gemm_columns(conv, out), made))
    if not strided or not wide:
        whole = block if wide or depthwise else 1
        given, blocked = (_bytes(t) // t.shape[1] * _up(t.shape[1], whole) for t in (x, out))
        packed = _bytes(conv.weight)
        if depthwise:
            packed = packed // groups * _up(groups, block)
        elif wide:
            packed = groups * _up(c_in, block) * _up(c_out, block) * conv.taps * 4
        return Scratch(max(biased * blocked + given + packed + blocked - made, blocked))
    # Channels last: there, and back in two steps. What the kernel gathers beside that depends on
    # how it cuts the work up: some lists, rows of the input, and of the result where it is uneven.
    given = _bytes(x) if x.shape[1] > 1 else 0
    packed = groups * c_in * _up(c_out, block) * conv.taps * 4
    even = all(o % s == 0 for o, s in zip(out.shape[2:], conv.stride, strict=True))
    first = (37_000 if even else 57_500 + biased * made) + given + packed
    most = first + _bytes(x) // 2 + (0 if even else min(2 * made, 1 << 20))
    back = made if out.shape[1] == 1 else 2 * made
    if back >= most:
        return Scratch(back)
    why = "how much oneDNN's strided transposed kernel gathers is not known here"
    return Scratch(max(first, back), why)


# Recurrent layers


@_rule(aten.mkldnn_rnn_layer)
def _lstm(args: tuple[Any, ...], out: Any) -> Scratch:
    """Sum of the biases, both weights in blocks, and the states of all steps, each from a page on.

    oneDNN's ``set_workspace_sizes`` and ``set_offsets`` (``src/cpu/rnn``), for inference.
    """
    x, w_input, w_hidden = args[:3]
    if args[15]:
        return Scratch(0, "what oneDNN keeps of an LSTM for its gradient is not known here")
    if x.dtype != torch.float32:
        return Scratch(0, f"oneDNN's LSTM for {x.dtype} is not known here")
    steps, batch, features = x.shape
    gates, hidden = w_input.shape[0], w_hidden.shape[1]

    def row(width: int) -> int:  # whole cache lines, and not a multiple of 1 KB
        whole = _up(width, 16)
        return batch * 4 * (whole + 16 if whole % 256 == 0 else whole)

    states = 2 * (steps + 1) * row(max(features, hidden))
    cells = 2 * (steps + 1) * batch * hidden * 4
    at_once = steps if batch == 1 else 1
    ends = 0
    for part in (states, cells, at_once * row(gates), row(hidden)):
        ends = _up(ends, _PAGE) + part
    block = 32 if _block() == 16 or batch == 1 else 16
    padded = gates // hidden * _up(hidden, block) * 4
    packed = (features + hidden) * padded
    return Scratch(gates * 4 + packed + _up(ends, _PAGE) + 4872)


# Attention


@_rule(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(args: tuple[Any, ...], out: Any) -> Scratch:
    """Each thread has a tile of scores, two sums and a tile of the result."""
    query, key = args[:2]
    if query.dtype not in (torch.float32, torch.float64):
        return Scratch(0, f"the tiles of attention for {query.dtype} are not known here")
    length = query.shape[2]
    tile = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    across = min(512, key.shape[2])
    width = tile * (across + 2 + query.shape[3])
    return Scratch(torch.get_num_threads() * width * query.element_size())


@_rule(aten._native_multi_head_attention)
def _fast_attention(args: tuple[Any, ...], out: Any) -> Scratch:
    """The fast path of nn.MultiheadAttention: queries, keys and values twice, or the scores."""
    query, _, _, _, heads = args[:5]
    return Scratch(_attention_bytes(query, heads) - _size(out))


@_rule(aten._transformer_encoder_layer_fwd)
def _fast_layer(args: tuple[Any, ...], out: Any) -> Scratch:
    """The fast path of nn.TransformerEncoderLayer: its attention, or what is between its two."""
    x, _, heads = args[:3]
    inner = next(w for w in reversed(args) if isinstance(w, torch.Tensor) and w.dim() == 2)
    between = 2 * _bytes(x) + x.shape[0] * x.shape[1] * inner.shape[1] * x.element_size()
    return Scratch(max(_attention_bytes(x, heads), between) - _bytes(out))


def _attention_bytes(x: torch.Tensor, heads: int) -> int:
    scores = x.shape[0] * heads * x.shape[1] ** 2 * x.element_size()
    return max(6 * _bytes(x), 3 * _bytes(x) + scores)


# The rest, each by its name


@_rule(aten.upsample_nearest2d, aten.upsample_bilinear2d, aten._upsample_nearest_exact2d)
def _upsampled(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    """More than one channel is resized channels last, there and back."""
    x = args[0]
    plain = x.shape[1] == 1 or _channels_last(x)
    return Scratch(0 if plain else _bytes(x) + _bytes(out))


@_rule(aten.logsumexp)
def _logsumexp(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    """The exponentials of all elements, and the maxima."""
    return Scratch(_bytes(args[0]) + _bytes(out))


@_rule(aten.median, aten.im2col, aten.huber_loss, aten.soft_margin_loss)
def _one_copy(args: tuple[Any, ...], out: Any) -> Scratch:
    return Scratch(_bytes(args[0]))


@_rule(aten.mse_loss, aten.smooth_l1_loss)
def _loss(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    """All differences, and once more while their mean or sum is taken."""
    return Scratch(0 if out.shape == args[0].shape else 2 * _bytes(args[0]))


@_rule(aten.binary_cross_entropy)
def _cross_entropy(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    return Scratch(0 if out.shape == args[0].shape else _bytes(args[0]))


@_rule(aten.kthvalue)
def _copy_and_places(args: tuple[Any, ...], out: Any) -> Scratch:
    return Scratch(_bytes(args[0]) + args[0].numel() * 8)


@_rule(aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
def _product(args: tuple[Any, ...], out: torch.Tensor) -> Scratch:
    if out.dtype in (torch.bfloat16, torch.float16):
        return Scratch(0, f"how oneDNN packs the operands of a product in {out.dtype} is not known")
    # BLAS reads rows or columns; what lies otherwise is copied.
    apart = [t for t in args[-2:] if 1 not in t.stride()[-2:]]
    return Scratch(_size(apart))
