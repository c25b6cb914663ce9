"""Exercise 5.1: scale and zero point from an observer (section 6.2.1 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import kind_of
from fxlab.teach.limits import AnswerError
from fxlab.teach.variants import forms

STUB = '''\
class MyObserver:
    """Watches batches of values and answers with a scale and a zero point.

    ``code = clamp(round(value / scale) + zero_point, quant_min, quant_max)``

    Args:
        quant_min: the smallest code.
        quant_max: the largest code.
        symmetric: the zero point is 0, and the codes reach as far down as up.
    """

    def __init__(self, quant_min=0, quant_max=255, symmetric=False):
        self.quant_min, self.quant_max, self.symmetric = quant_min, quant_max, symmetric
        self.low, self.high = float("inf"), float("-inf")

    def observe(self, x):
        """Take the tensor ``x`` into the range. Returns nothing."""'''


@dataclass(frozen=True)
class Form:
    """One form of the exercise: how a range grows, and which scales there are.

    Attributes:
        weight: How far a batch moves the range to its own ends; 0: it widens it.
        power: Whether a scale is a power of two.
        words: What stands in the master, and what stands there in this form.
    """

    weight: float = 0.0
    power: bool = False
    words: tuple[tuple[str, str], ...] = ()


EXTREMES = Form()
MOVING = Form(
    weight=0.25,
    words=(
        (
            "Take the tensor ``x`` into the range. Returns nothing.",
            "Move the range a quarter of the way to that of ``x``; the first sets it.",
        ),
        (
            "The codes cover every value seen, and 0 has a code of its own.",
            "The codes cover the range, and 0 has a code of its own.",
        ),
        (
            "* several batches, of which each may widen the range;",
            "* several batches: the first sets both ends of the range, each later one moves them a "
            "quarter of the way to its own ends;",
        ),
    ),
)
POWERS = Form(
    power=True,
    words=(
        (
            "The codes cover every value seen, and 0 has a code of its own.",
            "The scale is the smallest power of two with which the codes cover every value\n"
            "        seen; 0 has a code of its own.",
        ),
        (
            "* codes that begin elsewhere than at 0, and symmetric ones;",
            "* codes that begin elsewhere than at 0, and symmetric ones;\n* a device that shifts "
            "bits instead of multiplying: the scale is a power of two, rounded up;",
        ),
    ),
)


def entry(answer: Any, batches: Any, quant_min: int, quant_max: int, symmetric: bool) -> Any:
    """Let the student's class see the batches; return scale and zero point as two numbers."""
    if not isinstance(answer, type):
        raise AnswerError("type", f"MyObserver is {kind_of(answer)}, a class was asked for")
    observer = answer(quant_min, quant_max, symmetric)
    for batch in batches:
        observer.observe(batch)
    result = observer.qparams()
    try:
        scale, zero_point = result
        return [float(scale), float(zero_point)]
    except (TypeError, ValueError):
        return f"{type(result).__name__}: {result!r}"[:200]


def _range(batches: Iterable[torch.Tensor], form: Form = EXTREMES) -> tuple[float, float]:
    """Return the ends of the range, as observed."""
    low, high = math.inf, -math.inf
    for batch in batches:
        least, most = float(batch.double().min()), float(batch.double().max())
        if form.weight and low <= high:
            least, most = low + form.weight * (least - low), high + form.weight * (most - high)
            low, high = least, most
        else:
            low, high = min(low, least), max(high, most)
    return low, high


def _scale(
    low: float, high: float, quant_min: int, quant_max: int, symmetric: bool, form: Form = EXTREMES
) -> float:
    """Return the step between two codes that cover ``[low, high]``."""
    if symmetric:
        scale = max(-low, high) / min(quant_max, -quant_min)
    else:
        scale = (high - low) / (quant_max - quant_min)
    return 2.0 ** math.ceil(math.log2(scale)) if form.power and scale > 0 else scale


def _text(scale: float, zero_point: float) -> str:
    return f"scale {scale:.6g}, zero point {zero_point:g}"


def _with_0(ends: tuple[float, float]) -> tuple[float, float]:
    return min(ends[0], 0.0), max(ends[1], 0.0)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-5 * abs(b)


