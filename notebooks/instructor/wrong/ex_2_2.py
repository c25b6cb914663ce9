"""Wrong answers to 2.2, each plausible; the check must tell each its sentence."""

from __future__ import annotations

from fxlab.core.purity import effect
from fxlab.passes import dce


def wrong_forward(gm):
    """Walk from the first node: what only dead nodes read stays."""
    for node in list(gm.graph.nodes):
        if node.op not in ("placeholder", "output") and not node.users and not effect(node):
            gm.graph.erase_node(node)
    return gm


def wrong_no_effects(gm):
    """Forget effects."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            gm.graph.erase_node(node)
    return gm


def wrong_calls_only(gm):
    """Erase functions and methods only."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "call_method") and not node.users and not effect(node):
            gm.graph.erase_node(node)
    return gm


def wrong_parameters(gm):
    """Erase parameters too."""
    for node in reversed(list(gm.graph.nodes)):
        parameter = node.op == "placeholder"
        if node.op != "output" and not node.users and (parameter or not effect(node)):
            gm.graph.erase_node(node)
    return gm


def wrong_by_underscore(gm):
    """Know effects by their names."""
    for node in reversed(list(gm.graph.nodes)):
        writes = node.op == "call_method" and node.target.endswith("_")
        if node.op not in ("placeholder", "output") and not node.users and not writes:
            gm.graph.erase_node(node)
    return gm


def wrong_nothing(gm):
    """Do nothing."""
    return gm


def wrong_delegation(gm):
    """Call the kit's own."""
    return dce(gm)
