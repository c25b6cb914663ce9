"""Which words does the course teach, where, and in which order?

The glossary has one sentence for each word and the lecture or exercise that teaches it. A lecture
says what it needs and teaches in its first cell, an exercise in its data; a test walks the course
in order and finds any word that is needed before it is taught.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

COURSE = (
    "00 01 1.1 1.2 04 1.3 02 2.1 03 1.4 12 2.2 2.5 07 3.1 3.2 3.3 09 4.1 4.2 06 5.1 5.2 08 6.1"
).split()
"""Lectures (two digits) and exercises (with a point) in the order of the three weeks."""

BY_CHOICE = "05 10 11 13 20 2.3 2.4 4.3 5.3 6.2 7.1 8.1".split()
"""What comes after the course, in any order."""


def lecture_words(path: Path) -> tuple[list[str], list[str]]:
    """Return what a lecture needs and teaches, from the table in its first cell."""
    cell = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    found = {}
    for row in ("needs", "teaches"):
        match = re.search(rf"^\| {row} \| (.*) \|$", cell, re.MULTILINE)
        text = re.sub(r"\([^()]*\)", "", match[1]) if match else ""
        found[row] = [one.strip(" `") for one in re.split(r"[,;]", text) if one.strip()]
    return found["needs"], found["teaches"]
