"""Exercise 6.1: partition by what a device supports, without a cycle (section 6.4 of the paper)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import kind
from fxlab.passes.effects import order_constraints
from fxlab.passes.partition import CapabilityBasedPartitioner, create_op_support
from fxlab.passes.split import split_module
from fxlab.teach import judge, programs
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.limits import AnswerError
from fxlab.teach.variants import forms

STUB = '''\
def my_partition(gm, supported):
    """Return a dict: for each node that computes, which part it goes to. Edits nothing.

    A part holds only nodes that the device supports, or only nodes that it doesn't. No part waits
    for a node that waits for the part. The device gets as few parts as possible.

    Args:
        gm: the program.
        supported: ``supported(node)`` says whether the device runs a node. It is False for
            placeholders, get_attr nodes and the output, which get no part.

    Returns:
        Node -> part, named by any text or number; ``split_module`` cuts there.
    """'''


@dataclass(frozen=True)
class Form:
    """One form of the exercise: which nodes of one phase share a part.

    Attributes:
        connected: Only those between which values lead, inside the part; otherwise all.
        words: What stands in the master, and what stands there in this form.
    """

    connected: bool = False
    words: tuple[tuple[str, str], ...] = ()


FEWEST_PARTS = Form()
CONNECTED = Form(
    connected=True,
    words=(
        (
            "for a node that waits for the part. The device gets as few parts as possible.",
            "for a node that waits for the part. Nodes of the device that have the same phase\n"
            "    share a part if they are connected: a path of values (or pairs that keep their\n"
            "    order), in whatever direction, leads from one to the other inside the part.",
        ),
        (
            "The device gets as few parts as possible; how many parts",
            "On the device, nodes of one phase share a part when they are connected, and only "
            "then; how many parts",
        ),
    ),
)

NOT_COMPUTING = ("placeholder", "get_attr", "output")
SUPPORTED, ACYCLIC, FEWEST = 1, 2, 3


def computes(node: Node) -> bool:
    """Whether a node belongs to a part."""
    return node.op not in NOT_COMPUTING


def is_supported(gm: GraphModule, left_out: Iterable[str], node: Node) -> bool:
    """Whether a device runs a node that runs all but what is left out, by function or class."""
    return computes(node) and kind(node, gm) not in left_out


def entry(answer: Any, gm: GraphModule, left_out: Iterable[str] = ("sin",)) -> Any:
    """Ask for the parts; return for each node of the graph a number, -1 where it has none."""
    version = gm.graph.version
    parts = answer(gm, partial(is_supported, gm, tuple(left_out)))
    if not isinstance(parts, dict):
        raise AnswerError("type", f"it returned {judge.kind_of(parts)}, a dict was asked for")
    numbers: dict[Any, int] = {}
    found = []
    for node in gm.graph.nodes:
        if not computes(node):
            found.append(-1)
        elif node not in parts:
            raise AnswerError("type", f"{node.name} computes, and the dict has no part for it")
        else:
            found.append(numbers.setdefault(parts[node], len(numbers)))
    if gm.graph.version != version:
        raise AnswerError("type", "the graph has been edited: only say which node goes where")
    return found


def judge_parts(form: Form, asked: int, args: tuple, found: list[int]) -> Finding | None:
    """Look for a mixed part, a cycle, more parts than needed; cut, and compare the numbers.

    Args:
        form: which nodes share a part.
        asked: SUPPORTED, ACYCLIC or FEWEST: how much the behaviour asks for.
        args: the program and what the device doesn't support.
        found: a part for each node.
    """
    gm, left_out = args
    nodes = list(gm.graph.nodes)
    members: dict[int, list[Node]] = {}
    for node, part in zip(nodes, found, strict=True):
        if part >= 0:
            members.setdefault(part, []).append(node)
    device = {k for k, part in members.items() if is_supported(gm, left_out, part[0])}
    kits = kits_parts(gm, left_out, form)

    def wrong(sentence: str, node: str = "") -> Finding:
        shown = [f"{'device' if k in device else 'host'}: {_names(m)}" for k, m in members.items()]
        right = [f"device: {_names(part)}" for part in kits]
        return Finding(sentence, node, "\n".join(right), "\n".join(shown), gm)

    for part in members.values():
        sides = {is_supported(gm, left_out, node): node for node in part}
        if len(sides) == 2:
            return wrong(
                f"one part holds {sides[True].name} and {sides[False].name}, and the device does "
                f"not support {sides[False].name}",
                sides[False].name,
            )
    if asked >= ACYCLIC:
        problem = _cycle(gm, members)
        if problem:
            return wrong(problem)
        cut = split_module(gm, None, dict(zip(nodes, found, strict=True)).__getitem__)
        if text := judge.same_program(gm, cut, programs.fresh_inputs(gm)):
            return wrong(f"cut there, the program does something else: {text}")
    runs = sum(
        is_supported(gm, left_out, node) and not is_supported(gm, left_out, before)
        for before, node in itertools.pairwise(nodes)
    )
    if asked >= ACYCLIC and len(device) > max(runs, len(kits)):
        return wrong(
            f"the device gets {len(device)} parts, and {max(runs, len(kits))} would do if only "
            "neighbours in the list shared one"
        )
    if asked >= FEWEST and form.connected and (apart := _apart(gm, [members[k] for k in device])):
        return wrong(
            f"one part holds {apart[0].name} and {apart[1].name}, and no path inside it connects "
            "them",
            apart[1].name,
        )
    if asked >= FEWEST and len(device) > len(kits):
        return wrong(
            f"the device gets {len(device)} parts, and {len(kits)} would do: nodes may share a "
            "part without being neighbours in the list"
        )
    return None


def kits_parts(gm: GraphModule, left_out: Iterable[str], form: Form) -> list[list[Node]]:
    """Return the kit's own parts for the device, the fewest there can be."""
    support = create_op_support(lambda _, node: is_supported(gm, left_out, node))
    partitioner = CapabilityBasedPartitioner(
        gm,
        support,
        allows_single_node_partition=True,
        skip_horizontal_fusion=form.connected,
    )
    return [list(part.nodes) for part in partitioner.propose_partitions()]


