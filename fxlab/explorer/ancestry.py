"""Which node comes from which? Provenance of nodes of both kits, as numbers and pairs of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fxlab.core.node import target_text

if TYPE_CHECKING:
    from fxlab.explorer.frames import State
    from fxlab.explorer.timeline import Timeline


def node_id(node: Any) -> int:
    """A number for a node: its own `id`, or for torch.fx's nodes one that no fxlab node has."""
    own = getattr(node, "id", None)
    return own if isinstance(own, int) else -id(node)


def ancestors_of(node: Any) -> Sequence[dict[str, Any]]:
    """The provenance of a node, whatever kind it is; nearest ancestor first."""
    found = node.meta.get("from", ())
    told = [one for one in found if isinstance(one, dict)] if isinstance(found, tuple) else []
    return [*getattr(node, "_fxlab_from", ()), *told]


def foreign_ancestor(node: Any, old: Any) -> None:
    """Note on a torch.fx node which other it stands for: its meta is copied about, so not there."""
    if node is old:
        return
    target = old.target if isinstance(old.target, str) else target_text(old.target)
    entry = {"id": node_id(old), "name": old.name, "op": old.op, "target": target}
    known = [one for one in getattr(node, "_fxlab_from", ()) if one["id"] != entry["id"]]
    node._fxlab_from = (entry, *known, *getattr(old, "_fxlab_from", ()))[:8]


def ancestor_ids(node: Any) -> list[int]:
    """The ids of a node's ancestors, nearest first."""
    return [one["id"] for one in ancestors_of(node) if "id" in one]


def module_stack(meta: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """`nn_module_stack` as (path, type name) pairs, outermost first."""
    pairs = []
    stack = meta.get("nn_module_stack")
    for value in stack.values() if isinstance(stack, dict) else ():
        if isinstance(value, tuple) and len(value) == 2:
            kind = value[1]
            name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
            pairs.append((str(value[0]), name.rpartition(".")[2]))
    return tuple(pairs)


def pair_rows(
    timeline: Timeline, old: dict[int, State], new: dict[int, State]
) -> list[tuple[int, int]]:
    """Which row of the new program stands for which of the old: by ancestry, then by meaning."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for row in new:
        for one in timeline._rows[row].ancestors:
            if one["row"] in old and one["row"] not in taken:
                pairs[row] = one["row"]
                taken.add(one["row"])
                break
    by_meaning = {(s.name, s.op, s.target): row for row, s in old.items() if row not in taken}
    for row, state in new.items():
        other = by_meaning.pop((state.name, state.op, state.target), None)
        if row not in pairs and other is not None:
            pairs[row] = other
    return [(pairs[row], row) for row in new if row in pairs]
