"""A split program computes what the whole one computes, writes in place included."""

from __future__ import annotations

import operator
import random

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.split_module import split_module as torch_split_module

import fxlab
from fxlab.core.errors import RewriteError
from fxlab.passes.split import Partition, split_by_tags, split_module, split_module_simple


class Linears(nn.Module):
    """torch.fx's own example: a parameter, a module called twice, methods with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.rand(3, 4))
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.linear(x + self.param).clamp(min=0.0, max=1.0)
        w = self.linear(y).clamp(min=0.0, max=1.0)
        return z + w


class Keywords(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * kwargs["scale"] + kwargs["shift"]


class Defaults(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0, *, shift: int = 1) -> torch.Tensor:
        return torch.relu(x) * scale + shift


class Sizes(nn.Module):
    """Numbers, sizes and tuples cross the borders."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        n = x.size(0)
        shape = x.shape
        halves = torch.chunk(x + n, 2, dim=1)
        return torch.cat(halves, dim=0).view(2 * n, -1) * shape[1], n


class Nested(nn.Module):
    """Paths that flatten to one name: "a.b_c" and "a_b.c"."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"b_c": nn.Linear(4, 4)})
        self.a_b = nn.ModuleDict({"c": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_b["c"](self.a["b_c"](x))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count + 0
        self.count.add_(1)
        return self.norm(x) + before + self.count


def _cuts(gm: fxlab.GraphModule, count: int, seed: int) -> dict[str, int]:
    """A random cut that never goes back: node name -> part."""
    names = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    pick = random.Random(seed)
    return dict(zip(names, sorted(pick.randrange(count) for _ in names), strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("model", "args", "kwargs"),
    [
        (Linears(), (torch.randn(3, 4), torch.randn(3, 4)), {}),
        (Keywords(), (torch.randn(3),), {"scale": torch.tensor(2.0), "shift": torch.tensor(1.0)}),
        (Defaults(), (torch.randn(3),), {}),
        (Sizes(), (torch.randn(2, 4),), {}),
        (Nested(), (torch.randn(2, 4),), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_split_in_three_gives_the_numbers_of_eager(
    model: nn.Module, args: tuple, kwargs: dict, seed: int
) -> None:
    gm = fxlab.symbolic_trace(model)
    cut = _cuts(gm, 3, seed)
    split = split_module(gm, model, lambda node: cut[node.name])
    torch.testing.assert_close(split(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=0)
    assert split.meta["partition_names"] == {f"submod_{part}" for part in set(cut.values())}


def test_parts_and_order_are_those_of_torch_fx() -> None:
    model = Linears()
    ours, theirs = fxlab.symbolic_trace(model), torch.fx.symbolic_trace(model)

    def by_turns() -> object:
        turn = iter(range(100))
        known: dict = {}
        return lambda node: known.setdefault(node, next(turn) % 3)

    a = split_module(ours, None, by_turns())
    b = torch_split_module(theirs, None, by_turns())
    assert [(n.op, n.name) for n in a.graph.nodes] == [(n.op, n.name) for n in b.graph.nodes]
    for name in ("submod_0", "submod_1", "submod_2"):
        left, right = getattr(a, name).graph, getattr(b, name).graph
        assert [(n.op, n.target) for n in left.nodes] == [(n.op, n.target) for n in right.nodes]


@pytest.mark.parametrize("option", ["keep_original_order", "keep_original_node_name"])
def test_options_keep_the_meaning(option: str) -> None:
    model, x = Linears(), torch.randn(3, 4)
    gm = fxlab.symbolic_trace(model)
    cut = _cuts(gm, 3, 1)
    split = split_module(gm, None, lambda n: cut[n.name], **{option: True})
    assert torch.equal(split(x, x), model(x, x))
    if option == "keep_original_node_name":
        inside = [n.name for p in sorted(split.meta["partition_names"])
                  for n in getattr(split, p).graph.nodes]  # fmt: skip
        assert {"add", "clamp_1", "add_1"} <= set(inside)


def test_inputs_can_be_numbered_parts_named_and_single_outputs_be_tuples() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1) * 2)
    names: dict[str, str] = {}
    split = split_module(
        gm, None, lambda n: int(n.name == "mul"), names, keep_original_input_name=False,
        partition_affix="pp", tuple_return=True,
    )  # fmt: skip
    assert split.meta["partition_names"] == {"submod_pp_0", "submod_pp_1"}
    assert next(iter(split.submod_pp_1.graph.nodes)).name == "arg_0"
    assert isinstance(split.submod_pp_0(torch.ones(2)), tuple)
    assert torch.equal(split(torch.ones(2)), torch.full((2,), 4.0))


def test_the_name_map_leads_back_to_the_original_modules() -> None:
    model = Nested()
    gm = fxlab.symbolic_trace(model)
    names: dict[str, str] = {}
    split = split_module(gm, None, lambda n: 0, names)
    assert sorted(names.values()) == ["a.b_c", "a_b.c"]
    for new, old in names.items():
        assert split.get_submodule(new) is model.get_submodule(old)


def _write_then_read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.relu(x)
    z = y + 1
    y.mul_(2)
    return y, z, y - 1


def _write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    row = y[0]
    total = y.sum()
    row.add_(1)
    return y * total


def _out_argument(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y.exp()
    torch.mul(x, 3, out=y)
    return y + z


def _setitem(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    before = y.sum()
    operator.setitem(y, 0, 7.0)
    return y + before


@pytest.mark.parametrize(
    "program", [_write_then_read, _write_through_a_view, _out_argument, _setitem]
)
def test_writes_in_place_keep_their_place_whatever_the_cut(program: object) -> None:
    """All cuts into two parts are tried: each gives eager's numbers or names a cycle."""
    gm = fxlab.symbolic_trace(program)
    names = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    x = torch.randn(3, 3)
    expected = program(x.clone())
    right = refused = 0
    for bits in range(2 ** len(names)):
        cut = {name: bits >> i & 1 for i, name in enumerate(names)}
        try:
            split = split_module(gm, None, lambda n, cut=cut: cut[n.name])
        except RewriteError as error:
            assert "cycle" in str(error)
            refused += 1
            continue
        torch.testing.assert_close(split(x.clone()), expected, rtol=0, atol=0)
        right += 1
    assert right >= len(names)  # at least the cuts that never go back
    assert refused > 0


