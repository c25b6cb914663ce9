# ruff: noqa: RUF001 - letters that look alike are the point
"""Hostile names and signatures: whatever Python allows must mean the same in generated code.

Names of parameters, submodules, parameters, buffers, attributes, nodes and functions are drawn from
a pool of keywords, builtins, the generated code's own globals, quotes, spaces, digits and text
beyond ASCII, and from anything that hypothesis thinks of. The traced module must give eager's
numbers and the original's signature, also after a copy and a pickle.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import keyword
import os
import pickle
import unicodedata
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxlab

LONG = bool(os.environ.get("FXLAB_LONG"))
fuzz = settings(
    max_examples=1500 if LONG else 60,
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(3600 if LONG else 600)

OWN_GLOBALS = (
    "torch operator inf nan device NoneType fx_pytree pytree getattr slice Ellipsis set range self "
    "fxlab _operator torch_relu torch_nn_functional_relu forward root _in_spec _out_spec "
    "_tensor_constant0 _tensor _object _type wrapped add add_1 relu output input x y x_1 y_1"
).split()
HOSTILE = sorted(
    {
        *keyword.softkwlist,
        *(n for n in dir(builtins)
          if n.isidentifier() and not keyword.iskeyword(n) and n != "__debug__"),
        *OWN_GLOBALS,
        "__class__", "__dict__", "_", "__", "_0", "a1", "A", "é", "ñandú", "变量", "ﬁ", "ℌ", "µ",
        "x٣", "Ⅷ",   "_private", "__mangled", "__dunder__", "lambda_", "None_", "self_1", "cls",
        "args", "kwargs",
    }
)  # fmt: skip
ODD = [
    *keyword.kwlist, "a b", "a-b", "0", "1x", "a'b", 'a"b', "a\\b", "a\nb", "\t", " ", "a;b",
    "import os", "#", "{}", "%s", "{x}", "<img>", "</script>", "$", "😀", "'''", '"""', "\\",
    "x); import os; (", "a,b", "=", "\u2028", "\u200b", "é'", "None", "True", "\x7f",
]  # fmt: skip

identifiers = st.one_of(
    st.sampled_from(HOSTILE),
    st.from_regex(r"[^\W\d]\w{0,8}", fullmatch=True).filter(
        lambda s: s.isidentifier() and not keyword.iskeyword(unicodedata.normalize("NFKC", s))
    ),
)
attributes = st.one_of(
    st.sampled_from(HOSTILE + ODD),
    st.text(min_size=1, max_size=6).filter(lambda s: "." not in s and "\x00" not in s),
)


def distinct(names: list[str]) -> list[str]:
    """Drop names that Python reads as one (it normalises identifiers)."""
    return list({unicodedata.normalize("NFKC", name): name for name in names}.values())


class Thing:
    """A default or annotation whose repr is no code."""

    def __repr__(self) -> str:
        return "<Thing> )(*&"


DEFAULTS: list[Any] = [
    1, -2.5, float("inf"), float("-inf"), float("nan"), True, None, "text", "it's \"quoted\"\n",
    (1, 2), [1, [2]], {"a": 1}, 3 + 4j, torch.float32, torch.device("cpu"), torch.ones(2), Thing(),
    Thing, len, slice(1, 2), ..., frozenset({1}), b"bytes", range(3), torch.Size([2]), 10**30,
]  # fmt: skip
ANNOTATIONS: list[Any] = [
    torch.Tensor, int, "torch.Tensor", "int | None", list[int], dict[str, torch.Tensor], Thing,
    int | None, None, Any, "no.such.Name", tuple[int, ...],
]  # fmt: skip
KINDS = list(inspect._ParameterKind)


@st.composite
def signatures(draw: Any) -> tuple[list[str], list[Any], list[Any], list[Any]]:
    """Names, kinds, defaults and annotations that Python accepts together."""
    names = distinct(draw(st.lists(identifiers, min_size=1, max_size=6)))
    kinds = sorted(draw(st.sampled_from(KINDS)) for _ in names)
    kept: list[Any] = []
    for kind in kinds:
        star = kind in (KINDS[2], KINDS[4])
        kept.append(KINDS[1] if star and kind in kept and kept[-1] <= KINDS[1] else kind)
    kinds = []
    for kind in kept:
        if kind in (KINDS[2], KINDS[4]) and kind in kinds:
            kind = KINDS[3] if kind is KINDS[2] else None
        kinds.append(kind)
    pairs = [(n, k) for n, k in zip(names, kinds, strict=True) if k is not None]
    names, kinds = [n for n, _ in pairs], [k for _, k in pairs]
    defaults, must = [], False
    for kind in kinds:
        if kind in (KINDS[2], KINDS[4]):
            defaults.append(inspect.Parameter.empty)
            continue
        given_one = draw(st.booleans()) or (must and kind <= KINDS[1])
        must = must or (given_one and kind <= KINDS[1])
        defaults.append(draw(st.sampled_from(DEFAULTS)) if given_one else inspect.Parameter.empty)
    annotations = [
        draw(st.sampled_from(ANNOTATIONS)) if draw(st.booleans()) else inspect.Parameter.empty
        for _ in names
    ]
    return names, kinds, defaults, annotations


