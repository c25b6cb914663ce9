"""How is one submission marked?

A `Marker` is a trusted process's way through a submission: for each part it starts a process with
the student's cells in it, runs the cases over the pipe, and makes plain data of what came out. What
it learns about one student's answers it uses for the next: arguments are made and encoded once, and
an answer that returned the very bytes that another one returned is judged once.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxlab.core.errors import ExerciseError
from fxlab.teach import variants, wire
from fxlab.teach.checking import result_of
from fxlab.teach.collect import Notebook, Submission, files_beside
from fxlab.teach.examine import (
    Caller,
    CaseResult,
    Failure,
    examine,
    first_graph,
    generate,
    judged,
    run_case,
)
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property, exercises, part
from fxlab.teach.limits import AnswerError
from fxlab.teach.result import code_of, diff_of
from fxlab.teach.student import FORKS, Server, Student, call_message

REMEMBERED = 20_000  # judgements
PASTED = 12_000  # characters of a program in a cell to paste


@dataclass
class Marked:
    """What came out of one part of one submission, as plain data.

    Attributes:
        id: The part's.
        status: "pass", "fail", "error", "todo", "missing" or "nothing" (no notebook).
        points: Earned.
        out_of: Possible.
        behaviours: Behaviour -> (earned, possible).
        kind: Of the first error: "time", "memory", "lost", "asked", ... or "".
        sentence: Why points are lost, first reason.
        wrong: The wrong program as text, for the teacher's summary.
        card: HTML for the feedback.
        paste: Lines of a cell that shows each lost point.
        shape: The answer's normalised syntax.
        late: Whether a time-out decided, so that it is to be run once more alone.
    """

    id: str
    status: str
    points: int
    out_of: int
    behaviours: dict[str, tuple[int, int]] = field(default_factory=dict)
    kind: str = ""
    sentence: str = ""
    wrong: str = ""
    card: str = ""
    paste: list[str] = field(default_factory=list)
    shape: list[str] = field(default_factory=list)
    late: bool = False


class Marker:
    """Marks submissions, one after the other; a context manager.

    Args:
        hidden: File of hidden cases, or None.
        seconds: CPU seconds of one call of an answer.
        fork: Fork the students' processes from a server; by default where that is possible.
        course: Number of the course whose variants were handed out, or None.
    """

    def __init__(
        self,
        hidden: Path | None = None,
        seconds: float = 5.0,
        fork: bool = FORKS,
        course: int | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.course = course
        variants.use_course(course)
        self.hidden = hidden_cases(hidden) if hidden is not None else {}
        self.seconds = seconds
        self.server = Server() if fork else None
        self.prepared: dict[tuple[str, int], list[bytes]] = {}
        self.cases: dict[str, list[Case | Property]] = {}
        self.known: dict[tuple[str, int, int, bytes], Failure | None] = {}

    def __enter__(self) -> Marker:
        return self

    def __exit__(self, *_: object) -> None:
        variants.use_course(None)
        if self.server is not None:
            self.server.close()

    def mark(self, submission: Submission, ids: Iterable[str]) -> list[Marked]:
        """Mark the named parts of a submission."""
        return [self.mark_part(submission, id) for id in ids]

    def mark_part(self, submission: Submission, id: str) -> Marked:
        """Mark one part; whatever the student's code does, this returns."""
        owner, asked = part(id)
        notebook = notebook_for(submission, asked)
        if notebook is None:
            return unanswered(submission, asked)
        files = files_beside(notebook.folder)
        with Student(self.server, files, self.seconds, loads=asked.loads) as student:
            try:
                student.start(id, notebook.cells, notebook.marks.get(id), self.course)
                found = examine(asked, student.call, self._cases(asked), run=self._run(id, student))
            except AnswerError as error:
                return self._unstarted(owner, asked, error)
            return self._marked(owner, asked, found, student)

    def _unstarted(self, owner: Exercise, asked: Part, error: AnswerError) -> Marked:
        sentence, total = error.sentence, asked.total
        kind = error.kind or "error"
        case = CaseResult(next(iter(asked.points)), "the answer's cell", "error", sentence)
        case.trace = error.trace
        card = result_of(owner, asked, [case])
        card.status = "error"
        status = "missing" if kind == "missing" else "error"
        made = Marked(asked.id, status, 0, total, none_of(asked), kind, sentence)
        made.card, made.late = card._repr_html_(), kind == "time"
        return made

    def _marked(
        self, owner: Exercise, asked: Part, found: list[CaseResult], student: Student
    ) -> Marked:
        result = result_of(owner, asked, found)
        result.printed = student.printed
        made = Marked(asked.id, result.status, result.points, result.out_of, result.behaviours)
        made.shape = student.shape
        first = result.first
        made.card = result._repr_html_()
        if first is not None:
            made.sentence = first.sentence
            finding = first.finding or Finding("")
            wrong = diff_of(finding) or code_of(finding.actual).splitlines()
            made.wrong = "\n".join(wrong)[:4000]
            made.kind = next((word for word, text in _KINDS if text in first.sentence), "")
            made.late = made.kind == "time"
            made.paste = self._paste(asked, found)
        return made

    def _paste(self, asked: Part, found: list[CaseResult]) -> list[str]:
        """Lines that show each lost point where the student works."""
        public = {case.title for case in asked.cases()}
        lines = ["from fxlab.teach import check, replay"]
        for behaviour in dict.fromkeys(one.behaviour for one in found if one.status != "pass"):
            first = next(r for r in found if r.behaviour == behaviour and r.status != "pass")
            if first.title in public or first.args is None:
                lines.append(f'check("{asked.id}", {asked.name}, behaviour={behaviour!r}).show();')
                continue
            packed = base64.b85encode(zlib.compress(wire.encode(first.args), 9)).decode()
            if len(packed) <= PASTED:
                lines.append(f'replay("{asked.id}", {asked.name}, {packed!r})')
        return lines if len(lines) > 1 else []

    # -- cases, prepared once ----------------------------------------------------------------------

    def _cases(self, asked: Part) -> list[Case | Property]:
        if asked.id not in self.cases:
            self.cases[asked.id] = [*asked.cases(), *self.hidden.get(asked.id, ())]
        return self.cases[asked.id]

    def _run(self, id: str, student: Student) -> Any:
        places = {case: place for place, case in enumerate(self._cases(part(id)[1]))}

        def run(case: Case | Property, call: Caller) -> Failure | None:
            place = places[case]
            for number, message in enumerate(self._messages(id, place, case)):
                failure = self._try((id, place, number), case, message, student)
                if failure is None:
                    continue
                if isinstance(case, Case) or failure.error is not None:
                    return failure
                return run_case(case, call) or failure  # cut it down
            return None

        return run

    def _messages(self, id: str, place: int, case: Case | Property) -> list[bytes]:
        if (id, place) not in self.prepared:
            found: list[bytes] = []
            if isinstance(case, Case):
                found.append(call_message(case.args()))
            else:
                generate(case, lambda args: found.append(call_message(args)))
            self.prepared[id, place] = found
        return self.prepared[id, place]

    def _try(
        self, key: tuple[str, int, int], case: Case | Property, message: bytes, student: Student
    ) -> Failure | None:
        args: tuple[Any, ...]
        try:
            response = student.exchange(message)
            digest = hashlib.blake2b(response, digest_size=16).digest()
            if (*key, digest) in self.known:
                return self.known[(*key, digest)]
            value = student.read(response).get("value")
        except AnswerError as error:
            args = wire.decode(message)["args"]
            finding = error.finding or Finding(error.sentence)
            finding.graph = finding.graph or first_graph(args)
            return Failure(args, finding, error)
        args = wire.decode(message)["args"]
        finding = judged(case, args, value)
        failure = None
        if finding is not None:
            failure = Failure(wire.decode(message)["args"], finding)
        if len(self.known) < REMEMBERED:
            self.known[(*key, digest)] = failure
        return failure


