"""The cut by capability has no cycle, the fewest parts, and the meaning of the whole."""

from __future__ import annotations

import importlib
import operator
import random
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import fxlab
from fxlab.core.errors import RewriteError
from fxlab.passes.partition import (
    CapabilityBasedPartitioner,
    OperatorSupport,
    OpSupports,
    Partition,
    any_chain,
    chain,
    create_op_support,
    get_node_target,
)


def random_dag(seed: int, size: int) -> fxlab.GraphModule:
    """A random program of sums (supported) and sines (not), with several outputs."""
    pick = random.Random(seed)
    g = fxlab.Graph()
    values = [g.placeholder("x"), g.placeholder("y")]
    for _ in range(size):
        a, b = pick.choice(values[-6:]), pick.choice(values)
        if pick.random() < 0.3:
            values.append(g.call_function(torch.sin, (a,)))
        else:
            values.append(g.call_function(operator.add, (a, b)))
    g.output(tuple(pick.sample(values, 3)))
    return fxlab.GraphModule({}, g)


SUMS = OperatorSupport({operator.add: None})


def reaches(graph: fxlab.Graph) -> dict[fxlab.Node, set[fxlab.Node]]:
    """Brute force: all nodes that each node leads to."""
    below: dict[fxlab.Node, set[fxlab.Node]] = {}
    for node in reversed(list(graph.nodes)):
        below[node] = set().union(*({user} | below[user] for user in node.users), set())
    return below


def longest_alternation(gm: fxlab.GraphModule) -> int:
    """Brute force over all paths: the most supported stretches that one path goes through."""
    best: dict[fxlab.Node, int] = {}
    for node in gm.graph.nodes:
        inside = node.target is operator.add
        here = 1 if inside else 0
        for value in node.all_input_nodes:
            enters = inside and value.target is not operator.add
            here = max(here, best[value] + int(enters))
        best[node] = here
    return max(best.values())


@pytest.mark.parametrize("block", range(10))
def test_on_random_graphs_no_cycle_fewest_parts_same_numbers(block: int) -> None:
    """50 graphs each: 500 in all."""
    for seed in range(block * 50, block * 50 + 50):
        gm = random_dag(seed, 4 + seed % 27)
        partitioner = CapabilityBasedPartitioner(gm, SUMS, allows_single_node_partition=True)
        parts = partitioner.propose_partitions()
        assigned = [node for part in parts for node in part.nodes]
        supported = [n for n in gm.graph.nodes if n.target is operator.add]
        assert len(assigned) == len(set(assigned))
        assert set(assigned) == set(supported)
        below = reaches(gm.graph)
        for part in parts:  # no path leaves a part and comes back
            for node in part.nodes:
                for outside in below[node] - set(part.nodes):
                    assert not below[outside] & set(part.nodes)
        assert len(parts) == longest_alternation(gm)
        fused = partitioner.fuse_partitions(parts)
        fused.graph.lint()
        inputs = (torch.randn(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64))
        for a, b in zip(fused(*inputs), gm(*inputs), strict=True):
            assert torch.equal(a, b)


def test_it_never_makes_more_parts_than_torch_fx() -> None:
    from torch.fx.passes.infra import partitioner as theirs
    from torch.fx.passes.operator_support import create_op_support as torch_support

    support = torch_support(lambda modules, node: node.target is operator.add)
    for seed in range(40):
        gm = random_dag(seed, 25)
        g = torch.fx.Graph()
        env: dict = {}
        for node in gm.graph.nodes:
            args = torch.fx.node.map_aggregate(
                tuple(node.args), lambda a, env=env: env[a] if isinstance(a, fxlab.Node) else a
            )
            env[node] = g.create_node(node.op, node.target, args, name=node.name)
        torch_gm = torch.fx.GraphModule({}, g)
        other = theirs.CapabilityBasedPartitioner(torch_gm, support, True).propose_partitions()
        ours = CapabilityBasedPartitioner(gm, SUMS, True).propose_partitions()
        assert len(ours) <= len(other)


