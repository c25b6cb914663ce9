"""The command ``fxlab``: what can one do from a shell, without opening a notebook?

``fxlab lab`` starts JupyterLab on the first lecture; ``fxlab trace``, ``fxlab show`` and ``fxlab
draw`` capture a model, run passes over it and write what happened; ``fxlab paper`` sets the paper
beside this machine; ``fxlab release``, ``grade`` and ``new-exercise`` are a teacher's; ``fxlab
doctor`` prints what the kit finds around it. A command is one function that takes the parsed
arguments and returns an exit code: 0 for done, 1 for "could not" (the reason is on standard
error), 2 for a wrong command line, 130 when somebody stopped it. What takes long says on standard
error what it is doing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

from fxlab import measuring
from fxlab.arguments import count, new_file
from fxlab.core.errors import FxlabError
from fxlab.naming import (
    CommandError,
    WrongCommandLine,
    can_take,
    example_input,
    load,
    nearest,
    takes_a_module_alone,
    told,
)
from fxlab.surroundings import PACKAGES, START, Finding, start_notebook, surroundings, version_of
from fxlab.terminal import plain, print_json, say, write_any_letter

STANDARD_OUTPUT = Path("-")

# A teacher's commands; fxlab.teach.commands adds their arguments and runs them.
_TEACH = {
    "release": "make the students' notebooks from the masters",
    "grade": "grade a folder of submissions",
    "new-exercise": "start an exercise of your own",
}


def _print_findings(findings: Sequence[Finding], stream: TextIO | None = None) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        text = finding.found or f"missing; {finding.remedy}"
        print(f"{finding.name:{width}}  {text}", file=stream or sys.stdout)


def doctor(args: argparse.Namespace) -> int:
    """Print what the kit finds around it, as text to paste into an issue."""
    findings = surroundings()
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print_findings(findings)
    return 0


def lab(args: argparse.Namespace) -> int:
    """Start JupyterLab on the first lecture; unknown options go to JupyterLab."""
    needed = {"torch", "ipywidgets", "anywidget", "jupyterlab", "widget front end"}
    missing = [f for f in surroundings() if f.name in needed and not f.found]
    notebook = start_notebook()
    told = {"address": None, "notebook": notebook and str(notebook), "missing": []}
    if missing:
        print("fxlab lab can't start:", file=sys.stderr)
        _print_findings(missing, sys.stderr)
        if args.json:
            print_json({**told, "missing": [asdict(finding) for finding in missing]})
        return 1
    options = list(args.options)
    if notebook is None:
        print("The lectures are not here: clone the project to have them.", file=sys.stderr)
    else:
        options.append(f"--ServerApp.root_dir={notebook.parent.parent}")
        options.append(f"--LabApp.default_url=/lab/tree/{START.as_posix()}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in options:
        # Jupyter refuses to serve as root unless told; in a container there is nobody else.
        options.append("--allow-root")
    app = importlib.import_module("jupyterlab.labapp").LabApp
    if not args.json:
        return app.launch_instance(options) or 0
    server = app.initialize_server(options)
    # Its loop calls in order: by then it listens.
    server.io_loop.add_callback(print_json, {**told, "address": server.public_url})
    return server.start() or 0


def _pass(name: str) -> Any:
    """Find a pass that the command line names."""
    found = load(name, "fxlab.passes")
    kit = ":" not in name
    if not (takes_a_module_alone(found) if kit else callable(found) and can_take(found, None)):
        raise CommandError(
            f"{name} is no function that takes a module alone: write one, pass_(gm), that calls it"
        )
    return found


def _model(args: argparse.Namespace) -> Any:
    """Make the model that the command line names: a class is called, a function if told to."""
    from torch import nn

    found, returned = load(args.model, "fxlab.models"), False
    kit = ":" not in args.model
    if kit or args.call or isinstance(found, type):
        if isinstance(found, nn.Module) or not callable(found):
            raise CommandError(f"{args.model} is nothing to call: leave out --call")
        if not can_take(found):
            raise CommandError(
                f"{args.model} needs arguments: write a function that returns it, and --call that"
            )
        found, returned = found(), True
    if isinstance(found, nn.Module):
        found.train(args.train)
    elif not callable(found):
        kind = type(found).__name__
        raise CommandError(
            f"{args.model} returned no model and no function but something of type {kind}"
            if returned
            else f"{args.model} is no model and no function; it is of type {kind}"
        )
    return found


def _captured(args: argparse.Namespace) -> Any:
    """Capture the model that the command line names."""
    import fxlab

    model = _model(args)
    try:
        gm = fxlab.symbolic_trace(model)
    except FxlabError as error:
        raise CommandError(f"{error}{_if_a_maker(args, model)}") from error
    _refuse_a_maker(args, gm)
    return gm


def _if_a_maker(args: argparse.Namespace, model: Any) -> str:
    """Tell what to try with a function that may make a model: it can be called with nothing."""
    if isinstance(model, type(can_take)) and can_take(model):
        return f"\n  or, if {args.model} makes a model: add --call"
    return ""


def _refuse_a_maker(args: argparse.Namespace, gm: Any) -> None:
    """Tell who captured a function that makes a model how to capture the model instead.

    Raises:
        CommandError: If a module is in what the captured program returns.
    """
    from torch import nn
    from torch.utils import _pytree as pytree

    name = args.model.rpartition(":")[2]
    returned = next((node.args[0] for node in gm.graph.nodes if node.op == "output"), None)
    if isinstance(returned, nn.Module):
        raise CommandError(f"{name} returns a model: add --call")
    if any(isinstance(leaf, nn.Module) for leaf in pytree.tree_leaves(returned)):
        way = "write a function that returns it alone, and --call that"
        raise CommandError(f"{name} returns a model among other things: {way}")


def trace(args: argparse.Namespace) -> int:
    """Print the code, or the graph, of a captured model."""
    gm = _captured(args)
    if args.json:
        from fxlab.interop import graph_to_json

        print_json(graph_to_json(gm.graph))
    else:
        print(plain(str(gm.graph) if args.graph else gm.code.strip()))
    return 0


def show(args: argparse.Namespace) -> int:
    """Tell, step by step, what a capture and passes do to a model; write it where asked."""
    from fxlab.explorer import timeline_of
    from fxlab.explorer.sentences import plural
    from fxlab.explorer.static import text_table
    from fxlab.explorer.view import view

    passes = [_pass(name) for name in args.passes]
    inputs = tuple(example_input(text) for text in args.input) or None
    if args.check and inputs is None:
        raise WrongCommandLine(
            '--check compares outputs: it needs --input, like "f32[1, 3, 224, 224]"'
        )
    if args.check and not passes:
        raise WrongCommandLine("--check looks at what passes do: it needs --pass")
    written = [str(path) for path in (args.html, args.svg, args.json) if path is not None]
    if len(set(written)) < len(written):
        raise WrongCommandLine("--html, --svg and --json need a file each")
    model = _model(args)
    say(f"capturing {args.model}" + "".join(f", running {name}" for name in args.passes))
    start = time.perf_counter()
    timeline: Any = timeline_of(model, passes, inputs)
    if timeline.recorder.current is not None:  # else the capture failed
        _refuse_a_maker(args, timeline.recorder.current)
    last = len(timeline.steps)
    say(f"{plural(last, 'step')} in {time.perf_counter() - start:.1f} s")
    for path, write in (
        (args.html, timeline.to_html), (args.json, timeline.to_json),
        (args.svg, lambda path: timeline.to_svg(path, last)),
    ):  # fmt: skip
        if path is not None and path != STANDARD_OUTPUT:
            write(path)
            say(f"wrote {path}")
    # The last step says in one line what stopped it; the rest is for the error stream.
    table = text_table({**view(timeline), "error": ""}, limit=args.steps)
    if args.json == STANDARD_OUTPUT:
        say(table)
        print(timeline.to_json(indent=2), flush=True)
    else:
        print(plain(table))
    failure = timeline.failure
    if failure is not None:
        taught = isinstance(failure, FxlabError)
        why = failure if taught else told(failure) or f"{type(failure).__name__}: {failure}"
        hint = _if_a_maker(args, model) if timeline.recorder.current is None else ""
        say(f"stopped: {why}{hint}")
        return 1
    if args.check:
        return _checked(timeline.passes)
    if inputs is not None and timeline.recorder.reference.problem is not None:
        say(f"not run: {timeline.recorder.reference.problem}")
    return 0


def _checked(spans: Sequence[Any]) -> int:
    """Say which passes broke something; a program that can't run says nothing about a pass."""
    verdicts = [(span, span.same_output or {}) for span in spans]
    broke = [s.name for s, found in verdicts if s.lint or found.get("verdict") == "different"]
    refused = [found["text"] for _, found in verdicts if found.get("verdict") == "refused"]
    refused += [why for s in spans for why in s.kept if "which is no GraphModule" in why]
    if broke:
        say(f"not the same output, or not well formed: {', '.join(broke)}")
    if refused:
        say(refused[0])
    return int(bool(broke or refused))


