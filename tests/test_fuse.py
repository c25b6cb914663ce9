"""Folding batch norm: what is folded is right, what is not is left alone for a stated reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import FusionCases, LearningToPaintActor, resnet50
from fxlab.models.small import randomize_batch_norms
from fxlab.passes import fold_conv_bn, fuse_conv_bn, shape_prop

torch.set_num_threads(1)


def eval_double(model: nn.Module) -> nn.Module:
    return randomize_batch_norms(model).double().eval()


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_resnet50_goes_from_177_to_124_nodes_and_equals_itself_in_float64():
    model = eval_double(resnet50())
    gm = fxlab.symbolic_trace(model)
    assert len(gm.graph.nodes) == 177
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = gm(x)
    fuse_conv_bn(gm)
    assert len(gm.graph.nodes) == 124
    assert not any(isinstance(m, nn.BatchNorm2d) for m in gm.modules())
    assert_same(gm(x), expected)
    report = gm.meta["reports"]["fuse_conv_bn"]
    assert len(report.changed) == 53
    assert report.kept == []


def test_the_users_model_is_left_exactly_as_it_was():
    model = eval_double(LearningToPaintActor())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = {name: id(module) for name, module in model.named_modules()}
    x = torch.randn(1, 9, 128, 128, dtype=torch.float64)
    expected = model(x)
    gm = fuse_conv_bn(fxlab.symbolic_trace(model))
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), expected)
    assert_same(gm(x), expected)


def test_each_case_of_the_lecture_is_folded_or_left_alone_as_the_model_says():
    model = eval_double(FusionCases())
    gm = fxlab.symbolic_trace(model)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    expected = gm(x)
    fuse_conv_bn(gm)
    left = {n.target for n in gm.graph.nodes if n.op == "call_module"} & {
        *model.folded,
        *model.left_alone,
    }
    assert left == set(model.left_alone) - {"functional_bn"}
    kept = gm.meta["reports"]["fuse_conv_bn"].kept
    assert len(kept) >= len(model.left_alone)
    assert_same(gm(x), expected)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_algebra_holds_for_every_kind_of_convolution(dim, groups, transposed, affine, bias):
    name = f"Conv{'Transpose' if transposed else ''}{dim}d"
    conv = getattr(nn, name)(4, 6, 3, groups=groups, bias=bias).double()
    bn = getattr(nn, f"BatchNorm{dim}d")(6, affine=affine, eps=1e-3)
    bn = eval_double(nn.Sequential(bn))[0]
    x = torch.randn(2, 4, *[5] * dim, dtype=torch.float64)
    assert_same(fold_conv_bn(conv, bn)(x), bn(conv(x)))


def test_half_precision_weights_are_rounded_once():
    conv, bn = nn.Conv2d(3, 8, 3).to(torch.bfloat16), nn.BatchNorm2d(8)
    randomize_batch_norms(bn)
    folded = fold_conv_bn(conv, bn.eval())
    s = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    exact = conv.weight.float() * s.reshape(-1, 1, 1, 1)
    assert torch.equal(folded.weight, exact.to(torch.bfloat16))


def test_linear_is_folded_when_its_output_is_known_to_be_a_matrix():
    model = eval_double(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    x = torch.randn(3, 4, dtype=torch.float64)
    gm = fuse_conv_bn(fxlab.symbolic_trace(model))
    assert "run shape_prop first" in gm.meta["reports"]["fuse_conv_bn"].kept[0]
    gm = fuse_conv_bn(shape_prop(fxlab.symbolic_trace(model), x))
    assert len(gm.graph.nodes) == 3
    assert_same(gm(x), model(x))


def test_linear_before_a_norm_over_another_dimension_is_left_alone():
    model = eval_double(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    x = torch.randn(3, 6, 4, dtype=torch.float64)  # the norm is over the 6 tokens
    gm = fuse_conv_bn(shape_prop(fxlab.symbolic_trace(model), x))
    assert len(gm.graph.nodes) == 4
    assert torch.equal(gm(x), model(x))


class Pair(nn.Module):
    """A convolution and a batch norm, with room for one thing between or around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x))


