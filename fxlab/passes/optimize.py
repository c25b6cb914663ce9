"""Everything that makes a trained network faster on this CPU, chosen by measurement.

Beyond the paper: folding batch norm (Figure 7) is the first step. Two more follow the hardware.
Dropout does nothing in eval mode and goes. A convolution with the addition and the ReLU after it
is one kernel of oneDNN, which reads weights that were put into its blocked layout once, ahead of
time, and values with the channels last; or, for 3 x 3 filters, Winograd's way with fewer
multiplications. What pays depends on the sizes and the machine, so each group is timed every way
on tensors of its own shapes, and in the end the whole program.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.purity import effect
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.alias import Memory
from fxlab.passes.base import as_pass, copy_sharing_tensors, is_read, report, undisturbed
from fxlab.passes.convolutions import KERNELS, PackedConv2d, WinogradConv2d
from fxlab.passes.effects import AliasClasses, mutated_inputs
from fxlab.passes.fuse import NORMS, fuse_conv_bn, has_hooks
from fxlab.passes.roofline import fastest
from fxlab.passes.shape_prop import TensorMetadata, need_graph, shape_prop, shape_text
from fxlab.surroundings import tidy

__all__ = ["PackedConv2d", "optimize_for_inference", "remove_dropout"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ADDS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
# These give equal numbers for both orders of memory; others may ask for a contiguous tensor.
_ANY_LAYOUT = (*_ADDS, *_RELUS, operator.mul, operator.sub, torch.cat, torch.sigmoid, F.max_pool2d,
               F.avg_pool2d, F.adaptive_avg_pool2d, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d,
               nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.Conv2d, nn.Sigmoid, nn.SiLU)  # fmt: skip
# An eager group between packed ones makes values change their layout twice; Winograd's rounds ten
# times as much and takes more of the cache from the layers around it.
_HANDICAP = {"packed": 1.0, "Winograd": 1.1, "eager": 1.2}
_FEW = 8
"""So many weights are packed between two times that the memory of the plain ones is given back."""
_TILES = 16
"""Fewer tiles than this do not pay for reading Winograd's weights, four times the filter's."""
_BETWEEN = 1 << 21
"""Floats that are written between two measurements: more than the cache of one core."""


@as_pass
def remove_dropout(gm: GraphModule) -> GraphModule:
    """Edit ``gm`` in place: erase dropout that is off (eval mode); return ``gm``.

    Args:
        gm: The program. No shapes are needed.
    """
    need_graph(gm)
    changed, kept = [], []
    for node in list(gm.graph.nodes):
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, _DROPOUTS):
            off = not module.training
            if type(module) not in _DROPOUTS or has_hooks(module):
                kept.append(f"{node.name} kept: it has hooks, or is no dropout of torch's own")
                continue
        elif node.op == "call_function" and (told := _told_training(node)) is not None:
            off = told is False
        else:
            continue
        if not off:
            kept.append(f"{node.name} kept: it is in train mode, or may be")
            continue
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
        changed.append(f"erased {node.name}: it returned its input")
    gm.graph.lint()
    report(gm, "remove_dropout", changed, kept)
    return gm


@as_pass
def optimize_for_inference(gm: nn.Module, inputs: Any, *, repeats: int = 5) -> GraphModule:
    """Return a new, faster module for inference on a CPU; ``gm`` is left as it is.

    Batch norms are folded, dropout is removed, and groups of convolution (+ add) (+ ReLU) become
    one kernel of `fxlab.passes.convolutions`, the one that was fastest here and now, with torch's
    current number of threads. float32 results move by rounding only: by about
    1e-5 of a layer's largest value where Winograd's was chosen, which the report says.
    NaN and infinity come out otherwise (`fxlab.passes.convolutions`), and there is no gradient.

    Args:
        gm: A module in eval mode; traced if it is no GraphModule.
        inputs: Example inputs (a tensor, or a tuple), whose shapes are measured.
        repeats: Measurements of each candidate; the fastest of each counts.

    Returns:
        A new GraphModule. Its report ``optimize_for_inference`` has the seconds of each group and
        of the whole program, and what was left alone.

    Raises:
        RuntimeError: A node does not run on ``inputs``; it is a `ShapeError`.
        ValueError: ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least one measurement must count")
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    traced = gm if isinstance(gm, GraphModule) else symbolic_trace(gm)
    changed, kept = [], []
    result = _folded(traced, inputs)
    reports = result.meta["reports"]
    same = not (reports["fuse_conv_bn"].changed or reports["remove_dropout"].changed)
    if training := _training(result):
        kept.append(f"{', '.join(training)} kept, in train mode: call eval() on the model first")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = _whole({"as given": traced, "folded": result}, inputs, repeats)
        # In place, so that a folded weight is gone when its packed form is there.
        _pack_groups(result, repeats, changed, kept)
        _keep_layout_inside(result)
        _write_into_dead_values(result)
        result.graph.lint()
        after = _whole({"as given": traced, "packed": result}, inputs, repeats)
    whole = {**before, **after, "as given": min(before["as given"], after["as given"])}
    if changed and min(whole, key=lambda name: whole[name]) != "packed":
        # As given: the same numbers as folded for more work; a difference here is noise.
        way = "as given" if same else "folded"
        kept.append(f"the whole program was fastest {way}, so no group is packed")
        changed, result = [], _folded(traced, inputs)
    elif not changed:
        whole.pop("packed")  # the same program once more
    if same:
        whole.pop("folded")
    facts = {f"seconds {name}": value for name, value in whole.items()}
    report(result, "optimize_for_inference", changed, kept, **facts)
    return result


