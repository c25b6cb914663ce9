"""A long class leaves nothing behind; and a leak would be seen."""

from __future__ import annotations

import pytest
import torch

from tests.soak import Reading, minute, soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_programs_leave_no_memory_no_file_and_no_thread_behind():
    torch.set_num_threads(1)
    readings = soak(400)
    assert readings[-1].grew(readings[0]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_minutes_of_a_class_leave_nothing_behind():
    torch.set_num_threads(1)
    pytest.importorskip("ipywidgets")
    readings = soak(24, one=minute)
    assert readings[-1].grew(readings[0]) == []


def test_what_grows_is_named():
    before = Reading(python=10_000_000, resident=500_000_000, files=10, threads=1)
    assert before.grew(before) == []
    after = Reading(python=11_000_000, resident=540_000_000, files=11, threads=2, widgets=3)
    assert [text.split(":")[0] for text in after.grew(before)] == [
        "python", "resident", "files", "threads", "widgets",
    ]  # fmt: skip
    assert Reading(10_100_000, 510_000_000, 10, 1).grew(before) == []
