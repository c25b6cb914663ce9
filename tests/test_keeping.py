"""Progress, hints, save and restore: what is kept, and what is never written over."""

from __future__ import annotations

import json
import os
import time
import zipfile

import pytest
import torch

import fxlab
from fxlab.core.errors import ExerciseError
from fxlab.teach import check, exercises, hint, keeping, progress, restore, save
from fxlab.teach.releasing import student_copy, text_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder like a student's, with a file of progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXLAB_PROGRESS", str(tmp_path / keeping.PROGRESS))
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    monkeypatch.setattr(keeping, "_saved", [])
    return tmp_path


def notebook(answer="raise NotDone('2.2')", released=True):
    cell = {
        "cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [],
        "source": ["def my_dce(gm):\n", f"    {answer}"],
    }  # fmt: skip
    plain = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    if not released:
        return text_of(plain)
    handed_out = student_copy({**plain, "cells": [{**cell, "source": ["def my_dce(gm):\n"]}]})
    return text_of({**plain, "metadata": handed_out["metadata"]})


def handed_out():
    cell = {"cell_type": "markdown", "metadata": {}, "source": ["# 2.2"]}
    return text_of(student_copy({"cells": [cell], "metadata": {}, "nbformat": 4,
                                 "nbformat_minor": 5}))  # fmt: skip


def nothing(gm):
    return gm


def test_a_check_is_noted_and_the_best_of_all_checks_is_kept(folder):
    check("2.2", nothing)
    check("2.2", fxlab.passes.dce)  # asks to write this: no points
    row = next(row for row in progress().rows if row[0] == "2.2")
    assert row[3] == "not right yet" and row[4] == 1
    kept = json.loads((folder / keeping.PROGRESS).read_text())["parts"]["2.2"]
    assert kept["checks"] == 2 and kept["best"] == 1


def test_progress_shows_the_best_try_and_that_the_last_was_another(folder, monkeypatch):
    def row():
        return next(row for row in progress().rows if row[0] == "2.2")

    best = check("2.2", nothing)
    best.points, best.status = best.out_of, "pass"
    keeping.note_check("2.2", best)
    assert row()[3] == "public checks passed"
    check("2.2", nothing)
    assert row()[3] == "public checks passed (last try: not right yet)" and row()[4] == row()[5]
    later = [one for one in progress().rows if one[0] in ("2.1b", "5.2b", "5.2c")]
    lines = [line for line in repr(progress()).splitlines() if line.startswith("2.1b")]
    assert [one[2] for one in later] == [0, 0, 0] and " min" not in lines[0]


def test_a_check_of_one_behaviour_is_not_noted(folder):
    check("2.2", nothing, behaviour="effects stay")
    assert not (folder / keeping.PROGRESS).exists()


def test_progress_lists_every_part_of_every_exercise():
    rows = progress().rows
    assert [row[0] for row in rows] == [one.id for owner in exercises() for one in owner.parts]
    assert {row[3] for row in rows} == {"not begun"}
    assert "<script" not in progress()._repr_html_() and "2.2" in repr(progress())


def test_hints_come_one_by_one_and_begin_anew_after_the_third():
    given = [hint("2.1b") for _ in range(4)]
    assert [one.number for one in given] == [1, 2, 3, 1]
    assert len({one.text for one in given}) == 3
    assert hint("2.1a").number == 2  # the parts of an exercise share their hints
    assert next(row for row in progress().rows if row[0] == "2.1a")[6] == 3  # of three, all
    assert "here is the first again" in repr(given[3]) and "again" in given[3]._repr_html_()
    assert not any("again" in one.head for one in given[:3])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"hints": [], "parts": {"2.2": 3}}',
        '{"hints": {"2.2": "x"}, "parts": {"2.2": {"best": "9"}}}',
    ],
)
def test_a_broken_file_of_progress_stops_nothing(folder, text):
    (folder / keeping.PROGRESS).write_text(text)
    assert hint("2.2").number == 1
    check("2.2", nothing)
    assert next(row for row in progress().rows if row[0] == "2.2")[4] == 1


def test_outside_a_notebook_no_file_is_written(folder, monkeypatch):
    monkeypatch.delenv("FXLAB_PROGRESS")
    monkeypatch.setattr(keeping, "_notes", {"hints": {}, "parts": {}})
    assert [hint("2.2").number for _ in range(2)] == [1, 2]
    check("2.2", nothing)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_nothing(folder, monkeypatch):
    monkeypatch.setenv("FXLAB_PROGRESS", str(folder / "missing" / "progress.json"))
    assert hint("2.2").number == 1 and check("2.2", nothing).status == "fail"


