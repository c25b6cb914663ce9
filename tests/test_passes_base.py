"""Reports, provenance of passes, and the manager that stops at the first wrong one."""

from __future__ import annotations

import json
import operator
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import MLP, FusionCases
from fxlab.models.small import randomize_batch_norms
from fxlab.passes import (
    PassBase,
    PassError,
    PassManager,
    PassResult,
    as_pass,
    compare,
    const_fold,
    cse,
    dce,
    fuse_conv_bn,
    report,
)
from fxlab.passes.base import copy_sharing_tensors, undisturbed
from fxlab.passes.manager import this_before_that_pass_constraint
from fxlab.passes.quantize import sensitivity

torch.set_num_threads(1)
X = torch.randn(2, 4, 8, 8)


def traced():
    return fxlab.symbolic_trace(randomize_batch_norms(FusionCases()).eval())


@as_pass
def relu_to_gelu(gm):
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (torch.relu, F.relu):
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.gelu, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)


def wrong_fold(gm):
    """Fold batch norm by scale alone: well formed, and wrong."""
    for bn in list(gm.graph.nodes):
        module = gm.get_submodule(bn.target) if bn.op == "call_module" else None
        if isinstance(module, nn.BatchNorm2d) and len(bn.all_input_nodes[0].users) == 1:
            bn.replace_all_uses_with(bn.all_input_nodes[0])
            gm.graph.erase_node(bn)


def broken(gm):
    gm.graph.output_node().prepend(next(iter(gm.graph.nodes)))  # the input after its readers


def raises(gm):
    raise KeyError("no such thing")


def writes(gm):
    with torch.no_grad():
        next(gm.parameters()).add_(1)


def test_a_report_is_plain_data_and_reads_as_text():
    gm = fxlab.symbolic_trace(MLP())
    made = report(gm, "mine", ["a changed"], ["b kept: it is shared"], speed=2.0)
    assert gm.meta["reports"]["mine"] is made
    assert json.loads(json.dumps(made))["kept"] == ["b kept: it is shared"]
    assert str(made).splitlines()[-1].strip() == "left alone: b kept: it is shared"


def test_nodes_of_a_pass_carry_its_name():
    gm = fxlab.symbolic_trace(MLP())
    relu_to_gelu(gm)
    made = gm.graph.find_nodes(op="call_function", target=F.gelu)
    assert made
    assert all(node.meta["made_by"] == "relu_to_gelu" for node in made)


def test_a_copy_shares_tensors_and_nothing_else():
    gm = traced()
    twin = copy_sharing_tensors(gm)
    pairs = zip(gm.named_parameters(), twin.named_parameters(), strict=True)
    assert all(a is b and name == other for (name, a), (other, b) in pairs)
    fuse_conv_bn(twin)
    assert len(twin.graph.nodes) < len(gm.graph.nodes)


def test_the_manager_runs_all_passes_on_a_copy_and_reports_cost_and_difference():
    gm = traced()
    nodes = len(gm.graph.nodes)
    manager = PassManager([fuse_conv_bn, cse, const_fold, dce], inputs=(X,))
    result = manager(gm)
    assert isinstance(result, PassResult)
    assert result.modified
    assert len(gm.graph.nodes) == nodes
    first = manager.rows[0]
    assert (first.name, first.nodes_before) == ("fuse_conv_bn", nodes)
    assert first.nodes_after == len(result.graph_module.graph.nodes)
    assert first.cost_after.bytes_read < first.cost_before.bytes_read
    assert first.difference.precision == "float64"
    assert first.difference.max_rel < 1e-5
    assert not manager.rows[1].modified
    assert "fuse_conv_bn" in str(manager)


def test_the_first_pass_that_changes_the_numbers_is_named_and_the_graph_before_it_kept():
    manager = PassManager([fuse_conv_bn, wrong_fold, dce], inputs=(X,))
    with pytest.raises(PassError) as caught:
        manager(traced())
    error = caught.value
    assert error.pass_name == "wrong_fold"
    assert "not the input program's" in str(error)
    assert len(error.graph_module.graph.nodes) == error.rows[0].nodes_after
    assert error.graph_module(X).shape == X.shape
    assert [row.name for row in error.rows] == ["fuse_conv_bn", "wrong_fold"]


