"""No loss of a trace is silent: questions that a Proxy answers, and state that it cannot see."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import enum
import json
import math
import pickle
import random
import re
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor as T
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxlab
from fxlab import TraceWarning
from fxlab.tracing import keeping

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


def dtype_by_a_variable(m, x):
    kind = x.dtype
    return x * 2 if kind is torch.float32 else x


def is_strided(x):
    return x.layout is torch.strided


CLASS, SINGLE, NONE, TEXT, NAME = (
    "answers for the Proxy, not for the value",
    "as a Proxy",
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
    "a dtype by is": (lambda m, x: x * 2 if x.dtype is torch.float32 else x, SINGLE),
    "a dtype by is, turned": (lambda m, x: x if torch.float32 is not x.dtype else x * 2, SINGLE),
    "a dtype by a variable": (dtype_by_a_variable, SINGLE),
    "a flag by is": (lambda m, x: x * 2 if x.is_cuda is False else x, SINGLE),
    "a layout in a helper": (lambda m, x: x * 2 if is_strided(x) else x, SINGLE),
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


def test_callable_of_an_input_is_a_warning():
    with pytest.warns(TraceWarning, match=r"callable\(x\) is true of a Proxy"):
        fxlab.symbolic_trace(lambda x: x * 2 if callable(x) else x)


def compares_and_hands_on(m, x):
    y = torch.zeros(3, dtype=x.dtype, device=x.device, requires_grad=X.requires_grad is True)
    kind = x.dtype
    return (x + y).to(kind) if kind == torch.float32 else x


def is_no_proxys(m, x):
    dtype = x.dtype
    return x.to(dtype) * 2 if m.dtype is torch.float32 else x


@pytest.mark.parametrize("function", [compares_and_hands_on, is_no_proxys])
def test_a_dtype_that_is_handed_on_or_compared_by_value_is_no_warning(function):
    model = Model(function)
    model.dtype = torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error", TraceWarning)
        warnings.filterwarnings("ignore", ".*known from example inputs", TraceWarning)
        gm = fxlab.symbolic_trace(model, example_inputs=(X,))
    assert torch.equal(gm(X), model(X))


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


# -- states of torch, modes, and calls that are more than a forward ------------------------------


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "is_grad_enabled": (lambda m, x: x * 2 if torch.is_grad_enabled() else x, torch.no_grad),
    "is_inference_mode_enabled": (
        lambda m, x: x * int(torch.is_inference_mode_enabled()),
        torch.inference_mode,
    ),
    "is_autocast_enabled": (
        lambda m, x: x * 2 if torch.is_autocast_enabled("cpu") else x,
        lambda: torch.autocast("cpu"),
    ),
    "are_deterministic_algorithms_enabled": (
        lambda m, x: x * 2 if torch.are_deterministic_algorithms_enabled() else x,
        deterministic,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_switch_that_is_asked_while_tracing_is_a_warning(name):
    function, region = STATES[name]
    m = Model(function)
    gm, told = warnings_of(m)
    assert len(told) == 1 and f"torch.{name}() was asked" in told[0] and "test_silent" in told[0]
    with region():
        assert not torch.equal(gm(X), m(X))
    assert getattr(torch, name).__module__ != "fxlab.tracing.switches"


def test_a_switch_that_is_asked_in_a_region_of_the_program_is_none():
    def inside(m, x):
        with torch.no_grad():
            return x * 2 if torch.is_grad_enabled() else x * 3

    gm, told = warnings_of(Model(inside))
    assert told == [] and torch.equal(gm(X), X * 3)


class Multiplies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor:
            func = torch.ops.aten.mul.Tensor
        return func(*args, **(kwargs or {}))


def in_a_dispatch_mode(m, x):
    with Multiplies():
        return torch.add(x, 5)


def test_a_dispatch_mode_of_the_program_is_a_warning():
    gm, told = warnings_of(Model(in_a_dispatch_mode))
    assert len(told) == 1 and "a Multiplies sees what is done with tensors" in told[0]
    assert not torch.equal(gm(X), in_a_dispatch_mode(None, X))


def in_eval_mode(m, x):
    m.part.eval()
    y = m.part(x)
    m.part.train()
    return y


def test_a_mode_that_the_program_changes_for_a_while_is_a_warning():
    m = Model(in_eval_mode)
    m.part = nn.Dropout(1.0)
    gm, told = warnings_of(m)
    assert len(told) == 1 and "changes the mode of part" in told[0] and "eval()" in told[0]
    assert torch.equal(m(X), X) and not torch.equal(gm(X), X)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.zeros(1).expand(2**40)  # no machine has room for a copy

    def forward(self, x):
        return x + self.table[:3]


class Adding(Table):
    def forward(self, x):
        x += self.table[:3]
        return x


class Writing(Table):
    def __init__(self):
        super().__init__()
        self.table = torch.zeros(2**11)

    def forward(self, x):
        self.table.add_(0)
        return x + 1


@pytest.mark.parametrize("kind", [Table, Adding, Writing])
def test_a_large_tensor_that_the_model_holds_is_not_copied(kind, monkeypatch):
    monkeypatch.setattr(keeping, "_MOST_BYTES", 2**12)
    gm, told = warnings_of(kind())
    assert torch.equal(gm(X.clone()), kind()(X.clone()))
    assert len(told) == (kind is Writing) and all("not put back (it is too" in t for t in told)


class Calls(nn.Module):
    def __call__(self, x):
        return super().__call__(x) * 5

    def forward(self, x):
        return x + 1


def test_a_call_of_its_own_or_a_forward_that_is_an_attribute_is_a_warning_on_the_root_only():
    gm, told = warnings_of(Calls())
    assert len(told) == 1 and "a __call__ of its own" in told[0] and torch.equal(gm(X), X + 1)
    m = Part()
    m.forward = lambda x: x * 7
    gm, told = warnings_of(m)
    assert len(told) == 1 and "an attribute forward" in told[0] and torch.equal(gm(X), X)
    for part in (m, Calls()):
        gm, told = warnings_of(nn.Sequential(part))
        assert told == [] and torch.equal(gm(X), part(X))


class Part(nn.Module):
    def forward(self, x):
        return x


def test_the_class_of_tensors_of_one_dtype_is_a_class_that_a_value_may_have():
    _, told = warnings_of(Model(lambda m, x: x * 2 if isinstance(x, torch.LongTensor) else x))
    assert len(told) == 1 and CLASS in told[0]


# -- what the model holds, however deep ----------------------------------------------------------


class Count:
    def __init__(self):
        self.value = 0


def counts(m, x):
    m.held.value += 1
    return x * m.held.value


def nested(m, x):
    m.held[0]["n"] += 1
    return x * m.held[0]["n"]


def writes_into_a_tensor(m, x):
    m.held["t"][0].add_(1)
    return x * m.held["t"][0]


def rotates(m, x):
    m.held.rotate()
    return x * m.held[0]


def counts_twice(m, x):
    m.held["calls"] += 1
    return x * m.held["calls"]


HELD = {
    "an object": (Count, lambda held: held.value, counts),
    "a namespace": (lambda: types.SimpleNamespace(value=0), lambda held: held.value, counts),
    "a dict in a list": (lambda: [{"n": 1}], lambda held: held[0]["n"], nested),
    "a tensor in a tuple in a dict": (
        lambda: {"t": (torch.ones(3),)},
        lambda held: held["t"][0].tolist(),
        writes_into_a_tensor,
    ),
    "a deque": (lambda: collections.deque([1, 2, 3]), list, rotates),
    "a counter": (collections.Counter, lambda held: held["calls"], counts_twice),
}


@pytest.mark.parametrize("name", HELD)
def test_what_the_program_changes_inside_of_what_the_model_holds_is_put_back_and_said(name):
    make, look, function = HELD[name]
    m = Model(function)
    m.held = held = make()
    before = look(held)
    gm, told = warnings_of(nn.Sequential(m))
    assert len(told) == 1 and "0.held" in told[0] and "put back" in told[0]
    assert m.held is held and look(held) == before
    assert gm(X).shape == X.shape and look(held) == before


@pytest.mark.parametrize("name", HELD)
def test_what_the_model_holds_and_the_program_only_reads_is_no_warning(name):
    m = Model(lambda m, x: x * len(str(HELD[name][1](m.held))))
    m.held = HELD[name][0]()
    assert warnings_of(m)[1] == []


class Moving(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.update()
        return self.two(x) + self.calls

    def update(self):
        raise NotImplementedError


class Sets(Moving):
    def update(self):
        for one, two in zip(self.one.parameters(), self.two.parameters(), strict=True):
            two.data = two.data * 0.9 + one.data * 0.1


class Decorated(Moving):
    @torch.no_grad()
    def update(self):
        for one, two in zip(self.one.parameters(), self.two.parameters(), strict=True):
            two.mul_(0.9).add_(one, alpha=0.1)


class States(Moving):
    def update(self):
        state = self.one.state_dict()
        for name, value in self.two.state_dict().items():
            value.copy_(state[name])


class Buffers(Moving):
    def update(self):
        for _, buffer in self.named_buffers():
            buffer += 1


class Loads(Moving):
    def update(self):
        self.two.load_state_dict(self.one.state_dict())


@pytest.mark.parametrize("kind", [Sets, Decorated, States, Buffers, Loads])
def test_a_parameter_or_buffer_that_the_program_writes_into_itself_is_put_back_and_said(kind):
    m = kind()
    before = {name: (value, value.clone()) for name, value in m.state_dict(keep_vars=True).items()}
    gm, told = warnings_of(m)
    assert len(told) == 1 and "writes into the tensor" in told[0] and "put back" in told[0]
    for name, value in m.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1])
    assert torch.equal(gm(X), m.two(X)) and not torch.equal(gm(X), m(X))


class Draws(nn.Module):
    def forward(self, x):
        return x * self.factor()

    def factor(self):
        return random.random()


def test_what_a_method_of_the_root_does_is_seen():
    for m in (Draws(), nn.Sequential(Draws())):
        (told,) = warnings_of(m)[1]
        assert "random numbers from random" in told


LOOKED_UP = {
    "a dtype": lambda m, x: x * {torch.float32: 2}.get(x.dtype, 3),
    "a set of dtypes": lambda m, x: x * 2 if x.dtype in {torch.float32} else x * 3,
    "a shape": lambda m, x: x * {(3,): 2}.get(x.shape, 3),
    "a rank": lambda m, x: x * {1: 2}.get(x.dim(), 3),
    "a size": lambda m, x: x * {3: 2}.get(x.size(0), 3),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_what_is_looked_up_by_its_value_is_a_warning(name):
    gm, told = warnings_of(Model(LOOKED_UP[name]))
    assert len(told) == 1 and "looked up as a Proxy" in told[0] and "test_silent.py:" in told[0]
    assert not torch.equal(gm(X), LOOKED_UP[name](None, X))


def test_a_tensor_is_looked_up_as_an_object_and_that_is_no_warning():
    m = Model(lambda m, x: x * {x: 2, x + 1: 3}[x] * len({x, x + 1, x}))
    gm, told = warnings_of(m)
    assert told == [] and torch.equal(gm(X), m(X))


def hooks_a_leaf(m, x):
    handle = m.part.register_forward_hook(lambda module, args, out: out * 2)
    y = m.part(x)
    handle.remove()
    return y


def leaves_a_hook(m, x):
    m.inner.register_forward_hook(lambda module, args, out: out * 2)
    return m.inner(x)


def hooks_what_is_inlined(m, x):
    handle = m.inner.register_forward_hook(lambda module, args, out: out * 2)
    y = m.inner(x)
    handle.remove()
    return y


@pytest.mark.parametrize("function", [hooks_a_leaf, leaves_a_hook])
def test_a_hook_that_the_program_registers_is_a_warning_and_is_removed(function):
    m = Model(function)
    m.part, m.inner = nn.ReLU(), Part()
    _, told = warnings_of(m)
    assert len(told) == 1 and "registers a hook" in told[0] and function.__name__ in told[0]
    assert not m.inner._forward_hooks and not m.part._forward_hooks


def test_a_hook_around_a_call_that_is_traced_into_is_in_the_graph():
    m = Model(hooks_what_is_inlined)
    m.inner = Part()
    gm, told = warnings_of(m)
    assert told == [] and torch.equal(gm(X), X * 2) and torch.equal(m(X), X * 2)


# -- what is read from the code --------------------------------------------------------------------


class Setting(enum.Enum):
    ONE, TWO = 1, 2


def is_a_setting(x, setting=Setting.ONE):
    return x * (2 if setting is Setting.ONE else 3)


def is_true(x, flag=True):
    return x * (2 if flag is True else 3)


def is_another(x, y):
    return x * 2 if x is y else x * y


def is_none_in_a_closure(x, mask=None):
    def masked():
        return x if mask is None else x * mask

    return masked()


IS = {
    is_a_setting: "compared setting as a Proxy.*concrete_args={'setting'",
    is_true: "compared flag as a Proxy",
    is_another: "compared x as a Proxy",
    is_none_in_a_closure: "whether mask is None was answered",
}


@pytest.mark.parametrize("function", IS)
def test_an_input_that_is_compared_by_is_is_a_warning(function):
    (told,) = warnings_of(function)[1]
    assert re.search(IS[function], told) and "test_silent.py:" in told


def exists(value):
    return value is not None


def default(value, other):
    return value if exists(value) else other


class Attends(nn.Module):
    def forward(self, x, context=None, mask=None):
        context = default(context, x)
        return self.masked(x * context, factor=mask)

    def masked(self, y, factor):
        return y if factor is None else y * factor


def test_an_input_that_a_helper_tests_for_none_is_a_warning():
    gm, told = warnings_of(Attends())
    for_mask, for_context = sorted(told)
    assert "given context" in for_context and "return value is not None" in for_context
    assert "given mask" in for_mask and "if factor is None" in for_mask
    assert torch.equal(gm(X, X, X), Attends()(X, X, X))
    for given in ({"context": None, "mask": None}, {"context": fxlab.PH, "mask": fxlab.PH}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gm = fxlab.symbolic_trace(Attends(), concrete_args=given)
        assert not any("None was answered" in str(w.message) for w in caught)


def asks_for_a_key(batch):
    mask = batch.get("mask")
    return batch["x"] if mask is None else batch["x"] * mask


def test_a_value_that_a_dict_may_not_have_is_a_warning():
    (told,) = warnings_of(asks_for_a_key)[1]
    assert "whether what Proxy(batch).get() returns is None" in told
    assert warnings_of(lambda batch: batch["x"] * batch.get("mask", 1))[1] == []


def takes_a_list(xs: list[T]):
    return xs[0] if isinstance(xs, (list, tuple)) else xs * 2


def test_a_class_is_asked_of_what_an_annotation_or_an_example_tells():
    assert CLASS in warnings_of(takes_a_list)[1][0]
    several = lambda xs: xs[0] if isinstance(xs, (list, tuple)) else xs * 2  # noqa: E731
    assert warnings_of(several)[1] == []
    with pytest.warns(TraceWarning, match=CLASS):
        fxlab.symbolic_trace(several, example_inputs=([X, X],))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxlab.symbolic_trace(several, example_inputs=(X,))


def test_what_is_compared_by_is_and_is_no_input_is_none():
    def program(x, setting=Setting.TWO):
        y = x * 2
        return y if setting is Setting.TWO and y is not x else x

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fxlab.symbolic_trace(program, concrete_args={"setting": Setting.TWO})
    assert ["not compared at run time" in str(w.message) for w in told] == [True]


def views_or_not(x):
    try:
        return x.view(3, -1) * 2
    except (RuntimeError, KeyError):
        return x * 3


def suppresses(x):
    with contextlib.suppress(RuntimeError):
        x = x.view(3, -1)
    return x


def looks_up(x):
    try:
        y = x["mask"]
    except KeyError:
        y = None
    return y


@pytest.mark.parametrize("function", [views_or_not, suppresses, looks_up])
def test_operations_whose_exceptions_the_program_catches_are_a_warning(function):
    (told,) = warnings_of(function)[1]
    assert re.search("catches what (view|getitem) may raise", told) and "test_silent.py:" in told


def test_a_try_that_catches_nothing_of_an_operation_or_raises_again_is_none():
    def program(x):
        try:
            import no_such_module  # noqa: F401

            x = x * 5
        except ImportError:
            x = x * 2
        try:
            x = x.view(3, -1)
        except RuntimeError as error:
            raise ValueError("no three") from error
        finally:
            x = x + 1
        return x

    gm, told = warnings_of(program)
    assert told == [] and torch.equal(gm(X), program(X))


def matches_a_shape(x):
    match x.shape:
        case (_,):
            return x * 2
        case _:
            return x * 3


def matches_a_variable(x):
    shape = x.shape
    match shape:
        case [_]:
            return x * 2
    return x * 3


@pytest.mark.parametrize("function", [matches_a_shape, matches_a_variable])
def test_a_shape_that_is_matched_is_a_warning(function):
    (told,) = warnings_of(function)[1]
    assert "for no sequence" in told and "test_silent.py:" in told


# -- gradients and constants -----------------------------------------------------------------------


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 7, None


class UsesSevenfold(nn.Module):
    def forward(self, x):
        return Sevenfold.apply(torch.relu(x), 3.0) + Sevenfold.apply(torch.ones(3), 1.0)


def test_a_users_autograd_function_is_one_call_and_keeps_its_backward():
    gm, told = warnings_of(UsesSevenfold())
    assert told == [] and [n.name for n in gm.graph.find_nodes(op="call_function")] == [
        "relu", "sevenfold", "add"]  # fmt: skip
    for same in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), fxlab.Interpreter(gm).run):
        x = X.clone().requires_grad_()
        y = same(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, UsesSevenfold()(x)) and grad.tolist() == [7, 7, 7]


def regularizes(m, x):
    return x * sum(p.pow(2).sum() for p in m.parameters())


def reads_a_list(m, x):
    return x * m.held[0].exp()


def test_what_is_computed_from_parameters_themselves_is_a_warning():
    for function in (regularizes, reads_a_list):
        m = Model(function)
        m.weight = nn.Parameter(torch.ones(3))
        m.held = [m.weight]
        (told,) = warnings_of(m)[1]
        assert "mul reads what the program computed from parameters" in told
    m = Model(lambda m, x: x * m.held[0])  # the parameter itself is read each time
    m.weight = nn.Parameter(torch.ones(3))
    m.held = [m.weight]
    assert warnings_of(m)[1] == []


# -- closures and default values -------------------------------------------------------------------


def counts_calls():
    count = 0

    def program(x):
        nonlocal count
        count += 1
        return x * count

    return program


def remembers(function):
    known = {}

    def program(x):
        if id(x) not in known:
            known[id(x)] = function(x)
        return known[id(x)]

    return program


def by_default(x, known=[1]):  # noqa: B006
    known.append(x)
    return x * known[0]


OUTER = {
    "count": (counts_calls, False),
    "known": (lambda: remembers(torch.neg), True),
    "a default": (lambda: lambda x: by_default(x), True),
    "a keyword": (lambda: lambda x: helped(x), True),
}


def helped(x, *, known={}):  # noqa: B006
    known["x"] = x
    return x * 2


@pytest.mark.parametrize("name", OUTER)
def test_a_closure_variable_or_default_value_that_the_program_writes_is_a_warning(name):
    make, holds_proxy = OUTER[name]
    function = make()
    for _ in range(2):
        (told,) = warnings_of(function)[1]
        assert "a default value, a variable of an outer function or class" in told
        assert ("put back, since it held a Proxy" in told) == holds_proxy
    assert by_default.__defaults__ == ([1],) and helped.__kwdefaults__ == {"known": {}}


class Caches(nn.Module):
    table = {}  # noqa: RUF012

    def forward(self, x):
        if "y" not in self.table:
            self.table["y"] = x * 2
        return self.table["y"]


def test_a_container_of_the_class_that_the_program_writes_is_a_warning_and_keeps_no_proxy():
    for _ in range(2):
        (told,) = warnings_of(nn.Sequential(Caches()))[1]
        assert "writes to table" in told and "held a Proxy" in told and Caches.table == {}


def test_a_closure_variable_that_the_program_only_reads_is_none():
    factor, parts = 2, [1, 2]
    assert warnings_of(lambda x, more=(3,): x * factor * sum(parts) * more[0])[1] == []


def test_what_a_tracers_own_hooks_ask_a_proxy_is_no_question_of_the_program():
    class Curious(fxlab.Tracer):
        def create_arg(self, a):
            if isinstance(a, torch.Tensor) or hasattr(a, "weird") or f"{a}" == "x":
                return super().create_arg(a)
            return super().create_arg(a)

        def create_proxy(self, kind, target, args, kwargs, *more, **named):
            seen = {arg for arg in args if isinstance(arg, (torch.Tensor, int))}
            assert len(seen) <= len(args)
            return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def program(x):
        return torch.relu(x) + x.shape[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Curious().trace(program)

    def asks(x):
        return torch.relu(x) if isinstance(x, torch.Tensor) else x

    with pytest.warns(fxlab.TraceWarning, match="isinstance on Proxy"):
        Curious().trace(asks)
