"""1.2: what is a leaf, and who decides?

A Tracer is told which modules to keep whole and which to look into. What it should record follows
from the model's own tree of modules, so the judge compares the modules that stayed whole with lists
written down for each case, and runs the graph (paper, section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import Tracer
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import fill


class Block(nn.Module):
    """A layer with a shortcut around it; no module of torch.nn, so no leaf by default."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + act(fc(x)), f32[n, 4]."""
        return x + self.act(self.fc(x))


class GatedBlock(Block):
    """A Block whose shortcut is weighted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x / 2 + act(fc(x)), f32[n, 4]."""
        return x / 2 + self.act(self.fc(x))


class Tower(nn.Module):
    """Two Blocks and a head; the paths of its modules are those that the cases name."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()
        self.block10 = GatedBlock()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f32[n, 2] for f32[n, 4]."""
        return self.head(self.block10(self.block1(x)))


_CLASSES = {kind.__name__: kind for kind in (Block, GatedBlock, nn.Linear, nn.ReLU)}


def make_tower() -> nn.Module:
    """Return the same Tower each time."""
    return fill(Tower())


def entry(
    answer: Callable[..., Any], stop: list[str], through: list[str], x: torch.Tensor
) -> dict[str, Any]:
    """Trace a Tower with the student's Tracer.

    Args:
        answer: The class.
        stop: Paths and names of classes (a class begins with a capital) that stay whole.
        through: The same of those that are looked into.
        x: f32[n, 4], to run the graph on.

    Returns:
        {"whole": paths in the order of their calls, "nodes": how many, "code": the graph's text,
        "output": f32[n, 2]}.
    """
    tower = make_tower()
    names = ([_CLASSES.get(name, name) for name in group] for group in (stop, through))
    tracer = answer(*names)
    if not isinstance(tracer, Tracer):
        raise AnswerError(
            "type", f"NamedTracer makes {kind_of(tracer)}: derive it from fxlab.Tracer"
        )
    graph = tracer.trace(tower)
    if not isinstance(graph, Graph):
        raise AnswerError("type", f"its trace returned {kind_of(graph)}")
    gm = GraphModule(tower, graph)
    with torch.no_grad():
        output = gm(x)
    modules = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {"whole": modules, "nodes": len(graph.nodes), "code": str(graph), "output": output}


def _judge(expected: str, nodes: int) -> Callable[[tuple[Any, ...], Any], Finding | None]:
    wanted = expected.split()

    def judge(args: tuple[Any, ...], value: Any) -> Finding | None:
        stop, through, x = args
        got, code = value["whole"], value["code"]
        extra = [path for path in got if path not in wanted]
        for path in extra:
            alike = [
                one
                for one in stop
                if path.startswith(one) and path[len(one) :][:1] not in ("", ".")
            ]
            if alike:
                return Finding(
                    f"{path} stayed whole though only {alike[0]} was named in stop: compare whole "
                    "paths, not parts of them", actual=code,
                )  # fmt: skip
        for path in wanted:
            if path not in got:
                return Finding(_not_whole(path, stop), actual=code)
        for path in extra:
            return Finding(_too_whole(path, through), actual=code)
        with torch.no_grad():
            text = unequal(make_tower()(x), value["output"])
        if text or value["nodes"] != nodes:
            text = text or f"the graph has {value['nodes']} nodes where {nodes} are right"
            return Finding(f"the right modules are whole, but {text}", actual=code)
        return None

    return judge


def _kind(path: str) -> type:
    return type(make_tower().get_submodule(path))


def _not_whole(path: str, stop: list[str]) -> str:
    kind = _kind(path)
    if path in stop:
        return f"{path} was named in stop and was traced through"
    if kind.__name__ in stop:
        return f"{kind.__name__} was named in stop, and {path} is one, but it was traced through"
    bases = [name for name in stop if name in _CLASSES and issubclass(kind, _CLASSES[name])]
    if bases:
        return (
            f"{path} is a {kind.__name__}, which is a {bases[0]} too, and {bases[0]} was named in "
            "stop: ask isinstance, not for the exact class"
        )
    return (
        f"{path} ({kind.__name__}) was traced through though nobody named it: what is not named "
        "is decided as usual, by super().is_leaf_module"
    )


