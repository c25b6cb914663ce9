"""Who handed in what?

Reads a folder (or zip) of submissions as teachers get them: a folder, notebook or zip for each
student, or a bulk download of Moodle or Canvas, whose file names carry the student. The latest file
wins. Whatever is wrong with a file (no JSON, no notebook, a broken zip) becomes a sentence for that
student; nobody else is touched.
"""

from __future__ import annotations

import csv
import json
import re
import unicodedata
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach.masters import part_id, source_of

LARGEST = 300 << 20  # bytes of one notebook, or of all that is in a zip
BESIDE = 10 << 20  # bytes of the files that an answer may read
MOODLE = re.compile(r"(?P<who>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+_?(?P<file>.*)")
CANVAS = re.compile(r"(?P<who>[^_]+)_(?:LATE_)?(?P<id>\d+)_\d+_(?P<file>.+)")
VERSION = re.compile(r"(?P<stem>.+?)(?:-(?P<dash>\d{1,3})| \((?P<round>\d{1,3})\))?$")
SKIPPED = ("__MACOSX", ".ipynb_checkpoints", "__pycache__", ".git")


@dataclass
class Notebook:
    """The code of one notebook that was handed in.

    Attributes:
        name: Its file name as the teacher got it.
        cells: Source of each code cell, in order.
        marks: Part id -> number of the cell that carries nbgrader's id of it.
        folder: Where the files that came with it are, or None.
        order: Version, time and name: the largest is the latest.
    """

    name: str
    cells: list[str]
    marks: dict[str, int]
    folder: Path | None = None
    order: tuple[int, int, str] = (0, 0, "")


@dataclass
class Submission:
    """What one student handed in.

    Attributes:
        student: The id in the CSV.
        notebooks: Oldest first.
        problems: What could not be read, and why.
        files: The files behind it, as the teacher knows them.
        name: The student's name, "" if only the id is known.
    """

    student: str
    notebooks: list[Notebook] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    name: str = ""


def collect(
    folder: Path,
    room: Path,
    students: list[dict[str, str]] | None = None,
    skipped: Iterable[str] = (),
) -> list[Submission]:
    """Find the submissions in a folder or zip.

    Args:
        folder: What the teacher downloaded.
        room: An empty folder for what is unpacked.
        students: Rows of the class list, see `class_list`; matched by id, number or name.
        skipped: Names in the folder that are no submissions: what an earlier grading wrote there.

    Returns:
        One for each student, sorted by id; with a class list also those who handed in nothing.
        Two students of the same name (and different numbers) stay two.

    Raises:
        ExerciseError: There is no such folder or zip.
    """
    if folder.is_file() and folder.suffix == ".zip":
        target = room / "download"
        problem = unpack(folder, target)
        if problem:
            raise ExerciseError(f"{folder.name}: {problem}")
        folder = target
    if not folder.is_dir():
        is_there = f"{folder.name!r} is no folder and no zip"
        missing = f"there is no folder {folder.name!r}"
        raise ExerciseError(f"{is_there if folder.exists() else missing} of submissions")
    places = _places(folder, skipped)
    numbers: dict[str, set[str]] = {}
    for place in places:
        who, number, _ = owner_of(place.name)
        numbers.setdefault(who, set()).add(number)
    found: dict[str, Submission] = {}
    for place in places:
        student, number, shown = owner_of(place.name)
        row = _row(students, student, number)
        if row is not None:
            student = row["id"]
        elif len(numbers[student]) > 1 and number:
            student = f"{student} {number}"
        one = found.setdefault(student, Submission(student, name=row["name"] if row else ""))
        one.files.append(place.name)
        _take(place, shown, one, room / f"{len(found)}-{len(one.files)}")
    for row in students or ():
        found.setdefault(row["id"], Submission(row["id"], name=row["name"]))
    for one in found.values():
        one.notebooks.sort(key=lambda notebook: notebook.order)
    return [found[student] for student in sorted(found)]


def _places(folder: Path, skipped: Iterable[str]) -> list[Path]:
    """What stands in a folder of submissions; a folder around all of them is looked through."""
    places = [
        place
        for place in sorted(folder.iterdir())
        if not place.name.startswith(".")
        and place.name not in (*SKIPPED, *skipped)
        and place.suffix not in (".csv", ".html")
    ]
    if len(places) == 1 and places[0].is_dir() and owner_of(places[0].name)[1] == "":
        inner = [one for one in places[0].iterdir() if not one.name.startswith(".")]
        bulk = [one for one in inner if owner_of(one.name)[1]]
        if bulk or sum(one.is_dir() or one.suffix == ".zip" for one in inner) > 1:
            return _places(places[0], skipped)
    return places


