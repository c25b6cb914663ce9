"""The command ``fxlab``: what can one do from a shell, without opening a notebook?

``fxlab lab`` starts JupyterLab on the first lecture; ``fxlab trace``, ``fxlab show`` and ``fxlab
draw`` capture a model, run passes over it and write what happened; ``fxlab paper`` lists the
paper's figures; ``fxlab doctor`` prints what the kit finds around it. A command is one function
that takes the parsed arguments and returns an exit code: 0 for done, 1 for "could not" (the reason
is on standard error), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from fxlab.core.errors import FxlabError

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


class CommandError(Exception):
    """What the command line named is not there, or is not what it should be."""


def load(name: str, home: str) -> Any:
    """Find what a word of the command line names.

    Args:
        name: A name in ``home``; or ``file.py:name``; or ``package.module:name``.
        home: The module of the kit whose own names need no prefix.

    Returns:
        The object. A file is imported under its own name, with its folder on the path, as if it
        had been run.

    Raises:
        CommandError: If there is no such file, module or name.

    Example:
        >>> load("MLP", "fxlab.models").__name__
        'MLP'
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        module = importlib.import_module(home)
        known = [word for word in module.__all__ if _is_nameable(getattr(module, word))]
        if attribute not in known:
            raise CommandError(
                f"{home} has no {attribute}: give file.py:name, package.module:name or one of "
                + ", ".join(known)
            )
        return getattr(module, attribute)
    if place.endswith(".py"):
        module = _import_file(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise CommandError(f"can't import {place}: {error}") from error
    if not hasattr(module, attribute):
        raise CommandError(f"{place} has no {attribute}")
    return getattr(module, attribute)


def _is_nameable(value: Any) -> bool:
    """Tell models and functions from the other public names of the kit's modules."""
    from torch import nn

    return inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module))


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64",
    "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


def example_input(text: str) -> Any:
    """Make a tensor as ``f32[1, 3, 224, 224]`` describes it.

    Args:
        text: One of f64, f32, f16, bf16, i64, i32, i16, i8, u8, bool, and the sizes in brackets.

    Returns:
        Normal random numbers, or zeros and ones for a dtype without fractions; the same each time.

    Raises:
        CommandError: If the text is not of that form.

    Example:
        >>> example_input("i64[2, 3]").dtype, example_input("f32[4]").shape
        (torch.int64, torch.Size([4]))
    """
    import torch

    match = re.fullmatch(r"(\w+)\[([\d\s,]*)\]", text.strip())
    if match is None or match[1] not in _DTYPES:
        raise CommandError(f'an input is written like "f32[1, 3, 224, 224]", not "{text}"')
    sizes = [int(size) for size in match[2].split(",") if size.strip()]
    dtype = getattr(torch, _DTYPES[match[1]])
    chance = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=chance).to(dtype)
    return torch.randint(0, 2, sizes, generator=chance).to(dtype)


def _model(args: argparse.Namespace) -> Any:
    """Make the model that the command line names: a class is called, a function if told to."""
    from torch import nn

    found = load(args.model, "fxlab.models")
    kit = ":" not in args.model
    if kit or args.call or isinstance(found, type):
        found = found()
    if isinstance(found, nn.Module):
        found.train(args.train)
    elif not callable(found):
        raise CommandError(
            f"{args.model} is no model and no function, but a {type(found).__name__}"
        )
    return found


def trace(args: argparse.Namespace) -> int:
    """Print the code, or the graph, of a captured model."""
    import fxlab

    gm = fxlab.symbolic_trace(_model(args))
    if args.json:
        from fxlab.interop import graph_to_json

        print(json.dumps(graph_to_json(gm.graph), indent=2))
    else:
        print(gm.graph if args.graph else gm.code.strip())
    return 0


def show(args: argparse.Namespace) -> int:
    """Tell, step by step, what a capture and passes do to a model; write it where asked."""
    from fxlab.explorer import timeline_of
    from fxlab.explorer.static import text_table
    from fxlab.explorer.view import view

    passes = [load(name, "fxlab.passes") for name in args.passes]
    inputs = tuple(example_input(text) for text in args.input) or None
    if args.check and inputs is None:
        raise CommandError('--check compares outputs: it needs --input, like "f32[1, 3, 224, 224]"')
    timeline: Any = timeline_of(_model(args), passes, inputs)
    last = len(timeline.steps)
    for path, write in (
        (args.html, timeline.to_html), (args.json, timeline.to_json),
        (args.svg, lambda path: timeline.to_svg(path, last)),
    ):  # fmt: skip
        if path is not None:
            write(path)
            print(f"wrote {path}", file=sys.stderr)
    print(text_table(view(timeline), limit=args.steps))
    if timeline.failure is not None:
        print(f"stopped: {timeline.failure}", file=sys.stderr)
        return 1
    changed = [
        span.name
        for span in timeline.passes
        if span.lint or (span.same_output or {}).get("verdict") in ("different", "refused")
    ]
    if args.check and changed:
        print(f"not the same output, or not well formed: {', '.join(changed)}", file=sys.stderr)
        return 1
    return 0


