"""Exercise 7.1: hoist the start of a slow call (section 6.2.3 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.purity import has_side_effect
from fxlab.core.tracer import Tracer
from fxlab.explorer.sentences import plural
from fxlab.passes.effects import order_constraints
from fxlab.passes.schedule import hoist_async, start_call, wait_for
from fxlab.teach import judge, programs
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.wire import known

STUB = '''\
from fxlab.passes.effects import order_constraints
from fxlab.passes.schedule import start_call, wait_for


def my_hoist(gm, function):
    """Edit ``gm`` in place: calls of ``function`` start early and are waited for late; return it.

    ``function(*args, **kwargs)`` becomes ``start_call(function, 1, *args, **kwargs)`` as high up as
    what the call needs allows, and ``wait_for`` of it as far down as its readers allow, the output
    at the latest. Other nodes stay where they are. The first list of ``order_constraints(gm)`` has
    the pairs ``(before, after)`` that keep their order although no value flows.

    Args:
        gm: a program without ``with`` blocks.
        function: the target of the slow ``call_function`` nodes.
    """'''

STARTED, EARLY, LATE = 1, 2, 4
_log: list[Any] = []


@known
@has_side_effect
def fetch(keys: Tensor, times: float = 2.0) -> Tensor:
    """Stand for a server: slow, in reality; it notes what it was asked for."""
    _log.append(keys.detach().clone())
    return keys * times + 1


@known
@has_side_effect
def note(x: Tensor) -> None:
    """Stand for a print: it has an effect on the world."""
    _log.append(x.detach().clone())


class _Schedule(Interpreter):
    """Runs a program whose started calls run at once, or not before somebody waits for them.

    There is one worker: a call that is waited for runs after those that were started before it.
    """

    def __init__(self, gm: GraphModule, at_once: bool) -> None:
        super().__init__(gm)
        self.at_once = at_once
        self.waiting: list[list[Any]] = []  # [call] of each started call; its result, once it ran

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Start, wait, or run anything else as it is."""
        if target is start_call:
            handle: list[Any] = [partial(args[0], *args[2:], **kwargs)]
            self.waiting.append(handle)
            if self.at_once:
                self._finish(handle)
            return handle
        if target is wait_for:
            self._finish(args[0])
            return args[0][0]
        return super().call_function(target, args, kwargs)

    def _finish(self, handle: list[Any]) -> None:
        while any(one is handle for one in self.waiting):
            first = self.waiting.pop(0)
            first[0] = first[0]()


