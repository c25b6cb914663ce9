"""Binder's image would build: its files parse, its pins are ours, lectures find what they need."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BINDER = ROOT / "binder"


def requirements(path: Path) -> dict[str, Requirement]:
    """Read a requirements file: name -> requirement, options of pip left out."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in found}


def lectures() -> list[Path]:
    """List the lectures, without exercises and masters."""
    return sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def imports_outside_try(source: str) -> set[str]:
    """Name the top-level packages that ``source`` imports where an ImportError is not caught."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
        if isinstance(node, ast.Try):
            pending += [*node.handlers, *node.orelse, *node.finalbody]
        else:
            pending += ast.iter_child_nodes(node)
    return found


def code_of(notebook: Path) -> str:
    """Join the code cells of a notebook, without the lines that only IPython understands."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", text)


def test_every_pin_is_exact_and_the_one_that_ci_tests():
    pins = requirements(ROOT / "constraints.txt")
    for name, requirement in requirements(BINDER / "requirements.txt").items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", name
        (tested,) = pins[name].specifier
        assert specifier.version.removesuffix("+cpu") == tested.version, name


def test_torch_is_the_build_without_cuda_from_its_own_index():
    text = (BINDER / "requirements.txt").read_text(encoding="utf-8")
    assert "torch==2.13.0+cpu\n" in text
    assert "--extra-index-url https://download.pytorch.org/whl/cpu\n" in text


def test_the_lab_extra_is_pinned_in_full_for_binder():
    lab = {
        Requirement(text.split(";")[0]).name
        for text in importlib.metadata.requires("fxlab") or []
        if "extra == 'lab'" in text.replace('"', "'")
    }
    assert lab
    assert lab <= requirements(BINDER / "requirements.txt").keys()


@pytest.mark.parametrize("notebook", lectures(), ids=lambda path: path.stem)
def test_every_import_of_a_lecture_is_satisfied_by_the_pins(notebook):
    pinned = requirements(BINDER / "requirements.txt").keys() | {"fxlab"}
    provided = importlib.metadata.packages_distributions()
    for package in imports_outside_try(code_of(notebook)) - set(sys.stdlib_module_names):
        names = {name.lower().replace("_", "-") for name in provided.get(package, [package])}
        # JupyterLab brings IPython into every kernel that it starts.
        assert names & pinned or package == "IPython", package


def test_an_import_that_may_fail_is_not_demanded():
    source = (
        "import a\ntry:\n    import b.c\nexcept ImportError:\n    import d\ndef f(): import e\n"
    )
    assert imports_outside_try(source) == {"a", "d", "e"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", ["binder/postBuild", ".ci/run"])
def test_a_shell_script_parses_stops_on_errors_and_is_executable(script):
    path = ROOT / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o100


@pytest.fixture
def build_pack(monkeypatch):
    """The build pack that Binder's own tool chooses for this project."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tool's own imports
        python = pytest.importorskip("repo2docker.buildpacks.python")
    monkeypatch.chdir(ROOT)
    pack = python.PythonBuildPack("docker.io/library/buildpack-deps:jammy")
    assert pack.detect()
    return pack


def test_binders_build_pack_reads_our_python_and_our_apt_packages(build_pack):
    assert build_pack.binder_dir == "binder"
    assert build_pack.python_version == "3.12"
    assert "graphviz" in "".join(script for _, script in build_pack.get_preassemble_scripts())


def test_the_pins_are_installed_before_the_repository_is_copied(build_pack):
    # Then a change of a notebook does not install torch again.
    before = "".join(script for _, script in build_pack.get_preassemble_scripts())
    assert '-r "binder/requirements.txt"' in before
    assert "binder/requirements.txt" in build_pack.get_preassemble_script_files()


def test_repo2docker_writes_an_image_that_ends_with_post_build():
    pytest.importorskip("repo2docker", reason="needs jupyter-repo2docker")
    command = [sys.executable, "-W", "ignore", "-m", "repo2docker", "--no-build", "--debug", "."]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text = ran.stdout + ran.stderr
    steps = ['-r "binder/requirements.txt"', " src/ ${REPO_DIR}/", "RUN ./binder/postBuild"]
    places = [text.find(step) for step in steps]
    assert -1 not in places, text
    assert places == sorted(places)
