"""How do masters become what students get?

`release` copies each master of `notebooks/instructor/` to `notebooks/exercises/`: every solution
becomes `raise NotDone("2.2")`, outputs go. A copy carries a checksum of itself; a file that a
student (or teacher) has changed since is never written over. `problems` says what CI wants to know:
a copy that is not up to date, a line of a solution in a student's file, an output.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach import variants
from fxlab.teach.exercise import part
from fxlab.teach.masters import BEGIN, END, cleared, part_id, source_of

INSTRUCTOR = Path("notebooks/instructor")
_DAY_ONE = (1980, 1, 1, 0, 0, 0)  # of every zip entry: the same files make the same zip


def masters_of(folder: Path = INSTRUCTOR) -> list[Path]:
    """The masters in a folder.

    Raises:
        ExerciseError: There are none: a plain installation has no masters.
    """
    found = sorted(folder.glob("[0-9]*.ipynb"))
    if not found:
        raise ExerciseError(
            f"there are no masters in {folder.as_posix()}",
            hint="run this in a clone of the project, or name the masters",
        )
    return found


def student_copy(master: dict[str, Any], course: int | None = None) -> dict[str, Any]:
    """A master as students get it.

    Args:
        master: The notebook's JSON.
        course: Seed of a course's variants, or None.

    Raises:
        ExerciseError: A solution has no id or no end.
    """
    made = copy.deepcopy(master)
    if course is not None:
        made["cells"] = variants.varied(made["cells"], course)
    for cell in made["cells"]:
        mark = cell.get("metadata", {}).get("nbgrader", {})
        source = source_of(cell)
        if mark.get("solution") and cell["cell_type"] == "code":
            id = part_id(mark.get("grade_id"))
            if not id:
                raise ExerciseError(f"a solution cell has the id {mark.get('grade_id')!r}")
            source = cleared(source, id)
            compile(source, f"<stub {id}>", "exec")
        elif BEGIN in source or END in source:
            raise ExerciseError(
                f"a cell without nbgrader's solution mark has {BEGIN}: {source[:60]!r}"
            )
        cell["source"] = source.splitlines(keepends=True)
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        if mark and cell["cell_type"] == "code":
            # What nbgrader writes too: the cell can't be deleted, a check not changed.
            cell["metadata"]["deletable"] = False
            if mark.get("locked"):
                cell["metadata"]["editable"] = False
            mark["cell_type"] = "code"
            mark["checksum"] = _nbgrader_checksum(cell, mark)
    made["metadata"].pop("widgets", None)
    if course is not None:
        made["metadata"]["fxlab_course"] = course
    made["metadata"]["fxlab"] = {"released": _checksum(made)}
    return made


def _nbgrader_checksum(cell: dict[str, Any], mark: dict[str, Any]) -> str:
    """The checksum by which nbgrader sees whether a student changed a cell."""
    digest = hashlib.md5(usedforsecurity=False)
    grade, solution = bool(mark.get("grade")), bool(mark.get("solution"))
    locked = False if solution else True if grade else bool(mark.get("locked"))
    texts = [source_of(cell), cell["cell_type"], str(grade), str(solution), str(locked)]
    texts.append(mark["grade_id"])
    if grade:
        texts.append(str(float(mark["points"])))
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _checksum(notebook: dict[str, Any]) -> str:
    """Of what a student may change: the cells' sources. Outputs and ids don't count."""
    cells = [[cell["cell_type"], source_of(cell)] for cell in notebook["cells"]]
    return hashlib.blake2s(json.dumps(cells).encode(), digest_size=8).hexdigest()


def text_of(notebook: dict[str, Any]) -> str:
    """A notebook's file: the same notebook makes the same bytes."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def is_changed(path: Path) -> bool:
    """Whether a released copy has been worked on; what can't be read counts as changed."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        released = notebook["metadata"]["fxlab"]["released"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return released != _checksum(notebook)


def release(
    masters: Sequence[str | Path],
    to: str | Path = "notebooks/exercises",
    *,
    zip_path: str | Path | None = None,
    course: int | None = None,
) -> list[Path]:
    """Write the students' copies.

    Args:
        masters: The master notebooks.
        to: Folder of the copies.
        zip_path: Also write one zip of them.
        course: Seed of a course's variants (see `fxlab.teach.variants`).

    Returns:
        The paths written; a copy that was up to date already is among them.

    Raises:
        ExerciseError: A copy has been changed since it was released (it is left as it is, and
            nothing at all is written), or a master is not well formed.
    """
    to = Path(to)
    made: dict[Path, str] = {}
    for path in map(Path, masters):
        made[to / path.name] = text_of(student_copy(_read(path), course))
    changed = [path for path in made if path.exists() and is_changed(path)]
    if changed:
        raise ExerciseError(
            "changed since they were released: " + ", ".join(path.name for path in changed),
            hint="move them away, or release to another folder (--to)",
        )
    extra = _extra_files([Path(path) for path in masters])
    if course is not None:
        extra["course.json"] = json.dumps({"course": course}) + "\n"
    to.mkdir(parents=True, exist_ok=True)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    for name, text in extra.items():
        (to / name).write_text(text, encoding="utf-8", newline="\n")
    if zip_path is not None:
        _write_zip(Path(zip_path), {**{p.name: t for p, t in made.items()}, **extra})
    return [*made, *([Path(zip_path)] if zip_path is not None else [])]


def _extra_files(masters: list[Path]) -> dict[str, str]:
    """The cases of private exercises: their checks run where the student is."""
    folders = {path.parent for path in masters}
    found = [path for folder in sorted(folders) for path in sorted(folder.glob("ex_*.py"))]
    return {path.name: path.read_text(encoding="utf-8") for path in found}


def _write_zip(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _DAY_ONE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, text)


def _read(path: Path) -> dict[str, Any]:
    """A notebook's JSON, in which every cell has a type and a source.

    Raises:
        ExerciseError: It can't be read, or is no notebook.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if not isinstance(cell["cell_type"], str) or not isinstance(source_of(cell), str):
                raise TypeError("a cell without type or source")
    except KeyError as error:
        raise ExerciseError(f"{path.name} is no notebook: it has no {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ExerciseError(f"{path.name} can't be read as a notebook: {error}") from None
    return notebook


# -- what CI asks ----------------------------------------------------------------------------------


def solution_lines(master: dict[str, Any]) -> set[str]:
    """The lines that stand between solution delimiters and nowhere else in a master."""
    inside: set[str] = set()
    outside: set[str] = set()
    for cell in master["cells"]:
        within = False
        for line in source_of(cell).splitlines():
            text = line.strip()
            if text in (BEGIN, END):
                within = text == BEGIN
                continue
            (inside if within else outside).add(text)
    return {line for line in inside - outside if len(line) > 3}


def problems(
    masters: Iterable[str | Path], to: str | Path, *, course: int | None = None
) -> list[str]:
    """What is wrong with the students' copies: stale, missing, leaking, drifted, with outputs."""
    to = Path(to)
    found: list[str] = []
    for path in map(Path, masters):
        try:
            master = _read(path)
            expected = text_of(student_copy(master, course))
        except (ExerciseError, SyntaxError) as error:
            found.append(f"{path.name}: {error}")
            continue
        found += [f"{path.name}: {text}" for text in drifted(master)]
        made = to / path.name
        if not made.exists():
            found.append(f"{made.name} is missing: run fxlab release")
            continue
        text = made.read_text(encoding="utf-8")
        if text != expected:
            found.append(f"{made.name} is not what its master says now: run fxlab release")
        found += [f"{made.name}: {text}" for text in leaks(master, text)]
    wanted = {Path(path).name for path in masters}
    for path in sorted(to.glob("*.ipynb")):
        if path.name not in wanted:
            found.append(f"{path.name} has no master")
    return found


def leaks(master: dict[str, Any], student: str) -> list[str]:
    """Solution lines, delimiters and outputs in a student's file."""
    notebook = json.loads(student)
    lines = {line.strip() for cell in notebook["cells"] for line in source_of(cell).splitlines()}
    found = [f"has the delimiter {mark}" for mark in (BEGIN, END) if mark in student]
    found += [f"has a line of the solution: {line}" for line in sorted(
        lines & solution_lines(master)
    )]  # fmt: skip
    if any(cell.get("outputs") for cell in notebook["cells"]):
        found.append("has outputs")
    return found


def drifted(master: dict[str, Any]) -> list[str]:
    """Stubs of a master that are not what their exercise says."""
    found = []
    for cell in master["cells"]:
        mark = cell.get("metadata", {}).get("nbgrader", {})
        id = part_id(mark.get("grade_id")) if mark else ""
        if not id:
            continue
        try:
            asked = part(id)[1]
        except ExerciseError as error:
            found.append(error.message)
            continue
        if mark.get("solution"):
            before = source_of(cell).partition(BEGIN)[0]
            if asked.stub.strip() not in before:
                found.append(f"the stub of {id} is not the one of its exercise")
        elif mark.get("grade") and mark.get("points") != asked.total:
            found.append(f"the check of {id} has {mark.get('points')} points, not {asked.total}")
    return found
