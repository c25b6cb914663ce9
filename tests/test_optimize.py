"""optimize_for_inference: right everywhere, and never slower than what it was given to beat."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import DeepRecommender, LearningToPaintActor, resnet18
from fxlab.models.small import randomize_batch_norms
from fxlab.passes import (
    cost,
    live_ranges,
    optimize_for_inference,
    profile,
    remove_dropout,
    shape_prop,
    shape_text,
)
from fxlab.passes import optimize_for_inference as optimize
from fxlab.passes.base import copy_sharing_tensors
from fxlab.passes.convolutions import KERNELS, KernelError, WinogradConv2d
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
    _keep_layout_inside(gm)
    _write_into_dead_values(gm)
    gm.graph.lint()
    return gm


def kernels(gm: fxlab.GraphModule) -> list[PackedConv2d]:
    return [m for m in gm.modules() if isinstance(m, PackedConv2d)]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


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


class SharedConvolution(Block):
    def forward(self, x):
        return self.a(torch.relu(self.a(x))) + self.a(x)


class ViewBeforeWrite(Block):
    def forward(self, x):
        y = self.a(x)
        flat = y.view(-1)
        F.relu_(y)
        return flat


class WritesInput(Block):
    def forward(self, x):
        x += self.a(x)
        return F.relu_(x), x


class ChannelsLast(Block):
    def forward(self, x):
        y = torch.relu(self.a(x.contiguous(memory_format=torch.channels_last)))
        return y.permute(0, 2, 3, 1).view(-1, 4)


class InBfloat16(Block):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
        return torch.relu(self.b(x)), torch.relu(y)


class Indices(Block):
    def __init__(self):
        super().__init__()
        self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        y, places = self.pool(self.a(x))
        return self.b(self.back(y, places)), places


@pytest.mark.parametrize("way", ["packed", "Winograd"])
@pytest.mark.parametrize(
    "kind",
    [AddsInput, ReadsSumTwice, ViewOfOther, Broadcast, WritesOther, WriteBetween, Alpha, SumOfTwo,
     Views, SharedConvolution, ViewBeforeWrite, WritesInput, ChannelsLast, InBfloat16,
     Indices],
)  # fmt: skip
def test_every_shape_of_addition_keeps_its_meaning(kind, way):
    model = kind().eval().requires_grad_(False)
    x = torch.randn(2, 4, 6, 6)
    gm = packed(model, x, way)
    assert any(isinstance(m, KERNELS) for m in gm.modules())
    given, twin = x.clone(), x.clone()
    expected, found = model(given), gm(twin)
    assert close(twin, given)  # what is written into the input, too
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, int):
            assert a == b
        else:
            assert close(a, b)
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()


@pytest.mark.parametrize("way", ["packed", "Winograd"])
def test_a_write_reaches_an_input_with_the_channels_last(way):
    model, x = WritesInput().eval().requires_grad_(False), torch.randn(2, 4, 6, 6)
    gm = packed(model, x, way)
    given, twin = (x.contiguous(memory_format=torch.channels_last) for _ in range(2))
    model(given)
    gm(twin)
    assert close(twin, given)


class BatchMean(Block):
    def forward(self, x):
        return torch.relu(self.a(x) + self.b(x.mean(0, keepdim=True)))


@pytest.mark.parametrize("way", ["packed", "Winograd"])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_was_of_one_shape_in_the_example_may_be_broadcast_later(way, inplace):
    model = BatchMean().eval().requires_grad_(False)
    gm = packed(model, torch.randn(1, 4, 6, 6), way)
    kernel = next(m for m in gm.modules() if isinstance(m, KERNELS) and m.add)
    assert kernel.inplace
    kernel.inplace = inplace
    x = torch.randn(3, 4, 5, 9)
    assert close(gm(x), model(x))
    with pytest.raises(RuntimeError, match="must match"):
        kernel(x, torch.randn(1, 4, 2, 2))  # oneDNN itself would read past its end


class Hooked(Block):
    def __init__(self):
        super().__init__()
        self.norm, self.relu, self.drop = nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()

    def forward(self, x):
        return self.drop(self.relu(self.a(x) + self.norm(self.b(x))))


def test_hooks_see_what_they_saw_and_keep_what_they_kept():
    model, x = Hooked().eval().requires_grad_(False), torch.randn(1, 4, 6, 6)
    seen = []
    for name in ("norm", "relu", "drop"):
        getattr(model, name).register_forward_hook(lambda m, i, o: seen.append((m, o)))
    model(x)
    expected = [(type(m), o.clone()) for m, o in seen]
    gm = packed(remove_dropout(fold(model)), x)
    seen.clear()
    gm(x)
    assert [type(m) for m, _ in seen] == [kind for kind, _ in expected]
    assert all(close(o, e) for (_, o), (_, e) in zip(seen, expected, strict=True))


class Noise(nn.Dropout):
    def forward(self, input):
        return input + 1


def test_a_dropout_of_the_users_own_stays():
    graph = fxlab.Graph()
    graph.output(graph.call_module("noise", (graph.placeholder("x"),)))
    gm = remove_dropout(fxlab.GraphModule({"noise": Noise().eval()}, graph))
    assert torch.equal(gm(torch.zeros(1)), torch.ones(1))
    assert "no dropout of torch's" in gm.meta["reports"]["remove_dropout"].kept[0]


def test_a_packed_module_copies_and_pickles():
    gm = packed(AddsInput().eval(), torch.randn(1, 4, 6, 6))
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            assert torch.equal(twin(x), gm(x))


@pytest.mark.parametrize("way", ["packed", "Winograd"])
def test_analyses_need_no_data_of_a_packed_program(way):
    x = torch.randn(2, 3, 64, 64)
    gm = packed(fold(resnet18()), x, way)
    cost(gm, x)
    assert gm.meta["reports"]["cost"].kept == []
    assert live_ranges(gm, x)
    shape_prop(gm, x, dynamic={"x": {0: "N"}})
    assert shape_text(gm.graph.output_node()) == "f32[N, 1000]"
    assert gm.meta["reports"]["shape_prop"]["guards"] == []
    torch.save(gm, saved := io.BytesIO())
    saved.seek(0)
    with torch.no_grad():
        assert torch.equal(torch.load(saved, weights_only=False)(x), gm(x))


def both(conv: nn.Conv2d, add: bool = False) -> list[Any]:
    return [PackedConv2d(conv, (2, 4, 9, 9), add, True), WinogradConv2d(conv, add, True)]


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 9, 9), torch.ones(2, 5, 9, 9), torch.ones(2, 4, 9, 9).double(),
     torch.ones(2, 4, 2, 9), torch.ones(2, 4, 0, 9), torch.ones(2, 4, 9, 9, device="meta")],
    ids=shape_text,
)  # fmt: skip
def test_a_kernel_says_what_it_was_given_and_what_it_takes(x):
    for kernel in both(nn.Conv2d(4, 6, 3)):
        with pytest.raises(KernelError) as caught:
            kernel(x)
        text = str(caught.value)
        assert shape_text(x) in text
        assert "f32[N, 4, H, W] on cpu, of at least 3 x 3 pixels" in text
        assert "convolutions.py" not in text
        assert "test_optimize.py" in text


def test_a_kernel_computes_in_float32_under_autocast():
    conv, x = nn.Conv2d(4, 6, 3).requires_grad_(False), torch.randn(2, 4, 9, 9)
    for kernel in both(conv):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = kernel(x)
        assert float((got - F.relu(conv(x))).abs().max()) < 1e-4  # bfloat16 is off by 1e-2


def test_a_kernel_has_no_gradient_and_says_so():
    conv, x = nn.Conv2d(4, 6, 3).requires_grad_(False), torch.randn(2, 4, 9, 9)
    x.requires_grad_()
    for kernel in both(conv):
        assert close(kernel(x), F.relu(conv(x)))
        with pytest.raises(KernelError, match="no gradient"):
            kernel(x).sum().backward()
    other = torch.randn(2, 6, 7, 7, requires_grad=True)
    for kernel in both(conv, add=True):
        kernel.inplace = True
        twin = other.detach().clone()
        assert close(kernel(x, other), F.relu(conv(x) + other))
        assert torch.equal(other, twin)


def test_the_random_state_is_left_alone_and_no_measurement_is_refused():
    model, x = AddsInput().eval(), torch.randn(1, 4, 6, 6)
    before = torch.get_rng_state()
    optimize(model, x, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="repeats is 0"):
        optimize(model, x, repeats=0)


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
    model, x = randomize_batch_norms(resnet18()).eval(), torch.randn(2, 3, 128, 128)
    gm = packed(fold(model), x, "Winograd")
    assert (
        sum(isinstance(m, WinogradConv2d) for m in gm.modules()) == 13
    )  # of 13: the images of layers 3, 4 are small
    with torch.no_grad():
        assert close(gm(x), model(x))
        for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            assert torch.equal(twin(x), gm(x))
    assert 0 < cost(gm, x).flops < cost(fxlab.symbolic_trace(model), x).flops
    gm = shape_prop(copy_sharing_tensors(fxlab.symbolic_trace(fold(model))), x)
    timed = [group for group in _groups(gm, []) if "Winograd" in group.measure(1)]
    assert len(timed) == 7  # the images of layers 3 and 4 have too few tiles


def test_train_mode_is_told_in_its_own_report_and_eval_asked_for():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()

        def forward(self, x):
            return F.dropout(self.drop(self.bn(self.conv(x))), training=self.training)

    x = torch.randn(1, 3, 8, 8)
    kept = optimize(Net().train(), x, repeats=1).meta["reports"]["optimize_for_inference"].kept
    assert kept[0] == "bn, drop, dropout kept, in train mode: call eval() on the model first"
    kept = optimize(Net().eval(), x, repeats=1).meta["reports"]["optimize_for_inference"].kept
    assert "eval()" not in " ".join(kept)


@pytest.mark.parametrize("layers", [[nn.Linear(64, 64), nn.ReLU()], [nn.LSTM(4, 4)]])
def test_where_nothing_was_folded_or_packed_nothing_was_fastest(layers):
    x = torch.randn(32, 64) if isinstance(layers[0], nn.Linear) else torch.randn(2, 4, 4)
    report = optimize(nn.Sequential(*layers).eval(), x, repeats=1).meta["reports"][
        "optimize_for_inference"
    ]
    assert report.kept == ["there is no convolution to pack"]
    assert [key for key in report if "seconds" in key] == ["seconds as given"]
    shown = re.search(r"seconds as given: (\S+)", str(report))
    assert shown and len(shown[1].split("e")[0].replace(".", "").strip("0")) <= 4
