"""Quantization seen in training: fake quantization with a straight-through gradient.

Section 6.2.1 names the second flow: instead of observers, *fake quantize* modules, which round
activations and weights to what integers can represent, so that training gets used to it. Rounding
has gradient 0 almost everywhere; the straight-through estimator (Bengio et al. 2013) lets the
gradient of the rounded value through as if nothing had been done, except where the value was
clamped: there it is 0. A learnt scale follows from the same rule (LSQ, Esser et al. 2020).

A batch norm behind a convolution is folded while training goes on: the weight is scaled by the
running statistics, rounded, and scaled back, so that what is rounded is what will be deployed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import as_pass
from fxlab.passes.fuse import fold_conv_bn
from fxlab.passes.quantize.observers import Observer, QParams
from fxlab.passes.quantize.plan import make_plan, modules_of, path_of
from fxlab.passes.quantize.prepare import config_of, finish, insert_behind, layers_to_modules
from fxlab.passes.quantize.qconfig import QConfig, QConfigMapping, as_mapping, default_qat_qconfig

__all__ = ["FakeQuantize", "fake_quantize", "prepare_qat", "freeze_observers"]

NORM_OF = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
SMALLEST_FACTOR = 1e-6
"""A batch norm that scales a channel by less is not divided by: the channel is all but off."""


class _Round(torch.autograd.Function):
    """Rounds; its gradient is the straight-through one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def fake_quantize(x: Tensor, q: QParams, scale: Tensor | None = None) -> Tensor:
    """Return the representable value next to each element of ``x``, with gradients.

    The gradient with respect to ``x`` is 1 where ``round(x / scale) + zero_point`` is a code, and
    0 where it was clamped. With respect to ``scale`` it is ``code - zero_point - x / scale`` where
    not clamped, and ``code - zero_point`` where it was.

    Args:
        x: f32 of any shape.
        q: scale, zero point and range.
        scale: f32[], used instead of ``q.scale`` when it is learnt.

    Returns:
        f32 of the shape of ``x``.

    Example:
        >>> from fxlab.passes.quantize.observers import qparams_of_range
        >>> x = torch.tensor([-0.24, 0.52, 5.0], requires_grad=True)
        >>> y = fake_quantize(x, qparams_of_range(torch.tensor(-1.0), torch.tensor(1.0), -10, 10))
        >>> y.sum().backward(); [round(v, 3) for v in y.tolist()], x.grad.tolist()
        ([-0.2, 0.5, 1.0], [1.0, 1.0, 0.0])
    """
    shape: list[int] = []
    if q.axis is not None:
        shape = [1] * x.dim()
        shape[q.axis] = -1
    scale = (q.scale if scale is None else scale).reshape(shape)
    zero_point = q.zero_point.reshape(shape)
    codes = _Round.apply(x * (1 / scale)) + zero_point
    return (codes.clamp(q.quant_min, q.quant_max) - zero_point) * scale


class FakeQuantize(nn.Module):
    """Observes (in train mode) and rounds to what codes can represent.

    Args:
        observer: finds the range.
        learn_scale: make the scale a parameter, initialised from the first batch.
    """

    scale: nn.Parameter
    zero_point: Tensor

    def __init__(self, observer: Observer, learn_scale: bool = False) -> None:
        super().__init__()
        self.observer, self.learn_scale = observer, learn_scale
        self.observing = True
        if learn_scale:
            self.scale = nn.Parameter(torch.zeros(()))
            self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, f32 of any shape, rounded to its codes' values."""
        learning = self.learn_scale and float(self.scale.detach()) != 0
        if self.training and self.observing and not learning:
            self.observer(x)
        if self.observer.problem():
            return x  # nothing observed yet, as in a first call in eval mode
        if not self.learn_scale:
            return fake_quantize(x, self.observer.qparams())
        if not learning:
            q = self.observer.qparams()
            with torch.no_grad():
                self.scale.copy_(q.scale)
                self.zero_point.copy_(q.zero_point)
        damping = (x.numel() * self.observer.quant_max) ** -0.5  # LSQ, section 2.2
        scale = self.scale * damping + (self.scale * (1 - damping)).detach()
        return fake_quantize(x, self.qparams(), scale)

    def problem(self) -> str | None:
        """Return why there is no range yet, or None."""
        return self.observer.problem()

    def qparams(self) -> QParams:
        """Return the scale and zero point in use."""
        q = self.observer.qparams()
        if not self.learn_scale or float(self.scale.detach()) == 0:
            return q
        scale = self.scale.detach().abs()
        return QParams(scale, self.zero_point, q.quant_min, q.quant_max)


