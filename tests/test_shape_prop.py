"""Shape propagation, with numbers and with names for sizes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.fx.passes.shape_prop as torch_shape_prop
from torch import nn

import fxlab
from fxlab.models import MLP, TransformerBlock, resnet18
from fxlab.passes import ShapeError, ShapeProp, shape_prop, shape_text

torch.set_num_threads(1)


def test_metadata_agrees_with_torch_fx_on_resnet18():
    model, x = resnet18().eval(), torch.randn(1, 3, 64, 64)
    ours = shape_prop(fxlab.symbolic_trace(model), x)
    theirs = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        torch_shape_prop.ShapeProp(theirs).propagate(x)
    for a, b in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert tuple(a.meta["tensor_meta"]) == tuple(b.meta["tensor_meta"])
        assert a.meta["type"] is b.meta["type"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(1, 64, 56, 56), "f32[1, 64, 56, 56]"),
        (torch.zeros((), dtype=torch.bfloat16), "bf16[]"),
        (
            (torch.zeros(2, dtype=torch.bool), [torch.zeros(3, dtype=torch.int64)]),
            "(b8[2], [i64[3]])",
        ),
        ({"a": torch.zeros(2, dtype=torch.uint8)}, "{a: u8[2]}"),
        (7, "int"),
    ],
)
def test_shapes_read_as_text(value, text):
    assert shape_text(value) == text


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
def test_channels_last_and_quantized_values_keep_their_layout_and_scale():
    gm = fxlab.symbolic_trace(lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8))
    shape_prop(gm, torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    x, quantized, _ = gm.graph.nodes
    assert x.meta["tensor_meta"].memory_format is torch.channels_last
    meta = quantized.meta["tensor_meta"]
    assert meta.is_quantized
    assert (meta.qparams["scale"], meta.qparams["zero_point"]) == (0.5, 3)


def test_an_error_names_the_node_its_inputs_and_the_users_line():
    gm = fxlab.symbolic_trace(MLP((8, 4)))
    with pytest.raises(ShapeError) as caught:
        shape_prop(gm, torch.zeros(2, 5))
    text = str(caught.value)
    assert "layers_0" in text
    assert "x: f32[2, 5]" in text
    assert "small.py" in text
    assert isinstance(caught.value, RuntimeError)


def test_a_fake_mode_computes_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    gm = fxlab.symbolic_trace(nn.Linear(8, 1 << 10))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    out = ShapeProp(gm, mode).propagate(torch.empty(1 << 12, 8))
    assert tuple(out.shape) == (1 << 12, 1 << 10)
    assert isinstance(out, FakeTensor)


def test_a_named_batch_size_goes_through_resnet():
    gm = fxlab.symbolic_trace(resnet18().eval())
    shape_prop(gm, torch.zeros(1, 3, 224, 224), dynamic={"x": {0: "N"}})
    texts = {n.name: shape_text(n) for n in gm.graph.nodes}
    assert texts["layer1_0_conv1"] == "f32[N, 64, 56, 56]"
    assert texts["output"] == "f32[N, 1000]"
    assert gm.meta["reports"]["shape_prop"]["guards"] == []


def test_sizes_are_computed_with_their_names():
    gm = fxlab.symbolic_trace(lambda x, y: torch.cat([x.flatten(1), y], 1))
    names = [n.target for n in gm.graph.find_nodes(op="placeholder")]
    inputs = torch.zeros(2, 3, 8), torch.zeros(2, 5)
    shape_prop(gm, *inputs, dynamic={names[0]: {0: "N", 2: "T"}, names[1]: {0: "N"}})
    assert shape_text(gm.graph.output_node()) == "f32[N, 3*T + 5]"


def test_transformer_takes_named_batch_and_length():
    gm = fxlab.symbolic_trace(TransformerBlock().eval())
    shape_prop(gm, torch.zeros(2, 16, 32), dynamic={"x": {0: "N", 1: "T"}})
    assert shape_text(gm.graph.find_nodes(op="call_function", target=torch.softmax)[0]) == (
        "f32[N, 4, T, T]"
    )


def test_a_size_that_the_model_forces_is_shown_as_a_guard():
    gm = fxlab.symbolic_trace(lambda x: x + torch.ones(4))
    name = gm.graph.find_nodes(op="placeholder")[0].target
    shape_prop(gm, torch.zeros(4), dynamic={name: {0: "N"}})
    assert any("N == 4" in guard for guard in gm.meta["reports"]["shape_prop"]["guards"])
    assert shape_text(gm.graph.output_node()) == "f32[4]"


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [({"y": {0: "N"}}, "no such input"), ({"x": {5: "N"}}, "dimension 5"),
     ({"x": {0: "N", 1: "N"}}, "differ in the examples"), ({"x": ["N"]}, "dict from dimensions"),
     ({"x": {"0": "N"}}, "dict from dimensions"), ({"x": {0: 3}}, "dict from dimensions"),
     ({"x": {1: "C", -1: "K"}}, "twice")],
)  # fmt: skip
def test_wrong_names_of_sizes_are_refused(dynamic, message):
    gm = fxlab.symbolic_trace(MLP())
    with pytest.raises(ShapeError, match=message):
        shape_prop(gm, torch.zeros(2, 8), dynamic=dynamic)


def test_a_size_that_the_model_forbids_is_told_by_its_name_and_leaves_no_symbols(caplog):
    gm = fxlab.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    with pytest.raises(ShapeError) as caught:
        shape_prop(gm, torch.zeros(2, 5), dynamic={"input": {0: "batch"}})
    assert "[batch, 5]" in caught.value.message
    assert "f32[batch, 5]" in caught.value.expected
    assert "f32[batch, 5]" in str(caught.value)
    assert "ERROR" not in caplog.text  # torch logs the refusal of a fake tensor, with its stack
    assert shape_text(gm.graph.find_nodes(op="call_module")[0]) == "f32[batch, 5]"
    pickle.dumps(gm)


def test_what_is_no_tensor_has_no_sizes_to_name():
    gm = fxlab.symbolic_trace(lambda x, scale: x * scale)
    with pytest.raises(ShapeError, match="'scale', which is a int"):
        shape_prop(gm, torch.ones(2), 3, dynamic={"scale": {0: "N"}})
    with pytest.raises(ShapeError, match="'scale', which has no example"):
        shape_prop(gm, torch.ones(2), dynamic={"scale": {0: "N"}})


def test_a_size_that_only_data_can_tell_is_a_symbol_of_its_own():
    gm = fxlab.symbolic_trace(lambda x: x.nonzero())
    shape_prop(gm, torch.ones(2, 4), dynamic={"x": {0: "N"}})
    assert shape_text(gm.graph.output_node()) == "i64[u0, 2]"


PASSES = [
    fxlab.passes.amp, fxlab.passes.const_fold, fxlab.passes.cse, fxlab.passes.dce,
    fxlab.passes.fuse_conv_bn, fxlab.passes.remove_dropout,
    *(lambda gm, f=f: f(gm, torch.ones(1, 4)) for f in (
        fxlab.passes.cost, fxlab.passes.live_ranges, fxlab.passes.lower_peak,
        fxlab.passes.profile, shape_prop)),
]  # fmt: skip


@pytest.mark.parametrize("pass_", PASSES)
def test_a_model_that_was_not_traced_is_told_so(pass_):
    with pytest.raises(TypeError, match=r"was given a Linear; .*fxlab\.symbolic_trace"):
        pass_(nn.Linear(4, 4))


def test_an_input_may_be_named_as_its_node_is():
    gm = fxlab.symbolic_trace(nn.Flatten())
    node = gm.graph.find_nodes(op="placeholder")[0]
    assert node.name != node.target
    shape_prop(gm, torch.zeros(2, 3, 4), dynamic={node.name: {0: "N"}})
    assert shape_text(gm.graph.output_node()) == "f32[N, 12]"


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_pickles_in_every_protocol(protocol):
    gm = fxlab.symbolic_trace(lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8))
    shape_prop(gm, torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    for node in gm.graph.nodes:
        meta = node.meta["tensor_meta"]
        assert pickle.loads(pickle.dumps(meta, protocol)) == meta
    torch.save(gm, io.BytesIO())


def test_symbolic_metadata_copies_and_pickles():
    gm = fxlab.symbolic_trace(MLP())
    shape_prop(gm, torch.zeros(2, 8), dynamic={"x": {0: "N"}})
    for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert shape_text(twin.graph.output_node()) == "f32[N, 4]"


def test_the_function_carries_torch_fx_names_whatever_was_imported():
    import fxlab.passes.shape_prop

    assert fxlab.passes.shape_prop.ShapeProp is ShapeProp
    assert fxlab.passes.shape_prop is shape_prop
    assert hasattr(torch_shape_prop, "TensorMetadata")
    assert shape_prop.TensorMetadata._fields == torch_shape_prop.TensorMetadata._fields


RUNS = [shape_prop, fxlab.passes.profile, fxlab.passes.cost,
        lambda gm, *inputs: shape_prop(gm, *inputs, dynamic={"x": {0: "N"}})]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_inputs_too_many_or_too_few_are_refused_by_every_analysis(run):
    gm, x = fxlab.symbolic_trace(MLP()), torch.zeros(2, 8)
    with pytest.raises(ShapeError, match="takes 1 input, and 2 are given") as caught:
        run(gm, x, torch.zeros(1000, 1000))
    assert "value for each of: x" in caught.value.expected
    if run is not RUNS[-1]:  # which misses the example of what it names
        with pytest.raises(ShapeError, match="takes 1 input, and 0 are given"):
            run(gm)
    shown = str(caught.value)
    assert "test_shape_prop.py" in shown  # the user's line, none of the kit's own
    assert "passes/shape_prop.py" not in shown
    assert "passes/symbolic.py" not in shown


@pytest.mark.parametrize("run", RUNS)
def test_a_default_need_not_be_given_and_a_star_takes_any_number(run):
    def program(x, scale=2.0, *rest):
        return x * scale

    gm, x = fxlab.symbolic_trace(program), torch.zeros(2, 8)
    run(gm, x)
    run(gm, x, 3.0)


@pytest.mark.parametrize("run", RUNS[:3])
def test_a_wrong_shape_names_the_node_in_every_analysis(run):
    with pytest.raises(ShapeError, match="layers_0 does not run"):
        run(fxlab.symbolic_trace(MLP()), torch.zeros(2, 5))