def judge(form: Form, args: tuple, got: Any) -> Finding | None:
    """Compare with the definition, to the precision of float32; name the likely mistake."""
    batches, quant_min, quant_max, symmetric = args
    seen_low, seen_high = _range(batches, form)
    low, high = min(seen_low, 0.0), max(seen_high, 0.0)
    codes = quant_min, quant_max, symmetric, form
    scale = _scale(low, high, *codes) or 1.0
    zero_point = 0.0 if symmetric else min(max(quant_min - low / scale, quant_min), quant_max)
    expected = _text(scale, round(zero_point))
    if isinstance(got, str):
        return Finding(
            f"qparams() returned {got}; it returns a pair (scale, zero_point)", expected=expected
        )
    actual = _text(*got)
    found, point = got

    def wrong(sentence: str) -> Finding:
        count = "one batch" if len(batches) == 1 else f"{len(batches)} batches"
        saw = f"range: {seen_low:.4g} to {seen_high:.4g} in {count}; "
        return Finding(saw + sentence, expected=expected, actual=actual)

    if low == high:  # nothing but zeros
        if not 0 < found < float("inf"):
            return wrong(f"the scale is {found:g}: dividing by it gives no code; use 1")
        return None if point == zero_point else wrong(f"0 has the code {point:g}")
    if not _near(found, scale):
        return wrong(_why_scale(found, batches, low, high, codes))
    if symmetric and point != 0:
        return wrong(f"the zero point is {point:g}; symmetric codes have zero point 0")
    if point != int(point) or not quant_min <= point <= quant_max:
        return wrong(
            f"the zero point is {point:g}; it is a code, a whole number "
            f"from {quant_min} to {quant_max}"
        )
    if abs(point - zero_point) > 0.501:  # a tie may be rounded either way
        return wrong(_why_point(point, zero_point, quant_min))
    return None


def _why_scale(found: float, batches: Any, low: float, high: float, codes: tuple) -> str:
    """Say which other definition gives the scale that was found."""
    quant_min, quant_max, symmetric, form = codes
    last_low, last_high = _range(batches[-1:])
    seen_low, seen_high = _range(batches, form)
    if form.power and _near(found, _scale(low, high, *codes[:3])):
        return f"the scale is {found:.6g}; it is a power of two, rounded up"
    if form.weight and _near(found, _scale(*_with_0(_range(batches)), *codes)):
        return "the range is that of all values; a batch moves it a quarter of the way only"
    if not 0 < found < float("inf"):
        return f"the scale is {found:g}; a step between two codes is above 0 and finite"
    if len(batches) > 1 and (
        _near(found, _scale(min(last_low, 0), max(last_high, 0), *codes))
        or _near(found, _scale(last_low, last_high, *codes))
    ):
        return (
            "the scale fits the last batch only: observe widens the range, it does not replace it"
        )
    if not symmetric and _near(found, _scale(seen_low, seen_high, *codes)):
        return "0 lies outside the range, so it has no code: the range always includes 0"
    if not symmetric and _near(found, (high - low) / (quant_max - quant_min + 1)):
        return (
            f"the codes {quant_min} to {quant_max} are {quant_max - quant_min + 1} numbers, "
            f"and there are {quant_max - quant_min} steps between them"
        )
    if symmetric and _near(found, (high - low) / (quant_max - quant_min)):
        return (
            "symmetric codes reach as far down as up: the scale follows from the value "
            "that is furthest from 0, not from the width of the range"
        )
    if symmetric and _near(found, _scale(-high, -low, *codes)):
        return "the value that is furthest from 0 may be the smallest one: take the larger of both"
    reached = max(_range(batches)[1], -_range(batches)[0]) / found
    return f"with this scale the value furthest from 0 lies {reached:.1f} steps from it"


def _why_point(point: float, zero_point: float, quant_min: int) -> str:
    """Say what the zero point that was found would be right for."""
    if quant_min and abs(point - (zero_point - quant_min)) <= 0.501:
        return (
            f"the zero point counts from 0, but the codes begin at {quant_min}: "
            "the smallest value gets the smallest code"
        )
    if 0.5 < abs(point - zero_point) < 1:
        return f"the zero point is cut off, not rounded: {zero_point:.3f} became {point:g}"
    return f"the zero point is {point:g}, so the smallest value does not get the code {quant_min}"


