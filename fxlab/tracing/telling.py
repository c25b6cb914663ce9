"""How does a function get code that calls for what it otherwise asks without a method?

`x is None` and `type(x)` tell a Proxy nothing (paper, section 5.3). From the source of a user's
function comes here code that calls two given functions in their place and does the rest as before:
the file's statement is compiled once as it is, to see that it is the source, and once changed.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import linecache
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

BUILTINS = ("type", "callable")
"""Functions that answer for a Proxy without asking it."""
IDENTITY = frozenset(("is_", "is_not"))
"""Functions of `operator` that do."""


@functools.lru_cache(1000)
def telling(
    code: types.CodeType, file: str, ask_is: Callable[..., bool], ask_of: Callable[..., Any]
) -> types.CodeType | None:
    """Return code of the same source that calls for its questions; None if there is no source.

    Args:
        code: a function's.
        file: its file; code that differs only in that is equal.
        ask_is: called as `ask_is(a, b)` for `a is b`.
        ask_of: called as `ask_of((x,), type)` for `type(x)`, with a third argument for what the
            type is compared with; for `callable` and `operator.is_`, too.
    """
    try:
        tree = _tree("".join(linecache.getlines(file)))
        around = [s for s in tree.body if _first_line(s) <= code.co_firstlineno]
        pairs = _compiled(_At(tree, around[-1]), file, code.co_flags & _FUTURE)
    except (SyntaxError, ValueError, IndexError):
        return None
    calls = {_IS: ask_is, _OF: ask_of}
    return next((_with_functions(new, calls) for old, new in pairs if old == code), None)


_IS, _OF = "<fxlab is>", "<fxlab of>"


@functools.lru_cache(16)
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


class _At(NamedTuple):
    """A statement of a file."""

    tree: ast.Module
    statement: ast.stmt


@functools.lru_cache(64)
def _compiled(at: _At, file: str, flags: int) -> list[tuple[types.CodeType, types.CodeType]]:
    """Return each piece of code in a statement, as it is and with its calls.

    Python calls what the file has imported in a way of its own.
    """
    within = [s for s in at.tree.body if not isinstance(s, _SCOPES)]
    imports = [s for part in within for s in ast.walk(part) if isinstance(s, _IMPORTS)]
    asks = ast.fix_missing_locations(_Calls().visit(copy.deepcopy(at.statement)))
    modules = (ast.Module([*imports, part], []) for part in (at.statement, asks))
    plain, telling = (compile(m, file, "exec", flags, dont_inherit=True) for m in modules)
    return [*zip(_codes(plain), _codes(telling), strict=True)]


_IMPORTS = (ast.Import, ast.ImportFrom)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def _first_line(statement: ast.stmt) -> int:
    return min(s.lineno for s in (statement, *getattr(statement, "decorator_list", ())))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _with_functions(code: types.CodeType, calls: dict[Any, Any]) -> types.CodeType:
    """Put the functions themselves in the place of their names among the constants."""
    consts = (
        _with_functions(c, calls)
        if isinstance(c, types.CodeType)
        else calls.get(c, c)
        if isinstance(c, str)
        else c
        for c in code.co_consts
    )
    return code.replace(co_consts=tuple(consts))


class _Calls(ast.NodeTransformer):
    """Puts calls in the place of questions that ask no method."""

    def __init__(self) -> None:
        self.compared: dict[ast.Call, list[ast.expr]] = {}

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Change `a is b`; give `type(a)` what it is compared with."""
        left, kinds = node.left, node.comparators[0]
        parts = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
        plain = all(isinstance(part, (ast.Name, ast.Attribute)) for part in parts)
        if isinstance(left, ast.Call) and plain:
            self.compared[left] = [kinds]
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return node
        call = _call(_IS, node, node.left, node.comparators[0])
        return call if isinstance(node.ops[0], ast.Is) else _not(call)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Change `type(a)`, `callable(a)`, `operator.is_(a, b)`."""
        self.generic_visit(node)
        names = [getattr(node.func, field, "") for field in ("id", "attr")]
        asks = len(node.args) == 1 and names[0] in BUILTINS
        asks |= len(node.args) == 2 and not IDENTITY.isdisjoint(names)
        if not asks or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            return node
        values = ast.Tuple(node.args, ast.Load())
        return _call(_OF, node, values, node.func, *self.compared.get(node, []))

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        """Change `case None`."""
        self.generic_visit(node)
        pattern = node.pattern
        if isinstance(pattern, ast.MatchSingleton):
            subject = ast.Name("<subject>", ast.Load())
            call = _call(_IS, pattern, subject, ast.Constant(pattern.value))
            node.pattern = ast.copy_location(ast.MatchAs(name="<subject>"), pattern)
            node.guard = call if node.guard is None else ast.BoolOp(ast.And(), [call, node.guard])
        return node


def _call(name: str, place: Any, *args: ast.expr) -> ast.expr:
    """Return a call of a function by its name: of a method, since Python warns of text called."""
    method = ast.Attribute(ast.Constant(name), "__call__", ast.Load())
    return ast.copy_location(ast.Call(method, list(args), []), place)


def _not(value: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), value), value)
