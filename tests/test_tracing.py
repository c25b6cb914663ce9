"""What stands around a trace: what it knows, what it says it lost, and what it switches."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import types
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlab
from fxlab import TraceError, TraceWarning
from tests.clocks import own_seconds, times_as_long

X = torch.tensor([1.0, -2.0, 3.0])


def quiet(fn, **options):
    """Trace; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fxlab.symbolic_trace(fn, **options)


def said(fn, match, **options):
    """Trace; exactly one TraceWarning, which names a line of this file, is expected."""
    with pytest.warns(TraceWarning, match=match):
        gm = fxlab.symbolic_trace(fn, **options)
    assert len(gm.meta["trace_warnings"]) == 1
    assert Path(__file__).name in gm.meta["trace_warnings"][0]
    return gm


# -- what refuses a Proxy in words of its own --------------------------------------------------


REFUSALS = {
    "a function of numpy": lambda x: np.tanh(x),
    "a conversion to an array": lambda x: np.asarray(x),
    "numpy on what x.numpy() gives": lambda x: torch.from_numpy(np.tanh(x.numpy())),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "func.grad": lambda x: torch.func.grad(lambda v: (v * 2).sum())(x),
    "jacrev": lambda x: torch.func.jacrev(lambda v: v.sin())(x),
    "a function written in C": lambda x: torch._C._functorch._wrap_for_grad(x, 1),
}


@pytest.mark.parametrize("program", REFUSALS.values(), ids=list(REFUSALS))
def test_what_refuses_a_proxy_is_told_as_a_trace_error_with_the_users_line(program):
    with pytest.raises(TraceError) as info:
        fxlab.symbolic_trace(program)
    assert info.value.where[0][:2] == (__file__, program.__code__.co_firstlineno)
    assert any("wrap" in hint for hint in info.value.hint)


def test_an_error_of_the_program_itself_stays_what_it_is():
    def wrong(x):
        raise ValueError("no such mode")

    with pytest.raises(ValueError, match=r"^no such mode$"):
        fxlab.symbolic_trace(wrong)


def test_from_numpy_of_a_traced_array_and_a_numpy_scalar_times_a_proxy_are_recorded():
    gm = quiet(lambda x: torch.from_numpy(x.numpy()) + np.float64(2.0) * x)
    assert torch.equal(gm(X), X + 2 * X)


# -- switches and regions ------------------------------------------------------------------------


def test_a_seed_set_in_the_program_is_set_by_the_graph_and_not_by_the_trace():
    def program(x):
        torch.manual_seed(7)
        return x + torch.rand(3)

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    gm = quiet(program)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(gm(X), gm(X)) and torch.equal(gm(X), program(X))


def test_a_seed_set_under_another_name_is_recorded_too():
    import torch._dynamo as _  # noqa: F401 - puts a function of its own around torch.manual_seed
    from torch.random import manual_seed

    gm = quiet(lambda x: (torch.manual_seed(3), manual_seed(7), x + torch.rand(3))[2])
    assert len(gm.graph.find_nodes(op="call_function", target=manual_seed)) == 2
    assert torch.equal(gm(X), gm(X))
    gm.graph.eliminate_dead_code()
    assert torch.equal(gm(X), gm(X))


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("random", lambda x: x * random.random()),
        ("numpy", lambda x: x * float(np.random.rand())),
        ("torch", lambda x: x + torch.Tensor(3).normal_()),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_random_numbers_that_are_drawn_while_tracing_are_told(name, program):
    said(program, f"random numbers from {name} that are fixed")


def test_a_default_dtype_set_in_the_program_is_set_by_the_graph_and_put_back_by_the_trace():
    def program(x):
        torch.set_default_dtype(torch.float64)
        return x + torch.rand(x.shape[0])

    try:
        gm = quiet(program)
        assert torch.get_default_dtype() is torch.float32
        assert gm(X).dtype is torch.float64 and torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_set_grad_enabled_as_a_call_is_recorded_and_put_back_by_the_trace():
    def program(x):
        torch.set_grad_enabled(False)
        y = x * 2
        torch.set_grad_enabled(True)
        return y, x * 3

    gm = quiet(program)
    assert torch.is_grad_enabled()
    no, yes = gm(X.clone().requires_grad_())
    assert not no.requires_grad and yes.requires_grad

    def for_good(x):
        torch.set_grad_enabled(False)
        return x * 2

    gm = quiet(for_good)
    assert torch.is_grad_enabled()
    with torch.enable_grad():
        assert not gm(X.clone().requires_grad_()).requires_grad


