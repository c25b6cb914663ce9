"""Checkers are tested: red on the stub, green on the solution, red on each listed wrong answer.

Everything is read from the registry, the masters and the files of wrong answers, so that a new
exercise is tested by being there.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path

import pytest
import torch
import torch.fx

from fxlab.models import resnet18
from fxlab.teach import check, exercises
from fxlab.teach.exercise import ID, exercise, part
from fxlab.teach.masters import cleared, part_id, solution_cells, source_of
from tests.clocks import own_seconds

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTOR = ROOT / "notebooks" / "instructor"
MASTERS = sorted(INSTRUCTOR.glob("[0-9]*.ipynb"))
PARTS = [one.id for owner in exercises() for one in owner.parts]
SOLUTIONS = {cell.id: cell for path in MASTERS for cell in solution_cells(path)}
WRONG = [(one.id, name) for owner in exercises() for one in owner.parts
         for name in (*one.wrong, "delegation")]  # fmt: skip
TRACES = 1000  # the bar of one check: what torch.fx takes to trace ResNet-18 so often, 5 s here


def answer_of(id: str, source: str):
    """Run a cell's source, after its notebook's imports, and return what the part asks for."""
    setup = next(
        source_of(cell)
        for cell in json.loads(SOLUTIONS[id].path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    )
    setup = re.sub(r"^save\(\).*$", "", setup, flags=re.MULTILINE)
    space = {"__name__": "__main__"}
    exec(compile(setup, f"<setup {id}>", "exec"), space)
    exec(compile(source, f"<answer {id}>", "exec"), space)
    return space[part(id)[1].name]


def wrong_answer(id: str, name: str):
    """Load a wrong answer from its file."""
    owner, _ = part(id)
    path = INSTRUCTOR / "wrong" / f"ex_{owner.id.replace('.', '_')}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    letter = id.removeprefix(owner.id)
    return getattr(module, f"wrong_{letter + '_' if letter else ''}{name}")


@pytest.fixture(scope="module")
def seconds_at_most() -> float:
    model = resnet18()
    return TRACES * min(own_seconds(lambda: torch.fx.symbolic_trace(model)) for _ in range(50))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("owner", exercises(), ids=lambda one: one.id)
def test_an_exercise_says_what_a_student_asks_first(owner):
    assert ID.fullmatch(owner.id) and owner.title and owner.idea and owner.parts
    assert 1 <= owner.level <= 5 and 5 <= owner.minutes <= 90
    assert len(owner.hints) == 3 and all(len(hint) > 30 for hint in owner.hints)
    assert len({one.id for one in owner.parts}) == len(owner.parts)
    for one in owner.parts:
        assert one.id.startswith(owner.id) and exercise(one.id) is owner
        behaviours = [case.behaviour for case in one.cases()]
        assert set(behaviours) == set(one.points)
        assert all(points > 0 for points in one.points.values())
        assert len(one.wrong) >= 3


@pytest.mark.parametrize("id", PARTS)
def test_the_stub_is_neither_right_nor_wrong(id):
    result = check(id, answer_of(id, cleared(SOLUTIONS[id].source, id)))
    assert (result.status, result.points) == ("todo", 0)


@pytest.mark.parametrize("id", PARTS)
def test_the_solution_passes_with_all_points_in_time(id, seconds_at_most):
    answer = answer_of(id, SOLUTIONS[id].source)
    begin = time.process_time()
    result = check(id, answer)
    seconds = time.process_time() - begin
    assert result.status == "pass" and result.points == result.out_of == part(id)[1].total, result
    assert seconds < seconds_at_most


@pytest.mark.parametrize("id, name", WRONG)
def test_a_wrong_answer_is_told_its_sentence(id, name, seconds_at_most):
    answer = wrong_answer(id, name)
    begin = time.process_time()
    result = check(id, answer)
    seconds = time.process_time() - begin
    if name == "delegation":
        assert result.status == "error" and "asks you to write this" in result.sentence, result
    else:
        assert result.status in ("fail", "error") and result.points < result.out_of
        assert part(id)[1].wrong[name] in str(result), str(result)
    assert "<script" not in result._repr_html_()
    assert seconds < seconds_at_most


@pytest.mark.parametrize("id", PARTS)
def test_stub_in_master_and_registry_are_the_same_text(id):
    before = SOLUTIONS[id].source.partition("### BEGIN SOLUTION")[0].rstrip()
    assert part(id)[1].stub.strip() in before


def test_every_solution_cell_of_the_masters_belongs_to_an_exercise():
    assert set(SOLUTIONS) == set(PARTS)


@pytest.mark.parametrize("path", MASTERS, ids=lambda path: path.stem)
def test_a_check_stands_in_the_cell_after_its_answer(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    marks = [cell["metadata"].get("nbgrader", {}) for cell in cells]
    for number, mark in enumerate(marks):
        assert not cells[number].get("outputs")
        if mark.get("solution"):
            id = part_id(mark["grade_id"])
            following = marks[number + 1]
            assert following["grade_id"] == mark["grade_id"].replace("ex-", "check-")
            assert following["points"] == part(id)[1].total
            assert source_of(cells[number + 1]) == f'check("{id}", {part(id)[1].name}).show()'
