"""No loss of a trace is silent: questions that a Proxy answers, and state that it cannot see."""

from __future__ import annotations

import collections.abc
import concurrent.futures
import copy
import functools
import json
import math
import operator
import pickle
import re
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor as T
from torch import nn

import fxlab
from fxlab import TraceWarning

X = torch.ones(3)


class Model(nn.Module):
    """Calls a function with itself, so that a test can be written on one line."""

    def __init__(self, function):
        super().__init__()
        self.function, self.generator = function, torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.function(self, x)


def warnings_of(root: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gm = fxlab.symbolic_trace(root)
    assert all(issubclass(w.category, TraceWarning) for w in told)
    return gm, [str(w.message) for w in told]


def by_match(m, x):
    match x:
        case torch.Tensor():
            return x * 2
        case _:
            return x * 3


def gradient_by_a_variable(m, x):
    gradient = x.grad
    if gradient is not None:
        x = x * 2
    return x


def text_as_a_key(m, x):
    seen = {f"{x.shape}, {X.dtype}": 1}
    return x * len(seen)


def text_by_a_variable(m, x):
    key = str(x.shape)
    return x * 2 if key in {"torch.Size([3])": 1} else x


def describe(x):
    return f"{x.dtype}"


CLASS, NONE, TEXT, NAME = (
    "answers for the Proxy, not for the value",
    "is None was answered for a given one",
    "is not the text of the value",
    "is true for a Proxy and false for a tensor",
)
ASKED = {
    "__class__": (lambda m, x: x * 2 if x.__class__ is torch.Tensor else x * 3, CLASS),
    "match": (by_match, CLASS),
    "another name for Tensor": (lambda m, x: x * 2 if isinstance(x, (list, T)) else x, CLASS),
    "an abstract class": (
        lambda m, x: x * 2 if isinstance(x, collections.abc.Callable) else x,
        CLASS,
    ),
    "a shape's class": (lambda m, x: x * 2 if isinstance(x.shape, tuple) else x, CLASS),
    "a union": (lambda m, x: x * 2 if isinstance(x, int | None) else x, CLASS),
    "grad_fn": (lambda m, x: x * 2 if x.grad_fn is None else x * 3, NONE),
    "grad by getattr": (lambda m, x: x * 2 if getattr(x, "grad", 1) is None else x, NONE),
    "grad by a variable": (gradient_by_a_variable, NONE),
    "a key": (text_as_a_key, TEXT),
    "a key by a variable": (text_by_a_variable, TEXT),
    "a comparison": (lambda m, x: x if str(x.dtype) == "torch.float32" else x * 2, TEXT),
    "a comparison by a function": (
        lambda m, x: x if describe(x) == "torch.float32" else x * 2,
        TEXT,
    ),
    "getattr with a default": (lambda m, x: x * getattr(x, "scale_factor", 2), NAME),
    "hasattr by another name": (lambda m, x: x * 2 if asks(x, "scale_factor") else x, NAME),
}
asks = hasattr


COLUMNS = {"another name for Tensor", "an abstract class", "a shape's class", "a union",
           "hasattr by another name"}  # fmt: skip
"""Told apart by the columns of an instruction, which Python has since 3.11."""


@pytest.mark.parametrize("name", ASKED if sys.version_info >= (3, 11) else ASKED.keys() - COLUMNS)
def test_a_question_that_a_proxy_answers_for_itself_is_a_warning_with_its_line(name):
    function, text = ASKED[name]
    _, told = warnings_of(Model(function))
    assert [text in one and "test_silent.py:" in one for one in told] == [True]


def of_type(value, kind):
    return type(value) is kind


def is_given(mask):
    return mask is not None


class Part(nn.Module):
    def forward(self, x, bias=None):
        return x if bias is None else x + bias


class Optional(nn.Module):
    """Hands its optional input on, under other names."""

    def __init__(self, function):
        super().__init__()
        self.function, self.part = function, Part()

    def forward(self, x, mask=None):
        return self.function(self, x, mask)


def none_by_match(m, x, mask):
    match mask:
        case None:
            return x
        case _:
            return x * mask


@fxlab.wrap
def perhaps(x):
    return None


def by_a_local(m, x, mask):
    given = perhaps(x)
    return x if given is None else x * 2


class Asks:
    """A function in an object."""

    def __call__(self, x):
        return x * 2 if type(x + 1) in (torch.Tensor, nn.Parameter) else x


SILENT = {
    "type of a local": (lambda m, x, mask: x * 2 if type(x + 1) is T else x, r"type\(Proxy\(add"),
    "type by a function": (lambda m, x, mask: x * 2 if of_type(x + 1, T) else x, r"type\("),
    "type by an object": (lambda m, x, mask: Asks()(x), r"type\("),
    "type by issubclass": (lambda m, x, mask: x * 2 if issubclass(type(x), T) else x, r"type\("),
    "callable": (lambda m, x, mask: x * 2 if callable(x + 1) else x, r"callable\(Proxy\(add"),
    "an input": (lambda m, x, mask: x if mask is None else x * mask, NONE),
    "an input by a function": (lambda m, x, mask: x * mask if is_given(mask) else x, NONE),
    "an input by a module": (lambda m, x, mask: m.part(x, mask), NONE),
    "an input by match": (none_by_match, NONE),
    "a result of a leaf": (by_a_local, NONE),
    "grad of a local": (lambda m, x, mask: x if is_given((x + 1).grad) else x * 2, NONE),
    "a dtype": (lambda m, x, mask: x * 2 if x.dtype is torch.float32 else x, "answered for the"),
    "a method": (lambda m, x, mask: x * 2 if x.is_contiguous() is True else x, "answered for the"),
    "operator.is_": (lambda m, x, mask: x if operator.is_(mask, None) else x * mask, NONE),
    "two inputs": (lambda m, x, mask: x * 2 if x is mask else x, "answered for the"),
    "in place": (lambda m, x, mask: x * 2 if x.add_(0) is x else x, "answered for the"),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_question_that_asks_no_method_is_a_warning_with_its_line_wherever_it_is_asked(name):
    function, text = SILENT[name]
    codes = [f.__code__ for f in (function, of_type, is_given, Part.forward, Asks.__call__)]
    _, told = warnings_of(Optional(function))
    assert [bool(re.search(text, one)) and "test_silent.py:" in one for one in told] == [True]
    same = [f.__code__ for f in (function, of_type, is_given, Part.forward, Asks.__call__)]
    assert all(map(operator.is_, codes, same))


def in_a_table(x):
    return x * 2 if type(x + 1) is T else x


def in_a_list(x):
    return x * 2 if type(x + 2) is T else x


class Helper:
    """Asks in every kind of method."""

    def __init__(self, x=None):
        self.x = x * 2 if type(x) is T else x

    def __add__(self, x):
        return x * 2 if type(x) is T else x

    @classmethod
    def of_class(cls, x):
        return x * 2 if type(x) is T else x

    @staticmethod
    def static(x):
        return x * 2 if type(x) is T else x

    @property
    def double(self):
        return self.x * 2 if type(self.x) is T else self.x

    def method(self, x):
        return next(v * 2 if type(v) is T else v for v in [x])


class Empty(Helper):
    def __init__(self, x):
        self.x = x


TABLE, LIST = {"f": in_a_table}, [functools.partial(in_a_list)]
REACHED = {
    "a table": lambda m, x: TABLE["f"](x),
    "a partial in a list": lambda m, x: LIST[0](x),
    "a constructor": lambda m, x: Helper(x).x,
    "an operator": lambda m, x: Empty(1) + x,
    "a class method": lambda m, x: Helper.of_class(x),
    "a static method": lambda m, x: Helper.static(x),
    "a property": lambda m, x: Empty(x).double,
    "an object of the model": lambda m, x: m.helper.method(x),
    "a table of the model": lambda m, x: m.table["f"](x),
    "an attribute of a module": lambda m, x: sys.modules[__name__].in_a_table(x),
}


@pytest.mark.parametrize("name", REACHED)
def test_a_function_that_asks_is_found_wherever_the_program_has_it_from(name):
    m = Model(REACHED[name])
    m.helper, m.table = Empty(1), {"f": functools.partial(of_type, kind=T)}
    _, told = warnings_of(m)
    assert len(told) == 1 and "type(Proxy(" in told[0] and "test_silent.py:" in told[0]


HARMLESS_IDENTITY = {
    "a list": lambda m, x, mask: x[0] if type(x) is list or type(x) in (dict, str) else x,
    "a value that is there": lambda m, x, mask: x if is_given(x + 1) and is_given(m.part.w) else 0,
    "another object": lambda m, x, mask: x if (x + 1) is m or (x * 2) is Ellipsis else x * 2,
    "itself": lambda m, x, mask: x * 2 if x is x else x,
    "a new value": lambda m, x, mask: x if (x + 1) is x else x * 2,
    "a method of a value": lambda m, x, mask: x * 2 if callable(x.relu) and callable(m) else x,
    "text": lambda m, x, mask: shows(x),
    "a type that is shadowed": lambda m, x, mask, type=len: x * type([m]) if m is not X else x,
    "a flag that is there": lambda m, x, mask: F.dropout(x, 0.5, m.training) if has(m) else x,
    "an assert": lambda m, x, mask: insists(x, mask),
}


def has(m):
    return is_given(m.training) and None is not m.training


def shows(x):
    print(type(x))
    return x * 2


def insists(x, mask):
    assert mask is not None
    return x * mask


@pytest.mark.parametrize("name", HARMLESS_IDENTITY)
def test_what_is_asked_without_a_method_and_answered_rightly_is_no_warning(name):
    m = Optional(HARMLESS_IDENTITY[name])
    m.part.w = nn.Parameter(X)
    gm, told = warnings_of(m.eval())
    assert told == [] and torch.equal(gm(X, X), m(X, X))


def test_a_dtype_that_is_known_is_compared_as_it_is():
    def by_dtype(m, x):
        return x * 2 if m.weight.dtype is torch.float32 else x

    m = Model(by_dtype)
    m.weight = nn.Parameter(X)
    gm, told = warnings_of(m)
    assert told == [] and torch.equal(gm(X), X * 2)
    assert [node.name for node in gm.graph.nodes] == ["x", "weight", "mul", "output"]
    with pytest.warns(TraceWarning, match=r"fixed to torch.float32, known from example inputs"):
        gm = fxlab.symbolic_trace(
            Model(lambda m, x: x * 2 if x.dtype is torch.float32 else x), example_inputs=(X,)
        )
    assert torch.equal(gm(X), X * 2)


FLAGS = {
    "a dict": lambda m, x: x * 2 if {"t": m.training}["t"] is True else x * 3,
    "a list": lambda m, x: x * 2 if [m.training][0] is not False else x * 3,
    "a generator": lambda m, x: x * 2 if any(t is True for t in [m.training]) else x * 3,
    "keywords": lambda m, x: x * 2 if kept(t=m.training) else x * 3,
    "operator.is_": lambda m, x: x * 2 if operator.is_(m.training, True) else x * 3,
    "type": lambda m, x: x * 2 if type([m.training][0]) is bool else x * 3,
}


def kept(**options):
    return options["t"] is True


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_in_a_container_that_is_asked_by_is_is_right_and_said_to_be_fixed(name, training):
    m = Model(FLAGS[name]).train(training)
    gm, told = warnings_of(m)
    assert torch.equal(gm(X), m(X)) and len(told) == 1 and "training was fixed" in told[0]


def test_code_without_a_source_tells_what_its_parameters_are_asked(tmp_path):
    place: dict[str, Any] = {}
    source = "def asks(x, m=None):\n    return x if m is None else x * 2 if type(x) is list else m"
    exec(compile(source, str(tmp_path / "gone.py"), "exec"), place)
    _, told = warnings_of(place["asks"])
    assert len(told) == 2 and all("gone.py:2" in one for one in told)


def test_a_source_that_changed_since_it_was_imported_is_not_run(tmp_path):
    file, place = tmp_path / "changes.py", dict[str, Any]()
    file.write_text("def f(x, m=None):\n    return x * 2 if m is None else x * m\n")
    exec(compile(file.read_text(), str(file), "exec"), place)
    file.write_text("def f(x, m=None):\n    return x * 9 if m is None else x * 9\n")
    gm, told = warnings_of(place["f"])
    assert torch.equal(gm(X, X), X) and len(told) == 1


def test_traces_in_threads_leave_the_code_of_what_asks_as_it_was():
    code, models = Part.forward.__code__, [Optional(SILENT["an input by a module"][0])] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            modules = list(pool.map(fxlab.symbolic_trace, models * 8))
    assert all(torch.equal(gm(X, X), X * 2) for gm in modules)
    assert Part.forward.__code__ is code


def only_tells(m, x):
    message = f"bad {x.shape}"
    assert m.function is not None, message
    torch._assert(m.function is not None, f"{x.shape}")
    print(f"{x.shape}", str(x.dtype))
    warnings.warn(describe(x), DeprecationWarning, stacklevel=1)
    if m.function is None:
        raise ValueError(message)
    return x * 2


HARMLESS = {
    "a class that no value has": lambda m, x: x * 2 if isinstance(x, (str, dict)) else x,
    "a class that both have": lambda m, x: x * 2 if isinstance(x, collections.abc.Hashable) else x,
    "somebody who knows of tracing": lambda m, x: (
        x * 2 if isinstance(x, (torch.fx.Proxy, T)) else x
    ),
    "a plain read": lambda m, x: x.grad,
    "torch's own questions": lambda m, x: torch._foreach_add([x, x], [x, x])[0],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_question_whose_answer_is_the_value_s_is_no_warning(name):
    assert warnings_of(Model(HARMLESS[name]))[1] == []


def test_text_that_only_tells_is_no_warning(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", TraceWarning)
        fxlab.symbolic_trace(Model(only_tells))
    assert "Proxy(x)" in capsys.readouterr().out


WANT_A_BOOL = {
    "json": lambda m, x: x * len(json.dumps(m.training)),
    "json of a dict": lambda m, x: x * len(json.dumps({"training": m.training})),
    "math": lambda m, x: x * math.comb(3, m.training),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WANT_A_BOOL)
def test_what_wants_a_bool_and_asks_no_method_gets_one_and_that_is_said(name, training):
    m = Model(WANT_A_BOOL[name]).train(training)
    gm, told = warnings_of(m)
    assert torch.equal(gm(X), m(X)) and "training was fixed to" in told[0]


def test_a_tracer_whose_second_try_got_bools_records_flags_again_in_the_next_trace():
    tracer = fxlab.Tracer()
    with pytest.warns(TraceWarning, match="training was fixed"):
        tracer.trace(Model(WANT_A_BOOL["json"]))
    graph = tracer.trace(Model(lambda m, x: F.dropout(x, 0.5, m.training)))
    assert graph.find_nodes(op="get_attr", target="training")


def test_an_error_of_the_program_itself_is_raised_though_it_read_the_flag():
    def wrong(m, x):
        F.dropout(x, 0.5, m.training)
        return x * len(3)

    with pytest.raises(TypeError, match="has no len") as info:
        fxlab.symbolic_trace(Model(wrong))
    assert type(info.value) is TypeError


# -- state that a trace cannot see -------------------------------------------------------------


@fxlab.wrap
def writes(t, x):
    t += x.sum()
    return t


@fxlab.wrap
def writes_by_another(t, x):
    return add_to(t, x)


def add_to(t, x):
    return torch.add(t, x, out=t)


@fxlab.wrap
def reads(t, x):
    return t + x


LEAVES = {
    "writes": lambda x: writes(torch.zeros(3) + 1, x),
    "writes_by_another": lambda x: writes_by_another(torch.zeros(3) + 1, x),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_may_write_into_a_derived_constant_is_a_warning(name):
    gm, told = warnings_of(LEAVES[name])
    assert gm.graph.find_nodes(op="call_function", target=globals()[name])
    assert len(told) == 1 and "all calls of the graph share it" in told[0]


def test_a_leaf_that_only_reads_a_derived_constant_is_none():
    gm, told = warnings_of(lambda x: reads(torch.zeros(3) + 1, x))
    assert told == [] and torch.equal(gm(X), gm(X))


def test_a_generator_of_the_model_is_drawn_from_anew_by_each_call():
    m = Model(lambda m, x: x + torch.rand(3, generator=m.generator))
    state = m.generator.get_state()
    gm, told = warnings_of(m)
    assert told == [] and torch.equal(m.generator.get_state(), state)
    first, second = gm(X), gm(X)
    m.generator.set_state(state)
    assert torch.equal(first, m(X)) and torch.equal(second, m(X)) and not torch.equal(first, second)


def test_a_generator_of_a_closure_is_drawn_from_anew_by_each_call():
    generator = torch.Generator().manual_seed(3)
    gm, told = warnings_of(lambda x: x + torch.rand(3, generator=generator))
    assert told == [] and not torch.equal(gm(X), gm(X))


def test_a_generator_that_the_program_makes_begins_anew_in_each_call_and_that_is_said():
    m = Model(lambda m, x: x + torch.rand(3, generator=torch.Generator().manual_seed(5)))
    gm, told = warnings_of(m)
    assert len(told) == 1 and "a generator that the program made" in told[0]
    assert torch.equal(gm(X), m(X)) and torch.equal(gm(X), m(X))


def test_numbers_drawn_into_a_constant_from_a_generator_of_the_model_are_said_and_put_back():
    m = Model(lambda m, x: x + torch.empty(3).normal_(generator=m.generator))
    state = m.generator.get_state()
    _, told = warnings_of(m)
    assert len(told) == 1 and "draws random numbers from a generator" in told[0]
    assert torch.equal(m.generator.get_state(), state)


def test_a_graph_module_that_draws_from_a_generator_can_be_copied_and_pickled():
    gm, _ = warnings_of(Model(lambda m, x: x + torch.rand(3, generator=m.generator)))
    for again in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert again(X).shape == (3,)
