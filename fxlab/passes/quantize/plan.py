"""Which nodes will run on integer codes, which stay in float, and why?

Preparing and converting need the same answer (section 6.2.1: the first inserts what the second
replaces), so it is found here once, from the graph alone. A linear layer or a convolution always
starts a region of codes; cheap operations join it when all that they read are codes; a region ends
where float is read. A convolution takes the addition and the ReLU behind it into its kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.passes.alias import makes_new_value
from fxlab.passes.base import is_read
from fxlab.passes.effects import AliasClasses, mutated_inputs
from fxlab.passes.quantize.qconfig import QConfig, QConfigMapping

__all__ = ["Group", "Plan", "make_plan", "data_input", "reads_shape_only"]

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_RELU = {nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_TABLE = {
    *(nn.ReLU6, nn.SELU, nn.ELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardtanh),
    *(nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid),
    *(F.relu6, F.selu, F.selu_, F.elu, F.elu_, F.celu, F.gelu, F.sigmoid, F.tanh, F.hardtanh),
    *(F.leaky_relu, F.leaky_relu_, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.softplus),
    *(F.logsigmoid, torch.selu, torch.selu_, torch.sigmoid, torch.sigmoid_, torch.tanh),
    *(torch.tanh_, torch.clamp, torch.clamp_, torch.abs, operator.neg, torch.neg),
    *("sigmoid", "sigmoid_", "tanh", "tanh_", "clamp", "clamp_", "abs", "neg"),
}
_SCALAR = {
    *(operator.mul, operator.imul, operator.sub, operator.isub, operator.truediv),
    *(torch.mul, torch.sub, torch.div, "mul", "mul_", "sub", "sub_", "div", "div_"),
}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_CAT = {torch.cat, torch.concat, torch.concatenate}
_MAX_POOL = {nn.MaxPool2d, F.max_pool2d, torch.max_pool2d}
_AVG_POOL = {
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, "mean", torch.mean),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}
_SHAPE = {
    *(nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.squeeze),
    *(torch.unsqueeze, "flatten", "view", "reshape", "permute", "transpose", "squeeze"),
    *("unsqueeze", "contiguous", "expand", "t", "detach"),
}
_META = {"size", "dim", "ndimension", "numel", "stride", "is_contiguous"}
_CONV_FUNCTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}


@dataclass(frozen=True)
class Group:
    """Nodes that one int8 module will replace: an operation and what is fused into it.

    Args:
        kind: linear, conv, table, add, cat, max_pool, shape or embedding.
        nodes: the nodes, the first is the operation, the last gives the value.
        inputs: the values read as codes.
        relu: whether the last of the nodes is a ReLU.
        emits: "codes" or "float".
        qconfig: how weights and activations are observed.
    """

    kind: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    relu: bool
    emits: str
    qconfig: QConfig | None

    @property
    def out(self) -> Node:
        """The node whose value this is."""
        return self.nodes[-1]


@dataclass
class Plan:
    """The groups in graph order, the values that need a range, and what stays in float.

    ``group_of`` finds the group that gives a value, ``reader_of`` the first that reads it as codes.
    ``observed`` are the values from which codes are made; pooling and shape operations keep the
    range of what they read. ``kept`` has one sentence for each operation left in float.
    """

    groups: list[Group] = field(default_factory=list)
    observed: list[Node] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    group_of: dict[Node, Group] = field(default_factory=dict)
    reader_of: dict[Node, Group] = field(default_factory=dict)

    def root(self, value: Node) -> Node:
        """Return the value whose range ``value`` has: itself, or what a max pool or view reads."""
        while True:
            group = self.group_of.get(value)
            if group is None or group.kind not in ("shape", "max_pool"):
                return value
            value = group.inputs[0]


def data_input(node: Node) -> Node | None:
    """Return the tensor that ``node`` works on: its first argument, by position or by name."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, Node) else None


def modules_of(gm: GraphModule) -> dict[str, Any]:
    """Return every module by path, those with several paths under each."""
    return dict(gm.named_modules(remove_duplicate=False))


def path_of(node: Node) -> str:
    """Return the path or name that a node's target is."""
    return str(node.target)