def build(names: list[str], kinds: list[Any], defaults: list[Any], annotations: list[Any]) -> Any:
    """Make a function with this signature that computes something different from each tensor."""
    parts, marked = [], False
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind is KINDS[3] and not marked and KINDS[2] not in kinds:
            parts.append("*")
            marked = True
        text = {KINDS[2]: "*", KINDS[4]: "**"}.get(kind, "") + name
        text += f": annotation_{i}_" if annotations[i] is not inspect.Parameter.empty else ""
        text += f" = default_{i}_" if defaults[i] is not inspect.Parameter.empty else ""
        parts.append(text)
        if kind is KINDS[0] and KINDS[0] not in kinds[i + 1 :]:
            parts.append("/")
    empty = inspect.Parameter.empty
    used = [(i, n) for i, n in enumerate(names)
            if kinds[i] not in (KINDS[2], KINDS[4]) and defaults[i] is empty]  # fmt: skip
    lines = ["__result__ = torch_.zeros(2)"]
    lines += [f"__result__ = torch_.relu({n}) * {i + 2} + __result__ * 3 + 1" for i, n in used]
    source = f"def program({', '.join(parts)}):\n    " + "\n    ".join(
        [*lines, "return __result__"]
    )
    namespace: dict[str, Any] = {"torch_": torch}
    namespace |= {f"default_{i}_": d for i, d in enumerate(defaults)}
    namespace |= {f"annotation_{i}_": a for i, a in enumerate(annotations)}
    exec(source, namespace)
    return namespace["program"]


def arguments(fn: Any) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = [], {}
    for i, p in enumerate(inspect.signature(fn).parameters.values()):
        if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        value = torch.tensor([i + 0.5, -1.0])
        if p.kind is p.KEYWORD_ONLY:
            kwargs[p.name] = value
        else:
            args.append(value)
    return args, kwargs


def same_parameter(a: inspect.Parameter, b: inspect.Parameter) -> bool:
    return (a.name, a.kind) == (b.name, b.kind) and a.default is b.default


@fuzz
@given(signatures())
def test_every_signature_is_kept_and_means_the_same(signature: Any) -> None:
    assume("torch_" not in signature[0] and "__result__" not in signature[0])
    try:
        fn = build(*signature)
    except SyntaxError:
        assume(False)
    gm = fxlab.symbolic_trace(fn)
    gm.graph.lint()
    args, kwargs = arguments(fn)
    expected = fn(*args, **kwargs)
    old = list(inspect.signature(fn).parameters.values())
    for module in (gm, copy.deepcopy(gm)):
        # nn.Module's own `__call__` has a parameter `self`.
        call = module.forward if "self" in kwargs else module
        assert torch.equal(call(*args, **kwargs), expected), module.code
        new = list(inspect.signature(module.forward).parameters.values())
        assert [p.name for p in new] == [p.name for p in old], module.code
        assert [p.kind for p in new] == [p.kind for p in old], module.code
    new = list(inspect.signature(gm.forward).parameters.values())
    assert all(map(same_parameter, new, old)), gm.code
    for mine, theirs in zip(new, old, strict=True):
        if not isinstance(theirs.annotation, str):
            assert mine.annotation == theirs.annotation, gm.code