_KINDS = (
    ("time", "CPU s"), ("time", "no answer within"), ("memory", "ran out of memory"),
    ("lost", "its process ended"), ("asked", "asks you to write this"),
)  # fmt: skip


def none_of(asked: Part) -> dict[str, tuple[int, int]]:
    """No points for any behaviour."""
    return {name: (0, points) for name, points in asked.points.items()}


def notebook_for(submission: Submission, asked: Part) -> Notebook | None:
    """The latest notebook in which a part is answered: its cell is marked, or its name is there."""
    latest = submission.notebooks[::-1]
    marked = [one for one in latest if asked.id in one.marks]
    return next((one for one in [*marked, *latest] if _mentions(one, asked)), None) or (
        marked[0] if marked else None
    )


def unanswered(submission: Submission, asked: Part) -> Marked:
    """The mark of a part for which no notebook was handed in."""
    status = "missing" if _has_neighbour(submission, asked) else "nothing"
    why = f"no cell defines {asked.name}" if status == "missing" else "nothing to mark"
    return Marked(asked.id, status, 0, asked.total, none_of(asked), status, why)


def _has_neighbour(submission: Submission, asked: Part) -> bool:
    """Whether another exercise of the same notebook was handed in: then this one is missing."""
    group = asked.id.partition(".")[0]
    for one in submission.notebooks:
        if any(id.partition(".")[0] == group for id in one.marks):
            return True
    return False


