"""Exercise 8.1: mixed precision as a pass (what the paper's IR makes easy; lecture 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.amp import amp, column
from fxlab.passes.quantize.report import sqnr
from fxlab.teach import judge
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part

STUB = '''\
import copy

from fxlab.passes import shape_prop
from fxlab.passes.amp import column

LOW = torch.bfloat16


def my_amp(gm, inputs):
    """Edit ``gm`` in place: matrix products in bfloat16, float32 where it matters; return it.

    ``column(node, gm)`` is the op table's word for a node that computes. "lower": the float values
    it reads are bfloat16, and so are its module's weights. "keep": they are float32. "widest": they
    are float32 unless all are bfloat16. "follow": it takes them as they come. The output is float32
    where it was.

    A value is cast once for all its readers, a cast is never cast again, and what is no float32
    tensor (indices, masks) is left alone. Weights are cast now, in new modules: the model that was
    traced keeps its own.

    Args:
        gm: the program, float32, in eval mode.
        inputs: a list of example inputs; ``shape_prop(gm, *inputs)`` leaves each value's dtype in
            ``node.meta["tensor_meta"].dtype``.
    """'''

CASTS = {"to", "float", "bfloat16", "type", "half", "type_as", "_to_copy"}


class _Dtypes(Interpreter):
    """Runs a program and notes the dtype of each value."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.seen[n] = str(value.dtype).removeprefix("torch.")
        return value


def entry(answer: Any, gm: GraphModule, inputs: Sequence[Tensor] = ()) -> Any:
    """Let the answer edit the program; return its rows, outputs, and the weights it wrote to."""
    owned = [
        (f"{path}.{name}".lstrip("."), module, name, tensor, tensor.detach().clone())
        for path, module in gm.named_modules()
        for name, tensor in module._parameters.items()
        if tensor is not None and module is not gm
    ]
    judge.edited(answer, gm, list(inputs))
    written = [
        path
        for path, module, name, tensor, value in owned
        if module._parameters.get(name) is not tensor
        or tensor.dtype != value.dtype
        or not torch.equal(tensor, value)
    ]
    run = _Dtypes(gm)
    try:
        with torch.no_grad():
            output = run.run(*inputs) if inputs else None
    except RuntimeError as error:
        return {"raised": _explained(str(error)), "code": str(gm.code).strip(), "written": written}
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        computes = node.op in ("call_module", "call_function", "call_method")
        name = node.target if isinstance(node.target, str) else node.target.__name__
        rows.append(
            {
                "name": node.name,
                "column": column(node, gm) if computes else "",
                "cast": computes and node.op != "call_module" and name in CASTS,
                "reads": [place[value] for value in node.all_input_nodes],
                "dtype": run.seen.get(node, ""),
                "output": node.op == "output",
            }
        )
    return {"rows": rows, "output": output, "written": written, "code": str(gm.code).strip()}


def _explained(text: str) -> str:
    """Add to torch's words what they mean here."""
    meanings = {
        "indices": "the indices of an embedding are whole numbers: leave them alone",
        "same dtype": "one operand is cast and the other is not; a module's weights are operands",
    }
    meaning = next((m for part, m in meanings.items() if part in text), "")
    return f"{meaning}: {text}" if meaning else text


PRODUCTS, KEPT, CAST_ONCE, MODEL, OUTSIDE = 1, 2, 4, 8, 16
_FLOATS = ("float32", "bfloat16")


