"""2.1: insert a node and turn its readers; replace an operation in every spelling it has.

Figure 2 of the paper done right. What the edited program must compute is asked of the program
itself: an Interpreter runs the original and does at each call what the edit should bring about.
Part (b) is one of several operations (`PAIRS`), so that a graded course can draw another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.explorer.sentences import plural
from fxlab.interop.targets import function_table
from fxlab.passes.rewriter import replace_pattern
from fxlab.teach import judge
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.programs import built, fresh_inputs, programs
from fxlab.teach.variants import forms

Judge = Callable[[tuple[Any, ...], Any], Finding | None]


def _named(text: str) -> Callable[..., Any]:
    function = function_table(text)
    assert function is not None, text
    return function


# -- (a) insert and reroute ------------------------------------------------------------------------


def entry_a(answer: Callable[..., Any], gm: GraphModule, old: str, new: str) -> GraphModule:
    """Call the pass with the two functions that the texts name; it edits in place."""
    return judge.edited(answer, gm, _named(old), _named(new))


class _Twofold(Interpreter):
    """Runs a program and applies `new` to what each call of `old` returns."""

    def __init__(self, gm: GraphModule, old: Any, new: Any) -> None:
        super().__init__(gm)
        self.old, self.new = old, new

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().call_function(target, args, kwargs)
        return self.new(value) if target is self.old else value


class _Runs(nn.Module):
    """An Interpreter as a module, for `same_program`."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._run = interpreter.run

    def forward(self, *inputs: Any) -> Any:
        return self._run(*inputs)


def judge_insert(args: tuple[Any, ...], value: Any) -> Finding | None:
    """Hold the result to the original program, run with `new` behind each `old`."""
    gm, old, new = args
    old_function, new_function = _named(old), _named(new)
    short, added = new.rpartition(".")[2], new_function

    def wrong(sentence: str, node: str = "") -> Finding:
        return Finding(sentence, node, actual=value, graph=gm)

    def count(program: GraphModule, function: Any) -> int:
        return len(program.graph.find_nodes(op="call_function", target=function))

    wanted = count(gm, added) + count(gm, old_function)
    if old_function is not added and count(value, old_function) < count(gm, old_function):
        return wrong(f"a call of {old} is gone: it stays, and {short} reads its value")
    if count(value, added) != wanted:
        text = f"{plural(count(value, added), 'call')} of {new} where {wanted} would be right"
        return wrong(f"{text}: one behind each call of {old}, and no more")
    sizes = [judge.counts(one).total() for one in (gm, value)]
    if sizes[1] - sizes[0] != wanted - count(gm, added):
        return wrong(f"something else than one {short} behind each {old} was added or taken away")
    unread = [n for n in value.graph.find_nodes(op="call_function", target=added) if not n.users]
    if unread and all(n.users for n in gm.graph.nodes if n.op != "output"):
        return wrong(
            f"{unread[0].name} is there, but nobody reads it: turn the readers of {old} to it",
            unread[0].name,
        )
    inputs = fresh_inputs(gm)
    expected = _Runs(_Twofold(gm, old_function, new_function))
    text = judge.same_program(expected, value, inputs)
    if not text:
        return None
    return wrong(_misread(value, old_function, added, old, short) or f"run as a program, {text}")


def _misread(value: GraphModule, old: Any, new: Any, name: str, short: str) -> str:
    """Say which edge is wrong, if it is one of the usual ones."""
    for node in value.graph.nodes:
        if node.op == "call_function" and node.target is new and old is not new:
            sources = node.all_input_nodes
            if not any(source.target is old for source in sources):
                read = sources[0].name if sources else "nothing"
                return f"{node.name} reads {read}: it must read the value of {name}"
        elif any(source.target is old for source in node.all_input_nodes):
            return f"{node.name} still reads {name} itself: all its readers shall read {short}"
    return ""


def _insert_cases() -> Iterator[Case | Property]:
    def case(behaviour: str, title: str, program: Any, old: str, new: str) -> Case:
        return Case(behaviour, title, lambda: (symbolic_trace(program), old, new), judge_insert)

    relu, sigmoid = "torch.relu", "torch.sigmoid"
    yield case("readers turn", "the output reads it", lambda x: torch.relu(x), relu, sigmoid)
    yield case("readers turn", "one reader", lambda x: torch.relu(x).neg(), relu, sigmoid)
    yield case(
        "readers turn", "two readers, one of them twice",
        lambda x: torch.mul(y := torch.relu(x), y) + y, relu, sigmoid,
    )  # fmt: skip
    yield case(
        "readers turn",
        "a reader by keyword",
        lambda x: torch.abs(input=torch.relu(x)),
        relu,
        sigmoid,
    )
    yield case("every call", "none", lambda x: x.neg(), relu, sigmoid)
    yield case("every call", "two in a row", lambda x: torch.relu(torch.relu(x)), relu, sigmoid)
    yield case(
        "every call", "two side by side", lambda x: torch.relu(x) + torch.relu(x - 1), relu, sigmoid
    )
    yield case("its own kind", "one tanh becomes two", lambda x: torch.tanh(x), *["torch.tanh"] * 2)
    yield Property(
        "every call",
        "generated programs",
        lambda: programs(outputs=2).map(lambda gm: (gm, relu, "torch.tanh")),
        judge_insert,
        examples=20,
    )


