"""optimize_for_inference: right everywhere, and never slower than what it was given to beat."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import DeepRecommender, LearningToPaintActor, resnet18
from fxlab.models.small import randomize_batch_norms
from fxlab.passes import cost, optimize_for_inference, profile, remove_dropout, shape_prop
from fxlab.passes import optimize_for_inference as optimize
from fxlab.passes.base import copy_sharing_tensors
from fxlab.passes.convolutions import WinogradConv2d
from fxlab.passes.optimize import (
    PackedConv2d,
    _groups,
    _keep_layout_inside,
    _write_into_dead_values,
)

torch.set_num_threads(1)


def packed(model: nn.Module, x: torch.Tensor, way: str = "packed") -> fxlab.GraphModule:
    """Return ``model`` with every group packed, in ``way`` if it can, whatever is faster here."""
    gm = shape_prop(copy_sharing_tensors(fxlab.symbolic_trace(model)), x)
    for group in _groups(gm, []):
        group.replace(gm, way if way in group.kernels() else "packed")
    _write_into_dead_values(gm)
    _keep_layout_inside(gm)
    gm.graph.lint()
    return gm


def kernels(gm: fxlab.GraphModule) -> list[PackedConv2d]:
    return [m for m in gm.modules() if isinstance(m, PackedConv2d)]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_resnet18_keeps_its_numbers_and_loses_its_norms():
    model, x = randomize_batch_norms(resnet18()).eval(), torch.randn(2, 3, 64, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gm = optimize_for_inference(model, x, repeats=1)
    with torch.no_grad():
        out, expected = gm(x), model(x)
    assert close(out, expected)
    assert out.stride() == expected.stride()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in gm.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    report = gm.meta["reports"]["optimize_for_inference"]
    assert {"seconds as given", "seconds folded", "seconds packed"} <= report.keys()


@pytest.mark.parametrize("batch", [1, 3])
def test_packed_resnet18_works_for_other_batches_and_never_touches_its_input(batch):
    model = randomize_batch_norms(resnet18()).eval()
    gm = packed(model, torch.randn(2, 3, 64, 64))
    x = torch.randn(batch, 3, 64, 64)
    twin = x.clone()
    with torch.no_grad():
        first, second = gm(x), gm(x)
    assert torch.equal(x, twin)
    assert torch.equal(first, second)
    with torch.no_grad():
        assert close(first, model(twin))


def test_residual_additions_become_part_of_the_kernel_and_reuse_dead_memory():
    gm = packed(randomize_batch_norms(fold(resnet18())).eval(), torch.randn(1, 3, 64, 64))
    adds = [k for k in kernels(gm) if k.add]
    assert len(adds) == 8
    assert all(k.inplace for k in adds[1:])
    assert not gm.graph.find_nodes(op="call_function", target=operator.iadd)


def fold(model: nn.Module) -> nn.Module:
    from fxlab.passes import fuse_conv_bn

    return fuse_conv_bn(fxlab.symbolic_trace(model.eval()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)


class AddsInput(Block):
    def forward(self, x):
        return F.relu(self.a(x) + x)


class ReadsSumTwice(Block):
    def forward(self, x):
        y = torch.relu(x)
        z = self.a(y) + y
        return z, y


class ViewOfOther(Block):
    def forward(self, x):
        y = torch.relu(self.b(x))
        flat = y.flatten(1)
        z = self.a(x) + y
        return z, flat


class Broadcast(Block):
    def forward(self, x):
        return self.a(x) + x.mean((2, 3), keepdim=True)


class WritesOther(Block):
    def forward(self, x):
        y = torch.relu(x)
        z = self.a(y)
        y += z  # the sum is written into y, which is read again
        return y * 2, y


class WriteBetween(Block):
    def forward(self, x):
        y = torch.relu(x)
        z = self.a(y)
        y.mul_(2)
        return torch.relu(z + y)


class Alpha(Block):
    def forward(self, x):
        return torch.add(self.a(x), x, alpha=3)


class SumOfTwo(Block):
    def forward(self, x):
        return torch.relu(self.a(x) + self.b(x))


class Views(Block):
    def forward(self, x):
        y = self.a(x)
        return y.view(y.size(0), -1), y.permute(0, 2, 3, 1), y.stride(1)


@pytest.mark.parametrize(
    "kind",
    [AddsInput, ReadsSumTwice, ViewOfOther, Broadcast, WritesOther, WriteBetween, Alpha, SumOfTwo,
     Views],
)  # fmt: skip
def test_every_shape_of_addition_keeps_its_meaning(kind):
    model = kind().eval()
    x = torch.randn(2, 4, 6, 6)
    gm = packed(model, x)
    assert kernels(gm)
    with torch.no_grad():
        expected, found = model(x.clone()), gm(x.clone())
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, int):
            assert a == b
        else:
            assert close(a, b)
            assert a.stride() == b.stride()


def test_a_packed_module_copies_and_pickles():
    gm = packed(AddsInput().eval(), torch.randn(1, 4, 6, 6))
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            assert torch.equal(twin(x), gm(x))


def test_flops_of_packed_kernels_are_counted_and_their_time_is_measured():
    model, x = resnet18().eval(), torch.randn(1, 3, 64, 64)
    gm = packed(fold(model), x)
    assert any(kernel.inplace for kernel in kernels(gm))  # a program with effects
    assert cost(gm, x).flops == cost(fxlab.symbolic_trace(model), x).flops
    assert profile(gm, x, repeats=1).seconds > 0


@pytest.mark.parametrize(
    ("model", "shape"), [(LearningToPaintActor, (1, 9, 128, 128)), (DeepRecommender, (2, 17768))]
)
def test_other_models_come_back_right(model, shape):
    model, x = randomize_batch_norms(model()).eval(), torch.randn(shape)
    gm = optimize(model, (x,), repeats=1)
    with torch.no_grad():
        assert close(gm(x), model(x))


def test_convolutions_that_the_kernel_does_not_do_are_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.circular = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")
            self.same = nn.Conv2d(3, 3, 3, padding="same")
            self.wide = nn.Conv2d(3, 3, 1).double()

        def forward(self, x):
            return self.wide(self.same(self.circular(x)).double()).float()

    model, x = Odd().eval(), torch.randn(1, 3, 8, 8)
    gm = optimize(model, x, repeats=1)
    kept = " | ".join(gm.meta["reports"]["optimize_for_inference"].kept)
    assert "pads with zeros" in kept
    assert "float32" in kept
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))


def test_a_network_without_convolution_or_in_train_mode_says_so():
    gm = optimize(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), torch.ones(1, 3), repeats=1)
    kept = " | ".join(s for r in gm.meta["reports"].values() for s in r.kept)
    assert "no convolution" in kept
    assert "train mode" in kept


def test_dropout_that_is_off_goes_and_other_dropout_stays():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Dropout(), nn.Dropout2d()

        def forward(self, x):
            x = F.dropout(self.b(self.a(x)), 0.5, False)
            return F.dropout(x, training=False), F.dropout(x)

    gm = remove_dropout(fxlab.symbolic_trace(Drops().eval()))
    left = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    assert left == ["dropout_2"]
    assert "train mode" in gm.meta["reports"]["remove_dropout"].kept[0]


def test_a_convolution_whose_weight_the_graph_writes_is_not_packed():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)
            self.conv.weight.requires_grad_(False)

        def forward(self, x):
            self.conv.weight.mul_(2)
            return self.conv(x)

    gm = optimize_for_inference(Writes().eval(), torch.randn(1, 8, 8, 8), repeats=1)
    kept = gm.meta["reports"]["optimize_for_inference"].kept
    assert any("reads the weights of conv directly" in s for s in kept)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 14])
@pytest.mark.parametrize("padding", [0, 1, (2, 0), 5])
@pytest.mark.parametrize(
    "size", [(1, 3, 5, 4, 4), (2, 5, 1, 7, 12), (5, 2, 3, 3, 29), (0, 2, 2, 8, 8)]
)
def test_winograd_computes_the_convolution_at_every_border_and_chunk(
    size, padding, chunk, monkeypatch
):
    monkeypatch.setattr("fxlab.passes.convolutions._CHUNK", chunk)
    images, inputs, outputs, height, width = size
    conv = nn.Conv2d(inputs, outputs, 3, padding=padding, bias=inputs != 5).double()
    x = torch.randn(images, inputs, height, width, dtype=torch.float64)
    twin = x.clone()
    with torch.no_grad():
        expected = conv(x)
        other = torch.randn_like(expected)
        for add, relu in ((False, False), (False, True), (True, False), (True, True)):
            y = expected + other if add else expected
            y = y.relu() if relu else y
            got = WinogradConv2d(conv, add, relu)(x, *([other] if add else []))
            assert got.shape == y.shape
            assert torch.allclose(got, y, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, twin)


@pytest.mark.parametrize("shape", [(1, 64, 56, 56), (2, 512, 7, 7)])
def test_winograd_rounds_by_what_it_promises(shape):
    conv, x = nn.Conv2d(shape[1], shape[1], 3, padding=1), torch.randn(shape)
    with torch.no_grad():
        got = WinogradConv2d(conv, False, False)(x)
        exact = conv.double()(x.double())
    assert float((got - exact).abs().max() / exact.abs().max()) < 5e-5


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"groups": 2}])
def test_winograd_is_not_offered_for_other_convolutions(options):
    assert WinogradConv2d.fits(nn.Conv2d(4, 4, 3))
    assert not WinogradConv2d.fits(nn.Conv2d(4, 4, 3, **options))
    assert not WinogradConv2d.fits(nn.Conv2d(4, 4, 5))
    assert not WinogradConv2d.fits(nn.Conv2d(4, 4, 3, padding="same"))


def test_resnet18_by_winograd_keeps_its_numbers_copies_and_is_measured():
    model, x = randomize_batch_norms(resnet18()).eval(), torch.randn(2, 3, 64, 64)
    gm = packed(fold(model), x, "Winograd")
    assert sum(isinstance(m, WinogradConv2d) for m in gm.modules()) == 13
    with torch.no_grad():
        assert close(gm(x), model(x))
        for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            assert torch.equal(twin(x), gm(x))
    assert 0 < cost(gm, x).flops < cost(fxlab.symbolic_trace(model), x).flops
    report = optimize_for_inference(model, x, repeats=1).meta["reports"]["optimize_for_inference"]
    timed = [line for line in (*report.changed, *report.kept) if "ms Winograd" in line]
    assert len(timed) == 13
