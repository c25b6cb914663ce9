"""When is a graph well formed? The rules in one place; passes check them after their edits.

Ownership and links, opcodes, unique names, order (placeholders first, a value before its readers,
one output at the end), users and inputs that agree, targets that exist, regions that nest.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator

import torch

from .errors import LintError
from .graph import MISSING, Graph, _enter_region, _exit_region
from .node import OPCODES, Node, _freeze, lookup

_ASSIGN = "assign node.args or node.kwargs; do not edit users by hand"


def lint(graph: Graph) -> None:
    """Check every rule for every Node; linear in Nodes and edges.

    Raises:
        LintError: for the first Node that breaks a rule.
    """
    names: set[str] = set()
    seen: dict[Node, None] = {}
    regions: list[Node] = []
    prev = graph._root
    while prev._next is not graph._root:
        node = prev._next
        for problem, hint in _broken(graph, node, prev, seen, names, regions):
            raise LintError(problem, node=node, hint=hint)
        seen[node] = None
        names.add(node._name)
        prev = node
    # Every input has its reader among its users: as many in all, and there are no others.
    edges = sum(len(node.users) - len(node._input_nodes) for node in seen)
    for node in seen if edges else ():
        for user in node.users:
            if node not in user._input_nodes:
                raise LintError(f"{user._name}, one of its users, does not read it", node=node,
                                hint=_ASSIGN)  # fmt: skip
    if regions:
        raise LintError(f"the region {regions[-1]._name} is never left", node=regions[-1],
                        hint="add its exit")  # fmt: skip


def _broken(graph: Graph, node: Node, prev: Node, seen: dict[Node, None], names: set[str],
            regions: list[Node]) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield each rule that a Node breaks, and what to do about it; `seen` are those before it."""
    op, name, args = node._op, node._name, node._args
    if node.graph is not graph:
        yield f"{name} belongs to another graph", "copy it with graph.node_copy"
    if node._erased or node._prev is not prev:
        yield f"the list is broken at {name}", "use erase_node, prepend and append only"
    if op not in OPCODES:
        yield f"{op!r} is no opcode", "one of " + ", ".join(OPCODES)
    if name in names:
        yield f"two nodes are called {name}", "rename one: node._rename('other')"
    inputs: dict[Node, None] = {}
    _freeze(args, inputs)
    if node._kwargs:
        _freeze(node._kwargs, inputs)
    for source in inputs:
        if source not in seen or node not in source.users:
            yield _input(node, source, seen)
    if list(inputs) != list(node._input_nodes):
        yield f"the inputs noted for {name} are not those in its arguments", _ASSIGN
    if op == "placeholder":
        if prev._op not in ("root", "placeholder"):
            yield (f"{name} is a placeholder behind an operation",
                   "create it inside graph.inserting_before(first node)")  # fmt: skip
        if len(args) > 1 or node._kwargs:
            yield "a placeholder has at most one argument, its default", ""
    elif op == "output":
        if node._next is not graph._root:
            yield "there is something behind the output", "a graph has one output, its last node"
        if regions:
            yield f"the output lies inside the region {regions[-1]._name}", "leave it before"
        if len(args) != 1 or node._kwargs or node.users:
            yield "an output has one argument, the returned value, and no users", ""
    elif node._target is _enter_region:
        regions.append(node)
    elif node._target is _exit_region:
        if not regions or args[:1] != (regions.pop(),):
            yield f"{name} leaves a region that is not the innermost one", "regions nest"
    elif op in ("get_attr", "call_module") and graph.owning_module is not None:
        path = str(node._target)
        value = lookup(graph.owning_module, path, MISSING)
        if value is MISSING:
            yield (f"{op} {path!r} names nothing in {type(graph.owning_module).__name__}",
                   f"add it first: gm.add_submodule({path!r}, ...) or setattr")  # fmt: skip
        if op == "call_module" and not isinstance(value, torch.nn.Module):
            yield f"call_module {path!r} is no module but {type(value).__name__}", "use get_attr"


def _input(node: Node, source: Node, seen: dict[Node, None]) -> tuple[str, str]:
    """Say what is wrong with an edge between two Nodes."""
    name, read = node._name, source._name
    if source is node:
        return (f"{name} reads itself", "replace_all_uses_with also rewired the node that you "
                "inserted: pass delete_user_cb=lambda user: user is not new")  # fmt: skip
    if source.graph is not node.graph:
        return (f"{name} reads {read}, a node of another graph",
                "map arguments while copying: graph.node_copy(node, lambda n: new[n])")  # fmt: skip
    if source._erased:
        return f"{name} reads {read}, which was erased", "replace_all_uses_with before erase_node"
    if source in seen:
        return f"{read}.users does not know its reader {name}", _ASSIGN
    if node in source._input_nodes:
        return f"{name} and {read} read each other", "let one of them read another node"
    return f"{name} reads {read}, which comes later", f"move it: {name}.prepend({read})"
