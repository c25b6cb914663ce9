"""How does a program get an accelerator for what it supports, and PyTorch for the rest?

The way of section 6.4 and of fx2trt: find out node by node what can be lowered, cut the program
there, turn each supported part into an engine, and put it back as a module. `lower` does all of
it, `explain` only the first step, with the reason for each node that stays.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.backends.onnx import Emitter, OnnxValue, check_model
from fxlab.backends.runtimes import EngineOptions, LoweredModule, Port, check_backend
from fxlab.core.errors import LoweringError, cell_name
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import REGION_BORDERS, as_pass, report
from fxlab.passes.effects import AliasClasses, mutated_inputs
from fxlab.passes.partition import CapabilityBasedPartitioner, OperatorSupportBase, Partition
from fxlab.passes.shape_prop import ShapeProp

__all__ = ["Explanation", "explain", "lower", "with_shapes"]

_OTHER = "other_tensor_meta"
# What a backend computes in another type without a word, or has no kernels for.
_REFUSED_DTYPES = {
    "onnxruntime": {torch.bfloat16, torch.complex64, torch.complex128},
    "openvino": {torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128},
    "tensorrt": {torch.float64, torch.complex64, torch.complex128},
}


def with_shapes(gm: GraphModule, inputs: Sequence[Any], dynamic_batch: bool = False) -> GraphModule:
    """Return a copy of `gm` (tensors shared) whose nodes know their shapes and dtypes.

    Args:
        gm: the program; it is run once on copies of `inputs`, twice with `dynamic_batch`.
        inputs: example inputs.
        dynamic_batch: find out which sizes follow the first dimension of the inputs.

    Raises:
        LoweringError: a part of the program is in train mode.
    """
    for node in gm.graph.nodes:
        if node.op == "call_module":
            why = effect(node, gm)
            if why is not None and "train" in why:
                raise LoweringError(
                    f"a program that is trained cannot be lowered: {why}",
                    node=node,
                    hint="call eval() on the model first",
                )
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(gm.graph._codegen)
    copy = GraphModule(gm, graph)
    copy.training = gm.training
    if dynamic_batch:
        _run(copy, [_one_more(value) for value in inputs])
        for node in copy.graph.nodes:
            node.meta[_OTHER] = node.meta.pop("tensor_meta", None)
    _run(copy, inputs)
    return copy


def _one_more(value: Any) -> Any:
    """The same input with one more entry in its first dimension."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return torch.cat([value, value[:1]])
    return value


def _run(gm: GraphModule, inputs: Sequence[Any]) -> None:
    copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), tuple(inputs))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        ShapeProp(gm).propagate(*copies)


