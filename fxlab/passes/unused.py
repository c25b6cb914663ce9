"""What of a program does nobody use?

The two clean-ups that are methods: `Graph.eliminate_dead_code` and
`GraphModule.delete_all_unused_submodules`. A graph without control flow (paper, section 5.5) makes
the first one walk from the end: when a Node is reached, all its readers have been decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node


def erase_unread(graph: Graph, keep: Callable[[Node], bool]) -> None:
    """Erase what nobody reads, asking `keep` about each Node, last ones first."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not keep(node):
            graph.erase_node(node)


def eliminate_dead_code(self: Graph, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
    """Erase the Nodes whose value nobody reads and whose erasure nobody could notice.

    This is `Graph.eliminate_dead_code`; `dce` does the same to a module and reports.

    Args:
        self: the graph, which is edited in place.
        is_impure_node: says which Nodes to keep, instead of `Node.is_impure`.
            `torch.fx.Node.is_impure` has torch.fx's narrower idea of an effect, which erases
            in-place operations whose result nobody reads.

    Returns:
        Whether anything was erased.
    """
    self.lint()
    before = len(self.nodes)
    erase_unread(self, is_impure_node or Node.is_impure)
    return len(self.nodes) != before


def delete_all_unused_submodules(self: GraphModule) -> None:
    """Delete the sub-modules that no Node calls or reads and that hold none that one does.

    This is `GraphModule.delete_all_unused_submodules`.
    """
    read = {n.target for n in self.graph.nodes if n.op in ("call_module", "get_attr")}
    used = {prefix for target in read for prefix in _prefixes(target)}
    for path in [path for path, _ in self.named_modules(remove_duplicate=False) if path]:
        if path not in used and read.isdisjoint(_prefixes(path)):
            self.delete_submodule(path)


def _prefixes(path: str) -> set[str]:
    """Return every path on the way to `path`, itself too."""
    return set(itertools.accumulate(path.split("."), "{}.{}".format))


Graph.eliminate_dead_code = eliminate_dead_code
GraphModule.delete_all_unused_submodules = delete_all_unused_submodules
