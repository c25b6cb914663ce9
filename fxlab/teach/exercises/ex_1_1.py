"""1.1: does somebody who reads a model know which nodes the tracer records?

The graph that was built by hand is compared, node by node and by meaning, with the one that
`symbolic_trace` makes of the same module (paper, section 4.2 and Appendix A). Names and the order
of nodes that don't depend on each other are the student's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.errors import FxlabError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, map_aggregate, target_text
from fxlab.core.tracer import symbolic_trace
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.judge import kind_of, same_program, whole
from fxlab.teach.limits import AnswerError
from fxlab.teach.programs import fill


class Score(nn.Module):
    """The module whose graph is to be written down; it has all six opcodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Return the scores of each row of ``x``, f32[n, 4], and what they were made from."""
        h = torch.sub(self.linear(x), self.bias, alpha=2)
        top = h.relu().sum(dim=-1)
        return {"score": top + 1, "parts": [h, top]}


def make_score() -> nn.Module:
    """Return the same Score each time."""
    return fill(Score())


def entry(answer: Callable[[], Any]) -> GraphModule:
    """Return the program of the graph that ``answer()`` builds, with Score's state.

    Raises:
        AnswerError: It built no graph, or one that is not well formed.
    """
    graph = answer()
    if isinstance(graph, GraphModule):
        graph = graph.graph
    if not isinstance(graph, Graph):
        raise AnswerError("type", f"it returned {kind_of(graph)}: return the graph")
    if not graph.find_nodes(op="output"):
        raise AnswerError("lint", "the graph has no output: end it with graph.output(...)")
    try:
        gm = GraphModule(make_score(), graph)
    except (FxlabError, AttributeError) as error:
        text = error.message if isinstance(error, FxlabError) else str(error)
        raise AnswerError("lint", f"Score has not what this graph reads: {text}") from None
    return whole(gm)


def _what(node: Node) -> tuple[str, str]:
    return node.op, target_text(node.target)


_SENTENCES = {
    ("call_method", "relu"): "h.relu() calls a method, which h looks up for itself: the tracer "
    "records call_method with the target 'relu'",
    ("call_method", "sum"): "....sum(dim=-1) calls a method: the tracer records call_method with "
    "the target 'sum'",
    ("call_function", "torch.sub"): "torch.sub is a function, found before the call: the tracer "
    "records call_function with the target torch.sub",
    ("call_function", "operator.add"): "top + 1 asks the operator: the tracer records "
    "call_function with the target operator.add",
    ("call_module", "linear"): "self.linear is a leaf module: the tracer records call_module with "
    "the target 'linear'",
    ("get_attr", "bias"): "self.bias is read from the module: the tracer records get_attr with the "
    "target 'bias'",
    ("placeholder", "x"): "forward has one parameter, x: one placeholder",
}


def _judge_opcodes(args: tuple[Any, ...], value: Any) -> Finding | None:
    recorded = Counter(map(_what, symbolic_trace(make_score()).graph.nodes))
    written = Counter(map(_what, value.graph.nodes))
    for what, sentence in _SENTENCES.items():
        if written[what] < recorded[what]:
            return Finding(sentence, actual=value)
    for node in value.graph.nodes:
        if node.op == "placeholder" and node.target != "x":
            return Finding(
                f"forward has no parameter {node.target}: what belongs to the module is no "
                "placeholder",
                node=node.name,
                actual=value,
            )
        if node.op == "call_function" and node.target in (dict, list):
            return Finding(
                f"only calls are nodes: the {target_text(node.target)} that forward returns stands "
                "in the arguments of output, with nodes inside it",
                node=node.name,
                actual=value,
            )
        if written[_what(node)] > recorded[_what(node)]:
            return Finding(
                f"{node.name} is one node too many: the tracer records each operation once, and "
                "a value that is read twice is made once",
                node=node.name,
                actual=value,
            )
    return None


def _judge_arguments(args: tuple[Any, ...], value: Any) -> Finding | None:
    if (found := _judge_opcodes(args, value)) is not None:
        return found
    # Each (opcode, target) stands once in Score, so it says which node is meant.
    wanted = {_what(n): n for n in symbolic_trace(make_score()).graph.nodes}
    for node in value.graph.nodes:
        right = wanted[_what(node)]
        if _plain(node.kwargs) != _plain(right.kwargs):
            return Finding(_kwargs_sentence(node, right), node=node.name, actual=value)
        if _plain(node.args) != _plain(right.args):
            return Finding(_args_sentence(node), node=node.name, actual=value)
    return None


def _kwargs_sentence(node: Node, right: Node) -> str:
    call = node.name if node.op == "output" else target_text(node.target)
    if right.kwargs:
        text = ", ".join(f"{name}={value!r}" for name, value in right.kwargs.items())
        return (
            f"{call} is called with {text} in the program: arguments are stored as the author "
            f"wrote them, so its kwargs are {dict(right.kwargs)}"
        )
    return f"{call} has no keyword argument in the program: give it args only"


def _args_sentence(node: Node) -> str:
    if node.op == "call_module":
        return "call_module has no self in its arguments: args holds what the module is called with"
    if node.op == "output":
        return (
            "the output is not what forward returns: a dict with 'score' and 'parts', in which "
            "nodes stand where forward has values"
        )
    call = target_text(node.target)
    return f"the arguments of {call} are not those of the program: read its line again"


def _plain(value: Any) -> Any:
    """Return arguments with each node replaced by what it calls, lists and dicts as plain ones."""

    def leaf(part: Any) -> Any:
        return ("node", *_what(part)) if isinstance(part, Node) else (type(part).__name__, part)

    def unfrozen(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: unfrozen(inner) for name, inner in part.items()}
        return ["list", *map(unfrozen, part)] if isinstance(part, list) else part

    return unfrozen(map_aggregate(value, leaf))


def _judge_result(args: tuple[Any, ...], value: Any) -> Finding | None:
    if len(value.graph.find_nodes(op="placeholder")) != 1:
        return Finding(_SENTENCES["placeholder", "x"], actual=value)
    text = same_program(make_score(), value, [torch.randn(5, 4)])
    return Finding(f"run as a program, {text}", actual=value) if text else None


def _cases() -> Iterator[Case]:
    yield Case("opcodes", "each operation under its opcode and target", tuple, _judge_opcodes)
    yield Case(
        "arguments", "args and kwargs as the author wrote them", tuple, _judge_arguments, "opcodes"
    )
    yield Case("runs", "the graph computes what Score computes", tuple, _judge_result)


EXERCISE = Exercise(
    id="1.1",
    title="Read the IR: build by hand what the tracer would record",
    level=1,
    minutes=15,
    idea="Six opcodes are enough for a model: who knows them can write down the graph of any "
    "forward without running it (section 4.2, Appendix A).",
    needs=(
        "graph",
        "node",
        "opcode",
        "target",
        "arguments",
        "placeholder",
        "get_attr",
        "call_function",
        "call_method",
        "call_module",
        "output",
        "leaf module",
    ),
    teaches=("graph by hand",),
    hints=(
        "Lecture 01, 'The six opcodes', shows a module with all six and the list of its nodes. Ask "
        "of each operation in forward: is it a function, a method of a value, or a module?",
        "Write one line for each operation, in the order in which Python runs them: the parameter, "
        "the inner call of torch.sub, what else torch.sub reads, torch.sub, and so on. Keep what "
        "each call returns in a variable; it is the node that later calls read. End with "
        "graph.output.",
        "A call with keyword arguments, on another example: for torch.add(a, b, alpha=3) write "
        "graph.call_function(torch.add, (a, b), {'alpha': 3}); for a.mean(dim=0) write "
        "graph.call_method('mean', (a,), {'dim': 0}).",
    ),
    asks=(
        "fxlab.core.tracer.symbolic_trace",
        "fxlab.core.tracer.Tracer.trace",
        "fxlab.core.tracer.TracerBase.create_proxy",
        "torch.fx.symbolic_trace",
    ),
    parts=(
        Part(
            id="1.1",
            name="score_graph",
            points={"opcodes": 4, "arguments": 3, "runs": 1},
            entry=entry,
            cases=_cases,
            wrong={
                "method_as_function": "h.relu() calls a method",
                "positional_dim": "sum is called with dim=-1 in the program",
                "lost_alpha": "torch.sub is called with alpha=2",
                "dict_as_node": "only calls are nodes",
                "bias_as_input": "self.bias is read from the module",
                "counted_twice": "one node too many",
                "plus_on_a_node": "A Node is no Proxy, it computes nothing",
                "text_as_function": "RewriteError: the target of a call_function node",
                "module_itself": "call_method and call_module its name",
            },
            stub='def score_graph():\n    """Return the Graph that the tracer would record for '
            'Score, built by hand."""',
        ),
    ),
)
