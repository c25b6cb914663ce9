"""How does a graded course get exercises whose public solutions don't fit?

An exercise module may have `VARIANTS`: the same exercise about another operation, layer or fact,
from the same parametrised reference. A course has a number; the number draws one variant of each.
`use_course` makes the registry answer with the drawn ones, so that check and grade need nothing
else; `varied` puts the variant's words into the cells of a master, which holds the first variant.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fxlab.teach import exercise as registry
from fxlab.teach.exercise import Exercise
from fxlab.teach.masters import part_id, source_of

HEADING = re.compile(r"^## (\d+\.\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class Variant:
    """One form of an exercise.

    Attributes:
        exercise: Makes it.
        words: Pairs (text of the master, text of this variant), put into the exercise's cells in
            this order.
    """

    exercise: Callable[[], Exercise]
    words: tuple[tuple[str, str], ...] = ()


def forms(
    make: Callable[[Any], Exercise],
    kinds: Mapping[str, Any],
    words: Callable[[Any], tuple[tuple[str, str], ...]],
) -> dict[str, Variant]:
    """The variants of an exercise that is made from one value.

    Args:
        make: The exercise about one of `kinds`.
        kinds: Name -> what the exercise is about; the master's form first.
        words: Pairs (text of the master, text of this form); not asked for the master's.

    Returns:
        Name -> variant.
    """
    first = next(iter(kinds))
    return {
        name: Variant(partial(make, kind), () if name == first else words(kind))
        for name, kind in kinds.items()
    }


def variants_of(id: str) -> dict[str, Variant]:
    """Return the variants of an exercise by name, the master's first; {} when there is one form."""
    name = f"fxlab.teach.exercises.ex_{id.replace('.', '_')}"
    try:
        return getattr(importlib.import_module(name), "VARIANTS", {})
    except ModuleNotFoundError:  # a private exercise
        return {}


def drawn(seed: int) -> dict[str, str]:
    """Return which variant of each exercise the course with this number has.

    Example:
        >>> drawn(7) == drawn(7)
        True
    """
    chosen = {}
    for id in registry.plain_registry():
        names = list(variants_of(id))
        if names:
            digest = hashlib.sha256(f"{seed} {id}".encode()).digest()
            chosen[id] = names[int.from_bytes(digest[:4], "big") % len(names)]
    return chosen


def use_course(seed: int | None) -> None:
    """From now on `check`, `hint` and the registry mean the variants of this course.

    Args:
        seed: The course's number; None means the public form of each exercise.
    """
    chosen = {} if seed is None else drawn(seed)
    registry.use_forms({id: variants_of(id)[name].exercise() for id, name in chosen.items()})


def varied(cells: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return a master's cells with the words of the course's variants in them.

    Changed are, for each exercise, the cell with its heading, its solution cells and its checks,
    and the setup cell, which tells the kernel the course's number.
    """
    chosen = drawn(seed)
    result = []
    for cell in cells:
        cell = copy.deepcopy(cell)
        text = source_of(cell)
        heading = HEADING.search(text) if cell["cell_type"] == "markdown" else None
        grade_id = cell.get("metadata", {}).get("nbgrader", {}).get("grade_id")
        id = heading[1] if heading else part_id(grade_id).rstrip("abc")
        if id in chosen:
            for old, new in variants_of(id)[chosen[id]].words:
                text = text.replace(old, new)
        elif "from fxlab.teach import" in text and "save()" in text:
            text = f"{text}\nfxlab.teach.use_course({seed})"
        if text != source_of(cell):
            cell["source"] = text.splitlines(keepends=True)
        result.append(cell)
    return result
