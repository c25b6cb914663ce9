"""When is a graph well formed? The rules in one place; passes check them after their edits.

Ownership and links, opcodes, unique names, order (placeholders first, a value before its readers,
one output at the end), users and inputs that agree, targets that exist, regions that nest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import LintError, call_site
from .node import OPCODES, Node, map_arg

if TYPE_CHECKING:
    from .graph import Graph

_OPCODES = frozenset(OPCODES)


def lint(graph: Graph) -> None:
    """Check every rule for every Node; linear in Nodes and edges.

    Raises:
        LintError: for the first Node that breaks a rule.
    """
    seen_names: set[str] = set()
    seen: set[Node] = set()
    regions: list[Node] = []
    module = graph.owning_module
    known: dict[str, Any] = {}
    started, prev = False, graph._root
    node = prev._next
    while node is not graph._root:
        problem = _links(graph, node, prev) or _inputs(node, seen)
        op = node._op
        if problem is None and node._name in seen_names:
            problem = (f"two nodes are called {node._name}", "rename one: node._rename('other')")
        if problem is None:
            if op == "placeholder":
                if started:
                    problem = (f"{node._name} is a placeholder behind an operation",
                               "create placeholders with graph.inserting_before(first node)")  # fmt: skip
                elif len(node._args) > 1 or node._kwargs:
                    problem = ("a placeholder has at most one argument, its default", "")
            else:
                started = True
                if op == "output":
                    problem = _output(graph, node, regions)
                elif op == "call_function":
                    problem = _region(node, regions) if node._target in _REGIONS else None
                elif op != "call_method":
                    problem = _target(node, module, known)
        if problem is not None:
            what, hint = problem
            raise LintError(what, node=node, where=node.meta.get("source") or call_site(),
                            hint=hint)  # fmt: skip
        seen.add(node)
        seen_names.add(node._name)
        prev, node = node, node._next
    if regions:
        raise LintError(f"the region {regions[-1]._name} is never left", node=regions[-1],
                        hint="erase the enter node, or add its exit")  # fmt: skip


def _links(graph: Graph, node: Node, prev: Node) -> tuple[str, str] | None:
    if node.graph is not graph:
        return f"{node._name} belongs to another graph", "copy it with graph.node_copy"
    if node._erased or node._prev is not prev:
        return f"the list is broken at {node._name}", "use erase_node, prepend and append only"
    if node._op not in _OPCODES:
        return f"{node._op!r} is no opcode", "one of " + ", ".join(OPCODES)
    return None


def _inputs(node: Node, seen: set[Node]) -> tuple[str, str] | None:
    for source in node._input_nodes:
        if source not in seen:
            if source.graph is not node.graph:
                return (f"{node._name} reads {source._name}, a node of another graph",
                        "map arguments while copying: graph.node_copy(node, lambda n: new[n])")  # fmt: skip
            if source._erased:
                return (f"{node._name} reads {source._name}, which was erased",
                        "replace_all_uses_with before erase_node")  # fmt: skip
            if source is node:
                return (f"{node._name} reads itself",
                        "replace_all_uses_with also rewired the node that you inserted: build it "
                        "afterwards, or pass delete_user_cb=lambda user: user is not new")  # fmt: skip
            return (f"{node._name} reads {source._name}, which comes later or is not in the graph",
                    f"move it: {node._name}.prepend({source._name})")  # fmt: skip
        if node not in source.users:
            return (f"{source._name}.users does not know its reader {node._name}",
                    "assign node.args; do not edit users by hand")  # fmt: skip
    found: dict[Node, None] = {}
    if any(type(a) is not Node for a in node._args) or node._kwargs:
        map_arg((node._args, node._kwargs), lambda n: found.setdefault(n))
    else:
        found = dict.fromkeys(node._args)
    if found.keys() != node._input_nodes.keys():
        return (f"the inputs noted for {node._name} are not those in its arguments",
                "assign node.args or node.kwargs as a whole")  # fmt: skip
    for user in node.users:
        if node not in user._input_nodes:
            return (f"{node._name}.users lists {user._name}, which does not read it",
                    "assign node.args; do not edit users by hand")  # fmt: skip
    return None


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
    elif not regions or node._args[:1] != (regions[-1],):
        return (f"{node._name} leaves a region that is not the innermost one",
                "regions nest like with blocks")  # fmt: skip
    else:
        regions.pop()
    return None


def _target(node: Node, module: Any, known: dict[str, Any]) -> tuple[str, str] | None:
    """Check that a dotted path leads somewhere in the owning module, if there is one."""
    if module is None:
        return None
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


def lookup(module: Any, path: str) -> Any:
    """Return what a dotted path leads to.

    Raises:
        AttributeError: naming the part that is missing.
    """
    for part in path.split("."):
        try:
            module = getattr(module, part)
        except AttributeError:
            raise AttributeError(f"{type(module).__name__} has no {part!r}") from None
    return module


from .graph import _enter_region, _exit_region  # noqa: E402 - graph imports lint lazily

_REGIONS = frozenset((_enter_region, _exit_region))
