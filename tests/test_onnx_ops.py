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
    _agree(lowered, gm, inputs)


# These need one size in all of their inputs, or sorted ones.
ONE_SIZE = {"conv2d groups", "bucketize"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_it_agrees_for_another_size_of_the_first_dimension_too(case: Any, backend: str) -> None:
    name, function, inputs = case
    gm = _as_program(function, inputs)
    more = tuple(torch.cat([x, x[:1], x[:1]]) if x.dim() else x for x in inputs)
    try:
        with torch.no_grad():
            gm(*more)
    except (RuntimeError, IndexError, ValueError, AssertionError):
        pytest.skip("its inputs belong to one size")
    if name in ONE_SIZE:
        pytest.skip("its inputs belong to one size")
    _agree(lower(gm, inputs, backend, threads=1, dynamic_batch=True), gm, more)


def _agree(lowered: Any, gm: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        ours, eager = pytree.tree_leaves(lowered(*inputs)), pytree.tree_leaves(gm(*inputs))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
