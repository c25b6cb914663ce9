"""Copies without solutions; nobody's work is written over; drift and leaks are told."""

from __future__ import annotations

import importlib.util
import json
import shutil
import zipfile

import pytest
import torch

from fxlab.cli import main
from fxlab.core.errors import ExerciseError
from fxlab.teach import check, exercises
from fxlab.teach.authoring import new_exercise
from fxlab.teach.grading import grade
from fxlab.teach.masters import BEGIN, END, source_of
from fxlab.teach.releasing import (
    is_changed,
    leaks,
    masters_of,
    problems,
    release,
    solution_lines,
    student_copy,
)
from tests import submissions as made

MASTERS = sorted(made.INSTRUCTOR.glob("[0-9]*.ipynb"))
KEPT = made.ROOT / "notebooks" / "exercises"


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_copies_in_the_project_are_what_the_masters_say():
    assert problems(MASTERS, KEPT) == []


def test_release_writes_what_its_check_accepts_and_the_same_zip_twice(tmp_path):
    written = release(MASTERS[:2], tmp_path / "one", zip_path=tmp_path / "one.zip")
    assert [path.name for path in written] == [*(p.name for p in MASTERS[:2]), "one.zip"]
    assert problems(MASTERS[:2], tmp_path / "one") == []
    release(MASTERS[:2], tmp_path / "two", zip_path=tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == [path.name for path in MASTERS[:2]]


@pytest.mark.parametrize("path", MASTERS, ids=lambda path: path.stem)
def test_a_copy_has_stubs_no_solution_and_no_output(path):
    master = read(path)
    copy = student_copy(master)
    text = json.dumps(copy)
    assert BEGIN not in text and END not in text and leaks(master, text) == []
    assert text.count("raise NotDone(") >= len(made.parts_of(path.stem))
    assert solution_lines(master)


def test_a_copy_that_somebody_worked_on_is_never_written_over(tmp_path):
    release(MASTERS[:2], tmp_path)
    first, second = (tmp_path / path.name for path in MASTERS[:2])
    notebook = read(second)
    notebook["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    second.write_text(json.dumps(notebook), encoding="utf-8")
    assert not is_changed(second)  # it was run, no more
    release(MASTERS[:2], tmp_path)
    notebook["cells"].append({"cell_type": "code", "metadata": {}, "source": "my work"})
    second.write_text(json.dumps(notebook), encoding="utf-8")
    first.unlink()
    with pytest.raises(ExerciseError, match=second.name):
        release(MASTERS[:2], tmp_path)
    assert not first.exists() and "my work" in second.read_text(encoding="utf-8")
    second.write_text("not JSON", encoding="utf-8")
    with pytest.raises(ExerciseError, match=second.name):
        release(MASTERS[:2], tmp_path)


def test_each_kind_of_problem_is_told(tmp_path):
    master = tmp_path / MASTERS[1].name
    shutil.copy(MASTERS[1], master)
    to = tmp_path / "out"
    to.mkdir()
    assert [text for text in problems([master], to) if "is missing" in text]
    release([master], to)
    copy = to / master.name

    def told(change, word):
        notebook = read(copy)
        change(notebook)
        kept = copy.read_text(encoding="utf-8")
        copy.write_text(json.dumps(notebook), encoding="utf-8")
        assert any(word in text for text in problems([master], to)), word
        copy.write_text(kept, encoding="utf-8")

    line = sorted(solution_lines(read(master)))[0]
    told(lambda nb: nb["cells"][0].update(source="stale"), "is not what its master says now")
    told(lambda nb: nb["cells"][0].update(source=line), "has a line of the solution")
    told(lambda nb: nb["cells"][0].update(source=BEGIN), "has the delimiter")
    told(lambda nb: nb["cells"][1].update(outputs=[{"text": "x"}]), "has outputs")
    (to / "99_other.ipynb").write_text("{}", encoding="utf-8")
    assert "99_other.ipynb has no master" in problems([master], to)


def test_a_stub_or_points_that_drifted_are_told(tmp_path):
    master = tmp_path / "02_transform.ipynb"
    notebook = read(made.INSTRUCTOR / "02_transform.ipynb")
    for cell in notebook["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("grade_id") == "ex-2-2":
            cell["source"] = source_of(cell).replace('"""Edit', '"""Alter')
        if mark.get("grade_id") == "check-2-1a":
            mark["points"] = 1000
    made.write(master, notebook)
    found = "\n".join(problems([master], tmp_path / "out"))
    assert "the stub of 2.2 is not the one of its exercise" in found
    assert "the check of 2.1a has 1000 points" in found


def test_a_solution_without_an_end_or_without_a_mark_is_refused():
    notebook = read(MASTERS[1])
    cell = next(c for c in notebook["cells"] if BEGIN in source_of(c))
    cell["source"] = source_of(cell).replace(END, "")
    with pytest.raises(ExerciseError, match="has no"):
        student_copy(notebook)
    notebook = read(MASTERS[1])
    next(c for c in notebook["cells"] if BEGIN in source_of(c))["metadata"] = {}
    with pytest.raises(ExerciseError, match="without nbgrader's solution mark"):
        student_copy(notebook)


def test_a_course_has_other_forms_and_tells_the_kernel_its_number(tmp_path):
    path = made.INSTRUCTOR / "02_transform.ipynb"
    texts = []
    for seed in range(6):
        release([path], tmp_path / str(seed), course=seed)
        copy = read(tmp_path / str(seed) / path.name)
        text = "\n".join(source_of(cell) for cell in copy["cells"])
        assert f"fxlab.teach.use_course({seed})" in text
        texts.append(text.replace(f"use_course({seed})", ""))
        assert problems([path], tmp_path / str(seed), course=seed) == []
    assert len(set(texts)) > 1


def test_the_command_exits_with_one_and_says_why(tmp_path, capsys):
    assert main(["release", str(MASTERS[0]), "--to", str(tmp_path)]) == 0
    assert main(["release", str(MASTERS[0]), "--to", str(tmp_path), "--check"]) == 0
    (tmp_path / MASTERS[0].name).unlink()
    capsys.readouterr()
    assert main(["release", str(MASTERS[0]), "--to", str(tmp_path), "--check"]) == 1
    assert "is missing: run fxlab release" in capsys.readouterr().err
    with pytest.raises(ExerciseError, match="no masters"):
        masters_of(tmp_path / "nowhere")


def test_a_teachers_commands_as_json_print_what_they_wrote_and_nothing_else(tmp_path, capsys):
    words = ["release", str(MASTERS[0]), "--to", str(tmp_path / "to"), "--json"]
    assert main(words) == 0
    copy = tmp_path / "to" / MASTERS[0].name
    assert json.loads(capsys.readouterr().out) == {"written": [str(copy)], "problems": []}
    copy.unlink()
    assert main([*words, "--check"]) == 1
    said = capsys.readouterr()
    (problem,) = json.loads(said.out)["problems"]
    assert problem == f"{copy.name} is missing: run fxlab release" and problem in said.err
    own = tmp_path / "own"
    assert main(["new-exercise", "9.1", "--to", str(own), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["environment"] == {"FXLAB_EXERCISES": str(own)}
    assert sorted(found["written"]) == sorted(str(path) for path in own.rglob("*.*"))
    assert "next: set" in said.err
    assert main(["new-exercise", "9.1", "--to", str(own), "--json"]) == 1
    assert not capsys.readouterr().out


def test_an_exercise_of_ones_own_works_with_every_command(tmp_path, monkeypatch):
    own = tmp_path / "own"
    paths = new_exercise("9.1", own, 'Say "no"')
    assert [path.name for path in paths] == ["9_1.ipynb", "ex_9_1.py", "ex_9_1.py"]
    with pytest.raises(ExerciseError, match="is there already"):
        new_exercise("9.1", own)
    with pytest.raises(ExerciseError, match=r"an exercise 2\.2 already"):
        new_exercise("2.2", own)
    with pytest.raises(ExerciseError, match="no id"):
        new_exercise("nine", own)
    monkeypatch.setenv("FXLAB_EXERCISES", str(own))
    assert exercises()[-1].id == "9.1"
    release(paths[:1], tmp_path / "out", zip_path=tmp_path / "out.zip")
    assert problems(paths[:1], tmp_path / "out") == []
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == ["9_1.ipynb", "ex_9_1.py"]

    def right(gm):
        for node in gm.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.sigmoid

    assert check("9.1", right)
    spec = importlib.util.spec_from_file_location("wrong_9_1", paths[2])
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    for answer in (wrong.wrong_nothing, wrong.wrong_erases, wrong.wrong_all):
        assert check("9.1", answer).status == "fail"
    master = read(paths[0])
    solved = next(source_of(c) for c in master["cells"] if BEGIN in source_of(c))
    setup = {"cell_type": "code", "metadata": {}, "source": "import torch"}
    answer = {"cell_type": "code", "metadata": {}, "source": solved}
    made.write(tmp_path / "all" / "ada.ipynb", {"cells": [setup, answer], "nbformat": 4})
    grades = grade(tmp_path / "all", tmp_path / "g.csv")
    assert (grades.ids, grades.points("ada")) == (["9.1"], 2)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{}]}', "{", ""]
)
def test_a_master_that_is_no_notebook_is_refused_by_name(text, tmp_path):
    master = tmp_path / "lesson.ipynb"
    master.write_text(text)
    with pytest.raises(ExerciseError, match=r"lesson\.ipynb"):
        release([master], tmp_path / "to")
