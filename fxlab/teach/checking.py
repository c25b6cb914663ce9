"""Is this answer right, as far as the public cases can tell?

`check` calls the student's function in the kernel, within the limits of `limits.py`, on the cases
of the exercise, and returns a card. The same call gives the same card: cases and generated programs
do not change from run to run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach import wire
from fxlab.teach.examine import examine, points_of
from fxlab.teach.exercise import Case, Exercise, Part, Property, part
from fxlab.teach.limits import AnswerError, Guard
from fxlab.teach.result import Result


def check(
    id: str,
    answer: Any,
    *,
    strict: bool = False,
    behaviour: str | None = None,
    cases: Iterable[Case | Property] | None = None,
) -> Result:
    """Run the public cases of an exercise on an answer.

    Args:
        id: "2.2", or "2.1a" for one part.
        answer: What the exercise asks to write: a function or class.
        strict: Raise when it is not right (in tests of a notebook); a card never raises.
        behaviour: Run the cases of this behaviour only.
        cases: Other cases than the public ones.

    Returns:
        The result; in a notebook it shows itself as a card. `result.show()` shows it and returns
        the points.

    Raises:
        ExerciseError: There is no such exercise, or `strict` and the answer is not right.
        NotDone: `strict` and the answer is still the stub.

    Example:
        >>> from fxlab.teach import NotDone, check
        >>> def my_dce(gm):
        ...     raise NotDone("2.2")
        >>> check("2.2", my_dce).status
        'todo'
    """
    owner, asked = part(id)
    try:
        result = run_check(owner, asked, answer, behaviour=behaviour, cases=cases)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ExerciseError(
            "checks need the package hypothesis", hint='%pip install "fxlab[teach]"'
        ) from None
    from fxlab.teach import keeping

    keeping.note_check(asked.id, result)
    if strict and not result:
        if result.status == "todo":
            from fxlab.teach.exercise import NotDone

            raise NotDone(asked.id)
        raise ExerciseError(str(result))
    return result


def run_check(
    owner: Exercise,
    asked: Part,
    answer: Any,
    *,
    behaviour: str | None = None,
    cases: Iterable[Case | Property] | None = None,
) -> Result:
    """Run cases in this process and make the result; nothing is kept."""
    begin = time.perf_counter()
    guard = Guard(asked.id, asked.asks or owner.asks)

    def call(args: tuple[Any, ...]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning on stderr would cost nbgrader's points
            value = guard.call(asked.entry, answer, *args)
        try:
            wire.encode(value)  # a grader sends it over a pipe: say here what it would say
        except wire.WireError as error:
            raise AnswerError("type", f"what it returned can't be judged: {error}") from None
        return value

    found = examine(asked, call, cases, behaviour)
    result = result_of(owner, asked, found, behaviour)
    result.printed = str(guard.printed)
    result.seconds = time.perf_counter() - begin
    result.answer, result.entry = answer, asked.entry
    return result


def result_of(
    owner: Exercise, asked: Part, found: list[Any], behaviour: str | None = None
) -> Result:
    """The result of a part's cases."""
    earned = points_of(asked, found)
    if behaviour is not None:
        earned = {behaviour: earned[behaviour]}
    behaviours = {name: (points, asked.points[name]) for name, points in earned.items()}
    wrong = [one.status for one in found if one.status in ("fail", "error")]
    todo = any(one.status == "todo" for one in found)
    status = wrong[0] if wrong else "todo" if todo else "pass"
    points, out_of = sum(earned.values()), sum(possible for _, possible in behaviours.values())
    return Result(asked.id, owner.title, status, points, out_of, behaviours, found)
