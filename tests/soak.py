"""Does a long class leave anything behind? Thousands of programs in one process, and what stays.

``python -m tests.soak [2000]`` makes random programs, runs passes over each in a recording, steps
through it, exports it, and compares memory (Python's and the process's), open files, threads and
widgets after a quarter of them with what there is at the end. ``--class`` goes through eight hours
of a class instead, a student's minute after the other: open, step, edit, check, export, and once an
hour grade. It exits with 1 if something grew.

Python's memory is what tracemalloc traces; in the hours of a class it is the number of blocks that
Python has, which nothing of the measuring itself is in, and which takes a fifth of the time.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ipywidgets
import psutil
import torch

import fxlab
from fxlab import paper, teach
from fxlab.core import graph_module
from fxlab.explorer.static import static_html, text_table
from fxlab.explorer.view import view
from fxlab.passes import const_fold, cost, cse, dce, shape_prop
from tests.random_graphs import random_program
from tests.submissions import make

GROWTH = 1.05
BLOCKS = 1.003  # a number of blocks is the same in each run but for hundreds
WARM_UP = 4  # the first quarter fills caches that are meant to stay


def names_of_programs() -> int:
    """Return the bytes of the file names of generated programs.

    `tracemalloc` keeps every file name that it met, and each generated program has one of its own:
    while one measures they stay, 75 bytes for each program that is long gone.
    """
    lines, first = inspect.getsourcelines(graph_module._run_source)
    made = next(i for i, line in enumerate(lines, first) if "errors.GENERATED" in line)
    only = tracemalloc.Filter(True, graph_module.__file__, made)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([only]).traces)


@dataclass(frozen=True)
class Reading:
    """What the process holds at one moment.

    Attributes:
        python: Bytes that Python allocated since the start, less what `tracemalloc` itself keeps;
            0 where they are not traced.
        resident: Bytes of the process in memory.
        files: Open files and connections.
        threads: Threads of Python.
        widgets: Widgets that ipywidgets keeps for the page.
        blocks: Blocks of Python's memory, if it is not traced; else 0.
    """

    python: int
    resident: int
    files: int
    threads: int
    widgets: int = 0
    blocks: int = 0

    @classmethod
    def now(cls) -> Reading:
        """Collect what is garbage and read."""
        paper.tidy()
        process, traced = psutil.Process(), tracemalloc.is_tracing()
        files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
        return cls(
            tracemalloc.get_traced_memory()[0] - names_of_programs() if traced else 0,
            process.memory_info().rss,
            files,
            threading.active_count(),
            len(ipywidgets.widgets.widget._instances),
            0 if traced else sys.getallocatedblocks(),
        )

    def __str__(self) -> str:
        python = f"{self.blocks:,} blocks" if self.blocks else f"{self.python / 1e6:.2f} MB"
        return (
            f"python {python}, resident {self.resident / 1e6:.1f} MB, "
            f"{self.files} files, {self.threads} threads, {self.widgets} widgets"
        )

    def grew(self, before: Reading) -> list[str]:
        """Name what is more than 5 % above ``before``, 0.3 % of blocks; the rest may not grow."""
        found = []
        for name in ("python", "resident"):
            a, b = getattr(before, name), getattr(self, name)
            # Python's share is small: a hundred kilobytes are noise, a leak of each program is not.
            if b > a * GROWTH and b - a > 200_000:
                found.append(f"{name}: {a / 1e6:.2f} MB -> {b / 1e6:.2f} MB")
        if self.blocks > before.blocks * BLOCKS:
            found.append(f"blocks: {before.blocks:,} -> {self.blocks:,}")
        for name in ("files", "threads", "widgets"):
            if getattr(self, name) > getattr(before, name):
                found.append(f"{name}: {getattr(before, name)} -> {getattr(self, name)}")
        return found


def one(seed: int, folder: Path) -> None:
    """One student's minute: a program, passes over it, a look at every step, an export."""
    gm = random_program(seed)
    inputs = (torch.ones(4, 4), torch.full((4, 4), 0.5))
    with fxlab.record(gm, inputs=inputs) as timeline:
        for pass_ in (dce, cse, const_fold):
            pass_(gm)
    for step in range(len(timeline) + 1):
        timeline.frame(step)
    data = view(timeline)
    static_html(data), text_table(data)
    timeline.to_json(folder / "story.json")
    fxlab.Timeline.from_json(folder / "story.json")
    timeline.to_html(folder / "story.html")
    timeline.to_svg(folder / "story.svg", len(timeline))
    shape_prop(gm, *inputs)
    cost(gm, *inputs)
    if seed % 10 == 0:
        with torch.no_grad():  # some programs write into a parameter
            fxlab.symbolic_trace(gm)(*inputs)


