"""When are two calls the same call, written differently?

`relu(input=x)`, `x.relu()`, `F.relu(x)` and a `nn.ReLU` module mean one thing, and so do `1 + x`
and `torch.add(x, 1)`. The six opcodes (paper, section 4.2) keep what the user wrote; this is one
function that a matcher asks what it means, and no graph is changed.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.fx import operator_schemas
from torch.fx.operator_schemas import get_signature_for_torch_op

from fxlab.core.node import Node

Call = tuple[Any, tuple[Any, ...], dict[str, Any], bool]
"""What is called, positional arguments, keyword-only arguments, may the first two be swapped."""

_COMMUTATIVE = frozenset(
    "add mul eq ne maximum minimum logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor fmax fmin hypot logaddexp".split()
)
_OPERATORS = {
    "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "lshift":
    "bitwise_left_shift", "rshift": "bitwise_right_shift", "iadd": "add_", "isub": "sub_",
    "imul": "mul_", "itruediv": "div_",
}  # fmt: skip
_SYNONYMS = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div",
    "true_divide": "div", "clip": "clamp", "concat": "cat", "concatenate": "cat", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "arccos": "acos",
    "arcsin": "asin", "arctan": "atan", "swapaxes": "transpose", "swapdims": "transpose",
    "expit": "sigmoid", "log_sigmoid": "logsigmoid", "fix": "trunc",
}  # fmt: skip
_MANY = frozenset("permute reshape view expand repeat flip tile".split())  # x.permute(0, 2, 1)
_MODULES = {
    getattr(torch.nn, name): function
    for name, function in {
        "ReLU": "relu", "ReLU6": "relu6", "GELU": "gelu", "Sigmoid": "sigmoid", "Tanh": "tanh",
        "SiLU": "silu", "Mish": "mish", "ELU": "elu", "CELU": "celu", "SELU": "selu",
        "LeakyReLU": "leaky_relu", "Hardtanh": "hardtanh", "Hardswish": "hardswish",
        "Hardsigmoid": "hardsigmoid", "Softplus": "softplus", "Softsign": "softsign",
        "LogSigmoid": "logsigmoid", "Tanhshrink": "tanhshrink", "Softshrink": "softshrink",
        "Hardshrink": "hardshrink", "GLU": "glu", "Softmax": "softmax", "Softmin": "softmin",
        "LogSoftmax": "log_softmax", "Dropout": "dropout", "AvgPool1d": "avg_pool1d",
        "AvgPool2d": "avg_pool2d", "AdaptiveAvgPool1d": "adaptive_avg_pool1d",
        "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "Flatten": "flatten",
        "PixelShuffle": "pixel_shuffle",
    }.items()
}  # fmt: skip


def find(module: Any, path: str) -> Any:
    """Return what a dotted path leads to, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def canonical_call(node: Node) -> Call:
    """Return one spelling for all ways to write a call.

    A call that is not in the kit's tables keeps its own target and arguments, and so equals only
    itself. Left-out defaults at the end are dropped, keywords go to their positions.
    """
    args, kwargs = node.args, dict(node.kwargs)
    function: Any = node.target
    name: str | None = None
    if node.op == "call_module":
        owner = node.graph.owning_module
        module: Any = find(owner, str(node.target)) if owner is not None else None
        name = _MODULES.get(type(module))
        if name is None or module._forward_hooks or module._forward_pre_hooks:
            return (node.op, node.target), args, kwargs, False
        function = getattr(F, name, None) or getattr(torch, name)
        first, *rest = (_signatures(function) or [[]])[0]
        bound = {p.name: getattr(module, p.name) for p in rest if hasattr(module, p.name)}
        kwargs = {**dict(zip([first.name], args, strict=False)), **kwargs, **bound}
        args = ()
    elif node.op == "call_method":
        name = _SYNONYMS.get(str(node.target), str(node.target))
        name = str(name)
        function = getattr(torch, name, None) or getattr(torch.ops.aten, name, None)
        first = next((s[0].name for s in _signatures(function) if s), "") if function else ""
        if first not in ("input", "self", "tensor"):  # x.where(c, y) is torch.where(c, x, y)
            return (node.op, node.target), args, kwargs, False
        if name in _MANY and len(args) > 2:
            args = (args[0], args[1:])
    if node.op != "call_method":
        name = _name(function)
        if name is None:
            return (node.op, node.target), args, kwargs, False
    args, kwargs = _positional(function, args, kwargs)
    return name, args, kwargs, name in _COMMUTATIVE and not kwargs and len(args) == 2


