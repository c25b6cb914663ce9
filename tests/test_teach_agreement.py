"""`grade` and `check` agree: each wrong answer earns over the pipe what it earns in a kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fxlab.teach import check, exercises
from fxlab.teach.collect import Notebook, Submission
from fxlab.teach.exercise import part
from fxlab.teach.marking import Marked, Marker, hidden_cases
from fxlab.teach.masters import part_id, solution_cells, source_of
from fxlab.teach.releasing import student_copy

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTOR = ROOT / "notebooks" / "instructor"
SOLUTIONS = {
    cell.id: cell
    for path in sorted(INSTRUCTOR.glob("[0-9]*.ipynb"))
    for cell in solution_cells(path)
}
QUICK = {"2.1a", "5.2a"}  # what `make test` runs
SECONDS = 30.0  # CPU time of one call: here other tests run beside it


def wrong_source(id: str, name: str) -> str:
    """A cell that defines a wrong answer under the name that the part asks for."""
    owner, asked = part(id)
    path = INSTRUCTOR / "wrong" / f"ex_{owner.id.replace('.', '_')}.py"
    letter = id.removeprefix(owner.id)
    text = path.read_text(encoding="utf-8").replace("from __future__ import annotations\n", "")
    return f"{text}\n{asked.name} = wrong_{letter + '_' if letter else ''}{name}\n"


def submitted(id: str, source: str) -> Submission:
    """A student who handed in the notebook with this one cell written."""
    copy = student_copy(json.loads(SOLUTIONS[id].path.read_text(encoding="utf-8")))
    cells, marks = [], {}
    for cell in copy["cells"]:
        if cell["cell_type"] != "code":
            continue
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution"):
            marks[part_id(mark["grade_id"])] = len(cells)
        mine = mark.get("solution") and part_id(mark["grade_id"]) == id
        cells.append(source if mine else source_of(cell))
    return Submission("ada", [Notebook(SOLUTIONS[id].path.name, cells, marks)])


def in_kernel(id: str, source: str):
    """The answer that a cell defines, after the notebook's first cell."""
    first = submitted(id, source).notebooks[0].cells[0]
    space = {"__name__": "__main__"}
    exec(compile(first.replace("save()", "None"), "<setup>", "exec"), space)
    exec(compile(source, "<answer>", "exec"), space)
    return space[part(id)[1].name]


@pytest.fixture(scope="module")
def marker():
    """One for all: arguments are made once."""
    threads = torch.get_num_threads()
    with Marker(seconds=SECONDS) as made:
        yield made
    torch.set_num_threads(threads)


def agree(marker: Marker, id: str, source: str) -> Marked:
    """Mark an answer both ways, compare, and return what the grader said."""
    result = check(id, in_kernel(id, source))
    graded = marker.mark_part(submitted(id, source), id)
    expected = {name: earned for name, (earned, _) in result.behaviours.items()}
    found = {name: earned for name, (earned, _) in graded.behaviours.items()}
    assert found == expected, f"check: {result}\n\ngrade: {graded.status} {graded.sentence}"
    assert (graded.points, graded.out_of) == (result.points, result.out_of)
    assert graded.status == result.status
    return graded


PARTS = [one for owner in exercises() for one in owner.parts]


def row(*values: str):
    """A case; most run in `make test-all` only."""
    return pytest.param(
        *values, id="-".join(values), marks=[] if values[0] in QUICK else pytest.mark.slow
    )


@pytest.mark.parametrize(
    "id, name", [row(one.id, name) for one in PARTS for name in (*one.wrong, "delegation")]
)
def test_a_wrong_answer_gets_the_same_points_from_check_and_from_grade(marker, id, name):
    graded = agree(marker, id, wrong_source(id, name))
    assert graded.points < graded.out_of
    if name == "delegation":
        assert graded.kind == "asked" and "asks you to write this" in graded.sentence
    else:
        assert part(id)[1].wrong[name] in graded.card + graded.sentence


@pytest.mark.parametrize("id", [row(one.id) for one in PARTS])
def test_a_solution_gets_all_points_from_grade(marker, id):
    graded = marker.mark_part(submitted(id, SOLUTIONS[id].source), id)
    assert (graded.status, graded.points) == ("pass", part(id)[1].total), graded.sentence


HIDDEN = hidden_cases(Path("kit"))


@pytest.mark.parametrize("id", [row(id) for id in HIDDEN])
def test_the_kits_hidden_cases_are_right_for_a_solution_and_wrong_for_wrong_answers(id):
    def found(source: str) -> set[str]:
        return {one.status for one in check(id, in_kernel(id, source), cases=HIDDEN[id]).cases}

    assert found(SOLUTIONS[id].source) == {"pass"}
    assert any(found(wrong_source(id, name)) != {"pass"} for name in part(id)[1].wrong)


def test_what_has_no_hidden_cases_asks_about_given_programs():
    assert {one.id for one in PARTS} - HIDDEN.keys() == {"1.1", "1.3", "3.3a", "3.3b", "3.3c"}


@pytest.mark.parametrize("id", sorted(QUICK))
def test_a_stub_gets_nothing_and_is_called_not_written(marker, id):
    copy = student_copy(json.loads(SOLUTIONS[id].path.read_text(encoding="utf-8")))
    (stub,) = (
        source_of(cell)
        for cell in copy["cells"]
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "ex-" + id.replace(".", "-")
    )
    assert agree(marker, id, stub).status == "todo"
