"""A Graph becomes ONNX node by node; what cannot is said with its reason and line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab import models
from fxlab.core.errors import LoweringError
from fxlab.core.purity import pure
from fxlab.passes import split_module

onnx = pytest.importorskip("onnx")
from fxlab.backends import (  # noqa: E402  (the package needs onnx)
    Unsupported,
    available_backends,
    converter,
    explain,
    lower,
    to_onnx,
)
from fxlab.backends.registry import _REGISTRY, find_converter  # noqa: E402


def _store(x: torch.Tensor, index: object, value: torch.Tensor) -> torch.Tensor:
    x[index] = value
    return x


def _types(model: object) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_each_node_becomes_onnx_nodes_in_its_order_and_carries_its_name() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1) * x)
    model = to_onnx(gm, [torch.ones(2)])
    assert _types(model) == ["Add", "Relu", "Mul"]
    assert [node.name for node in model.graph.node] == ["add", "relu", "mul"]


def test_the_opset_is_pinned_and_the_checker_accepts_the_model() -> None:
    model = to_onnx(fxlab.symbolic_trace(models.MLP().eval()), [torch.ones(2, 8)])
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]
    onnx.checker.check_model(model, full_check=True)


def test_weights_are_initializers_and_a_shared_weight_is_stored_once() -> None:
    layer = nn.Linear(64, 64)
    gm = fxlab.symbolic_trace(nn.Sequential(layer, nn.ReLU(), layer))
    model = to_onnx(gm, [torch.ones(3, 64)])
    sizes = sorted(len(tensor.raw_data) for tensor in model.graph.initializer)
    assert sizes == [64 * 4, 64 * 64 * 4]


def test_what_depends_on_no_input_is_computed_while_lowering() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.exp(self.w) * 2

    model = to_onnx(fxlab.symbolic_trace(Model()), [torch.ones(3)])
    assert _types(model) == ["Add"]


def test_weights_go_to_a_file_beside_the_model_when_they_are_large(tmp_path: Path) -> None:
    gm = fxlab.symbolic_trace(nn.Linear(100, 100).eval())
    path = tmp_path / "model.onnx"
    x = torch.randn(2, 100)
    to_onnx(gm, [x], path, external_data_bytes=1000)
    assert (tmp_path / "model.onnx.data").stat().st_size >= 40_000
    assert path.stat().st_size < 2000
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), gm(x).detach())


def test_a_student_adds_a_converter_in_a_cell() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.special.i0e(x) + 1)
    assert "no converter for special_i0e" in str(explain(gm, [torch.ones(2)]))
    try:

        @converter(torch.special.i0e)
        def i0e(ctx: object, x: object) -> object:
            return ctx.op("Exp", ctx.op("Neg", x))

        assert _types(to_onnx(gm, [torch.ones(2)])) == ["Neg", "Exp", "Add"]
        assert not explain(gm, [torch.ones(2)])
    finally:
        del _REGISTRY[torch.special.i0e]


def test_a_later_converter_replaces_an_earlier_one_and_methods_go_by_name() -> None:
    before = find_converter("call_method", "relu")
    try:
        converter("relu")(lambda ctx, x: ctx.op("Identity", x))
        gm = fxlab.symbolic_trace(lambda x: x.relu())
        assert _types(to_onnx(gm, [torch.ones(2)])) == ["Identity"]
    finally:
        converter("relu")(before)
    assert find_converter("call_method", "relu_") is before  # in place: the same converter
    assert find_converter("call_function", torch.ops.aten.relu.default) is before


def test_a_module_without_converter_is_lowered_by_running_its_code() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)).eval()
    gm = fxlab.symbolic_trace(model)
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    found = _types(to_onnx(gm, [torch.randn(3, 2, 8)]))
    assert found.count("LayerNormalization") == 2
    assert "Softmax" in found


@pytest.mark.parametrize(
    ("name", "program", "inputs", "reason"),
    [
        ("no converter", lambda x: torch.special.i0(x), [torch.ones(2)], "no converter"),
        ("mask as index", lambda x: x[x > 0], [torch.ones(2)], "boolean mask"),
        ("where alone", lambda x: torch.where(x > 0)[0], [torch.ones(2)], "depends on values"),
        ("nonzero", lambda x: torch.nonzero(x), [torch.ones(2)], "no converter"),
        ("complex", lambda x: torch.abs(x) + 1, [torch.ones(2, dtype=torch.complex64)], "complex"),
        ("random", lambda x: x + torch.rand(2), [torch.ones(2)], "random"),
        ("a write to an input", lambda x: x.add_(1) * 2, [torch.ones(2)], "belongs to the caller"),
        ("indices", lambda x: F.max_pool2d(x, 2, return_indices=True), [torch.ones(1, 1, 4, 4)],
         "return_indices"),
        pytest.param(
            "proj_size", nn.LSTM(3, 4, proj_size=2), [torch.ones(5, 2, 3)], "proj_size",
            marks=pytest.mark.filterwarnings("ignore:LSTM with projections"),
        ),
        ("a mask's numbers", lambda x, y: _store(x * 1, x > 0, y), [torch.ones(3), torch.ones(3)],
         "as many numbers as a mask has entries"),
        ("printing", lambda x: (print(x), x + 1)[1], [torch.ones(2)], "world"),
    ],
)  # fmt: skip
def test_what_cannot_be_lowered_has_a_reason(
    name: str, program: object, inputs: list[torch.Tensor], reason: str
) -> None:
    gm = fxlab.symbolic_trace(nn.Sequential(program) if isinstance(program, nn.Module) else program)
    if name == "printing":
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(print, ("hello",))
    found = explain(gm, inputs)
    assert any(reason in text for text in found.values()), dict(found)
    with pytest.raises(LoweringError):
        lower(gm, inputs, strict=True)


def test_the_strict_error_names_node_line_reason_and_the_ways_out() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.special.i0(x))
    with pytest.raises(LoweringError) as caught:
        lower(gm, [torch.ones(2)], strict=True)
    text = str(caught.value)
    assert "special_i0" in text
    assert "test_onnx.py" in text
    assert "strict=False" in text
    assert isinstance(caught.value, RuntimeError)


def _lowered_as_eager(program: Callable[..., Any], *inputs: torch.Tensor) -> set[str]:
    """Lower and compare, results and inputs; return the nodes that stayed in PyTorch."""
    gm = fxlab.symbolic_trace(program)
    lowered = lower(gm, inputs, threads=1)
    ours, eager = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(lowered(*ours), program(*eager))
    torch.testing.assert_close(ours, eager)
    return set(lowered.meta["reports"]["lower"]["reasons"])


def test_a_write_in_place_is_lowered_when_no_other_view_shows_it() -> None:
    def unseen(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y += x
        return y.relu_()

    def read_by_its_name(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y * 2
        y.add_(5)
        y[0] = 3
        return y + z

    def a_row_at_a_time(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[0] += x[1]
        y[1].copy_(x[0])
        y[:, 1:].mul_(2)
        return y

    for program in (unseen, read_by_its_name, a_row_at_a_time):
        assert _lowered_as_eager(program, torch.randn(2, 3)) == set()


def test_a_write_that_another_view_shows_stays_and_so_do_the_views() -> None:
    """An engine would return a copy in place of a view, and the write would be lost."""

    def view_first(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y.view(-1)
        y.add_(5)
        return z * 2

    def through_the_view(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.t().add_(5)
        return y * 2

    def of_the_input(x: torch.Tensor) -> torch.Tensor:
        x.t().mul_(2)
        return x + 1

    x = torch.randn(3, 3)
    assert _lowered_as_eager(view_first, x) == {"view", "add_"}
    assert _lowered_as_eager(through_the_view, x) == {"t", "add_"}
    assert _lowered_as_eager(of_the_input, x) == {"t", "mul_"}
    gm = fxlab.symbolic_trace(view_first)
    assert explain(gm, [x])["view"] == "may be a view of what add_ may write to"


def test_a_view_of_what_unknown_code_may_write_to_stays() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y.view(-1)
        fill_with_ones(y)
        return z * 2

    with fxlab.wrapped(fill_with_ones):
        assert _lowered_as_eager(program, torch.randn(2, 2)) == {"view", "fill_with_ones"}


def fill_with_ones(x: torch.Tensor) -> None:
    x.fill_(1)


def test_a_copy_that_would_be_a_view_of_an_engines_result_stays_a_copy() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.t() * 1  # as x.t() in memory, so that reshape copies
        z = y.reshape(-1)
        z.add_(1)
        return y, z

    assert "mul" in _lowered_as_eager(program, torch.randn(2, 3))


def test_a_write_through_a_list_is_seen() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 1
        before = y + 0
        torch._foreach_add_([y, x], 1.0)
        return before, y + 0, x * 2

    x = torch.randn(3)
    assert "_foreach_add_" in _lowered_as_eager(program, x)
    gm = fxlab.symbolic_trace(program)
    places = {"mul": 0, "add": 0, "_foreach_add_": 1, "add_1": 2, "mul_1": 2}
    parts = split_module(gm, None, lambda n: places[n.name])
    torch.testing.assert_close(parts(x.clone()), program(x.clone()))


def test_a_method_that_changes_only_the_view_stores_nothing() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].t_()
        return y

    _lowered_as_eager(program, torch.randn(2, 3, 3))


def test_a_constant_keeps_its_value_for_those_who_read_it_before_a_write() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.ones(x.shape[0])
        before = x + z
        return before, z.add_(1) * x

    assert _lowered_as_eager(program, torch.randn(3)) == set()


def test_counting_up_a_size_changes_no_other_name_of_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        m = n
        n += 1
        return x * n - m

    _lowered_as_eager(program, torch.randn(3))


def test_lowering_leaves_the_buffers_of_a_model_that_writes_to_them() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    model = Counts()
    lowered = lower(fxlab.symbolic_trace(model), [torch.ones(2)], threads=1)
    assert model.count == 0
    lowered(torch.ones(2))
    assert lowered(torch.ones(2)).tolist() == [3, 3]


def test_a_leaf_modules_own_writes_are_kept() -> None:
    @pure
    class Leaf(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            y.add_(1)
            before = y + 0
            y.masked_fill_(y > 0, 3.0)
            x.sub_(1)
            return before, y

    class LeafTracer(fxlab.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return isinstance(m, Leaf)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + 1
            a, b = self.leaf(y)
            return a, b, y + self.leaf(x)[0]

    model, x = Model(), torch.randn(5)
    gm = fxlab.GraphModule(model, LeafTracer().trace(model))
    lowered = lower(gm, [x], threads=1, strict=True)
    torch.testing.assert_close(lowered(x.clone()), model(x.clone()))


def test_recurrent_layers_take_any_batch() -> None:
    model = nn.Sequential(nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)).eval()
    lowered = lower(model, [torch.randn(2, 5, 3)], threads=1, dynamic_batch=True, strict=True)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 5, 3)
        with torch.no_grad():
            torch.testing.assert_close(lowered(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_of_a_recurrent_layer_that_is_called_twice_are_stored_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(self.gru(x)[0])[0]

    model = to_onnx(fxlab.symbolic_trace(Model()), [torch.randn(3, 1, 64)])
    assert _types(model).count("GRU") == 2
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    assert weights < 4 * (2 * 3 * 64 * 64 + 6 * 64) + 1000


def test_a_model_in_train_mode_is_refused_with_the_remedy() -> None:
    gm = fxlab.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(LoweringError, match="eval"):
        lower(gm, [torch.ones(2, 4)])
    assert gm.get_submodule("1").num_batches_tracked == 0


def test_the_users_inputs_weights_and_random_state_are_untouched() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + torch.rand(2)

    x, state = torch.ones(2), torch.get_rng_state()
    gm = fxlab.symbolic_trace(program)
    before = str(gm.graph)
    explain(gm, [x])
    assert torch.equal(x, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert str(gm.graph) == before
    assert not any("tensor_meta" in n.meta for n in gm.graph.nodes)


def test_sizes_that_follow_the_batch_are_computed_by_the_engine() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        n, c = x.shape[0], x.size(1)
        y = x.view(n, c // 2, 2).transpose(0, 1).reshape(-1, n * 2)
        return y.flatten(0) + torch.zeros(n * c) + torch.arange(n * c)

    gm = fxlab.symbolic_trace(program)
    lowered = lower(gm, [torch.randn(3, 4)], dynamic_batch=True, strict=True, threads=1)
    for batch in (1, 3, 8):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(lowered(x), program(x))
    model = lowered.device_0.onnx_model
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[: x.shape[0] // 2],  # as large for 4 rows as for 5
        lambda x: x.roll(-1, 0),
        lambda x: torch.take_along_dim(x, x.argsort(0), 0),
        lambda x: x.mean(0) * x.shape[0],
        lambda x: F.one_hot(x.argmax(1), 4),
    ],
)
def test_no_size_of_the_example_is_left_in_an_engine(program: Callable[..., Any]) -> None:
    gm = fxlab.symbolic_trace(program)
    for backend in (name for name, missing in available_backends().items() if missing is None):
        lowered = lower(gm, [torch.randn(4, 4)], backend, threads=1, dynamic_batch=True)
        for batch in (2, 4, 7):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(lowered(x), program(x))


def test_what_would_fix_a_dynamic_size_is_left_to_pytorch_instead() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.split(x + 1, 1)[0] * 2)
    found = explain(gm, [torch.ones(3, 2)], dynamic_batch=True)
    assert "batch" in found["split"]
    lowered = lower(gm, [torch.ones(3, 2)], dynamic_batch=True, threads=1)
    x = torch.randn(5, 2)
    torch.testing.assert_close(lowered(x), (x[:1] + 1) * 2)


def test_a_size_that_follows_the_batch_only_within_limits_is_left_to_pytorch() -> None:
    programs: list[Callable[..., Any]] = [
        lambda x: x[:4].mean(0) + x[:4].sum(0) / x[:4].size(0),
        lambda x: x[:4].reshape(x[:4].size(0), -1) * 2,
        lambda x: x[4:] * 2,
        lambda x: x.sum() * ((x.size(0) - 4) // 2),
        lambda x: x * (x.size(0) > 10),
        lambda x: (x * 2).squeeze() + 1,
        lambda x: (x * 2).squeeze(0) + 1,
        lambda x: x.split(2)[0] * 2,
        lambda x: x.mean(0),
    ]
    for example in (1, 2, 8):
        for program in programs:
            gm = fxlab.symbolic_trace(program)
            lowered = lower(gm, [torch.randn(example, 2)], threads=1, dynamic_batch=True)
            for batch in (1, 2, 3, 12):
                x = torch.randn(batch, 2)
                torch.testing.assert_close(lowered(x), program(x))
    nothing = torch.zeros(0, 2)
    assert lowered(nothing).isnan().all()


def test_sizes_that_depend_on_values_stay_in_pytorch() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nonzero(x) + 1
        return x[x > 0] * 1 + 2, y * 2, x.masked_select(x > 0).sum() * 3

    gm = fxlab.symbolic_trace(program)
    for backend in (name for name, missing in available_backends().items() if missing is None):
        lowered = lower(gm, [torch.tensor([1.0, -1.0])], backend, threads=1)
        for x in (torch.tensor([1.0, 2.0]), torch.tensor([0.0, -1.0])):
            torch.testing.assert_close(lowered(x), program(x))


class _CountsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.c += 1
        return x + 0


def count_up(x: torch.Tensor) -> None:
    x.data.add_(1)


class _Changes(nn.Module):
    """Reads in four ways what it changes in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = _CountsInside()
        self.register_buffer("count", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)
        self.table = nn.Embedding(3, 2, max_norm=0.1)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.leaf(x) * self.leaf.c
        count_up(self.count)
        F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        rows = self.table(i)
        return (
            y,
            x * self.count,
            x * self.norm.running_mean,
            self.norm(x),
            rows,
            self.table.weight + 1,
        )


