"""Single operations with their inputs: what each runtime must compute as eager does.

A case is ``(id, program, inputs)``. Numbers are chosen away from ties and poles, where two correct
implementations may round to different sides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, kept 0.02 away from zero and from halves."""
    x = torch.randn(*shape, generator=_generator(seed))
    return torch.where(((x * 2) - (x * 2).round()).abs() < 0.04, x + 0.05, x)


def positive(*shape: int, seed: int = 1) -> torch.Tensor:
    """Numbers from 0.1 to 0.9."""
    return torch.rand(*shape, generator=_generator(seed)) * 0.8 + 0.1


def whole(*shape: int, low: int = 1, high: int = 9, seed: int = 2) -> torch.Tensor:
    """int64 numbers from `low` to `high` - 1."""
    return torch.randint(low, high, shape, generator=_generator(seed))


def _with_number(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a: function(a, 0.25)


def cases() -> list[Case]:
    """All cases, each with a unique id."""
    x, y, p = normal(3, 4), normal(3, 4, seed=5), positive(3, 4)
    image = normal(2, 4, 8, 8)
    found: list[Case] = []

    def add(name: str, program: Callable[..., Any], *inputs: torch.Tensor) -> None:
        found.append((name, program, inputs))

    for name in [
        "abs",
        "neg",
        "exp",
        "sin",
        "cos",
        "tan",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "erf",
        "sigmoid",
        "reciprocal",
        "ceil",
        "floor",
        "round",
        "trunc",
        "frac",
        "sign",
        "square",
        "exp2",
        "expm1",
        "relu",
        "erfc",
        "deg2rad",
        "rad2deg",
        "isnan",
        "isfinite",
        "isinf",
    ]:
        add(name, getattr(torch, name), x)
    for name in [
        "log",
        "sqrt",
        "asin",
        "acos",
        "atanh",
        "rsqrt",
        "log2",
        "log10",
        "log1p",
        "logit",
    ]:
        add(name, getattr(torch, name), p)
    add("acosh", torch.acosh, p + 1)
    add("nan_to_num", torch.nan_to_num, torch.tensor([1.0, float("nan"), float("inf")]))
    add("log of integers", torch.log, whole(3))
    add("relu method in place", lambda a: (a + 1).relu_(), x)
    add("operator neg", operator.neg, x)

    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "hypot",
        "logaddexp",
        "fmod",
        "remainder",
    ]:
        add(name, getattr(torch, name), x, y)
    add("pow", torch.pow, p, y)
    add("pow of a number", lambda a: a**3, x)
    add("square by pow", lambda a: a**2, x)
    add("root by pow", lambda a: a**0.5, p)
    add("number to a power", lambda a: 2**a, x)
    add("add alpha", lambda a, b: torch.add(a, b, alpha=2), x, y)
    add("sub alpha", lambda a, b: torch.sub(a, b, alpha=0.5), x, y)
    add("rsub", lambda a: 1 - a, x)
    add("number minus", lambda a: torch.rsub(a, 3), x)
    add("add a number", lambda a: a + 2, x)
    add("int plus float", lambda a: a + 0.5, whole(3, 4))
    add("int times tensor", torch.mul, whole(3, 4), x)
    add("int over int", torch.div, whole(3, 4), whole(3, 4, seed=7))
    add("floor divide", operator.floordiv, whole(3, 4, low=-9), whole(3, 4, seed=7))
    add("floor divide float", lambda a, b: a // b, x, p)
    add("div floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), x, p)
    add("div trunc", lambda a, b: torch.div(a, b, rounding_mode="trunc"), x, p)
    add("mod of ints", operator.mod, whole(3, 4, low=-9), whole(3, 4, seed=7))
    add("in place add", lambda a, b: operator.iadd(a + 0, b), x, y)
    add("method mul_", lambda a, b: (a + 0).mul_(b), x, y)
    add("addcmul", lambda a, b: torch.addcmul(a, b, b, value=0.5), x, y)
    add("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), x, y, p)
    add("lerp", lambda a, b: torch.lerp(a, b, 0.3), x, y)
    add("clamp", lambda a: a.clamp(-0.5, 0.5), x)
    add("clamp min", lambda a: torch.clamp(a, min=0.1), x)
    add("clamp by tensors", lambda a, b: torch.clamp(a, b - 1, b), x, y)
    add("clamp_min", lambda a: a.clamp_min(0.2), x)
    add("broadcast", torch.add, x, normal(4))

    for name in ["eq", "ne", "lt", "le", "gt", "ge"]:
        add(name, getattr(torch, name), whole(3, 4), whole(3, 4, seed=9))
        add(f"{name} number", _with_number(getattr(operator, name)), x)
    for name in ["logical_and", "logical_or", "logical_xor"]:
        add(name, getattr(torch, name), x > 0, y > 0)
    for name in ["bitwise_and", "bitwise_or", "bitwise_xor"]:
        add(name, getattr(torch, name), whole(3, 4), whole(3, 4, seed=9))
    add("and of masks", lambda a, b: (a > 0) & (b > 0), x, y)
    add("not of a mask", lambda a: ~(a > 0), x)
    add("logical_not", torch.logical_not, x > 0)
    add("where", lambda a, b: torch.where(a > 0, a, b), x, y)
    add("where number", lambda a: torch.where(a > 0, a, 0.0), x)
    add("masked_fill", lambda a: a.masked_fill(a > 0, -1.0), x)

    for name in ["sum", "mean", "prod", "amax", "amin"]:
        add(name, getattr(torch, name), x)
        add(f"{name} dim", functools.partial(getattr(torch, name), dim=1), x)
        add(f"{name} keepdim", functools.partial(getattr(torch, name), dim=-1, keepdim=True), x)
    add("sum dims", lambda a: a.sum((1, 2)), image)
    add("sum of ints", torch.sum, whole(3, 4))
    add("mean of a mask", lambda a: (a > 0).float().mean(), x)
    add("max", torch.max, x)
    add("max dim", lambda a: torch.max(a, 1), x)
    add("min dim", lambda a: a.min(dim=0, keepdim=True), x)
    add("max of two", torch.max, x, y)
    add("argmax", torch.argmax, x)
    add("argmin dim", lambda a: a.argmin(1), x)
    add("var", torch.var, x)
    add("var dim", lambda a: a.var(1, unbiased=False), x)
    add("std dim", lambda a: torch.std(a, dim=-1, keepdim=True), x)
    add("var_mean", lambda a: torch.var_mean(a, dim=1), x)
    add("norm", torch.norm, x)
    add("norm 1", lambda a: torch.norm(a, p=1, dim=1), x)
    add("vector_norm inf", lambda a: torch.linalg.vector_norm(a, float("inf"), 1), x)
    add("norm 3", lambda a: torch.norm(a, p=3, dim=1), x)
    add("logsumexp", lambda a: torch.logsumexp(a, 1), x)
    add("all", lambda a: (a > -5).all(), x)
    add("any dim", lambda a: (a > 0.5).any(1), x)
    add("count_nonzero", lambda a: torch.count_nonzero(a > 0, dim=1), x)
    add("cumsum", lambda a: torch.cumsum(a, 1), x)

    add("matmul", torch.matmul, x, normal(4, 5))
    add("matmul batch", torch.matmul, normal(2, 3, 4), normal(2, 4, 5))
    add("matmul broadcast", operator.matmul, normal(2, 3, 4), normal(4, 5))
    add("mm", torch.mm, x, normal(4, 5))
    add("bmm", torch.bmm, normal(2, 3, 4), normal(2, 4, 5))
    add("mv", torch.mv, x, normal(4))
    add("dot", torch.dot, normal(4), normal(4, seed=8))
    add("linear", F.linear, x, normal(5, 4), normal(5))
    add("linear 3d", F.linear, normal(2, 3, 4), normal(5, 4), normal(5))
    add("linear no bias", F.linear, x, normal(5, 4))
    add("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), normal(5), x,
        normal(4, 5))  # fmt: skip
    add("baddbmm", torch.baddbmm, normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5))
    add("outer", torch.outer, normal(3), normal(4))
    add("einsum", lambda a, b: torch.einsum("bij, bjk -> bik", a, b), normal(2, 3, 4),
        normal(2, 4, 5))  # fmt: skip

    add("conv1d", lambda a, w: F.conv1d(a, w, stride=2, padding=1), normal(2, 4, 9),
        normal(6, 4, 3))  # fmt: skip
    add("conv2d", F.conv2d, image, normal(6, 4, 3, 3), normal(6))
    add("conv2d same", lambda a, w: F.conv2d(a, w, padding="same", dilation=2), image,
        normal(6, 4, 3, 3))  # fmt: skip
    add("conv2d groups", lambda a, w: F.conv2d(a, w, groups=2, padding=(1, 0)), image,
        normal(6, 2, 3, 3))  # fmt: skip
    add("conv2d depthwise", lambda a, w: F.conv2d(a, w, groups=4), image, normal(4, 1, 3, 3))
    add("conv2d unbatched", F.conv2d, image[0], normal(6, 4, 3, 3))
    add("conv3d", F.conv3d, normal(1, 2, 4, 5, 6), normal(3, 2, 2, 2, 2))
    add("conv_transpose1d", lambda a, w: F.conv_transpose1d(a, w, stride=2), normal(2, 4, 5),
        normal(4, 3, 3))  # fmt: skip
    add("conv_transpose2d", lambda a, w: F.conv_transpose2d(a, w, None, 2, 1, 1), image,
        normal(4, 3, 3, 3))  # fmt: skip
    add("max_pool2d", lambda a: F.max_pool2d(a, 2), image)
    add("max_pool2d padded", lambda a: F.max_pool2d(a, 3, 2, 1), image)
    add("max_pool2d ceil", lambda a: F.max_pool2d(a, 3, 2, ceil_mode=True), image)
    add("max_pool1d", lambda a: F.max_pool1d(a, 2), normal(2, 4, 9))
    add("avg_pool2d", lambda a: F.avg_pool2d(a, 2), image)
    add("avg_pool2d padded", lambda a: F.avg_pool2d(a, 3, 1, 1), image)
    add("avg_pool2d bare", lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False), image)
    add("avg_pool1d", lambda a: F.avg_pool1d(a, 3, 2), normal(2, 4, 9))
    add("adaptive_avg_pool2d 1", lambda a: F.adaptive_avg_pool2d(a, 1), image)
    add("adaptive_avg_pool2d", lambda a: F.adaptive_avg_pool2d(a, (4, 2)), image)
    add("adaptive_max_pool2d", lambda a: F.adaptive_max_pool2d(a, 2), image)

    add("batch_norm", lambda a, m, v: F.batch_norm(a, m, v), image, normal(4), positive(4))
    add("layer_norm", lambda a, w, b: F.layer_norm(a, (4,), w, b), x, normal(4), normal(4))
    add("layer_norm two axes", lambda a: F.layer_norm(a, (8, 8)), image)
    add("rms_norm", lambda a, w: F.rms_norm(a, (4,), w, 1e-6), x, normal(4))
    add("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), image, normal(4), normal(4))
    add("instance_norm", F.instance_norm, image)
    add("normalize", lambda a: F.normalize(a, dim=1), x)
    add("local_response_norm", lambda a: F.local_response_norm(a, 3), image)

    for name in [
        "relu6",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "leaky_relu",
        "logsigmoid",
        "tanhshrink",
        "softsign",
        "softshrink",
        "hardshrink",
    ]:
        add(name, getattr(F, name), x * 3)
    add("gelu tanh", lambda a: F.gelu(a, approximate="tanh"), x)
    add("softplus beta", lambda a: F.softplus(a, beta=2.0), x)
    add("elu alpha", lambda a: F.elu(a, 0.5), x)
    add("prelu", F.prelu, image, positive(4))
    add("threshold", lambda a: F.threshold(a, 0.1, 20.0), x)
    add("glu", lambda a: F.glu(a, 1), x)
    add("softmax", lambda a: F.softmax(a, dim=-1), x)
    add("softmax method", lambda a: a.softmax(0), x)
    add("log_softmax", lambda a: torch.log_softmax(a, 1), x)
    add("softmin", lambda a: F.softmin(a, dim=1), x)
    add("dropout at rest", lambda a: F.dropout(a, 0.5, training=False) + 1, x)
    add("embedding", lambda i, w: F.embedding(i, w), whole(3, 4), normal(9, 5))
    add("attention", F.scaled_dot_product_attention, normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=3),
        normal(2, 3, 5, 4, seed=4))  # fmt: skip
    add("attention causal", lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        normal(2, 5, 4), normal(2, 5, 4, seed=3))  # fmt: skip
    add("attention masked", lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
        normal(2, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril())  # fmt: skip
    add("upsample nearest", lambda a: F.interpolate(a, scale_factor=2), image)
    add("upsample bilinear", lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), image)
    add("upsample corners", lambda a: F.interpolate(a, size=(5, 11), mode="bilinear",
                                                    align_corners=True), image)  # fmt: skip
    add("upsample bicubic", lambda a: F.interpolate(a, size=(16, 16), mode="bicubic"), image)
    add("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), image)
    add("pixel_unshuffle", lambda a: F.pixel_unshuffle(a, 2), image)
    add("cosine_similarity", F.cosine_similarity, x, y)
    add("mse_loss", F.mse_loss, x, y)
    add("one_hot", lambda i: F.one_hot(i, 10), whole(3, 4))

    add("view", lambda a: a.view(2, 6), x)
    add("view -1", lambda a: a.view(a.size(0), -1), image)
    add("reshape", lambda a: torch.reshape(a, (4, 3)), x)
    add("flatten", lambda a: torch.flatten(a, 1), image)
    add("unflatten", lambda a: a.unflatten(1, (2, 2)), image)
    add("squeeze", lambda a: a.squeeze(1), normal(3, 1, 4))
    add("squeeze all", torch.squeeze, normal(3, 1, 4, 1))
    add("unsqueeze", lambda a: a.unsqueeze(-1), x)
    add("permute", lambda a: a.permute(0, 2, 3, 1), image)
    add("transpose", lambda a: a.transpose(1, -1), image)
    add("t", lambda a: a.t(), x)
    add("T", lambda a: a.T, x)
    add("movedim", lambda a: torch.movedim(a, 1, -1), image)
    add("expand", lambda a: a.expand(3, -1, 4), normal(3, 2, 1))
    add("expand_as", lambda a, b: a.expand_as(b), normal(1, 4), x)
    add("repeat", lambda a: a.repeat(2, 1, 3), x)
    add("repeat_interleave", lambda a: torch.repeat_interleave(a, 2, dim=1), x)
    add("contiguous", lambda a: a.transpose(0, 1).contiguous() + 1, x)
    add("to double and back", lambda a: a.to(torch.int32).float(), x * 4)
    add("long", lambda a: a.long(), x * 4)
    add("bool", lambda a: a.bool(), whole(3, low=0, high=2))
    add("cat", lambda a, b: torch.cat([a, b], 1), x, y)
    add("cat of two dtypes", lambda a, b: torch.cat([a, b]), x, whole(2, 4))
    add("stack", lambda a, b: torch.stack((a, b), dim=1), x, y)
    add("hstack", lambda a, b: torch.hstack((a, b)), x, y)
    add("split", lambda a: torch.split(a, 3, dim=1), x)
    add("split sizes", lambda a: a.split([1, 3], 1), x)
    add("chunk", lambda a: a.chunk(3, 1), x)
    add("unbind", lambda a: torch.unbind(a, 0), x)
    add("narrow", lambda a: a.narrow(1, 1, 2), x)
    add("select", lambda a: a.select(1, -1), x)
    add("index int", lambda a: a[1], x)
    add("index last", lambda a: a[-1, 2:], x)
    add("index slice", lambda a: a[:, 1:3], x)
    add("index step", lambda a: a[..., ::2], image)
    add("index none", lambda a: a[:, None], x)
    add("index tensor", lambda a, i: a[i], x, torch.tensor([2, 0]))
    add("index_select", lambda a, i: torch.index_select(a, 1, i), x, torch.tensor([3, 0]))
    add("gather", lambda a, i: torch.gather(a, 1, i), x, whole(3, 2, low=0, high=4))
    add("gather smaller", lambda a, i: torch.gather(a, 1, i), x, whole(2, 2, low=0, high=4))
    add("scatter", lambda a, i, b: a.scatter(1, i, b), x, torch.tensor([[1, 0], [2, 3], [0, 1]]),
        normal(3, 2, seed=6))  # fmt: skip
    add("scatter_add", lambda a, i, b: a.scatter_add(1, i, b), x,
        torch.tensor([[1, 1], [2, 3], [0, 1]]), normal(3, 2, seed=6))  # fmt: skip
    add("index_add", lambda a, i, b: a.index_add(0, i, b), x, torch.tensor([0, 2]),
        normal(2, 4, seed=6))  # fmt: skip
    add("topk", lambda a: torch.topk(a, 2, dim=1), x)
    add("sort", lambda a: torch.sort(a, dim=1, descending=True), x)
    add("argsort", lambda a: torch.argsort(a, dim=1), x)
    add("flip", lambda a: torch.flip(a, (1,)), x)
    add("roll", lambda a: torch.roll(a, 1, 1), x)
    add("tril", lambda a: torch.tril(a, -1), x)
    add("triu", torch.triu, x)
    add("diff", torch.diff, x)
    add("zeros_like", lambda a: torch.zeros_like(a) + a, x)
    add("full_like", lambda a: torch.full_like(a, 3.0) * a, x)
    add("pad", lambda a: F.pad(a, (1, 2)), x)
    add("pad value", lambda a: F.pad(a, (1, 0, 0, 2), value=3.0), x)
    add("pad reflect", lambda a: F.pad(a, (1, 2, 2, 1), mode="reflect"), image)
    add("pad replicate", lambda a: F.pad(a, (1, 2, 2, 1), mode="replicate"), image)
    add("unfold", lambda a: a.unfold(1, 2, 1), x)
    add("fake quantize", lambda a: torch.fake_quantize_per_tensor_affine(a, 0.05, 10, 0, 255), x)

    torch.manual_seed(0)
    for name, module, value in (
        ("nn.Linear", nn.Linear(4, 5), x),
        ("nn.Conv2d", nn.Conv2d(4, 6, 3, padding=1), image),
        ("nn.Conv2d circular", nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), image),
        ("nn.ConvTranspose2d", nn.ConvTranspose2d(4, 6, 2, stride=2), image),
        ("nn.BatchNorm2d", nn.BatchNorm2d(4), image),
        ("nn.LayerNorm", nn.LayerNorm(4), x),
        ("nn.GroupNorm", nn.GroupNorm(2, 4), image),
        ("nn.PReLU", nn.PReLU(4), image),
        ("nn.GELU", nn.GELU(), x),
        ("nn.Embedding", nn.Embedding(10, 3), whole(3, 4)),
        ("nn.Upsample", nn.Upsample(scale_factor=2), image),
        ("nn.MultiheadAttention", SelfAttention(), normal(3, 2, 8)),
        ("nn.TransformerEncoderLayer", nn.TransformerEncoderLayer(8, 2, 16), normal(3, 2, 8)),
    ):
        add(name, module.eval(), value)
    for more in (_corners, _numbers, _shapes, _indices, _writes, _losses, _layers, _recurrent):
        more(add)
    return found


Add = Callable[..., None]


def _numbers(add: Add) -> None:
    x, y, p = normal(3, 4), normal(3, 4, seed=5), positive(3, 4)
    nan = torch.where(x > 0.5, float("nan"), x)
    add("atan2", torch.atan2, x, y)
    add("atan2 on the axes", torch.atan2, torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0]),
        torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]))  # fmt: skip
    for name in ["copysign", "heaviside", "fmax", "fmin", "xlogy", "logaddexp2"]:
        add(name, getattr(torch, name), p if name == "heaviside" else x, p)
    add("fmax with nan", torch.fmax, nan, y)
    add("sinc", torch.sinc, torch.cat([x[0], torch.zeros(1)]))
    add("ldexp", torch.ldexp, x, whole(3, 4))
    add("isneginf", torch.isneginf, torch.tensor([1.0, float("-inf"), float("inf")]))
    add("isclose", lambda a: torch.isclose(a, a.round(), atol=0.3), x)
    add("isin", torch.isin, whole(3, 4), whole(3, seed=4))
    add("bucketize", torch.bucketize, x, torch.tensor([-1.0, 0.0, 1.0]))
    add("shift left", operator.lshift, whole(3, 4), whole(3, 4))
    add("shift right", lambda a: a >> 1, whole(3, 4))
    add("nansum", lambda a: torch.nansum(a, 1), nan)
    add("nanmean", torch.nanmean, nan)
    add("std_mean", lambda a: torch.std_mean(a, dim=1), x)
    add("aminmax", lambda a: torch.aminmax(a, dim=1), x)
    add("median of ints", lambda a: torch.median(a), whole(3, 5))
    add("kthvalue", lambda a: a.kthvalue(2, 1), x)
    add("add with out", lambda a, b: torch.add(a, b, out=torch.zeros_like(a)) * 2, x, y)
    add("in place, other dtype", lambda a, b: (a + 0).mul_(b), x, whole(3, 4))
    add("compare in place", lambda a: (a + 0).gt_(0.1), x)
    add("softplus threshold", lambda a: F.softplus(a, threshold=0.5), x)
    add("inner", torch.inner, x, y)
    add("vdot", torch.vdot, x[0], y[0])
    add("addr", torch.addr, x, normal(3), normal(4))
    add("addbmm", torch.addbmm, normal(3, 5), normal(2, 3, 4), normal(2, 4, 5))
    add("dist", torch.dist, x, y)
    add("cdist", torch.cdist, x, normal(5, 4))
    add("cross", lambda a, b: torch.linalg.cross(a, b, dim=0), x, y)
    add("tensordot", lambda a, b: torch.tensordot(a, b, ([1, 0], [0, 2])), x, normal(4, 5, 3))
    add("multi_dot", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), x, normal(4, 5),
        normal(5, 2))  # fmt: skip


