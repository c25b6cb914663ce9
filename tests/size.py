"""Count lines of code: no blank line, no comment, no docstring.

`make size` prints the table and fails over the budgets; tests/test_architecture.py uses the same
functions.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_CODE, FILE_ALL = 450, 700
CORE_CODE, CORE_ALL = 3000, 5000
VIEWER_BYTES, VIEWER_LINE = 64 * 1024, 120

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """Lines of code and lines in all of one file or of many."""

    code: int
    all: int

    def __add__(self, other: Size) -> Size:
        return Size(self.code + other.code, self.all + other.all)


def count(source: str) -> Size:
    """Count the lines of ``source`` that hold code, and all of its lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(len(code - docstrings), source.count("\n"))


def python_files(folder: Path = ROOT / "fxlab") -> dict[str, Size]:
    """Sizes of every Python file under ``folder``, by path relative to the project."""
    return {
        path.relative_to(ROOT).as_posix(): count(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


def over_budget(sizes: dict[str, Size]) -> list[str]:
    """Say which budget is exceeded, by which file and by how much."""
    found = []
    for name, size in sizes.items():
        if size.code > FILE_CODE or size.all > FILE_ALL:
            found.append(
                f"{name}: {size.code} of code, {size.all} in all ({FILE_CODE}, {FILE_ALL})"
            )
    core = sum((s for n, s in sizes.items() if n.startswith("fxlab/core/")), Size(0, 0))
    if core.code > CORE_CODE or core.all > CORE_ALL:
        found.append(
            f"fxlab/core: {core.code} of code, {core.all} in all ({CORE_CODE}, {CORE_ALL})"
        )
    viewer = [ROOT / "fxlab/explorer" / name for name in ("viewer.js", "viewer.css")]
    texts = [path.read_text(encoding="utf-8") for path in viewer if path.exists()]
    written = sum(len(text.encode()) for text in texts)
    if written > VIEWER_BYTES:
        found.append(f"viewer.js + viewer.css: {written} bytes ({VIEWER_BYTES})")
    if any(len(line) > VIEWER_LINE for text in texts for line in text.splitlines()):
        found.append(f"viewer.js or viewer.css has a line over {VIEWER_LINE}")
    return found


def main() -> int:
    """Print the table; return 1 over a budget."""
    sizes = python_files()
    folders: dict[str, Size] = {}
    for name, size in sizes.items():
        print(f"{size.code:6} {size.all:6}  {name}")
        folder = name.rsplit("/", 1)[0]
        folders[folder] = folders.get(folder, Size(0, 0)) + size
    print("  code    all  folder")
    for folder, size in folders.items():
        print(f"{size.code:6} {size.all:6}  {folder}")
    found = over_budget(sizes)
    for line in found:
        print(f"over budget: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
