"""nbgrader itself makes the same student files from the masters and gives the same points.

Each command is nbgrader's own, in a process of its own, on a course in a temporary folder.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxlab.teach.grading import grade
from fxlab.teach.masters import part_id, source_of
from tests import submissions as made

pytest.importorskip("nbgrader")
EXERCISES = made.ROOT / "notebooks" / "exercises"


def nbgrader(course: Path, *words: str) -> str:
    # nbgrader calls alembic by name: the environment's own commands come first on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *words], cwd=course, text=True, capture_output=True,
        env={**os.environ, "PATH": path}, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def course_of(folder: Path, names: list[str]) -> Path:
    source = folder / "source" / "ps1"
    source.mkdir(parents=True)
    shutil.copy(made.INSTRUCTOR / "nbgrader_config.py", folder)
    for name in names:
        shutil.copy(made.INSTRUCTOR / f"{name}.ipynb", source)
    nbgrader(folder, "generate_assignment", "ps1")
    return folder


def hand_in(course: Path, student: str, name: str, answers: dict[str, str]) -> None:
    """The released notebook with these answers in it."""
    notebook = json.loads((course / "release" / "ps1" / f"{name}.ipynb").read_text("utf-8"))
    for cell in notebook["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        id = part_id(mark.get("grade_id"))
        if mark.get("solution") and id in answers:
            cell["source"] = answers[id]
    made.write(course / "submitted" / student / "ps1" / f"{name}.ipynb", notebook)


def same_cells(course: Path, name: str) -> None:
    theirs = json.loads((course / "release" / "ps1" / f"{name}.ipynb").read_text("utf-8"))
    ours = json.loads((EXERCISES / f"{name}.ipynb").read_text("utf-8"))
    assert len(theirs["cells"]) == len(ours["cells"])
    for one, other in zip(theirs["cells"], ours["cells"], strict=True):
        assert source_of(one) == source_of(other)
        assert one["metadata"] == other["metadata"]


def agree(folder: Path, name: str, students: dict[str, dict[str, str]]) -> dict[str, float]:
    """Grade with nbgrader and with `fxlab grade`; return the points, which agree."""
    course = course_of(folder, [name])
    same_cells(course, name)
    for student, answers in students.items():
        hand_in(course, student, name, answers)
    nbgrader(course, "autograde", "ps1")
    nbgrader(course, "generate_feedback", "ps1")
    nbgrader(course, "export")
    rows = csv.DictReader((course / "grades.csv").read_text("utf-8").splitlines())
    theirs = {row["student_id"]: float(row["score"]) for row in rows}
    for student in students:
        assert list((course / "feedback" / student / "ps1").glob("*.html"))
    ours = grade(course / "submitted", folder / "ours.csv", exercises=made.parts_of(name))
    assert {student: float(ours.points(student)) for student in students} == theirs
    assert ours.out_of == sum(made.total(made.parts_of(name)).values())
    return theirs


def test_nbgrader_and_fxlab_grade_agree_on_a_good_a_partial_and_a_broken_submission(tmp_path):
    name = "08_mixed_precision"
    (id,) = made.parts_of(name)
    wrong = next(one for one in made.part(id)[1].wrong if made.checked_points(id, one) > 0)
    points = agree(
        tmp_path,
        name,
        {
            "good": {id: made.solution(name, id)},
            "partial": {id: made.wrong_source(id, wrong)},
            "broken": {id: "def f(:\n"},
        },
    )
    full = made.part(id)[1].total
    assert points["good"] == full and 0 < points["partial"] < full
    assert points["broken"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", sorted(made.INSTRUCTOR.glob("0*.ipynb")), ids=lambda p: p.stem)
def test_every_master_is_generated_and_graded_by_nbgrader_as_by_fxlab(tmp_path, path):
    name = path.stem
    ids = made.parts_of(name)
    wrong = {id: made.wrong_source(id, next(iter(made.part(id)[1].wrong))) for id in ids}
    right = {id: made.solution(name, id) for id in ids}
    mixed = {id: (right if k % 2 else wrong)[id] for k, id in enumerate(ids)}
    points = agree(tmp_path, name, {"good": right, "mixed": mixed, "untouched": {}})
    assert points["good"] == sum(made.total(ids).values()) and points["untouched"] == 0
