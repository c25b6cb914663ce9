"""2.4: constant folding: what depends on no input is computed once, and becomes state.

The judge runs the program that came back beside the original, twice in a row, since a constant that
is written into differs only in the second call. Where nothing is written, the kit's own pass tells
how many calls are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.cleanup import const_fold
from fxlab.teach import judge
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import built, copy_of, fill, fresh_inputs, programs

STUB = '''def my_const_fold(gm):
    """Edit `gm` in place: compute what depends on no input once, now; return `gm`.

    Each result that other nodes read becomes a buffer of `gm`, read by a get_attr node. `gm` is in
    eval mode. A program that writes anywhere may be left as it is.
    """
'''


def entry(answer: Callable[[GraphModule], Any], gm: GraphModule) -> GraphModule:
    """Call the pass; it edits in place. Only here can be seen how a folded tensor is kept.

    Raises:
        AnswerError: It is no buffer, or has a history.
    """
    before = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    judge.edited(answer, gm)
    buffers = dict(gm.named_buffers(remove_duplicate=False))
    for node in gm.graph.find_nodes(op="get_attr"):
        if node.target in before:
            continue
        if node.target not in buffers:
            raise AnswerError(
                "type", f"gm.{node.target} is not a buffer: state_dict() and to(device) pass it "
                "by; use gm.register_buffer",
            )  # fmt: skip
        if buffers[node.target].requires_grad:
            raise AnswerError(
                "type", f"gm.{node.target} still remembers how it was computed: compute inside "
                "torch.no_grad(), and keep value.detach()",
            )  # fmt: skip
    return gm


def judge_fold(args: tuple[Any, ...], value: Any) -> Finding | None:
    """Hold the result to the program before it and to the kit's own pass."""
    (gm,) = args
    inputs = fresh_inputs(gm)
    writes = any(effect(node, gm) for node in _calls(gm))

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node, const_fold(copy_of(gm)), value, gm)

    text = judge.same_program(gm, value, inputs)
    if text:
        return wrong(f"{_folded_too_much(gm, value)} ({text})")
    text = judge.unequal(_second(gm, inputs), _second(value, inputs)) if writes else ""
    if text:
        return wrong(
            "the first call is right and the second is not: a constant is written into, so it must "
            f"be made anew in each call ({text})"
        )
    if writes:
        return None
    node = _constant_call(value)
    if node is not None and len(_calls(value)) > len(_calls(const_fold(copy_of(gm)))):
        return wrong(_left(gm, node), node.name)
    left = judge.dead(value)
    if left is not None and judge.was_read(gm, left.name):
        return wrong(f"{left.name} is still there and nobody reads it: erase what was folded")
    return None


def _calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op.startswith("call_")]


def _folded_too_much(gm: GraphModule, value: GraphModule) -> str:
    names = {node.name for node in value.graph.nodes}
    for node in _calls(gm):
        reason = effect(node, gm)
        if reason and node.name not in names:
            return f"{node.name} was folded, but {reason}: it must run in each call"
    reads = [node.target for node in value.graph.find_nodes(op="get_attr")]
    if len(reads) > len(set(reads)):
        name = max(reads, key=reads.count)
        return f"two values are kept under one name, {name}: the second takes the first's place"
    return "the program does something else than before"


