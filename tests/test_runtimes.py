"""Lowered programs: the kit's models, precision, copies, threads, caches, and what is refused."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlab
from fxlab import models
from fxlab.core.errors import LoweringError
from fxlab.passes.partition import OperatorSupportBase, OpSupports
from fxlab.passes.quantize import quantize_static

pytest.importorskip("onnx")
from fxlab.backends import available_backends, converter, explain, lower
from fxlab.backends.registry import _REGISTRY
from fxlab.backends.runtimes import EngineOptions, _no_precision

HERE = [name for name, missing in available_backends().items() if missing is None]
backends = pytest.mark.parametrize("backend", HERE)


def _kit() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Each model of the kit with an input; small images keep the tests quick."""
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "MLP": (models.MLP(), torch.randn(4, 8)),
        "TransformerBlock": (models.TransformerBlock(), torch.randn(2, 6, 32)),
        "FusionCases": (models.FusionCases(), torch.randn(2, 4, 16, 16)),
        "resnet18": (models.resnet18(), torch.randn(2, 3, 64, 64)),
        "resnet50": (models.resnet50(), torch.randn(1, 3, 64, 64)),
        "LearningToPaintActor": (models.LearningToPaintActor(), torch.rand(2, 9, 128, 128)),
        "DeepRecommender": (models.DeepRecommender(200), torch.rand(4, 200)),
    }
    return {
        name: (models.small.randomize_batch_norms(model).eval(), x)
        for name, (model, x) in found.items()
    }


KIT = _kit()


@functools.cache
def _quantized(name: str) -> fxlab.GraphModule:
    model, x = KIT[name]
    return quantize_static(fxlab.symbolic_trace(model), [x])


