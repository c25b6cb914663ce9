"""Quantization in three readable phases: prepare, calibrate, convert (section 6.2.1, Figure 6).

>>> import torch
>>> from torch import nn
>>> from fxlab.passes.quantize import convert, prepare
>>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
>>> prepared = prepare(model)                      # observers are in, everything is float
>>> with torch.no_grad():
...     _ = prepared(torch.randn(100, 16))         # calibrate: the observers see typical values
>>> quantized = convert(prepared)                  # weights are int8, operators work on codes
>>> [node.name for node in quantized.graph.nodes]
['input_1', '_0_int8', '_2_int8', 'output']

Read `observers`, then `prepare` with `plan`, `convert` with `modules`, and `kernels` for the
arithmetic; `qat` is the same with training, `report` says where the accuracy went.
"""

from fxlab.passes.quantize.convert import convert, quantize_static
from fxlab.passes.quantize.observers import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    Observer,
    PerChannelMinMaxObserver,
    QParams,
)
from fxlab.passes.quantize.prepare import prepare
from fxlab.passes.quantize.qat import FakeQuantize, fake_quantize, freeze_observers, prepare_qat
from fxlab.passes.quantize.qconfig import (
    QConfig,
    QConfigMapping,
    default_qat_qconfig,
    default_qconfig,
    simulated_qconfig,
)
from fxlab.passes.quantize.report import Comparison, compare, sensitivity, sqnr

__all__ = [
    "prepare",
    "prepare_qat",
    "convert",
    "quantize_static",
    "compare",
    "sensitivity",
    "sqnr",
    "QConfig",
    "QConfigMapping",
    "default_qconfig",
    "default_qat_qconfig",
    "simulated_qconfig",
    "Observer",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "HistogramObserver",
    "PerChannelMinMaxObserver",
    "QParams",
    "FakeQuantize",
    "fake_quantize",
    "freeze_observers",
    "Comparison",
]