def test_set_grad_enabled_as_a_block_is_one_region_and_no_call():
    def program(x):
        with torch.set_grad_enabled(False):
            return x * 2

    gm = quiet(program)
    assert gm.code.count("set_grad_enabled") == 1 and "with " in gm.code


def test_a_forked_generator_is_a_region():
    def program(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            y = x + torch.rand(3)
        return y, torch.rand(1)

    gm = quiet(program)
    assert "with torch.random.fork_rng(devices = []):" in gm.code
    for run in (gm, fxlab.Interpreter(gm).run):
        torch.manual_seed(5)
        wanted = program(X)
        torch.manual_seed(5)
        assert all(torch.equal(a, b) for a, b in zip(run(X), wanted, strict=True))


def test_a_programs_own_context_manager_is_traced_through():
    import contextlib

    @contextlib.contextmanager
    def doubled(x):
        yield x * 2

    def program(x):
        with doubled(x) as y:
            return y + 1

    gm = quiet(program)
    assert "with " not in gm.code and torch.equal(gm(X), program(X))


def test_a_device_block_gives_recorded_factories_their_device():
    def program(x):
        with torch.device("meta"):
            a = torch.rand(x.shape[0])
            b = torch.zeros(x.shape[0], device="cpu")
        return a, b, torch.ones(x.shape[0])

    a, b, c = quiet(program)(X)
    assert (a.device.type, b.device.type, c.device.type) == ("meta", "cpu", "cpu")


# -- tensors that the program makes --------------------------------------------------------------


def fills_by_index(x):
    out = torch.zeros(4)
    for i in range(3):
        out[i] = x[i] * 2
    return out


def adds_in_place(x):
    h = torch.zeros(3)
    h.add_(x)
    h.mul_(2)
    return h, h + 1


def augmented(x):
    h = torch.ones(3)
    before = h + x
    h += x
    return before, h, h.sum()


def writes_by_out(x):
    buffer = torch.empty(3)
    torch.mul(x, 2, out=buffer)
    return buffer * 2


def reads_back(x):
    h = torch.arange(3.0)
    h[0] = x[1]
    return h[0] + h[1], h.real, torch.relu(h), h.shape[0] * x, [row * 2 for row in (h[1], h[2])]


def asks_for_its_size(x):
    h = torch.zeros(3)
    h.add_(x)
    for i in range(len(h)):
        x = x + h[i] * h.dim()
    return x if h.dtype is torch.float32 else -x


def in_a_loop(x):
    total = x
    for _ in range(3):
        h = torch.zeros(3)
        h[1] = total[0]
        total = total + h
    return total


def by_functions(x):
    a, b, c = torch.empty(3), torch.zeros(3), torch.ones(3)
    a.copy_(x)
    torch.add(b, x, out=b)
    torch.nn.functional.relu(c.sub_(x), inplace=True)
    b[x > 0] = 5.0
    return [a, b, c, torch.zeros(3).add_(x)]


def in_a_region(x):
    with torch.no_grad():
        h = torch.zeros(3)
        h.add_(x)
    h = h * 2
    return h


def writes_into_views(x):
    z, v = torch.zeros(4, 3), torch.ones(3)
    z.view(-1)[0:3] = x
    row, same = z[1], v.detach()
    row.copy_(x)
    v += x
    before = torch.zeros(3)
    first, both = before[:1], torch.cat([before, x])
    before.add_(x)
    return z, same + 0, first + 1, both, row


def sets_by_mask_and_like(x):
    out = torch.empty(3)
    out[:2] = x[:2]
    out[2:] = x[2:] * 2
    out[out > 0] = 0
    other = torch.zeros_like(torch.zeros(3))
    other += x
    return out, other


def shows_and_walks(x):
    h = torch.zeros(3)
    h += x
    g = torch.zeros(3)
    g.add_(x)
    str(g), f"{g}"
    total = x
    for row in g:
        total = total + row
    first, *rest = g
    return total, first, len(rest), copy.deepcopy(g)


def sets_data(x):
    h = torch.zeros(3)
    h.add_(x)
    h.data = x * 3
    return h + 1


@pytest.mark.parametrize(
    "program",
    [
        fills_by_index, adds_in_place, augmented, writes_by_out, reads_back, asks_for_its_size,
        in_a_loop, writes_into_views, sets_by_mask_and_like, by_functions, in_a_region,
        shows_and_walks, sets_data,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_tensor_that_the_program_makes_and_writes_into_is_new_in_each_call(program):
    gm = quiet(program)
    for run in (gm, gm, fxlab.Interpreter(gm).run, fxlab.symbolic_trace(gm)):
        assert repr(run(X)) == repr(program(X))
        assert repr(run(X + 1)) == repr(program(X + 1))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_branch_on_a_tensor_that_the_program_writes_into_is_refused():
    def program(x):
        h = torch.zeros(3)
        h.add_(x)
        return x if h.sum() > 0 else -x

    with pytest.raises(TraceError, match="a branch"):
        fxlab.symbolic_trace(program)


def test_a_branch_on_a_buffer_that_the_program_has_written_into_is_refused():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x):
            for _ in range(self.b.shape[0]):
                self.b.add_(x)
            return x if self.b.sum() > 0 else -x

    with pytest.raises(TraceError, match="a branch"):
        fxlab.symbolic_trace(M())


def test_a_tensor_that_is_only_read_stays_a_constant():
    gm = quiet(lambda x: x + torch.zeros(3))
    assert not gm.graph.find_nodes(op="call_method", target="clone")


def test_writing_into_a_tensor_from_outside_or_made_of_others_is_told():
    def copied(x):
        h = torch.zeros(3).clone()
        h.add_(x)
        return h

    said(copied, "made outside of the program")
    outside = torch.zeros(3)

    def keeps(x):
        outside.add_(x)
        return outside + x

    said(keeps, "made outside of the program")
    assert torch.equal(outside, torch.zeros(3))


# -- questions that a Proxy cannot answer as the value would ----------------------------------


def test_hasattr_of_what_no_tensor_has_is_told_and_of_what_one_has_is_not():
    gm = said(lambda x: x.tensors if hasattr(x, "tensors") else x + 1, "hasattr.*tensors")
    assert gm.graph.find_nodes(op="call_function", target=getattr)
    quiet(lambda x: x + 1 if hasattr(x, "shape") else x)
    quiet(lambda x: x.tensors + 1)


# -- traced again ----------------------------------------------------------------------------------


def test_a_graph_module_with_structured_inputs_can_be_traced_again():
    def program(x, table):
        return {"sum": x + table["a"], "all": [table["b"][0]]}

    given = {"a": X, "b": [X + 1]}
    once = quiet(program, concrete_args={"table": {"a": fxlab.PH, "b": [fxlab.PH]}})
    twice = quiet(once)
    assert repr(twice(X, given)) == repr(program(X, given))
    assert [n.name for n in twice.graph.nodes] == [n.name for n in once.graph.nodes]


def test_star_arguments_behind_a_decorator_are_traced_with_the_decorators_region():
    class M(nn.Module):
        @torch.no_grad()
        def forward(self, *xs, k=1, **more):
            return xs[0] * k + more["m"]

    gm = quiet(M())
    got = gm(X.clone().requires_grad_(), k=3, m=X)
    assert torch.equal(got, X * 3 + X) and not got.requires_grad


def test_star_arguments_of_a_method_and_of_an_object_are_traced():
    class Calls:
        def __call__(self, *xs):
            return xs[1] * 2

        def method(self, a, *xs):
            return a + xs[0]

    assert torch.equal(quiet(Calls())(X, X + 1), (X + 1) * 2)
    assert torch.equal(quiet(Calls().method)(X, X), X * 2)


def optional_mask(x, mask=None):
    if mask is not None:
        x = x * mask
    return x


def test_a_test_for_none_of_an_open_input_with_that_default_is_told():
    gm = said(optional_mask, r"mask is None.*concrete_args=\{'mask': None\}")
    assert torch.equal(gm(X, X), X * X)
    fixed = quiet(optional_mask, concrete_args={"mask": None})
    assert torch.equal(fixed(X, None), X)

    class Inner(nn.Module):
        def forward(self, x, mask=None):
            return x if mask is None else x * mask

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x, mask=None):
            return self.inner(x, mask)

    said(Outer(), "mask is None")

    def asserted(x):
        assert x is not None
        return x + 1

    quiet(asserted)
    quiet(lambda x, mask=None: torch.nn.functional.scaled_dot_product_attention(x, x, x, mask))


def test_a_question_for_the_type_of_an_input_is_told():
    said(lambda x: x + 1 if type(x) is torch.Tensor else x, r"type\(x\)")
    quiet(lambda x, n=2: x if type(n) is int else x + 1, concrete_args={"n": 2})


COUNT = 0
CACHE = {}
KEPT = [1, 2]


def counts(x):
    global COUNT
    COUNT += 1
    return x + 1


def remembers(x):
    CACHE["last"] = x
    return x + KEPT[0]


def calls_another(x):
    return remembers(x) * 2


def test_globals_that_the_program_changes_are_told_and_hold_no_proxy_afterwards():
    said(counts, "global COUNT")
    said(remembers, "global CACHE.*put back")
    said(calls_another, "global CACHE")
    assert CACHE == {} and KEPT == [1, 2]
    quiet(lambda x: x + KEPT[0] + COUNT)


def test_an_attribute_that_the_program_sets_on_a_leaf_module_is_put_back_and_told():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x):
            self.norm.momentum = 0.5
            self.lin.seen = x
            del self.norm.eps
            return self.lin(self.norm(x))

    m = M()
    before = [dict(vars(part)) for part in m.modules()]
    with pytest.warns(TraceWarning, match="writes to"):
        fxlab.symbolic_trace(m)
    assert [list(vars(part).items()) for part in m.modules()] == [list(b.items()) for b in before]


