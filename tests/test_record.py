"""Recording: what is heard, what is said, what is judged, what is put back."""

from __future__ import annotations

import base64
import copy
import functools
import gc
import io
import json
import linecache
import operator
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import const_fold
from torch.fx.passes.split_module import split_module as torch_split

import fxlab
from fxlab import record
from fxlab.core.graph import graph_created_hooks
from fxlab.explorer import sameness, timeline_of, trace_timeline
from fxlab.explorer.run import thumbnail
from fxlab.explorer.sameness import private_copy
from fxlab.explorer.static import static_html, text_table
from fxlab.explorer.timeline import Timeline
from fxlab.explorer.view import strip, view
from fxlab.models import resnet18, resnet50
from fxlab.models.small import randomize_batch_norms
from fxlab.passes import as_pass, dce, fuse_conv_bn
from fxlab.passes.fuse import fold_conv_bn
from fxlab.passes.matcher import SubgraphMatcher

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own file uses what torch deprecates
    from torch.fx.experimental.optimization import fuse as torch_fuse

HERE = Path(__file__).name


class Small(nn.Module):
    """conv, bn, relu, and a second pair inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        for norm in (self.bn, self.inner[1]):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x):
        y = self.inner(self.act(self.bn(self.conv(x))))
        return y + 1, torch.relu(y)


def small():
    torch.manual_seed(0)
    return fxlab.symbolic_trace(Small().eval())


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def sentences(timeline):
    """Sentences without their line numbers."""
    return [step.sentence.partition(" ")[2] for step in timeline.steps]


def relu_to_gelu(gm):
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.gelu, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)


def chain(pairs):
    graph = fxlab.Graph()
    value = graph.placeholder("x")
    for _ in range(pairs):
        value = graph.call_function(torch.neg, (graph.call_function(torch.relu, (value,)),))
    graph.output(value)
    return fxlab.GraphModule(nn.Module(), graph)


def test_users_that_are_given_a_value_are_one_step_each_and_go_back_and_forth(tmp_path):
    def fold(gm):
        (relu,) = gm.graph.find_nodes(op="call_function", target=torch.relu)
        relu.replace_all_uses_with(5)
        gm.graph.erase_node(relu)

    def program(x):
        y = torch.relu(x)
        return y + 1, y * 2

    gm = fxlab.symbolic_trace(program)
    with record(gm) as timeline:
        fold(gm)
    assert [step.edit.kind for step in timeline.steps] == ["args", "args", "erase"]
    assert gm(X) == (6, 10)
    timeline.to_json(tmp_path / "story.json")
    again = fxlab.Timeline.from_json(tmp_path / "story.json")
    assert [step.sentence for step in again.steps] == [step.sentence for step in timeline.steps]


def test_each_edit_of_a_pass_is_one_step_with_its_line_and_its_sentence():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg())
    with record(gm) as timeline:
        relu_to_gelu(gm)
    first = relu_to_gelu.__code__.co_firstlineno
    assert [step.edit.kind for step in timeline.steps] == ["create", "reroute", "erase"]
    assert [step.where[0].line - first for step in timeline.steps] == [4, 5, 6]
    assert {step.where[0].function for step in timeline.steps} == {"relu_to_gelu"}
    assert timeline.steps[0].sentence == (
        f"{HERE}:{first + 4} adds gelu = F.gelu(x) after relu; nothing reads it yet"
    )
    assert timeline.steps[1].sentence.startswith(f":{first + 5} the reader of relu (neg) now reads")
    assert timeline.steps[2].code == "relu_to_gelu:3/relu"
    assert all(step.well_formed for step in timeline.steps)
    key, source = timeline.source_of(timeline.steps[0].where[0])
    assert source.line == first
    assert source.text.startswith("def relu_to_gelu(gm):")
    assert timeline.passes[0].source == key


def test_every_kind_of_edit_is_told_in_words():
    gm = small()
    nodes = {node.name: node for node in gm.graph.nodes}

    def all_kinds(gm):
        nodes["act"].target = "inner.0"
        nodes["relu"].name = "rectified"
        nodes["add"].args = (nodes["inner_1"], 2)
        nodes["add"].append(nodes["inner_1"])
        nodes["x"].type = torch.Tensor
        nodes["add"].update_kwarg("alpha", 3)
        gm.note = "plain attribute"

    with record(gm) as timeline:
        all_kinds(gm)
    assert sentences(timeline) == [
        'act now calls getattr(self.inner, "0"), was self.act',
        "relu is now called rectified",
        "add: 2nd argument 1 -> 2",
        "moves inner_1: after inner_0 -> after add",
        "x: type none -> Tensor",
        "add: alpha none -> 3",
        "self.note: new, 'plain attribute'",
    ]
    assert [s.edit.kind for s in timeline.steps] == [
        "target", "rename", "args", "move", "target", "args", "attr",
    ]  # fmt: skip


def test_the_frames_follow_the_graph_edit_by_edit_and_end_where_it_is():
    gm = chain(5)
    with record(gm) as timeline:
        relu_to_gelu(gm)
    last = timeline.frame(len(timeline)).rows
    assert [state.name for state in last.values()] == [node.name for node in gm.graph.nodes]
    assert [state.name for state in timeline.frame(0).rows.values()][1:3] == ["relu", "neg"]


def test_resnet50_fold_has_a_step_for_each_edit_and_the_lines_of_the_pass():
    gm = fxlab.symbolic_trace(resnet50().eval())
    assert len(gm.graph.nodes) == 177
    with record(gm) as timeline:
        fuse_conv_bn(gm)
    kinds = [step.edit.kind for step in timeline.steps]
    assert len(gm.graph.nodes) == 124
    assert kinds.count("module") >= 53
    assert (kinds.count("reroute"), kinds.count("erase")) == (53, 53)
    assert {step.where[0].file for step in timeline.steps} == {"fxlab/passes/fuse.py"}
    assert all(step.well_formed for step in timeline.steps)
    assert timeline.passes[0].name == "fuse_conv_bn"
    assert len(timeline.to_json()) / len(timeline) < 1500


def test_nested_module_and_tensor_edits_are_heard_without_the_graph_module():
    gm = small()

    def nested(gm):
        conv = gm.inner.get_submodule("0")
        conv.weight = nn.Parameter(torch.zeros_like(conv.weight))
        gm.inner.get_submodule("0").bias = None
        setattr(gm.inner, "1", nn.Identity())
        delattr(gm.inner, "1")

    with record(gm) as timeline:
        nested(gm)
    facts = [(s.edit.kind, s.edit.after["path"]) for s in timeline.steps]
    assert ("attr", "inner.0.weight") in facts
    assert ("attr", "inner.0.bias") in facts
    assert ("module", "inner.1") in facts
    gone = next(step for step in timeline.steps if step.sentence.endswith("gone, was Identity"))
    assert gone.edit.after == {"path": "inner.1", "value": None, "by": "snapshot"}
    assert gone.problem == 'inner_1 names getattr(self.inner, "1"), which does not exist'


def test_a_write_into_a_tensor_is_found_and_earlier_frames_refuse_to_be_run():
    gm = small()

    def writes(gm):
        next(iter(gm.graph.nodes)).type = torch.Tensor
        gm.conv.weight.data.mul_(2)

    with record(gm, inputs=(X,)) as timeline:
        timeline.run(writes)
    last = timeline.steps[-1]
    assert last.sentence == "self.conv.weight: its numbers were written over in place"
    assert last.edit.after["by"] == "snapshot"
    verdict = timeline.passes[0].same_output
    assert verdict["verdict"] == "different"
    assert "written over in place" in verdict["text"]
    with pytest.raises(fxlab.TimelineError, match="written over"):
        timeline.module(1)


def test_a_fold_is_rounding_and_a_wrong_edit_is_different_at_its_node():
    gm = small()
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(fuse_conv_bn)
    verdict = timeline.passes[0].same_output
    assert verdict["verdict"] == "rounding"
    share = re.fullmatch(
        r"rounding: (\S+) of the largest value where 1e-5 is allowed in float64, for weights made "
        r"anew",
        verdict["text"],
    )
    assert float(share[1]) < 1e-5
    assert 0 < verdict["error"] <= verdict["allowed"]
    gm = small()

    def swaps(gm):
        add = next(node for node in gm.graph.nodes if node.name == "add")
        add.args = (add.args[0], 1.001)

    with record(gm, inputs=(X,)) as timeline:
        timeline.run(swaps)
    verdict = timeline.passes[0].same_output
    assert (verdict["verdict"], verdict["name"]) == ("different", "add")
    assert verdict["text"] == (
        "different, first at add: off by 7e-4 of the largest value where 1e-9 is allowed in float64"
    )


def test_where_float64_cannot_run_the_verdict_names_the_type_that_decided_and_why():
    gm = small()

    class Narrow(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise TypeError("32 bits only")
            return x * (1 + 1e-5)

    def narrows(gm):
        gm.add_submodule("narrow", Narrow())
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            new = gm.graph.call_module("narrow", (output.args[0][0],))
        output.args = ((new, *output.args[0][1:]),)

    with record(gm, inputs=(X,)) as timeline:
        timeline.run(narrows)
        timeline.run(fuse_conv_bn)
    narrowed, fused = (span.same_output for span in timeline.passes)
    told = r"rounding: \S+ of the largest value where 1e-3 is allowed in f32: the {} program does "
    told += "not run in float64"
    assert re.fullmatch(told.format("new"), narrowed["text"]) and "1e-5 of" in narrowed["text"]
    assert re.fullmatch(told.format("given"), fused["text"])
    assert re.fullmatch(told.format("new"), fused["first"]["text"])


def test_an_error_far_below_float32_is_found_in_float64():
    gm = fxlab.symbolic_trace(lambda x: (x * 1.0).sin())

    def tiny(gm):
        mul = list(gm.graph.nodes)[1]
        mul.args = (mul.args[0], 1.0 + 1e-7)

    with record(gm, inputs=(torch.linspace(0, 1, 50),)) as timeline:
        timeline.run(tiny)
    assert timeline.passes[0].same_output["verdict"] == "different"
    assert timeline.passes[0].same_output["name"] == "mul"


def test_random_nodes_draw_the_same_numbers_in_both_programs():
    gm = fxlab.symbolic_trace(lambda x: F.dropout(torch.relu(x), 0.5, True) + torch.rand_like(x))

    def reorder(gm):
        nodes = {node.name: node for node in gm.graph.nodes}
        nodes["relu"].prepend(nodes["rand_like"])

    with record(gm, inputs=(torch.ones(100),)) as timeline:
        timeline.run(reorder)
    assert timeline.passes[0].same_output["verdict"] == "identical"


def test_running_statistics_of_the_model_are_left_as_they_are_by_the_checks():
    model = Small().train()
    before = copy.deepcopy(model.state_dict())
    gm = fxlab.symbolic_trace(model)
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(relu_to_gelu)
    assert timeline.passes[0].same_output["verdict"] == "different"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    "inputs", [(torch.randn(1, 9),), (), (X, X)], ids=["shape", "too few", "too many"]
)
def test_inputs_that_do_not_fit_are_said_and_nothing_crashes(inputs):
    gm = small()
    with record(gm, inputs=inputs) as timeline:
        timeline.run(fuse_conv_bn)
    verdict = timeline.passes[0].same_output
    assert verdict["verdict"] == "refused"
    assert verdict["text"].startswith("not checked: the program fails on the inputs")


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_numbers_are_said_and_nothing_crashes(kind):
    if kind == "fake":
        with FakeTensorMode():
            model, x = Small().eval(), torch.randn(2, 3, 8, 8)
    else:
        model, x = Small().eval().to("meta"), torch.randn(2, 3, 8, 8, device="meta")
    timeline = timeline_of(model, [dce], (x,))
    assert timeline.failure is None
    verdict = timeline.passes[-1].same_output
    assert verdict["verdict"] == "refused" and "has no numbers" in verdict["text"]
    explored = timeline_of(model, None, (x,))
    assert explored.failure is None

    def loses_numbers(gm):
        relu = next(node for node in gm.graph.nodes if node.target is torch.relu)
        relu.args, relu.target = (), lost

    timeline = timeline_of(fxlab.symbolic_trace(Small().eval()), [loses_numbers], (X,))
    assert "a tensor without numbers" in timeline.passes[0].same_output["text"]


def lost():
    return torch.empty(2, 4, 4, 4, device="meta")


def slowly(x):
    time.sleep(0.02)
    return x + 0


def test_the_time_of_a_program_is_measured_when_it_is_asked_for():
    def slow():
        gm = fxlab.symbolic_trace(nn.Linear(3, 3))
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(slowly, output.args),)
        return gm

    def faster(gm):
        for node in list(gm.graph.find_nodes(op="call_function", target=slowly)):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)

    x = torch.randn(2, 3)
    with record(slow(), (x,), repeats=3) as timeline:
        timeline.run(faster)
    (span,) = timeline.passes
    assert span.cost_before["seconds"] >= 0.02 > span.cost_after["seconds"] > 0
    (text,) = [text for text in strip(span) if text.startswith("time")]
    assert re.fullmatch(r"time \d\S* ms \u2192 \d\S* ms", text)
    again = Timeline.from_json(timeline.to_json())
    assert again.passes[0].cost_after == span.cost_after
    assert timeline_of(slow(), [faster], (x,), repeats=1).passes[0].cost_before["seconds"] >= 0.02
    assert timeline_of(slow(), [faster], (x,)).passes[0].cost_before["seconds"] is None


def test_without_inputs_nothing_is_said_about_the_output():
    gm = small()
    with record(gm) as timeline:
        timeline.run(fuse_conv_bn)
    assert timeline.passes[0].same_output is None


def test_a_pass_that_breaks_the_program_is_different_and_does_not_end_the_recording():
    gm = small()

    def breaks(gm):
        gm.conv = nn.Conv2d(5, 4, 3)

    with record(gm, inputs=(X,)) as timeline:
        timeline.run(breaks)
    assert timeline.passes[0].same_output["text"].startswith("different: it fails to run")


def test_half_precision_and_integers_are_compared_in_their_own_terms():
    gm = fxlab.symbolic_trace(lambda x, i: (x.to(torch.bfloat16) * 3, i + 1))

    def nothing(gm):
        gm.graph.lint()

    def integer(gm):
        add = next(node for node in gm.graph.nodes if node.name == "add")
        add.args = (add.args[0], 2)

    inputs = (torch.randn(4), torch.arange(4))
    with record(gm, inputs=inputs) as timeline:
        timeline.run(nothing)
        timeline.run(integer)
    assert [p.same_output["verdict"] for p in timeline.passes] == ["identical", "different"]
    assert timeline.passes[1].same_output["name"] == "add"


def test_a_block_that_raises_is_undone_graph_and_state():
    gm = small()
    code, keys, weight = gm.code, list(gm.state_dict()), gm.conv.weight
    modules = [name for name, _ in gm.named_modules()]
    version = {node: (node.args, node.name) for node in gm.graph.nodes}

    def fails(gm):
        fuse_conv_bn(gm)
        gm.inner.get_submodule("0").bias = None
        delattr(gm.inner, "0")
        gm.extra = nn.Linear(2, 2)
        list(gm.graph.nodes)[1].name = "renamed"
        raise ValueError("no further")

    with pytest.raises(ValueError, match="no further"), record(gm) as timeline:
        fails(gm)
    assert gm.code == code
    assert {node: (node.args, node.name) for node in gm.graph.nodes} == version
    assert list(gm.state_dict()) == keys
    assert [name for name, _ in gm.named_modules()] == modules
    assert gm.conv.weight is weight
    gm.graph.lint()
    assert timeline.error == "ValueError: no further"
    assert timeline.steps[-1].sentence
    assert timeline.passes[0].name == "fails"
    again = timeline.module(0)
    assert torch.equal(again(X)[0], gm(X)[0])


def test_a_loop_that_visits_what_it_inserts_is_stopped_named_and_undone():
    gm = chain(3)
    code = gm.code

    def endless(gm):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                with gm.graph.inserting_after(node):
                    gm.graph.call_function(torch.relu, (node,))

    caught = pytest.raises(fxlab.EditLimitError, match="iterate over list")
    with caught as info, record(gm, max_growth=4) as timeline:
        endless(gm)
    assert info.value.where[0][2] == "endless"
    assert "grew from 8 to 33 nodes" in str(info.value)
    assert gm.code == code
    assert len(timeline) == 26
    assert "its edits are undone" in timeline.steps[-1].sentence
    assert timeline.error.startswith("EditLimitError: the graph grew")


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"max_edits": 10}, "more than 10 edits"), ({"max_seconds": 0.0}, "more than 0.0 seconds")],
)
def test_edits_and_seconds_are_limited_too(limits, words):
    gm = chain(10)
    with pytest.raises(fxlab.EditLimitError, match=words), record(gm, **limits):
        relu_to_gelu(gm)
    assert len(gm.graph.nodes) == 22


def test_after_a_recording_nothing_listens_any_more():
    gm = small()
    hooks = list(graph_created_hooks)
    match, create = SubgraphMatcher.match, torch.fx.Graph.create_node
    with record(gm) as timeline:
        pass
    with record(torch.fx.symbolic_trace(Small().eval())):
        assert torch.fx.Graph.create_node is not create
    relu_to_gelu(gm)
    nn.Linear(2, 2)
    gm.inner.get_submodule("0").bias = None
    assert len(timeline) == 0
    assert gm.graph._listeners == ()
    assert graph_created_hooks == hooks
    assert (SubgraphMatcher.match, torch.fx.Graph.create_node) == (match, create)
    assert "_edit" not in repr(torch.fx.Node.__setattr__)


def test_a_dropped_recording_is_freed():
    import weakref

    gm = small()
    with record(gm) as timeline:
        relu_to_gelu(gm)
    gone = weakref.ref(timeline.recorder)
    assert timeline.steps
    del timeline
    gc.collect()
    assert gone() is None


def test_a_transformer_gives_another_program_with_a_result_step_and_paired_rows():
    class Swap(fxlab.Transformer):
        def call_module(self, target, args, kwargs):
            if target == "act":
                return F.gelu(args[0])
            return super().call_module(target, args, kwargs)

    def swap(gm):
        return Swap(gm).transform()

    gm = small()
    with record(gm, inputs=(X,)) as timeline:
        out = timeline.run(swap)
    assert out is not gm
    assert [(p.id, p.made_from) for p in timeline.programs] == [
        ("p0", None),
        ("p1", {"program": "p0", "how": "transform"}),
    ]
    last = timeline.steps[-1]
    assert last.edit.kind == "result"
    assert len(last.edit.after["pairs"]) == len(out.graph.nodes)
    assert timeline.passes[0].result == "p1"
    assert timeline.passes[0].same_output["name"] == "gelu"
    assert timeline.program_at(len(timeline)) == "p1"


def test_patterns_and_helper_graphs_are_no_programs():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg())

    def rewrite(gm):
        fxlab.symbolic_trace(Small().eval())
        fxlab.replace_pattern(gm, lambda a: torch.relu(a), lambda a: F.gelu(a))

    with record(gm) as timeline:
        rewrite(gm)
    assert [program.id for program in timeline.programs] == ["p0"]
    assert "gelu" in timeline.frame(len(timeline)).code()


def test_a_rewrite_that_finds_nothing_says_how_far_its_pattern_came():
    gm = fxlab.symbolic_trace(lambda x, y: torch.add(x, y).relu())

    def rewrite(gm):
        fxlab.replace_pattern(gm, lambda a, b: torch.relu(torch.add(a, b)), lambda a, b: a * b)

    with record(gm) as timeline:
        timeline.run(rewrite)
    assert not timeline.passes[0].changed
    assert "the pattern add, relu was not found" in timeline.passes[0].sentence
    assert "normalize=True" in timeline.passes[0].kept[0]


def test_a_pass_that_changes_nothing_says_so_and_what_it_left_alone():
    gm = chain(2)
    with record(gm) as timeline:
        timeline.run(fxlab.passes.dce)
        timeline.run(fuse_conv_bn)
    first, second = timeline.passes
    assert (first.changed, first.first, first.last) == (False, 1, 0)
    assert first.sentence == "dce changed nothing: none of the 6 nodes was edited"
    assert second.sentence.startswith("fuse_conv_bn changed nothing: there is no batch norm")
    assert second.report["name"] == "fuse_conv_bn"


def test_a_pass_may_return_none_a_module_or_a_pass_result_and_finish_overrides():
    gm = small()
    other = small()
    with record(gm) as timeline:
        assert timeline.run(lambda gm: None) is gm
        assert timeline.run(lambda gm: fxlab.passes.PassResult(other, True)) is other
        assert timeline.run(lambda gm: 3) is other
    assert timeline.passes[1].result == "p1"
    assert "returned an int, which is no GraphModule" in timeline.passes[2].kept[0]
    with record(gm) as timeline:
        relu_to_gelu(gm)
        timeline.finish(other)
    assert timeline.passes[-1].result == "p1"


def test_as_pass_names_the_pass_and_signs_its_rows():
    @as_pass
    def adds_noise(gm):
        "Edit in place."
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.rand, (1,))

    gm = small()
    with record(gm) as timeline:
        adds_noise(gm)
    assert timeline.passes[0].name == "adds_noise"
    row = timeline.steps[0].edit.row
    assert timeline.rows[row].made_by == "adds_noise"


def test_provenance_links_a_row_to_what_it_replaced_and_to_the_users_line():
    gm = small()
    with record(gm) as timeline:
        fuse_conv_bn(gm)
    rows = {state.name: row for row, state in timeline.frame(0).rows.items()}
    conv = timeline.rows[rows["conv"]]
    assert [one["row"] for one in conv.ancestors] == [rows["bn"]]
    assert conv.source[0].file.endswith(HERE)
    assert ("inner.0", "Conv2d") in timeline.rows[rows["inner_0"]].stack


def test_a_trace_is_one_step_per_operation_on_the_models_line():
    timeline = trace_timeline(Small().eval(), (X,))
    names = [state.name for state in timeline.frame(len(timeline)).rows.values()]
    assert names == ["x", "conv", "bn", "act", "inner_0", "inner_1", "add", "relu", "output"]
    assert timeline.frame(0).rows == {}
    assert timeline.passes[0].kind == "trace"
    line = Small.forward.__code__.co_firstlineno
    lines = {step.code.partition("/")[2]: step.where[0].line - line for step in timeline.steps[1:8]}
    assert lines == {"conv": 1, "bn": 1, "act": 1, "inner_0": 1, "inner_1": 1, "add": 2, "relu": 2}
    assert timeline.shape(0) == "f32[2, 3, 8, 8]"


def test_a_trace_that_fails_ends_with_the_taught_error_on_its_line():
    def branches(x):
        y = torch.relu(x)
        if y.sum() > 0:
            return y
        return x

    timeline = trace_timeline(branches)
    last = timeline.steps[-1]
    assert isinstance(timeline.failure, fxlab.TraceError)
    assert last.edit.kind == "error"
    assert last.where[0].line == branches.__code__.co_firstlineno + 2
    assert any("torch.where" in hint for hint in last.edit.after["hints"])
    assert [step.edit.kind for step in timeline.steps] == ["create"] * 4 + ["error"]
    assert timeline.error.startswith("TraceError")


def test_a_models_own_exception_is_the_last_step_too():
    def fails(x):
        torch.relu(x)
        raise KeyError("mine")

    timeline = trace_timeline(fails)
    assert timeline.steps[-1].edit.after["type"] == "KeyError"
    assert timeline.steps[-1].where[0].function == "fails"


def test_a_list_of_passes_is_one_story_and_the_model_stays_as_it_was():
    model = Small().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    timeline = timeline_of(model, [fuse_conv_bn, fxlab.passes.dce], (X,))
    assert [span.name for span in timeline.passes] == ["trace", "fuse_conv_bn", "dce"]
    assert [span.changed for span in timeline.passes] == [True, True, False]
    assert timeline.passes[1].cost_before["flops"] > 0
    assert timeline.passes[1].cost_after["nodes"]["call_module"] == 3
    assert dict.fromkeys(before, True) == {
        name: torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    }


def test_exploring_a_graph_module_leaves_it_as_it_is_and_a_raising_pass_is_the_last_step():
    gm = small()
    code = gm.code

    def fails(gm):
        list(gm.graph.nodes)[1].name = "renamed"
        raise RuntimeError("broken pass")

    timeline = timeline_of(gm, [fuse_conv_bn, fails, fxlab.passes.dce], (X,))
    assert gm.code == code
    assert [span.name for span in timeline.passes] == ["fuse_conv_bn", "fails"]
    assert timeline.steps[-1].sentence.endswith(
        "stops: RuntimeError: broken pass; its edits were undone; not run: dce"
    )
    assert isinstance(timeline.failure, RuntimeError)
    good = timeline.module(timeline.passes[0].last)
    torch.testing.assert_close(good(X)[0], gm(X)[0])


def test_a_run_is_one_step_per_node_with_values_and_what_is_freed():
    timeline = timeline_of(small(), inputs=(X,))
    assert [step.edit.kind for step in timeline.steps] == ["value"] * 9
    conv = timeline.steps[1].edit.after
    assert conv["shape"] == "f32[2, 4, 6, 6]"
    assert sum(conv["histogram"]) == 2 * 4 * 6 * 6
    assert conv["freed"] == [0]
    assert conv["bytes"] == conv["live_bytes"] == 2 * 4 * 6 * 6 * 4
    assert timeline.passes[0].kind == "run"
    assert set(timeline.passes[0].columns) >= {"seconds", "live_bytes"}


def test_exploring_what_is_no_program_says_what_is_expected():
    with pytest.raises(fxlab.RewriteError, match="can't show an int"):
        timeline_of(3)
    with pytest.raises(fxlab.RewriteError, match="record needs a GraphModule"):
        record(nn.Linear(1, 1))


def foreign():
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Small().eval())


def test_torchs_own_fuse_is_recorded_edit_by_edit_and_judged():
    with record(foreign(), inputs=(X,)) as timeline:
        timeline.run(torch_fuse)
    kinds = [step.edit.kind for step in timeline.steps]
    assert kinds == ["module", "reroute", "erase"] * 2 + ["result"]
    assert timeline.steps[1].where[0].file.endswith("torch/fx/experimental/optimization.py")
    assert timeline.passes[0].same_output["verdict"] == "rounding"
    assert all(step.well_formed for step in timeline.steps)


def test_torchs_own_split_gives_a_result_with_parts():
    count = iter(range(100))
    with record(foreign(), inputs=(X,)) as timeline:
        timeline.run(torch_split, None, lambda node: next(count) // 4)
    result = timeline.steps[-1].edit
    assert result.kind == "result"
    assert len(result.after["parts"]) == 2
    parts = [timeline.program(part["program"]) for part in result.after["parts"]]
    assert [part.title for part in parts] == ["submod_0", "submod_1"]
    assert {part.made_from["how"] for part in parts} == {"split"}
    assert timeline.passes[0].same_output["verdict"] == "identical"


def test_torchs_own_constant_folding_is_recorded():
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + (self.w * 2 + 1)

    gm = torch.fx.symbolic_trace(Folds())
    warned = pytest.warns(UserWarning, match="get_attr")
    with record(gm, inputs=(torch.ones(3),)) as timeline, warned:
        timeline.run(const_fold.split_const_subgraphs)
    assert timeline.steps[-1].edit.kind == "result"
    assert timeline.passes[0].same_output["verdict"] == "identical"


def edit_foreign(gm):
    nodes = {node.name: node for node in gm.graph.nodes}
    with gm.graph.inserting_after(nodes["act"]):
        gelu = gm.graph.call_function(F.gelu, (nodes["bn"],))
    nodes["act"].replace_all_uses_with(gelu)
    gm.graph.erase_node(nodes["act"])
    gelu.name = "curve"
    nodes["add"].insert_arg(2, 3)
    nodes["add"].args = nodes["add"].args[:2]
    nodes["add"].append(nodes["relu"])
    nodes["relu"].target = torch.neg
    nodes["add"]._update_args_kwargs((nodes["inner_1"], 5), {})  # no public method tells of this
    gm.recompile()


def test_edits_of_a_torch_fx_graph_are_heard_and_what_is_not_is_found_by_comparing():
    gm = foreign()
    with record(gm) as timeline:
        edit_foreign(gm)
    assert [step.edit.kind for step in timeline.steps] == [
        "create", "reroute", "erase", "rename", "args", "args", "target", "args",
    ]  # fmt: skip
    assert timeline.steps[-1].edit.after["by"] == "snapshot"
    frame = timeline.frame(len(timeline)).rows.values()
    assert [state.name for state in frame] == [node.name for node in gm.graph.nodes]
    assert gm.code == timeline.module(len(timeline)).code


def test_a_torch_fx_graph_is_put_back_after_a_raise():
    gm = foreign()
    code = gm.code
    with pytest.raises(ZeroDivisionError), record(gm):
        edit_foreign(gm)
        1 / 0  # noqa: B018
    gm.graph.lint()
    assert gm.code == code
    assert len(gm.graph.nodes) == len(list(gm.graph.nodes)) == 9


def test_threads_that_edit_their_own_graphs_are_not_recorded():
    gm, other = small(), foreign()
    done = []

    def work():
        edit_foreign(foreign())
        relu_to_gelu(fxlab.symbolic_trace(lambda x: torch.relu(x)))
        done.append(nn.Linear(2, 2))

    with record(other) as timeline, record(gm) as mine:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        relu_to_gelu(gm)
    assert done
    assert len(timeline) == 0
    assert len(mine) == 3
    assert len(mine.programs) == 1


def fold(gm, wrong=None):
    pairs = [n for n in gm.graph.nodes if n.op == "call_module" and n.target.endswith(("bn", "1"))]
    for number, bn in enumerate(pairs):
        conv = bn.args[0]
        new = fold_conv_bn(gm.get_submodule(conv.target), gm.get_submodule(bn.target))
        if number == wrong:
            new.bias = nn.Parameter(new.bias + 1)
        gm.set_submodule(conv.target, new)
        bn.replace_all_uses_with(conv)
        gm.graph.erase_node(bn)


def test_regions_must_nest_after_every_edit_and_a_trace_inside_one_is_well_formed():
    def region(x):
        with torch.no_grad():
            y = torch.relu(x)
        return y

    timeline = trace_timeline(region)
    assert all(step.well_formed for step in timeline.steps)
    gm = fxlab.symbolic_trace(region)
    nodes = {node.target: node for node in gm.graph.nodes if node.op == "call_function"}
    leave = next(node for target, node in nodes.items() if "exit" in target.__name__)

    def forgets(gm):
        gm.graph.erase_node(leave)

    with record(gm) as timeline:
        forgets(gm)
    assert timeline.steps[0].problem.endswith("is never left")


def test_bisect_of_a_right_fold_says_that_nothing_broke_for_good():
    gm = small()
    want = gm(X)[0].detach()
    with record(gm) as timeline:
        timeline.run(fold)
    found = timeline.bisect(lambda gm: torch.allclose(gm(X)[0], want, atol=1e-4))
    assert (found.step, found.healed, found.skipped) == (None, 2, 0)
    assert "nothing broke for good" in str(found)
    assert "2 times" in str(found)


@pytest.mark.parametrize("wrong", [0, 1])
def test_bisect_of_a_wrong_fold_names_the_pair_and_its_edits(wrong):
    gm = small()
    want = gm(X)[0].detach()
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(fold, wrong)
    found = timeline.bisect(lambda gm: torch.allclose(gm(X)[0], want, atol=1e-4))
    assert found.step.index == 3 * wrong + 1
    assert found.last_good == 3 * wrong
    assert [step.edit.kind for step in found.suspects] == ["module", "reroute", "erase"]
    assert found.healed == wrong
    assert timeline.passes[0].same_output["name"] == ["conv", "inner_0"][wrong]


def test_bisect_skips_frames_that_are_no_graph_and_takes_an_assert_as_failing():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg().sin())
    x = torch.linspace(-1, 1, 5)
    want = gm(x)

    def planted(gm):
        nodes = list(gm.graph.nodes)
        nodes[2].args = (nodes[3],)  # reads what comes later: no graph for one step
        nodes[2].args = (nodes[0],)
        nodes[-1].name = "out"

    with record(gm) as timeline:
        timeline.run(planted)

    def check(gm):
        torch.testing.assert_close(gm(x), want)

    found = timeline.bisect(check)
    assert [step.well_formed for step in timeline.steps] == [False, True, True]
    assert found.skipped == 1
    assert found.last_good == 0
    assert found.step.index == 1
    assert found.failure.startswith("AssertionError")


def test_the_module_of_a_step_has_the_state_of_that_step():
    gm = small()
    old = gm.conv.weight
    with record(gm) as timeline:
        timeline.run(fold)
    assert timeline.module(0).conv.weight is old
    assert timeline.module(1).conv.weight is gm.conv.weight
    assert timeline.module(0).conv.bias is None
    assert [n.name for n in timeline.module(3).graph.nodes][:3] == ["x", "conv", "act"]
    with pytest.raises(IndexError):
        timeline.module(99)


def test_a_frame_that_is_no_graph_is_not_handed_out():
    gm = chain(1)

    def breaks(gm):
        nodes = list(gm.graph.nodes)
        nodes[1].args = (nodes[2],)
        nodes[1].args = (nodes[0],)

    with record(gm) as timeline:
        breaks(gm)
    with pytest.raises(fxlab.TimelineError, match="relu reads neg, which is computed after it"):
        timeline.module(1)


def test_a_timeline_can_be_read_while_it_is_recorded():
    gm = chain(2)
    with record(gm) as timeline:
        list(gm.graph.nodes)[1].name = "first"
        assert len(timeline.steps) == 1
        relu_to_gelu(gm)
        assert len(timeline.steps) == 7
    assert len(timeline) == 7


def test_nothing_of_the_machine_is_in_the_file(tmp_path):
    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    stories = [trace_timeline(branches).to_json(), trace_timeline(Small().eval()).to_json()]
    gm = small()
    with record(gm) as timeline:
        gm.where_from = Path(__file__).resolve()
        fuse_conv_bn(gm)
    stories.append(timeline.to_json())
    for text in stories:
        assert str(Path.home()) not in text
        assert str(Path(__file__).resolve().parent) not in text
        assert str(Path(fxlab.__file__).parent) not in text
        assert not re.search("at 0x[0-9a-f]{6}", text)


def test_hostile_names_are_kept_as_text_in_the_json(tmp_path):
    gm = fxlab.symbolic_trace(nn.Sequential(nn.ReLU()))
    for name in ("<img src=x onerror=alert(1)>", "</script>", 'a"b\nc', "n" * 10_000):
        with record(gm) as timeline:
            list(gm.graph.nodes)[1].name = name
        again = Timeline.from_json(timeline.to_json())
        assert again.steps[0].edit.after["name"] == name
        assert len(again.steps[0].sentence) < 200


def test_json_of_every_recording_comes_back_and_steps_alike():
    timeline = timeline_of(Small().eval(), [fuse_conv_bn], (X,))
    again = Timeline.from_json(timeline.to_json())
    assert json.loads(again.to_json()) == json.loads(timeline.to_json())
    for index in (0, 5, len(timeline)):
        assert again.frame(index).code() == timeline.frame(index).code()
    assert again.passes[1].same_output == timeline.passes[1].same_output


def test_record_works_in_a_plain_script_without_widgets_or_notebooks():
    script = """
