"""How is a student's function called so that it can do no harm to the notebook it is called from?

`Guard` runs one call: it stops a function that takes too long or lets a graph grow without end and
names the line, takes what it prints, turns whatever it raises (SystemExit too) into an
`AnswerError` with the student's own line, and makes the functions that the exercise asks to write
refuse to be called. The kernel is usable afterwards: nothing stays patched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import linecache
import sys
import sysconfig
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fxlab.core.errors import EditLimitError, ExerciseError, FxlabError, cell_name, is_users
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.teach.exercise import Finding, NotDone

SECONDS = 10.0
IMPORTS = 120.0  # seconds that an import within a call may take: they are not the answer's
GROWTH = 50
PRINTED = 2_000  # characters of what the function prints that a card shows
_refused = threading.local()


class AnswerError(Exception):
    """An answer could not be called to its end.

    Attributes:
        kind: "todo" (the stub), "asked" (it calls what it should write), "time", "growth", "lint",
            "memory", "error" (it raised), "type" (what it returned can't be judged) or "lost" (its
            process ended).
        sentence: What happened, where, and what to do.
        trace: The traceback from the student's lines on, "" where there is none.
        finding: The input program it happened on, once that is known.
    """

    def __init__(self, kind: str, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.trace = kind, sentence, trace
        self.finding: Finding | None = None


class TimeLimit(BaseException):
    """Raised into a call that takes too long; no `except Exception` swallows it."""


class _Printed(io.TextIOBase):
    """Keeps the first characters that are written and counts the rest."""

    def __init__(self) -> None:
        self.text, self.count = "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.count += len(text)
        if len(self.text) < PRINTED:
            self.text += text[: PRINTED - len(self.text)]
        return len(text)

    def __str__(self) -> str:
        more = self.count - len(self.text)
        return self.text + (f"\n... and {more:,} more characters" if more else "")


class Guard:
    """Calls an answer within limits; one Guard serves all calls of one check.

    Args:
        id: The part, as the refusals name it.
        asks: Qualified names of what the answer may not call.
        seconds: How long one call may take. The clock is the wall's.
        growth: How many times its first size a graph may reach.
        cpu: Count the process's CPU seconds instead, so that a busy machine changes nothing.

    Example:
        >>> Guard("9.9").call(lambda x: x + 1, 1)
        2
    """

    def __init__(
        self,
        id: str,
        asks: tuple[str, ...] = (),
        seconds: float = SECONDS,
        growth: int = GROWTH,
        cpu: bool = False,
    ) -> None:
        self.id, self.asks, self.seconds, self.growth = id, asks, seconds, growth
        self.cpu = cpu
        self.printed = _Printed()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(*args)` returns.

        Raises:
            AnswerError: It raised, took too long, or called what it should write.
            KeyboardInterrupt: The student interrupted the kernel.
        """
        watch = _Watch(self.seconds, self.cpu)
        limit = _growth_limit(args, self.growth)
        _refused.what = None
        try:
            with (
                contextlib.redirect_stdout(self.printed),
                contextlib.redirect_stderr(self.printed),
                refusing(self.id, self.asks),
                limit,
                watch,
            ):
                value = function(*args)
        except (KeyboardInterrupt, AnswerError):
            raise  # an AnswerError is what `entry` says of the answer
        except BaseException as error:
            raise self.explained(error, watch) from None
        if watch.fired:  # the answer caught the limit and went on
            raise self.explained(TimeLimit(), watch)
        if _refused.what:  # the answer caught the refusal and went on
            raise AnswerError("asked", f"{self.id} asks you to write this: {_refused.what}")
        return value

    def explained(self, error: BaseException, watch: _Watch | None = None) -> AnswerError:
        """Put what a call raised into words."""
        if isinstance(error, TimeLimit) or (watch is not None and watch.fired):
            line = watch.where if watch is not None else ""
            sentence = (
                f"stopped after {self.seconds:g} {'CPU s' if self.cpu else 's'}{line}: "
                "a loop that never ends? If it walks over gm.graph.nodes while it inserts, "
                "iterate over list(gm.graph.nodes)"
            )
            return AnswerError("time", sentence)
        if _refused.what:
            return AnswerError("asked", f"{self.id} asks you to write this: {_refused.what}")
        if isinstance(error, NotDone):
            return AnswerError("todo", str(error))
        kind = {EditLimitError: "growth", MemoryError: "memory"}.get(type(error), "error")
        where = users_line(error)
        if kind == "memory" or "allocate memory" in safe_text(error):
            return AnswerError("memory", f"it ran out of memory{where}", users_trace(error))
        if isinstance(error, EditLimitError):
            return AnswerError(kind, f"{error.message}{where}")
        if isinstance(error, SystemExit):
            return AnswerError(
                "error", f"your code left Python by SystemExit{where}: return instead"
            )
        text = error.message if isinstance(error, FxlabError) else safe_text(error)
        text = text.strip().splitlines()[0][:500] if text.strip() else "no message"
        sentence = f"{_public_name(error)}: {text}{where}{_try(error, text)}"
        return AnswerError(kind, sentence, users_trace(error))


