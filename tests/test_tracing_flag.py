"""The training flag while tracing, constants that are written into, and random states."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab import TraceWarning
from tests.clocks import own_seconds, times_as_long

X = torch.ones(3)


class Model(nn.Module):
    """Calls a function with itself, so that a test can be written on one line."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.p = function, nn.Linear(3, 3), 0.5

    def forward(self, x):
        return self.function(self, x)


def run(fn, *args):
    torch.manual_seed(0)
    return fn(*args)


def with_blocks(m, x):
    with torch.set_grad_enabled(m.training):
        y = x * m.linear.weight
    with torch.autocast("cpu", enabled=m.training):
        y = y @ m.linear.weight
    with torch.inference_mode(m.training):
        x * 2
    return y


def by_a_variable(m, x):
    t = m.training
    return x * 2 if t is True else x * 3


ASKED = {
    "a variable": by_a_variable,
    "type": lambda m, x: x * (2 if type(m.training) is bool else 3),
    "max": lambda m, x: x * max(m.training, 0.5),
    "is": lambda m, x: x * 2 if m.training is True else x * 3,
    "is not": lambda m, x: x * 2 if True is not m.training else x * 3,
    "text": lambda m, x: x * 2 if f"{m.training}" == "True" else x * 3,
    "repr": lambda m, x: x * len(repr(m.training)),
    "times a number": lambda m, x: F.dropout(x, m.p * m.training),
    "equals": lambda m, x: x * 2 if m.training == True else x * 3,  # noqa: E712
    "index": lambda m, x: x * [2, 3][m.training],
    "key": lambda m, x: x * {True: 2, False: 3}[m.training],
    "int": lambda m, x: x * int(m.training),
    "not": lambda m, x: x * (not m.training),
    "with": with_blocks,
}
RECORDED = {
    "isinstance": lambda m, x: x * 2 if isinstance(m.training, bool) else x * 3,
    "torch.tensor": lambda m, x: x * torch.tensor(m.training),
    "a constant times it": lambda m, x: x + torch.ones(3) * m.training,
    "it times a constant": lambda m, x: x + m.training * torch.ones(3),
    "a Proxy times it": lambda m, x: x * m.training,
    "torch.mul": lambda m, x: torch.mul(x, m.training),
    "torch.dropout": lambda m, x: torch.dropout(x, 0.5, m.training),
    "dropout of a constant": lambda m, x: x + F.dropout(torch.ones(3), 0.5, m.training),
    "torch.rrelu": lambda m, x: torch.rrelu(x - 2, 0.1, 0.3, m.training),
    "torch.batch_norm": lambda m, x: torch.batch_norm(
        x.expand(2, 3), None, None, torch.zeros(3), torch.ones(3), m.training, 0.1, 1e-5, False
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ASKED)
def test_a_training_flag_that_is_asked_for_its_value_is_right_and_said_to_be_fixed(name, training):
    m = Model(ASKED[name]).train(training)
    expected = run(m, X)
    with pytest.warns(TraceWarning, match=r"training was fixed|on training"):
        gm = fxlab.symbolic_trace(m)
    assert torch.equal(run(gm, X), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", RECORDED)
def test_a_training_flag_among_tensors_is_recorded_and_follows_train_and_eval(name, training):
    m = Model(RECORDED[name]).train(training)
    gm = fxlab.symbolic_trace(m)  # a warning is an error
    assert torch.equal(run(gm, X), run(m, X))
    assert torch.equal(run(gm.train(not training), X), run(m.train(not training), X))


def scaled(x, training=False):
    return x * 2 if training is True else x * 3


class Hands(nn.Module):
    def forward(self, x):
        return scaled(x, training=self.training)


def through_a_variable(x, mode):
    now = mode
    return x * 2 if now is not False else x * 3


def both_ways(x, on, rate, strict=False):
    x = x * 2 if strict is True else x * 3
    return F.dropout(x, rate, on)


class AsksByIs(nn.Module):
    def forward(self, x, on=None):
        return x * 2 if on is True else x * 3


class HandsToModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = AsksByIs()

    def forward(self, x):
        return self.part(x, self.training)


HANDS = {
    "keyword": Hands(),
    "any name": Model(lambda m, x: through_a_variable(x, m.training)),
    "module": HandsToModule(),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", HANDS)
def test_a_function_that_asks_by_is_gets_the_training_flag_as_a_bool_which_is_said(name, training):
    m = HANDS[name].train(training)
    codes = scaled.__code__, through_a_variable.__code__, AsksByIs.forward.__code__
    with pytest.warns(TraceWarning, match="training was fixed to"):
        gm = fxlab.symbolic_trace(m)
    assert torch.equal(gm(X), m(X))
    assert codes == (scaled.__code__, through_a_variable.__code__, AsksByIs.forward.__code__)


def test_a_flag_beside_a_parameter_that_is_asked_by_is_stays_alive():
    m = Model(lambda m, x: both_ways(x, m.training, 0.5))
    gm = fxlab.symbolic_trace(m)  # a warning is an error
    for training in (True, False):
        assert torch.equal(run(gm.train(training), X), run(m.train(training), X))


def test_a_submodule_can_be_given_the_training_flag():
    m = Model(lambda m, x: m.linear.train(m.training)(x))
    assert torch.equal(fxlab.symbolic_trace(m)(X), m(X))
    assert type(m.linear.training) is bool


def out_of_max(x):
    m, i = torch.zeros(()), torch.zeros((), dtype=torch.long)
    torch.max(x, 0, out=(m, i))
    return x + m


def out_of_sort(x):
    a, b = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    torch.sort(x, out=(a, b))
    return a + b


def foreach(x):
    o = torch.zeros(3)
    torch._foreach_add_([o], [x])
    return o + 1


def running_statistics(x):
    mean, var = torch.zeros(3), torch.ones(3)
    F.batch_norm(x.expand(2, 3), mean, var, training=True)
    return mean + var


def overload_by_keywords(x):
    o = torch.zeros(3)
    torch.ops.aten.add_.Tensor(self=o, other=x)
    return o + 1


def packet(x):
    o = torch.zeros(3)
    torch.ops.aten.add_(o, x)
    return o + 1


@fxlab.wrap
def write(x, into):
    into.add_(x)


def by_a_wrapped_function(x):
    o = torch.zeros(3)
    write(x, into=o)
    return o + 1


@pytest.mark.parametrize(
    "fn",
    [
        out_of_max,
        out_of_sort,
        foreach,
        running_statistics,
        overload_by_keywords,
        packet,
        by_a_wrapped_function,
    ],
)
def test_each_call_has_constants_of_its_own_whatever_way_they_are_written(fn):
    gm = fxlab.symbolic_trace(fn)
    for i in range(3):
        assert torch.equal(gm(X + i), fn(X + i))


@pytest.mark.parametrize("fn", [foreach, overload_by_keywords])
def test_a_buffer_that_was_written_has_no_known_value(fn):
    def forward(m, x):
        table = m.count
        if fn is foreach:
            torch._foreach_add_([table], [x.sum()])
        else:
            torch.ops.aten.add_.Tensor(self=table, other=x.sum())
        return x * 2 if table > 1 else x

    m = Model(forward)
    m.register_buffer("count", torch.zeros(()))
    with pytest.raises(fxlab.TraceError):
        fxlab.symbolic_trace(m)


def test_the_random_state_is_read_when_the_graph_runs():
    def f(x):
        state = torch.get_rng_state()
        a = torch.rand(3)
        torch.set_rng_state(state)
        return x + a + torch.rand(3) + torch.initial_seed()

    gm = fxlab.symbolic_trace(f)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = f(X)
        torch.manual_seed(seed)
        assert torch.equal(gm(X), expected)


def test_written_constants_cost_a_trace_linear_time():
    def seconds(n):
        def f(x):
            for _ in range(n):
                h = torch.zeros(1)
                h += x
                x = x + h
            return x

        return own_seconds(lambda: fxlab.symbolic_trace(f))

    # 8 if linear, 64 if quadratic
    assert times_as_long(lambda: seconds(1200), lambda: seconds(150), rounds=3) < 24


def test_a_warning_is_given_once_for_a_line_that_asks_twice():
    m = Model(lambda m, x: x * 2 if m.training is True and m.training is True else x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxlab.symbolic_trace(m)
    assert len(caught) == 1


class Dropping(nn.Module):
    """A leaf that reads the flag, a function that is given it, and a branch on a leaf's result."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(x)
        return F.dropout(x, 0.5, self.training) * F.dropout(x, 0.5, training=self.training).sum()


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_tracer_that_runs_what_it_records_gets_no_nodes_of_it_and_can_read_every_argument(fx):
    """As transformers' HFTracer does: each Proxy carries what its operation gives."""

    class Example(fx.Proxy):
        value = None

    class Runs(fx.Tracer):
        def proxy(self, node):
            return Example(node, self)

        def create_proxy(self, kind, target, args, kwargs, *more, **named):
            made = super().create_proxy(kind, target, args, kwargs, *more, **named)

            def value(a):
                return a.value if isinstance(a, Example) else a

            args, kwargs = tuple(map(value, args)), {k: value(v) for k, v in kwargs.items()}
            if kind == "placeholder":
                found = torch.ones(4, 3, device="meta")
            elif kind == "get_attr":
                found = getattr(self.root, target)
            elif kind == "call_module":
                found = self.root.get_submodule(target).forward(*args, **kwargs)
            elif kind == "call_method":
                found = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                found = target(*args, **kwargs)
            vars(made)["value"] = found
            return made

    model = Dropping().eval()
    graph = Runs().trace(model)
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    assert [n.name for n in calls] == ["drop", "dropout", "dropout_1", "sum_1", "mul"]
    gm, x = fx.GraphModule(model, graph), torch.randn(4, 3)
    assert torch.equal(gm(x), model(x))
    if fx is fxlab:
        torch.manual_seed(0)
        want = model.train()(x)
        torch.manual_seed(0)
        assert torch.equal(gm.train()(x), want), "the flags are read when the module runs"