def _mentions(notebook: Notebook, asked: Part) -> bool:
    form = rf"^(?:def |class )?{asked.name}\b(?=\s*[(:=])|import .*\b{asked.name}\b"
    definition = re.compile(form, re.MULTILINE)
    return any(definition.search(cell) for cell in notebook.cells)


def parts_in(submissions: Iterable[Submission]) -> list[str]:
    """The parts that at least one submission has a cell for, in the course's order."""
    kept = []
    submissions = list(submissions)
    for owner in exercises():
        for one in owner.parts:
            if any(notebook_for(submission, one) is not None for submission in submissions):
                kept.append(one.id)
    return kept


def _more(asked: Part) -> list[Case | Property]:
    """A part's properties, on more arguments."""
    own = [case for case in asked.cases() if isinstance(case, Property)]
    return [replace(one, title=f"more: {one.title}", examples=4 * one.examples) for one in own]


def hidden_cases(path: Path) -> dict[str, list[Case | Property]]:
    """Read a teacher's file of hidden cases: `CASES = {"2.2": [Case(...), Property(...)]}`.

    The path "kit" gives the exercises' own second set; where an exercise has none, four times as
    many generated arguments as `check` tries.

    Raises:
        ExerciseError: The file does not say that, or names a behaviour that earns no points.
    """
    if str(path) == "kit":
        parts = [one for owner in exercises() for one in owner.parts]
        found = {one.id: list((one.hidden or partial(_more, one))()) for one in parts}
        return {id: own for id, own in found.items() if own}
    if not path.is_file():
        raise ExerciseError(f"there is no file {path.name!r} of hidden cases")
    spec = importlib.util.spec_from_file_location("hidden_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hidden_cases"] = module
    spec.loader.exec_module(module)
    cases = getattr(module, "CASES", None)
    if not isinstance(cases, dict):
        raise ExerciseError(f'{path.name} has no CASES = {{"2.2": [Case(...), ...]}}')
    for id, own in cases.items():
        points = part(id)[1].points
        for case in own:
            if not isinstance(case, Case | Property) or case.behaviour not in points:
                raise ExerciseError(
                    f"{path.name}: {id} has a case of {getattr(case, 'behaviour', case)!r}",
                    expected="one of " + ", ".join(points),
                )
    return cases