@pytest.mark.parametrize(
    ("pass_", "word"), [(broken, "LintError"), (raises, "no such thing"), (writes, "wrote into")]
)
def test_a_pass_that_breaks_something_is_named(pass_, word):
    with pytest.raises(PassError, match=word) as caught:
        PassManager([dce, pass_])(traced())
    assert caught.value.pass_name == pass_.__name__
    caught.value.graph_module.graph.lint()


def test_a_failed_check_can_be_let_pass_and_is_still_in_the_rows():
    manager = PassManager([wrong_fold], inputs=(X,), suppress_check_failures=True)
    assert manager(traced()).modified
    assert manager.rows[0].difference.max_rel > 1e-3


def test_no_pass_is_blamed_for_the_numbers_of_one_before():
    @fxlab.passes.as_pass(min_sqnr_db=10.0)
    def coarse(gm):
        "Edit in place."
        conv = gm.get_submodule(gm.graph.find_nodes(op="call_module")[0].target)
        conv.weight = nn.Parameter((conv.weight * 64).round() / 64)

    manager = PassManager([coarse, dce], inputs=(X,))
    manager(traced())
    assert [row.difference.max_rel > 1e-4 for row in manager.rows] == [True, False]
    manager = PassManager([wrong_fold, dce], inputs=(X,), suppress_check_failures=True)
    manager(traced())
    assert [row.difference.max_rel > 1e-4 for row in manager.rows] == [True, False]
    with pytest.raises(PassError) as caught:
        PassManager([coarse, wrong_fold], inputs=(X,))(traced())
    assert caught.value.pass_name == "wrong_fold"


def test_passes_may_return_none_a_module_or_a_result():
    class ClassPass(PassBase):
        def call(self, graph_module):
            dce(graph_module)
            return PassResult(graph_module, False)

    def new_module(gm):
        return fxlab.GraphModule(gm, gm.graph)

    manager = PassManager([relu_to_gelu, new_module, ClassPass()])
    assert manager(fxlab.symbolic_trace(MLP())).modified
    assert [row.modified for row in manager.rows] == [True, True, False]
    with pytest.raises(PassError, match="returned a int"):
        PassManager([lambda gm: 3])(traced())


def test_steps_repeat_until_nothing_changes():
    calls = []

    def once(gm):
        calls.append(1)
        if len(calls) == 1:
            relu_to_gelu(gm)

    PassManager([once], steps=5)(fxlab.symbolic_trace(MLP()))
    assert len(calls) == 2


def test_constraints_order_the_list_or_say_that_they_cannot():
    manager = PassManager([dce, cse], [this_before_that_pass_constraint(cse, dce)])
    with pytest.raises(RuntimeError, match="dce must not run before cse"):
        manager.validate_constraints()
    manager.solve_constraints()
    assert manager.passes == [cse, dce]
    manager.add_constraint(this_before_that_pass_constraint(dce, cse))
    with pytest.raises(RuntimeError, match="circle"):
        manager.solve_constraints()


def test_checks_of_the_users_own_run_after_each_pass():
    seen = []
    manager = PassManager([dce, cse], run_checks_after_each_pass=True)
    manager.add_checks(lambda module: seen.append(module))
    manager(fxlab.symbolic_trace(MLP()))
    assert len(seen) == 3
    with pytest.raises(TypeError, match="one argument"):
        manager.add_checks(lambda a, b: None)


def test_compare_sees_structure_nan_and_complex():
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    assert compare(nan, nan).max_abs == 0
    assert compare(nan, torch.ones(3)).max_abs == float("inf")
    assert not compare([torch.ones(2)], (torch.ones(2),)).same_structure
    assert not compare(torch.ones(2), torch.ones(3)).same_structure
    assert compare((1, "a"), (1, "a")).same_structure
    assert compare(torch.tensor([1j]), torch.tensor([-1j])).max_abs == 2
    assert compare(torch.ones(4), torch.ones(4) * 1.1).sqnr_db == pytest.approx(20, abs=0.01)


