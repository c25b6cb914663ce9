"""Claims about prepare and convert: what they insert, replace, refuse and report."""

import copy
import io
import itertools
import operator
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab import FxlabError
from fxlab.models import DeepRecommender, LearningToPaintActor, randomize_batch_norms, resnet18
from fxlab.passes.quantize import (
    QConfigMapping,
    compare,
    convert,
    default_qconfig,
    prepare,
    prepare_qat,
    quantize_static,
    sensitivity,
    sqnr,
)
from fxlab.passes.quantize.modules import Int8Embedding, Int8Linear, Table
from fxlab.passes.quantize.observers import Observer


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mlp(*widths):
    parts = []
    for a, b in itertools.pairwise(widths):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).eval()


def names(gm):
    return [node.name for node in gm.graph.nodes]


def kinds(gm):
    return [
        type(gm.get_submodule(n.target)).__name__ for n in gm.graph.nodes if n.op == "call_module"
    ]


def snapshot(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


# -------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize(
    ("make", "shape", "least"),
    [
        (lambda: DeepRecommender(400, (64, 64, 96)), (50, 400), 30),
        (lambda: resnet18(10), (2, 3, 64, 64), 20),
        (LearningToPaintActor, (1, 9, 128, 128), 20),
        (lambda: mlp(20, 30, 10), (64, 20), 30),
    ],
    ids=["recommender", "resnet18", "paint", "mlp"],
)
def test_an_int8_model_is_close_to_the_float_one_on_new_data(make, shape, least):
    model = make()
    randomize_batch_norms(model)
    model.eval()
    quantized = quantize_static(model, [torch.randn(shape)])
    x = torch.randn(shape)
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) >= least


def test_every_engine_gives_the_output_of_the_reference_within_one_code():
    model = DeepRecommender(300, (32, 32, 48)).eval()
    prepared = prepare(model, replace(default_qconfig(), tables="all"))
    x = torch.randn(40, 300)
    prepared(x)
    outputs = {e: convert(prepared, engine=e)(x) for e in ("reference", "onednn", "fbgemm")}
    step = (outputs["reference"].unique().diff()).max()
    for engine in ("onednn", "fbgemm"):
        gap = (outputs[engine] - outputs["reference"]).abs()
        assert float(gap.max()) <= 2 * float(step)
        assert float((gap > 0).double().mean()) < 0.02


def test_a_batch_of_one_and_of_many_give_the_same_rows_within_a_code():
    model = DeepRecommender(300, (32, 32, 48)).eval()
    quantized = quantize_static(model, [torch.randn(40, 300)])
    x = torch.randn(9, 300)
    with torch.no_grad():
        one = torch.cat([quantized(row[None]) for row in x])
        assert sqnr(quantized(x), one) > 45


# ------------------------------------------------------------------------- what is put in the graph


def test_prepare_computes_what_the_float_model_does_and_leaves_it_alone():
    model = resnet18(10)
    randomize_batch_norms(model)
    model.eval()
    gm = fxlab.symbolic_trace(model)
    code, before = gm.code, snapshot(model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want = model(x)
        prepared = prepare(gm)
        torch.testing.assert_close(prepared(x), want, rtol=1e-3, atol=1e-3)
        convert(prepared)
    assert gm.code == code
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(isinstance(m, Observer) for m in gm.modules())


def test_convert_leaves_the_prepared_module_as_it_was():
    prepared = prepare(mlp(4, 5, 3))
    x = torch.randn(8, 4)
    want = prepared(x)
    code, before = prepared.code, snapshot(prepared)
    convert(prepared)
    assert prepared.code == code
    assert before.keys() == prepared.state_dict().keys()
    assert torch.equal(prepared(x), want)


def test_a_residual_network_runs_on_codes_from_its_first_to_its_last_layer():
    model = resnet18(10).eval()
    quantized = quantize_static(model, [torch.randn(2, 3, 64, 64)])
    assert kinds(quantized).count("Int8Conv") == 20
    assert kinds(quantized).count("Quantize") == 1  # the input; the last layer quantizes its own
    assert quantized.get_submodule("fc").reads_float
    assert "Int8Add" not in kinds(quantized)  # all eight additions are inside a convolution
    (kept,) = quantized.meta["reports"]["convert"].kept
    assert kept.startswith("avgpool kept in float: averages")


def test_methods_and_functions_count_as_well_as_modules():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6))
            self.bias = nn.Parameter(torch.randn(8))
            self.kernel = nn.Parameter(torch.randn(4, 2, 3, 3))

        def forward(self, x, image):
            y = F.linear(input=x, bias=self.bias, weight=self.weight).relu()
            z = F.relu(F.conv2d(image, self.kernel, stride=2, padding=1), inplace=True)
            return y, F.max_pool2d(z, 2).flatten(1)

    model = Plain().eval()
    x, image = torch.randn(16, 6), torch.randn(16, 2, 12, 12)
    quantized = quantize_static(model, [(x, image)])
    assert kinds(quantized).count("Int8Linear") == kinds(quantized).count("Int8Conv") == 1
    for want, got in zip(model(x, image), quantized(x, image), strict=True):
        assert sqnr(want, got) > 25


