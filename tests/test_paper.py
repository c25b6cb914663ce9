"""The paper's numbers are those of the paper, and the rules for an honest figure hold."""

from __future__ import annotations

import importlib.util
import time

import pytest

from fxlab import paper
from fxlab.paper import Pair, Ratio, Slot, verdict


def test_the_tables_give_the_ratios_that_the_notebooks_quote():
    assert [round(row.speedup.value, 2) for row in paper.APPENDIX_B] == [3.5, 3.1, 1.55, 1.25, 1.1]
    assert [round(row.speedup.value, 3) for row in paper.APPENDIX_C] == [1.062, 1.407, 1.179]
    assert [round(row.reduction, 3) for row in paper.APPENDIX_C] == [0.058, 0.289, 0.152]
    assert [round(row.normalized, 3) for row in paper.APPENDIX_D] == [0.271, 0.647]


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


def test_a_measurement_without_a_run_is_refused():
    with pytest.raises(ValueError, match="repeats=0"):
        paper.measure(time.perf_counter, time.perf_counter, repeats=0)
    with pytest.raises(ValueError, match="warmup=-1"):
        paper.measure(time.perf_counter, time.perf_counter, repeats=1, warmup=-1)


def test_an_outlier_in_both_programs_at_once_does_not_move_the_ratio():
    pair = Pair((1.0, 1.0, 9.0, 1.0, 1.0), (0.5, 0.5, 4.5, 0.5, 0.5))
    assert pair.speedup == Ratio(2.0, 2.0, 2.0)
    assert pair.normalized.value == 0.5


def test_the_interval_of_a_ratio_holds_its_median_and_is_the_same_each_time():
    pair = Pair((1.0, 1.2, 1.1, 1.4, 0.9, 1.0), (0.6, 0.7, 0.5, 0.8, 0.6, 0.7))
    value, low, high = pair.speedup
    assert low < value < high
    assert pair.speedup == pair.speedup


def slots() -> list[Slot]:
    """Three slots: one whole, one that could not run here, one that is not in the paper."""
    fast = Pair((1.0, 1.1, 1.0), (0.8, 0.9, 0.8))
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
    assert "3 repeats" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_figure_tells_paper_and_machine_apart_without_colour_and_names_the_machine():
    figure = paper.draw(slots(), "Figure 7", names=("unfused", "fused"))
    left, right = figure.axes
    words = [text.get_text() for text in left.texts]
    assert "no GPU here" in words
    assert "not in the paper" in words
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
    assert all(part in caption for part in (machine.cpu, "granted", "thread", machine.date))
    # The bar of the paper's threaded row: as high as normalized, error bar as tall as stdev / mean.
    assert left.patches[0].get_height() == pytest.approx(0.2129 / 0.2996)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_long_reason_stays_inside_its_slot_and_below_the_legend():
    reason = "TensorRT needs an NVIDIA GPU and a CUDA build of torch; none is here"
    slot = Slot("ResNet-50", paper.APPENDIX_D[0], reason, {}, ("device",))
    figure = paper.draw([slot, slot], "Figure 8", names=("PyTorch", "lowered"))
    figure.canvas.draw()
    axes = figure.axes[0]
    (found, _) = [text for text in axes.texts if "TensorRT" in text.get_text()]
    place = found.get_window_extent()
    assert place.y1 < axes.get_legend().get_window_extent().y0
    assert axes.bbox.x0 < place.x0 and place.x1 < axes.bbox.x1


def test_the_cores_granted_are_at_least_a_part_of_one_and_at_most_those_of_the_machine():
    import os

    assert 0 < paper.cores_granted() <= (os.cpu_count() or 1)
