"""Capture: what is recorded, what is refused with a lesson, and that the model is left alone."""

import copy
import functools
import importlib
import math
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab import TraceError, TraceWarning


def ops(gm_or_graph):
    graph = getattr(gm_or_graph, "graph", gm_or_graph)
    return [(n.op, n.name) for n in graph.nodes]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.rand(3))
        self.plain = torch.rand(3)
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))

    def forward(self, x):
        return self.inner(self.lin(x)) * self.weight + self.scale + self.plain


def test_a_trace_computes_what_the_model_computes():
    m, x = Small(), torch.randn(2, 3)
    gm = fxlab.symbolic_trace(m)
    gm.graph.lint()
    assert torch.equal(gm(x), m(x))


def test_a_buffer_is_read_when_the_graph_runs_not_when_it_was_traced():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return x + self.b * 2

    m = M()
    gm = fxlab.symbolic_trace(m)
    gm.b.fill_(5)
    assert torch.equal(gm(torch.zeros(2)), torch.full((2,), 10.0))


def test_the_user_model_is_left_exactly_as_it_was():
    class Writes(Small):
        def __init__(self):
            super().__init__()
            self.seen, self.table = [], {"n": 0}

        def forward(self, x):
            self.cache = x
            self.seen.append(x)
            self.table["n"] = x
            self.plain = x
            return super().forward(x) + torch.tensor([1.0, 2.0, 3.0])

    m = Writes()
    before = dict(m.__dict__)
    state = {k: v.clone() for k, v in m.state_dict().items()}
    with pytest.warns(TraceWarning, match="cache, seen, table|writes to"):
        gm = fxlab.symbolic_trace(m)
    assert list(m.__dict__) == list(before) and all(m.__dict__[k] is v for k, v in before.items())
    assert m.seen == [] and m.table == {"n": 0}
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
    assert len(gm.meta["trace_warnings"]) == 1 and "test_tracer.py" in gm.meta["trace_warnings"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = fxlab.symbolic_trace(m)
    assert str(again.graph) == str(gm.graph)


def test_constants_live_on_the_new_module():
    m = Small()
    gm = fxlab.symbolic_trace(lambda x: x + torch.tensor([1.0, 2.0]))
    assert torch.equal(gm(torch.zeros(2)), torch.tensor([1.0, 2.0]))
    assert torch.equal(gm._tensor_constant0, torch.tensor([1.0, 2.0]))
    assert not hasattr(m, "_tensor_constant0")


def branch(x):
    return x if x.sum() > 0 else -x


def loop_over_rows(x):
    return sum(row for row in x)


def uses_len(x):
    return x * len(x)


def uses_range(x):
    for _ in range(x.shape[0]):
        x = x + 1
    return x


def uses_int(x):
    return torch.ones(2) * int(x.sum())


def uses_float(x):
    return float(x.mean()) * 2


def star_shape(x):
    return x.view(*x.shape)


def rest_of_shape(x):
    n, *_ = x.shape
    return x.view(n, -1)


def contains(x):
    return 3 in x


def rounds(x):
    return round(x.sum())


PROTOCOLS = {
    branch: TraceError, loop_over_rows: TypeError, uses_len: TypeError, uses_range: TypeError,
    uses_int: TypeError, uses_float: TypeError, star_shape: TypeError, rest_of_shape: TypeError,
    contains: TypeError, rounds: TypeError,
}  # fmt: skip


@pytest.mark.parametrize("fn", PROTOCOLS, ids=lambda f: f.__name__)
def test_what_python_wants_to_know_now_is_refused_with_node_line_and_remedy(fn):
    with pytest.raises(TraceError) as info:
        fxlab.symbolic_trace(fn)
    error = info.value
    assert isinstance(error, PROTOCOLS[fn])
    assert error.where[0][0] == __file__ and error.where[0][2] == fn.__name__
    assert "at node: %" in str(error) and error.hint
    line = Path(__file__).read_text().splitlines()[error.where[0][1] - 1].strip()
    assert line in str(error)


@pytest.mark.parametrize("fn", [uses_len, uses_range, star_shape, rest_of_shape],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_example_inputs_make_ranks_and_sizes_known(fn):
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        gm = fxlab.symbolic_trace(fn, example_inputs=(torch.zeros(2, 3),))
    assert torch.equal(gm(x), fn(x))


def test_a_size_that_example_inputs_fixed_is_said_with_its_line():
    with pytest.warns(
        TraceWarning, match=r"fixed to 2.*example inputs(.|\n)*range\(x.shape\[0\]\)"
    ):
        fxlab.symbolic_trace(uses_range, example_inputs=(torch.zeros(2, 3),))


def test_the_rank_alone_is_no_loss_and_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = fxlab.symbolic_trace(rest_of_shape, example_inputs=(torch.zeros(2, 3),))
    assert torch.equal(gm(torch.ones(5, 3)), torch.ones(5, 3))


def test_unpacking_records_as_many_reads():
    gm = fxlab.symbolic_trace(lambda x: sum(x.shape[0] for _ in range(2)) + (lambda a, b: b)(
        *(lambda s: (s[0], s[1]))(x.shape)))  # fmt: skip
    assert gm(torch.zeros(2, 3)) == 7

    def pair(x):
        n, c = x.shape
        return x.view(c, n)

    assert fxlab.symbolic_trace(pair)(torch.zeros(2, 3)).shape == (3, 2)


def test_code_that_catches_our_error_and_goes_on_is_told():
    def probe(x):
        try:
            n = len(x)
        except TypeError:
            n = 1
        return x * n

    with pytest.warns(TraceWarning, match="caught this and went on"):
        gm = fxlab.symbolic_trace(probe)
    assert torch.equal(gm(torch.ones(3)), torch.ones(3))


def test_isinstance_on_a_proxy_warns_and_answers_like_torch_fx():
    def f(x):
        return x + 1 if isinstance(x, torch.Tensor) else x - 1

    with pytest.warns(TraceWarning, match="isinstance"):
        gm = fxlab.symbolic_trace(f)
    assert torch.equal(gm(torch.zeros(1)), torch.fx.symbolic_trace(f)(torch.zeros(1)))


def test_a_proxy_is_an_instance_of_torch_fx_proxy():
    seen = []
    with pytest.warns(TraceWarning, match="writes to seen"):
        fxlab.symbolic_trace(lambda x: (seen.append(isinstance(x, torch.fx.Proxy)), x)[1])
    assert seen == [True]


def test_text_made_from_a_proxy_never_raises_and_is_told_when_it_becomes_an_argument():
    def quiet(x):
        assert x is not None, f"{x} {x.shape!r} {x!s:>5}"
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxlab.symbolic_trace(quiet)
    with pytest.warns(TraceWarning, match="text made from a Proxy"):
        fxlab.symbolic_trace(lambda x: torch.einsum(f"i->i {x}", x))


def test_in_place_operators_and_item_assignment_are_recorded_as_what_they_are():
    def f(x):
        y = x.clone()
        y += 1
        y[0] = 7
        del x
        return y

    gm = fxlab.symbolic_trace(f)
    x = torch.zeros(3)
    assert torch.equal(gm(x), f(x)) and torch.equal(x, torch.zeros(3))

    def g(n):
        n += 1
        return n

    assert fxlab.symbolic_trace(g)(3) == 4 and fxlab.symbolic_trace(g)((1,) and 2.5) == 3.5


@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.no_grad(), lambda: torch.enable_grad(), lambda: torch.set_grad_enabled(False),
        lambda: torch.inference_mode(), lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autograd.profiler.record_function("part"),
    ],
)  # fmt: skip
def test_a_region_is_kept(region):
    w = torch.randn(3, 3, requires_grad=True)

    def f(x):
        y = x @ x
        with region():
            z = y @ y
        return z, y

    gm = fxlab.symbolic_trace(f)
    gm.graph.lint()
    assert "with " in gm.code
    for got, wanted in zip(gm(w), f(w), strict=True):
        assert got.requires_grad == wanted.requires_grad and got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    for got, wanted in zip(fxlab.Interpreter(gm).run(w), f(w), strict=True):
        assert got.requires_grad == wanted.requires_grad and got.dtype == wanted.dtype
    assert torch.is_grad_enabled()