def owner_of(name: str) -> tuple[str, str, str]:
    """The student that a file name of a bulk download names, a number, and the file's own name.

    Example:
        >>> owner_of("Ada Lovelace_1234_assignsubmission_file_02_transform.ipynb")
        ('Ada Lovelace', '1234', '02_transform.ipynb')
        >>> owner_of("lovelaceada_LATE_77_9001_02_transform-2.ipynb")
        ('lovelaceada', '77', '02_transform-2.ipynb')
        >>> owner_of("ada.zip")
        ('ada', '', 'ada.zip')
    """
    stem = name
    for pattern in (MOODLE, CANVAS):
        match = pattern.fullmatch(stem)
        if match:
            return match["who"].strip(), match["id"], match["file"] or name
    base = PurePosixPath(name)
    plain = base.stem if base.suffix in (".ipynb", ".zip") else name
    return VERSION.fullmatch(plain)["stem"] if base.suffix else plain, "", name  # type: ignore


def _version(shown: str) -> int:
    match = VERSION.fullmatch(PurePosixPath(shown).stem)
    return int(match["dash"] or match["round"] or 0) if match else 0


def _take(place: Path, shown: str, one: Submission, room: Path) -> None:
    """Read what stands under one name of the folder."""
    if place.is_dir():
        _take_folder(place, one, room)
    elif zipfile.is_zipfile(place) and place.suffix == ".zip":
        problem = unpack(place, room)
        if problem:
            one.problems.append(f"{place.name}: {problem}")
        else:
            _take_folder(room, one, room / "inner")
    elif place.suffix == ".zip":
        one.problems.append(f"{place.name}: this is no zip file")
    elif place.suffix == ".ipynb":
        _take_notebook(place, shown, one, None)
    else:
        one.problems.append(f"{place.name}: neither a notebook, a zip nor a folder")


def _take_folder(folder: Path, one: Submission, room: Path) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if not set(path.relative_to(folder).parts) & set(SKIPPED)]
    for path in paths:
        if path.suffix == ".ipynb":
            _take_notebook(path, path.name, one, path.parent)
        elif path.suffix == ".zip" and not path.name.startswith("."):
            inner = room / f"{len(one.notebooks)}-{path.stem}"
            problem = unpack(path, inner)
            if problem:
                one.problems.append(f"{path.name}: {problem}")
                continue
            for found in sorted(inner.rglob("*.ipynb")):
                if not set(found.relative_to(inner).parts) & set(SKIPPED):
                    _take_notebook(found, found.name, one, found.parent)
    if not paths:
        one.problems.append(f"{folder.name}: the folder is empty")


def _take_notebook(path: Path, shown: str, one: Submission, folder: Path | None) -> None:
    try:
        notebook = read_notebook(path)
    except ExerciseError as error:
        one.problems.append(f"{shown}: {error.message}")
        return
    notebook.name, notebook.folder = shown, folder
    notebook.order = (_version(shown), int(path.stat().st_mtime), shown)
    one.notebooks.append(notebook)


def read_notebook(path: Path) -> Notebook:
    """Read the code of a notebook, whatever else is wrong with it.

    Raises:
        ExerciseError: It is too large, no JSON, or has no list of cells.
    """
    size = path.stat().st_size
    if size > LARGEST:
        raise ExerciseError(f"it has {size >> 20} MB, more than {LARGEST >> 20}")
    try:
        data: Any = json.loads(path.read_bytes().decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise ExerciseError(f"it is no notebook: {str(error)[:200]}") from None
    sheets = data.get("worksheets") if isinstance(data, dict) else None
    if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict):
        data = sheets[0]  # the format before 2015
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise ExerciseError("it is no notebook: it has no list of cells")
    sources: list[str] = []
    marks: dict[str, int] = {}
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        cell = {"source": cell.get("source", cell.get("input", "")), **cell}
        metadata = cell.get("metadata")
        mark = metadata.get("nbgrader") if isinstance(metadata, dict) else None
        id = ""
        if isinstance(mark, dict) and mark.get("solution"):
            id = part_id(mark.get("grade_id"))
        try:
            source = source_of(cell)
        except TypeError:
            source = ""
        if id:
            marks[id] = len(sources)
        sources.append(source)
    return Notebook(path.name, sources, marks)


