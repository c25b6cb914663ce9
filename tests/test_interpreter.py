"""An Interpreter does what generated code does; a Transformer writes the program again."""

from __future__ import annotations

import gc
import operator
import sys
import threading
import weakref

import pytest
import torch
import torch.fx
from torch import nn

import fxlab
from fxlab.core.errors import RewriteError, TraceError
from fxlab.core.graph import Graph, _enter_region, _exit_region
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter, Transformer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, n=2):
        y = torch.relu(self.linear(x)) * self.scale
        return {"y": y.sum(dim=[0, 1]), "all": [y[:, 1:n], (y, n)]}


X = torch.randn(2, 3)


def traced():
    return fxlab.symbolic_trace(Model())


def test_it_returns_what_the_generated_code_returns():
    gm = traced()
    for args in ((X,), (X, 3)):
        assert repr(Interpreter(gm).run(*args)) == repr(gm(*args))
        assert repr(Interpreter(gm, garbage_collect_values=False).run(*args)) == repr(gm(*args))


def test_functions_get_plain_lists_and_dicts_as_from_generated_code():
    kinds = []

    def look(*args):
        kinds.append([type(a) for a in args])

    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(look, ([x], {"k": x}, (x,), [[1]], slice(x), []))
    graph.output(x)
    gm = GraphModule({}, graph)
    gm(1)
    Interpreter(gm).run(1)
    assert kinds[0] == kinds[1] == [list, dict, tuple, list, slice, list]


def test_each_opcode_has_a_method_that_can_be_overridden():
    seen = []

    class Watch(Interpreter):
        pass

    def watch(op):
        def method(self, target, args, kwargs):
            seen.append(op)
            return getattr(Interpreter, op)(self, target, args, kwargs)

        return method

    ops = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
    for op in ops:
        setattr(Watch, op, watch(op))
    gm = traced()
    Watch(gm).run(X)
    assert seen == [node.op for node in gm.graph.nodes] and set(seen) == set(ops)


def test_values_known_before_are_not_computed_again():
    gm = traced()
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    zeros = torch.zeros(2, 3)
    interpreter = Interpreter(gm)
    assert interpreter.run(X, initial_env={relu: zeros})["y"] == 0
    env = {node: X for node in gm.graph.nodes if node.op == "placeholder" and node.name == "x"}
    assert torch.equal(interpreter.run(initial_env=env)["y"], gm(X)["y"])


def test_values_are_dropped_behind_their_last_use_unless_asked_for():
    refs, alive = [], {}

    class Watch(Interpreter):
        def run_node(self, n):
            gc.collect()
            alive[n.name] = [ref() is not None for ref in refs]
            value = super().run_node(n)
            refs.append(weakref.ref(value))
            return value

    gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg().exp())
    watch = Watch(gm)
    watch.run(torch.ones(2))
    assert alive["output"][1:] == [False, False, True]
    refs.clear()
    watch.boxed_run([torch.ones(2)])
    assert alive["exp"] == [False, True]
    keep = Interpreter(gm, garbage_collect_values=False)
    keep.run(torch.ones(2))
    assert set(keep.env) == set(gm.graph.nodes)
    assert len(watch.env) == 1


def test_boxed_run_empties_the_list_of_arguments():
    gm = traced()
    values = [X, 2]
    assert repr(Interpreter(gm).boxed_run(values)) == repr(gm(X, 2)) and values == []
    with pytest.raises(RuntimeError, match=r"boxed_run got 1 values(.|\n)*2, one for each"):
        Interpreter(gm).boxed_run([X])


def test_all_kinds_of_parameters_can_be_given():
    def program(a, b=2, *rest, c, d=4, **more):
        return a, b, rest, c, d, more

    gm = fxlab.symbolic_trace(program)
    assert gm(1, 2, 3, c=5, e=6) == (1, 2, (3,), 5, 4, {"e": 6})
    assert Interpreter(gm).run(1, 2, 3, c=5, e=6) == (1, 2, (3,), 5, 4, {"e": 6})
    assert Interpreter(gm).run(1, c=5) == (1, 2, (), 5, 4, {})
    with pytest.raises(RuntimeError, match="no value for the parameter a"):
        Interpreter(gm).run()
    with pytest.raises(RuntimeError, match="a value for typo, which is no parameter"):
        Interpreter(traced()).run(X, typo=1)