import sys, torch, fxlab
gm = fxlab.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
with fxlab.record(gm) as timeline:
    list(gm.graph.nodes)[1].name = "first"
assert timeline.steps[0].sentence.endswith("_0 is now called first"), timeline.steps
heavy = {"ipywidgets", "anywidget", "IPython", "graphviz", "matplotlib"}
bad = heavy & set(sys.modules)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(fxlab.__file__).parents[1])


def test_ten_thousand_edits_take_linear_time_and_no_recursion():
    gm = chain(4000)
    with record(gm) as timeline:
        relu_to_gelu(gm)
    assert len(timeline) == 12_000
    assert timeline.steps[-1].well_formed
    assert len(timeline.slots(0, "p0")) == 12_002
    assert len(timeline.frame(6000).rows) == 8_002


def test_the_pass_is_quoted_as_it_was_when_it_ran(tmp_path, monkeypatch):
    path = tmp_path / "my_passes.py"
    path.write_text("def renames(gm):\n    list(gm.graph.nodes)[1].name = 'first'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_passes

    with record(chain(1)) as timeline:
        timeline.run(my_passes.renames)
    path.write_text("# another text\n" * 5)
    linecache.checkcache()
    _, source = timeline.source_of(timeline.steps[0].where[0])
    assert source.text.startswith("def renames(gm):")
    assert source.file == "my_passes.py"


def random_edits(gm, rng, count):
    """Edits of every kind, right and wrong ones."""
    graph = gm.graph
    for number in range(count):
        nodes = list(graph.nodes)
        node, other = rng.choice(nodes), rng.choice(nodes)
        kind = rng.randrange(9)
        if kind <= 1:
            with (
                graph.inserting_after(node) if rng.random() < 0.5 else graph.inserting_before(node)
            ):
                graph.call_function(torch.add, (other, number))
        elif kind == 2 and not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)
        elif kind == 3 and node is not other:
            node.append(other)
        elif kind == 4 and node.op == "call_function":
            node.args = (other, [number, {"k": node.all_input_nodes[:1]}])
        elif kind == 5:
            node.replace_all_uses_with(other, lambda user: rng.random() < 0.7)
        elif kind == 6:
            node.name = rng.choice([f"name_{number}", other.name])
        elif kind == 7 and node.op == "call_function":
            node.target = rng.choice([torch.mul, torch.sub])
        elif kind == 8 and node.op == "call_function":
            node.kwargs = {"alpha": rng.choice([1, other])}


