"""The classroom's commands: `fxlab release`, `fxlab grade` and `fxlab new-exercise`.

`cli.py` asks here for their arguments and runs them; nothing of the classroom is imported before
one of the three is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fxlab.arguments import count, count_from_one, folder, new_file_in_new_folders, seconds
from fxlab.core.errors import FxlabError, message_text
from fxlab.terminal import plain, print_json, say


def _release_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make the students' notebooks from the masters: no solutions, no outputs."
    parser.epilog = "fxlab release --zip exercises.zip"
    parser.add_argument(
        "masters", nargs="*", type=Path, help="masters; all of notebooks/instructor by default"
    )
    parser.add_argument(
        "--to", type=folder, default=Path("notebooks/exercises"), help="folder of the copies"
    )
    parser.add_argument(
        "--zip", type=new_file_in_new_folders, metavar="FILE", help="also write one zip to hand out"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a copy is not up to date",
    )
    parser.add_argument(
        "--course", type=count, metavar="SEED", help="draw variants of some exercises for a course"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def _release(args: argparse.Namespace) -> int:
    from fxlab.teach import releasing

    masters = args.masters or releasing.masters_of()
    if args.check:
        written = []
        problems = releasing.problems(masters, args.to, course=args.course)
    else:
        written = releasing.release(masters, args.to, zip_path=args.zip, course=args.course)
        problems = []
    for problem in problems:
        say(problem)
    if args.json:
        print_json({"written": [str(path) for path in written], "problems": problems})
    else:
        _print_paths(written)
    return 1 if problems else 0


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(plain(str(path)))


def _grade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Grade a folder of submissions: points for each exercise, a page of feedback for each "
        "student, a summary of the class."
    )
    parser.epilog = (
        "Students' code runs within limits, each exercise in a process of its own. That is no "
        "sandbox: for code that you don't trust use a container."
    )
    parser.add_argument(
        "submissions", type=Path,
        help="folder or zip: a folder, notebook or zip a student, or a Moodle or Canvas download",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=new_file_in_new_folders, default=Path("grades.csv"), metavar="FILE",
        help="the table to write (grades.csv)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=count_from_one, default=1, help="submissions at a time")
    parser.add_argument("--hidden", type=Path, metavar="CASES.PY", help="hidden cases, or kit")
    parser.add_argument(
        "--class", dest="students", type=Path, metavar="LIST.CSV", help="the class list"
    )
    parser.add_argument(
        "--exercises", help="ids like 2.1,2.2; by default all that somebody has a cell for"
    )
    parser.add_argument(
        "--course", type=count, metavar="SEED", help="the number given to `fxlab release --course`"
    )
    parser.add_argument("--similar", action="store_true", help="list pairs of similar answers")
    parser.add_argument("--seconds", type=seconds, default=5.0, help="CPU seconds of one call (5)")
    parser.add_argument(
        "--fresh", action="store_true", help="mark all anew, also what is as in the run before"
    )
    parser.add_argument("--json", action="store_true", help="print the grades as JSON")


def _grade(args: argparse.Namespace) -> int:
    from fxlab.explorer.sentences import plural
    from fxlab.teach import grading

    say(grading.WARNING)
    grades = grading.grade(
        args.submissions,
        args.out,
        jobs=args.jobs,
        hidden=args.hidden,
        students=args.students,
        exercises=args.exercises.split(",") if args.exercises else None,
        similar_pairs=args.similar,
        seconds=args.seconds,
        course=args.course,
        fresh=args.fresh,
        progress=grading.progress_bar,
    )
    if args.json:
        rows = [
            {
                "student": one.student,
                "name": one.name,
                "points": grades.points(one.student),
                "out_of": grades.out_of,
                "exercises": {mark.id: mark.points for mark in grades.marks[one.student]},
                "remarks": grading.remarks(one, grades.marks[one.student]),
            }
            for one in grades.submissions
        ]
        print_json(rows)
        return 0
    out, stem = plain(str(args.out)), plain(str(args.out.with_suffix("")))
    handed, parts = plural(len(grades.submissions), "submission"), plural(len(grades.ids), "part")
    print(f"{handed}, {parts}: {out}")
    print(f"feedback: {stem}-feedback/   the class: {stem}-summary.html")
    if grades.kept:
        marks = plural(grades.kept, "mark")
        print(f"as in the run before: {marks}, not run again (--fresh runs all)")
    if args.similar:
        print(f"{plural(len(grades.pairs), 'similar pair')}: {stem}-similar.csv")
    return 0


def _new_exercise_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the files of an exercise of your own: a master with stub, solution and check, the "
        "exercise's cases, and its wrong answers."
    )
    parser.epilog = "Set FXLAB_EXERCISES to the folder, then every command knows the exercise."
    parser.add_argument("id", help="such as 9.1; ids of the kit are taken")
    parser.add_argument(
        "--to", type=folder, default=Path("my-exercises"), help="folder (my-exercises)"
    )
    parser.add_argument("--title", default="A pass of our own", help="the exercise's title")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def _new_exercise(args: argparse.Namespace) -> int:
    from fxlab.teach import authoring

    written = authoring.new_exercise(args.id, args.to, args.title)
    home = str(args.to.resolve())
    if args.json:
        environment = {"FXLAB_EXERCISES": home}
        print_json({"written": [str(path) for path in written], "environment": environment})
    else:
        _print_paths(written)
    say(
        f"next: set the environment variable FXLAB_EXERCISES to {home}\n"
        f'in a notebook, before fxlab is imported: os.environ["FXLAB_EXERCISES"] = {home!r}'
    )
    return 0


ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "release": _release_arguments,
    "grade": _grade_arguments,
    "new-exercise": _new_exercise_arguments,
}


def _told(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Leave the kit's own lines out of an error: a teacher at a shell has no use for them."""

    def told(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except FxlabError as error:
            error.where = ()
            error.args = (message_text(error),)
            raise

    return told


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "release": _told(_release),
    "grade": _told(_grade),
    "new-exercise": _told(_new_exercise),
}
