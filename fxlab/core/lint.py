"""When is a graph well formed? The rules in one place; passes check them after their edits.

Ownership and links, opcodes, unique names, order (placeholders first, a value before its readers,
one output at the end), users and inputs that agree, targets that exist, regions that nest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import LintError
from .node import OPCODES, Node, _freeze, lookup

if TYPE_CHECKING:
    from .graph import Graph

_OPCODES = frozenset(OPCODES)
_ASSIGN = "assign node.args or node.kwargs; do not edit users by hand"


def lint(graph: Graph) -> None:
    """Check every rule for every Node; linear in Nodes and edges.

    Raises:
        LintError: for the first Node that breaks a rule.
    """
    names: set[str] = set()
    seen: set[Node] = set()
    regions: list[Node] = []
    module = graph.owning_module
    known: dict[str, Any] = {}
    started, edges, users, prev = False, 0, 0, graph._root
    node = prev._next
    while node is not graph._root:
        op, name, problem = node._op, node._name, None
        if node.graph is not graph or node._prev is not prev or node._erased or op not in _OPCODES:
            problem = _links(graph, node, prev)
        elif name in names:
            problem = (f"two nodes are called {name}", "rename one: node._rename('other')")
        else:
            found: dict[Node, None] = {}
            _freeze(node._args, found)
            if node._kwargs:
                _freeze(node._kwargs, found)
            for source in found:
                if source not in seen or node not in source.users:
                    problem = _input(node, source, seen)
                    break
            edges += len(found)
            users += len(node.users)
            if problem is None and list(found) != list(node._input_nodes):
                problem = (f"the inputs noted for {name} are not those in its arguments", _ASSIGN)
        if problem is None:
            if op == "placeholder":
                if started:
                    problem = (f"{name} is a placeholder behind an operation",
                               "create it inside graph.inserting_before(first node)")  # fmt: skip
                elif len(node._args) > 1 or node._kwargs:
                    problem = ("a placeholder has at most one argument, its default", "")
            else:
                started = True
                if op == "output":
                    problem = _output(graph, node, regions)
                elif op == "call_function":
                    problem = _region(node, regions) if node._target in _REGIONS else None
                elif op != "call_method" and module is not None:
                    problem = _target(node, module, known)
        if problem is not None:
            _fail(node, *problem)
        seen.add(node)
        names.add(name)
        prev, node = node, node._next
    for node in seen if edges != users else ():
        for user in node.users:
            if node not in user._input_nodes:
                _fail(node, f"{user._name}, one of its users, does not read it", _ASSIGN)
    if regions:
        _fail(regions[-1], f"the region {regions[-1]._name} is never left", "add its exit")


def _fail(node: Node, what: str, hint: str) -> None:
    raise LintError(what, node=node, hint=hint)


def _links(graph: Graph, node: Node, prev: Node) -> tuple[str, str] | None:
    if node.graph is not graph:
        return f"{node._name} belongs to another graph", "copy it with graph.node_copy"
    if node._erased or node._prev is not prev:
        return f"the list is broken at {node._name}", "use erase_node, prepend and append only"
    if node._op not in _OPCODES:
        return f"{node._op!r} is no opcode", "one of " + ", ".join(OPCODES)
    return None


def _input(node: Node, source: Node, seen: set[Node]) -> tuple[str, str]:
    name = node._name
    if source is node:
        return (f"{name} reads itself", "replace_all_uses_with also rewired the node that you "
                "inserted: pass delete_user_cb=lambda user: user is not new")  # fmt: skip
    if source.graph is not node.graph:
        return (f"{name} reads {source._name}, a node of another graph",
                "map arguments while copying: graph.node_copy(node, lambda n: new[n])")  # fmt: skip
    if source._erased:
        return (f"{name} reads {source._name}, which was erased",
                "replace_all_uses_with before erase_node")  # fmt: skip
    if source not in seen and node in source._input_nodes:
        return f"{name} and {source._name} read each other", "let one of them read another node"
    if source not in seen:
        return (f"{name} reads {source._name}, which comes later",
                f"move it: {name}.prepend({source._name})")  # fmt: skip
    return f"{source._name}.users does not know its reader {name}", _ASSIGN


def _output(graph: Graph, node: Node, regions: list[Node]) -> tuple[str, str] | None:
    if node._next is not graph._root:
        return "there is something behind the output", "a graph has one output, its last node"
    if regions:
        return f"the output lies inside the region {regions[-1]._name}", "leave it before"
    if len(node._args) != 1 or node._kwargs or node.users:
        return "an output has one argument, the returned value, and no users", ""
    return None


def _region(node: Node, regions: list[Node]) -> tuple[str, str] | None:
    if node._target is _enter_region:
        regions.append(node)
    elif not regions or node._args[:1] != (regions.pop(),):
        return f"{node._name} leaves a region that is not the innermost one", "regions nest"
    return None


def _target(node: Node, module: Any, known: dict[str, Any]) -> tuple[str, str] | None:
    """Check that a dotted path leads somewhere in the owning module."""
    path = str(node._target)
    try:
        value = known[path] if path in known else lookup(module, path)
    except AttributeError as error:
        return (f"{node._op} {path!r} names nothing in {type(module).__name__}: {error}",
                f"add it first: gm.add_submodule({path!r}, ...) or setattr")  # fmt: skip
    known[path] = value
    if node._op == "call_module" and not isinstance(value, torch.nn.Module):
        return f"call_module {path!r} is no module but {type(value).__name__}", "use get_attr"
    return None


from .graph import _enter_region, _exit_region  # noqa: E402 - graph imports lint lazily

_REGIONS = frozenset((_enter_region, _exit_region))
