"""How does a student's work survive a closed browser, and how far has it got?

Checks and hints are noted in a small JSON file beside the notebook; it is the student's own and
nobody grades it. `save` puts changed notebooks, that file and saved timelines into one zip, and
`restore` brings them back without ever writing over work that is newer. Outside a notebook nothing
is written: a script, a test or a grader leaves no file behind.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import sys
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.teach.exercise import exercise, exercises, part

PROGRESS = "fxlab_progress.json"
INDEX = "fxlab_work.json"  # inside a zip: when each file was written
LARGEST = 64 << 20  # bytes of one file that is kept
SUFFIXES = (".ipynb", ".json", ".html")
_notes: dict[str, Any] = {"hints": {}, "parts": {}}  # of this process, where no file is kept
_saved: list[Path] = []  # zips that this process made


# -- the file of progress --------------------------------------------------------------------------


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this, and no grader."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return getattr(shell, "kernel", None) is not None and "NBGRADER_EXECUTION" not in os.environ


def _file() -> Path | None:
    """Where progress is kept: FXLAB_PROGRESS ("off": nowhere), else beside the notebook."""
    asked = os.environ.get("FXLAB_PROGRESS", "")
    if asked:
        return None if asked == "off" else Path(asked)
    return Path.cwd() / PROGRESS if _in_notebook() else None


def _read() -> dict[str, Any]:
    path = _file()
    if path is None:
        return _notes
    try:
        return _valid(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {"hints": {}, "parts": {}}  # none yet, or a broken one: checks fill it again


def _valid(data: Any) -> dict[str, Any]:
    """Keep what is well formed of a file that anybody may have edited."""
    hints = data.get("hints") if isinstance(data, dict) else None
    parts = data.get("parts") if isinstance(data, dict) else None
    return {
        "hints": {
            id: count
            for id, count in (hints if isinstance(hints, dict) else {}).items()
            if type(count) is int and 0 <= count < 10**6
        },
        "parts": {
            id: {**_FRESH, **{k: v for k, v in one.items() if type(v) is type(_FRESH.get(k))}}
            for id, one in (parts if isinstance(parts, dict) else {}).items()
            if isinstance(one, dict)
        },
    }


_FRESH: dict[str, Any] = {"status": "todo", "best": 0, "out_of": 0, "checks": 0, "when": ""}


def _write(data: dict[str, Any]) -> None:
    path = _file()
    if path is None:
        return
    text = json.dumps({"format": "fxlab.progress", "version": 1, **data}, indent=1, sort_keys=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError:  # a folder that can't be written to costs the table, not the check
        beside.unlink(missing_ok=True)


def note_check(id: str, result: Any) -> None:
    """Remember what a check said, for `progress`.

    Args:
        id: The part's.
        result: The Result; one of a single behaviour is not counted.
    """
    if result.out_of != part(id)[1].total:
        return
    data = _read()
    note = data["parts"].setdefault(id, dict(_FRESH))
    note["status"], note["out_of"] = result.status, result.out_of
    note["best"] = max(note["best"], result.points)
    note["checks"] += 1
    note["when"] = time.strftime("%Y-%m-%d %H:%M")
    _write(data)


# -- hint and progress -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hint:
    """One hint; in a notebook it shows itself.

    Attributes:
        id: Of the exercise.
        number: 1 to 3.
        text: What it says.
        again: It was given before: the three were over.
    """

    id: str
    number: int
    text: str
    again: bool = False

    @property
    def head(self) -> str:
        """Which hint it is; before the first one that comes again, that it does."""
        over = "that was the last hint; here is the first again. "
        return (
            f"{over if self.again and self.number == 1 else ''}{self.id}, hint {self.number} of 3"
        )

    def __repr__(self) -> str:
        return f"{self.head}: {self.text}"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.head)}</b><br>{html.escape(self.text)}</p>"


def hint(id: str) -> Hint:
    """Give one more hint at each call: the idea, the steps, the call that beginners miss.

    None of the three is the answer, and asking costs nothing. The fourth call says so and
    begins anew.

    Args:
        id: Of an exercise or part.

    Example:
        >>> hint("2.2").number, hint("2.2").number
        (1, 2)
    """
    owner = exercise(id)
    data = _read()
    asked = data["hints"].get(owner.id, 0)
    data["hints"][owner.id] = asked + 1
    _write(data)
    number = asked % 3 + 1
    return Hint(owner.id, number, owner.hints[number - 1], asked >= 3)


_WORDS = {
    "": "not begun",
    "todo": "not written yet",
    "pass": "public checks passed",
    "fail": "not right yet",
    "error": "not right yet",
}


@dataclass(frozen=True)
class Progress:
    """The table that `progress` shows.

    Attributes:
        rows: (id, title, minutes, state in words, best points, points possible, hints asked). The
            state and the points are of the best try; minutes are 0 but in an exercise's first part.
    """

    rows: list[tuple[str, str, int, str, int, int, int]] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [
            f"{id:5} {title[:50]:50} {f'{minutes} min' if minutes else '':7}  {status:44} "
            f"{best:2} of {out_of:2}  {asked}"
            for id, title, minutes, status, best, out_of, asked in self.rows
        ]
        head = f"{'':5} {'exercise':50} {'':7}  {'state':44} {'points':8}  hints"
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        names = ("", "exercise", "minutes", "state", "points", "hints asked")
        head = "".join(f"<th {left}>{name}</th>" for name in names)
        rows = []
        for id, title, minutes, status, best, out_of, asked in self.rows:
            texts = (id, title, minutes or "", status, f"{best} of {out_of}", asked)
            cells = "".join(f"<td {left}>{html.escape(str(text))}</td>" for text in texts)
            rows.append(f"<tr>{cells}</tr>")
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def progress() -> Progress:
    """Show how far you are: a table of all exercises. It is yours; nobody grades it.

    Example:
        >>> [row[1] for row in progress().rows if row[0] == "2.2"]
        ['Dead code elimination that keeps effects']
    """
    data = _read()
    rows = []
    for owner in exercises():
        for k, one in enumerate(owner.parts):
            note = data["parts"].get(one.id, {})
            best = min(note.get("best", 0), one.total)
            status = _state(note.get("status", ""), best == one.total)
            asked = min(data["hints"].get(owner.id, 0), 3) if k == 0 else 0
            minutes = owner.minutes if k == 0 else 0
            rows.append((one.id, owner.title, minutes, status, best, one.total, asked))
    return Progress(rows)


def _state(last: str, passed: bool) -> str:
    """The state of the best try, in words, and of the last one where that is another."""
    said = _WORDS.get(last, "not begun")
    return f"{_WORDS['pass']} (last try: {said})" if passed and last != "pass" else said


# -- save and restore ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What `save` or `restore` did; in a notebook it shows itself, with a link.

    Attributes:
        path: The zip, or None when there was nothing to save.
        lines: What was done, in sentences.
    """

    path: Path | None
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        text = "<br>".join(map(html.escape, self.lines))
        if self.path is None:
            return f"<p>{text}</p>"
        name = html.escape(self.path.name, quote=True)
        return f'<p><a href="{name}" download="{name}">{name}</a><br>{text}</p>'