def test_state_that_the_program_writes_to_is_not_baked_into_an_engine() -> None:
    class Leaves(fxlab.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return isinstance(m, _CountsInside) or super().is_leaf_module(m, qualified_name)

    model = _Changes().eval()
    with torch.no_grad():
        model.table.weight.fill_(1.0)
    with fxlab.wrapped(count_up):
        gm = fxlab.GraphModule(model, Leaves().trace(model))
    x, i = torch.arange(4.0).reshape(2, 2), torch.tensor([0, 1])
    for backend in (name for name, missing in available_backends().items() if missing is None):
        reference = copy.deepcopy(model)
        with torch.no_grad():
            lowered = copy.deepcopy(lower(gm, [x, i], backend, threads=1))
            reasons = lowered.meta["reports"]["lower"]["reasons"]
            assert {"mul", "mul_1", "mul_2", "norm", "add"} <= set(reasons)
            assert "may write to" in reasons["mul"]
            for _ in range(3):
                torch.testing.assert_close(lowered(x, i), reference(x, i))


def test_positions_outside_are_errors_in_onnxruntime_as_they_are_in_pytorch() -> None:
    pytest.importorskip("onnxruntime")
    table, inside = torch.randn(5, 2), torch.tensor([0, 1])

    def write(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[i] = 9.0
        return y

    programs: list[Callable[..., Any]] = [
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.scatter(0, i[:, None], 1.0),
        lambda x, i: x.index_add(0, i, x[:2]),
        lambda x, i: x[i],
        lambda x, i: x[i, i],
        lambda x, i: F.cross_entropy(x[:2], i),
        lambda x, i: F.one_hot(i, 3),
        write,
    ]
    for program in programs:
        lowered = lower(fxlab.symbolic_trace(program), [table, inside], threads=1, strict=True)
        for places in ([-1, 0], [-2, 1], [7, 1], [-7, 1]):
            i = torch.tensor(places)
            try:
                expected = program(table, i)
            except (IndexError, RuntimeError):
                with pytest.raises(Exception, match=r"ONNXRuntimeError|out of bounds"):
                    lowered(table, i)
            else:
                torch.testing.assert_close(lowered(table, i), expected)


def test_explain_lists_nodes_with_their_source_lines() -> None:
    found = explain(models.MLP().eval(), [torch.ones(2, 8)])
    assert str(found) == f"{found.total} of {found.total} nodes can be lowered"
    one = explain(fxlab.symbolic_trace(lambda x: torch.special.i0(x)), [torch.ones(2)])
    assert "0 of 1 nodes" in str(one)
    assert "test_onnx.py:" in str(one)


def test_unsupported_raised_by_a_students_converter_is_the_reason() -> None:
    try:

        @converter(torch.special.i1)
        def i1(ctx: object, x: object) -> object:
            raise Unsupported("only on Tuesdays")

        gm = fxlab.symbolic_trace(lambda x: torch.special.i1(x))
        assert explain(gm, [torch.ones(2)])["special_i1"] == "only on Tuesdays"
    finally:
        del _REGISTRY[torch.special.i1]


def test_a_converter_with_a_bug_is_reported_not_hidden() -> None:
    try:

        @converter(torch.special.i1)
        def i1(ctx: object, x: object) -> object:
            return ctx.nothing

        gm = fxlab.symbolic_trace(lambda x: torch.special.i1(x))
        assert "AttributeError" in explain(gm, [torch.ones(2)])["special_i1"]
    finally:
        del _REGISTRY[torch.special.i1]