def to_tanh(gm: fxlab.GraphModule) -> None:
    """A pass that a student edits."""
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh


def my_dce(gm: fxlab.GraphModule) -> fxlab.GraphModule:
    """A student's answer to 2.2."""
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    return gm


def unfinished(gm: fxlab.GraphModule) -> fxlab.GraphModule:
    """A student's answer that is not right yet."""
    return gm


def minute(number: int, folder: Path) -> None:
    """A minute of a class: a student opens, steps, edits, checks and exports; hourly, a grading."""
    inputs = (torch.ones(4, 4), torch.full((4, 4), 0.5))
    explorer = fxlab.explore(random_program(number), [dce, cse], inputs)
    for step in range(len(explorer.timeline) + 1):
        explorer.step = step
    explorer.note(1, "why this one?")
    explorer.static_html()
    explorer.to_html(folder / "story.html")
    explorer.close()
    playground = fxlab.Playground(random_program(number), inputs, [dce])
    playground.add("cse")
    playground.add(to_tanh)
    source = inspect.getsource(to_tanh)
    playground.edit(2, source.replace("torch.tanh", "torch.sigmoid"))
    playground.edit(1, source)  # another name: refused
    assert playground.passes == ["dce", "cse", "to_tanh"] and playground.error is not None
    playground.move(2, -1)
    assert playground.passes == ["dce", "to_tanh", "cse"] and playground.error is None
    playground.undo()
    playground.export(folder / "playground.html")
    playground.close()
    for answer, right in ((unfinished, False), (my_dce, True)):
        result = teach.check("2.2", answer)
        assert bool(result) is right and result._repr_html_()
    if number % 60 == 0:
        handed = make(folder / "class", 3)
        grades = teach.grade(folder / "class", folder / "grades.csv", exercises=["2.1a"])
        assert [grades.points(one.student) for one in handed] == [
            one.points["2.1a"] for one in handed
        ]


def soak(
    count: int, told: float = 10.0, one: Callable[[int, Path], None] = one, traced: bool = True
) -> list[Reading]:
    """Go through ``count`` programs or minutes; return a reading after each quarter of them."""
    readings = []
    if traced:
        tracemalloc.start()
    last = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(count):
                one(seed, Path(folder))
                if (seed + 1) % max(1, count // WARM_UP) == 0:
                    readings.append(Reading.now())
                    # At once: a soak that somebody ends has told what it found so far.
                    print(f"after {seed + 1}: {readings[-1]}", flush=True)
                if time.monotonic() - last > told:
                    print(f"{seed + 1} of {count}", file=sys.stderr, flush=True)
                    last = time.monotonic()
    finally:
        tracemalloc.stop()
    return readings


def main(words: list[str]) -> int:
    """Soak, and say what grew."""
    torch.set_num_threads(1)
    gc.collect()
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("count", type=int, nargs="?", help="programs (2000) or minutes (480)")
    parser.add_argument("--class", dest="minutes", action="store_true", help="a class's minutes")
    args = parser.parse_args(words)
    what, usual = (minute, 480) if args.minutes else (one, 2000)
    readings = soak(args.count or usual, one=what, traced=not args.minutes)
    found = readings[-1].grew(readings[0])
    print("\n".join(found) or "nothing grew")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