class Holder(nn.Module):
    """Holds something of each kind under hostile names and uses all of it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names_: list[tuple[str, int]] = []
        for i, name in enumerate(names):
            if hasattr(self, name):
                continue
            kind = i % 3
            if kind == 0:
                self.add_module(name, nn.Linear(2, 2))
            elif kind == 1:
                self.register_parameter(name, nn.Parameter(torch.full((2,), float(i))))
            else:
                self.register_buffer(name, torch.full((2,), float(i) + 0.5))
            self.names_.append((name, kind))

    def forward(self, x):
        for name, kind in self.names_:
            value = getattr(self, name)
            x = value(x) if kind == 0 else torch.relu(x) + value
        return x


class Outer(nn.Module):
    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name_ = name

    def forward(self, x):
        return getattr(self, self.name_)(x) * 2


@fuzz
@example(["A"], "graph")
@example(["A"], "code")
@example(["A"], "__name__")
@given(st.lists(attributes, min_size=1, max_size=7, unique=True), attributes)
def test_every_attribute_name_is_kept_and_means_the_same(names: list[str], outer: str) -> None:
    inner = Holder(names)
    assume(not hasattr(nn.Module(), outer) and outer != "name_")
    model = Outer(outer, inner)
    own = hasattr(fxlab.GraphModule, outer) and not hasattr(nn.Module, outer)
    if own or outer in ("_graph", "_original", "meta"):
        with pytest.raises(fxlab.RewriteError, match=f"the model has {outer!r}, which is a name"):
            fxlab.symbolic_trace(model)
        return
    gm = fxlab.symbolic_trace(model)
    gm.graph.lint()
    x = torch.tensor([[0.5, -1.0]])
    expected = model(x)
    assert torch.equal(gm(x), expected), gm.code
    assert torch.equal(copy.deepcopy(gm)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(gm))(x), expected)
    assert torch.equal(fxlab.symbolic_trace(gm)(x), expected)
    assert torch.equal(fxlab.Interpreter(gm).run(x), expected)
    assert set(gm.state_dict()) == set(model.state_dict()) & set(gm.state_dict())


@fuzz
@given(st.lists(st.one_of(attributes, identifiers), min_size=1, max_size=8))
def test_every_node_name_is_usable(names: list[str]) -> None:
    graph = fxlab.Graph()
    first = graph.placeholder("x")
    value = first
    for i, name in enumerate(names):
        value = graph.create_node("call_function", torch.add, (value, i), {"alpha": 2}, name)
    graph.output((value, first))
    gm = fxlab.GraphModule(nn.Module(), graph)
    gm.graph.lint()
    x = torch.ones(2)
    expected = x + 2 * sum(range(len(names)))
    assert torch.equal(gm(x)[0], expected), gm.code
    assert torch.equal(gm(x)[1], x)
    assert len({n.name for n in graph.nodes}) == len(list(graph.nodes))
    for node, name in zip(list(graph.nodes)[1:-1], names, strict=True):
        node.name = name + "!"  # whatever somebody sets: the code must not break
    if len({n.name for n in graph.nodes}) == len(list(graph.nodes)):
        assert torch.equal(gm(x)[0], expected), gm.code
        assert torch.equal(copy.deepcopy(gm)(x)[0], expected)


@fuzz
@given(
    st.lists(attributes, min_size=1, max_size=5), st.sampled_from(["torch", "os", "a.b", "", "é"])
)
def test_every_function_name_is_usable(names: list[str], home: str) -> None:
    functions = []
    for i, name in enumerate(names):

        def function(x, i=i):
            return x * (i + 2)

        function.__name__ = function.__qualname__ = name
        function.__module__ = home
        functions.append(function)
    functions += [functools.partial(torch.add, 5), Thing().__class__, lambda v: v - 1]
    graph = fxlab.Graph()
    value = x = graph.placeholder("x")
    for function in functions:
        if function is not Thing:
            value = graph.call_function(function, (value,))
    graph.output(value)
    gm = fxlab.GraphModule(nn.Module(), graph)
    expected = torch.ones(2)
    for function in functions:
        expected = expected if function is Thing else function(expected)
    assert x.op == "placeholder"
    assert torch.equal(gm(torch.ones(2)), expected), gm.code
    assert torch.equal(copy.deepcopy(gm)(torch.ones(2)), expected)


@fuzz
@given(st.dictionaries(st.one_of(identifiers, attributes), st.integers(-5, 5), max_size=5))
def test_every_keyword_and_key_is_kept(options: dict[str, int]) -> None:
    def take(x, **given_options):
        return x, dict(given_options)

    graph = fxlab.Graph()
    x = graph.placeholder("x")
    options.pop("x", None)
    call = graph.call_function(take, (x,), dict(options))
    graph.output({"call": call, **{f"k {k}": v for k, v in options.items()}})
    gm = fxlab.GraphModule(nn.Module(), graph)
    result = gm(1)
    assert result["call"] == (1, options), gm.code
    assert {k: result[f"k {k}"] for k in options} == options
    assert list(result["call"][1]) == list(options)


@pytest.mark.parametrize("name", [n for n in HOSTILE if n not in ("__class__", "__dict__")])
def test_a_parameter_of_this_name_does_not_shadow_what_the_code_needs(name: str) -> None:
    source = (
        f"def program({name}, other_):\n"
        f"    a = torch_.relu({name}) + inf_ * 0 + other_[0:1]\n"
        f"    b = torch_.where(a > 0, a, torch_.zeros_like(a, dtype=torch_.float32))\n"
        f"    return getattr_({name}, 'T'), torch_.nan_to_num(b), {name} @ other_\n"
    )
    namespace: dict[str, Any] = {"torch_": torch, "getattr_": getattr, "inf_": float("inf")}
    exec(source, namespace)
    fn = namespace["program"]
    gm = fxlab.symbolic_trace(fn)
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    torch.testing.assert_close(gm(x, y), fn(x, y))
    keyword_name = unicodedata.normalize("NFKC", name)
    torch.testing.assert_close(gm.forward(**{keyword_name: x, "other_": y}), fn(x, y))
