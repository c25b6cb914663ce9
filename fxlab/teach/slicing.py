"""Which lines of a student's notebook does an answer need?

A grader runs no notebook from top to bottom: it takes the cell that defines the answer, and from
the other cells the imports, functions, classes and values that it reads, directly or through
others. So cells may be missing, doubled, in another order, or broken, and only the exercise that
needs a broken line is lost. This runs where the student's code runs: reading a program is its risk.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import symtable
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAGIC = re.compile(r"^(\s*)(?:[%!?].*|[\w.]+\?{1,2}\s*)$", re.MULTILINE)
SKIPPED = ("%%bash", "%%html", "%%javascript", "%%writefile", "%%sh", "%%latex", "%%markdown")
# Calls at the level of a cell that prepare what an answer reads.
PREPARING = frozenset(
    "wrap has_side_effect pure manual_seed setattr delattr append add update extend insert "
    "setdefault register_buffer register_parameter add_module register".split()
)


@dataclass
class Statement:
    """One statement at the level of a cell.

    Attributes:
        cell: Its cell's number.
        node: Its syntax tree.
        binds: Names that it defines.
        changes: Names whose object it changes.
    """

    cell: int
    node: ast.stmt
    binds: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)

    @functools.cached_property
    def reads(self) -> set[str]:
        """Names of the notebook's level that it reads; few statements are asked."""
        try:
            return _read(symtable.symtable(ast.unparse(self.node), "cell", "exec"))
        except (SyntaxError, RecursionError, ValueError):
            return {part.id for part in ast.walk(self.node) if isinstance(part, ast.Name)}


def plain(source: str) -> str:
    """A cell's text with IPython's own lines taken out; line numbers stay."""
    if source.lstrip().startswith(SKIPPED):
        return ""
    return MAGIC.sub(lambda found: found[1] + "pass", source)


def statements(cells: Iterable[str]) -> tuple[list[Statement], dict[int, str]]:
    """The statements of all cells, and cell number -> why it could not be read."""
    found: list[Statement] = []
    broken: dict[int, str] = {}
    for number, source in enumerate(cells):
        try:
            tree = ast.parse(plain(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            broken[number] = f"{type(error).__name__}{f' in line {line}' if line else ''}: " + str(
                getattr(error, "msg", error)
            )
            continue
        for node in tree.body:
            found.append(Statement(number, node, _bound(node), _changed(node)))
    return found, broken


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = {part.id for part in _targets(node) if isinstance(part, ast.Name)}
    for inner in _inner(node):
        names |= _bound(inner)
    return names


def _inner(node: ast.stmt) -> list[ast.stmt]:
    """The statements inside a loop, branch, with or try."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    found: list[ast.stmt] = []
    for name in ("body", "orelse", "finalbody"):
        found += getattr(node, name, ())
    for handler in getattr(node, "handlers", ()):
        found += handler.body
    return found


def _changed(node: ast.stmt) -> set[str]:
    names: set[str] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        stack += _inner(one)
        for part in _targets(one):
            root = part
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root is not part:
                names.add(root.id)
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            names |= _prepared(one.value)
    return names


def _targets(node: ast.stmt) -> list[ast.expr]:
    found: list[Any] = []
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    flat = []
    while found:
        one = found.pop()
        if isinstance(one, ast.Tuple | ast.List):
            found += one.elts
        else:
            flat.append(one.value if isinstance(one, ast.Starred) else one)
    return flat


def _prepared(call: ast.Call) -> set[str]:
    """The names that a bare call prepares: `TABLE.append(x)`, `fxlab.wrap("f")`, `wrap(f)`."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in PREPARING:
        return set()
    names = {arg.id for arg in call.args if isinstance(arg, ast.Name)}
    if name in ("setattr", "delattr"):
        names = {arg.id for arg in call.args[:1] if isinstance(arg, ast.Name)}
    names |= {
        arg.value
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    }
    root = function
    while isinstance(root, ast.Attribute):
        root = root.value
    return names | ({root.id} if isinstance(root, ast.Name) else set())


def _read(table: symtable.SymbolTable) -> set[str]:
    names, stack = set(), [table]
    while stack:
        one = stack.pop()
        stack += one.get_children()
        for symbol in one.get_symbols():
            top = one.get_type() == "module"
            if (top and symbol.is_referenced()) or (not top and symbol.is_global()):
                names.add(symbol.get_name())
    return names


def is_stub(node: ast.stmt) -> bool:
    """Whether a definition still raises NotDone."""
    return any(
        isinstance(part, ast.Raise) and "NotDone" in ast.dump(part) for part in ast.walk(node)
    )


def answer(found: list[Statement], name: str, marked: int | None = None) -> list[Statement]:
    """The statements that the answer `name` needs, in the notebook's order.

    Args:
        found: All statements.
        name: What the exercise asks to define.
        marked: Number of the cell that nbgrader's id marks as the answer's, if there is one.

    Returns:
        [] when no cell defines `name`. Of several definitions the last that is not the stub
        counts, else the last.
    """
    definitions = [one for one in found if name in one.binds]
    if not definitions:
        return []
    written = [one for one in definitions if not is_stub(one.node)] or definitions
    own = [one for one in written if one.cell == marked]
    home = (own or written)[-1]
    beside = _names_of(found, home.cell)
    for one in found:
        if one.cell == home.cell:
            one.changes |= _handed_to(one.node, beside)
    needed = {name} | beside
    chosen = {id(home)}
    again = True
    while again:
        again = False
        for one in found:
            if id(one) in chosen or (name in one.binds and one is not home):
                continue
            star = isinstance(one.node, ast.ImportFrom) and one.node.names[0].name == "*"
            if star or needed & (one.binds | one.changes):
                chosen.add(id(one))
                again = True
        for one in found:
            if id(one) in chosen and not one.reads <= needed:
                needed |= one.reads
                again = True
    return [one for one in found if id(one) in chosen]


def _handed_to(node: ast.stmt, own: set[str]) -> set[str]:
    """The names that a bare call gives to a function of the same cell: `install(MyProxy)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return set()
    if call.func.id not in own:
        return set()
    return {arg.id for arg in call.args if isinstance(arg, ast.Name)}


def _names_of(found: list[Statement], cell: int) -> set[str]:
    """What else the answer's own cell defines: helpers that it may look up by name."""
    return {name for one in found if one.cell == cell for name in one.binds}


def run(
    chosen: list[Statement], sources: list[str], space: dict[str, Any], label: str = "cell"
) -> list[tuple[Statement, BaseException]]:
    """Run statements; those that fail are tried again after the others, until none gets further.

    Returns:
        What still fails, with its error.
    """
    for number in {one.cell for one in chosen}:
        text = plain(sources[number])
        name = f"<{label} {number + 1}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    left, failed = chosen, []
    while True:
        failed = []
        for one in left:
            try:
                code = compile(ast.Module([one.node], []), f"<{label} {one.cell + 1}>", "exec")
                exec(code, space)
            except (Exception, SystemExit) as error:
                failed.append((one, error))
        if not failed or len(failed) == len(left):
            return failed
        left = [one for one, _ in failed]
