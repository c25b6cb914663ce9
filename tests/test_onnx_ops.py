"""Every operation that has a converter computes on each runtime what eager computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlab
from tests import onnx_cases

pytest.importorskip("onnx")
from fxlab.backends import available_backends, lower

CASES = onnx_cases.cases()
HERE = [name for name, missing in available_backends().items() if missing is None]


def _as_program(function: Any, inputs: tuple[torch.Tensor, ...]) -> fxlab.GraphModule:
    """The call as a graph of one operation (modules stay one node)."""
    if isinstance(function, nn.Module):
        is_torchs = type(function).__module__.startswith("torch")
        return fxlab.symbolic_trace(nn.Sequential(function) if is_torchs else function)
    names = ["a", "b", "c"][: len(inputs)]
    scope: dict[str, Any] = {"function": function}
    exec(f"def program({', '.join(names)}): return function({', '.join(names)})", scope)
    return fxlab.symbolic_trace(scope["program"])


def test_there_are_200_cases_and_their_names_are_unique() -> None:
    names = [name for name, _, _ in CASES]
    assert len(names) == len(set(names)) >= 200


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_lowered_operation_agrees_with_eager(case: Any, backend: str) -> None:
    _, function, inputs = case
    gm = _as_program(function, inputs)
    lowered = lower(gm, inputs, backend, threads=1, strict=True)
    with torch.no_grad():
        ours, eager = pytree.tree_leaves(lowered(*inputs)), pytree.tree_leaves(gm(*inputs))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
