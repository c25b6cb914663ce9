"""The run against other versions of torch plans what the project says, and reads what came out."""

from __future__ import annotations

import sys

from tests.compat import (
    CORE,
    HOSTED,
    ROOT,
    Outcome,
    pins_without_torch,
    plan,
    read_report,
    supported,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="good"/>
<testcase classname="tests.test_a" name="bad"><failure message="no such name&#10;more"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure"/></testcase>
<testcase classname="tests.test_a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_oldest_torch_is_the_one_that_the_project_names():
    assert supported((ROOT / "pyproject.toml").read_text("utf-8")) == "2.9.0"


def test_other_pins_stay_and_those_that_belong_to_torch_go():
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    left = pins_without_torch(pins)
    assert "torch==" not in left
    assert "sympy==" not in left
    assert "pytest==" in left
    assert "ipywidgets==" in left


def test_what_broke_is_named_with_its_first_line():
    outcome = Outcome("oldest", torch="2.9.0")
    read_report(REPORT, outcome)
    assert str(outcome) == (
        "oldest: torch 2.9.0: 1 passed, 2 broken\n"
        "  tests.test_a::bad: no such name\n"
        "  ::tests.test_b: collection failure"
    )


def test_every_other_python_of_the_machine_is_tried_with_the_pinned_torch(monkeypatch, tmp_path):
    versions = {tmp_path / "a": "3.10", tmp_path / "b": "3.13"}
    here = ".".join(map(str, sys.version_info[:2]))
    monkeypatch.setattr("tests.compat.found", lambda: list(versions))
    monkeypatch.setattr("tests.compat.version_of", lambda path: versions.get(path, here))
    tried = plan("six==1\ntorch==2.13.0\n", 'dependencies = ["torch>=2.9"]')
    assert tried["oldest"][1] == "torch==2.9.0"
    assert tried["newest"][1] == "torch"
    assert {name: torch for name, (_, torch) in tried.items() if name.startswith("python")} == {
        f"python{version}": "torch==2.13.0" for version in versions.values() if version != here
    }
    assert all((ROOT / f"tests/test_{part}.py").is_file() for part in (*CORE, *HOSTED))


def test_what_could_not_be_installed_is_said():
    assert str(Outcome("newest", reason="no network")) == "newest: nothing ran: no network"