# -- (b) replace an operation ----------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """An operation and what takes its place.

    Attributes:
        old, new: Their names, as torch.nn.functional has them.
        module: The old one's class.
        setting: The module's attribute, and keyword of the functions, that must be kept.
        values: Two values of it.
        other: A function with a similar name, which must stay.
    """

    old: str
    new: str
    module: type[nn.Module]
    setting: str
    values: tuple[Any, Any]
    other: str

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions that are the old operation."""
        return (getattr(torch, self.old), getattr(F, self.old))

    def is_old(self, node: Node, gm: nn.Module) -> bool:
        """Say whether a node is the old operation, in any spelling."""
        if node.op == "call_module":
            return type(gm.get_submodule(node.target)) is self.module
        if node.op == "call_method":
            return node.target == self.old
        return node.op == "call_function" and node.target in self.functions


PAIRS = (
    Pair("softmax", "log_softmax", nn.Softmax, "dim", (0, 1), "log_softmax"),
    Pair("log_softmax", "softmin", nn.LogSoftmax, "dim", (0, 1), "softmax"),
    Pair("hardshrink", "softshrink", nn.Hardshrink, "lambd", (0.3, 1.2), "tanhshrink"),
)


def entry_b(answer: Callable[..., Any], gm: GraphModule) -> GraphModule:
    """Call the pass; it edits in place."""
    return judge.edited(answer, gm)


class _Replaced(Interpreter):
    """Runs a program with the new operation wherever it has the old one."""

    def __init__(self, gm: GraphModule, pair: Pair) -> None:
        super().__init__(gm)
        self.pair = pair

    def run_node(self, n: Node) -> Any:
        if not self.pair.is_old(n, self.module):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_module":
            module = self.fetch_attr(n.target)
            kwargs = {**kwargs, self.pair.setting: getattr(module, self.pair.setting)}
        return getattr(F, self.pair.new)(*args, **kwargs)


def _judge_replace(pair: Pair) -> Judge:
    def judge_replace(args: tuple[Any, ...], value: Any) -> Finding | None:
        (gm,) = args
        new = getattr(F, pair.new)

        def wrong(sentence: str, node: str = "") -> Finding:
            return Finding(sentence, node, actual=value, graph=gm)

        for node in value.graph.nodes:
            if pair.is_old(node, value):
                return wrong(_left(pair, node), node.name)
        inputs = [torch.randn(3, 4) * 2 for _ in gm.graph.find_nodes(op="placeholder")]
        text = judge.same_program(_Runs(_Replaced(gm, pair)), value, inputs)
        if not text:
            return None
        before = [node for node in gm.graph.nodes if pair.is_old(node, gm)]
        if not before:
            return wrong(f"there is no {pair.old} in this program, and it was changed: {text}")
        for node in value.graph.find_nodes(op="call_function", target=new):
            lost = [n for n in before if n.kwargs.keys() - node.kwargs.keys() - {"input"}]
            if lost and len(node.args) < 2:
                names = " and ".join(sorted(lost[0].kwargs))
                return wrong(
                    f"{lost[0].name} takes {names} by keyword, and the new node does not: "
                    f"copy node.kwargs as well as node.args ({text})", node.name,
                )  # fmt: skip
        if any(node.op == "call_module" for node in before):
            return wrong(
                f"{text}. A module holds its {pair.setting} itself: read it from "
                f"gm.get_submodule(node.target).{pair.setting}"
            )
        return wrong(f"run as a program, {text}")

    return judge_replace


def _left(pair: Pair, node: Node) -> str:
    if not node.users:
        return f"{node.name} is still in the graph, though nobody reads it: erase it as well"
    if node.op == "call_method":
        return f"x.{pair.old}(...) is still there: a method has the opcode call_method and a text "\
            "as its target"  # fmt: skip
    if node.op == "call_module":
        return (
            f"self.{node.target} is still called, an nn.{pair.module.__name__}: the target of "
            "call_module is a path; gm.get_submodule tells what is there"
        )
    space = "torch" if node.target is getattr(torch, pair.old) else "torch.nn.functional"
    return f"{space}.{pair.old} is still called: torch and torch.nn.functional each have one"


