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
    monkeypatch.setattr(audit_pins, "pins", lambda path="": pins)
    text = "\n".join(audit_pins.problems())
    assert "ruff: not an exact version" in text
    assert "build: comes from an address" in text
    assert "torch: needed and not pinned" in text


def test_a_pin_with_a_known_hole_is_a_problem_wherever_it_stands(monkeypatch):
    real = audit_pins.pins()
    assert audit_pins.FIRST_SAFE.keys() <= real.keys()
    for name, (safe, advisory) in audit_pins.FIRST_SAFE.items():
        (text,) = audit_pins.hole(name, f"{safe}.dev1")
        assert name in text and advisory in text and safe in text
        assert audit_pins.hole(name, safe) == []
    for path in audit_pins.PINNED:
        files = {name: dict(audit_pins.pins(name)) for name in audit_pins.PINNED}
        assert files[path]["torch"].specifier
        files[path]["torch"] = Requirement("torch==2.12.1+cpu")
        with monkeypatch.context() as patch:
            patch.setattr(audit_pins, "pins", lambda name="constraints.txt", f=files: f[name])
            assert audit_pins.problems() == ["torch 2.12.1+cpu: CVE-2025-3000 is mended in 2.13.0"]
