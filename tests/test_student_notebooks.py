"""What a student gets runs from top to bottom at any stage, and holds nothing of a solution."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fxlab.teach.exercise import part
from fxlab.teach.masters import BEGIN, END, part_id, solution_cells, source_of
from fxlab.teach.releasing import leaks, problems, solution_lines, student_copy
from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTOR = ROOT / "notebooks" / "instructor"
EXERCISES = ROOT / "notebooks" / "exercises"
MASTERS = sorted(INSTRUCTOR.glob("[0-9]*.ipynb"))
EACH = pytest.mark.parametrize("master", MASTERS, ids=lambda path: path.stem)
SMALL = "07_scheduling"  # the one whose every stage runs in `make test`
STAGES = ("untouched", "half done", "solved")
RUNS = [
    pytest.param(
        path,
        stage,
        id=f"{path.stem}-{stage}",
        marks=[] if path.stem == SMALL or stage == "solved" else pytest.mark.slow,
    )
    for path in MASTERS
    for stage in STAGES
]
MINUTES = 5


def released(master: Path) -> dict:
    """The student's copy of a master, as `fxlab release` makes it."""
    return student_copy(json.loads(master.read_text(encoding="utf-8")))


def filled_in(notebook: dict, master: Path, stage: str) -> tuple[dict, set[str]]:
    """The copy with the solutions of all parts, of every second one, or of none; and which."""
    made, done = copy.deepcopy(notebook), set()
    solutions = {cell.id: cell.source for cell in solution_cells(master)}
    for number, (id, source) in enumerate(solutions.items()):
        if stage == "solved" or (stage == "half done" and number % 2 == 0):
            done.add(id)
            (cell,) = (one for one in made["cells"] if answers(one) == id)
            cell["source"] = source.splitlines(keepends=True)
    return made, done


def mark_of(cell: dict) -> dict:
    """What nbgrader knows of a cell."""
    return cell.get("metadata", {}).get("nbgrader", {})


def answers(cell: dict) -> str:
    """The part whose answer a cell is, or ""."""
    mark = mark_of(cell)
    return part_id(mark["grade_id"]) if mark.get("solution") else ""


def said(cell: dict) -> str:
    """Everything that a cell shows as text."""
    texts = [o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
    return "\n".join(texts)


@pytest.mark.parametrize("master, stage", RUNS)
def test_run_all_passes_and_each_check_says_where_it_stands(master, stage, tmp_path):
    notebook, done = filled_in(released(master), master, stage)
    client = NotebookClient(
        nbformat.reads(json.dumps(notebook), as_version=4),
        timeout=60 * MINUTES,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    ran = client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    checks = [cell for cell in ran.cells if mark_of(cell).get("grade")]
    assert len(checks) == len({part_id(mark_of(cell)["grade_id"]) for cell in checks})
    for cell in checks:
        id = part_id(mark_of(cell)["grade_id"])
        total, text = part(id)[1].total, said(cell)
        expected = (
            (f"public checks passed ({total} of {total})", str(total))
            if id in done
            else (f"not written yet (0 of {total})", "0")
        )
        assert expected[0] in text and text.splitlines()[-1] == expected[1], text
    assert not [
        o for cell in ran.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"
    ]


@EACH
def test_the_copy_holds_no_solution_no_delimiter_and_no_output(master):
    notebook = json.loads(master.read_text(encoding="utf-8"))
    assert solution_lines(notebook)  # what is looked for is there to be found
    assert leaks(notebook, json.dumps(student_copy(notebook))) == []


def test_a_leak_is_found():
    notebook = json.loads(MASTERS[0].read_text(encoding="utf-8"))
    leaking = copy.deepcopy(student_copy(notebook))
    line = max(solution_lines(notebook), key=len)
    leaking["cells"][-1]["source"] = [line]
    assert leaks(notebook, json.dumps(leaking)) == [f"has a line of the solution: {line}"]
    assert len(leaks(notebook, json.dumps(notebook))) > 2


def test_the_copies_that_are_kept_are_those_of_the_masters():
    assert problems(MASTERS, EXERCISES) == []


def blocks(source: str, length: int = 3) -> set[tuple[str, ...]]:
    """The runs of lines of a text, blank lines and indents left out."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def solved_blocks() -> set[tuple[str, ...]]:
    """Three lines in a row of any solution."""
    found = set()
    for path in MASTERS:
        for cell in solution_cells(path):
            for inside in re.findall(f"{BEGIN}(.*?){END}", cell.source, flags=re.DOTALL):
                found |= blocks(inside)
    return found


def test_the_wheel_holds_no_master_and_no_solution(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=HANGS)
    (wheel,) = tmp_path.glob("fxlab-*.whl")
    searched = solved_blocks()
    assert len(searched) > 100
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not [name for name in names if "instructor" in name or name.endswith(".ipynb")]
        lessons = [name for name in names if name.startswith("fxlab/teach/")]
        assert len(lessons) > 20
        for name in lessons:
            text = archive.read(name).decode()
            assert not blocks(text) & searched, name
            assert BEGIN not in text or "/exercises/" not in name, name


def test_every_answer_cell_of_a_copy_is_a_stub_that_says_its_number():
    for master in MASTERS:
        stubs = [cell for cell in released(master)["cells"] if answers(cell)]
        assert stubs
        for cell in stubs:
            assert f'raise NotDone("{answers(cell)}")' in source_of(cell)
