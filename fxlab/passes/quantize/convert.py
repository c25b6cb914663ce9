"""Phase three: replace what was observed by int8 operators (section 6.2.1).

Converting takes the observers out again, asks the plan that put them in which nodes run on codes,
down-casts the weights and swaps in the operators of ``modules.py`` with scale and zero point
embedded. Where float meets codes, one Quantize or Dequantize serves all readers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import as_pass, copy_sharing_tensors, report, undisturbed
from fxlab.passes.quantize import kernels
from fxlab.passes.quantize.kernels import Codes
from fxlab.passes.quantize.modules import (
    Dequantize,
    Int8Add,
    Int8Cat,
    Int8Conv,
    Int8Embedding,
    Int8Linear,
    Int8MaxPool2d,
    Quantize,
    Table,
)
from fxlab.passes.quantize.observers import Observer, QParams
from fxlab.passes.quantize.plan import (
    Group,
    Plan,
    evaluate,
    make_plan,
    modules_of,
    path_of,
    reads_shape_only,
)
from fxlab.passes.quantize.prepare import (
    config_of,
    erase_identities,
    free_path,
    last_placeholder,
    prepare,
)
from fxlab.passes.quantize.qconfig import QConfig, QConfigMapping

__all__ = ["convert", "quantize_static"]

POOL_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

_CALIBRATE = """\
prepared = prepare(gm)
for batch in batches:
    prepared(batch)
