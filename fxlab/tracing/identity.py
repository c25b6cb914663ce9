"""What does a program find out by `is`, `type` and `callable`?

They ask no method of a value, so a Proxy, or what stands for the training flag, cannot answer for
it (paper, section 5.3: what is no operation is fixed while tracing). While somebody traces, those
users' functions that ask so run from their own source, compiled anew with a call in the place of
each such question: of `_is` or `_of`, which answer, and say what they cannot know.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from fxlab.core.proxy import Proxy
from fxlab.tracing import asking
from fxlab.tracing.questions import Facts
from fxlab.tracing.switches import TrainingFlag, fix
from fxlab.tracing.telling import telling

_lock = threading.Lock()
_running: dict[types.FunctionType, tuple[int, types.CodeType]] = {}
"""Function -> how many traces watch it, and its own code."""


@contextlib.contextmanager
def watched(shown: dict[types.FunctionType, Facts]) -> Iterator[set[types.FunctionType]]:
    """Let functions tell what they ask; yield those that do (not those without a source).

    Args:
        shown: Function -> what its code shows.
    """
    codes = {f: _telling(f.__code__) for f in shown if shown[f].asks}
    found = {f: code for f, code in codes.items() if code is not None}
    with _lock:
        for function, code in found.items():
            count, own = _running.get(function, (0, function.__code__))
            _running[function] = count + 1, own
            function.__code__ = code
    try:
        yield set(found)
    finally:
        with _lock:
            for function in found:
                count, own = _running.pop(function)
                if count > 1:
                    _running[function] = count - 1, own
                else:
                    function.__code__ = own


def _is(a: Any, b: Any, depth: int = 1) -> bool:
    """Answer `a is b`, for the value where that is known; `depth` frames above asks a user's."""
    if a is b:
        return True
    frame = sys._getframe(depth)
    if TrainingFlag in (type(a), type(b)) and a is not None and b is not None:
        a, b = (_bool(v, frame) for v in (a, b))
    for value, other in ((a, b), (b, a)):
        if issubclass(type(value), Proxy) and value.tracer._tracing:
            return asking.answer_is(value, other, frame)
    return a is b


def _of(values: tuple[Any, ...], function: Any, compared: Any = None) -> Any:
    """Answer `function(*values)`, where `function` may be `type`, `callable`, `operator.is_`."""
    frame, value = sys._getframe(1), values[0]
    if function is operator.is_ or function is operator.is_not:
        return _is(values[0], values[1], 2) is (function is operator.is_)
    if function is type and type(value) is TrainingFlag:
        return type(_bool(value, frame))
    asked = function is type or function is callable
    if asked and issubclass(type(value), Proxy) and value.tracer._tracing:
        return asking.answer_builtin(value, function, compared, frame)
    return function(*values)


def _bool(value: Any, frame: types.FrameType) -> Any:
    return fix(value.value, value.path, frame) if type(value) is TrainingFlag else value


def _telling(code: types.CodeType) -> types.CodeType | None:
    return telling(code, code.co_filename, _is, _of)
