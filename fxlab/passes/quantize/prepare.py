"""Phase one: put observers where codes will be made (section 6.2.1).

Preparing folds batch norms, turns layers that are called as functions into modules (a weight has
to live somewhere), and inserts an observer behind each value that will become codes. The prepared
program computes what the float one does; run a few typical batches through it to *calibrate*.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.alias import Memory
from fxlab.passes.base import as_pass, copy_sharing_tensors, report
from fxlab.passes.fuse import fuse_conv_bn
from fxlab.passes.quantize.observers import Observer
from fxlab.passes.quantize.plan import Plan, make_plan
from fxlab.passes.quantize.qconfig import QConfig, QConfigMapping, as_mapping, default_qconfig

__all__ = ["prepare"]

_EVAL_ONLY = """\
model.eval()
prepared = prepare(fxlab.symbolic_trace(model))"""

_LAYERS = {
    F.linear: (nn.Linear, ("input", "weight", "bias")),
    F.conv1d: (nn.Conv1d, None),
    F.conv2d: (nn.Conv2d, None),
    F.conv3d: (nn.Conv3d, None),
    torch.conv1d: (nn.Conv1d, None),
    torch.conv2d: (nn.Conv2d, None),
    torch.conv3d: (nn.Conv3d, None),
}
_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@as_pass
def prepare(
    gm: GraphModule | nn.Module, qconfig: QConfig | QConfigMapping | None = None
) -> GraphModule:
    """Return a new module with observers inserted; ``gm`` is left as it is, tensors are shared.

    Args:
        gm: a GraphModule in eval mode, or a model, which is traced first.
        qconfig: a QConfig for everything, a QConfigMapping, or None for the default.

    Returns:
        The module to calibrate: call it on a few batches, then ``convert`` it. Its report
        (``meta["reports"]["prepare"]``) names the observers and each operation that stays in
        float, with the reason.

    Raises:
        FxlabError: ``gm`` is in train mode, was prepared before, or ``qconfig`` is no QConfig.

    Example:
        >>> prepared = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval())
        >>> [node.name for node in prepared.graph.nodes]
        ['input_1', 'input_1_observer', '_0', '_1', '_1_observer', '_2', 'output']
    """
    mapping = as_mapping(qconfig, default_qconfig())
    prepared = _start(gm)
    if prepared.training or _training_parts(prepared):
        part = "" if prepared.training else f" (its part {_training_parts(prepared)[0]!r})"
        raise FxlabError(
            f"the model is in train mode{part}",
            expected="eval mode: calibration measures what the finished model computes",
            hint="call model.eval() first; to train with quantization in mind use prepare_qat",
            right=_EVAL_ONLY,
        )
    fuse_conv_bn(prepared)
    layers_to_modules(prepared)
    erase_identities(prepared)
    plan = make_plan(prepared, mapping)
    insert_behind(prepared, plan, lambda node: _observer_of(plan, node, mapping))
    return finish(prepared, plan, mapping, "prepare")


def _start(gm: Any) -> GraphModule:
    """Return a copy of ``gm`` to edit, traced if need be."""
    if not isinstance(gm, nn.Module):
        raise FxlabError(f"got a {type(gm).__name__}", expected="a GraphModule or a model to trace")
    if not isinstance(gm, GraphModule):
        gm = symbolic_trace(gm)
    if "quantize" in gm.meta:
        raise FxlabError(
            f"this module went through {gm.meta['quantize']['phase']} already",
            expected="the float module",
        )
    return copy_sharing_tensors(gm)


def _training_parts(gm: GraphModule) -> list[str]:
    """Return the modules in train mode where that changes what is computed."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    used = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    found = ((path, gm.get_submodule(path)) for path in used)
    return [path for path, part in found if part.training and isinstance(part, norms)]


def finish(gm: GraphModule, plan: Plan, mapping: QConfigMapping, phase: str) -> GraphModule:
    """Lint, note the phase and the plan's report; return ``gm``."""
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    gm.meta["quantize"] = {"phase": phase, "mapping": mapping}
    changed = [f"{node.name} is observed" for node in plan.observed]
    if not plan.groups:
        plan.kept.append("nothing to quantize: no linear layer, convolution or embedding")
    report(gm, phase, changed, plan.kept)
    return gm