def test_addition_concatenation_pools_and_views_stay_on_codes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
            self.head = nn.Linear(12 * 16, 5)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            both = torch.relu(a + b)
            y = torch.cat([both, a, b], dim=1)
            y = F.max_pool2d(y, 4)
            return self.head(y.permute(0, 2, 3, 1).reshape(y.size(0), -1))

    model = Net().eval()
    x = torch.randn(8, 3, 16, 16)
    quantized = quantize_static(model, [x])
    assert quantized.meta["reports"]["convert"].kept == []
    assert {"Int8Add", "Int8Cat", "Int8MaxPool2d"} <= set(kinds(quantized))
    assert sqnr(model(x), quantized(x)) > 25


@pytest.mark.parametrize(("dim", "kernel"), [(1, 3), (2, 3), (3, 2)])
def test_convolutions_of_one_to_three_dimensions_with_batch_norm_and_relu(dim, kernel):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1](3, 6, kernel, padding=1)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](6)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten())
    randomize_batch_norms(model)
    model.eval()
    x = torch.randn(4, 3, *[8] * dim)
    quantized = quantize_static(model, [x])
    assert "BatchNorm" not in str(kinds(quantized))
    assert sqnr(model(x), quantized(x)) > 30


def test_an_embedding_keeps_its_rows_in_int8_and_feeds_a_layer():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)).eval()
    index = torch.randint(0, 50, (32, 3))
    quantized = quantize_static(model, [index])
    assert "Int8Embedding" in kinds(quantized)
    assert sqnr(model(index), quantized(index)) > 30
    rows = quantized.get_submodule("0")
    assert isinstance(rows, Int8Embedding) and rows.weight.dtype == torch.int8


@pytest.mark.parametrize(("tables", "count"), [("ends", 1), ("all", 3), ("none", 0)])
def test_tables_says_where_a_function_becomes_one(tables, count):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = F.selu(layer(x))
            return x

    model, x = Net().eval(), torch.randn(32, 8)
    quantized = quantize_static(model, [x], replace(default_qconfig(), tables=tables))
    assert sum(isinstance(m, Table) for m in quantized.modules()) == count
    assert sqnr(model(x), quantized(x)) > 25


def test_a_value_read_in_float_and_as_codes_is_made_float_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.a(x)
            return self.b(y), y.sum(), torch.cumsum(y, 0)

    model, x = Net().eval(), torch.randn(16, 6)
    quantized = quantize_static(model, [x])
    assert kinds(quantized).count("Dequantize") == 1
    for want, got in zip(model(x), quantized(x), strict=True):
        assert sqnr(want, got) > 20


def test_layers_of_more_than_two_dimensions_and_unbatched_images():
    model = nn.Linear(5, 3).eval()
    x = torch.randn(2, 4, 7, 5)
    quantized = quantize_static(nn.Sequential(model).eval(), [x])
    assert quantized(x).shape == (2, 4, 7, 3)
    conv = nn.Sequential(nn.Conv2d(2, 3, 3)).eval()
    image = torch.randn(2, 9, 9)
    quantized = quantize_static(conv, [image])
    assert quantized(image).shape == conv(image).shape