def test_a_tensor_that_forward_caches_on_the_model_becomes_a_constant():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.tensor([1.0, 0.0, 1.0])
            return x * self.mask

    class Registers(nn.Module):
        def forward(self, x):
            self.register_buffer("table", torch.ones(3))
            return x + self.table

    for model in (Masked(), Registers()):
        gm = said(model, "the model was put back")
        assert torch.equal(gm(X), copy.deepcopy(model)(X))
        assert getattr(model, "mask", None) is None and not hasattr(model, "table")


def test_tracing_a_long_graph_module_again_is_linear():
    from fxlab.tracing import questions

    def seconds(n):
        graph = fxlab.Graph()
        x = graph.placeholder("x")
        for _ in range(n):
            x = graph.call_function(torch.relu, (x,))
        graph.output(x)
        gm = fxlab.GraphModule(nn.Module(), graph)
        forward, again = gm.forward.__func__, []
        spent = own_seconds(lambda: again.append(fxlab.symbolic_trace(gm)))
        assert len(again[0].graph.nodes) == n + 2 and forward not in questions._facts
        return spent

    # 8 if linear, 64 if not
    assert times_as_long(lambda: seconds(6000), lambda: seconds(750), rounds=3) < 24


# -- what example inputs cannot know, and what torch's own Python refuses -----------------------