def save(folder: str | Path | None = None) -> Saved:
    """Put your work into one zip to download: changed notebooks, progress, saved timelines.

    What is in it is what is on the disk: save the notebook first (Ctrl+S). A notebook that nobody
    has changed since it was handed out is left out.

    Args:
        folder: Where the notebooks are; by default the notebook's own folder.
    """
    folder = Path.cwd() if folder is None else Path(folder)
    if "NBGRADER_EXECUTION" in os.environ:
        return Saved(None, ("nothing is saved while a grader runs",))
    files = _work(folder)
    if not any(name != PROGRESS for name in files):
        text = 'nothing to save yet; restore("that.zip") brings back what you saved elsewhere'
        return Saved(None, (text,))
    digest = hashlib.sha256()
    for name, (content, _) in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content + b"\0")
    names, mark = ", ".join(sorted(files)), digest.hexdigest()
    same = [path for path in sorted(folder.glob("fxlab-work-*.zip")) if _digest(path) == mark]
    if same:
        return Saved(same[-1], (f"saved already: {names}",))
    path = _new_name(folder)
    try:
        path.write_bytes(_packed(files, mark))
    except OSError as error:
        return Saved(None, (f"nothing was saved: {error.strerror or error}",))
    for old in set(folder.glob("fxlab-work-*.zip")) - {path}:
        # Of the same files by this kernel, or with nothing but other progress: the new one has it.
        ours = old in _saved and _names(old) <= files.keys()
        if ours or _same_work(old, files):
            old.unlink(missing_ok=True)
    _saved.append(path)
    text = "download it; restore(...) brings it back, here or on another machine"
    return Saved(path, (f"saved: {names}", text))


def restore(zip: str | Path) -> Saved:
    """Bring back what `save` put into a zip. Work that is newer is never written over.

    A file that is not here, or here as it was handed out, is written. One that was changed here
    is replaced only if the zip's is newer, and then the one from here stays under another name;
    if it is the newer one, the zip's is put beside it.

    Args:
        zip: Path of the zip; its files go into the current folder.

    Raises:
        ExerciseError: It is no zip of `save`.
    """
    path = Path(zip)
    files = _unpacked(path)
    folder, lines = Path.cwd(), []
    for name, (content, written) in sorted(files.items()):
        if name == PROGRESS:
            lines.append(_merge_progress(content))
            continue
        target = folder / name
        if not target.exists() or _untouched(target):
            _put(target, content, written)
            lines.append(f"{name}: restored")
        elif target.read_bytes() == content:
            lines.append(f"{name}: the same")
        elif written > target.stat().st_mtime:
            kept = _free(target, "replaced")
            target.rename(kept)
            _put(target, content, written)
            lines.append(f"{name}: restored; the older one is now {kept.name}")
        else:
            beside = _free(target, "restored")
            _put(beside, content, written)
            lines.append(f"{name}: the one here is newer and stays; the zip's is {beside.name}")
    return Saved(None, (*lines, "reopen the notebook to see what was restored"))


