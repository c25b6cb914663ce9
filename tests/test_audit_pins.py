"""Every pin is exact, and everything that is needed is pinned."""

from __future__ import annotations

from packaging.requirements import Requirement

from tests import audit_pins


def test_the_pins_have_no_problem():
    assert audit_pins.problems() == []


def test_what_the_extras_bring_is_followed_to_the_end():
    needed = audit_pins.needed()
    assert {"torch", "sympy", "jupyterlab", "tornado", "onnxruntime", "pytest"} <= needed
    assert "openvino" not in audit_pins.needed(("", "lab"))


def test_a_loose_or_foreign_or_missing_pin_is_a_problem(monkeypatch):
    pins = audit_pins.pins()
    pins["ruff"] = Requirement("ruff>=0.8")
    pins["build"] = Requirement("build @ https://example.org/build.whl")
    del pins["torch"]
    monkeypatch.setattr(audit_pins, "pins", lambda: pins)
    text = "\n".join(audit_pins.problems())
    assert "ruff: not an exact version" in text
    assert "build: comes from an address" in text
    assert "torch: needed and not pinned" in text
