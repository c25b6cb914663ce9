"""A course's variants: drawn by its number, solvable, and not solved by the public solution."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from fxlab.teach import check, exercises
from fxlab.teach.exercise import exercise, plain_registry, use_forms
from fxlab.teach.masters import part_id, source_of
from fxlab.teach.variants import drawn, use_course, variants_of, varied

INSTRUCTOR = Path(__file__).resolve().parent.parent / "notebooks" / "instructor"
VARIED = [id for id in plain_registry() if variants_of(id)]
FORMS = [(id, name) for id in VARIED for name in variants_of(id)]


@pytest.fixture(autouse=True)
def public_forms_afterwards():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    use_course(None)
    torch.set_num_threads(threads)


def course_with(id: str, name: str) -> int:
    """The first course number that draws this variant."""
    return next(seed for seed in range(1000) if drawn(seed)[id] == name)


def cells_of(id: str, seed: int | None) -> list[dict]:
    """The cells of the master that poses an exercise, as a course has them."""
    (path,) = INSTRUCTOR.glob(f"0{id.partition('.')[0]}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells if seed is None else varied(cells, seed)


def sources(id: str, seed: int | None) -> dict[str, str]:
    """Part -> its solution cell."""
    found = {}
    for cell in cells_of(id, seed):
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution") and part_id(mark["grade_id"]).rstrip("abc") == id:
            found[part_id(mark["grade_id"])] = source_of(cell)
    return found


def answer_to(id: str, part: str, variant: str, source: str, name: str):
    """The answer to a variant: from its file, or else what the words make of the master's."""
    path = INSTRUCTOR / "variants" / f"ex_{id.replace('.', '_')}.py"
    wanted = f"answer_{part.removeprefix(id)}_{variant}" if part != id else f"answer_{variant}"
    wanted = re.sub(r"\W", "_", wanted)
    if path.exists():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, wanted):
            return getattr(module, wanted)
    space = {}
    exec("import torch\nfrom torch import nn\nimport fxlab\n" + source, space)
    return space[name]


def test_six_exercises_have_variants():
    assert set(VARIED) >= {"2.1", "2.2", "3.2", "4.1", "5.1", "6.1"}
    assert all(len(variants_of(id)) >= 2 for id in VARIED)


def test_a_number_draws_the_same_each_time_and_every_variant_is_drawn():
    assert drawn(5) == drawn(5)
    for id in VARIED:
        assert {drawn(seed)[id] for seed in range(60)} == set(variants_of(id))


def test_the_first_variant_is_the_public_form():
    for id in VARIED:
        name, first = next(iter(variants_of(id).items()))
        made = first.exercise()
        assert not first.words, name
        for one, public in zip(made.parts, exercise(id).parts, strict=True):
            assert (one.id, one.name, one.points, one.stub) == (
                public.id, public.name, public.points, public.stub,
            )  # fmt: skip


def test_use_course_changes_the_registry_and_none_puts_it_back():
    before = exercises()
    use_course(course_with("3.2", "Linear"))
    assert "Linear" in exercise("3.2").parts[0].stub
    assert [one.id for one in exercises()] == [one.id for one in before]
    use_course(None)
    assert exercises() == before
    use_forms({})


def test_the_notebook_of_a_course_tells_its_kernel_the_number():
    setup = next(source_of(cell) for cell in cells_of("3.2", 11) if cell["cell_type"] == "code")
    assert setup.endswith("fxlab.teach.use_course(11)")


@pytest.mark.parametrize("id, name", FORMS)
def test_a_variant_is_posed_in_its_own_words_for_the_same_points(id, name):
    seed = course_with(id, name)
    texts = sources(id, seed)
    public = {one.id: one for one in exercise(id).parts}
    use_course(seed)
    for one in exercise(id).parts:
        assert one.stub.strip() in texts[one.id]
        assert one.total == public[one.id].total
    text = "\n".join(source_of(cell) for cell in cells_of(id, None))
    for old, new in variants_of(id)[name].words:
        assert old in text, f"the master has not {old!r}"
        text = text.replace(old, new)


@pytest.mark.parametrize("id, name", FORMS)
def test_a_variant_is_solved_by_its_answer(id, name):
    seed = course_with(id, name)
    texts = sources(id, seed)
    use_course(seed)
    for one in exercise(id).parts:
        answer = answer_to(id, one.id, name, texts[one.id], one.name)
        result = check(one.id, answer)
        assert result.points == result.out_of, result


@pytest.mark.parametrize("id, name", [one for one in FORMS if variants_of(one[0])[one[1]].words])
def test_the_public_solution_does_not_solve_another_variant(id, name):
    texts = sources(id, None)
    answers = {}
    for one in exercise(id).parts:
        answers[one.id] = answer_to(
            id, one.id, next(iter(variants_of(id))), texts[one.id], one.name
        )
    use_course(course_with(id, name))
    lost = 0
    for one in exercise(id).parts:
        result = check(one.id, answers[one.id])
        lost += result.out_of - result.points
    assert lost > 0
