"""4.1: does an Interpreter that writes shapes see every value, and say where a run fails?

Without control flow one forward walk is the whole analysis (paper, section 6.3). What the answer
writes on the nodes is compared, node by node, with what the kit's ``shape_prop`` finds on the same
inputs.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.shape_prop import TensorMetadata, shape_prop
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import built, fill

NOTHING = "nothing"
Judged = Callable[[tuple[Any, ...], Any], "Finding | None"]


def _interpreter(answer: Any, gm: GraphModule) -> Interpreter:
    made = answer(gm)
    if not isinstance(made, Interpreter):
        raise AnswerError("type", f"{kind_of(made)} is no Interpreter: subclass fxlab.Interpreter")
    return made


def entry(answer: Any, gm: GraphModule, *runs: list[Any]) -> dict[str, Any]:
    """Run the answer's interpreter once for each list of inputs.

    Returns:
        {"shapes": for each node what meta["shape"] holds, or "nothing", "result": of the last run,
        "error": what the last run raised, as text, or None}
    """
    if not runs:
        return {}
    result, error = None, None
    for number, inputs in enumerate(runs):
        interpreter = _interpreter(answer, gm)
        try:
            result = interpreter.run(*inputs)
        except RuntimeError as raised:
            # Torch's own errors are RuntimeErrors, too; what an answer makes of them is judged.
            if number < len(runs) - 1 or not _fails(gm, inputs):
                raise
            error = str(raised)
    return {
        "shapes": [_plain(node.meta.get("shape", NOTHING)) for node in gm.graph.nodes],
        "result": result,
        "error": error,
    }


def _fails(gm: GraphModule, inputs: list[Any]) -> bool:
    try:
        gm(*inputs)
    except RuntimeError:
        return True
    return False


def _plain(value: Any) -> Any:
    """Return what stands in meta["shape"] as lists of numbers, so that it crosses a pipe."""
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if isinstance(value, (int, str)) else repr(value)


def _wanted(gm: GraphModule, inputs: list[Any]) -> list[Any]:
    """Return the shapes that the kit's own pass finds, in the same form."""
    shape_prop(gm, *inputs)

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, TensorMetadata) else value

    found = []
    for node in gm.graph.nodes:
        meta = node.meta.get("tensor_meta", NOTHING)
        if isinstance(meta, TensorMetadata):
            found.append(list(meta.shape))
        else:
            found.append(_plain(_each(meta, shape)))
    return found


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, TensorMetadata):
        return function(value)
    if isinstance(value, (tuple, list)):
        return [_each(part, function) for part in value]
    if isinstance(value, Mapping):
        return {name: _each(part, function) for name, part in value.items()}
    return value