def test_save_takes_changed_notebooks_progress_and_timelines_and_leaves_the_rest(folder):
    hint("2.2")
    (folder / "02_transform.ipynb").write_text(notebook("return gm"))
    (folder / "03_fusion.ipynb").write_text(handed_out())
    (folder / "notes.json").write_text('{"a": 1}')
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    with fxlab.record(gm) as timeline:
        gm.graph.find_nodes(op="call_function", target=torch.relu)[0].target = torch.tanh
    timeline.to_json(folder / "story.json")
    timeline.to_html(folder / "story.html")
    saved = save()
    with zipfile.ZipFile(saved.path) as archive:
        assert set(archive.namelist()) == {keeping.INDEX, keeping.PROGRESS, "02_transform.ipynb",
                                           "story.json", "story.html"}  # fmt: skip
    assert f'href="{saved.path.name}"' in saved._repr_html_()
    assert "<script" not in saved._repr_html_()


def test_save_makes_one_zip_of_the_same_work_and_keeps_zips_of_other_work(folder):
    (folder / "fxlab-work-2026-01-01-000000.zip").write_bytes(b"somebody's upload")
    (folder / "a.ipynb").write_text(notebook("return 1"))
    first = save().path
    assert save().path == first
    (folder / "a.ipynb").write_text(notebook("return 2"))
    second = save().path
    assert second != first and not first.exists() and second.exists()
    assert (folder / "fxlab-work-2026-01-01-000000.zip").exists()
    (folder / "b.ipynb").write_text(notebook("return 3"))
    third = save().path
    (folder / "b.ipynb").unlink()
    assert save().path != third and third.exists()  # it has what is nowhere else


def test_a_kernel_that_saves_the_same_notebooks_again_leaves_one_zip(folder, monkeypatch):
    (folder / "a.ipynb").write_text(notebook("return 1"))
    first = save().path
    monkeypatch.setattr(keeping, "_saved", [])  # another kernel, another day
    hint("2.2")
    second = save().path
    assert second != first and list(folder.glob("*.zip")) == [second]
    with zipfile.ZipFile(second) as archive:
        assert keeping.PROGRESS in archive.namelist()
    monkeypatch.setattr(keeping, "_saved", [])
    (folder / "a.ipynb").write_text(notebook("return 2"))
    third = save().path
    assert set(folder.glob("*.zip")) == {second, third}  # what was there before stays


def test_save_of_nothing_writes_nothing(folder, monkeypatch):
    (folder / "02_transform.ipynb").write_text(handed_out())
    assert save().path is None and "nothing to save" in repr(save())
    (folder / "02_transform.ipynb").write_text(notebook())
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    assert save().path is None


def zip_of(folder, name, text, when):
    (folder / name).write_text(text)
    os.utime(folder / name, (when, when))
    path = save().path.rename(folder / "my.zip")
    (folder / name).unlink()
    return path


def test_restore_writes_what_is_missing_and_replaces_what_nobody_touched(folder):
    path = zip_of(folder, "a.ipynb", notebook("return 1"), time.time() - 5000)
    restore(path)
    assert "return 1" in (folder / "a.ipynb").read_text()
    (folder / "a.ipynb").write_text(handed_out())  # a fresh container: newer, and nobody's work
    restore(path)
    assert "return 1" in (folder / "a.ipynb").read_text()
    assert "the same" in repr(restore(path))


def test_restore_never_loses_work_of_either_side(folder):
    path = zip_of(folder, "a.ipynb", notebook("return 1"), time.time() - 5000)
    (folder / "a.ipynb").write_text(notebook("return 2"))
    assert "newer and stays" in repr(restore(path))
    assert "return 2" in (folder / "a.ipynb").read_text()
    assert "return 1" in (folder / "a (restored).ipynb").read_text()
    os.utime(folder / "a.ipynb", (1.0, 1.0))
    restore(path)
    assert "return 1" in (folder / "a.ipynb").read_text()
    assert "return 2" in (folder / "a (replaced).ipynb").read_text()


def test_restore_merges_progress(folder):
    check("2.2", nothing)
    (folder / "a.ipynb").write_text(notebook("return 1"))
    path = save().path
    (folder / keeping.PROGRESS).unlink()
    hint("2.1")
    restore(path)
    rows = {row[0]: row for row in progress().rows}
    assert rows["2.2"][4] == 1 and rows["2.1a"][6] == 1


@pytest.mark.parametrize("name", ["../a.ipynb", "/tmp/a.ipynb", ".bashrc", "a.py", "b/a.ipynb"])
def test_a_zip_that_leads_elsewhere_is_refused(folder, name):
    head = {"format": "fxlab.work", "version": 1, "digest": "", "files": {name: 1.0}}
    with zipfile.ZipFile(folder / "bad.zip", "w") as archive:
        archive.writestr(keeping.INDEX, json.dumps(head))
        archive.writestr(name, "x")
    with pytest.raises(ExerciseError, match="never writes"):
        restore("bad.zip")
    assert [path.name for path in folder.iterdir()] == ["bad.zip"]


def test_what_is_no_zip_of_ours_is_refused(folder):
    (folder / "a.zip").write_text("no zip")
    with zipfile.ZipFile(folder / "b.zip", "w") as archive:
        archive.writestr("a.ipynb", "{}")
    for name, text in (("a.zip", "no zip that save"), ("b.zip", "no zip that save"),
                       ("c.zip", "there is no file")):  # fmt: skip
        with pytest.raises(ExerciseError, match=text):
            restore(name)
