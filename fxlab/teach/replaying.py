"""How does a student see a point that was lost on a case that the notebook doesn't have?

Feedback has a cell to paste: `replay` with the failing arguments in it, as the grader sent them.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.core.graph_module import GraphModule
from fxlab.teach import wire
from fxlab.teach.exercise import part
from fxlab.teach.limits import AnswerError, Guard
from fxlab.teach.result import code_of, stepped


def replay(id: str, answer: Any, packed: str, *, explore: bool = False) -> Any:
    """Call an answer on the arguments that a page of feedback carries, and show what it does.

    Args:
        id: The part's.
        answer: The student's function.
        packed: From the feedback.
        explore: Step through it, where it edits a program.

    Returns:
        What the answer returned; an Explorer with `explore`.

    Raises:
        ExerciseError: `packed` is not from a page of feedback.
    """
    owner, asked = part(id)
    try:
        args = wire.decode(zlib.decompress(base64.b85decode(packed)))
    except (ValueError, zlib.error, wire.WireError):
        raise ExerciseError("this text was not made by fxlab grade, or a part is missing") from None
    if explore and any(isinstance(one, GraphModule) for one in args):
        return stepped(asked.entry, answer, args)
    for number, one in enumerate(args):
        print(f"argument {number}:\n{code_of(one)}")
    try:
        value = Guard(id, asked.asks or owner.asks).call(asked.entry, answer, *args)
    except AnswerError as error:
        print(f"{error.sentence}\n{error.trace}")
        return None
    print(f"your answer:\n{code_of(value)}")
    return value