def _judge_shapes(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, *runs = args
    wanted = _wanted(gm, runs[-1])
    for node, right, seen in zip(gm.graph.nodes, wanted, value["shapes"], strict=True):
        if right == seen:
            continue
        call = f"{node.name} ({node.op})"
        if right == NOTHING:
            sentence = f"{call} gives no tensor, so it has no shape: leave meta['shape'] out"
        elif seen == NOTHING:
            sentence = f"{call} has no meta['shape']: its value has {_said(right)}"
        elif isinstance(right, list) and right and not isinstance(right[0], int):
            sentence = (
                f"{call} gives several tensors: meta['shape'] holds {_said(seen)}, expected "
                f"one shape for each, in a tuple or list of the same form, {_said(right)}"
            )
        else:
            old = len(runs) > 1 and seen == _wanted(gm, runs[0])[list(gm.graph.nodes).index(node)]
            again = ": that was the run before, on other inputs" if old else ""
            sentence = f"{call}: meta['shape'] is {_said(seen)}, expected {_said(right)}{again}"
        return Finding(sentence, node=node.name)
    return None


def _said(shape: Any) -> str:
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        return str(tuple(shape))
    return str(shape).replace("[", "(").replace("]", ")")


def _judge_result(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, inputs = args
    if value["result"] is None:
        return Finding(
            "run returned None and the program returns a tensor: run_node must return the value "
            "that it has seen, for the nodes that read it"
        )
    text = unequal(gm(*inputs), value["result"], name="what run returns")
    return Finding(text) if text else None


def _judge_error(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, inputs = args
    said = value["error"]
    if said is None:
        return Finding("this program can't run on these inputs, and the run raised no RuntimeError")
    node, shapes = _failing(gm, inputs)
    if not re.search(rf"\b{re.escape(node)}\b", said):
        return Finding(
            f"the error does not say which node failed: {said.splitlines()[0][:120]!r}. Catch what "
            "super().run_node(n) raises and raise a RuntimeError with n.name in its text",
            node=node,
        )
    for shape in shapes:
        if not re.search(r"\D+".join(rf"\b{size}\b" for size in shape), said):
            return Finding(
                f"the error names {node}, and not what it was given: a value of shape "
                f"{tuple(shape)}. The shapes of n.all_input_nodes are in their meta already",
                node=node,
            )
    return None


def _failing(gm: GraphModule, inputs: list[Any]) -> tuple[str, list[list[int]]]:
    """Return the node that fails on these inputs, and the shapes of what it reads."""
    seen: dict[str, Any] = {}
    failed: list[Any] = []

    class Watch(Interpreter):
        def run_node(self, n: Any) -> Any:
            try:
                seen[n.name] = super().run_node(n)
            except RuntimeError:
                failed.append(failed[0] if failed else n)
                raise
            return seen[n.name]

    with contextlib.suppress(RuntimeError):
        Watch(gm).run(*inputs)
    return failed[0].name, [list(seen[n.name].shape) for n in failed[0].all_input_nodes]


class Kinds(nn.Module):
    """A node of every opcode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.empty(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f32[n, 1] for f32[n, 4]."""
        return torch.relu(self.linear(x)).matmul(self.scale)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _halves(x: torch.Tensor) -> Any:
    a, b = x.chunk(2, dim=-1)
    return a.sum(-1), torch.cat([b, b])


def _named(x: torch.Tensor) -> Any:
    return {"all": x.t(), "parts": [x[0], x.mean()]}


def _sizes(x: torch.Tensor) -> Any:
    return x.reshape(x.size(0), -1) * 2


def _head(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.relu(x.flatten(1)) @ w


def _mismatch(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.tanh(x + 1) + y.t()


def _made(program: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    program = fill(program) if isinstance(program, nn.Module) else program
    generator = torch.Generator().manual_seed(1)
    return symbolic_trace(program), [torch.randn(s, generator=generator) for s in shapes]


def _twice(program: Any, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[Any, ...]:
    return (*_made(program, first), _made(program, second)[1])


def _reshapers() -> Any:
    """Make a strategy of chains whose nodes change the shape."""
    from hypothesis import strategies as st

    calls = [
        ("call_method", "t", ()), ("call_method", "sum", (0, True)),
        ("call_method", "repeat", (2, 1)), ("call_function", torch.relu, ()),
        ("call_function", operator.getitem, (slice(0, 1),)),
        ("call_function", torch.flip, ((0,),)),
    ]  # fmt: skip

    def build(steps: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        def chain(graph: Graph) -> None:
            value = graph.placeholder("x")
            for op, target, rest in steps:
                value = graph.create_node(op, target, (value, *rest))
            graph.output(value)

        return built(chain), [torch.ones(2, 3)]

    return st.lists(st.sampled_from(calls), min_size=1, max_size=5).map(build)


def _cases() -> Iterator[Case | Property]:
    yield Case("result", "run returns the output", lambda: _made(_identity, (2,)), _judge_result)
    tensors, several, none, sizes, failing = (
        "tensors", "several tensors", "no tensor", "other sizes", "the failing node",
    )  # fmt: skip
    for behaviour, title, make, judge in (
        (tensors, "an input and an output", lambda: _made(_identity, (2,)), _judge_shapes),
        (tensors, "a node of every opcode", lambda: _made(Kinds(), (2, 4)), _judge_shapes),
        (several, "a tuple of two", lambda: _made(_halves, (2, 6)), _judge_shapes),
        (several, "a dict with a list in it", lambda: _made(_named, (2, 3)), _judge_shapes),
        (none, "a size is no tensor", lambda: _made(_sizes, (2, 3, 2)), _judge_shapes),
        (sizes, "a second run", lambda: _twice(Kinds(), (2, 4), (5, 4)), _judge_shapes),
        (failing, "a product", lambda: _made(_head, (2, 5), (7, 3)), _judge_error),
        (failing, "a sum", lambda: _made(_mismatch, (4, 5), (6, 5)), _judge_error),
    ):
        yield Case(behaviour, title, make, judge)
    yield Property(tensors, "any chain of calls", _reshapers, _judge_shapes, examples=20)


EXERCISE = Exercise(
    id="4.1",
    title="Shape propagation as an Interpreter",
    level=2,
    minutes=30,
    idea="Without control flow in the IR, one walk that runs each node and writes down what came "
    "out is a whole analysis (sections 6.3 and 5.5).",
    needs=("Interpreter", "shape propagation", "arguments"),
    teaches=("meta",),
    hints=(
        "Lectures 03, 'Running a graph', and 09, 'Shapes', have an Interpreter that sees every "
        "value. Which method sees the values of all six opcodes?",
        "Override run_node. Let super().run_node(n) compute the value, put its shape into n.meta, "
        "return the value. Then ask what the value can be besides one tensor: tensors in tuples, "
        "lists and dicts, or a number. Last, put a try around the computing: when it fails, the "
        "inputs' shapes stand in the meta of n.all_input_nodes.",
        "A function for each leaf of nested values, on another example: fxlab.map_aggregate("
        "(1, [2, {'a': 3}]), lambda leaf: leaf + 1) returns (2, [3, {'a': 4}]). And "
        "`raise RuntimeError('...') from error` keeps the first error visible.",
    ),
    asks=(
        "fxlab.passes.shape_prop",
        "fxlab.passes.shape_prop.ShapeProp",
        "torch.fx.passes.shape_prop.ShapeProp",
    ),
    parts=(
        Part(
            id="4.1",
            name="MyShapes",
            points={
                "result": 1,
                "tensors": 3,
                "several tensors": 2,
                "no tensor": 1,
                "other sizes": 1,
                "the failing node": 2,
            },
            entry=entry,
            cases=_cases,
            wrong={
                "result_lost": "run_node must return the value that it has seen",
                "functions_only": "has no meta['shape']",
                "first_of_several": "expected one shape for each",
                "every_value_a_tensor": "AttributeError",
                "written_once": "that was the run before",
                "bare_error": "the error does not say which node failed",
            },
            stub="class MyShapes(fxlab.Interpreter):\n"
            '    """Run a program; keep the shape of each node\'s value in ``n.meta["shape"]``.\n'
            "\n"
            "    A tensor gives a tuple of sizes; tensors in a tuple, list or dict give the same\n"
            "    form with shapes in it; what holds no tensor leaves no entry. A node that fails\n"
            "    raises a RuntimeError with the node's name and the shapes of what it reads.\n"
            '    """',
        ),
    ),
)
