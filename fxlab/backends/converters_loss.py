"""How are losses said in ONNX?

Converters (see `fxlab.backends.onnx`), each a formula in PyTorch for every element or sample, as
in `converters_composed.py`; the reduction is done by one decorator.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.backends.onnx import Unsupported, converter

__all__: list[str] = []


def _loss(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a formula, which gets all arguments of `function` by name, but not the reduction."""
    signature = inspect.signature(function)

    def keep(formula: Callable[..., Any]) -> Callable[..., Any]:
        def convert(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            options = dict(given.arguments)
            if any(options.pop(old, None) is not None for old in ("size_average", "reduce")):
                raise Unsupported("size_average and reduce, which reduction replaced")
            reduction = options.pop("reduction")
            values = formula(**options)
            values, weights = values if isinstance(values, tuple) else (values, None)
            if reduction == "none":
                return values
            if reduction == "sum":
                return values.sum()
            if reduction == "batchmean":
                return values.sum() / options["input"].shape[0]
            return values.mean() if weights is None else values.sum() / weights.sum()

        converter(function)(convert)
        return formula

    return keep


def _unweighted(values: Any, weight: Any) -> Any:
    if weight is not None:
        raise Unsupported("a weight for each element")
    return values


@_loss(F.mse_loss)
def mse_loss(input: Any, target: Any, weight: Any = None) -> Any:
    return _unweighted((input - target) ** 2, weight)


@_loss(F.l1_loss)
def l1_loss(input: Any, target: Any, weight: Any = None) -> Any:
    return _unweighted((input - target).abs(), weight)


@_loss(F.smooth_l1_loss)
def smooth_l1_loss(input: Any, target: Any, beta: float) -> Any:
    distance = (input - target).abs()
    if beta == 0:
        return distance
    return torch.where(distance < beta, distance**2 * (0.5 / beta), distance - 0.5 * beta)


@_loss(F.huber_loss)
def huber_loss(input: Any, target: Any, delta: float, weight: Any = None) -> Any:
    distance = (input - target).abs()
    near = distance <= delta
    return _unweighted(
        torch.where(near, distance**2 * 0.5, (distance - 0.5 * delta) * delta), weight
    )


@_loss(F.binary_cross_entropy)
def binary_cross_entropy(input: Any, target: Any, weight: Any) -> Any:
    yes, no = input.log().clamp(min=-100), (1 - input).log().clamp(min=-100)
    values = -(target * yes + (1 - target) * no)
    return values if weight is None else values * weight


@_loss(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(input: Any, target: Any, weight: Any, pos_weight: Any) -> Any:
    share = 1.0 if pos_weight is None else (pos_weight - 1) * target + 1
    values = (1 - target) * input + F.softplus(-input) * share
    return values if weight is None else values * weight


@_loss(F.nll_loss)
def nll_loss(input: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    return _picked(-input, target, weight, ignore_index)


def _picked(values: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    """``values`` at the target's class (axis 1), weighted; and the weights."""
    axis = 1 if values.dim() > 1 else 0
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    found = values.gather(axis, safe.unsqueeze(axis)).squeeze(axis)
    weights = valid.to(values.dtype)
    if weight is not None:
        weights = weights * weight[safe]
    return torch.where(valid, found * weights, 0.0), weights


@_loss(F.cross_entropy)
def cross_entropy(
    input: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float
) -> Any:
    axis = 1 if input.dim() > 1 else 0
    classes = int(input.shape[axis])
    shape = [-1, *[1] * (input.dim() - 1 - axis)]
    values = -F.log_softmax(input, axis)
    scaled = values if weight is None else values * weight.reshape(shape)
    if target.is_floating_point():
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        losses = (scaled * target).sum(axis)
        return losses, torch.ones_like(losses)
    losses, weights = _picked(values, target, weight, ignore_index)
    if label_smoothing:
        all_classes = torch.where(target != ignore_index, scaled.sum(axis), 0.0)
        losses = losses * (1 - label_smoothing) + all_classes * (label_smoothing / classes)
    return losses, weights


@_loss(F.kl_div)
def kl_div(input: Any, target: Any, log_target: bool) -> Any:
    if log_target:
        return target.exp() * (target - input)
    return torch.xlogy(target, target) - target * input


@_loss(F.poisson_nll_loss)
def poisson_nll_loss(input: Any, target: Any, log_input: bool, full: bool, eps: float) -> Any:
    rate, log_rate = (input.exp(), input) if log_input else (input, (input + eps).log())
    values = rate - target * log_rate
    if full:
        more = target * target.log() - target + (target * (2 * math.pi)).log() * 0.5
        values = values + torch.where(target > 1, more, 0.0)
    return values


@_loss(F.gaussian_nll_loss)
def gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool, eps: float) -> Any:
    if isinstance(var, (int, float)):
        var = torch.full((), float(var), dtype=input.dtype)
    elif var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    var = var.clamp(min=eps)
    values = (var.log() + (input - target) ** 2 / var) * 0.5
    return values + 0.5 * math.log(2 * math.pi) if full else values


@_loss(F.hinge_embedding_loss)
def hinge_embedding_loss(input: Any, target: Any, margin: float) -> Any:
    apart = torch.where(target != 1, (margin - input).clamp(min=0), 0.0)
    return apart + torch.where(target != -1, input, 0.0)


@_loss(F.margin_ranking_loss)
def margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: float) -> Any:
    return (margin - target * (input1 - input2)).clamp(min=0)


@_loss(F.cosine_embedding_loss)
def cosine_embedding_loss(input1: Any, input2: Any, target: Any, margin: float) -> Any:
    squares = [(x * x).sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (squares[0] * squares[1]).sqrt()
    apart = torch.where(target == -1, (cosine - margin).clamp(min=0), 0.0)
    return torch.where(target == 1, 1 - cosine, apart)


@_loss(F.soft_margin_loss)
def soft_margin_loss(input: Any, target: Any) -> Any:
    return F.softplus(-target * input)


@_loss(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(input: Any, target: Any, weight: Any) -> Any:
    values = F.softplus(-input) * target + F.softplus(input) * (1 - target)
    return (values if weight is None else values * weight).mean(-1)


@_loss(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float, p: float, eps: float, swap: bool
) -> Any:
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return (near - far + margin).clamp(min=0)
