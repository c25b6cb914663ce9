"""The paper's numbers are those of the paper, and the rules for an honest figure hold."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time

import pytest
import torch

from fxlab import paper
from fxlab.paper import Pair, Ratio, Row, Slot, verdict


def test_the_tables_give_the_ratios_that_the_notebooks_quote():
    assert [round(row.speedup.value, 2) for row in paper.APPENDIX_B] == [3.5, 3.1, 1.55, 1.25, 1.1]
    assert [round(row.speedup.value, 3) for row in paper.APPENDIX_C] == [1.062, 1.407, 1.179]
    assert [round(row.reduction, 3) for row in paper.APPENDIX_C] == [0.058, 0.289, 0.152]
    assert [round(row.normalized.value, 3) for row in paper.APPENDIX_D] == [0.271, 0.647]


def test_each_claim_stands_beside_what_its_own_table_gives():
    rows = {6: paper.APPENDIX_B, 7: paper.APPENDIX_C, 8: paper.APPENDIX_D}
    for claim in paper.CLAIMS:
        saved = claim.quantity.startswith("time saved")
        from_table = [row.reduction if saved else row.speedup.value for row in rows[claim.figure]]
        assert min(abs(value - claim.table) for value in from_table) < 0.006, claim
        agrees = abs(claim.said - claim.table) / claim.table < 0.04
        assert agrees == (claim.reading == "they agree"), claim


def test_the_text_of_figure_7_took_the_speed_up_minus_one_for_a_reduction():
    for claim, row in zip(paper.CLAIMS[2:4], paper.APPENDIX_C[1:], strict=True):
        assert claim.said == pytest.approx(row.speedup.value - 1, abs=0.01)


def test_every_number_carries_a_known_mark():
    groups = (paper.FACTS, paper.IR_LINES, paper.IR_NODES_2021)
    marks = {fact.mark for group in groups for fact in group.values()}
    marks |= {row.mark for table in "BCD" for row in getattr(paper, f"APPENDIX_{table}")}
    assert marks <= paper.MARKS.keys()


def test_the_eight_figures_and_five_tables_are_there_each_with_its_lecture():
    titles = [exhibit.title for exhibit in paper.EXHIBITS]
    assert titles[:8] == [f"Figure {n}" for n in range(1, 9)]
    assert titles[8:] == ["Table A.1", "Table A.2", "Table B", "Table C", "Table D"]
    assert all(exhibit.notebook and exhibit.minutes for exhibit in paper.EXHIBITS)


def test_the_opcodes_of_appendix_a_are_those_of_the_ir():
    import torch.fx

    names = [opcode.name for opcode in paper.APPENDIX_A]
    assert {*names, "root"} == set(torch.fx.node._legal_ops)


@pytest.mark.parametrize(
    ("theirs", "ours", "differs", "word"),
    [
        (445, 445, (), "exact"),
        (445, 444, (), "different"),
        (Ratio(1.4, 1.2, 1.6), Ratio(1.55, 1.5, 1.6), (), "agrees"),
        (Ratio(1.4, 1.3, 1.5), Ratio(1.15, 1.1, 1.2), (), "same direction"),
        (Ratio(1.4, 1.3, 1.5), Ratio(0.9, 0.8, 0.95), (), "opposite"),
        (Ratio(1.4, 1.3, 1.5), Ratio(1.0, 1.0, 1.0), (), "opposite"),
        (Ratio(3.7, 3.6, 3.8), Ratio(3.7, 3.6, 3.8), ("size",), "not comparable (size)"),
        (Ratio(3.7, 3.6, 3.8), None, (), "not comparable (nothing ran here)"),
    ],
)
def test_the_verdict_follows_the_rule(theirs, ours, differs, word):
    assert verdict(theirs, ours, differs=differs) == word


def test_two_programs_are_timed_in_turns_after_the_warm_up():
    calls: list[str] = []
    pair = paper.measure(lambda: calls.append("a"), lambda: calls.append("b"), repeats=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert len(pair.base) == len(pair.new) == 3
    assert pair.threads == torch.get_num_threads()


def test_the_seconds_of_a_run_of_many_calls_are_those_of_one_call():
    calls: list[str] = []

    def slow():
        calls.append("a")
        sum(range(20_000))

    start = time.perf_counter()
    pair = paper.measure(slow, slow, repeats=2, warmup=0, calls=10)
    whole = time.perf_counter() - start
    assert len(calls) == 40
    assert 10 * sum(pair.base + pair.new) <= whole


def test_a_measurement_without_a_run_is_refused():
    with pytest.raises(ValueError, match="repeats=0"):
        paper.measure(time.perf_counter, time.perf_counter, repeats=0)
    with pytest.raises(ValueError, match="warmup=-1"):
        paper.measure(time.perf_counter, time.perf_counter, repeats=1, warmup=-1)
    with pytest.raises(ValueError, match="calls=0"):
        paper.measure(time.perf_counter, time.perf_counter, repeats=1, calls=0)


def test_an_outlier_in_both_programs_at_once_does_not_move_the_median():
    pair = Pair((1.0, 1.0, 9.0, 1.0, 1.0), (0.5, 0.5, 4.5, 0.5, 0.5))
    assert pair.median == Ratio(2.0, 2.0, 2.0)
    assert pair.speedup.low < 1.0 < pair.speedup.value  # but that the runs scattered is said


def test_the_interval_of_a_median_holds_it_and_is_the_same_each_time():
    pair = Pair((1.0, 1.2, 1.1, 1.4, 0.9, 1.0), (0.6, 0.7, 0.5, 0.8, 0.6, 0.7))
    value, low, high = pair.median
    assert low < value < high
    assert pair.median == pair.median


def test_paper_and_machine_have_one_kind_of_interval():
    runs = Pair((1.0, 1.2, 1.1, 0.9), (0.6, 0.7, 0.5, 0.6))
    sides = [
        f(side) for side in (runs.base, runs.new) for f in (statistics.fmean, statistics.stdev)
    ]
    assert runs.speedup == Row("the same", *sides).speedup
    value, low, high = runs.speedup
    factor = 1 + math.hypot(sides[1] / sides[0], sides[3] / sides[2])
    assert (value, low, high) == pytest.approx((1.05 / 0.6, value / factor, value * factor))


@pytest.mark.parametrize("here", [1.05, 1.1, 1.35, 1.5, 2.0])
def test_intervals_overlap_in_the_picture_exactly_when_the_verdict_says_so(here):
    pair = Pair((1.0, 1.01, 0.99), (1.0 / here, 1.01 / here, 0.99 / here))
    slot = Slot("CPU", paper.APPENDIX_C[1], pair)
    drawn = [paper.bar("", 0, found).ends for found in (slot.paper, pair)]
    (_, low, high), (_, other_low, other_high) = drawn
    assert (low <= other_high and other_low <= high) == (slot.verdict == "agrees")


def test_what_explains_the_interval_gives_the_numbers_of_the_table():
    threaded, single = paper.APPENDIX_C[1:]
    assert str(single.speedup) in paper.READING
    assert single.speedup.low < 1 < threaded.speedup.low  # as the trap of Figure 7 says
    (figure,) = [one for one in paper.EXHIBITS if one.title == "Figure 7"]
    assert "one thread contains 1" in figure.trap


def slots() -> list[Slot]:
    """Three slots: one whole, one that could not run here, one that is not in the paper."""
    fast = Pair((1.0, 1.1, 1.0), (0.8, 0.9, 0.8), 2)
    return [
        Slot("CPU", paper.APPENDIX_C[1], fast, {"oneDNN": fast}),
        Slot("GPU", paper.APPENDIX_C[0], "no GPU here", {"oneDNN": "not for a GPU"}),
        Slot("phone", None, fast, differs=("device",)),
    ]


def test_the_list_behind_a_figure_says_why_a_slot_is_empty():
    text = paper.table(slots())
    assert "the paper's method here: no GPU here" in text
    assert "beyond the paper, oneDNN: not for a GPU" in text
    assert "verdict: not comparable (not in the paper)" in text
    assert "3 repeats, 2 threads" in text
    assert "CPU\n  paper, CPU, threaded, batch not stated: 0.2996 s" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_figure_tells_paper_and_machine_apart_without_colour_and_names_the_machine():
    figure = paper.draw(slots(), "Figure 7", names=("unfused", "fused"))
    left, right = figure.axes
    words = [text.get_text() for text in left.texts]
    assert [text.get_text() for text in right.texts].count("not for a GPU") == 1
    assert "not measured" in [text.get_text() for text in right.texts]
    assert "no GPU here" in words
    assert "1.41x" in words
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "paper",
        "the paper's method here",
    ]
    assert right.get_title() == "beyond the paper"
    assert len({patch.get_hatch() for axes in (left, right) for patch in axes.patches}) == 3
    assert left.get_ylabel() == "run time, fused / unfused"
    machine = paper.machine()
    caption = figure.get_supxlabel()
    named = (machine.cpu, "granted", "2 threads", machine.date, "3 repeats", "Whiskers: ")
    assert all(part in " ".join(caption.split()) for part in named)
    assert left.patches[0].get_height() == pytest.approx(0.2129 / 0.2996)
    whisker = left.containers[1].lines[2][0].get_segments()[0][:, 1]
    assert list(whisker) == pytest.approx(paper.APPENDIX_C[1].normalized[1:])


def labels(axes) -> list[str]:
    """What stands below an axis, left to right."""
    return [text.get_text() for text in axes.get_xticklabels()]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_papers_bar_stands_once_under_its_own_name_for_all_that_it_leaves_open():
    fast, row = Pair((1.0, 1.1), (0.8, 0.9), 1), paper.APPENDIX_D[0]
    swept = [Slot(f"ResNet-18\nbatch {n}", row, fast) for n in (1, 10, 32)]
    own = Slot(paper.APPENDIX_B[0].label, paper.APPENDIX_B[0], fast)
    figure = paper.draw([*swept, own], "Figure 8", names=("PyTorch", "lowered"))
    (axes,) = figure.axes
    assert len(axes.patches) == 4 + 2
    wanted = ["ResNet50\nbatch\nnot stated", *(slot.label for slot in swept), "batch 1"]
    assert labels(axes) == wanted


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_name_that_all_of_a_group_have_stands_below_it_once():
    fast, row = Pair((1.0, 1.1), (0.8, 0.9), 1), paper.APPENDIX_C[2]
    swept = [Slot(f"{row.label}\nbatch {n}", row, fast, {"more": fast}) for n in (1, 10)]
    figure = paper.draw(swept, "Figure 7", names=("unfused", "fused"))
    left, right = figure.axes
    assert labels(left) == ["batch\nnot stated", "batch 1", "batch 10"]
    assert labels(right) == ["batch 1", "batch 10"]
    for axes in figure.axes:
        assert [text.get_text() for text in axes.get_xticklabels(minor=True)] == [row.label]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_figure_is_read_without_being_made_smaller():
    from matplotlib.text import Text

    figure = paper.draw(slots() * 4, "Figure 7", names=("unfused", "fused"))
    assert figure.get_figwidth() * figure.dpi <= 900
    words = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in words) >= 8


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_long_reason_stays_inside_its_slot_and_below_the_legend():
    reason = "TensorRT needs an NVIDIA GPU and a CUDA build of torch; none is here"
    slot = Slot("ResNet-50", paper.APPENDIX_D[0], reason, {}, ("device",))
    figure = paper.draw([slot, slot], "Figure 8", names=("PyTorch", "lowered"))
    figure.canvas.draw()
    axes = figure.axes[0]
    (found,) = [text for text in axes.texts if "TensorRT" in text.get_text()]  # once for both
    place = found.get_window_extent()
    assert place.y1 < axes.get_legend().get_window_extent().y0
    assert axes.bbox.x0 < place.x0 and place.x1 < axes.bbox.x1


def test_the_cores_granted_are_at_least_a_part_of_one_and_at_most_those_of_the_machine():
    import os

    assert 0 < paper.cores_granted() <= (os.cpu_count() or 1)