def test_a_decorated_forward_keeps_its_region():
    class M(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return x * 2

    gm = fxlab.symbolic_trace(M())
    assert not gm(torch.ones(2, requires_grad=True)).requires_grad


def test_an_empty_region_leaves_nothing():
    def f(x):
        with torch.no_grad():
            pass
        return x + 1

    assert len(fxlab.symbolic_trace(f).graph.nodes) == 3


def test_random_factories_are_recorded_not_frozen():
    gm = fxlab.symbolic_trace(lambda x: x + torch.rand(3))
    assert not torch.equal(gm(torch.zeros(3)), gm(torch.zeros(3)))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.zeros(x.shape[0], 2), lambda x: torch.arange(x.shape[0]),
        lambda x: torch.full((x.shape[0],), 3.0), lambda x: torch.ones((x.size(0), x.size(1))),
        lambda x: torch.eye(x.shape[1]), lambda x: torch.arange(10)[: x.shape[0]],
        lambda x: torch.tensor([x.shape[0], 2]), lambda x: torch.linspace(0, 1, x.shape[0]),
    ],
)  # fmt: skip
def test_a_factory_fed_by_a_size_is_recorded(fn):
    gm = fxlab.symbolic_trace(fn)
    for n in (2, 5):
        assert torch.equal(gm(torch.zeros(n, 3)), fn(torch.zeros(n, 3)))


