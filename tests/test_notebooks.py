"""The lectures read well as saved: linked, in order, the same on every machine, without scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from tests.run_notebooks import STATE, VIEW, shown_widgets, stable

ROOT = Path(__file__).resolve().parent.parent
LECTURES = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
EACH = pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)

# What would differ on another machine.
UNSTABLE = {
    "an address": re.compile(r"\bat 0x[0-9a-f]{5,}"),
    "a path of the machine": re.compile(
        r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|Users|work|mnt)/\w"
    ),
    "a kernel's file": re.compile(r"ipykernel_\d|<ipython-input"),
}


def read(path: Path) -> nbformat.NotebookNode:
    """Read the notebook at ``path``."""
    return nbformat.read(path, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """List the outputs of all cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(output: nbformat.NotebookNode) -> list[str]:
    """List what an output says in words."""
    data = output.get("data", {})
    return [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]


def test_the_first_lectures_are_here():
    stems = [path.stem for path in LECTURES]
    assert {"00_start", "01_capture", "02_transform", "03_recapture"} <= set(stems)


@EACH
def test_the_first_cell_says_what_comes_before_and_after_and_what_it_costs(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]} ")
    rows = dict(re.findall(r"^\| ([a-z ,]+) \| (.+) \|$", first.source, flags=re.M))
    assert rows.keys() >= {"before, after", "time", "memory", "needs", "teaches", "paper"}
    assert re.fullmatch(r"\d+ minutes", rows["time"])
    assert re.search(r"\d [MG]B", rows["memory"])


@EACH
def test_the_memory_in_the_first_cell_is_what_was_measured_rounded_up(path):
    measured = json.loads((ROOT / "tests" / "lectures.json").read_text(encoding="utf-8"))
    said, unit = re.search(
        r"\| memory \| about ([\d.]+) ([MG])B", read(path).cells[0].source
    ).groups()
    room = float(said) * (1000 if unit == "G" else 1) - measured[path.stem]["megabytes"]
    assert 0 <= room <= 150


def neighbours(path: Path) -> tuple[list[str], list[str]]:
    """List the lectures that the first cell names as coming before, and the next one, if any."""
    row = re.search(r"^\| before, after \| (.*) \|$", read(path).cells[0].source, flags=re.M)
    assert row is not None, path.name
    before, _, after = row[1].partition("next:")
    link = re.compile(r"\((\d\d_\w+\.ipynb)\)")
    return link.findall(before), link.findall(after)


def test_the_lectures_link_each_other_in_one_chain():
    order, name = [], "00_start.ipynb"
    while name and name not in order:
        order.append(name)
        before, after = neighbours(ROOT / "notebooks" / name)
        assert set(before) <= set(order[:-1]), name
        assert len(order) == 1 or order[-2] in before, name
        name = after[0] if after else ""
    assert sorted(order) == [path.name for path in LECTURES]


@EACH
def test_every_link_leads_to_a_file(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", cell.source):
                assert (path.parent / target).exists(), target


@EACH
def test_it_was_executed_once_from_top_to_bottom_without_an_error(path):
    notebook = read(path)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(output.output_type != "error" for output in outputs(notebook))


@EACH
def test_its_outputs_name_nothing_of_the_machine(path):
    # Times and figures that differ from run to run are for nbval to find.
    for text in [text for output in outputs(read(path)) for text in texts(output)]:
        for what, pattern in UNSTABLE.items():
            found = pattern.search(text)
            assert found is None, f"{what}: {text[max(0, found.start() - 60) : found.end()]}"
    assert not UNSTABLE["a path of the machine"].search(path.read_text("utf-8"))


@EACH
def test_every_explorer_has_a_static_copy_behind_it_and_its_state_is_saved(path):
    notebook = read(path)
    for cell in notebook.cells:
        shown = cell.get("outputs", [])
        for place, output in enumerate(shown):
            if VIEW not in output.get("data", {}):
                continue
            copy = shown[place + 1].data["text/html"]
            assert "<details" in copy
            assert 'src="data:image/svg+xml;base64,' in copy
            assert re.search(r'<img[^>]* alt="[^"]+', copy)
            assert not re.search(r"<script|<style|\son\w+=", copy)
    shown = shown_widgets(notebook)
    assert set(shown) <= notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {}).keys()


@EACH
def test_one_lecture_with_its_explorers_stays_small(path):
    assert path.stat().st_size < 1_000_000


def test_what_is_printed_in_pieces_is_saved_as_one():
    pieces = [
        nbformat.v4.new_output("stream", name=name, text=text)
        for name, text in (("stdout", "a"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d"))
    ]
    cell = nbformat.v4.new_code_cell("x", outputs=pieces)
    saved = stable(nbformat.v4.new_notebook(cells=[cell]), "x").cells[0].outputs
    assert [output.text for output in saved] == ["ab\n", "c", "d"]


def test_two_runs_that_differ_in_ids_and_times_are_saved_alike():
    def run(one: str, two: str, when: str) -> str:
        model = {"model_module": "m", "model_name": "n", "model_module_version": "1"}
        state = {
            two: {**model, "state": {"layout": f"IPY_MODEL_{one}"}},
            one: {**model, "state": {}},
            "f" * 32: {**model, "state": {"left": "over"}},
        }
        view = {"version_major": 2, "version_minor": 0, "model_id": two}
        cell = nbformat.v4.new_code_cell(
            "show()",
            metadata={"execution": {"iopub.status.busy": when}},
            outputs=[nbformat.v4.new_output("display_data", data={VIEW: view})],
        )
        metadata = {"widgets": {STATE: {"state": state, "version_major": 2, "version_minor": 0}}}
        notebook = nbformat.v4.new_notebook(cells=[cell], metadata=metadata)
        return nbformat.writes(stable(notebook, "x"))

    first = run("a" * 32, "b" * 32, "yesterday")
    assert first == run("c" * 32, "d" * 32, "today")
    kept = json.loads(first)["metadata"]["widgets"][STATE]["state"]
    assert len(kept) == 2
    assert "left" not in first