def judge_amp(asked: int, args: tuple, found: Any) -> Finding | None:
    """Compare outputs; then look at the dtypes each operation reads, at casts, at the model.

    Args:
        asked: PRODUCTS, KEPT, CAST_ONCE, MODEL, OUTSIDE, added up: what the behaviour asks for.
        args: the program and its inputs.
        found: what `entry` returned.
    """
    gm, inputs = args

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node, actual=found["code"], graph=gm)

    if asked & MODEL and found["written"]:
        return wrong(
            f"{found['written'][0]} of the model that was traced has changed: gm shares its "
            "modules, so install a copy (gm.set_submodule) and cast that"
        )
    if "raised" in found:
        return wrong(f"the program does not run: {found['raised']}")
    with torch.no_grad():
        expected = gm(*inputs)
    outputs, mine = _flat(expected), _flat(found["output"])
    if len(outputs) != len(mine):
        return wrong(f"the program returns {len(mine)} values, and returned {len(outputs)}")
    for one, other in zip(outputs, mine, strict=True):
        if one.shape != other.shape or (asked & OUTSIDE and one.dtype != other.dtype):
            return wrong(
                f"an output is {other.dtype} {list(other.shape)}, and was {one.dtype} "
                f"{list(one.shape)}: inputs and outputs keep their types"
            )
        if one.is_floating_point() and sqnr(one, other) < 20:
            return wrong(f"an output is {sqnr(one, other):.0f} dB from that of the float program")
    rows = found["rows"]
    for row in rows:
        floats = [rows[i] for i in row["reads"] if rows[i]["dtype"] in _FLOATS]
        if asked & PRODUCTS and row["column"] == "lower":
            for value in floats:
                if value["dtype"] == "float32":
                    return wrong(
                        f"{row['name']} reads {value['name']} in float32; a matrix product runs "
                        "in bfloat16",
                        row["name"],
                    )
        mixed = {value["dtype"] for value in floats} == set(_FLOATS)
        if asked & KEPT and (row["column"] == "keep" or (row["column"] == "widest" and mixed)):
            for value in floats:
                if value["dtype"] == "bfloat16":
                    return wrong(
                        f"{row['name']} reads {value['name']} in bfloat16; the op table says "
                        f'"{row["column"]}": float32',
                        row["name"],
                    )
    problem = _casts(rows) if asked & CAST_ONCE else ""
    return wrong(problem) if problem else None


def _casts(rows: list[dict]) -> str:
    """Name a cast that is not needed, or return ""."""
    first: dict[tuple[int, str], str] = {}
    for row in rows:
        if not row["cast"]:
            continue
        (source, *_) = row["reads"]
        value = rows[source]
        if value["cast"]:
            return (
                f"{row['name']} casts {value['name']}, which is a cast of "
                f"{rows[value['reads'][0]]['name']}: read that instead"
            )
        if value["dtype"] == row["dtype"]:
            return f"{row['name']} casts {value['name']} to {row['dtype']}, which it is already"
        if (source, row["dtype"]) in first:
            return (
                f"{value['name']} is cast to {row['dtype']} twice, by "
                f"{first[source, row['dtype']]} and {row['name']}: one cast serves all readers"
            )
        first[source, row["dtype"]] = row["name"]
    return ""


def _flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# ---------------------------------------------------------------------------------------- programs


class Two(nn.Module):
    """Two layers with a ReLU between, which follows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second layer of a ReLU of the first."""
        return self.fc2(torch.relu(self.fc1(x)))


class Chain(nn.Module):
    """Two layers, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second layer of the first."""
        return self.fc2(self.fc1(x))


class Classifier(Two):
    """A softmax, which keeps float32, behind two layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities."""
        return torch.softmax(super().forward(x), dim=-1)


class Normed(nn.Module):
    """A layer norm, which keeps float32, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a layer of the normed value, and the value's mean added."""
        h = self.fc1(x)
        return self.fc2(self.norm(h)) + h.mean(-1, keepdim=True)


class Fan(nn.Module):
    """Three layers read one value; one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        scores = torch.matmul(self.q(x), self.k(x).transpose(0, 1))
        return torch.softmax(scores, -1) @ self.q(x)


class Words(nn.Module):
    """The input is a tensor of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer of the rows, and the indices shifted."""
        return self.fc(self.embed(ids)), ids + 1


class Weight(nn.Module):
    """The product reads a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a matrix product."""
        return x @ self.weight


def one() -> nn.Module:
    """One layer."""
    return nn.Sequential(nn.Linear(6, 4))


def cast_program(
    make: Callable[[], nn.Module], indices: bool = False, seed: int = 0
) -> tuple[GraphModule, list[Tensor]]:
    """Return the arguments of a case: a traced model in eval mode, and inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
        x = torch.randint(0, 10, (5,)) if indices else torch.randn(5, 6)
    return symbolic_trace(model), [x]