def test_an_empty_batch_goes_through():
    quantized = quantize_static(mlp(4, 5, 3), [torch.randn(8, 4)])
    assert quantized(torch.randn(0, 4)).shape == (0, 3)


# -------------------------------------------------------------- what is left in float, and the rest


def test_each_operation_left_in_float_is_named_with_its_reason():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.up = nn.Linear(6, 6), nn.ConvTranspose1d(1, 1, 3)
            self.head = nn.Linear(8, 2)
            self.narrow = nn.Linear(8, 2).half()

        def forward(self, x):
            y = torch.softmax(self.a(x), -1)
            y = self.up(y.unsqueeze(1)).squeeze(1)
            return self.head(y), self.narrow(y.half())

    mapping = QConfigMapping().set_global(default_qconfig()).set_module_name("head", None)
    prepared = prepare(Net().eval(), mapping)
    kept = "\n".join(prepared.meta["reports"]["prepare"].kept)
    assert "softmax kept in float: no int8 kernel for softmax" in kept
    assert "up kept in float: no int8 kernel for ConvTranspose1d" in kept
    assert "head kept in float: its qconfig is None" in kept
    assert "narrow kept in float: its weight is torch.float16" in kept


def test_the_most_specific_entry_of_a_mapping_wins():
    model = nn.Sequential(mlp(4, 4, 4), nn.Linear(4, 2)).eval()
    config = default_qconfig()

    def layers_of(mapping):
        gm = quantize_static(model, [torch.randn(8, 4)], mapping)
        return {n for n, m in gm.named_modules() if isinstance(m, Int8Linear)}

    everything = QConfigMapping().set_global(config)
    assert layers_of(everything) == {"0.0", "0.2", "1"}
    assert layers_of(QConfigMapping().set_module_name("0", config)) == {"0.0", "0.2"}
    assert layers_of(
        QConfigMapping().set_module_name("0", config).set_module_name("0.2", None)
    ) == {"0.0"}
    assert layers_of(QConfigMapping().set_module_name_regex(r"0\..*", config)) == {"0.0", "0.2"}
    assert layers_of(QConfigMapping().set_object_type(nn.Linear, config)) == {"0.0", "0.2", "1"}


def test_a_value_edited_in_place_that_others_read_is_left_in_float_and_right():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.a(x)
            z = F.relu(y, inplace=True)
            return self.b(y) + z

    model, x = Net().eval(), torch.randn(16, 6)
    quantized = quantize_static(model, [x])
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 25
    assert any("edited in place" in s for s in quantized.meta["reports"]["convert"].kept)


def test_adding_in_place_as_residual_networks_do_is_quantized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x):
            y = F.relu(self.a(x))
            z = self.b(y)
            z += y
            return self.a(F.relu(z))

    model, x = Net().eval(), torch.randn(4, 2, 6, 6)
    quantized = quantize_static(model, [x])
    assert not any(n.target is operator.iadd for n in quantized.graph.nodes)
    assert sqnr(model(x), quantized(x)) > 25


# --------------------------------------------------------------------------------------- bad input


def test_converting_before_calibrating_is_refused_with_the_recipe():
    with pytest.raises(FxlabError, match="2 of 2 values have no range") as caught:
        convert(prepare(mlp(4, 5, 3)))
    assert "prepared(batch)" in str(caught.value)
    assert "it saw no data" in str(caught.value)


def test_an_observer_on_a_branch_that_never_ran_is_refused_by_name():
    prepared = prepare(mlp(4, 5, 3))
    prepared(torch.randn(3, 4))
    prepared.get_submodule("_1_observer").count.zero_()
    with pytest.raises(FxlabError, match=r"1 of 2 values have no range \(_1: it saw no data"):
        convert(prepared)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_calibrating_with_nan_is_refused(bad):
    prepared = prepare(mlp(4, 5, 3))
    prepared(torch.tensor([[1.0, bad, 0.0, 2.0]]))
    with pytest.raises(FxlabError, match="NaN or infinite"):
        convert(prepared)


