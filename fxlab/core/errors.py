"""How does fxlab tell somebody that something is wrong, and where in their own file?

Every error of the kit says what happened, at which node, at which line of the user's file, what
was expected and what to try. The texts are put together here and nowhere else, so that they read
alike and can be tested. The paper asks for this in section 5.3: a failed capture must name the
place. `call_site` finds that place; it is also what provenance and the explorer's `where` use.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import copyreg
import linecache
import os
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .codegen import PythonCode

Frame = tuple[str, int, str]
"""A place in somebody's source: (file, line, function)."""

_PACKAGE, _TORCH = Path(__file__).parent.parent, str(Path(torch.__file__).parent)
_HERE, _TORCH_FX = str(_PACKAGE / "core"), str(Path(_TORCH) / "fx")
_ROOMS = [str(_PACKAGE / room) for room in ("core", "display", "explorer", "tracing")]
_FILES = [str(_PACKAGE / f"passes/{name}.py") for name in ("base", "rewriter", "matcher", "unused")]
_MACHINERY = frozenset((*_ROOMS, _TORCH_FX, *_FILES, contextlib.__file__))
_OUTSIDE, _INSIDE, _TORCHS, _GENERATED, _BORDER, _ENTRY = range(6)
GENERATED = "<eval_with_key>.fxlab_"
"""How the names of files of generated code begin; a number follows."""
trace_state = threading.local()
"""`outer`, in a thread that traces: the frames that called the module being traced."""
generated_code: weakref.WeakValueDictionary[str, PythonCode] = weakref.WeakValueDictionary()
"""File name of generated code -> the code, which knows the Node of each line."""


class _Kinds(dict[str, int]):
    """File name -> whose code it holds; a path that merely begins like torch's is a user's."""

    def __missing__(self, name: str) -> int:
        if name.startswith(GENERATED):
            return _GENERATED  # not kept: there may be many, and they come and go
        folder, _, file = name.rpartition(os.sep)
        if folder == _HERE and file == "capture.py":
            kind = _BORDER
        elif name == str(_PACKAGE / "cli.py"):
            kind = _ENTRY  # who types a command calls from no line of theirs
        elif not _MACHINERY.isdisjoint((folder, name)) or name.startswith(("<frozen ", "<eval_")):
            kind = _INSIDE
        else:
            kind = _TORCHS if name.startswith(_TORCH + os.sep) else _OUTSIDE
        self[name] = kind
        return kind


_kinds = _Kinds()


def is_users(file: str) -> bool:
    """Say whether a file is a user's: neither torch's nor of the kit's core or explorer."""
    return _kinds[file] == _OUTSIDE


def is_torchs(file: str) -> bool:
    """Say whether a file is one of torch's own, other than torch.fx's."""
    return _kinds[file] == _TORCHS


def call_site(limit: int = 4, skip_torch: bool = False, skip: int = 1) -> tuple[Frame, ...]:
    """Return the frames of the user's code that led here, innermost first.

    Args:
        limit: how many frames at most.
        skip_torch: leave out all of torch, not only torch.fx's own graph files. Generated code is
            replaced by the source of the node whose line is running. Inside a trace, looking stops
            at the tracer's own entry (`capture.py`); the frames of the module's call follow.
        skip: how many of the innermost frames are known to be no user's.
    """
    frame, kinds = sys._getframe(skip), _kinds
    while kinds[frame.f_code.co_filename] == _INSIDE and frame.f_back is not None:
        frame = frame.f_back  # most frames
    frames: list[Frame] = []
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        kind = kinds[file]
        if kind == _OUTSIDE or (kind == _TORCHS and not skip_torch):
            frames.append((file, frame.f_lineno, code.co_name))
            if len(frames) == limit or code.co_name == "<module>":
                break
        elif kind == _BORDER:
            outer = getattr(trace_state, "outer", None)
            if outer is not None and (frames or outer):
                frames += outer
                break
        elif kind == _GENERATED:
            node = _node_of(frame)
            frames += node.meta.get("source", ()) if node is not None else ()
            if len(frames) >= limit:
                break
        elif kind == _ENTRY:
            break
        frame = frame.f_back
    return tuple(frames[:limit])


def running_node() -> Any:
    """Return the Node whose line of generated code is running, or None."""
    frame = sys._getframe(1)
    while frame is not None and _kinds[frame.f_code.co_filename] != _GENERATED:
        frame = frame.f_back
    return None if frame is None else _node_of(frame)


def _node_of(frame: types.FrameType) -> Any:
    """Return the Node that a frame of generated code runs.

    `frame.f_lineno` walks through the code from its beginning; a table keeps tracing linear.
    """
    code = generated_code.get(frame.f_code.co_filename)
    if code is None:
        return None
    if not code.places:
        lines = frame.f_code.co_lines()
        code.places = {at: line for first, end, line in lines for at in range(first, end)}
    return code.node_at(code.places.get(frame.f_lasti) or 0)


def register_generated(file: str, code: PythonCode, function: types.FunctionType) -> None:
    """Make a generated file known to tracebacks and `call_site`, as long as its function lives."""
    source = code.src
    linecache.cache[file] = (lambda: source,)  # type: ignore[assignment]
    generated_code[file] = code
    weakref.finalize(function.__code__, linecache.cache.pop, file, None).atexit = False