def key_of(node: Node, modules: dict[str, Any]) -> Any:
    """Return what the tables above hold: a module's class, a function, a method's name."""
    return type(modules[path_of(node)]) if node.op == "call_module" else node.target


def make_plan(gm: GraphModule, mapping: QConfigMapping) -> Plan:
    """Return which nodes of ``gm`` run on codes under ``mapping``; edits nothing."""
    modules = modules_of(gm)
    plan = Plan()
    kinds: dict[Node, str] = {}
    why: dict[Node, str] = {}
    configs: dict[Node, Any] = {}
    shared, writers = _edited_in_place(gm, modules)
    reads = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    feeding = _feed_layers(gm, modules)
    for node in gm.graph.nodes:
        if node.op not in ("call_module", "call_function", "call_method"):
            continue
        path = path_of(node) if node.op == "call_module" else node.name
        configs[node] = mapping.find(path, key_of(node, modules))
        kind, reason = _classify(node, modules)
        if kind == "meta":
            continue
        if kind is not None and configs[node] is None:
            kind, reason = None, "its qconfig is None"
        if kind is not None and any(v in shared for v in node.all_input_nodes):
            kind, reason = None, f"it reads {shared_name(node, shared)}, which is edited in place"
        if kind is not None and node in writers:
            kind, reason = None, "it writes into an input of the program"
        if kind in ("linear", "conv", "embedding") and is_read(path, reads):
            kind, reason = None, f"the graph also reads the weights of {path} directly"
        if kind == "table" and not _as_table(configs[node].tables, node in feeding):
            kind, reason = None, f"tables={configs[node].tables!r} computes it in float"
        if kind not in (None, "linear", "conv", "embedding"):
            late = [v.name for v in _tensors(node, kind) if v not in kinds]
            if late:
                view = kind == "shape"  # works on any type: nothing to report
                kind, reason = None, "" if view else f"it reads {', '.join(late)}, in float"
        if kind is None:
            why[node] = reason
        else:
            kinds[node] = kind
    _drop_what_nobody_reads_as_codes(gm, kinds, why)
    _group(gm, plan, kinds, configs)
    _find_observed(gm, plan)
    plan.kept = [f"{n.name} kept in float: {why[n]}" for n in gm.graph.nodes if why.get(n)]
    return plan


def shared_name(node: Node, shared: set[Node]) -> str:
    """Return the name of the first value in ``shared`` that ``node`` reads."""
    return next(v.name for v in node.all_input_nodes if v in shared)


def reads_shape_only(node: Node) -> bool:
    """Return whether ``node`` asks for a size, which codes answer as well as values."""
    if node.op == "call_method":
        return node.target in _META
    return (
        node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim")
    )


def _edited_in_place(gm: GraphModule, modules: dict[str, Any]) -> tuple[set[Node], set[Node]]:
    """Return the values that must stay float tensors, and the nodes that write into an input.

    Codes are a copy, so what is written into a value later, perhaps through a view, would be lost
    on whoever reads the codes. ``relu_(conv(x))`` is harmless: nobody else holds that memory, so
    all later readers read the result of the write.
    """
    aliases = AliasClasses(gm)
    alone: dict[Node, bool] = {}  # nobody but this node's readers reaches the memory of its value
    given: dict[Node, bool] = {}  # the memory may be the caller's
    classes, writers = set(), set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        written = mutated_inputs(node, gm)
        for value in written:
            if not alone[value] or len(value.users) > 1:
                classes.add(aliases.find(value))
            if given[value]:
                writers.add(node)
        fresh = not written and (makes_new_value(node, gm) or _is_layer_or_pool(node, modules))
        sources = [] if fresh else written or node.all_input_nodes
        alone[node] = node.op != "get_attr" and all(alone[v] and len(v.users) == 1 for v in sources)
        given[node] = node.op == "placeholder" or any(given[v] for v in sources)
    return {node for node in alone if aliases.find(node) in classes}, writers


def _is_layer_or_pool(node: Node, modules: dict[str, Any]) -> bool:
    return node.op == "call_module" and isinstance(
        modules[path_of(node)], (nn.Linear, *CONVS, nn.Embedding, nn.MaxPool2d)
    )


