"""3.3: can somebody find the edit that broke a program, in a pass that is not theirs?

Three passes of ``foreign.py``, each wrong in another way: one fails in the middle of each match,
right ones too; one is right on the input at hand; one changes nothing that a single call returns.
The truth is looked for here with a check that all three can't pass: several wide inputs, two calls
each, outputs and state. A failing pass is not blamed by binary search (EXPLORER's ``bisect``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.explorer.hunt import Bisection, judge
from fxlab.explorer.record import record
from fxlab.explorer.timeline import Step
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.exercises import foreign
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError

Pass = Callable[[GraphModule], None]


def leaking(x: torch.Tensor) -> torch.Tensor:
    """Say some things twice."""
    a = torch.relu(x.abs()) + torch.relu(x.abs())
    b = nn.functional.leaky_relu(x, 0.2, inplace=False)
    c = nn.functional.elu(x, alpha=1.0) + nn.functional.elu(x, alpha=3.0)
    return a * b + c + torch.relu(x.abs())


class Remembering(nn.Module):
    """Leave something behind at each call."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f64[4] for f64[n, 4]."""
        y = self.seen.sum(0) + x.mean(0)
        x.exp()
        self.seen[0] = y
        x.neg().relu()
        return torch.tanh(y)


def entry(answer: Any, gm: GraphModule, x: torch.Tensor) -> str:
    """Return the code of the step that the answer names.

    Returns:
        The code; "" for none, "start" for before all, "None" when it returned None.

    Raises:
        AnswerError: It returned something that names no step.
    """
    found = answer(gm, x)
    if isinstance(found, Bisection):
        if found.last_good is None:
            return "start"
        return "" if found.step is None else found.step.code
    if isinstance(found, Step):
        return found.code
    if found is None:
        return "None"
    if isinstance(found, str) and re.fullmatch(r"\w+:\d+(/.*)?", found):
        return found
    raise AnswerError(
        "type", f"it returned {kind_of(found)}: return what timeline.bisect(check) returned"
    )


def truth(pass_: Pass, gm: GraphModule) -> tuple[Any, list[bool | None], Any]:
    """Find the edit that broke ``gm`` for good.

    Returns:
        The timeline, for each frame whether it computes what the start does, and the Bisection.
    """
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    inputs = [scale * wide for scale in (0.1, 1, 10, 100)]

    def behaviour(program: Any) -> list[Any]:
        program = copy.deepcopy(program)
        with torch.no_grad():
            seen = [program(x) for x in inputs for _ in range(2)]
        return [*seen, list(program.buffers())]

    wanted = behaviour(gm)

    def check(program: Any) -> bool:
        return not unequal(wanted, behaviour(program), 1e-9)

    with record(gm) as timeline:
        pass_(gm)
    verdicts = [judge(timeline, check, index)[0] for index in range(len(timeline.steps) + 1)]
    return timeline, verdicts, timeline.bisect(check)


def _judge(pass_: Pass, nothing: str) -> Callable[[tuple[Any, ...], Any], Finding | None]:
    """Make the judge for one pass; ``nothing`` is said to who finds that nothing broke."""

    def judged(args: tuple[Any, ...], value: Any) -> Finding | None:
        gm, x = args
        timeline, verdicts, found = truth(pass_, copy.deepcopy(gm))
        if value == "None":
            return Finding(
                "it returned None. Either `return` is missing, return what timeline.bisect(check) "
                f"returns; or it holds no step, as nothing broke for good. {nothing}"
            )
        if value == "":
            return Finding(f"it found that nothing broke for good. {nothing}")
        if value == "start":
            return Finding(
                "no frame passes your check, not even the start. Is what you compare with taken "
                "before the pass ran, and from a copy, so that no call changes the program that "
                "is recorded?"
            )
        index, last = int(value.partition(":")[2].partition("/")[0]), len(timeline.steps)
        if not 1 <= index <= last:
            return Finding(f"there is no step {index}: the pass makes {last} edits on this program")
        if index == found.step.index:
            return None
        step = timeline.steps[index - 1]
        said = f"step {index} ({step.sentence})"
        if index > found.step.index:
            return Finding(f"before {said} the program is broken already: look earlier")
        if verdicts[index]:
            copied = " Does your check run a copy, so that no frame is changed by being looked at?"
            return Finding(
                f"after {said} the program still computes what it did at the start, outputs and "
                f"state{_rounding(timeline, index, x)}.{copied if list(gm.buffers()) else ''}"
            )
        healed = next(k for k in range(index, last + 1) if verdicts[k])
        return Finding(
            f"{said} breaks the program only for a moment: after step {healed} it computes the "
            f"same again{_rounding(timeline, healed, x)}, as in the middle of any right match. "
            "Look for the failure that stays"
        )

    return judged


