"""1.4: what must an object do so that a program that is run with it writes itself down?

Three pieces of a Proxy, each over `fxlab.Graph`: operators and methods, torch's functions by
`__torch_function__`, and arguments in which Proxies are nested. The program that came out is run
beside the original and compared with what the kit's own tracer records (paper, sections 4.1, 5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, target_text
from fxlab.core.proxy import Proxy
from fxlab.core.tracer import symbolic_trace
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.judge import kind_of, same_program, whole
from fxlab.teach.limits import AnswerError

Program = Callable[..., Any]

OPERATORS: dict[str, Program] = {
    "x + y": lambda x, y: x + y,
    "x * 2": lambda x, y: x * 2,
    "-x": lambda x, y: -x,
    "x @ y": lambda x, y: x @ y,
    "x[0]": lambda x, y: x[0],
    "x > y": lambda x, y: x > y,
    "2 * x": lambda x, y: 2 * x,
    "1 - x": lambda x, y: 1 - x,
    "2 / x": lambda x, y: 2 / x,
    "(x - 1) * -y": lambda x, y: (x - 1) * -y,
    "x.relu()": lambda x, y: x.relu(),
    "x.sum(dim=0)": lambda x, y: x.sum(dim=0),
    "x.clamp(-1, max=1)": lambda x, y: x.clamp(-1, max=1),
    "x.maximum(y)": lambda x, y: x.maximum(y),
    "(x * y).tanh() + 1": lambda x, y: (x * y).tanh() + 1,
}
FUNCTIONS: dict[str, Program] = {
    "torch.relu(x)": lambda x, y: torch.relu(x),
    "torch.maximum(x, y)": lambda x, y: torch.maximum(x, y),
    "F.gelu(x)": lambda x, y: F.gelu(x),
    "torch.sum(x, dim=0, keepdim=True)": lambda x, y: torch.sum(x, dim=0, keepdim=True),
    "F.leaky_relu(x, negative_slope=2.0)": lambda x, y: F.leaky_relu(x, negative_slope=2.0),
    "F.linear(input=x, weight=y)": lambda x, y: F.linear(input=x, weight=y),
    "torch.sub(x, y, alpha=torch.pi)": lambda x, y: torch.sub(x, y, alpha=torch.pi),
    "torch.relu(torch.tanh(x))": lambda x, y: torch.relu(torch.tanh(x)),
}
NESTED: dict[str, Callable[..., Any]] = {
    "x": lambda x, y: x,
    "3.5": lambda x, y: 3.5,
    "(x, 1)": lambda x, y: (x, 1),
    "[x, y]": lambda x, y: [x, y],
    "{'a': x, 'b': 2}": lambda x, y: {"a": x, "b": 2},
    "slice(x, None)": lambda x, y: slice(x, None),
    "(slice(None), x)": lambda x, y: (slice(None), x),
    "slice(0, y, x)": lambda x, y: slice(0, y, x),
    "[[x], (y, [x])]": lambda x, y: [[x], (y, [x])],
    "{'a': [x, {'b': (y,)}]}": lambda x, y: {"a": [x, {"b": (y,)}]},
    "(torch.float32, 'text', None)": lambda x, y: (torch.float32, "text", None),
}
# The same behaviours on other programs: the second set of cases.
OTHER_OPERATORS: dict[str, Program] = {
    "y - x": lambda x, y: y - x,
    "x[1]": lambda x, y: x[1],
    "-(x - 2)": lambda x, y: -(x - 2),
    "5 - y": lambda x, y: 5 - y,
    "0.5 / x": lambda x, y: 0.5 / x,
    "x.tanh()": lambda x, y: x.tanh(),
    "y.mean(dim=1)": lambda x, y: y.mean(dim=1),
    "x.mul(y).neg()": lambda x, y: x.mul(y).neg(),
}
OTHER_FUNCTIONS: dict[str, Program] = {
    "torch.tanh(y)": lambda x, y: torch.tanh(y),
    "torch.minimum(y, x)": lambda x, y: torch.minimum(y, x),
    "F.silu(torch.neg(x))": lambda x, y: F.silu(torch.neg(x)),
    "torch.mean(x, dim=1)": lambda x, y: torch.mean(x, dim=1),
    "torch.add(input=x, other=y, alpha=3)": lambda x, y: torch.add(input=x, other=y, alpha=3),
}
OTHER_NESTED: dict[str, Callable[..., Any]] = {
    "(y, x, 'text')": lambda x, y: (y, x, "text"),
    "[[], x]": lambda x, y: [[], x],
    "[slice(x, y), 1]": lambda x, y: [slice(x, y), 1],
    "{'k': ([x], {'a': y})}": lambda x, y: {"k": ([x], {"a": y})},
}


def _record(answer: Callable[[Node], Any], text: str, program: Program) -> GraphModule:
    """Run a program on two of the student's Proxies; return what they wrote down."""
    graph = Graph()
    stand_ins = [answer(graph.placeholder(name)) for name in "xy"]
    result = program(*stand_ins)
    if not isinstance(getattr(result, "node", None), Node):
        raise AnswerError(
            "type", f"{text} returned {kind_of(result)}: an operation returns the Proxy of the "
            "node that it made, so that the program can go on with it",
        )  # fmt: skip
    graph.output(result.node)
    return whole(GraphModule(nn.Module(), graph))


