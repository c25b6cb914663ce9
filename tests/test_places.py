"""What hosted notebooks document of their images is enough for the kit; one source of the badge."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.places import BELOW, FIRST_CELL, HOSTS, NOT_THERE, REF, REPOSITORY, badge

ROOT = Path(__file__).resolve().parent.parent


def asked(extra: str) -> dict[str, Requirement]:
    """Read what the project asks for: name -> requirement of the core and of one extra."""
    found = map(Requirement, importlib.metadata.requires("fxlab") or [])
    return {
        one.name: one for one in found
        if one.marker is None or one.marker.evaluate({"extra": extra})
    }  # fmt: skip


def installed_by_the_cell() -> set[str]:
    """Name what the first cell installs with what it needs."""
    (line,) = [line for line in FIRST_CELL.splitlines() if "--no-deps" not in line]
    return {word for word in line.split()[2:] if not word.startswith("-")}


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_after_the_first_cell_a_host_has_all_that_a_lecture_needs(host):
    for name in asked("lab").keys() - NOT_THERE:
        assert host.version(name) or name in installed_by_the_cell(), name


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_what_a_host_has_is_new_enough_or_said_to_be_enough(host):
    below = set()
    for name, requirement in asked("lab").items():
        for specifier in Requirement(name + host.version(name).replace("any", "")).specifier:
            fits = specifier.version in requirement.specifier and specifier.operator == "=="
            if not fits:
                below.add((host.name, name))
    assert below == {key for key in BELOW if key[0] == host.name}


def test_the_first_cell_leaves_the_hosts_own_packages_alone():
    assert installed_by_the_cell().isdisjoint({"torch", "ipywidgets", "matplotlib", "jupyterlab"})
    assert f"github.com/{REPOSITORY}@{REF}" in FIRST_CELL
    lines = FIRST_CELL.splitlines()
    assert all(line.startswith("%pip install ") for line in lines)  # no shell: works everywhere


def test_the_badge_is_of_the_one_ref_and_opens_a_file_that_is_there():
    found = re.search(rf"/gh/{REPOSITORY}/([\w.]+)\?urlpath=lab/tree/([\w/.]+)\)", badge())
    assert found is not None
    assert found[1] == REF
    assert (ROOT / found[2]).is_file()
    assert badge() in (ROOT / "README.md").read_text("utf-8")


def test_the_ref_is_a_branch_or_a_tag_that_is_there():
    git = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet"]
    if subprocess.run([*git, "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("no repository")
    # A clone of one commit knows only its own branch: then `main` cannot be asked for.
    if REF != "main":
        tag = subprocess.run([*git, f"refs/tags/{REF}"], capture_output=True, check=False)
        version = re.search(
            r'__version__ = "(.+)"', (ROOT / "fxlab/__init__.py").read_text("utf-8")
        )
        assert version is not None
        assert tag.returncode == 0 or f"v{version[1]}" == REF


def test_windows_and_macos_find_no_step_for_a_shell_in_the_documented_way():
    text = (ROOT / "README.md").read_text("utf-8").partition("Without make:")[2]
    block = re.search(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        assert re.match(r"(python3|\.venv/bin/\w+) ", line), line
        assert not re.search(r"&&|\||[$;<>`]|\bexport\b|\bsource\b", line), line


def texts_without_an_encoding(source: str) -> list[int]:
    """Return the lines that read or write text in whatever encoding the system has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or {k.arg for k in node.keywords} & {"encoding", None}:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mode: ast.AST | None = None
        if name in ("read_text", "write_text") and len(node.args) == (name == "write_text"):
            found.append(node.lineno)
        elif name == "open":  # the builtin, or a path's; an archive's or os.open takes a name first
            mode = next(iter(node.args[isinstance(node.func, ast.Name) :]), ast.Constant("r"))
            if isinstance(mode, ast.Constant) and "b" not in str(mode.value):
                found.append(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "fxlab").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_of_text_is_read_and_written_in_utf8_everywhere(path):
    assert texts_without_an_encoding(path.read_text("utf-8")) == []


def test_a_text_without_an_encoding_is_found():
    source = (
        'p.read_text()\np.read_text("utf-8")\np.write_text(x)\nopen(p)\nopen(p, "rb")\nos.open(p)'
    )
    assert texts_without_an_encoding(source) == [1, 3, 4]
