"""``import fxlab`` loads torch and little else, and no later import hides a public name."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import fxlab
from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("ipywidgets", "anywidget", "IPython", "graphviz", "matplotlib", "onnx")
HEAVY += ("onnxruntime", "openvino", "hypothesis", "nbformat")


def fresh(code: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that sees the project."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=check,
        timeout=HANGS,
    )


def loaded_by(statement: str) -> set[str]:
    """Name the heavy packages that ``statement`` loads beyond those that torch itself loads."""
    code = f"import sys, torch; before = set(sys.modules)\n{statement}\n"
    code += f"print(*[m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    return set(fresh(code).stdout.split())


def submodules() -> list[str]:
    """Name every module of the package."""
    return [module.name for module in pkgutil.walk_packages(fxlab.__path__, "fxlab.")]


def test_import_fxlab_loads_no_widget_no_plot_and_no_runtime():
    assert loaded_by("import fxlab") == set()


def test_the_check_above_can_fail():
    assert loaded_by("import fxlab, ipywidgets, graphviz") >= {"ipywidgets", "graphviz"}


def test_the_lazy_names_of_the_explorer_are_there_without_being_loaded():
    code = (
        "import sys, fxlab; assert {'record', 'explore', 'Timeline'} <= set(dir(fxlab));"
        "assert 'fxlab.explorer.widget' not in sys.modules"
    )
    fresh(code)


def test_recording_in_a_plain_script_needs_no_widget():
    code = (
        "import torch, fxlab\n"
        "gm = fxlab.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))\n"
        "with fxlab.record(gm) as timeline: gm.graph.eliminate_dead_code()\n"
    )
    assert loaded_by(code) == set()


def test_with_torch_alone_one_can_trace_transform_record_run_and_write_a_page(bare):
    code = (
        "import sys, torch, fxlab\n"
        "from fxlab.models import FusionCases\n"
        "gm = fxlab.symbolic_trace(FusionCases().eval())\n"
        "with fxlab.record(gm) as timeline: fxlab.passes.fuse_conv_bn(gm)\n"
        "fxlab.passes.shape_prop(gm, torch.zeros(1, 4, 8, 8))\n"
        "timeline.to_html('story.html'); timeline.to_json('story.json')\n"
        "assert len(fxlab.Timeline.from_json('story.json').steps) == len(timeline.steps) > 10\n"
        "assert not {'numpy', 'ipywidgets', 'IPython', 'matplotlib'} & set(sys.modules)\n"
    )
    ran = bare("-c", code)
    assert ran.returncode == 0, ran.stderr
    told = bare("-c", "import ipywidgets")
    assert "No module named 'ipywidgets'" in told.stderr  # the environment is bare indeed


# Each call, by the name under which a user finds it: a submodule of the same name must not hide it.
CALLS = {
    "fxlab.symbolic_trace": "fxlab.symbolic_trace(model)",
    "fxlab.record": "fxlab.record(gm)",
    "fxlab.explore": "fxlab.explore(gm)",
    "fxlab.passes.shape_prop": "fxlab.passes.shape_prop(gm, x)",
    "fxlab.passes.fuse_conv_bn": "fxlab.passes.fuse_conv_bn(gm)",
    "fxlab.passes.cost": "fxlab.passes.cost(gm, x)",
    "fxlab.passes.amp": "fxlab.passes.amp(gm, torch.bfloat16)",
    "fxlab.passes.split_module": "fxlab.passes.split_module(gm, model, lambda node: 0)",
}


def test_no_submodule_hides_a_function_of_the_same_name():
    imports = "".join(f"import {name}\n" for name in submodules())
    calls = "".join(
        f"if hasattr({name.rpartition('.')[0]}, {name.rpartition('.')[2]!r}):\n    {call}\n"
        for name, call in CALLS.items()
    )
    code = (
        f"{imports}import torch\nimport fxlab\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()\n"
        "gm, x = fxlab.symbolic_trace(model), torch.ones(1, 2)\n"
        f"{calls}"
        "for name in ('fxlab.explore', 'fxlab.record', 'fxlab.passes.shape_prop'):\n"
        "    assert callable(eval(name)), name\n"
    )
    ran = fresh(code, check=False)
    assert ran.returncode == 0, ran.stderr


def test_every_public_name_resolves():
    missing = [name for name in fxlab.__all__ if not hasattr(fxlab, name)]
    assert missing == []
