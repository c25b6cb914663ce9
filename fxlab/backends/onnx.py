"""How does a Graph become a program for another runtime?

Section 6.4 of the paper lowers a Graph to TensorRT with an Interpreter that calls the builder of
TensorRT instead of PyTorch, node by node. Here the target is ONNX, which several runtimes read.
`Emitter` runs the graph with `OnnxValue`s in place of tensors; for each call it looks up a
*converter*, a small function that appends ONNX nodes. A student adds one in a cell::

    @converter(torch.special.entr, "entr")
    def entr(ctx, x):
        return ctx.op("Neg", ctx.op("Mul", x, ctx.op("Log", x)))

A converter takes the builder and then exactly the arguments of the function it stands for. What
has no converter raises `Unsupported` with the reason, and whoever lowers leaves it to PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import onnx
import torch
from onnx import TensorProto, helper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxlab.backends.exact import refuse_inexact
from fxlab.backends.registry import Unsupported, converter, find_converter, functional_form
from fxlab.backends.sizes import BY_VALUES, VARIES, depend_on_values
from fxlab.backends.values import External, OnnxValue, SymbolicInt
from fxlab.core.errors import LoweringError
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.passes.effects import mutated_inputs

__all__ = [
    "OPSET",
    "Builder",
    "Emitter",
    "EngineError",
    "OnnxValue",
    "SymbolicInt",
    "Unsupported",
    "converter",
    "find_converter",
    "to_onnx",
]

OPSET = 20  # pinned: onnxruntime and OpenVINO both read it completely
IR_VERSION = 9
EXTERNAL_DATA_BYTES = 2_000_000_000  # a protobuf message ends at 2 GiB

DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int16: TensorProto.INT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
    torch.quint8: TensorProto.UINT8,
    torch.qint8: TensorProto.INT8,
    torch.qint32: TensorProto.INT32,
}

_SIZE_METHODS = {
    "size": "size",
    "dim": "dim",
    "ndimension": "dim",
    "numel": "numel",
    "nelement": "numel",
    "is_floating_point": "is_floating_point",
    torch.numel: "numel",
    torch.is_floating_point: "is_floating_point",
}


_COMPARISONS = {getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class Builder:
    """The ONNX graph under construction: what a converter appends to.

    Args:
        backend: the runtime it is for, None for any.

    Attributes:
        out: fake tensor(s) that the call being converted returns: its shape and dtype.
        nodes: the ONNX nodes so far.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.nodes: list[onnx.NodeProto] = []
        self.out: Any = None
        self._other_out: Any = None
        self.scope = "value"
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._names: dict[str, int] = {}
        self._initializers: dict[str, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self._initializer_names: dict[Any, str] = {}
        self._dims: dict[tuple[str, int], SymbolicInt] = {}

    # What converters use.

    def op(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append an ONNX node.

        Args:
            kind: the ONNX operator, such as ``"Conv"``.
            inputs: OnnxValues, tensors (become initializers), None for one left out.
            outputs: number of outputs.
            attributes: the node's attributes; those that are None are left out.

        Returns:
            One OnnxValue, or a tuple of them when ``outputs`` is above 1.

        Raises:
            Unsupported: small whole numbers that may overflow: only PyTorch wraps them around; what
                the backend does not compute exactly.
        """
        values = [None if v is None else self.value(v) for v in inputs]
        refuse_inexact(self.backend, kind, values, attributes)
        names = ["" if value is None else value.name for value in values]
        while names and not names[-1]:
            names.pop()
        made = tuple(OnnxValue(self, name) for name in self.raw(kind, names, outputs, **attributes))
        return made[0] if outputs == 1 else made

    def raw(self, kind: str, names: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Append a ``kind`` of node with ``attributes``, given names; return its outputs' names."""
        made = [self.unique(self.scope) for _ in range(outputs)]
        given = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(helper.make_node(kind, names, made, name=made[0], **given))
        return made

    def value(self, value: Any) -> OnnxValue:
        """Return `value` as an OnnxValue; a tensor becomes an initializer, shared by identity.

        Raises:
            Unsupported: ONNX has no such value.
        """
        if isinstance(value, OnnxValue):
            return value
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"a {type(value).__name__} where a tensor is expected")
        if value.dtype not in DTYPES or value.is_quantized:
            raise Unsupported(f"constant of dtype {value.dtype}")
        key = id(value)
        if key not in self._initializer_names:
            name = self.unique(f"{self.scope}.constant")
            self._initializer_names[key] = name
            self._initializers[name] = value.detach()
            self._alive.append(value)  # so that its id stays taken
        return OnnxValue(self, self._initializer_names[key], self.fake(value))

    def derived(self, tensor: torch.Tensor, how: str, made: torch.Tensor) -> OnnxValue:
        """Return the initializer `made` of `tensor`; one per (tensor, how), however often asked.

        Args:
            tensor: a parameter or constant of the program, of any shape and dtype.
            how: says in a word what was done with it.
            made: what came of it, of the shape and dtype that the operator wants.
        """
        key = (id(tensor), how)
        if key not in self._initializer_names:
            self._initializer_names[key] = self.value(made).name
            self._alive.append(tensor)
        name = self._initializer_names[key]
        return OnnxValue(self, name, self.fake(self._initializers[name]))

    def const(self, value: Any, dtype: torch.dtype) -> OnnxValue:
        """Return a constant: ``value``, a number or a nested list of numbers of that dtype."""
        key = (repr(value), dtype)
        if key not in self._initializer_names:
            self._initializer_names[key] = name = self.unique("constant")
            self._initializers[name] = torch.tensor(value, dtype=dtype)
        name = self._initializer_names[key]
        return OnnxValue(self, name, self.fake(self._initializers[name]))

    def ints(self, sizes: Sequence[Any]) -> OnnxValue:
        """Return a 1-D int64 value of sizes, some of which may depend on the batch."""
        if not any(isinstance(size, SymbolicInt) for size in sizes):
            return self.const([int(size) for size in sizes], torch.int64)
        return OnnxValue(self, self.raw("Concat", [self.size_name(s) for s in sizes], axis=0)[0])

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return `value` in `dtype`; a number becomes a constant."""
        if isinstance(value, (bool, int, float)):
            return self.const(value, dtype)
        if isinstance(value, SymbolicInt):
            scalar = self.op("Squeeze", OnnxValue(self, value.name))
            return self.op("Cast", scalar, to=DTYPES[dtype])
        if isinstance(value, torch.Tensor):
            return self.value(value if value.dtype == dtype else value.to(dtype))
        if value.fake is not None and value.dtype == dtype:
            return value
        return self.op("Cast", value, to=DTYPES[dtype])

    # How sizes and shapes are known.

    def size_name(self, size: Any) -> str:
        """Name of a 1-element int64 tensor that holds `size`."""
        return size.name if isinstance(size, SymbolicInt) else self.const([size], torch.int64).name

    def dim(self, value: OnnxValue, axis: int, sizes: tuple[int, int]) -> SymbolicInt:
        """The size of an axis of a value, read when the engine runs; ``sizes`` are two examples."""
        key = (value.name, axis)
        if key not in self._dims:
            (name,) = self.raw("Shape", [value.name], start=axis, end=axis + 1)
            self._dims[key] = SymbolicInt(self, name, sizes)
        return self._dims[key]

    def out_sizes(self, first: int = 0) -> list[int]:
        """Sizes of the result from dimension ``first`` on.

        Raises:
            Unsupported: one of them depends on the batch.
        """
        sizes = list(self.out.shape[first:])
        if self._other_out is not None and sizes != list(self._other_out.shape[first:]):
            raise Unsupported("needs fixed sizes of its result, but they depend on the batch")
        return sizes

    def unique(self, name: str) -> str:
        """Return a name that no value has yet."""
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}.{count}"

    def fake(self, value: Any) -> Any:
        """Return fake tensors of the shape and dtype of `value` (tensor, TensorMetadata, nest)."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            with self._fake_mode:
                return torch.empty(tuple(shape), dtype=dtype)
        if isinstance(value, (tuple, list)):
            return tuple(self.fake(item) for item in value)
        return value

    def _run_fake(self, op: str, target: Any, args: Any, kwargs: Any, which: str) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, OnnxValue):
                return getattr(value, which) if getattr(value, which) is not None else value.fake
            if isinstance(value, SymbolicInt):
                return value.sizes[which == "other"]
            return value

        args, kwargs = pytree.tree_map_only((OnnxValue, SymbolicInt), real, (args, kwargs))
        with self._fake_mode, torch.no_grad():
            if op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    # How one call is converted.

    def call(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        out: Any = None,
        other: Any = None,
    ) -> Any:
        """Convert one call, or evaluate it now when nothing in it depends on an input.

        Args:
            op: ``call_function``, ``call_method`` or ``call_module``.
            target: function, method name, or module.
            args: positional arguments.
            kwargs: keyword arguments.
            out: fake result, when the caller knows it.
            other: the same for the other batch size.

        Returns:
            What the converter returns, with shapes filled in.

        Raises:
            Unsupported: no converter, or one that cannot express this call.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, External):
                raise Unsupported(
                    f"reads {leaf.name} from PyTorch, no tensor or one of sizes not known yet"
                )
        if not any(isinstance(leaf, (OnnxValue, SymbolicInt)) for leaf in leaves):
            with torch.no_grad():
                if op == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return target(*args, **kwargs)
        if target is getattr or (target is operator.getitem and not isinstance(args[0], OnnxValue)):
            return target(*args, **kwargs)
        if not any(isinstance(leaf, OnnxValue) for leaf in leaves) and getattr(
            target, "__module__", ""
        ) in ("_operator", "math"):
            if target in _COMPARISONS:  # true for the examples says nothing of other sizes
                raise Unsupported("a comparison of a size that depends on the batch")
            return target(*args, **kwargs)
        if op != "call_module" and target in _SIZE_METHODS and isinstance(args[0], OnnxValue):
            return getattr(args[0], _SIZE_METHODS[target])(*args[1:], **kwargs)
        written, form = kwargs.get("out"), (op, target)
        if "out" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if isinstance(written, (tuple, list)):
            raise Unsupported("several tensors as out=")
        if written is None:
            written = args[0] if args else None
            form = functional_form(op, target) if op != "call_module" else None
        function = find_converter(op, target)
        if form is not None and function is not None and function is find_converter(*form):
            dtype: Any = getattr(written, "dtype", None)
            value = self.cast(self.call(*form, args, kwargs), dtype)
            return self._shaped(value, value.fake if out is None else out, other)
        if function is None:
            if op == "call_module":  # run its code: each call in it comes back through here
                return target.forward(*args, **kwargs)
            name = getattr(target, "__name__", target)
            raise Unsupported(f"no converter for {name}; add one with @converter")
        if op == "call_module":
            args = (target, *args)
        if out is None:
            out = self._run_fake(op, target, args, kwargs, "fake")
            dynamic = any(
                isinstance(v, SymbolicInt) or getattr(v, "other", None) is not None
                for v in leaves
                if isinstance(v, (OnnxValue, SymbolicInt))
            )
            if dynamic:
                other = self._run_fake(op, target, args, kwargs, "other")
        saved = self.out, self._other_out
        self.out, self._other_out = out, other
        try:
            result = function(self, *args, **kwargs)
        finally:
            self.out, self._other_out = saved
        return self._shaped(result, out, other)

    def _shaped(self, result: Any, out: Any, other: Any) -> Any:
        if isinstance(result, (tuple, list)) and isinstance(out, (tuple, list)):
            others = other if other is not None else [None] * len(out)
            parts = zip(result, out, others, strict=False)
            return _in_form([self._shaped(*part) for part in parts], type(out))
        if not isinstance(result, OnnxValue) or not isinstance(out, torch.Tensor):
            return result
        shaped = OnnxValue(self, result.name, out)
        if other is not None and tuple(other.shape) != tuple(out.shape):
            shaped.other = other
        shaped.scale, shaped.zero_point, shaped.axis = result.scale, result.zero_point, result.axis
        return shaped


class EngineError(LoweringError):
    """A part is not accepted, though each of its nodes has a converter."""


def _in_form(values: Any, kind: Any) -> Any:
    """Values as a tuple, or as the list or named tuple that eager mode returns."""
    if not isinstance(values, (tuple, list)) or not isinstance(kind, type):
        return values
    if issubclass(kind, list):
        return list(values)
    if issubclass(kind, tuple) and kind is not torch.Size:
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    return values


class Emitter(Interpreter):
    """Run a graph on OnnxValues: each node appends its ONNX nodes to a Builder.

    Args:
        gm: the program; placeholders carry ``meta["tensor_meta"]`` (see `shape_prop`).
        backend: the runtime that is to read the ONNX, None for any.
        tolerant: record what cannot be lowered in `reasons` and go on; otherwise raise.
        refuse: called with each node first; a text it returns is the reason not to lower it.
    """

    def __init__(
        self,
        gm: GraphModule,
        *,
        backend: str | None = None,
        tolerant: bool = False,
        refuse: Callable[[Node], str | None] = lambda node: None,
    ) -> None:
        super().__init__(gm)
        self.program = gm
        self.ctx = Builder(backend)
        self.tolerant = tolerant
        self.refuse = refuse
        self.reasons: dict[str, str] = {}
        self.python_values: set[str] = set()
        self.inputs: list[OnnxValue] = []
        self.outputs: list[OnnxValue] = []
        self.absent: list[int] = []
        self.result: Any = None

    def emit(self) -> Any:
        """Walk the graph once and return what its output node returns, as OnnxValues."""
        self.result = self.run(*self._arguments(), enable_io_processing=False)
        return self.result

    def _arguments(self) -> list[Any]:
        return [
            self._outside(node) for node in self.program.graph.nodes if node.op == "placeholder"
        ]

    def _outside(self, node: Node) -> Any:
        """What stands for a value that comes from PyTorch: a graph input, or an External."""
        fake = self.ctx.fake(node.meta.get("tensor_meta"))
        other = self.ctx.fake(node.meta.get("other_tensor_meta"))
        name = str(node.target).lstrip("*") if node.op == "placeholder" else node.name
        if VARIES in node.meta:
            return External(name)
        return self._as_input(name, fake, other)

    def _as_input(self, name: str, fake: Any, other: Any) -> Any:
        if isinstance(fake, tuple) and fake:
            others = other if other is not None else [None] * len(fake)
            if len(others) != len(fake):
                return External(name)  # how many there are depends on the batch
            pairs = zip(fake, others, strict=True)
            return tuple(self._as_input(f"{name}_{i}", *pair) for i, pair in enumerate(pairs))
        if not isinstance(fake, torch.Tensor) or fake.dtype not in DTYPES:
            return External(name)
        value = OnnxValue(self.ctx, self.ctx.unique(name), fake)
        if other is not None and tuple(other.shape) != tuple(fake.shape):
            value.other = other
        self.inputs.append(value.copy())  # code that runs on the value may write to it
        return value

    def run_node(self, n: Node) -> Any:
        """Convert one node; when tolerant, note why not and pretend that PyTorch made it."""
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        self.ctx.scope = n.name
        try:
            if (why := self.refuse(n)) is not None:
                raise Unsupported(why)
            for value in mutated_inputs(n, self.program):
                if isinstance(self.env.get(value), torch.Tensor):  # a constant others may hold
                    self.env[value] = self.env[value].clone()
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "get_attr":
                return self.fetch_attr(str(n.target))
            target = self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target
            out = self.ctx.fake(n.meta.get("tensor_meta"))
            other = self.ctx.fake(n.meta.get("other_tensor_meta"))
            result = self.ctx.call(n.op, target, args, kwargs, out, other)
            if n.op == "call_module" and out is not None:
                result = self.ctx._shaped(result, out, other)
            self._check(result, n)
            return _in_form(result, n.meta.get("type"))
        except Unsupported as reason:
            text = str(reason)
        except LoweringError:
            raise
        except Exception as error:
            text = f"its conversion failed: {type(error).__name__}: {error}"
        if not self.tolerant:
            raise LoweringError(
                f"this node cannot be lowered to ONNX: {text}",
                node=n,
                hint="leave it to PyTorch (strict=False), or register a converter for it",
            )
        self.reasons[n.name] = text
        if depend_on_values(n, self):
            n.meta[VARIES] = BY_VALUES
        return self._outside(n)

    def _check(self, result: Any, node: Node) -> None:
        if not any(isinstance(v, OnnxValue) for v in pytree.tree_leaves(result)):
            if not isinstance(result, torch.Tensor):
                self.python_values.add(node.name)
            return
        for value in pytree.tree_leaves(result):
            if isinstance(value, OnnxValue) and value.dtype not in DTYPES:
                raise Unsupported(f"{value.dtype} does not exist in ONNX")

    def model(self, name: str = "fxlab") -> tuple[onnx.ModelProto, Any]:
        """Return the finished model and the pytree spec of its outputs, None among them."""
        ctx = self.ctx
        leaves, spec = pytree.tree_flatten(self.result)
        self.absent = [place for place, leaf in enumerate(leaves) if leaf is None]
        outputs, used = [], {value.name for value in self.inputs}
        for leaf in leaves:
            if leaf is None:
                continue
            if not isinstance(leaf, (OnnxValue, torch.Tensor)):
                raise LoweringError(
                    f"the output has a {type(leaf).__name__}; a lowered part returns tensors only"
                )
            value = ctx.value(leaf)
            if value.name in used or value.name in ctx._initializers:
                (fresh,) = ctx.raw("Identity", [value.name])
                value = ctx._shaped(OnnxValue(ctx, fresh), value.fake, value.other)
            used.add(value.name)
            outputs.append(value)
        self.outputs = outputs
        model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="fxlab")
        model.opset_import.add(domain="", version=OPSET)
        graph = model.graph  # filled in place: helper.make_model would copy the weights twice
        graph.name = name
        graph.node.extend(ctx.nodes)
        graph.input.extend(_info(value) for value in self.inputs)
        graph.output.extend(_info(value) for value in outputs)
        for key, tensor in ctx._initializers.items():
            _fill(graph.initializer.add(), key, tensor)
        return model, spec


def _info(value: OnnxValue) -> onnx.ValueInfoProto:
    shape: list[Any] = list(value.fake.shape)
    if value.other is not None:
        pairs = zip(shape, value.other.shape, strict=True)
        shape = [a if a == b else f"batch_{axis}" for axis, (a, b) in enumerate(pairs)]
    return helper.make_tensor_value_info(value.name, DTYPES[value.dtype], shape)


def _fill(proto: onnx.TensorProto, name: str, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    proto.name, proto.data_type = name, DTYPES[tensor.dtype]
    proto.dims.extend(tensor.shape)
    if tensor.numel() < 2:  # contiguous whatever its stride, which the view as bytes minds
        tensor = tensor.as_strided(tensor.shape, [1] * tensor.dim())
    proto.raw_data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def to_onnx(
    gm: GraphModule,
    inputs: Sequence[Any],
    path: str | Path | None = None,
    *,
    dynamic_batch: bool = False,
    external_data_bytes: int = EXTERNAL_DATA_BYTES,
) -> onnx.ModelProto:
    """Lower a whole program to one checked ONNX model; `gm` is left untouched.

    Args:
        gm: the program, in eval mode.
        inputs: example inputs; their shapes and dtypes become those of the model.
        path: also write the model there, weights beside it once they pass `external_data_bytes`.
        dynamic_batch: let the first dimension of every input vary.
        external_data_bytes: from this size on weights go to ``<path>.data``.

    Returns:
        The model, opset `OPSET`, weights as initializers.

    Raises:
        LoweringError: a node has no converter, or one that cannot express it.

    Example:
        >>> import fxlab, torch
        >>> model = to_onnx(fxlab.symbolic_trace(lambda x: torch.relu(x) + 1), [torch.ones(2)])
        >>> [node.op_type for node in model.graph.node]
        ['Relu', 'Add']
    """
    from fxlab.backends.lowering import with_shapes  # imports this module

    emitter = Emitter(with_shapes(gm, inputs, dynamic_batch))
    emitter.emit()
    model, _ = emitter.model()
    check_model(model)
    if path is not None:
        save_model(model, Path(path), external_data_bytes)
    return model


def check_model(model: onnx.ModelProto) -> None:
    """Run onnx's own checker on ``model``, types and shapes too; it takes none above 2 GiB.

    Raises:
        EngineError: the model is not valid.
    """
    weights = sum(len(t.raw_data) for t in model.graph.initializer)
    if weights < EXTERNAL_DATA_BYTES:
        try:
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise EngineError(f"its ONNX is not valid: {error}") from error


def save_model(model: onnx.ModelProto, path: Path, external_data_bytes: int) -> None:
    """Write a model; weights go to ``<path>.data`` when they are at least that many bytes."""
    weights = sum(len(t.raw_data) for t in model.graph.initializer)
    if weights < external_data_bytes:
        path.write_bytes(model.SerializeToString())
        return
    data = Path(f"{path.name}.data")
    path.with_name(data.name).unlink(missing_ok=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, str(path), save_as_external_data=True, location=data.name)


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return numpy's dtype for a torch dtype, None where numpy has none (bfloat16)."""
    if dtype is torch.bfloat16:
        return None
    return numpy.dtype(str(dtype).removeprefix("torch."))