def _replace_cases(pair: Pair) -> Iterator[Case]:
    a, b = pair.values
    plain, functional = pair.functions
    set_a, set_b = {pair.setting: a}, {pair.setting: b}

    class Calls(nn.Module):
        """Calls a module of the old kind, perhaps twice."""

        def __init__(self, setting: Any, times: int = 1) -> None:
            super().__init__()
            self.act, self.times = pair.module(setting), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.act(x * 2)
            return x

    class Four(nn.Module):
        """Has all spellings, each with a reader."""

        def __init__(self) -> None:
            super().__init__()
            self.act = pair.module(b)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.act(functional(plain(x, **set_a) * 3, **set_b) * 3)
            y = getattr(y, pair.old)(a) if hasattr(torch.Tensor, pair.old) else functional(y, a)
            return y + 1

    class Misnamed(nn.Module):
        """Has a module of another kind under the old one's name."""

        def __init__(self) -> None:
            super().__init__()
            self.add_module(pair.old, nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule(pair.old)(x)

    def case(behaviour: str, title: str, program: Any) -> Case:
        return Case(behaviour, title, lambda: (symbolic_trace(program),), _judge_replace(pair))

    name = pair.old
    yield case("functions", f"torch.{name}(x, {a})", lambda x: plain(x, a))
    yield case("functions", f"F.{name}(x, {b}) and a reader", lambda x: functional(x, b).neg())
    yield case("keyword arguments", f"{pair.setting}={a}", lambda x: plain(x, **set_a))
    yield case("keyword arguments", f"input=x, {pair.setting}={b}",
               lambda x: plain(input=x, **set_b))  # fmt: skip
    if hasattr(torch.Tensor, name):
        yield case("methods", f"x.{name}({b})", lambda x: getattr(x, name)(b))
        yield case("methods", f"x.{name}({pair.setting}={a})", lambda x: getattr(x, name)(**set_a))
    yield case("modules", f"nn.{pair.module.__name__}({a})", Calls(a))
    yield case("modules", "one module, called twice", Calls(b, times=2))
    yield case("the rest stays", "none", lambda x: torch.sigmoid(x) + 1)
    other = getattr(F, pair.other)
    more = set_a if pair.setting == "dim" else {}
    yield case("the rest stays", f"F.{pair.other} only sounds alike", lambda x: other(x, **more))
    yield case("the rest stays", f"self.{name} is an nn.Tanh", Misnamed())
    yield case("the rest stays", "all spellings in one program", Four())


def _other_replace_cases(pair: Pair) -> Iterator[Case]:
    """The same behaviours on other programs: several calls in each."""
    a, b = pair.values
    plain, functional = pair.functions
    set_a, set_b = {pair.setting: a}, {pair.setting: b}

    class Two(nn.Module):
        """Two modules of the old kind, with other settings."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = pair.module(b), nn.Sequential(pair.module(a), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.first(x) * 2)

    def case(behaviour: str, title: str, program: Any) -> Case:
        return Case(behaviour, title, lambda: (symbolic_trace(program),), _judge_replace(pair))

    yield case("functions", "two in a row", lambda x: functional(plain(x * 3, b) * 3, a))
    yield case("keyword arguments", f"twice, {pair.setting}={b} and {pair.setting}={a}",
               lambda x: functional(input=x * 2, **set_b) + plain(x, **set_a))  # fmt: skip
    if hasattr(torch.Tensor, pair.old):
        method = operator.methodcaller(pair.old, a)
        yield case("methods", "two side by side", lambda x: method(x) - method(x * 3))
    yield case("modules", "two modules, one inside another", Two())
    yield case("the rest stays", "two readers of one", lambda x: torch.tanh(x) * torch.tanh(x))


STUB_A = '''def insert_behind(gm, old, new):
    """Edit `gm` in place: behind each call of the function `old`, call `new` on its result.

    Whoever read the result of `old` reads the result of `new` afterwards.
    """
'''
STUB_B = '''def to_{new}(gm):
    """Edit `gm` in place: replace each {old}, in every spelling, by F.{new}."""
'''


def make(pair: Pair) -> Exercise:
    """Return the exercise with another operation in part (b)."""
    return Exercise(
        id="2.1",
        title="Insert a node, reroute its readers; replace an operation in every spelling",
        level=2,
        minutes=30,
        idea="A transform is three edits: insert, reroute, erase; what makes it right is what it "
        "does with keyword arguments, other spellings and the node that it inserted (section 4.3, "
        "Figure 2).",
        needs=("node", "opcode", "target", "arguments", "users", "insertion point", "reroute",
               "erase", "lint"),
        teaches=("spelling",),
        hints=(
            "Lecture 02 does both on other operations: 'Mistake 2' doubles the result of relu, "
            "'Done right' replaces relu in four spellings. Which of its three mistakes could your "
            "loop make?",
            "(a) For each call of old, over a list of the nodes: insert new behind it, turn the "
            "readers, and see to it that the new node itself still reads old. (b) For each node "
            "ask what it is by its opcode: a function is compared, a method is a text, a module "
            "is looked up. Then insert with all its arguments, reroute, erase.",
            "Two calls that beginners miss, on another example: node.replace_all_uses_with(mul, "
            "delete_user_cb=lambda user: user is not mul) turns all readers but mul; "
            "gm.get_submodule('layers.0').in_features reads a setting of a Linear.",
        ),
        asks=("fxlab.passes.rewriter.replace_pattern",
              "fxlab.passes.rewriter.replace_pattern_with_filters",
              "torch.fx.replace_pattern", "fxlab.core.interpreter.Transformer.transform"),
        parts=(
            Part(
                id="2.1a",
                name="insert_behind",
                points={"readers turn": 2, "every call": 2, "its own kind": 1},
                entry=entry_a,
                cases=_insert_cases,
                wrong={
                    "reads_itself": "replace_all_uses_with also rewired the node you inserted",
                    "visits_its_own": "your loop visits the nodes it inserts",
                    "reads_the_input": "sigmoid reads x: it must read the value of torch.relu",
                    "no_reroute": "sigmoid is there, but nobody reads it",
                    "first_only": "1 call of torch.sigmoid where 2 would be right",
                    "erases_old": "a call of torch.relu is gone",
                },
                stub=STUB_A,
            ),
            Part(
                id="2.1b",
                name=f"to_{pair.new}",
                points={"functions": 1, "keyword arguments": 2, "methods": 1, "modules": 2,
                        "the rest stays": 1},
                entry=entry_b,
                cases=lambda: _replace_cases(pair),
                hidden=lambda: _other_replace_cases(pair),
                wrong={
                    "lost_kwargs": "copy node.kwargs as well as node.args",
                    "functions_only": "x.softmax(...) is still there",
                    "no_modules": "self.act is still called, an nn.Softmax",
                    "last_dim": "A module holds its dim itself",
                    "first_argument": "tuple index out of range",
                    "not_erased": "softmax is still in the graph, though nobody reads it: erase it",
                    "by_the_sound": "there is no softmax in this program, and it was changed",
                },
                stub=STUB_B.format(old=pair.old, new=pair.new),
            ),
        ),
    )  # fmt: skip


def _words(pair: Pair) -> tuple[tuple[str, str], ...]:
    """Return what turns the master's cells, about PAIRS[0], into those of another pair."""
    first = PAIRS[0]
    olds = (
        first.new,
        first.module.__name__,
        first.old,
        f"`{first.setting}`",
        f".{first.setting}",
        f'"{first.setting}"',
    )
    news = (
        pair.new,
        pair.module.__name__,
        pair.old,
        f"`{pair.setting}`",
        f".{pair.setting}",
        f'"{pair.setting}"',
    )
    # In two steps, since what is new in one pair may be old in another.
    marks = [f"@{k}@" for k in range(len(olds))]
    return (*zip(olds, marks, strict=True), *zip(marks, news, strict=True))


EXERCISE = make(PAIRS[0])
VARIANTS = forms(make, {pair.old: pair for pair in PAIRS}, _words)


def _by_pattern(gm: GraphModule, old: Any, new: Any) -> None:
    """What the kit has for part (a)."""
    replace_pattern(gm, lambda x: old(x), lambda x: new(old(x)))


def _chain(count: int) -> tuple[GraphModule, str, str]:
    """A chain of about ``count`` nodes, every second of which is a relu."""

    def make_graph(graph: Graph) -> None:
        node = graph.placeholder("x")
        for _ in range(count // 2):
            node = graph.call_method("neg", (graph.call_function(torch.relu, (node,)),))
        graph.output(node)

    return built(make_graph), "torch.relu", "torch.sigmoid"


COMPARE = {
    "2.1a": Reference(
        kit=_by_pattern,
        small=lambda: (
            symbolic_trace(lambda x: torch.relu(x).neg()),
            "torch.relu",
            "torch.sigmoid",
        ),
        large=_chain,
    )
}