def test_another_graph_can_be_run_on_the_state_of_a_module():
    gm = traced()
    graph = Graph()
    graph.output(graph.create_node("get_attr", "scale"))
    assert Interpreter(gm, graph=graph).run() is gm.scale


def test_a_graph_without_output_returns_none():
    graph = Graph()
    graph.placeholder("x")
    assert Interpreter(GraphModule({}, graph)).run(1) is None
    assert Transformer(GraphModule({}, graph)).transform()(1) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no notes")
def test_an_error_names_the_node_and_the_users_line():
    gm = traced()
    with pytest.raises(RuntimeError) as caught:
        Interpreter(gm).run(torch.randn(2, 7))
    (note,) = caught.value.__notes__
    assert note.startswith("While running node %linear : ") and "test_interpreter.py" in note
    assert "y = torch.relu(self.linear(x)) * self.scale" in note
    quiet = Interpreter(gm)
    quiet.extra_traceback = False
    with pytest.raises(RuntimeError) as caught:
        quiet.run(torch.randn(2, 7))
    assert not hasattr(caught.value, "__notes__")


def test_a_value_that_is_not_there_and_a_missing_attribute_are_named():
    graph = Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    graph.output(relu)
    gm = GraphModule({}, graph)
    x.prepend(relu)
    with pytest.raises(RuntimeError, match="relu reads x, which has no value"):
        Interpreter(gm).run(1)
    with pytest.raises(
        RewriteError, match=r"nothing is at 'a\.b': 'GraphModule' object has no attribute 'a'"
    ):
        Interpreter(gm).fetch_attr("a.b")


def test_regions_are_left_and_the_callers_mode_is_put_back_on_errors():
    graph = Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(_enter_region, (torch.no_grad,))
    inner = graph.call_function(_enter_region, (torch.enable_grad,))
    a = graph.call_function(torch.mul, (x, 2))
    graph.call_function(_exit_region, (inner,))
    b = graph.call_function(torch.mul, (x, 3))
    graph.call_function(_exit_region, (outer,))
    c = graph.call_function(torch.mul, (x, 4))
    graph.output((a, b, c))
    gm = GraphModule({}, graph)
    x = torch.ones(1, requires_grad=True)
    for run in (gm, Interpreter(gm).run, Transformer(gm).transform()):
        assert [out.requires_grad for out in run(x)] == [True, False, True]
        assert torch.is_grad_enabled()
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                with pytest.raises(TypeError):
                    run(object())
                assert torch.is_grad_enabled() is mode


def test_eight_thousand_nodes_run():
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(8000):
        x = graph.call_function(operator.add, (x, 1))
    graph.output(x)
    gm = GraphModule({}, graph)
    assert Interpreter(gm).run(0) == 8000 == Transformer(gm).transform()(0)


# -- Transformer ----------------------------------------------------------------------


class Swap(Transformer):
    """The example of torch.fx's documentation: neg and sigmoid change places."""

    def call_function(self, target, args, kwargs):
        if target == torch.neg:
            return torch.sigmoid(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target, args, kwargs):
        if target == "neg":
            self_obj, *rest = args
            return self_obj.sigmoid(*rest, **kwargs)
        return super().call_method(target, args, kwargs)


def test_a_transformer_replaces_operations_as_torch_fx_s_does():
    def program(x):
        return torch.neg(x).neg() + x.view(-1)

    class TorchSwap(torch.fx.Transformer):
        call_function, call_method = Swap.call_function, Swap.call_method

    x = torch.randn(3)
    gm = Swap(fxlab.symbolic_trace(program)).transform()
    assert torch.equal(gm(x), torch.sigmoid(x).sigmoid() + x)
    assert [n.op for n in gm.graph.nodes] == [
        "placeholder", "call_function", "call_method", "call_method", "call_function", "output"
    ]  # fmt: skip
    gm.graph.lint()