def _apart(gm: GraphModule, parts: Iterable[list[Node]]) -> tuple[Node, Node] | None:
    """Return two nodes of one part that nothing inside it connects, or None."""
    hidden = [pair for pairs in order_constraints(gm) for pair in pairs]
    edges = [(v, n) for n in gm.graph.nodes for v in n.all_input_nodes] + hidden
    near: dict[Node, list[Node]] = {}
    for before, after in edges:
        near.setdefault(before, []).append(after)
        near.setdefault(after, []).append(before)
    for part in parts:
        reached, waiting = {part[0]}, [part[0]]
        while waiting:
            for other in near.get(waiting.pop(), ()):
                if other in part and other not in reached:
                    reached.add(other)
                    waiting.append(other)
        left = [node for node in part if node not in reached]
        if left:
            return part[0], left[0]
    return None


def _names(nodes: Iterable[Node]) -> str:
    return ", ".join(node.name for node in nodes)


def _cycle(gm: GraphModule, members: dict[int, list[Node]]) -> str:
    """Name two nodes of one part between which another part must run, or return ""."""
    part_of = {node: k for k, part in members.items() for node in part}
    hidden = [pair for pairs in order_constraints(gm) for pair in pairs]
    for edges, why in (([], ""), (hidden, _why(hidden, gm))):
        needs: dict[int, dict[int, tuple[Node, Node]]] = {k: {} for k in members}
        values = [(v, n) for n in gm.graph.nodes for v in n.all_input_nodes]
        for before, after in [*values, *edges]:
            if before in part_of and after in part_of and part_of[before] != part_of[after]:
                needs[part_of[after]].setdefault(part_of[before], (before, after))
        stuck = _stuck(needs)
        if stuck:
            path = _walk(needs, stuck)
            inside, outside = path[0], path[1]
            return (
                f"a cycle: the part of {inside[1].name} needs {inside[0].name} to have run, and "
                f"that part needs {outside[0].name}: neither can go first{why}"
            )
    return ""


