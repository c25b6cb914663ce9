"""The command ``fxlab``: what can one do from a shell, without opening a notebook?

``fxlab lab`` starts JupyterLab on the first lecture, ``fxlab doctor`` prints what the kit finds
around it. A command is one function that takes the parsed arguments and returns an exit code: 0
for done, 1 for "could not" (the reason is on standard error), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

START = Path("notebooks") / "00_start.ipynb"
SETTINGS = Path("share/jupyter/lab/settings/overrides.d/fxlab.json")

# What each part of the kit stands on: (distribution, extra that brings it, what for).
_PACKAGES = (
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


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package(distribution: str, extra: str, purpose: str) -> Finding:
    version = _version(distribution)
    wanted = f"fxlab[{extra}]" if extra else "fxlab"
    remedy = "" if version else f'for {purpose}: python -m pip install "{wanted}"'
    return Finding(distribution, version, remedy, extra)


def _front_end() -> Finding:
    """Compare ipywidgets in the kernel with its half in the browser: one generation or nothing."""
    kernel, browser = _version("ipywidgets"), _version("jupyterlab_widgets")
    name = "widget front end"
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
    version = _version("graphviz-pure")
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
        Finding("fxlab", _version("fxlab") or "a checkout, not installed"),
        Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
    ]
    findings += [_package(*package) for package in _PACKAGES]
    findings += [_front_end(), _dot(), _saved_state()]
    return findings


def _print_findings(findings: Sequence[Finding], stream: TextIO | None = None) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        text = finding.found or f"missing; {finding.remedy}"
        print(f"{finding.name:{width}}  {text}", file=stream or sys.stdout)


def doctor(args: argparse.Namespace) -> int:
    """Print what the kit finds around it, as text to paste into an issue."""
    findings = surroundings()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_findings(findings)
    return 0


def start_notebook() -> Path | None:
    """Find the first lecture: in this folder or one above it, else beside the package.

    Returns:
        The path of ``00_start.ipynb``, or None where the lectures are not (a plain
        ``pip install`` brings the package alone).
    """
    here = Path.cwd()
    places = [here, *here.parents, Path(__file__).resolve().parent.parent]
    return next((place / START for place in places if (place / START).is_file()), None)


def lab(args: argparse.Namespace) -> int:
    """Start JupyterLab on the first lecture; unknown options go to JupyterLab."""
    needed = {"torch", "ipywidgets", "anywidget", "jupyterlab", "widget front end"}
    missing = [f for f in surroundings() if f.name in needed and not f.found]
    if missing:
        print("fxlab lab can't start:", file=sys.stderr)
        _print_findings(missing, sys.stderr)
        return 1
    notebook = start_notebook()
    options = list(args.options)
    if notebook is None:
        print("The lectures are not here: clone the project to have them.", file=sys.stderr)
    else:
        options.append(f"--ServerApp.root_dir={notebook.parent.parent}")
        options.append(f"--LabApp.default_url=/lab/tree/{START.as_posix()}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in options:
        # Jupyter refuses to serve as root unless told; in a container there is nobody else.
        options.append("--allow-root")
    start = importlib.import_module("jupyterlab.labapp").main
    return start(options) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxlab",
        description="See programs being captured and transformed.",
        epilog="`fxlab COMMAND --help` says more about one.",
    )
    parser.add_argument("--version", action="version", version=_version("fxlab") or "unknown")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser(
        "lab",
        help="start JupyterLab on the first lecture",
        description="Start JupyterLab on notebooks/00_start.ipynb and print its address.",
        epilog="All other options go to JupyterLab, for example --no-browser --port 8899.",
    )
    command.set_defaults(run=lab, passes_on=True)

    command = commands.add_parser(
        "doctor",
        help="say what is installed, what is missing and how to get it",
        description="Print what the kit finds around it, as text to paste into an issue.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=doctor, passes_on=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``fxlab``.

    Args:
        argv: The words after ``fxlab``; those of this process when None.

    Returns:
        The exit code: 0 done, 1 could not.

    Raises:
        SystemExit: With 2 on a wrong command line, with 0 after ``--help``.

    Example:
        >>> main(["doctor", "--json"])  # doctest: +ELLIPSIS
        [
          {
            "name": "fxlab",
        ...
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.options = rest
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
