"""The Explorer as a Python object: traits both ways, two outputs, small saved state."""

import base64
import json
import re
import subprocess
import sys
import types
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import fxlab
from fxlab.explorer import diagram
from fxlab.explorer.view import view
from fxlab.explorer.widget import WIDGET_TYPE, Explorer
from fxlab.passes import dce, fuse_conv_bn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if y.sum() > 0:
            return y
        return -y


@pytest.fixture(scope="module")
def timeline():
    gm = fxlab.symbolic_trace(Net().eval())
    with fxlab.record(gm) as recorded:
        fuse_conv_bn(gm)
        dce(gm)
    return recorded


@pytest.fixture
def explorer(timeline):
    return Explorer(timeline)


def test_the_story_travels_once_and_unpacks_to_the_view(explorer, timeline):
    data = json.loads(zlib.decompress(explorer._story))
    assert data == json.loads(json.dumps(view(timeline)))


def test_the_script_unpacks_to_the_viewer(explorer):
    packed = explorer._esm.split('"')[1]
    script = zlib.decompress(base64.b64decode(packed)).decode()
    assert "export default { render };" in script
    assert explorer._css.startswith(".fxl")


def test_a_step_stays_inside_the_story(explorer, timeline):
    explorer.step = 10_000
    assert explorer.step == len(timeline)
    explorer.step = -1
    assert explorer.step == len(timeline)
    explorer.step = 0
    assert explorer.step == 0


def test_goto_takes_a_code_to_its_step_and_row(explorer, timeline):
    erase = next(step for step in timeline.steps if step.edit.kind == "erase")
    explorer.goto(erase.code)
    assert explorer.step == erase.index
    assert explorer.selection == "bn"
    with pytest.raises(ValueError, match="step code"):
        explorer.goto("nothing")


def test_a_note_reaches_the_timeline_and_the_front_end(timeline):
    explorer = Explorer(timeline)
    explorer.note(2, "look here")
    assert timeline.notes[2] == "look here"
    assert explorer.notes["2"] == "look here"
    assert explorer.get_state()["notes"]["2"] == "look here"
    del timeline.notes[2]


def test_the_bundle_carries_all_three_forms(explorer):
    data, _ = explorer._repr_mimebundle_()
    assert set(data) == {WIDGET_TYPE, "text/plain", "text/html"}
    assert "fuse_conv_bn" in data["text/plain"]
    assert data["text/html"].startswith("<details")


def test_display_publishes_the_widget_and_then_a_closed_static_copy(explorer):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            shell.display_formatter.format(explorer)
    finally:
        InteractiveShell.clear_instance()
    first, second = captured.outputs
    assert set(first.data) == {WIDGET_TYPE, "text/plain"}
    assert set(second.data) == {"text/html", "text/plain"}
    assert second.data["text/html"].startswith("<details class")


def test_a_page_made_by_nbconvert_keeps_the_static_copy(explorer):
    from nbconvert import HTMLExporter
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    data, _ = explorer._repr_mimebundle_()
    widget = {WIDGET_TYPE: data[WIDGET_TYPE], "text/plain": data["text/plain"]}
    static = {"text/html": data["text/html"], "text/plain": "static copy"}
    outputs = [new_output("display_data", data=one) for one in (widget, static)]
    page, _ = HTMLExporter().from_notebook_node(
        new_notebook(cells=[new_code_cell("explorer", outputs=outputs)])
    )
    assert 'src="data:image/svg+xml;base64,' in page
    assert "<b>fuse_conv_bn</b>" in page


def test_the_front_end_gets_a_picture_or_the_reason_why_not(explorer, monkeypatch):
    sent = []
    monkeypatch.setattr(explorer, "send", lambda message: sent.append(message))
    explorer._handle_custom_msg({"kind": "picture", "step": 1}, [])
    assert base64.b64decode(sent[-1]["svg"]).decode().rstrip().endswith("</svg>")
    monkeypatch.setattr(diagram, "layout_program", lambda: None)
    explorer._handle_custom_msg({"kind": "picture", "step": 1}, [])
    assert "graphviz" in sent[-1]["text"]


def test_the_classic_picture_is_refused_above_its_limit(timeline, monkeypatch):
    monkeypatch.setattr(diagram, "LIMIT", 2)
    with pytest.raises(ValueError, match="up to 2"):
        diagram.timeline_dot(timeline, 0)


