"""A GraphModule runs what its Graph says, always, and survives everything one does to a Module."""

from __future__ import annotations

import collections
import copy
import gc
import importlib
import inspect
import io
import linecache
import operator
import pickle
import shutil
import sys
import threading
import traceback
import weakref

import pytest
import torch
import torch.fx
from torch import nn

import fxlab
from fxlab.core import errors
from fxlab.core.errors import CodegenError, RewriteError
from fxlab.core.graph import MISSING, Graph
from fxlab.core.graph_module import GraphModule
from fxlab.explorer.undo import undo


class Model(nn.Module):
    """A model with state of every kind."""

    limit = 3

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.unused = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(1.0))
        self.register_buffer("hidden", torch.tensor(1.0), persistent=False)
        self.config = {"heads": 4}
        self._secret = 1

    def heads(self):
        return self.config["heads"]

    @staticmethod
    def doubled(x):
        return 2 * x

    def forward(self, x):
        x = self.blocks(self.linear(x)) * self.scale + self.shift + self.hidden
        return torch.relu(x)


MODEL, X = Model().eval(), torch.randn(2, 3)
WANT = MODEL(X)


def traced() -> GraphModule:
    return fxlab.symbolic_trace(MODEL)


def edit(gm: GraphModule) -> torch.Tensor:
    """Make the relu at the end a negation; return what the module must give now."""
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.neg
    relu_gone = MODEL.blocks(MODEL.linear(X)) * MODEL.scale + MODEL.shift + MODEL.hidden
    return -relu_gone


# -- state -------------------------------------------------------------------------------------


def test_it_takes_over_the_state_that_the_graph_needs_and_shares_it():
    gm, theirs = traced(), torch.fx.symbolic_trace(MODEL)
    assert list(gm.state_dict()) == [k for k in theirs.state_dict() if k != "hidden"]
    assert [n for n, _ in gm.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert gm.linear is MODEL.linear and gm.scale is MODEL.scale and gm.shift is MODEL.shift
    assert type(gm.blocks) is nn.Module and gm.blocks is not MODEL.blocks
    assert not hasattr(gm, "unused") and "hidden" in dict(gm.named_buffers())
    assert not gm.training and not gm.blocks.training
    assert torch.equal(gm(X), WANT)


def test_the_root_may_be_a_dict_from_path_to_value():
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_module", "a.b", (x,))
    w = graph.create_node("get_attr", "a.weight")
    s = graph.create_node("get_attr", "a")
    graph.output((y, w, s))
    holder = nn.Module()
    gm = GraphModule({"a.weight": torch.ones(2), "a.b": nn.ReLU(), "a": holder}, graph, "Mine")
    assert gm(torch.tensor(-1.0))[0] == 0 and "a.weight" in gm.state_dict() and gm.a is holder
    assert repr(gm).startswith("Mine(") and type(gm).__name__ == "Mine"
    with pytest.raises(RuntimeError, match=r"a_weight refers to 'a.weight'"):
        GraphModule({"a.b": nn.ReLU(), "a": holder}, graph)


@pytest.mark.parametrize("name", ["graph", "_graph", "code", "recompile", "meta", "to_folder",
                                  "_compile", "_edit", "_original", "original_type"])  # fmt: skip
def test_a_name_of_graph_modules_own_is_refused_with_its_node(name):
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, nn.ReLU())

        def forward(self, x):
            return getattr(self, name)(x)

    with pytest.raises(RewriteError, match=f"'{name}', which is a name of GraphModule's own"):
        fxlab.symbolic_trace(Clash())
    graph = Graph()
    graph.output(graph.create_node("get_attr", f"{name}.weight"))
    with pytest.raises(RewriteError, match=f"'{name}', which is a name of GraphModule's own"):
        GraphModule({f"{name}.weight": torch.ones(1)}, graph)


