"""How is a program printed: the graph, one Node, a shape?

`print(graph)` shows the IR of the paper's section 4.2, one Node a line. The text is torch.fx's, so
that what somebody knows from there can be read here.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from fxlab.core.graph import Graph
from fxlab.core.node import Node, map_aggregate, target_text


def shape_text(value: Any) -> str:
    """Return dtype and shape of a tensor, a Node's value, or tensor metadata: `f32[8, 3]`.

    Args:
        value: a tensor, a Node whose meta has `tensor_meta` or `val`, a TensorMetadata, or a
            tuple or list of those. Anything else gives "".
    """
    if isinstance(value, Node):
        meta = value.meta
        value = meta.get("tensor_meta", meta.get("val", meta.get("example_value")))
    whole: Any = value
    if isinstance(value, (tuple, list)) and not hasattr(value, "shape"):
        parts = [shape_text(v) for v in whole[:8]]
        return "(" + ", ".join(parts) + ")" if any(parts) else ""
    if not hasattr(whole, "shape") or not hasattr(whole, "dtype"):
        return ""
    sizes = ", ".join(str(size) for size in whole.shape)
    return f"{_DTYPES.get(whole.dtype, str(whole.dtype).removeprefix('torch.'))}[{sizes}]"


_DTYPES = {getattr(torch, name): short for name, short in {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8",
    "complex64": "c64", "complex128": "c128", "quint8": "qu8", "qint8": "qi8", "qint32": "qi32",
}.items()}  # fmt: skip


def type_text(kind: Any) -> str:
    """Return an annotation as text, short for classes."""
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias):
        return str(kind)
    builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if builtin else f"{kind.__module__}.{kind.__qualname__}"


class _Text(str):
    """Text that shows without quotes inside a container's repr."""

    __repr__ = str.__str__


def format_arg(arg: Any) -> str:
    """Return an argument as `print(graph)` shows it: Nodes with a %."""

    def leaf(a: Any) -> _Text:
        custom = getattr(a, "_custom_fx_repr_fn", None)
        return _Text(f"%{a}" if isinstance(a, Node) else custom() if custom else str(a))

    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k}: {format_arg(v)}" for k, v in arg.items()) + "}"
    return str(map_aggregate(arg, leaf))


def format_node(
    self: Node,
    placeholder_names: list[str] | None = None,
    maybe_return_typename: list[str] | None = None,
    *,
    include_tensor_metadata: bool = False,
) -> str | None:
    """Return the line that `print(graph)` shows for this Node.

    Args:
        self: the Node.
        placeholder_names: when given, a placeholder's text is appended there, None is returned.
        maybe_return_typename: when given, an output's annotation is written to its element 0.
        include_tensor_metadata: show dtype and shape from `meta` where known.
    """
    op, kind = self.op, "" if self.type is None else type_text(self.type)
    if op == "placeholder" and placeholder_names is not None:
        placeholder_names.append(f"{self.target}: {kind}" if kind else str(self.target))
        return None
    if op == "output":
        if kind and maybe_return_typename:
            maybe_return_typename[0] = f" -> {kind}"
        return f"return {self.args[0] if self.args else None}"
    shown = (include_tensor_metadata and op[:4] == "call" and shape_text(self)) or kind
    text = (f"%{self.name} : {shown}{' ' if shown else ''}[num_users={len(self.users)}] = {op}"
            f"[target={target_text(self.target)}]")  # fmt: skip
    if op == "placeholder":
        return f"{text}(default={self.args[0]})" if self.args else text
    if op == "get_attr":
        return text
    return f"{text}(args = {format_arg(self.args)}, kwargs = {format_arg(self._kwargs)})"


def _stack_trace(self: Node) -> str | None:
    """Return the place in the user's source that made a Node, as text; outermost frame first."""
    kept, frames = self.meta.get("stack_trace"), self.meta.get("source")
    if kept is not None or not frames:
        return kept
    return "\n".join(f'  File "{f}", line {n}, in {fn}' for f, n, fn in reversed(frames))


def _set_stack_trace(self: Node, trace: str | None) -> None:
    self.meta["stack_trace"] = trace


stack_trace = property(_stack_trace, _set_stack_trace)


def graph_text(self: Graph) -> str:
    """Return what `print(graph)` shows."""
    returns = [""]
    lines = [format_node(node, None, returns) or "" for node in self.nodes]
    return "\n    ".join([f"graph(){returns[0]}:", *lines])


def print_tabular(self: Graph, print_output: bool = True) -> str:
    """Print the Nodes as a table of opcode, name, target, args, kwargs; return its text.

    Args:
        self: the Graph.
        print_output: False returns the text alone.

    >>> import fxlab
    >>> _ = fxlab.symbolic_trace(lambda x: x.neg()).graph.print_tabular()
    opcode       name    target  args    kwargs
    -----------  ------  ------  ------  ------
    placeholder  x       x       ()      {}
    call_method  neg     neg     (x,)    {}
    output       output  output  (neg,)  {}
    """
    rows = [["opcode", "name", "target", "args", "kwargs"]]
    for n in self.nodes:
        args, kwargs = (format_arg(a).replace("%", "") for a in (n.args, n.kwargs))
        rows.append([n.op, n.name, target_text(n.target), args, kwargs])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    text = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    if print_output:
        print(text)
    return text