LIST = [1, 2, 3]


def while_of_a_value(x):
    while x.sum() > 0:
        x = x - 1
    return x


def assert_of_a_value(x):
    assert (x > 0).any()
    return x


DEPENDS_ON_VALUES = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "if of many": lambda x: x if x else -x,
    "while": while_of_a_value,
    "assert": assert_of_a_value,
    "max": lambda x: max(x.sum(), x.mean()),
    "int": lambda x: x * int(x.sum()),
    "float": lambda x: x * float(x.max()),
    "complex": lambda x: x * complex(x.max()),
    "round": lambda x: x * round(x.max()),
    "an index of a float": lambda x: x * LIST[x.sum()],
    "an index": lambda x: x * LIST[x.sum().long()],
    "range": lambda x: [x for _ in range(x.sum())],
    "numpy": lambda x: torch.from_numpy(np.asarray(x)),
    "item": lambda x: x if x.sum().item() > 0 else -x,
}


@pytest.mark.parametrize("program", DEPENDS_ON_VALUES.values(), ids=list(DEPENDS_ON_VALUES))
def test_what_depends_on_values_is_refused_alike_with_and_without_example_inputs(program):
    texts = []
    for options in ({}, {"example_inputs": (X,)}, {"example_inputs": X}):
        with pytest.raises(TraceError) as info:
            fxlab.symbolic_trace(program, **options)
        assert info.value.where[0][0] == __file__
        assert info.value.hint
        texts.append(str(info.value))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("program", DEPENDS_ON_VALUES.values(), ids=list(DEPENDS_ON_VALUES))
