"""Rewriting: the same matches and results as torch.fx's where it is right, linear, explained."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx.subgraph_rewriter import replace_pattern as torch_replace_pattern

import fxlab
from fxlab import RewriteError, SubgraphMatcher, explain_mismatch, replace_pattern
from fxlab.explorer.undo import undo
from fxlab.passes.rewriter import replace_pattern_with_filters
from tests.clocks import own_seconds, times_as_long


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.fc(x))
        b = torch.relu(self.fc(w))
        return torch.cat([a, b]).sum() + torch.max(a)


def chain(x):
    return torch.relu(torch.relu(torch.relu(x)))


def shared(x):
    y = torch.sigmoid(x)
    return y * x + y


def through_list(x):
    a = torch.cat([x, x * 2])
    b = torch.cat([a, a * 2])
    return torch.cat([b, a]).sum()


def diamonds(x):
    for _ in range(3):
        a, b = torch.neg(x), torch.exp(x)
        x = a + b
    return x


def literal(x):
    return torch.add(x, 2) * torch.add(x, 3)


def keyword(x):
    return F.softmax(x, dim=-1) + F.softmax(x * 2, dim=0)


def sliced(x):
    n = x.shape[0] // 2
    return x[:n] * 2 + x[n:] * 3


PROGRAMS: dict[str, tuple[Any, int]] = {  # program, number of inputs of shape (4, 4)
    "two branches": (TwoBranches(), 2),
    "chain": (chain, 1),
    "shared": (shared, 1),
    "through list": (through_list, 1),
    "diamonds": (diamonds, 1),
    "literal": (literal, 1),
    "keyword": (keyword, 1),
    "sliced": (sliced, 1),
}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (lambda x: torch.relu(x), lambda x: F.gelu(x)),
    "two relus": (lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x)),
    "relu is removed": (lambda x: torch.relu(x), lambda x: x),
    "sigmoid times": (lambda x, y: torch.sigmoid(x) * y, lambda x, y: x * y),
    "cat": (lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack([x, y]).sum(0)),
    "add of a constant": (lambda x: torch.add(x, 2), lambda x: x - 2),
    "two results": (
        lambda x: (torch.neg(x), torch.exp(x)),
        lambda x: (torch.abs(x), torch.sin(x)),
    ),
    "neg plus exp": (lambda x: torch.neg(x) + torch.exp(x), lambda x: x * 7),
    "softmax": (lambda x: F.softmax(x, dim=-1), lambda x: torch.tanh(x)),
    "times constant": (lambda x: x * 2, lambda x: x + x),
}


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4) for _ in range(count)]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_replaces_what_torch_fx_replaces(program: str, pair: str) -> None:
    fn, count = PROGRAMS[program]
    args = inputs(count)
    theirs, ours = torch.fx.symbolic_trace(fn), fxlab.symbolic_trace(fn)
    try:
        expected = torch_replace_pattern(theirs, *PAIRS[pair])
        theirs.graph.lint()
        theirs(*args)
    except (RuntimeError, KeyError, UnboundLocalError):  # torch.fx left a dangling node
        expected = None
    found = replace_pattern(ours, *PAIRS[pair])
    ours.graph.lint()
    result = ours(*args)
    if expected is not None:
        assert len(found) == len(expected)
        torch.testing.assert_close(result, theirs(*args), equal_nan=True)
        kinds = sorted((n.op, str(n.target)) for n in ours.graph.nodes)
        assert kinds == sorted((n.op, str(n.target)) for n in theirs.graph.nodes)
        assert [{p.name: str(g) for p, g in m.nodes_map.items()} for m in found] == [
            {p.name: str(g) for p, g in m.nodes_map.items()} for m in expected
        ]


def test_matches_back_to_back_through_a_list_read_the_replacement() -> None:
    gm = fxlab.symbolic_trace(through_list)
    x = torch.arange(4.0)
    matches = replace_pattern(gm, lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([b, a]))
    assert len(matches) == 3
    gm.graph.lint()
    a = torch.cat([x * 2, x])
    b = torch.cat([a * 2, a])
    assert torch.equal(gm(x), torch.cat([a, b]).sum())


def test_a_parameter_may_stand_for_a_whole_list() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.cat([torch.relu(x), torch.relu(x * 2)]))
    assert len(replace_pattern(gm, lambda x: torch.relu(x), lambda x: torch.neg(x))) == 2
    assert len(replace_pattern(gm, lambda t: torch.cat(t), lambda t: torch.stack(t))) == 1
    x = torch.randn(3)
    assert torch.equal(gm(x), torch.stack([-x, -x * 2]))


def test_overlapping_matches_keep_the_first_in_graph_order() -> None:
    gm = fxlab.symbolic_trace(chain)
    matches = replace_pattern(gm, lambda x: torch.relu(torch.relu(x)), lambda x: torch.neg(x))
    assert len(matches) == 1
    assert [n.name for n in gm.graph.nodes] == ["x", "neg", "relu_2", "output"]


def test_without_removing_overlaps_every_match_is_returned() -> None:
    pattern = fxlab.symbolic_trace(lambda x: torch.relu(torch.relu(x))).graph
    gm = fxlab.symbolic_trace(chain)
    every = SubgraphMatcher(pattern, remove_overlapping_matches=False).match(gm.graph)
    assert [m.returning_nodes[0].name for m in every] == ["relu_1", "relu_2"]


def test_a_match_whose_inside_is_read_outside_is_left_alone_and_explained() -> None:
    def program(x):
        y = torch.exp(x)
        return torch.relu(y) + y

    gm = fxlab.symbolic_trace(program)

    def pattern(x):
        return torch.relu(torch.exp(x))

    assert replace_pattern(gm, pattern, lambda x: x) == []
    answer = explain_mismatch(pattern, gm)
    assert answer.matches == 0
    assert answer.matched == [("relu", "relu"), ("exp", "exp")]
    assert answer.reason == "exp is read by add too, which is not part of the match"
    assert "return it from the pattern" in answer.hint


def test_results_in_two_places_are_put_behind_all_inputs() -> None:
    def program(x, y):
        a = torch.neg(x)
        c = torch.sin(a)  # reads a result before the other result's input exists
        b = torch.exp(torch.cos(y))
        return c + b

    gm = fxlab.symbolic_trace(program)

    def pattern(x, y):
        return torch.neg(x), torch.exp(y)

    def replacement(x, y):
        return x - y.sum(), y + x.sum()

    assert len(replace_pattern(gm, pattern, replacement)) == 1
    gm.graph.lint()
    x, y = inputs(2)
    expected = torch.sin(x - torch.cos(y).sum()) + torch.cos(y) + x.sum()
    torch.testing.assert_close(gm(x, y), expected)


def test_a_match_that_feeds_itself_is_left_alone() -> None:
    def program(x):
        a = torch.neg(x)
        return torch.exp(torch.sin(a))

    gm = fxlab.symbolic_trace(program)
    before = gm.code

    def pattern(x, y):
        return torch.neg(x), torch.exp(y)

    assert replace_pattern(gm, pattern, lambda x, y: (x + y, x - y)) == []
    assert gm.code == before
    assert "depend on its own results" in explain_mismatch(pattern, gm).reason


def test_nothing_moves_past_a_write() -> None:
    def program(x):
        y = torch.neg(x)
        x.add_(1)
        return torch.exp(y)

    gm = fxlab.symbolic_trace(program)

    def pattern(x):
        return torch.exp(torch.neg(x))

    assert replace_pattern(gm, pattern, lambda x: torch.exp(x)) == []
    answer = explain_mismatch(pattern, gm)
    assert answer.reason.startswith("add_ stands between its nodes")
    assert answer.where is None or answer.where[0] == __file__


def test_the_replacement_reads_its_inputs_before_a_later_write() -> None:
    def program(x):
        y = torch.neg(x)
        x.add_(1)
        return y + x

    gm = fxlab.symbolic_trace(program)
    assert len(replace_pattern(gm, lambda x: torch.neg(x), lambda x: x * -1)) == 1
    x = torch.ones(2)
    assert torch.equal(gm(x.clone()), program(x.clone()))


def test_nothing_moves_across_the_border_of_a_region() -> None:
    def program(x):
        with torch.no_grad():
            y = torch.neg(x)
        return torch.exp(y)

    gm = fxlab.symbolic_trace(program)
    assert replace_pattern(gm, lambda x: torch.exp(torch.neg(x)), lambda x: torch.exp(x)) == []


def test_replacement_nodes_say_what_they_stand_for() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(torch.exp(x)))
    replaced = {n.id: n.name for n in gm.graph.nodes if n.op == "call_function"}
    replace_pattern(gm, lambda x: torch.relu(torch.exp(x)), lambda x: torch.neg(torch.abs(x)))
    new = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.name for n in new] == ["abs_1", "neg"]
    for node in new:
        assert {a["id"]: a["name"] for a in node.meta["from"]} == replaced


def test_replacement_nodes_stay_in_the_module_of_what_they_replace() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return torch.relu(x) + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) * 2

    gm = fxlab.symbolic_trace(Outer())
    replace_pattern(gm, lambda x: torch.relu(x), lambda x: F.gelu(x))
    gelu = next(n for n in gm.graph.nodes if n.target is F.gelu)
    assert [path for path, _ in gelu.meta["nn_module_stack"].values()][-1] == "inner"


def test_state_of_a_replacement_module_is_copied_and_existing_state_stays() -> None:
    class Replacement(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x):
            return self.fc(x) * self.scale

    model = TwoBranches()
    gm, replacement = fxlab.symbolic_trace(model), fxlab.symbolic_trace(Replacement())
    assert len(replace_pattern(gm, lambda x: torch.relu(x), replacement)) == 2
    gm.graph.lint()
    assert torch.equal(gm.fc.weight, model.fc.weight)
    assert torch.equal(gm.scale, torch.full((4,), 3.0))
    x, w = inputs(2)
    a, b = (model.fc(model.fc(v)) * 3 for v in (x, w))
    torch.testing.assert_close(gm(x, w), torch.cat([a, b]).sum() + a.max())


def test_constants_of_a_replacement_function_get_a_name_of_their_own() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + torch.tensor([1.0, 2.0]))
    replace_pattern(gm, lambda x: torch.relu(x), lambda x: x * torch.tensor([5.0, 7.0]))
    gm.graph.lint()
    assert torch.equal(gm(torch.ones(2)), torch.tensor([6.0, 9.0]))


def test_submodules_match_by_name_and_can_be_replaced() -> None:
    class Pattern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.fc(x))

    gm = fxlab.symbolic_trace(TwoBranches())
    pattern = fxlab.symbolic_trace(Pattern())
    assert len(replace_pattern(gm, pattern, lambda x: torch.neg(x))) == 2
    x, w = inputs(2)
    torch.testing.assert_close(gm(x, w), torch.cat([-x, -w]).sum() + (-x).max())


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_module_given_as_replacement_takes_away_what_nothing_calls_any_more(fx: Any) -> None:
    class Squash(nn.Module):
        def __init__(self, squash: nn.Module) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            setattr(self, type(squash).__name__.lower(), squash)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.tanh(x) if hasattr(self, "tanh") else self.sigmoid(x))

    gm = fx.symbolic_trace(Squash(nn.Sigmoid()))
    fc = gm.fc
    assert len(fx.replace_pattern(gm, Squash(nn.Sigmoid()), Squash(nn.Tanh()))) == 1
    assert sorted(dict(gm.named_children())) == ["fc", "tanh"]
    assert gm.fc is fc, "a path that is there already keeps its meaning"
    x = torch.randn(2, 4)
    torch.testing.assert_close(gm(x), fc(torch.tanh(x)))


def test_filters_callback_names_and_ignored_literals() -> None:
    def program(x):
        return torch.add(x, 2) + torch.add(x, 3)

    def pattern(x):
        return torch.add(x, 0)

    gm = fxlab.symbolic_trace(program)
    assert replace_pattern(gm, pattern, lambda x: x) == []
    assert "ignore_literals=True" in explain_mismatch(pattern, gm).hint

    def only_three(match: Any, graph: Any, pattern_graph: Any) -> bool:
        return match.returning_nodes[0].args[1] == 3

    def times(match: Any, graph: Any, pattern_graph: Any) -> Any:
        factor = match.returning_nodes[0].args[1]
        return fxlab.symbolic_trace(lambda x: x * factor).graph

    done = replace_pattern_with_filters(
        gm,
        pattern,
        match_filters=[only_three],
        ignore_literals=True,
        replacement_callback=times,
    )
    assert len(done) == 1
    assert [n.name for n in done[0].replacements] == ["mul"]
    assert torch.equal(gm(torch.ones(2)), torch.full((2,), 6.0))

    named = fxlab.symbolic_trace(lambda x: torch.sin(torch.cos(x)))
    found = replace_pattern_with_filters(
        named, lambda x: torch.relu(x), lambda x: x * 2, node_name_match="sin"
    )
    assert len(found) == 1
    assert torch.equal(named(torch.zeros(1)), torch.full((1,), 2.0))


SAME_MEANING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "keyword": (lambda x: torch.relu(x), lambda x: torch.relu(input=x)),
    "functional": (lambda x: torch.relu(x), lambda x: F.relu(x)),
    "functional with its default": (lambda x: torch.relu(x), lambda x: F.relu(x, inplace=False)),
    "method": (lambda x: torch.relu(x), lambda x: x.relu()),
    "method is the pattern": (lambda x: x.relu(), lambda x: torch.relu(x)),
    "module": (lambda x: torch.relu(x), nn.ReLU()),
    "module with settings": (lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.2)),
    "softmax module": (lambda x: torch.softmax(x, 1), nn.Softmax(dim=1)),
    "softmax functional": (lambda x: torch.softmax(x, dim=1), lambda x: F.softmax(x, 1)),
    "gelu": (lambda x: F.gelu(x), nn.GELU()),
    "flatten": (lambda x: torch.flatten(x, 1), nn.Flatten()),
    "sigmoid": (lambda x: torch.sigmoid(x), nn.Sigmoid()),
    "operands": (lambda x: x + 1, lambda x: 1 + x),
    "operator and function": (lambda x: x + 1, lambda x: torch.add(x, 1)),
    "operator and method": (lambda x: x * 3, lambda x: x.mul(3)),
    "function and keyword": (lambda x: torch.add(x, 1), lambda x: torch.add(x, other=1)),
    "synonym": (lambda x: torch.multiply(x, 3), lambda x: 3 * x),
    "varargs": (lambda x: torch.permute(x, (1, 0)), lambda x: x.permute(1, 0)),
    "reshape": (lambda x: x.reshape(2, 8), lambda x: torch.reshape(x, (2, 8))),
    "clamp": (lambda x: torch.clamp(x, 0, 6), lambda x: x.clamp(min=0, max=6)),
    "clamp of one side": (lambda x: torch.clamp(x, max=6), lambda x: x.clamp(None, 6)),
    "transpose": (lambda x: torch.transpose(x, 0, 1), lambda x: x.swapaxes(0, 1)),
    "division": (lambda x: x / 2, lambda x: torch.div(x, 2)),
    "cat": (lambda x: torch.cat([x, x]), lambda x: torch.concat([x, x], dim=0)),
    "sum": (lambda x: torch.sum(x, 1), lambda x: x.sum(dim=1)),
    "max of all": (lambda x: torch.max(x), lambda x: x.max()),
    "dropout": (lambda x: F.dropout(x, 0.1, False), nn.Dropout(0.1).eval()),
    "equality": (lambda x: torch.eq(x, 1), lambda x: x == 1),
}


@pytest.mark.parametrize("name", SAME_MEANING)
def test_normalize_matches_by_meaning(name: str) -> None:
    pattern, program = SAME_MEANING[name]
    wrapped = nn.Sequential(program) if isinstance(program, nn.Module) else program
    gm = fxlab.symbolic_trace(wrapped)
    matches = replace_pattern(gm, pattern, lambda x: torch.sin(x), normalize=True)
    assert len(matches) == 1, explain_mismatch(pattern, gm, normalize=True)
    gm.graph.lint()
    x = torch.randn(4, 4)
    assert torch.equal(gm(x), torch.sin(x))


OTHER_MEANING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "in place": (lambda x: torch.relu(x), lambda x: F.relu(x, inplace=True)),
    "in-place module": (lambda x: torch.relu(x), nn.ReLU(inplace=True)),
    "alpha": (lambda x: torch.add(x, 1), lambda x: torch.add(x, 1, alpha=2)),
    "subtraction's operands": (lambda x: x - 1, lambda x: 1 - x),
    "slope": (lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.1)),
    "dimension": (lambda x: torch.softmax(x, 1), nn.Softmax(dim=0)),
    "approximation": (lambda x: F.gelu(x), nn.GELU(approximate="tanh")),
    "training": (lambda x: F.dropout(x, 0.1, False), nn.Dropout(0.1).train()),
    "where's method order": (
        lambda x: torch.where(x > 0, x, x),
        lambda x: x.where(x > 0, x),
    ),
    "type": (lambda x: x + 1, lambda x: x + 1.0),
}


@pytest.mark.parametrize("name", OTHER_MEANING)
def test_normalize_does_not_match_what_means_something_else(name: str) -> None:
    pattern, program = OTHER_MEANING[name]
    wrapped = nn.Sequential(program) if isinstance(program, nn.Module) else program
    gm = fxlab.symbolic_trace(wrapped)
    assert replace_pattern(gm, pattern, lambda x: torch.sin(x), normalize=True) == []


def test_a_long_pattern_of_swapped_operands_matches() -> None:
    gm = fxlab.symbolic_trace(lambda x, y: 1 + (y * (torch.relu(x) + y)))

    def pattern(x, y):
        return (y + torch.relu(x)) * y + 1

    assert len(replace_pattern(gm, pattern, lambda x, y: x - y, normalize=True)) == 1
    x, y = inputs(2)
    assert torch.equal(gm(x, y), x - y)


def test_a_module_with_hooks_is_not_taken_for_its_function() -> None:
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, args, output: output + 1)
    gm = fxlab.symbolic_trace(nn.Sequential(relu))
    assert replace_pattern(gm, lambda x: torch.relu(x), lambda x: x, normalize=True) == []


EXPLAINED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "another function": (
        lambda x: torch.relu(torch.exp(x)),
        lambda x: torch.relu(torch.sin(x)),
        "the pattern has torch.exp here, the graph torch.sin",
        "",
    ),
    "a method": (
        lambda x: torch.relu(torch.exp(x)),
        lambda x: torch.relu(x.exp()),
        "the pattern has torch.exp (call_function) here, the graph exp (call_method)",
        "normalize=True: both mean the same call",
    ),
    "keywords": (
        lambda x: torch.sum(x, dim=1),
        lambda x: torch.sum(x, 1),
        "sum_1 is called with (x, dim=1), sum_1 with (x, 1)",
        "normalize=True: by the signature the arguments are the same",
    ),
    "an input": (
        lambda x: torch.relu(torch.exp(x)),
        lambda x: torch.relu(x),
        "the pattern has torch.exp here, the graph its placeholder x",
        "",
    ),
    "a constant": (
        lambda x: torch.add(x, 2),
        lambda x: torch.add(x, 3),
        "the pattern has 2 here, the graph has 3",
        "ignore_literals=True",
    ),
    "computed instead of constant": (
        lambda x: torch.add(x, 2),
        lambda x: torch.add(x, x.sum()),
        "the pattern has the constant 2 here, the graph computes sum_1",
        "make it a parameter of the pattern",
    ),
    "constant instead of computed": (
        lambda x: torch.add(x, torch.exp(x)),
        lambda x: torch.add(x, 1),
        "the pattern computes exp here, the graph has the constant 1",
        "",
    ),
    "one parameter twice": (
        lambda x: torch.add(torch.exp(x), x),
        lambda x, y: torch.add(torch.exp(x), y),
        "the pattern's x stands for x already, here it would be y",
        "give the pattern a parameter for each",
    ),
    "two parameters for one node": (
        lambda x, y: torch.add(x, y),
        lambda x: torch.add(x, x),
        "x stands for another part of the pattern already, not for y as well",
        "write the pattern with one",
    ),
    "no such node": (
        lambda x: torch.relu(x),
        lambda x: torch.sin(x) + torch.cos(x),
        "the pattern ends with torch.relu (call_function), and the graph has no such node",
        "print(gm.graph)",
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_mismatch_is_explained(name: str) -> None:
    pattern, program, reason, hint = EXPLAINED[name]
    gm = fxlab.symbolic_trace(program)
    before = str(gm.graph)
    answer = explain_mismatch(pattern, gm)
    assert answer.matches == 0
    assert reason in answer.reason
    assert hint in answer.hint
    assert answer.reason in str(answer)
    assert str(gm.graph) == before


def test_explanation_of_one_node_and_of_a_match() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(torch.exp(x)) + torch.relu(torch.sin(x)))

    def pattern(x):
        return torch.relu(torch.exp(x))

    assert explain_mismatch(pattern, gm).matches == 1
    assert str(explain_mismatch(pattern, gm)) == "the pattern matches once, first at relu"
    at = explain_mismatch(pattern, gm, "relu_1")
    assert at.matched == [("relu", "relu_1")]
    assert at.node.name == "sin"
    assert at.where is not None and at.where[0] == __file__
    with pytest.raises(RewriteError, match="no node 'nobody'"):
        explain_mismatch(pattern, gm, "nobody")


def test_explanation_of_an_overlap() -> None:
    gm = fxlab.symbolic_trace(chain)
    answer = explain_mismatch(lambda x: torch.relu(torch.relu(x)), gm, "relu_2")
    assert "an earlier match shares a node" in str(answer)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "unused parameter": (lambda x, y: torch.relu(x), lambda x, y: x, "takes y and does not use it"),
    "computes nothing": (lambda x: x, lambda x: torch.relu(x), "computes nothing"),
    "other parameters": (
        lambda x: torch.relu(x),
        lambda x, y: x + y,
        "the replacement has 2 parameters, the pattern 1",
    ),
    "other results": (
        lambda x: torch.relu(x),
        lambda x: (x, x, x),
        "the replacement returns 3 results, the pattern 1 results",
    ),
    "no result": (lambda x: torch.relu(x), lambda x: None, "the replacement returns nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pattern_that_makes_no_sense_is_refused(name: str) -> None:
    pattern, replacement, text = REFUSED[name]
    gm = fxlab.symbolic_trace(lambda a: torch.relu(a))
    before = gm.code
    with pytest.raises(RewriteError, match=text):
        replace_pattern(gm, pattern, replacement)
    assert gm.code == before


def test_a_replacement_may_return_a_constant_or_what_a_parameter_stands_for() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.mul(torch.relu(x), torch.add(x, 3)) + torch.relu(x))
    assert len(replace_pattern(gm, lambda x: torch.relu(x), lambda x: 2.0)) == 2
    assert len(replace_pattern(gm, lambda x, c: torch.add(x, c), lambda x, c: c)) == 1
    gm.graph.lint()
    x = torch.randn(3)
    assert gm(x) == 2.0 * 3 + 2.0


def test_the_report_says_what_was_replaced() -> None:
    gm = fxlab.symbolic_trace(chain)
    replace_pattern(gm, lambda x: torch.relu(x), lambda x: torch.neg(x))
    report = gm.meta["reports"]["replace_pattern"]
    assert report["matches"] == 3
    assert report["changed"][0] == "relu became [neg]"


def test_dead_code_in_a_pattern_is_refused() -> None:
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.exp, (x,))
    graph.output(graph.call_function(torch.relu, (x,)))
    with pytest.raises(RewriteError, match="computes exp and does not use it"):
        SubgraphMatcher(graph)
    with pytest.raises(RewriteError, match="the pattern is empty"):
        SubgraphMatcher(fxlab.Graph())


def test_something_else_than_a_graph_module_is_refused_with_the_way_out() -> None:
    theirs = torch.fx.symbolic_trace(chain)
    with pytest.raises(RewriteError, match="from_torch_fx"):
        replace_pattern(theirs, lambda x: torch.relu(x), lambda x: x)
    with pytest.raises(RewriteError, match="neither a replacement nor"):
        replace_pattern_with_filters(fxlab.symbolic_trace(chain), lambda x: torch.relu(x))


def test_listeners_see_every_edit_and_undo_restores_the_graph() -> None:
    gm = fxlab.symbolic_trace(through_list)
    before, code = str(gm.graph), gm.code
    events: list[tuple[Any, ...]] = []

    def listen(kind: str, graph: Any, node: Any, old: Any, new: Any) -> None:
        events.append((kind, node, old, new))

    gm.graph.add_listener(listen)
    replace_pattern(gm, lambda a, b: torch.cat([a, b]), lambda a, b: torch.stack([b, a]).sum(0))
    gm.graph.remove_listener(listen)
    kinds = [kind for kind, *_ in events]
    assert kinds.count("create") == 6
    assert kinds.count("reroute") == 3
    assert kinds.count("erase") == 3
    for kind, node, old, new in reversed(events):
        undo(kind, gm.graph, node, old, new)
    gm.graph.lint()
    assert str(gm.graph) == before
    assert gm.code == code


def test_copies_are_not_changed() -> None:
    gm = fxlab.symbolic_trace(chain)
    other = copy.deepcopy(gm)
    replace_pattern(gm, lambda x: torch.relu(x), lambda x: torch.neg(x))
    assert torch.equal(other(torch.ones(2)), torch.ones(2))
    assert torch.equal(gm(torch.ones(2)), -torch.ones(2))


def test_opoverloads_match_with_defaults_left_out() -> None:
    add = torch.ops.aten.add.Tensor

    def graph(kwargs: dict[str, Any]) -> fxlab.Graph:
        graph = fxlab.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        graph.output(graph.call_function(add, (x, y), kwargs))
        return graph

    assert len(SubgraphMatcher(graph({})).match(graph({"alpha": 1}))) == 1
    assert len(SubgraphMatcher(graph({})).match(graph({"alpha": 2}))) == 0


def straight(n: int, lab: Any) -> Any:
    graph = lab.Graph()
    x = graph.placeholder("x")
    for _ in range(n // 2):
        x = graph.call_method("neg", (graph.call_function(torch.relu, (x,)),))
    graph.output(x)
    return lab.GraphModule(nn.Module(), graph)


def seconds(n: int, lab: Any, replace: Callable[..., Any]) -> float:
    gm, matches = straight(n, lab), []
    took = own_seconds(
        lambda: matches.extend(replace(gm, lambda x: torch.relu(x), lambda x: F.gelu(x)))
    )
    assert len(matches) == n // 2
    return took


def test_rewriting_grows_linearly() -> None:
    def of(n: int) -> Callable[[], float]:
        return lambda: seconds(n, fxlab, replace_pattern)

    assert times_as_long(of(8000), of(1000), rounds=3) < 14  # 8 if linear, 64 if quadratic


def test_patterns_with_several_results_are_found_in_linear_time() -> None:
    def build(n: int) -> fxlab.GraphModule:
        graph = fxlab.Graph()
        x = graph.placeholder("x")
        for _ in range(n):
            a, b = graph.call_function(torch.neg, (x,)), graph.call_function(torch.exp, (x,))
            x = graph.call_function(torch.add, (a, b))
        graph.output(x)
        return fxlab.GraphModule(nn.Module(), graph)

    def once(n: int) -> float:
        gm, found = build(n), []
        pattern, by = lambda x: (torch.neg(x), torch.exp(x)), lambda x: (torch.sin(x), torch.cos(x))
        took = own_seconds(lambda: found.extend(replace_pattern(gm, pattern, by)))
        assert len(found) == n
        gm.graph.lint()
        return took

    # 8 if linear, 64 if quadratic
    assert times_as_long(lambda: once(2000), lambda: once(250), rounds=3) < 16


def test_a_replacement_that_hands_on_an_input_is_refused_where_the_graph_writes():
    def clone(v):
        return v.clone()

    def itself(v):
        return v

    def writes_later(x):
        y = x.clone()
        y.add_(1)
        return x, y

    def writes_the_input(x):
        h = torch.relu(x)
        y = h.clone().clone()  # one of the two is enough
        h.mul_(2)
        return h, y

    def only_reads(x):
        return x.clone() + 1

    x = torch.tensor([1.0, -2.0])
    for program, matches in ((writes_later, 0), (writes_the_input, 1), (only_reads, 1)):
        gm = fxlab.symbolic_trace(program)
        assert len(fxlab.replace_pattern(gm, clone, itself)) == matches
        assert repr(gm(x.clone())) == repr(program(x.clone()))
        told = str(gm.meta["reports"]["replace_pattern"])
        assert ("would be one piece of memory" in told) == (program is not only_reads)


def test_a_replacement_that_makes_a_view_where_the_pattern_made_a_copy_is_refused_too():
    def program(x):
        y = (x + 0).view(-1)
        y.add_(1)
        return x, y

    gm = fxlab.symbolic_trace(program)
    found = fxlab.replace_pattern(gm, lambda v: (v + 0).view(-1), lambda v: v.view(-1))
    x = torch.ones(2, 2)
    assert found == [] and torch.equal(gm(x)[0], torch.ones(2, 2))
    gm = fxlab.symbolic_trace(program)  # a view for a view changes nothing
    assert len(fxlab.replace_pattern(gm, lambda v: v.view(-1), lambda v: v.reshape(-1))) == 1


def test_the_search_for_cycles_is_on_again_behind_a_rewrite_and_behind_one_that_raises():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    relu, neg, seen = lambda x: torch.relu(x), lambda x: torch.neg(x), []

    def fails(match, graph, pattern):
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fxlab.replace_pattern_with_filters(gm, relu, neg, [fails])
    assert seen == [False] and gc.isenabled()
    assert len(fxlab.replace_pattern(gm, relu, neg)) == 2 and gc.isenabled()
    gc.disable()
    try:
        fxlab.replace_pattern(gm, neg, relu)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ignored_literals_do_not_stand_for_what_the_pattern_computes() -> None:
    def two(x):
        return torch.relu(x), torch.neg(x)

    pattern = fxlab.symbolic_trace(two).graph
    matcher = SubgraphMatcher(pattern, match_output=True, ignore_literals=True)
    assert matcher.match(fxlab.symbolic_trace(lambda x: torch.relu(x)).graph) == []
    (found,) = matcher.match(fxlab.symbolic_trace(two).graph)
    assert len(found.nodes_map) == 4