def _batches(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def cases(form: Form = EXTREMES) -> Iterable[Case | Property]:
    """The public cases, smallest first."""
    judged = partial(judge, form)
    yield Case(
        "scale and zero point",
        "one batch, -1 to 1.55",
        lambda: (_batches([-1.0, 0.5, 1.55]), 0, 255, False),
        judged,
    )
    yield Case(
        "scale and zero point",
        "one batch, -0.1 to 0.457",
        lambda: (_batches([-0.1, 0.457]), 0, 255, False),
        judged,
    )
    yield Property(
        "scale and zero point",
        "random values on both sides of 0",
        lambda: _random(0, 255, False),
        judged,
    )
    yield Case(
        "all batches count",
        "a wide batch, then a narrow one",
        lambda: (_batches([-2.0, 3.0], [-0.5, 0.25]), 0, 255, False),
        judged,
    )
    yield Case(
        "all batches count",
        "each batch widens one end",
        lambda: (_batches([-2.0, 0.5], [0.1, 3.0], [-1.0, 1.0]), 0, 255, False),
        judged,
    )
    yield Case(
        "0 has a code",
        "values above 0 only",
        lambda: (_batches([1.0, 4.0]), 0, 255, False),
        judged,
    )
    yield Case(
        "0 has a code",
        "values below 0 only",
        lambda: (_batches([-4.0, -3.0]), 0, 255, False),
        judged,
    )
    yield Case(
        "other codes",
        "signed codes, -128 to 127",
        lambda: (_batches([-1.0, 1.55]), -128, 127, False),
        judged,
    )
    yield Case(
        "other codes",
        "four bits, 0 to 15",
        lambda: (_batches([-1.0, 2.0]), 0, 15, False),
        judged,
    )
    yield Case(
        "symmetric",
        "further up than down",
        lambda: (_batches([-0.5, 1.27]), -127, 127, True),
        judged,
    )
    yield Case(
        "symmetric",
        "further down than up",
        lambda: (_batches([-2.54, 1.0]), -127, 127, True),
        judged,
    )
    yield Property("symmetric", "random weights", lambda: _random(-127, 127, True), judged)
    yield Case("only zeros", "one zero", lambda: (_batches([0.0]), 0, 255, False), judged)
    yield Case("only zeros", "symmetric", lambda: (_batches([0.0, 0.0]), -127, 127, True), judged)


def hidden(form: Form = EXTREMES) -> Iterable[Case]:
    """The same behaviours on other numbers."""
    rows = [
        ("scale and zero point", _batches([-0.3, 7.9, 2.2]), 0, 255, False),
        ("all batches count", _batches([5.0, -0.2], [1.0], [-3.3, 0.1]), 0, 255, False),
        ("0 has a code", _batches([0.7, 0.9]), 0, 255, False),
        ("other codes", _batches([-6.0, 1.1]), -64, 63, False),
        ("symmetric", _batches([-0.31, 0.12]), -7, 7, True),
        ("only zeros", _batches([0.0], [0.0]), -128, 127, False),
    ]
    for behaviour, *args in rows:
        yield Case(behaviour, "other numbers", lambda args=tuple(args): args, partial(judge, form))


def _random(quant_min: int, quant_max: int, symmetric: bool) -> Any:
    """One batch of numbers with two decimals, some on each side of 0."""
    from hypothesis import strategies as st

    below = st.lists(st.integers(-500, -1), min_size=1, max_size=3)
    above = st.lists(st.integers(1, 500), min_size=1, max_size=3)
    batch = st.tuples(below, above).map(lambda ends: torch.tensor([*ends[0], *ends[1]]) / 100)
    return batch.map(lambda found: ([found], quant_min, quant_max, symmetric))


HINTS = (
    "An observer keeps only two numbers, whatever it is shown. The lecture's section 'A scale "
    "and a zero point' has the formula from a range to codes; here you go from values to the "
    "range, and from the range to scale and zero point.",
    "observe: the new low is the smaller of the old one and the smallest value of x; high "
    "likewise. qparams: widen the range so that 0 is in it. The scale is the width of the "
    "range, divided by how many steps there are from the smallest code to the largest. The "
    "zero point is the code that 0 gets when the low end gets quant_min. For symmetric codes "
    "ask which end is further from 0. Last, think of a tensor that holds nothing but zeros.",
    "`x.min()` is a tensor of no dimensions; `float(x.min())` is a number. Python's `round` "
    "gives the nearest whole number, `int` cuts off: round(2.7) is 3, int(2.7) is 2.",
)


def make(form: Form) -> Exercise:
    """Make one form of the exercise."""
    stub = STUB
    for old, new in form.words:
        stub = stub.replace(old, new)
    return Exercise(
        id="5.1",
        title="Scale and zero point from an observer",
        level=2,
        minutes=25,
        idea="A range seen in calibration becomes the two numbers that an int8 operator needs "
        "(section 6.2.1).",
        needs=("observer", "calibration", "scale and zero point", "saturation"),
        teaches=("affine and symmetric codes",),
        hints=HINTS,
        asks=(
            "fxlab.passes.quantize.observers.qparams_of_range",
            "fxlab.passes.quantize.observers.Observer.qparams",
            "torch.ao.quantization.observer.UniformQuantizationObserverBase._calculate_qparams",
        ),
        parts=(
            Part(
                id="5.1",
                name="MyObserver",
                points={
                    "scale and zero point": 2,
                    "all batches count": 2,
                    "0 has a code": 2,
                    "other codes": 1,
                    "symmetric": 2,
                    "only zeros": 1,
                },
                entry=entry,
                cases=partial(cases, form),
                hidden=partial(hidden, form),
                wrong={
                    "last_batch": "observe widens the range, it does not replace it",
                    "zero_outside": "the range always includes 0",
                    "counts_codes": "there are 255 steps between them",
                    "cuts_off": "cut off, not rounded",
                    "counts_from_0": "the smallest value gets the smallest code",
                    "divides_by_0": "dividing by it gives no code",
                    "width_if_symmetric": "not from the width of the range",
                },
                stub=stub,
            ),
        ),
    )


EXERCISE = make(EXTREMES)
_FORMS = {"extremes": EXTREMES, "moving": MOVING, "powers": POWERS}
VARIANTS = forms(make, _FORMS, lambda form: form.words)