def test_a_weight_that_is_nan_is_refused_with_its_path():
    model = mlp(4, 5, 3)
    prepared = prepare(model)
    prepared(torch.randn(3, 4))
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(FxlabError, match="the weight of 2 cannot be quantized"):
        convert(prepared)


def test_a_constant_is_converted_exactly_and_reported():
    model = mlp(4, 5, 3)
    x = torch.full((3, 4), 0.5)
    quantized = quantize_static(model, [x])
    assert "input_1: calibration saw one constant value only" in "\n".join(
        quantized.meta["reports"]["convert"].kept
    )
    assert sqnr(model(x), quantized(x)) > 30


def test_a_model_in_train_mode_is_refused_for_calibration_and_eval_for_training():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    with pytest.raises(FxlabError, match="train mode"):
        prepare(model)
    with pytest.raises(FxlabError, match="eval mode"):
        prepare_qat(model.eval())
    gm = fxlab.symbolic_trace(model)
    gm.get_submodule("1").train()
    with pytest.raises(FxlabError, match="its part '1'"):
        prepare(gm)


def test_a_module_called_twice_and_a_weight_held_by_two_modules_are_coded_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x) * 3))

    model, x = Shared().eval(), torch.randn(32, 6)
    quantized = quantize_static(model, [x])
    assert sqnr(model(x), quantized(x)) > 25
    layers = [m for m in quantized.modules() if isinstance(m, Int8Linear)]
    assert len(layers) == 3
    assert len({layer.weight.data_ptr() for layer in layers}) == 1
    kept = "\n".join(quantized.meta["reports"]["convert"].kept)
    assert "a is called several times" in kept
    assert "b shares its weight with another module" in kept


def test_channels_of_zeros_stay_zero_and_are_reported():
    model = mlp(4, 5, 3)
    with torch.no_grad():
        model[0].weight[1:3] = 0
    x = torch.randn(16, 4)
    quantized = quantize_static(model, [x])
    assert sqnr(model(x), quantized(x)) > 30
    assert torch.equal(quantized.get_submodule("0").weight[1:3], torch.zeros(2, 4).to(torch.int8))
    assert "0: 2 channels have no weight but 0" in "\n".join(
        quantized.meta["reports"]["convert"].kept
    )


def test_an_engine_that_this_build_lacks_is_said_and_the_next_one_taken(monkeypatch):
    from fxlab.passes.quantize import kernels

    monkeypatch.setattr(kernels, "available_engines", lambda: ("onednn", "reference"))
    prepared = prepare(mlp(4, 5, 3))
    prepared(torch.randn(8, 4))
    quantized = convert(prepared, engine="fbgemm")
    assert "engine fbgemm is not in this torch build; onednn is used" in (
        quantized.meta["reports"]["convert"].kept
    )
    with pytest.raises(FxlabError, match="no engine 'cuda'"):
        convert(prepared, engine="cuda")


def test_without_any_library_the_reference_still_computes(monkeypatch):
    from fxlab.passes.quantize import kernels

    monkeypatch.setattr(kernels, "available_engines", lambda: ("reference",))
    kernels.choose_engine.cache_clear()
    try:
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)).eval()
        x = torch.randn(4, 2, 8, 8)
        quantized = quantize_static(model, [x])
        assert sqnr(model(x), quantized(x)) > 25
    finally:
        kernels.choose_engine.cache_clear()


def test_inputs_beyond_the_calibrated_range_saturate_and_are_counted():
    model = mlp(4, 5, 3)
    prepared = prepare(model)
    prepared(torch.rand(64, 4))
    quantized = convert(prepared)
    x = torch.rand(64, 4)
    x[:16] *= 100
    row = compare(prepared, quantized, x).rows[0]
    assert 0.2 < row.saturated < 0.27
    assert compare(prepared, quantized, torch.rand(64, 4) * 0.9).rows[0].saturated == 0


