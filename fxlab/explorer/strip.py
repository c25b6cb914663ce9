"""What is said of a pass at its end: is the graph well formed, what did it cost and save?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxlab.explorer.sentences import quantity, short

if TYPE_CHECKING:
    from fxlab.explorer.timeline import PassSpan, Timeline


def formed(timeline: Timeline, k: int) -> list[str]:
    """What is said at the end of a pass of a graph that is no valid one, and since when it is."""
    since = timeline.ill_formed_since(k)
    if since is None:
        return []
    span = timeline.passes[since]
    since_text = f"not well formed since {short(span.name, 40)}"
    return [f"well formed: no: {span.lint}" if since == k else since_text]


def strip(span: PassSpan) -> list[str]:
    """What a pass cost and saved, one text a fact: `nodes 177 -> 124`, `FLOPs 8.2 G -> 8.1 G`."""
    before, after = span.cost_before or {}, span.cost_after or {}
    out = []
    nodes_before, nodes_after = before.get("nodes") or {}, after.get("nodes") or {}
    if nodes_before and nodes_after:
        out.append(_change("nodes", sum(nodes_before.values()), sum(nodes_after.values())))
        for op in [*nodes_before, *(op for op in nodes_after if op not in nodes_before)]:
            if nodes_before.get(op, 0) != nodes_after.get(op, 0):
                out.append(_change(op, nodes_before.get(op, 0), nodes_after.get(op, 0)))
    for key, word, scale, unit in (
        ("parameters", "parameters", 1, ""),
        ("flops", "FLOPs of conv and matmul", 1, ""),
        ("bytes", "bytes", 1, "B"),
        ("seconds", "time", 1e3, "ms"),
    ):
        if before.get(key) is not None and after.get(key) is not None:
            out.append(_change(word, scale * before[key], scale * after[key], unit))
    if span.same_output:
        out.append(f"same output: {span.same_output['text']}")
    return out


def _change(word: str, before: float, after: float, unit: str = "") -> str:
    first, then = quantity(before, unit), quantity(after, unit)
    if before == after:
        return f"{word} {first}"
    if first == then:
        first, then = (f"{value:,} {unit}".rstrip() for value in (before, after))
    return f"{word} {first} \u2192 {then}"