def test_a_part_that_only_writes_is_called_between_its_readers() -> None:
    gm = fxlab.symbolic_trace(_write_then_read)
    place = {"relu": 0, "add": 1, "mul_": 2, "sub": 3}
    split = split_module(gm, None, lambda n: place[n.name])
    called = [n.target for n in split.graph.nodes if n.op == "call_module"]
    assert called == ["submod_0", "submod_1", "submod_2", "submod_3"]


def test_buffers_and_running_statistics_are_shared_with_the_original() -> None:
    model, x = Buffers(), torch.randn(5, 4)
    twin = Buffers()
    gm = fxlab.symbolic_trace(model)
    cut = _cuts(gm, 3, 0)
    split = split_module(gm, None, lambda n: cut[n.name])
    for _ in range(2):
        assert torch.equal(split(x), twin(x))
    assert model.count == 2
    assert torch.equal(model.norm.running_mean, twin.norm.running_mean)


def test_random_numbers_are_drawn_in_the_order_of_the_whole() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 4), nn.Dropout())
    gm = fxlab.symbolic_trace(model)
    split = split_module(gm, None, lambda n: n.name)
    x = torch.randn(3, 4)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(split(x), expected)


def test_regions_are_opened_in_each_part_that_stood_in_them() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        with torch.no_grad():
            a = y * 2
            b = a * w
        return y + b

    gm = fxlab.symbolic_trace(program)
    order = {"mul": 0, "mul_1": 0, "mul_2": 1, "add": 1}
    split = split_module(gm, None, lambda n: order.get(n.name, 0))
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(program(x, w).sum(), w)
    assert torch.equal(torch.autograd.grad(split(x, w).sum(), w)[0], expected[0])
    assert torch.is_grad_enabled()


def test_a_program_without_operations_is_returned_as_it_is() -> None:
    gm = fxlab.symbolic_trace(nn.Identity())
    empty = fxlab.GraphModule({}, fxlab.Graph())
    assert empty is not None
    g = fxlab.Graph()
    g.output(g.placeholder("x"))
    nothing = fxlab.GraphModule({}, g)
    split = split_module(nothing, None, lambda n: 0)
    assert torch.equal(split(torch.ones(2)), torch.ones(2))
    assert split_module(gm, None, lambda n: 0)(3) == 3


def test_a_cycle_names_both_parts_the_value_and_the_users_line() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(torch.sin(x) + 1) * 2)
    parts = {"sin": 0, "add": 1, "relu": 0, "mul": 1}
    with pytest.raises(RewriteError, match="cycle exists between partitions") as caught:
        split_module(gm, None, lambda n: parts[n.name])
    text = str(caught.value)
    assert "submod_0" in text
    assert "submod_1" in text
    assert "test_split.py" in text
    assert isinstance(caught.value, RuntimeError)


