"""Every public docstring says what goes in, what comes out and what is raised; rules that can fail.

The public names are those of tests/reference.py and the public methods of the classes among them.
What a function raises is read from its code: the `raise` statements in it and in the private
functions of the package that it calls, unless a handler around them catches the class.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fxlab
import fxlab.teach
from fxlab.core import errors
from fxlab.core.errors import FxlabError, RewriteError
from tests.reference import entries

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples", "Note")
NAMED = ("Args", "Attributes", "Raises")
SHAPE = re.compile(r"\bshapes?\b|\[[^\]]*\]|\b[Ss]calars?\b|\bsizes?\b|one number|\([A-Z]\w*, ")
DTYPE = re.compile(
    r"\bdtypes?\b|\b[iu]?int\d*\b|\bu?int8\b|\bfloat\w*\b|\bf32\b|\b[fiu]\d*\[|\bbool\b|integers?"
)
UNIT = re.compile(
    r"seconds?|minutes?|bytes?|flops?|_db\b|\bdB\b|decibels?|bits?\b|share|ratio|fraction|factor|times"
    r"|percent|probability|absolute|relative|between 0 and 1|in the .* unit",
    re.IGNORECASE,
)
MEASURE = re.compile(r"(^|_)(time|duration|latency|memory|bandwidth|delay)(_|$)")


def sections(text: str) -> dict[str, dict[str, str]]:
    """Split a docstring: section -> name of an entry -> what is said of it; "" is plain text."""
    found: dict[str, dict[str, str]] = {"": {"": ""}}
    section, names, depth = "", "", 0
    for line in inspect.cleandoc(text).splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            section, names, depth = line[:-1], "", 0
            found.setdefault(section, {"": ""})
            continue
        indent = len(line) - len(line.lstrip())
        if line.strip() and not indent:
            section = names = ""
        depth = depth or indent
        body = line.strip()
        if section in NAMED and body and indent == depth and ":" in body:
            names, _, body = body.partition(":")
        for name in names.split(",") if section in NAMED else [""]:
            key = re.sub(r"\(.*\)|[*` ]", "", name)
            found[section][key] = f"{found[section].get(key, '')} {body}".strip()
    return found


@dataclass(frozen=True)
class Member:
    """Something public that can be called, and the docstring that speaks for it."""

    name: str
    function: Any  # a class's own constructor, a function, a method, what a property asks
    text: str
    owner: Any = None  # the class of a method
    makes: bool = False  # it is a constructor

    @property
    def parameters(self) -> list[inspect.Parameter]:
        found = list(inspect.signature(self.function).parameters.values())
        raw = inspect.getattr_static(self.owner, self.function.__name__, None)
        bound = self.owner is not None and (self.makes or not isinstance(raw, staticmethod))
        return found[bound:]

    @property
    def told(self) -> dict[str, str]:
        """What is said of each parameter."""
        parts = sections(self.text)
        return {**parts.get("Attributes", {}), **parts.get("Args", {})}


def plain(value: Any) -> Any:
    """Return the function in a method, property, class or static method, or under decorators."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    return inspect.unwrap(value) if callable(value) else value


def members() -> Iterator[Member]:
    """Yield the public names that can be called, and the public methods of classes among them."""
    for entry in entries():
        value = entry.value
        if inspect.isfunction(value):
            yield Member(entry.name, inspect.unwrap(value), entry.text)
        elif inspect.isclass(value) and value.__module__.startswith("fxlab"):
            maker = vars(value).get("__init__", vars(value).get("__new__"))
            if maker is not None and not issubclass(value, FxlabError):  # those say it in one place
                yield Member(entry.name, plain(maker), entry.text, value, makes=True)
            for word, raw in vars(value).items():
                function = plain(raw)
                of_ours = getattr(function, "__module__", "").startswith("fxlab")
                if word[0] != "_" and inspect.isfunction(function) and of_ours:
                    said = inspect.getdoc(raw if isinstance(raw, property) else function) or ""
                    yield Member(f"{entry.name}.{word}", function, said, value)


def raised(function: Any, owner: Any = None, seen: set[Any] | None = None) -> dict[type, str]:
    """Return what a function raises, itself or in private functions that it calls, and where."""
    seen = set() if seen is None else seen
    if function in seen or not hasattr(function, "__globals__"):
        return {}
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # generated, or a lambda in the middle of a line
        return {}
    names = {**vars(builtins), **function.__globals__, "self": owner, "cls": owner}
    found: dict[type, str] = {}

    def value_of(node: ast.expr | None) -> Any:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            return inspect.getattr_static(value_of(node.value), node.attr, None)
        return None

    def kind(node: ast.expr) -> Any:
        value = plain(value_of(node.func if isinstance(node, ast.Call) else node))
        if inspect.isfunction(value):  # one of core/errors.py, which builds an error
            told = value.__annotations__.get("return")
            value = value.__globals__.get(told, names.get(told)) if isinstance(told, str) else told
        return value if inspect.isclass(value) and issubclass(value, Exception) else None

    def kinds(handlers: list[ast.ExceptHandler]) -> tuple[type, ...]:
        nodes = [n for h in handlers for n in getattr(h.type, "elts", None) or [h.type]]
        values = [BaseException if node is None else value_of(node) for node in nodes]
        return tuple(value for value in values if inspect.isclass(value))

    def walk(node: ast.AST, caught: tuple[type, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef) and node is not top:
            return
        more: dict[type, str] = {}
        if isinstance(node, ast.Raise) and node.exc is not None and kind(node.exc) is not None:
            more = {kind(node.exc): function.__qualname__}
        elif isinstance(node, ast.Call):
            called = plain(value_of(node.func))
            if inspect.isfunction(called) and called.__name__[0] == "_":
                more = raised(called, owner, seen)
        for error, where in more.items():
            if not issubclass(error, (*caught, NotImplementedError)):  # a method to be overridden
                found.setdefault(error, where)
        for name, part in ast.iter_fields(node):
            guarded = isinstance(node, ast.Try) and name == "body"
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.AST):
                    walk(child, caught + kinds(node.handlers) if guarded else caught)

    top = tree.body[0]
    walk(top, ())
    return found