def _feed_layers(gm: GraphModule, modules: dict[str, Any]) -> set[Node]:
    """Return the nodes whose result reaches a layer through nothing but operations on codes."""
    found = set()
    for node in reversed(gm.graph.nodes):
        for user in node.users:
            if user.op not in ("call_module", "call_function", "call_method"):
                continue
            kind = _classify(user, modules)[0]
            if kind in ("linear", "conv") or (kind not in (None, "meta") and user in found):
                found.add(node)
                break
    return found


def _as_table(policy: str, between_layers: bool) -> bool:
    return policy == "all" or (policy == "ends" and not between_layers)


def _classify(node: Node, modules: dict[str, Any]) -> tuple[str | None, str]:
    """Return what ``node`` is to quantization, or None and the reason why it is nothing."""
    module = modules[path_of(node)] if node.op == "call_module" else None
    key = key_of(node, modules)
    label = key if isinstance(key, str) else getattr(key, "__name__", str(key))
    if reads_shape_only(node) or key in (getattr, operator.getitem):
        return "meta", ""
    if module is not None and isinstance(module, (nn.Linear, *CONVS)):
        return _classify_layer(module)
    if key is nn.Embedding:
        return "embedding", ""
    if key is F.linear or key in _CONV_FUNCTIONS:
        return None, "its weight is computed in the graph, not a parameter"
    for kind, table in (
        ("relu", _RELU),
        ("table", _TABLE),
        ("max_pool", _MAX_POOL),
        ("shape", _SHAPE),
        ("cat", _CAT),
    ):
        if key in table:
            return _check(node, module, kind)
    if key in _ADD or key in _SCALAR:
        count = len(node.all_input_nodes)
        operands = [*node.args, *(v for k, v in node.kwargs.items() if k != "alpha")]
        if count == 1 and len(operands) == 2 and not all(isinstance(a, Node) for a in operands):
            return "table", ""
        if key in _ADD and len(operands) == 2 and node.kwargs.get("alpha", 1) == 1:
            return "add", ""
        return None, f"no int8 kernel for {label} of these operands"
    if key in _AVG_POOL:
        return None, "averages are taken in float: rounding them to codes twice costs accuracy"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return None, "a batch norm that could not be folded (see the report of fuse_conv_bn)"
    return None, f"no int8 kernel for {label}"


def _classify_layer(module: nn.Module) -> tuple[str | None, str]:
    kind = "linear" if isinstance(module, nn.Linear) else "conv"
    if type(module) not in (nn.Linear, *CONVS) and not getattr(module, "is_qat", False):
        return None, f"{type(module).__name__} may compute something else than its base class"
    if module.weight.dtype != torch.float32:
        return None, f"its weight is {module.weight.dtype}, not float32"
    if kind == "conv" and module.padding_mode != "zeros":
        return None, f"padding_mode {module.padding_mode!r}"
    if kind == "conv" and isinstance(module.padding, str) and module.padding != "valid":
        return None, f"padding {module.padding!r}"
    return kind, ""


def _check(node: Node, module: nn.Module | None, kind: str) -> tuple[str | None, str]:
    """Return ``kind`` unless an option of this call has no int8 form."""
    if node.kwargs.get("return_indices") or getattr(module, "return_indices", False):
        return None, "it also returns indices"
    if kind == "cat":
        return ("cat", "") if isinstance(_cat_list(node), (list, tuple)) else (None, "no list")
    if data_input(node) is None:
        return None, "its first argument is no tensor of the graph"
    if kind in ("relu", "table") and len(node.all_input_nodes) != 1:
        return None, "it reads several tensors"
    return kind, ""


