"""Claims about training with quantization in mind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxlab import Interpreter
from fxlab.models import randomize_batch_norms
from fxlab.models.resnet import BasicBlock
from fxlab.passes.quantize import (
    convert,
    default_qat_qconfig,
    fake_quantize,
    freeze_observers,
    prepare_qat,
    simulated_qconfig,
    sqnr,
)
from fxlab.passes.quantize.modules import Int8Conv, Int8Linear, Int8MaxPool2d
from fxlab.passes.quantize.observers import QParams, qparams_of_range
from fxlab.passes.quantize.qat import FakeQuantize


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def qparams(scale, zero_point, low=0, high=255, axis=None):
    return QParams(
        torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), low, high, axis
    )


@pytest.mark.parametrize(("low", "high"), [(0, 255), (-127, 127), (-7, 7), (0, 15)])
def test_the_gradient_is_one_inside_and_zero_where_clamped(low, high):
    q = qparams(0.1, (low + high) // 2, low, high)
    x = torch.linspace(-40, 40, 4001, requires_grad=True)
    upstream = torch.randn(4001)
    fake_quantize(x, q).backward(upstream)
    codes = torch.round(x.detach() * (1 / q.scale)) + q.zero_point
    inside = (codes >= low) & (codes <= high)
    # Backward multiplies by 1/scale and by scale: one rounding of float32 remains.
    torch.testing.assert_close(x.grad, torch.where(inside, upstream, 0.0), rtol=1e-6, atol=0)


def test_the_values_are_those_of_torchs_own_operator():
    x = torch.randn(1000) * 3
    q = qparams(0.0173, 77)
    mine = fake_quantize(x, q)
    torchs = torch.fake_quantize_per_tensor_affine(x, 0.0173, 77, 0, 255)
    torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-6)


def test_the_gradient_agrees_with_torchs_own_for_each_channel():
    x = torch.randn(4, 50) * 2
    scale = torch.tensor([0.01, 0.02, 0.003, 0.1])
    mine, torchs = (x.clone().requires_grad_() for _ in range(2))
    q = QParams(scale, torch.zeros(4, dtype=torch.int32), -127, 127, 0)
    (fake_quantize(mine, q) ** 2).sum().backward()
    (
        torch.fake_quantize_per_channel_affine(
            torchs, scale, torch.zeros(4, dtype=torch.int32), 0, -127, 127
        )
        ** 2
    ).sum().backward()
    torch.testing.assert_close(mine.grad, torchs.grad, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_learnt_scale_is_that_of_the_definition():
    x = torch.tensor([-9.0, -0.26, 0.0, 0.34, 7.0])
    scale = torch.tensor(0.1, requires_grad=True)
    q = qparams(0.1, 0, -10, 10)
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    (fake_quantize(x, q, scale) * weights).sum().backward()
    code = torch.tensor([-10.0, -3.0, 0.0, 3.0, 10.0])
    inside = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    want = ((code - inside * x / 0.1) * weights).sum()
    torch.testing.assert_close(scale.grad, want, rtol=1e-4, atol=1e-3)


def small_net():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(128, 5),
    )


def train(model, steps=30, lr=1e-2):
    data = torch.randn(64, 2, 8, 8)
    labels = (data.mean((1, 2, 3)) * 20).long().clamp(0, 4)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, 0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_the_input_model_is_not_trained_along():
    model = small_net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    prepared = prepare_qat(model)
    losses = train(prepared)
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("learn_scale", [False, True])
def test_after_conversion_int8_agrees_with_fake_quantization_within_one_quantum(learn_scale):
    prepared = prepare_qat(small_net(), default_qat_qconfig(learn_scale))
    train(prepared)
    prepared.eval()
    quantized = convert(prepared)
    x = torch.randn(32, 2, 8, 8)
    with torch.no_grad():
        fake, real = prepared(x), quantized(x)
    # The layers' own outputs differ by a code at ties; the last layer's quantum is what such a
    # difference of its input is worth: the largest weight times one step.
    last = quantized.get_submodule("9")
    quantum = float(last.dequantized_weight().abs().max()) * last.input.scale
    assert float((fake - real).abs().max()) <= quantum
    assert sqnr(fake, real) > 45


class Keep(Interpreter):
    """Keeps every value, by name."""

    def run_node(self, n):
        value = super().run_node(n)
        self.__dict__.setdefault("values", {})[n.name] = value
        return value


def residual_net():
    """A network with additions, a pool, batch norms and a downsampled shortcut."""
    return (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        .append(BasicBlock(8, 8))
        .append(BasicBlock(8, 16, 2))
        .append(nn.Flatten())
        .append(nn.Linear(256, 5))
    )


@pytest.mark.parametrize("make", [small_net, residual_net])
def test_each_layer_agrees_with_its_fake_quantized_twin_within_one_code(make):
    """Each layer is given the codes that training saw; a code that differs cannot spread.

    Without that a tie in an early layer changes many codes of later ones: networks of rounded
    numbers are chaotic at the size of a code.
    """
    prepared = prepare_qat(make())
    channels = 2 if make is small_net else 3
    for _ in range(3):
        prepared(torch.randn(16, channels, 8 if channels == 2 else 16, 8 if channels == 2 else 16))
    prepared.eval()
    quantized = convert(prepared)
    run = Keep(prepared, garbage_collect_values=False)
    with torch.no_grad():
        run.run(torch.randn(8, channels, 8 if channels == 2 else 16, 8 if channels == 2 else 16))

    def codes(node):
        """The codes of the fake-quantized value that ``node`` computes."""
        module = quantized.get_submodule(node.target)
        if isinstance(module, (Int8MaxPool2d, nn.Flatten)):
            return module(codes(node.args[0]))
        scale, zero_point, _ = node.meta["quantized"]["codes"]
        value = run.values[node.meta["quantized"]["value"] + "_observer"]
        return (value * (1 / scale)).round().add(zero_point).to(torch.uint8)

    layers = 0
    for node in quantized.graph.nodes:
        module = quantized.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(module, (Int8Conv, Int8Linear)):
            continue
        layers += 1
        inputs = [node.meta.get("quantized_input")] + [None] * len(node.args)
        out = (
            module(run.values[inputs[0]["value"] + "_observer"])
            if inputs[0]
            else module(*[codes(n) for n in node.args])
        )
        if module.output is None:
            wanted = run.values[node.meta["quantized"]["value"]]
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        else:
            gap = (out.int() - codes(node).int()).abs()
            assert int(gap.max()) <= 1
            assert float((gap > 0).double().mean()) < 1e-3
    assert layers == (3 if make is small_net else 7)


def test_batch_norms_are_folded_while_they_go_on_learning():
    prepared = prepare_qat(small_net())
    norms = [m for m in prepared.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 2
    assert not any("BatchNorm" in str(n.target) for n in prepared.graph.nodes)
    before = norms[0].running_mean.clone()
    prepared(torch.randn(16, 2, 8, 8) + 3)
    assert not torch.equal(norms[0].running_mean, before)
    prepared.eval()
    frozen = norms[0].running_mean.clone()
    prepared(torch.randn(16, 2, 8, 8) + 3)
    assert torch.equal(norms[0].running_mean, frozen)
    quantized = convert(prepared)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in quantized.modules())


def test_in_eval_mode_a_folded_batch_norm_computes_what_it_did():
    model = small_net()
    randomize_batch_norms(model)
    prepared = prepare_qat(model, simulated_qconfig(8, 8, qat=True))
    x = torch.randn(8, 2, 8, 8)
    prepared(x)
    for ours, theirs in zip(
        [m for m in prepared.modules() if isinstance(m, nn.BatchNorm2d)],
        [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)],
        strict=True,
    ):
        ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert sqnr(model.eval()(x), prepared.eval()(x)) > 25


def test_a_batch_norm_with_gamma_zero_trains_without_nan():
    model = small_net()
    nn.init.zeros_(model[1].weight)
    prepared = prepare_qat(model)
    assert all(torch.isfinite(torch.tensor(train(prepared, 5))))
    x = torch.randn(4, 2, 8, 8)
    assert torch.isfinite(convert(prepared.eval())(x)).all()


def test_a_learnt_scale_moves_and_stays_positive():
    prepared = prepare_qat(small_net(), default_qat_qconfig(learn_scale=True))
    prepared(torch.randn(16, 2, 8, 8))
    scales = [m for m in prepared.modules() if isinstance(m, FakeQuantize)]
    before = [float(m.scale.detach()) for m in scales]
    train(prepared, 10, lr=0.05)
    assert any(abs(float(m.scale.detach()) - b) > 0 for m, b in zip(scales, before, strict=True))
    assert all(float(m.qparams().scale) > 0 for m in scales)


def test_frozen_observers_stop_moving():
    prepared = prepare_qat(small_net())
    prepared(torch.randn(16, 2, 8, 8))
    freeze_observers(prepared)
    fakes = [m for m in prepared.modules() if isinstance(m, FakeQuantize)]
    before = [float(m.observer.high) for m in fakes]
    prepared(torch.randn(16, 2, 8, 8) * 100)
    assert before == [float(m.observer.high) for m in fakes]


def test_four_bits_are_held_to_four_bits():
    q = qparams_of_range(torch.tensor(-1.0), torch.tensor(1.0), 0, 15)
    assert fake_quantize(torch.linspace(-2, 2, 999), q).unique().numel() == 16
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).train()
    prepared = prepare_qat(model, simulated_qconfig(4, 4, qat=True))
    prepared(torch.randn(64, 8))
    quantized = convert(prepared.eval())
    assert quantized.get_submodule("0").weight.abs().max() <= 7
    codes = quantized.get_submodule("0")(torch.randn(9, 8))
    assert int(codes.max()) <= 15


def test_a_residual_network_trains_and_converts():
    prepared = prepare_qat(residual_net())
    x = torch.randn(16, 3, 16, 16)
    prepared(x).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters() if p.requires_grad)
    prepared.eval()
    with torch.no_grad():
        assert sqnr(prepared(x), convert(prepared)(x)) > 25
