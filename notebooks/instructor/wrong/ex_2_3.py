"""Wrong answers to 2.3, each plausible; the check must tell each its sentence."""

from __future__ import annotations

from fxlab.core.purity import effect
from fxlab.passes import cse


def _text_key(node):
    return node.op, node.target, repr(node.args), repr(node.kwargs)


def _last_write(gm):
    last = None
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and effect(node, gm, impure_random=False):
            last = node
    return last


def _merge(gm, key=_text_key, effects=True, after_writes=True, erase=True):
    seen, last = {}, _last_write(gm) if after_writes else None
    for node in list(gm.graph.nodes):
        if last is not None:
            last = None if node is last else last
            continue
        if node.op in ("placeholder", "output") or (effects and effect(node, gm)):
            continue
        first = seen.setdefault(key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            if erase:
                gm.graph.erase_node(node)
    return gm


def wrong_without_kwargs(gm):
    """Forget the keyword arguments in the key."""
    return _merge(gm, key=lambda node: (node.op, node.target, repr(node.args)))


def wrong_python_equality(gm):
    """Compare constants as Python does."""

    def key(node):
        args = tuple(a if isinstance(a, bool | int | float) else repr(a) for a in node.args)
        return node.op, node.target, args, repr(node.kwargs)

    return _merge(gm, key=key)


def wrong_effects_too(gm):
    """Merge whatever looks equal."""
    return _merge(gm, effects=False)


def wrong_across_writes(gm):
    """Leave effects alone, but look past them."""
    return _merge(gm, after_writes=False)


def wrong_written_into(gm):
    """Count the writes before a node, and forget those after it."""
    seen, writes = {}, 0
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if effect(node, gm):
            writes += 1
            continue
        first = seen.setdefault((writes, *_text_key(node)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    return gm


def wrong_keys_first(gm):
    """Make all keys before the first merge."""
    keys = {node: _text_key(node) for node in gm.graph.nodes}
    return _merge(gm, key=keys.__getitem__)


def wrong_left_dead(gm):
    """Turn the readers and forget to erase."""
    return _merge(gm, erase=False)


def wrong_delegation(gm):
    """Call the kit's own."""
    return cse(gm)