def test_a_target_that_the_root_lacks_is_named_with_its_node():
    graph = Graph()
    graph.output(graph.create_node("call_module", "a.b", ()))
    for kind in (AttributeError, RuntimeError, RewriteError):
        with pytest.raises(kind, match=r"(?s)a_b refers to 'a.b'.*Module.*at node: %a_b"):
            GraphModule(nn.Module(), graph)
    with pytest.raises(RuntimeError, match="its state from a int"):
        GraphModule(3, graph)  # type: ignore[arg-type]


def test_overlapping_paths_are_installed_once():
    graph = Graph()
    x = graph.placeholder("x")
    inner = graph.create_node("call_module", "blocks.0", (x,))
    whole = graph.create_node("call_module", "blocks", (inner,))
    graph.output(graph.create_node("call_module", "blocks.1", (whole,)))
    gm = GraphModule(MODEL, graph)
    assert gm.blocks is MODEL.blocks
    assert torch.equal(gm(X), MODEL.blocks[1](MODEL.blocks(MODEL.blocks[0](X))))


def test_constants_of_the_trace_live_on_the_new_module_only():
    constant, model = torch.ones(3), nn.Identity()

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x) + constant

    root = Uses()
    before = set(vars(root))
    gm = fxlab.symbolic_trace(root)
    again = fxlab.symbolic_trace(gm)
    for module in (gm, again, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), copy.copy(gm)):
        assert torch.equal(module(X), X + 1)
    assert set(vars(root)) == before and "_tensor_constant0" in dict(gm.named_buffers())


