"""Measure what each lecture needs in its quick form: memory with its children, seconds on one core.

``python -m tests.measure_lectures [07 08 ...]`` runs the lectures as Binder would, on one core, and
keeps what it found in ``tests/lectures.json``, from which README's lecture map takes its numbers.
Seconds are those that the processor worked for the kernel and its children: on a shared machine the
clock on the wall says more about the neighbours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "lectures.json"
SECONDS = 60
MEGABYTES = 800
# Two stages of a pipeline and a server are processes of their own, each with torch in it.
MORE_MEGABYTES = {"10_scheduling": 1200}


def lectures() -> list[Path]:
    """List the lectures, without exercises and masters."""
    return sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


class Meter(threading.Thread):
    """Watch a process and its children until told to stop.

    Attributes:
        peak: The most bytes resident at one moment, all processes together.
        seconds: Seconds of processor time of all of them.
        cell: Which cell was running at the peak.
    """

    def __init__(self, pid: int, pause: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.process, self.pause = psutil.Process(pid), pause
        self.peak, self.cell, self.now = 0, 0, 0
        self.times: dict[tuple[int, float], float] = {}
        self.stopped = threading.Event()

    def bytes_of(self, process: psutil.Process) -> int:
        """Return what is resident of the kernel; of a child what it has for itself.

        In the moment between its making and its own program a child has all of its parent's
        memory, once more in name only.
        """
        if process.pid == self.process.pid:
            return process.memory_info().rss
        young = time.time() - process.create_time() < 1
        if young and process.cmdline() == self.process.cmdline():
            return 0
        return process.memory_full_info().uss

    @property
    def seconds(self) -> float:
        return sum(self.times.values())

    def run(self) -> None:
        """Look at the processes every ``pause`` seconds."""
        while not self.stopped.wait(self.pause):
            total = 0
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.Error:
                return
            for process in family:
                try:
                    with process.oneshot():
                        total += self.bytes_of(process)
                        used = process.cpu_times()
                        self.times[process.pid, process.create_time()] = used.user + used.system
                except psutil.Error:  # it has just ended
                    continue
            if total > self.peak:
                self.peak, self.cell = total, self.now


def measure(path: Path) -> dict[str, float]:
    """Execute the lecture at ``path`` in a new kernel and return what it needed.

    Returns:
        ``seconds`` of processor time, ``wall`` seconds, ``megabytes`` at the peak, and the
        number of the ``cell`` that ran then.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    with client.setup_kernel(stderr=subprocess.DEVNULL):
        meter = Meter(client.km.provisioner.process.pid)
        meter.start()
        for number, cell in enumerate(notebook.cells):
            meter.now = number
            client.execute_cell(cell, number)
        meter.stopped.set()
        meter.join()
    return {
        "seconds": round(meter.seconds, 1),
        "wall": round(time.perf_counter() - start, 1),
        "megabytes": round(meter.peak / 1e6),
        "cell": meter.cell,
    }


def bar(stem: str) -> int:
    """Return how many megabytes the lecture may take."""
    return MORE_MEGABYTES.get(stem, MEGABYTES)


def main(words: list[str]) -> int:
    """Measure the lectures whose names begin with one of ``words``, or all; 1 over a bar."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    over = 0
    for path in lectures():
        if words and not path.name.startswith(tuple(words)):
            continue
        found = results[path.stem] = measure(path)
        missed = found["megabytes"] > bar(path.stem) or found["seconds"] > SECONDS
        over += missed
        print(
            f"{path.stem:20} {found['seconds']:5} s on one core ({found['wall']} s here), "
            f"{found['megabytes']:5} MB of {bar(path.stem)} at cell {found['cell']}"
            f"{'  OVER' if missed else ''}",
            flush=True,
        )
        text = json.dumps({key: results[key] for key in sorted(results)}, indent=1)
        RESULTS.write_text(text + "\n", encoding="utf-8")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
