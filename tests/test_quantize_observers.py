"""Claims about observers: ranges, scales, zero points, and the cut of a histogram."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlab import FxlabError
from fxlab.passes.quantize.observers import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    qparams_of_range,
)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), st.booleans(), st.booleans())
def test_zero_is_exact_and_the_range_is_covered_within_half_a_step(a, b, symmetric, signed):
    low, high = torch.tensor(min(a, b)), torch.tensor(max(a, b))
    bounds = (-127, 127) if signed else (0, 255)
    q = qparams_of_range(low, high, *bounds, symmetric=symmetric)
    assert float(q.dequantize(q.quantize(torch.zeros(1)))) == 0
    values = torch.stack([low, high])
    error = (q.fake_quantize(values) - values).abs().max()
    assert float(error) <= 0.501 * float(q.scale) + 1e-30 + 1e-6 * float(values.abs().max())


def test_a_min_max_observer_holds_the_extremes_of_all_batches():
    observer = MinMaxObserver()
    for batch in ([1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]):
        observer(torch.tensor(batch))
    assert (float(observer.low), float(observer.high)) == (-3.0, 2.0)


def test_a_moving_average_forgets_an_outlier_that_min_max_keeps():
    average, extremes = MovingAverageMinMaxObserver(averaging=0.1), MinMaxObserver()
    for observer in (average, extremes):
        observer(torch.tensor([0.0, 100.0]))
        for _ in range(100):
            observer(torch.tensor([0.0, 1.0]))
    assert float(extremes.high) == 100.0
    assert float(average.high) < 1.1


def test_each_channel_has_a_range_of_its_own():
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.25], [0.0, 0.0]])
    observer = PerChannelMinMaxObserver()
    observer(weight)
    q = observer.qparams()
    assert torch.allclose(q.scale, torch.tensor([2 / 127, 0.5 / 127, 1.0]))
    assert torch.equal(q.quantize(weight)[2], torch.zeros(2, dtype=torch.int8))


def test_a_histogram_counts_the_same_in_any_order_and_batch_size():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    one, other = HistogramObserver(), HistogramObserver()
    one(x)
    for part in x.flip(0).split(37):
        other(part)
    assert float(one.reach) == float(other.reach)
    assert float(one.counts.sum()) == float(other.counts.sum()) == 5000
    assert float((one.counts - other.counts).abs().sum()) < 10  # values on the border of two bins
    assert torch.equal(one.qparams().scale, other.qparams().scale)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_histograms_cut_has_a_smaller_error_than_the_extremes(bits):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    x[0] = 40.0
    errors = {}
    for kind in (MinMaxObserver, HistogramObserver):
        observer = kind(bits=bits)
        observer(x)
        errors[kind] = float((observer.qparams().fake_quantize(x) - x).square().mean())
    assert errors[HistogramObserver] < 0.9 * errors[MinMaxObserver]


def test_the_histograms_cut_is_within_a_tenth_of_the_best_by_trying():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(2)).exp()
    observer = HistogramObserver(bits=4)
    observer(x)
    mine = float((observer.qparams().fake_quantize(x) - x).square().mean())
    best = min(
        float((q.fake_quantize(x) - x).square().mean())
        for cut in torch.linspace(0.5, float(x.max()), 200)
        for q in [qparams_of_range(torch.tensor(0.0), cut, 0, 15)]
    )
    assert mine <= 1.1 * best


def test_zeros_of_a_relu_do_not_pull_the_cut_outwards():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(3)).clamp(min=0)
    observer = HistogramObserver(bits=4)
    observer(x)
    assert int(observer.zeros) == int((x == 0).sum())
    assert int(observer.qparams().zero_point) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_observer_that_saw_no_number_refuses_to_answer(bad):
    observer = HistogramObserver()
    observer(torch.tensor([1.0, bad]))
    with pytest.raises(FxlabError, match="1 values that are NaN or infinite"):
        observer.qparams()


def test_an_observer_that_saw_nothing_says_how_to_calibrate():
    with pytest.raises(FxlabError, match=r"it saw no data[\s\S]*prepared\(batch\)"):
        MinMaxObserver().qparams()


@pytest.mark.parametrize("constant", [0.0, 2.5, -1e-30])
@pytest.mark.parametrize("kind", [MinMaxObserver, HistogramObserver])
def test_a_constant_is_represented_exactly_or_within_half_a_step(kind, constant):
    observer = kind()
    observer(torch.full((7,), constant))
    assert observer.constant
    q = observer.qparams()
    error = abs(float(q.fake_quantize(torch.tensor([constant]))) - constant)
    assert error <= float(q.scale) / 2
    assert torch.isfinite(q.scale)


@pytest.mark.parametrize("kind", [MinMaxObserver, HistogramObserver, PerChannelMinMaxObserver])
def test_calibration_survives_state_dict(kind):
    observer, other = kind(), kind()
    observer(torch.randn(4, 6))
    other.load_state_dict(observer.state_dict())
    assert torch.equal(other.qparams().scale, observer.qparams().scale)


def test_an_empty_batch_changes_nothing():
    observer = HistogramObserver()
    observer(torch.randn(9))
    before = observer.qparams()
    observer(torch.empty(0, 3))
    assert torch.equal(before.scale, observer.qparams().scale)
