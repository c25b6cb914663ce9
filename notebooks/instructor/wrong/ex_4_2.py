"""Plausible wrong answers to 4.2: one factor or one kind of traffic is not counted."""

import operator

import torch
from torch import nn

from fxlab.passes import cost
from fxlab.passes.alias import makes_new_value


def _roofline(
    gm, peak, traffic, *,
    each=2, rows=True, groups=True, parameters=True, views=False, size=None, functions=True,
    roof=True,
):  # fmt: skip
    found = []
    for node in gm.graph.nodes:
        meta, flops, moved, layer = node.meta.get("tensor_meta"), 0, 0, None
        if node.op.startswith("call_") and (views or makes_new_value(node, gm)):
            values = [n.meta["tensor_meta"] for n in (*node.all_input_nodes, node)]
            if node.op == "call_module":
                layer = gm.get_submodule(node.target)
                values += layer.parameters() if parameters else []
            moved = sum(v.shape.numel() * (size or v.dtype.itemsize) for v in values)
            terms = 0
            if isinstance(layer, nn.Linear):
                terms = layer.in_features
            elif isinstance(layer, nn.Conv2d):
                terms = layer.weight[0].numel() * (1 if groups else layer.groups)
            elif functions and node.target in (operator.matmul, torch.matmul, "matmul"):
                terms = node.args[0].meta["tensor_meta"].shape[-1]
            one = isinstance(layer, nn.Linear) and not rows
            flops = each * terms * (layer.out_features if one else meta.shape.numel())
        intensity = flops / moved if moved else 0.0
        attainable = intensity * traffic
        found.append({
            "flops": flops, "bytes": moved, "intensity": intensity,
            "attainable": min(peak, attainable) if roof else attainable,
        })  # fmt: skip
    return found


def wrong_macs(gm, peak, traffic):
    return _roofline(gm, peak, traffic, each=1)


def wrong_one_row(gm, peak, traffic):
    return _roofline(gm, peak, traffic, rows=False)


def wrong_no_groups(gm, peak, traffic):
    return _roofline(gm, peak, traffic, groups=False)


def wrong_no_parameters(gm, peak, traffic):
    return _roofline(gm, peak, traffic, parameters=False)


def wrong_views_move(gm, peak, traffic):
    return _roofline(gm, peak, traffic, views=True)


def wrong_four_bytes(gm, peak, traffic):
    return _roofline(gm, peak, traffic, size=4)


def wrong_modules_only(gm, peak, traffic):
    return _roofline(gm, peak, traffic, functions=False)


def wrong_no_roof(gm, peak, traffic):
    return _roofline(gm, peak, traffic, roof=False)


def wrong_delegation(gm, peak, traffic):
    values = [n.meta["tensor_meta"] for n in gm.graph.find_nodes(op="placeholder")]
    rows = cost(gm, *(torch.zeros(v.shape, dtype=v.dtype) for v in values)).rows
    return [{"flops": r.flops, "bytes": r.bytes_moved, "intensity": r.intensity,
             "attainable": min(peak, r.intensity * traffic)} for r in rows]  # fmt: skip