quantized = convert(prepared)"""


@as_pass(min_sqnr_db=20.0)
def convert(prepared: GraphModule, *, engine: str = "auto", rows: int = 32) -> GraphModule:
    """Return a new module that computes in int8; ``prepared`` is left as it is.

    Args:
        prepared: what ``prepare`` returned, after calibration; or what ``prepare_qat`` returned,
            after training.
        engine: "auto" (measured), "onednn", "fbgemm" or "reference" for all layers. One that this
            torch build lacks is named in the report, and the next is taken.
        rows: the batch size to pack the weights of linear layers for. The packing for others, and
            of convolutions for the size of their images, is made at the first call.

    Returns:
        The int8 program. Its report (``meta["reports"]["convert"]``) has each layer's and each
        tensor's range, scale and zero point, and each operation left in float with the reason.

    Raises:
        FxlabError: an observer saw nothing, NaN or infinity, or ``prepared`` is not prepared.

    Example:
        >>> prepared = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval())
        >>> _ = prepared(torch.randn(8, 4))
        >>> [node.name for node in convert(prepared).graph.nodes]
        ['input_1', '_0_int8', '_2_int8', 'output']
    """
    start = time.perf_counter()
    phase = prepared.meta.get("quantize", {}).get("phase") if hasattr(prepared, "meta") else None
    if phase not in ("prepare", "prepare_qat"):
        raise FxlabError(
            "convert wants a prepared module",
            expected="what prepare(gm) returned" + (f", not of {phase}" if phase else ""),
            right=_CALIBRATE,
        )
    mapping = prepared.meta["quantize"]["mapping"]
    gm = copy_sharing_tensors(prepared).eval()
    trained = _take_out_training(gm)
    erase_identities(gm)
    observers = _take_out_observers(gm)
    plan = make_plan(gm, mapping)
    _refuse_uncalibrated(plan, observers)
    engine, notes = _available(engine)
    writer = _Writer(gm, plan, mapping, observers, trained, engine)
    for group in plan.groups:
        writer.write(group)
    writer.erase_old()
    _merge_quantize(gm)
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    for module in gm.modules():
        if isinstance(module, Int8Linear) and engine != "reference":
            module.pack(rows)
    gm.meta["quantize"] = {"phase": "convert", "mapping": mapping}
    gm.eval()
    report(
        gm,
        "convert",
        writer.changed,
        plan.kept + notes + writer.notes,
        tensors=writer.tensors,
        engine=engine,
        seconds=time.perf_counter() - start,
    )
    return gm


def quantize_static(
    gm: GraphModule | nn.Module,
    batches: Iterable[Any],
    qconfig: QConfig | QConfigMapping | None = None,
    **options: Any,
) -> GraphModule:
    """Return the int8 form of ``gm``: prepare, calibrate on ``batches``, convert.

    Args:
        gm: a GraphModule or model in eval mode; it is left as it is.
        batches: inputs; a tuple or list is the arguments of one call, anything else the only one.
        qconfig: as in ``prepare``.
        **options: as in ``convert``.

    Example:
        >>> quantized = quantize_static(nn.Sequential(nn.Linear(4, 2)).eval(), [torch.ones(3, 4)])
        >>> quantized(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    to_trace = isinstance(gm, nn.Module) and not isinstance(gm, GraphModule)
    traced: Any = symbolic_trace(gm) if to_trace else gm
    prepared = prepare(traced, qconfig)
    with torch.no_grad():
        for batch in batches:
            inputs = batch if isinstance(batch, (tuple, list)) else (batch,)
            with undisturbed(traced, inputs) as given:  # the observers' state is to change
                prepared(*given)
    return convert(prepared, **options)


def _take_out_observers(gm: GraphModule) -> dict[Node, Observer]:
    """Edit in place: erase the observers; return the one of each value."""
    observers = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_module":
            continue
        module: Any = gm.get_submodule(path_of(node))
        observer = module if isinstance(module, Observer) else getattr(module, "observer", None)
        if not isinstance(observer, Observer) or getattr(module, "is_qat", False):
            continue
        value = node.args[0]
        observers[value] = module
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    return observers


def _take_out_training(gm: GraphModule) -> dict[str, QParams]:
    """Edit in place: plain layers for those of prepare_qat; return their weights' QParams."""
    trained = {}
    for node in gm.graph.nodes:
        if node.op == "call_module" and node.target not in trained:
            module: Any = gm.get_submodule(path_of(node))
            if getattr(module, "is_qat", False):
                plain, trained[node.target] = module.plain()
                gm.set_submodule(node.target, plain)
    return trained


def _refuse_uncalibrated(plan: Plan, observers: dict[Node, Observer]) -> None:
    problems, first = [], None
    for node in plan.observed:
        observer = observers.get(node)
        problem = "it has no observer" if observer is None else observer.problem()
        if problem:
            problems.append(f"{node.name}: {problem}")
            first = first or node
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise FxlabError(
            f"{len(problems)} of {len(plan.observed)} values have no range ({shown})",
            node=first,
            expected="each observer to have seen finite numbers",
            hint="calibrate first: call the prepared module on a few typical batches",
            right=_CALIBRATE,
        )


def _available(engine: str) -> tuple[str, list[str]]:
    """Return the engine to use, and a sentence if it is not the one asked for."""
    known = ("auto", "onednn", "fbgemm", "reference")
    if engine not in known:
        raise FxlabError(f"no engine {engine!r}", expected=f"one of {', '.join(known)}")
    found = kernels.available_engines()
    if engine == "auto" or engine in found:
        return engine, []
    return found[0], [f"engine {engine} is not in this torch build; {found[0]} is used"]


def _merge_quantize(gm: GraphModule) -> None:
    """Edit in place: let a linear layer that is the only reader of a Quantize do its work too.

    For a few rows this is one kernel instead of two; for many the layer may call both.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_module" or len(node.users) != 1:
            continue
        (reader,) = node.users
        layer = gm.get_submodule(path_of(reader)) if reader.op == "call_module" else None
        if isinstance(gm.get_submodule(path_of(node)), Quantize) and isinstance(layer, Int8Linear):
            layer.reads_float = True
            reader.meta["quantized_input"] = node.meta["quantized"]
            reader.replace_input_with(node, node.args[0])
            gm.graph.erase_node(node)


class _Writer:
    """Writes one group after another as int8 modules, and remembers who has codes already."""

    def __init__(
        self,
        gm: GraphModule,
        plan: Plan,
        mapping: QConfigMapping,
        observers: dict[Node, Observer],
        trained: dict[str, QParams],
        engine: str,
    ) -> None:
        self.gm, self.plan, self.mapping, self.engine = gm, plan, mapping, engine
        self.observers, self.trained = observers, trained
        self.modules = modules_of(gm)
        groups = (group for group in plan.groups if group.kind != "embedding")
        self.members = {node for group in groups for node in group.nodes}
        self.code_of: dict[Node, Node] = {}  # value -> the node that gives its codes
        self.now: dict[Node, Node] = {}  # a float value -> the node that gives it now
        self.meaning: dict[Node, Codes] = {}  # root value -> what its codes mean
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}  # one int8 copy of a shared weight
        self.calls: dict[str, int] = {}
        self.old: list[Node] = []
        self.changed: list[str] = []
        self.notes: list[str] = []
        self.tensors: dict[str, dict[str, float]] = {}

    # ---------------------------------------------------------------------------- codes and ranges

    def codes_of(self, value: Node) -> Codes:
        """Return what the codes of ``value`` mean: the answer of its observer."""
        root = self.plan.root(value)
        if root not in self.meaning:
            observer = self.observers[root]
            q = observer.qparams()
            codes = Codes(float(q.scale), int(q.zero_point), q.quant_max)
            self.meaning[root] = codes
            low, high = q.bounds
            seen: Any = getattr(observer, "observer", observer)
            self.tensors[root.name] = {
                "low": float(low),
                "high": float(high),
                "scale": codes.scale,
                "zero_point": codes.zero_point,
                "seen_low": float(seen.low),
                "seen_high": float(seen.high),
            }
            if seen.constant:
                self.notes.append(f"{root.name}: calibration saw one constant value only")
        return self.meaning[root]

    def read(self, value: Node) -> Node:
        """Return the node that gives the codes of ``value``; makes a Quantize if there is none."""
        if value not in self.code_of:
            path = free_path(self.gm, f"{value.name}_codes")
            self.gm.add_submodule(path, Quantize(self.codes_of(value)))
            source = self.now.get(value, value)
            with self.gm.graph.inserting_after(last_placeholder(source)):
                self.code_of[value] = new = self.gm.graph.call_module(path, (source,))
            new.meta["quantized"] = {"value": value.name, "codes": tuple(self.codes_of(value))}
        return self.code_of[value]

    # ------------------------------------------------------------------------------ writing a group

    def write(self, group: Group) -> None:
        """Insert the int8 form of ``group`` and give its readers what they read."""
        if group.kind == "shape":
            return self._in_place(group)
        module, path, args = getattr(self, f"_{group.kind}")(group)
        self._place(group, module, path, args)
        return None

    def _place(self, group: Group, module: nn.Module, path: str, args: tuple) -> None:
        out = group.out
        if path in self.modules and path in {n.target for n in group.nodes}:
            self.gm.set_submodule(path, module)
        else:
            path = free_path(self.gm, path)
            self.gm.add_submodule(path, module)
        with self.gm.graph.inserting_before(out):
            name = f"{group.nodes[0].name}_{'table' if group.kind == 'table' else 'int8'}"
            new = self.gm.graph.create_node("call_module", path, args, {}, name)
        for key in ("source", "nn_module_stack", "stack_trace"):
            if key in group.nodes[0].meta:
                new.meta[key] = group.nodes[0].meta[key]
        codes = self.codes_of(out) if group.emits == "codes" else None
        new.meta["quantized"] = {"value": out.name, "codes": codes and tuple(codes)}
        self.changed.append(f"{' + '.join(n.name for n in group.nodes)} -> {_describe(module)}")
        self.old.extend(group.nodes)
        if group.emits == "float":
            out.replace_all_uses_with(new)
            self.now[out] = new
        else:
            self.code_of[out] = new
            self._float_for_others(out, new)

    def _float_for_others(self, out: Node, new: Node) -> None:
        """Give the readers of ``out`` that want float one Dequantize of the codes ``new``."""
        for user in [user for user in out.users if reads_shape_only(user)]:
            user.replace_input_with(out, new)
        readers = [u for u in out.users if not (self._takes_codes(u) or reads_shape_only(u))]
        if not readers:
            return
        path = free_path(self.gm, f"{out.name}_float")
        self.gm.add_submodule(path, Dequantize(self.codes_of(out)))
        with self.gm.graph.inserting_after(new):
            value = self.gm.graph.call_module(path, (new,))
        for user in readers:
            user.replace_input_with(out, value)

    def _takes_codes(self, user: Node) -> bool:
        return user in self.members

    def _in_place(self, group: Group) -> None:
        """Views do to codes what they do to values: only their input changes."""
        node, value = group.out, group.inputs[0]
        node.replace_input_with(value, self.read(value))
        self.code_of[node] = node
        self._float_for_others(node, node)
        self.changed.append(f"{node.name} works on codes")

    # --------------------------------------------------------------------------------- one per kind

    def _layer_arguments(self, group: Group) -> tuple[dict[str, Any], Any, str]:
        node = group.nodes[0]
        path = path_of(node)
        layer = self.modules[path]
        weight, scale = self._weight(path, layer.weight, group)
        output = self.codes_of(group.out) if group.emits == "codes" else None
        arguments = {
            "weight": weight,
            "weight_scale": scale,
            "bias": None if layer.bias is None else layer.bias.detach(),
            "input": self.codes_of(group.inputs[0]),
            "output": output,
            "relu": group.relu,
            "engine": self.engine,
        }
        used = self.calls[path] = self.calls.get(path, 0) + 1
        if used == 2:
            self.notes.append(
                f"{path} is called several times: each call has its own scales, "
                "all share one int8 weight"
            )
        return arguments, layer, path if used == 1 else f"{path.replace('.', '_')}_{used}"

    def _weight(self, path: str, weight: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Return int8 codes and scales of a weight; a weight shared by modules is coded once."""
        key = id(weight)
        if key in self.weights:
            if path not in self.calls:
                self.notes.append(f"{path} shares its weight with another module; so do the codes")
            return self.weights[key]
        q = self.trained.get(path)
        if q is None:
            observer = config_of(self.plan, group.out, self.mapping).weight()
            observer(weight.detach())
            if observer.problem():
                raise FxlabError(
                    f"the weight of {path} cannot be quantized: {observer.problem()}",
                    node=group.nodes[0],
                )
            q = observer.qparams()
        scale = q.scale if q.scale.dim() else q.scale.repeat(weight.shape[0])
        codes = kernels.weight_codes(weight, scale, q.quant_min, q.quant_max)
        low, high = codes.flatten(1).aminmax(dim=1)
        dead = int(((low == 0) & (high == 0)).sum())
        if dead:
            self.notes.append(f"{path}: {dead} channels have no weight but 0; scale 1, exact")
        self.weights[key] = codes, scale.contiguous()
        return self.weights[key]

    def _linear(self, group: Group) -> tuple[nn.Module, str, tuple]:
        arguments, _, path = self._layer_arguments(group)
        return Int8Linear(**arguments), path, (self.read(group.inputs[0]),)

    def _conv(self, group: Group) -> tuple[nn.Module, str, tuple]:
        arguments, conv, path = self._layer_arguments(group)
        padding = (0,) * len(conv.stride) if conv.padding == "valid" else conv.padding
        other = None if len(group.inputs) == 1 else self.codes_of(group.inputs[1])
        module = Int8Conv(
            **arguments,
            stride=conv.stride,
            padding=padding,
            dilation=conv.dilation,
            groups=conv.groups,
            other=other,
        )
        return module, path, tuple(self.read(v) for v in group.inputs)

    def _table(self, group: Group) -> tuple[nn.Module, str, tuple]:
        node, value = group.out, group.inputs[0]
        name = node.target if isinstance(node.target, str) else node.target.__name__
        if node.op == "call_module":
            name = type(self.modules[path_of(node)]).__name__
        output = self.codes_of(node) if group.emits == "codes" else None
        function = evaluate(node, self.modules)
        table = Table.of(name, function, self.codes_of(value), output)
        return table, f"{node.name}_table", (self.read(value),)

    def _add(self, group: Group) -> tuple[nn.Module, str, tuple]:
        node = group.nodes[0]
        operands = [*node.args, *(v for k, v in node.kwargs.items() if k != "alpha")]
        left, right = operands
        module = Int8Add(
            self.codes_of(left), self.codes_of(right), self.codes_of(group.out), group.relu
        )
        return module, f"{group.out.name}_int8", (self.read(left), self.read(right))

    def _max_pool(self, group: Group) -> tuple[nn.Module, str, tuple]:
        node = group.out
        if node.op == "call_module":
            pool = self.modules[path_of(node)]
            given = {name: getattr(pool, name) for name in POOL_OPTIONS}
        else:
            given = dict(zip(POOL_OPTIONS, node.args[1:], strict=False)) | dict(node.kwargs)
            given = {name: value for name, value in given.items() if name in POOL_OPTIONS}
        path = path_of(node) if node.op == "call_module" else f"{node.name}_int8"
        path = path if self._calls(path) == 1 else f"{node.name}_int8"
        module = Int8MaxPool2d(self.codes_of(group.inputs[0]), **given)
        return module, path, (self.read(group.inputs[0]),)

    def _calls(self, path: str) -> int:
        return sum(n.target == path for n in self.gm.graph.nodes)

    def _cat(self, group: Group) -> tuple[nn.Module, str, tuple]:
        node = group.out
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        inputs = [self.codes_of(v) for v in group.inputs]
        module = Int8Cat(inputs, self.codes_of(node), dim)
        return module, f"{node.name}_int8", ([self.read(v) for v in group.inputs],)

    def _embedding(self, group: Group) -> tuple[nn.Module, str, tuple]:
        node = group.out
        layer = self.modules[path_of(node)]
        weight, scale = self._weight(path_of(node), layer.weight, group)
        return Int8Embedding(weight, scale), path_of(node), tuple(node.args)

    def erase_old(self) -> None:
        """Erase the nodes that were replaced, last first."""
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        for node in sorted(self.old, key=lambda n: -order[n]):
            self.gm.graph.erase_node(node)


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