class _QatLayer:
    """What the trained layers share; mixed into nn.Linear and nn.ConvNd."""

    is_qat = True
    weight_observer: Callable[[], Observer]

    def weight_qparams(self, weight: Tensor) -> QParams:
        """Return the scales of the weight as it is now."""
        observer = self.weight_observer()
        observer(weight.detach())
        return observer.qparams()

    def rounded(self, weight: Tensor) -> Tensor:
        """Return the weight's representable values, with the straight-through gradient."""
        return fake_quantize(weight, self.weight_qparams(weight))


class QatLinear(_QatLayer, nn.Linear):
    """A linear layer whose weight is rounded in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of ``x`` with rounded weight."""
        return F.linear(x, self.rounded(self.weight), self.bias)

    def plain(self) -> tuple[nn.Module, QParams]:
        """Return the float layer and its weight's QParams."""
        return _as(self, nn.Linear), self.weight_qparams(self.weight)


class _QatConv(_QatLayer):
    bn: Any
    weight: nn.Parameter
    bias: nn.Parameter | None
    _conv_forward: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of ``x``, and the batch norm of it if there is one."""
        bn = self.bn
        if bn is None:
            return self._conv_forward(x, self.rounded(self.weight), self.bias)
        factor = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        along = factor.reshape([-1] + [1] * (self.weight.dim() - 1))
        weight = self.rounded(self.weight * along)
        if not bn.training:
            bias = 0 if self.bias is None else self.bias
            return self._conv_forward(x, weight, (bias - bn.running_mean) * factor + bn.bias)
        safe = torch.where(factor.abs() < SMALLEST_FACTOR, torch.ones_like(factor), factor)
        y = self._conv_forward(x, weight, None)
        y = y / safe.reshape([1, -1] + [1] * (y.dim() - 2))
        if self.bias is not None:
            y = y + self.bias.reshape([1, -1] + [1] * (y.dim() - 2))
        return bn(y)

    def plain(self) -> tuple[nn.Module, QParams]:
        """Return the float layer, batch norm folded in, and its weight's QParams."""
        kind = next(k for k in NORM_OF if isinstance(self, k))
        conv: Any = _as(self, kind)
        conv._modules.pop("bn", None)
        if self.bn is not None:
            conv = fold_conv_bn(conv, self.bn)
        return conv, self.weight_qparams(conv.weight)


class QatConv1d(_QatConv, nn.Conv1d):
    """nn.Conv1d with rounded weight and, if it had one, its batch norm."""


class QatConv2d(_QatConv, nn.Conv2d):
    """nn.Conv2d with rounded weight and, if it had one, its batch norm."""


class QatConv3d(_QatConv, nn.Conv3d):
    """nn.Conv3d with rounded weight and, if it had one, its batch norm."""


QAT_OF: dict[type, type] = {
    nn.Linear: QatLinear,
    nn.Conv1d: QatConv1d,
    nn.Conv2d: QatConv2d,
    nn.Conv3d: QatConv3d,
}