@pytest.mark.parametrize("seed", range(12))
def test_after_any_edits_frames_are_the_graph_verdicts_are_lints_and_a_raise_undoes_all(seed):
    rng = random.Random(seed)
    gm = chain(4)
    text, names = str(gm.graph), [node.name for node in gm.graph.nodes]
    lints, codes = [], []

    def judge(kind, graph, node, before, after):
        codes.append([(n.name, [one.name for one in n.all_input_nodes]) for n in graph.nodes])
        try:
            graph.lint()
            lints.append(True)
        except fxlab.LintError:
            lints.append(False)

    gm.graph.add_listener(judge)
    with pytest.raises(ZeroDivisionError), record(gm) as timeline:
        random_edits(gm, rng, 120)
        gm.graph.remove_listener(judge)
        1 / 0  # noqa: B018
    assert str(gm.graph) == text
    assert [node.name for node in gm.graph.nodes] == names
    gm.graph.lint()
    assert len(timeline) == len(codes) + 1
    assert timeline.steps[-1].edit.kind == "error"
    assert [step.well_formed for step in timeline.steps[:-1]] == lints
    for index, code in enumerate(codes, 1):
        frame = timeline.frame(index)
        shown = [
            (state.name, [frame.name(one) for one in frame.inputs(row)])
            for row, state in frame.rows.items()
        ]
        assert shown == code, timeline.steps[index - 1]
    again = Timeline.from_json(timeline.to_json())
    assert [step.problem for step in again.steps] == [step.problem for step in timeline.steps]
    slots = timeline.slots(0, "p0")
    for index in (0, len(codes) // 2, len(codes)):
        live = [slot.row for slot in slots if slot.live(index)]
        assert live == list(timeline.frame(index).rows)


def test_a_pass_that_changes_numbers_on_purpose_is_held_to_its_own_promise():
    @as_pass(min_sqnr_db=20.0)
    def coarse(gm):
        "Edit in place."
        gm.conv.weight = nn.Parameter((gm.conv.weight * 64).round() / 64)

    @as_pass(min_sqnr_db=20.0)
    def ruins(gm):
        "Edit in place."
        gm.conv.weight = nn.Parameter(torch.zeros_like(gm.conv.weight))

    for pass_, kind in ((coarse, "rounding"), (ruins, "different")):
        with record(small(), inputs=(X,)) as timeline:
            timeline.run(pass_)
            timeline.run(fxlab.passes.dce)
        own, later = (span.same_output for span in timeline.passes)
        assert own["verdict"] == kind and own["text"].endswith("dB where 20 dB is asked")
        assert later["verdict"] == "identical" and later["first"]["verdict"] == kind
        assert later["first"]["text"] == own["text"]


def test_a_copy_that_is_edited_is_a_program_that_begins_whole():
    def on_a_copy(gm):
        new = copy.deepcopy(gm)
        fuse_conv_bn(new)
        return new

    gm = small()
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(on_a_copy)
    assert timeline.programs[1].made_from == {"program": "p0", "how": "copy"}
    assert len(timeline.frame(0, "p1").rows) == 9
    assert "create" not in {step.edit.kind for step in timeline.steps}
    assert timeline.steps[-1].edit.kind == "result"
    assert len(timeline.steps[-1].edit.after["pairs"]) == 7
    assert all(step.well_formed for step in timeline.steps)
    assert timeline.passes[0].same_output["verdict"] == "rounding"


def test_a_split_of_ours_gives_parts_whose_rows_pair_with_the_whole():
    gm = small()
    number = {node: index // 5 for index, node in enumerate(gm.graph.nodes)}
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(fxlab.passes.split_module, None, lambda node: number[node])
    result = timeline.steps[-1].edit
    paired = {old for old, _ in result.after["pairs"]}
    assert paired == set(timeline.frame(0).rows)
    assert len(result.after["parts"]) == 2
    assert all(step.well_formed for step in timeline.steps)


def test_a_graph_that_is_exchanged_whole_is_another_program():
    def exchanges(gm):
        graph = fxlab.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        gm.graph = graph

    gm = small()
    with record(gm, inputs=(X,)) as timeline:
        timeline.run(exchanges)
        timeline.run(fuse_conv_bn)
    assert [(span.program, span.result) for span in timeline.passes] == [("p0", "p1"), ("p1", "p1")]
    assert [span.same_output["verdict"] for span in timeline.passes] == ["identical", "rounding"]


def test_a_graph_module_inside_the_recorded_one_is_a_program_with_its_path():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x):
            return self.inner(x)[0] + 1

    class WholeModules(fxlab.Tracer):
        def is_leaf_module(self, module, name):
            return True

    outer = Outer()
    gm = fxlab.GraphModule(outer, WholeModules().trace(outer))

    def inside(gm):
        fuse_conv_bn(gm.inner)

    with record(gm, inputs=(X,)) as timeline:
        timeline.run(inside)
    assert [(program.id, program.path) for program in timeline.programs] == [
        ("p0", ""),
        ("p1", "inner"),
    ]
    assert {step.program for step in timeline.steps if step.edit.kind == "erase"} == {"p1"}
    assert timeline.passes[0].same_output["verdict"] == "rounding"


def _inmost(node):
    node.target = torch.tanh


def _outer(node):
    (lambda one: (lambda two: (lambda three: _inmost(three))(two))(one))(node)


def relus_to_tanh(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            _outer(node)


class RelusToTanh:
    def __call__(self, gm):
        relus_to_tanh(gm)


@pytest.mark.parametrize("trace", [fxlab.symbolic_trace, torch.fx.symbolic_trace])
def test_a_pass_is_called_what_the_block_called_however_deep_its_edit_is_made(trace):
    def called(pass_):
        gm = trace(lambda x: torch.relu(x))
        with record(gm) as timeline:
            pass_(gm)
        return [span.name for span in timeline.passes]

    assert called(relus_to_tanh) == ["relus_to_tanh"]
    assert called(RelusToTanh()) == ["RelusToTanh"]
    assert called(lambda gm: relus_to_tanh(gm)) == ["relus_to_tanh"]
    gm = trace(lambda x: torch.relu(x))
    with record(gm) as timeline:
        list(gm.graph.nodes)[1].target = torch.tanh
    assert [span.name for span in timeline.passes] == ["edits"]


def logged(pass_):
    @functools.wraps(pass_)
    def wrapper(gm):
        return pass_(gm)

    return wrapper


@logged
@logged
def tanh_for_relus(gm):
    relus_to_tanh(gm)


class Passes:
    @staticmethod
    @logged
    def tanh_in_a_class(gm):
        relus_to_tanh(gm)


def test_a_decorated_pass_has_the_name_that_its_author_wrote():
    def names(edit):
        gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
        with record(gm) as timeline:
            edit(gm)
        return {span.name for span in timeline.passes} | {timeline.steps[0].code.split(":")[0]}

    def called_here(gm):
        tanh_for_relus(gm)

    local = logged(relus_to_tanh)
    assert names(tanh_for_relus) == {"tanh_for_relus"}
    assert names(local) == {"relus_to_tanh"}
    assert names(Passes.tanh_in_a_class) == {"tanh_in_a_class"}
    assert names(called_here) == {"called_here"}
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    with record(gm) as timeline:
        Passes.tanh_in_a_class(gm)
    assert timeline.passes[0].name == "tanh_in_a_class"


def test_a_pass_of_passes_that_sign_their_edits_has_its_own_name():
    gm = fxlab.symbolic_trace(resnet18().eval())
    with record(gm) as timeline:
        fxlab.passes.optimize_for_inference(gm, (torch.randn(1, 3, 32, 32),))
    assert [span.name for span in timeline.passes] == ["optimize_for_inference"]


class Squeezed(nn.Module):
    def forward(self, x):
        return x.amax(dim=1) + torch.relu(x.amax(dim=2)).mean()


def merges_without_a_look_at_keywords(gm):
    seen = {}
    for node in gm.graph.nodes:
        if node.op == "call_method":
            first = seen.setdefault((node.target, node.args), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


@pytest.mark.parametrize("trace", [fxlab.symbolic_trace, torch.fx.symbolic_trace])
def test_a_node_that_computes_what_it_did_is_not_blamed_for_its_new_readers(trace):
    gm = trace(Squeezed())
    with record(gm, inputs=(torch.randn(2, 5, 5),)) as timeline:
        merges_without_a_look_at_keywords(gm)
    verdict = timeline.passes[0].same_output
    assert verdict["name"] == "relu"
    assert "first at relu, which reads amax where it read amax_1: " in verdict["text"]


def test_a_node_that_took_over_is_named_with_what_it_replaced():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x - 1).sum())

    def to_gelu(gm):
        for node in list(gm.graph.nodes):
            if node.target is torch.relu:
                with gm.graph.inserting_after(node):
                    gelu = gm.graph.call_function(nn.functional.gelu, node.args)
                node.replace_all_uses_with(gelu)
                gm.graph.erase_node(node)

    with record(gm, inputs=(torch.randn(4),)) as timeline:
        to_gelu(gm)
    verdict = timeline.passes[0].same_output
    assert verdict["text"].startswith("different, first at gelu, in place of relu: off by")


def test_a_difference_of_a_model_in_train_mode_says_which_nodes_draw_random_numbers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return torch.relu(self.drop(x)) * 2

    def drops_dropout(gm):
        for node in list(gm.graph.nodes):
            if node.op == "call_module":
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)

    texts = {}
    for mode in (True, False):
        gm = fxlab.symbolic_trace(Net().train(mode))
        with record(gm, inputs=(torch.ones(64),)) as timeline:
            drops_dropout(gm)
        texts[mode] = timeline.passes[0].same_output["text"]
    assert "random numbers are drawn by drop (train mode; compare after eval())" in texts[True]
    assert texts[False] == "identical"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.arange(12.0).reshape(3, 4), (4, 3)),
        (torch.randn(2, 3, 40, 80).bfloat16(), (16, 16)),
        ([torch.ones(2, 2, dtype=torch.int64)], (2, 2)),
        (torch.tensor([[float("nan"), float("inf")], [0.0, 1.0]]), (2, 2)),
        (torch.tensor([[True, False]]), (2, 1)),
        (torch.zeros(4), None),
        (torch.zeros(0, 3), None),
        (torch.zeros(2, 2, dtype=torch.complex64), None),
        (torch.eye(3).to_sparse(), None),
        (torch.zeros(2, 2, device="meta"), None),
        (3, None),
    ],
)
def test_a_value_has_a_small_picture_of_its_last_two_dimensions(value, size):
    picture = thumbnail(value)
    if size is None:
        assert picture is None
        return
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert (image.size, image.mode) == (size, "L")
    assert len(picture) < 600


