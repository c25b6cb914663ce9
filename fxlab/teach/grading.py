"""How does a folder of submissions become a table of points?

`grade` finds the submissions, marks each in trusted worker processes that run no line of a
student's (`marking.py`), marks once more alone what ran out of time, and writes the CSV, one page
of feedback for each student and a summary for the teacher. The same command again writes the same
CSV, byte for byte, and runs only what changed (`remembering.py`). Limits and separate processes
keep honest mistakes apart; this is no sandbox: grade submissions of people you don't trust in a
container or a virtual machine.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach import feedback, process, similar
from fxlab.teach.collect import Submission, class_list, collect
from fxlab.teach.exercise import part
from fxlab.teach.marking import Marked, Marker, none_of, notebook_for, parts_in, unanswered
from fxlab.teach.remembering import Remembered

WARNING = (
    "fxlab grade runs students' code with limits of time and memory, each exercise in a process of "
    "its own. That is no sandbox: for code that you don't trust use a container."
)


@dataclass
class Grades:
    """What `grade` found.

    Attributes:
        ids: The parts, in the course's order: columns of the CSV.
        submissions: One for each student, sorted by id.
        marks: Student -> what came out of each part.
        pairs: Similar answers, if asked for: (part, student, student, similarity).
        kept: How many marks are those of the run before.
        seconds: What it took.
    """

    ids: list[str]
    submissions: list[Submission]
    marks: dict[str, list[Marked]]
    pairs: list[tuple[str, str, str, float]] = field(default_factory=list)
    kept: int = 0
    seconds: float = 0.0

    def points(self, student: str) -> int:
        """A student's points in all."""
        return sum(one.points for one in self.marks[student])

    @property
    def out_of(self) -> int:
        """The points that one student could get."""
        return sum(part(id)[1].total for id in self.ids)

    def to_csv(self) -> str:
        """The table: student, name, points, out_of, a column for each part, remarks."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["student", "name", "points", "out_of", *self.ids, "remarks"])
        for one in self.submissions:
            marks = self.marks[one.student]
            points = [mark.points for mark in marks]
            row = [one.student, one.name, self.points(one.student), self.out_of, *points]
            writer.writerow([*map(_cell, row), _cell(remarks(one, marks))])
        return text.getvalue()


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    text = str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def remarks(one: Submission, marks: Sequence[Marked]) -> str:
    """What a teacher should know of a submission, in one line."""
    said = list(one.problems)
    if not one.files:
        return "handed in nothing"
    for mark in marks:
        if mark.kind in ("time", "memory", "lost", "asked", "missing"):
            said.append(f"{mark.id}: {_WORDS[mark.kind]}")
    return "; ".join(text.replace("\n", " ") for text in said)


_WORDS = {
    "time": "ran out of time",
    "memory": "ran out of memory",
    "lost": "its process ended",
    "asked": "calls what it should write",
    "missing": "no answer found",
}


def grade(
    submissions: str | Path,
    out: str | Path = "grades.csv",
    *,
    jobs: int = 1,
    hidden: str | Path | None = None,
    students: str | Path | None = None,
    exercises: Iterable[str] | None = None,
    similar_pairs: bool = False,
    seconds: float = 5.0,
    course: int | None = None,
    fresh: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Grades:
    """Mark every submission in a folder.

    Args:
        submissions: Folder or zip: a folder, notebook or zip for each student, or a bulk download
            of Moodle or Canvas.
        out: The CSV to write. Beside it go `<name>-feedback/<student>.html`,
            `<name>-summary.html`, `<name>-marks.json.gz` for the next run and, if asked for,
            `<name>-similar.csv`.
        jobs: How many submissions at a time.
        hidden: A file of hidden cases, `CASES = {"2.2": [Case(...), ...]}`; "kit" for the kit's
            own second set, which is public but in no notebook.
        students: A class list (CSV): its ids stand in the table, with a line for each student who
            handed in nothing.
        exercises: Ids such as "2.2" or "2.1a"; by default all that any submission has a cell for.
        similar_pairs: List pairs of similar answers. A reason to talk, never points.
        seconds: CPU seconds of one call of an answer.
        course: Number of the course that was released, for its variants.
        fresh: Mark everything anew, also what was marked before and is the same.
        progress: Called with (done, all, student).

    Returns:
        The grades; they are written already.

    Raises:
        ExerciseError: There is no such folder, file or exercise, or nothing was handed in.
        BaseException: What interrupts it; the next run begins with what was marked till then.
    """
    import time

    begin = time.monotonic()
    out = Path(out)
    hidden = Path(hidden) if hidden is not None else None
    listed = class_list(Path(students)) if students is not None else None
    with tempfile.TemporaryDirectory(prefix="fxlab-grade-") as room:
        beside = (f"{out.stem}-feedback", f"{out.stem}-marks.json.gz")
        written = beside if out.parent.resolve() == Path(submissions).resolve() else ()
        found = collect(Path(submissions), Path(room), listed, written)
        ids = _asked(exercises) if exercises is not None else parts_in(found)
        if hidden is not None:
            from fxlab.teach.marking import hidden_cases

            hidden_cases(hidden)  # say now what is wrong with it
        if not found:
            raise ExerciseError(
                f"nobody handed in anything in {Path(submissions).name!r}",
                expected="a folder, a notebook or a zip for each student",
            )
        options = {"hidden": hidden, "seconds": seconds, "course": course}
        known = Remembered(out.with_name(beside[1]), options, fresh)
        done = {one.student: _done(one, ids, known) for one in found}
        marks: dict[str, list[Marked]] = {}
        try:
            _mark_all(found, ids, done, jobs, options, progress, marks)
            _again(found, marks, done, options, progress)
        except BaseException:  # the teacher's interrupt: what was marked need not run again
            _keep(found, marks, known, without="time")  # that had no second try
            raise
        _keep(found, marks, known)
    marks = {one.student: marks[one.student] for one in found}
    grades = Grades(ids, found, marks, kept=known.used)
    if similar_pairs:
        grades.pairs = similar.pairs(marks)
    grades.seconds = time.monotonic() - begin
    _write(grades, out, similar_pairs)
    return grades


Task = tuple[Submission, list[str]]  # a student and the parts that have to be run


def _asked(wanted: Iterable[str]) -> list[str]:
    from fxlab.teach.exercise import exercise

    ids: list[str] = []
    for id in wanted:
        owner = exercise(id)
        own = [one.id for one in owner.parts if id in (owner.id, one.id)]
        if not own:
            part(id)  # says what there is
        ids += [one for one in own if one not in ids]
    return ids


def _done(one: Submission, ids: list[str], known: Remembered) -> dict[str, Marked]:
    """Part -> mark, where no line of the student's has to run for it."""
    if not one.notebooks:
        return {id: _nothing(id) for id in ids}
    found: dict[str, Marked] = {}
    for id in ids:
        asked = part(id)[1]
        answered = notebook_for(one, asked) is not None
        mark = known.mark(one, id) if answered else unanswered(one, asked)
        if mark is not None:
            found[id] = mark
    return found


