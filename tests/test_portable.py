"""What other systems lack is not needed: the package works where POSIX's names are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parent.parent

# Windows has none of these; macOS has no /proc and no fork that is safe with threads.
WITHOUT_POSIX = """
import contextlib, faulthandler, importlib, os, pkgutil, signal, sys
for name in ("torch", "ipywidgets", "anywidget", "matplotlib.pyplot", "graphviz", "nbclient",
             "nbformat", "hypothesis", "hypothesis.strategies", "onnx", "onnxruntime", "openvino"):
    with contextlib.suppress(ImportError):  # they ask which system it is, and this one is POSIX
        importlib.import_module(name)
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for place, names in (
    (os, "fork forkpty killpg setsid getuid geteuid getgid mkfifo nice sched_setaffinity"),
    (signal, "SIGKILL SIGUSR1 SIGALRM alarm setitimer"), (faulthandler, "register"),
):
    for name in names.split():
        if hasattr(place, name):
            delattr(place, name)
"""
USE = """
import fxlab, fxlab.teach
for module in pkgutil.walk_packages(fxlab.__path__, "fxlab."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("fxlab") and error.name not in ("resource", "fcntl"), error
from fxlab import cli
assert cli.main(["trace", "MLP"]) == 0
assert cli.main(["doctor", "--json"]) == 0
assert cli.main(["show", "MLP", "--pass", "dce", "--html", "a page.html", "--svg", "b.svg"]) == 0
def my_dce(gm):
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    return gm
assert fxlab.teach.check("2.2", my_dce).status == "pass"
"""


@pytest.mark.parametrize("name", ["fork", "SIGUSR1"])
def test_the_names_are_gone_where_the_next_test_says_so(name, tmp_path):
    ask = f"\nprint(hasattr(os, {name!r}) or hasattr(signal, {name!r}))"
    assert fresh(WITHOUT_POSIX + ask, tmp_path).stdout.split()[-1] == "False"


def test_the_package_is_imported_and_used_without_posix(tmp_path):
    ran = fresh(WITHOUT_POSIX + USE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "a page.html").stat().st_size > 10_000


STAGES = """
import multiprocessing, torch, fxlab
from fxlab.passes import pipeline_stages, run_pipeline

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.ones(4, 4)
    stages = pipeline_stages(fxlab.symbolic_trace(model), (x,), 2)
    run = run_pipeline(stages, (x,), microbatches=2)
    assert torch.equal(run.output, model(x))
    print(len(set(run.processes)))
"""


def test_a_pipeline_in_a_script_runs_where_processes_are_spawned(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(STAGES, "utf-8")
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=HANGS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == "2"


def fresh(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that sees the project, in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=HANGS,
    )  # fmt: skip