def unnamed_errors(member: Member) -> list[str]:
    """Name what is raised and not in `Raises`; a parent that is more than Exception will do."""
    told = sections(member.text).get("Raises", {})
    also = getattr(member.owner, "__post_init__", None) if member.makes else None
    found = raised(member.function, member.owner) | raised(plain(also), member.owner)
    general = (Exception, BaseException, object)
    return [
        f"{error.__name__} of {where}"
        for error, where in found.items()
        if not any(c.__name__ in told for c in error.__mro__ if c not in general)
    ]


def unknown_errors(member: Member) -> list[str]:
    """Name the entries of `Raises` that are no exceptions of the package, torch's or Python's."""
    places = (vars(builtins), vars(errors), vars(fxlab), vars(fxlab.teach),
              member.function.__globals__)  # fmt: skip
    found = []
    for name in filter(None, sections(member.text).get("Raises", {})):
        values = [place[name] for place in places if name in place]
        if not any(inspect.isclass(v) and issubclass(v, BaseException) for v in values):
            found.append(name)
    return found


def unexplained(member: Member) -> list[str]:
    """Name the parameters that nothing is said of.

    A function or class has them under `Args` (a dataclass: `Attributes`). A method may have the
    parameter's name in its sentence, and its class may tell in backticks what methods share.
    """
    spoken: set[str] = set()
    if member.owner is not None and not member.makes:
        spoken.update(re.findall(r"\w+", member.text))
        for parent in member.owner.__mro__:
            spoken.update(re.findall(r"`(\w+)`", parent.__doc__ or ""))
    return [p.name for p in member.parameters if p.name not in spoken | member.told.keys()]


def without_measure(member: Member) -> list[str]:
    """Name the tensors without a shape or dtype, and the fractional numbers without a unit."""
    found = []
    told = {p.name: (str(p.annotation), member.told.get(p.name, member.text))
            for p in member.parameters}  # fmt: skip
    result = str(inspect.signature(member.function).return_annotation)
    if not member.makes:
        parts = sections(member.text)
        said = " ".join([parts[""][""], *parts.get("Returns", {}).values()])
        told["the result"] = (result, f"{member.function.__name__} {said}")
    for name, (kind, said) in told.items():
        if kind.startswith(("Callable", "type[")):
            continue
        if re.search(r"\bTensor\b", kind):
            found += [f"{name}: no shape"] * (not SHAPE.search(said))
            found += [f"{name}: no dtype"] * (not DTYPE.search(said))
        number = re.search(r"\bfloat\b", kind) or (MEASURE.search(name) and "int" in kind)
        if number and not UNIT.search(f"{name} {said}"):
            found.append(f"{name}: no unit")
    return found


MEMBERS = {member.name: member for member in members()}
everything = pytest.mark.parametrize("name", MEMBERS)


@everything
def test_every_parameter_is_explained(name):
    assert not unexplained(MEMBERS[name])


@everything
def test_what_is_raised_is_named_under_raises(name):
    assert not unnamed_errors(MEMBERS[name])
    assert not unknown_errors(MEMBERS[name])


@everything
def test_tensors_have_shapes_and_dtypes_and_numbers_have_units(name):
    assert not without_measure(MEMBERS[name])


def test_every_public_method_has_a_docstring():
    assert [name for name, member in MEMBERS.items() if not member.text] == []


def test_the_rules_look_at_the_whole_surface():
    assert {"fxlab.symbolic_trace", "fxlab.Graph", "fxlab.Graph.erase_node",
            "fxlab.passes.Device", "fxlab.teach.grade"} <= MEMBERS.keys()  # fmt: skip
    assert len(MEMBERS) > 300
    assert sum(bool(raised(m.function, m.owner)) for m in MEMBERS.values()) > 50


def _refuse(x: int) -> None:
    if x:
        raise RewriteError("no")


def _caught(x: int) -> None:
    try:
        _refuse(x)
    except FxlabError:
        raise KeyError(x) from None


def bad(x: torch.Tensor, wait: float) -> torch.Tensor:
    """Do it."""
    _refuse(1)
    _caught(2)
    return x * wait


def good(x: torch.Tensor, wait: float) -> torch.Tensor:
    """Do it.

    Args:
        x: Any shape, any dtype.
        wait: In seconds,
            all of them.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        FxlabError: Never: the point is
            that it is named.
        KeyError: Always.
    """
    return bad(x, wait) if wait else (_refuse(1), _caught(1), x)[2]


RULES: dict[Callable[[Member], list[str]], list[str]] = {
    unexplained: ["x", "wait"],
    unnamed_errors: ["RewriteError of _refuse", "KeyError of _caught"],
    unknown_errors: [],
    without_measure: ["x: no shape", "x: no dtype", "wait: no unit", "the result: no shape",
                      "the result: no dtype"],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_is_missing_and_nothing_else(rule):
    assert rule(Member("bad", bad, bad.__doc__ or "")) == RULES[rule]
    assert rule(Member("good", good, good.__doc__ or "")) == []
    said = "Do it.\n\nRaises:\n    NoSuchError: If x.\n    ValueError: If y."
    assert unknown_errors(Member("bad", bad, said)) == ["NoSuchError"]
