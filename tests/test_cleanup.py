"""Dead code, common subexpressions, constants: nothing that could be noticed ever changes."""

from __future__ import annotations

import copy
import operator
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.passes import const_fold, cse, dce
from tests.clocks import own_seconds, times_as_long
from tests.random_graphs import random_program, run

torch.set_num_threads(1)
PROGRAMS = 1000 if os.environ.get("FXLAB_LONG") else 100
PASSES = [dce, cse, const_fold]


def runs(gm, seed):
    try:
        return run(copy.deepcopy(gm), seed)
    except RuntimeError:  # it writes into a tensor through an overlapping view of itself
        return None


@pytest.mark.parametrize("pass_", PASSES, ids=lambda p: p.__name__)
def test_outputs_inputs_and_state_stay_bit_equal_and_a_second_run_changes_nothing(pass_):
    changed = 0
    for seed in range(PROGRAMS):
        gm = random_program(seed)
        expected = runs(gm, seed)
        if expected is None:
            continue
        pass_(gm)
        changed += bool(gm.meta["reports"][pass_.__name__].changed)
        found = run(copy.deepcopy(gm), seed)
        same = [torch.equal(a, b) for a, b in zip(expected, found, strict=False)]
        assert all(same), f"program {seed} differs:\n{random_program(seed).code}\n{gm.code}"
        code = gm.code
        pass_(gm)
        assert gm.meta["reports"][pass_.__name__].changed == [], f"program {seed} changed twice"
        assert gm.code == code
    assert changed > PROGRAMS / 5


def test_all_three_in_a_row_keep_outputs_bit_equal():
    for seed in range(PROGRAMS):
        gm = random_program(seed, size=25)
        expected = runs(gm, seed)
        if expected is None:
            continue
        for pass_ in (cse, const_fold, dce, cse):
            pass_(gm)
        found = run(copy.deepcopy(gm), seed)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=False)), seed


def names(gm):
    return [node.name for node in gm.graph.nodes]


def trace(f):
    return fxlab.symbolic_trace(f)


