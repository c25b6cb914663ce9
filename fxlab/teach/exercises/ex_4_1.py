"""4.1: does an Interpreter that writes shapes see every value, and say where a run fails?

Without control flow one forward walk is the whole analysis (paper, section 6.3). What the answer
writes on the nodes is compared, node by node, with what the kit's ``shape_prop`` finds on the same
inputs. A graded course draws which fact is written down: shape, bytes or rank.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.shape_prop import TensorMetadata, _extract_tensor_metadata, shape_prop
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError, users_line, users_trace
from fxlab.teach.programs import built, fill
from fxlab.teach.variants import Variant

NOTHING = "nothing"


@dataclass(frozen=True)
class Fact:
    """What is written down of each tensor.

    Attributes:
        key: Where: ``n.meta[key]``.
        answer: Name of the class that the student writes.
        of: Reads it off a tensor's metadata.
        said: How it is called in the plural.
        tensor: What a tensor gives, for the stub.
    """

    key: str
    answer: str
    of: Callable[[TensorMetadata], Any]
    said: str
    tensor: str


SHAPE = Fact("shape", "MyShapes", lambda t: list(t.shape), "shapes", "a tuple of sizes")
BYTES = Fact(
    "bytes", "MyBytes", lambda t: t.shape.numel() * t.dtype.itemsize, "numbers",
    "its number of bytes",
)  # fmt: skip
RANK = Fact("rank", "MyRanks", lambda t: len(t.shape), "ranks", "its number of dimensions")


FREED = (
    "An Interpreter's env keeps a value until its last reader has run, so after the run it is "
    "gone: write the fact down in run_node, which sees each value once"
)


def _interpreter(answer: Any, gm: GraphModule) -> Interpreter:
    made = answer(gm)
    if not isinstance(made, Interpreter):
        raise AnswerError("type", f"{kind_of(made)} is no Interpreter: subclass fxlab.Interpreter")
    return made


def entry(answer: Any, gm: GraphModule, key: str = "shape", *runs: list[Any]) -> dict[str, Any]:
    """Run the answer's interpreter once for each list of inputs.

    Returns:
        {"found": for each node what meta[key] holds, or "nothing", "result": of the last run,
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
        except KeyError as raised:
            if not (raised.args and isinstance(raised.args[0], Node)):
                raise
            sentence = f"KeyError: {raised.args[0].name}{users_line(raised)}. {FREED}"
            raise AnswerError("error", sentence, users_trace(raised)) from None
    return {
        "found": [_plain(node.meta.get(key, NOTHING)) for node in gm.graph.nodes],
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
    """Return what stands in a node's meta as lists of numbers, so that it crosses a pipe."""
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if isinstance(value, (int, str)) else repr(value)


def _wanted(fact: Fact, gm: GraphModule, inputs: list[Any]) -> list[Any]:
    """Return the facts that the kit's own pass finds, in the same form."""
    shape_prop(gm, *inputs)
    metas = [node.meta.get("tensor_meta", NOTHING) for node in gm.graph.nodes]
    return [_plain(_each(meta, fact.of)) for meta in metas]


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, TensorMetadata):
        return function(value)
    if isinstance(value, (tuple, list)):
        return [_each(part, function) for part in value]
    if isinstance(value, Mapping):
        return {name: _each(part, function) for name, part in value.items()}
    return value


def _judge_facts(fact: Fact, args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, key, *runs = args
    wanted = _wanted(fact, gm, runs[-1])
    before = _wanted(fact, gm, runs[0]) if len(runs) > 1 else [NOTHING] * len(wanted)
    where = f"meta[{key!r}]"
    rows = zip(gm.graph.nodes, wanted, before, value["found"], strict=True)
    for node, right, old, seen in rows:
        if right == seen:
            continue
        call = f"{node.name} ({node.op})"
        if right == NOTHING:
            sentence = f"{call} gives no tensor: leave {where} out"
        elif seen == NOTHING:
            sentence = f"{call} has no {where}: its value has {_said(right)}"
        elif isinstance(node.meta.get("tensor_meta"), TensorMetadata):
            again = ": that was the run before, on other inputs" if seen == old else ""
            sentence = f"{call}: {where} is {_said(seen)}, expected {_said(right)}{again}"
        else:
            sentence = (
                f"{call} gives several tensors: {where} holds {_said(seen)}, expected one entry "
                f"for each, in the same form, {_said(right)}"
            )
        return Finding(sentence, node=node.name)
    return None


def _said(fact: Any) -> str:
    if isinstance(fact, list):
        inner = ", ".join(map(_said, fact))
        return f"({inner},)" if len(fact) == 1 else f"({inner})"
    if isinstance(fact, dict):
        return "{" + ", ".join(f"{name}: {_said(part)}" for name, part in fact.items()) + "}"
    return str(fact)


def _judge_result(args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, _, inputs = args
    if value["result"] is None:
        return Finding(
            "run returned None and the program returns a tensor: run_node must return the value "
            "that it has seen, for the nodes that read it"
        )
    text = unequal(gm(*inputs), value["result"], name="what run returns")
    return Finding(text) if text else None


def _judge_error(fact: Fact, args: tuple[Any, ...], value: Any) -> Finding | None:
    gm, _, inputs = args
    said = value["error"]
    if said is None:
        return Finding("this program can't run on these inputs, and the run raised no RuntimeError")
    node, facts = _failing(fact, gm, inputs)
    others = [n.name for n in gm.graph.nodes if re.search(rf"\b{re.escape(n.name)}\b", said)]
    if others and node not in others:
        return Finding(
            f"the error names {others[0]}, and in this program {node} is the node that fails. "
            "Does run_node return the value that it has seen, for the nodes that read it?",
            node=node,
        )
    if node not in others:
        return Finding(
            f"the error does not say which node failed: {said.splitlines()[0][:120]!r}. Catch what "
            "super().run_node(n) raises and raise a RuntimeError with n.name in its text",
            node=node,
        )
    for given in facts:
        numbers = given if isinstance(given, list) else [given]
        if not re.search(r"\D+".join(rf"\b{number}\b" for number in numbers), said):
            return Finding(
                f"the error names {node}, and not what it was given, {_said(given)}: the "
                f"{fact.said} of n.all_input_nodes are in their meta already",
                node=node,
            )
    return None


def _failing(fact: Fact, gm: GraphModule, inputs: list[Any]) -> tuple[str, list[Any]]:
    """Return the node that fails on these inputs, and the facts of what it reads."""
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
    read = (_extract_tensor_metadata(seen[n.name]) for n in failed[0].all_input_nodes)
    return failed[0].name, [fact.of(meta) for meta in read]


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


def _growing(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.unsqueeze(0) + 1)


def _halves(x: torch.Tensor) -> tuple:
    a, b = x.chunk(2, dim=-1)
    return a.sum(-1), torch.cat([b, b])


def _named(x: torch.Tensor) -> dict:
    return {"all": x.t(), "parts": [x[0], x.mean()]}


def _sizes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.size(0), -1) * 2


def _head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.flatten(1)) @ w


def _mismatch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + 1) + y.t()