def _why(hidden: list[tuple[Node, Node]], gm: GraphModule) -> str:
    if not hidden:
        return ""
    before, after = hidden[0]
    return (
        f"; no value flows, but {before.name} and {after.name} must keep their order "
        "(order_constraints)"
    )


def _stuck(needs: dict[int, dict[int, Any]]) -> set[int]:
    """Return the parts that are in a cycle, or wait for one."""
    left = dict(needs)
    while ready := [k for k, others in left.items() if not any(o in left for o in others)]:
        for k in ready:
            del left[k]
    return set(left)


def _walk(needs: dict[int, dict[int, Any]], stuck: set[int]) -> list[tuple[Node, Node]]:
    """Follow what stuck parts need until one comes again; return the edges of the cycle."""
    part, seen, edges = min(stuck), [], []
    while part not in seen:
        seen.append(part)
        part, edge = next((o, e) for o, e in needs[part].items() if o in stuck)
        edges.append(edge)
    return edges[seen.index(part) :]


# ---------------------------------------------------------------------------------------- programs


def chain(x: torch.Tensor) -> torch.Tensor:
    """Supported, not, supported."""
    return torch.relu(torch.sin((x + 1) * 2))


def around(x: torch.Tensor) -> torch.Tensor:
    """The last addition needs the first, and sin of the first."""
    a = x + 1
    return a * 2 + torch.sin(a)


def host_twice(x: torch.Tensor) -> torch.Tensor:
    """Not supported, supported, not supported."""
    return torch.sin(torch.relu(torch.sin(x)) + 1)


