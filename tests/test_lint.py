"""Each rule of a well-formed graph, broken one at a time."""

import pytest
import torch
from torch import nn

import fxlab
from fxlab import Graph, GraphModule, LintError
from fxlab.core.graph import _enter_region, _exit_region


def small():
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    graph.output(a)
    return graph, x, a


def late_placeholder(g, x, a):
    with g.inserting_after(a):
        g.placeholder("late")


def use_before_definition(g, x, a):
    with g.inserting_before(a):
        n = g.call_function(torch.neg, (x,))
    n.args = (a,)
    a.args = (x,)


def reads_itself(g, x, a):
    a.args = (a,)


def foreign_input(g, x, a):
    a.args = (Graph().placeholder("y"),)


def erased_input(g, x, a):
    with g.inserting_before(a):
        n = g.call_function(torch.neg, (x,))
    g.erase_node(n)
    a.args = (n,)


def two_outputs(g, x, a):
    g.output(x)


def same_name(g, x, a):
    a._name = "x"


def wrong_users(g, x, a):
    x.users.clear()


def extra_user(g, x, a):
    x.users[g.output_node()] = None


def stale_inputs(g, x, a):
    a._input_nodes = {}


def bad_opcode(g, x, a):
    a._op = "root"


def open_region(g, x, a):
    with g.inserting_before(a):
        g.call_function(_enter_region, (torch.no_grad,))


def crossed_regions(g, x, a):
    with g.inserting_before(a):
        one = g.call_function(_enter_region, (torch.no_grad,))
        two = g.call_function(_enter_region, (torch.enable_grad,))
        g.call_function(_exit_region, (one,))
        g.call_function(_exit_region, (two,))


RULES = {
    late_placeholder: "placeholder", use_before_definition: "later", reads_itself: "reads itself",
    foreign_input: "another graph", erased_input: "erased", two_outputs: "behind the output",
    same_name: "two nodes are called", wrong_users: "does not know", extra_user: "does not read",
    stale_inputs: "not those|does not read", bad_opcode: "no opcode",
    open_region: "never left|inside the region",
    crossed_regions: "innermost",
}  # fmt: skip


@pytest.mark.parametrize("break_it", RULES, ids=lambda f: f.__name__)
def test_a_broken_rule_is_found_and_named(break_it):
    graph, x, a = small()
    graph.lint()
    break_it(graph, x, a)
    with pytest.raises(LintError, match=RULES[break_it]) as info:
        graph.lint()
    assert isinstance(info.value, RuntimeError) and isinstance(info.value, ValueError)
    assert info.value.node or info.value.hint


def test_targets_must_exist_in_the_owning_module():
    gm = fxlab.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gm.graph.lint()
    node = gm.graph.find_nodes(op="call_module")[0]
    node.target = "7"
    with pytest.raises(LintError, match="names nothing"):
        gm.graph.lint()
    node.target = "0.weight"
    with pytest.raises(LintError, match="no module"):
        gm.graph.lint()


def test_a_graph_of_its_own_needs_no_module():
    graph = Graph()
    graph.output(graph.call_module("anything", (graph.placeholder("x"),)))
    graph.lint()
    GraphModule({"anything": nn.ReLU()}, graph).graph.lint()
