"""The wheel holds the package and nothing else, and asks for no more than torch."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.clocks import HANGS
from tests.conftest import link_torch_into

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The wheel of this checkout as a file, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=HANGS)
    (path,) = folder.glob("fxlab-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(built):
    """The wheel of this checkout, opened."""
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Run the programs of an empty environment that has the wheel, torch and what torch needs."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=True)
    programs = home / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(built)], check=True, capture_output=True, text=True, timeout=HANGS)
    (packages,) = home.rglob("site-packages")
    link_torch_into(packages)

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [str(programs / program), *words]
        return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True,
                              check=False, timeout=HANGS)  # fmt: skip

    return run


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    """Read the wheel's METADATA."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_has_every_file_of_the_package_and_no_test_and_no_notebook(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-.*", "", top) for top in tops} == {"fxlab"}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fxlab").rglob("*")
        if path.suffix in {".py", ".js", ".css"}
    }
    assert package <= set(names)
    assert not [name for name in names if "test" in Path(name).stem or name.endswith(".ipynb")]


def test_no_solution_and_no_wrong_answer_is_in_it(wheel):
    marks = (b"### BEGIN SOLUTION", b"def wrong_")
    for name in wheel.namelist():
        assert "instructor" not in name
        text = wheel.read(name)
        if name == "fxlab/teach/authoring.py":
            continue  # the form of a new exercise has these marks, and nothing between them
        assert not any(re.search(rb"^ *" + mark, text, flags=re.MULTILINE) for mark in marks), name


def test_the_numbers_of_the_lectures_come_with_it(wheel):
    assert json.loads(wheel.read("fxlab/measured.json"))["format"] == "fxlab.results"


def test_installed_without_extras_it_traces_with_torch_alone(installed):
    code = (
        "import torch, fxlab, sys\n"
        "gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg())\n"
        "fxlab.passes.dce(gm)\n"
        "with fxlab.record(gm) as timeline:\n    fxlab.passes.cse(gm)\n"
        "print(gm(torch.ones(2)), len(gm.graph.nodes))\n"
        "print(sorted({'ipywidgets', 'numpy', 'matplotlib'} & sys.modules.keys()))\n"
        "print('site-packages' in fxlab.__file__)"
    )
    ran = installed("python", "-W", "ignore", "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["tensor([-1., -1.]) 4", "[]", "True"]


def test_installed_without_extras_the_command_works_or_says_what_it_needs(installed, tmp_path):
    ran = installed("fxlab", "trace", "MLP")
    assert (ran.returncode, "return layers_2" in ran.stdout) == (0, True), ran.stderr
    page = tmp_path / "story.html"
    ran = installed("fxlab", "show", "MLP", "--pass", "dce", "--html", str(page))
    assert ran.returncode == 0, ran.stderr
    assert page.stat().st_size > 10_000
    ran = installed("fxlab", "paper")
    assert (ran.returncode, "Figure 8" in ran.stdout) == (0, True), ran.stderr
    for words, extra in ((["lab"], "lab"), (["draw", "MLP", "-o", "x.svg"], "lab"),
                         (["bench"], "clone"), (["paper", "--run"], "clone")):  # fmt: skip
        ran = installed("fxlab", *words)
        assert ran.returncode == 1
        assert extra in ran.stderr and "Traceback" not in ran.stderr, ran.stderr
    assert "onnx" in installed("fxlab", "doctor").stdout


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("fxlab.explore(gm)", "lab"),
        ("fxlab.Explorer", "lab"),
        ("fxlab.Playground(gm)", "lab"),
        ("fxlab.explorer.diagram.graph_dot(gm)", "lab"),
        ("fxlab.backends", "lower"),
        ("fxlab.teach.check('2.2', lambda gm: gm)", "teach"),
    ],
)
def test_installed_without_extras_a_call_says_which_it_needs(installed, call, extra):
    code = "import fxlab, fxlab.explorer.diagram\ngm = fxlab.symbolic_trace(lambda x: x + 1)\n"
    ran = installed("python", "-W", "ignore", "-c", code + call)
    assert ran.returncode == 1
    assert f"fxlab[{extra}]" in ran.stderr.splitlines()[-1], ran.stderr


def test_without_an_extra_it_needs_torch_alone(wheel):
    needs = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist") or []]
    assert [need.name for need in needs if need.marker is None] == ["torch"]
    extras = set(metadata(wheel).get_all("Provides-Extra") or [])
    assert extras == {"lab", "lower", "teach", "dev"}


def test_it_brings_the_settings_that_save_widgets_with_a_notebook(wheel):
    (name,) = (name for name in wheel.namelist() if "overrides.d/fxlab.json" in name)
    assert name.endswith("data/share/jupyter/lab/settings/overrides.d/fxlab.json")
    settings = json.loads(wheel.read(name))
    assert settings["@jupyter-widgets/jupyterlab-manager:plugin"] == {"saveState": True}


def test_it_has_the_command_and_the_licence(wheel):
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "fxlab = fxlab.cli:main" in wheel.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata(wheel)["License-Expression"] == "MIT"


def test_every_requirement_of_the_project_is_pinned_for_ci(wheel):
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {Requirement(line).name.lower() for line in lines if line and line[0] != "#"}
    needs = {Requirement(text).name for text in metadata(wheel).get_all("Requires-Dist") or []}
    assert needs - {"fxlab"} <= pins
