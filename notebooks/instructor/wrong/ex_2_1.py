"""Wrong answers to 2.1, each plausible; the check must tell each its sentence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fxlab


def wrong_a_reads_itself(gm, old, new):
    """Turn all readers, the new node too."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, (node,))
            node.replace_all_uses_with(added)


def wrong_a_visits_its_own(gm, old, new):
    """Walk the list while it grows."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, (node,))
            node.replace_all_uses_with(
                added, delete_user_cb=lambda user, new=added: user is not new
            )


def wrong_a_reads_the_input(gm, old, new):
    """Give the new node the arguments of the old one, as Figure 2 does."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, node.args)
            node.replace_all_uses_with(added)


def wrong_a_no_reroute(gm, old, new):
    """Insert, and stop there."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                gm.graph.call_function(new, (node,))


def wrong_a_first_only(gm, old, new):
    """Return after the first."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, (node,))
            node.replace_all_uses_with(
                added, delete_user_cb=lambda user, new=added: user is not new
            )
            return gm


def wrong_a_erases_old(gm, old, new):
    """Replace where inserting was asked."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is old:
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, node.args)
            node.replace_all_uses_with(added)
            gm.graph.erase_node(node)


def wrong_a_delegation(gm, old, new):
    """Let replace_pattern do it."""
    fxlab.replace_pattern(gm, lambda x: old(x), lambda x: new(old(x)))


def _replace(gm, node, args, kwargs):
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(F.log_softmax, args, kwargs)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _is_function(node):
    return node.op == "call_function" and node.target in (torch.softmax, F.softmax)


def _is_method(node):
    return node.op == "call_method" and node.target == "softmax"


def wrong_b_lost_kwargs(gm):
    """Copy args only, as Figure 2 does."""
    for node in list(gm.graph.nodes):
        if _is_function(node) or _is_method(node):
            _replace(gm, node, node.args, {})


def wrong_b_functions_only(gm):
    """Forget methods and modules."""
    for node in list(gm.graph.nodes):
        if _is_function(node):
            _replace(gm, node, node.args, node.kwargs)


def wrong_b_no_modules(gm):
    """Forget modules."""
    for node in list(gm.graph.nodes):
        if _is_function(node) or _is_method(node):
            _replace(gm, node, node.args, node.kwargs)


def wrong_b_not_erased(gm):
    """Reroute rightly, and leave the old node behind."""
    for node in list(gm.graph.nodes):
        if _is_function(node) or _is_method(node):
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.log_softmax, node.args, node.kwargs)
            node.replace_all_uses_with(new)


def wrong_b_last_dim(gm):
    """Take it that every softmax is over the last dimension."""
    for node in list(gm.graph.nodes):
        if _is_function(node) or _is_method(node):
            _replace(gm, node, node.args, node.kwargs)
        elif node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.Softmax):
            _replace(gm, node, node.args, {"dim": -1})


def wrong_b_first_argument(gm):
    """Take it that the input is always args[0]."""
    for node in list(gm.graph.nodes):
        if _is_function(node) or _is_method(node):
            _replace(gm, node, (node.args[0], *node.args[1:]), node.kwargs)
        elif node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.Softmax):
            _replace(gm, node, node.args, {"dim": gm.get_submodule(node.target).dim})


def wrong_b_by_the_sound(gm):
    """Look for the word in the target."""
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.Softmax):
            _replace(gm, node, node.args, {"dim": gm.get_submodule(node.target).dim})
        elif "softmax" in str(node.target):
            _replace(gm, node, node.args, {"dim": 0} if node.op == "call_module" else node.kwargs)


def wrong_b_delegation(gm):
    """Let replace_pattern do it."""
    for dim in (0, 1):
        fxlab.replace_pattern(
            gm,
            lambda x, dim=dim: torch.softmax(x, dim=dim),
            lambda x, dim=dim: F.log_softmax(x, dim=dim),
            normalize=True,
        )
