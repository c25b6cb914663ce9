"""Where in a big graph does a small one stand?

`SubgraphMatcher` walks a pattern and a graph upwards together, from what the pattern returns to its
parameters, which stand for anything: a value has many readers but one producer, so only this way is
there nothing to guess. A search costs the number of places where a match can begin times the size
of the pattern. It also says why a match cannot be taken out as one step (paper, section 6: a
transform must not change what the program means).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from fxlab.core.errors import RewriteError
from fxlab.core.graph import Graph
from fxlab.core.node import Node, holds_node
from fxlab.core.purity import effect
from fxlab.passes.normalize import Call, canonical_call, find

EDGES = ("placeholder", "output")
_CALLS = ("call_function", "call_method", "call_module")
_LISTS = (list, tuple)
HOLDERS = (Node, list, tuple, dict, slice)  # what may hold a Node; all else is a constant
_Pairs = list[tuple[Any, Any]]
_Goals = (
    Any  # None or (pattern's part, graph's part, further goals): a linked list is cheap to share
)


@dataclass
class InternalMatch:
    """One match of a `SubgraphMatcher`.

    Attributes:
        anchors: the pattern's Nodes from which the search began.
        nodes_map: pattern Node -> Node of the graph, or a constant for a parameter.
        placeholder_nodes: what the pattern's parameters stand for, in their order.
        returning_nodes: the Nodes of the graph that the pattern returns, in their order.
        name_node_map: name -> Node, for patterns that return a dict of names.
    """

    anchors: list[Node]
    nodes_map: dict[Node, Node] = field(default_factory=dict[Node, Node])
    placeholder_nodes: list[Node] = field(default_factory=list[Node])
    returning_nodes: list[Node] = field(default_factory=list[Node])
    name_node_map: dict[str, Node] = field(default_factory=dict[str, Node])

    def __copy__(self) -> InternalMatch:
        maps = self.nodes_map.copy(), self.placeholder_nodes.copy(), self.returning_nodes.copy()
        return InternalMatch(self.anchors, *maps, self.name_node_map.copy())


class SubgraphMatcher:
    """Find every place of a graph that looks like `pattern`.

    Args:
        pattern: what to look for. Its parameters match anything, but two of them never the same
            Node; a parameter that is used twice must stand for one thing.
        match_output: the pattern's output must be the graph's output.
        match_placeholder: the pattern's parameters match only parameters of the graph.
        remove_overlapping_matches: of matches that share a Node keep the first in graph order.
        ignore_literals: constants of the pattern match every constant.
        normalize: compare what calls mean, not how they are written: keywords and positions by the
            signature, left-out defaults, method, function, operator and stateless module of the
            same name (`x.relu()`, `F.relu(x)`, `nn.ReLU`), operands of `+`, `*`, `==`, ... swapped.

    Raises:
        RewriteError: the pattern is empty, or computes something that it does not return.

    >>> import torch, fxlab
    >>> pattern = fxlab.symbolic_trace(lambda x: torch.relu(x).neg()).graph
    >>> graph = fxlab.symbolic_trace(lambda a, b: torch.relu(a + b).neg() * 2).graph
    >>> [match.returning_nodes for match in SubgraphMatcher(pattern).match(graph)]
    [[neg]]
    """

    def __init__(
        self,
        pattern: Graph,
        match_output: bool = False,
        match_placeholder: bool = False,
        remove_overlapping_matches: bool = True,
        ignore_literals: bool = False,
        *,
        normalize: bool = False,
    ) -> None:
        self.pattern = pattern
        self.match_output = match_output
        self.match_placeholder = match_placeholder
        self.remove_overlapping_matches = remove_overlapping_matches
        self.ignore_literals = ignore_literals
        self.normalize = normalize
        nodes = list(pattern.nodes)
        if not nodes or nodes[-1].op != "output":
            raise RewriteError(
                "the pattern is empty" if not nodes else "the pattern returns nothing",
                hint="trace a function that computes and returns something",
            )  # fmt: skip
        for node in nodes[:-1]:
            if not node.users and node.op != "placeholder" and not node.is_impure():
                raise RewriteError(
                    f"the pattern computes {node.name} and does not use it", node=node,
                    hint="remove it from the pattern, or return it",
                )  # fmt: skip
        output = nodes[-1]
        self.pattern_placeholder_nodes = [n for n in nodes if n.op == "placeholder"]
        self.pattern_returning_nodes: list[Node] = output.all_input_nodes
        self.pattern_anchors: list[Node] = (
            [output] if match_output else [n for n in output.all_input_nodes if len(n.users) == 1]
        )
        self._returned = frozenset(self.pattern_returning_nodes)
        self._edges = frozenset(n for n in nodes if n.op in EDGES)
        self._anything = frozenset(() if match_placeholder else self.pattern_placeholder_nodes)
        self._spellings: dict[Node, Call] = {}
        self.order: dict[Node, float] = {}
        self._trouble: Callable[[dict[Node, Any], str, Any, Any], None] | None = None

    def match(self, graph: Graph, node_name_match: str = "") -> list[InternalMatch]:
        """Return the matches in graph order.

        A match is closed: what it computes and the pattern does not return is read by nobody else,
        so that it can be taken out. A match that cannot be replaced by something in one place is
        left out (`explain_mismatch` names the reason): its inputs depend on its own results, or
        something between its Nodes writes into tensors or begins or ends a region.

        Args:
            graph: where to look; it is not changed.
            node_name_match: a Node whose name contains this text may be where a match begins,
                whatever it calls.
        """
        return list(self._search(graph, node_name_match))

    # -- the search ------------------------------------------------------------------------------

    def _search(
        self, graph: Graph, name: str = "", start: Node | None = None
    ) -> Iterator[InternalMatch]:
        """Yield matches, those that begin at `start` only when it is given."""
        self._spellings = {}
        order = self.order = {node: i for i, node in enumerate(graph.nodes)}
        effects, taken = _Effects(order), set[Node]()
        anchors = self.pattern_anchors
        candidates = {a: [n for n in order if self._alike(a, n, name)] for a in anchors}
        for node in candidates[anchors[0]] if candidates and all(candidates.values()) else ():
            if node in taken or start not in (None, node):
                continue
            found: set[tuple[int, ...]] = set()
            for bound in self._solve(node, name, candidates, taken):
                key = tuple([id(bound[anchor]) for anchor in anchors[1:]])
                body = {gn: pn for pn, gn in bound.items() if pn not in self._edges}
                if key in found or not taken.isdisjoint(body):
                    continue
                obstacle = self._obstacle(bound, body, effects)
                if obstacle is not None:
                    self._tell(bound, *obstacle)
                    continue
                found.add(key)
                inputs = [bound[n] for n in self.pattern_placeholder_nodes if n in bound]
                results = [bound[n] for n in self.pattern_returning_nodes if n in bound]
                yield InternalMatch(anchors, dict(bound), inputs, results)
                if self.remove_overlapping_matches:
                    taken.update(body)
                    break

    def _tell(self, bound: dict[Node, Any], kind: str, pn: Any = None, gn: Any = None) -> None:
        if self._trouble is not None:
            self._trouble(bound, kind, pn, gn)

    def _solve(
        self, first: Node, name: str, candidates: dict[Node, list[Node]], taken: set[Node]
    ) -> Iterator[dict[Node, Any]]:
        """Yield every way to bind the pattern's Nodes when its first anchor is `first`.

        Depth first with a stack of choices: a choice is the goals that remain, and how many
        bindings were made before it. Choices come from further anchors and swapped operands.
        """
        anchors = self.pattern_anchors
        bound: dict[Node, Any] = {}
        images: set[Any] = set()
        choices: list[tuple[int, _Goals, int]] = [(1, (anchors[0], first, None), 0)]
        while choices:
            index, goals, mark = choices.pop()
            while len(bound) > mark:
                images.discard(id(bound.popitem()[1]))
            while goals is not None:
                pn, gn, goals = goals
                ways = self._step(pn, gn, bound, images, name if pn in anchors else "")
                if isinstance(ways, str):
                    self._tell(bound, ways, pn, gn)
                    break
                for way in ways[:0:-1]:
                    choices.append((index, _push(way, goals), len(bound)))
                goals = _push(ways[0], goals) if ways else goals
                if goals is None and index < len(anchors):
                    near = candidates[anchors[index]]
                    near = near if name else self._near(anchors[index], bound, near)
                    choices += [(index + 1, (anchors[index], n, None), len(bound))
                                for n in reversed(near) if n not in taken]  # fmt: skip
                    break
            else:
                yield bound

    def _near(self, anchor: Node, bound: dict[Node, Any], every: list[Node]) -> list[Node]:
        """Return the candidates for a further anchor: users of what is bound already, if any."""
        level, paths = [anchor], dict[Node, Node]()
        for pn in level:
            for source in pn.all_input_nodes:
                if source in paths:
                    continue
                paths[source] = pn
                if not isinstance(bound.get(source), Node):
                    level.append(source)
                    continue
                reached = {bound[source]}
                while source is not anchor:
                    source = paths[source]
                    reached = {u for n in reached for u in n.users if self._alike(source, u)}
                return sorted(reached, key=self.order.__getitem__)
        return every

    def _alike(self, pn: Node, gn: Node, name: str = "") -> bool:
        """Say whether two Nodes do the same, their arguments aside."""
        if pn in self._anything or (name and name in gn.name):
            return True
        if self.normalize and pn.op in _CALLS and gn.op in _CALLS:
            return self._spelling(pn)[0] == self._spelling(gn)[0]
        if pn.op != gn.op:
            return False
        if pn.op == "get_attr":
            return _same_kind_of_state(pn, gn)
        return pn.op in EDGES or pn.target == gn.target

    def _spelling(self, node: Node) -> Call:
        if node not in self._spellings:
            self._spellings[node] = canonical_call(node)
        return self._spellings[node]

    def _step(
        self, pn: Any, gn: Any, bound: dict[Node, Any], images: set[Any], name: str
    ) -> list[_Pairs] | str:
        """Match one pair; return the ways to go on (lists of pairs), or what stopped it."""
        if isinstance(pn, Node):
            if pn in bound:
                same = bound[pn] is gn or (not isinstance(gn, Node) and _same(bound[pn], gn))
                return [] if same else "bound"
            if isinstance(gn, Node):
                if id(gn) in images:
                    return "twice"
                if pn not in self._anything and not self._alike(pn, gn, name):
                    return "call"
                images.add(id(gn))
            elif pn.op != "placeholder":
                return "computed"
            bound[pn] = gn
            return [] if pn.op == "placeholder" else self._arguments(pn, gn)
        if pn is gn and not isinstance(pn, HOLDERS):
            return []
        pairs = _parts(pn, gn)
        if pairs is not None:
            return [pairs]
        lists = isinstance(pn, _LISTS) and isinstance(gn, _LISTS)
        free = self.ignore_literals and not lists and not holds_node(pn)
        if free or (not isinstance(gn, Node) and _same(pn, gn)):
            return []
        return "literal"

    def _arguments(self, pn: Node, gn: Node) -> list[_Pairs] | str:
        """Return the ways to pair the arguments of two Nodes that do the same."""
        swap, pargs, pkwargs, gargs, gkwargs = False, pn.args, pn.kwargs, gn.args, gn.kwargs
        if self.normalize and pn.op in _CALLS and gn.op in _CALLS:
            (_, pargs, pkwargs, swap), (_, gargs, gkwargs, _) = map(self._spelling, (pn, gn))
        elif (len(pargs) != len(gargs) or pkwargs.keys() != gkwargs.keys()) and (
            pn.target is gn.target and isinstance(pn.target, OpOverload)
        ):
            pargs, gargs, pkwargs, gkwargs = _by_schema(pn), _by_schema(gn), {}, {}
        if len(pargs) != len(gargs) or pkwargs.keys() != gkwargs.keys():
            return "arguments"
        pairs: _Pairs = list(zip(pargs, gargs, strict=True))
        if pkwargs:
            pairs += [(v, gkwargs[k]) for k, v in pkwargs.items()]
        if swap and len(pargs) == 2:
            return [pairs, [(pargs[0], gargs[1]), (pargs[1], gargs[0])]]
        return [pairs]

    def _obstacle(
        self, bound: dict[Node, Any], body: dict[Node, Node], effects: _Effects
    ) -> tuple[str, Node | None, Any] | None:
        """Return why nothing else can be put in the place of a match: the kind, and two Nodes."""
        end = self.pattern_anchors[0] if self.match_output else None
        for gn, pn in body.items():
            if pn not in self._returned:
                for user in gn.users:
                    if user not in body and (end is None or user is not bound[end]):
                        return "leak", gn, user
        where = self.order.__getitem__
        places = [*map(where, body)]
        if not places or max(places) - min(places) + 1 == len(places):
            return None
        first, last = min(places), max(places)
        returned = [gn for gn, pn in body.items() if pn in self._returned]
        late = late_readers(body, returned, last, where)
        return ("cycle", None, None) if late is None else effects.between(body, late, first, last)


class _Effects:
    """The Nodes of a graph that do more than compute a value, looked up by position."""

    def __init__(self, order: dict[Node, float]) -> None:
        self._order = order
        self._nodes: list[Node] | None = None

    def between(
        self, body: dict[Node, Node], late: list[Node], first: float, last: float
    ) -> tuple[str, Node, Any] | None:
        """Say which Node stops `body` and `late` from moving to position `last`, if any."""
        if self._nodes is None:
            self._nodes = [n for n in self._order if n.op not in EDGES and effect(n)]
            self._places = [self._order[n] for n in self._nodes]
        for writer in filter(_writes, body):
            for reader in (u for n in writer.all_input_nodes for u in n.users):
                if reader not in body and first < self._order[reader] < last:
                    return "overwritten", writer, reader
        moves = any(effect(n) for n in (*body, *late))
        places = bisect_left(self._places, first), bisect_right(self._places, last)
        for node in self._nodes[slice(*places)]:
            if node not in body and (_writes(node) or (moves and node not in late)):
                return "between", node, effect(node)
        return None


def _push(pairs: list[tuple[Any, Any]], goals: _Goals) -> _Goals:
    for pair in reversed(pairs):
        goals = (*pair, goals)
    return goals


def _parts(pn: Any, gn: Any) -> list[tuple[Any, Any]] | None:
    """Pair the parts of two aggregates of the same shape; None when they are not that."""
    if isinstance(pn, _LISTS) and isinstance(gn, _LISTS):
        return list(zip(pn, gn, strict=True)) if len(pn) == len(gn) else None
    if isinstance(pn, dict) and isinstance(gn, dict):
        return [(v, gn[k]) for k, v in pn.items()] if pn.keys() == gn.keys() else None
    if isinstance(pn, slice) and isinstance(gn, slice):
        return [(pn.start, gn.start), (pn.stop, gn.stop), (pn.step, gn.step)]
    return None


def _same(a: Any, b: Any) -> bool:
    """Say whether two constants are one: type and value; nan is nan, tensors by value."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # a foreign __eq__ that has no yes or no
        return False