def entry_a(answer: Callable[[Node], Any], text: str) -> GraphModule:
    """Record the program of part (a) that ``text`` names."""
    return _record(answer, text, {**OPERATORS, **OTHER_OPERATORS}[text])


def entry_b(answer: Callable[[Node], Any], text: str) -> GraphModule:
    """Record the program of part (b) that ``text`` names."""
    return _record(answer, text, {**FUNCTIONS, **OTHER_FUNCTIONS}[text])


def entry_c(answer: Callable[[Any], Any], text: str) -> Any:
    """Turn the value that ``text`` names into arguments; nodes come back as {"node": name}."""
    return _plain(answer(_nested(text)), Node)


def _nested(text: str) -> Any:
    graph = Graph()
    made = {**NESTED, **OTHER_NESTED}[text]
    return made(*(Proxy(graph.placeholder(name)) for name in "xy"))


def _plain(value: Any, kind: type) -> Any:
    """Return nested arguments as plain data, nodes (or Proxies) by name."""
    if type(value) is Proxy or isinstance(value, Node):
        node = value.node if type(value) is Proxy else value
        return {"node" if isinstance(value, kind) or type(value) is kind else "proxy": node.name}
    if isinstance(value, slice):
        return {"slice": [_plain(one, kind) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple | list):
        name = "tuple" if isinstance(value, tuple) else "list"
        return {name: [_plain(one, kind) for one in value]}
    if isinstance(value, dict):
        return {"dict": {name: _plain(one, kind) for name, one in value.items()}}
    return repr(value)


def _judge_program(table: dict[str, Program]) -> Callable[[tuple[Any, ...], Any], Finding | None]:
    def judge(args: tuple[Any, ...], value: Any) -> Finding | None:
        (text,) = args
        reference = symbolic_trace(table[text])
        inputs = [torch.randn(3, 3) + 0.1, torch.randn(3, 3)]
        wanted, got = (Counter(map(_what, one.graph.nodes)) for one in (reference, value))
        differs = same_program(reference, value, inputs)
        if not differs and wanted == got:
            return None
        return Finding(
            _why(text, reference, value, differs), expected=reference, actual=value, graph=reference
        )

    return judge


def _what(node: Node) -> tuple[str, str]:
    return node.op, target_text(node.target)


def _why(text: str, reference: GraphModule, value: GraphModule, differs: str) -> str:
    made = [n for n in value.graph.nodes if n.op.startswith("call_")]
    right = [n for n in reference.graph.nodes if n.op.startswith("call_")]
    if len(made) != len(right):
        return f"{text} is {len(right)} operations, and {len(made)} nodes were made"
    for mine, theirs in zip(made, right, strict=True):
        if dict(mine.kwargs) != dict(theirs.kwargs) and theirs.kwargs and not mine.kwargs:
            return f"{text}: the keyword arguments {dict(theirs.kwargs)} are lost"
        if _what(mine) != _what(theirs):
            return (
                f"{text} is recorded as {mine.op} of {target_text(mine.target)}: it is a "
                f"{theirs.op} of {target_text(theirs.target)}"
            )
        if (
            [str(a) for a in mine.args]
            == [str(a) for a in theirs.args][::-1]
            != [str(a) for a in theirs.args]
        ):
            return f"{text} is recorded with its operands turned round: x is the second of the two"
    return f"{text}, run from the graph: {differs}" if differs else f"{text} is other nodes"


def _judge_nested(args: tuple[Any, ...], value: Any) -> Finding | None:
    (text,) = args
    right = _plain(_nested(text), Proxy)
    if right == value:
        return None
    if "'proxy'" in repr(value):
        sentence = f"in {text} a Proxy is left where its node belongs: look inside every container"
    elif text == "x":
        sentence = f"x comes back as {_shown(value)}: a Proxy becomes its node"
    elif _kinds(right) != _kinds(value):
        sentence = f"{text} comes back as {_shown(value)}: each container keeps its own type"
    else:
        sentence = f"{text} comes back as {_shown(value)}"
    return Finding(sentence, expected=_shown(right), actual=_shown(value))


def _kinds(value: Any) -> list[str]:
    """Return the containers of plain data, outermost first."""
    if not isinstance(value, dict):
        return []
    ((kind, inside),) = value.items()
    parts = inside.values() if kind == "dict" else inside if isinstance(inside, list) else ()
    return [kind, *(name for part in parts for name in _kinds(part))]


def _shown(value: Any) -> str:
    """Write plain data as Python would."""
    if not isinstance(value, dict):
        return str(value)
    ((kind, inside),) = value.items()
    if kind in ("node", "proxy"):
        return str(inside) if kind == "node" else f"Proxy({inside})"
    if kind == "dict":
        return "{" + ", ".join(f"{name!r}: {_shown(one)}" for name, one in inside.items()) + "}"
    texts = [_shown(one) for one in inside]
    if kind == "slice":
        return f"slice({', '.join(texts)})"
    if kind == "list":
        return f"[{', '.join(texts)}]"
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _cases_a(table: dict[str, Program]) -> Iterator[Case]:
    judge = _judge_program(table)
    for text in table:
        turned = text[0].isdigit()
        behaviour = "methods" if "." in text else "turned operators" if turned else "operators"
        yield Case(behaviour, text, lambda text=text: (text,), judge)


def _cases_b(table: dict[str, Program]) -> Iterator[Case]:
    judge = _judge_program(table)
    for text in table:
        behaviour = "keyword arguments" if "=" in text else "functions"
        yield Case(behaviour, text, lambda text=text: (text,), judge)


def _cases_c(table: dict[str, Callable[..., Any]]) -> Iterator[Case]:
    for text in table:
        deep = sum(text.count(one) for one in "([{") > 1
        behaviour = "slices" if "slice" in text else "deeper" if deep else "containers"
        yield Case(behaviour, text, lambda text=text: (text,), _judge_nested)


EXERCISE = Exercise(
    id="1.4",
    title="A Proxy in sixty lines",
    level=3,
    minutes=60,
    idea="Capture needs no parser: an object that writes down what is done to it is enough, since "
    "Python and torch both ask objects before they act (sections 4.1 and 5.1).",
    needs=("proxy", "node", "graph", "call_function", "call_method", "arguments", "placeholder"),
    teaches=("__torch_function__",),
    hints=(
        "Lecture 01, 'How it was captured', has a Proxy at work: each operation makes a node and "
        "returns that node's Proxy. Yours does the same with three ways in: Python's operators, "
        "attributes that are called, and torch's functions.",
        "Begin with make: turn each Proxy among the arguments into its node, make the node in the "
        "graph of self.node, return a new Proxy of it. Everything else calls make. In (b) there is "
        "no self: the graph is that of any Proxy among the arguments. (c) asks of a value what it "
        "is, and calls itself for each part.",
        "3 ** p asks p.__rpow__(3), so the operands must be put back in order: operator.pow of "
        "(3, p). torch looks for __torch_function__ on the class, so it is a classmethod, and it "
        "may leave kwargs out. On another example: `lambda *args, **kwargs: print(args, kwargs)` "
        "is something that can be called with any arguments.",
    ),
    asks=("fxlab.Proxy",),
    parts=(
        Part(
            id="1.4a",
            name="OperatorProxy",
            points={"operators": 3, "methods": 2, "turned operators": 2},
            entry=entry_a,
            cases=partial(_cases_a, OPERATORS),
            hidden=partial(_cases_a, OTHER_OPERATORS),
            wrong={
                "not_turned": "with its operands turned round",
                "no_turned": "unsupported operand",
                "methods_as_functions": "x.relu() is recorded as call_function",
                "lost_kwargs": "the keyword arguments {'dim': 0} are lost",
                "returns_node": "x + y returned a Node: an operation returns the Proxy",
            },
            stub='class OperatorProxy:\n    """Stands for the value of a node; operators and '
            'methods on it make new nodes."""',
        ),
        Part(
            id="1.4b",
            name="FunctionProxy",
            points={"functions": 2, "keyword arguments": 2},
            entry=entry_b,
            cases=partial(_cases_b, FUNCTIONS),
            hidden=partial(_cases_b, OTHER_FUNCTIONS),
            wrong={
                "no_kwargs": "the keyword arguments {'dim': 0, 'keepdim': True} are lost",
                "kwargs_required": "missing 1 required positional argument: 'kwargs'",
                "first_argument": "tuple index out of range",
                "by_name": "is recorded as call_method",
            },
            stub='class FunctionProxy:\n    """Stands for the value of a node; functions of torch '
            'on it make new nodes."""',
        ),
        Part(
            id="1.4c",
            name="to_arguments",
            points={"containers": 2, "slices": 1, "deeper": 2},
            entry=entry_c,
            cases=partial(_cases_c, NESTED),
            hidden=partial(_cases_c, OTHER_NESTED),
            wrong={
                "one_level": "a Proxy is left where its node belongs",
                "tuples_to_lists": "each container keeps its own type",
                "no_slices": "in slice(x, None) a Proxy is left",
                "no_dicts": "in {'a': x, 'b': 2} a Proxy is left",
            },
            asks=(
                "fxlab.core.tracer.TracerBase.create_arg",
                "fxlab.core.node.map_aggregate",
                "torch.fx.node.map_aggregate",
                "torch.fx.proxy.TracerBase.create_arg",
                "torch.utils._pytree.tree_map",
                "torch.utils._pytree.tree_map_only",
            ),
            stub='def to_arguments(value):\n    """Return value with each fxlab.Proxy in it '
            'replaced by its node, at any depth."""',
        ),
    ),
)
