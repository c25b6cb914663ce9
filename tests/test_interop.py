"""Programs come in and go out whole: torch.fx, torch.export, torch.compile, plain data."""

from __future__ import annotations

import copy
import json
import math
import operator
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import fxlab
from fxlab import RewriteError, TimelineError
from fxlab.interop import (
    DynamoRecorder,
    from_exported,
    from_torch_fx,
    graph_from_json,
    graph_to_json,
    to_torch_fx,
)
from fxlab.interop.targets import Opaque, function_table, method_names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("shift", torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor, *, factor: float = 2.0) -> dict[str, torch.Tensor]:
        y = F.relu(self.bn(self.conv(x))) * self.scale + self.shift
        return {"y": y[:, 1:3, ...], "z": (y * factor).flatten(1), "none": None}


def facts(graph: Any) -> list[tuple[Any, ...]]:
    """What must not change on the way: names, opcodes, targets, arguments as text, types."""
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs), n.type) for n in graph.nodes]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_torch_fx_to_fxlab_and_back_keeps_everything() -> None:
    theirs = torch.fx.symbolic_trace(Block().eval())
    x = torch.randn(2, 3, 5, 5)
    ShapeProp(theirs).propagate(x)
    for node in theirs.graph.nodes:
        node.meta["mine"] = node.name
        node.meta["stack_trace"] = '  File "/home/me/model.py", line 7, in forward\n    y = x\n'
    ours = from_torch_fx(theirs)
    ours.graph.lint()
    assert facts(ours.graph) == facts(theirs.graph)
    assert equal(ours(x), theirs(x))
    assert ours.conv is theirs.conv
    assert ours.training is False
    relu = next(n for n in ours.graph.nodes if n.target is F.relu)
    assert relu.meta["source"] == (("/home/me/model.py", 7, "forward"),)
    assert relu.meta["tensor_meta"].shape == (2, 4, 5, 5)
    back = to_torch_fx(ours)
    assert facts(back.graph) == facts(theirs.graph)
    assert [n.meta for n in back.graph.nodes] == [n.meta for n in theirs.graph.nodes]
    assert equal(back(x), theirs(x))
    back.graph.lint()


def test_fxlab_to_torch_fx_and_back_keeps_everything() -> None:
    ours = fxlab.symbolic_trace(Block().eval())
    fxlab.replace_pattern(ours, lambda v: F.relu(v), lambda v: F.gelu(v))
    theirs = to_torch_fx(ours)
    theirs.graph.lint()
    x = torch.randn(2, 3, 5, 5)
    assert equal(theirs(x), ours(x))
    gelu = next(n for n in theirs.graph.nodes if n.target is F.gelu)
    assert gelu.meta["from_node"][0].name == "relu"
    assert __file__ in gelu.stack_trace
    back = from_torch_fx(theirs)
    assert facts(back.graph) == facts(ours.graph)
    assert [n.meta for n in back.graph.nodes] == [n.meta for n in ours.graph.nodes]


def test_a_renamed_node_keeps_its_name() -> None:
    theirs = torch.fx.symbolic_trace(lambda x: torch.relu(x).neg())
    for i, node in enumerate(theirs.graph.nodes):
        node._rename(f"step_{7 - i}")
    ours = from_torch_fx(theirs)
    assert [n.name for n in ours.graph.nodes] == ["step_7", "step_6", "step_5", "step_4"]
    made = ours.graph.call_function(torch.relu, name="step_6")
    assert made.name != "step_6"
    assert [n.name for n in to_torch_fx(ours).graph.nodes][:4] == [
        "step_7", "step_6", "step_5", "step_4",
    ]  # fmt: skip


