"""3.1: does somebody who has read the algebra of the fold get every term of it right?

A batch norm in eval mode is folded into the convolution before it (paper, section 6.2.2). The
folded convolution runs beside the pair on random images in float64, with statistics that are far
from those of a new batch norm; where it differs, its numbers are compared with those of the usual
slips, so that the sentence names the term.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import symbolic_trace
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import fill

SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")
MOST = 12  # numbers of a tensor that a card shows


def pair_of(
    inner: int,
    outer: int,
    kernel: int = 1,
    *,
    affine: bool = True,
    eps: float = 1e-5,
    **options: Any,
) -> GraphModule:
    """Return a convolution and a batch norm in float64 and eval mode, with numbers as if trained.

    Args:
        inner: Input channels.
        outer: Output channels.
        kernel: Size of the kernel.
        affine: Whether the batch norm has a weight and a bias.
        eps: Of the batch norm.
        **options: Of the convolution.
    """
    conv = nn.Conv2d(inner, outer, kernel, **options)
    bn = nn.BatchNorm2d(outer, affine=affine, eps=eps)
    return symbolic_trace(fill(nn.Sequential(OrderedDict(conv=conv, bn=bn))).double().eval())


def entry(answer: Any, pair: GraphModule) -> dict[str, Any]:
    """Fold the pair's two layers.

    Returns:
        {"folded": the new convolution as a program, "pair": the pair afterwards,
        "same": whether the convolution that was given came back}

    Raises:
        AnswerError: It returned no Conv2d.
    """
    conv, bn = pair.get_submodule("conv"), pair.get_submodule("bn")
    folded = answer(conv, bn)
    if not isinstance(folded, nn.Conv2d):
        raise AnswerError("type", f"it returned {kind_of(folded)}: return a new nn.Conv2d")
    graph = Graph()
    graph.output(graph.call_module("conv", (graph.placeholder("x"),)))
    root = nn.Module()
    root.conv = folded
    return {"folded": GraphModule(root, graph), "pair": pair, "same": folded is conv}


def _judge_numbers(args: tuple[Any, ...], value: Any) -> Finding | None:
    (pair,) = args
    conv, bn = pair.get_submodule("conv"), pair.get_submodule("bn")
    folded = value["folded"].get_submodule("conv")
    for name in SETTINGS:
        one, other = getattr(conv, name), getattr(folded, name)
        if one != other:
            return Finding(
                f"the new convolution has {name}={other}, the old one {name}={one}: the fold "
                "changes weight and bias and nothing else",
                expected=repr(conv), actual=repr(folded),
            )  # fmt: skip
    for name in ("weight", "bias"):
        tensor = getattr(folded, name)
        if tensor is not None and tensor.dtype != conv.weight.dtype:
            return Finding(
                f"the new {name} is {tensor.dtype}, the old weight {conv.weight.dtype}: give the "
                "new convolution the old one's dtype, as copy.deepcopy(conv) does"
            )
    x = torch.randn(2, conv.in_channels, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        text = unequal(pair(x), value["folded"](x), 1e-9)
    if not text:
        return None
    return Finding(
        _slip(conv, bn, folded)
        or f"{text}: compare weight and bias, term by term, with "
        "W' = s W and b' = (b - mean) s + beta",
        actual=f"weight {_listed(folded.weight)}\nbias {_listed(folded.bias)}",
    )


def _listed(value: Any) -> str:
    """A tensor's numbers with 4 digits; of many the shape and the first ones."""
    if value is None:
        return "None"
    numbers = [f"{number:.4g}" for number in value.detach().flatten().tolist()]
    shape = f"of shape {list(value.shape)}: "
    return shape + ", ".join(numbers[:MOST]) + (", ..." if len(numbers) > MOST else "")