def _untouched(path: Path) -> bool:
    from fxlab.teach.releasing import is_changed

    return path.suffix == ".ipynb" and not is_changed(path)


def _work(folder: Path) -> dict[str, tuple[bytes, float]]:
    """Name -> content and time of what belongs into the zip."""
    found: dict[str, tuple[bytes, float]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file() or path.stat().st_size > LARGEST:
            continue
        content = path.read_bytes()
        wanted = path.name == PROGRESS or (
            not _untouched(path) if path.suffix == ".ipynb" else _is_timeline(content)
        )
        if wanted:
            found[path.name] = content, path.stat().st_mtime
    return found


def _is_timeline(content: bytes) -> bool:
    begin = content[:4000]
    return b'"format":"fxlab.timeline"' in begin or (b"<html" in begin and b".fxl" in begin)


def _packed(files: dict[str, tuple[bytes, float]], digest: str) -> bytes:
    index = {name: written for name, (_, written) in files.items()}
    head = {"format": "fxlab.work", "version": 1, "digest": digest, "files": index}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(INDEX, json.dumps(head, indent=1, sort_keys=True))
        for name, (content, _) in sorted(files.items()):
            archive.writestr(name, content)
    return buffer.getvalue()


def _head(archive: zipfile.ZipFile) -> dict[str, Any]:
    with archive.open(INDEX) as file:
        head = json.loads(file.read(1 << 20))
    if not isinstance(head, dict) or head.get("format") != "fxlab.work":
        raise ValueError
    return head


def _digest(path: Path) -> str:
    """What a zip of ours says its files' digest is, "" for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return str(_head(archive).get("digest"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return ""


def _names(path: Path) -> set[str]:
    """The names of the files in a zip of ours; of a zip that is gone none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist()) - {INDEX}
    except (OSError, zipfile.BadZipFile):
        return set()


def _same_work(path: Path, files: dict[str, tuple[bytes, float]]) -> bool:
    """Whether all that a zip of ours has, progress left out, is among these files, as it is."""
    try:
        old = _unpacked(path)
    except ExerciseError:
        return False  # it is not ours to judge
    old.pop(PROGRESS, None)
    same = all(name in files and files[name][0] == content for name, (content, _) in old.items())
    return same and bool(old)


def _unpacked(path: Path) -> dict[str, tuple[bytes, float]]:
    """Name -> content and time of a zip's files; names that lead elsewhere are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            written = _head(archive).get("files")
            found = {}
            for name, when in written.items() if isinstance(written, dict) else ():
                plain = Path(name).name == name and not name.startswith(".")
                if not plain or Path(name).suffix not in SUFFIXES or type(when) not in (int, float):
                    raise ExerciseError(f"{path.name} has a file that save() never writes: {name}")
                with archive.open(name) as file:
                    content = file.read(LARGEST + 1)
                if len(content) > LARGEST:
                    raise ExerciseError(f"{name} in {path.name} has more than {LARGEST >> 20} MB")
                found[name] = content, float(when)
            return found
    except FileNotFoundError:
        raise ExerciseError(
            f"there is no file {path}",
            hint="upload the zip into the notebook's folder; its name begins with fxlab-work",
        ) from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise ExerciseError(f"{path.name} is no zip that save() made") from None


def _merge_progress(content: bytes) -> str:
    try:
        theirs = _valid(json.loads(content))
    except ValueError:
        return f"{PROGRESS}: can't be read, left out"
    ours = _read()
    for id, count in theirs["hints"].items():
        ours["hints"][id] = max(count, ours["hints"].get(id, 0))
    for id, note in theirs["parts"].items():
        mine = ours["parts"].get(id)
        if mine is None:
            ours["parts"][id] = note
            continue
        newer = max(mine, note, key=lambda one: one["when"])
        counts = {key: max(mine[key], note[key]) for key in ("best", "checks")}
        ours["parts"][id] = {**newer, **counts}
    _write(ours)
    return f"{PROGRESS}: merged"


def _put(path: Path, content: bytes, written: float) -> None:
    path.write_bytes(content)
    os.utime(path, (written, written))


def _free(path: Path, word: str) -> Path:
    """`02_transform (restored).ipynb`, or with a number if that is taken."""
    names: Iterable[str] = (
        f"{path.stem} ({word}{f' {k}' if k else ''}){path.suffix}" for k in range(1000)
    )
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


def _new_name(folder: Path) -> Path:
    stem = time.strftime("fxlab-work-%Y-%m-%d-%H%M%S")
    path = folder / f"{stem}.zip"
    return path if not path.exists() else _free(path, "again")