def _folded(traced: GraphModule, inputs: Any) -> GraphModule:
    """Return a copy without batch norms and dropout where they can go, its shapes known."""
    folded = copy_sharing_tensors(traced)
    fuse_conv_bn(folded)
    remove_dropout(folded)
    return shape_prop(folded, *inputs)


def _training(gm: GraphModule) -> list[str]:
    """Name the batch norms and dropouts that are in train mode."""
    names = []
    for node in gm.graph.nodes:
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        is_on = isinstance(module, (*_DROPOUTS, *NORMS)) and module.training
        if node.op == "call_function" and (told := _told_training(node)) is not None:
            is_on = told is True or (isinstance(told, Node) and gm.training)
        if is_on:
            names.append(node.name)
    return names


def _told_training(node: Node) -> bool | Node | None:
    """Return what a function's dropout is told of the mode (True by default); None for others."""
    if node.target not in (F.dropout, torch.dropout):
        return None
    given = node.args[2] if len(node.args) > 2 else True
    return node.kwargs.get("training", node.kwargs.get("train", given))  # type: ignore[return-value]


def _whole(programs: dict[str, GraphModule], inputs: Any, repeats: int) -> dict[str, float]:
    """Return the seconds of whole programs; the first one's effects are undone."""
    with undisturbed(next(iter(programs.values())), inputs) as given:
        return fastest({name: partial(gm, *given) for name, gm in programs.items()}, repeats)


def _pack_groups(gm: GraphModule, repeats: int, changed: list[str], kept: list[str]) -> None:
    """Put the kernel that is the fastest into the place of each group that gains."""
    seconds: dict[tuple[Any, ...], dict[str, float]] = {}
    groups = _groups(gm, kept)[::-1]
    while groups:
        group = groups.pop()
        key = group.key()
        if key not in seconds:
            seconds[key] = group.measure(repeats)
        found = seconds[key]
        times = ", ".join(f"{s * 1e3:.2f} ms {way}" for way, s in found.items())
        way = min(found, key=lambda way: found[way] * _HANDICAP[way])
        if way != "eager":
            group.replace(gm, way)
            gm.delete_all_unused_submodules()
            if len(changed) % _FEW == 0:
                tidy()
            changed.append(f"{group.text()}: {times}")
        else:
            kept.append(f"{group.text()} kept: {times}")


