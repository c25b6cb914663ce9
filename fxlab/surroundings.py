"""What is installed around the kit, what is missing, and how does one get it?

``fxlab doctor`` prints these findings as text to paste into an issue, and ``fxlab lab`` refuses to
start without what it needs. Nothing is imported, and no path of the machine is in a finding.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

START = Path("notebooks") / "00_start.ipynb"
SETTINGS = Path("share/jupyter/lab/settings/overrides.d/fxlab.json")

# What each part of the kit stands on: (distribution, extra that brings it, what for).
PACKAGES = (
    ("torch", "", "everything"),
    ("ipywidgets", "lab", "the explorer"),
    ("anywidget", "lab", "the explorer"),
    ("jupyterlab", "lab", "`fxlab lab`"),
    ("jupyterlab_widgets", "lab", "the explorer's front end in JupyterLab"),
    ("graphviz", "lab", "the classic picture"),
    ("matplotlib", "lab", "the figures of the paper"),
    ("nbformat", "teach", "handing out and grading exercises"),
    ("nbclient", "teach", "handing out and grading exercises"),
    ("hypothesis", "teach", "counterexamples to an exercise"),
    ("onnx", "lower", "lowering to a device"),
    ("onnxruntime", "lower", "lowering to a device"),
    ("openvino", "lower", "lowering to a device"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that the kit looked for around itself.

    Attributes:
        name: What was looked for.
        found: Its version or place; empty when it is missing or does not fit.
        remedy: What to do when it is missing; empty when it was found.
        part: The extra that needs it; empty for the core.
    """

    name: str
    found: str
    remedy: str = ""
    part: str = ""


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution; empty when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package(distribution: str, extra: str, purpose: str) -> Finding:
    version = version_of(distribution)
    wanted = f"fxlab[{extra}]" if extra else "fxlab"
    remedy = "" if version else f'for {purpose}: python -m pip install "{wanted}"'
    return Finding(distribution, version, remedy, extra)


def _front_end() -> Finding:
    """Compare ipywidgets in the kernel with its half in the browser: one generation or nothing."""
    kernel, browser = version_of("ipywidgets"), version_of("jupyterlab_widgets")
    name = "widget front end"
    if kernel and version_of("google-colab"):
        return Finding(name, f"Colab's own, with ipywidgets {kernel}", "", "lab")
    if not kernel or not browser:
        return Finding(name, "", 'python -m pip install "fxlab[lab]"', "lab")
    generation = {"8": "3", "7": "1"}.get(kernel.split(".")[0], "3")
    if browser.split(".")[0] != generation:
        remedy = (
            f"ipywidgets {kernel} wants jupyterlab_widgets {generation}, not {browser}: "
            "python -m pip install --upgrade ipywidgets jupyterlab_widgets"
        )
        return Finding(name, "", remedy, "lab")
    return Finding(name, f"ipywidgets {kernel} with jupyterlab_widgets {browser}", "", "lab")


def _dot() -> Finding:
    if shutil.which("dot"):
        return Finding("dot", "the system's graphviz", "", "lab")
    version = version_of("graphviz-pure")
    if version:
        return Finding("dot", f"graphviz-pure {version}", "", "lab")
    remedy = "install your system's graphviz, or: python -m pip install graphviz-pure"
    return Finding("dot", "", remedy, "lab")


def _saved_state() -> Finding:
    name = "widgets saved with notebooks"
    if (Path(sys.prefix) / SETTINGS).is_file():
        return Finding(name, "yes", "", "lab")
    remedy = (
        "JupyterLab: Settings > Save Widget State Automatically "
        "(a reopened notebook shows its explorers only then)"
    )
    return Finding(name, "", remedy, "lab")


def surroundings() -> list[Finding]:
    """Look for everything that some part of the kit needs.

    Returns:
        One finding for each thing looked for, the core's first. Nothing is imported but torch,
        and no path of the machine is in a finding.

    Example:
        >>> surroundings()[2].name
        'torch'
    """
    findings = [
        Finding("fxlab", version_of("fxlab") or "a checkout, not installed"),
        Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
    ]
    findings += [_package(*package) for package in PACKAGES]
    findings += [_front_end(), _dot(), _saved_state()]
    return findings


def start_notebook() -> Path | None:
    """Find the first lecture: in this folder or one above it, else beside the package.

    Returns:
        The path of ``00_start.ipynb``, or None where the lectures are not (a plain
        ``pip install`` brings the package alone).
    """
    return of_the_project(START)


def of_the_project(part: Path) -> Path | None:
    """Find `part` of the project, which does not come with the package, or return None."""
    here = Path.cwd()
    places = [here, *here.parents, Path(__file__).resolve().parent.parent]
    return next((place / part for place in places if (place / part).exists()), None)


def tidy() -> None:
    """Free what nobody holds any more, and give its pages back to the system where that can be.

    Graphs and modules stand in circles, which only the collector frees; and C's allocator keeps
    what was freed, so that one measured program would still weigh on the machine of the next.

    Example:
        >>> tidy()
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)