@torch.no_grad()
def _slip(conv: Any, bn: Any, folded: Any) -> str:
    """Name the slip that gives just these numbers, "" when it is none of the usual ones."""
    mean, var, old = bn.running_mean, bn.running_var, conv.weight
    gamma = torch.ones_like(var) if bn.weight is None else bn.weight
    beta = torch.zeros_like(var) if bn.bias is None else bn.bias
    bias = torch.zeros_like(var) if conv.bias is None else conv.bias
    s = gamma / torch.sqrt(var + bn.eps)
    weight, shift = folded.weight, folded.bias

    def is_(one: Any, other: torch.Tensor) -> bool:
        return (
            one is not None and one.shape == other.shape and torch.allclose(one, other, 1e-9, 1e-12)
        )

    def scaled(by: torch.Tensor) -> torch.Tensor:
        return old * by.reshape(-1, 1, 1, 1)

    if weight.shape != old.shape:
        return (
            f"the new weight has shape {list(weight.shape)}, the old one {list(old.shape)}: s has "
            "one number an output channel; give it the shape (channels, 1, 1, 1)"
        )
    if is_(weight, old) and not is_(s, torch.ones_like(s)):
        return "the weight is not scaled: W' = s W, each output channel with its own s"
    if not is_(weight, scaled(s)):
        if is_(weight, scaled(gamma / (var + bn.eps))):
            return "the square root is missing: s = gamma / sqrt(var + eps)"
        for eps in (0.0, 1e-5):
            if eps != bn.eps and is_(weight, scaled(gamma / torch.sqrt(var + eps))):
                return f"eps is not {eps:g} here: it is bn.eps, and stands under the root with var"
        if is_(weight, scaled(1 / torch.sqrt(var + bn.eps))):
            return "gamma is missing in s: gamma is the batch norm's weight"
        if is_(weight, scaled(gamma * torch.sqrt(var + bn.eps))):
            return "s divides by the root, it does not multiply: s = gamma / sqrt(var + eps)"
        if old.shape[0] == old.shape[1] and is_(weight, old * s.reshape(1, -1, 1, 1)):
            return (
                "s went along the input channels: the output channels of a Conv2d's weight are "
                "dimension 0"
            )
        if s.numel() == old.shape[-1] and is_(weight, old * s):
            return (
                "s went along the kernel's last dimension: the output channels of a Conv2d's "
                "weight are dimension 0; give s the shape (channels, 1, 1, 1)"
            )
        return ""
    if shift is None:
        return "the new convolution has no bias, and beta - mean * s has to go somewhere"
    for other, sentence in (
        (bias - mean * s + beta, "the old bias is not scaled: b' = (b - mean) s + beta, and what "
         "comes out of the convolution has the old bias in it"),
        (beta - mean * s, "the old bias is lost: b' = (b - mean) s + beta"),
        (bias * s + beta, "mean is missing in the new bias: b' = (b - mean) s + beta"),
        ((bias - mean) * s, "beta is missing in the new bias: beta is the batch norm's bias"),
        ((bias + mean) * s + beta, "mean is subtracted, not added: b' = (b - mean) s + beta"),
        (bias, "the bias is still the old one: b' = (b - mean) s + beta"),
    ):  # fmt: skip
        if is_(shift, other):
            return sentence
    return ""


def _judge_untouched(args: tuple[Any, ...], value: Any) -> Finding | None:
    (pair,) = args
    if value["same"]:
        return Finding(
            "it returned the convolution that it was given: the model that the convolution belongs "
            "to would change with it. Make a new one, for instance copy.deepcopy(conv)"
        )
    for name, tensor in value["pair"].state_dict().items():
        if text := unequal(pair.state_dict()[name], tensor, 0.0, name):
            return Finding(
                f"it wrote into its arguments: {text}. The model still uses them; give a new "
                "convolution new tensors"
            )
    return _judge_numbers(args, value)


def _pairs() -> Any:
    """Make a strategy of pairs of every shape and setting."""
    from hypothesis import strategies as st

    @st.composite
    def one(draw: Any) -> tuple[GraphModule]:
        groups = draw(st.sampled_from([1, 2]))
        inner, outer = (groups * draw(st.integers(1, 3)) for _ in range(2))
        kernel = draw(st.sampled_from([1, 2, 3]))
        return (
            pair_of(
                inner, outer, kernel,
                affine=draw(st.booleans()),
                eps=draw(st.sampled_from([1e-5, 0.1])),
                bias=draw(st.booleans()),
                groups=groups,
                stride=draw(st.sampled_from([1, 2])),
                padding=draw(st.sampled_from([0, 1])),
                dilation=draw(st.sampled_from([1, 2])),
            ),
        )  # fmt: skip

    return one()


