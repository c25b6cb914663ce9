"""What the lectures measured is kept as data, judged by rule, and two machines can be compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
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
        '{"format": "fxlab.results", "version": 1, "exhibits": [{"exhibit": "a", "form": "quick",'
        ' "machine": {"cpu": "x"}, "rows": []}]}',
        '{"format": "fxlab.results", "version": 1, "exhibits": [{"exhibit": "a", "form": "quick",'
        ' "machine": {}, "rows": [{"label": "a", "quantity": "b", "paper": 1, "here": 1,'
        ' "method": "m", "why": "", "differs": [], "samples": {"base": [1], "new": [0]}}]}]}',
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
    assert "beyond the paper: packed 1.25x [1.16, 1.35] (CPU, one thread, batch 1)" in row["here"]
    assert row["verdict"] == "CPU, one thread: agrees; GPU: not comparable (nothing ran here)"
    assert beyond.paper is None
    assert beyond.of == one.of == "CPU, one thread"


def test_a_method_beyond_the_paper_is_told_from_its_worst_ratio_to_its_best():
    slow, fast = (
        Measured(label, "speed-up", None, Ratio(value, value, value), method="packed")
        for label, value in (("batch 1", 0.56), ("batch 2", 1.44))
    )
    said = evidence.summary([fast, slow])
    assert said == (
        "beyond the paper: packed 0.56x [0.56, 0.56] (batch 1) to 1.44x [1.44, 1.44] (batch 2)"
    )


def swept() -> Evidence:
    """One row of the paper, swept over what it leaves open, in sizes that differ."""
    row = APPENDIX_C[2]
    slots = [
        Slot(f"{row.label}\nbatch {n}", row, Pair((r, r), (1.0, 1.0), 2), differs=differs)
        for n, r, differs in ((1, 1.2, ()), (10, 1.1, ("size",)), (32, 1.3, ("size",)))
    ]
    return evidence.ratios("Figure 7", slots)


def test_what_the_paper_leaves_open_is_told_as_a_range():
    (row,) = [r for r in evidence.overview([swept()]) if r["exhibit"] == "Figure 7"]
    assert row["here"] == (
        "CPU, one thread: 1.10x [1.10, 1.10] (batch 10) to 1.30x [1.30, 1.30] (batch 32)"
    )
    assert row["verdict"] == (
        "CPU, one thread, batch 1: agrees; "
        "CPU, one thread, batch 10 and CPU, one thread, batch 32: not comparable (size)"
    )


def test_a_table_tells_which_of_the_papers_rows_ran_and_counts_no_empty_slot():
    here = {row["exhibit"]: row["here"] for row in evidence.overview([swept(), figure_7()])}
    assert here["Table C"] == "1 of the 2 ran here; ratios as in Figure 7"


def test_a_ratio_and_its_interval_are_computed_from_the_samples_of_a_file(tmp_path):
    evidence.dump([figure_7()], tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text("utf-8"))
    row = data["exhibits"][0]["rows"][0]
    assert row["here"][0] == pytest.approx(1.25)
    row["here"] = [9.0, 8.0, 10.0]
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert evidence.load(tmp_path / "x.json") == [figure_7()]


def test_the_machine_the_form_and_the_threads_of_the_measurement_are_said():
    rows = evidence.overview([swept()])
    where = {row["exhibit"]: row["machine"] for row in rows}["Figure 7"]
    machine = paper.machine()
    assert where.startswith("quick form; ")
    assert all(part in where for part in (machine.cpu, "2 threads", machine.torch, machine.date))
    notes = evidence.footnotes(rows)
    assert notes == [f"machine, of Figure 7, Table C: {where}", paper.READING]
    assert all("machine" not in row for row in rows)
    assert evidence.footnotes(evidence.overview([])) == []


def test_two_machines_are_compared_number_by_number():
    rows = evidence.comparison([figure_7()], [figure_7(0.5)], ("a", "b"))
    assert [(row["a"], row["b"], row["verdict"]) for row in rows] == [
        ("1.25x [1.16, 1.35]", "2.00x [1.85, 2.16]", "same direction"),
        ("1.25x [1.16, 1.35]", "2.00x [1.85, 2.16]", "same direction"),
        ("no GPU here", "no GPU here", "not comparable (nothing ran on one)"),
    ]
    assert [row["paper"] for row in rows] == [
        "CPU, one thread: 1.18x [0.99, 1.40]",
        "-",
        "1.06x [1.06, 1.07]",
    ]
    assert all(row["machine a"] == row["machine b"] == figure_7().where for row in rows)
    alone = evidence.comparison([], [figure_7()], ("a", "b"))
    assert {row["verdict"] for row in alone} == {"only one has it"}


def test_runs_of_another_form_or_size_are_not_compared():
    quick = figure_7()
    whole = replace(quick, form="paper-sized")
    words = [row["verdict"] for row in evidence.comparison([quick], [whole], ("a", "b"))]
    assert words == [*["not comparable (size)"] * 2, "not comparable (nothing ran on one)"]
    smaller = replace(quick, rows=tuple(replace(row, differs=("size",)) for row in quick.rows))
    words = [row["verdict"] for row in evidence.comparison([quick], [smaller], ("a", "b"))]
    assert words[0] == "not comparable (size)"
    counted = evidence.counts("Figure 1", {"as traced": 4})
    again = replace(counted, form="paper-sized")
    (row,) = evidence.comparison([counted], [again], ("a", "b"))
    assert row["verdict"] == "exact"  # a graph has no size of its input


def test_a_row_of_the_paper_keeps_its_own_name_beside_what_ran_in_its_place():
    pair = Pair((2.0, 2.0), (1.0, 1.0))
    here = evidence.ratios("Figure 8", [Slot("ResNet-18\nbatch 1", paper.APPENDIX_D[0], pair)])
    (row,) = evidence.comparison([here], [here], ("a", "b"))
    assert (row["what"], row["paper"]) == ("ResNet-18, batch 1", "ResNet50: 3.69x [3.67, 3.71]")


def test_every_form_of_the_output_names_machine_and_intervals(tmp_path, capsys):
    evidence.dump([figure_7()], tmp_path / "there.json")
    for words in (["paper"], ["paper", "--compare", str(tmp_path / "there.json")]):
        for form in ([], ["--markdown"], ["--json"]):
            assert cli.main([*words, "--only", "Figure 7", *form]) == 0
            said = capsys.readouterr().out
            assert all(part in said for part in (paper.machine().cpu, "thread", "torch ", "x ["))
            assert form == ["--json"] or said.rstrip().endswith(paper.READING)


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


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["paper", "--run", "--only", "Figure 9"], "the paper has no Figure 9"),
        (["paper", "--out", "x.json"], "they need --run"),
        (["paper", "--paper-size"], "they need --run"),
        (["bench", "cor"], "there is no benchmark cor (is it core?)"),
        (["show", "MLP", "--check"], "it needs --input"),
        (["show", "MLP", "--input", "f32[2,8]", "--check"], "it needs --pass"),
        (
            ["show", "MLP", "--html", "x", "--json", "x"],
            "--html, --svg and --json need a file each",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_2(words, why, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


def test_measured_numbers_are_read_as_they_were_written():
    row = Measured("a", "speed-up", Ratio(1.0, 0.9, 1.1), None, why="no GPU", differs=("device",))
    assert Evidence.from_json(Evidence("Figure 8", (row,)).to_json()).rows == (row,)


def test_what_the_paper_leaves_open_is_swept_in_the_saved_numbers():
    swept: dict[str, set[str]] = {}
    for one in evidence.saved():
        for row in one.rows:
            batch = re.search(r"batch (\d+)", row.label)
            if one.exhibit in ("Figure 7", "Figure 8") and row.of and batch:
                swept.setdefault(row.of, set()).add(batch[1])
    named = {row.label for row in (*paper.APPENDIX_C, *paper.APPENDIX_D)}
    assert swept.keys() <= named
    for label in ("CPU, one thread", "ResNet50", "LearningToPaint"):
        assert swept[label] >= {"1", "10", "32"}
