"""The command line says what it finds, passes on what is not its own, and exits as documented."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import fxlab
from fxlab import arguments, cli, evidence, surroundings, terminal
from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parent.parent


def wait_for(port: int, deadline: float) -> None:
    """Return when somebody on this machine listens at ``port``."""
    with socket.socket() as attempt:
        while attempt.connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline


def test_doctor_names_every_part_and_its_version(capsys):
    assert cli.main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].startswith("2.")
    assert lines["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {"ipywidgets", "anywidget", "jupyterlab", "dot", "onnx"} <= lines.keys()


def test_doctor_prints_the_same_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in findings] == [f.name for f in cli.surroundings()]


def test_doctor_does_not_ask_a_host_with_a_front_end_of_its_own_for_another(monkeypatch):
    there = {"ipywidgets": "7.7.1", "jupyterlab_widgets": "3.0.16"}
    monkeypatch.setattr("fxlab.surroundings.version_of", lambda name: there.get(name, ""))
    found = {finding.name: finding for finding in cli.surroundings()}
    assert "wants jupyterlab_widgets 1" in found["widget front end"].remedy
    there["google-colab"] = "1.0.0"
    found = {finding.name: finding for finding in cli.surroundings()}
    assert found["widget front end"].found == "Colab's own, with ipywidgets 7.7.1"


def test_doctor_tells_nobody_where_it_runs(capsys):
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert str(Path.home()) not in text.replace("\n", " ")
    assert str(ROOT) not in text


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["doctor", "--nonsense"], ["draw", "MLP", "-o", "x.gif"]]
)
def test_a_wrong_command_line_exits_with_2_and_shows_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: fxlab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctr", "there is no doctr (is it doctor?): give one of lab, trace, show"),
        ("show MLP --pass dce cse", "arguments: cse (--pass and --input take one word: give them"),
        ("show MLP --pases dce", "fxlab show: error: unrecognized arguments: --pases dce\n"),
    ],
)
def test_a_mistyped_command_line_says_what_was_meant(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_without_the_lab_extra_each_missing_part_comes_with_its_remedy(bare):
    told = bare("-m", "fxlab.cli", "lab")
    assert told.returncode == 1
    assert 'ipywidgets        missing; for the explorer: python -m pip install "fxlab[lab]"' in (
        told.stderr
    )
    assert "Traceback" not in told.stderr
    found = json.loads(bare("-m", "fxlab.cli", "lab", "--json").stdout)
    assert found["address"] is None
    assert {"ipywidgets", "jupyterlab"} <= {finding["name"] for finding in found["missing"]}
    text = bare("-m", "fxlab.cli", "doctor").stdout
    assert "onnxruntime                   missing; for lowering to a device" in text


def test_without_the_lab_extra_a_drawing_says_what_it_needs(bare, tmp_path):
    told = bare("-m", "fxlab.cli", "draw", "MLP", "-o", str(tmp_path / "x.svg"))
    assert told.returncode == 1
    # torch itself warns before, that there is no numpy.
    assert told.stderr.endswith('fxlab draw needs graphviz: python -m pip install "fxlab[lab]"\n')


MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


def make():
    return Net()


def double(x):
    return torch.relu(x) * 2


def branch(x):
    return x if x.sum() > 0 else -x


class NeedsArgs(Net):
    def __init__(self, width):
        super().__init__()


def with_a_constant(x):
    return torch.relu(x) @ torch.ones(5, 3)


def same(gm):
    return gm


def erases_all(gm):
    for node in list(gm.graph.nodes):
        gm.graph.erase_node(node)


def oops(gm):
    raise KeyError("oops")


def to_tanh(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A user's file, and the folder with it as the current one."""
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield "users_model.py"
    sys.path.remove(str(tmp_path))
    del sys.modules["users_model"]


def test_trace_prints_the_code_of_a_users_function_and_the_nodes_of_a_users_model(model, capsys):
    assert cli.main(["trace", f"{model}:double"]) == 0
    assert "mul = relu * 2" in capsys.readouterr().out
    assert cli.main(["trace", f"{model}:make", "--call", "--graph"]) == 0
    assert "call_module[target=bn]" in capsys.readouterr().out
    assert cli.main(["trace", f"{model}:double", "--json"]) == 0
    names = [node["name"] for node in json.loads(capsys.readouterr().out)["nodes"]]
    assert names == ["x", "relu", "mul", "output"]