def draw(args: argparse.Namespace) -> int:
    """Draw a captured model as boxes and arrows."""
    import fxlab
    from fxlab.explorer.diagram import graph_dot, render

    gm = fxlab.symbolic_trace(_model(args))
    if args.input:
        from fxlab.passes import shape_prop

        shape_prop(gm, *(example_input(text) for text in args.input))
    dot = graph_dot(gm)
    text = dot.source if args.output.suffix == ".dot" else render(dot, "svg")
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def paper(args: argparse.Namespace) -> int:
    """List the paper's figures and tables: claim, number, trap, lecture."""
    from fxlab.paper import EXHIBITS

    if args.json:
        print(json.dumps([asdict(exhibit) for exhibit in EXHIBITS], indent=2))
        return 0
    for exhibit in EXHIBITS:
        print(f"{exhibit.title} (section {exhibit.section}): {exhibit.claim}")
        for word, text in (("paper", exhibit.number), ("beware", exhibit.trap)):
            if text:
                print(f"  {word}: {text}")
        print(f"  lecture: {exhibit.notebook}, {exhibit.minutes} minutes")
    return 0


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", help="resnet50 or another model of the kit; file.py:Name; package.module:name"
    )
    command.add_argument(
        "--call", action="store_true", help="Name is a function that returns the model: call it"
    )
    command.add_argument("--train", action="store_true", help="in train mode, not eval mode")


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".svg", ".dot"):
        raise argparse.ArgumentTypeError(f"{text}: a picture is written to a .svg or .dot file")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxlab",
        description="See programs being captured and transformed.",
        epilog="`fxlab COMMAND --help` says more about one.",
    )
    parser.add_argument("--version", action="version", version=_version("fxlab") or "unknown")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )

    command = commands.add_parser(
        "lab",
        help="start JupyterLab on the first lecture",
        description="Start JupyterLab on notebooks/00_start.ipynb and print its address.",
        epilog="All other options go to JupyterLab, for example --no-browser --port 8899.",
    )
    command.set_defaults(run=lab, passes_on=True)

    command = commands.add_parser(
        "trace",
        help="print the code of a captured model",
        description="Capture a model by symbolic tracing and print the code of its graph.",
    )
    _add_model(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--graph", action="store_true", help="print the nodes instead")
    form.add_argument("--json", action="store_true", help="print the graph as JSON")
    command.set_defaults(run=trace, passes_on=False)

    command = commands.add_parser(
        "show",
        help="tell what passes do to a model, edit by edit",
        description="Capture a model, run passes over it and tell every edit.",
        epilog="fxlab show resnet50 --pass fuse_conv_bn --html story.html",
    )
    _add_model(command)
    command.add_argument(
        "--pass", dest="passes", action="append", default=[], metavar="PASS",
        help="a pass of the kit, file.py:name or package.module:name; may be given several times",
    )  # fmt: skip
    command.add_argument(
        "--input", action="append", default=[], metavar="SHAPE",
        help='an input, like "f32[1, 3, 224, 224]"; once for each parameter',
    )  # fmt: skip
    command.add_argument("--html", type=Path, help="write one page that needs no network")
    command.add_argument("--svg", type=Path, help="write the picture of the last step")
    command.add_argument("--json", type=Path, help="write the timeline")
    command.add_argument("--steps", type=int, default=40, help="steps told of each pass (40)")
    command.add_argument(
        "--check", action="store_true", help="exit with 1 if a pass changes the output"
    )
    command.set_defaults(run=show, passes_on=False)

    command = commands.add_parser(
        "draw",
        help="draw a captured model as boxes and arrows",
        description="Capture a model and draw its graph with graphviz.",
    )
    _add_model(command)
    command.add_argument("-o", "--output", type=_picture_path, required=True, help=".svg or .dot")
    command.add_argument(
        "--input", action="append", default=[], metavar="SHAPE", help="write shapes on the boxes"
    )
    command.set_defaults(run=draw, passes_on=False)

    command = commands.add_parser(
        "paper",
        help="list the paper's figures and tables, and where to meet them",
        description="List the paper's 8 figures and 5 tables: claim, number, trap, lecture.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=paper, passes_on=False)

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
    try:
        return args.run(args)
    except ModuleNotFoundError as error:
        extra = {distribution: extra for distribution, extra, _ in _PACKAGES}.get(error.name or "")
        if extra is None:
            raise
        need = f'python -m pip install "fxlab[{extra}]"'
        print(f"fxlab {args.command} needs {error.name}: {need}", file=sys.stderr)
    except BrokenPipeError:  # `fxlab show ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CommandError, FxlabError, OSError) as error:
        print(f"fxlab {args.command}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