def test_a_question_that_example_inputs_cannot_answer_leaves_no_node(program):
    def nodes(**options):
        tracer = fxlab.Tracer()
        with pytest.raises(TraceError):
            tracer.trace(program, **options)
        return [str(node.target) for node in tracer.graph.nodes]

    assert nodes(example_inputs=(X,)) == nodes()


class AsksItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x):
        return x * self.factor if (self.factor * 2).sum() > 3 else x


def test_a_value_that_a_buffer_tells_is_known_beside_example_inputs():
    gm = said(AsksItsBuffer(), r"fixed to tensor\(True\)", example_inputs=(X,))
    torch.testing.assert_close(gm(X), X * 2)


def test_a_value_that_the_program_wrote_down_is_known_beside_example_inputs():
    gm = fxlab.symbolic_trace(lambda x: x if torch.tensor(3) > 2 else -x, example_inputs=(X,))
    torch.testing.assert_close(gm(X), X)


def test_the_value_of_a_buffer_on_the_meta_device_is_not_known():
    with pytest.raises(TraceError, match="a branch"):
        fxlab.symbolic_trace(AsksItsBuffer().to("meta"))


TORCHS_OWN = {
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2), RuntimeError),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2), 1, enable_nested_tensor=False
        ),
        RuntimeError,
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(16, 2), ValueError),
    "LSTM": (lambda: nn.LSTM(3, 3), ValueError),
}


@pytest.mark.parametrize(("make", "kind"), TORCHS_OWN.values(), ids=list(TORCHS_OWN))
def test_a_module_of_torchs_that_cannot_be_traced_itself_says_so_and_how_it_can(make, kind):
    module = make()
    with pytest.raises(TraceError) as info:
        fxlab.symbolic_trace(module)
    assert isinstance(info.value, kind)
    assert any(frame[0] == __file__ for frame in info.value.where)
    assert "torch.nn.Sequential(module)" in info.value.hint[0]
    assert len(fxlab.symbolic_trace(nn.Sequential(module)).graph.nodes) == 3


def test_an_error_in_torchs_python_on_a_proxy_is_a_trace_error_with_line_cause_and_way_out():
    def program(x):
        return torch.nested.nested_tensor([x])

    with pytest.raises(TraceError, match="in torch's nested_tensor") as info:
        fxlab.symbolic_trace(program)
    assert info.value.where[0][1] == program.__code__.co_firstlineno + 1
    assert isinstance(info.value.__cause__, TypeError)
    assert any("fxlab.wrap" in hint for hint in info.value.hint)


def test_an_error_in_torchs_python_without_a_proxy_stays_what_it_is():
    with pytest.raises(ValueError, match="dropout probability") as info:
        fxlab.symbolic_trace(lambda x: nn.Dropout(2)(x))
    assert type(info.value) is ValueError


def test_a_region_that_decorates_a_users_function_is_recorded():
    @torch.backends.cudnn.flags(enabled=False)
    def program(x):
        return x + 1

    @torch.no_grad()
    @torch.backends.cudnn.flags(enabled=False)
    def twice(x):
        return x + 1

    def stacked(x):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            return x + 1

    for function in (lambda x: program(x), stacked):
        names = [node.name for node in fxlab.symbolic_trace(function).graph.nodes]
        assert names == ["x", "flags", "add", "flags_exit", "output"]
    names = [node.name for node in fxlab.symbolic_trace(lambda x: twice(x)).graph.nodes]
    assert names == ["x", "no_grad", "flags", "add", "flags_exit", "no_grad_exit", "output"]