def test_without_horizontal_fusion_parts_are_connected_and_still_free_of_cycles() -> None:
    for seed in range(60):
        gm = random_dag(seed, 30)
        partitioner = CapabilityBasedPartitioner(gm, SUMS, True, skip_horizontal_fusion=True)
        parts = partitioner.propose_partitions()
        for part in parts:
            nodes = list(part.nodes)
            seen, todo = {nodes[0]}, [nodes[0]]
            while todo:
                node = todo.pop()
                for other in (*node.users, *node.all_input_nodes):
                    if other in part.nodes and other not in seen:
                        seen.add(other)
                        todo.append(other)
            assert seen == set(nodes)
        x = torch.randn(2)
        for a, b in zip(partitioner.fuse_partitions(parts)(x, x), gm(x, x), strict=True):
            assert torch.equal(a, b)


def test_every_node_left_out_has_a_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    gm = fxlab.symbolic_trace(model)
    support = OperatorSupport({nn.ReLU: None})
    partitioner = CapabilityBasedPartitioner(gm, support)
    fused = partitioner.partition_and_fuse()
    reasons = partitioner.reasons
    assert "not in the support table" in reasons["_0"]
    assert "its part has 1 computing nodes" in reasons["_1"]
    report = fused.meta["reports"]["partition"]
    assert set(report["reasons"]) == {"_0", "_1", "_2"}
    assert any(line.startswith("_1 left: supported, but alone") for line in report.kept)


def test_support_is_said_by_dtype_rank_predicate_and_name_and_can_be_combined() -> None:
    gm = fxlab.symbolic_trace(lambda x, i: torch.relu(x) + torch.neg(i))
    fxlab.passes.shape_prop(gm, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64))
    nodes = {n.name: n for n in gm.graph.nodes}
    table = OperatorSupport(
        {"torch.relu": ([[torch.float32]], {}), "torch.neg": ([[torch.float32]], {})}
    )
    assert table.is_node_supported({}, nodes["relu"])
    assert "argument 0 is torch.int64" in table.reason({}, nodes["neg"])
    assert "is not in" in table.reason({}, nodes["add"])
    floats = OpSupports.decline_if_input_dtype(torch.int64)
    assert floats.reason({}, nodes["neg"]) == "input i is torch.int64"
    flat = OpSupports.decline_if_rank_above(1)
    assert "2 dimensions" in flat.reason({}, nodes["relu"])
    named = OpSupports.decline_if_node_in_names({"add"})
    adds = create_op_support(lambda modules, node: node.target is operator.add)
    assert not (table & named).is_node_supported({}, nodes["add"])
    assert (table | adds).is_node_supported({}, nodes["add"])
    assert (~adds).is_node_supported({}, nodes["relu"])
    assert chain(table, floats).reason({}, nodes["relu"]) is None
    assert any_chain(table, named).reason({}, nodes["add"]) is not None
    assert get_node_target({}, nodes["relu"]) == "torch.relu"


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_subclass_of_the_support_table_decides_by_is_node_supported(fx: Any) -> None:
    """The way in which passes for torch.fx say what a device can do."""
    support = importlib.import_module(f"{fx.__name__}.passes.operator_support")
    partitioner = importlib.import_module(f"{fx.__name__}.passes.infra.partitioner")

    class Adds(support.OperatorSupport):
        def is_node_supported(self, submodules: Any, node: Any) -> bool:
            known = super().is_node_supported(submodules, node)
            return node.op == "call_function" and (known or node.target is operator.add)

    def parts(rules: Any) -> list[list[str]]:
        gm = fx.symbolic_trace(lambda a, b: torch.relu(a + b + a).neg().abs() + a)
        found = partitioner.CapabilityBasedPartitioner(
            gm, rules, allows_single_node_partition=True
        ).propose_partitions()
        return sorted(sorted(node.name for node in part.nodes) for part in found)

    adds = Adds({"torch.relu": None})
    assert parts(adds) == [["add", "add_1", "relu"], ["add_2"]]
    for both in (support.chain(adds, adds), support.any_chain(adds, Adds())):
        assert parts(both) == parts(adds)