def test_the_original_can_be_read_through():
    gm = traced()
    assert gm.original_type is Model and gm.limit == 3 and gm.heads() == 4 and gm.doubled(2) == 4
    assert gm.config is MODEL.config
    for name in ("_secret", "unused", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(gm, name)
    gm.limit = 7
    assert gm.limit == 7 and Model.limit == 3
    assert fxlab.symbolic_trace(gm).original_type is Model
    assert copy.deepcopy(gm).heads() == copy.copy(gm).heads() == 4
    assert fxlab.symbolic_trace(lambda x: x).original_type is None


def test_submodules_are_added_and_deleted_by_path():
    gm = traced()
    assert gm.add_submodule("new.deep.relu", nn.ReLU()) and type(gm.new.deep) is nn.Module
    assert not gm.add_submodule("scale.x", nn.ReLU())
    assert gm.delete_submodule("new.deep.relu") and not gm.delete_submodule("new.deep.relu")
    assert not gm.delete_submodule("scale") and not gm.delete_submodule("a.b.c")
    gm.set_submodule("blocks.1", nn.Tanh())
    assert type(gm.blocks.get_submodule("1")) is nn.Tanh


def test_unused_submodules_are_deleted_and_used_ones_kept():
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_module", "unused.1", (x,))
    graph.output((y, graph.create_node("get_attr", "linear.weight")))
    gm = GraphModule(MODEL, graph)
    gm.add_submodule("extra.part", nn.ReLU())
    gm.add_submodule("unused.2", nn.ReLU())
    gm.delete_all_unused_submodules()
    assert [n for n, _ in gm.named_modules()] == ["", "unused", "unused.1", "unused.1.0", "linear"]


# -- events of state ---------------------------------------------------------------------------


def heard(gm, act):
    """Return the events that `act` causes, and how often the graph's version went up."""
    events = []

    def listen(*event):
        events.append(event)

    gm.graph.add_listener(listen)
    version = gm.graph.version
    act()
    gm.graph.remove_listener(listen)
    return events, gm.graph.version - version


RELU, WEIGHT, BUFFER = nn.ReLU(), nn.Parameter(torch.ones(1)), torch.ones(2)
STATE_EDITS = {
    "setattr": (lambda gm: setattr(gm, "linear", RELU), "module", "linear", MODEL.linear, RELU),
    "add_module": (lambda gm: gm.add_module("new", RELU), "module", "new", MISSING, RELU),
    "add_submodule": (lambda gm: gm.add_submodule("blocks.9", RELU), "module", "blocks.9", MISSING,
                      RELU),
    "set_submodule": (lambda gm: gm.set_submodule("blocks.1", RELU), "module", "blocks.1",
                      MODEL.blocks[1], RELU),
    "delete_submodule": (lambda gm: gm.delete_submodule("blocks.1"), "module", "blocks.1",
                         MODEL.blocks[1], MISSING),
    "delattr": (lambda gm: delattr(gm, "linear"), "module", "linear", MODEL.linear, MISSING),
    "parameter": (lambda gm: setattr(gm, "scale", WEIGHT), "attr", "scale", MODEL.scale, WEIGHT),
    "register_parameter": (lambda gm: gm.register_parameter("w", WEIGHT), "attr", "w", MISSING,
                           WEIGHT),
    "buffer": (lambda gm: setattr(gm, "shift", BUFFER), "attr", "shift", MODEL.shift, BUFFER),
    "register_buffer": (lambda gm: gm.register_buffer("b", BUFFER), "attr", "b", MISSING, BUFFER),
    "plain": (lambda gm: setattr(gm, "number", 3), "attr", "number", MISSING, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE_EDITS)
def test_an_edit_of_state_is_one_event_and_can_be_undone(name):
    act, kind, path, before, after = STATE_EDITS[name]
    gm = traced()
    state = dict(gm.named_modules()) | dict(gm.named_parameters()) | dict(gm.named_buffers())
    events, versions = heard(gm, lambda: act(gm))
    assert [(e[0], e[2], e[3]["path"], e[4]["path"]) for e in events] == [(kind, None, path, path)]
    assert events[0][3]["value"] is before and events[0][4]["value"] is after and versions >= 1
    assert events[0][3]["module"] is gm
    undo(events[0][0], gm.graph, *events[0][2:])
    undone = dict(gm.named_modules()) | dict(gm.named_parameters()) | dict(gm.named_buffers())
    assert undone == state and not hasattr(gm, "number")


def test_setting_the_same_value_tells_nothing_and_code_stays():
    gm = traced()
    gm(X)
    function = type(gm).forward
    events, _ = heard(gm, lambda: setattr(gm, "linear", gm.linear))
    gm.number = 4
    assert not events and type(gm).forward is function


# -- code follows the graph --------------------------------------------------------------------


def test_an_edit_is_seen_by_the_next_call_without_recompile():
    gm = traced()
    gm(X)
    assert torch.equal(gm(X), WANT)
    want = edit(gm)
    assert torch.equal(gm(X), want) and "torch.neg" in gm.code


def test_a_hundred_edits_compile_once():
    gm = traced()
    gm(X)
    counter, write = [], gm.graph._codegen._gen_python_code
    gm.graph._codegen._gen_python_code = lambda *a, **k: counter.append(1) or write(*a, **k)
    for _ in range(100):
        want = edit(gm)
        gm.graph.lint()
        gm.recompile()
    assert not counter and torch.equal(gm(X), want) and torch.equal(gm(X), want)
    assert len(counter) == 1


def test_recompile_returns_the_code_and_makes_hand_made_changes_count():
    gm = traced()
    gm(X)
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node._target = torch.neg  # behind the back of every primitive
    assert "neg" not in gm.code
    assert "torch.neg" in gm.recompile().src and gm.recompile().globals["torch"] is torch
    assert "torch.neg" in gm.code


def test_two_modules_may_share_a_graph():
    graph = traced().graph
    a, b = GraphModule(MODEL, graph), GraphModule(MODEL, graph)
    assert torch.equal(a(X), b(X))
    want = edit(a)
    assert torch.equal(a(X), want) and torch.equal(b(X), want)
    del a
    gc.collect()
    assert list(graph._owners) == [b] and torch.equal(b(X), want)


def test_assigning_a_graph_replaces_the_code_and_leaves_the_old_graph_alone():
    gm, other = traced(), Graph()
    old = gm.graph
    gm(X)
    other.output(other.call_function(torch.neg, (other.placeholder("x"),)))
    gm.graph = other
    assert torch.equal(gm(X), -X) and other.owning_module is gm and old.owning_module is None
    function = type(gm).forward
    next(iter(old.nodes)).name = "renamed"
    assert type(gm).forward is function
    with pytest.raises(RuntimeError, match="must be a Graph"):
        gm.graph = "graph"


def test_each_instance_has_a_class_of_its_own():
    gm = traced()
    modules = [gm, traced(), copy.copy(gm), copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))]
    assert len({type(m) for m in modules}) == len(modules)
    assert {type(m).__mro__[1] for m in modules} == {GraphModule}
    assert {type(m).__name__ for m in modules} == {"Model"}


