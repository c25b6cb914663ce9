"""What is in a master notebook, and how is one put together?

A master in `notebooks/instructor/` holds, for each exercise, lesson, example, exercise text, the
cell with stub and solution, the check, and a look at torch.fx. The cells here carry nbgrader's
schema-3 metadata, so that `fxlab release` and nbgrader read the same file. Solutions stand between
nbgrader's own delimiters.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach.exercise import Exercise, Part, part

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
Cell = dict[str, Any]


def grade_id(id: str) -> str:
    """The nbgrader id of a part's solution cell: "2.1a" -> "ex-2-1a"."""
    return "ex-" + id.replace(".", "-")


def part_id(grade: Any) -> str:
    """The part that a cell's nbgrader id names ("check-2-1a" -> "2.1a"), "" for none."""
    match = re.fullmatch(r"(?:ex|check)-(\d+)-(\d+[a-z]?)", grade if isinstance(grade, str) else "")
    return f"{match[1]}.{match[2]}" if match else ""


def markdown(text: str) -> Cell:
    """A lesson cell."""
    return _cell("markdown", text, {})


def code(text: str) -> Cell:
    """An example cell."""
    return _cell("code", text, {})


def exercise_text(exercise: Exercise, text: str) -> Cell:
    """The cell that poses an exercise: heading with its id, level, minutes, needs, then `text`."""
    stars = f"level {exercise.level} of 5"
    needs = ", ".join(exercise.needs)
    head = f"## {exercise.id} {exercise.title}\n\n{stars} · {exercise.minutes} minutes"
    head += f" · needs: {needs}" if needs else ""
    return _cell("markdown", f"{head}\n\n{textwrap.dedent(text).strip()}", {})


def solution(id: str, text: str) -> Cell:
    """The cell with stub and solution of a part; `text` has the delimiters in it."""
    if BEGIN not in text or END not in text:
        raise ExerciseError(f"the solution cell of {id} has no {BEGIN} ... {END}")
    metadata = {"grade": False, "solution": True, "locked": False, "grade_id": grade_id(id)}
    return _cell("code", text, {"nbgrader": {**metadata, "schema_version": 3, "task": False}})


def check_cell(id: str, found: Part | None = None) -> Cell:
    """The locked cell after it, which shows the card; nbgrader reads the points from its value."""
    found = found or part(id)[1]
    metadata = {"grade": True, "solution": False, "locked": True, "points": found.total}
    metadata["grade_id"] = grade_id(id).replace("ex-", "check-")
    text = f'check("{id}", {found.name}).show()'
    return _cell("code", text, {"nbgrader": {**metadata, "schema_version": 3, "task": False}})


SETUP = """\
import torch
from torch import nn

import fxlab
from fxlab.teach import NotDone, check, hint, predict, progress, restore, save

save()  # a link to one zip with your work; restore("that.zip") brings it back"""


def first_cells(title: str, rows: dict[str, str], text: str) -> list[Cell]:
    """The cells that open a master: title, the table of the lectures, what it is for, imports.

    Args:
        title: Such as "02 Transform: exercises".
        rows: Of the table: "before, after", "time", "memory", "needs", "teaches", "paper".
        text: What stands below the table.
    """
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return [markdown(f"# {title}\n\n| | |\n|---|---|\n{table}\n\n{text}"), code(SETUP)]


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Write a notebook without outputs; the same cells give the same bytes."""
    for number, cell in enumerate(cells):
        cell["id"] = cell.get("id") or f"cell-{number}"
    notebook = {
        "cells": list(cells),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _cell(kind: str, text: str, metadata: dict[str, Any]) -> Cell:
    text = textwrap.dedent(text).strip("\n")
    cell: Cell = {
        "cell_type": kind,
        "metadata": metadata,
        "source": text.splitlines(keepends=True),
    }
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SolutionCell:
    """One solution cell of a master.

    Attributes:
        id: The part's.
        source: With stub and solution.
        path: The notebook.
    """

    id: str
    source: str
    path: Path


def source_of(cell: Any) -> str:
    """A cell's text, however the notebook stores it."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def solution_cells(path: Path) -> Iterator[SolutionCell]:
    """The solution cells of one master."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        mark = cell.get("metadata", {}).get("nbgrader", {})
        if mark.get("solution"):
            yield SolutionCell(part_id(mark.get("grade_id")), source_of(cell), path)


def cleared(source: str, id: str) -> str:
    """A solution cell as the student gets it: each solution replaced by `raise NotDone(id)`.

    Example:
        >>> text = ["def f():", "    ### BEGIN SOLUTION", "    return 1", "    ### END SOLUTION"]
        >>> cleared(chr(10).join(text), "1.1").splitlines()
        ['def f():', '    raise NotDone("1.1")']
    """
    lines, inside = [], False
    for line in source.splitlines():
        if line.strip() == BEGIN:
            if inside:
                raise ExerciseError(f"{id}: a solution begins inside a solution")
            inside = True
            lines.append(line[: len(line) - len(line.lstrip())] + f'raise NotDone("{id}")')
        elif line.strip() == END:
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        raise ExerciseError(f"{id}: a solution has no {END}")
    return "\n".join(lines)