def two_strands(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An unsupported node stands between two supported ones that do not wait for it."""
    a = x + 1
    s = torch.sin(y)
    return torch.relu(a), s


def late_join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A long way round, and a short one to the same node."""
    a = torch.relu(torch.sin(x + 1))
    b = y * 2
    return torch.relu(torch.sin(b) + a)


def ends_apart(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two strands, each with a sin between."""
    return torch.relu(torch.sin(x * 2)), torch.relu(torch.sin(y + 1))


def written(x: torch.Tensor) -> torch.Tensor:
    """What is written into a value is no edge of the graph."""
    y = (x + 1) * 2
    y.sin_()
    return y + 1


def read_before(x: torch.Tensor) -> torch.Tensor:
    """A read must come before a write."""
    y = x * 2
    z = torch.sin(y)
    y.add_(1)
    return z * y


CASES: list[tuple[str, int, Callable[..., Any], tuple[str, ...]]] = [
    ("one side a part", SUPPORTED, chain, ("sin",)),
    ("one side a part", SUPPORTED, two_strands, ("sin",)),
    ("no cycle", ACYCLIC, chain, ("sin",)),
    ("no cycle", ACYCLIC, around, ("sin",)),
    ("no cycle", ACYCLIC, host_twice, ("sin",)),
    ("no cycle", ACYCLIC, late_join, ("sin",)),
    ("as few parts as possible", FEWEST, two_strands, ("sin",)),
    ("as few parts as possible", FEWEST, ends_apart, ("sin",)),
    ("as few parts as possible", FEWEST, late_join, ("sin", "mul")),
    ("effects keep their order", ACYCLIC, written, ("sin_",)),
    ("effects keep their order", ACYCLIC, read_before, ("sin",)),
]


def traced(program: Callable[..., Any], left_out: tuple[str, ...]) -> tuple[GraphModule, list[str]]:
    """Return the arguments of a case."""
    return symbolic_trace(program), list(left_out)


def _title(program: Callable[..., Any]) -> str:
    text = (program.__doc__ or "").rstrip(".")
    return text[:1].lower() + text[1:]


def cases(form: Form = FEWEST_PARTS) -> Iterator[Case | Property]:
    """The public cases, smallest first, then generated programs."""
    for behaviour, asked, program, left_out in CASES:
        title = f"{_title(program)}; the device lacks {', '.join(left_out)}"
        args = partial(traced, program, left_out)
        yield Case(behaviour, title, args, partial(judge_parts, form, asked))
        if (behaviour, program) == ("no cycle", late_join):
            yield Property(
                behaviour, "generated programs", _generated, partial(judge_parts, form, ACYCLIC), 20
            )
        if (behaviour, program) == ("as few parts as possible", late_join):
            yield Property(
                behaviour, "generated programs", _generated, partial(judge_parts, form, FEWEST), 20
            )


def hidden(form: Form = FEWEST_PARTS) -> Iterator[Case | Property]:
    """The same programs on a device that supports something else."""
    for behaviour, asked, program, left_out in CASES:
        other = ("add", "mul_") if "sin" in left_out else left_out
        args = partial(traced, program, other)
        yield Case(behaviour, "another device", args, partial(judge_parts, form, asked))


def _generated() -> Any:
    """Programs of two inputs, and a device without some of their operations."""
    from hypothesis import strategies as st

    left_out = st.sampled_from([["relu"], ["add"], ["neg", "mul"], ["relu", "sigmoid", "sub"]])
    return st.tuples(programs.programs(most=8, inputs=2, outputs=2), left_out)


HINTS = (
    "Think of two trains that each wait for the other. The lecture's section 'What the device "
    "does not support' gives every node a phase; nodes of one phase never wait for each "
    "other's part.",
    "Walk the nodes in order. A supported node begins with phase 0, any other with -1. Then "
    "look at everything that must run before it: its phase is at least theirs, and one more "
    "where it is supported and they are not. Take the largest. A part is then a side (device "
    "or host) and a phase. What must run before a node: its inputs, and the nodes that "
    "order_constraints pairs with it.",
    "`max` over nothing raises; `max(values, default=0)` does not. A part may be any text or "
    "number, and two sides must never share one: f'{side}_{phase}'. True counts as 1 in an "
    "addition: 3 + (2 > 1) is 4.",
)


def make(form: Form) -> Exercise:
    """Make one form of the exercise."""
    stub = STUB
    for old, new in form.words:
        stub = stub.replace(old, new)
    return Exercise(
        id="6.1",
        title="Partition by what a device supports, without a cycle",
        level=4,
        minutes=75,
        idea="What a device supports goes to it in few pieces, and no piece waits for itself "
        "(section 6.4).",
        needs=("partition", "phase", "reader", "effect"),
        teaches=("cycle of parts",),
        hints=HINTS,
        asks=(
            "fxlab.passes.partition.CapabilityBasedPartitioner",
            "torch.fx.passes.infra.partitioner.CapabilityBasedPartitioner",
        ),
        parts=(
            Part(
                id="6.1",
                name="my_partition",
                points={
                    "one side a part": 1,
                    "no cycle": 3,
                    "as few parts as possible": 3,
                    "effects keep their order": 2,
                },
                entry=entry,
                cases=partial(cases, form),
                hidden=partial(hidden, form),
                wrong={
                    "all_in_one": "a cycle: the part of",
                    "runs": "nodes may share a part without being neighbours in the list",
                    "neighbours": "neither can go first",
                    "first_input": "neither can go first",
                    "values_only": "must keep their order (order_constraints)",
                    "one_host": "neither can go first",
                    "one_number": "and the device does not support",
                },
                stub=stub,
            ),
        ),
    )


EXERCISE = make(FEWEST_PARTS)
_FORMS = {"fewest": FEWEST_PARTS, "connected": CONNECTED}
VARIANTS = forms(make, _FORMS, lambda form: form.words)
