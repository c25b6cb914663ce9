"""Every lecture was measured within its bars, and says in its first cell what it takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.clocks import HANGS
from tests.measure_lectures import RESULTS, SECONDS, Meter, bar, lectures
from tests.readme import first_cell

MEASURED = json.loads(RESULTS.read_text(encoding="utf-8"))
EACH = pytest.mark.parametrize("path", lectures(), ids=lambda path: path.stem)


@EACH
def test_its_quick_form_fits_where_it_is_meant_to_run(path):
    found = MEASURED[path.stem]
    assert found["megabytes"] <= bar(path.stem)
    assert found["seconds"] <= SECONDS


@EACH
def test_its_first_cell_names_the_memory_that_it_takes(path):
    row = first_cell(path)[1]["memory"]
    number, unit = re.search(r"([\d.]+) ([MG])B", row).groups()
    said = float(number) * (1000 if unit == "G" else 1)
    takes = MEASURED[path.stem]["megabytes"]
    assert 0.9 * takes <= said <= takes + 150, row


def test_the_meter_sees_memory_and_work_of_a_process_and_its_child():
    child = "x = bytearray(60_000_000); print('made', flush=True); input()"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "sum(range(10**7)); input(); child.communicate(b'\\n')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    meter = Meter(process.pid, pause=0.005)
    meter.start()
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    for _ in range(100 * HANGS):  # the next look at the processes
        if meter.peak > 60_000_000:
            break
        meter.stopped.wait(0.01)
    process.communicate(b"\n")
    meter.stopped.set()
    meter.join()
    assert meter.peak > 60_000_000
    assert meter.seconds > 0
