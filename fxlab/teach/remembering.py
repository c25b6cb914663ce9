"""What need not be marked again when the same command runs a second time?

A mark depends on the code of the notebook, the files beside it, the part, the limits, the hidden
cases and the kit with its environment. `Remembered` keeps each mark beside the table under a digest
of the first three; if one of the others changed, it forgets all. It is read before the first line
of a student's runs and written after the last process of theirs has ended. A time-out was run twice
when it is kept, the second time alone; what the machine may have decided (out of memory, a process
that ended) is never kept.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import platform
import sys
import zlib
from pathlib import Path
from typing import Any

import fxlab
from fxlab.teach.collect import Submission, files_beside
from fxlab.teach.exercise import part, private_files
from fxlab.teach.marking import Marked, notebook_for

_CHANCE = ("memory", "lost")


class Remembered:
    """The marks of the runs before, by what they depend on; `used` counts those asked for.

    Args:
        path: The file; one that is not there, or that is no file of ours, remembers nothing.
        options: `hidden`, `seconds` and `course`, as `grade` has them.
        fresh: Forget what the file says.
    """

    def __init__(self, path: Path, options: dict[str, Any], fresh: bool = False) -> None:
        self.path, self.settings, self.used = path, _settings(options), 0
        self.marks: dict[str, Marked] = {}
        if fresh or not path.is_file():
            return
        try:
            data = json.loads(gzip.decompress(path.read_bytes()))
            if data["settings"] == self.settings:
                self.marks = {key: _made(one) for key, one in data["marks"].items()}
        except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError):
            self.marks = {}

    def mark(self, one: Submission, id: str) -> Marked | None:
        """The mark that this answer got before, or None."""
        mark = self.marks.get(_key(one, id))
        self.used += mark is not None
        return mark

    def keep(self, one: Submission, mark: Marked) -> None:
        """Keep a mark, unless the machine may have decided it."""
        key = _key(one, mark.id)
        if key and mark.kind not in _CHANCE and mark.status != "nothing":
            self.marks[key] = mark

    def write(self) -> None:
        """Write the file; the same marks make the same bytes."""
        marks = {key: dataclasses.asdict(self.marks[key]) for key in sorted(self.marks)}
        data = {"settings": self.settings, "marks": marks}
        text = json.dumps(data, separators=(",", ":"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))


def _made(data: dict[str, Any]) -> Marked:
    made = Marked(**data)
    made.behaviours = {name: (got, of) for name, (got, of) in made.behaviours.items()}
    return made


def _key(one: Submission, id: str) -> str:
    """A digest of what an answer's process gets, "" when there is no notebook for it."""
    notebook = notebook_for(one, part(id)[1])
    if notebook is None:
        return ""
    beside = [(path.name, _digest(path.read_bytes())) for path in files_beside(notebook.folder)]
    said = [id, notebook.cells, notebook.marks.get(id), beside]
    return _digest(json.dumps(said).encode())


def _settings(options: dict[str, Any]) -> str:
    """A digest of all that is the same for the whole class: options, kit, environment."""
    hidden = options["hidden"]
    cases = _digest(hidden.read_bytes()) if hidden and hidden.is_file() else str(hidden)
    said = [options["seconds"], options["course"], cases, _environment()]
    said += [_digest(path.read_bytes()) for path in private_files()]
    return _digest(json.dumps(said).encode())


@functools.cache
def _environment() -> str:
    """A digest of the kit and of what it runs on, as this process found them."""
    files = sorted(Path(fxlab.__file__).parent.rglob("*.py"))
    packages = {f"{one.name}=={one.version}" for one in importlib.metadata.distributions()}
    said = [_digest(path.read_bytes()) for path in files]
    said += [*sorted(packages), sys.version, platform.platform()]
    return _digest(json.dumps(said).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