def test_the_original_is_left_untouched() -> None:
    gm = fxlab.symbolic_trace(Linears())
    before, version = str(gm.graph), gm.graph.version
    split_module(gm, None, lambda n: 0)
    assert (str(gm.graph), gm.graph.version) == (before, version)


def test_the_report_counts_the_bytes_that_cross_each_border() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1) * 2)
    fxlab.passes.shape_prop(gm, torch.ones(5, 3))
    split = split_module(gm, None, lambda n: int(n.name == "mul"))
    report = split.meta["reports"]["split_module"]
    assert report["parts"]["submod_1"]["inputs"] == {"relu": 60}
    crossing = {"value": "relu", "from": "submod_0", "to": "submod_1", "bytes": 60}
    assert crossing in report["boundaries"]


def test_nodes_of_the_parts_descend_from_the_original_nodes() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1))
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    split = split_module(gm, None, lambda n: 0)
    copy = next(n for n in split.submod_0.graph.nodes if n.name == "relu")
    assert copy.meta["from"][0]["id"] == relu.id
    assert copy.meta["source"] == relu.meta["source"]
    assert copy.meta["made_by"] == "split_module"


def test_train_and_eval_reach_the_modules_inside_the_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).eval()
    gm = fxlab.symbolic_trace(model)
    split = split_module(gm, None, lambda n: n.name)
    x = torch.randn(2, 4)
    assert torch.equal(split(x), model(x))
    split.train()
    assert model[1].training


def test_tags_become_the_names_and_the_order_of_the_parts() -> None:
    model = Linears()
    gm = fxlab.symbolic_trace(model)
    for node in gm.graph.nodes:
        node.tag = "second" if node.name in ("linear_1", "clamp_1", "add_1") else "first"
    split, names = split_by_tags(gm, ["first", "second"], return_fqn_mapping=True)
    x = torch.randn(3, 4)
    assert torch.equal(split(x, x), model(x, x))
    assert [n.name for n in split.graph.nodes] == ["x", "y", "first", "second", "output"]
    assert names["param"] == "first.param"
    assert split.get_submodule(names["linear"]) is model.linear


def test_a_missing_tag_and_a_wrong_order_of_tags_are_named() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1))
    with pytest.raises(RewriteError, match="no tag"):
        split_by_tags(gm, ["only"])
    for node in gm.graph.nodes:
        node.tag = "late" if node.name == "relu" else "early"
    with pytest.raises(RewriteError, match="'early'"):
        split_by_tags(gm, ["late", "early"])


def test_the_simple_form_takes_a_ready_assignment() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1))
    assignment = {n: 0 for n in gm.graph.nodes if n.op == "call_function"}
    assert split_module_simple(gm, assignment)(torch.ones(1)) == 2
    assert fxlab.passes.split_module.Partition is Partition


def test_the_time_grows_with_the_number_of_nodes_only() -> None:
    """Counted in calls of the edit primitive, which no other process can disturb."""
    edits = []
    for count in (500, 2000):
        g = fxlab.Graph()
        value = g.placeholder("x")
        for _ in range(count):
            value = g.call_function(operator.add, (value, 1))
        g.output(value)
        gm = fxlab.GraphModule({}, g)
        place = {n: i // 50 for i, n in enumerate(g.nodes)}
        split = split_module(gm, None, place.__getitem__)
        edits.append(
            split.graph.version
            + sum(getattr(split, p).graph.version for p in split.meta["partition_names"])
        )
    assert edits[1] <= 4.5 * edits[0]


def touch(x: torch.Tensor) -> None:
    x.zero_()


def test_unknown_code_that_may_write_its_argument_is_never_run_in_another_order() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        touch(y)
        a = y * 2
        return a + y

    tracer = fxlab.Tracer(autowrap_functions=(touch,))
    gm = fxlab.GraphModule(nn.Module(), tracer.trace(program))
    parts = {"mul": 0, "touch": 1, "mul_1": 2, "add": 1}
    with pytest.raises(RewriteError, match="touch"):
        split_module(gm, gm, lambda node: parts[node.name])
    in_order = split_module(gm, gm, lambda node: {**parts, "add": 2}[node.name])
    assert torch.equal(in_order(torch.ones(2)), torch.zeros(2))
