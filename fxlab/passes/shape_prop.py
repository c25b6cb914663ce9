"""Shape propagation: which shape, dtype and layout does each value have (section 6.3)?

Without control flow in the IR one forward walk is the whole analysis: run the program on example
inputs, one node at a time, and write down what came out (section 5.5 says what loops would cost).
``dynamic=`` does the same walk with sizes that have names instead of numbers: torch's fake
tensors carry symbols through every operator, and the result reads ``f32[N, 64, 56, 56]``.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from fxlab.core.errors import FxlabError, call_site, message_text
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node, map_aggregate
from fxlab.passes.base import report, undisturbed

__all__ = ["ShapeError", "ShapeProp", "TensorMetadata", "shape_prop", "shape_text"]

DTYPE_TEXT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.quint8: "qu8",
    torch.qint8: "qi8",
    torch.qint32: "qi32",
}

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class ShapeError(FxlabError, RuntimeError):
    """A node could not be run on the example inputs."""

    def __init__(self, message: str = "", *, node: Any = None, **facts: Any) -> None:
        if facts.get("where") is None and not getattr(node, "meta", {}).get("source"):
            # The line to look at is the user's; the kit's own lines between say nothing to them.
            ours = __file__.removesuffix("shape_prop.py")
            frames = [f for f in call_site(32) if not f[0].startswith(ours)]
            facts["where"] = tuple(frames[:4])
        super().__init__(message, node=node, **facts)

    def rename(self, names: Mapping[str, str]) -> None:
        """Put the user's names of sizes in the place of torch's, in all texts."""
        if not names:
            return
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        for field in ("message", "expected", "node"):
            if isinstance(text := getattr(self, field), str):
                setattr(self, field, words.sub(lambda found: names[found[0]], text))
        self.args = (message_text(self),)


def need_graph(gm: Any) -> None:
    """Raise TypeError if ``gm`` is a model that was not traced, or no module at all."""
    if not hasattr(gm, "graph"):
        raise TypeError(
            f"a pass takes a GraphModule and was given a {type(gm).__name__}; "
            "trace it first: gm = fxlab.symbolic_trace(model)"
        )


def need_inputs(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Raise ShapeError if ``inputs`` are more or fewer than the program takes.

    Raises:
        TypeError: ``gm`` is no GraphModule.
    """
    need_graph(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = [str(node.target) for node in placeholders]
    given = len(gm.graph.process_inputs(*inputs))
    several = any(name.startswith("*") for name in names)
    needed = sum(not (node.args or str(node.target).startswith("*")) for node in placeholders)
    if needed <= given and (several or given <= len(names)):
        return
    words = "input" if needed == len(names) == 1 else "inputs"
    count = f"{needed}" if needed == len(names) else f"{needed} to {len(names)}"
    count = f"at least {needed}" if several else count
    raise ShapeError(
        f"the program takes {count} {words}, and {given} {'is' if given == 1 else 'are'} given",
        expected=f"a value for each of: {', '.join(names) or 'nothing'}",
    )


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Let torch not log a refusal of a fake tensor, with its stack, beside the error itself."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_no_record)
    try:
        yield
    finally:
        logger.removeFilter(_no_record)


def _no_record(record: logging.LogRecord) -> bool:
    return False


class TensorMetadata(NamedTuple):
    """What is known of one tensor value, under torch.fx's names.

    Attributes:
        shape: Its sizes; a size that is dynamic is a symbol.
        dtype: Its dtype.
        requires_grad: Whether a gradient goes through it.
        stride: Elements of memory between neighbours, for each dimension.
        memory_format: None when the tensor is dense in none of torch's formats.
        is_quantized: Whether it is one of torch's quantized tensors.
        qparams: That tensor's scheme, scale and zero point by name; empty unless it is one.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]
    memory_format: torch.memory_format | None
    is_quantized: bool
    qparams: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name what torch.save's protocol cannot write: layouts and schemes."""
        return _metadata, tuple(map(_by_name, self))


class _Name(str):
    """The name of an object of torch's."""


def _by_name(value: Any) -> Any:
    if isinstance(value, (torch.memory_format, torch.qscheme)):
        return _Name(str(value).removeprefix("torch."))
    if isinstance(value, dict):
        return {key: _by_name(part) for key, part in value.items()}
    return value


def _metadata(*fields: Any) -> TensorMetadata:
    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: found(part) for key, part in value.items()}
        return getattr(torch, value) if isinstance(value, _Name) else value

    return TensorMetadata(*map(found, fields))


def _extract_tensor_metadata(
    result: torch.Tensor, include_contiguity: bool = True
) -> TensorMetadata:
    strided = result.layout == torch.strided
    memory_format = None
    if include_contiguity and strided:
        # channels_last asks for four dimensions, channels_last_3d for five.
        ranks = zip(_LAYOUTS, (None, 4, 5), strict=True)
        fits = [layout for layout, rank in ranks if rank in (None, result.dim())]
        with contextlib.suppress(RuntimeError):  # it hangs on a size that only data can tell
            memory_format = next((f for f in fits if result.is_contiguous(memory_format=f)), None)
    qparams: dict[str, Any] = {}
    if result.is_quantized:
        qparams["qscheme"] = scheme = result.qscheme()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            qparams |= {"scale": result.q_scale(), "zero_point": result.q_zero_point()}
        else:
            qparams["scale"] = result.q_per_channel_scales().tolist()
            qparams["zero_point"] = result.q_per_channel_zero_points().tolist()
            qparams["axis"] = result.q_per_channel_axis()
    return TensorMetadata(
        result.shape,
        result.dtype,
        result.requires_grad,
        result.stride() if strided else (),
        memory_format,
        result.is_quantized,
        qparams,
    )


