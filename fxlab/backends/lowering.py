"""How does a program get an accelerator for what it supports, and PyTorch for the rest?

The way of section 6.4 and of fx2trt: find out node by node what can be lowered, cut the program
there, turn each supported part into an engine, and put it back as a module. `lower` does all of
it, `explain` only the first step, with the reason for each node that stays.
"""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.backends.onnx import Emitter, EngineError
from fxlab.backends.runtimes import (
    EngineOptions,
    beyond_float32,
    check_backend,
)
from fxlab.backends.sizes import VARIES, follows_sometimes
from fxlab.backends.trial import Trial, engine_module
from fxlab.backends.writes import is_tensor, name_writes
from fxlab.core.errors import LoweringError, cell_name
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import REGION_BORDERS, as_pass, report, undisturbed
from fxlab.passes.effects import AliasClasses, mutated_inputs
from fxlab.passes.partition import CapabilityBasedPartitioner, OperatorSupportBase, Partition
from fxlab.passes.shape_prop import ShapeProp

__all__ = ["Explanation", "explain", "lower", "with_shapes"]

_OTHER, _THIRD, _WIDE = "other_tensor_meta", "third_tensor_meta", "beyond_float32"
# What a backend computes in another type without a word, or has no kernels for.
_REFUSED_DTYPES = {
    "onnxruntime": {torch.bfloat16, torch.complex64, torch.complex128},
    "openvino": {torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128},
    "tensorrt": {torch.float64, torch.complex64, torch.complex128},
}


def with_shapes(gm: GraphModule, inputs: Sequence[Any], dynamic_batch: bool = False) -> GraphModule:
    """Return a copy of `gm` (tensors shared) whose nodes know their shapes, dtypes and writes.

    Args:
        gm: the program; it is run once on `inputs`, twice with `dynamic_batch`; state that it
            writes to is put back.
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
        _run(copy, [_with_more(value) for value in inputs])
        for node in copy.graph.nodes:
            node.meta[_OTHER] = node.meta.pop("tensor_meta", None)
        third = _has_third(copy, inputs)
    _run(copy, inputs)
    if dynamic_batch:
        for node in copy.graph.nodes:
            metas = [node.meta.get("tensor_meta"), node.meta[_OTHER]]
            metas += [node.meta.pop(_THIRD, None)] if third else []
            if follows_sometimes(metas):
                node.meta[VARIES] = "its size follows the batch only within limits"
    name_writes(copy)
    return copy


def _has_third(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Note the shapes for another size of the batch, where the program takes it."""
    try:
        _run(gm, [_with_another(value) for value in inputs])
    except Exception:  # whatever a program says of a batch it was not written for
        return False
    for node in gm.graph.nodes:
        node.meta[_THIRD] = node.meta.pop("tensor_meta", None)
    return True


def _with_more(value: Any) -> Any:
    """The same input with more entries in its first dimension; half of them are more, too."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return torch.cat([value, value, value[:1]])
    return value


def _with_another(value: Any) -> Any:
    """The same input with one entry in its first dimension; with two if it had one."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value[:1] if len(value) > 1 else torch.cat([value, value])
    return value


def _run(gm: GraphModule, inputs: Sequence[Any]) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), undisturbed(gm, inputs) as given:
        _Shapes(gm).propagate(*given)


class _Shapes(ShapeProp):
    """Note also where whole numbers are beyond what float32 holds."""

    def run_node(self, n: Node) -> Any:
        """Run one node and keep what is known of its result."""
        result = super().run_node(n)
        n.meta[_WIDE] = any(
            isinstance(leaf, torch.Tensor) and beyond_float32(leaf)
            for leaf in pytree.tree_leaves(result)
        )
        return result