def test_the_training_flag_as_an_argument_follows_train_and_eval():
    class Inner(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, training=self.training)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    m = M()
    gm = fxlab.symbolic_trace(m)
    x = torch.ones(1000)
    assert (gm.train()(x) == 0).any() and torch.equal(gm.eval()(x), x)
    assert type(m.training) is bool and "training" not in nn.Module.__dict__


def test_hooks_of_the_root_and_of_inlined_modules_run():
    m = Small()
    m.register_forward_hook(lambda mod, args, out: out * 3)
    m.inner.register_forward_pre_hook(lambda mod, args: (args[0] + 1,))
    x = torch.randn(2, 3)
    assert torch.allclose(fxlab.symbolic_trace(m)(x), m(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_refused_with_what_to_trace_instead():
    with pytest.raises(TraceError, match=r"\.module"):
        fxlab.symbolic_trace(nn.DataParallel(Small()))
    with pytest.raises(TraceError, match=r"\._orig_mod"):
        fxlab.symbolic_trace(torch.compile(Small()))


class Sized(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x * self.size


class Records(nn.Module):
    """Calls a module, or lets the tracer record that it did."""

    def __init__(self, tracer=None, path=""):
        super().__init__()
        self.part, self.tracer, self.path = nn.Linear(2, 2), tracer, path

    def forward(self, x):
        return self.record(x) if self.tracer else self.part(x)

    def record(self, x):
        return self.tracer.create_proxy("call_module", self.path, (x,), {})


class Wraps(nn.Module):
    def __init__(self, tracer=None, path=""):
        super().__init__()
        self.inner = Records(tracer, "inner." + path)

    def forward(self, x):
        return self.inner(x)


class OwnCall(fxlab.Tracer):
    def call_module(self, m, forward, args, kwargs):
        if isinstance(m, Records):
            return forward(*args, **kwargs)
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


class OwnProxy(fxlab.Tracer):
    def create_proxy(self, *args, **kwargs):
        return super().create_proxy(*args, **kwargs)


class OwnProxyTwice(OwnProxy):
    def create_proxy(self, *args, **kwargs):
        return super().create_proxy(*args, **kwargs)

    def create_node(self, *args, **kwargs):
        return super().create_node(*args, **kwargs)


@pytest.mark.parametrize("kind", [fxlab.Tracer, OwnCall, OwnProxy, OwnProxyTwice])
@pytest.mark.parametrize("outer", [Records, Wraps])
def test_a_call_of_a_module_names_the_line_that_calls_whoever_records_it(outer, kind):
    tracer = kind()
    line = (__file__, Records.forward.__code__.co_firstlineno + 1, "forward")
    (node,) = tracer.trace(outer()).find_nodes(op="call_module")
    assert node.meta["source"][0] == line
    (node,) = tracer.trace(outer(tracer, "part")).find_nodes(op="call_module")
    source = node.meta["source"]
    assert source[source.index(line) - 1][2] == "record"


def test_a_search_in_a_shape_is_answered_from_example_inputs():
    with pytest.warns(TraceWarning, match=r"its value of .*Size"):
        gm = fxlab.symbolic_trace(
            lambda x: x * 2 if 3 in x.shape else -x, example_inputs=(torch.ones(3),)
        )
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(TraceError, match=r"`in` on .* searches its values"):
        fxlab.symbolic_trace(lambda x: x * 2 if 3 in x.shape else -x)


def takes_sizes(x):
    n = x.shape[0]
    parts = torch.roll(x, n, 0), torch.sum(x, n - 3), torch.bincount(x.long(), minlength=n)
    return *parts, torch.hann_window(n), torch.tril_indices(n, n), torch.asarray(x)


def test_sizes_that_a_function_of_torch_gives_to_the_proxy_are_recorded_and_no_warning():
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = fxlab.symbolic_trace(takes_sizes)
    assert all(map(torch.equal, gm(x), takes_sizes(x)))


PLACES = torch.tensor([[0, 1]])


def test_a_sparse_tensor_of_traced_values_is_recorded():
    def program(x):
        return torch.sparse_coo_tensor(PLACES, x, (2,), check_invariants=True) * 2

    gm = fxlab.symbolic_trace(program)
    for x in (torch.ones(2), torch.zeros(2)):
        assert torch.equal(gm(x).to_dense(), program(x).to_dense())


def test_a_function_of_c_that_refuses_a_proxy_is_told_as_a_trace_error():
    def program(x):
        return x * torch.finfo(x.dtype).max

    with pytest.raises(TraceError, match=r"got a Proxy: torch.finfo(.|\n)*finfo\(x.dtype\)"):
        fxlab.symbolic_trace(program)
    with pytest.raises(TypeError, match="integer") as error:
        fxlab.symbolic_trace(lambda x: x * "abc".center("w"))
    assert not isinstance(error.value, TraceError)


def create_proxy(x):
    return x.tracer.create_proxy("call_function", torch.relu, (x,), {})


def test_a_function_that_is_named_like_a_hook_is_a_line_of_the_program():
    (node,) = fxlab.Tracer().trace(create_proxy).find_nodes(op="call_function")
    assert node.meta["source"][0] == (__file__, create_proxy.__code__.co_firstlineno + 1,
                                      "create_proxy")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        (Small, "symbolic_trace(Small())"),
        (Sized, "symbolic_trace(Sized(...))"),
        (functools.partial(Sized, 3), "symbolic_trace(Sized(...))"),
        (nn.ReLU, "symbolic_trace(ReLU())"),
    ],
)
def test_a_class_is_refused_and_told_to_be_instantiated(kind, right):
    with pytest.raises(TraceError, match="is a class") as info:
        fxlab.symbolic_trace(kind)
    assert info.value.right == right and info.value.where[0][0] == __file__
    assert "instantiate it" in str(info.value)


def helper(x):
    return x * 2 if x.sum() > 0 else x


def test_wrap_works_in_a_function_body_and_wrapped_in_a_block():
    def f(x):
        return helper(x) + 1

    with pytest.raises(TraceError):
        fxlab.symbolic_trace(f)
    with fxlab.wrapped(helper):
        gm = fxlab.symbolic_trace(f)
    assert gm.graph.find_nodes(op="call_function", target=helper)
    with pytest.raises(TraceError):
        fxlab.symbolic_trace(f)
    assert (
        fxlab.Tracer(autowrap_functions=(helper,))
        .trace(f)
        .find_nodes(op="call_function", target=helper)
    )


def test_math_functions_are_recorded():
    gm = fxlab.symbolic_trace(lambda x: math.sqrt(x.size(0)) + math.floor(x.size(1)))
    assert gm(torch.zeros(4, 3)) == 5.0


def test_a_function_registered_with_torch_fx_wrap_is_a_leaf_here_too():
    key = (id(globals()), "helper")
    torch.fx._symbolic_trace._wrapped_fns_to_patch[key] = globals()
    try:
        gm = fxlab.symbolic_trace(lambda x: helper(x))
    finally:
        del torch.fx._symbolic_trace._wrapped_fns_to_patch[key]
    assert gm.graph.find_nodes(op="call_function", target=helper)


def test_the_tracing_flag_of_torch_fx_is_set_while_tracing():
    seen = []
    with pytest.warns(TraceWarning, match="writes to seen"):
        fxlab.symbolic_trace(
            lambda x: (seen.append(torch.fx._symbolic_trace._is_fx_tracing_flag), x)[1]
        )
    assert seen == [True] and not torch.fx._symbolic_trace._is_fx_tracing_flag


def test_concrete_args_fix_values_and_open_structures():
    def f(x, flag, table):
        return (x if flag else -x) + table["a"] * table["b"][0]

    gm = fxlab.symbolic_trace(f, {"flag": True, "table": {"a": fxlab.PH, "b": [fxlab.PH]}})
    assert gm(torch.ones(1), True, {"a": 2, "b": [3]}) == 7
    with pytest.raises(Exception, match="specialized"):
        gm(torch.ones(1), False, {"a": 2, "b": [3]})
    with pytest.raises(TraceError, match="no argument"):
        fxlab.symbolic_trace(f, {"flags": True})


def test_check_names_the_first_node_that_differs():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.calls = 0

        def forward(self, x):
            y = self.lin(x)
            return y * 2 if isinstance(x, torch.Tensor) else y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TraceError, match="computes something else"):
            fxlab.symbolic_trace(M(), check=(torch.ones(1, 2),))
    fxlab.symbolic_trace(Small(), check=(torch.randn(1, 3),))


