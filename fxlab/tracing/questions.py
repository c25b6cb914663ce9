"""What does a program's code ask or do that no Proxy is told of?

`x is None` and `type(x)` ask no method of the value, and an assignment to a global calls none, so
tracing (paper, section 5.3) bakes the one answer that a Proxy gives and forgets the other. They can
be read from the bytecode of the functions that a trace goes through, before it begins; and what a
frame does with the answer that it gets just now, from its code and source.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import functools
import itertools
import linecache
import re
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxlab.core.errors import Frame, is_users
from fxlab.tracing.bytecode import Step, loads, steps

BUILTINS = ("type", "callable")
"""Functions that answer for a Proxy without asking it."""
_DRAWS = re.compile(
    r"\w*rand\w*|choices?|shuffle|sample|uniform_?|gauss|normal_?|bernoulli_?|\w*dropout\w*|init"
).fullmatch


@dataclass
class Facts:
    """What the code of one function shows.

    Attributes:
        none: Parameter -> the place where it is compared with None.
        same: Parameter -> the place where it is compared by `is` with something else.
        builtins: (one of `BUILTINS`, parameter) -> the place where it is asked of that.
        truth: Variable -> the place where it is compared with True or False by `is`.
        names: Global names that it reads.
        stored: Global names that it assigns.
        catches: Whether it has a `try` with an `except`, or suppresses exceptions.
        draws: Whether one of the names may draw random numbers.
        writes: Whether it may write into a tensor: an in-place operator or method, an item, `out=`.
    """

    none: dict[str, Frame] = field(default_factory=dict)
    same: dict[str, Frame] = field(default_factory=dict)
    builtins: dict[tuple[str, str], Frame] = field(default_factory=dict)
    truth: dict[str, Frame] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    catches: bool = False
    draws: bool = False
    writes: bool = False


_facts: weakref.WeakKeyDictionary[Any, Facts] = weakref.WeakKeyDictionary()


def facts(function: types.FunctionType) -> Facts:
    """Return what the code of a function shows; worked out once for each function."""
    found = _facts.get(function)
    if found is None:
        found = _facts[function] = Facts()
        code = function.__code__
        parameters, todo = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], [code]
        while todo:
            code = todo.pop()
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            found.names.update(code.co_names)
            found.writes |= any(isinstance(c, tuple) and "out" in c for c in code.co_consts)
            _read(code, found, parameters if code is function.__code__ else code.co_freevars)
        found.catches |= "suppress" in found.names
        found.draws = any(map(_DRAWS, found.names))
        found.writes |= any(name[-1:] == "_" != name[-2:-1] for name in found.names)
        found.writes |= "load_state_dict" in found.names
    return found


def _read(code: types.CodeType, found: Facts, parameters: tuple[str, ...]) -> None:
    last: Any = ""
    before, known = "", steps(code)
    for i, (name, value, line, _) in enumerate(known, 1):
        place = (code.co_filename, line, code.co_name)
        found.catches |= name in _CATCHES
        found.writes |= name in _WRITES or (name == "BINARY_OP" and value.endswith("="))
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found.stored.add(value)
        elif name in ("LOAD_FAST", "LOAD_DEREF"):
            if last in BUILTINS and value in parameters:
                found.builtins.setdefault((last, value), place)
            if value in parameters and _is_compared(known, i, parameters):
                found.same.setdefault(value, place)
            before, last = value, "variable"
            continue
        elif last == "variable" and (name.endswith("NONE") or (name, value) == _LOAD_NONE):
            if before in parameters:
                found.none.setdefault(before, place)
        elif last == "variable" and name == "LOAD_CONST" and (value is True or value is False):
            last = "truth"
            continue
        elif last == "truth" and name == "IS_OP":
            found.truth.setdefault(before, place)
        last = value if name.startswith("LOAD_GLOBAL") and value in BUILTINS else ""


def _is_compared(known: Sequence[Step], i: int, parameters: tuple[str, ...]) -> bool:
    """Say whether what the step before `i` loads is compared by `is`, but not with None.

    Nor with a variable: what was computed is another object than an input.
    """
    rest = known[i : i + 6]
    if not _is_identified(rest) or rest[0][:2] == _LOAD_NONE:
        return False
    right = rest[0].opname == "IS_OP"
    other = known[i - 2] if right else rest[0]
    variable = other.opname in ("LOAD_FAST", "LOAD_DEREF") and other.argval not in parameters
    return not variable or (not right and rest[1].opname == "LOAD_ATTR")


_LOAD_NONE = ("LOAD_CONST", None)
_CATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")
_WRITES = frozenset((
    "STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR", "DELETE_SUBSCR",
    *(f"INPLACE_{name}" for name in "ADD SUBTRACT MULTIPLY TRUE_DIVIDE FLOOR_DIVIDE MODULO POWER "
      "MATRIX_MULTIPLY LSHIFT RSHIFT AND OR XOR".split())))  # fmt: skip


def reachable(*functions: tuple[Any, type]) -> dict[types.FunctionType, Facts]:
    """Return users' functions, and those of users' files that their code may call by name.

    That is: what a global, a module's global or a closure holds, and methods of a class.

    Args:
        functions: Functions, each with the class whose methods it may call.
    """
    todo, found = list(functions), dict[types.FunctionType, Facts]()
    for given, owner in todo:  # grows meanwhile
        function = given
        while isinstance(function, _FUNCTIONS) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if (
            isinstance(function, types.FunctionType)
            and function not in found
            and is_users(function.__code__.co_filename)
        ):
            shown = found[function] = facts(function)
            names, table = shown.names, function.__globals__
            values = [table[name] for name in names & table.keys()]
            values += contents(function.__closure__ or ())
            for value in (owner, *values) if owner is not object else values:
                if isinstance(value, _FUNCTIONS):
                    todo.append((value, object))
                elif isinstance(value, types.ModuleType):
                    todo += [(vars(value)[name], object) for name in names & vars(value).keys()]
                else:
                    kind: Any = value if isinstance(value, type) else type(value)
                    methods = (getattr(kind, name, None) for name in (*names, "__call__"))
                    todo += [(m, kind) for m in methods if isinstance(m, _FUNCTIONS)]
    return found


_FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)


def contents(cells: Iterable[types.CellType]) -> list[Any]:
    """Return what the cells of a closure hold, as far as they are filled."""
    found: list[Any] = []
    for cell in cells:
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def opname(frame: types.FrameType) -> str:
    """Return the name of the instruction that a frame is at."""
    at = frame.f_lasti
    return next((s.opname for s in steps(frame.f_code) if s.offset == at), "")


@functools.lru_cache(1000)
def after(code: types.CodeType, at: int) -> list[tuple[Step, ...]]:
    """Return the steps that follow what code has read at an offset.

    A variable or attribute that it goes to first counts, too: its loads are looked for.
    """
    known = steps(code)
    first = bisect.bisect(known, at, key=lambda step: step.offset)
    kind, _, where = known[first].opname.partition("_") if first < len(known) else ("", "", "")
    if kind != "STORE":
        return [known[first : first + 6]]
    places = loads(code).get((f"LOAD_{where}", known[first].argval), [])
    return [known[i + 1 : i + 7] for i in places]


def is_tested_for_none(frame: types.FrameType, called: bool = False) -> bool:
    """Say whether what a frame reads just now, or a call of that, is next compared with None."""
    at = frame.f_lasti
    if called:
        calls = [s.offset for s in steps(frame.f_code) if s.opname.startswith("CALL")]
        at = next((offset for offset in calls if offset > at), at)
    return any(
        s.opname.endswith("NONE") or s[:2] == _LOAD_NONE
        for rest in after(frame.f_code, at)
        for s in rest[:1]
    )


_DOTTED_NAME_IS = re.compile(r"(LOAD_(?!ATTR|METHOD)\w+ (LOAD_ATTR )*)?IS_OP\b").match


def _is_identified(rest: Sequence[Step]) -> bool:
    return _DOTTED_NAME_IS(" ".join(s.opname for s in rest)) is not None


def is_identified(frame: types.FrameType) -> bool:
    """Say whether what a frame reads just now is next compared by `is`, with a name."""
    return any(map(_is_identified, after(frame.f_code, frame.f_lasti)))


def is_matched(frame: types.FrameType) -> bool:
    """Say whether what a frame reads just now is next matched with patterns of sequences."""
    found = after(frame.f_code, frame.f_lasti)
    return any("MATCH_SEQUENCE" in [s.opname for s in rest[:2]] for rest in found)


def expression(frame: types.FrameType) -> ast.expr | None:
    """Return the syntax of the expression that a frame evaluates just now, or None.

    Python tells the columns of an instruction since 3.11, and not without the source.
    """
    places: Any = getattr(frame.f_code, "co_positions", lambda: ())()
    place: Any = next(itertools.islice(places, frame.f_lasti // 2, None), (None,) * 4)
    if None in place:
        return None
    first, last, start, end = place
    lines = [
        linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def value_of(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the value of a name, a dotted name, a constant, or a tuple or union of those.

    Raises:
        LookupError, AttributeError: it is something else, which might do something when evaluated.
    """
    if isinstance(node, ast.Name):
        scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
        return next(scope for scope in scopes if node.id in scope or scope is scopes[-1])[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, frame), node.attr)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(value_of(part, frame) for part in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return (value_of(node.left, frame), value_of(node.right, frame))
    raise LookupError(ast.dump(node))
