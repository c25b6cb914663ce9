"""The wheel holds the package and nothing else, and asks for no more than torch."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    (path,) = folder.glob("fxlab-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


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