def test_preparing_or_converting_twice_is_refused():
    prepared = prepare(mlp(4, 5, 3))
    prepared(torch.randn(3, 4))
    with pytest.raises(FxlabError, match="went through prepare already"):
        prepare(prepared)
    with pytest.raises(FxlabError, match="wants a prepared module"):
        convert(convert(prepared))
    with pytest.raises(FxlabError, match="wants a prepared module"):
        convert(mlp(4, 5, 3))
    with pytest.raises(FxlabError, match="qconfig is a str"):
        prepare(mlp(4, 5, 3), "fbgemm")


def test_a_model_with_nothing_to_quantize_comes_back_as_it_is_and_says_so():
    quantized = quantize_static(nn.Sequential(nn.ReLU()).eval(), [torch.randn(3)])
    assert any(
        "nothing to quantize" in s
        for s in prepare(nn.Sequential(nn.ReLU()).eval()).meta["reports"]["prepare"].kept
    )
    x = torch.randn(5)
    assert torch.equal(quantized(x), torch.relu(x))


# ---------------------------------------------------------------------------- a module as any other


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 6), nn.Sigmoid()
    ).eval()
    return quantize_static(model, [torch.randn(8, 2, 8, 8)]), torch.randn(5, 2, 8, 8)


def test_the_code_is_readable(converted):
    quantized, _ = converted
    lines = [line.split("=")[0].strip() for line in quantized.code.splitlines() if " = " in line]
    assert lines == [
        "input_1",
        "input_1_codes",
        "_0_int8",
        "_2",
        "_3_int8",
        "_4_table",
    ]


