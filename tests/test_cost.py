"""Cost, the roofline device, and measured time: against torch's counter, profiler and the clock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import fxlab
from fxlab.models import (
    MLP,
    DeepRecommender,
    FusionCases,
    LearningToPaintActor,
    TransformerBlock,
    resnet18,
    resnet50,
)
from fxlab.passes import Device, calibrate, cost, profile
from fxlab.passes.cost import amount
from tests.clocks import own_seconds, times_as_long

torch.set_num_threads(1)

MODELS = [
    (resnet50, (2, 3, 224, 224)),
    (resnet18, (1, 3, 224, 224)),
    (DeepRecommender, (16, 17768)),
    (LearningToPaintActor, (4, 9, 128, 128)),
    (MLP, (2, 8)),
    (TransformerBlock, (2, 16, 32)),
    (FusionCases, (2, 4, 8, 8)),
]


def traced(model: nn.Module) -> fxlab.GraphModule:
    return fxlab.symbolic_trace(model.eval())


def measured_peak(gm: fxlab.GraphModule, *x: torch.Tensor) -> int:
    """Return the most bytes allocated at one moment, from the profiler's memory events."""
    with torch.no_grad():
        gm(*x)
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            gm(*x)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(("model", "shape"), MODELS, ids=[m.__name__ for m, _ in MODELS])
def test_flops_equal_torchs_counter_and_the_peak_is_within_a_tenth(model, shape):
    gm, x = traced(model()), torch.randn(shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gm(x)
    result = cost(gm, x)
    assert result.flops == counter.get_total_flops()
    assert result.flops == sum(row.flops for row in result.rows)
    assert result.peak_bytes == pytest.approx(measured_peak(gm, x), rel=0.1)
    assert gm.meta["reports"]["cost"].kept == []


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 8, 8)),
        (nn.Conv2d(20, 36, 3), (2, 20, 8, 8)),
        (nn.Conv2d(4, 4, 3, groups=2), (2, 4, 8, 8)),
        (nn.Conv2d(32, 32, 3, groups=32), (2, 32, 8, 8)),
        (nn.Conv2d(64, 128, 3, stride=2, groups=4), (2, 64, 16, 16)),
        (nn.Conv2d(64, 64, 3, groups=8), (2, 64, 16, 16)),
        (nn.Conv2d(64, 64, 3, groups=32), (2, 64, 16, 16)),
        (nn.Conv2d(48, 24, 3, groups=4), (2, 48, 16, 16)),
        (nn.Conv2d(64, 128, 1, groups=8), (2, 64, 16, 16)),
        (nn.Conv2d(24, 24, 3, dilation=2), (2, 24, 16, 16)),
        (nn.Conv1d(16, 32, 5, padding=2), (8, 16, 500)),
        (nn.Conv1d(32, 64, 3, stride=2), (8, 32, 500)),
        (nn.Conv1d(64, 64, 1), (32, 64, 500)),
        (nn.Conv1d(32, 32, 3, groups=32), (4, 32, 300)),
        (nn.Conv1d(32, 32, 3).double(), (4, 32, 300)),
        (nn.Conv3d(8, 16, 3), (2, 8, 12, 20, 20)),
        (nn.Conv3d(32, 32, 3, padding=1), (2, 32, 8, 12, 12)),
        (nn.Conv2d(64, 128, 1), (2, 64, 16, 16)),
        (nn.Conv2d(64, 128, 1, stride=2), (2, 64, 16, 16)),
        (nn.Conv2d(64, 128, 3).double(), (2, 64, 16, 16)),
        (nn.ConvTranspose2d(64, 32, 2, stride=2), (2, 64, 16, 16)),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), (2, 4, 8, 8)),
    ],
    ids=str,
)
def test_the_memory_that_a_convolution_needs_for_its_time_is_counted(layer, shape):
    gm = traced(nn.Sequential(layer))
    x = torch.randn(shape, dtype=layer.weight.dtype)
    assert cost(gm, x).peak_bytes == pytest.approx(measured_peak(gm, x), rel=0.1)