@functools.cache
def _name(function: Callable[..., Any]) -> str | None:
    """Return the one name of a function of torch or operator, None for any other."""
    if isinstance(function, OpOverload):
        namespace, _, name = function._schema.name.partition("::")
        return _SYNONYMS.get(name, name) if namespace == "aten" else None
    name = getattr(function, "__name__", "")
    if getattr(operator, name, None) is function:
        return _SYNONYMS.get(_OPERATORS.get(name, name), _OPERATORS.get(name, name))
    special = getattr(torch.special, name.removeprefix("special_"), None)
    homes = (getattr(torch, name, None), getattr(F, name, None), special)
    builtin = getattr(function, "__module__", None) == "torch._C._nn"
    if not name or not (builtin or any(home is function for home in homes)):
        return None
    return _SYNONYMS.get(name.removeprefix("special_"), name.removeprefix("special_"))


@functools.cache
def _signatures(function: Callable[..., Any]) -> list[list[inspect.Parameter]]:
    """Return the parameters of every overload of a function."""
    if getattr(operator, getattr(function, "__name__", ""), None) is function:
        function = getattr(torch, _name(function) or "", function)
    found = get_signature_for_torch_op(function) or []
    if not found or inspect.isfunction(function):
        try:
            found = [inspect.signature(function)]
        except (TypeError, ValueError):
            return []
    hidden = ("_stacklevel", "out")
    return [[p for p in s.parameters.values() if p.name not in hidden] for s in found]


def _positional(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move keywords to positions by the first overload that takes them; drop trailing defaults."""
    kwargs.pop("_stacklevel", None)
    if "self" in kwargs:
        kwargs["input"] = kwargs.pop("self")
    for parameters in _signatures(function):
        names = {p.name for p in parameters}
        many = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        places = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        if many or not kwargs.keys() <= names or len(args) > len(places):
            continue
        values = list(args)
        rest = dict(kwargs)
        for p in places[len(args) :]:
            values.append(rest.pop(p.name, p.default))
        while len(values) > 1 and _is_default(values[-1], places[len(values) - 1].default):
            values.pop()
        if any(value is inspect.Parameter.empty for value in values):
            continue
        only = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        rest = {k: v for k, v in rest.items() if k not in only or not _is_default(v, only[k])}
        return tuple(values), rest
    return args, kwargs


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def normalized_arguments(
    self: Node,
    root: torch.nn.Module,
    arg_types: tuple[Any, ...] | None = None,
    kwarg_types: dict[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> Any:
    """Return (args, kwargs) in the order of the callee's signature, or None if it has none.

    This is `Node.normalized_arguments`; `canonical_call` goes further (aliases, operands).

    Args:
        self: the node.
        root: the module in which `call_module` targets are looked up.
        arg_types: types of the positional arguments, to choose between several signatures.
        kwarg_types: types of the keyword arguments, likewise.
        normalize_to_only_use_kwargs: give every argument by keyword where that can be.
    """
    given, only = (self.args, dict(self.kwargs)), normalize_to_only_use_kwargs
    if self.op == "call_function":
        types = arg_types, kwarg_types
        return operator_schemas.normalize_function(self.target, *given, *types, only)
    if self.op == "call_module":
        return operator_schemas.normalize_module(root, self.target, *given, only)
    return None


Node.normalized_arguments = normalized_arguments