def test_a_picture_goes_from_black_at_the_smallest_to_white_at_the_largest():
    picture = thumbnail(torch.tensor([[0.0, 0.5], [0.25, 1.0]]))
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert [image.getpixel(at) for at in ((0, 0), (1, 0), (0, 1), (1, 1))] == [0, 127, 63, 255]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.other(torch.relu(self.one(self.lstm(x)[0]))) * self.scale
        return (y * 1.0).sum(dim=1)


def test_the_check_in_float64_makes_no_second_model_and_leaves_every_parameter():
    torch.manual_seed(0)
    gm = fxlab.symbolic_trace(Tied().eval())
    before = {name: (one, one.clone()) for name, one in gm.named_parameters()}
    private = private_copy(gm, torch.float64)
    shared = {id(one) for one in gm.parameters()}
    assert all(id(one) in shared for one in private.parameters())

    def tiny(gm):
        mul = next(n for n in gm.graph.nodes if n.args[1:] == (1.0,))
        mul.args = (mul.args[0], 1.0 + 1e-7)

    with record(gm, inputs=(torch.randn(2, 3, 4),)) as timeline:
        timeline.run(tiny)
    assert timeline.passes[0].same_output["name"] == "mul_1"
    for name, one in gm.named_parameters():
        assert one is before[name][0]
        assert torch.equal(one, before[name][1])
    assert gm.other.weight is gm.one.weight
    assert all(one.dtype is torch.float32 for one in gm.lstm._flat_weights)


