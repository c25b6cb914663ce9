"""What does a program's code ask or do that no Proxy is told of?

`x is None` and `type(x)` ask no method of the value, and an assignment to a global calls none, so
tracing (paper, section 5.3) bakes the one answer that a Proxy gives and forgets the other. They can
be read from the bytecode of the functions that a trace goes through, before it begins.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxlab.core.errors import Frame, is_users


@dataclass
class Facts:
    """What the code of one function shows.

    Attributes:
        none: Parameter -> the place where it is compared with None.
        type: Parameter -> the place where its type is asked for.
        truth: Parameter -> the place where it is compared with True or False by `is`.
        names: Global names that it reads.
        stored: Global names that it assigns.
    """

    none: dict[str, Frame] = field(default_factory=dict)
    type: dict[str, Frame] = field(default_factory=dict)
    truth: dict[str, Frame] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)


_facts: weakref.WeakKeyDictionary[Any, Facts] = weakref.WeakKeyDictionary()


def facts(function: types.FunctionType) -> Facts:
    """Return what the code of a function shows; worked out once for each function."""
    found = _facts.get(function)
    if found is None:
        found = _facts[function] = Facts()
        todo = [function.__code__]
        while todo:
            code = todo.pop()
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            found.names.update(code.co_names)
            _read(code, found)
    return found


def _read(code: types.CodeType, found: Facts) -> None:
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    line, last, before = code.co_firstlineno, "", ""
    for step in dis.get_instructions(code):
        line = step.starts_line if isinstance(step.starts_line, int) and step.starts_line else line
        name, value = step.opname, step.argval
        place = (code.co_filename, line, code.co_name)
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found.stored.add(value)
        elif name.startswith("LOAD_FAST") and value in parameters:
            if last == "type":
                found.type.setdefault(value, place)
            before, last = value, "parameter"
            continue
        elif last == "parameter" and (name.endswith("NONE") or (name, value) == _LOAD_NONE):
            found.none.setdefault(before, place)
        elif last == "parameter" and name == "LOAD_CONST" and (value is True or value is False):
            last = "truth"
            continue
        elif last == "truth" and name == "IS_OP":
            found.truth.setdefault(before, place)
        last = "type" if name.startswith("LOAD_GLOBAL") and value == "type" else ""


_LOAD_NONE = ("LOAD_CONST", None)


def reachable(root: Any, *methods: tuple[Any, type]) -> Iterator[types.FunctionType]:
    """Yield users' functions, and those of users' files that their code calls by name.

    Args:
        root: A function.
        methods: Functions with the class whose methods they may call.
    """
    todo: list[tuple[Any, type]] = [(root, object), *methods]
    seen = set[int]()
    while todo:
        function, owner = todo.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if is_users(function.__code__.co_filename):
            yield function
            table = function.__globals__
            for name in facts(function).names:
                todo += [(table.get(name), object), (getattr(owner, name, None), owner)]
