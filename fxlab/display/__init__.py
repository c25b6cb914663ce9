"""A program on paper: as a table, as code for a reader, as files that run without fxlab.

The core writes code that runs (paper, section 4.3). What is written to be looked at or taken away
is here, and is hung onto the core's classes by this import: `Graph.print_tabular`,
`GraphModule.print_readable`, `GraphModule.to_folder`, and what `verbose=True` adds to code.
"""

from __future__ import annotations

from fxlab.core.codegen import CodeGen
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node

from .folder import to_folder
from .readable import Comments, print_readable, print_tabular, shape_text

__all__ = ["Comments", "print_readable", "print_tabular", "shape_text", "to_folder"]

CodeGen.comments = Comments
Node._shape_text = shape_text
Graph.print_tabular = print_tabular
GraphModule.print_readable = print_readable
GraphModule.to_folder = to_folder
