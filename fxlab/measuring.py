"""How are the paper's figures measured anew, and the kit beside torch.fx?

``fxlab paper`` lists what the lectures found beside the paper's numbers, or executes them;
``fxlab bench`` runs the benchmark scripts. Both need a clone of the project to measure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fxlab.naming import CommandError, WrongCommandLine, nearest
from fxlab.surroundings import of_the_project, start_notebook
from fxlab.terminal import plain, print_json, say

# Runs a script as Python would, but for Ctrl-C: of that the command tells, without a traceback.
_ENDS_SILENTLY = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def paper(args: argparse.Namespace) -> int:
    """Set the paper's figures and tables beside this machine, or two machines side by side."""
    from fxlab import evidence

    if not args.run_again and (args.out is not None or args.paper_size):
        raise WrongCommandLine("--out and --paper-size say how to measure: they need --run")
    failed: list[str] = []
    exhibits = _exhibits(args.only)
    wanted = {name for exhibit in exhibits for name in (exhibit.title, exhibit.evidence)}

    def chosen(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        return [row for row in rows if args.only is None or row["exhibit"] in wanted]

    if args.run_again:
        found, failed = _measure_again(args, sorted({one.notebook for one in exhibits}))
    else:
        found = [evidence.load(path) for path in args.compare or ()] or [evidence.saved()]
        if len(found) == 1 and args.compare:
            found.insert(0, evidence.saved())
        if len(found) == 2:
            one, other = ("saved", *(path.stem for path in args.compare))[-2:]
            names = (f"1 {one}", f"2 {other}")
            return _print_rows(chosen(evidence.comparison(found[0], found[1], names)), args)
        (found,) = found
    code = _print_rows(chosen(evidence.overview(found)), args)
    for line in failed:
        say(line)
    return 1 if failed else code


def _exhibits(only: str | None) -> list[Any]:
    """Return the exhibits of the lecture that has one of them, or all."""
    from fxlab.paper import EXHIBITS

    wanted = only and only.lower()
    homes = {e.notebook for e in EXHIBITS
             if wanted in (None, e.title.lower(), e.evidence.lower())}  # fmt: skip
    if not homes:
        titles = ", ".join(exhibit.title for exhibit in EXHIBITS)
        raise WrongCommandLine(f"the paper has no {only}: give one of {titles}")
    return [exhibit for exhibit in EXHIBITS if exhibit.notebook in homes]


def _measure_again(args: argparse.Namespace, names: list[str]) -> tuple[list[Any], list[str]]:
    """Run lectures and write what they find."""
    from fxlab import evidence

    start = start_notebook()
    if start is None:
        raise CommandError("the lectures are not here: clone the project to run them")
    lectures = [start.parent / f"{name}.ipynb" for name in names]
    found, failed = evidence.run(lectures, paper_size=args.paper_size, progress=say)
    if args.out is not None:
        evidence.dump(found, args.out)
        say(f"wrote {args.out}")
    return found, failed


def _print_rows(rows: list[dict[str, str]], args: argparse.Namespace) -> int:
    """Print rows of texts as JSON, as a Markdown table, or one below the other, and the notes."""
    from fxlab import evidence

    if args.json:
        print_json(rows)
        return 0
    notes = evidence.footnotes(rows)
    if args.markdown:
        print(plain(evidence.markdown(rows)))
    else:
        for row in rows:
            (_, title), *rest = row.items()
            print(plain(title))
            for name, text in rest:
                if text:
                    print(plain(f"  {name}: {text}"))
    for note in notes:
        print(plain(f"\n{note}"))
    return 0


def bench(args: argparse.Namespace) -> int:
    """Run the benchmark scripts, each in a process of its own on one thread."""
    folder = of_the_project(Path("tests/bench"))
    if folder is None:
        raise CommandError("the benchmarks are not here: they come with a clone of the project")
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    wanted = args.names or list(scripts)
    for name in wanted:
        if name not in scripts:
            close = nearest(name, scripts)
            choice = ", ".join(scripts)
            raise WrongCommandLine(f"there is no benchmark {name}{close}: give one of {choice}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    results = []
    for number, name in enumerate(wanted, 1):
        say(f"[{number}/{len(wanted)}] {name}")
        words = [sys.executable, "-c", _ENDS_SILENTLY, str(scripts[name])]
        ran = subprocess.run(words, env=environment, text=True, check=False,
                             stdout=subprocess.PIPE if args.json else None)  # fmt: skip
        lines = (ran.stdout or "").splitlines()
        results.append({"name": name, "code": ran.returncode, "lines": lines})
    if args.json:
        print_json(results)
    return int(any(result["code"] for result in results))
