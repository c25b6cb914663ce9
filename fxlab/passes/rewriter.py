"""How is a small graph inside a big one replaced by another?

Rewriting is the paper's plainest transform (section 6): say what to look for as a program, say
what to put there as a program, and let use-def edges do the rest. `replace_pattern` copies the
replacement to the place of each match that `matcher.py` finds; when nothing matched,
`fxlab.explain_mismatch` tells how far the pattern got and what stopped it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxlab.core.errors import RewriteError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, add_ancestors, leaves, map_aggregate, map_arg
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.alias import Memory, makes_new_value
from fxlab.passes.base import report
from fxlab.passes.matcher import EDGES, HOLDERS, InternalMatch, SubgraphMatcher, late_readers
from fxlab.passes.normalize import find

__all__ = [
    "InternalMatch",
    "Match",
    "ReplacedPatterns",
    "SubgraphMatcher",
    "replace_pattern",
    "replace_pattern_with_filters",
]


class Match(NamedTuple):
    """One match of `replace_pattern`.

    Attributes:
        anchor: the pattern's Node from which the search began.
        nodes_map: pattern Node -> Node of the graph (or the constant that a parameter stands for).
    """

    anchor: Node
    nodes_map: dict[Node, Node]


@dataclass
class ReplacedPatterns:
    """One match of `replace_pattern_with_filters`, and the Nodes that were put in its place."""

    anchor: Node
    nodes_map: dict[Node, Node]
    replacements: list[Node]


_TOLD = 50  # a report names so many replacements


def replace_pattern(
    gm: GraphModule,
    pattern: Callable[..., Any] | Graph | GraphModule,
    replacement: Callable[..., Any] | Graph | GraphModule,
    *,
    normalize: bool = False,
) -> list[Match]:
    """Put `replacement` in the place of every match of `pattern`; edits `gm` in place.

    Args:
        gm: the module to edit.
        pattern: what to look for: a function of tensors, or its GraphModule or Graph. Its
            parameters stand for anything.
        replacement: what to put there, with as many parameters and results as the pattern.
        normalize: match by meaning, not by spelling; see `SubgraphMatcher`.

    A match stays as it is, and the report says so, if the replacement hands on memory of an input
    where the pattern makes a new value (`x` for `x.clone()`) and the graph writes into either.

    Returns:
        The matches in graph order; of overlapping ones the first. An empty list means that nothing
        matched: `explain_mismatch(pattern, gm)` says why.

    Raises:
        RewriteError: the pattern has unused parameters or dead code, or pattern and replacement
            differ in parameters or results.

    >>> import torch, fxlab
    >>> gm = fxlab.symbolic_trace(lambda x, y: torch.relu(x + y) * torch.relu(y))
    >>> matches = replace_pattern(gm, lambda v: torch.relu(v), lambda v: torch.clamp(v, min=0))
    >>> len(matches)
    2
    >>> print(gm.code.strip())
    def forward(self, x, y):
        add = x + y;  x = None
        clamp = torch.clamp(add, min = 0);  add = None
        clamp_1 = torch.clamp(y, min = 0);  y = None
        mul = clamp * clamp_1;  clamp = clamp_1 = None
        return mul
    """
    found = replace_pattern_with_filters(gm, pattern, replacement, normalize=normalize)
    return [Match(match.anchor, match.nodes_map) for match in found]


def replace_pattern_with_filters(
    gm: GraphModule | Any,
    pattern: Callable[..., Any] | Graph | GraphModule,
    replacement: Callable[..., Any] | Graph | GraphModule | None = None,
    match_filters: list[Callable[[InternalMatch, Graph, Graph], bool]] | None = None,
    ignore_literals: bool = False,
    replacement_callback: Callable[[InternalMatch, Graph, Graph], Graph] | None = None,
    node_name_match: str = "",
    *,
    normalize: bool = False,
) -> list[ReplacedPatterns]:
    """Replace like `replace_pattern`, but only the matches that pass filters; edits `gm` in place.

    Args:
        gm: the module to edit.
        pattern: what to look for, as in `replace_pattern`.
        replacement: what to put there, as in `replace_pattern`.
        match_filters: functions (match, graph, pattern graph) -> bool; all must be true.
        ignore_literals: constants in the pattern match every constant.
        replacement_callback: makes the replacement for one match, from the same three arguments.
        node_name_match: text in the name of a Node where a match may begin, whatever it calls.
        normalize: match by meaning, not by spelling; see `SubgraphMatcher`.

    Returns:
        One `ReplacedPatterns` a match, with the Nodes that were added.

    Raises:
        RewriteError: the pattern or the replacement is unusable, neither kind of replacement is
            given, or `gm` is no GraphModule.
    """
    if not isinstance(gm, GraphModule):
        raise RewriteError(
            f"replace_pattern edits a GraphModule of fxlab, got {torch.typename(gm)}",
            hint="fxlab.symbolic_trace(model), or fxlab.interop.from_torch_fx(gm)",
        )
    if replacement is None and replacement_callback is None:
        raise RewriteError(
            "neither a replacement nor a replacement_callback was given",
            expected="what to put in the place of a match",
        )
    pattern_graph = _graph_of(pattern)[0]
    matcher = SubgraphMatcher(pattern_graph, ignore_literals=ignore_literals, normalize=normalize)
    _check_reached(matcher)
    with _no_collections():
        return _rewrite(
            gm, matcher, pattern_graph, replacement, match_filters, replacement_callback,
            node_name_match,
        )  # fmt: skip


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause Python's search for garbage in cycles.

    A rewrite makes many objects that stay and drops no cycles: each full search would walk the
    whole graph for nothing, which makes time grow faster than the graph.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rewrite(
    gm: GraphModule,
    matcher: SubgraphMatcher,
    pattern_graph: Graph,
    replacement: Any,
    match_filters: list[Callable[[InternalMatch, Graph, Graph], bool]] | None,
    replacement_callback: Callable[[InternalMatch, Graph, Graph], Graph] | None,
    node_name_match: str,
) -> list[ReplacedPatterns]:
    matches = [
        match
        for match in matcher.match(gm.graph, node_name_match)
        if all(keep(match, gm.graph, pattern_graph) for keep in match_filters or ())
    ]
    plan: Any = None
    if replacement is not None and matches:
        graph, module = _graph_of(replacement)
        plan = _Plan(graph, matcher, module if isinstance(module, torch.nn.Module) else gm)
        if module is not None:
            plan.adopt_state(gm, module, isinstance(replacement, torch.nn.Module))
    memory: Memory | None = None
    now: dict[Node, Any] = {}
    done: list[ReplacedPatterns] = []
    kept: list[str] = []
    for match in matches:
        if replacement_callback is not None:
            plan = _Plan(replacement_callback(match, gm.graph, pattern_graph), matcher, gm)
        if plan.shared:
            memory = memory or Memory(gm)
            written = _written_when_shared(match, plan, memory, now, gm)
            if written is not None:
                kept.append(
                    f"{written.name} kept: the graph writes into it or into its input, which "
                    "would be one piece of memory"
                )
                continue
        added = _replace(gm.graph, match, matcher, plan, now)
        if added is not None:
            done.append(ReplacedPatterns(match.anchors[0], match.nodes_map, added))
        else:
            kept.append(f"{match.returning_nodes} kept: its inputs now depend on its results")
    if matches and isinstance(replacement, torch.nn.Module):
        gm.delete_all_unused_submodules()  # what only the replaced nodes called
    gm.recompile()
    told = [f"{r.nodes_map[r.anchor]} became {r.replacements}" for r in done[:_TOLD]]
    report(gm, "replace_pattern", changed=told, kept=kept, matches=len(done))
    return done


def _graph_of(program: Any) -> tuple[Graph, torch.nn.Module | None]:
    """Return a program's Graph, and the module that holds the state it uses."""
    if isinstance(program, Graph):
        return program, program.owning_module
    traced = program if isinstance(program, GraphModule) else symbolic_trace(program)
    return traced.graph, traced


