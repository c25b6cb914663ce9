"""No exercise needs a later one, no lecture a word that is not yet taught."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fxlab.core.errors import ExerciseError
from fxlab.teach import exercises, word
from fxlab.teach.words import BY_CHOICE, COURSE, GLOSSARY, MASTERS, lecture_of, lecture_words

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LECTURES = {path.name[:2]: path for path in NOTEBOOKS.glob("[0-9]*.ipynb")}
EXERCISES = {one.id: one for one in exercises()}
# What somebody brings who has trained a network with PyTorch.
KNOWN_BEFORE = {
    "torch.nn`: what a module and its `forward` are",
    "classes and operators in Python",
    "torch.fx` from your own work",
}


def words_of(place: str) -> tuple[list[str], list[str]]:
    """What a lecture or exercise needs and teaches."""
    if "." in place:
        return list(EXERCISES[place].needs), list(EXERCISES[place].teaches)
    return lecture_words(LECTURES[place])


def before(place: str) -> set[str]:
    """The words that are taught before a place.

    What is by choice follows the whole course, and an exercise its own lecture.
    """
    earlier = COURSE[: COURSE.index(place)] if place in COURSE else [*COURSE]
    if "." in place and place not in COURSE:
        earlier.append(MASTERS[f"0{place.partition('.')[0]}"])
    return {one.lower() for other in earlier for one in words_of(other)[1]}


def test_the_course_has_every_exercise_and_names_each_once():
    places = [*COURSE, *BY_CHOICE]
    assert len(places) == len(set(places))
    assert {one for one in places if "." in one} == set(EXERCISES)
    assert {one for one in places if "." not in one} <= set(LECTURES)


@pytest.mark.parametrize("place", [*COURSE, *BY_CHOICE])
def test_what_a_place_needs_is_taught_before_it(place):
    needs = {one.lower() for one in words_of(place)[0]} - {one.lower() for one in KNOWN_BEFORE}
    assert needs <= before(place), f"not taught before {place}: {sorted(needs - before(place))}"


def test_an_exercise_of_the_course_follows_its_lecture():
    for place in COURSE:
        if "." in place:
            lecture = MASTERS[f"0{place.partition('.')[0]}"]
            assert COURSE.index(lecture) < COURSE.index(place), place


@pytest.mark.parametrize("place", [*COURSE, *BY_CHOICE])
def test_every_word_that_is_taught_is_in_the_glossary(place):
    for name in words_of(place)[1]:
        assert str(word(name)), name


def test_the_glossary_names_the_first_place_that_teaches_each_word():
    first: dict[str, str] = {}
    for place in [*COURSE, *BY_CHOICE]:
        for name in words_of(place)[1]:
            first.setdefault(name.lower(), place)
    assert {name.lower(): found.where for name, found in GLOSSARY.items()} == first


def test_a_word_is_one_sentence_and_says_where_it_is_taught():
    for found in GLOSSARY.values():
        assert 15 < len(found.sentence) < 120 and not found.sentence.endswith(".")
    assert str(word("Live Range")).endswith("(lecture 09)")
    assert str(word("bisect")).endswith("(exercise 3.3)")


def test_an_unknown_word_is_answered_with_the_nearest_ones():
    with pytest.raises(ExerciseError, match="no word of the course") as caught:
        word("live ranges")
    assert "live range" in str(caught.value)


def test_each_notebook_of_exercises_belongs_to_a_lecture():
    masters = {path.name[:2] for path in (NOTEBOOKS / "instructor").glob("[0-9]*.ipynb")}
    assert set(MASTERS) == masters
    assert set(MASTERS.values()) <= set(LECTURES)
    for one in EXERCISES:
        assert f"0{one.partition('.')[0]}" in MASTERS


@pytest.mark.parametrize("number", sorted(LECTURES))
def test_a_lecture_names_the_exercises_that_come_after_it_and_links_them(number):
    cell = "".join(json.loads(LECTURES[number].read_text(encoding="utf-8"))["cells"][0]["source"])
    row = re.search(r"^\| before, after \| (.*) \|$", cell, re.MULTILINE)[1]
    named = re.search(r"exercises? \[([^]]*)\]\(exercises/(\d\d)_\w+\.ipynb\)", row)
    after = [one.id for one in exercises() if lecture_of(one.id) == number]
    assert (named[1].split(", ") if named else []) == after
    assert not named or {id.partition(".")[0] for id in after} == {named[2].lstrip("0")}


def test_the_first_lecture_says_where_exercises_are_and_what_helps_with_them():
    cells = json.loads(LECTURES["00"].read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert "(exercises/01_capture.ipynb)" in text and "`hint`" in text and "`progress`" in text
