"""How is one program cut into several that are called one after the other?

Lowering (section 6.4 of the paper), pipelining and remote execution all need it: each part becomes
a GraphModule of its own and the outer program calls them. `split_module` and `split_by_tags` have
torch.fx's signatures; `split_nodes` is what they, the partitioner and the pipeline share. Unlike a
cut by data alone, writes to shared tensors keep their order across parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxlab.core.errors import RewriteError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, add_ancestors
from fxlab.core.purity import effect
from fxlab.passes.base import as_pass, report
from fxlab.passes.effects import order_constraints
from fxlab.passes.order import Regions, RegionWriter, topological_order, unit_name

__all__ = [
    "Partition",
    "split_by_tags",
    "split_module",
    "split_module_simple",
    "split_nodes",
    "value_bytes",
]


class Partition:
    """One part of a split: its nodes, what it reads and returns, and the graph made from it.

    Attributes:
        name: the part's identifier as text; ``submod_name`` is its attribute on the split module.
        nodes: nodes of the original graph, in order.
        inputs: original nodes whose values come in, in order of first use.
        outputs: original nodes whose values go out, in the order in which they are first read.
        graph: the part's own graph.
        environment: original node -> node of ``graph``.
        targets: attribute path in the part -> object.

    Args:
        name: the part's identifier.
        submod_name: its attribute; ``submod_<name>`` when None.
    """

    def __init__(self, name: str, submod_name: str | None = None) -> None:
        self.name = name
        self.submod_name = submod_name or f"submod_{name}"
        self.nodes: list[Node] = []
        self.inputs: dict[Node, None] = {}
        self.outputs: dict[Node, None] = {}
        self.attributes: dict[Node, None] = {}
        self.graph = Graph()
        self.environment: dict[Node, Node] = {}
        self.targets: dict[str, Any] = {}
        self._path_of: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"Partition({self.submod_name}: {len(self.nodes)} nodes, "
            f"{[n.name for n in self.inputs]} -> {[n.name for n in self.outputs]})"
        )

    def rename(self, path: str, keep: bool) -> str:
        """Return the path under which the part owns the object at `path`; that one if `keep`."""
        if keep:
            return path
        if path not in self._path_of:
            base = name = path.replace(".", "_")
            taken = set(self._path_of.values())
            count = 1
            while name in taken:  # "a.b_c" and "a_b.c" must not become one attribute
                name, count = f"{base}_{count}", count + 1
            self._path_of[path] = name
        return self._path_of[path]


def value_bytes(value: Any) -> int | None:
    """Return the size in bytes of a node's value by its meta, None when shapes are not known.

    Args:
        value: a Node (its ``meta["tensor_meta"]``, ``["val"]`` or ``["example_value"]`` is read),
            a tensor, a TensorMetadata, a number, or a container of these.
    """
    if isinstance(value, Node):
        for key in ("tensor_meta", "val", "example_value"):
            if key in value.meta:
                return value_bytes(value.meta[key])
        return None
    if isinstance(value, torch.Size):
        return 8 * len(value)
    if isinstance(value, (int, float, bool)):
        return 8
    if hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), torch.dtype):
        count = 1
        for size in value.shape:
            count *= int(size)
        return count * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        sizes = [value_bytes(item) for item in value]
        return None if any(s is None for s in sizes) else sum(s for s in sizes if s is not None)
    return None


def _lookup(gm: torch.nn.Module, path: str, node: Node) -> Any:
    found: Any = gm
    for atom in path.split("."):
        if not hasattr(found, atom):
            raise RewriteError(f"the module has no attribute {path!r}", node=node)
        found = getattr(found, atom)
    return found


def _is_leaf_input(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def split_nodes(
    gm: GraphModule,
    part_of: Mapping[Node, Partition],
    *,
    own_attributes: bool = True,
    keep_paths: bool = True,
    keep_original_order: bool = False,
    keep_original_node_name: bool = False,
    keep_original_input_name: bool = True,
    tuple_return: bool = False,
    qualname_map: dict[str, str] | None = None,
    report_as: str = "split_module",
    constraints: tuple[list[tuple[Node, Node]], list[tuple[Node, Node]]] | None = None,
) -> GraphModule:
    """Return a new module in which each part of `gm` is a GraphModule called in a valid order.

    Nodes without a part stay in the outer graph. Parts share parameters, buffers and submodules
    with `gm`; `gm` is left untouched. Every step is linear in nodes and edges but for the heap
    that keeps the order of parts stable.

    Args:
        gm: the program to cut.
        part_of: the part of each node that is to move into one.
        own_attributes: whether a part reads parameters itself; otherwise it gets them as inputs.
        keep_paths: whether submodules keep their dotted path inside a part.
        keep_original_order: call parts in order of their first node; an order that this makes
            wrong is an error.
        keep_original_node_name: give nodes of the parts their old names even where a name
            clashes with Python or torch; without it they have them wherever that is possible.
        keep_original_input_name: name a part's inputs after the values; otherwise ``arg_0``...
        tuple_return: whether a part with one output returns a tuple, too.
        qualname_map: filled with ``"<part>.<path>" -> "<old path>"``.
        report_as: the key of the report in ``meta["reports"]``.
        constraints: what `order_constraints` says of `gm`, when the caller has it already.

    Returns:
        The outer GraphModule. ``meta["partition_names"]`` are its parts, and the report lists
        each boundary value with its bytes (None while shapes are not known).

    Raises:
        RewriteError: the parts need each other in a cycle (a RuntimeError, as in torch.fx), or
            code that is not known, and may write to what it reads, would run in another order.
    """
    nodes = list(gm.graph.nodes)
    regions = Regions(nodes)
    nodes = [node for node in nodes if node not in regions.borders]
    output = nodes[-1]
    units: dict[Any, None] = {}
    for node in nodes:
        if not _is_leaf_input(node) and node is not output:
            units.setdefault(part_of.get(node, node))
    for part in units:
        if isinstance(part, Partition):
            part.nodes.clear()
    edges: dict[Any, dict[Any, tuple[Node, Node]]] = {}
    soft_edges: list[tuple[Any, Any, tuple[Node, Node]]] = []

    for node in nodes:
        if _is_leaf_input(node):
            continue
        part = part_of.get(node)
        if part is not None:
            part.nodes.append(node)
        unit = part if part is not None else node
        for value in node.all_input_nodes:
            origin = part_of.get(value)
            if origin is not None and origin is not part:
                origin.outputs.setdefault(value)
            if part is not None and origin is not part:
                if value.op == "get_attr" and (own_attributes or _holds_module(gm, value)):
                    part.attributes.setdefault(value)
                else:
                    part.inputs.setdefault(value)
            source = origin if origin is not None else value
            if source is not unit and not _is_leaf_input(value) and node is not output:
                edges.setdefault(source, {}).setdefault(unit, (value, node))
    notes: list[str] = []
    hard, soft = order_constraints(gm) if constraints is None else constraints
    for before, after in hard:
        a, b = part_of.get(before, before), part_of.get(after, after)
        if a is not b:
            edges.setdefault(a, {}).setdefault(b, (before, after))
    _keep_setters(gm, regions, part_of, edges)
    for before, after in soft:
        a, b = part_of.get(before, before), part_of.get(after, after)
        if a is not b and b not in edges.get(a, {}):
            soft_edges.append((a, b, (before, after)))
    order = _ordered(gm, list(units), edges, soft_edges, notes)
    if keep_original_order:
        _check_order(list(units), edges)
        order = list(units)
    parts = [unit for unit in order if isinstance(unit, Partition)]

    for part in parts:
        _fill_part(gm, part, regions, keep_paths, keep_original_node_name, keep_original_input_name)
        values = tuple(part.environment[node] for node in part.outputs)
        part.graph.output(values[0] if len(values) == 1 and not tuple_return else values)
        if qualname_map is not None:
            for old in dict.fromkeys(str(n.target) for n in part.nodes if n.op == "call_module"):
                qualname_map[f"{part.submod_name}.{part.rename(old, keep_paths)}"] = old

    base, targets, env = Graph(), {}, {}
    needed = {v for u in order if isinstance(u, Partition) for v in u.inputs}
    needed.update(v for n in nodes if n not in part_of for v in n.all_input_nodes)
    for node in nodes:
        if node.op == "placeholder":
            env[node] = base.node_copy(node)
            if keep_original_node_name and env[node].name != node.name:
                env[node].name = node.name
    for node in nodes:
        if node.op == "get_attr" and (node in needed or not own_attributes):
            env[node] = base.node_copy(node)
            targets[str(node.target)] = _lookup(gm, str(node.target), node)
    writer = RegionWriter(base, regions, env)
    for unit in order:
        if isinstance(unit, Partition):
            writer.close()
            _call_part(base, env, unit, targets, gm, tuple_return)
        else:
            writer.copy(unit)
            if unit.op == "call_module":
                targets[str(unit.target)] = _lookup(gm, str(unit.target), unit)
    writer.close()
    base.node_copy(output, env.__getitem__)
    base.set_codegen(gm.graph._codegen)
    result = GraphModule(targets, base, type(gm).__name__)
    result.training = gm.training
    result.meta.update({k: v for k, v in gm.meta.items() if k != "reports"})
    result.meta["reports"] = dict(gm.meta.get("reports", {}))
    result.meta["partition_names"] = {part.submod_name for part in parts}
    result.graph.lint()
    _report(result, report_as, parts, part_of, notes)
    return result


def _holds_module(gm: GraphModule, node: Node) -> bool:
    return isinstance(_lookup(gm, str(node.target), node), torch.nn.Module)


def _keep_setters(
    gm: GraphModule,
    regions: Regions,
    part_of: Mapping[Node, Partition],
    edges: dict[Any, dict[Any, tuple[Node, Node]]],
) -> None:
    """A raw switch of the grad mode has no exit, so what follows it stays after what precedes."""
    before: dict[Any, Node] = {}
    for node in gm.graph.nodes if regions.setters else ():
        if _is_leaf_input(node) or node.op == "output" or node in regions.borders:
            continue
        unit = part_of.get(node, node)
        here = regions.at.get(node, ())
        for other, last in before.items():
            if other is not unit and regions.at.get(last, ()) != here:
                edges.setdefault(other, {}).setdefault(unit, (last, node))
        before[unit] = node


def _ordered(
    gm: GraphModule,
    units: list[Any],
    edges: dict[Any, dict[Any, tuple[Node, Node]]],
    soft_edges: list[tuple[Any, Any, tuple[Node, Node]]],
    notes: list[str],
) -> list[Any]:
    """Topological order that also keeps the order of random draws where that is possible.

    Raises:
        RewriteError: there is none; or none that keeps code that may write to its inputs in place.
    """
    kept = {a: dict(b) for a, b in edges.items()}
    draws: list[tuple[Any, Any, tuple[Node, Node]]] = []
    for a, b, why in soft_edges:
        if any(effect(node, gm, impure_random=False) is not None for node in why):
            kept.setdefault(a, {}).setdefault(b, why)
        else:
            draws.append((a, b, why))
    order = topological_order(units, kept)
    for a, b, why in draws:
        kept.setdefault(a, {}).setdefault(b, why)
    try:
        return topological_order(units, kept) if draws else order
    except RewriteError as error:
        notes.append(f"random numbers are drawn in another order: {error.message}")
        return order


def _check_order(units: list[Any], edges: dict[Any, dict[Any, tuple[Node, Node]]]) -> None:
    position = {unit: index for index, unit in enumerate(units)}
    for a, followers in edges.items():
        for b, (value, user) in followers.items():
            if position[a] > position[b]:
                raise RewriteError(
                    f"keep_original_order=True would call {unit_name(b)} before {unit_name(a)}, "
                    f"whose {value.name} it needs",
                    node=user,
                    hint="leave keep_original_order off",
                )


def _describe(new: Node, value: Node) -> None:
    """Give a node that hands a value on what is known of that value."""
    meta = {k: v for k, v in value.meta.items() if k not in ("param_kind", "param_default")}
    new.meta = {**meta, **new.meta}
    add_ancestors(new, [value])


def _fill_part(
    gm: GraphModule,
    part: Partition,
    regions: Regions,
    keep_paths: bool,
    keep_node_name: bool,
    keep_input_name: bool,
) -> None:
    """Copy the part's nodes into its graph, opening and closing regions where they need it."""
    env = part.environment
    for index, value in enumerate(part.inputs):
        name = value.name if keep_input_name else f"arg_{index}"
        env[value] = part.graph.placeholder(name, type_expr=value.type)
        _describe(env[value], value)
    for value in part.attributes:
        path = str(value.target)
        env[value] = part.graph.node_copy(value)
        part.targets[path] = _lookup(gm, path, value)
    writer = RegionWriter(part.graph, regions, env)
    for node in part.nodes:
        copy = writer.copy(node)
        if keep_node_name and copy.name != node.name:
            copy.name = node.name
        if node.op == "call_module":
            path = str(node.target)
            name = part.rename(path, keep_paths)
            part.targets[name] = _lookup(gm, path, node)
            if name != path:
                copy.target = name
    writer.close()