def test_each_node_knows_its_line_and_module_stack():
    m = Small()
    gm = fxlab.symbolic_trace(m)
    node = gm.graph.find_nodes(op="call_module", target="inner.1")[0]
    file, _line, function = node.meta["source"][0]
    assert file == __file__ and function == "forward"
    assert list(node.meta["nn_module_stack"]) == ["inner", "inner.1"]
    for copied in (copy.deepcopy(gm), fxlab.symbolic_trace(gm), fxlab.Transformer(gm).transform()):
        again = copied.graph.find_nodes(op="call_module", target="inner.1")[0]
        assert again.meta["source"] == node.meta["source"]
        assert again.meta["from"][0]["id"] == node.id


def test_a_module_outside_the_hierarchy_is_refused_with_the_remedy():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]

        def forward(self, x):
            return self.hidden[0](x)

    with pytest.raises(TraceError, match="ModuleList") as info:
        fxlab.symbolic_trace(M())
    assert isinstance(info.value, NameError)


def test_outputs_come_back_as_the_same_type():
    from collections import OrderedDict, namedtuple
    from dataclasses import dataclass

    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Box:
        a: object
        b: object

    for make in (
        lambda x: OrderedDict(p=x, q=x + 1), lambda x: Pair(x, x + 1), lambda x: Box(x, x + 1),
        lambda x: {"k": [x, (x + 1, None)]}, lambda x: None, lambda x: (x,), lambda x: [x],
        lambda x: slice(x, None, 2),
    ):  # fmt: skip
        got = fxlab.symbolic_trace(make)(torch.tensor(1))
        assert type(got) is type(make(torch.tensor(1))) and repr(got) == repr(make(torch.tensor(1)))


