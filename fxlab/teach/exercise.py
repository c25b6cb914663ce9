"""What is an exercise, and which are there?

An exercise is data: its texts, the behaviours that earn points, the cases of each, and the
plausible wrong answers with the sentence that each must be told. One file of `exercises/` holds one
exercise; the registry finds them by their file names. `check` and `grade` both run `examine.py`
over this data, so that they can't disagree. There is no solution here: a judge compares with what
the kit's own pass or torch.fx makes of the same program, or with a property that any right answer
has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxlab.core.errors import ExerciseError

FOLDER = Path(__file__).parent / "exercises"
ID = re.compile(r"\d+\.\d+")
PART_ID = re.compile(r"\d+\.\d+[a-z]?")


class NotDone(NotImplementedError):
    """What a stub raises: this exercise, or this part of it, is not written yet.

    Args:
        id: Such as "2.2" or "2.1a".

    Example:
        >>> raise NotDone("2.2")
        Traceback (most recent call last):
        ...
        fxlab.teach.exercise.NotDone: 2.2 is not written yet: replace this line with your answer
    """

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id

    def __str__(self) -> str:
        return f"{self.id} is not written yet: replace this line with your answer"


@dataclass
class Finding:
    """Why an answer is wrong on one case.

    Attributes:
        sentence: What happened and what to do, in one sentence.
        node: The node it shows at, as the student's graph names it; "" where there is none.
        expected: The program that was expected (a GraphModule), or its code or value as text.
        actual: The program that the answer made, or its code or value as text.
        graph: The input program, as it was given to the answer.
    """

    sentence: str
    node: str = ""
    expected: Any = None
    actual: Any = None
    graph: Any = None


Judge = Callable[[tuple[Any, ...], Any], "Finding | None"]


@dataclass(frozen=True)
class Case:
    """One input of one behaviour.

    Attributes:
        behaviour: The name of what earns the points, a key of `Part.points`.
        title: What is special about the input, shown to the student.
        args: Makes the arguments anew: GraphModules, tensors, numbers, texts, and lists, tuples and
            dicts of them. Two calls return equal arguments.
        judge: `judge(args, value)` gets arguments that nobody has touched and what `Part.entry`
            returned, and gives a Finding or, when it is right, None.
        after: A behaviour without which this case has nothing to say: it is not run when a case of
            that behaviour went wrong.
    """

    behaviour: str
    title: str
    args: Callable[[], tuple[Any, ...]]
    judge: Judge
    after: str = ""


@dataclass(frozen=True)
class Property:
    """The same on generated arguments, cut down to the smallest that fails.

    Attributes:
        behaviour: A key of `Part.points`.
        title: Shown to the student.
        args: Makes the hypothesis strategy of argument tuples (a call, so that hypothesis is
            imported only when it is needed).
        judge: As in `Case`.
        examples: How many arguments are tried; the same ones each time.
    """

    behaviour: str
    title: str
    args: Callable[[], Any]
    judge: Judge
    examples: int = 30


@dataclass(frozen=True)
class Part:
    """What one cell of the student's defines, and how it is judged.

    Attributes:
        id: "2.2", or "2.1a" where the exercise has parts.
        name: The name that the student's cell defines.
        points: Behaviour -> points. A behaviour's points are given when all its cases are right.
        entry: `entry(answer, *args)` calls the student's object as the exercise says and returns
            what crosses a pipe. It runs where the student's code runs; a module-level function.
        cases: The public cases, smallest first.
        wrong: Name of a plausible wrong answer -> a distinctive part of the sentence it is told.
        stub: First line of the stub and its docstring, as in the master notebook.
        hidden: The same behaviours on other inputs, or None.
        asks: What this part asks to write and may not be called; empty: the exercise's `asks`.
        loads: Modules that a call imports late: a grader imports them once for the whole class.
    """

    id: str
    name: str
    points: dict[str, int]
    entry: Callable[..., Any]
    cases: Callable[[], Iterable[Case | Property]]
    wrong: dict[str, str]
    stub: str = ""
    hidden: Callable[[], Iterable[Case | Property]] | None = None
    asks: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The points of all behaviours together."""
        return sum(self.points.values())


@dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    Attributes:
        id: Such as "2.2": heading, stub, check, pytest id and CSV column all use it.
        title: As in the notebook's heading.
        level: 1 (read) to 5.
        minutes: Of a student who has come this far in the course.
        idea: One sentence, with the paper's section.
        needs: Words of the glossary that are taught before.
        teaches: Words of the glossary that this exercise teaches.
        hints: The idea again and where the lecture shows it; the steps in words; the call that
            beginners miss, on another example.
        asks: Qualified names of what it asks to write: called from an answer, they refuse.
        parts: One, or (a), (b), (c).
    """

    id: str
    title: str
    level: int
    minutes: int
    idea: str
    needs: tuple[str, ...]
    teaches: tuple[str, ...]
    hints: tuple[str, str, str]
    asks: tuple[str, ...]
    parts: tuple[Part, ...] = field(default=())

    @property
    def total(self) -> int:
        """The points of all parts together."""
        return sum(part.total for part in self.parts)


def private_files() -> list[Path]:
    """Files of exercises that are not the kit's: FXLAB_EXERCISES, and beside a notebook."""
    folders = [Path(one) for one in os.environ.get("FXLAB_EXERCISES", "").split(os.pathsep) if one]
    if "ipykernel" in sys.modules:
        folders.append(Path.cwd())
    return [path for folder in folders for path in sorted(folder.glob("ex_*.py"))]


@functools.cache
def _load(path: Path, changed: float) -> Exercise:
    name = f"fxlab_private_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ExerciseError(f"{path.name} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.EXERCISE


@functools.cache
def _kits() -> dict[str, Exercise]:
    found = []
    for path in FOLDER.glob("ex_*.py"):
        found.append(importlib.import_module(f"fxlab.teach.exercises.{path.stem}").EXERCISE)
    found.sort(key=lambda one: tuple(int(number) for number in one.id.split(".")))
    return {one.id: one for one in found}


def plain_registry() -> dict[str, Exercise]:
    """Every exercise in its public form, by id."""
    own = [_load(path, path.stat().st_mtime) for path in private_files()]
    return {**{one.id: one for one in own}, **_kits()} if own else _kits()


_forms: dict[str, Exercise] = {}


def use_forms(forms: dict[str, Exercise]) -> None:
    """Let the registry answer with other forms of some exercises; {} for the public ones."""
    _forms.clear()
    _forms.update(forms)


def _registry() -> dict[str, Exercise]:
    return {**plain_registry(), **_forms}


def exercises() -> list[Exercise]:
    """List every exercise, sorted by id: the kit's, and those of FXLAB_EXERCISES.

    Example:
        >>> [one.title for one in exercises() if one.id == "2.2"]
        ['Dead code elimination that keeps effects']
    """
    found = _registry()
    return sorted(found.values(), key=lambda one: tuple(map(int, one.id.split("."))))


def exercise(id: str) -> Exercise:
    """Return the exercise "2.2" (or the one that part "2.1a" belongs to).

    Raises:
        ExerciseError: There is no such exercise; the message lists what there is.
    """
    found = _registry().get(id.rstrip("abc")) if isinstance(id, str) else None
    if found is None:
        raise ExerciseError(
            f"there is no exercise {id!r}", expected="one of " + ", ".join(_registry())
        )
    return found


def part(id: str) -> tuple[Exercise, Part]:
    """Return the part "2.1a" (or the only part of "2.2") and its exercise.

    Raises:
        ExerciseError: There is no such part.
    """
    owner = exercise(id)
    found = [one for one in owner.parts if id in (one.id, owner.id)]
    if len(found) != 1:
        raise ExerciseError(
            f"exercise {owner.id} has no part {id!r}",
            expected="one of " + ", ".join(one.id for one in owner.parts),
        )
    return owner, found[0]