def run(program: Callable[..., Any], inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return what a program gives, what it wrote into its inputs, and what the world noticed."""
    _log.clear()
    given = [x.clone() for x in inputs]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = program(*given)
    return {"output": judge.detached(output), "inputs": given, "log": list(_log)}


def entry(answer: Any, gm: GraphModule, inputs: Sequence[Tensor] = ()) -> Any:
    """Let the answer edit the program; return its rows, and what it does under two schedules."""
    judge.edited(answer, gm, fetch)
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    after: dict[Any, list[int]] = {}
    for first, second in order_constraints(gm)[0]:
        after.setdefault(second, []).append(place[first])
    rows: list[dict[str, Any]] = []
    for node in nodes:
        kinds = {fetch: "call", start_call: "start", wait_for: "wait"}
        kind = kinds.get(node.target, "") if node.op == "call_function" else node.op
        rows.append(
            {
                "name": node.name,
                "kind": kind,
                "reads": [place[value] for value in node.all_input_nodes],
                "after": after.get(node, []),
            }
        )
    runs = [run(_Schedule(gm, at_once).run, inputs) for at_once in (True, False)] if inputs else []
    return {"rows": rows, "runs": runs, "code": str(gm.code).strip()}


def judge_schedule(asked: int, args: tuple, found: Any) -> Finding | None:
    """Look for what is still blocking; run under both schedules; then measure how far things went.

    Args:
        asked: STARTED, and EARLY and LATE added where the behaviour asks for it.
        args: the program and its inputs.
        found: what `entry` returned.
    """
    gm, inputs = args
    rows = found["rows"]

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node, actual=found["code"], graph=gm)

    calls = sum(node.target is fetch for node in gm.graph.nodes)
    starts = [i for i, row in enumerate(rows) if row["kind"] == "start"]
    waits = [i for i, row in enumerate(rows) if row["kind"] == "wait"]
    for row in rows:
        if row["kind"] == "call":
            return wrong(f"{row['name']} is still one blocking call", row["name"])
    if len(starts) != calls:
        became = f"{plural(calls, 'call')} became {plural(len(starts), 'start')}"
        return wrong(f"{became}; each call is started once")
    for i in starts:
        readers = [j for j, row in enumerate(rows) if i in row["reads"]]
        if not readers:
            return wrong(
                f"{rows[i]['name']} is started and nobody waits for it: an error in it would go "
                "unseen, and the program could end first",
                rows[i]["name"],
            )
        if any(j not in waits for j in readers) or len(readers) > 1:
            return wrong(
                f"{rows[i]['name']} is read by {', '.join(rows[j]['name'] for j in readers)}; a "
                "started call is read by one wait_for, and the readers read that",
                rows[i]["name"],
            )
    truth = run(gm, inputs)
    for outcome, when in zip(found["runs"], ("at once", "when it is waited for"), strict=True):
        for key in ("log", "output", "inputs"):
            if judge.unequal(truth[key], outcome[key], 1e-6):
                return wrong(f"when a started call runs {when}, {_WORDS[key]}")
    problem = _too_late(rows, starts) if asked & EARLY else ""
    problem = problem or (_too_early(rows, waits) if asked & LATE else "")
    return wrong(problem) if problem else None


_WORDS = {
    "log": "the server (or another effect) gets other values than before, or in another order: are "
    "all arguments there, and do effects keep their order (order_constraints)?",
    "output": "the output differs: are all arguments there, and is a value written before or after "
    "the call?",
    "inputs": "other values are written: do effects keep their order (order_constraints)?",
}


def _too_late(rows: list[dict], starts: list[int]) -> str:
    """Name a node in front of a start that the start does not need, or return ""."""
    needed = set(starts)
    for i in reversed(range(len(rows))):
        if i in needed and rows[i]["kind"] != "wait":
            needed.update(rows[i]["reads"])
    for i in starts:
        must = [*rows[i]["reads"], *rows[i]["after"]]
        must += [j for j, row in enumerate(rows[:i]) if row["kind"] == "placeholder"]
        for j in range(max(must, default=-1) + 1, i):
            if j not in needed and rows[j]["kind"] != "wait":
                return (
                    f"{rows[i]['name']} stands behind {rows[j]['name']}, which it does not need: "
                    "it could start earlier"
                )
    return ""


def _too_early(rows: list[dict], waits: list[int]) -> str:
    """Name a node that a wait holds up for nothing, or return ""."""
    waiting = set(waits)
    for i, row in enumerate(rows):
        if any(j in waiting for j in row["reads"]):
            waiting.add(i)
    for i in waits:
        later = [
            j
            for j, row in enumerate(rows)
            if j > i and (i in row["reads"] or (i in row["after"] and row["kind"] == ""))
        ]
        first = min(later, default=len(rows) - 1)
        for j in range(i + 1, first):
            if j not in waiting and rows[j]["kind"] != "start":
                return (
                    f"{rows[i]['name']} stands before {rows[j]['name']}, which does not need the "
                    "result and could run meanwhile: it could wait later"
                )
    return ""


# ---------------------------------------------------------------------------------------- programs


def last_line(x: Tensor, k: Tensor) -> Tensor:
    """The call stands behind work that it does not need."""
    y = torch.relu(x)
    return y + fetch(k)


def first_line(x: Tensor, k: Tensor) -> Tensor:
    """The call stands first, its reader last."""
    r = fetch(k)
    return torch.tanh(torch.relu(x)) + r


def computed_keys(x: Tensor, k: Tensor) -> Tensor:
    """The call needs a value that is computed in the middle."""
    y = torch.relu(x)
    keys = k * 3
    z = torch.tanh(y)
    r = fetch(keys)
    return torch.sigmoid(z) + r


def keywords(x: Tensor, k: Tensor) -> Tensor:
    """The call has a keyword argument."""
    y = torch.relu(x)
    return y + fetch(k, times=5.0)


def one_needs_the_other(x: Tensor, k: Tensor) -> Tensor:
    """The second call needs the first one's result."""
    y = torch.relu(x)
    r = fetch(k)
    s = fetch(r - 1)
    return torch.tanh(y) * s


def unread(x: Tensor, k: Tensor) -> Tensor:
    """Nobody reads the result."""
    fetch(k)
    return torch.relu(x)


def written_before(x: Tensor, k: Tensor) -> Tensor:
    """The keys are written into before the call."""
    y = torch.relu(x)
    k.add_(1)
    return y + fetch(k)


def written_after(x: Tensor, k: Tensor) -> Tensor:
    """The keys are written into after the call."""
    r = fetch(k)
    k.mul_(0)
    return torch.relu(x) + r


def noted_before(x: Tensor, k: Tensor) -> Tensor:
    """Another effect stands before the call."""
    note(x)
    return torch.relu(x) + fetch(k)


def scheduled(program: Callable[..., Any], seed: int = 0) -> tuple[GraphModule, list[Tensor]]:
    """Return the arguments of a case: a traced program with slow calls as nodes, and inputs."""
    tracer = Tracer(autowrap_functions=(fetch, note))
    graph = tracer.trace(program)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, 3, generator=generator) for _ in range(2)]
    return GraphModule(tracer.root, graph), inputs