@pytest.mark.parametrize(
    "copier",
    [
        copy.deepcopy,
        lambda gm: pickle.loads(pickle.dumps(gm)),
        lambda gm: torch.load(_saved(gm), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_and_pickles_compute_the_same(converted, copier):
    quantized, x = converted
    want = quantized(x)
    other = copier(quantized)
    assert torch.equal(other(x), want)
    assert names(other) == names(quantized)


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_state_dict_carries_weights_scales_and_tables_to_another_conversion(converted):
    quantized, x = converted
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 6), nn.Sigmoid()
    ).eval()
    other = quantize_static(model, [torch.randn(8, 2, 8, 8) * 5])
    other(x)  # packs the weights that are about to be replaced
    assert not torch.equal(other(x), quantized(x))
    state = torch.load(_saved(quantized.state_dict()), weights_only=True)
    other.load_state_dict(state)
    assert torch.equal(other(x), quantized(x))


def test_weights_take_a_quarter_of_the_memory(converted):
    model = DeepRecommender(2000).eval()
    quantized = quantize_static(model, [torch.randn(4, 2000)])
    size = {
        gm: sum(
            t.numel() * t.element_size()
            for t in gm.state_dict().values()
            if isinstance(t, torch.Tensor)
        )
        for gm in (model, quantized)
    }
    assert size[quantized] < 0.27 * size[model]


def test_the_pass_goes_through_record_and_an_interpreter(converted):
    model, x = mlp(4, 5, 3), torch.randn(8, 4)
    gm = fxlab.symbolic_trace(model)
    quantized = quantize_static(gm, [x])
    assert torch.equal(fxlab.Interpreter(quantized).run(x), quantized(x))
    explorer = fxlab.explore(gm, [prepare_calibrate_convert(x)], inputs=(x,))
    assert explorer.error is None
    assert len(explorer.timeline) > 5


def prepare_calibrate_convert(x):
    def quantize(gm):
        return quantize_static(gm, [x])

    return quantize


def test_each_new_node_knows_the_line_of_the_model_it_came_from():
    gm = fxlab.symbolic_trace(DeepRecommender(30, (8, 8)).eval())
    quantized = quantize_static(gm, [torch.randn(4, 30)])
    for node in quantized.graph.nodes:
        if node.name.endswith("_int8"):
            assert node.meta["source"][0][0].endswith("recommender.py")


# ------------------------------------------------------------------------------------------ reports


def test_compare_finds_the_worst_layer_and_writes_it_on_the_nodes():
    model = mlp(8, 8, 8, 8)
    with torch.no_grad():
        model[2].weight[:, 0] *= 1000  # one input column drowns the rest of its scale
    prepared = prepare(model)
    x = torch.randn(64, 8)
    prepared(x)
    quantized = convert(prepared)
    result = compare(prepared, quantized, x)
    assert [row.value for row in result.rows] == ["input_1", "_1", "_3", "_4"]
    assert result.worst.sqnr_db == min(row.sqnr_db for row in result.rows)
    assert "output:" in str(result)
    by_name = {n.name: n for n in quantized.graph.nodes}
    assert result.rows[0].what == "Quantize"  # done inside the first layer
    for row in result.rows[1:]:
        assert by_name[row.name].meta["columns"]["sqnr_db"] == row.sqnr_db


def test_compare_does_not_feed_the_observers():
    prepared = prepare(mlp(4, 5, 3))
    prepared(torch.randn(8, 4))
    before = snapshot(prepared)
    compare(prepared, convert(prepared), torch.randn(8, 4) * 100)
    assert all(torch.equal(before[k], v) for k, v in prepared.state_dict().items())


def test_sensitivity_names_the_layer_that_hurts_most():
    model = mlp(8, 8, 8, 8)
    with torch.no_grad():
        model[2].weight[:, 0] *= 3000
        model[0].weight[0] *= 0
        model[0].bias[0] = 0  # what the big column reads is 0, so that only coding it hurts
    ranked = sensitivity(model, [torch.randn(64, 8)])
    assert {path for path, _ in ranked} == {"0", "2", "4"}
    assert ranked[0][0] == "2"
    assert [db for _, db in ranked] == sorted(db for _, db in ranked)
    with pytest.raises(FxlabError, match="no layer '9'"):
        sensitivity(model, [torch.randn(4, 8)], only=["9"])


def test_the_report_of_convert_has_each_tensors_range(converted):
    quantized, _ = converted
    tensors = quantized.meta["reports"]["convert"]["tensors"]
    assert set(tensors) == {"input_1", "_1", "_3"}
    for entry in tensors.values():
        assert entry["low"] <= 0 <= entry["high"]
        assert entry["scale"] == pytest.approx((entry["high"] - entry["low"]) / 255, rel=1e-4)


def _write_through_view(y):
    y.view(-1).mul_(3)


def _write_item(y):
    y[:, 0] = 100


def _write_slice(y):
    y[:, :4].mul_(5)


@pytest.mark.parametrize("write", [_write_through_view, _write_item, _write_slice])
def test_a_value_that_is_written_through_a_view_stays_float_for_its_readers(write):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            write(y)
            return self.b(y)

    model, x = Writes().eval(), torch.randn(8, 8)
    quantized = quantize_static(fxlab.symbolic_trace(model), [x])
    assert (quantized(x) - model(x)).norm() < 0.03 * model(x).norm()
    assert any("edited in place" in s for s in quantized.meta["reports"]["convert"].kept)


def test_a_write_into_an_input_still_reaches_the_caller():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x.relu_()).relu_())

    quantized = quantize_static(Writes().eval(), [torch.randn(8, 8)])
    x = torch.full((8, 8), -1.0)
    quantized(x)
    assert x.min() == 0
    assert [type(quantized.get_submodule(n)).__name__ for n in "ab"] == ["Int8Linear"] * 2


def test_a_layer_whose_weight_is_read_elsewhere_stays_float():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(x, self.a.weight * 2, self.a.bias) + self.a(x), self.a.weight.sum()

    model, x = Tied().eval(), torch.randn(8, 8)
    quantized = quantize_static(fxlab.symbolic_trace(model), [(x,)])
    torch.testing.assert_close(quantized(x), model(x))
    kept = quantized.meta["reports"]["convert"].kept
    assert any("reads the weights of a directly" in s for s in kept)


def test_a_layer_called_as_a_function_whose_weight_the_graph_writes_stays_float():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.ones(4, 8))

        def forward(self, x):
            self.w.mul_(2)
            return F.linear(x, self.w)

    model, x = Writes().eval(), torch.ones(2, 8)
    quantized = quantize_static(fxlab.symbolic_trace(model), [x])
    assert [quantized(x)[0, 0].item() for _ in range(2)] == [16, 32]