def _call_part(
    base: Graph,
    env: dict[Node, Node],
    part: Partition,
    targets: dict[str, Any],
    gm: GraphModule,
    tuple_return: bool,
) -> None:
    module = GraphModule(part.targets, part.graph, part.submod_name)
    module.training = gm.training
    targets[part.submod_name] = module
    call = base.call_module(part.submod_name, tuple(env[value] for value in part.inputs))
    if len(part.outputs) == 1 and not tuple_return:
        (value,) = part.outputs
        _describe(call, value)
        env[value] = call
        return
    for index, value in enumerate(part.outputs):
        item = base.call_function(operator.getitem, (call, index))
        _describe(item, value)
        env[value] = item


def _report(
    result: GraphModule,
    name: str,
    parts: Sequence[Partition],
    part_of: Mapping[Node, Partition],
    notes: list[str],
) -> None:
    boundaries = [
        {
            "value": value.name,
            "from": part_of[value].submod_name if value in part_of else value.op,
            "to": part.submod_name,
            "bytes": value_bytes(value),
        }
        for part in parts
        for value in part.inputs
    ]
    report(
        result,
        name,
        [f"{part.submod_name}: {len(part.nodes)} nodes" for part in parts],
        notes,
        parts={
            part.submod_name: {
                "nodes": len(part.nodes),
                "inputs": {node.name: value_bytes(node) for node in part.inputs},
                "outputs": {node.name: value_bytes(node) for node in part.outputs},
            }
            for part in parts
        },
        boundaries=boundaries,
    )