def forgets_eps(gm):
    for module in gm.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.0
    fuse_conv_bn(gm)


def off_by_a_thousandth(gm):
    fuse_conv_bn(gm)
    last = [name for name, one in gm.named_modules() if isinstance(one, nn.Conv2d)][-1]
    weight = gm.get_submodule(last).weight
    gm.get_submodule(last).weight = nn.Parameter(weight.detach() * 1.0005)


@pytest.mark.parametrize("model_class", [resnet18, resnet50])
def test_rounding_of_a_fold_is_told_from_a_forgotten_eps_and_from_a_wrong_weight(model_class):
    model = randomize_batch_norms(model_class()).eval()
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = {}
    for pass_ in (fuse_conv_bn, forgets_eps, off_by_a_thousandth):
        gm = fxlab.symbolic_trace(copy.deepcopy(model))
        with record(gm, inputs=(x,)) as timeline:
            timeline.run(pass_)
        found[pass_] = timeline.passes[0].same_output
    assert [one["verdict"] for one in found.values()] == ["rounding", "different", "different"]
    assert "where 1e-5 is allowed" in found[forgets_eps]["text"]
    assert found[forgets_eps]["name"] == "conv1"
    first, last = found[forgets_eps], found[off_by_a_thousandth]
    assert first["error"] > first["allowed"]
    assert last["error"] > last["allowed"]
    convs = [n.name for n in fxlab.symbolic_trace(model).graph.nodes if "conv" in n.name]
    assert last["name"] == convs[-1] or "downsample" in last["name"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fold_of_half_weights_is_rounding(dtype):
    model = Small().eval().to(dtype)
    gm = fxlab.symbolic_trace(model)
    with record(gm, inputs=(X.to(dtype),)) as timeline:
        timeline.run(fuse_conv_bn)
    assert timeline.passes[0].same_output["verdict"] == "rounding"


def square_by_product(gm):
    for node in list(gm.graph.nodes):
        if node.target is operator.pow:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(operator.mul, (node.args[0], node.args[0]))
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)