def _too_whole(path: str, through: list[str]) -> str:
    kind = _kind(path).__name__
    if path in through or kind in through:
        return f"{path} ({kind}) was named in through and stayed whole"
    return f"{path} ({kind}) stayed whole though nobody named it in stop"


_ALL = "block1.fc block1.act block10.fc block10.act head"
_CASES = [
    # behaviour, title, stop, through, what stays whole, how many nodes the graph has
    ("the others as usual", "nobody is named", [], [], _ALL, 10),
    ("stop at a path", "stop at block10", ["block10"], [], "block1.fc block1.act block10 head", 7),
    ("stop at a path", "stop at block1, which block10 only begins like", ["block1"], [],
     "block1 block10.fc block10.act head", 8),
    ("through a path", "through head", [], ["head"], "block1.fc block1.act block10.fc block10.act",
     12),
    ("through a path", "through block1.act", [], ["block1.act"],
     "block1.fc block10.fc block10.act head", 10),
    ("classes", "stop at each GatedBlock", ["GatedBlock"], [], "block1.fc block1.act block10 head",
     7),
    ("classes", "stop at each Block", ["Block"], [], "block1 block10 head", 5),
    ("classes", "through each Linear", [], ["Linear"], "block1.act block10.act", 16),
    ("stop wins", "through each Linear, but stop at head", ["head"], ["Linear"],
     "block1.act block10.act head", 14),
]  # fmt: skip
_HIDDEN = [
    ("stop at a path", "stop at block10 and head", ["block10", "head"], [],
     "block1.fc block1.act block10 head", 7),
    ("through a path", "through block10.fc and head", [], ["block10.fc", "head"],
     "block1.fc block1.act block10.act", 14),
    ("classes", "through each ReLU", [], ["ReLU"], "block1.fc block10.fc head", 10),
    ("classes", "stop at each Block, through each Linear", ["Block"], ["Linear"], "block1 block10",
     7),
    ("stop wins", "stop at each GatedBlock, though block10 is to be looked through",
     ["GatedBlock"], ["block10"], "block1.fc block1.act block10 head", 7),
]  # fmt: skip


def _cases(rows: list[Any] = _CASES) -> Iterator[Case]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    for behaviour, title, stop, through, whole, nodes in rows:
        args = (list(stop), list(through), x)
        yield Case(behaviour, title, lambda args=args: args, _judge(whole, nodes))


STUB = '''
class NamedTracer(fxlab.Tracer):
    """Stops at the modules in `stop`, looks into those in `through`, treats the others as usual.

    Both hold paths ("block1.fc") and classes (nn.Linear, which names its subclasses too). A module
    that both name is stopped at.
    """
'''.strip()

EXERCISE = Exercise(
    id="1.2",
    title="A Tracer that stops at, or goes through, the modules you name",
    level=2,
    minutes=20,
    idea="The level of a capture is a choice: a leaf module is one node, any other is traced "
    "through, and one method of the Tracer decides (section 5.2).",
    needs=("graph", "node", "call_module", "leaf module"),
    teaches=("level of a capture",),
    hints=(
        "Lecture 01, 'The level of a capture', shows two Tracers that override is_leaf_module: one "
        "answers for all modules alike, one asks for a class and leaves the rest to super().",
        "is_leaf_module gets the module and its path. Ask three questions in order: is it named in "
        "stop (then True)? Is it named in through (then False)? Else, what would the Tracer have "
        "said that you derive from?",
        "An entry of stop may be a text or a class, and these are compared in different ways: "
        "isinstance(3, str) is False; isinstance(3, int) asks the class; 'ab' == 'abc' is False "
        "where 'ab' in 'abc' is True.",
    ),
    asks=("fxlab.core.tracer.symbolic_trace", "torch.fx.symbolic_trace"),
    parts=(
        Part(
            id="1.2",
            name="NamedTracer",
            points={
                "the others as usual": 1,
                "stop at a path": 2,
                "through a path": 2,
                "classes": 2,
                "stop wins": 1,
            },
            entry=entry,
            cases=_cases,
            hidden=partial(_cases, _HIDDEN),
            wrong={
                "forgets_the_others": "what is not named is decided as usual",
                "part_of_a_path": "compare whole paths",
                "exact_class": "ask isinstance",
                "super_first": "was named in through and stayed whole",
                "paths_only": "was named in stop, and block10 is one",
                "through_wins": "head was named in stop and was traced through",
            },
            stub=STUB,
        ),
    ),
)