def test_what_is_not_changed_keeps_names_meta_types_attributes_and_knows_its_origin():
    gm = traced()
    nodes = list(gm.graph.nodes)
    nodes[2].name, nodes[3].type, nodes[4].mine = "my_name", torch.Tensor, 5
    for node in nodes:
        node.meta["note"] = node.name
    new = Transformer(gm).transform()
    assert new.code == gm.code and new.graph is not gm.graph
    for old, node in zip(nodes, new.graph.nodes, strict=True):
        for field in ("name", "op", "target", "type"):
            assert getattr(node, field) == getattr(old, field)
        assert node.meta["note"] == old.name and vars(node) == vars(old)
        assert node.meta["source"] == old.meta["source"]
        assert node.meta["from"][0]["id"] == old.id
    assert repr(new(X)) == repr(gm(X))
    again = Transformer(new).transform()
    last = again.graph.output_node()
    assert [a["id"] for a in last.meta["from"]] == [new.graph.output_node().id, nodes[-1].id]


def test_new_nodes_know_what_they_came_from():
    class Decompose(Transformer):
        def call_function(self, target, args, kwargs):
            if target is torch.relu:
                return args[0] * (args[0] > 0)
            return super().call_function(target, args, kwargs)

    gm = traced()
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    relu.meta["tensor_meta"] = "about relu"
    new = Decompose(gm).transform()
    made = [n for n in new.graph.nodes if n.meta["from"][0]["id"] == relu.id]
    assert [n.target for n in made] == [operator.gt, operator.mul]
    assert all(n.meta["source"] == relu.meta["source"] for n in made)
    assert "tensor_meta" not in made[0].meta and made[1].meta["tensor_meta"] == "about relu"
    assert torch.equal(new(X)["y"], gm(X)["y"])


def test_shared_modules_and_parameters_keep_their_paths():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    gm = fxlab.symbolic_trace(model)
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    gm.add_submodule("other", layer)
    calls[1].target = "other"
    new = Transformer(gm).transform()
    paths = [n.target for n in new.graph.nodes if n.op == "call_module"]
    assert paths == [calls[0].target, "other"]


def test_a_transformer_may_trace_into_modules():
    class Inner(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    class Open(Transformer):
        def call_module(self, target, args, kwargs):
            module = self.fetch_attr(target)
            return module.forward(*args, **kwargs)

    class Keep(fxlab.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return True

    model = nn.Sequential(Inner())
    gm = GraphModule(model, Keep().trace(model))
    new = Open(gm).transform()
    ops = [n.op for n in new.graph.nodes]
    assert ops == ["placeholder", "call_function", "call_function", "output"]
    assert torch.equal(new(X), X * 2 + 1)


def test_nested_inputs_keep_their_structure():
    gm = fxlab.symbolic_trace(
        lambda d: {"sum": d["a"] + d["b"][0]},
        concrete_args={"d": {"a": fxlab.PH, "b": [fxlab.PH]}},
    )
    new = Transformer(gm).transform()
    assert new({"a": 1, "b": [2]}) == {"sum": 3} == gm({"a": 1, "b": [2]})


def test_defaults_and_kinds_of_parameters_survive():
    gm = fxlab.symbolic_trace(lambda a, /, b=(1, 2), *, c=5: (a, b, c))
    new = Transformer(gm).transform()
    assert new.code == gm.code and new(0) == (0, (1, 2), 5)


def test_branching_on_a_value_while_transforming_is_taught():
    class Branch(Transformer):
        def call_function(self, target, args, kwargs):
            return args[0] if args[0] else super().call_function(target, args, kwargs)

    with pytest.raises(TraceError, match="branch"):
        Branch(fxlab.symbolic_trace(lambda x: torch.relu(x))).transform()


def test_threads_run_one_module_with_interpreters_of_their_own():
    gm, results = traced(), []
    threads = [
        threading.Thread(target=lambda: results.append(Interpreter(gm).run(X)["y"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(r, gm(X)["y"]) for r in results)
