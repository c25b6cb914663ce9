"""Why did a pattern not match?

A rewrite that finds nothing changes nothing and says nothing, which is the commonest trouble with
pattern rewriting (paper, section 6). `explain_mismatch` searches again, keeps the attempt that came
furthest, and says in words what stopped it there and what to try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fxlab.core.errors import RewriteError, quote
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, target_text
from fxlab.passes.matcher import EDGES, SubgraphMatcher
from fxlab.passes.normalize import canonical_call
from fxlab.passes.rewriter import _check_reached, _graph_of

__all__ = ["Mismatch", "explain_mismatch"]


@dataclass
class Mismatch:
    """What `explain_mismatch` found; `print` it.

    Attributes:
        matches: how many matches there are (that contain `node`, if given); 0 is a mismatch.
        operations: how many operations the pattern has.
        matched: the best attempt, as pairs (pattern's name, graph's name), from the result up.
        pattern_node: where the attempt stopped in the pattern, None when all of it was found.
        node: where it stopped in the graph: a Node, or the constant that stood there.
        reason: what stopped it.
        hint: what to try, or "".
        where: (file, line, function) of `node` in the user's source, or None.
    """

    matches: int
    operations: int
    matched: list[tuple[str, str]] = field(default_factory=list)
    pattern_node: Any = None
    node: Any = None
    reason: str = ""
    hint: str = ""
    where: tuple[str, int, str] | None = None

    def __str__(self) -> str:
        if self.matches:
            times = "once" if self.matches == 1 else f"{self.matches} times"
            return f"the pattern matches {times}, first at {self.matched[0][1]}"
        count = f"{len(self.matched)} of {self.operations}"
        lines = [f"no match; the best attempt found {count} operations of the pattern"]
        lines += [f"  the pattern's {pattern} is {name}" for pattern, name in self.matched]
        lines.append(f"stopped: {self.reason}")
        if self.where is not None:
            lines.append(f"  at {quote(self.where)}")
        return "\n".join(lines + ([f"try: {self.hint}"] if self.hint else []))


def explain_mismatch(
    pattern: Callable[..., Any] | Graph | GraphModule,
    gm: GraphModule,
    node: Node | str | None = None,
    *,
    ignore_literals: bool = False,
    normalize: bool = False,
) -> Mismatch:
    """Say how far `pattern` matches in `gm` and what stops it. Nothing is changed.

    Args:
        pattern: as given to `replace_pattern`.
        gm: where to look.
        node: the Node (or its name) where the pattern's result was expected; by default every
            place is tried and the attempt that came furthest is told.
        ignore_literals: as in `SubgraphMatcher`.
        normalize: as in `SubgraphMatcher`.

    Raises:
        RewriteError: there is no such node, or the pattern is unusable.

    >>> import torch, fxlab
    >>> gm = fxlab.symbolic_trace(lambda x, y: torch.add(x, y).relu())
    >>> print(explain_mismatch(lambda a, b: torch.relu(torch.add(a, b)), gm))
    no match; the best attempt found 0 of 2 operations of the pattern
    stopped: the pattern has torch.relu (call_function) here, the graph relu (call_method)
    ...
    try: normalize=True: both mean the same call
    """
    graph = _graph_of(pattern)[0]
    matcher = SubgraphMatcher(graph, ignore_literals=ignore_literals, normalize=normalize)
    _check_reached(matcher)
    start = node if isinstance(node, Node) else None
    if isinstance(node, str):
        start = next((n for n in gm.graph.nodes if n.name == node), None)
        if start is None:
            raise RewriteError(f"the graph has no node {node!r}", hint="print(gm.graph) names them")
    found = [m for m in matcher.match(gm.graph) if start in (None, *m.nodes_map.values())]
    answer = Mismatch(len(found), sum(n.op not in EDGES for n in graph.nodes))
    if found:
        answer.matched = _pairs(found[0].nodes_map)
        return answer
    best: list[Any] = []

    def trouble(bound: dict[Node, Any], kind: str, pn: Any, gn: Any) -> None:
        if not best or len(bound) > len(best[0]):
            best[:] = dict(bound), kind, pn, gn

    matcher._trouble = trouble
    whole = next(matcher._search(gm.graph, "", start), None)
    if whole is not None:
        answer.matched = _pairs(whole.nodes_map)
        answer.reason = "an earlier match shares a node with this one; the first one counts"
    else:
        bound, kind, pn, gn = best or ({}, *_start(matcher, gm.graph, start))
        answer.matched, answer.pattern_node, answer.node = _pairs(bound), pn, gn
        answer.reason, answer.hint = _text(matcher, kind, pn, gn, bound)
        if kind == "between":  # its Node comes first; the pattern was found whole
            answer.pattern_node, answer.node = None, pn
    if isinstance(answer.node, Node) and answer.node.meta.get("source"):
        answer.where = answer.node.meta["source"][0]
    return answer


def _start(matcher: SubgraphMatcher, graph: Graph, node: Node | None) -> tuple[str, Any, Any]:
    """Say why a search could not even begin: no Node looks like a result of the pattern."""
    starts = [node] if node is not None else [n for n in graph.nodes if n.op not in EDGES]
    for anchor in matcher.pattern_anchors:
        if any(matcher._alike(anchor, n) for n in starts):
            continue
        same = [n for n in starts if _same_meaning(anchor, n)]
        if same or len(starts) == 1:
            return "call", anchor, (same or starts)[0]
        return "none", anchor, None
    return "none", matcher.pattern_anchors[0] if matcher.pattern_anchors else None, None


def _same_meaning(pn: Node, gn: Node) -> bool:
    calls = pn.op.startswith("call_") and gn.op.startswith("call_")
    return calls and canonical_call(pn)[0] == canonical_call(gn)[0]


def _text(
    matcher: SubgraphMatcher, kind: str, pn: Any, gn: Any, bound: dict[Any, Any]
) -> tuple[str, str]:
    """Return what stopped an attempt in words, and what to try."""
    parameter = "make it a parameter of the pattern"
    if kind == "call":
        ends = gn.op in EDGES
        same = not matcher.normalize and _same_meaning(pn, gn)
        hint = "normalize=True: both mean the same call" if same else ""
        left, right = (
            target_text(pn.target),
            f"its {gn.op} {gn}" if ends else target_text(gn.target),
        )
        if pn.op != gn.op and not ends:
            left, right = f"{left} ({pn.op})", f"{right} ({gn.op})"
        return f"the pattern has {left} here, the graph {right}", hint
    if kind == "arguments":
        left, right = (", ".join([*map(str, n.args), *(f"{k}={v}" for k, v in n.kwargs.items())])
                       for n in (pn, gn))  # fmt: skip
        same = False
        if not matcher.normalize and _same_meaning(pn, gn):
            ours, theirs = canonical_call(pn), canonical_call(gn)
            same = len(ours[1]) == len(theirs[1]) and ours[2].keys() == theirs[2].keys()
        hint = "normalize=True: by the signature the arguments are the same" if same else ""
        return f"{pn} is called with ({left}), {gn} with ({right})", hint
    if kind == "literal":
        if isinstance(gn, Node):
            return f"the pattern has the constant {pn!r} here, the graph computes {gn}", parameter
        hint = f"ignore_literals=True, or {parameter}"
        return f"the pattern has {pn!r} here, the graph has {gn!r}", hint
    none = "the pattern returns nothing that it computes for that alone"
    if pn is not None:
        called = target_text(pn.target) if isinstance(pn, Node) and pn.op not in EDGES else ""
        none = f"the pattern ends with {called} ({pn.op}), and the graph has no such node"
    return {
        "bound": (f"the pattern's {pn} stands for {bound.get(pn)} already, here it would be {gn}",
                  "give the pattern a parameter for each"),
        "twice": (f"{gn} stands for another part of the pattern already, not for {pn} as well",
                  "two parameters never match one node: write the pattern with one"),
        "computed": (f"the pattern computes {pn} here, the graph has the constant {gn!r}", ""),
        "leak": (f"{pn} is read by {gn} too, which is not part of the match",
                 "return it from the pattern and from the replacement as well"),
        "cycle": ("its inputs depend on its own results, so that it cannot be one step", ""),
        "overwritten": (f"{pn} writes into what {gn} reads, which stands in between", ""),
        "between": (f"{pn} stands between its nodes, and it {gn}",
                    "move it out of the way, or make it part of the pattern"),
        "none": (none, "print(gm.graph) shows what there is"),
    }[kind]  # fmt: skip


def _pairs(bound: dict[Node, Any]) -> list[tuple[str, str]]:
    return [(pn.name, str(gn)) for pn, gn in bound.items() if pn.op not in EDGES]