def _public_name(error: BaseException) -> str:
    """The name of an error's class, or of the first parent that a student may know."""
    names = [one.__name__ for one in type(error).__mro__]
    return next((name for name in names if not name.startswith("_")), names[0])


def _try(error: BaseException, text: str) -> str:
    """What to do about an error, where that is known: what the kit says itself, or a usual slip."""
    if isinstance(error, FxlabError):
        return f". Try: {error.hint[0]}" if error.hint else ""
    if isinstance(error, TypeError) and "'Node'" in text and " operand" in text:
        return (
            ". A Node is no Proxy, it computes nothing: record the operation yourself, "
            "graph.call_function(operator.add, (node, 1))"
        )
    if isinstance(error, AttributeError) and "'Node' object" in text:
        return ". A Node is no Proxy: graph.call_method('relu', (node,)) records a method's call"
    return ""


def safe_text(value: Any) -> str:
    """The text of an object whose own methods may be anybody's."""
    try:
        return str(value)
    except Exception:  # a hostile __str__ must not hide what happened
        return f"<{type(value).__name__}>"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [one for one in frames if is_answer(one.filename)]


def is_answer(file: str) -> bool:
    """Whether a file may hold a student's code: not the kit's, torch's or Python's."""
    return is_users(file) and not file.startswith(_STANDARD) and "_pytest" not in file