class _Refusals:
    """Why a node must not go to the device whatever converters there are."""

    def __init__(self, gm: GraphModule, backend: str, support: OperatorSupportBase | None) -> None:
        self.gm, self.backend, self.support = gm, backend, support
        self.modules = dict(gm.named_modules(remove_duplicate=False))
        nodes = list(gm.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.writes = {node: found for node in nodes if (found := mutated_inputs(node, gm))}
        self.last_use: dict[Node, tuple[list[int], list[int], bool]] = {}
        if self.writes:
            self._find_last_uses(nodes)

    def _find_last_uses(self, nodes: Sequence[Node]) -> None:
        """Per class of aliases: positions of its values, the latest use of each value so far."""
        self.classes = AliasClasses(self.gm)
        members: dict[Node, list[Node]] = {}
        for node in nodes:
            members.setdefault(self.classes.find(node), []).append(node)
        for root, group in members.items():
            positions, latest, here = [], [], -1
            for node in group:
                positions.append(self.position[node])
                here = max([here, *(self.position[user] for user in node.users)])
                latest.append(here)
            outside = any(node.op in ("placeholder", "get_attr") for node in group)
            self.last_use[root] = (positions, latest, outside)

    def __call__(self, node: Node) -> str | None:
        if node.op == "get_attr":
            return None
        if node.op == "call_function" and node.target in REGION_BORDERS:
            return "a border of a region (no_grad, autocast, ...)"
        if self.support is not None:
            why = self.support.reason(self.modules, node)
            if why is not None:
                return why
        for value in (node, *node.all_input_nodes):
            for leaf in pytree.tree_leaves(
                value.meta.get("tensor_meta"), is_leaf=lambda v: hasattr(v, "dtype")
            ):
                dtype = getattr(leaf, "dtype", None)
                if dtype in _REFUSED_DTYPES[self.backend]:
                    return f"{value.name} is {dtype}, which {self.backend} does not compute in"
        if node in self.writes:
            return self._visible_write(node)
        return effect(node, self.gm)

    def _visible_write(self, node: Node) -> str | None:
        """A write in place may become a new value if nobody looks at the old one afterwards."""
        for value in self.writes[node]:
            positions, latest, outside = self.last_use[self.classes.find(value)]
            if outside:
                return f"writes to {value.name}, memory that belongs to the caller or the model"
            earlier = bisect.bisect_left(positions, self.position[node])
            if earlier and latest[earlier - 1] > self.position[node]:
                return f"writes to {value.name}, whose memory is read again afterwards"
        return None


class Explanation(dict):
    """Node name -> why it stays in PyTorch; empty when everything can be lowered.

    Attributes:
        total: number of computing nodes.
        sources: node name -> ``file:line`` of the user's code (``In[5]:3`` in a notebook), where
            known.

    Args:
        reasons: node name -> why.
        gm: the program of those nodes.
    """

    def __init__(self, reasons: Mapping[str, str], gm: GraphModule) -> None:
        super().__init__(reasons)
        nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        self.total = len(nodes)
        self.sources = {
            node.name: f"{cell_name(frames[0][0]) or Path(frames[0][0]).name}:{frames[0][1]}"
            for node in nodes
            if node.name in reasons and (frames := node.meta.get("source"))
        }

    def __str__(self) -> str:
        head = f"{self.total - len(self)} of {self.total} nodes can be lowered"
        lines = [
            f"  {name}: {why}" + (f" ({self.sources[name]})" if name in self.sources else "")
            for name, why in self.items()
        ]
        return "\n".join([head, *lines])


def _as_graph_module(model: torch.nn.Module) -> GraphModule:
    if isinstance(model, GraphModule):
        return model
    return symbolic_trace(model)  # a torch.fx.GraphModule is a module with a forward like any other


def explain(
    gm: torch.nn.Module,
    inputs: Sequence[Any],
    backend: str = "onnxruntime",
    *,
    support: OperatorSupportBase | None = None,
    dynamic_batch: bool = False,
) -> Explanation:
    """Say which nodes `lower` would leave to PyTorch, and why; nothing is built.

    Args:
        gm: the program (a Module is traced first).
        inputs: example inputs.
        backend: see `lower`; the package need not be installed.
        support: see `lower`.
        dynamic_batch: see `lower`.

    Raises:
        LoweringError: there is no such backend.

    Example:
        >>> import fxlab, torch
        >>> gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + torch.special.i0(x))
        >>> print(explain(gm, [torch.ones(2)]).get("special_i0"))
        no converter for special_i0; add one with @converter
    """
    shaped = with_shapes(_as_graph_module(gm), inputs, dynamic_batch)
    return Explanation(_analyse(shaped, backend, support).reasons, shaped)


def _analyse(gm: GraphModule, backend: str, support: OperatorSupportBase | None) -> Emitter:
    """Walk the graph once, noting what has no ONNX form."""
    if backend not in _REFUSED_DTYPES:
        raise LoweringError(
            f"no backend is called {backend!r}", expected=f"one of {', '.join(_REFUSED_DTYPES)}"
        )
    emitter = Emitter(gm, tolerant=True, refuse=_Refusals(gm, backend, support))
    emitter.emit()
    return emitter


class _Analysed(OperatorSupportBase):
    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node.name not in self.reasons

    def reason(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> str | None:
        return self.reasons.get(node.name)


@as_pass
def lower(
    gm: torch.nn.Module,
    inputs: Sequence[Any],
    backend: str = "onnxruntime",
    *,
    precision: str = "f32",
    threads: int | None = None,
    strict: bool = False,
    support: OperatorSupportBase | None = None,
    dynamic_batch: bool = False,
    min_partition_size: int = 1,
    cache_dir: str | None = None,
) -> GraphModule:
    """Return a new module whose supported parts are engines and whose rest is PyTorch.

    Args:
        gm: the program in eval mode (a Module is traced first); left untouched. Weights are
            copied into the engines: training it afterwards does not change them.
        inputs: example inputs; engines take these shapes and dtypes.
        backend: ``"onnxruntime"``, ``"openvino"`` or ``"tensorrt"``.
        precision: ``"f32"``; ``"bf16"`` (OpenVINO, on CPUs that have it) or ``"f16"``.
        threads: threads of an engine, by default `torch.get_num_threads()`.
        strict: raise instead of leaving a node to PyTorch.
        support: what may go to the device at all, besides what has a converter.
        dynamic_batch: let the first dimension of the inputs vary.
        min_partition_size: leave parts with fewer nodes to PyTorch.
        cache_dir: folder in which built engines are kept (OpenVINO, TensorRT).

    Returns:
        A GraphModule. ``meta["reports"]["lower"]`` has the parts, the nodes left and why, and the
        seconds that building took; an engine's ONNX model is ``gm.device_0.onnx_model``.

    Raises:
        LoweringError: runtime or precision missing; train mode; with `strict`, the first node that
            cannot be lowered, with its line.

    Example:
        >>> import fxlab, torch
        >>> lowered = lower(fxlab.symbolic_trace(torch.nn.Linear(4, 2)).eval(), [torch.ones(1, 4)])
        >>> [n.name for n in lowered.graph.nodes]
        ['input_1', 'device_0', 'output']
    """
    options = EngineOptions(backend, precision, threads or torch.get_num_threads(), cache_dir)
    check_backend(options)
    shaped = with_shapes(_as_graph_module(gm), inputs, dynamic_batch)
    analysis = _analyse(shaped, backend, support)
    if strict and analysis.reasons:
        name, why = next(iter(analysis.reasons.items()))
        node = next(n for n in shaped.graph.nodes if n.name == name)
        raise LoweringError(
            f"{name} cannot be lowered to {backend}: {why}",
            node=node,
            hint="leave it to PyTorch (strict=False), or register a converter for it",
        )
    partitioner = CapabilityBasedPartitioner(
        shaped,
        _Analysed(analysis.reasons),
        allows_single_node_partition=True,
        min_partition_size=min_partition_size,
    )
    partitions = partitioner.propose_partitions()
    _place_python_values(shaped, partitions, analysis.python_values)
    lowered = partitioner.fuse_partitions(partitions, "device_", report_as="lower")
    facts = lowered.meta["reports"]["lower"]
    facts["seconds"] = {}
    for name in sorted(lowered.meta["partition_names"]):
        start = time.perf_counter()
        setattr(lowered, name, _engine_module(getattr(lowered, name), options))
        facts["seconds"][name] = time.perf_counter() - start
    report(
        lowered,
        "lower",
        [f"{text}, run by {backend} in {precision}" for text in facts["changed"]],
        facts["kept"],
        **{k: v for k, v in facts.items() if k not in ("name", "changed", "kept")},
    )
    return lowered


def _place_python_values(
    gm: GraphModule, partitions: list[Partition], python_values: set[str]
) -> None:
    """Give each part that needs a size its own copy of the nodes that compute it.

    An engine returns tensors only, so ``x.size(0)`` cannot leave a part. Such nodes are cheap:
    each part whose tensors need one, and PyTorch's side, gets its own.
    """
    owner: dict[Node, Partition | None] = {}
    for partition in partitions:
        owner.update(dict.fromkeys(partition.nodes, partition))
    nodes = list(gm.graph.nodes)
    needed: dict[Node, dict[Partition | None, None]] = {}
    for node in reversed(nodes):
        if node.name in python_values and node in owner:
            wanted = needed[node] = {}
            for user in node.users:
                wanted.update(needed[user] if user in needed else {owner.get(user): None})
    copies: dict[tuple[Node, Partition | None], Node] = {}
    for node in nodes:
        if node not in needed:
            continue
        mine = owner[node]
        for partition in needed[node]:
            copy = node
            if partition is not mine:
                with gm.graph.inserting_after(node):
                    copy = gm.graph.node_copy(node, lambda n, p=partition: copies.get((n, p), n))
                if partition is not None:
                    partition.add_node(copy)
            copies[node, partition] = copy
    for node in nodes:
        if node in needed:
            continue
        for value in node.all_input_nodes:
            copy = copies.get((value, owner.get(node)))
            if copy is not None and copy is not value:
                node.replace_input_with(value, copy)
    for node in reversed(nodes):
        if node in needed and not node.users:
            owner[node].remove_node(node)  # type: ignore[union-attr]
            gm.graph.erase_node(node)


def _engine_module(part: GraphModule, options: EngineOptions) -> LoweredModule:
    emitter = Emitter(part)
    emitter.emit()
    model, spec = emitter.model()
    check_model(model)
    inputs, outputs = ([_port(v) for v in values] for values in (emitter.inputs, emitter.outputs))
    lowered = LoweredModule(model, inputs, outputs, spec, options)
    del model, emitter  # two copies of the weights, while the engine makes its own
    _ = lowered.engine  # built now, so that what an engine refuses is said now
    return lowered


def _port(value: OnnxValue) -> Port:
    shape: tuple[int | None, ...] = tuple(value.fake.shape)
    if value.other is not None:
        pairs = zip(shape, value.other.shape, strict=True)
        shape = tuple(a if a == b else None for a, b in pairs)
    return Port(value.name, value.dtype, shape)