def _distance(a: object, b: object) -> float:
    """max|a - b| / max|b| over all tensors of two results."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return max(float((p - q).abs().max().detach() / q.abs().max().detach()) for p, q in pairs)


@backends
@pytest.mark.parametrize("name", KIT)
def test_every_model_of_the_kit_is_lowered_whole_and_agrees_with_eager(
    name: str, backend: str
) -> None:
    model, x = KIT[name]
    gm = fxlab.symbolic_trace(model)
    lowered = lower(gm, [x], backend, threads=1)
    assert lowered.meta["reports"]["lower"].kept == []
    assert len(lowered.meta["partition_names"]) == 1
    with torch.inference_mode():
        assert _distance(lowered(x), model(x)) <= 1e-4


@backends
@pytest.mark.parametrize("name", KIT)
def test_the_quantized_models_are_lowered_whole_too(name: str, backend: str) -> None:
    """Codes may differ by one quantum, as two int8 kernels do; noise stays below 5 %."""
    quantized, x = _quantized(name), KIT[name][1]
    lowered = lower(quantized, [x], backend, threads=1)
    assert lowered.meta["reports"]["lower"].kept == []
    with torch.inference_mode():
        ours, theirs = lowered(x), quantized(x)
    noise = (ours - theirs).pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
    assert noise <= 0.05


@backends
def test_one_operation_declared_unsupported_splits_as_in_the_papers_example(backend: str) -> None:
    model, x = KIT["resnet18"]
    gm = fxlab.symbolic_trace(model)
    lowered = lower(
        gm, [x], backend, threads=1, support=OpSupports.decline_if_node_in_names({"fc"})
    )
    assert [n.name for n in lowered.graph.nodes] == ["x", "device_0", "fc", "output"]
    assert lowered.meta["reports"]["lower"]["reasons"] == {"fc": "named as one to leave out"}
    assert lowered.fc is model.fc
    with torch.inference_mode():
        assert _distance(lowered(x), model(x)) <= 1e-4


def test_unsupported_nodes_between_parts_run_in_pytorch() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        y = torch.special.i0(x + 1)
        return torch.relu(y.view(y.size(0) * 2, -1) * 3), x.size(1)

    gm, x = fxlab.symbolic_trace(program), torch.randn(2, 4)
    lowered = lower(gm, [x], threads=1)
    kinds = [n.target for n in lowered.graph.nodes if n.op.startswith("call")]
    assert kinds[0] == "device_0"
    assert torch.special.i0 in kinds
    assert "device_1" in kinds
    ours, eager = lowered(x), program(x)
    torch.testing.assert_close(ours[0], eager[0])
    assert ours[1] == eager[1] == 4


def test_small_parts_stay_in_pytorch_when_asked() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.special.i0(x + 1) * 2 + 3 - 4)
    lowered = lower(gm, [torch.ones(2)], threads=1, min_partition_size=2)
    names = [n.name for n in lowered.graph.nodes]
    assert names == ["x", "add", "special_i0", "device_0", "output"]


@backends
def test_a_lowered_module_pickles_and_copies_and_one_engine_serves_equal_parts(
    backend: str,
) -> None:
    model, x = KIT["MLP"]
    lowered = lower(fxlab.symbolic_trace(model), [x], backend, threads=1)
    loaded = pickle.loads(pickle.dumps(lowered))
    copied = copy.deepcopy(lowered)
    expected = lowered(x)
    assert torch.equal(loaded(x), expected)
    assert torch.equal(copied(x), expected)
    assert copied.device_0.engine is lowered.device_0.engine
    assert loaded.device_0.engine is lowered.device_0.engine
    assert "device_0" in lowered.code


@backends
def test_results_are_the_callers_own_memory(backend: str) -> None:
    gm, x = fxlab.symbolic_trace(lambda x: x * 2), torch.ones(3)
    lowered = lower(gm, [x], backend, threads=1)
    first = lowered(x)
    second = lowered(torch.full((3,), 5.0))
    assert torch.equal(first, torch.full((3,), 2.0))
    assert torch.equal(second, torch.full((3,), 10.0))


@backends
def test_threads_may_share_a_lowered_module(backend: str) -> None:
    gm = fxlab.symbolic_trace(lambda x: x * 2 + 1)
    lowered = lower(gm, [torch.ones(64)], backend, threads=1)
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((64,), float(number))
        for _ in range(50):
            if not torch.equal(lowered(x), x * 2 + 1):
                wrong.append(number)

    crew = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert wrong == []


@backends
def test_strided_and_offset_inputs_are_read_right(backend: str) -> None:
    gm = fxlab.symbolic_trace(lambda x: x + 1)
    x = torch.randn(4, 6)
    lowered = lower(gm, [x.t()[1:]], backend, threads=1)
    assert torch.equal(lowered(x.t()[1:]), x.t()[1:] + 1)


@backends
def test_a_wrong_shape_or_dtype_is_named(backend: str) -> None:
    gm = fxlab.symbolic_trace(lambda x: x + 1)
    lowered = lower(gm, [torch.ones(2, 3)], backend, threads=1)
    with pytest.raises(LoweringError, match=r"\[2, 4\].*built for.*\[2, 3\]"):
        lowered.device_0(torch.ones(2, 4))
    with pytest.raises(LoweringError, match=r"given \(str\)"):
        lowered.device_0("x")
    with pytest.raises(LoweringError, match=r"float64"):
        lowered.device_0(torch.ones(2, 3, dtype=torch.float64))


def test_gradients_are_refused_not_lost() -> None:
    lowered = lower(fxlab.symbolic_trace(lambda x: x * 2), [torch.ones(2)], threads=1)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(LoweringError, match="no_grad"):
        lowered.device_0(x)
    with torch.no_grad():
        assert torch.equal(lowered(x), torch.full((2,), 2.0))


def test_nested_results_come_back_in_their_form() -> None:
    def program(x: torch.Tensor) -> dict[str, object]:
        return {"sum": x + 1, "parts": [x * 2, (x - 1,)]}

    gm, x = fxlab.symbolic_trace(program), torch.ones(2)
    ours, eager = lower(gm, [x], threads=1)(x), program(x)
    assert pytree.tree_structure(ours) == pytree.tree_structure(eager)
    assert _distance(ours, eager) == 0


@pytest.mark.skipif("openvino" not in HERE, reason="openvino is not installed")
def test_bfloat16_is_used_where_the_cpu_has_it_and_refused_elsewhere() -> None:
    model, x = KIT["resnet18"]
    options = EngineOptions("openvino", "bf16")
    if _no_precision(options) is not None:
        with pytest.raises(LoweringError, match="bf16"):
            lower(model, [x], "openvino", precision="bf16")
        return
    lowered = lower(model, [x], "openvino", precision="bf16", threads=1)
    exact = lower(model, [x], "openvino", threads=1)
    with torch.inference_mode():
        reference = model(x)
        assert _distance(exact(x), reference) < 1e-4 < _distance(lowered(x), reference) < 0.05


def test_a_precision_that_a_backend_lacks_is_refused() -> None:
    with pytest.raises(LoweringError, match="f32"):
        lower(KIT["MLP"][0], [KIT["MLP"][1]], "onnxruntime", precision="bf16")
    with pytest.raises(LoweringError, match="precision"):
        lower(KIT["MLP"][0], [KIT["MLP"][1]], precision="int4")


@pytest.mark.skipif("openvino" not in HERE, reason="openvino is not installed")
def test_engines_are_kept_in_a_folder_and_those_of_another_version_are_not_read(
    tmp_path: Path,
) -> None:
    model, x = KIT["MLP"]
    first = lower(model, [x], "openvino", threads=1, cache_dir=str(tmp_path))
    assert not first.device_0.engine.from_cache
    expected = first(x)
    engine = first.device_0._build()
    assert engine.from_cache
    (note,) = tmp_path.glob("*.json")
    note.write_text(note.read_text().replace("openvino", "older"))
    rebuilt = first.device_0._build()
    assert not rebuilt.from_cache
    assert torch.equal(rebuilt([x])[0], expected)


@pytest.mark.skipif("openvino" not in HERE, reason="openvino is not installed")
def test_an_engine_from_the_folder_is_the_one_that_was_built_or_is_built_anew(
    tmp_path: Path,
) -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(),
        torch.randn(8, 64),
    )
    first = lower(model, [x], "openvino", threads=1, cache_dir=str(tmp_path)).device_0
    expected = first(x)
    engine = first._build()
    assert engine.from_cache
    for name in ("INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS"):
        built = first.engine.compiled.get_property(name)
        assert engine.compiled.get_property(name) == built
    assert torch.equal(engine([x])[0], expected)
    (blob,), (note,) = tmp_path.glob("*.blob"), tmp_path.glob("*.json")
    assert len(list(tmp_path.iterdir())) == 2
    whole = blob.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 64
    for path, content in (
        (blob, bytes(damaged)), (blob, whole[: len(whole) // 2]), (note, b'{"open'), (blob, b""),
    ):  # fmt: skip
        path.write_bytes(content)
        rebuilt = first._build()
        assert not rebuilt.from_cache
        assert torch.equal(rebuilt([x])[0], expected)
        assert first._build().from_cache
    with pytest.raises(LoweringError, match="cache_dir cannot be used"):
        lower(model, [x], "openvino", cache_dir=str(blob))


def test_tensorrt_without_a_gpu_says_what_is_missing() -> None:
    missing = available_backends()["tensorrt"]
    if missing is None:
        pytest.skip("TensorRT is here")
    with pytest.raises(LoweringError) as caught:
        lower(KIT["MLP"][0], [KIT["MLP"][1]], "tensorrt")
    assert "GPU" in str(caught.value) or "provider" in str(caught.value)
    assert "usable on this machine" in str(caught.value)
    assert not explain(KIT["MLP"][0], [KIT["MLP"][1]], "tensorrt")  # explaining needs no device


@pytest.mark.parametrize("option", ["min_partition_size", "threads"])
@pytest.mark.parametrize("number", ["a", 0, -1, 1.5])
def test_a_count_that_is_none_is_refused(option: str, number: Any) -> None:
    with pytest.raises(LoweringError, match=f"{option}=.* is no count"):
        lower(KIT["MLP"][0], [KIT["MLP"][1]], **{option: number})


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(LoweringError, match="no backend is called 'tpu'"):
        lower(KIT["MLP"][0], [KIT["MLP"][1]], "tpu")
    with pytest.raises(LoweringError, match="no backend is called 'tpu'"):
        explain(KIT["MLP"][0], [KIT["MLP"][1]], "tpu")


def test_what_the_engine_itself_refuses_is_an_error_with_a_way_out() -> None:
    lowered = lower(fxlab.symbolic_trace(lambda x: x + 1), [torch.ones(2)], threads=1)
    part = copy.deepcopy(lowered.device_0)
    part._model = b"not a model"
    with pytest.raises(LoweringError, match="does not accept this part"):
        part._build()


def test_dtypes_that_a_runtime_would_change_silently_stay_in_pytorch() -> None:
    gm, x = fxlab.symbolic_trace(lambda x: x + 1e-9), torch.ones(2, dtype=torch.float64)
    assert "float64" in explain(gm, [x], "openvino")["add"]
    assert not explain(gm, [x], "onnxruntime")
    assert torch.equal(lower(gm, [x], "onnxruntime", threads=1)(x), x + 1e-9)


def test_what_a_runtime_has_no_kernel_for_stays_in_pytorch_with_its_words() -> None:
    """onnxruntime has no tangent and no convolution of doubles; that is known when it is asked."""
    layers = [nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3), nn.ReLU()]
    model, x = nn.Sequential(*layers).double().eval(), torch.randn(1, 2, 9).double()
    lowered = lower(model, [x], "onnxruntime", threads=1)
    reasons = lowered.meta["reports"]["lower"]["reasons"]
    assert set(reasons) == {"_0", "_1"}
    assert "Conv" in reasons["_0"]
    with torch.no_grad():
        torch.testing.assert_close(lowered(x), model(x))
    with pytest.raises(LoweringError, match=r"_0 cannot be lowered to onnxruntime.*Conv"):
        lower(model, [x], "onnxruntime", threads=1, strict=True)


def test_a_converter_whose_result_is_not_eagers_is_found_out_and_left() -> None:
    gm, x = fxlab.symbolic_trace(lambda x: torch.special.i0e(x) + 1), torch.ones(2, 3)

    def no_rows(ctx: Any, x: Any) -> Any:  # how many there are is known when it has run
        total = ctx.op("ReduceSum", x, ctx.const([1], torch.int64), keepdims=0)
        none = ctx.op("Cast", ctx.op("Sub", total, total), to=9)
        return ctx.op("Compress", x, none, axis=0)

    wrong = {
        "fewer rows": no_rows,
        "another shape": lambda ctx, x: ctx.op("Flatten", x, axis=0),
        "invalid ONNX": lambda ctx, x: ctx.op("Concat", axis=0),
        "another dtype": lambda ctx, x: ctx.op("Cast", x, to=7),
    }
    for backend in HERE:
        for what, convert in wrong.items():
            converter(torch.special.i0e)(convert)
            try:
                lowered = lower(gm, [x], backend, threads=1)
            finally:
                del _REGISTRY[torch.special.i0e]
            assert "special_i0e" in lowered.meta["reports"]["lower"]["reasons"], what
            torch.testing.assert_close(lowered(x), gm(x))


@backends
def test_a_wrong_number_is_found_where_it_is_made_and_named(backend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.special.i0e(x * 2) + 1
        return y.sigmoid() * 3

    gm, x = fxlab.symbolic_trace(program), torch.randn(2, 3)
    converter(torch.special.i0e)(lambda ctx, x: ctx.op("Exp", ctx.op("Neg", x)))
    try:
        lowered = lower(gm, [x], backend, threads=1)
        with pytest.raises(LoweringError, match=r"a value of 'special_i0e' is .*, in PyTorch "):
            lower(gm, [x], backend, threads=1, strict=True)
    finally:
        del _REGISTRY[torch.special.i0e]
    assert set(lowered.meta["reports"]["lower"]["reasons"]) == {"special_i0e"}
    torch.testing.assert_close(lowered(x), program(x))


@backends
@pytest.mark.parametrize("read", ["sum", "mean", "amax"])
def test_what_an_engine_fuses_wrongly_is_left_to_pytorch(read: str, backend: str) -> None:
    """OpenVINO adds only the first number of the vector here."""
    b = torch.randn(5)
    gm = fxlab.symbolic_trace(lambda x: (getattr(x, read)(-1) + b).relu())
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(lower(gm, [x], backend, threads=1)(x), gm(x))
    layer = nn.Bilinear(3, 4, 5).eval()
    pair = [torch.randn(2, 3), torch.randn(2, 4)]
    with torch.no_grad():
        torch.testing.assert_close(lower(layer, pair, backend, threads=1)(*pair), layer(*pair))


@backends
def test_what_is_only_noise_in_pytorch_too_is_no_difference(backend: str) -> None:
    gm = fxlab.symbolic_trace(nn.LayerNorm(7).eval())
    assert (
        not lower(gm, [torch.full((2, 7), 0.3)], backend, threads=1).meta["reports"]["lower"].kept
    )


@backends
def test_a_product_of_one_number_does_not_end_the_process(backend: str) -> None:
    for program in (
        lambda a, b: torch.tensordot(a, b, 2),
        lambda a, b: (a.reshape(1, -1) @ b.reshape(-1, 1)).reshape(()),
        lambda a, b: (a.reshape(1, -1) @ b.reshape(-1, 1)).view([]),
    ):
        a, b = torch.randn(3, 3), torch.randn(3, 3)
        lowered = lower(fxlab.symbolic_trace(program), [a, b], backend, threads=1, strict=True)
        torch.testing.assert_close(lowered(a, b), program(a, b))


@backends
def test_a_result_may_be_none(backend: str) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.inner(x, x, x, need_weights=False)

    model, x = Attends().eval(), torch.randn(3, 2, 4)
    lowered = lower(model, [x], backend, threads=1, strict=True)
    with torch.no_grad():
        for module in (lowered, pickle.loads(pickle.dumps(lowered))):
            ours, none = module(x)
            assert none is None
            torch.testing.assert_close(ours, model(x)[0])


@backends
def test_a_view_that_negates_is_read_with_its_sign(backend: str) -> None:
    x = torch.randn(100_000)
    lowered = lower(fxlab.symbolic_trace(lambda x: x + 1), [x], backend, threads=1)
    assert torch.equal(lowered(torch._neg_view(x)), 1 - x)


def test_large_parts_of_equal_weights_do_not_share_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fxlab.backends.runtimes.EXTERNAL_DATA_BYTES", 0)
    w, x = torch.randn(3), torch.randn(3)
    lowered = [
        lower(fxlab.symbolic_trace(program), [x], threads=1)
        for program in (lambda x: x + w, lambda x: x * w, lambda x: x * w)
    ]
    assert torch.equal(lowered[0](x), x + w)
    assert torch.equal(lowered[1](x), x * w)
    assert lowered[1].device_0.engine is lowered[2].device_0.engine


def test_a_support_that_raises_and_a_runtime_that_cannot_be_imported_are_said(
    tmp_path: Path,
) -> None:
    class Broken(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: Any) -> bool:
            return node.meta["nothing"]

    with pytest.raises(LoweringError, match=r"support= raised KeyError.*relu"):
        lower(fxlab.symbolic_trace(lambda x: x.relu()), [torch.ones(2)], support=Broken())
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("raise OSError('its library is gone')")
    code = "from fxlab.backends import available_backends as a; print(a()['onnxruntime'])"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert "importing onnxruntime fails: OSError: its library is gone" in done.stdout


@pytest.mark.skipif("openvino" not in HERE, reason="openvino is not installed")
def test_numbers_beyond_24_bits_and_empty_tensors_are_kept_from_openvino() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) % 1000)
    wide = torch.tensor([123_456_789, 16_777_217])
    assert "beyond 24 bits" in explain(gm, [wide], "openvino")["relu"]
    assert torch.equal(lower(gm, [wide], "openvino", threads=1)(wide), wide % 1000)
    assert "no elements" in explain(gm, [torch.ones(0, 2)], "openvino")["relu"]
    lowered = lower(gm, [torch.tensor([1, 2])], "openvino", threads=1, dynamic_batch=True)
    assert lowered(torch.tensor([1, -2, 1003])).tolist() == [1, 0, 3]
    for given in (wide, wide.int()):
        other = lower(gm, [given % 7], "openvino", threads=1)
        with pytest.raises(LoweringError, match="beyond 24 bits"):
            other(given)
    with pytest.raises(LoweringError, match="beyond 24 bits"):
        lowered(wide)
    with pytest.raises(LoweringError, match="no elements"):
        lowered(wide[:0])


@backends
def test_named_results_come_back_by_name_and_pickle(backend: str) -> None:
    gm = fxlab.symbolic_trace(lambda x: (torch.sort(x), x.max(1).values))
    x = torch.randn(3, 4)
    lowered = lower(gm, [x], backend, threads=1, strict=True)
    for module in (lowered, pickle.loads(pickle.dumps(lowered))):
        found, largest = module(x)
        assert torch.equal(found.indices, torch.sort(x).indices)
        assert torch.equal(largest, x.amax(1))


def test_the_report_has_parts_seconds_and_reasons() -> None:
    gm = fxlab.symbolic_trace(lambda x: torch.special.i0(x + 1) + 2)
    report = lower(gm, [torch.ones(2)], threads=1).meta["reports"]["lower"]
    assert set(report["seconds"]) == {"device_0", "device_1"}
    assert "special_i0" in report["reasons"]
    assert report["parts"]["device_0"] == {"nodes": 1, "inputs": {"x": 8}, "outputs": {"add": 8}}
    assert any("run by onnxruntime in f32" in line for line in report.changed)


def test_a_torch_fx_module_is_taken_too() -> None:
    import torch.fx

    model, x = KIT["MLP"]
    lowered = lower(torch.fx.symbolic_trace(model), [x], threads=1)
    assert _distance(lowered(x), model(x)) <= 1e-4


@backends
def test_shapes_and_cost_of_a_lowered_program_need_no_data(backend: str) -> None:
    model, x = KIT["MLP"]
    gm = fxlab.symbolic_trace(model)
    for dynamic in (False, True):
        lowered = lower(gm, [x], backend, threads=1, dynamic_batch=dynamic)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            result = lowered(mode.from_tensor(x))
        assert (result.shape, result.dtype) == (model(x).shape, model(x).dtype)
