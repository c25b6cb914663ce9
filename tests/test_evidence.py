"""What the lectures measured is kept as data, judged by rule, and two machines can be compared."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from fxlab import cli, evidence, paper, surroundings
from fxlab.evidence import PAPERS_METHOD, Evidence, Measured
from fxlab.paper import APPENDIX_C, Pair, Ratio, Slot
from tests.run_notebooks import found_by_the_lectures

ROOT = Path(__file__).resolve().parent.parent


def figure_7(fused: float = 0.8) -> Evidence:
    """A figure with one slot that ran and one that could not."""
    pair = Pair((1.0, 1.1, 1.0), (fused, fused * 1.1, fused))
    return evidence.ratios(
        "Figure 7",
        [
            Slot("CPU, one thread\nbatch 1", APPENDIX_C[2], pair, {"packed": pair}),
            Slot("GPU", APPENDIX_C[0], "no GPU here"),
        ],
    )


def test_the_saved_numbers_are_those_in_the_outputs_of_the_lectures():
    assert evidence.saved() == found_by_the_lectures()


def test_every_exhibit_of_the_paper_was_measured_by_its_own_lecture():
    measured = {one.exhibit for one in evidence.saved()}
    assert {exhibit.evidence for exhibit in paper.EXHIBITS} <= measured
    for exhibit in paper.EXHIBITS:
        cells = nbformat.read(ROOT / "notebooks" / f"{exhibit.notebook}.ipynb", 4).cells
        here = [e.exhibit for c in cells for e in evidence.kept(c.get("outputs", []))]
        assert exhibit.evidence in here, exhibit.title


def test_the_counts_of_the_paper_come_out_exactly():
    words = {row["exhibit"]: row["verdict"] for row in evidence.overview(evidence.saved())}
    assert [words[f"Figure {n}"] for n in (1, 2, 3)] == ["exact"] * 3
    assert "torch.fx: exact" in words["Figure 5"]
    assert words["Table A.1"] == words["Table A.2"] == "exact"


def test_all_eight_figures_and_five_tables_have_a_row_even_when_nothing_ran():
    rows = evidence.overview([])
    assert len(rows) == 13
    assert {row["verdict"] for row in rows} == {"not comparable (nothing ran here)"}
    assert all(row["here"] and row["paper"] and row["lecture"] for row in rows)


def test_numbers_samples_and_machine_survive_a_file(tmp_path):
    before = [figure_7(), evidence.counts("Figure 5", {"torch.fx": 445, "torch.jit.trace": None})]
    evidence.dump(before, tmp_path / "here.json")
    after = evidence.load(tmp_path / "here.json")
    assert after == before
    assert after[0].rows[0].samples["base"] == (1.0, 1.1, 1.0)
    assert after[0].machine["torch"] == paper.machine().torch
    assert [row.verdict for row in after[1].rows] == ["exact", "not comparable (nothing ran here)"]


def test_a_verdict_in_a_file_is_not_believed(tmp_path):
    evidence.dump([evidence.counts("Figure 1", {"as traced": 5})], tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text("utf-8")
    assert '"verdict": "different"' in text
    (tmp_path / "x.json").write_text(text.replace('"different"', '"exact"'))
    assert evidence.load(tmp_path / "x.json")[0].rows[0].verdict == "different"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "fxlab.results", "version": 2, "exhibits": []}',
        '{"format": "fxlab.results", "version": 1, "exhibits": [{}]}',
        '{"format": "fxlab.results", "version": 1, "exhibits": [{"exhibit": "a", "form": "quick",'
        ' "machine": {}, "rows": [{"label": "a", "quantity": "b", "paper": "<b>", "here": 1,'
        ' "method": "m", "why": "", "differs": []}]}]}',
        '{"format": "fxlab.results", "version": 1, "exhibits": [{"exhibit": "a", "form": "quick",'
        ' "machine": {}, "rows": [{"label": "a", "quantity": "b", "paper": NaN, "here": 1,'
        ' "method": "m", "why": "", "differs": []}]}]}',
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        evidence.load(path)
    assert cli.main(["paper", "--compare", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_without_a_format_is_told_what_writes_one(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"--run --out FILE` writes one\): it has no 'format'"):
        evidence.load(path)


def test_a_notebook_keeps_the_data_behind_the_text():
    bundle = figure_7()._repr_mimebundle_()
    assert "the paper's method here" in bundle["text/plain"]
    output = {"data": json.loads(json.dumps(bundle))}
    assert evidence.kept([output, {"text": "x"}]) == [figure_7()]


def test_a_method_beyond_the_paper_has_no_verdict_and_stands_apart():
    one, beyond, gpu = figure_7().rows
    assert (one.method, one.verdict) == (PAPERS_METHOD, "agrees")
    assert (beyond.method, beyond.verdict) == ("packed", "")
    assert gpu.verdict == "not comparable (nothing ran here)"
    (row,) = [r for r in evidence.overview([figure_7()]) if r["exhibit"] == "Figure 7"]
    assert "beyond the paper: packed 1.25x (CPU, one thread, batch 1)" in row["here"]
    assert row["verdict"] == (
        "CPU, one thread, batch 1: agrees; GPU: not comparable (nothing ran here)"
    )


def test_a_method_beyond_the_paper_is_told_from_its_worst_ratio_to_its_best():
    slow, fast = (
        Measured(label, "speed-up", None, Ratio(value, value, value), method="packed")
        for label, value in (("batch 1", 0.56), ("batch 2", 1.44))
    )
    said = evidence.summary([fast, slow])
    assert said == "beyond the paper: packed 0.56x (batch 1) to 1.44x (batch 2)"


def test_two_machines_are_compared_number_by_number():
    rows = evidence.comparison([figure_7()], [figure_7(0.5)], ("a", "b"))
    assert [(row["a"], row["b"], row["verdict"]) for row in rows] == [
        ("1.25x", "2.00x", "same direction"),
        ("1.25x", "2.00x", "same direction"),
        ("no GPU here", "no GPU here", "not comparable (nothing ran on one)"),
    ]
    alone = evidence.comparison([], [figure_7()], ("a", "b"))
    assert {row["verdict"] for row in alone} == {"only one has it"}


def test_nothing_in_a_text_leaves_its_cell_of_the_table():
    rows = [{"a|b": "x\n| y | <script>", "c": "\\|"}]
    assert evidence.markdown(rows).splitlines()[2] == "| x \\| y \\| &lt;script> | \\\\\\| |"


def lecture(path: Path, *cells: str) -> Path:
    """Write a small lecture."""
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def test_lectures_are_executed_anew_in_their_form_and_a_failing_one_is_named(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.setenv("FXLAB_TEST", "1")
    good = lecture(
        tmp_path / "good.ipynb",
        "import os\nfrom fxlab import evidence\nassert 'FXLAB_TEST' not in os.environ",
        "evidence.counts('Figure 1', {'as traced': 4})",
    )
    bad = lecture(tmp_path / "bad.ipynb", "raise ValueError('no luck')")
    told: list[str] = []
    before = good.read_bytes()
    found, failed = evidence.run([good, bad], progress=told.append)
    assert [one.exhibit for one in found] == ["Figure 1"]
    assert failed == ["bad failed: ValueError: no luck"]
    assert told == ["[1/2] good: cell 1 of 2", "[1/2] good: cell 2 of 2", "[2/2] bad: cell 1 of 1"]
    assert good.read_bytes() == before


def test_the_command_measures_one_exhibit_and_writes_it(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nbclient")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / surroundings.START).write_text("{}")
    cell = "from fxlab import evidence\nevidence.counts('Figure 1', {'as traced': 4})"
    lecture(tmp_path / "notebooks/01_capture.ipynb", cell)
    monkeypatch.chdir(tmp_path)
    command = ["paper", "--run", "--only", "Figure 1", "--out", "here.json", "--json"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert "[1/1] 01_capture: cell 1 of 1" in said.err
    assert [(row["exhibit"], row["verdict"]) for row in json.loads(said.out)] == [
        ("Figure 1", "exact"),
        ("Table A.1", "not comparable (nothing ran here)"),
        ("Table A.2", "not comparable (nothing ran here)"),
    ]
    assert cli.main(["paper", "--compare", "here.json", "here.json", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "exact"
    assert cli.main(["paper", "--run", "--only", "Figure 9"]) == 1
    assert "the paper has no Figure 9" in capsys.readouterr().err


def test_measured_numbers_are_read_as_they_were_written():
    row = Measured("a", "speed-up", Ratio(1.0, 0.9, 1.1), None, why="no GPU", differs=("device",))
    assert Evidence.from_json(Evidence("Figure 8", (row,)).to_json()).rows == (row,)