def users_line(error: BaseException) -> str:
    """` (line 3 of my_dce: node.foo())`: the innermost line of the student's, or ""."""
    frames = _frames(error)
    if isinstance(error, SyntaxError) and not frames:
        return f" at line {error.lineno}"
    return _at(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""


def _at(file: str, line: int, function: str) -> str:
    text = linecache.getline(file, line).strip()
    return f" (line {line} of {function}{f': {text}' if text else ''})"


def users_trace(error: BaseException) -> str:
    """The student's lines of a traceback, outermost first."""
    lines = []
    for frame in _frames(error)[-8:]:
        name = cell_name(frame.filename) or frame.filename.rpartition("/")[2]
        lines.append(f"{name}:{frame.lineno} in {frame.name}: {frame.line}")
    return "\n".join(lines)


_STANDARD = (str(Path(__file__).parent.parent), *{
    sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")
})  # fmt: skip


class _Watch:
    """Raises TimeLimit in the calling thread when the time is over, again until it is out.

    A signal would work in the main thread of POSIX systems only; this works wherever bytecode runs.
    An import is not cut in half, which would leave a module in the kernel that is there in part
    only: the clock starts again when it is over.
    """

    def __init__(self, seconds: float, cpu: bool = False) -> None:
        self.seconds, self.cpu, self.fired, self.where = seconds, cpu, False, ""
        self._over, self._lock = threading.Event(), threading.Lock()
        self._target = 0

    def __enter__(self) -> _Watch:
        self._target = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        begin, pause = time.process_time(), self.seconds
        last, importing = time.monotonic() + self.seconds + IMPORTS, False
        while not self._over.wait(pause):
            if not self.fired and time.monotonic() < last:
                was, importing = importing, self._importing()
                if importing or was:
                    begin, pause = time.process_time(), 0.05 if importing else self.seconds
                    continue
            left = self.seconds - (time.process_time() - begin)
            if self.cpu and left > 0:
                pause = max(left, 0.05)
                continue
            with self._lock:
                if self._over.is_set():
                    return
                if not self.fired:
                    self.fired, self.where = True, self._line()
                _raise_in(self._target, TimeLimit)
            pause = 0.2

    def _importing(self) -> bool:
        frame = sys._current_frames().get(self._target)
        while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        return frame is not None

    def _line(self) -> str:
        frame = sys._current_frames().get(self._target)
        while frame is not None:
            code = frame.f_code
            if is_answer(code.co_filename):
                return _at(code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return ""

    def __exit__(self, *_: object) -> None:
        # A TimeLimit may be raised here, between the call's end and this line: take it again.
        while True:
            try:
                with self._lock:
                    self._over.set()
                    _raise_in(self._target, None)
                return
            except TimeLimit:
                continue


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None
    )


@contextlib.contextmanager
def _growth_limit(args: tuple[Any, ...], growth: int) -> Iterator[None]:
    """Raise EditLimitError in the call that lets a graph among `args` grow beyond the limit."""
    watched: list[tuple[Graph, Any]] = []
    for graph in graphs_in(args):
        most = growth * max(len(graph.nodes), 4)

        def hear(kind: str, heard: Graph, *_: Any, most: int = most) -> None:
            if kind == "create" and len(heard.nodes) > most:
                raise EditLimitError(
                    f"the graph grew to {most:,} nodes, {growth} times its size, and was stopped: "
                    "your loop visits the nodes it inserts: iterate over list(graph.nodes)"
                )

        graph.add_listener(hear)
        watched.append((graph, hear))
    try:
        yield
    finally:
        for graph, hear in watched:
            graph.remove_listener(hear)


def graphs_in(value: Any) -> list[Graph]:
    """The graphs of the GraphModules inside arguments."""
    found, stack = [], [value]
    while stack:
        one = stack.pop()
        if isinstance(one, GraphModule):
            found.append(one.graph)
        elif isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, list | tuple):
            stack.extend(one)
    return found


# -- what the exercise asks to write ---------------------------------------------------------------


def refuse(id: str, name: str) -> None:
    """Say that an answer called what it should write; put in place of that function's code."""
    _refused.what = f"your answer calls {name}"
    raise ExerciseError(f"{id} asks you to write this: your answer calls {name}")


@contextlib.contextmanager
def refusing(id: str, asks: tuple[str, ...]) -> Iterator[None]:
    """Let the named functions refuse while the block runs, under whatever name they are called.

    The function objects keep their identity: only their code is swapped, so a name that was
    imported before refuses too.
    """
    swapped: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for name in asks:
            for function in functions_of(name):
                swapped.append((function, function.__code__))
                function.__code__ = _stand_in(function, id, name)
        yield
    finally:
        for function, code in reversed(swapped):
            function.__code__ = code


@functools.cache
def functions_of(name: str) -> tuple[types.FunctionType, ...]:
    """The Python functions behind a qualified name: itself and what it wraps, or a class's own."""
    parts = name.split(".")
    found: Any = None
    for cut in range(len(parts) - 1, 0, -1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # modules of torch's that warn of themselves
                found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        except ImportError:  # it needs a package that is not here: nobody can call it
            return ()
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
            break
        except AttributeError:
            found = None
    if isinstance(found, type):
        values = [one for one in vars(found).values() if isinstance(one, types.FunctionType)]
        return tuple(values)
    functions = []
    while found is not None:
        inner = getattr(found, "__func__", found)
        if isinstance(inner, types.FunctionType):
            functions.append(inner)
        found = getattr(found, "__wrapped__", None)
    if not functions:
        raise ExerciseError(f"exercise asks for {name}, which is no function of Python")
    return tuple(functions)


def _stand_in(function: types.FunctionType, id: str, name: str) -> types.CodeType:
    source = (
        "def stand_in(*args, **kwargs):\n"
        "    from fxlab.teach.limits import refuse\n"
        f"    return refuse({id!r}, {name!r})\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), space)
    # The code must name as many free variables as the function has cells; it reads none of them.
    return space["stand_in"].__code__.replace(co_freevars=function.__code__.co_freevars)
