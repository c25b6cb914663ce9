"""Exercise 5.3: fake quantization with a straight-through gradient (section 6.2.1 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError

STUB = '''\
class MyFakeQuantize(torch.autograd.Function):
    """Rounds to what codes can represent; the gradient goes straight through.

    Used as ``MyFakeQuantize.apply(x, scale, zero_point, quant_min, quant_max)``.
    """

    @staticmethod
    def forward(ctx, x, scale, zero_point, quant_min, quant_max):
        """Return, for each element of ``x``, the value of its code: the shape and dtype of ``x``.

        A value beyond the codes saturates.
        """'''


def entry(answer: Any, x: Tensor, codes: list, gradient: Tensor) -> Any:
    """Apply the answer, go backward with ``gradient``; return the values and the gradient of x."""
    if not hasattr(answer, "apply"):
        raise AnswerError(
            "type", f"MyFakeQuantize is {kind_of(answer)}, a torch.autograd.Function was asked for"
        )
    x = x.clone().requires_grad_(True)
    before = x.detach().clone()
    y = answer.apply(x, *codes)
    if not isinstance(y, Tensor):
        return {"kind": kind_of(y)}
    found: dict[str, Any] = {"kind": "", "value": y.detach().clone(), "joined": y.requires_grad}
    if y.requires_grad:
        y.backward(gradient.clone())
    found["gradient"] = x.grad
    found["written"] = not torch.equal(before, x.detach())
    return found


def _codes(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return the codes of ``x`` before they are clamped."""
    return torch.round(x * (1 / scale)) + zero_point


def judge(args: tuple, found: Any) -> Finding | None:
    """Compare value and gradient with the definition; name the mistake that gives them."""
    x, (scale, zero_point, low, high), gradient = args
    codes = _codes(x, scale, zero_point)
    value = (codes.clamp(low, high) - zero_point) * scale
    inside = ((codes >= low) & (codes <= high)).to(x.dtype)
    expected = gradient * inside

    def wrong(sentence: str, right: Any = None, got: Any = None) -> Finding:
        shown = f"x = {_list(x)}, scale {scale:g}, zero point {zero_point}, codes {low} to {high}: "
        return Finding(shown + sentence, expected=_list(right), actual=_list(got))

    if found["kind"]:
        return wrong(f"apply gave {found['kind']}; forward returns a tensor")
    if found["written"]:
        return wrong("forward has written into x: return a new tensor")
    if text := unequal(value, found["value"], 1e-5, "the value"):
        return wrong(_why_value(text, x, found["value"], codes, args[1]), value, found["value"])
    if not found["joined"]:
        return wrong("the result has no gradient: forward and backward belong to one Function")
    got = found["gradient"]
    if got is None:
        return wrong("backward returned no gradient for x: the first of the five is x's", expected)
    if unequal(expected, got, 1e-6):
        return wrong(_why_gradient(got, gradient, inside, codes, low, high), expected, got)
    return None


def _why_value(text: str, x: Tensor, got: Tensor, codes: Tensor, given: list) -> str:
    """Say which other definition gives the value that was found."""
    scale, zero_point, low, high = given
    others = {
        "values beyond the codes do not saturate: clamp the codes": (codes - zero_point) * scale,
        "these are codes: take the zero point off and multiply by the scale": codes.clamp(
            low, high
        ),
        "nothing is rounded": x,
        "the zero point is added before the codes are clamped, and taken off after": (
            (codes - zero_point).clamp(low, high) * scale
        ),
    }
    for sentence, other in others.items():
        if not unequal(other, got, 1e-5):
            return sentence
    return text


def _why_gradient(
    got: Tensor, gradient: Tensor, inside: Tensor, codes: Tensor, low: int, high: int
) -> str:
    """Say which other definition gives the gradient that was found."""
    strictly = ((codes > low) & (codes < high)).to(gradient.dtype)
    if not inside.any():
        return "the gradient passes where x saturated: there a change of x changes nothing"
    others = {
        "the gradient is held back at the first and the last code, which are codes like any "
        "other": gradient * strictly,
        "the gradient is 0: that is the gradient of rounding, and nothing would be learnt; "
        "let what comes from behind pass": torch.zeros_like(gradient),
        "the gradient passes where x saturated: there a change of x changes nothing": gradient,
        "it returned the mask alone: multiply the gradient that comes from behind by it": inside,
    }
    for sentence, other in others.items():
        if not unequal(other, got, 1e-6):
            return sentence
    return "the gradient is neither that of the rounded value nor 0 where it saturated"


