"""What a lecture measures has its spread, in words and as whiskers."""

from __future__ import annotations

import importlib.util
import time

import pytest

from fxlab import paper, spread

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
FOUND = {"quick": [1e-6, 2e-6, 3e-6], "slow": [9e-6, 9e-6, 9e-6], "none": "not installed"}


def test_programs_are_timed_in_turns_after_the_warm_up():
    calls: list[str] = []
    programs = {name: lambda n=name: calls.append(n) for name in "abc"}
    samples = spread.in_turns(programs, repeats=2, calls=2, warmup=1)
    assert "".join(calls) == "aabbcc" * 3
    assert {name: len(runs) for name, runs in samples.items()} == dict.fromkeys("abc", 2)


def test_a_sample_is_the_time_of_one_call():
    ticks = iter(range(100))
    samples = spread.in_turns(
        {"a": lambda: None}, repeats=2, calls=4, clock=lambda: float(next(ticks))
    )
    assert samples["a"] == (0.25, 0.25)


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"repeats": 1, "calls": 0}])
def test_a_measurement_without_a_run_is_refused(wrong):
    with pytest.raises(ValueError, match="a measurement needs a run"):
        spread.in_turns({"a": time.perf_counter}, **wrong)


def test_the_text_has_the_interval_the_unit_the_repeats_and_why_something_is_missing():
    lines = spread.listed(FOUND, "us", 1e6).splitlines()
    assert lines[0].split(maxsplit=1) == ["quick", "2 [1, 3] us, 3 repeats"]
    assert lines[2].split(maxsplit=1) == ["none", "not installed"]
    assert spread.listed({"a": 7}, "nodes") == "a  7 nodes"  # a count has no spread


@needs_matplotlib
def test_each_measured_bar_has_its_whiskers_and_nothing_leaves_the_picture():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    series = {"here": FOUND, "predicted": {"quick": 2e-6, "slow": 8e-6}}
    spread.draw(axes, series, unit="us a call", scale=1e6)
    spread.caption(figure, "medians of 3 repeats")
    figure.canvas.draw()
    whiskers = [c for c in axes.containers if type(c).__name__ == "ErrorbarContainer"]
    assert len(whiskers) == 2  # of what was measured here
    words = [text.get_text() for text in axes.texts]
    assert {"2 [1, 3]", "9 [9, 9]", "not installed", "not measured", "8"} <= {*words}
    frame = axes.get_window_extent()
    for text in axes.texts:
        place = text.get_window_extent()
        assert frame.x0 <= place.x0 and place.x1 <= frame.x1, text.get_text()
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["here", "predicted"]
    machine = " ".join(figure.get_supxlabel().split())
    assert machine == f"medians of 3 repeats; {paper.machine()}"
