"""Where did the accuracy go? Float and int8 side by side, layer by layer.

The paper says that the correctness of quantization was checked, without numbers. This file makes
them: ``compare`` runs the prepared float program and the int8 one on the same input and gives the
signal-to-quantization-noise ratio of each value,

    SQNR = 10 * log10(sum(float**2) / sum((float - int8)**2))   in decibel,

with its range and how much of it lies beyond; ``sensitivity`` quantizes one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import kind, undisturbed
from fxlab.passes.quantize import kernels
from fxlab.passes.quantize.convert import quantize_static
from fxlab.passes.quantize.kernels import Codes
from fxlab.passes.quantize.plan import layers, make_plan, path_of
from fxlab.passes.quantize.prepare import prepare
from fxlab.passes.quantize.qconfig import QConfig, QConfigMapping, default_qconfig

__all__ = ["Comparison", "LayerRow", "compare", "sensitivity", "sqnr"]


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Return the signal-to-noise ratio of ``other`` in decibel; infinite when they are equal.

    Args:
        reference: What is right, of any shape and float dtype.
        other: What is judged, of the same shape, any float dtype.

    Example:
        >>> round(sqnr(torch.tensor([1.0, 1.0]), torch.tensor([1.1, 0.9])), 3)
        20.0
    """
    reference = reference.detach().double()
    noise = float((reference - other.detach().double()).square().sum())
    signal = float(reference.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


@dataclass(frozen=True)
class LayerRow:
    """One value of the int8 program beside its float twin.

    Args:
        name: the node of the int8 program.
        value: the node of the float program with the same value.
        what: the class or function that gives it.
        sqnr_db: decibel; lower is worse.
        low, high: what codes can reach; None for float values.
        scale: step between codes; None for float values.
        zero_point: the code of 0; None for float values.
        saturated: fraction of the float values beyond ``[low, high]`` by more than half a step.
    """

    name: str
    value: str
    what: str
    sqnr_db: float
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    zero_point: int | None = None
    saturated: float = 0.0


@dataclass
class Comparison:
    """How far an int8 program is from its float twin.

    Attributes:
        rows: Its values in graph order.
        sqnr_db: Of the whole program's output, in decibel.
    """

    rows: list[LayerRow] = field(default_factory=list)
    sqnr_db: float = math.inf

    @property
    def worst(self) -> LayerRow:
        """The row with the lowest SQNR.

        Raises:
            FxlabError: nothing of the program is quantized.
        """
        if not self.rows:
            raise FxlabError("nothing was compared: no value of this program is quantized")
        return min(self.rows, key=lambda row: row.sqnr_db)

    def __str__(self) -> str:
        head = f"{'value':28} {'from':14} {'SQNR dB':>8}  {'range':>19} {'step':>9} {'beyond':>8}"
        lines = [head]
        for row in self.rows:
            line = f"{row.value:28.28} {row.what:14.14} {row.sqnr_db:8.1f}"
            if row.low is not None:
                line += f"  [{row.low:8.3g}, {row.high:7.3g}] {row.scale:9.3g} {row.saturated:8.2%}"
            lines.append(line)
        lines.append(f"output: {self.sqnr_db:.1f} dB")
        return "\n".join(lines)


class _Keep(Interpreter):
    """Keeps the values of some nodes, by name."""

    def __init__(self, gm: GraphModule, names: set[str]) -> None:
        super().__init__(gm)
        self.names, self.values = names, {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, Tensor):
            self.values[n.name] = value.detach().clone()
        return value


def compare(prepared: GraphModule, quantized: GraphModule, *inputs: Any) -> Comparison:
    """Run both programs on ``inputs`` and return the SQNR of each value.

    The numbers also go to ``node.meta["columns"]`` of the int8 program (``sqnr_db``,
    ``saturated``), which the explorer shows as columns, and to its report "compare".

    Args:
        prepared: the float program, as ``prepare`` returned it (batch norms folded, so its values
            are those of the int8 program). Its observers are not fed.
        quantized: what ``convert`` made of it.
        *inputs: arguments of both.
    """
    twins = {n: n.meta["quantized"] for n in quantized.graph.nodes if "quantized" in n.meta}
    inputs_of = {
        n: n.meta["quantized_input"] for n in quantized.graph.nodes if "quantized_input" in n.meta
    }
    wanted = {twin["value"] for twin in (*twins.values(), *inputs_of.values())}
    kept = {n.name for n in twins} | {n.args[0].name for n in inputs_of}
    observers = [m for m in prepared.modules() if hasattr(m, "observe")]
    state = [{k: v.clone() for k, v in m.state_dict().items()} for m in observers]
    was_training = prepared.training
    prepared.eval()
    with torch.no_grad():
        float_run, int8_run = _Keep(prepared, wanted), _Keep(quantized, kept)
        with undisturbed(prepared, inputs) as given:
            float_out = float_run.run(*given)
        for module, saved in zip(observers, state, strict=True):
            module.load_state_dict(saved)
        prepared.train(was_training)
        with undisturbed(quantized, inputs) as given:
            int8_out = int8_run.run(*given)
    result = Comparison(sqnr_db=sqnr(_flat(float_out), _flat(int8_out)))
    for node in quantized.graph.nodes:
        if node in inputs_of and inputs_of[node]["value"] in float_run.values:
            codes = Codes(*inputs_of[node]["codes"])
            got = kernels.quantize(int8_run.values[node.args[0].name], codes)
            result.rows.append(_row(node, "Quantize", inputs_of[node], float_run.values, got))
        if node in twins and twins[node]["value"] in float_run.values:
            got = int8_run.values[node.name]
            row = _row(node, kind(node, quantized), twins[node], float_run.values, got)
            result.rows.append(row)
            columns = {"sqnr_db": min(row.sqnr_db, 999.0), "saturated": row.saturated}
            node.meta["columns"] = {**node.meta.get("columns", {}), **columns}
    quantized.meta.setdefault("reports", {})["compare"] = {
        "name": "compare",
        "changed": [],
        "kept": [],
        "sqnr_db": min(result.sqnr_db, 999.0),
        "worst": result.worst.value if result.rows else "",
    }
    return result


def _row(node: Node, what: str, twin: dict, reference: dict[str, Tensor], got: Tensor) -> LayerRow:
    wanted = reference[twin["value"]]
    if twin["codes"] is None:
        return LayerRow(node.name, twin["value"], what, sqnr(wanted, got))
    codes = Codes(*twin["codes"])
    low = -codes.zero_point * codes.scale
    high = (codes.quant_max - codes.zero_point) * codes.scale
    margin = codes.scale / 2
    beyond = float(((wanted < low - margin) | (wanted > high + margin)).double().mean())
    return LayerRow(
        node.name,
        twin["value"],
        what,
        sqnr(wanted, kernels.dequantize(got, codes)),
        low,
        high,
        codes.scale,
        codes.zero_point,
        beyond,
    )


def _flat(value: Any) -> Tensor:
    """Return all tensors of an output as one row of float64."""
    from torch.utils import _pytree as pytree

    leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    return torch.cat([leaf.detach().double().reshape(-1) for leaf in leaves])


def sensitivity(
    gm: GraphModule,
    batches: Iterable[Any],
    qconfig: QConfig | None = None,
    only: Sequence[str] | None = None,
) -> list[tuple[str, float]]:
    """Return the output's SQNR when one layer alone is quantized, the worst layer first.

    Args:
        gm: the float program, in eval mode.
        batches: inputs to calibrate on; the first is also the one that is compared.
        qconfig: how to quantize; the default when None.
        only: module paths to look at; all layers when None.

    Returns:
        Pairs (module path, decibel).

    Raises:
        FxlabError: there is no batch, or no such layer.
    """
    qconfig, batches = qconfig or default_qconfig(), list(batches)
    if not isinstance(gm, GraphModule):
        gm = symbolic_trace(gm)
    if not batches:
        raise FxlabError("no batch to calibrate on", expected="at least one")
    plan = make_plan(prepare(gm, qconfig), QConfigMapping().set_global(qconfig))
    paths = dict.fromkeys(path_of(group.nodes[0]) for group in layers(plan))
    first = batches[0] if isinstance(batches[0], (tuple, list)) else (batches[0],)
    found = []
    with torch.no_grad():
        with undisturbed(gm, first) as given:
            reference = _flat(gm(*given))
        for path in paths if only is None else only:
            if path not in paths:
                raise FxlabError(f"no layer {path!r} to quantize", expected=", ".join(paths))
            alone = QConfigMapping().set_module_name(path, qconfig)
            quantized = quantize_static(gm, batches, alone)
            with undisturbed(quantized, first) as given:
                found.append((path, sqnr(reference, _flat(quantized(*given)))))
    return sorted(found, key=lambda pair: pair[1])