def _check_reached(matcher: SubgraphMatcher) -> None:
    """Refuse a pattern of which a part does not lead to what it returns."""
    reached = {*matcher.pattern_anchors}
    level = [*matcher.pattern_anchors]
    for node in level:
        level += [n for n in node.all_input_nodes if n not in reached and not reached.add(n)]
    operations = [n for n in matcher.pattern.nodes if n.op != "output"]
    unused = next((n for n in operations if n not in reached), None)
    if unused is not None and matcher.pattern_anchors:
        what = "takes" if unused.op == "placeholder" else "computes"
        raise RewriteError(
            f"the pattern {what} {unused.name} and does not use it for what it returns",
            node=unused, hint="a match could not say what it stands for: leave it out",
        )  # fmt: skip
    if all(n.op == "placeholder" for n in operations):
        raise RewriteError(
            "the pattern computes nothing: it would match every value",
            expected="a pattern that calls at least one function, method or module",
        )


class _Plan:
    """A replacement graph, read once: its parameters, operations, results and paths of state."""

    def __init__(self, graph: Graph, matcher: SubgraphMatcher, owner: Any) -> None:
        nodes = list(graph.nodes)
        self.parameters = [n for n in nodes if n.op == "placeholder"]
        self.operations = [n for n in nodes if n.op not in EDGES]
        wanted = matcher.pattern_placeholder_nodes
        if len(self.parameters) != len(wanted):
            raise RewriteError(
                f"the replacement has {len(self.parameters)} parameters, the pattern {len(wanted)}",
                expected="the same parameters in the same order, used or not",
            )
        self.results = _results(graph, matcher)
        self.replaced = [n for n in reversed(matcher.pattern.nodes) if n.op not in EDGES]
        self.paths: dict[str, str] = {}
        parameters = {*self.parameters}
        nodes = [r for r in self.results if isinstance(r, Node)]
        self.shared = {r for r in nodes if _shares(r, parameters, owner)}

    def adopt_state(self, gm: GraphModule, module: torch.nn.Module, keep_names: bool) -> None:
        """Copy the state that the operations use from `module` into `gm`.

        A path that `gm` has already keeps meaning what it means there, as in torch.fx; the
        constants of a trace get a name of their own.
        """
        for node in self.operations:
            if node.op not in ("get_attr", "call_module") or node.target in self.paths:
                continue
            path = new = node.target
            if not keep_names or re.fullmatch(r"_tensor_constant\d+", path):
                stem, number = path.rpartition(".")[2].rstrip("0123456789"), 0
                while find(gm, new) is not None:
                    new, number = f"{stem}{number}", number + 1
            elif find(gm, path) is not None:
                continue
            value = find(module, path)
            if value is None:
                raise RewriteError(
                    f"the replacement uses {path!r}, which neither it nor the edited module has",
                    node=node, hint="pass the replacement as a GraphModule that holds it",
                )  # fmt: skip
            owner, _, name = new.rpartition(".")
            value = copy.deepcopy(value)
            if isinstance(value, torch.nn.Module):
                gm.add_submodule(new, value)
            else:
                if owner and find(gm, owner) is None:
                    gm.add_submodule(owner, torch.nn.Module())
                home = gm.get_submodule(owner)
                buffer = isinstance(value, torch.Tensor) and not isinstance(
                    value, torch.nn.Parameter
                )
                home.register_buffer(name, value) if buffer else setattr(home, name, value)
            self.paths[path] = new