def test_eight_threads_trace_while_two_only_run():
    m, x = Small().eval(), torch.randn(2, 3)
    wanted, text = m(x), str(fxlab.symbolic_trace(m).graph)
    problems, stop = [], threading.Event()

    def runs():
        while not stop.is_set():
            out = m(x)
            if type(out) is not torch.Tensor or not torch.equal(out, wanted):
                problems.append(out)
                return

    def traces():
        for _ in range(20):
            gm = fxlab.symbolic_trace(m)
            if str(gm.graph) != text or not torch.equal(gm(x), wanted):
                problems.append(str(gm.graph))

    runners = [threading.Thread(target=runs) for _ in range(2)]
    tracers = [threading.Thread(target=traces) for _ in range(8)]
    for t in runners + tracers:
        t.start()
    for t in tracers:
        t.join()
    stop.set()
    for t in runners:
        t.join()
    assert not problems
    assert "training" not in nn.Module.__dict__


def patched_state():
    return (
        nn.Module.__call__.__code__, nn.Module.__getattr__.__code__, "training" in vars(nn.Module),
        nn.Module.__setattr__.__code__, torch.manual_seed.__code__, torch.set_grad_enabled.__init__,
        torch.Tensor.__getitem__, torch.rand, torch.zeros, torch.no_grad.__enter__, math.sqrt,
        torch.no_grad.__exit__, torch.autocast.__enter__, helper,
        torch.fx._symbolic_trace._is_fx_tracing_flag, torch.is_grad_enabled(),
    )  # fmt: skip