def _second(gm: GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Return what the second of two calls returns."""
    program = copy_of(gm)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        program(*(x.clone() for x in inputs))
        return judge.detached(program(*(x.clone() for x in inputs)))


def _constant_call(gm: GraphModule) -> Node | None:
    """Return the first call that depends on no input and is not merely returned, or None."""
    constant: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
        elif node.op.startswith("call_") and constant.issuperset(node.all_input_nodes):
            constant.add(node)
            if any(user.op != "output" for user in node.users):
                return node
    return None


def _left(gm: GraphModule, node: Node) -> str:
    still = f"{node.name} is still computed in each call"
    before = {one.target for one in gm.graph.find_nodes(op="get_attr")}
    if any(source.target not in before for source in node.all_input_nodes):
        return f"{still}: what reads only constants is a constant too"
    read = ", ".join(str(source.target) for source in node.all_input_nodes)
    return f"{still}, and it reads {f'only {read}' if read else 'nothing'}"


class _Weights(nn.Module):
    """The state of the cases."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.scale = nn.Parameter(torch.empty(4))
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()


class _Transposed(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class _Chain(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.scale * 2).tanh()


class _TwoReaders(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.scale.exp()
        return x * wide + torch.relu(x - wide)


class _TwoConstants(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp() + self.scale.neg()


class _Nested(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight.t()


class _ThroughModule(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.scale)


class _Written(_Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.scale * 2
        state.add_(1)
        return x + state


def case(behaviour: str, title: str, program: Any) -> Case:
    """A fixed case: a function or module, traced in eval mode."""
    if isinstance(program, nn.Module):
        program = fill(program)
    return Case(behaviour, title, lambda: (symbolic_trace(program).eval(),), judge_fold)


def _no_state(graph: Graph) -> None:
    """A tracer computes a factory without Proxies at once; a graph by hand may hold its call."""
    x = graph.placeholder("x")
    full = graph.call_function(torch.full, ((4,), 2.0))
    graph.output(graph.call_function(torch.mul, (x, full)))


def _cases() -> Iterator[Case | Property]:
    yield case("constants are folded", "x @ self.weight.t()", _Transposed())
    yield Case("constants are folded", "torch.full((4,), 2.0), without any state",
               lambda: (built(_no_state),), judge_fold)  # fmt: skip
    yield case("constants are folded", "a chain", _Chain())
    yield case("constants are folded", "two readers", _TwoReaders())
    yield case("constants are folded", "two constants", _TwoConstants())
    yield case("state is found", "self.linear.weight.t()", _Nested())
    yield case("state is found", "a module applied to a constant", _ThroughModule())
    yield case("inputs and effects stay", "nothing is constant", lambda x: torch.relu(x) * 2)
    yield case("inputs and effects stay", "a random number",
               lambda x: x + torch.rand(4))  # fmt: skip
    yield case("inputs and effects stay", "a constant that is written into", _Written())
    yield Property(
        "constants are folded",
        "generated programs that write nothing",
        lambda: judge.tuples(programs(state=True, outputs=2)),
        judge_fold,
        examples=15,
    )
    yield Property(
        "inputs and effects stay",
        "generated programs that write",
        lambda: judge.tuples(programs(state=True, effects=True, outputs=2)),
        judge_fold,
        examples=15,
    )


EXERCISE = Exercise(
    id="2.4",
    title="Constant folding",
    level=3,
    minutes=45,
    idea="A value that depends on no input can be computed once and kept as state: the graph is "
    "functional, its module is not (section 5.6).",
    needs=("get_attr", "constant", "effect", "pure", "reroute", "erase"),
    teaches=("buffer",),
    hints=(
        "Lecture 12, 'Constants', steps through the kit's pass and says what must not be folded. "
        "Lecture 03 runs a graph node by node.",
        "One walk: a get_attr of a tensor is constant, and so is a pure call that reads constants "
        "only. Keep the value of each in a dictionary from node to value. For each constant that "
        "somebody else reads: register a buffer under a new name, insert a get_attr before it, "
        "turn its readers. At the end erase from the back what nobody reads.",
        "Calls that beginners miss, on other examples: fxlab.map_arg((a, 1), values.__getitem__) "
        "replaces the node a by its value at any depth; gm.get_parameter('block.linear.bias') "
        "follows the dots and getattr(gm, 'block.linear.bias') does not; with torch.no_grad(): "
        "and tensor.detach() keep a result free of its history.",
    ),
    asks=("fxlab.passes.cleanup.const_fold",
          "torch.fx.experimental.const_fold.split_const_subgraphs"),
    parts=(
        Part(
            id="2.4",
            name="my_const_fold",
            points={"constants are folded": 4, "state is found": 2, "inputs and effects stay": 3},
            entry=entry,
            cases=_cases,
            wrong={
                "folds_random": "rand was folded, but torch.rand draws random numbers",
                "plain_attribute": "is not a buffer: state_dict() and to(device) pass it by",
                "no_dots": "has no attribute",
                "one_level": "what reads only constants is a constant too",
                "leaves_dead": "is still there and nobody reads it: erase what was folded",
                "folds_written": "the first call is right and the second is not",
                "with_history": "still remembers how it was computed",
                "one_name": "two values are kept under one name",
            },
            stub=STUB,
        ),
    ),
)  # fmt: skip


def _long(count: int) -> tuple[GraphModule]:
    """About ``count`` nodes: constants that are added to what depends on the input."""

    def make(graph: Graph) -> None:
        node = graph.placeholder("x")
        for _ in range(count // 4):
            read = graph.get_attr("scale")
            made = graph.call_method("tanh", (graph.call_method("neg", (read,)),))
            node = graph.call_function(torch.add, (node, made))
        graph.output(node)

    return (built(make, fill(_Weights())),)


COMPARE = {
    "2.4": Reference(
        kit=const_fold, small=lambda: (symbolic_trace(fill(_Chain())).eval(),), large=_long
    )
}
