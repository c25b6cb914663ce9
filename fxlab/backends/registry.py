"""Which function says an operation in ONNX?

A table from what a Graph calls (functions, method names, module classes) to *converters*; see
`fxlab.backends.onnx` for how they are used and how a student adds one (section 6.4 of the paper).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["Unsupported", "converter", "find_converter", "functional_form"]

_REGISTRY: dict[Any, Callable[..., Any]] = {}


class Unsupported(Exception):
    """Raised by a converter that cannot express a call in ONNX; its text is the reason."""


def converter(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the way to express `targets` in ONNX.

    Args:
        targets: functions, module classes (the converter then gets the module first), or names of
            Tensor methods. A later registration replaces an earlier one.

    Returns:
        A decorator that gives the function back. It takes ``(ctx: Builder, *args, **kwargs)`` with
        `OnnxValue` for tensors, and returns an OnnxValue or a tuple of them.

    Example:
        >>> import torch
        >>> @converter(torch.special.entr, "entr")
        ... def entr(ctx, x):
        ...     return ctx.op("Neg", ctx.op("Mul", x, ctx.op("Log", x)))
        >>> find_converter("call_method", "entr") is entr
        True
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _REGISTRY.update(dict.fromkeys(targets, function))
        return function

    return register


_INPLACE = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
} | {operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor}


def find_converter(op: str, target: Any) -> Callable[..., Any] | None:
    """Return the converter for a call, None when there is none.

    Args:
        op: ``call_function``, ``call_method`` or ``call_module``.
        target: the function, the method's name, or the module.
    """
    if op == "call_module":
        for kind in type(target).__mro__:
            if kind in _REGISTRY and kind.forward is type(target).forward:
                return _REGISTRY[kind]
        return None
    if target in _REGISTRY:
        return _REGISTRY[target]
    name = "" if isinstance(target, str) else _name_of_method(target)
    if name in _REGISTRY:
        return _REGISTRY[name]
    if isinstance(target, torch._ops.OpOverload):
        for home in (torch, F):  # functions in Python have other parameters than the operator
            function = getattr(home, name, None)
            if function in _REGISTRY and not inspect.isfunction(function):
                return _REGISTRY[function]
    functional = functional_form(op, target)
    return None if functional is None else find_converter(*functional)


def _name_of_method(target: Any) -> str:
    """The method of Tensor that an ATen operator or an unbound method stands for, else ""."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    name = getattr(target, "__name__", "")
    return name if getattr(torch.Tensor, name, None) is target else ""


def functional_form(op: str, target: Any) -> tuple[str, Any] | None:
    """Return the call ``(op, target)`` that computes what an in-place call leaves in its argument.

    Args:
        op: ``call_function`` or ``call_method``.
        target: the function or the method's name.

    Returns:
        None when the call is not known to be an in-place form of another.

    Example:
        >>> functional_form("call_method", "add_")
        ('call_method', 'add')
    """
    if target in _INPLACE:
        return "call_function", _INPLACE[target]
    name = target if isinstance(target, str) else _name_of_method(target)
    if name.endswith("_") and not name.endswith("__"):
        return "call_method", name[:-1]
    name = getattr(target, "__name__", "")
    if name.endswith("_"):
        for home in (torch, F):
            if getattr(home, name, None) is target and hasattr(home, name[:-1]):
                return "call_function", getattr(home, name[:-1])
    return None