def _same_kind_of_state(pn: Node, gn: Node) -> bool:
    """Two get_attr Nodes are alike if both read a tensor of one class, or equal constants."""
    if None in (pn.graph.owning_module, gn.graph.owning_module):
        return pn.target == gn.target
    left, right = (find(n.graph.owning_module, str(n.target)) for n in (pn, gn))
    return type(left) is type(right) and (isinstance(left, torch.Tensor) or _same(left, right))


def _by_schema(node: Node) -> list[Any]:
    """Return the arguments of a torch.ops call in the order of its schema, defaults filled in."""
    values: list[Any] = []
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        given = node.args[i] if i < len(node.args) and not argument.kwarg_only else None
        default = given if given is not None else argument.default_value
        values.append(node.kwargs.get(argument.name, default))
    return values


def _writes(node: Node) -> bool:
    """Say whether a pure Node that is moved past this one could compute something else."""
    return re.search("write|region|switch|changes its", effect(node) or "") is not None


def late_readers(
    body: Collection[Node], returned: list[Node], last: Any, position: Callable[[Node], Any]
) -> list[Node] | None:
    """Return the Nodes that depend on `returned` and stand before `last`, in order.

    None means that one of them feeds the match: taken as one step it would depend on itself.
    """
    late: dict[Node, None] = {}
    stack = [user for node in returned for user in node.users if user not in body]
    while stack:
        node = stack.pop()
        if node in late or position(node) > last:
            continue
        late[node] = None
        for user in node.users:
            if user in body:
                return None
            stack.append(user)
    return sorted(late, key=position)
