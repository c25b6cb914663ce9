"""Does the suite pass with the oldest torch that we support, the newest, and other Pythons?

``make compat`` (or ``python -m tests.compat``) makes an environment for each in ``build/compat``,
installs what it can, runs the suite without notebooks and browser, and says what broke beside the
pinned torch. For every other Python of this machine the pinned torch is installed and nothing else
of ours, and the core's tests run; and the explorer's with the versions that Google Colab documents.
``--only python3.12`` tries one. It needs a network and some gigabytes; what can't be installed is
said and skipped.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from tests.places import COLAB
from tests.pythons import found, version_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "compat"
# Prose and pictures are checked against the pinned versions only.
LEFT_OUT = ("browser", "test_notebooks.py", "test_readme.py", "test_reference.py", "test_binder.py",
            "test_package.py", "test_differences.py")  # fmt: skip
# What is done with torch alone, whatever Python runs it.
CORE = (
    *("bytecode", "codegen", "errors", "graph", "graph_module", "interpreter", "lint", "names"),
    *("operators", "parity", "pickling", "purity", "tracer", "tracing", "tracing_flag"),
)
# What asks something of a host's widgets, fonts and notebook.
HOSTED = ("widget", "static", "playground", "predicting")


@dataclass
class Outcome:
    """What one environment came to.

    Attributes:
        name: "oldest", "newest", a Python such as "python3.12", or "colab".
        torch: The version that was installed; empty when none could be.
        reason: Why nothing ran; empty when something did.
        passed: How many tests passed.
        broken: Tests that failed or could not be collected, with the first line of why.
    """

    name: str
    torch: str = ""
    reason: str = ""
    passed: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: nothing ran: {self.reason}"
        head = f"{self.name}: torch {self.torch}: {self.passed} passed, {len(self.broken)} broken"
        return "\n".join([head, *(f"  {test}: {why}" for test, why in self.broken.items())])


def supported(pyproject: str) -> str:
    """Return the oldest torch that the project says it supports.

    >>> supported('dependencies = ["torch>=2.9"]')
    '2.9.0'
    """
    found = re.search(r'"torch>=([\d.]+)', pyproject)
    assert found is not None, "the project does not say which torch it needs"
    parts = found[1].split(".")
    return ".".join([*parts, "0", "0"][:3])


def pins_without_torch(constraints: str) -> str:
    """Drop the pins that another torch may not agree with.

    >>> pins_without_torch("torch==2.13.0\\nsympy==1.14\\nruff==0.8\\ntriton==3.1\\n")
    'ruff==0.8\\n'
    """
    free = re.compile(r"^(torch|sympy|mpmath|triton|numpy|networkx|fsspec|nvidia\S*)==", re.I)
    kept = [line for line in constraints.splitlines() if not free.match(line)]
    return "".join(f"{line}\n" for line in kept)


def read_report(text: str, outcome: Outcome) -> None:
    """Take the numbers out of a JUnit report."""
    for case in ElementTree.fromstring(text).iter("testcase"):
        bad = next((e for e in case if e.tag in ("failure", "error")), None)
        if bad is not None:
            why = (bad.get("message") or "").splitlines() or [""]
            outcome.broken[f"{case.get('classname')}::{case.get('name')}"] = why[0][:200]
        elif case.find("skipped") is None:
            outcome.passed += 1


def plan(constraints: str, pyproject: str) -> dict[str, tuple[Path, str]]:
    """Return what is tried: name -> interpreter and torch."""
    here = Path(sys.executable)
    (pinned,) = re.findall(r"^torch==\S+", constraints, flags=re.M)
    tried = {"oldest": (here, f"torch=={supported(pyproject)}"), "newest": (here, "torch")}
    for python in found():
        if version_of(python) != version_of(here):
            tried[f"python{version_of(python)}"] = (python, pinned)
        if version_of(python) == COLAB.python:
            tried["colab"] = (python, pinned)
    return tried


def attempt(name: str, interpreter: Path, requirement: str, torch_args: list[str]) -> Outcome:
    """Make the environment, install, run the suite in it; the core's part on another Python."""
    outcome = Outcome(name)
    home = FOLDER / name
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([str(interpreter), "-m", "venv", str(home)], check=True)
    alone = name.startswith("python") or name == "colab"  # without an installation of ours
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pins = FOLDER / "constraints.txt"
    pins.write_text(pins_without_torch((ROOT / "constraints.txt").read_text("utf-8")), "utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    tools = ["pytest", "pytest-timeout", "pytest-xdist", "psutil", "packaging"]
    tools += ["hypothesis", "numpy"]
    ours = [] if alone else ["nbval", "-e", f"{ROOT}[teach,lab,lower]"]
    if name == "colab":
        ours = [need for need in COLAB.packages if not need.startswith("torch")]
        ours += ["graphviz-pure"]
    pinned = [] if alone else ["-c", str(pins)]  # a pin may not know another Python
    for words in ([*pip, *torch_args, requirement], [*pip, *pinned, *tools, *ours]):
        print(f"{name}: {' '.join(words[3:])}", flush=True)
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if ran.returncode:
            outcome.reason = (ran.stderr.strip().splitlines() or ["pip failed"])[-1]
            return outcome
    words = [str(python), "-c", "import torch; print(torch.__version__)"]
    outcome.torch = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    ignored = [] if alone else [f"--ignore=tests/{part}" for part in LEFT_OUT]
    parts = HOSTED if name == "colab" else CORE
    chosen = [f"tests/test_{part}.py" for part in parts] if alone else ["tests"]
    print(f"{name}: running the suite with torch {outcome.torch}", flush=True)
    # Deprecations of another torch are news, not failures.
    words = [str(python), "-m", "pytest", "-q", "-n", "2", "-W", "default", "-m",
             "not slow and not browser", f"--junitxml={report}", *ignored, *chosen]  # fmt: skip
    subprocess.run(words, cwd=ROOT, check=False)
    if report.exists():
        read_report(report.read_text(encoding="utf-8"), outcome)
    else:
        outcome.reason = "pytest did not come to its end"
    return outcome


def main(words: list[str]) -> int:
    """Try all; unknown arguments go to pip's install of torch, such as ``--index-url``."""
    tried = plan((ROOT / "constraints.txt").read_text(encoding="utf-8"),
                 (ROOT / "pyproject.toml").read_text(encoding="utf-8"))  # fmt: skip
    parser = argparse.ArgumentParser(prog="python -m tests.compat", allow_abbrev=False)
    parser.add_argument("--only", choices=tried, action="append")
    args, torch_args = parser.parse_known_args(words)
    FOLDER.mkdir(parents=True, exist_ok=True)
    outcomes = [attempt(name, *tried[name], torch_args) for name in args.only or tried]
    print("\n".join(str(outcome) for outcome in outcomes))
    return int(any(outcome.broken or outcome.reason for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