def _corners(add: Add) -> None:
    """Arguments that are easily passed over, and sizes that are easily forgotten."""
    x, y, number, image = normal(3, 4), normal(3, 4, seed=5), torch.tensor(2.5), normal(2, 4, 8, 8)
    m, v, w = normal(4), positive(4), normal(4, seed=3)
    add("where method", lambda a, b: a.where(b > 0, b), x, y)
    add("where of aten", lambda a, b: torch.ops.aten.where.self(a > 0, a, b), x, y)
    add("where of masks", lambda a, b: torch.where(a > 0, b > 0, b < 1), x, y)
    add("masked_fill of a mask", lambda a: (a > 1).masked_fill(a < 0, True), x)
    add("batch_norm of torch", lambda a: torch.batch_norm(a, w, m, m, v, False, 0.1, 1e-5, False),
        image)  # fmt: skip
    add("instance_norm of torch", lambda a: torch.instance_norm(
        a, w, m, None, None, True, 0.1, 1e-5, False), image)  # fmt: skip
    add("var correction", lambda a: torch.var(a, 1, correction=0.5), x)
    add("cosine_similarity broadcast", lambda a, b: F.cosine_similarity(a, b, dim=-2),
        normal(1, 2, 3), normal(2, 1, 3))  # fmt: skip
    add("take_along_dim broadcast", lambda a, i: torch.take_along_dim(a, i, 1), normal(1, 4),
        whole(3, 2, low=0, high=4))  # fmt: skip
    add("pad negative", lambda a: F.pad(a, (-1, 2, 1, -3), "replicate"), image)
    add("pad circular negative", lambda a: F.pad(a, (-1, 2, 1, -3), "circular"), image)
    add("diff with ends", lambda a, b: torch.diff(a, prepend=b, append=b), x, y[:, :1])
    add("adaptive_avg_pool2d uneven", lambda a: F.adaptive_avg_pool2d(a, (3, 5)), image)
    add("adaptive_max_pool2d uneven", lambda a: F.adaptive_max_pool2d(a, (5, 3)), image)
    add("upsample nearest-exact", lambda a: F.interpolate(a, size=(5, 11), mode="nearest-exact"),
        image)  # fmt: skip
    add("resize by area", lambda a: F.interpolate(a, size=(3, 5), mode="area"), image)
    add("addmm beta 0", lambda a, b, c: torch.addmm(a / 0, b, c, beta=0), normal(5), x,
        normal(4, 5))  # fmt: skip
    add("roll flat", lambda a: torch.roll(a, 3), x)
    for name in ["sum", "mean", "amax", "argmax", "logsumexp", "cumsum", "all"]:
        add(f"{name} of a number", functools.partial(getattr(torch, name), dim=0), number)
    add("multiply by bool", torch.mul, x, y > 0)
    add("mm by name", lambda a, b: torch.mm(a, mat2=b), x, normal(4, 5))