def _observer_of(plan: Plan, node: Node, mapping: QConfigMapping) -> Observer:
    return config_of(plan, node, mapping).activation()


def config_of(plan: Plan, node: Node, mapping: QConfigMapping) -> QConfig:
    """Return the QConfig under which the value of ``node`` becomes codes."""
    group = plan.group_of.get(node)
    if group is not None and group.qconfig is not None:
        return group.qconfig
    reader = plan.reader_of.get(node)  # a float value: as its reader wants it
    if reader is not None and reader.qconfig is not None:
        return reader.qconfig
    return mapping.global_ or default_qconfig()


def insert_behind(gm: GraphModule, plan: Plan, make: Any) -> None:
    """Insert the module ``make(node)`` behind each observed value; all readers read it instead."""
    for node in plan.observed:
        path = free_path(gm, f"{node.name}_observer")
        gm.add_submodule(path, make(node))
        with gm.graph.inserting_after(last_placeholder(node)):
            observer = gm.graph.call_module(path, (node,))
        node.replace_all_uses_with(observer)
        observer.args = (node,)


def last_placeholder(node: Node) -> Node:
    """Return ``node``, or the last placeholder when it is one: operations stand behind them all."""
    if node.op != "placeholder":
        return node
    return list(node.graph.find_nodes(op="placeholder"))[-1]


def free_path(gm: nn.Module, name: str) -> str:
    """Return ``name``, or ``name_1`` and so on when the module already has such an attribute."""
    path, n = name, 0
    while hasattr(gm, path):
        n += 1
        path = f"{name}_{n}"
    return path


def erase_identities(gm: GraphModule) -> None:
    """Edit in place: erase Dropout and Identity modules, which do nothing in eval mode."""
    kinds = (nn.Identity, nn.modules.dropout._DropoutNd)
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and isinstance(gm.get_submodule(node.target), kinds):
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)


def layers_to_modules(gm: GraphModule) -> None:
    """Edit in place: make ``F.linear(x, self.w, self.b)`` a call of an nn.Linear that holds both.

    The module holds the same parameters, not copies. Calls whose weight is computed or written in
    the graph are left alone.
    """
    written = Memory(gm).written
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _LAYERS:
            continue
        kind, names = _LAYERS[node.target]
        given = dict(zip(names or _CONV_NAMES, node.args, strict=False)) | dict(node.kwargs)
        weight = _parameter(gm, given.get("weight"))
        bias = _parameter(gm, given.get("bias"))
        if given.get("weight") in written or given.get("bias") in written:
            continue
        if weight is None or (given.get("bias") is not None and bias is None):
            continue
        layer = _layer(kind, weight, bias, given)
        path = free_path(gm, f"{node.name}_layer")
        gm.add_submodule(path, layer)
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(path, (given["input"],))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
        for source in (given.get("weight"), given.get("bias")):
            if isinstance(source, Node) and not source.users:
                gm.graph.erase_node(source)


def _parameter(gm: GraphModule, node: Any) -> nn.Parameter | None:
    """Return the parameter that a get_attr node reads, or None when it is something else."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    owner, _, name = node.target.rpartition(".")
    value = getattr(gm.get_submodule(owner), name)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    return value if isinstance(value, nn.Parameter) else None


def _layer(kind: type, weight: nn.Parameter, bias: Any, given: dict) -> nn.Module:
    """Return a module of ``kind`` around ``weight`` and ``bias``, in eval mode."""
    options = {k: given[k] for k in ("stride", "padding", "dilation", "groups") if k in given}
    if kind is nn.Linear:
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    else:
        groups = options.get("groups", 1)
        sizes = {
            "in_channels": weight.shape[1] * groups,
            "out_channels": weight.shape[0],
            "kernel_size": tuple(weight.shape[2:]),
        }
    layer: Any = kind(**sizes, **options, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    return layer.eval()
