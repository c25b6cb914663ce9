"""A long class leaves nothing behind; and a leak would be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

import fxlab
from tests.random_graphs import random_program
from tests.soak import Reading, minute, soak

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_programs_leave_no_memory_no_file_and_no_thread_behind():
    """In a process of its own: what thousands of tests left behind goes on growing in a worker."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "400"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hours_of_a_class_leave_nothing_behind():
    torch.set_num_threads(1)
    pytest.importorskip("ipywidgets")
    readings = soak(120, one=minute, traced=False)
    assert readings[-1].grew(readings[0]) == []


def test_what_tracemalloc_keeps_is_not_counted_and_what_somebody_keeps_is():
    gm, kept = fxlab.symbolic_trace(torch.nn.ReLU()), []

    def grown(keep: bool) -> tuple[int, int]:
        """Return what 2,000 programs add: as the soak counts it, and as tracemalloc does."""
        before, raw = Reading.now().python, tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            gm.recompile()
            code = gm.forward.__code__
            if keep:
                kept.append(code)
        return Reading.now().python - before, tracemalloc.get_traced_memory()[0] - raw

    tracemalloc.start()
    try:
        grown(False)
        # What other tests left behind may grow in one round; what a program leaves, in each.
        rounds = [grown(False) for _ in range(4)]
        counted, traced = (min(found) for found in zip(*rounds, strict=True))
        assert counted < 20_000 < 100_000 < traced
        assert min(grown(True)[0] for _ in range(2)) > 500_000
    finally:
        tracemalloc.stop()


def test_what_grows_is_named():
    before = Reading(python=10_000_000, resident=500_000_000, files=10, threads=1)
    assert before.grew(before) == []
    after = Reading(python=11_000_000, resident=540_000_000, files=11, threads=2, widgets=3)
    assert [text.split(":")[0] for text in after.grew(before)] == [
        "python", "resident", "files", "threads", "widgets",
    ]  # fmt: skip
    assert Reading(10_100_000, 510_000_000, 10, 1).grew(before) == []
    counted = Reading(0, 500_000_000, 10, 1, blocks=1_000_000)
    assert Reading(0, 500_000_000, 10, 1, blocks=1_002_000).grew(counted) == []
    (text,) = Reading(0, 500_000_000, 10, 1, blocks=1_020_000).grew(counted)
    assert text == "blocks: 1,000,000 -> 1,020,000"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_leak_of_one_graph_in_a_minute_would_be_seen():
    torch.set_num_threads(1)
    kept = []

    def keeps(number, folder):
        kept.append(fxlab.symbolic_trace(random_program(number)))

    readings = soak(60, one=keeps, traced=False)
    assert [text.split(":")[0] for text in readings[-1].grew(readings[0])][:1] == ["blocks"]