class Effects(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.dropout = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.bn(x)
        self.dropout(x)
        self.relu(x)
        x.add_(1)
        self.count.add_(1)
        torch.relu(x)  # the only dead one
        torch.rand(3)
        torch.add(x, 1, out=x)
        return x * 1


def test_dce_keeps_every_kind_of_effect_and_says_which():
    gm = dce(fxlab.symbolic_trace(Effects().train()))
    report = gm.meta["reports"]["dce"]
    assert report.changed == ["erased relu_1: nothing read it"]
    reasons = " | ".join(report.kept)
    for word in ("running statistics", "random", "inplace", "in place", "out="):
        assert word in reasons


def test_dce_erases_a_chain_in_one_walk():
    def f(x):
        y = x
        for _ in range(50):
            y = torch.relu(y)
        return x * 2

    gm = dce(trace(f))
    assert names(gm) == ["x", "mul", "output"]


def test_cse_tells_constants_by_type_and_value():
    def f(x):
        return x * 1, x * 1.0, x * True, x * 0.0, x * -0.0, x * 1

    gm = cse(trace(f))
    assert len(gm.graph.find_nodes(op="call_function")) == 5


def test_cse_merges_modules_methods_functions_attributes_and_nested_arguments():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            a = torch.cat([self.fc(x).neg(), self.w * x], dim=-1)
            b = torch.cat([self.fc(x).neg(), self.w * x], dim=-1)
            return a + b

    gm = cse(fxlab.symbolic_trace(M().eval()))
    assert len(gm.graph.find_nodes(op="call_module")) == 1
    assert len(gm.graph.find_nodes(op="get_attr")) == 1
    cat = gm.graph.find_nodes(op="call_function", target=torch.cat)
    assert len(cat) == 1


def test_cse_keeps_random_numbers_apart():
    gm = cse(trace(lambda x: torch.rand_like(x) + torch.rand_like(x)))
    assert len(gm.graph.find_nodes(op="call_function", target=torch.rand_like)) == 2
    assert "random" in gm.meta["reports"]["cse"].kept[0]


def test_cse_does_not_merge_across_a_write_or_into_written_memory():
    def across(x):
        a = torch.relu(x)
        x.add_(1)
        return a + torch.relu(x)

    def into(x):
        a, b = x + 1, x + 1
        a.mul_(2)
        return a, b

    def through_a_view(x):
        a, b = x + 1, x + 1
        a.view(-1).mul_(2)
        return a, b

    for f in (across, into, through_a_view):
        gm = trace(f)
        x = torch.randn(3)
        expected = f(x.clone())
        before = len(gm.graph.nodes)
        cse(gm)
        assert len(gm.graph.nodes) == before
        torch.testing.assert_close(gm(x.clone()), expected, rtol=0, atol=0)


def test_cse_does_not_merge_across_the_border_of_a_region():
    def f(x):
        a = x * 2
        with torch.no_grad():
            b = x * 2
        return a, b

    gm = cse(trace(f))
    a, b = gm(torch.ones(2, requires_grad=True))
    assert a.requires_grad
    assert not b.requires_grad


def test_uninitialized_memory_is_not_shared():
    gm = cse(trace(lambda x: torch.empty_like(x).copy_(x) + torch.empty_like(x).copy_(x * 2)))
    assert torch.equal(gm(torch.ones(2)), torch.full((2,), 3.0))


class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        scale = self.w.shape[1] * 0.5
        return F.linear(x, (self.w * self.mask).t().contiguous()) * scale


def test_const_fold_computes_once_and_puts_numbers_into_arguments():
    model = Folds().eval()
    gm = fxlab.symbolic_trace(model)
    x = torch.randn(2, 3)
    expected = gm(x)
    const_fold(gm)
    assert torch.equal(gm(x), expected)
    assert gm.graph.find_nodes(op="get_attr")[0].target == "_folded_0"
    assert gm.graph.find_nodes(op="call_function", target=operator.mul)[0].args[1] == 2.0
    assert "_folded_0" not in model.state_dict()


def test_const_fold_leaves_parameters_alone_while_they_are_trained():
    gm = const_fold(fxlab.symbolic_trace(Folds().train()))
    assert not any("tensor" in s for s in gm.meta["reports"]["const_fold"].changed)
    gm(torch.randn(2, 3)).sum().backward()
    assert gm.w.grad is not None


def test_const_fold_keeps_what_must_be_new_in_each_call():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            fresh = self.w * 2
            fresh.add_(x)
            return fresh, self.w * 3, torch.nn.functional.dropout(self.w * 5, 0.5) + x

    gm = const_fold(fxlab.symbolic_trace(M().eval()))
    first = [t.clone() for t in gm(torch.ones(3))[:2]]
    second = gm(torch.ones(3))
    assert torch.equal(first[0], second[0])
    assert second[1] is not gm(torch.ones(3))[1]
    kept = " | ".join(gm.meta["reports"]["const_fold"].kept)
    assert "written to in place" in kept
    assert "returned" in kept


def test_const_fold_stops_at_a_size():
    gm = fxlab.symbolic_trace(Folds().eval())
    const_fold(gm, max_bytes=8)
    assert "would add" in gm.meta["reports"]["const_fold"].kept[0]


def test_const_fold_says_when_a_constant_fails():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + self.w.view(2)

    gm = const_fold(fxlab.symbolic_trace(M().eval()))
    assert "fails when computed now" in gm.meta["reports"]["const_fold"].kept[0]


@pytest.mark.parametrize("pass_", PASSES, ids=lambda p: p.__name__)
def test_clean_ups_are_linear(pass_):
    def seconds(size):
        graph = fxlab.Graph()
        x = y = graph.placeholder("x")
        for i in range(size):
            y = graph.call_function(torch.add, (y, i % 7)) if i % 3 else y
            graph.call_function(torch.add, (x, i % 5))
        graph.output(y)
        gm = fxlab.GraphModule(nn.Module(), graph)
        return own_seconds(lambda: pass_(gm))

    # 8 if linear, 64 if quadratic
    assert times_as_long(lambda: seconds(8000), lambda: seconds(1000), rounds=3) < 24


def test_cse_is_linear_where_one_node_reads_thousands_of_equal_ones():
    def edits(n):
        graph = fxlab.Graph()
        x = graph.placeholder("x")
        many = [graph.call_function(torch.relu, (x,)) for _ in range(n)]
        graph.output(graph.call_function(torch.cat, (many,)))
        gm = fxlab.GraphModule(torch.nn.Module(), graph)
        count = [0]

        def hear(kind, *rest):
            count[0] += kind == "args"

        gm.graph.add_listener(hear)
        cse(gm)
        gm.graph.lint()
        assert [node.name for node in gm.graph.nodes] == ["x", "relu", "cat", "output"]
        assert torch.equal(gm(torch.ones(1)), torch.ones(n))
        assert gm.graph.find_nodes(op="call_function", target=torch.relu)[0].meta["from"]
        return count[0]

    assert edits(2000) == edits(200)
