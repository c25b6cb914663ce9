"""The arrows of the house go one way, and every file is small enough to read.

The imports are found by parsing, so that one inside a function counts as well.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import browser_ran, size

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fxlab"

# Room -> the rooms it may import. `models` and `surroundings` need nothing of ours; `fxlab` itself
# is the front door, through which notebooks, tests, teach and cli come, and nobody in the house.
ROOMS = {
    "core": set(),
    "models": set(),
    "bars": set(),
    "paper": {"bars", "surroundings"},
    "surroundings": set(),
    "evidence": {"paper"},
    "spread": {"paper"},
    "terminal": set(),
    "arguments": set(),
    "naming": {"core"},
    "measuring": {"evidence", "naming", "paper", "surroundings", "terminal"},
    "display": {"core"},
    "interop": {"core", "tracing"},
    "tracing": {"core"},
    "passes": {"core", "surroundings"},
    "backends": {"core", "passes"},
    "explorer": {"core", "display", "interop", "passes"},
    "teach": {
        "core",
        "interop",
        "passes",
        "backends",
        "explorer",
        "models",
        "paper",
        "arguments",
        "terminal",
        "fxlab",
    },
    "cli": {
        "core",
        "interop",
        "passes",
        "backends",
        "explorer",
        "models",
        "paper",
        "arguments",
        "evidence",
        "measuring",
        "naming",
        "surroundings",
        "teach",
        "terminal",
        "fxlab",
    },
}
# What core may take from torch's own fx and ao packages.
TORCH_FX = re.compile(
    r"torch\.fx\.(proxy\.TraceError|_symbolic_trace|operator_schemas"
    r"|experimental\.symbolic_shapes)\b"
)
TORCH_FX_FREE = {"interop", "teach", "cli"}
WIDGETS = {"ipywidgets", "anywidget", "IPython"}
WIDGET_FILES = {"explorer/widget.py", "explorer/playground.py"}
STANDARD_AND_TORCH = {"core", "models"}


def room_of(path: Path, package: Path = PACKAGE) -> str:
    """Name the room of the house that a file is in: its folder, or the file itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return "fxlab" if parts == ("__init__",) else parts[0]


def imports(source: str, package: str) -> set[str]:
    """Name every module that ``source`` imports, also inside functions; relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found.update(a.value for a in node.args if isinstance(a, ast.Constant))
    return {str(name) for name in found}


def rooms_imported(names: set[str], rooms: set[str]) -> set[str]:
    """Name the rooms that the module ``names`` are in."""
    found = set()
    for name in names:
        if name == "fxlab" or name.startswith("fxlab."):
            second = name.split(".")[1] if "." in name else ""
            found.add(second if second in rooms else "fxlab")
    return found


def files() -> list[Path]:
    """List the package's Python files."""
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Name the modules that the file at ``path`` imports."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return imports(path.read_text(encoding="utf-8"), package)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_along_the_arrows(path):
    room = room_of(path)
    if room not in ROOMS:  # the front door, and the aliases of torch.fx's module paths
        return
    allowed = ROOMS[room] | {room}
    if path.relative_to(PACKAGE).as_posix() == "explorer/playground.py":
        allowed |= {"models"}
    assert rooms_imported(imports_of(path), ROOMS.keys() | {"fxlab"}) - allowed == set()


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_the_listed_parts_of_torch_fx_are_used(path):
    if room_of(path) in TORCH_FX_FREE or path.name == "foreign.py":
        return
    used = {
        name
        for name in imports_of(path)
        if re.match(r"torch\.(fx|ao)\b", name) and not TORCH_FX.match(name)
    }
    assert used == set()


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_widgets_are_imported_in_widget_files_only(path):
    name = path.relative_to(PACKAGE).as_posix()
    used = {module.split(".")[0] for module in imports_of(path)} & WIDGETS
    assert name in WIDGET_FILES or used == set()


def test_core_and_models_import_torch_and_the_standard_library_only():
    import sys

    for path in files():
        if room_of(path) in STANDARD_AND_TORCH:
            tops = {name.split(".")[0] for name in imports_of(path)}
            assert tops - sys.stdlib_module_names - {"torch", "fxlab"} == set(), path.name


def test_the_parser_of_imports_sees_what_could_hide():
    source = (
        "import os, fxlab.core.node\n"
        "def f():\n"
        "    from ..passes import cost\n"
        "    from . import lanes\n"
        "    import importlib\n"
        "    importlib.import_module('fxlab.teach')\n"
    )
    found = imports(source, "fxlab.explorer")
    assert {
        "fxlab.core.node",
        "fxlab.passes.cost",
        "fxlab.explorer.lanes",
        "fxlab.teach",
    } <= found
    assert rooms_imported(found, ROOMS.keys() | {"fxlab"}) == {
        "core",
        "passes",
        "explorer",
        "teach",
    }


def test_every_file_and_the_core_stay_within_their_budgets():
    assert size.over_budget(size.python_files()) == []


def test_a_file_or_core_over_budget_is_named():
    big = size.Size(code=451, all=460)
    assert "fxlab/a.py: 451 of code" in size.over_budget({"fxlab/a.py": big})[0]
    core = {f"fxlab/core/{i}.py": size.Size(400, 650) for i in range(8)}
    assert size.over_budget(core)[0].startswith("fxlab/core: 3200 of code, 5200 in all")


def test_blank_lines_comments_and_docstrings_are_no_code():
    source = '"""Doc.\n\nMore.\n"""\n\n# why\nx = """a\n\nb"""  # three lines of code\n\n\n'
    source += 'def f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert size.count(source) == size.Size(code=7, all=16)


def test_every_module_opens_with_a_docstring():
    bare = [
        path.name
        for path in files()
        if ast.get_docstring(ast.parse(path.read_text("utf-8"))) is None
    ]
    assert bare == []


def test_a_report_without_browser_tests_or_with_skipped_ones_is_told():
    case = '<testcase classname="tests.browser.test_lab" name="t">{}</testcase>'
    report = "<testsuites><testsuite>{}</testsuite></testsuites>"
    assert browser_ran.browser_cases(report.format("")) == (0, 0)
    assert browser_ran.browser_cases(report.format(case.format(""))) == (1, 0)
    skipped = case.format("<skipped/>")
    assert browser_ran.browser_cases(report.format(skipped + case.format(""))) == (1, 1)
