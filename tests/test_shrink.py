"""shrink: the smallest program on which a pass still breaks, and its script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxlab
from fxlab.explorer.shrink import shrink
from fxlab.models import resnet18
from fxlab.passes import fuse_conv_bn


def drops_downsample_norm(gm):
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and node.target.endswith("downsample.1"):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def raises_at_relu(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            raise KeyError("relu")


def no_output_above_one(before, after, inputs):
    assert float(after(*inputs).max()) <= 1, "above one"


def resnet():
    torch.manual_seed(0)
    model = resnet18().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(2.0)
    return fxlab.symbolic_trace(model)


def test_a_planted_bug_in_69_operations_is_one_operation_and_a_script_that_fails(tmp_path):
    gm = resnet()
    code = gm.code
    found = fxlab.shrink(gm, drops_downsample_norm, inputs=(torch.randn(1, 3, 32, 32),))
    assert (found.before, found.after) == (69, 1)
    assert gm.code == code
    assert "drops_downsample_norm breaks on 1 of 69 operations" in str(found)
    path = found.save(tmp_path / "bug.py")
    ran = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(fxlab.__file__).parents[1])},
    )
    assert ran.returncode == 1
    assert "Tensor-likes are not close" in ran.stderr


def test_a_pass_that_raises_is_shrunk_to_the_node_it_raises_at():
    gm = fxlab.symbolic_trace(lambda x, y: (torch.relu(x.cos() + 1).sin() * y).tan())
    found = fxlab.shrink(gm, raises_at_relu, inputs=(torch.ones(2), torch.ones(2)))
    assert [node.name for node in found.gm.graph.nodes if node.op != "output"][-1] == "relu"
    assert found.after == 1
    assert found.failure == "KeyError: 'relu'"


def test_a_check_of_ones_own_may_look_at_before_after_and_inputs():
    def scales(gm):
        for node in gm.graph.nodes:
            if node.target is torch.sigmoid:
                node.target = torch.exp

    gm = fxlab.symbolic_trace(lambda x: torch.sigmoid(torch.sin(x) * 2) - 0.0)
    found = fxlab.shrink(gm, scales, no_output_above_one, (torch.ones(3),))
    assert found.after == 1
    assert found.failure == "the check: above one"


def test_a_pass_that_is_right_is_refused():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(fxlab.ExerciseError, match="does not break"):
        fxlab.shrink(gm, fxlab.passes.dce, inputs=(torch.ones(2),))


def test_a_lambda_cannot_be_written_into_a_script(tmp_path):
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    found = fxlab.shrink(gm, lambda gm: raises_at_relu(gm), inputs=(torch.ones(2),))
    with pytest.raises(fxlab.RewriteError, match="lambda"):
        found.save(tmp_path / "bug.py")


def test_large_weights_go_to_a_file_beside_the_script(tmp_path):
    def breaks(gm):
        output = gm.graph.output_node()
        linear = output.args[0]
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(torch.neg, (linear,)),)

    gm = fxlab.symbolic_trace(nn.Linear(400, 400))
    found = fxlab.shrink(gm, breaks, inputs=(torch.ones(1, 400),))
    found.save(tmp_path / "bug.py")
    assert (tmp_path / "bug.pt").exists()
    assert (tmp_path / "bug.py").stat().st_size < 10_000


def merges_without_a_look_at_keywords(gm):
    seen = {}
    for node in gm.graph.nodes:
        if node.op == "call_method":
            first = seen.setdefault((node.target, node.args), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def test_two_values_that_meet_further_down_are_returned_side_by_side():
    def program(x):
        y = torch.relu(x)
        rows, columns = torch.sin(y.amax(dim=1)), torch.sin(y.amax(dim=2))
        return torch.sigmoid(torch.cos(rows) + torch.cos(columns))

    gm = fxlab.symbolic_trace(program)
    x = torch.randn(2, 5, 5)
    found = fxlab.shrink(gm, merges_without_a_look_at_keywords, inputs=(x,))
    computed = [node.name for node in found.gm.graph.nodes if node.op == "call_method"]
    assert found.after == 2
    assert computed == ["amax", "amax_1"]


def test_a_forgotten_eps_and_another_dtype_are_found_as_a_recording_finds_them():
    def forgets_eps(gm):
        for module in gm.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 0.0
        fuse_conv_bn(gm)

    def ends_in_double(gm):
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_method("double", (output.args[0],)),)

    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()]
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for module in model[1::3]:
            module.running_var.fill_(0.1)
    gm = fxlab.symbolic_trace(model)
    x = torch.randn(1, 3, 16, 16)
    found = shrink(gm, forgets_eps, inputs=(x,))
    assert found.after <= 2
    assert "where 1e-5 is allowed" in found.failure
    assert "it returns f64" in shrink(gm, ends_in_double, inputs=(x,)).failure
    with pytest.raises(fxlab.ExerciseError):
        shrink(gm, fuse_conv_bn, inputs=(x,))