def _made(fact: Fact, program: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    program = fill(program) if isinstance(program, nn.Module) else program
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(s, generator=generator) for s in shapes]
    return symbolic_trace(program), fact.key, inputs


def _twice(
    fact: Fact, program: Any, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[Any, ...]:
    return (*_made(fact, program, first), _made(fact, program, second)[2])


def _reshapers(fact: Fact) -> Any:
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

        return built(chain), fact.key, [torch.ones(2, 3)]

    return st.lists(st.sampled_from(calls), min_size=1, max_size=5).map(build)


def _cases(fact: Fact) -> Iterator[Case | Property]:
    made, facts, error = (
        partial(_made, fact),
        partial(_judge_facts, fact),
        partial(_judge_error, fact),
    )
    yield Case("result", "run returns the output", partial(made, _identity, (2,)), _judge_result)
    tensors, several, none, sizes, failing = (
        "tensors", "several tensors", "no tensor", "other sizes", "the failing node",
    )  # fmt: skip
    for behaviour, title, make_args, judge in (
        (tensors, "an input and an output", partial(made, _identity, (2,)), facts),
        (tensors, "a node of every opcode", partial(made, Kinds(), (2, 4)), facts),
        (several, "a tuple of two", partial(made, _halves, (2, 6)), facts),
        (several, "a dict with a list in it", partial(made, _named, (2, 3)), facts),
        (none, "a size is no tensor", partial(made, _sizes, (2, 3, 2)), facts),
        (sizes, "a second run", partial(_twice, fact, _growing, (2,), (5, 2)), facts),
        (failing, "a product", partial(made, _head, (2, 5), (7, 3)), error),
        (failing, "a sum", partial(made, _mismatch, (4, 5), (6, 5)), error),
    ):
        yield Case(behaviour, title, make_args, judge)
    reshapers = partial(_reshapers, fact)
    yield Property(tensors, "any chain of calls", reshapers, facts, examples=20)


def make(fact: Fact) -> Exercise:
    """Return the exercise about this fact."""
    key = fact.key
    return Exercise(
        id="4.1",
        title="Shape propagation as an Interpreter",
        level=2,
        minutes=30,
        idea="Without control flow in the IR, one walk that runs each node and writes down what "
        "came out is a whole analysis (sections 6.3 and 5.5).",
        needs=("Interpreter", "shape propagation", "arguments"),
        teaches=("meta",),
        hints=(
            "Lectures 03, 'Running a graph', and 09, 'Shapes', have an Interpreter that sees "
            "every value. Which method sees the values of all six opcodes?",
            "Override run_node. Let super().run_node(n) compute the value, put the fact about it "
            "into n.meta, return the value. Then ask what the value can be besides one tensor: "
            "tensors in tuples, lists and dicts, or a number. Last, put a try around the "
            "computing: when it fails, the facts about its inputs stand in the meta of "
            "n.all_input_nodes.",
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
                name=fact.answer,
                points={
                    "result": 1,
                    "tensors": 3,
                    "several tensors": 2,
                    "no tensor": 1,
                    "other sizes": 1,
                    "the failing node": 2,
                },
                entry=entry,
                cases=partial(_cases, fact),
                wrong={
                    "result_lost": "run_node must return the value that it has seen",
                    "functions_only": f"has no meta[{fact.key!r}]",
                    "first_of_several": "expected one entry for each",
                    "every_value_a_tensor": "AttributeError",
                    "written_once": "that was the run before",
                    "after_the_run": "write the fact down in run_node",
                    "named_without_values": "Does run_node return the value",
                    "bare_error": "the error does not say which node failed",
                },
                stub=f"class {fact.answer}(fxlab.Interpreter):\n"
                f'    """Run a program; keep the {key} of each value in ``n.meta["{key}"]``.\n'
                "\n"
                f"    A tensor gives {fact.tensor}; tensors in a tuple, list or dict\n"
                f"    give the same form with {fact.said} in it (numbers stay); what holds\n"
                "    no tensor leaves no entry. A node that fails raises a RuntimeError with its\n"
                f"    name and the {fact.said} of what it reads.\n"
                '    """',
            ),
        ),
    )


def _words(fact: Fact, tensor: str) -> tuple[tuple[str, str], ...]:
    """Return what turns the master's cells, about shapes, into those of another fact."""
    return (
        ("MyShapes", fact.answer),
        ('meta["shape"]', f'meta["{fact.key}"]'),
        ("keep the shape of", f"keep the {fact.key} of"),
        ("keeps the shape of", f"keeps the {fact.key} of"),
        ("a tuple of sizes", fact.tensor),
        ("a tuple of numbers, such as `(2, 3)`", tensor),
        ("shapes", fact.said),
    )


EXERCISE = make(SHAPE)
VARIANTS = {
    "shape": Variant(partial(make, SHAPE)),
    "bytes": Variant(partial(make, BYTES), _words(BYTES, "its number of bytes, such as `24`")),
    "rank": Variant(partial(make, RANK), _words(RANK, "its number of dimensions, such as `2`")),
}
