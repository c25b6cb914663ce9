"""A regrade is the same command: it runs what changed, and writes what a full run writes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from fxlab.cli import main
from fxlab.teach import remembering
from fxlab.teach.grading import grade
from fxlab.teach.marking import Marker
from tests import submissions as made
from tests.submissions import IMPORTS, MY_DCE

FORWARD = MY_DCE.replace("reversed(list(gm.graph.nodes))", "list(gm.graph.nodes)")
READS = IMPORTS + "SIGN = open('sign.txt').read()\n"
SIGNED = MY_DCE.replace("return gm", "return gm if SIGN == 'yes' else 3")


def hand_in(folder, student, *cells):
    made.write(folder / student / "work.ipynb", {"cells": [made._code(one) for one in cells]})


def written(out):
    """Every byte that a teacher gets: the table, the summary, the pages."""
    pages = sorted(out.with_name(out.stem + "-feedback").iterdir())
    paths = [out, out.with_name(out.stem + "-summary.html"), *pages]
    return {path.name.replace(out.stem, ""): path.read_bytes() for path in paths}


@pytest.fixture(scope="module", autouse=True)
def server():
    with made.one_server() as server:
        yield server


def class_of_four(folder):
    hand_in(folder, "ada", IMPORTS, MY_DCE)
    hand_in(folder, "bob", IMPORTS, FORWARD)
    hand_in(folder, "cyd", READS, SIGNED)
    (folder / "cyd" / "sign.txt").write_text("yes", encoding="utf-8")
    (folder / "dan.ipynb").write_text("no notebook", encoding="utf-8")
    return folder


@pytest.fixture
def handed(tmp_path):
    """A class whose submissions nobody has graded yet."""
    return class_of_four(tmp_path / "class")


@pytest.fixture(scope="module")
def once(tmp_path_factory, server):
    """The same class, and beside it what one grading wrote."""
    folder = tmp_path_factory.mktemp("once")
    grade(class_of_four(folder / "class"), folder / "g.csv", exercises=["2.2"])
    return folder


@pytest.fixture
def graded(once, tmp_path):
    """A copy of the class that was graded once, and of its table with what is beside it."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "class", tmp_path / "g.csv"


@pytest.fixture
def run(monkeypatch):
    """The students of whom something was run, newest last."""
    students = []
    original = Marker.mark_part

    def told(self, submission, id):
        students.append(submission.student)
        return original(self, submission, id)

    monkeypatch.setattr(Marker, "mark_part", told)
    return students


def marked(folder, out, run, **options):
    """Grade 2.2; return the grades and who was run."""
    run.clear()
    grades = grade(folder, out, exercises=["2.2"], **options)
    return grades, list(run)


def test_a_second_run_runs_nothing_and_writes_every_byte_again(handed, tmp_path, run):
    out = tmp_path / "g.csv"
    first, who = marked(handed, out, run)
    assert who == ["ada", "bob", "cyd"] and first.kept == 0
    assert [first.points(one) for one in ("ada", "bob", "cyd", "dan")] == [6, 2, 6, 0]
    before = written(out)
    out.unlink()
    again, who = marked(handed, out, run)
    assert who == [] and again.kept == 3 and written(out) == before
    assert again.marks == first.marks
    anew, who = marked(handed, out, run, fresh=True)
    assert who == ["ada", "bob", "cyd"] and anew.kept == 0 and written(out) == before


def test_one_students_new_notebook_is_the_only_one_run(graded, tmp_path, run):
    handed, out = graded
    hand_in(handed, "bob", IMPORTS, MY_DCE + "# mine\n")
    grades, who = marked(handed, out, run)
    assert who == ["bob"] and grades.points("bob") == 6
    marked(handed, tmp_path / "full.csv", run, fresh=True)
    assert written(out) == written(tmp_path / "full.csv")


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_marked_before_an_interrupt_is_not_run_again(handed, tmp_path, run, jobs):
    out = tmp_path / "new" / "g.csv"
    told = []

    def interrupt(done, count, student):
        told.append(student)
        if len(told) == 3:  # dan, of whom nothing is run, and two others
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        marked(handed, out, run, jobs=jobs, progress=interrupt)
    assert not out.exists()
    grades, who = marked(handed, out, run)
    assert grades.kept == 2 and who == [one for one in ("ada", "bob", "cyd") if one not in told]
    marked(handed, tmp_path / "full.csv", run, fresh=True)
    assert written(out) == written(tmp_path / "full.csv")


def test_a_table_that_cannot_be_written_costs_no_mark(handed, tmp_path, run):
    out = tmp_path / "g.csv"
    out.mkdir()
    with pytest.raises(OSError, match=r"g\.csv"):
        marked(handed, out, run)
    out.rmdir()
    grades, who = marked(handed, out, run)
    assert who == [] and grades.kept == 3


def test_workers_get_only_what_is_left(graded, tmp_path, run):
    handed, out = graded
    hand_in(handed, "bob", IMPORTS, MY_DCE + "# mine\n")
    grades, who = marked(handed, out, run, jobs=2)
    assert who == [] and grades.kept == 2 and grades.points("bob") == 6  # in another process