def test_pytree_inputs_survive() -> None:
    def program(pair, scale):
        return {"sum": pair["a"] + pair["b"][0] * scale}

    tree = {"a": torch.fx._symbolic_trace.PH, "b": [torch.fx._symbolic_trace.PH]}
    theirs = torch.fx.symbolic_trace(program, concrete_args={"pair": tree})
    ours = from_torch_fx(theirs)
    pair = {"a": torch.ones(2), "b": [torch.ones(2) * 3]}
    assert equal(ours(pair, 2.0), program(pair, 2.0))
    assert equal(to_torch_fx(ours)(pair, 2.0), program(pair, 2.0))


def test_regions_and_training_flags_go_to_torch_fx() -> None:
    class Model(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x * 2
            return F.dropout(y, 0.5, self.training) + x

    ours = fxlab.symbolic_trace(Model())
    theirs = to_torch_fx(ours)
    theirs.graph.eliminate_dead_code()
    theirs.recompile()
    theirs.eval()
    x = torch.ones(3, requires_grad=True)
    y = theirs(x)
    assert torch.equal(y, torch.full((3,), 3.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_an_exported_program_comes_in() -> None:
    model = Block().eval()
    x = torch.randn(2, 3, 5, 5)
    ours = from_exported(torch.export.export(model, (x,)))
    ours.graph.lint()
    assert equal(ours(x), model(x))
    convolution = next(n for n in ours.graph.nodes if "conv2d" in str(n.target))
    assert convolution.meta["val"].shape == (2, 4, 5, 5)
    assert [path for path, _ in convolution.meta["nn_module_stack"].values()][-1] == "conv"
    assert convolution.meta["source"][0][0].endswith(("conv.py", "test_interop.py"))


def test_the_compile_backend_records_what_dynamo_captured() -> None:
    recorder = DynamoRecorder()

    def program(x):
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return y.sum() + 1

    x = torch.randn(4)
    assert torch.equal(torch.compile(program, backend=recorder)(x), program(x))
    assert len(recorder.captured) == 2
    first = recorder.captured[0]
    first.graph.lint()
    assert [n.target for n in first.graph.nodes if n.op == "call_function"][:1] == [torch.relu]
    assert first.graph.find_nodes(op="call_function")[0].meta["source"][0][0] == __file__


def test_something_else_is_refused() -> None:
    with pytest.raises(RewriteError, match=r"takes a torch\.fx\.GraphModule"):
        from_torch_fx(Block())


# -- plain data ----------------------------------------------------------------------------------


def everything() -> fxlab.Graph:
    """A graph with an argument of every kind that JSON can say."""
    graph = fxlab.Graph()
    x = graph.placeholder("x", torch.Tensor)
    weight = graph.get_attr("layers.0.weight") if False else graph.placeholder("weight")
    a = graph.call_function(torch.add, (x, 2), {"alpha": 1.5})
    b = graph.call_method("permute", (a, (1, 0)))
    c = graph.call_function(operator.getitem, (b, (slice(0, None, 2), ..., None)))
    d = graph.call_function(F.pad, (c, [1, 1]), {"mode": "constant", "value": -math.inf})
    e = graph.call_method("to", (d, torch.float64))
    f = graph.call_method("to", (e,), {"device": torch.device("cpu"), "copy": True})
    g = graph.call_function(getattr, (f, "shape"))
    h = graph.call_function(torch.zeros, (torch.Size([2, 3]),), {"layout": torch.strided})
    i = graph.call_function(torch.ops.aten.add.Tensor, (h, h))
    j = graph.call_function(torch.mul, (i, 1j))
    k = graph.call_function(math.floor, (2.5,))
    graph.output({"out": [f, (g, weight)], "i": i, "j": j, "k": k, "n": None, "t": True})
    return graph


def test_json_round_trip_keeps_names_targets_and_arguments() -> None:
    graph = everything()
    text = json.dumps(graph_to_json(graph), allow_nan=False)
    again = graph_from_json(text)
    assert facts(again) == facts(graph)
    assert graph_to_json(again) == graph_to_json(graph)


def test_json_keeps_shapes_sources_and_ancestors() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    fxlab.passes.shape_prop(gm, torch.ones(2, 3))
    fxlab.replace_pattern(gm, lambda x: torch.relu(x), lambda x: F.gelu(x))
    fxlab.passes.shape_prop(gm, torch.ones(2, 3))
    again = graph_from_json(json.loads(json.dumps(graph_to_json(gm.graph))))
    for old, new in zip(gm.graph.nodes, again.nodes, strict=True):
        assert (new.meta.get("source") or ()) == (old.meta.get("source") or ())
        assert new.meta.get("from") == old.meta.get("from")
        if old.op == "call_function":
            assert new.meta["tensor_meta"].shape == (2, 3)
            assert new.meta["tensor_meta"].dtype == torch.float32


def test_loaded_graphs_run() -> None:
    gm = fxlab.symbolic_trace(lambda x, y: torch.relu(x).mul(y)[0] + x.shape[1])
    again = fxlab.GraphModule(nn.Module(), graph_from_json(graph_to_json(gm.graph)))
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(again(x, y), gm(x, y))


def entry(op: str, target: str, args: list[Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "nodes": [
            {"name": "x", "op": "placeholder", "target": "x", "args": [], "kwargs": {}},
            {"name": "y", "op": op, "target": target, "args": args, "kwargs": {}},
            {"name": "output", "op": "output", "target": "output", "args": [{"node": "y"}],
             "kwargs": {}},
        ],
    }  # fmt: skip


X = {"node": "x"}
HOSTILE: dict[str, dict[str, Any]] = {
    "os.system": entry("call_function", "os.system", ["true"]),
    "builtins.eval": entry("call_function", "builtins.eval", ["1"]),
    "builtins.exec": entry("call_function", "exec", ["1"]),
    "torch.load": entry("call_function", "torch.load", ["/tmp/x"]),
    "torch.save": entry("call_function", "torch.save", [X, "/tmp/x"]),
    "torch.from_file": entry("call_function", "torch.from_file", ["/tmp/x"]),
    "torch.hub.load": entry("call_function", "torch.hub.load", ["x", "y"]),
    "aten from_file": entry("call_function", "torch.ops.aten.from_file.default", ["/tmp/x"]),
    "aten save": entry("call_function", "torch.ops.aten.save.default", ["/tmp/x"]),
    "aten dunder": entry("call_function", "torch.ops.aten.__class__.default", []),
    "operator.attrgetter": entry("call_function", "operator.attrgetter", ["__class__"]),
    "operator.methodcaller": entry("call_function", "operator.methodcaller", ["system"]),
    "operator.call": entry("call_function", "operator.call", [X]),
    "getattr of a dunder": entry("call_function", "builtins.getattr", [X, "__class__"]),
    "getattr of a method": entry("call_function", "builtins.getattr", [X, "numpy"]),
    "getattr of text": entry("call_function", "builtins.getattr", ["x", "shape"]),
    "getattr by a computed name": entry("call_function", "builtins.getattr", [X, X]),
    "an unknown method": entry("call_method", "system", [X]),
    "a method that takes functions": entry("call_method", "apply_", [X]),
    "a dunder method": entry("call_method", "__reduce_ex__", [X, 2]),
    "a dunder path": entry("get_attr", "__class__.__base__", []),
    "a dunder path inside": entry("get_attr", "a.__dict__.b", []),
    "a path with a hole": entry("call_module", "a..b", [X]),
    "code as a target": entry("call_function", "x); import os; (", [X]),
    "markup as a target": entry("call_function", "<img src=x onerror=alert(1)>", [X]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_in_the_table_is_shown_and_does_not_run(name: str) -> None:
    data = HOSTILE[name]
    graph = graph_from_json(copy.deepcopy(data))
    node = list(graph.nodes)[1]
    assert isinstance(node.target, Opaque)
    assert data["nodes"][1]["target"] in repr(node.target)
    assert str(graph)
    gm = fxlab.GraphModule(nn.Module(), graph)
    assert "import os" not in gm.code.replace("_import_os_", "")
    with pytest.raises(RewriteError, match="can be shown, not run"):
        gm(torch.ones(2))
    saved = graph_to_json(graph)["nodes"][1]
    assert (saved["op"], saved["target"]) == (data["nodes"][1]["op"], data["nodes"][1]["target"])


def broken(change: Any) -> dict[str, Any]:
    data = entry("call_function", "torch.relu", [X])
    change(data)
    return data


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not JSON"),
    "a list": ([], "a JSON object"),
    "no version": (broken(lambda d: d.pop("version")), "version 1"),
    "another version": (broken(lambda d: d.update(version=99)), "version 1"),
    "no nodes": (broken(lambda d: d.pop("nodes")), "a list of nodes"),
    "a node that is text": (broken(lambda d: d["nodes"].insert(0, "x")), "node 0.*an object"),
    "no name": (broken(lambda d: d["nodes"][1].pop("name")), "node 1.*a name"),
    "a name that is code": (broken(lambda d: d["nodes"][1].update(name="a b")), "a name"),
    "one name twice": (broken(lambda d: d["nodes"][1].update(name="x")), "no other node"),
    "an unknown opcode": (broken(lambda d: d["nodes"][1].update(op="goto")), "placeholder | get"),
    "an unknown node": (
        broken(lambda d: d["nodes"][1].update(args=[{"node": "z"}])),
        "an earlier node, got 'z'",
    ),
    "a later node": (
        broken(lambda d: d["nodes"][1].update(args=[{"node": "output"}])),
        "an earlier node",
    ),
    "args that are no list": (broken(lambda d: d["nodes"][1].update(args={})), "args as a list"),
    "kwargs that are no object": (broken(lambda d: d["nodes"][1].update(kwargs=[])), "kwargs as"),
    "an unknown argument": (
        broken(lambda d: d["nodes"][1].update(args=[{"pickle": "gASV"}])),
        "an argument",
    ),
    "an argument of two kinds": (
        broken(lambda d: d["nodes"][1].update(args=[{"node": "x", "tuple": []}])),
        "an argument",
    ),
    "a bad dtype": (
        broken(lambda d: d["nodes"][1].update(args=[{"torch": "torch.load"}])),
        "an argument",
    ),
    "a bad device": (
        broken(lambda d: d["nodes"][1].update(args=[{"device": "moon"}])),
        "an argument",
    ),
    "a target of no text": (broken(lambda d: d["nodes"][1].update(target=3)), "target as text"),
    "two outputs": (broken(lambda d: d["nodes"].append({
        "name": "o2", "op": "output", "target": "output", "args": [None], "kwargs": {}})),
        "not well formed"),
    "meta of another form": (
        broken(lambda d: d["nodes"][1].update(meta={"source": [1, 2]})),
        "meta as",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_json_is_refused_with_the_reason(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(TimelineError, match=f"(?s){reason}"):
        graph_from_json(data)


def test_deep_nesting_is_refused_and_does_not_overflow() -> None:
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    data = entry("call_function", "torch.relu", [nested])
    with pytest.raises(TimelineError, match="nested at most"):
        graph_from_json(data)
    with pytest.raises(TimelineError, match=r"not JSON|nested"):
        graph_from_json("[" * 100_000)


def test_the_table_holds_operators_and_nothing_that_reaches_outside() -> None:
    for name in ("torch.relu", "torch.conv2d", "torch._C._nn.gelu", "operator.add",
                 "math.sqrt", "torch.zeros", "torch._C._linalg.linalg_norm"):  # fmt: skip
        assert function_table(name) is not None, name
    for name in ("torch.load", "torch.compile", "torch.from_file", "torch.jit.load", "os.system",
                 "torch.utils.cpp_extension.load", "operator.attrgetter", "builtins.open",
                 "torch.ops.load_library", "torch.classes.load_library"):  # fmt: skip
        assert function_table(name) is None, name
    assert "relu" in method_names() and "add_" in method_names()
    assert not {"apply_", "map_", "numpy", "backward", "__class__", "set_"} & method_names()