def shape_text(value: Any) -> str:
    """Return ``f32[8, 3, 224, 224]`` for a tensor, its metadata, or the node that computes it.

    Tuples, lists and dicts are written with their parts; other values by their type's name; a
    node without metadata gives the empty string.

    Args:
        value: Any of these, or a nest of them.

    Example:
        >>> shape_text((torch.zeros(2, 3), torch.ones(4, dtype=torch.int64)))
        '(f32[2, 3], i64[4])'
    """
    if isinstance(value, Node):
        value = value.meta.get("tensor_meta", "")
    if isinstance(value, str):
        return value
    if isinstance(value, (torch.Tensor, TensorMetadata)) or hasattr(value, "memory_format"):
        dtype = DTYPE_TEXT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {shape_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(shape_text(v) for v in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(shape_text(v) for v in value) + "]"
    return type(value).__name__


def without_packed(result: Any) -> Any:
    """`result` with packed sequences as plain tuples: their class computes with its fields."""
    if isinstance(result, PackedSequence):
        return tuple(result)
    if type(result) in (tuple, list):
        return type(result)(map(without_packed, result))
    return result


class ShapeProp(Interpreter):
    """Run a GraphModule node by node and keep each result's metadata on its node.

    Writes ``node.meta["tensor_meta"]`` (a TensorMetadata, or a nest of them) and
    ``node.meta["type"]``.

    Args:
        gm: The module to run.
        fake_mode: A torch FakeTensorMode: shapes are then computed without any tensor data.

    Example:
        >>> import fxlab
        >>> gm = fxlab.symbolic_trace(torch.nn.Linear(4, 2))
        >>> _ = ShapeProp(gm).propagate(torch.randn(3, 4))
        >>> [shape_text(node) for node in gm.graph.nodes][-1]
        'f32[3, 2]'
    """

    def __init__(self, gm: GraphModule, fake_mode: Any = None) -> None:
        super().__init__(gm)
        self.fake_mode = fake_mode

    def run_node(self, n: Node) -> Any:
        """Run one node, ``n``, keep the metadata of its result, return the result.

        Raises:
            ShapeError: Naming the node, the shapes of its inputs, and the line of the user's
                model that made it.
        """
        try:
            result = super().run_node(n)
        except Exception as error:
            inputs = ", ".join(f"{i.name}: {shape_text(i) or '?'}" for i in n.all_input_nodes)
            raise ShapeError(
                f"{n.name} does not run on these inputs: {error}",
                node=n,
                expected=f"inputs that {n.name} accepts; it was given {inputs or 'no values'}",
                hint="pass example inputs of the shapes and dtypes that the model is made for",
            ) from error
        found = []

        def keep(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found.append(value)
            return _extract_tensor_metadata(value)

        meta = map_aggregate(without_packed(result), keep)
        if found:
            n.meta["tensor_meta"] = meta
        else:
            n.meta.pop("tensor_meta", None)
        n.meta["type"] = type(result)
        return result

    def propagate(self, *args: Any) -> Any:
        """Run on the inputs ``args``; return the module's output."""
        if self.fake_mode is None:
            return super().run(*args)
        with self.fake_mode:
            fakes = [
                self.fake_mode.from_tensor(a)
                if isinstance(a, torch.Tensor) and not hasattr(a, "fake_mode")
                else a
                for a in args
            ]
            return super().run(*fakes)


def shape_prop(
    gm: GraphModule, *inputs: Any, dynamic: Mapping[str, Mapping[int, str]] | None = None
) -> GraphModule:
    """Write shape metadata on the nodes of ``gm`` (in place, meta only); return ``gm``.

    Args:
        gm: The module to analyse. It runs once, without gradients; inputs and state that it writes
            to are as before afterwards.
        *inputs: One example input for each placeholder without a default.
        dynamic: Sizes to keep symbolic: for each placeholder's name, dimension -> symbol.
            The same symbol in two places means the same size. What the shapes rely on is in the
            report, ``guards``: conditions on the names (`fxlab.passes.guards`), for sizes of 1 or
            more. What hangs on data (an index out of range) is in no guard.

    Raises:
        ShapeError: A node does not run on the inputs, these are more than the program takes, or
            ``dynamic`` names no such dimension.

    Example:
        >>> import fxlab
        >>> gm = fxlab.symbolic_trace(torch.nn.Flatten())
        >>> gm = shape_prop(gm, torch.zeros(2, 3, 4), dynamic={"input": {0: "N"}})
        >>> shape_text(gm.graph.output_node())
        'f32[N, 12]'
    """
    need_graph(gm)
    if dynamic:
        from fxlab.passes.symbolic import propagate_symbolic

        with undisturbed(gm, inputs) as given:
            guards = propagate_symbolic(gm, given, dynamic)
    else:
        guards = []
        need_inputs(gm, inputs)
        with torch.no_grad(), undisturbed(gm, inputs) as given:
            ShapeProp(gm).propagate(*given)
    known = [n for n in gm.graph.nodes if "tensor_meta" in n.meta]
    unknown = [n for n in gm.graph.nodes if "tensor_meta" not in n.meta]
    report(
        gm,
        "shape_prop",
        [f"{n.name}: {shape_text(n)}" for n in known],
        [f"{n.name}: no tensor, {n.meta['type'].__name__}" for n in unknown],
        guards=guards,
    )
    return gm