def test_no_import_of_a_submodule_hides_a_function():
    code = """
import importlib, pathlib, fxlab, fxlab.passes
folder = pathlib.Path(fxlab.passes.__file__).parent
for file in sorted(folder.glob("*.py")):
    if file.stem != "__init__":
        importlib.import_module(f"fxlab.passes.{file.stem}")
for name in ("shape_prop", "cost", "amp", "profile", "dce", "cse", "const_fold", "fuse_conv_bn"):
    assert callable(getattr(fxlab.passes, name)), name
from fxlab.passes.cost import Cost
import torch
gm = fxlab.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
assert isinstance(fxlab.passes.cost(gm, torch.ones(1, 2)), Cost)
assert fxlab.passes.shape_prop.ShapeProp
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Counts(nn.Module):
    """Writes into its input, and in place into a buffer, through .data, and through a module."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("m", torch.zeros(1))

    def forward(self, x):
        x.add_(1)
        self.n.add_(1)
        self.m.data.add_(1)
        return self.norm(self.layer(x)) * self.n


LOOKS = {
    "shape_prop": lambda gm, x: fxlab.passes.shape_prop(gm, x),
    "cost": lambda gm, x: fxlab.passes.cost(gm, x),
    "profile": lambda gm, x: fxlab.passes.profile(gm, x, repeats=2, warmup=0),
    "amp": lambda gm, x: fxlab.passes.amp(gm, inputs=x),
    "quantize_static": lambda gm, x: fxlab.passes.quantize_static(gm, [x]),
    "sensitivity": lambda gm, x: sensitivity(gm, [x]),
    "optimize_for_inference": lambda gm, x: fxlab.passes.optimize_for_inference(gm, x, repeats=1),
    "pipeline_stages": lambda gm, x: fxlab.passes.pipeline_stages(gm, [x], 2),
    "PassManager": lambda gm, x: fxlab.passes.PassManager([dce], inputs=(x,))(gm),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("training", [False, True])
def test_who_runs_a_program_to_look_at_it_leaves_its_state_and_the_inputs(look, training):
    model = Counts().train(training)
    if training and look in ("quantize_static", "sensitivity"):
        return  # they ask for eval mode
    if look == "PassManager":  # its run in float64 makes no copy of what is float64 already
        model.double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.zeros(4, 8, dtype=model.layer.weight.dtype)
    LOOKS[look](fxlab.symbolic_trace(model), x)
    assert not x.any()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_program_without_effects_is_looked_at_on_the_inputs_themselves():
    x = torch.ones(2)
    with undisturbed(fxlab.symbolic_trace(nn.Linear(2, 2)), (x,)) as (given,):
        assert given is x


def test_state_is_put_back_after_an_error_too():
    model, x = Counts().eval(), torch.ones(2, 8, requires_grad=True)
    gm = fxlab.symbolic_trace(model)
    with pytest.raises(ZeroDivisionError), undisturbed(gm, (x,)) as (given,), torch.no_grad():
        assert given.requires_grad
        gm(given)
        assert model.n == 1
        raise ZeroDivisionError
    assert model.n == 0 and model.m == 0 and x.max() == 1


def forgets_eps(gm):
    for module in gm.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.0
    fuse_conv_bn(gm)


def test_the_manager_tells_a_forgotten_eps_from_rounding():
    gm = fxlab.symbolic_trace(randomize_batch_norms(fxlab.models.resnet18()).eval())
    x = torch.randn(1, 3, 32, 32)
    assert PassManager([fuse_conv_bn], inputs=(x,))(gm).modified
    with pytest.raises(PassError, match="forgets_eps"):
        PassManager([forgets_eps], inputs=(x,))(gm)


def ends_in(method):
    def ends(gm):
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_method(method, (output.args[0],)),)

    return ends


@pytest.mark.parametrize(("method", "type_"), [("double", "f64"), ("half", "f16")])
def test_the_manager_refuses_another_dtype_unless_the_pass_promises_a_ratio(method, type_):
    gm, x = fxlab.symbolic_trace(lambda x: torch.relu(x)), torch.ones(3)
    with pytest.raises(PassError, match=rf"it returns {type_}\[3\] where f32\[3\] was returned"):
        PassManager([ends_in(method)], inputs=(x,))(gm)
    assert PassManager([as_pass(min_sqnr_db=20.0)(ends_in(method))], inputs=(x,))(gm).modified


def test_the_manager_refuses_integers_for_floats_of_the_same_values():
    def product(gm):
        node = next(n for n in gm.graph.nodes if n.op == "call_function")
        node.target, node.args = operator.mul, (node.args[0], node.args[0])

    gm = fxlab.symbolic_trace(lambda x: x**2.0)
    with pytest.raises(PassError, match=r"it returns i64\[3\] where f32\[3\] was returned"):
        PassManager([product], inputs=(torch.arange(3),))(gm)