def _shapes(add: Add) -> None:
    x, image = normal(3, 4), normal(2, 4, 8, 8)
    add("vstack", lambda a, b: torch.vstack((a, b)), x, normal(4))
    add("dstack", lambda a, b: torch.dstack((a, b)), x, x + 1)
    add("column_stack", lambda a, b: torch.column_stack((a, b)), normal(3), x)
    add("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="xy"), normal(3), normal(4))
    add("broadcast_tensors", lambda a, b: torch.broadcast_tensors(a, b), x, normal(4))
    add("fliplr", torch.fliplr, x)
    add("rot90", lambda a: torch.rot90(a, 3, (0, 1)), x)
    add("hsplit", lambda a: torch.hsplit(a, 2), x)
    add("ravel", torch.ravel, x)
    add("diagonal", lambda a: a.diagonal(1, 2, 3), image)
    add("diag", torch.diag, x)
    add("diag of a vector", lambda a: torch.diag(a, -1), normal(4))
    add("diag_embed", lambda a: torch.diag_embed(a, 1), x)
    add("trace", torch.trace, x)
    add("empty_like, filled", lambda a: torch.empty_like(a).fill_(2.0) + a, x)
    add("new_zeros", lambda a: a.new_zeros((2, 4)) + a[:2], x)
    add("named results", lambda a: (a.max(1).values, a.sort(1).indices), x)


def _indices(add: Add) -> None:
    x, rows, columns = normal(3, 4), torch.tensor([2, 0]), torch.tensor([1, 3])
    add("index two tensors", lambda a, i, j: a[i, j], x, rows, columns)
    add("index from the end", lambda a, i: a[i, -1], x, rows - 3)
    add("index rows of rows", lambda a, i: a[i[:, None], i], normal(3, 3, 2), rows)
    add("take", torch.take, x, torch.tensor([[0, 5], [11, 2]]))
    add("index_add alpha", lambda a, i, b: a.index_add(0, i, b, alpha=2), x, rows,
        normal(2, 4, seed=6))  # fmt: skip
    add("index_copy", lambda a, i, b: a.index_copy(1, i, b), x, columns, normal(3, 2, seed=6))
    add("index_fill", lambda a, i: a.index_fill(1, i, 5.0), x, columns)
    add("index_put", lambda a, i, b: a.index_put((i,), b), x, rows, normal(4))
    add("index_put, added", lambda a, i, b: a.index_put((i, i), b, accumulate=True), x,
        torch.tensor([1, 1]), normal(2))  # fmt: skip
    add("scatter_reduce", lambda a, i, b: a.scatter_reduce(1, i, b, "amax"), x,
        torch.tensor([[1, 1], [2, 3], [0, 1]]), normal(3, 2, seed=6))  # fmt: skip
    add("select_scatter", lambda a, b: torch.select_scatter(a, b, 1, -1), x, normal(3))
    add("slice_scatter", lambda a, b: torch.slice_scatter(a, b, 1, 0, 4, 2), x, normal(3, 2))


def _writes(add: Add) -> None:
    x, y, rows = normal(3, 4), normal(3, 4, seed=5), torch.tensor([2, 0])

    def after(write: Callable[..., None]) -> Callable[..., torch.Tensor]:
        def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a = a * 1
            write(a, b)
            return a + 1

        return program

    def slices(a: Any, b: Any) -> None:
        a[:, 0] = b[:, 1]
        a[1:, ::2] = b[1:, 2:]

    def number(a: Any, b: Any) -> None:
        a[..., -1] = 2
        a[1, 1] = b[0, 0]

    def new_axis(a: Any, b: Any) -> None:
        a[:, None, 1:3] = b[:, :2].unsqueeze(1)

    def added(a: Any, b: Any) -> None:
        a[:, 0] += b[:, 0]
        a[0] *= 2
        a -= b

    def mask(a: Any, b: Any) -> None:
        a[a > 0.5] = 0
        a[b[:, 0] > 0] = b[0]

    def through_a_view(a: Any, b: Any) -> None:
        a[0].fill_(3)
        a[:, 1].add_(b[:, 0])
        a[2, 2:].copy_(b[1, :2])
        a[1].zero_()

    for write in (slices, number, new_axis, added, mask, through_a_view):
        add(f"write: {write.__name__}", after(write), x, y)

    def to_rows(a: torch.Tensor, i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a = a * 1
        a[i] = b
        a[i, i + 1] = 7
        return a

    add("write: rows", to_rows, x, rows, y[:2])


def _losses(add: Add) -> None:
    x, y, p = normal(3, 4), normal(3, 4, seed=5), positive(3, 4)
    labels, sign = torch.tensor([3, 0, 2]), torch.tensor([1.0, -1.0, 1.0])
    add("mse_loss sum", lambda a, b: F.mse_loss(a, b, None, None, "sum"), x, y)
    for name in ["l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
                 "poisson_nll_loss", "soft_margin_loss",
                 "multilabel_soft_margin_loss"]:  # fmt: skip
        add(name, getattr(F, name), x, p)
    add("kl_div", lambda a, b: F.kl_div(a, b, reduction="batchmean"), x, p)
    add("binary_cross_entropy", F.binary_cross_entropy, p, positive(3, 4, seed=9))
    add("gaussian_nll_loss", F.gaussian_nll_loss, x, y, p)
    add("cross_entropy", F.cross_entropy, x, labels)
    add("cross_entropy smooth", lambda a, t, w: F.cross_entropy(
        a, t, w, ignore_index=0, label_smoothing=0.1), x, labels, positive(4))  # fmt: skip
    add("cross_entropy of shares", lambda a, b: F.cross_entropy(a, b, reduction="none"), x, p)
    add("nll_loss of images", F.nll_loss, normal(2, 3, 4, 4), whole(2, 4, 4, low=0, high=3))
    add("hinge_embedding_loss", F.hinge_embedding_loss, x, sign[:, None].expand(3, 4))
    add("margin_ranking_loss", F.margin_ranking_loss, normal(3), normal(3, seed=4), sign)
    add("cosine_embedding_loss", F.cosine_embedding_loss, x, y, sign)
    add("triplet_margin_loss", lambda a, b, c: F.triplet_margin_loss(a, b, c, swap=True), x, y, p)
    add("pairwise_distance", F.pairwise_distance, x, y)


def _layers(add: Add) -> None:
    image = normal(2, 4, 8, 8)
    add("unfold of an image", lambda a: F.unfold(a, (3, 2), 1, 1, 2), image)
    add("fold", lambda a: F.fold(a, (9, 8), 3, 1, 1, 2), normal(2, 18, 20))
    add("lp_pool2d", lambda a: F.lp_pool2d(a, 2, 3, 2), image)
    add("channel_shuffle", lambda a: F.channel_shuffle(a, 2), image)
    add("bilinear", F.bilinear, normal(3, 4), normal(3, 5), normal(2, 4, 5))
    add("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="sum"), whole(3, 4), normal(9, 5))
    add("affine_grid", lambda t: F.affine_grid(t, [2, 1, 4, 5], False), normal(2, 2, 3))
    add("rrelu at rest", F.rrelu, image)
    torch.manual_seed(0)
    add("nn.EmbeddingBag", nn.EmbeddingBag(10, 3), whole(3, 4))
    add("nn.Fold", nn.Fold((4, 4), 2), normal(1, 8, 9))
    masked = MaskedAttention()
    add(
        "attention with padding",
        masked,
        normal(3, 2, 8),
        torch.tensor([[False, False, True], [False, True, True]]),
    )


def _recurrent(add: Add) -> None:
    torch.manual_seed(0)
    x, h = normal(5, 2, 3), normal(1, 2, 4)
    add("nn.LSTM", nn.LSTM(3, 4), x)
    add("nn.LSTM deep", nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), x)
    add("nn.GRU", nn.GRU(3, 4, 2, bias=False), x)
    add("nn.GRU both ways", nn.GRU(3, 4, bidirectional=True), x)
    add("nn.RNN relu", nn.RNN(3, 4, nonlinearity="relu", batch_first=True), x)
    add("nn.LSTM unbatched", nn.LSTM(3, 4), x[:, 0])
    add("nn.LSTM with a state", WithTwoStates(nn.LSTM(3, 4)), x, h, h + 1)
    add("nn.GRU with a state", WithState(nn.GRU(3, 4)), x, h)
    add("nn.LSTMCell", nn.LSTMCell(3, 4), x[0])
    add("nn.GRUCell with a state", WithState(nn.GRUCell(3, 4)), x[0], h[0])
    add("nn.RNNCell", nn.RNNCell(3, 4), x[0])


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, through the library's module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x, x, x)


class MaskedAttention(SelfAttention):
    """The same with padded positions that are not looked at."""

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x, x, x, key_padding_mask=padding)


class WithState(nn.Module):
    """A recurrent layer that is given its first state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        return self.inner(x, h)


class WithTwoStates(WithState):
    """An LSTM that is given both of its first states."""

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.inner(x, (h, c))
