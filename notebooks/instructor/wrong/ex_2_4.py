"""Wrong answers to 2.4, each plausible; the check must tell each its sentence."""

from __future__ import annotations

import contextlib

import torch

import fxlab
from fxlab.core.purity import effect
from fxlab.passes import const_fold


def _writes(gm):
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return any(effect(node, gm, impure_random=False) for node in calls)


def _value(gm, node, values):
    if node.op == "get_attr":
        owner, _, name = node.target.rpartition(".")
        return getattr(gm.get_submodule(owner), name)
    args, kwargs = (fxlab.map_arg(a, values.__getitem__) for a in (node.args, node.kwargs))
    if node.op == "call_module":
        return gm.get_submodule(node.target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _fold(
    gm,
    value=_value,
    pure=lambda node: effect(node) is None,
    store=lambda gm, name, tensor: gm.register_buffer(name, tensor),
    erase=True,
    chains=True,
    writes=True,
    grad=False,
    names=True,
):
    if writes and _writes(gm):
        return gm
    values = {}
    with contextlib.nullcontext() if grad else torch.no_grad():
        for node in gm.graph.nodes:
            inputs = [n for n in node.all_input_nodes if chains or n.op == "get_attr"]
            known = inputs == node.all_input_nodes and all(n in values for n in inputs)
            called = node.op.startswith("call_") and pure(node)
            if node.op == "get_attr" or (called and known):
                values[node] = value(gm, node, values)
    for k, (node, tensor) in enumerate(values.items()):
        readers = [user for user in node.users if user not in values]
        if node.op != "get_attr" and readers:
            name = f"_constant_{k}" if names else "_constant"
            store(gm, name, tensor if grad else tensor.detach())
            with gm.graph.inserting_before(node):
                read = gm.graph.get_attr(name)
            node.replace_all_uses_with(read)
    for node in reversed(list(values)):
        if erase and not node.users:
            gm.graph.erase_node(node)
    return gm


def wrong_folds_random(gm):
    """Take it that whatever reads no input is the same each time."""
    return _fold(gm, pure=lambda node: True)


def wrong_plain_attribute(gm):
    """Keep the tensor as a plain attribute."""
    return _fold(gm, store=lambda gm, name, tensor: object.__setattr__(gm, name, tensor))


def wrong_no_dots(gm):
    """Read state with getattr, which knows no dots."""

    def value(gm, node, values):
        return getattr(gm, node.target) if node.op == "get_attr" else _value(gm, node, values)

    return _fold(gm, value=value)


def wrong_one_level(gm):
    """Fold only what reads attributes directly."""
    return _fold(gm, chains=False)


def wrong_leaves_dead(gm):
    """Turn the readers and forget to erase."""
    return _fold(gm, erase=False)


def wrong_folds_written(gm):
    """Forget that a constant may be written into."""
    return _fold(gm, writes=False)


def wrong_with_history(gm):
    """Compute with gradients on."""
    return _fold(gm, grad=True)


def wrong_one_name(gm):
    """Use one name for all buffers."""
    return _fold(gm, names=False)


def wrong_delegation(gm):
    """Call the kit's own."""
    return const_fold(gm)