def draw(args: argparse.Namespace) -> int:
    """Draw a captured model as boxes and arrows."""
    from fxlab.explorer.diagram import graph_dot, layout_program, render
    from fxlab.explorer.sentences import plural

    gm = _captured(args)
    if args.input:
        from fxlab.passes import shape_prop

        takes = gm.graph.find_nodes(op="placeholder")
        if len(args.input) > len(takes) and not any(str(n.target).startswith("*") for n in takes):
            wanted = plural(len(takes), "input")
            raise CommandError(f"{args.model} takes {wanted}; --input is given {len(args.input)}")
        shape_prop(gm, *(example_input(text) for text in args.input))
    dot = graph_dot(gm)
    say(f"drawing {plural(len(gm.graph.nodes), 'node')}")
    kind = args.output.suffix.lower()
    if kind == ".png":
        words = [layout_program() or "dot", "-Tpng", "-o", str(args.output)]
        subprocess.run(words, input=dot.source.encode("utf-8", "replace"), check=True, timeout=300)
    else:
        text = dot.source if kind == ".dot" else render(dot, "svg")
        args.output.write_text(text, encoding="utf-8")
    say(f"wrote {args.output}")
    if args.json:
        arrows = sum(len(node.all_input_nodes) for node in gm.graph.nodes)
        print_json({"written": [str(args.output)], "nodes": len(gm.graph.nodes), "arrows": arrows})
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
    path = new_file(text)
    if path.suffix.lower() not in (".svg", ".png", ".dot"):
        raise argparse.ArgumentTypeError(f"{text}: a picture goes to a .svg, .png or .dot file")
    return path