def test_a_graph_module_with_structures_that_was_not_compiled_is_whole_after_a_trace_through_it():
    inner = fxlab.symbolic_trace(
        lambda x: {"sum": x["a"] + x["b"]}, {"x": {"a": fxlab.PH, "b": fxlab.PH}}
    )

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, a):
            return self.inner({"a": a, "b": a})["sum"]

    gm = quiet(Outer())
    torch.testing.assert_close(gm(X), X * 2)
    torch.testing.assert_close(inner({"a": X, "b": X})["sum"], X * 2)


class Sum:
    def __init__(self, a, b):
        self.a, self.b = a, b


pytree.register_pytree_node(Sum, lambda s: ([s.a, s.b], None), lambda parts, _: Sum(*parts))


def test_a_proxy_for_a_structure_that_cannot_be_read_part_by_part_is_refused_with_its_line():
    inner = fxlab.symbolic_trace(lambda x: x.a + x.b, {"x": Sum(fxlab.PH, fxlab.PH)})
    with pytest.raises(TraceError, match="mismatch") as info:
        fxlab.symbolic_trace(nn.Sequential(inner))
    assert info.value.where[0][0] == __file__


# -- objects that hold a Proxy where it cannot be seen -------------------------------------------


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Holder:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


def closure(x):
    return lambda: x


def generator(x):
    yield x


HOLDERS = {
    "values": lambda x: {"a": x}.values(),
    "items": lambda x: {"a": x}.items(),
    "deque": lambda x: collections.deque([x]),
    "mapping proxy": lambda x: types.MappingProxyType({"a": x}),
    "slots": lambda x: Slots([x]),
    "an object in an object": lambda x: Holder(Holder(x)),
    "a bound method": lambda x: Holder(x).read,
    "closure": closure,
    "default": lambda x: lambda y=x: y,
    "partial": lambda x: functools.partial(torch.add, x),
    "generator": generator,
    "a generator inside": lambda x: generator(x),
    "iter": lambda x: iter([x]),
    "map": lambda x: map(abs, [x]),
    "zip": lambda x: zip([x], [x], strict=True),
    "enumerate": lambda x: enumerate([x]),
    "reversed": lambda x: reversed([x]),
}


@pytest.mark.parametrize("program", HOLDERS.values(), ids=list(HOLDERS))
def test_an_object_that_holds_a_proxy_out_of_sight_cannot_stand_in_a_graph(program):
    with pytest.raises(TraceError):
        fxlab.symbolic_trace(program)


def test_an_object_without_a_proxy_may_still_stand_in_a_graph():
    held = [Slots(1), Holder(Holder(2)), Path("a"), collections.deque([3]), closure(4), len]
    gm = fxlab.symbolic_trace(lambda x: (x, held))
    assert all(a is b for a, b in zip(gm(X)[1], held, strict=True))


# -- *args and **kwargs behind what calls them ---------------------------------------------------


def test_a_partial_of_a_function_with_stars_is_traced():
    part = functools.partial(lambda x, *a, k=1, **m: x * a[0] * k * m["z"], X, k=3)
    torch.testing.assert_close(quiet(part)(X, z=2), X * X * 6)


def hides(fn):
    functions = [fn]

    @functools.wraps(fn)
    def call(*args, **kwargs):
        return functions[0](*args, **kwargs)

    return call


@functools.lru_cache
def cached(x, *a):
    return x * a[0]


HIDDEN = {
    "a decorator that keeps it in a list": hides(lambda x, **kw: x * len(kw)),
    "lru_cache": cached,
    "a partial that fixes some of *args": functools.partial(lambda x, *a: x * a[0], X, X),
    "a partial that fixes some of **kwargs": functools.partial(lambda x, **kw: x * kw["q"], q=X),
}


@pytest.mark.parametrize("function", HIDDEN.values(), ids=list(HIDDEN))
def test_stars_that_cannot_be_reached_are_refused(function):
    with pytest.raises(TraceError, match="cannot become inputs"):
        fxlab.symbolic_trace(function)


def test_the_names_of_many_constants_are_not_searched_from_the_first_each_time():
    asked = []

    class Counting(dict):
        def __contains__(self, name):
            asked.append(name)
            return super().__contains__(name)

    def program(x):
        tracer.graph._constants = Counting(tracer.graph._constants)
        for _ in range(50):
            x = x + torch.ones(1).sum().reshape(1)
        return x

    tracer = fxlab.Tracer()
    graph = tracer.trace(program)
    constants = [str(n.target) for n in graph.nodes if n.op == "get_attr"]
    assert constants == [f"_tensor_constant{i}" for i in range(50)]
    assert len(asked) <= 4 * 50