def test_channels_last_input_needs_no_copy_of_itself():
    gm, x = traced(nn.Sequential(nn.Conv2d(64, 128, 3))), torch.randn(2, 64, 16, 16)
    x = x.to(memory_format=torch.channels_last)
    assert cost(gm, x).peak_bytes == pytest.approx(measured_peak(gm, x), rel=0.1)


def test_resnet50_has_the_papers_size():
    result = cost(traced(resnet50()), torch.randn(1, 3, 224, 224))
    assert result.parameters == 25_557_032
    assert result.flops == pytest.approx(8.18e9, rel=1e-3)
    assert result["conv1"].shape == "f32[1, 64, 112, 112]"


def test_bytes_are_those_of_operands_and_results():
    gm = traced(nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Flatten()))
    rows = cost(gm, torch.randn(2, 4)).rows
    linear, relu, flatten = rows[1:4]
    assert (linear.bytes_read, linear.bytes_written) == (4 * (2 * 4 + 4 * 6), 4 * 2 * 6)
    assert linear.flops == 2 * 2 * 4 * 6
    assert linear.intensity == linear.flops / (linear.bytes_read + linear.bytes_written)
    assert (relu.bytes_read, relu.bytes_written) == (48, 48)
    assert (flatten.bytes_read, flatten.bytes_written) == (0, 0)  # a view
    assert linear.parameters == 24


def test_an_embedding_reads_its_rows_and_an_expanded_tensor_its_data():
    table = traced(nn.Sequential(nn.Embedding(1000, 8)))
    row = cost(table, torch.zeros(5, dtype=torch.int64)).rows[1]
    assert row.bytes_read == 5 * 8 * 4 + 5 * 8
    gm = fxlab.symbolic_trace(lambda x: x.expand(100, 4).relu())
    assert cost(gm, torch.ones(1, 4))["relu"].bytes_read == 16


def test_in_place_and_freed_values_do_not_add_up():
    def chain(x):
        for _ in range(10):
            x = torch.relu(x)
        return x

    assert cost(fxlab.symbolic_trace(chain), torch.zeros(1000)).peak_bytes == 2 * 4000

    def in_place(x):
        x = torch.relu(x)
        for _ in range(10):
            x = x.add_(1)
        return x

    assert cost(fxlab.symbolic_trace(in_place), torch.zeros(1000)).peak_bytes == 4000


def test_a_program_that_looks_at_data_is_costed_on_data():
    def f(x, w):
        return (x @ w) * x.sum().item()

    gm = fxlab.symbolic_trace(f)
    result = cost(gm, torch.ones(4, 4), torch.ones(4, 4))
    assert result.flops == 2 * 4**3
    assert "real data" in gm.meta["reports"]["cost"].kept[0]


def test_inputs_that_do_not_fit_name_the_node():
    from fxlab.passes import ShapeError

    with pytest.raises(ShapeError, match="layers_0"):
        cost(traced(MLP()), torch.zeros(2, 5))


def test_a_refused_input_is_told_once(caplog):
    gm = fxlab.symbolic_trace(lambda x: x @ torch.ones(3, 3))
    with pytest.raises(fxlab.passes.ShapeError):
        cost(gm, torch.zeros(2, 5))
    assert "ERROR" not in caplog.text  # torch's fake tensors log their refusals, with the stack


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


FUSED = [
    (nn.Sequential(nn.LSTM(64, 128, 2, batch_first=True)), (8, 50, 64),
     2 * 8 * 50 * 4 * 128 * ((64 + 128) + (128 + 128))),
    (nn.Sequential(nn.LSTM(6, 5, bidirectional=True)), (7, 3, 6), 2 * 2 * 7 * 3 * 4 * 5 * (6 + 5)),
    (nn.Sequential(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)), (4, 64, 256), None),
    (nn.Sequential(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=True)),
     (2, 9, 32), None),
    (Attention(), (2, 10, 64), None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "by_hand"), FUSED)
