"""Plausible wrong answers to 3.2: each forgets one of the reasons to leave a batch norm alone."""

from collections import Counter

import torch
from torch import nn

from fxlab.passes import fold_conv_bn, fuse_conv_bn


def _fuse(
    gm, *, readers=True, calls=True, mode=True, before=None, erase=True, finish=None, anew=True
):
    modules = dict(gm.named_modules(remove_duplicate=False))
    count = Counter(n.target for n in gm.graph.nodes if n.op == "call_module")
    for bn in list(gm.graph.nodes):
        norm = modules.get(bn.target) if bn.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm2d):
            continue
        if mode and (norm.training or norm.running_mean is None):
            continue
        conv = before(bn) if before else bn.all_input_nodes[0]
        if conv.op != "call_module" or not isinstance(modules[conv.target], nn.Conv2d):
            continue
        if (readers and len(conv.users) > 1) or (calls and count[conv.target] > 1):
            continue
        layer = gm.get_submodule(conv.target) if anew else modules[conv.target]
        gm.set_submodule(conv.target, fold_conv_bn(layer, norm))
        bn.replace_all_uses_with(conv)
        if erase:
            gm.graph.erase_node(bn)
        if finish:
            finish(gm, bn)


def wrong_no_readers(gm):
    _fuse(gm, readers=False)


def wrong_no_calls(gm):
    _fuse(gm, calls=False)


def wrong_train_mode(gm):
    _fuse(gm, mode=False)


def wrong_node_before(gm):
    # The node before it in the list of nodes, not the node that it reads.
    def last_conv(bn):
        node = bn.prev
        while node.op == "call_module" and not node.target.startswith("layer"):
            node = node.prev
        return node

    _fuse(gm, before=last_conv)


def wrong_in_place(gm):
    modules = dict(gm.named_modules())
    calls = Counter(n.target for n in gm.graph.nodes if n.op == "call_module")
    for bn in list(gm.graph.nodes):
        norm = modules.get(bn.target) if bn.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm2d) or norm.training or norm.running_mean is None:
            continue
        conv = bn.all_input_nodes[0]
        layer = modules.get(conv.target) if conv.op == "call_module" else None
        if not isinstance(layer, nn.Conv2d) or len(conv.users) > 1 or calls[conv.target] > 1:
            continue
        folded = fold_conv_bn(layer, norm)
        with torch.no_grad():
            layer.weight.copy_(folded.weight)
            layer.bias = folded.bias
        bn.replace_all_uses_with(conv)
        gm.graph.erase_node(bn)


def wrong_not_erased(gm):
    _fuse(gm, erase=False)


def wrong_module_gone(gm):
    # The batch norm may have another call, which still needs its module.
    _fuse(gm, finish=lambda gm, bn: gm.delete_submodule(bn.target))


def wrong_positional(gm):
    _fuse(gm, before=lambda bn: bn.args[0])


def wrong_old_layer(gm):
    # The second of two batch norms in a row is folded into the convolution as it was before.
    _fuse(gm, anew=False)


def wrong_delegation(gm):
    return fuse_conv_bn(gm)