@dataclass
class _Group:
    """A convolution and what follows it: an addition (or None), a ReLU (or None)."""

    conv: Node
    module: nn.Conv2d
    add: Node | None = None
    relu: Node | None = None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.conv, self.add, self.relu) if node is not None]

    @property
    def other(self) -> Node | None:
        """The value that is added; asked anew each time, since groups before are replaced."""
        if self.add is None:
            return None
        return next(i for i in self.add.all_input_nodes if i is not self.conv)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.conv.args[0].meta["tensor_meta"].shape)

    def key(self) -> tuple[Any, ...]:
        return (repr(self.module), self.shape(), self.add is None, self.relu is None)

    def text(self) -> str:
        return " + ".join(node.name for node in self.nodes)

    def kernels(self) -> dict[str, Callable[[], nn.Module]]:
        """Return what can stand for the group, by the name that the report has for it."""
        add, relu = self.add is not None, self.relu is not None
        ways: dict[str, Any] = {
            "packed": lambda: PackedConv2d(self.module, self.shape(), add, relu)
        }
        if WinogradConv2d.fits(self.module):
            ways["Winograd"] = lambda: WinogradConv2d(self.module, add, relu)
        return ways

    def measure(self, repeats: int) -> dict[str, float]:
        """Return the seconds of each kernel and of the group as it is, each in its own layout."""
        x, kernels = torch.randn(self.shape()), self.kernels()
        images, _, *size = x.shape
        if images * math.prod(-(-pixels // 4) for pixels in size) < _TILES:
            kernels.pop("Winograd", None)
        x_last = x.contiguous(memory_format=torch.channels_last)
        others, others_last = [], []
        if self.other is not None:
            others = [torch.randn(tuple(self.other.meta["tensor_meta"].shape))]
            others_last = [t.contiguous(memory_format=torch.channels_last) for t in others]

        def eager() -> torch.Tensor:
            y = self.module(x)
            for other in others:
                y = y + other
            return F.relu(y) if self.relu else y

        ways: dict[str, Callable[[], Any]] = {
            way: partial(make(), x_last, *others_last) for way, make in kernels.items()
        }
        # In the program other layers run in between, so a kernel finds its weights far away.
        between = torch.empty(_BETWEEN)
        return fastest({**ways, "eager": eager}, repeats, between.zero_)

    def replace(self, gm: GraphModule, way: str = "packed") -> None:
        stem = f"{self.conv.target.replace('.', '_')}_{way.lower()}"
        # A convolution may be called at several places, and the model may have such a name.
        names = (f"{stem}_{k}" if k else stem for k in itertools.count())
        name = next(name for name in names if not hasattr(gm, name))
        gm.add_submodule(name, self.kernels()[way]())
        last = self.nodes[-1]
        args = (self.conv.args[0], self.other)[: 1 if self.add is None else 2]
        with gm.graph.inserting_before(last):
            new = gm.graph.call_module(name, args)
        new.meta["tensor_meta"] = last.meta["tensor_meta"]
        last.replace_all_uses_with(new)
        for node in reversed(self.nodes):
            gm.graph.erase_node(node)


def _groups(gm: GraphModule, kept: list[str]) -> list[_Group]:
    """Return the groups in graph order; each node is in at most one."""
    position, effects, count = {}, {}, 0
    for i, node in enumerate(gm.graph.nodes):
        count += bool(effect(node, gm)) and node.op not in ("placeholder", "output")
        position[node], effects[node] = i, count
    reads = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    taken: set[Node] = set()
    groups = []
    for conv in gm.graph.nodes:
        module = gm.get_submodule(conv.target) if conv.op == "call_module" else None
        if not isinstance(module, nn.Conv2d):
            continue
        reason = _cannot_pack(conv, gm, reads)
        if reason:
            kept.append(f"{conv.name} kept: {reason}")
            continue
        group = _Group(conv, module)
        reader = _only_reader(conv)
        if reader is not None and reader not in taken and _is_plain_add(reader, conv):
            group.add = reader
            reader = _only_reader(reader)
        if reader is not None and _is_relu(reader, gm):
            group.relu = reader
        last = group.nodes[-1]
        inside = sum(bool(effect(node, gm)) for node in group.nodes[1:])
        if effects[last] - effects[conv] > inside:
            # Something else is written between the two: the group cannot run as one.
            group.add = group.relu = None
        taken.update(group.nodes)
        groups.append(group)
    if not groups:
        kept.append("there is no convolution to pack")
    return groups


def _cannot_pack(conv: Node, gm: GraphModule, reads: set[str]) -> str | None:
    module: Any = gm.get_submodule(conv.target)
    if type(module) is not nn.Conv2d:
        return f"{type(module).__name__} may compute something else than Conv2d"
    if module.weight.dtype != torch.float32 or module.weight.device.type != "cpu":
        return "the packed kernel is for float32 on a CPU"
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return "the packed kernel pads with zeros, by a number"
    if has_hooks(module):
        return "it has hooks"
    if is_read(conv.target, reads):
        return f"the graph also reads the weights of {conv.target} directly"
    meta = conv.args[0].meta.get("tensor_meta") if conv.args else None
    if meta is None or len(meta.shape) != 4 or conv.kwargs:
        return "its input is not a batch of images"
    if conv.meta["tensor_meta"].dtype != torch.float32:
        return f"it gives {shape_text(conv)}, so autocast is on there"
    return None


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_plain_add(node: Node, conv: Node) -> bool:
    if node.op != "call_function" or node.target not in _ADDS or node.kwargs:
        return False
    metas = [getattr(n, "meta", {}).get("tensor_meta") for n in (node, conv, *node.args)]
    shapes = {(getattr(m, "shape", None), getattr(m, "dtype", None)) for m in metas}
    if node.target is operator.iadd and node.args[0] is not conv:
        return False  # it writes into the other value, which may have more readers
    return len(node.args) == 2 and len(node.all_input_nodes) == 2 and len(shapes) == 1


def _is_relu(node: Node, gm: GraphModule) -> bool:
    if node.op == "call_module":
        module = gm.get_submodule(node.target)
        return type(module) is nn.ReLU and not has_hooks(module)
    return node.op in ("call_function", "call_method") and node.target in _RELUS


def _write_into_dead_values(gm: GraphModule) -> None:
    """Let a packed addition write into its second input where nobody reads that afterwards."""
    memory = Memory(gm)
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(module, KERNELS) or not module.add:
            continue
        x, other = node.args
        last = max(position[user] for user in other.users) == position[node]
        module.inplace = (
            last
            and x is not other
            and other.op == "call_module"
            and memory.alone(other)
            and not has_hooks(gm.get_submodule(other.target))  # a hook may have kept the value
        )


def _keep_layout_inside(gm: GraphModule) -> None:
    """Make values contiguous again where they leave the nodes that take any layout.

    What leaves is a copy, which no write in place reaches any more: memory that is written is
    therefore copied as soon as it is made.
    """
    written, classes = Memory(gm).written, AliasClasses(gm)
    leaving = {classes.find(value) for value in _leaving(gm) if value in written}
    early = {node for node in gm.graph.nodes if classes.find(node) in leaving}
    for value, readers in _leaving(gm, early).items():
        before = value.next if value in early else readers[0]
        with gm.graph.inserting_before(before):
            dense = gm.graph.call_method("contiguous", (value,))
        for reader in readers:
            reader.replace_input_with(value, dense)


def _leaving(gm: GraphModule, early: Container[Node] = ()) -> dict[Node, list[Node]]:
    """Return the values that have the channels last only here, each with who must not see that.

    Args:
        gm: The program, with kernels in it.
        early: Values of which nobody may see it.
    """
    channels_last: set[Node] = set()
    leaving: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        inputs = [i for i in node.all_input_nodes if i in channels_last]
        takes_any = (node.target if module is None else type(module)) in _ANY_LAYOUT
        takes_any &= isinstance(node.meta.get("tensor_meta"), TensorMetadata)  # one value, not two
        if not isinstance(module, KERNELS) and not (inputs and takes_any):
            for value in inputs:
                leaving.setdefault(value, []).append(node)
        elif not channels_last.issuperset(mutated_inputs(node, gm)):
            continue  # its value is memory that has another layout
        elif node in early:
            leaving[node] = list(node.users)
        elif _memory_format(node) is not torch.channels_last:
            channels_last.add(node)
    return leaving


def _memory_format(node: Node) -> torch.memory_format | None:
    return getattr(node.meta.get("tensor_meta"), "memory_format", None)
