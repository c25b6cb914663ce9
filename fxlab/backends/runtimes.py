"""Which engines run a lowered part, and how do tensors get in and out without a copy?

Section 6.4 of the paper has one device, TensorRT. Here one ONNX model goes to onnxruntime,
OpenVINO or (through onnxruntime's provider) TensorRT. A `LoweredModule` stands in the GraphModule
where the part stood: tensors in, tensors out, the memory of PyTorch handed to the engine as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxlab.backends.onnx import EXTERNAL_DATA_BYTES, EngineError, numpy_dtype, save_model
from fxlab.core.errors import LoweringError

__all__ = [
    "EngineOptions",
    "LoweredModule",
    "available_backends",
    "beyond_float32",
    "check_backend",
]

BACKENDS = ("onnxruntime", "openvino", "tensorrt")
PRECISIONS = ("f32", "bf16", "f16")
COPIED_BYTES = 1 << 18


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        backend: ``"onnxruntime"``, ``"openvino"`` or ``"tensorrt"``.
        precision: ``"f32"``, ``"bf16"`` or ``"f16"``: what it may compute in; inputs and outputs
            keep their dtypes.
        threads: number of threads inside the engine.
        cache_dir: folder for engines that take long to build, None for none.
    """

    backend: str = "onnxruntime"
    precision: str = "f32"
    threads: int = 1
    cache_dir: str | None = None


def available_backends() -> dict[str, str | None]:
    """Return each backend -> None when it can be used here, or what is missing.

    Example:
        >>> sorted(available_backends())
        ['onnxruntime', 'openvino', 'tensorrt']
    """
    return {name: _missing(name) for name in BACKENDS}


def _missing(backend: str) -> str | None:
    package = "openvino" if backend == "openvino" else "onnxruntime"
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed: pip install 'fxlab[lower]'"
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken installation may raise anything
        return f"importing {package} fails: {type(error).__name__}: {error}"
    if backend == "tensorrt":
        if not torch.cuda.is_available():
            return "TensorRT needs an NVIDIA GPU and a CUDA build of torch; none is here"
        import onnxruntime

        if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
            return "this onnxruntime has no TensorRT provider: pip install onnxruntime-gpu tensorrt"
    return None