def sets_data(x):
    y = x.clone()
    y.data = torch.ones(5, 1)
    return list(y)


def transposes(x):
    y = x.clone()
    y.t_()
    return list(y)


def resizes(x):
    y = x.clone()
    y.resize_(3, 2)
    return x if y.shape[0] == 2 else -x


@pytest.mark.parametrize("program", [sets_data, transposes, resizes])
def test_a_shape_that_is_changed_in_place_is_not_known_from_example_inputs(program):
    with pytest.raises(TraceError):
        fxlab.symbolic_trace(program, example_inputs=(torch.zeros(2, 3),))


class Structured(nn.Module):
    def forward(self, d, n):
        return d["a"] * n + d["b"][0][1]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        fixed = {"d": {"a": fxlab.PH, "b": [(fxlab.PH, fxlab.PH)]}}
        self.inner = fxlab.symbolic_trace(Structured(), concrete_args=fixed)

    def forward(self, d, x):
        return self.inner(d, 3) + self.inner({"a": x, "b": d["b"]}, x)


def test_a_graph_module_with_structured_inputs_is_traced_as_part_of_another():
    x, y, outer = torch.ones(2), torch.arange(2.0), Outer()
    d = {"a": y, "b": [(x, y + 5)]}
    before = pytree.TreeSpec.flatten_up_to
    gm = fxlab.symbolic_trace(outer)
    assert torch.equal(gm(d, x), outer(d, x)) and pytree.TreeSpec.flatten_up_to is before


def test_a_graph_module_of_a_list_reads_a_proxy_of_one():
    inner = fxlab.symbolic_trace(lambda x: x[0] + x[1], {"x": [fxlab.PH, fxlab.PH]})
    gm = fxlab.symbolic_trace(nn.Sequential(inner))
    assert torch.equal(gm([X, X + 1]), inner([X, X + 1]))


def test_torch_compile_that_looked_at_torch_during_a_trace_looks_again():
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map.cache_clear()

    def looks(x):
        trace_rules.get_torch_obj_rule_map()
        return x + 1

    fxlab.symbolic_trace(looks)
    compiled = torch.compile(lambda x: x + torch.zeros(4), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(4)), torch.ones(4))


def test_a_constant_that_is_written_after_it_was_read_is_a_warning():
    def late(x):
        z = torch.ones(3)
        a = x + z
        z.add_(1)
        return a

    def early(x):
        z = torch.ones(3)
        z.add_(1)
        return x + z

    with pytest.warns(TraceWarning, match="writes into a tensor after add has read it"):
        fxlab.symbolic_trace(late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = fxlab.symbolic_trace(early)
    assert torch.equal(gm(torch.zeros(3)), torch.full((3,), 2.0))


def test_tensors_of_inference_mode_are_traced_wherever_they_are():
    with torch.inference_mode():
        made = torch.ones(3)

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.more = made, {"a": [made + 1]}

        def forward(self, x):
            return x + self.one + self.more["a"][0]

    assert torch.equal(fxlab.symbolic_trace(lambda x: x + made)(made), made + made)
    assert torch.equal(fxlab.symbolic_trace(Holds())(made), made * 4)


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_factory_that_the_caller_replaced_records_what_it_wants(fx, monkeypatch):
    """As transformers' tracer does: a call with a Proxy becomes a call of the original."""
    original = torch.ones

    @functools.wraps(original)
    def ones(*args, **kwargs):
        proxies = [a for a in args if isinstance(a, fx.Proxy)]
        if not proxies:
            return original(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", original, args, kwargs)

    monkeypatch.setattr(torch, "ones", ones)
    gm = fx.symbolic_trace(lambda x: torch.ones(x.size(0)) + x)
    (call,) = (n for n in gm.graph.nodes if n.name.startswith("ones"))
    assert call.target is original
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.ones is ones


def test_a_name_made_from_an_annotation_holds_no_address():
    def program(x):
        return x + 1

    program.__annotations__["x"] = typing.NamedTuple
    assert "0x" not in fxlab.symbolic_trace(program).code