def ends_in_double(gm):
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_method("double", (output.args[0],)),)


def test_another_dtype_of_the_output_is_different_though_its_numbers_are_not():
    integers = torch.arange(3)
    for pass_, x, told in (
        (square_by_product, integers, "it returns i64[3] where f32[3] was returned"),
        (ends_in_double, integers.float(), "it returns f64[3] where f32[3] was returned"),
    ):
        gm = fxlab.symbolic_trace(lambda x: x**2.0)
        with record(gm, inputs=(x,)) as timeline:
            timeline.run(pass_)
        verdict = timeline.passes[0].same_output
        assert verdict["verdict"] == "different"
        assert told in verdict["text"]
    assert "without a partner: double" in verdict["text"]


def test_a_pass_that_promises_a_signal_to_noise_ratio_may_return_another_dtype():
    gm = fxlab.symbolic_trace(lambda x: x**2.0)
    with record(gm, inputs=(torch.ones(3),)) as timeline:
        timeline.run(as_pass(min_sqnr_db=20.0)(ends_in_double))
    assert timeline.passes[0].same_output["verdict"] == "identical"


def keeps(gm):
    "Edit nothing."


def skips_relu(gm):
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    relu.replace_all_uses_with(relu.args[0])
    gm.graph.erase_node(relu)


