"""Every operation that has a converter computes on each runtime what eager computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxlab
from fxlab.core.errors import LoweringError
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


# What a runtime would not compute as eager does, for all numbers; it stays in PyTorch.
LEFT = {
    "onnxruntime": {
        "floor divide": "only PyTorch raises when one is 0",
        "mod of ints": "only PyTorch raises when one is 0",
        "shift left": "a power of whole numbers",
        "sum of ints": "64-bit numbers go through doubles",
    },
    "openvino": {
        "div floor": "rounded quotient",
        "floor divide": "only PyTorch raises when one is 0",
        "floor divide float": "rounded quotient",
        "fmod": "rounded quotient",
        "long": "24 bits",
        "mod of ints": "only PyTorch raises when one is 0",
        "remainder": "rounded quotient",
        "shift left": "a power of whole numbers",
        "sum of ints": "24 bits",
        "to double and back": "24 bits",
        "write: rows": "24 bits",
    },
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_lowered_operation_agrees_with_eager(case: Any, backend: str) -> None:
    name, function, inputs = case
    gm = _as_program(function, inputs)
    why = LEFT.get(backend, {}).get(name)
    if why is not None:
        with pytest.raises(LoweringError, match=why):
            lower(gm, inputs, backend, threads=1, strict=True)
    lowered = lower(gm, inputs, backend, threads=1, strict=why is None)
    _agree(lowered, gm, inputs)


INF, NAN = math.inf, math.nan
LEFT_SIDE = torch.tensor([1.0, 0.0, -0.0, 1e8, -1e8, 5.0, -5.0, INF, -INF, 7.5, 1e-3, -200.0])
RIGHT_SIDE = torch.tensor([0.1, 2.0, 3.0, -3.0, INF, -INF, INF, 2.0, 2.0, -0.5, 0.1, 0.0])
AT_THE_EDGES: dict[str, Any] = {
    "floor division": lambda a, b: a // b,
    "by a tenth": lambda a, b: a // 0.1,
    "remainder": lambda a, b: a % b,
    "fmod": lambda a, b: torch.fmod(a, b),
    "log1p": lambda a, b: torch.log1p(a),
    "expm1": lambda a, b: torch.expm1(a),
    "hypot": lambda a, b: torch.hypot(a * 1e20, b),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "logaddexp2": lambda a, b: torch.logaddexp2(a, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "copysign": lambda a, b: torch.copysign(b, a),
    "nan_to_num": lambda a, b: torch.nan_to_num(a / b, INF, 1.0, 2.0),
    "isinf": lambda a, b: torch.isinf(a.double() * 1e200),
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", AT_THE_EDGES)
def test_zeros_infinities_and_large_numbers_are_computed_as_by_eager(
    name: str, backend: str
) -> None:
    program = AT_THE_EDGES[name]
    gm = fxlab.symbolic_trace(program)
    pairs = [(LEFT_SIDE, RIGHT_SIDE), (RIGHT_SIDE, LEFT_SIDE), (LEFT_SIDE, LEFT_SIDE)]
    lowered = lower(gm, [LEFT_SIDE.abs().clamp(1, 9), RIGHT_SIDE.abs().clamp(1, 9)], backend)
    for a, b in pairs:
        if backend == "openvino":  # not a number is not carried there
            keep = ~program(a, b).isnan()
            a, b = torch.where(keep, a, 1.0), torch.where(keep, b, 1.0)
        torch.testing.assert_close(lowered(a, b), program(a, b), equal_nan=True)


@pytest.mark.skipif("onnxruntime" not in HERE, reason="onnxruntime is not installed")
def test_onnxruntime_carries_what_is_not_a_number_as_eager_does() -> None:
    programs = [
        torch.max, torch.amin, torch.amax, torch.aminmax, torch.sign, F.hardshrink, F.softshrink,
        torch.argmax, torch.argmin, torch.relu, F.hardtanh, torch.exp, torch.isnan, torch.isfinite,
        lambda x: F.threshold(x, 0.1, 20.0), lambda x: x.max(0), lambda x: x.min(-1, True),
        lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0])), lambda x: x > 0.5,
        lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0]), right=True),
        lambda x: x.clamp(-1, 1), lambda x: x.bool(),
    ]  # fmt: skip
    for program in programs:
        gm = _as_program(program, (torch.arange(4.0),))
        lowered = lower(gm, [torch.arange(4.0)], "onnxruntime", threads=1, strict=True)
        for numbers in ([NAN, -1, INF, 0], [NAN] * 4, [1, NAN, 0, -INF], [0, 1, -0.2, NAN]):
            x = torch.tensor(numbers)
            _agree(lowered, gm, (x,))


@pytest.mark.parametrize("backend", HERE)
def test_whole_numbers_are_divided_exactly(backend: str) -> None:
    programs = [
        lambda x: x // 3, lambda x: x % -3, lambda x: torch.fmod(x, 3), lambda x: x**3,
        lambda x: torch.div(x, -3, rounding_mode="trunc"),
        lambda x: x // torch.tensor([1, 2, -3, 4]),
    ]  # fmt: skip
    for program in programs:
        gm = fxlab.symbolic_trace(program)
        for dtype in (torch.int32, torch.int64):
            x = torch.tensor([-(2**24), 5, -7, 7], dtype=dtype)
            torch.testing.assert_close(lower(gm, [x % 5], backend)(x), program(x))
            if backend == "onnxruntime":
                x = torch.tensor([-(2**31), 5, -7, 2**31 - 1], dtype=dtype)
                torch.testing.assert_close(lower(gm, [x], backend)(x), program(x))


@pytest.mark.parametrize("backend", HERE)
def test_a_rounding_to_half_precision_is_not_left_out(backend: str) -> None:
    for program in (lambda x: x.half().float() * 3, lambda x: (x.half() * 3).float() - x * 3):
        gm, x = fxlab.symbolic_trace(program), torch.randn(100)
        torch.testing.assert_close(lower(gm, [x * 7], backend, threads=1)(x), program(x))


@pytest.mark.parametrize("backend", HERE)
def test_a_row_in_which_everything_is_masked_attends_to_nothing(backend: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    shown = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    for mask in (shown, torch.zeros(3, 3).masked_fill(~shown, -INF)):

        def fixed(q: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

        _agree(lower(fxlab.symbolic_trace(lambda q: fixed(q)), [q], backend), fixed, (q,))
        gm = fxlab.symbolic_trace(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m))
        example = torch.ones(3, 3, dtype=mask.dtype)
        _agree(lower(gm, [q, example], backend, strict=True), gm, (q, mask))


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
