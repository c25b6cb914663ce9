"""What does a function's bytecode say, whichever Python compiled it?

Instructions differ from one version to the next: since 3.13 two loads of variables may be one
instruction, and lines are told under another name. Who reads code to see what it asks of a value
(paper, section 5.3) reads these steps, which are the same for 3.10 to 3.14.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from typing import Any, NamedTuple

_PAIR = re.compile(r"(LOAD|STORE)_FAST\w*?_(LOAD|STORE)_FAST\w*").fullmatch
_FAST = re.compile(r"(LOAD|STORE)_FAST(_BORROW|_CHECK|_AND_CLEAR)?").fullmatch
_SILENT = frozenset(("CACHE", "NOT_TAKEN", "EXTENDED_ARG", "NOP"))


class Step(NamedTuple):
    """One instruction.

    Attributes:
        opname: its name; LOAD_FAST and STORE_FAST under these names only.
        argval: what it is about: a variable's name, a constant, a target, an operator's sign.
        line: the line of the source that it belongs to.
        offset: where it stands, in bytes, as a frame's `f_lasti` says.
    """

    opname: str
    argval: Any
    line: int
    offset: int


@functools.lru_cache(256)
def steps(code: types.CodeType) -> tuple[Step, ...]:
    """Return the instructions of some code, one for each variable that is loaded or stored."""
    found: list[Step] = []
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        # Since 3.13 `starts_line` says only whether a line starts here.
        told = getattr(one, "line_number", one.starts_line)
        line = line if told is None else told
        pair, fast = _PAIR(one.opname), _FAST(one.opname)
        if pair is not None and isinstance(one.argval, tuple):
            kinds = (f"{kind}_FAST" for kind in pair.groups())
            found += [Step(kind, name, line, one.offset)
                      for kind, name in zip(kinds, one.argval, strict=True)]  # fmt: skip
        elif one.opname not in _SILENT:
            name = f"{fast[1]}_FAST" if fast is not None else one.opname
            about = one.argrepr if name == "BINARY_OP" else one.argval
            found.append(Step(name, about, line, one.offset))
    return tuple(found)


@functools.lru_cache(256)
def loads(code: types.CodeType) -> dict[tuple[str, str], list[int]]:
    """Return (instruction, name) -> where it stands, for all that loads by a name."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, step in enumerate(steps(code)):
        if isinstance(step.argval, str):
            found.setdefault((step.opname, step.argval), []).append(i)
    return found