def test_what_a_subclass_refuses_is_named() -> None:
    class Nothing(OperatorSupport):
        def is_node_supported(self, submodules: Any, node: Any) -> bool:
            return False

    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    partitioner = CapabilityBasedPartitioner(gm, Nothing({torch.relu: None}))
    assert partitioner.propose_partitions() == []
    assert partitioner.reasons["relu"] == "torch.relu is not supported"
    assert "not in the support table" in partitioner.reasons["add"]


def test_items_of_a_tuple_stay_with_the_node_that_makes_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.chunk(x, 2)
        return torch.relu(a) + torch.relu(b)

    gm = fxlab.symbolic_trace(program)
    everything_else = create_op_support(lambda modules, node: node.target is not torch.chunk)
    partitioner = CapabilityBasedPartitioner(gm, everything_else)
    (part,) = partitioner.propose_partitions()
    assert {n.name for n in part.nodes} == {"relu", "relu_1", "add"}
    assert "an item of chunk" in partitioner.reasons["getitem"]


def test_a_write_in_place_divides_parts() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y + 2
        y.mul_(3)
        return y + z

    gm = fxlab.symbolic_trace(program)
    fused = CapabilityBasedPartitioner(gm, SUMS, True).partition_and_fuse()
    assert [n.name for n in fused.graph.nodes][1:-1] == [
        "fused_0",
        "getitem",
        "getitem_1",
        "mul_",
        "fused_1",
    ]
    x = torch.randn(3)
    assert torch.equal(fused(x.clone()), program(x.clone()))


def test_small_parts_are_left_out_when_asked() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.sin(x + 1 + 2 + 3) + 4 + 5)
    partitioner = CapabilityBasedPartitioner(gm, SUMS, min_partition_size=3)
    assert [part.size() for part in partitioner.propose_partitions()] == [3]
    assert "at least 3 asked" in partitioner.reasons["add_3"]


def test_bookends_that_compute_nothing_are_taken_off() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(torch.t(x + 1) + 2).t() + 0)
    nodes = {n.name: n for n in gm.graph.nodes}
    part = Partition(0, [nodes["t"], nodes["add_1"], nodes["relu"]])
    CapabilityBasedPartitioner(
        gm, SUMS, non_compute_ops=["torch.t"]
    ).remove_bookend_non_compute_ops([part])
    assert list(part.nodes) == [nodes["add_1"], nodes["relu"]]


def test_parts_put_together_by_hand_into_a_cycle_are_refused() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.sin(x + 1) + 2)
    nodes = {n.name: n for n in gm.graph.nodes}
    part = Partition(0, [nodes["add"], nodes["add_1"]])
    with pytest.raises(RewriteError, match="cycle"):
        CapabilityBasedPartitioner(gm, SUMS).fuse_partitions([part])


def test_parameters_are_read_inside_the_part() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x + self.w + 1)

    model = Model()
    fused = CapabilityBasedPartitioner(fxlab.symbolic_trace(model), SUMS).partition_and_fuse()
    assert fused.fused_0.w is model.w
    assert torch.equal(fused(torch.ones(3)), model(torch.ones(3)))


@pytest.mark.parametrize(
    "fused", [("relu", "add", "sum_1", "add_1"), ("relu", "sum_1", "add_1"), ("add", "bn")]
)
def test_a_read_of_running_statistics_stays_behind_the_batch_norm_that_updates_them(fused):
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            y = torch.relu(x)
            z = self.bn(y)
            return z, self.bn.running_mean + 0 + y.sum()

    x = torch.rand(4, 3) + 5
    gm = fxlab.symbolic_trace(Reads().train())
    support = create_op_support(lambda modules, node: node.name in fused)
    partitioner = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
    result = partitioner.partition_and_fuse()
    torch.testing.assert_close(result(x), Reads().train()(x))


def test_a_batch_norm_stays_behind_what_writes_its_statistics():
    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            self.bn.running_mean.add_(torch.tanh(x).sum())
            return self.bn(torch.relu(x))

    x = torch.rand(4, 3)
    gm = fxlab.symbolic_trace(Writes().eval())
    support = create_op_support(lambda modules, node: node.name in ("relu", "bn"))
    result = CapabilityBasedPartitioner(gm, support).partition_and_fuse()
    torch.testing.assert_close(result(x), Writes().eval()(x))