CASES: list[tuple[str, int, Callable[..., Any]]] = [
    ("a start and a wait", STARTED, last_line),
    ("a start and a wait", STARTED, keywords),
    ("a start and a wait", STARTED, unread),
    ("the start is early", EARLY, last_line),
    ("the start is early", EARLY, computed_keys),
    ("the start is early", EARLY, one_needs_the_other),
    ("the wait is late", LATE, first_line),
    ("the wait is late", LATE, computed_keys),
    ("the wait is late", LATE, unread),
    ("effects keep their order", STARTED, written_before),
    ("effects keep their order", STARTED, written_after),
    ("effects keep their order", STARTED, noted_before),
]


def cases(seed: int = 0) -> Iterator[Case | Property]:
    """The public cases, smallest first."""
    for behaviour, asked, program in CASES:
        text = (program.__doc__ or "").rstrip(".")
        title = text[:1].lower() + text[1:]
        args = partial(scheduled, program, seed)
        yield Case(behaviour, title, args, partial(judge_schedule, asked))
    yield Property(
        "the wait is late",
        "generated programs without other effects",
        partial(_generated, False),
        partial(judge_schedule, EARLY | LATE),
        40,
    )
    yield Property(
        "effects keep their order",
        "generated programs that write",
        partial(_generated, True),
        partial(judge_schedule, STARTED),
        40,
    )


def _generated(effects: bool) -> Any:
    """Programs of two inputs that call the server now and then."""
    calls = [
        ("call_function", fetch, (), {}),
        ("call_function", fetch, (), {"times": 3.0}),
        ("call_function", fetch, (0.5,), {}),
    ]
    drawn = programs.programs(most=6, inputs=2, effects=effects, choices=calls)
    return drawn.map(lambda gm: (gm, programs.fresh_inputs(gm)))


def hidden() -> Iterator[Case | Property]:
    """The public programs on other numbers, and larger ones."""
    yield from cases(seed=11)


EXERCISE = Exercise(
    id="7.1",
    title="Hoist the start of a slow call",
    level=3,
    minutes=40,
    idea="A blocking call becomes a start, early, and a wait, late, so that other work runs "
    "meanwhile (section 6.2.3).",
    needs=("blocking call", "start and wait", "effect", "reader", "insertion point"),
    teaches=("hoist",),
    hints=(
        "While the server works, this process should have something to do. The lecture's section "
        "'Start and wait' names the three things that hold a start and a wait where they are.",
        "For each call: collect what must come before it (its inputs, and the first of each pair "
        "whose second is the call) and what must come after (its readers, and the second of each "
        "pair whose first is the call). From the call walk up until you meet one of the former or "
        "a placeholder; the start goes behind that node. Walk down until you meet one of the "
        "latter or the output; the wait goes before it. Then turn the readers and erase the call. "
        "An earlier call that is gone now: its start stands for it above, its wait below.",
        "`node.prev` and `node.next` are the neighbours in the list. To keep keyword arguments, "
        "hand both over: `graph.call_function(new, (extra, *node.args), node.kwargs)`.",
    ),
    asks=("fxlab.passes.schedule.hoist_async",),
    parts=(
        Part(
            id="7.1",
            name="my_hoist",
            points={
                "a start and a wait": 2,
                "the start is early": 3,
                "the wait is late": 2,
                "effects keep their order": 2,
            },
            entry=entry,
            cases=cases,
            hidden=hidden,
            wrong={
                "where_it_stood": "which it does not need: it could start earlier",
                "waits_at_once": "could run meanwhile: it could wait later",
                "no_keywords": "are all arguments there",
                "values_only": "do effects keep their order (order_constraints)?",
                "never_waits": "nobody waits for it",
                "at_the_top": "which comes after it",
                "reads_the_start": "a started call is read by one wait_for",
            },
            stub=STUB,
        ),
    ),
)


def _large(nodes: int) -> tuple[GraphModule, tuple[()]]:
    """A program of so many nodes: work, and a call in every hundredth place."""
    graph = Graph()
    x, k = graph.placeholder("x"), graph.placeholder("k")
    while len(graph.nodes) < nodes:
        many = len(graph.nodes) % 100 == 0
        x = graph.call_function(torch.add, (x, graph.call_function(fetch, (k,)))) if many else x
        x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    return GraphModule(torch.nn.Module(), graph), ()


COMPARE = {
    "7.1": Reference(
        kit=hoist_async,
        small=partial(scheduled, computed_keys),
        large=_large,
    )
}