class _Parser(argparse.ArgumentParser):
    """Repeats a wrong word only as what may go to a terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(plain(message))


class _OneOrTwo(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if len(values) > 2:
            parser.error("--compare takes one file or two")
        setattr(namespace, self.dest, values)


def _parser(chosen: str = "") -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fxlab",
        description="See programs being captured and transformed.",
        epilog="`fxlab COMMAND --help` says more about one.",
    )
    parser.add_argument("--version", action="version", version=version_of("fxlab") or "unknown")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )

    command = commands.add_parser(
        "lab",
        help="start JupyterLab on the first lecture",
        description="Start JupyterLab on notebooks/00_start.ipynb and print its address.",
        epilog="All other options go to JupyterLab, for example --no-browser --port 8899.",
    )
    command.add_argument("--json", action="store_true", help="print its address as JSON")
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
    command.add_argument(
        "--html", type=new_file, metavar="FILE", help="write one page that needs no network"
    )
    command.add_argument(
        "--svg", type=new_file, metavar="FILE", help="write the picture of the last step"
    )
    command.add_argument(
        "--json", type=lambda text: STANDARD_OUTPUT if text == "-" else new_file(text),
        metavar="FILE", help="write the timeline; - prints it, and all else on the error stream",
    )  # fmt: skip
    command.add_argument("--steps", type=count, default=40, help="steps told of each pass (40)")
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
    command.add_argument(
        "-o",
        "--output",
        type=_picture_path,
        required=True,
        metavar="FILE",
        help=".svg, .png or .dot",
    )
    command.add_argument(
        "--input", action="append", default=[], metavar="SHAPE", help="write shapes on the boxes"
    )
    command.add_argument("--json", action="store_true", help="print what was drawn as JSON")
    command.set_defaults(run=draw, passes_on=False)

    command = commands.add_parser(
        "paper",
        help="set the paper's figures and tables beside this machine",
        description="List the paper's 8 figures and 5 tables: claim, the paper's number, this "
        "machine's, verdict, trap, lecture. Without options nothing is run: the numbers are those "
        "that the lectures found when they were last executed.",
        epilog="fxlab paper --run --out here.json; fxlab paper --compare there.json here.json",
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--run", dest="run_again", action="store_true",
        help="execute the lectures and measure all anew (minutes)",
    )  # fmt: skip
    what.add_argument(
        "--compare", type=Path, nargs="+", metavar="FILE", action=_OneOrTwo,
        help="set the machine of a results file beside the saved numbers, or two files",
    )  # fmt: skip
    command.add_argument(
        "--paper-size", action="store_true", help="with --run: the paper's sizes and repeats"
    )
    command.add_argument(
        "--only", metavar="EXHIBIT", help='its lecture\'s exhibits alone, as for "Figure 7"'
    )
    command.add_argument(
        "--out", type=new_file, metavar="FILE",
        help="with --run: write all samples and the machine's description as JSON",
    )  # fmt: skip
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print README's table")
    command.set_defaults(run=measuring.paper, passes_on=False)

    command = commands.add_parser(
        "bench",
        help="measure the kit beside torch.fx, as ratios",
        description="Run the benchmark scripts of a clone of the project, one after the other.",
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="core, record, ...; all if none")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=measuring.bench, passes_on=False)

    for name, purpose in _TEACH.items():
        command = commands.add_parser(name, help=purpose)
        if name == chosen:
            part = importlib.import_module("fxlab.teach.commands")
            part.ARGUMENTS[name](command)
            command.set_defaults(run=part.RUN[name], passes_on=False)

    command = commands.add_parser(
        "doctor",
        help="say what is installed, what is missing and how to get it",
        description="Print what the kit finds around it, as text to paste into an issue.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=doctor, passes_on=False)
    if chosen and chosen not in commands.choices:
        choice = ", ".join(commands.choices)
        parser.error(
            f"there is no {chosen}{nearest(chosen, commands.choices)}: give one of {choice}"
        )
    for command in commands.choices.values():  # whose usage helps more than that of `fxlab`
        command.set_defaults(refuse=command.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``fxlab``.

    Args:
        argv: The words after ``fxlab``; those of this process when None.

    Returns:
        The exit code: 0 done, 1 could not, 130 stopped by somebody.

    Raises:
        SystemExit: With 2 on a wrong command line, with 0 after ``--help``.

    Example:
        >>> main(["doctor", "--json"])  # doctest: +ELLIPSIS
        [
          {
            "name": "fxlab",
        ...
    """
    write_any_letter()
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(next((word for word in words if not word.startswith("-")), ""))
    if not words:
        parser.exit(2, parser.format_help())
    args, rest = parser.parse_known_args(words)
    if rest and not args.passes_on:
        several = args.command in ("show", "draw") and not rest[0].startswith("-")
        hint = " (--pass and --input take one word: give them several times)" if several else ""
        args.refuse(f"unrecognized arguments: {' '.join(rest)}{hint}")
    args.options = rest
    try:
        return args.run(args)
    except BrokenPipeError:  # `fxlab show ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        say(f"fxlab {args.command}: stopped")
        return 130
    except WrongCommandLine as error:
        args.refuse(str(error))
    except SystemExit as stop:
        if args.passes_on:
            raise
        say(f"fxlab {args.command}: the code ended the process, with {stop.code!r}")
    except BaseException as error:  # a user's code may raise what is no Exception
        say(f"fxlab {args.command}{_reason(error)}")
    return 1


def _reason(error: BaseException) -> str:
    """Say why a command could not: in the kit's words, or where a user's code stopped.

    Raises:
        BaseException: The error itself, if it is neither: then the kit is wrong.
    """
    extras = {distribution: extra for distribution, extra, _ in PACKAGES}
    if isinstance(error, ModuleNotFoundError) and error.name in extras:
        return f' needs {error.name}: python -m pip install "fxlab[{extras[error.name]}]"'
    if isinstance(error, CommandError | FxlabError):
        return f": {error}"
    users = told(error)
    if not users and isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f": {error.filename}: {error.strerror}"
    if not users and not isinstance(error, OSError | ValueError | subprocess.SubprocessError):
        raise error
    return f": {users or error}"


if __name__ == "__main__":
    sys.exit(main())