def check_backend(options: EngineOptions) -> None:
    """Raise LoweringError when the backend or the precision cannot be had on this machine."""
    if options.backend not in BACKENDS:
        raise LoweringError(
            f"no backend is called {options.backend!r}", expected=f"one of {', '.join(BACKENDS)}"
        )
    if (missing := _missing(options.backend)) is not None:
        usable = [name for name in BACKENDS if _missing(name) is None]
        raise LoweringError(
            f"{options.backend} cannot be used here: {missing}",
            hint=f"usable on this machine: {', '.join(usable) or 'none'}",
        )
    if options.precision not in PRECISIONS:
        raise LoweringError(
            f"no precision is called {options.precision!r}", expected=f"one of {PRECISIONS}"
        )
    if options.precision != "f32" and (why := _no_precision(options)) is not None:
        raise LoweringError(
            f"{options.backend} cannot compute in {options.precision} here: {why}",
            hint="use precision='f32'",
        )
    if options.cache_dir is not None:
        try:
            Path(options.cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoweringError(
                f"cache_dir cannot be used: {error}", hint="give a folder that can be written to"
            ) from error


def _no_precision(options: EngineOptions) -> str | None:
    if options.backend == "openvino":
        import openvino

        able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        wanted = {"bf16": "BF16", "f16": "FP16"}[options.precision]
        return None if wanted in able else f"this CPU offers {', '.join(able)}"
    if options.backend == "onnxruntime":
        return "its CPU kernels compute in f32"
    return None if options.precision == "f16" else "TensorRT's provider is asked for f16 only"


class _OnnxRuntimeEngine:
    """A session of onnxruntime; inputs and outputs are bound to torch's memory."""

    def __init__(self, model: bytes, path: str | None, options: EngineOptions) -> None:
        import onnxruntime

        self.version = onnxruntime.__version__
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 4  # what fails is raised, too
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers: list[Any] = ["CPUExecutionProvider"]
        if options.backend == "tensorrt":
            engine = {"trt_fp16_enable": options.precision == "f16"}
            if options.cache_dir is not None:
                engine |= {"trt_engine_cache_enable": True}
                engine |= {"trt_engine_cache_path": options.cache_dir}
            providers = [("TensorrtExecutionProvider", engine), "CUDAExecutionProvider", *providers]
        self.session = onnxruntime.InferenceSession(
            path if path is not None else model, settings, providers=providers
        )
        self.device = "cuda" if options.backend == "tensorrt" else "cpu"
        self._types: list[tuple[str, Any]] = []
        self._out: list[tuple[str, tuple[int, ...] | None, torch.dtype, Any]] = []

    def describe(
        self,
        inputs: Sequence[tuple[str, torch.dtype]],
        outputs: Sequence[tuple[str, tuple[int, ...] | None, torch.dtype]],
    ) -> None:
        """Tell the engine names and dtypes; an output's shape is None where it may vary."""
        self._types = [(name, _bind_type(dtype)) for name, dtype in inputs]
        self._out = [(name, shape, dtype, _bind_type(dtype)) for name, shape, dtype in outputs]
        self._names = [name for name, _ in inputs]
        size = sum(math.prod(s or ()) * d.itemsize for _, s, d in outputs)
        numpy_knows = all(
            numpy_dtype(d) is not None
            for d in (*dict(inputs).values(), *(d for _, _, d in outputs))
        )
        # Binding costs more than copying a small result does.
        self._copies = self.device == "cpu" and numpy_knows and size < COPIED_BYTES

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._copies:
            feed = {n: t.numpy() for n, t in zip(self._names, tensors, strict=True)}
            return [torch.from_numpy(value) for value in self.session.run(None, feed)]
        binding = self.session.io_binding()
        device = self.device
        for (name, kind), tensor in zip(self._types, tensors, strict=True):
            binding.bind_input(name, device, 0, kind, tensor.shape, tensor.data_ptr())
        results: list[torch.Tensor | None] = []
        for name, shape, dtype, kind in self._out:
            if shape is None:
                results.append(None)
                binding.bind_output(name, device, 0)
            else:
                made = torch.empty(shape, dtype=dtype, device=device)
                results.append(made)
                binding.bind_output(name, device, 0, kind, shape, made.data_ptr())
        self.session.run_with_iobinding(binding)
        if None not in results:
            return results  # type: ignore[return-value]
        values = binding.get_outputs()
        return [
            torch.from_numpy(value.numpy()) if made is None else made
            for made, value in zip(results, values, strict=True)
        ]


def _bind_type(dtype: torch.dtype) -> Any:
    kind = numpy_dtype(dtype)
    return onnx.TensorProto.BFLOAT16 if kind is None else kind.type


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that other processes see either not at all or whole."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class _OpenVinoEngine:
    """A compiled model of OpenVINO; one request per thread, its tensors lie in torch's memory."""

    device = "cpu"

    def __init__(self, model: bytes, path: str | None, options: EngineOptions) -> None:
        import openvino

        self.version = openvino.__version__
        core = openvino.Core()
        settings = {
            "INFERENCE_NUM_THREADS": options.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": options.precision,
        }
        self.from_cache = False
        if options.cache_dir is None:
            source = core.read_model(path) if path is not None else core.read_model(model)
            self.compiled = core.compile_model(source, "CPU", settings)
        else:
            self.compiled = self._cached(core, model, path, settings, Path(options.cache_dir))
        self._tensor = openvino.Tensor
        self._local = threading.local()
        self._out: list[tuple[str, tuple[int, ...] | None, torch.dtype]] = []

    def _cached(
        self, core: Any, model: bytes, path: str | None, settings: dict[str, Any], folder: Path
    ) -> Any:
        """Import the engine from `folder`, or build and store it.

        One of another version or with other settings, one that is damaged or half written and one
        that OpenVINO cannot read is built anew.
        """
        key = hashlib.sha256(model + repr(sorted(settings.items())).encode()).hexdigest()
        blob, note = folder / f"{key}.blob", folder / f"{key}.json"
        header = {"openvino": self.version, "settings": settings}
        try:
            stored = blob.read_bytes()
            checksum = hashlib.sha256(stored).hexdigest()
            if json.loads(note.read_text("utf-8")) == header | {"sha256": checksum}:
                compiled = core.import_model(stored, "CPU", settings)
                self.from_cache = True
                return compiled
        except (OSError, ValueError, RuntimeError):
            pass
        source = core.read_model(path) if path is not None else core.read_model(model)
        compiled = core.compile_model(source, "CPU", settings)
        stream = io.BytesIO()
        compiled.export_model(stream)
        made = stream.getvalue()
        checksum = hashlib.sha256(made).hexdigest()
        _write_whole(blob, made)
        _write_whole(note, json.dumps(header | {"sha256": checksum}).encode())
        return compiled

    def describe(
        self,
        inputs: Sequence[tuple[str, torch.dtype]],
        outputs: Sequence[tuple[str, tuple[int, ...] | None, torch.dtype]],
    ) -> None:
        """Tell the engine the outputs' shapes (None where one may vary) and dtypes."""
        order = {name: i for i, port in enumerate(self.compiled.inputs) for name in port.names}
        self._order = [order.get(name) for name, _ in inputs]  # OpenVINO drops inputs unread
        fixed = [port.partial_shape.is_static for port in self.compiled.outputs]
        self._out = [
            (name, shape if is_fixed else None, dtype)
            for (name, shape, dtype), is_fixed in zip(outputs, fixed, strict=True)
        ]
        ports = (*self.compiled.inputs, *self.compiled.outputs)
        # Handing memory over costs more than copying little of it does.
        self._copies = all(port.partial_shape.is_static for port in ports) and (
            sum(math.prod(port.shape) * port.element_type.size for port in ports) < COPIED_BYTES
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        local = self._local
        request = getattr(local, "request", None)
        if request is None:
            request = local.request = self.compiled.create_infer_request()
            if self._copies:
                local.given = [
                    i if i is None else request.get_input_tensor(i).data for i in self._order
                ]
                local.made = [request.get_output_tensor(i).data for i in range(len(self._out))]
        if self._copies:
            for place, value in zip(local.given, tensors, strict=True):
                if place is not None:
                    place[...] = value.numpy()
            request.infer()
            return [torch.from_numpy(made.copy()) for made in local.made]
        return self._in_place(request, tensors)

    def _in_place(self, request: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensor = self._tensor
        for index, value in zip(self._order, tensors, strict=True):
            if index is not None:
                request.set_input_tensor(index, tensor(value.numpy(), shared_memory=True))
        results: list[torch.Tensor | None] = []
        for index, (_, shape, dtype) in enumerate(self._out):
            if shape is None:
                results.append(None)
            else:
                made = torch.empty(shape, dtype=dtype)
                results.append(made)
                request.set_output_tensor(index, tensor(made.numpy(), shared_memory=True))
        request.infer()
        return [
            torch.from_numpy(request.get_output_tensor(index).data.copy()) if made is None else made
            for index, made in enumerate(results)
        ]


_ENGINES: dict[str, Callable[..., Any]] = {
    "onnxruntime": _OnnxRuntimeEngine,
    "tensorrt": _OnnxRuntimeEngine,
    "openvino": _OpenVinoEngine,
}
_cache: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_cache_lock = threading.Lock()


@dataclass(frozen=True)
class Port:
    """One tensor that goes into or comes out of an engine.

    Attributes:
        name: its name in the ONNX model.
        dtype: its torch dtype.
        shape: its sizes; None for one that may vary.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]

    @property
    def fixed_shape(self) -> torch.Size | None:
        """The shape when no size may vary, else None."""
        sizes = [size for size in self.shape if size is not None]
        return torch.Size(sizes) if len(sizes) == len(self.shape) else None


WHOLE = (torch.int32, torch.int64)


def beyond_float32(tensor: torch.Tensor) -> bool:
    """Say whether a `tensor` of whole numbers holds one that float32 may round."""
    if tensor.dtype not in WHOLE or tensor.layout is not torch.strided:
        return False
    if not tensor.numel() or tensor.is_meta:
        return False
    low, high = torch.aminmax(tensor)
    return int(low) < -(2**24) or int(high) > 2**24


def _digest(model: onnx.ModelProto) -> str:
    """A hash of all that a model too large to be serialized consists of."""
    digest = hashlib.sha256()
    graph = model.graph
    for part in (*model.opset_import, *graph.node, *graph.input, *graph.output):
        text = part.SerializeToString(deterministic=True)
        digest.update(b"%d " % len(text) + text)
    for tensor in graph.initializer:
        digest.update(repr((tensor.name, tensor.data_type, list(tensor.dims))).encode())
        digest.update(tensor.raw_data)
    return digest.hexdigest()


class LoweredModule(torch.nn.Module):
    """A part of a program that an engine runs.

    It pickles and copies as ONNX bytes and options; the engine is built when first needed, and
    one engine serves all modules of equal content in the process.

    Args:
        model: the ONNX model.
        inputs: ports, in the order of the flattened arguments.
        outputs: ports, in the order of the flattened result.
        out_spec: how the result is put together from the outputs.
        options: how to build the engine.
        absent: places of None among the leaves of the result.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        out_spec: Any,
        options: EngineOptions,
        absent: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.options = options
        self.out_spec = out_spec
        self._absent = tuple(absent)
        self._single = out_spec.is_leaf()
        weights = sum(len(t.raw_data) for t in model.graph.initializer)
        self._folder: Any = None
        self._model: onnx.ModelProto | bytes
        if weights < EXTERNAL_DATA_BYTES:
            self._model = model.SerializeToString()
            self.content = hashlib.sha256(self._model).hexdigest()
        else:
            self._model = model  # no message of this size can be serialized: built through a file
            self.content = _digest(model)
        self._check = tuple((port.name, port.dtype, port.fixed_shape) for port in self.inputs)
        self._is_openvino = options.backend == "openvino"
        self.training = False
        codes = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
        self.rounds = codes or options.precision != "f32"
        self._engine: Any = None

    def extra_repr(self) -> str:
        """Return backend, precision, threads and size for the module's repr."""
        o = self.options
        return f"{o.backend}, {o.precision}, {o.threads} thread(s), {self.content[:12]}"

    @property
    def onnx_model(self) -> onnx.ModelProto:
        """The ONNX model that the engine was built from."""
        if isinstance(self._model, bytes):
            return onnx.load_model_from_string(self._model)
        return self._model

    @property
    def engine(self) -> Any:
        """The engine, built when it is not there yet.

        Raises:
            EngineError: the runtime does not accept the program.
        """
        if self._engine is None:
            key = (self.content, self.options)
            with _cache_lock:
                engine = _cache.get(key)
                if engine is None:
                    engine = _cache[key] = self._build()
                self._engine = engine
        return self._engine

    def _build(self) -> Any:
        check_backend(self.options)
        make = _ENGINES[self.options.backend]
        try:
            if isinstance(self._model, bytes):
                engine = make(self._model, None, self.options)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "model.onnx"
                    save_model(self._model, path, 0)
                    engine = make(self.content.encode(), os.fspath(path), self.options)
        except Exception as error:
            raise EngineError(
                f"{self.options.backend} does not accept this part: {error}",
                hint="lower with support=... that leaves the operator out, or another backend",
            ) from error
        # Where an input may vary, a size of a result that did not in two examples may all the same.
        fixed = all(port.fixed_shape is not None for port in self.inputs)
        engine.describe(
            [(port.name, port.dtype) for port in self.inputs],
            [(port.name, port.fixed_shape if fixed else None, port.dtype) for port in self.outputs],
        )
        return engine

    def forward(self, *args: Any) -> Any:
        """Run the engine on ``args``, tensors of the shapes and dtypes it was built for.

        Raises:
            LoweringError: a tensor has another shape or dtype, or a gradient is wanted.
        """
        engine = self._engine or self.engine
        if len(args) != len(self._check) or not all(type(a) is torch.Tensor for a in args):
            args = tuple(pytree.tree_leaves(args))
            if any(isinstance(a, FakeTensor) for a in args):
                return self._only_shapes(args)
            if not all(isinstance(a, torch.Tensor) for a in args):
                kinds = ", ".join(type(a).__name__ for a in args)
                raise LoweringError(f"an engine was given ({kinds})", expected="tensors only")
        tensors = []
        for (name, dtype, shape), tensor in zip(self._check, args, strict=True):
            if tensor.dtype is not dtype or (shape is not None and tensor.shape != shape):
                self._refuse(name, tensor)
            if tensor.requires_grad:
                if torch.is_grad_enabled():
                    raise LoweringError(
                        f"input {name} requires a gradient, and a lowered part has none",
                        hint="run it under torch.no_grad() or torch.inference_mode()",
                    )
                tensor = tensor.detach()
            if self._is_openvino and (shape is None or dtype in WHOLE):
                self._refuse_what_openvino_cannot(name, tensor)
            if tensor.is_neg():  # its memory holds the numbers with the other sign
                tensor = tensor.resolve_neg()
            tensors.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        results = engine(tensors)
        return results[0] if self._single else self._put_together(results)

    def _put_together(self, results: list[Any]) -> Any:
        for place in self._absent:
            results.insert(place, None)
        return pytree.tree_unflatten(results, self.out_spec)

    def _only_shapes(self, args: tuple[Any, ...]) -> Any:
        """What `forward` returns for tensors without data: the shapes that the engine gives."""
        batch = args[0].shape[0] if args[0].dim() else 1
        results = [
            args[0].new_empty([batch if n is None else n for n in port.shape], dtype=port.dtype)
            for port in self.outputs
        ]
        return self._put_together(results)

    def _refuse(self, name: str, tensor: torch.Tensor) -> None:
        port = next(port for port in self.inputs if port.name == name)
        raise LoweringError(
            f"input {name} is {tensor.dtype} {list(tensor.shape)}, the engine was built for "
            f"{port.dtype} {list(port.shape)}",
            hint="lower again with such an input, or with dynamic_batch=True",
        )

    def _refuse_what_openvino_cannot(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0 or beyond_float32(tensor):
            what = "numbers beyond 24 bits" if tensor.numel() else "no elements"
            raise LoweringError(
                f"input {name} has {what}, with which openvino does not compute exactly",
                hint="run the program that was lowered, or lower with another backend",
            )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_engine"] = None
        state["out_spec"] = pytree.tree_unflatten(
            range(len(self.outputs) + len(self._absent)), self.out_spec
        )
        if not isinstance(self._model, bytes):
            raise LoweringError("a part with more than 2 GB of weights cannot be pickled")
        state["options"] = asdict(self.options)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.out_spec = pytree.tree_structure(state["out_spec"])
        self.options = EngineOptions(**state["options"])

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredModule:
        copy = self.__class__.__new__(self.__class__)
        torch.nn.Module.__init__(copy)
        copy.__dict__.update(self.__dict__)
        memo[id(self)] = copy
        return copy
