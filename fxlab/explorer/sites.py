"""From which line was this edit made? The same answer as `call_site`, but quick in a loop.

A pass edits in a loop, so edit after edit comes from the same few lines under the same callers. As
long as the caller of a line is the same frame at the same line, all frames above are the same too.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from fxlab.core import graph
from fxlab.core.errors import call_site, is_torchs, is_users

KIT = (str(Path(graph.__file__).parent), str(Path(__file__).parent))
AS_PASS = str(Path(graph.__file__).parents[1] / "passes" / "base.py")
INSIDE, USERS, OTHER = 0, 1, 2


class Sites:
    """Remembers the stack of each editing line while its caller has not moved on."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.lines: dict[str, list[str]] = {}
        self.files: set[str] = set()
        self.known: dict[tuple[CodeType, int], tuple[FrameType, int, Any]] = {}

    def here(self, frame: FrameType | None) -> Any:
        """The frames `(file, line, function)` from the first outside the kit on; None: ask again.

        Args:
            frame: Where to begin to look: a frame of the kit's own.
        """
        kinds = self.kinds
        while frame is not None:
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = kind_of(file)
            if kind == USERS:
                break
            if kind == OTHER:
                return None
            frame = frame.f_back
        back = None if frame is None else frame.f_back
        if frame is None or back is None:
            return None
        key = (frame.f_code, frame.f_lineno)
        found = self.known.get(key)
        if found is not None and found[0] is back and found[1] == back.f_lineno:
            return found[2]
        where = call_site()
        self.known[key] = (back, back.f_lineno, where)
        self.files.update(file for file, _, _ in where)
        return where

    def forget(self) -> None:
        """Let go of the frames, which hold their local variables; read the cited files now."""
        self.known.clear()
        for file in self.files - set(self.lines):
            self.lines[file] = linecache.getlines(file)


def place_of_edit() -> tuple[tuple[str, int, str], ...]:
    """The frames that led to an edit.

    torch's own way from an operation to its Proxy is none, nor are the wrappers that keep Dynamo
    out of torch.fx.
    """
    where = call_site()
    if where and is_torchs(where[0][0]):
        dispatched = any(name == "handle_torch_function" for _, _, name in where)
        if dispatched or "_dynamo" in Path(where[0][0]).parts:
            return call_site(skip_torch=True) or where
    return where


def kind_of(file: str) -> int:
    """Whose file it is: the kit's own machinery, a user's (or a pass's), or something else."""
    if is_users(file):
        return USERS
    return INSIDE if file.rpartition("/")[0] in KIT or file.rpartition("\\")[0] in KIT else OTHER


def entry_name(block: tuple[str, str], where: Sequence[tuple[str, int, str]]) -> str:
    """What the recorded block has called, on the stack of this edit; "" for an edit of its own."""
    if not where or where[0][::2] == block:
        return ""
    frame, inside = sys._getframe(2), []
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != block:
        inside.append(frame)
        frame = frame.f_back
    for called in reversed(inside if frame is not None else []):
        name = called.f_code.co_name
        if name == "run" and called.f_code.co_filename == AS_PASS:
            return called.f_locals["function"].__name__
        if name == "__call__":  # an object that is a pass
            return type(called.f_locals.get("self")).__name__
        if name.isidentifier():
            return own_name(called)
    return ""


def own_name(called: FrameType) -> str:
    """The name of the function that runs in a frame: a decorated one's is not its code's.

    A frame knows its code only. The function is looked for where its caller must have had it: under
    the names that the caller's code mentions, one attribute deep.
    """
    code, caller = called.f_code, called.f_back
    if not code.co_freevars or caller is None:  # what decorates holds what it decorates
        return code.co_name
    names = dict.fromkeys((*caller.f_code.co_names, *caller.f_locals))
    scope = {**caller.f_globals, **caller.f_locals}
    values = [scope[name] for name in names if name in scope]
    owners = [value for value in values if isinstance(value, ModuleType | type)]
    values += [vars(owner)[name] for owner in owners for name in names if name in vars(owner)]
    for value in (getattr(value, "__func__", value) for value in values):
        if getattr(value, "__code__", None) is code and holds(value, called):
            return str(value.__name__)
    return code.co_name


def holds(function: Any, frame: FrameType) -> bool:
    """Whether a function's closure is the one that a frame runs with."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(frame.f_locals.get(name) is cell.cell_contents for name, cell in cells)