def _as(module: Any, kind: type) -> Any:
    """Return ``module`` as an instance of a sub- or superclass; it shares the parameters."""
    new = copy.copy(module)
    for name, value in list(vars(new).items()):
        if isinstance(value, dict):
            object.__setattr__(new, name, value.copy())
    new.__class__ = kind
    vars(new).pop("weight_observer", None)
    vars(new).pop("bn", None)
    return new


@as_pass
def prepare_qat(
    gm: GraphModule | nn.Module, qconfig: QConfig | QConfigMapping | None = None
) -> GraphModule:
    """Return a new module to train, with fake quantization; ``gm`` is left as it is.

    Args:
        gm: a GraphModule in train mode, or a model, which is traced first.
        qconfig: a QConfig for everything, a QConfigMapping, or None for the default.

    Returns:
        The module to train, in train mode; then ``convert`` it.

    Raises:
        FxlabError: ``gm`` is in eval mode.

    Example:
        >>> prepared = prepare_qat(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> type(prepared.get_submodule("0")).__name__
        'QatLinear'
    """
    mapping = as_mapping(qconfig, default_qat_qconfig())
    if not isinstance(gm, GraphModule):
        gm = symbolic_trace(gm)
    if not gm.training:
        raise FxlabError(
            "the model is in eval mode",
            expected="train mode: batch norms go on learning while weights get used to rounding",
            hint="call model.train() first; to calibrate without training use prepare",
            right="model.train()\nprepared = prepare_qat(fxlab.symbolic_trace(model))",
        )
    prepared: Any = copy.deepcopy(gm)
    layers_to_modules(prepared)
    _take_in_batch_norms(prepared)
    plan = make_plan(prepared, mapping)
    for group in plan.groups:
        if group.kind in ("linear", "conv"):
            path = path_of(group.nodes[0])
            _train_layer(prepared, path, config_of(plan, group.out, mapping))

    def fake(node: Any) -> FakeQuantize:
        config = config_of(plan, node, mapping)
        return FakeQuantize(config.activation(), config.learn_scale)

    insert_behind(prepared, plan, fake)
    finish(prepared, plan, mapping, "prepare_qat")
    return prepared.train()


def _take_in_batch_norms(gm: GraphModule) -> None:
    """Edit in place: hang each batch norm that can be folded later into its convolution."""
    modules = modules_of(gm)
    calls: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls[node.target] = calls.get(node.target, 0) + 1
    for node in list(gm.graph.nodes):
        if node.op != "call_module" or not isinstance(
            modules[node.target], tuple(NORM_OF.values())
        ):
            continue
        conv = node.all_input_nodes[0]
        bn = modules[node.target]
        layer = modules.get(conv.target) if conv.op == "call_module" else None
        fits = NORM_OF.get(type(layer)) is type(bn) and bn.track_running_stats and bn.affine
        if not fits or len(conv.users) > 1 or calls[conv.target] > 1 or calls[node.target] > 1:
            continue
        trained = _as(layer, QAT_OF[type(layer)])
        trained.bn = bn
        gm.set_submodule(conv.target, trained)
        node.replace_all_uses_with(conv)
        gm.graph.erase_node(node)


def _train_layer(gm: GraphModule, path: str, config: QConfig) -> None:
    """Edit in place: make the layer at ``path`` one whose weight is rounded."""
    layer: Any = gm.get_submodule(path)
    if not getattr(layer, "is_qat", False):
        layer = _as(layer, QAT_OF[type(layer)])
        if type(layer) is not QatLinear:
            layer.bn = None
        gm.set_submodule(path, layer)
    layer.weight_observer = config.weight


def freeze_observers(prepared: GraphModule, frozen: bool = True) -> GraphModule:
    """Edit in place: stop (or go on) moving ranges, as one does for the last epochs; return it.

    Args:
        prepared: from `prepare_qat`.
        frozen: False lets them move again.
    """
    for module in prepared.modules():
        if isinstance(module, FakeQuantize):
            module.observing = not frozen
    return prepared
