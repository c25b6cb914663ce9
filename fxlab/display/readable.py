"""What does a reader want to see of a program that Python does not need?

The line of the user's file that a statement stands for, dtype and shape of its value, and no
deletions of values. `graph.python_code("self", verbose=True)` and `gm.print_readable()` write it;
the text still is code that runs. (The paper's figures print code in this way.)
"""

from __future__ import annotations

import linecache
from typing import Any

import torch

from fxlab.core.errors import CodegenError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, format_arg, target_text

_OPTIONS = ("include_stride", "include_device", "colored", "additional_meta")


def shape_text(value: Any) -> str:
    """Return dtype and shape of a tensor, a Node's value, or tensor metadata: `f32[8, 3]`.

    Args:
        value: a tensor, a Node whose meta has `tensor_meta` or `val`, a TensorMetadata, or a
            tuple or list of those. Anything else gives "".
    """
    if isinstance(value, Node):
        meta = value.meta
        value = meta.get("tensor_meta", meta.get("val", meta.get("example_value")))
    if isinstance(value, (tuple, list)) and not hasattr(value, "shape"):
        parts = [shape_text(v) for v in value[:8]]
        return "(" + ", ".join(parts) + ")" if any(parts) else ""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return ""
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"


_DTYPES = {getattr(torch, name): short for name, short in {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8",
    "complex64": "c64", "complex128": "c128", "quint8": "qu8", "qint8": "qi8", "qint32": "qi32",
}.items()}  # fmt: skip


class Comments:
    """What verbose code shows above and beside the statements of one function.

    Args:
        options: `include_stride`, `include_device`, `colored` (true or false), and
            `additional_meta`, a list of keys of `node.meta`.

    Raises:
        CodegenError: there is no such option.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        unknown = sorted(name for name, value in options.items() if value and name not in _OPTIONS)
        if unknown:
            raise CodegenError(
                f"python_code has no option {unknown[0]}", expected=", ".join(_OPTIONS)
            )
        self.options = options
        self._last: Any = None

    def above(self, node: Node) -> list[str]:
        """Return the comment lines above a statement: its source line if new, and chosen meta."""
        notes: list[str] = []
        source = node.meta.get("source", self._last)
        if source and source != self._last:
            file, line, function = source[0]
            code = linecache.getline(file, line).strip()
            notes.append(f"# File: {file}:{line} in {function}, code: {code}")
        self._last = source
        keys = [key for key in self.options.get("additional_meta") or () if key in node.meta]
        return notes + [" ".join(f"# {key}: {node.meta[key]}".split("\n")) for key in keys]

    def beside(self, node: Node) -> str:
        """Return dtype and shape behind a name, as a string annotation, or ""."""
        text, value = shape_text(node), node.meta.get("val", node.meta.get("tensor_meta"))
        for name in ("stride", "device"):
            if text and self.options.get(f"include_{name}"):
                part = getattr(value, name, "")
                text += str(part() if callable(part) else part)
        paint = "\033[34m{}\033[0m" if self.options.get("colored") else "{}"
        return f': "{paint.format(text)}"' if text else ""


def print_readable(self: GraphModule, print_output: bool = True, **options: Any) -> str:
    """Print the code for a reader: shapes and source lines, no deletions; return its text.

    Args:
        self: the module; GraphModules in it are shown behind it.
        print_output: print it, or only return it.
        options: `include_stride`, `include_device`, `colored`, `expanded_def`,
            `additional_meta` (a list of keys of `node.meta` to show).
    """
    text = _readable(self, self._get_name(), options)
    if print_output:
        print(text)
    return text


def _readable(gm: GraphModule, name: str, options: dict[str, Any]) -> str:
    code = gm.graph.python_code("self", verbose=True, delete_values=False, **options)
    inner = [(n, m) for n, m in gm.named_children() if isinstance(m, GraphModule)]
    parts = [code.src.strip(), *(_readable(module, child, options) for child, module in inner)]
    body = "\n\n".join(parts).replace("\n", "\n    ")
    return f"class {name}(torch.nn.Module):\n    {body}\n"


def print_tabular(self: Graph, print_output: bool = True) -> str:
    """Print the Nodes as a table of opcode, name, target, args, kwargs; return its text.

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