def test_a_function_that_makes_a_model_is_not_shown_as_a_program(model, tmp_path, capsys):
    source = Path(model)
    source.write_text(f"{MODEL}\n\ndef pair():\n    return {{'net': Net()}}, 3\n")
    for command in (["show"], ["trace"], ["draw", "-o", "x.dot"]):
        assert cli.main([*command, f"{model}:make"]) == 1
        assert capsys.readouterr().err.endswith(": make returns a model: add --call\n")
        assert cli.main([*command, f"{model}:pair"]) == 1
        said = capsys.readouterr()
        assert "pair returns a model among other things: write a function" in said.err
        assert not said.out
    assert not (tmp_path / "x.dot").exists()


NAMES = "Net, make, double, branch, NeedsArgs, with_a_constant, same, erases_all, oops, to_tanh"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("users_model.py", "write users_model.py:NAME; it has {names}"),
        ("users_model", "write users_model.py:NAME; it has {names}"),
        ("users_model:sam", "write users_model.py:NAME (is it same?); it has {names}"),
        ("users_model:same", "write users_model.py:same"),
        ("users_model.same", "write users_model.py:same"),
        ("users_model.py::sam", "users_model.py has no sam (is it same?); it has {names}"),
        ("users_model.py:Same", "users_model.py has no Same (is it same?); it has {names}"),
        ("user_model.py:same", "there is no file user_model.py (is it users_model.py?)"),
        ("user_model.py", "there is no file user_model.py (is it users_model.py?)"),
    ],
)
def test_a_name_in_a_file_is_asked_for_with_what_the_file_has(
    word, said, tmp_path, monkeypatch, capsys
):
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    # The script `fxlab` does not have the current folder on its path, as `python -m fxlab` has.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "users_model", None)
    for command in (["show", word], ["show", "MLP", "--pass", word]):
        assert cli.main(command) == 1
        assert capsys.readouterr().err == f"fxlab show: {said.format(names=NAMES)}\n"


def test_show_with_check_fails_when_a_pass_returns_no_module(model, capsys):
    source = Path(model)
    source.write_text(f"{MODEL}\n\ndef returns_text(gm):\n    return 'done'\n")
    command = ["show", f"{model}:double", "--pass", f"{model}:returns_text", "--input", "f32[4]"]
    assert cli.main([*command, "--check"]) == 1
    assert "\nreturns_text returned a str, which is no GraphModule" in capsys.readouterr().err
    assert cli.main(command) == 0


