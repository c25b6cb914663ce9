"""Where would a runtime's whole numbers be others than PyTorch's?

Two that agree on floats need not agree on whole numbers: they overflow in different ways, and a
runtime may compute with them in floats. What would differ stays in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from onnx import TensorProto

from fxlab.backends.registry import Unsupported

__all__ = ["refuse_inexact"]

_HALF = {torch.float16: TensorProto.FLOAT, torch.float32: TensorProto.FLOAT16}
_SMALL = {torch.uint8, torch.int8, torch.int16}
_WIDE = {torch.int32, torch.int64}
_MAY_OVERFLOW = set(
    "Abs Add CumSum Div MatMul Mod Mul Neg Pow ReduceProd ReduceSum Resize Sub".split()
)
# OpenVINO computes with whole numbers in float32, exact up to 24 bits. Its inputs are held to that
# (see `LoweredModule`); these may leave the range, or start outside of it.
_MAY_LEAVE_24_BITS = set("Add BitShift CumSum MatMul Mul Pow ReduceProd ReduceSum Sub".split())


def refuse_inexact(
    backend: str | None, kind: str, values: Sequence[Any], attributes: Mapping[str, Any]
) -> None:
    """Look at an ONNX node before it is appended.

    Args:
        backend: the runtime it is for, None for any.
        kind: the operator.
        values: its inputs, `OnnxValue` or None; those that a converter makes for itself have no
            shape and dtype yet, and the converter knows their range.
        attributes: its attributes.

    Raises:
        Unsupported: its result may not be the one that PyTorch computes.
    """
    dtypes = [v.dtype for v in values if v is not None and v.fake is not None]
    if kind in _MAY_OVERFLOW and any(dtype in _SMALL for dtype in dtypes):
        small = next(dtype for dtype in dtypes if dtype in _SMALL)
        raise Unsupported(f"{small} that overflows wraps around only in PyTorch")
    first = (
        values[0].dtype if values and values[0] is not None and values[0].fake is not None else None
    )
    if backend == "openvino":
        if kind in _MAY_LEAVE_24_BITS and first in _WIDE:
            raise Unsupported("openvino computes with whole numbers in float32, exact to 24 bits")
        whole = attributes.get("to") in (TensorProto.INT32, TensorProto.INT64)
        if kind == "Cast" and whole and first is not None and first.is_floating_point:
            raise Unsupported("whole numbers made of floats may pass 24 bits in openvino")
    elif (
        backend == "onnxruntime"
        and kind == "Cast"
        and (first in _HALF and attributes["to"] == _HALF[first])
    ):
        raise Unsupported("onnxruntime leaves out roundings to float16 beside float32")
    elif kind in ("ReduceSum", "ReduceProd") and first is torch.int64:
        raise Unsupported("sums of 64-bit numbers go through doubles")