def _shares(result: Node, inputs: set[Node], owner: Any) -> set[Node]:
    """Return those of `inputs` with which a value may share memory."""
    found, todo, seen = set[Node](), [result], set[Node]()
    while todo:
        node = todo.pop()
        if node in inputs:
            found.add(node)
            continue
        missing = node.op == "call_module" and find(owner, str(node.target)) is None
        if node not in seen and not missing and not makes_new_value(node, owner):
            seen.add(node)
            todo += node.all_input_nodes
    return found


def _written_when_shared(
    match: InternalMatch, plan: _Plan, memory: Memory, now: dict[Node, Any], gm: GraphModule
) -> Node | None:
    """Return a result of a match that must keep memory of its own, since somebody writes."""
    inputs = {n for n in leaves(match.placeholder_nodes) if isinstance(n, Node)}
    for old, result in zip(match.returning_nodes, plan.results, strict=True):
        if isinstance(result, Node) and result in plan.shared and not _shares(old, inputs, gm):
            parts = [old, *(_latest(n, now) for n in inputs)]
            if any(part in memory.written for part in parts):
                return old
    return None


def _replace(
    graph: Graph, match: InternalMatch, matcher: SubgraphMatcher, plan: _Plan, now: dict[Node, Any]
) -> list[Node] | None:
    """Put a copy of the replacement in the place of one match; return its Nodes.

    `now` tells what stands for the Nodes that earlier matches took out. None is returned, and
    nothing done, when earlier replacements made this match depend on its own results.
    """
    nodes, parameters = match.nodes_map, matcher.pattern_placeholder_nodes
    if now:
        inputs = [nodes[pn] for pn in parameters]
        match.placeholder_nodes[:] = _mapped(inputs, lambda n: _latest(n, now))
        nodes.update(zip(parameters, match.placeholder_nodes, strict=True))
    body = [nodes[pn] for pn in plan.replaced]
    order = matcher.order  # kept up to date: comparing Nodes would number the graph each time
    last = max(body, key=order.__getitem__)
    place = order[last]
    late: list[Node] | None = []
    if len(matcher.pattern_returning_nodes) > 1:
        returned = [gn for gn in match.returning_nodes if gn in body]
        late = late_readers(set(body), returned, place, order.__getitem__)
    if late is None:
        return None
    values: dict[Any, Any] = dict(zip(plan.parameters, match.placeholder_nodes, strict=True))
    stack = last.meta.get("nn_module_stack")
    added: list[Node] = []
    with graph.inserting_before(last):
        for node in plan.operations:
            args, kwargs = _mapped(node.args, values.__getitem__), node.kwargs
            kwargs = map_arg(kwargs, values.__getitem__) if kwargs else kwargs
            state = node.op in ("get_attr", "call_module")
            target: Any = plan.paths.get(str(node.target), node.target) if state else node.target
            new = graph.create_node(node.op, target, args, kwargs, node.name, node.type)
            new.meta = {**node.meta, **new.meta}
            if stack is not None and not new.meta.get("nn_module_stack"):
                new.meta["nn_module_stack"] = stack
            new.meta["from"] = added[0].meta["from"] if added else ()
            if not added:
                add_ancestors(new, body)
            added.append(new)
            values[node], order[new] = new, place
    for old, result in zip(match.returning_nodes, plan.results, strict=True):
        now[old] = values.get(result, result) if isinstance(result, Node) else result
        # A parameter that the pattern returns too changes only for those who read it later.
        readers = [u for u in old.users if u not in added and (old in body or order[u] > place)]
        _reroute(old, now[old], readers)
        if now[old] is old:
            del now[old]
    behind = order.get(last.next, place + 1)
    for i, node in enumerate(late, 1):
        order[node] = place + (behind - place) * i / (len(late) + 1)
        last.prepend(node)  # `last` goes: behind the new Nodes
    for node in body:
        graph.erase_node(node)
    return added


