"""What flows through a Graph while it is being written as ONNX?

Stand-ins for what flows through it when it runs: `OnnxValue` for a tensor, `SymbolicInt` for a size
that depends on the batch, `External` for a Python value that only PyTorch can make. The tensor
stand-in implements ``__torch_function__`` and operators, so the code of a module that has no
converter of its own can simply be run on it (section 4.1 of the paper: what a Proxy does).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from fxlab.backends.registry import Unsupported, find_converter

if TYPE_CHECKING:
    from fxlab.backends.onnx import Builder

__all__ = ["External", "OnnxValue", "SymbolicInt"]


class SymbolicInt:
    """A size that depends on the batch: known only when the engine runs.

    Arithmetic on it appends ONNX nodes; code that needs the number now (``int``, an index, a
    branch) makes the call `Unsupported` rather than fixing the size silently.
    """

    def __init__(self, ctx: Builder, name: str, sizes: tuple[int, int]) -> None:
        self.ctx, self.name, self.sizes = ctx, name, sizes

    def _arithmetic(self, op: str, function: Callable[..., int], other: Any, swap: bool) -> Any:
        if not isinstance(other, (int, SymbolicInt)):
            raise Unsupported("arithmetic between a dynamic size and a float")
        theirs = other.sizes if isinstance(other, SymbolicInt) else (other, other)
        pairs = zip(*((theirs, self.sizes) if swap else (self.sizes, theirs)), strict=True)
        first, second = (function(a, b) for a, b in pairs)
        names = [self.ctx.size_name(v) for v in ((other, self) if swap else (self, other))]
        if op == "Div":  # ONNX's rounds towards zero
            (rest,) = self.ctx.raw("Mod", names)
            names[:1] = self.ctx.raw("Sub", [names[0], rest])
        (name,) = self.ctx.raw(op, names)
        return SymbolicInt(self.ctx, name, (first, second))

    def _compare(self, function: Callable[..., bool], other: Any) -> bool:
        theirs = other.sizes if isinstance(other, SymbolicInt) else (other, other)
        answers = {function(a, b) for a, b in zip(self.sizes, theirs, strict=True)}
        if len(answers) == 2:
            raise Unsupported("a branch depends on a dynamic size")
        return answers.pop()

    def __int__(self) -> int:
        raise Unsupported("needs a fixed size, but this one depends on the batch")

    __index__ = __int__
    __hash__ = object.__hash__


def _define_size_operators() -> None:
    kinds = {"add": "Add", "sub": "Sub", "mul": "Mul", "floordiv": "Div", "mod": "Mod"}
    for name, op in kinds.items():
        function = getattr(operator, name)

        def forward(self: SymbolicInt, other: Any, op: str = op, f: Any = function) -> Any:
            return self._arithmetic(op, f, other, False)

        def reflected(self: SymbolicInt, other: Any, op: str = op, f: Any = function) -> Any:
            return self._arithmetic(op, f, other, True)

        setattr(SymbolicInt, f"__{name}__", forward)
        setattr(SymbolicInt, f"__r{name}__", reflected)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(operator, name)

        def compare(self: SymbolicInt, other: Any, f: Any = function) -> bool:
            return self._compare(f, other)

        setattr(SymbolicInt, f"__{name}__", compare)


_define_size_operators()


class OnnxValue:
    """A tensor of the ONNX graph under construction; it answers like a tensor where it can.

    Attributes:
        ctx: the Builder of that graph.
        name: its name in the ONNX graph.
        fake: a fake tensor with its shape and dtype (no memory behind it).
        other: the same for another batch size, None when all sizes are fixed.
        scale, zero_point: set while the value is quantized.
    """

    def __init__(self, ctx: Builder, name: str, fake: Any = None, other: Any = None) -> None:
        self.ctx, self.name, self.fake, self.other = ctx, name, fake, other
        self.scale: Any = None
        self.zero_point: Any = None
        self.axis: int | None = None

    def __repr__(self) -> str:
        return f"OnnxValue({self.name}: {self.dtype}{list(self.fake.shape)})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.fake.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes: int where fixed, SymbolicInt where they depend on the batch."""
        sizes = tuple(self.fake.shape)
        if self.other is None:
            return torch.Size(sizes)
        pairs = zip(sizes, self.other.shape, strict=True)
        return tuple(
            a if a == b else self.ctx.dim(self, axis, (a, b)) for axis, (a, b) in enumerate(pairs)
        )

    def size(self, dim: int | None = None) -> Any:
        """Return all sizes, or that of ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.fake.dim()

    ndim = property(dim)
    device = torch.device("cpu")
    requires_grad = is_nested = is_sparse = is_quantized = False

    def numel(self) -> Any:
        """Return the number of elements."""
        count: Any = 1
        for size in self.shape:
            count = count * size
        return count

    def is_floating_point(self) -> bool:
        """Say whether the dtype is a floating one."""
        return self.dtype.is_floating_point

    @property
    def T(self) -> Any:
        """The transpose."""
        return self.ctx.call("call_method", "t", (self,), {})

    @property
    def mH(self) -> Any:
        """The last two dimensions swapped: no number here is complex."""
        return self.mT

    @property
    def mT(self) -> Any:
        """The last two dimensions swapped."""
        return self.ctx.call("call_method", "transpose", (self, -2, -1), {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        ctx = next(leaf.ctx for leaf in leaves if isinstance(leaf, OnnxValue))
        return ctx.call("call_function", func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or find_converter("call_method", name) is None:
            raise AttributeError(f"a value being lowered has no attribute {name!r}")

        def method(*args: Any, **kwargs: Any) -> Any:
            result = self.ctx.call("call_method", name, (self, *args), kwargs)
            if name.endswith("_"):  # the code that runs on this value goes on with what it wrote
                self.name, self.fake, self.other = result.name, result.fake, result.other
            return result

        return method

    def copy(self) -> OnnxValue:
        """Return another stand-in for the same value."""
        made = OnnxValue(self.ctx, self.name, self.fake, self.other)
        made.scale, made.zero_point, made.axis = self.scale, self.zero_point, self.axis
        return made

    def __bool__(self) -> bool:
        raise Unsupported("a branch depends on a tensor's value")

    __hash__ = object.__hash__


def _define_tensor_operators() -> None:
    binary = (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
    )
    for name in (*binary, "lt", "le", "gt", "ge", "eq", "ne"):
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

        def forward(self: OnnxValue, other: Any, f: Any = function) -> Any:
            return self.ctx.call("call_function", f, (self, other), {})

        def reflected(self: OnnxValue, other: Any, f: Any = function) -> Any:
            return self.ctx.call("call_function", f, (other, self), {})

        setattr(OnnxValue, f"__{name}__", forward)
        setattr(OnnxValue, f"__r{name}__", reflected)
    for name in ("neg", "invert", "abs"):
        function = getattr(operator, name)

        def unary(self: OnnxValue, f: Any = function) -> Any:
            return self.ctx.call("call_function", f, (self,), {})

        setattr(OnnxValue, f"__{name}__", unary)

    def getitem(self: OnnxValue, index: Any) -> Any:
        return self.ctx.call("call_function", operator.getitem, (self, index), {})

    OnnxValue.__getitem__ = getitem  # type: ignore[attr-defined]


_define_tensor_operators()


class External:
    """A value that PyTorch makes and ONNX cannot hold: a number, a string, a list of them."""

    def __init__(self, name: str) -> None:
        self.name = name
