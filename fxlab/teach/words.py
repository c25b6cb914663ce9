"""Which words does the course teach, where, and in which order?

The glossary has one sentence for each word and the lecture or exercise that teaches it. A lecture
says what it needs and teaches in its first cell, an exercise in its data; a test walks the course
in order and finds any word that is needed before it is taught.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from fxlab.core.errors import ExerciseError
from fxlab.teach.glossary import TAUGHT

COURSE = (
    "00 01 1.1 1.2 04 1.3 02 2.1 03 1.4 12 2.2 2.5 07 3.1 3.2 3.3 09 4.1 4.2 06 5.1 5.2 08 6.1"
).split()
"""Lectures (two digits) and exercises (with a point) in the order of the three weeks."""

BY_CHOICE = "05 10 11 13 20 2.3 2.4 4.3 5.3 6.2 7.1 8.1".split()
"""What comes after the course, in any order."""

MASTERS = {
    "01": "01", "02": "02", "03": "07", "04": "09", "05": "06", "06": "08", "07": "10", "08": "11",
}  # fmt: skip
"""Number of a notebook of exercises -> number of the lecture that it belongs to."""


def lecture_of(id: str) -> str:
    """Return the number of the lecture after which an exercise comes.

    One of the course comes where the course has it; one by choice after the last lecture that an
    exercise of its chapter comes after.

    Example:
        >>> lecture_of("1.3"), lecture_of("2.3"), lecture_of("7.1")
        ('04', '12', '10')
    """
    chapter = [one for one in COURSE if one.partition(".")[0] == id.partition(".")[0]]
    chapter = [one for one in chapter if "." in one]
    if not chapter:
        return MASTERS[f"0{id.partition('.')[0]}"]
    course: list[str] = [*COURSE]
    place = course.index(id if id in course else chapter[-1])
    return next(one for one in reversed(course[:place]) if "." not in one)


@dataclass(frozen=True)
class Word:
    """A word of the course; printing it gives the sentence.

    Attributes:
        name: The word.
        sentence: What it means.
        where: The lecture ("09") or exercise ("4.1") that teaches it.
    """

    name: str
    sentence: str
    where: str

    def __str__(self) -> str:
        kind = "exercise" if "." in self.where else "lecture"
        return f"{self.name}: {self.sentence} ({kind} {self.where})"

    __repr__ = __str__


GLOSSARY: dict[str, Word] = {
    name: Word(name, sentence, where)
    for where, words in TAUGHT.items()
    for name, sentence in words.items()
}
"""Word -> what it means and where it is taught."""


def word(name: str) -> Word:
    """Say what a word of the course means and where it is taught.

    Args:
        name: The word, such as "live range".

    Raises:
        ExerciseError: It is no word of the course; the message has the nearest ones.

    Example:
        >>> word("live range")
        live range: from the node that makes a value to the last node that reads it (lecture 09)
    """
    by_lower = {one.lower(): one for one in GLOSSARY}
    asked = str(name).strip().lower()
    if asked in by_lower:
        return GLOSSARY[by_lower[asked]]
    near = difflib.get_close_matches(asked, by_lower, n=4, cutoff=0.5)
    near += [one for one in by_lower if asked and asked in one and one not in near]
    said = ", ".join(by_lower[one] for one in near[:5])
    raise ExerciseError(
        f"{name!r} is no word of the course", expected=said or "a word such as graph or reroute"
    )


def lecture_words(path: Path) -> tuple[list[str], list[str]]:
    """Return what a lecture needs and teaches, from the table in its first cell."""
    cell = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    found = {}
    for row in ("needs", "teaches"):
        match = re.search(rf"^\| {row} \| (.*) \|$", cell, re.MULTILINE)
        text = re.sub(r"\([^()]*\)", "", match[1]) if match else ""
        found[row] = [one.strip(" `") for one in re.split(r"[,;]", text) if one.strip()]
    return found["needs"], found["teaches"]