def relu_again(gm):
    (output,) = gm.graph.find_nodes(op="output")
    first, second = output.args[0]
    with gm.graph.inserting_before(output):
        new = gm.graph.call_function(torch.relu, (second,))
    output.args = ((first, new),)


def drops_second(gm):
    add = next(node for node in gm.graph.nodes if node.name == "add")
    add.args = (add.args[0], 2.0)


def test_a_pass_is_held_to_the_program_that_it_was_given():
    with record(small(), inputs=(X,)) as timeline:
        for pass_ in (fuse_conv_bn, skips_relu, keeps, fuse_conv_bn, relu_again, fxlab.passes.dce):
            timeline.run(pass_)
    own = [span.same_output for span in timeline.passes]
    kinds = ["rounding", "different", "identical", "identical", "different", "identical"]
    assert [one["verdict"] for one in own] == kinds
    whole = [(one["first"] or one)["verdict"] for one in own]
    assert whole == ["rounding", *["different"] * 3, "rounding", "rounding"]
    assert own[1]["name"] == "output" or "relu" in own[1]["text"]
    assert "conv" not in own[1]["text"]  # an edit of the pass before
    assert own[2]["text"] == own[3]["text"] == "identical; still different since skips_relu"
    assert own[4]["text"].endswith("; the output of the first program again")
    assert own[5]["text"] == "identical"
    assert Timeline.from_json(timeline.to_json()).passes[2].same_output == own[2]