def test_outputs_and_the_name_of_the_file_change_no_mark(graded, run):
    handed, out = graded
    path = handed / "ada" / "work.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["cells"][0]["outputs"] = [{"output_type": "stream", "text": "hello"}]
    made.write(handed / "ada" / "again.ipynb", notebook)
    path.unlink()
    shutil.move(handed / "bob", handed / "bea")
    assert marked(handed, out, run)[1] == []


def test_a_file_beside_the_notebook_is_part_of_the_answer(graded, run):
    handed, out = graded
    (handed / "cyd" / "sign.txt").write_text("no", encoding="utf-8")
    grades, who = marked(handed, out, run)
    assert who == ["cyd"] and grades.points("cyd") == 0


CASES = """
import torch
from fxlab.teach import programs
from fxlab.teach.exercise import Case
from fxlab.teach.exercises import ex_2_2

def two(graph):
    x = graph.placeholder("x")
    graph.call_function(torch.exp, (graph.call_function(torch.cos, (x,)),))
    graph.output(x)

CASES = {"2.2": [Case("dead nodes go", "mine", lambda: (programs.built(two),), ex_2_2.judge_dce)]}
"""


def test_what_is_the_same_for_the_class_forgets_all_when_it_changes(
    handed, tmp_path, run, monkeypatch
):
    out, hidden = tmp_path / "g.csv", tmp_path / "cases.py"
    hidden.write_text(CASES, encoding="utf-8")
    assert len(marked(handed, out, run)[1]) == 3
    assert len(marked(handed, out, run, hidden=hidden)[1]) == 3
    assert len(marked(handed, out, run, hidden=hidden)[1]) == 0
    hidden.write_text(CASES.replace("torch.cos", "torch.sin"), encoding="utf-8")
    assert len(marked(handed, out, run, hidden=hidden)[1]) == 3
    settings = remembering._settings
    plain = {"hidden": None, "seconds": 5.0, "course": None}
    others = ({"hidden": Path("kit")}, {"seconds": 6.0}, {"course": 3})
    assert settings(plain) == settings({**plain})
    assert len({settings({**plain, **one}) for one in ({}, *others)}) == 4
    before = settings(plain)
    with monkeypatch.context() as patch:
        patch.setattr(remembering.sys, "version", "another Python")
        remembering._environment.cache_clear()
        assert settings(plain) != before
    remembering._environment.cache_clear()
    other = tmp_path / "other"  # an exercise of the teacher's own is read as the kit is
    other.mkdir()
    (other / "ex_9_9.py").write_text("from fxlab.teach.exercises.ex_2_5 import EXERCISE", "utf-8")
    monkeypatch.setenv("FXLAB_EXERCISES", str(other))
    assert settings(plain) != before


def test_what_the_machine_may_have_decided_is_run_again(tmp_path, run):
    folder, out = tmp_path / "class", tmp_path / "g.csv"
    hand_in(folder, "ada", IMPORTS, "def my_dce(gm):\n    while True: pass\n")
    hand_in(folder, "bob", IMPORTS, "import os\ndef my_dce(gm):\n    os._exit(3)\n")
    hand_in(folder, "cyd", IMPORTS, "def my_dce(gm):\n    raise MemoryError\n")
    hand_in(folder, "dan", IMPORTS, MY_DCE)
    grades, who = marked(folder, out, run, seconds=0.5)
    assert who == ["ada", "bob", "cyd", "dan", "ada"]
    kinds = [grades.marks[one][0].kind for one in ("ada", "bob", "cyd", "dan")]
    assert kinds == ["time", "lost", "memory", ""]
    grades, who = marked(folder, out, run, seconds=0.5)
    assert who == ["bob", "cyd"] and grades.kept == 2  # a time-out was run twice before
    assert [grades.marks[one][0].kind for one in ("ada", "bob", "cyd", "dan")] == kinds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no gzip"),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(path.read_bytes()[:30] + bytes(99)),
        lambda path: path.write_bytes(gzip.compress(b"[]")),
        lambda path: path.unlink(),
    ],
)
def test_a_file_of_marks_that_cannot_be_read_is_as_none(graded, run, spoil):
    handed, out = graded
    before = written(out)
    spoil(out.with_name("g-marks.json.gz"))
    assert len(marked(handed, out, run)[1]) == 3 and written(out) == before


def test_marks_beside_the_submissions_are_nobodys_submission(handed, run):
    out = handed / "g.csv"
    marked(handed, out, run)
    os.utime(handed / "g-marks.json.gz", (9, 9))
    grades, who = marked(handed, out, run)
    assert who == [] and [one.student for one in grades.submissions] == ["ada", "bob", "cyd", "dan"]


def test_the_command_says_what_it_did_not_run(handed, tmp_path, capsys):
    words = ["grade", str(handed), "--out", str(tmp_path / "g.csv"), "--exercises", "2.2"]
    assert main(words) == 0
    assert "as in the run before" not in capsys.readouterr().out
    assert main(words) == 0
    assert "as in the run before: 3 marks, not run again" in capsys.readouterr().out
    assert main([*words, "--fresh"]) == 0
    assert "as in the run before" not in capsys.readouterr().out