@as_pass
def split_module(
    m: GraphModule,
    root_m: torch.nn.Module | None,
    split_callback: Callable[[Node], Any],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool | None = False,
    keep_original_node_name: bool | None = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """Return a new module that calls one submodule per value of `split_callback`.

    The result computes what `m` computes, writes to shared tensors included. Parts are called in
    a topological order that otherwise follows their first nodes. Parameters are read by the outer
    module and passed in, as torch.fx does it.

    Args:
        m: the program; left untouched.
        root_m: not used, as in torch.fx.
        split_callback: gives each node (but placeholders, get_attr and output) a part identifier.
        qualname_map: filled with new target -> old target of the called modules.
        keep_original_order: call the parts in the order of their first nodes.
        keep_original_node_name: keep node names inside the parts.
        keep_original_input_name: name the parts' inputs after the values, else ``arg_0``, ...
        partition_affix: parts are named ``submod_<affix>_<identifier>``.
        tuple_return: parts with one output return a tuple, too.

    Returns:
        The outer GraphModule; ``meta["reports"]["split_module"]`` lists what crosses each border.

    Raises:
        RewriteError: the identifiers make parts that need each other in a cycle.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1) * 2)
        >>> two = split_module(gm, None, lambda n: int(n.name == "mul"))
        >>> [n.name for n in two.graph.nodes]
        ['x', 'submod_0', 'submod_1', 'output']
    """
    parts: dict[Any, Partition] = {}
    part_of = {}
    for node in m.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        identifier = split_callback(node)
        if identifier not in parts:
            affix = "" if partition_affix is None else f"{partition_affix}_"
            parts[identifier] = Partition(f"{affix}{identifier}")
        part_of[node] = parts[identifier]
    return split_nodes(
        m,
        part_of,
        own_attributes=False,
        keep_paths=False,
        keep_original_order=bool(keep_original_order),
        keep_original_node_name=bool(keep_original_node_name),
        keep_original_input_name=keep_original_input_name,
        tuple_return=tuple_return,
        qualname_map=qualname_map,
    )


def split_module_simple(
    m: GraphModule, node_to_partition: Mapping[Node, int], *, partition_affix: str | None = None
) -> GraphModule:
    """Return `split_module` of a ready-made assignment of nodes to parts.

    Args:
        m: the module to split; it stays as it is.
        node_to_partition: the part of each node.
        partition_affix: as in `split_module`.
    """
    return split_module(m, None, node_to_partition.__getitem__, partition_affix=partition_affix)


@as_pass
def split_by_tags(
    gm: GraphModule,
    tags: list[str],
    return_fqn_mapping: bool = False,
    return_tuple: bool = False,
    GraphModuleCls: type[GraphModule] = GraphModule,
) -> GraphModule | tuple[GraphModule, dict[str, str]]:
    """Return a new module with one submodule per tag, called in the order of `tags`.

    Every node but placeholders, get_attr and output carries its tag as ``node.tag``. Parameters
    are read inside the parts.

    Args:
        gm: the program; left untouched.
        tags: names of the parts, in calling order.
        return_fqn_mapping: also return old path -> path after the split.
        return_tuple: parts with one output return a tuple, too.
        GraphModuleCls: class of the result.

    Raises:
        RewriteError: a node has no tag or an unknown one, or a tag comes before one it needs.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x + 1) * 2)
        >>> for node in gm.graph.nodes:
        ...     node.tag = "late" if node.name == "mul" else "early"
        >>> [n.name for n in split_by_tags(gm, ["early", "late"]).graph.nodes]
        ['x', 'early', 'late', 'output']
    """
    parts = {tag: Partition(tag, tag) for tag in tags}
    rank = {tag: index for index, tag in enumerate(tags)}
    part_of: dict[Node, Partition] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        tag = getattr(node, "tag", None)
        if tag not in parts:
            raise RewriteError(
                "this node has no tag" if tag is None else f"its tag {tag!r} is not in the list",
                node=node,
                expected=f"one of {tags}",
                hint=f"set it before splitting: node.tag = {tags[0]!r}" if tags else (),
            )
        part_of[node] = parts[tag]
        for value in node.all_input_nodes:
            if value in part_of and rank[part_of[value].name] > rank[tag]:
                raise RewriteError(
                    f"part {tag!r} is called before part {part_of[value].name!r}, whose "
                    f"{value.name} it needs",
                    node=node,
                    hint="change the order of the tags",
                )
    result = split_nodes(gm, part_of, tuple_return=return_tuple, report_as="split_by_tags")
    if GraphModuleCls is not GraphModule:
        result = GraphModuleCls(result, result.graph)
    if not return_fqn_mapping:
        return result
    mapping = {
        str(node.target): f"{part.submod_name}.{node.target}"
        for part in parts.values()
        for node in (*part.attributes, *part.nodes)
        if node.op in ("call_module", "get_attr")
    }
    return result, mapping