def test_a_layer_that_is_one_kernel_counts_what_its_steps_do(model, shape, by_hand):
    """In train mode, or by hand: torch's counter knows the steps, and none of the kernels."""
    gm, x = fxlab.symbolic_trace(model), torch.randn(shape)
    result = cost(gm.eval(), x)
    (row,) = (row for row in result.rows if row.beyond_torch)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gm(x)
    assert counter.get_total_flops() == result.flops - sum(row.beyond_torch.values())
    if by_hand is None:
        with FlopCounterMode(display=False) as steps, torch.no_grad():
            gm.train()(x)
        by_hand = steps.get_total_flops()
    assert result.flops == row.flops == by_hand > 0
    (said,) = gm.meta["reports"]["cost"]["beyond_torch"]
    assert said.startswith(f"{row.name}: {amount(by_hand)} FLOP of ")
    assert said in str(result)
    assert Device("chip", 1e9, 1e12, 1e9).predict(result).seconds >= by_hand / 1e9


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_sequences_of_several_lengths_are_counted_without_their_padding():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x, padding):
            return self.layers(x, src_key_padding_mask=padding)

    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    weights, tokens = 16 * 48 + 16 * 16 + 2 * 16 * 32, 5 + 3
    by_hand = 2 * (2 * tokens * weights + 4 * 16 * (5 * 5 + 3 * 3))
    assert cost(traced(Encoder()), torch.randn(2, 5, 16), padding).flops == by_hand


@pytest.mark.parametrize("rnn", [nn.GRU, nn.RNN])
def test_recurrent_layers_without_a_kernel_count_as_torch_does(rnn):
    gm, x = traced(nn.Sequential(rnn(6, 5, 2))), torch.randn(7, 3, 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gm(x)
    assert cost(gm, x).flops == counter.get_total_flops() > 0
    assert gm.meta["reports"]["cost"]["beyond_torch"] == []


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (torch.matmul, [(3, 4), (4,)], 2 * 3 * 4),
        (torch.matmul, [(4,), (4,)], 2 * 4),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b), [(2, 4, 9, 8), (2, 4, 7, 8)],
         4 * 2 * 4 * 9 * 7 * 8),
        (F.bilinear, [(3, 4), (3, 5), (6, 4, 5)], 2 * 3 * 6 * 5 * (4 + 1)),
    ],
)  # fmt: skip
def test_products_that_torch_counts_as_nothing(function, shapes, flops):
    names = "abc"[: len(shapes)]
    graph = fxlab.Graph()
    graph.output(graph.call_function(function, tuple(map(graph.placeholder, names))))
    gm = fxlab.GraphModule(nn.Module(), graph)
    inputs = [torch.randn(shape) for shape in shapes]
    assert cost(gm, *inputs).flops == flops
    assert gm.meta["reports"]["cost"]["beyond_torch"]


def test_a_kernel_without_a_formula_is_named():
    library = torch.library.Library("fxlab_test_cost", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("fxlab_test_cost::twice", torch.empty_like, lib=library)
    for function, name in (
        (torch.ops.fxlab_test_cost.twice.default, "fxlab_test_cost::twice"),
        (torch.fft.rfft, "_fft_r2c"),
        (torch.linalg.inv, "linalg_inv_ex"),
    ):
        graph = fxlab.Graph()
        graph.output(graph.call_function(function, (graph.placeholder("x"),)))
        gm = fxlab.GraphModule(nn.Module(), graph)
        cost(gm, torch.eye(4))
        assert any(name in why for why in gm.meta["reports"]["cost"].kept), name
    relu = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    cost(relu, torch.eye(4))
    assert relu.meta["reports"]["cost"].kept == []


def test_only_a_cost_is_predicted():
    gm = traced(MLP())
    with pytest.raises(TypeError, match=r"was given a .*; .*fxlab\.passes\.cost\(gm"):
        Device("chip", 1e12, 1e11, 1e9).predict(gm)


def test_the_table_reads_as_text_and_as_html():
    result = cost(traced(nn.Sequential(nn.Linear(3, 3))), torch.ones(1, 3))
    assert str(result).splitlines()[0].split()[:3] == ["node", "kind", "shape"]
    assert "f32[1, 3]" in str(result)
    assert result._repr_html_().count("<tr>") == len(result.rows) + 2
    assert "<script" not in result._repr_html_()
    assert [amount(v) for v in (5, 1500, 8.18e9, 2e12)] == ["5", "1.5k", "8.18G", "2T"]


@pytest.mark.parametrize("field", ["flops_per_second", "bytes_per_second", "memory_bytes"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), None, "1e12"])
def test_a_device_without_a_number_is_refused(field, value):
    good = {"flops_per_second": 1e12, "bytes_per_second": 1e11, "memory_bytes": 1e9}
    with pytest.raises(ValueError, match=field):
        Device("chip", **{**good, field: value})