def test_a_trace_that_raises_at_any_call_leaves_nothing_patched():
    from fxlab.core import graph as graph_module

    before, m = patched_state(), Small()
    state = dict(m.__dict__)
    original = graph_module.Graph.create_node
    k, finished = 0, False
    while not finished:
        k += 1
        count = 0

        def failing(self, *args, k=k, **kwargs):
            nonlocal count
            count += 1
            if count == k:
                raise KeyboardInterrupt("at call " + str(k))
            return original(self, *args, **kwargs)

        graph_module.Graph.create_node = failing
        try:
            fxlab.symbolic_trace(m)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            graph_module.Graph.create_node = original
        assert patched_state() == before and dict(m.__dict__) == state
    assert k > 8


def test_a_failure_while_installing_any_patch_puts_all_back(monkeypatch):
    from fxlab.core import patches

    before = patched_state()
    total = 0
    for k in range(1, 200):
        count = 0
        originals = {n: getattr(patches, n) for n in ("_set",)}

        def failing(*args, original, k=k):
            nonlocal count
            count += 1
            if count == k:
                raise RuntimeError("no")
            return original(*args)

        for name, original in originals.items():
            monkeypatch.setattr(patches, name, lambda *a, o=original: failing(*a, original=o))
        try:
            fxlab.symbolic_trace(lambda x: x + 1)
            total = k
            break
        except RuntimeError:
            assert patched_state() == before
        finally:
            for name, original in originals.items():
                monkeypatch.setattr(patches, name, original)
    assert total > 10 and patched_state() == before


def test_a_tracer_can_choose_branches_and_leaves():
    class Brave(fxlab.Tracer):
        def to_bool(self, obj):
            return False

        def is_leaf_module(self, m, module_qualified_name):
            return False

    graph = Brave().trace(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).eval())
    graph.eliminate_dead_code()
    assert graph.find_nodes(op="call_function", target=F.batch_norm)
    assert not graph.find_nodes(op="call_module")


