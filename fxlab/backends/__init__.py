"""Graph -> another runtime (section 6.4 of the paper).

>>> import fxlab, torch
>>> from fxlab.backends import explain, lower
>>> gm = fxlab.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())).eval()
>>> x = torch.ones(2, 4)
>>> print(explain(gm, [x]))
2 of 2 nodes can be lowered
>>> lowered = lower(gm, [x], backend="onnxruntime")
>>> torch.allclose(lowered(x), gm(x), atol=1e-6)
True

`onnx.py` turns a Graph into ONNX node by node, with one converter per operation
(``converters_*.py``); `runtimes.py` runs ONNX on onnxruntime, OpenVINO or TensorRT; `lowering.py`
cuts a program into what the device supports and the rest. `pipeline.py` spreads a program over
several processes instead.
"""

try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fxlab.backends needs the package onnx: pip install 'fxlab[lower]'"
    ) from error

from fxlab.backends import (
    converters_act,
    converters_composed,
    converters_index,
    converters_int8,
    converters_loss,
    converters_math,
    converters_nn,
    converters_reduce,
    converters_rnn,
    converters_shape,
)
from fxlab.backends.lowering import Explanation, explain, lower
from fxlab.backends.onnx import OPSET, Builder, OnnxValue, Unsupported, converter, to_onnx
from fxlab.backends.runtimes import EngineOptions, LoweredModule, available_backends

__all__ = [
    "OPSET",
    "Builder",
    "EngineOptions",
    "Explanation",
    "LoweredModule",
    "OnnxValue",
    "Unsupported",
    "available_backends",
    "converter",
    "converters_act",
    "converters_composed",
    "converters_index",
    "converters_int8",
    "converters_loss",
    "converters_math",
    "converters_nn",
    "converters_reduce",
    "converters_rnn",
    "converters_shape",
    "explain",
    "lower",
    "to_onnx",
]