def _rounding(timeline: Any, index: int, x: torch.Tensor) -> str:
    """Say so when a frame's output is that of the start up to rounding, and not to the last bit."""
    with torch.no_grad():
        first, now = (copy.deepcopy(timeline.module(k))(x.clone()) for k in (0, index))
    return "" if torch.equal(first, now) else " (up to rounding: use torch.allclose)"


THIS, OTHER = "this program", "another program"
_a = _judge(
    foreign.fold_scales,
    "Is what you compare with computed before the pass ran? Afterwards it is the broken program's.",
)
_b = _judge(
    foreign.merge_repeats,
    "On the inputs that you tried the program is right to the end. Try others: large and negative "
    "at once, as torch.linspace(-40, 40, x.numel(), dtype=x.dtype).view_as(x).",
)
_c = _judge(
    foreign.drop_unread,
    "One call returns what it did before. Look at what a call leaves behind: call twice, or "
    "compare the buffers.",
)


def _cases_a() -> Iterator[Case]:
    yield Case(THIS, "layers a, b, c, d, c", lambda: foreign.program("a"), _a)
    yield Case(OTHER, "layers a, a, b, c", lambda: foreign.made(foreign.Scaled("aabc")), _a)
    yield Case(OTHER, "layers b, c, d, a, d", lambda: foreign.made(foreign.Scaled("bcdad")), _a)


def _cases_b() -> Iterator[Case]:
    yield Case(THIS, "limited", lambda: foreign.program("b"), _b)
    yield Case(OTHER, "leaking", lambda: foreign.made(leaking), _b)


def _cases_c() -> Iterator[Case]:
    yield Case(THIS, "Counting", lambda: foreign.program("c"), _c)
    yield Case(OTHER, "Remembering", lambda: foreign.made(Remembering()), _c)


def _stub(letter: str, pass_: str, promise: str) -> str:
    return (
        f"def find_{letter}(gm, x):\n"
        f'    """Return what bisect finds for foreign.{pass_} on ``gm``.\n'
        "\n"
        f"    {promise}\n"
        '    """'
    )


def _part(
    letter: str, cases: Callable[[], Iterable[Case]], wrong: dict[str, str], stub: str
) -> Part:
    points = {THIS: 2, OTHER: 1}
    return Part(f"3.3{letter}", f"find_{letter}", points, entry, cases, wrong, stub)


EXERCISE = Exercise(
    id="3.3",
    title="Find the edit that broke it: three foreign passes",
    level=2,
    minutes=30,
    idea="A pass is a list of edits, and a right one is wrong in the middle of each match: what "
    "counts is the failure that never heals (sections 6.2 and 4.3).",
    needs=("timeline", "edit", "fold", "effect", "same output"),
    teaches=("bisect",),
    hints=(
        "Lecture 07, 'A wrong fold, found', does it for one pass: record it, then "
        "timeline.bisect(check). bisect asks check about the program after each edit. So the "
        "whole question is what check must look at.",
        "Take what the right program computes before the pass runs. (a) One input is enough; let "
        "bisect tell the failures that heal from the one that stays. (b) The two programs differ, "
        "but not on this x: compare on inputs of your own. (c) They differ only in what a call "
        "leaves behind: compare what the second call returns.",
        "A call may change the program's buffers, so a check that calls it spoils what it looks "
        "at. On another example: twin = copy.deepcopy(program); twin(x) leaves program as it is. "
        "And torch.linspace(-40, 40, x.numel(), dtype=x.dtype).view_as(x) reaches further than x.",
    ),
    asks=("fxlab.teach.exercises.ex_3_3.truth",),
    parts=(
        _part("a", _cases_a, {
            "first_failure": "only for a moment",
            "last_edit": "the program is broken already",
            "compared_afterwards": "Is what you compare with computed before the pass ran",
            "told_by_hand": "look earlier",
            "forgotten_return": "Either `return` is missing",
            "to_the_last_bit": "up to rounding: use torch.allclose",
        }, _stub("a", "fold_scales", "The edit from which on it never computes the same.")),
        _part("b", _cases_b, {
            "this_input": "Try others: large and negative at once",
            "shapes_only": "On the inputs that you tried the program is right",
            "first_edit": "the program still computes what it did",
        }, _stub("b", "merge_repeats", "On ``x`` itself the program is right to the end.")),
        _part("c", _cases_c, {
            "one_call": "Look at what a call leaves behind",
            "no_copy": "Does your check run a copy",
            "spoilt_start": "no frame passes your check",
        }, _stub("c", "drop_unread", "A single call returns what it did before.")),
    ),
)  # fmt: skip