CASES: list[tuple[str, int, Callable[[], nn.Module], str]] = [
    ("products in 16 bits", PRODUCTS, one, "one layer"),
    ("products in 16 bits", PRODUCTS, Two, "two layers"),
    ("products in 16 bits", PRODUCTS, Weight, "x @ self.weight"),
    ("the rest in 32 bits", KEPT | PRODUCTS, Classifier, "a softmax behind two layers"),
    ("the rest in 32 bits", KEPT | PRODUCTS, Normed, "a layer norm and a mean"),
    ("one cast a value", CAST_ONCE | PRODUCTS, Chain, "two layers in a row"),
    ("one cast a value", CAST_ONCE | PRODUCTS, Two, "two layers with a ReLU between"),
    ("one cast a value", CAST_ONCE | PRODUCTS | KEPT, Normed, "a value that two read in float32"),
    ("one cast a value", CAST_ONCE | PRODUCTS | KEPT, Fan, "a value that three layers read"),
    ("outputs keep their types", OUTSIDE | PRODUCTS, one, "one layer"),
    ("outputs keep their types", OUTSIDE | PRODUCTS, Classifier, "a softmax"),
    ("indices stay", PRODUCTS, Words, "an embedding"),
    ("the model stays", MODEL | PRODUCTS, one, "one layer"),
    ("the model stays", MODEL | PRODUCTS, Fan, "a layer that is called twice"),
]


def cases(seed: int = 0) -> Iterator[Case]:
    """The public cases, smallest first."""
    for behaviour, asked, make, title in CASES:
        args = partial(cast_program, make, make is Words, seed)
        yield Case(behaviour, title, args, partial(judge_amp, asked))


def hidden() -> Iterator[Case]:
    """The same on other numbers."""
    yield from cases(seed=23)


EXERCISE = Exercise(
    id="8.1",
    title="Mixed precision as a pass",
    level=4,
    minutes=75,
    idea="A graph is known ahead of time, so casts can be placed once, shared, and taken off "
    "weights before the program runs (lecture 11; the kind of pass that sections 1 and 6 promise).",
    needs=("bfloat16", "cast", "op table", "shape propagation", "state of a GraphModule"),
    teaches=("precision of a value",),
    hints=(
        "Walk the program once, from the inputs on, and know for each float value in which "
        "precision it is now. The lecture's section 'The op table' says which precision a node "
        "wants.",
        "Keep a dict from node to True (bfloat16) or False (float32), for float32 tensors only. "
        'For each node: take its column; the output is like "keep". If it wants another precision '
        "than a value has, let it read a cast of that value; remember the cast in a dict by value "
        'and dtype, so that the next reader gets the same. A "follow" node is bfloat16 when all '
        'the float values it reads are. For a "lower" module, install a copy with cast weights.',
        "`node.replace_input_with(old, new)` changes one reader and leaves the others. "
        "`graph.call_method('to', (value, torch.float16))` is a cast as a node; inserted before "
        "the first reader it stands before all readers. `copy.deepcopy(nn.ReLU()).to(dtype)` makes "
        "a module of its own.",
    ),
    asks=("fxlab.passes.amp.amp",),
    parts=(
        Part(
            id="8.1",
            name="my_amp",
            points={
                "products in 16 bits": 3,
                "the rest in 32 bits": 2,
                "one cast a value": 2,
                "outputs keep their types": 1,
                "indices stay": 1,
                "the model stays": 2,
            },
            entry=entry,
            cases=cases,
            hidden=hidden,
            wrong={
                "everything": "the op table says",
                "cast_a_reader": "one cast serves all readers",
                "there_and_back": "which is a cast of",
                "casts_indices": "the indices of an embedding",
                "in_place": "of the model that was traced has changed",
                "forgets_output": "inputs and outputs keep their types",
                "forgets_weights": "a module's weights are operands",
                "reads_itself": "also rewired the node you inserted",
            },
            stub=STUB,
        ),
    ),
)


def _kits(gm: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    return amp(gm)


def _large(nodes: int) -> tuple[GraphModule, list[Tensor]]:
    """A program of so many nodes: one small layer over and over, with functions between."""
    graph, root = Graph(), nn.Module()
    root.fc = nn.Linear(4, 4)
    x = graph.placeholder("x")
    while len(graph.nodes) < nodes:
        x = graph.call_module("fc", (x,))
        x = graph.call_function(torch.softmax, (graph.call_function(torch.relu, (x,)), -1))
    graph.output(x)
    return GraphModule(root.eval().requires_grad_(False), graph), [torch.randn(2, 4)]


COMPARE = {
    "8.1": Reference(kit=_kits, small=partial(cast_program, Fan), large=_large),
}