def test_the_classic_picture_takes_hostile_names_as_text():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module('<b>"\\N', nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)

    svg = diagram.render(diagram.graph_dot(fxlab.symbolic_trace(Odd())))
    assert "&lt;b&gt;" in svg or "&lt;b>" in svg
    assert "<b>" not in svg


def test_a_model_that_does_not_trace_opens_on_the_error():
    explorer = fxlab.explore(Branch())
    assert explorer.step == len(explorer.timeline)
    assert isinstance(explorer.error, fxlab.core.errors.TraceError)
    assert "torch.where" in repr(explorer)


def test_explore_keeps_the_model_and_shows_each_pass():
    model = fxlab.symbolic_trace(Net().eval())
    before = model.code
    explorer = fxlab.explore(model, passes=[fuse_conv_bn, dce], inputs=(torch.randn(1, 3, 8, 8),))
    assert model.code == before
    assert [span.name for span in explorer.timeline.passes] == ["fuse_conv_bn", "dce"]


def test_a_saved_explorer_of_200_nodes_and_30_steps_is_small():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *[
                    layer
                    for _ in range(66)
                    for layer in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
                ]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def relu_to_gelu(gm: fxlab.GraphModule) -> None:
        for node in list(gm.graph.find_nodes(op="call_module", target="body.2"))[:1]:
            node.target = "body.5"
        for node in [n for n in gm.graph.nodes if n.name.startswith("body_")][:10]:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(torch.nn.functional.gelu, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            new.name = f"{node.name}_gelu"

    gm = fxlab.symbolic_trace(Deep().eval())
    with fxlab.record(gm) as timeline:
        relu_to_gelu(gm)
    assert len(gm.graph.nodes) >= 200
    assert len(timeline) >= 30
    explorer = Explorer(timeline)
    state = explorer.get_state()
    saved = sum(
        len(base64.b64encode(value)) if isinstance(value, bytes) else len(json.dumps(value))
        for value in state.values()
    )
    saved += len(json.dumps(explorer.static_html())) + len(repr(explorer))
    assert 20 * saved <= 3_000_000


def test_what_vs_code_and_colab_ask_of_a_widget_holds(explorer):
    data, _ = explorer._repr_mimebundle_()
    assert next(iter(data)) == WIDGET_TYPE
    assert data[WIDGET_TYPE].keys() >= {"model_id", "version_major", "version_minor"}
    state = explorer.get_state()
    assert state["_model_module"] == state["_view_module"] == "anywidget"
    packed = explorer._esm.split('"')[1]
    script = zlib.decompress(base64.b64decode(packed)).decode()
    for text in (explorer._esm.replace(packed, ""), script, explorer._css):
        told = text.replace("http://www.w3.org/2000/svg", "")  # a name, never fetched
        assert not re.search(r"https?:|//\w+\.\w|@import|\burl\((?!\))[^)]", told), told[:200]
        assert not re.search(r"^\s*import\b|\bimport\((?!url\))|\bfetch\(|XMLHttp", told, re.M)


def test_colab_is_told_where_its_widget_manager_is(timeline, monkeypatch):
    address = "https://example.org/manager"
    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: None
    output._widgets = types.SimpleNamespace(_installed_url=address)
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    _, metadata = Explorer(timeline)._repr_mimebundle_()
    assert metadata[WIDGET_TYPE]["colab"]["custom_widget_manager"]["url"] == address


def test_where_no_widget_manager_lives_the_story_is_a_table_of_text(timeline, tmp_path):
    timeline.to_json(tmp_path / "story.json")
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "_ = shell.run_cell('import fxlab')\n"
        "_ = shell.run_cell('fxlab.explore(fxlab.Timeline.from_json(\"story.json\"))')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(fxlab.__file__).parents[1]), "HOME": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    for step in timeline.steps:
        assert step.sentence in ran.stdout
    assert "<img" not in ran.stdout


def test_the_script_is_ready_before_it_is_unpacked(explorer):
    """Anywidget waits two seconds for a script; unpacking takes longer on a busy machine."""
    depth = 0
    for line in explorer._esm.splitlines():
        assert depth or line.startswith("export") or "await" not in line
        depth += line.count("{") - line.count("}")