def _nothing(id: str) -> Marked:
    asked = part(id)[1]
    return Marked(id, "nothing", 0, asked.total, none_of(asked), "", "nothing to mark")


def _mark_all(
    found: list[Submission],
    ids: list[str],
    done: dict[str, dict[str, Marked]],
    jobs: int,
    options: dict[str, Any],
    progress: Callable[[int, int, str], None] | None,
    marks: dict[str, list[Marked]],
) -> None:
    """Fill `marks`, student -> the mark of each part; what is `done` is not run."""

    def keep(student: str, new: list[Marked]) -> None:
        own = {**done[student], **{mark.id: mark for mark in new}}
        marks[student] = [own[id] for id in ids]
        if progress is not None:
            progress(len(marks), len(found), student)

    waiting: list[Task] = []
    for one in found:
        left = [id for id in ids if id not in done[one.student]]
        if left:
            waiting.append((one, left))
        else:
            keep(one.student, [])
    if jobs <= 1:
        _mark_here(waiting, options, keep)
    elif waiting:
        _mark_with(jobs, waiting, options, keep)
        # A worker that broke takes the others' work with it: those are marked one at a time.
        for one, left in [task for task in waiting if task[0].student not in marks]:
            _mark_with(1, [(one, left)], options, keep)
            if one.student not in marks:
                one.problems.append("marking it broke the grader's own process")
                keep(one.student, [_nothing(id) for id in left])