def unpack(path: Path, target: Path) -> str:
    """Unpack a zip; return why it can't be, "" when it was.

    Names that lead out of the target, links, and more than LARGEST bytes are refused.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [one for one in archive.infolist() if not one.is_dir()]
            if sum(one.file_size for one in entries) > LARGEST:
                return f"it unpacks to more than {LARGEST >> 20} MB"
            for one in entries:
                name = PurePosixPath(one.filename.replace("\\", "/"))
                if name.is_absolute() or ".." in name.parts or ":" in one.filename:
                    return f"it has the name {one.filename!r}, which leads out of it"
                if set(name.parts) & set(SKIPPED):
                    continue
                place = target / name
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(one) as source, place.open("wb") as written:
                    left = LARGEST
                    while part := source.read(1 << 20):
                        left -= len(part)
                        if left < 0:
                            return f"it unpacks to more than {LARGEST >> 20} MB"
                        written.write(part)
                _set_time(place, one.date_time)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        return f"it can't be unpacked: {str(error)[:200]}"
    return ""


def _set_time(path: Path, date: tuple[int, int, int, int, int, int]) -> None:
    import calendar
    import os

    seconds = calendar.timegm((*date, 0, 0, 0))
    os.utime(path, (seconds, seconds))


def files_beside(folder: Path | None) -> tuple[Path, ...]:
    """The files that came with a notebook and that its code may read."""
    if folder is None:
        return ()
    found = [one for one in sorted(folder.iterdir()) if one.is_file() and not one.is_symlink()]
    found = [one for one in found if one.suffix not in (".ipynb", ".zip")]
    return tuple(found) if sum(one.stat().st_size for one in found) <= BESIDE else ()


# -- the class list --------------------------------------------------------------------------------

_COLUMNS = {
    "id": ("id", "student", "student_id", "studentid", "username", "user", "login", "sis login id",
           "id number", "matriculation"),
    "name": ("name", "student name", "full name", "fullname"),
    "number": ("number", "canvas id", "moodle id", "identifier", "participant"),
}  # fmt: skip


def class_list(path: Path) -> list[dict[str, str]]:
    """Read a class list: a CSV with a header.

    Returns:
        Rows with "id", "name" and "number" ("" where the file has no such column). First and last
        name may be two columns.

    Raises:
        ExerciseError: It has no column of ids, or is no text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "save it as CSV in UTF-8"
        raise ExerciseError(f"{path.name} is no text in UTF-8", hint=hint) from error
    try:
        dialect: Any = csv.Sniffer().sniff(text[:4000], delimiters=",;\t")
    except csv.Error:
        dialect = csv.excel
    rows = list(csv.DictReader(text.splitlines(), dialect=dialect))
    found = []
    for row in rows:
        lower = {(key or "").strip().lower(): (value or "").strip()
                 for key, value in row.items() if not isinstance(value, list)}  # fmt: skip
        made = {kind: next((lower[name] for name in names if name in lower), "")
                for kind, names in _COLUMNS.items()}  # fmt: skip
        first = lower.get("first name", lower.get("firstname", ""))
        last = lower.get("last name", lower.get("lastname", lower.get("surname", "")))
        made["name"] = made["name"] or f"{first} {last}".strip()
        if made["id"]:
            found.append(made)
    if not found:
        raise ExerciseError(f"{path.name}: no column id, student or username")
    return found


def _row(students: Iterable[dict[str, str]] | None, who: str, number: str) -> dict[str, str] | None:
    """The row of the class list that a file's name means."""
    key = folded(who)
    for row in students or ():
        names = {folded(row["id"]), folded(row["name"]), _turned(row["name"])}
        if key in names or (number and number in (row["id"], row["number"])):
            return row
    return None


def folded(name: str) -> str:
    """A name for comparing: no case, accents, spaces or punctuation."""
    text = unicodedata.normalize("NFKD", name)
    return "".join(c for c in text.casefold() if c.isalnum())


def _turned(name: str) -> str:
    """Last name first, as Canvas writes it."""
    parts = name.split()
    return folded("".join([*parts[-1:], *parts[:-1]])) if parts else "\0"
