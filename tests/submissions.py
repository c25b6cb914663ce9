"""Submissions as a class hands them in: good, partial, and broken in every way that happens.

`make(folder, count)` writes them, the same ones each time, and says what each should get. They come
from the masters: a good one has the solutions in, a partial one some of the listed wrong answers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fxlab.teach import check, marking
from fxlab.teach.exercise import part
from fxlab.teach.masters import cleared, part_id, source_of
from fxlab.teach.releasing import student_copy, text_of
from fxlab.teach.student import FORKS, Server

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTOR = ROOT / "notebooks" / "instructor"
Notebook = dict[str, Any]

# A first cell, and an answer to 2.2.
IMPORTS = "import torch\nimport fxlab\nfrom fxlab.core.purity import effect\n"
MY_DCE = """def my_dce(gm):
    for node in reversed(list(gm.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not effect(node):
            gm.graph.erase_node(node)
    return gm
"""


class Kept(Server):
    """A process that forks students' processes, for more than one grading."""

    def close(self) -> None:
        """Leave it to the next grading."""

    def end(self) -> None:
        super().close()


@contextlib.contextmanager
def one_server() -> Iterator[Server | None]:
    """Let each grading in this process take the same server: to start one takes two seconds."""
    if not FORKS:
        yield None
        return
    server = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marking, "Server", lambda: server)
        yield server
    server.end()


@dataclass
class Handed:
    """One submission: student -> file or folder, and the points that it should get.

    Attributes:
        student: Its name.
        kind: Which way of being good or bad.
        points: Part -> points; parts that are not there get 0.
        remark: A word that the CSV's remarks must have, or "".
    """

    student: str
    kind: str
    points: dict[str, int] = field(default_factory=dict)
    remark: str = ""


@functools.cache
def master_text(name: str) -> str:
    return (INSTRUCTOR / f"{name}.ipynb").read_text(encoding="utf-8")


def master(name: str) -> Notebook:
    return json.loads(master_text(name))


def parts_of(name: str) -> list[str]:
    marks = [cell["metadata"].get("nbgrader", {}) for cell in master(name)["cells"]]
    return [part_id(mark["grade_id"]) for mark in marks if mark.get("solution")]


def solution(name: str, id: str) -> str:
    for cell in master(name)["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution") and part_id(mark["grade_id"]) == id:
            return source_of(cell)
    raise KeyError(id)


def wrong_source(id: str, wrong: str) -> str:
    """A cell that defines the answer by one of the listed wrong ones."""
    owner, asked = part(id)
    text = (INSTRUCTOR / "wrong" / f"ex_{owner.id.replace('.', '_')}.py").read_text("utf-8")
    letter = id.removeprefix(owner.id)
    return f"{text}\n\n{asked.name} = wrong_{letter + '_' if letter else ''}{wrong}\n"


@functools.cache
def checked_points(id: str, wrong: str) -> int:
    """What `check` gives for a wrong answer: `grade` must give the same."""
    space: dict[str, Any] = {"__name__": "wrong"}
    exec(compile(wrong_source(id, wrong), f"<wrong {id}>", "exec"), space)
    return check(id, space[part(id)[1].name]).points


def filled(name: str, answers: dict[str, str]) -> Notebook:
    """The student's copy of a master with these cells for its parts; others stay stubs."""
    notebook = student_copy(master(name))
    for cell in notebook["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        id = part_id(mark.get("grade_id", ""))
        if mark.get("solution") and id in answers:
            cell["source"] = answers[id].splitlines(keepends=True)
    return notebook


def good(name: str) -> Notebook:
    return filled(name, {id: solution(name, id) for id in parts_of(name)})


def total(ids: list[str]) -> dict[str, int]:
    return {id: part(id)[1].total for id in ids}


LOOP = "    while True:\n        pass\n"
# What a student's function does instead of its work, and the remark that the table makes of it.
DEEDS = {
    "none": ("    return None\n", ""),
    "wrong type": ("    return 'done'\n", ""),
    "unchanged": ("    return gm\n", ""),
    "fails lint": ("    node = list(gm.graph.nodes)[-1]\n    node.args = (node,)\n", ""),
    "prints a megabyte": ("    print('x' * 1_000_000)\n    return gm\n", ""),
    "loops": (LOOP, "ran out of time"),
    "eats memory": ("    kept = []\n    while True:\n        kept.append(bytearray(10**8))\n",
                    "ran out of memory"),
    "deletes files": ("    import pathlib\n    for path in pathlib.Path('.').iterdir():\n"
                      "        path.unlink()\n    return gm\n", ""),
    "patches": ("    import fxlab.teach.judge as j\n    j.same_program = lambda *a, **k: ''\n"
                "    j.dead = lambda *a: None\n    return gm\n", ""),
    "exits": ("    raise SystemExit(1)\n", ""),
    "leaves": ("    import os\n    os._exit(0)\n", "its process ended"),
    "forks": ("    import os, time\n    if os.fork() == 0:\n        os.setsid()\n"
              "        time.sleep(600)\n    return gm\n", ""),
    "crashes": ("    import ctypes\n    ctypes.string_at(0)\n", "its process ended"),
}  # fmt: skip
# The exercise that is spoilt, and what a pass that changes nothing earns there.
SPOILT = "2.2"


def spoilt(deed: str) -> str:
    return f"def my_dce(gm):\n{DEEDS[deed][0]}"


@functools.cache
def unchanged_points() -> int:
    return check(SPOILT, lambda gm: gm).points


def spoilt_points(deed: str) -> int:
    harmless = ("unchanged", "prints a megabyte", "deletes files", "patches", "forks", "none")
    return unchanged_points() if deed in harmless else 0


def _code(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None,
            "source": source}  # fmt: skip


def without(notebook: Notebook, id: str) -> Notebook:
    cells = notebook["cells"]
    notebook["cells"] = [
        c for c in cells if c["metadata"].get("nbgrader", {}).get("grade_id") != _grade_id(id)
    ]
    return notebook


def _grade_id(id: str) -> str:
    return "ex-" + id.replace(".", "-")


def doubled(notebook: Notebook) -> Notebook:
    """Each answer's cell is there twice, first the stub."""
    cells = []
    for cell in notebook["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution"):
            stub = {**cell, "source": cleared(_as_master(cell), part_id(mark["grade_id"]))}
            cells.append(stub)
        cells.append(cell)
    notebook["cells"] = cells
    return notebook


def _as_master(cell: dict[str, Any]) -> str:
    source = source_of(cell)
    return source if "### BEGIN" in source else "pass"


def reordered(notebook: Notebook) -> Notebook:
    notebook["cells"] = notebook["cells"][::-1]
    return notebook


def renamed(notebook: Notebook) -> Notebook:
    """No nbgrader ids at all, as after copying cells into a new notebook."""
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        cell["id"] = "x" + cell.get("id", "")
    return notebook


def with_broken_cells(notebook: Notebook) -> Notebook:
    notebook["cells"].insert(1, _code("def f(:\n    pass"))
    notebook["cells"].append(_code("%matplotlib inline\n!ls\nundefined_name + 1\n1/0"))
    return notebook


def with_large_outputs(notebook: Notebook, megabytes: int) -> Notebook:
    text = "0123456789abcdef" * (megabytes << 16)
    notebook["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
    return notebook


def with_strange_kernel(notebook: Notebook) -> Notebook:
    notebook["metadata"]["kernelspec"] = {"name": "no-such-kernel", "display_name": "?"}
    return notebook


def write(path: Path, notebook: Notebook) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")


SHAPES: dict[str, Callable[[Notebook], Notebook]] = {
    "doubled cells": doubled,
    "reordered cells": reordered,
    "renamed cells": renamed,
    "broken cells": with_broken_cells,
    "large outputs": lambda notebook: with_large_outputs(notebook, 50),
    "strange kernel": with_strange_kernel,
}


def make(folder: Path, count: int, names: list[str] | None = None, seed: int = 0) -> list[Handed]:
    """Write `count` submissions of the masters `names`.

    Returns:
        What each should get, in the order of writing.
    """
    rng = random.Random(seed)
    names = names or ["02_transform"]
    made = []
    kinds = [*DEEDS, *SHAPES, "not JSON", "no cells", "empty file", "no zip", "zip", "deleted cell"]
    for number in range(count):
        student = f"student{number:03d}"
        name = names[number % len(names)]
        ids = parts_of(name)
        share = number % 10
        # Half of a class is good, a quarter partial, the rest broken in each way in turn.
        if share < 5:
            write(folder / student / f"{name}.ipynb", good(name))
            made.append(Handed(student, "good", total(ids)))
        elif share < 7:
            made.append(_partial(folder, student, name, ids, rng))
        elif share == 7:
            write(folder / student / f"{name}.ipynb", filled(name, {}))
            made.append(Handed(student, "untouched"))
        else:
            kind = kinds[(number // 10 * 2 + share - 8) % len(kinds)]
            made.append(_broken(folder, student, kind, name))
    return made


def _partial(folder: Path, student: str, name: str, ids: list[str], rng: random.Random) -> Handed:
    answers, points = {}, {}
    for id in ids:
        choice = rng.random()
        if choice < 0.5:
            answers[id], points[id] = solution(name, id), part(id)[1].total
        elif choice < 0.9:
            wrong = rng.choice([*part(id)[1].wrong])
            answers[id], points[id] = wrong_source(id, wrong), checked_points(id, wrong)
    write(folder / student / f"{name}.ipynb", filled(name, answers))
    return Handed(student, "partial", points)


def _broken(folder: Path, student: str, kind: str, name: str) -> Handed:
    path = folder / f"{student}.ipynb"
    if kind in DEEDS:
        name = "02_transform"
        notebook = good(name)
        for cell in notebook["cells"]:
            if cell["metadata"].get("nbgrader", {}).get("grade_id") == _grade_id(SPOILT):
                cell["source"] = spoilt(kind)
        write(path, notebook)
        points = {**total(parts_of(name)), SPOILT: spoilt_points(kind)}
        return Handed(student, kind, points, DEEDS[kind][1])
    full = total(parts_of(name))
    if kind in SHAPES:
        write(path, SHAPES[kind](good(name)))
        return Handed(student, kind, full)
    if kind == "deleted cell":
        first = parts_of(name)[0]
        write(path, without(good(name), first))
        return Handed(student, kind, {**full, first: 0}, "no answer found")
    if kind == "zip":
        with zipfile.ZipFile(folder / f"{student}.zip", "w") as archive:
            archive.writestr(f"work/{name}.ipynb", text_of(good(name)))
        return Handed(student, kind, full)
    if kind == "no zip":
        (folder / f"{student}.zip").write_bytes(b"PK not a zip")
        return Handed(student, kind, {}, "no zip")
    content = {"not JSON": "{ this is not JSON", "no cells": '{"metadata": {}}', "empty file": ""}
    path.write_text(content[kind], encoding="utf-8")
    return Handed(student, kind, {}, "no notebook")