def _mark_here(
    waiting: list[Task], options: dict[str, Any], keep: Callable[[str, list[Marked]], None]
) -> None:
    if waiting:
        with Marker(**options) as marker:
            for one, left in waiting:
                keep(one.student, marker.mark(one, left))


def _mark_with(
    jobs: int,
    waiting: list[Task],
    options: dict[str, Any],
    keep: Callable[[str, list[Marked]], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _open_worker, (options,)) as pool:
        tasks = {pool.submit(_mark_in_worker, *task): task[0] for task in waiting}
        try:
            for task in as_completed(tasks):
                keep(tasks[task].student, task.result())
        except BrokenProcessPool:
            return
        except BaseException:  # the teacher's interrupt: don't mark the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_worker: list[Marker] = []


def _open_worker(options: dict[str, Any]) -> None:
    import atexit

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process.die_with_parent()
    _worker.append(Marker(**options))
    server = _worker[0].server
    if server is not None:
        atexit.register(server.close)


def _mark_in_worker(one: Submission, ids: list[str]) -> list[Marked]:
    return _worker[0].mark(one, ids)


def _keep(
    found: list[Submission],
    marks: dict[str, list[Marked]],
    known: Remembered,
    without: str | None = None,
) -> None:
    """Write down what was marked, but for one kind of mark, before anything else is written."""
    for one in found:
        for mark in marks.get(one.student, ()):
            if mark.kind != without:
                known.keep(one, mark)
    known.write()


def _again(
    found: list[Submission],
    marks: dict[str, list[Marked]],
    done: dict[str, dict[str, Marked]],
    options: dict[str, Any],
    progress: Callable[[int, int, str], None] | None,
) -> None:
    """Run once more, alone, what ran out of time: the machine was busy before."""
    late = [
        (one, k)
        for one in found
        for k, mark in enumerate(marks[one.student])
        if mark.late and mark.id not in done[one.student]
    ]
    if not late:
        return
    told = progress or (lambda *_: None)
    with Marker(**options) as marker:
        for number, (one, k) in enumerate(late):
            told(number, len(late), "once more, alone: what ran out of time")
            marks[one.student][k] = marker.mark_part(one, marks[one.student][k].id)
    told(len(late), len(late), "once more, alone: what ran out of time")


def _write(grades: Grades, out: Path, similar_pairs: bool) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(grades.to_csv(), encoding="utf-8", newline="")
    folder = out.with_name(out.stem + "-feedback")
    folder.mkdir(exist_ok=True)
    names = feedback.file_names([one.student for one in grades.submissions])
    for one in grades.submissions:
        page = feedback.page(one, grades.marks[one.student])
        (folder / names[one.student]).write_text(page, encoding="utf-8")
    summary = feedback.summary(grades.ids, grades.submissions, grades.marks)
    out.with_name(out.stem + "-summary.html").write_text(summary, encoding="utf-8")
    if similar_pairs:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["exercise", "student", "other", "similarity"])
        writer.writerows([id, _cell(a), _cell(b), f"{s:.2f}"] for id, a, b, s in grades.pairs)
        path = out.with_name(out.stem + "-similar.csv")
        path.write_text(text.getvalue(), encoding="utf-8", newline="")


def progress_bar(done: int, count: int, student: str) -> None:
    """Write how far grading has come to standard error, on one line of a terminal."""
    width = 30
    bar = "#" * (width * done // max(count, 1))
    line = f"[{bar:{width}}] {done}/{count} {student[:40]:40}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="" if done < count else "\n", file=sys.stderr, flush=True)
    elif done == count or done % 20 == 0:
        print(line.rstrip(), file=sys.stderr)


__all__ = ["WARNING", "ExerciseError", "Grades", "grade", "progress_bar"]