class _Refusals:
    """Why a node must not go to the device whatever converters there are."""

    def __init__(self, gm: GraphModule, backend: str, support: OperatorSupportBase | None) -> None:
        self.gm, self.backend, self.support = gm, backend, support
        self.modules = dict(gm.named_modules(remove_duplicate=False))
        nodes = list(gm.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        self.writes = {node: found for node in nodes if (found := mutated_inputs(node, gm))}
        self.members: dict[Node, list[Node]] = {}
        self.last_use: dict[Node, tuple[list[int], list[int], bool]] = {}
        self.kept: dict[Node, str] = {}
        unknown = [n for n in nodes if "not known to be pure" in (effect(n, gm) or "")]
        if self.writes or unknown:
            self._find_last_uses(nodes)
            self._keep_writes_and_views(unknown)
        self._keep_state_that_changes(nodes, unknown)

    def _keep_writes_and_views(self, unknown: Sequence[Node]) -> None:
        """Leave a write that somebody sees to PyTorch, and every view that it shows through.

        An engine returns copies: a view made by one would not show what PyTorch writes.
        """
        seen: dict[Node, Node] = {}  # class of aliases -> who writes to it
        lowered = set()
        for node, values in self.writes.items():
            why = next((w for v in values if (w := self._visible_write(node, v))), None)
            if why is None:
                lowered.add(node)
            else:
                self.kept[node] = why
                seen.update(dict.fromkeys(map(self.classes.find, values), node))
        for node in unknown:
            for value in node.all_input_nodes:
                if self._read_again(node, value):
                    seen.setdefault(self.classes.find(value), node)
        for root, write in seen.items():
            for node in self.members[root]:
                views = any(self.classes.find(value) is root for value in node.all_input_nodes)
                if node in lowered or effect(node, self.gm) is not None:
                    continue
                if views:
                    self.kept[node] = f"may be a view of what {write.name} may write to"
                else:
                    self._keep_layout(node, write)

    def _keep_layout(self, node: Node, write: Node) -> None:
        """Leave a tensor to PyTorch that an engine would lay out in another way, and its origins.

        Whether ``reshape`` of it is a view or a copy, and with it what a write shows, depends on
        that.
        """
        if node.op.startswith("call_") and not _is_dense(node.meta.get("tensor_meta")):
            self.kept[node] = f"lies in memory as only in PyTorch, and {write.name} writes"
            for value in node.all_input_nodes:
                if value not in self.kept:
                    self._keep_layout(value, write)

    def _keep_state_that_changes(self, nodes: Sequence[Node], unknown: Sequence[Node]) -> None:
        """Leave to PyTorch what reads a tensor of the model that the program may write to.

        An engine would go on with the value that the tensor had when it was built.
        """
        changed: dict[int, Node] = {}
        written = [(node, value) for node, values in self.writes.items() for value in values]
        written += [(node, value) for node in unknown for value in node.all_input_nodes]
        for node in nodes:
            why = effect(node, self.gm) if node.op.startswith("call_") else None
            if why is None or "random" in why:
                continue
            if node.op == "call_module":
                changed.update(dict.fromkeys(map(_memory, _state(self.modules[node.target])), node))
            elif "max_norm" in why:
                written += [(node, value) for value in node.all_input_nodes]
        if written and not self.members:
            self._find_last_uses(nodes)
        for node, value in written:
            for member in self.members[self.classes.find(value)]:
                if member.op == "get_attr":
                    changed[_memory(_attribute(self.gm, member))] = node
        named = {_memory(tensor) for tensor in _state(self.gm)}
        for node in nodes:
            if node.op == "get_attr":
                tensors, readers = [_attribute(self.gm, node)], list(node.users)
                if unknown and _memory(tensors[0]) not in named:  # a global, within reach of all
                    changed.setdefault(_memory(tensors[0]), unknown[0])
            elif node.op == "call_module" and changed:
                tensors, readers = _state(self.modules[node.target]), [node]
            else:
                continue
            writer = next((w for t in tensors if (w := changed.get(_memory(t))) is not None), None)
            if writer is not None:
                why = f"reads state that {writer.name} may write to"
                self.kept.update((r, why) for r in readers if r not in self.kept and r != writer)

    def _find_last_uses(self, nodes: Sequence[Node]) -> None:
        """Per class of aliases: positions of its values, the latest use of each value so far."""
        self.classes = AliasClasses(self.gm)
        for node in nodes:
            self.members.setdefault(self.classes.find(node), []).append(node)
        for root, group in self.members.items():
            positions, latest, here = [], [], -1
            for node in group:
                positions.append(self.position[node])
                here = max([here, *(self.position[user] for user in node.users)])
                latest.append(here)
            outside = any(node.op in ("placeholder", "get_attr") for node in group)
            self.last_use[root] = (positions, latest, outside)

    def __call__(self, node: Node) -> str | None:
        if node in self.kept:
            return self.kept[node]
        if node.op == "get_attr":
            return None
        if VARIES in node.meta:
            return str(node.meta[VARIES])
        if node.op == "call_function" and node.target in REGION_BORDERS:
            return "a border of a region (no_grad, autocast, ...)"
        if self.support is not None:
            try:
                why = self.support.reason(self.modules, node)
            except Exception as error:
                raise LoweringError(
                    f"support= raised {type(error).__name__} ({error}), asked about {node.name}",
                    node=node,
                ) from error
            if why is not None:
                return why
        for value in (node, *node.all_input_nodes):
            for leaf in pytree.tree_leaves(
                value.meta.get("tensor_meta"), is_leaf=lambda v: hasattr(v, "dtype")
            ):
                dtype = getattr(leaf, "dtype", None)
                if dtype in _REFUSED_DTYPES[self.backend]:
                    return f"{value.name} is {dtype}, which {self.backend} does not compute in"
                if self.backend == "openvino" and dtype is not None and 0 in leaf.shape:
                    return f"{value.name} has no elements, on which openvino may end the process"
            if self.backend == "openvino" and value.meta.get(_WIDE):
                return f"{value.name} has numbers beyond 24 bits, which openvino rounds"
        if node in self.writes or _is_tensors_sort(node) or _draws_nothing(node):
            return None
        return effect(node, self.gm)

    def _visible_write(self, node: Node, value: Node) -> str | None:
        """A write in place may become a new value if nobody looks at the old one afterwards."""
        if self.last_use[self.classes.find(value)][2]:
            return f"writes to {value.name}, memory that belongs to the caller or the model"
        if self._read_again(node, value):
            return f"writes to {value.name}, whose memory is read again afterwards"
        return None

    def _read_again(self, node: Node, value: Node) -> bool:
        """Say whether something made before `node` that may share memory is read behind it."""
        positions, latest, _ = self.last_use[self.classes.find(value)]
        earlier = bisect.bisect_left(positions, self.position[node])
        return bool(earlier) and latest[earlier - 1] > self.position[node]


def _state(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _is_dense(meta: Any) -> bool:
    """Say whether a tensor lies in memory as an engine's results do."""
    expected = 1
    if hasattr(meta, "stride"):
        for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
    return True


def _attribute(gm: GraphModule, node: Node) -> Any:
    return Interpreter(gm).fetch_attr(str(node.target))


def _memory(value: Any) -> int:
    """What tensors that share memory have in common."""
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if plain else id(value)


def _is_tensors_sort(node: Node) -> bool:
    """``x.sort()`` of a tensor returns a new one; whoever knows no types takes `x` for a list."""
    return node.op == "call_method" and node.target == "sort" and is_tensor(node.args[0])


def _draws_nothing(node: Node) -> bool:
    """Say whether an operator that may draw random numbers (dropout, an LSTM) is told not to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    places = enumerate(node.target._schema.arguments)
    names = {argument.name: place for place, argument in places}
    given = {
        n: node.args[p] if p < len(node.args) else node.kwargs.get(n) for n, p in names.items()
    }
    return any(n in names and not given[n] for n in ("train", "training", "dropout", "dropout_p"))


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


def _analyse(
    gm: GraphModule,
    backend: str,
    support: OperatorSupportBase | None,
    refused: Mapping[str, str] | None = None,
) -> Emitter:
    """Walk the graph once, noting what has no ONNX form or was refused by the engine."""
    if backend not in _REFUSED_DTYPES:
        raise LoweringError(
            f"no backend is called {backend!r}", expected=f"one of {', '.join(_REFUSED_DTYPES)}"
        )
    refusals = _Refusals(gm, backend, support)
    words = refused or {}
    refusals.kept.update((n, words[n.name]) for n in gm.graph.nodes if n.name in words)
    emitter = Emitter(gm, backend=backend, tolerant=True, refuse=refusals)
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
        seconds that building took; an engine's ONNX model is ``gm.device_0.onnx_model``. Engines
        are run once on the example inputs: what one refuses, or returns with another shape, dtype
        or value than eager, is left to PyTorch like the rest. Where an engine cannot give eager's
        numbers for all inputs the node is left, too, but for this: OpenVINO carries no NaN through
        relu, clamp, extremes, comparisons, exp and sort, onnxruntime none through max-pool, sort,
        topk and median; OpenVINO reads something where an index is outside (onnxruntime raises)
        and takes whole numbers up to 24 bits only (a larger one raises). Results are contiguous
        and never views.

    Raises:
        LoweringError: runtime or precision missing; train mode; with `strict`, the first node that
            cannot be lowered, with its line.

    Example:
        >>> import fxlab, torch
        >>> lowered = lower(fxlab.symbolic_trace(torch.nn.Linear(4, 2)).eval(), [torch.ones(1, 4)])
        >>> [n.name for n in lowered.graph.nodes]
        ['input_1', 'device_0', 'output']
    """
    for name, number in (("min_partition_size", min_partition_size), ("threads", threads)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise LoweringError(f"{name}={number!r} is no count", expected="a whole number from 1")
    options = EngineOptions(backend, precision, threads or torch.get_num_threads(), cache_dir)
    check_backend(options)
    gm = _as_graph_module(gm)
    refused: dict[str, str] = {}
    while True:
        shaped = with_shapes(gm, inputs, dynamic_batch)
        analysis = _analyse(shaped, backend, support, refused)
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
        names = {node.name for node in shaped.graph.nodes}
        _place_python_values(shaped, partitions, analysis.python_values)
        lowered = partitioner.fuse_partitions(partitions, "device_", report_as="lower")
        parts = {name: getattr(lowered, name) for name in lowered.meta["partition_names"]}
        more = _build_engines(lowered, options, names) or _try(
            lowered, parts, inputs, names, dynamic_batch
        )
        if not more:
            break
        refused.update(more)
    facts = lowered.meta["reports"]["lower"]
    report(
        lowered,
        "lower",
        [f"{text}, run by {backend} in {precision}" for text in facts["changed"]],
        facts["kept"],
        **{k: v for k, v in facts.items() if k not in ("name", "changed", "kept")},
    )
    return lowered


def _build_engines(lowered: GraphModule, options: EngineOptions, names: set[str]) -> dict[str, str]:
    """Put an engine in the place of each part; return which of `names` it refused, and why."""
    seconds = lowered.meta["reports"]["lower"]["seconds"] = {}
    refused: dict[str, str] = {}
    for name in sorted(lowered.meta["partition_names"]):
        part = getattr(lowered, name)
        start = time.perf_counter()
        try:
            setattr(lowered, name, engine_module(part, options))
        except EngineError as error:
            refused |= _guilty(part, error.message, names)
        seconds[name] = time.perf_counter() - start
    return refused


def _guilty(part: GraphModule, why: str, names: set[str]) -> dict[str, str]:
    """Name the nodes of a part that an error quotes, all of them when it quotes none.

    A kernel that is missing is missing for every call of the kind: those are named too.
    """
    nodes = [n for n in part.graph.nodes if n.op.startswith("call_") and n.name in names]
    quoted = {word.split(".")[0] for word in re.findall(r"['(\" ]([\w.]+)['\")]", why)}
    found = [n for n in nodes if n.name in quoted] or nodes
    if "implementation" in why:
        kinds = {_kind(n, part) for n in found}
        found = [n for n in nodes if _kind(n, part) in kinds]
    return dict.fromkeys((n.name for n in found), why)


def _kind(node: Node, gm: GraphModule) -> tuple[Any, ...]:
    """What is called on which dtypes."""
    target: Any = node.target
    if node.op == "call_module":
        target = type(gm.get_submodule(str(target)))
    metas = [value.meta.get("tensor_meta") for value in node.all_input_nodes]
    return target, *(str(getattr(meta, "dtype", "")) for meta in metas)


def _try(
    lowered: GraphModule,
    parts: Mapping[str, GraphModule],
    inputs: Sequence[Any],
    names: set[str],
    dynamic_batch: bool,
) -> dict[str, str]:
    """Run engines on the example inputs; return which of `names` they fail on, and why."""
    trial = Trial(lowered, parts)
    examples = [inputs]
    if dynamic_batch:
        examples += [[make(value) for value in inputs] for make in (_with_more, _with_another)]
    for example in examples:
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                undisturbed(lowered, example) as given,
            ):
                trial.run(*given)
        except Exception:  # it need not take a batch of one
            if example is inputs:
                raise
    refused: dict[str, str] = {}
    for target, why in trial.errors.items():
        refused |= _guilty(parts[target], why, names)
    return refused


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