def test_what_is_counted_once_is_told_in_the_singular(model, capsys):
    source = Path(model)
    source.write_text(f"{MODEL}\n\ndef nothing():\n    return 3\n")
    assert cli.main(["show", f"{model}:nothing"]) == 0
    assert "\n1 step in " in capsys.readouterr().err
    assert cli.main(["draw", f"{model}:nothing", "-o", "x.dot"]) == 0
    assert "drawing 1 node\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["\x1b[31m"], ["show", "\x1b[31m"], ["show", "MLP", "\x1b[31m"],
     ["show", "\x1b[31m.py:\udcff"],
     ["show", "MLP", "--html", "\x1b[31m/\udcff"], ["show", "MLP", "--steps", "\x1b[31m\udcff"],
     ["show", "MLP", "--pass", "\x1b[31m"], ["show", "MLP", "--input", "\x1b[31m"],
     ["paper", "--only", "\x1b[31m"], ["paper", "--compare", "\x1b[31m"], ["bench", "\x1b[31m"],
     ["grade", "\x1b[31m"], ["grade", "x", "--jobs", "\x1b[31m"], ["release", "\x1b[31m"],
     ["new-exercise", "\x1b[31m"], ["trace", "MLP", "--\x1b[31m"]],
)  # fmt: skip
def test_a_wrong_word_moves_no_cursor(words, capsys):
    try:
        assert cli.main(words) == 1
    except SystemExit as stop:
        assert stop.code == 2
    said = capsys.readouterr()
    assert not said.out and "\x1b" not in said.err
    assert "[31m" in said.err


def test_without_a_command_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert not said.out and "start JupyterLab on the first lecture" in said.err


def test_python_m_fxlab_is_the_command_and_prints_a_commands_own_usage():
    words = [sys.executable, "-m", "fxlab", "doctor", "--jsn"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: fxlab doctor [-h] [--json]\n")


def test_show_tells_the_edits_of_a_pass_and_writes_them(model, tmp_path, capsys):
    outputs = ["--html", "story.html", "--svg", "story.svg", "--json", "story.json"]
    command = ["show", f"{model}:Net", "--pass", "fuse_conv_bn", "--input", "f32[1, 3, 8, 8]"]
    assert cli.main([*command, "--check", *outputs]) == 0
    said = capsys.readouterr()
    assert "erases bn, was self.bn(conv); nothing read it" in said.out
    assert "wrote story.html" in said.err
    assert "<html" in (tmp_path / "story.html").read_text("utf-8")
    assert (tmp_path / "story.svg").read_text("utf-8").lstrip().startswith("<svg")
    assert json.loads((tmp_path / "story.json").read_text("utf-8"))["format"] == "fxlab.timeline"


def test_show_with_check_fails_when_a_users_pass_changes_the_output(model, capsys):
    command = ["show", f"{model}:double", "--pass", f"{model}:to_tanh", "--input", "f32[4]"]
    assert cli.main(command) == 0
    assert cli.main([*command, "--check"]) == 1
    assert "not the same output, or not well formed: to_tanh" in capsys.readouterr().err


def test_show_of_what_cannot_be_traced_tells_the_steps_before_and_the_error(model, capsys):
    assert cli.main(["show", f"{model}:branch"]) == 1
    said = capsys.readouterr()
    assert "gt = sum_1 > 0" in said.out
    assert "torch.where" in said.err


def test_what_needs_arguments_is_told_in_one_line(model, capsys):
    for name in ("randomize_batch_norms", "ResNet", f"{model}:NeedsArgs"):
        assert cli.main(["show", name]) == 1
        said = f"{name} needs arguments: write a function that returns it, and --call that"
        assert capsys.readouterr().err == f"fxlab show: {said}\n"


def listed(*words, capsys):
    assert cli.main(["show", *words]) == 1
    return set(capsys.readouterr().err.rpartition("one of ")[2].strip().split(", "))


def test_a_list_of_models_has_no_helper_and_a_list_of_passes_no_other_function(capsys):
    models = listed("nope", capsys=capsys)
    assert {"resnet50", "MLP"} <= models
    assert not {"randomize_batch_norms", "ResNet"} & models
    passes = listed("MLP", "--pass", "nope", capsys=capsys)
    assert {"amp", "cse", "dce", "fuse_conv_bn"} <= passes
    others = {"report", "compare", "cost", "replace_pattern", "split_module", "chain", "as_pass"}
    assert not others & passes


def test_a_function_of_the_kit_that_is_no_pass_is_not_run_as_one(capsys):
    assert cli.main(["show", "MLP", "--pass", "cost"]) == 1
    said = capsys.readouterr()
    assert "cost is no function that takes a module alone" in said.err
    assert not said.out


@pytest.mark.parametrize("name", ["erases_all", "oops"])
def test_what_stopped_a_pass_is_told_in_full_once_and_without_the_commands_own_lines(
    name, model, capsys
):
    assert cli.main(["show", f"{model}:double", "--pass", f"{model}:{name}"]) == 1
    said = capsys.readouterr()
    assert "stops: " in said.out.splitlines()[-1]
    assert "at node" not in said.out
    assert said.err.count("stopped: ") == 1
    assert ("at node" in said.err) == (name == "erases_all")
    assert "cli.py" not in said.out + said.err
    oops = r"stopped: \S*users_model\.py:\d+, in oops:  raise .*\n  KeyError: 'oops'"
    assert bool(re.search(oops, said.err)) == (name == "oops")


def test_a_decorated_pass_is_blamed_without_the_decorators_line(model, capsys):
    source = Path(model)
    source.write_text(
        f"from fxlab.passes import as_pass\n{MODEL}\nerases_all = as_pass(erases_all)\n"
    )
    assert cli.main(["show", f"{model}:double", "--pass", f"{model}:erases_all"]) == 1
    said = capsys.readouterr().err
    assert "in erases_all:  gm.graph.erase_node(node)" in said
    assert "base.py" not in said


def test_show_with_check_does_not_blame_a_pass_for_inputs_that_the_program_refuses(model, capsys):
    command = ["show", f"{model}:with_a_constant", "--pass", f"{model}:same", "--check"]
    assert cli.main([*command, "--input", "f32[4, 7]"]) == 1
    said = capsys.readouterr().err
    assert "not checked: the program fails on the inputs" in said
    assert "same" not in said.replace(f"running {model}:same", "")


def test_draw_writes_boxes_and_arrows_with_shapes(model, tmp_path):
    pytest.importorskip("graphviz")
    command = ["draw", f"{model}:Net", "--input", "f32[1, 3, 8, 8]", "-o"]
    assert cli.main([*command, "net.dot"]) == 0
    assert cli.main([*command, "net.SVG"]) == 0
    assert "f32[1, 4, 6, 6]" in (tmp_path / "net.dot").read_text("utf-8")
    assert "</svg>" in (tmp_path / "net.SVG").read_text("utf-8")


def test_draw_as_json_says_what_it_drew(model, tmp_path, capsys):
    pytest.importorskip("graphviz")
    assert cli.main(["draw", f"{model}:double", "-o", "net.dot", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"written": ["net.dot"], "nodes": 4, "arrows": 3}
    assert "wrote net.dot" in said.err
    assert cli.main(["draw", f"{model}:branch", "-o", "net.dot", "--json"]) == 1
    assert not capsys.readouterr().out


def test_show_as_json_on_the_standard_output_leaves_it_to_the_timeline(model, capsys):
    command = ["show", f"{model}:double", "--pass", f"{model}:to_tanh", "--json", "-"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    timeline = fxlab.Timeline.from_json(said.out)
    assert [one.name for one in timeline.passes] == ["trace", "to_tanh"]
    assert "relu now calls torch.tanh" in said.err
    assert not Path("-").exists()
    assert cli.main(["show", f"{model}:branch", "--json", "-"]) == 1
    said = capsys.readouterr()
    assert "torch.where" in fxlab.Timeline.from_json(said.out).error
    assert "stopped: " in said.err


def test_paper_lists_every_figure_and_table(capsys):
    assert cli.main(["paper"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Figure 1\n  section: 4.1\n")
    assert "  verdict: exact" in text
    assert "  lecture: 07_fusion" in text
    assert cli.main(["paper", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 13


def test_paper_with_only_shows_the_exhibits_of_one_lecture_without_running_it(tmp_path, capsys):
    assert cli.main(["paper", "--only", "figure 7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["exhibit"] for row in rows] == ["Figure 7", "Table C"]
    same = tmp_path / "same.json"
    evidence.dump(evidence.saved(), same)
    assert cli.main(["paper", "--compare", str(same), "--only", "Table C", "--json"]) == 0
    assert {row["exhibit"] for row in json.loads(capsys.readouterr().out)} == {"Figure 7"}
    with pytest.raises(SystemExit) as stop:
        cli.main(["paper", "--only", "Figure 9"])
    assert stop.value.code == 2
    assert "the paper has no Figure 9: give one of Figure 1, " in capsys.readouterr().err


@pytest.mark.parametrize("exhibits", [None, 3, [3], [{}], "text"])
def test_a_file_of_results_without_exhibits_is_refused_by_name(exhibits, tmp_path, capsys):
    path = tmp_path / "there.json"
    data = {"format": evidence.FORMAT, "version": evidence.VERSION, "exhibits": exhibits}
    path.write_text(json.dumps(data))
    assert cli.main(["paper", "--compare", str(path)]) == 1
    assert capsys.readouterr().err.startswith("fxlab paper: ")


def test_a_hostile_file_of_results_moves_no_cursor(tmp_path, capsys):
    path = tmp_path / "there.json"
    evidence.dump(evidence.saved(), path)
    path.write_text(path.read_text("utf-8").replace("Figure 7", "Figure 7\\u009b31m"), "utf-8")
    for form in ([], ["--markdown"]):
        cli.main(["paper", "--compare", str(path), *form])
        said = capsys.readouterr()
        assert "\x9b" not in said.out + said.err


def test_an_unknown_name_brings_the_nearest_one_and_a_sorted_list(capsys):
    assert cli.main(["show", "MLP", "--pass", "fuse_conv_bm"]) == 1
    said = capsys.readouterr().err
    assert "(is it fuse_conv_bn?)" in said
    listed = said.rpartition("one of ")[2].strip().split(", ")
    assert listed == sorted(listed)
    assert {"dce", "cse", "fuse_conv_bn"} <= set(listed)


def test_show_says_what_it_is_doing_on_the_error_stream(model, capsys):
    assert cli.main(["show", f"{model}:double", "--pass", f"{model}:to_tanh"]) == 0
    said = capsys.readouterr()
    assert f"capturing {model}:double, running {model}:to_tanh" in said.err
    assert re.search(r"\d+ steps in [\d.]+ s", said.err)
    assert "capturing" not in said.out


def test_draw_writes_a_picture_of_points(model, tmp_path):
    pytest.importorskip("graphviz")
    assert cli.main(["draw", f"{model}:Net", "-o", "net.png"]) == 0
    assert (tmp_path / "net.png").read_bytes().startswith(b"\x89PNG")


BENCHES = {
    "good": "import os\nprint('ratio 2.0', os.environ['OMP_NUM_THREADS'])\n",
    "bad": "raise SystemExit(1)\n",
}


def test_bench_runs_the_scripts_of_a_checkout_and_tells_which_failed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tests" / "bench"
    folder.mkdir(parents=True)
    for name, code in BENCHES.items():
        (folder / f"bench_{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "good", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"name": "good", "code": 0, "lines": ["ratio 2.0 1"]}]
    assert "[1/1] good" in said.err
    assert cli.main(["bench", "--json"]) == 1
    assert [one["code"] for one in json.loads(capsys.readouterr().out)] == [1, 0]
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "nope"])
    assert stop.value.code == 2
    assert "give one of bad, good" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="sends a signal to a group of processes")
@pytest.mark.parametrize("words", ["bench slow", "show MLP --pass slow.py:never"])
def test_ctrl_c_ends_a_command_and_what_it_started_in_a_line(words, tmp_path):
    slow = "import pathlib, time\n\n\ndef never(gm):\n    pathlib.Path('on').touch()\n"
    slow += "    while True:\n        time.sleep(0.01)\n"
    (tmp_path / "slow.py").write_text(slow)
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    (tmp_path / "tests" / "bench" / "bench_slow.py").write_text(f"{slow}\n\nnever(None)\n")
    ran = subprocess.Popen(
        [sys.executable, "-m", "fxlab", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        # Who runs the tests in the background may have the signal ignored, and Python keeps that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + HANGS
    while not (tmp_path / "on").exists():
        assert time.monotonic() < deadline and ran.poll() is None
    os.killpg(ran.pid, signal.SIGINT)  # as a terminal does
    said = ran.communicate(timeout=HANGS)[1]
    assert ran.returncode == 130
    assert "Traceback" not in said
    assert said.endswith(f"fxlab {words.split()[0]}: stopped\n")


def test_every_command_has_a_help_that_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["lab", "show", "draw", "trace", "paper", "bench", "release", "grade", "new-exercise",
             "doctor"]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    whole = capsys.readouterr().out
    for name in names:
        assert re.search(rf"^    {name}\b", whole, flags=re.MULTILINE), name
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: fxlab {name}")
        assert max(map(len, said.splitlines())) <= 80
        assert len(said.splitlines()) > 4


def test_a_teachers_commands_are_loaded_only_when_they_are_called():
    code = (
        "import sys\nfrom fxlab import cli\ncli.main(['doctor'])\n"
        "sys.exit('fxlab.teach.commands' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert ran.returncode == 0


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["trace", "nope"], "fxlab.models has no nope"),
        (["trace", "nofile.py:x"], "there is no file nofile.py"),
        (["trace", "no.such.module:x"], "can't import no.such.module"),
        (["trace", "math:tan_"], "math has no tan_ (is it tan?)"),
        (["show", "mlp"], "fxlab.models has no mlp (is it MLP?)"),
        (["show", "MLP", "--pass", "fuse"], "fxlab.passes has no fuse (is it fuse_conv_bn?)"),
        (["show", "MLP", "--input", "float32[2]"], "the first word is one of f64, f32"),
        (["paper", "--compare", "no.json"], "fxlab paper: no.json: "),
        (["trace", "math:nope"], "math has no nope"),
        (["trace", "math:pi"], "math:pi is no model and no function; it is of type float"),
        (["show", "MLP", "--pass", "nope"], "fxlab.passes has no nope"),
        (["show", "MLP", "--input", "q8[2]"], "an input is written like"),
    ],
)
def test_what_is_not_there_is_named_in_one_line_and_exits_with_1(argv, reason, capsys):
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    assert reason in said
    assert said.startswith(f"fxlab {argv[0]}: ")
    assert said.count("\n") == 1


BROKEN = """
import sys
from torch import nn


class Raises(nn.Module):
    def __init__(self):
        raise RuntimeError("no weights here")


class Exits(nn.Module):
    def __init__(self):
        sys.exit(3)


def fails():
    raise KeyError("nope")


def endless(x):
    return endless(x)


def stops(gm):
    raise KeyboardInterrupt


def ends(gm):
    sys.exit("bye")


class Cancelled(BaseException):
    pass


def cancels(gm):
    raise Cancelled("no Exception")


def forgets():
    pass


ready = nn.ReLU()


def layers(depth=2):
    return nn.Sequential(*[nn.ReLU() for _ in range(depth)])
"""
FILES = {
    "broken.py": BROKEN,
    "imports.py": "import no_such_package\n",
    "no_python.py": "x = 1\ndef f(: pass\n",
    "raises.py": "raise ValueError('boom\\x1b[31m')\n",
    "no_text.py": "\0",
    "empty.py": "",
    "notes.txt": "",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder of a user's files, in each of which something is wrong."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("name", ["json", "torch", "fxlab", "types", "a b", "1", "é"])
def test_a_file_may_be_called_as_a_module_is(name, tmp_path, monkeypatch, capsys):
    (tmp_path / f"{name}.py").write_text(MODEL)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    command = ["show", f"{name}.py:double", "--pass", f"more/{name}.py:to_tanh", "--html", "x.html"]
    assert cli.main(command) == 0
    assert "relu now calls torch.tanh" in capsys.readouterr().out
    assert before.items() <= sys.modules.items()
    for made in sys.modules.keys() - before.keys():
        if str(getattr(sys.modules[made], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[made]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "show broken.py:Raises",
            r"broken\.py:8, in __init__:  raise .*\n  RuntimeError: no weights",
        ),
        ("show broken.py:fails --call", r"broken\.py:17, in fails:  raise .*\n  KeyError: 'nope'"),
        ("trace broken.py:endless", r"broken\.py:21, in endless: .*\n  RecursionError: "),
        ("draw broken.py:fails --call -o x.dot", r"broken\.py:17, in fails"),
        ("show imports.py:x", r"imports\.py:1, in <module>: .*\n  ModuleNotFoundError: "),
        ("show no_python.py:x", r"no_python\.py:2: SyntaxError: "),
        ("show no_text.py:x", r"no_text\.py: SyntaxError: |null bytes"),
        ("trace raises.py:x", r"raises\.py:1, in <module>: .*\n  ValueError: boom"),
        ("show broken.py:Exits", r": the code ended the process, with 3$"),
        ("show MLP --pass broken.py:ends", r": the code ended the process, with 'bye'$"),
        (
            "show MLP --pass broken.py:cancels",
            r"broken\.py:\d+, in cancels: .*\n  Cancelled: no",
        ),
        ("show broken.py:forgets --call", r"forgets returned no model .* of type NoneType$"),
        ("show folder.py:x", r"folder\.py is a folder: give a file$"),
        ("show dangling.py:x", r"there is no file dangling\.py$"),
        (
            "draw MLP --input f32[2,8] --input f32[1] -o x.dot",
            r"takes 1 input; --input is given 2",
        ),
        ("show broken.py:ready --call", r"broken\.py:ready is nothing to call"),
        (
            "show broken.py:",
            r"write broken\.py:NAME; it has Raises, Exits, fails, .*, ready, layers$",
        ),
        ("show no_python.py", r"no_python\.py:2: SyntaxError: "),
        ("show no_text.py", r"no_text\.py: SyntaxError: |null bytes"),
        ("show empty.py", r"write empty\.py:NAME; it has no names$"),
        ("show empty.py:x", r"empty\.py has no x; it has no names$"),
        ("show notes.txt:x", r"notes\.txt is no file of Python: that ends in \.py$"),
        (
            "show broken.py:layers",
            r"stopped: .*(\n .*)+\n  or, if broken.py:layers makes a model: ",
        ),
        ("trace broken.py:layers", r"try 1: .*(\n .*)+\n  or, if broken.py:layers makes a model: "),
        ("show MLP --input f32[99999999999999999999]", r"f32\[9+\] cannot be made: "),
        ("show MLP --input f32[1000000,1000000,1000]", r"cannot be made: "),
    ],
)
def test_what_is_wrong_with_a_users_code_is_told_with_its_line_and_no_traceback(
    words, said, broken, capsys
):
    assert cli.main(words.split()) == 1
    told = capsys.readouterr().err
    assert re.search(said, told, flags=re.MULTILINE), told
    assert "Traceback" not in told and "cli.py" not in told and "\x1b" not in told


def test_who_stops_a_command_is_told_so_and_gets_130(broken, capsys):
    assert cli.main(["show", "MLP", "--pass", "broken.py:stops"]) == 130
    assert capsys.readouterr().err.endswith("fxlab show: stopped\n")


def test_an_error_of_the_kits_own_is_not_hidden(monkeypatch):
    def wrong():
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "surroundings", wrong)
    # This test is a user's file; the kit's own line must be the last one.
    monkeypatch.setattr(cli, "told", lambda error: "")
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("show MLP --html {}", "is a folder"),
        ("show MLP --html {}/no/x.html", "there is no folder"),
        ("show MLP --json {}/no/x.json", "there is no folder"),
        ("show MLP --svg {}", "is a folder"),
        ("show MLP --html {}/" + "x" * 300, "can't be written: File name too long"),
        ("draw MLP -o {}/no/x.svg", "there is no folder"),
        ("draw MLP -o {}/x.gif", "a picture goes to a .svg, .png or .dot file"),
        ("show MLP --steps -5", "expected one argument|give a number, 0 or more"),
        ("show MLP --steps x", "give a number, 0 or more"),
        ("paper --run --out {}", "is a folder"),
        ("paper --run --out {}/kept/x.json", "can't be written: No space"),
        ("grade {} --out {}", "is a folder"),
        ("grade {} --out {}/kept/x.csv", "can't be written: No space"),
        ("grade {} --out {}/a.txt/new/x.csv", "a.txt is no folder; give the name of one"),
        ("grade {} --seconds 0", "give seconds, more than 0"),
        ("grade {} --seconds nan", "give seconds, more than 0"),
        ("grade {} --seconds soon", "give seconds, more than 0"),
        ("grade {} --jobs 0", "give a number, 1 or more"),
        ("grade {} --course one", "give a number, 0 or more"),
        ("release --to {}/a.txt", "a.txt is no folder; give the name of one"),
        ("release --zip {}", "is a folder"),
        ("new-exercise 9.1 --to {}/a.txt/own", "a.txt is no folder; give the name of one"),
    ],
)
def test_where_nothing_can_be_written_is_told_before_anything_runs(
    words, why, tmp_path, monkeypatch, capsys
):
    (tmp_path / "kept").mkdir()
    (tmp_path / "a.txt").write_text("kept")
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda path: not_there(path) or touch(path))
    with pytest.raises(SystemExit) as stop:
        cli.main(words.replace("{}", str(tmp_path)).split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert re.search(why, told), told
    assert "capturing" not in told and "students' code" not in told
    assert (tmp_path / "a.txt").read_text() == "kept"


def not_there(path: Path) -> None:
    """Refuse a file in a folder that takes none: nothing is refused to who runs tests as root."""
    if path.parent.name == "kept":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path, capsys):
    old = tmp_path / "old.json"
    old.write_text("kept")
    assert cli.main(["show", "nope", "--json", str(old), "--html", str(tmp_path / "x.html")]) == 1
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("old.json", "kept")]


def test_a_file_in_new_folders_is_no_reason_to_make_them_yet(tmp_path):
    path = tmp_path / "a" / "b" / "grades.csv"
    assert arguments.new_file_in_new_folders(str(path)) == path
    assert arguments.folder(str(path.parent)) == path.parent
    assert not list(tmp_path.iterdir())


def test_a_letter_that_the_terminal_lacks_is_written_as_python_does(tmp_path):
    source = "import torch\n\n\ndef f(é):\n    return torch.relu(é)\n"
    (tmp_path / "it's é.py").write_text(source, encoding="utf-8")
    words = [sys.executable, "-m", "fxlab", "trace", "it's é.py:f"]
    ran = subprocess.run(
        words, cwd=tmp_path, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert b"def forward(self, \\xe9):" in ran.stdout


def test_what_is_said_to_nobody_is_not_said_to_the_next_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    terminal.say("wrote x")
    assert capsys.readouterr().out == ""


def test_show_says_so_when_the_program_refuses_the_inputs(capsys):
    assert cli.main(["show", "MLP", "--input", "f32[2, 3]"]) == 0
    assert "\nnot run: the program fails on the inputs (RuntimeError: " in capsys.readouterr().err
    assert cli.main(["show", "MLP", "--input", "f32[2, 8]"]) == 0
    assert "not run" not in capsys.readouterr().err


def test_the_first_lecture_is_found_from_a_folder_below_the_project(monkeypatch, tmp_path):
    lecture = tmp_path / surroundings.START
    lecture.parent.mkdir()
    lecture.write_text("{}")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert surroundings.start_notebook() == lecture


@pytest.fixture
def lab(tmp_path):
    """Start `fxlab lab` in a folder with a first lecture; its process, port, and the lecture."""
    lecture = tmp_path / surroundings.START
    lecture.parent.mkdir()
    lecture.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=t"]
    started = []

    def start(*words):
        server = subprocess.Popen(
            [sys.executable, "-m", "fxlab.cli", "lab", *options, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if words else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if words else subprocess.PIPE,
            text=True,
        )
        too_late = threading.Timer(HANGS, server.kill)  # ends who reads what it says
        too_late.start()
        started.append((server, too_late))
        return server, port, lecture

    yield start
    for server, too_late in started:
        too_late.cancel()
        server.kill()
        server.communicate()


def test_lab_serves_the_first_lecture_and_passes_options_on_to_jupyterlab(lab):
    server, port, _ = lab()
    assert server.stderr is not None
    address = f"http://127.0.0.1:{port}/lab/tree/notebooks/00_start.ipynb"
    assert any(address in line for line in server.stderr)
    wait_for(port, time.monotonic() + HANGS)  # it says its address just before it listens
    with urllib.request.urlopen(f"{address}?token=t", timeout=HANGS) as page:
        assert page.status == 200
    stored = f"http://127.0.0.1:{port}/api/contents/notebooks/00_start.ipynb?token=t"
    with urllib.request.urlopen(stored, timeout=HANGS) as page:
        assert json.load(page)["type"] == "notebook"


def test_lab_as_json_says_where_it_listens(lab):
    server, port, lecture = lab("--json")
    assert server.stdout is not None
    lines = []
    while (line := server.stdout.readline()) and line != "}\n":
        lines.append(line)
    found = json.loads("".join([*lines, line]))
    assert found["notebook"] == str(lecture) and found["missing"] == []
    assert found["address"].startswith(f"http://127.0.0.1:{port}/lab/tree/notebooks/00_start.ipynb")
    with urllib.request.urlopen(found["address"], timeout=HANGS) as page:
        assert page.status == 200
