"""What does a reader want to see of a program that Python does not need?

The line of the user's file that a statement stands for, dtype and shape of its value, and no
deletions of values. `graph.python_code("self", verbose=True)` and `gm.print_readable()` write it;
the text still is code that runs. (The paper's figures print code in this way.)
"""

from __future__ import annotations

import linecache
from typing import Any

from fxlab.core.errors import CodegenError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node

from .printed import shape_text

_OPTIONS = ("include_stride", "include_device", "colored", "additional_meta")


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