def test_no_leaf_trace_of_resnet50_has_the_papers_444_nodes_and_445_lines():
    from fxlab.models import resnet50

    class NoLeaf(fxlab.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return False

        def to_bool(self, obj):
            return False

    m = resnet50().eval()
    graph = NoLeaf().trace(m)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == 444 and len(str(graph).splitlines()) == 445
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(fxlab.GraphModule(m, graph)(x), m(x))


def test_trace_asserts_and_mutable_checks():
    class Asserting(fxlab.Tracer):
        trace_asserts = True

    space = {}  # pytest rewrites the asserts of this file
    exec("def f(x):\n    assert x.sum() > 0, 'positive'\n    return x", space)
    gm = fxlab.GraphModule(nn.Module(), Asserting().trace(space["f"]))
    assert torch.equal(gm(torch.ones(2)), torch.ones(2))
    with pytest.raises(AssertionError):
        gm(-torch.ones(2))

    for other in (
        "msg = 'AssertionError would be too harsh'; return x * 5",
        "raise MyAssertionError('x')",
    ):
        exec(f"def f(x):\n    if not x.sum() > 0:\n        {other}\n    return x", space)
        with pytest.raises(fxlab.TraceError):
            Asserting().trace(space["f"])

    class Pure(fxlab.Tracer):
        check_mutable_operations = True

    for mutating in (lambda x: torch.relu_(x), lambda x: x.add_(1), lambda x: F.relu(x, True)):
        with pytest.raises(RuntimeError, match=r"mut|in place"):
            Pure().trace(mutating)


def test_code_with_a_relative_import_is_traced(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("def one():\n    return 1\n")
    (package / "net.py").write_text("def f(x):\n    from . import one\n    return x + one.one()\n")
    monkeypatch.syspath_prepend(tmp_path)
    gm = fxlab.symbolic_trace(importlib.import_module("some_package.net").f)
    assert gm(2) == 3


def test_a_callable_object_gives_its_own_name_and_a_module_its_classs():
    class Named:
        __name__ = "nice"

        def __call__(self, x):
            return x + 1

    assert fxlab.symbolic_trace(Named())._get_name() == "nice"
    model = nn.Sequential()
    model.add_module("__name__", nn.ReLU())
    assert fxlab.symbolic_trace(model)._get_name() == "Sequential"


def test_star_arguments_and_keyword_only_ones_reach_the_right_parameters():
    def f(a, *rest, k=3, **more):
        return a * k + rest[0] * more["m"]

    gm = fxlab.symbolic_trace(f)
    assert gm(2, 10, k=5, m=7) == f(2, 10, k=5, m=7) == 80

    class M(nn.Module):
        def forward(self, a, /, b=1, *rest, k, **more):
            return a + b * 10 + rest[0] * 100 + k * 1000 + more["m"] * 10000

    assert fxlab.symbolic_trace(M())(1, 2, 3, k=4, m=5) == 54321


def test_a_plain_tensor_that_forward_writes_into_is_put_back_and_told():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = torch.zeros(1)

        def forward(self, x):
            self.n += 1
            return x + self.n

    m = M()
    with pytest.warns(TraceWarning, match="register_buffer"):
        fxlab.symbolic_trace(m)
    assert torch.equal(m.n, torch.zeros(1))


def test_a_region_that_is_left_by_an_exception_is_closed_in_the_graph():
    def f(x):
        try:
            with torch.no_grad():
                y = x * 2
                raise KeyError
        except KeyError:
            pass
        return y + x

    gm = fxlab.symbolic_trace(f)
    gm.graph.lint()
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(gm(x), f(x)) and gm(x).requires_grad == f(x).requires_grad


def test_a_branch_on_the_training_flag_is_fixed_and_told():
    class M(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x * 3

    with pytest.warns(TraceWarning, match="branch on training was fixed to True"):
        fxlab.symbolic_trace(M())


def test_buffers_stay_state_when_a_graph_module_is_traced_again():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return x + self.b * 2

    gm = fxlab.symbolic_trace(fxlab.symbolic_trace(M()))
    gm.b.fill_(5)
    assert torch.equal(gm(torch.zeros(2)), torch.full((2,), 10.0))


def test_a_generator_function_is_refused():
    def rows(x):
        yield x

    with pytest.raises(TraceError, match="generator"):
        fxlab.symbolic_trace(rows)


def test_a_tensor_as_a_default_survives_a_transformer():
    default = torch.ones(3)

    def f(x, t=default):
        return x * t

    gm = fxlab.Transformer(fxlab.symbolic_trace(f)).transform()
    assert torch.equal(gm(torch.full((3,), 2.0)), torch.full((3,), 2.0))
    assert gm.forward.__defaults__[0] is default


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_a_scripted_part_is_traced():
    m = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU())
    x = torch.ones(1, 2)
    assert torch.equal(fxlab.symbolic_trace(m)(x), m(x))


def test_a_root_may_be_a_graph_module_of_torch_fx_or_torch_export():
    def f(x):
        return x + 1

    x = torch.randn(3)
    theirs = torch.fx.symbolic_trace(f)
    assert torch.equal(fxlab.symbolic_trace(theirs)(x), f(x))
    exported = torch.export.export(nn.Linear(3, 3), (x,)).module()
    ours = fxlab.symbolic_trace(exported)
    assert torch.equal(ours(x), exported(x))
    assert len(ours.graph.nodes) == len(torch.fx.symbolic_trace(exported).graph.nodes)
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1))
    double = torch.fx.symbolic_trace(lambda x: x * 2)
    assert len(fxlab.replace_pattern(gm, theirs, double)) == 1
    assert torch.equal(gm(x), torch.relu(x * 2))