class Special(GraphModule):
    """A user's subclass, with a signature and state of its own."""

    def __init__(self, graph, extra):
        super().__init__({}, graph, "Special")
        self.extra = extra

    def twice(self, x):
        return self(x) * 2


def test_a_subclass_keeps_its_type_and_state_through_copies():
    graph = Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    gm = Special(graph, [1])
    for other in (gm, copy.copy(gm), copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert isinstance(other, Special) and other.extra == [1]
        assert torch.equal(other.twice(X), -2 * X)


def test_an_attribute_called_forward_on_the_instance_wins():
    gm = traced()
    gm.forward = lambda x: 5
    edit(gm)
    assert gm(X) == 5


def test_a_graph_that_cannot_be_written_says_so_at_the_call():
    gm = traced()
    graph = gm.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_method("neg", ())
    with pytest.raises(CodegenError, match="neg cannot be written as Python"):
        gm(X)
    with pytest.raises(CodegenError):
        gm.forward  # noqa: B018


# -- who looks at forward ----------------------------------------------------------------------


def stale(gm):
    """Return a module whose code is stale after a compilation, and what it must give."""
    gm(X)
    return gm, edit(gm)


def test_signature_source_and_bound_method_are_those_of_a_plain_function():
    for look in (
        lambda gm: list(inspect.signature(gm.forward).parameters) == ["x"],
        lambda gm: list(inspect.signature(type(gm).forward).parameters) == ["self", "x"],
        lambda gm: "torch.neg" in inspect.getsource(type(gm).forward),
        lambda gm: type(gm.forward.__func__) is type(stale) and gm.forward.__self__ is gm,
    ):
        gm, want = stale(traced())
        assert look(gm)
        assert torch.equal(gm(X), want)


def test_four_threads_may_make_the_first_call_at_once():
    for _ in range(20):
        gm, want = stale(traced())
        barrier, results = threading.Barrier(4), []

        def call(gm=gm, barrier=barrier, results=results):
            barrier.wait()
            results.append(gm(X))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and all(torch.equal(r, want) for r in results)


def test_replicas_for_data_parallel_run_the_current_code():
    gm, want = stale(traced())
    replicas = [gm._replicate_for_data_parallel() for _ in range(3)]
    for replica in replicas:
        assert not replica._parameters and replica.graph is gm.graph
        for name, parameter in gm._parameters.items():
            replica._parameters[name] = parameter
        assert torch.equal(replica(X), want)
    assert "torch.neg" in gm.code and torch.equal(gm(X), want)
    edit_back = next(n for n in gm.graph.nodes if n.target is torch.neg)
    edit_back.target = torch.relu
    assert all(torch.equal(m(X), WANT) for m in (gm, *replicas))


def test_distributed_data_parallel_trains_it(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        gm, want = stale(fxlab.symbolic_trace(copy.deepcopy(MODEL)))
        parallel = nn.parallel.DistributedDataParallel(gm)
        assert torch.allclose(parallel(X), want)
        parallel(X).sum().backward()
        assert gm.scale.grad is not None
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_torchscript_compiles_what_the_graph_says_now():
    gm, want = stale(traced())
    assert torch.allclose(torch.jit.script(gm)(X), want)
    next(n for n in gm.graph.nodes if n.target is torch.neg).target = torch.relu
    assert torch.allclose(torch.jit.script(gm)(X), WANT)
    gm, want = stale(traced())
    assert torch.allclose(torch.jit.trace(gm, (X,))(X), want)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_takes_it_whole_stale_or_inside_another_module():
    gm, want = stale(traced())
    assert torch.allclose(torch.compile(gm, backend="eager", fullgraph=True)(X), want)
    gm, want = stale(traced())
    outer = torch.compile(Outer(gm), backend="eager", fullgraph=True)
    assert torch.allclose(outer(X), want * 2)
    gm, want = stale(traced())
    called = torch.compile(lambda x: gm(x) + 1, backend="eager", fullgraph=True)
    assert torch.allclose(called(X), want + 1)
    fresh = torch.compile(traced(), backend="eager", fullgraph=True)
    assert torch.allclose(fresh(X), WANT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("form", ["alone", "method", "inside", "called"])
def test_what_torch_compile_took_follows_every_edit(form, fullgraph):
    torch._dynamo.reset()
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    how = {"backend": "eager", "fullgraph": fullgraph}
    if form == "method":
        gm.compile(**how)
    part = {"inside": Outer(gm), "called": lambda x: gm(x) * 2}.get(form, gm)
    run = gm if form == "method" else torch.compile(part, **how)
    times = 2 if form in ("inside", "called") else 1
    for target in (torch.relu, torch.neg, torch.abs, torch.exp):  # without recompile or gm(x)
        list(gm.graph.nodes)[1].target = target
        assert torch.equal(run(-X), (target(-X) + 1) * times)
    handle = gm.register_forward_hook(lambda *_: X)
    assert form != "alone" or torch.equal(run(-X), X)
    handle.remove()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fx", [torch.fx, fxlab])
def test_torch_compile_takes_more_modules_than_its_limit_for_one_function(fx):
    torch._dynamo.reset()
    for i in range(torch._dynamo.config.recompile_limit + 2):
        gm = fx.symbolic_trace(lambda x, i=i: torch.relu(x) + i, {"i": i})
        seen = []

        def backend(captured, _, seen=seen):
            seen.append(captured)
            return captured.forward

        assert torch.equal(torch.compile(gm, backend=backend, fullgraph=True)(X, i), X.relu() + i)
        assert len(seen) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_takes_it(strict):
    gm, want = stale(traced())
    program = torch.export.export(gm, (X,), strict=strict)
    assert torch.allclose(program.module()(X), want)


def test_it_is_traced_again_inside_another_module():
    gm, want = stale(traced())
    outer = fxlab.symbolic_trace(Outer(gm))
    assert torch.equal(outer(X), want * 2)
    assert any(node.target == "inner.linear" for node in outer.graph.nodes)


def test_module_hooks_and_training_mode_work_as_on_any_module():
    gm, calls = traced(), []
    gm.register_forward_hook(lambda m, args, out: calls.append(out))
    gm(X)
    assert len(calls) == 1
    gm.train()
    assert gm.training and gm.blocks.training


# -- copies and files --------------------------------------------------------------------------


def described(gm):
    """Return what a copy must keep of a graph."""
    return [(n.op, n.name, str(n.target), n.type, str(n.args), n.meta.get("note"), vars(n))
            for n in gm.graph.nodes]  # fmt: skip


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda gm: pickle.loads(pickle.dumps(gm)),
    "torch.save": lambda gm: torch.load(saved(gm), weights_only=False),
}


def saved(gm):
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_the_graph_itself_and_share_nothing(name):
    gm = traced()
    nodes = list(gm.graph.nodes)
    nodes[1].name = "my_name"
    nodes[2].meta["note"] = {"k": [1]}
    nodes[2].mine = 5
    nodes[3].type = torch.Tensor
    gm.meta["reports"] = {"a": 1}
    gm.limit = 9
    want = described(gm)
    other = COPIES[name](gm)
    assert described(other) == want and other.meta == gm.meta and other.limit == 9
    assert other.code == gm.code and torch.equal(other(X), gm(X))
    assert other.linear.weight is not gm.linear.weight
    assert list(other.state_dict()) == list(gm.state_dict())
    assert other.original_type is Model and other.heads() == 4
    edit(other)
    assert torch.equal(gm(X), WANT) and not torch.equal(other(X), WANT)
    other.graph.lint()


def test_a_shallow_copy_shares_graph_and_tensors_but_no_containers():
    gm = traced()
    other = copy.copy(gm)
    assert other.graph is gm.graph and other.linear is gm.linear and other.scale is gm.scale
    other.delete_submodule("blocks.1")
    other.register_buffer("new", torch.ones(1))
    assert "1" in gm.blocks._modules and not hasattr(gm, "new")
    want = edit(other)
    assert torch.equal(gm(X), want)


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    other = copy.deepcopy(fxlab.symbolic_trace(model))
    assert other.get_submodule("0").weight is other.get_submodule("1").weight


def test_a_pickle_carries_a_version_that_is_checked():
    build, (state,) = traced().graph.__reduce__()
    with pytest.raises(CodegenError, match="version 0; this fxlab reads version 1"):
        build({**state, "version": 0})
    assert build(state).nodes


def test_what_cannot_be_pickled_is_named_with_its_node():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    relu.args = (relu.args[0], threading.Lock())
    with pytest.raises(Exception, match="relu"):
        pickle.dumps(gm)


def test_an_original_that_cannot_be_pickled_does_not_hinder():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock, self.number = threading.Lock(), 3

        def forward(self, x):
            return x + 1

    gm = fxlab.symbolic_trace(Local())
    assert gm.lock and gm.original_type is Local
    other = pickle.loads(pickle.dumps(gm))
    assert other.number == 3 and other.original_type is None and not hasattr(other, "lock")


def test_to_folder_writes_a_package_that_computes_the_same(tmp_path, monkeypatch):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a b", nn.Linear(3, 3))
            self.register_buffer("class", torch.ones(3))

        def forward(self, x, limit=float("inf"), *, kind=torch.float64):
            y = torch.clamp(getattr(self, "a b")(x) + getattr(self, "class"), max=limit)
            return collections.OrderedDict(y=operator.iadd(y, 1).to(kind))

    gm = fxlab.symbolic_trace(Odd())
    gm.to_folder(tmp_path / "first" / "package", "Saved")
    shutil.move(tmp_path / "first" / "package", tmp_path / "moved_package")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module("moved_package").Saved()
    want, got = gm(X), loaded(X)
    assert type(got) is type(want) and torch.equal(got["y"], want["y"])
    assert got["y"].dtype is torch.float64
    assert list(loaded.state_dict()) == list(gm.state_dict())
    sys.modules.pop("moved_package.module")


# -- texts and errors --------------------------------------------------------------------------


def test_print_readable_prints_and_returns_the_same_text(capsys):
    gm = fxlab.symbolic_trace(Outer(nn.ReLU()))
    gm.add_submodule("part", traced())
    text = gm.print_readable()
    assert capsys.readouterr().out == text + "\n"
    assert text == gm.print_readable(print_output=False)
    assert text.startswith("class Outer(torch.nn.Module):\n    def forward(self, x):\n")
    assert "        inner = self.inner(x)\n" in text and "x = None" not in text
    assert "    class part(torch.nn.Module):\n        def forward" in text
    assert "# File: " in text and "code: return self.inner(x) * 2" in text
    compile(text, "text", "exec")
    assert "relu = torch.relu" in str(traced())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no notes")
def test_an_error_names_the_generated_line_the_node_and_the_users_line():
    gm = traced()
    with pytest.raises(RuntimeError) as caught:
        gm(torch.randn(2, 7))
    (note,) = caught.value.__notes__
    assert note.splitlines()[0].startswith("While running node %linear : ")
    assert "generated code:  linear = self.linear(x);  x = None" in note
    assert "test_graph_module.py" in note and "x = self.blocks(self.linear(x))" in note
    text = "".join(traceback.format_exception(caught.value))
    assert "linear = self.linear(x);  x = None\n" in text.split("While running")[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no notes")
def test_an_error_inside_a_module_inside_a_module_has_one_note():
    gm = fxlab.symbolic_trace(nn.Sequential(nn.ReLU()))
    gm.set_submodule("0", traced())
    with pytest.raises(RuntimeError) as caught:
        gm(torch.randn(2, 7))
    (note,) = caught.value.__notes__
    assert "%linear" in note


def test_nothing_is_left_behind_when_modules_are_dropped():
    gc.collect()
    files, known = set(linecache.cache), set(errors.generated_code)
    refs = []
    for _ in range(10):
        gm = traced()
        gm(X)
        edit(gm)
        gm(X)
        refs += [weakref.ref(gm), weakref.ref(type(gm)), weakref.ref(gm.graph)]
    assert set(errors.generated_code) > known
    del gm
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
    assert not set(errors.generated_code) - known and not set(linecache.cache) - files


# -- torch.fx's hooks --------------------------------------------------------------------------


def test_node_hooks_of_torch_fx_are_called():
    gm, seen = traced(), []

    def created(node):
        seen.append(("create", node.name))

    def erased(node):
        seen.append(("erase", node.name))

    def replaced(old, new, user):
        seen.append(("replace", old.name, new, user.name))

    gm._register_create_node_hook(created)
    gm._register_erase_node_hook(erased)
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    with gm._set_replace_hook(replaced):
        with gm.graph.inserting_after(relu):
            neg = gm.graph.call_function(torch.neg, relu.args)
        relu.replace_all_uses_with(neg)
        gm.graph.erase_node(relu)
    gm._unregister_create_node_hook(created)
    gm._unregister_erase_node_hook(erased)
    gm.graph.erase_node(gm.graph.call_function(len, ([],)))
    assert seen == [("create", "neg"), ("replace", "relu", "neg", "output"), ("erase", "relu")]
    copies = []
    gm._register_deepcopy_hook(copies.append)
    other = copy.deepcopy(gm)
    assert copies == [other]
    gm._unregister_deepcopy_hook(copies.append)


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_a_subclass_may_begin_as_a_plain_module_as_torchvisions_does(fx):
    class Two(fx.GraphModule):
        def __init__(self, root, first, second):
            super(fx.GraphModule, self).__init__()
            for name, child in root.named_children():
                setattr(self, name, child)
            self.first, self.second = first, second
            self.graph = first

        def train(self, mode=True):
            self.graph = self.first if mode else self.second
            return super().train(mode)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, second = fx.symbolic_trace(model).graph, fx.symbolic_trace(model).graph
    relu = second.find_nodes(op="call_module", target="1")[0]
    relu.replace_all_uses_with(relu.args[0])
    second.erase_node(relu)
    both, x = Two(model, first, second), torch.randn(4, 2)
    for kept in (both, copy.deepcopy(both))[: 2 if fx is fxlab else 1]:  # torch.fx loses the class
        assert torch.equal(kept.train()(x), model(x))
        assert torch.equal(kept.eval()(x), model[0](x))


@pytest.mark.parametrize("early", [True, False], ids=["called before", "not called before"])
def test_its_class_may_be_changed_to_a_derived_one_as_parametrize_and_fsdp_do(early):
    gm = traced()
    want = gm(X) if early else traced()(X)
    own = type(gm)
    gm.__class__ = type("Wrapped", (own,), {"forward": lambda self, x: own.forward(self, x) + 1})
    assert torch.equal(gm(X), want + 1)
    other, deep = copy.copy(gm), copy.deepcopy(gm)
    assert torch.equal(other(X), want) and torch.equal(deep(X), want), "a copy is its graph"
    edit(gm)
    after = gm(X)
    assert not torch.equal(after, want + 1), "an edit is not lost"
    assert torch.equal(deep(X), want)
    gm.__class__ = own
    assert torch.equal(gm(X), after - 1)
    linear = fxlab.symbolic_trace(nn.Linear(2, 2))
    x, weight = torch.randn(4, 2), linear.weight.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())
    assert torch.equal(linear(x), nn.functional.linear(x, weight.tanh(), linear.bias))


def test_a_subclass_may_say_how_it_is_called():
    class Doubled(GraphModule):
        def _call_impl(self, *args, **kwargs):
            return 2 * super()._call_impl(*args, **kwargs)

    gm = Doubled(MODEL, traced().graph)
    for _ in range(2):
        assert torch.equal(gm(X), 2 * traced()(X))
