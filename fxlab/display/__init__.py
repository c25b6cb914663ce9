"""A program on paper: printed, as a table, as code for a reader, as files without fxlab.

The core writes code that runs (paper, section 4.3). What is written to be looked at or taken away
is here, and is hung onto the core's classes by this import: `Node.format_node` and `stack_trace`,
`print(graph)` and `print_tabular`, `GraphModule.print_readable` and `to_folder`, and what
`verbose=True` adds to code.
"""

from __future__ import annotations

from fxlab.core.codegen import CodeGen
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node

from .folder import to_folder
from .printed import format_node, graph_text, print_tabular, shape_text, stack_trace
from .readable import Comments, print_readable

__all__ = ["Comments", "print_readable", "print_tabular", "shape_text", "to_folder"]

CodeGen.comments = Comments
Node.format_node = format_node
Node.stack_trace = stack_trace
Graph.__str__ = graph_text
Graph.print_tabular = print_tabular
GraphModule.print_readable = print_readable
GraphModule.to_folder = to_folder