def test_a_tracer_may_say_what_the_roots_scope_is_as_torchs_own_quantizer_does():
    from fxlab.proxy import Scope

    class Mine(fxlab.Tracer):
        def __init__(self):
            super().__init__()
            self.scope = Scope("top", torch.nn.Sequential)

    tracer = Mine()
    graph = tracer.trace(torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU())))
    assert tracer.scope == Scope("top", torch.nn.Sequential)
    assert tracer.node_name_to_scope["input_1"] == ("top", torch.nn.Sequential)
    (relu,) = graph.find_nodes(op="call_module", target="0.0")
    assert tracer.node_name_to_scope[relu.name] == ("0.0", torch.nn.ReLU)


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_marker_for_an_argument_hands_its_attributes_to_the_node_but_takes_none_away(fx):
    holder = importlib.import_module(f"{fx.__name__}._symbolic_trace").PHBase

    class Marked(holder):
        def __init__(self, **attributes):
            vars(self).update(attributes)

    class Tags(fx.Tracer):
        def create_node(self, *args, **kwargs):
            node = super().create_node(*args, **kwargs)
            node.tag = "own"
            return node

    marked = Marked(tag="bad", note=1, op="bad", users="bad", meta="bad", graph="bad", args="bad")
    graph = Tags().trace(lambda a, b: a + b, concrete_args={"a": marked, "b": 2})
    graph.lint()
    first = next(iter(graph.nodes))
    assert first.note == 1 and {node.tag for node in graph.nodes} == {"own"}


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
@pytest.mark.parametrize("fixed, other", [
    (torch.float16, torch.float64), (torch.device("cpu"), torch.device("meta")),
    (torch.channels_last, torch.contiguous_format), ("a", "b"), (1, 2), (True, False),
])  # fmt: skip
def test_every_plain_value_that_was_fixed_is_compared_at_run_time(fx, fixed, other):
    gm = fx.symbolic_trace(lambda x, how: x + 1, concrete_args={"how": fixed})
    assert torch.equal(gm(torch.ones(2), fixed), torch.full((2,), 2.0))
    with pytest.raises(AssertionError, match="specialized"):
        gm(torch.ones(2), other)