def _mapped(args: Sequence[Any], read: Callable[[Node], Any]) -> tuple[Any, ...]:
    """Return `map_arg(args, read)`; nearly always each argument is a Node or a plain constant."""
    return tuple([
        read(a) if type(a) is Node else map_arg(a, read) if isinstance(a, HOLDERS) else a
        for a in args
    ])  # fmt: skip


def _reroute(old: Node, new: Any, readers: list[Node]) -> None:
    """Make `readers` of `old` read `new`: a Node, or the constant that a parameter stood for."""
    if isinstance(new, Node) and new is not old:
        chosen = set(readers)
        every = len(chosen) == len(old.users)
        old.replace_all_uses_with(new, None if every else chosen.__contains__)
    elif new is not old:
        for user in readers:
            user.args, user.kwargs = (
                map_arg(a, lambda n: new if n is old else n) for a in (user.args, user.kwargs)
            )


def _latest(node: Any, now: dict[Node, Any]) -> Any:
    """Return what stands for a Node after the replacements so far."""
    while isinstance(node, Node) and node in now:
        node = now[node]
    return node


def _results(replacement: Graph, matcher: SubgraphMatcher) -> list[Any]:
    """Return what the replacement returns for each Node that the pattern returns."""
    found: list[list[Any]] = []
    for graph in (matcher.pattern, replacement):
        leaves: list[Any] = []
        map_aggregate(graph.output_node().args, leaves.append)
        found.append(leaves)
    theirs, ours = found
    wanted = matcher.pattern_returning_nodes
    if len(ours) == len(theirs):  # (y, y) in the pattern is one result: the first counts
        pairs = dict(reversed(list(zip(theirs, ours, strict=True))))
        ours = [pairs[node] for node in wanted]
    if len(ours) != len(wanted) or None in ours:
        what = "nothing" if None in ours else f"{len(ours)} results"
        raise RewriteError(
            f"the replacement returns {what}, the pattern {len(wanted)} results",
            expected="one result for each of the pattern's, in the same order",
        )
    return ours