@pytest.mark.parametrize("value", [-1e-6, float("nan"), None])
def test_a_launch_takes_no_time_or_some(value):
    with pytest.raises(ValueError, match="launch_seconds"):
        Device("chip", 1e12, 1e11, 1e9, launch_seconds=value)


def test_a_calibration_without_a_measurement_is_refused():
    with pytest.raises(ValueError, match="repeats is 0"):
        calibrate(repeats=0)


def test_the_roofline_takes_the_longer_of_compute_and_memory():
    result = cost(traced(MLP((64, 64, 64))), torch.randn(8, 64))
    chip = Device("chip", 1e9, 1e9, 1e6, launch_seconds=1e-6)
    rows = {row.name: row for row in chip.predict(result).rows}
    linear, relu = result["layers_0"], result["relu"]
    assert rows["layers_0"].seconds == linear.flops / 1e9 + 1e-6
    assert rows["layers_0"].bound == "compute"
    assert rows["relu"].seconds == relu.bytes_moved / 1e9 + 1e-6
    assert rows["relu"].bound == "memory"
    assert rows["x"].seconds == 0
    assert chip.predict(result).fits
    assert not Device("small", 1e9, 1e9, 1000).predict(result).fits
    assert "does not fit" in str(Device("small", 1e9, 1e9, 1000).predict(result))
    assert chip.ridge == 1
    assert chip.attainable(0.5) == 0.5e9


def test_a_prediction_says_whose_shares_it_gives_and_what_all_launches_take():
    result = cost(traced(MLP((64, 64, 64))), torch.randn(8, 64))
    chip = Device("chip", 1e9, 1e9, 1e6, launch_seconds=1e-6)
    rows = [row for row in chip.predict(result).rows if row.seconds]
    total = sum(row.seconds for row in rows)
    compute = sum(row.seconds for row in rows if row.bound == "compute")
    assert "(nodes bound by compute " in str(chip.predict(result))
    assert f"compute {compute / total:.0%}, " in str(chip.predict(result))
    assert f"; all launches together {len(rows) * 1e-6 / total:.0%}), memory" in str(
        chip.predict(result)
    )
    assert "launches" not in str(Device("chip", 1e9, 1e9, 1e6).predict(result))


def test_predicted_time_of_resnet50_is_within_twice_of_measured():
    gm, x = traced(resnet50()), torch.randn(1, 3, 224, 224)
    found = cost(gm, x)
    with torch.no_grad():
        ratio = times_as_long(
            lambda: calibrate().predict(found).seconds, lambda: own_seconds(lambda: gm(x))
        )
    assert 0.5 < ratio < 2


def test_profile_measures_each_node_and_keeps_it_on_the_node():
    gm = traced(TransformerBlock())
    result = profile(gm, torch.randn(2, 16, 32), repeats=3)
    assert [row.name for row in result.rows] == [node.name for node in gm.graph.nodes]
    assert all(node.meta["columns"]["seconds"] >= 0 for node in gm.graph.nodes)
    assert result.seconds == pytest.approx(sum(result.by_kind().values()))
    assert result.slowest(1)[0].seconds == max(row.seconds for row in result.rows)
    assert all(len(row.samples) == 3 for row in result.rows)
    assert len(result.call_samples) == 3
    together = result.samples_by_kind()
    assert sum(map(sum, together.values())) == pytest.approx(
        sum(sum(row.samples) for row in result.rows)
    )
    assert "medians of 3" in str(result)
    assert result._repr_html_().count("<tr>") == len(result.rows)
    for wrong in ({"repeats": 0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="at least one run must count"):
            profile(gm, torch.randn(2, 16, 32), **wrong)