def _list(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return str([float(f"{number:.4g}") for number in value.flatten().tolist()[:8]])


def _case(x: list, codes: list, gradient: list | None = None) -> tuple:
    values = torch.tensor(x)
    return values, codes, torch.ones_like(values) if gradient is None else torch.tensor(gradient)


def cases() -> Iterable[Case | Property]:
    """The public cases, smallest first."""
    fixed: list[tuple[str, str, tuple]] = [
        ("the value is that of a code", "between two codes", ([0.26], [0.25, 0, -4, 4])),
        ("the value is that of a code", "a zero point", ([0.26, -0.4], [0.25, 3, 0, 7])),
        ("values saturate", "beyond both ends", ([-9.0, 9.0, 0.1], [0.25, 3, 0, 7])),
        ("the gradient passes", "where x has a code", ([0.26], [0.25, 0, -4, 4])),
        ("the gradient passes", "at the first and last code", ([1.0, 0.3], [0.25, 0, -4, 4])),
        ("it is multiplied", "a gradient of 2", ([0.26, 0.4], [0.25, 0, -4, 4], [2.0, -3.0])),
        ("none where x saturated", "beyond the last code", ([9.0], [0.25, 0, -4, 4])),
        ("none where x saturated", "one of two", ([-9.0, 0.3], [0.25, 3, 0, 7], [1.5, 2.5])),
    ]
    for behaviour, title, args in fixed:
        yield Case(behaviour, title, partial(_case, *args), _only(behaviour))
    yield Property("it is multiplied", "random tensors", _random, judge)


def _only(behaviour: str) -> Any:
    """Let the cases of the value overlook the gradient, which other cases ask for."""
    values = behaviour in ("the value is that of a code", "values saturate")

    def judged(args: tuple, found: Any) -> Finding | None:
        finding = judge(args, found)
        if finding is not None and values and not found["kind"]:
            x, (scale, zero_point, low, high), _ = args
            right = (_codes(x, scale, zero_point).clamp(low, high) - zero_point) * scale
            if not unequal(right, found["value"], 1e-5) and not found["written"]:
                return None
        return finding

    return judged


def _random() -> Any:
    from hypothesis import strategies as st

    numbers = st.lists(st.integers(-30, 30), min_size=1, max_size=4)
    codes = st.sampled_from([[0.25, 0, -4, 4], [0.5, 3, 0, 7], [0.125, 0, -8, 7]])

    def made(drawn: tuple) -> tuple:
        found, given = drawn
        x = torch.tensor(found) / 7  # no ties between two codes
        return x, given, torch.arange(1.0, len(found) + 1)

    return st.tuples(numbers, codes).map(made)


def hidden() -> Iterable[Case]:
    """The same behaviours on other numbers."""
    rows: list[tuple[str, tuple]] = [
        ("the value is that of a code", ([0.71, -1.3], [0.5, 2, 0, 15])),
        ("values saturate", ([-20.0, 30.0, 1.2], [0.5, 2, 0, 15])),
        ("the gradient passes", ([0.71, 6.5, -1.0], [0.5, 2, 0, 15])),
        ("it is multiplied", ([0.71, 1.9], [0.5, 2, 0, 15], [-7.0, 0.25])),
        ("none where x saturated", ([11.0, 0.4, -3.0], [0.5, 2, 0, 15], [3.0, 4.0, 5.0])),
    ]
    for behaviour, args in rows:
        yield Case(behaviour, "other numbers", partial(_case, *args), _only(behaviour))


EXERCISE = Exercise(
    id="5.3",
    title="Fake quantization with a straight-through gradient",
    level=3,
    minutes=40,
    idea="Training gets used to rounding when each value is rounded on the way forward and the "
    "gradient passes as if it had not been (section 6.2.1, the second flow).",
    needs=("fake quantization", "straight-through", "scale and zero point", "saturation"),
    teaches=("autograd function",),
    hints=(
        "Rounding is a staircase: flat almost everywhere, so its gradient is 0. The lecture's "
        "section 'A task, four bits, and training' says what the straight-through estimator does "
        "instead, and where it makes an exception.",
        "forward: divide by the scale, round, add the zero point; that is the code. Remember for "
        "backward which codes lie from quant_min to quant_max. Clamp, take the zero point off, "
        "multiply by the scale. backward: the incoming gradient where that was so, 0 elsewhere, "
        "and None for the other four arguments.",
        "`ctx.save_for_backward(mask)` in forward, `(mask,) = ctx.saved_tensors` in backward. A "
        "Function of three arguments returns three gradients: `return gradient * 2, None, None`.",
    ),
    asks=(
        "fxlab.passes.quantize.qat.fake_quantize",
        "fxlab.passes.quantize.observers.QParams.fake_quantize",
    ),
    parts=(
        Part(
            id="5.3",
            name="MyFakeQuantize",
            points={
                "the value is that of a code": 2,
                "values saturate": 1,
                "the gradient passes": 2,
                "it is multiplied": 2,
                "none where x saturated": 2,
            },
            entry=entry,
            cases=cases,
            hidden=hidden,
            wrong={
                "gradient_of_round": "nothing would be learnt",
                "passes_everywhere": "passes where x saturated",
                "mask_only": "multiply the gradient that comes from behind",
                "strictly_inside": "held back at the first and the last code",
                "no_clamp": "values beyond the codes do not saturate",
                "one_gradient": "returned an incorrect number of gradients",
                "returns_codes": "take the zero point off",
            },
            stub=STUB,
            loads=("torch.fx.experimental.symbolic_shapes",),  # what backward() imports
        ),
    ),
)