def add_run_note(error: BaseException, node: Any, code: str = "") -> None:
    """Add to an error raised by running a Node which Node that was and whose source it stands for.

    Args:
        error: any exception; one that has such a note, or an error of the kit, is left alone.
        node: the Node that ran, or None when that is not known.
        code: the line of generated code that failed.
    """
    start = "While running node "
    notes = getattr(error, "__notes__", ())
    if isinstance(error, FxlabError) or any(note.startswith(start) for note in notes):
        return
    lines = [start + (_describe(node) if node is not None else "of a GraphModule")]
    if code.strip():
        lines.append(f"  generated code:  {code.strip()}")
    lines += _places(node.meta.get("source", ()) if node is not None else ())
    if sys.version_info >= (3, 11):
        error.add_note("\n".join(lines))


def quote(frame: Frame) -> str:
    """Return `file:line, in function:  the source line`, as every message shows a place."""
    file, line, function = frame
    text = linecache.getline(file, line).strip()
    place = f"{cell_name(file) or file}:{line}, in {function}"
    return f"{place}:  {text}" if text else place


def cell_name(file: str) -> str | None:
    """Return `In[7]` for the file name under which IPython compiled a notebook cell, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    namer: Any = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if namer is not None and (name := namer(file)) is not None:
        return name[1]
    return "In[?]" if "ipykernel_" in file or file.startswith("<ipython-input") else None


class FxlabError(Exception):
    """The parent of every error of the kit; carries its facts as fields.

    Args:
        message: what happened, one sentence.
        node: the Node concerned, or text that describes it.
        where: a frame (file, line, function) or several, innermost first; by default the node's
            own `meta["source"]`, else the user's line that led here.
        expected: what would have been right.
        hint: what to try; several are numbered.
        wrong, right: short code that shows the mistake and its mending.
    """

    def __init__(
        self, message: str = "", *, node: Any = None, where: Frame | Sequence[Frame] | None = None,
        expected: str = "", hint: str | Sequence[str] = (), wrong: str = "", right: str = "",
    ) -> None:  # fmt: skip
        if where is None:
            made = node.meta.get("source") if hasattr(node, "meta") else None
            here = call_site(4, getattr(trace_state, "outer", None) is not None)
            # A refused edit is a mistake of the line that edits, not of the one that was traced.
            where = here or made if isinstance(self, RewriteError) else made or here
        frames: Any = (where,) if where and isinstance(where[0], str) else where
        self.message, self.expected, self.wrong, self.right = message, expected, wrong, right
        self.node = node if node is None or isinstance(node, str) else _describe(node)
        self.where: tuple[Frame, ...] = tuple(frames)
        self.hint = (hint,) if isinstance(hint, str) and hint else tuple(hint)
        super().__init__(message_text(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields, so that an error crosses a process border whole."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def message_text(error: FxlabError) -> str:
    """Compose the text of an error from its fields."""
    lines = [error.message]
    lines += [f"  at node: {error.node}"] if error.node else []
    lines += _places(error.where)
    lines += [f"  expected: {error.expected}"] if error.expected else []
    several = len(error.hint) > 1
    lines += [f"  try{f' {i}' if several else ''}: {h}" for i, h in enumerate(error.hint, 1)]
    for label, code in (("wrong", error.wrong), ("right", error.right)):
        if code:
            lines.append(f"  {label}:")
            lines += ["      " + line for line in code.splitlines()]
    return "\n".join(lines)


def _places(frames: Sequence[Frame]) -> list[str]:
    return [f"  {'called from' if i else 'at'} {quote(f)}" for i, f in enumerate(frames)]


def _describe(node: Any) -> str:
    try:
        text = node.format_node() or repr(node)
    except Exception:  # a hostile repr must not hide the error that is being told
        text = f"%{node.name}"
    return text if len(text) <= 400 else text[:300] + " ... " + text[-80:]


class TraceError(FxlabError, ValueError):
    """The program cannot be captured by symbolic tracing."""


class TraceTypeError(TraceError, TypeError):
    """A Proxy was asked for a concrete number or text."""


class TraceIterError(TraceError, TypeError):
    """A Proxy of unknown length was iterated."""


class TraceIndexError(TraceError, TypeError, IndexError):
    """A Proxy was used as an index of a Python sequence."""


class TraceLenError(TraceError, TypeError, RuntimeError):
    """The length of a Proxy was asked for."""


class TraceAttributeError(TraceError, AttributeError):
    """An attribute of a Proxy was set or asked for in a way that cannot be recorded."""


class TraceNotImplementedError(TraceError, NotImplementedError):
    """A value of a type that a Graph cannot hold met the tracer."""


class TraceNameError(TraceError, NameError):
    """A parameter or module was used that is not part of the traced module."""


class TraceRuntimeError(TraceError, RuntimeError):
    """A TraceError where torch.fx raises a RuntimeError."""


class LintError(FxlabError, RuntimeError, ValueError):
    """A graph is not well formed."""


class CodegenError(FxlabError, RuntimeError):
    """A graph cannot be written as Python."""


class RewriteError(FxlabError, RuntimeError):
    """A pattern, a replacement or an edit makes no sense."""


class LoweringError(FxlabError, RuntimeError):
    """A graph cannot be lowered to a device."""


class ExerciseError(FxlabError, RuntimeError):
    """An exercise was called in a way that cannot be checked."""


class EditLimitError(FxlabError, RuntimeError):
    """A pass edited more than `record` allows."""


class TimelineError(FxlabError, ValueError):
    """A timeline file was refused."""


class TraceWarning(UserWarning):
    """A trace went through, but something of the program is not in the graph."""