class ReadsWeight(Pair):
    def forward(self, x):
        return self.bn(self.conv(x)) + self.conv.weight.sum()


class Functional(Pair):
    def forward(self, x):
        return self.bn(F.conv2d(x, self.conv.weight))


class Twice(Pair):
    def forward(self, x):
        return self.bn(self.conv(self.bn(self.conv(x))))


class CustomConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) ** 2


CustomConv.__module__ = "torch.nn.modules.conv"  # so that it is a leaf


class SquaredConv(Pair):
    def __init__(self):
        super().__init__()
        self.conv = CustomConv(3, 3, 1)


class Region(Pair):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(x)
        return self.bn(x)


REASONS = [
    (ReadsWeight, "reads the weights of conv directly"),
    (Functional, "not a module whose weights can be replaced"),
    (Twice, "called 2 times"),
    (SquaredConv, "its input conv is a CustomConv"),
    (Region, "border of a with block"),
]


@pytest.mark.parametrize(("kind", "reason"), REASONS)
def test_what_cannot_be_folded_is_left_alone_with_its_reason(kind, reason):
    model = eval_double(kind())
    gm = fxlab.symbolic_trace(model)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected = gm(x)
    fuse_conv_bn(gm)
    assert any(reason in sentence for sentence in gm.meta["reports"]["fuse_conv_bn"].kept)
    assert gm.meta["reports"]["fuse_conv_bn"].changed == []
    assert torch.equal(gm(x), expected)


def test_hooks_keep_a_pair_apart():
    model = eval_double(Pair())
    seen = []
    gm = fxlab.symbolic_trace(model)
    gm.conv.register_forward_hook(lambda module, args, output: seen.append(output))
    fuse_conv_bn(gm)
    gm(torch.ones(1, 3, 4, 4, dtype=torch.float64))
    assert len(seen) == 1
    assert "hooks" in gm.meta["reports"]["fuse_conv_bn"].kept[0]


def test_in_train_mode_nothing_is_folded():
    gm = fuse_conv_bn(fxlab.symbolic_trace(Pair().train()))
    assert "train mode" in gm.meta["reports"]["fuse_conv_bn"].kept[0]
    assert len(gm.graph.nodes) == 4


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.ReLU())])
def test_a_graph_without_batch_norm_says_so(model):
    gm = fuse_conv_bn(fxlab.symbolic_trace(model.eval()))
    assert gm.meta["reports"]["fuse_conv_bn"].kept == ["there is no batch norm in this graph"]


def test_each_pair_is_edited_as_module_reroute_erase():
    gm = fxlab.symbolic_trace(eval_double(Pair()))
    kinds = []
    gm.graph.add_listener(lambda kind, *rest: kinds.append(kind))
    fuse_conv_bn(gm)
    assert kinds == ["module", "reroute", "erase", "module"]


def test_a_fused_module_still_copies_and_folds_again_to_itself():
    gm = fuse_conv_bn(fxlab.symbolic_trace(eval_double(resnet50())))
    twin = copy.deepcopy(gm)
    fuse_conv_bn(twin)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(twin(x), gm(x))


def test_a_batch_norm_whose_statistics_the_graph_writes_is_kept():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            self.bn.running_mean.add_(1)
            return self.bn(self.conv(x))

    model, x = Writes().eval(), torch.randn(1, 3, 2, 2)
    expected = copy.deepcopy(model)(x)
    gm = fuse_conv_bn(fxlab.symbolic_trace(model))
    torch.testing.assert_close(gm(x), expected)
    assert "reads the state of bn" in gm.meta["reports"]["fuse_conv_bn"].kept[0]


def test_a_batch_norm_of_another_width_is_refused():
    with pytest.raises(ValueError, match="has 5 channels, the layer gives 4"):
        fold_conv_bn(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5))
