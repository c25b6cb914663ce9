"""What does a program find out about a Proxy that it would not find out about the value?

Python lets some questions be answered: a class, an attribute that is not there, the text of a
value, whether it is None. A Proxy's answer is not the value's, and the program goes on with it
(paper, section 5.3: what is not an operation is fixed while tracing). Each such answer that may be
another one for the value becomes a `TraceWarning` with its line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import logging
import operator
import re
import types
import warnings
from collections.abc import Iterable
from typing import Any, get_origin

import torch

from fxlab.core import proxy as proxies
from fxlab.core.errors import is_users
from fxlab.core.proxy import HASH, TEXT, UNKNOWN, Proxy, asks_shape, doubtful, probes
from fxlab.core.tracer import Tracer, TracerBase
from fxlab.tracing.hooks import in_a_hook
from fxlab.tracing.known import known
from fxlab.tracing.questions import (
    Facts,
    expression,
    is_identified,
    is_matched,
    is_tested_for_none,
    opname,
    value_of,
)

_NUMBERS = (bool, int, float, complex)
_OF_A_PROXY = (torch.fx.Proxy, Proxy)
_CLASS_NAMES = re.compile("Tensor|int|float|bool|Number|complex|Size|tuple")
_FIXED = "and that answer is fixed in the graph"


_SINGLES = (bool, torch.dtype, torch.layout)
_single: set[str] = set()
"""Attributes of a tensor whose value there is once, so that one may ask for it by `is`."""


def install() -> None:
    """Be told of every question that a user's frame asks a Proxy."""
    if probe not in probes:
        probes.append(probe)
        tensor = torch.empty(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {name: _or_else(tensor, name) for name in dir(tensor) if name[:2] != "__"}
        doubtful.update(name for name, value in found.items() if value is None)
        _single.update(name for name, value in found.items() if isinstance(value, _SINGLES))
        doubtful.update(_single, ["shape"])


def _or_else(tensor: torch.Tensor, name: str) -> Any:
    try:
        return getattr(tensor, name)
    except Exception:  # an attribute that this tensor does not have
        return ...


def probe(tracer: TracerBase, proxy: Proxy, name: str, frame: types.FrameType) -> None:
    """Say what a line of the user's found out about a Proxy that it would not of the value.

    Args:
        tracer: the one that traces.
        proxy: who is asked.
        name: of an attribute that no tensor has, that may be None, or that `is` may be asked of,
            or "shape", which may be matched;
            "" if its class is asked for, `TEXT` or `HASH` if its text or hash is.
        frame: the one that asks.
    """
    if name == TEXT:
        while frame.f_code.co_filename == proxies.__file__ and frame.f_back is not None:
            frame = frame.f_back
        if is_users(frame.f_code.co_filename) and not _only_tells(frame):
            _warn(
                tracer,
                frame,
                "text",
                "text made from a Proxy is not the text of the value, and what the program does "
                "with it (a key, a comparison) is fixed in the graph",
            )
    elif name == HASH:  # a tensor's is that of an object, too
        _warn_of_hash(tracer, proxy, frame)
    elif name in _single:
        if is_identified(frame):
            _warn(
                tracer,
                frame,
                "is",
                f"`is` compared {proxy}.{name} as a Proxy, {_FIXED}: compare by == (with example "
                "inputs it is answered)",
            )
    elif name == "get":
        if is_tested_for_none(frame, called=True):
            text = f"whether what {proxy}.get() returns is None was answered for a given one"
            _warn(tracer, frame, "none", f"{text}, {_FIXED}")
    elif name == "shape":
        if is_matched(frame):
            text = f"`match` took {proxy}.shape, which is a Proxy, for no sequence, {_FIXED}"
            _warn(tracer, frame, "match", text)
    elif name in doubtful:
        if is_tested_for_none(frame):
            _warn(
                tracer,
                frame,
                "none",
                f"whether {proxy}.{name} is None was answered for a given one, {_FIXED}",
            )
    elif name:
        _warn_of_attribute(tracer, proxy, name, frame)
    else:
        _warn_of_class(tracer, proxy, frame)


def _warn(tracer: TracerBase, frame: types.FrameType, kind: str, text: str) -> None:
    """Say what the program asked; the tracer's own hooks may ask what they like."""
    if not in_a_hook(tracer, frame):
        tracer.warn(kind, text)


def _warn_of_hash(tracer: TracerBase, proxy: Proxy, frame: types.FrameType) -> None:
    fields = proxy.__dict__
    name, node = fields.get("attr", ""), fields.get("node")
    by_value = name in _single or name in ("shape", "device", "ndim") or (node and asks_shape(node))
    if by_value and tracer._tracing and is_users(frame.f_code.co_filename):
        text = f"{proxy} is a key or was looked up as a Proxy, not by its value, {_FIXED}"
        _warn(tracer, frame, "hash", text)


def _warn_of_attribute(tracer: TracerBase, proxy: Proxy, name: str, frame: types.FrameType) -> None:
    call = expression(frame)
    if isinstance(call, ast.Call):
        function = _value(call.func, frame)
        asked = function is hasattr or (function is getattr and len(call.args) == 3)
    else:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        asked = call is None and re.search(rf"(hasattr|getattr)\(.*{name}", line) is not None
    if asked:
        _warn(
            tracer,
            frame,
            "hasattr",
            f"hasattr({proxy}, {name!r}) is true for a Proxy and false for a tensor, {_FIXED}",
        )


def _warn_of_class(tracer: TracerBase, proxy: Proxy, frame: types.FrameType) -> None:
    if frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:
        frame = frame.f_back  # of an abstract class, or of torch's for parameters
    if frame.f_code.co_name != "is_tensor" and not _is_asked(proxy, frame):
        return
    _warn(
        tracer,
        frame,
        "isinstance",
        f"isinstance on {proxy} answers for the Proxy, not for the value, {_FIXED}",
    )


def _is_asked(proxy: Proxy, frame: types.FrameType) -> bool:
    """Say whether a frame asks for a class, or for an instance of a class, that matters."""
    call, name = expression(frame), opname(frame)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if "LOAD_" in name:
        return not _only_tells(frame)
    if not isinstance(call, ast.Call):  # a version of Python without columns
        asked = name == "MATCH_CLASS" or "isinstance" in line
        return asked and _CLASS_NAMES.search(line) is not None
    if name == "MATCH_CLASS":
        kinds = call.func
    elif _value(call.func, frame) is isinstance and len(call.args) == 2:
        kinds = call.args[1]
    else:  # who is called asks for purposes of its own
        return "isinstance" in line and _CLASS_NAMES.search(line) is not None
    given = _value(kinds, frame)
    return given is None or _differs(proxy, [*_flat(given)])


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the value of a plain expression; None if it cannot be told without doing something."""
    try:
        return value_of(node, frame)
    except (LookupError, AttributeError):
        return None


def _flat(kinds: Any) -> Iterable[Any]:
    """Yield the classes of the second argument of `isinstance`."""
    if isinstance(kinds, tuple):
        for kind in kinds:
            yield from _flat(kind)
    elif isinstance(kinds, type(torch.LongTensor)):  # what only tensors of one dtype are
        yield torch.Tensor
    elif isinstance(kinds, type):
        yield kinds
    else:  # a union of types
        yield from getattr(kinds, "__args__", ())


def _differs(proxy: Proxy, kinds: list[type]) -> bool:
    """Say whether a value that a Proxy may stand for is an instance of classes that it is none of.

    A tensor, a number, or a torch.Size where a shape was asked for.
    """

    def holds(kind: type) -> bool:
        return any(issubclass(kind, k) for k in kinds)

    if any(k in _OF_A_PROXY for k in kinds) and not holds(torch.Tensor):
        return False  # somebody who knows of tracing
    for_proxy, fields = holds(torch.fx.Proxy), proxy.__dict__
    node, tracer = fields.get("node"), proxy.tracer
    value = UNKNOWN if not node or tracer._examples is None else known(tracer, node)[0]
    if value is not UNKNOWN:
        return holds(type(value)) != for_proxy
    noted: Any = node and node.op == "placeholder" and (get_origin(node.type) or node.type)
    if noted in (list, tuple, dict):
        return holds(noted) != for_proxy
    shape = fields.get("attr") == "shape" or (node and node.target == "size" and len(node.args) < 2)
    values = (*_NUMBERS, torch.Size) if shape else _NUMBERS
    return holds(torch.Tensor) != for_proxy or (not for_proxy and any(map(holds, values)))


# -- text --------------------------------------------------------------------------------------


@functools.lru_cache(16)
def _statements(source: str) -> list[ast.stmt]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def _only_tells(frame: types.FrameType) -> bool:
    """Say whether the line that a frame is at only tells somebody: it raises, asserts or prints.

    So does a variable all of whose readers do, and a function whose caller does.
    """
    call = expression(frame)
    if isinstance(call, ast.Call) and _is_told(_value(call.func, frame)):
        return True  # wherever the call stands
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        statements = _statements(source)
    except SyntaxError:
        return False
    statement = _innermost(statements, frame.f_lineno, frame.f_lineno)
    if isinstance(statement, ast.Return) or frame.f_code.co_name == "<lambda>":
        outer = frame.f_back
        return outer is not None and is_users(outer.f_code.co_filename) and _only_tells(outer)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name, within = statement.targets[0].id, frame.f_code.co_firstlineno
        function = next((s for s in statements if _begins(s, within)), None)
        reads = [n for n in ast.walk(function) if isinstance(n, ast.Name)] if function else []
        reads = [n for n in reads if n.id == name and isinstance(n.ctx, ast.Load)]
        readers = [_innermost(statements, n.lineno, n.end_lineno or n.lineno) for n in reads]
        return bool(function) and all(_tells(reader, frame) for reader in readers)
    return _tells(statement, frame)


def _calls(function: types.FunctionType) -> list[ast.Call]:
    """Return the calls in a function, as far as it has a name and its file can be read."""
    code = function.__code__
    with contextlib.suppress(SyntaxError):
        for statement in _statements("".join(linecache.getlines(code.co_filename))):
            if _begins(statement, code.co_firstlineno):
                return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return []


def _hand_on(
    todo: list[tuple[types.FunctionType, str, str]], shown: dict[types.FunctionType, Facts]
) -> None:
    """Add (function, parameter, input) to which calls that name them hand variables on.

    Args:
        todo: (function, variable, input) known before.
        shown: The functions that may be called -> what their code shows.
    """
    asked = {function for function, _, _ in todo}
    helpers = {f.__name__: f for f in shown if f not in asked}
    calls: dict[types.FunctionType, list[ast.Call]] = {}
    if not any(shown[helper].none for helper in helpers.values()):
        return
    for caller, variable, given in todo:  # grows meanwhile
        if caller not in calls:
            calls[caller] = _calls(caller) if helpers.keys() & shown[caller].names else []
        for call in calls[caller]:
            called: Any = call.func
            callee = helpers.get(getattr(called, "attr", getattr(called, "id", "")))
            if callee is None:
                continue
            names = callee.__code__.co_varnames[: callee.__code__.co_argcount]
            method = "." in callee.__qualname__.rpartition("<locals>.")[2]
            bound = method and names[:1] == caller.__code__.co_varnames[:1]  # self
            to = [*zip(names[bound:], call.args, strict=False)]
            to += [(str(keyword.arg), keyword.value) for keyword in call.keywords]
            new = [(callee, n, given) for n, v in to if getattr(v, "id", None) == variable]
            todo += [one for one in new if one not in todo]


def _begins(statement: ast.stmt, line: int) -> bool:
    """Say whether a function's definition begins at a line, that of its first decorator."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return line in (statement.lineno, *(d.lineno for d in statement.decorator_list))


def _innermost(statements: list[ast.stmt], first: int, last: int) -> ast.stmt | None:
    """Return the shortest statement that holds some lines."""
    around = [s for s in statements if s.lineno <= first and last <= (s.end_lineno or s.lineno)]
    return min(around, key=lambda s: (s.end_lineno or s.lineno) - s.lineno, default=None)


def _is_told(function: Any) -> bool:
    """Say whether a function does nothing with text but to tell it."""
    return (
        any(function is one for one in (print, warnings.warn, torch._assert))
        or isinstance(getattr(function, "__self__", None), logging.Logger)
        or getattr(function, "__module__", None) == "logging"
    )


def _tells(statement: ast.stmt | None, frame: types.FrameType) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _is_told(_value(statement.value.func, frame))
    if isinstance(statement, ast.Expr):  # a docstring, or text that nobody uses
        return not any(isinstance(n, (ast.Subscript, ast.Call)) for n in ast.walk(statement))
    return isinstance(statement, (ast.Raise, ast.Assert))


def _warn_of_tries(tracer: Tracer, functions: list[types.FunctionType]) -> None:
    """Say what is computed where the program catches exceptions: the graph does not."""
    spans: dict[str, list[Any]] = {}
    for file in {function.__code__.co_filename for function in functions}:
        statements: list[Any] = []
        with contextlib.suppress(SyntaxError):
            statements = _statements("".join(linecache.getlines(file)))
        found = [(s.body[0].lineno, s.body[-1].end_lineno, _caught(s)) for s in statements
                 if isinstance(s, (ast.Try, ast.With))]  # fmt: skip
        spans[file] = [span for span in found if span[-1]]
    for node in tracer.graph.nodes if any(spans.values()) else ():
        lookup = {"KeyError"} if node.target is operator.getitem else set[str]()
        for place in node.meta.get("source", ()):
            for first, last, kinds in spans.get(place[0], ()):
                if first <= place[1] <= last and kinds - (_OF_NO_OPERATION - lookup):
                    text = f"the program catches what {node.name} may raise, and the graph does not"
                    tracer.warn("try", text, place)


_OF_NO_OPERATION = {"ImportError", "ModuleNotFoundError", "KeyError", "OSError", "StopIteration"}


def _caught(statement: ast.Try | ast.With) -> set[str]:
    """Return the names of the exceptions that a statement catches to go on another way."""
    if isinstance(statement, ast.With):
        calls = [item.context_expr for item in statement.items]
        calls = [c for c in calls if isinstance(c, ast.Call) and "suppress" in ast.unparse(c.func)]
        caught = [kind for call in calls for kind in call.args]
    else:
        handlers = [h for h in statement.handlers if not isinstance(h.body[-1], ast.Raise)]
        caught = [h.type or ast.Name("BaseException") for h in handlers]
    kinds = [kind.elts if isinstance(kind, ast.Tuple) else [kind] for kind in caught]
    return {ast.unparse(part).rpartition(".")[-1] for parts in kinds for part in parts}


# -- questions that are read from the code -----------------------------------------------------


def warn_of_code(tracer: Tracer, shown: dict[types.FunctionType, Facts], asked: list[Any]) -> None:
    """Say which questions of the code were answered for a Proxy, and not for the value.

    Args:
        tracer: the one that has traced.
        shown: Function -> what its code shows.
        asked: The root function and the forwards: those whose parameters are Proxies.
    """
    _warn_of_tries(tracer, [f for f, facts in shown.items() if facts.catches])
    told = [f for f in asked if f in shown]
    inputs = {str(n.target): n for n in tracer.graph.find_nodes(op="placeholder")}
    optional = {name for name, node in inputs.items() if node.args == (None,)}
    given = [(f, name, name) for f in told for name in inputs if name in optional]
    _hand_on(given, shown)
    for asks, name, its in given:
        if name in shown[asks].none:
            tracer.warn(
                "none",
                f"whether {name} is None was answered for a given {its}, and that answer is fixed "
                f"in the graph although the default of {its} is None: fix it, concrete_args="
                f"{{{its!r}: None}}, or give the parameter no default",
                shown[asks].none[name],
            )
    for function in told:
        found = shown[function]
        for name in [name for name in inputs if name in found.same]:
            tracer.warn(
                "is",
                f"`is` compared {name} as a Proxy, {_FIXED}: if it is a setting, fix it, "
                f"concrete_args={{{name!r}: ...}}",
                found.same[name],
            )
        for (builtin, name), place in found.builtins.items():
            if function is tracer.root_function and name not in inputs:
                continue
            text = (
                "the type of a Proxy" if builtin == "type" else "true of a Proxy, not of a tensor"
            )
            tracer.warn(
                builtin,
                f"{builtin}({name}) is {text} while tracing, and what follows from that is "
                "fixed in the graph",
                place,
            )
