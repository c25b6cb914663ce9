"""Folding batch norm into the layer before it (section 6.2.2, Figure 7).

In eval mode a batch norm is an affine map of each channel with numbers that no longer change:

    y = gamma * (x - mean) / sqrt(var + eps) + beta = s * x + (beta - mean * s)
    with s = gamma / sqrt(var + eps)

A convolution is linear, so s can be multiplied into its weights, channel by channel, and the rest
goes into its bias: W' = s * W, b' = (b - mean) * s + beta. One operation fewer is run, and one
value fewer is written to memory. The pass needs the graph (who reads what) and the module state
(the weights) together: that is why a GraphModule holds both.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.passes.base import (
    as_pass,
    called_as_a_whole,
    copy_without_weights,
    is_read,
    module_calls,
    regions,
    report,
)
from fxlab.passes.shape_prop import need_graph

__all__ = ["fold_conv_bn", "fuse_conv_bn"]

PAIRS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.Conv1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.Conv3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.ConvTranspose1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.ConvTranspose2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.ConvTranspose3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.Linear: (nn.BatchNorm1d, nn.SyncBatchNorm),
}
Layer: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d
    | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear
)  # fmt: skip
Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@as_pass
def fuse_conv_bn(gm: GraphModule) -> GraphModule:
    """Edit ``gm`` in place: fold each batch norm into the convolution before it; return ``gm``.

    Folds Conv1d to Conv3d, ConvTranspose1d to 3d, and Linear (where ``shape_prop`` has shown that
    its output is a matrix). Each pair is four edits, in this order: a new module in the place of
    the convolution, the readers of the batch norm rerouted, the batch norm erased, its module
    deleted. The original model's modules and tensors are never written to.

    The report (``gm.meta["reports"]["fuse_conv_bn"]``) names each batch norm that was left alone
    and why. Call ``eval()`` on the model before: in train mode a batch norm uses the statistics of
    the batch, and nothing can be folded.

    Args:
        gm: The program, in eval mode, of any float dtype.

    Example:
        >>> import fxlab
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> gm = fuse_conv_bn(fxlab.symbolic_trace(model))
        >>> [node.name for node in gm.graph.nodes]
        ['input_1', '_0', '_2', 'output']
    """
    need_graph(gm)
    changed, kept = [], []
    modules: dict[str, Any] = dict(gm.named_modules(remove_duplicate=False))
    calls = module_calls(gm)
    reads = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    region = regions(gm)
    for bn in list(gm.graph.nodes):
        if bn.op == "call_function" and bn.target in (F.batch_norm, torch.batch_norm):
            kept.append(f"{bn.name} kept: it is called as a function; only modules are folded")
        if bn.op != "call_module" or not isinstance(modules[bn.target], NORMS):
            continue
        why = _why_not(bn, modules, calls, reads, region)
        if why:
            kept.append(f"{bn.name} kept: {why}")
            continue
        conv = bn.all_input_nodes[0]
        path, bn_path = conv.target, bn.target
        modules[path] = fold_conv_bn(modules[path], modules[bn_path])
        gm.set_submodule(path, modules[path])
        bn.replace_all_uses_with(conv)
        gm.graph.erase_node(bn)
        calls[bn_path].remove(bn)
        if not calls[bn_path]:
            gm.delete_submodule(bn_path)
        changed.append(f"folded {bn.name} into {conv.name}")
    if not changed and not kept:
        kept.append("there is no batch norm in this graph")
    gm.graph.lint()
    gm.recompile()
    report(gm, "fuse_conv_bn", changed, kept)
    return gm


def _why_not(
    bn: Node,
    modules: dict[str, Any],
    calls: dict[str, list[Node]],
    reads: set[str],
    region: dict[Node, int],
) -> str | None:
    """Return the reason why ``bn`` must be left alone, or None when it can be folded."""
    norm = modules[bn.target]
    if type(norm) not in NORMS:
        return f"{type(norm).__name__} may compute something else than its base class"
    if norm.training:
        return "in train mode it uses the statistics of the batch; call eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics, so it uses those of the batch"
    conv = bn.all_input_nodes[0]
    if conv.op != "call_module":
        return f"its input {conv.name} is a {conv.op}, not a module whose weights can be replaced"
    layer = modules[conv.target]
    if type(layer) not in PAIRS:
        return f"its input {conv.name} is a {type(layer).__name__}"
    if type(norm) not in PAIRS[type(layer)]:
        return f"a {type(norm).__name__} does not fit the {type(layer).__name__} before it"
    if len(conv.users) > 1:
        return f"{conv.name} has {len(conv.users)} users; the others want it without batch norm"
    if len(calls[conv.target]) > 1:
        return f"{conv.target} is called {len(calls[conv.target])} times and has one weight for all"
    owner = called_as_a_whole(conv.target, calls)
    if owner:
        return f"{conv.target} is part of {owner}, which is also called as a whole"
    if is_read(conv.target, reads):
        return f"the graph also reads the weights of {conv.target} directly"
    if is_read(bn.target, reads):
        return f"the graph also reads the state of {bn.target} directly, and may write to it"
    if any(has_hooks(module) for module in (layer, norm)):
        return f"{conv.target} or {bn.target} has hooks, which see values that would be gone"
    if region.get(conv) != region.get(bn):
        return f"{conv.name} and {bn.name} are on two sides of the border of a with block"
    width = _width(layer)
    if norm.num_features != width:
        return f"it has {norm.num_features} channels and {conv.name} gives {width}"
    rank = getattr(conv.meta.get("tensor_meta"), "shape", None)
    if isinstance(layer, nn.Linear) and (rank is None or len(rank) != 2):
        known = "is not known (run shape_prop first)" if rank is None else f"is {len(rank)}"
        return f"the rank of {conv.name} {known}; a Linear is folded when it gives a matrix"
    return None


def _width(layer: Layer) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def fold_conv_bn(conv: Layer, bn: Norm) -> Layer:
    """Return a new layer that computes ``bn(conv(x))``; neither argument is changed.

    Args:
        conv: A Conv1d-3d, ConvTranspose1d-3d or Linear.
        bn: A batch norm with running statistics; it is folded as in eval mode.

    Raises:
        ValueError: ``bn`` has no running statistics, or another number of channels.

    The arithmetic is done in float32 or wider, whatever the weights are, and rounded once.
    """
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("the batch norm keeps no running statistics, so there is nothing to fold")
    if bn.num_features != (width := _width(conv)):
        raise ValueError(f"the batch norm has {bn.num_features} channels, the layer gives {width}")
    with torch.no_grad():
        mean, var = bn.running_mean.to(wide), bn.running_var.to(wide)
        gamma = torch.ones_like(mean) if bn.weight is None else bn.weight.to(wide)
        beta = torch.zeros_like(mean) if bn.bias is None else bn.bias.to(wide)
        bias = torch.zeros_like(mean) if conv.bias is None else conv.bias.to(wide)
        s = gamma / torch.sqrt(var + bn.eps)  # (C,)
        weight = conv.weight * _along_output_channels(s, conv)
        bias = (bias - mean) * s + beta
    folded = copy_without_weights(conv)
    folded.weight = _like(conv.weight, weight)
    folded.bias = _like(conv.weight if conv.bias is None else conv.bias, bias)
    return folded


def _along_output_channels(s: torch.Tensor, conv: Layer) -> torch.Tensor:
    """Return ``s`` (one number an output channel) in a shape that multiplies ``conv.weight``."""
    rank = conv.weight.dim()
    if not isinstance(conv, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return s.reshape(-1, *[1] * (rank - 1))  # (C, 1, 1, 1): output channels are dimension 0
    # A transposed convolution's weight is (in, out / groups, ...): its rows are in groups, and
    # each group has its own share of the output channels.
    per_group = s.reshape(conv.groups, 1, -1)
    rows = per_group.expand(-1, conv.in_channels // conv.groups, -1)
    return rows.reshape(conv.in_channels, -1, *[1] * (rank - 2))


def _like(old: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)


def has_hooks(module: nn.Module) -> bool:
    """Say whether the user hung functions onto a module, which see what it is given and returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