def test_a_second_mistake_is_found_beside_the_first_and_loose_edits_are_no_passs():
    with record(small(), inputs=(X,)) as timeline:
        skips_relu(timeline.recorder.current)
        timeline.run(keeps)
        timeline.run(drops_second)
    loose, kept, second = (span.same_output for span in timeline.passes)
    assert (loose["verdict"], kept["verdict"]) == ("different", "identical")
    assert (second["verdict"], second["name"]) == ("different", "add")
    assert second["first"]["verdict"] == "different"


def test_each_program_runs_once_and_in_float64_only_where_that_decides(monkeypatch):
    runs = []

    def counted(gm, inputs, keys, keep=None, shapes=None, dtype=None):
        runs.append(dtype)
        return run(gm, inputs, keys, keep, shapes, dtype)

    run = sameness.execute
    monkeypatch.setattr(sameness, "execute", counted)
    with record(small(), inputs=(X,)) as timeline:
        for pass_ in (keeps, fuse_conv_bn, keeps, fxlab.passes.dce):
            timeline.run(pass_)
    assert runs.count(None) == 5
    assert runs.count(torch.float64) == 2


def breaks_order(gm):
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    gm.graph.output_node().append(relu)


def mends_order(gm):
    (output,) = gm.graph.find_nodes(op="output")
    output.prepend(next(node for node in gm.graph.nodes if node.name == "relu"))


def test_a_pass_carries_its_own_well_formedness_and_a_later_one_is_not_blamed():
    with record(small(), inputs=(X,)) as timeline:
        for pass_ in (keeps, breaks_order, keeps, keeps, mends_order):
            timeline.run(pass_)
    first, broke, *later = timeline.passes
    assert first.lint is None and timeline.ill_formed_since(0) is None
    assert broke.lint == timeline.steps[broke.last - 1].problem
    assert [span.lint for span in later] == [None] * 3  # nothing that they did
    assert [timeline.ill_formed_since(k) for k in (1, 2, 3, 4)] == [1, 1, 1, None]
    assert Timeline.from_json(timeline.to_json()).ill_formed_since(3) == 1
    assert broke.same_output["verdict"] == "different"
    assert later[0].same_output["verdict"] == "not checked"


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, KeyError])
@pytest.mark.parametrize("named", [False, True])
def test_a_block_that_raises_ends_with_a_step_that_says_so(kind, named):
    gm = small()
    code = gm.code

    def stops(gm):
        relu_to_gelu(gm)
        raise kind("enough")

    with pytest.raises(kind), record(gm) as timeline:
        if named:
            timeline.run(stops)
        else:
            stops(gm)
    assert gm.code == code
    last = timeline.steps[-1]
    assert last.edit.kind == "error" and last.where[0].function == "stops"
    assert f"stops: {kind.__name__}: " in last.sentence
    assert last.sentence.endswith("; its edits were undone")
    assert isinstance(timeline.failure, kind)
    for text in (text_table(view(timeline)), static_html(view(timeline))):
        assert "its edits were undone" in text
    assert [span.name for span in timeline.passes] == ["stops"]


def test_a_block_that_raises_without_an_edit_says_that_too():
    with pytest.raises(ValueError), record(small()) as timeline:
        timeline.run(relu_to_gelu)
        raise ValueError
    assert timeline.steps[-1].sentence.endswith(
        "stops: ValueError; all edits of the block were undone"
    )
    with pytest.raises(ValueError), record(small()) as timeline:
        raise ValueError("at once")
    assert [step.sentence.partition("stops: ")[2] for step in timeline.steps] == [
        "ValueError: at once"
    ]


def test_a_block_without_edits_says_so_and_a_pass_by_its_name():
    gm = small()
    relu_to_gelu(gm)
    with record(gm) as timeline:
        relu_to_gelu(gm)
    assert timeline.passes[0].sentence == (
        "nothing was edited in this block; an analysis edits nothing, and a pass that ran before "
        "on this GraphModule finds nothing left: trace it anew"
    )
    assert timeline.passes[0].sentence in text_table(view(timeline))  # and is not cut short there
    with record(gm) as timeline:
        timeline.run(relu_to_gelu)
    assert timeline.passes[0].sentence == (
        f"relu_to_gelu changed nothing: none of the {len(gm.graph.nodes)} nodes was edited"
    )


class NoForward(nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (Small, r"this is a class[\s\S]*explore\(Small\(\)\)"),
        (NoForward(), "a NoForward .*no forward[\\s\\S]*define forward"),
        (None, "trace the module before scripting it"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(given, advice):
    if given is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch deprecates people still have
            given = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(fxlab.RewriteError, match=advice):
        timeline_of(given)
    with pytest.raises(fxlab.RewriteError, match="this is a class"):
        record(Small)


def test_inputs_may_be_a_dict_by_parameter_and_passes_are_functions():
    by_name = timeline_of(Small().eval(), [fuse_conv_bn], {"x": X})
    assert by_name.passes[-1].same_output["verdict"] == "rounding"
    with record(small(), inputs={"x": X}) as timeline:
        timeline.run(keeps)
    assert timeline.passes[0].same_output["verdict"] == "identical"
    with pytest.raises(fxlab.RewriteError, match=r"does not fit the parameters: .*'x'"):
        timeline_of(Small().eval(), inputs={"y": X})
    for passes in (["dce"], "dce", [fuse_conv_bn, "dce"]):
        with pytest.raises(fxlab.RewriteError, match="'dce' is a str, and a pass is a function"):
            timeline_of(Small().eval(), passes)


def test_after_a_stop_the_passes_that_were_not_run_are_named():
    def branches(x):
        return x if x.sum() > 0 else -x

    timeline = timeline_of(branches, [keeps, fuse_conv_bn], (X,))
    assert timeline.steps[-1].sentence.endswith("; not run: keeps, fuse_conv_bn")
    assert "not run" in text_table(view(timeline))


class CallsFunctional(nn.Module):
    def forward(self, x):
        return F.gelu(F.dropout(x))


def test_a_row_is_placed_at_the_users_line_and_not_in_torch():
    def traces(gm):
        return torch.fx.symbolic_trace(CallsFunctional().eval())

    timeline = timeline_of(torch.fx.symbolic_trace(CallsFunctional().eval()), [traces])
    made = [step for step in timeline.steps if step.edit.kind == "create" and step.where]
    places = [step.where[0] for step in made]
    places += [row.source[0] for row in timeline.rows.values() if row.source]
    assert not [place for place in places if "torch/" in place.file]
    timeline = timeline_of(CallsFunctional().eval(), [lambda gm: fxlab.symbolic_trace(gm)])
    places = [step.where[0] for step in timeline.steps if step.where]
    assert places and not [place for place in places if "torch/" in place.file]


def test_recording_writes_no_code_of_a_program_that_nobody_runs(monkeypatch):
    from fxlab.core.codegen import CodeGen

    written = []
    monkeypatch.setattr(CodeGen, "_gen_python_code", lambda *args, **kwargs: written.append(args))
    gm = fxlab.symbolic_trace(CallsFunctional().eval())
    with fxlab.record(gm):
        gm.graph.find_nodes(op="call_function", target=F.gelu)[0].target = torch.tanh
    assert written == []