def _cases() -> Iterator[Case | Property]:
    plain, settings = "plain", "settings kept"
    for behaviour, title, make in (
        (plain, "one channel, a kernel of one number", lambda: pair_of(1, 1)),
        (plain, "a large eps", lambda: pair_of(1, 1, eps=0.5)),
        (plain, "three channels", lambda: pair_of(3, 3, 3)),
        ("no bias", "a convolution without bias", lambda: pair_of(1, 2, bias=False)),
        ("no gamma and beta", "BatchNorm2d(affine=False)", lambda: pair_of(1, 2, affine=False)),
        (settings, "stride and padding", lambda: pair_of(1, 2, 3, stride=2, padding=1)),
        (settings, "groups and dilation", lambda: pair_of(2, 4, 3, groups=2, dilation=2)),
        (settings, "a padding mode", lambda: pair_of(1, 2, 3, padding=1, padding_mode="circular")),
    ):
        yield Case(behaviour, title, lambda make=make: (make(),), _judge_numbers)
    yield Property(settings, "any convolution", _pairs, _judge_numbers, examples=15)
    for title, make in (
        ("the layers are left as they were", lambda: pair_of(1, 2)),
        ("also a convolution without bias", lambda: pair_of(1, 2, bias=False)),
    ):
        yield Case("arguments untouched", title, lambda make=make: (make(),), _judge_untouched)


EXERCISE = Exercise(
    id="3.1",
    title="Fold a batch norm into a convolution (the algebra)",
    level=2,
    minutes=25,
    idea="In eval mode a batch norm is an affine map of each channel, and a convolution can take "
    "it over: one operation less, the same numbers (section 6.2.2).",
    needs=("fold",),
    teaches=("per channel",),
    hints=(
        "Lecture 07, 'The algebra', has the two formulas and one example where nothing is missing. "
        "Yours must also work where the convolution has no bias, the batch norm no gamma and beta.",
        "Compute s, one number an output channel, from the batch norm alone. Then W', from the old "
        "weight and s in a shape that broadcasts along dimension 0. Then b'; put 0, 1 or 0 in the "
        "place of a bias, gamma or beta that is None. Then a new convolution with the old one's "
        "settings, which gets both.",
        "What belongs to a layer is changed by giving the layer another parameter, on another "
        "example: new = copy.deepcopy(linear); new.weight = nn.Parameter(2 * linear.weight) under "
        "torch.no_grad(). linear.weight.mul_(2) would write into the tensor that the model uses.",
    ),
    asks=(
        "fxlab.passes.fuse.fold_conv_bn",
        "fxlab.passes.fuse.fuse_conv_bn",
        "torch.nn.utils.fusion.fuse_conv_bn_eval",
        "torch.nn.utils.fusion.fuse_conv_bn_weights",
    ),
    parts=(
        Part(
            id="3.1",
            name="my_fold",
            points={
                "plain": 3,
                "no bias": 2,
                "no gamma and beta": 1,
                "settings kept": 2,
                "arguments untouched": 2,
            },
            entry=entry,
            cases=_cases,
            wrong={
                "no_root": "the square root is missing",
                "no_eps": "eps is not 0 here",
                "bias_not_scaled": "the old bias is not scaled",
                "input_channels": "s went along the input channels",
                "bias_needed": "TypeError",
                "settings_lost": "the fold changes weight and bias and nothing else",
                "in_place": "it wrote into its arguments",
                "same_layer": "it returned the convolution that it was given",
            },
            stub="def my_fold(conv, bn):\n"
            '    """Return a new Conv2d that computes what ``bn(conv(x))`` computes in eval mode.\n'
            "\n"
            "    Neither argument is changed. ``conv`` may have no bias, and ``bn`` no weight and\n"
            "    no bias.\n"
            '    """',
        ),
    ),
)