def _cat_list(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("tensors")


def _tensors(node: Node, kind: str) -> list[Node]:
    """Return the values that ``node`` would read as codes."""
    if kind == "cat":
        return [v for v in _cat_list(node) if isinstance(v, Node)]
    if kind == "add":
        return list(node.all_input_nodes)
    value = data_input(node)
    if value is None:  # a number first: 1 + x
        value = node.all_input_nodes[0]
    return [value]


def _drop_what_nobody_reads_as_codes(
    gm: GraphModule, kinds: dict[Node, str], why: dict[Node, str]
) -> None:
    """Give back to float what would only be made of codes in order to become float again."""
    for node in reversed(gm.graph.nodes):
        kind = kinds.get(node)
        if kind in ("shape", "max_pool", "add", "cat") and not _read_as_codes(node, kinds):
            del kinds[node]
            if kind != "shape":
                why[node] = "all that read it are computed in float"


def _read_as_codes(value: Node, kinds: dict[Node, str]) -> bool:
    return any(kinds.get(user) not in (None, "embedding") for user in value.users)


def _group(
    gm: GraphModule,
    plan: Plan,
    kinds: dict[Node, str],
    configs: dict[Node, Any],
) -> None:
    """Fuse, and fill ``plan.groups`` in the order of the values they give."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    taken: set[Node] = set()
    for node in gm.graph.nodes:
        if kinds.get(node) not in ("linear", "conv"):
            continue
        nodes, inputs = [node], list(_tensors(node, kinds[node]))
        if kinds[node] == "conv" and isinstance(gm.get_submodule(path_of(node)), nn.Conv2d):
            add = _only_user(node, kinds, "add")
            if add is not None and add not in taken:
                other = next((v for v in add.all_input_nodes if v is not node), None)
                if other is not None and not _later_conv(other, node, kinds, order):
                    nodes.append(add)
                    inputs.append(other)
        relu = _only_user(nodes[-1], kinds, "relu")
        if relu is not None:
            nodes.append(relu)
        taken.update(nodes)
        plan.group_of[nodes[-1]] = Group(
            kinds[node],
            tuple(nodes),
            tuple(inputs),
            relu is not None,
            "codes" if _read_as_codes(nodes[-1], kinds) else "float",
            configs[node],
        )
    for node in gm.graph.nodes:
        kind = kinds.get(node)
        if kind is None or node in taken:
            continue
        nodes, relu = (node,), None
        if kind == "add":
            relu = _only_user(node, kinds, "relu")
            nodes = (node,) if relu is None else (node, relu)
        taken.update(nodes)
        emits = "codes" if _read_as_codes(nodes[-1], kinds) and kind != "embedding" else "float"
        inputs = () if kind == "embedding" else tuple(_tensors(node, kind))
        name = "table" if kind == "relu" else kind
        plan.group_of[nodes[-1]] = Group(
            name, nodes, inputs, relu is not None, emits, configs[node]
        )
    plan.groups = sorted(plan.group_of.values(), key=lambda group: order[group.out])


def _only_user(value: Node, kinds: dict[Node, str], kind: str) -> Node | None:
    """Return the one reader of ``value`` if it is of ``kind``, else None."""
    users = list(value.users)
    return users[0] if len(users) == 1 and kinds.get(users[0]) == kind else None


def _later_conv(other: Node, node: Node, kinds: dict[Node, str], order: dict[Node, int]) -> bool:
    """Return whether ``other`` is a convolution after ``node`` that should take the addition."""
    alone = len(other.users) == 1
    return kinds.get(other) == "conv" and alone and order[other] > order[node]


def _find_observed(gm: GraphModule, plan: Plan) -> None:
    for group in plan.groups:
        for value in group.inputs:
            plan.reader_of.setdefault(plan.root(value), group)
    plan.observed = [node for node in gm.graph.nodes if node in plan.reader_of]


def evaluate(node: Node, modules: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of one tensor that ``node`` computes, its other arguments filled in."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        args = [x if isinstance(a, Node) else a for a in node.args]
        kwargs = {k: x if isinstance(a, Node) else a for k, a in node.kwargs.items()}
        if node.op == "call_module":
            return modules[path_of(node)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(x, path_of(node))(*args[1:], **kwargs)
        run: Any = node.target
        return run(*args, **kwargs)

    return function


def layers(plan: Plan) -> Iterator[Group]:
    """Yield the groups that hold weights."""
    return (group for group in plan.groups if group.kind in ("linear", "conv", "embedding"))
