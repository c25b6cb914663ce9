"""Does an engine compute what PyTorch computes?

A part that has become an engine (section 6.4 of the paper) is run once beside the code that it
stands for. A converter may be wrong, and so may an engine that fuses what does not belong
together; both are seen in the numbers, and what is wrong is named, so that it can stay in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.backends.onnx import Emitter, EngineError, OnnxValue, check_model
from fxlab.backends.runtimes import EngineOptions, LoweredModule, Port
from fxlab.core.errors import LoweringError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node

__all__ = ["Trial", "engine_module"]


def engine_module(part: GraphModule, options: EngineOptions) -> LoweredModule:
    """Return the engine that computes what `part` does, built with those ``options``.

    Raises:
        EngineError: the runtime does not accept the part.
    """
    emitter = Emitter(part, backend=options.backend)
    emitter.emit()
    model, spec = emitter.model()
    check_model(model)
    inputs, outputs = ([_port(v) for v in values] for values in (emitter.inputs, emitter.outputs))
    lowered = LoweredModule(model, inputs, outputs, spec, options, emitter.absent)
    del model, emitter  # two copies of the weights, while the engine makes its own
    _ = lowered.engine  # built now, so that what an engine refuses is said now
    return lowered


def _port(value: OnnxValue) -> Port:
    shape: tuple[int | None, ...] = tuple(value.fake.shape)
    if value.other is not None:
        pairs = zip(shape, value.other.shape, strict=True)
        shape = tuple(a if a == b else None for a, b in pairs)
    return Port(value.name, value.dtype, shape)


class Trial(Interpreter):
    """Run a lowered program once, each engine beside PyTorch: `errors` says which do not agree."""

    def __init__(self, lowered: GraphModule, parts: Mapping[str, GraphModule]) -> None:
        super().__init__(lowered)
        self.parts = parts
        self.errors: dict[str, str] = {}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a module; of a part, return what PyTorch makes of it."""
        if target not in self.parts:
            return super().call_module(target, args, kwargs)
        module, part = self.fetch_attr(target), self.parts[target]
        given = pytree.tree_map_only(torch.Tensor, torch.clone, args)
        try:
            result = super().call_module(target, args, kwargs)
            error = None
        except Exception as caught:
            error = caught
        expected = part(*args, **kwargs)
        try:
            if error is not None:
                raise error
            self._compare(module, part, given, result, expected)
        except Exception as caught:
            words = getattr(caught, "message", None) or str(caught)
            self.errors[target] = f"{module.options.backend} fails: {words}"
        return expected

    def _compare(
        self, module: LoweredModule, part: GraphModule, given: Any, result: Any, expected: Any
    ) -> None:
        ours = [v for v in pytree.tree_leaves(result) if v is not None]
        theirs = [v for v in pytree.tree_leaves(expected) if v is not None]
        for port, value in zip(module.outputs, ours, strict=True):
            fits = len(port.shape) == value.dim() and all(
                a in (None, b) for a, b in zip(port.shape, value.shape, strict=True)
            )
            if value.dtype != port.dtype or not fits:
                raise EngineError(
                    f"'{port.name}' is {value.dtype} {list(value.shape)}, "
                    f"in PyTorch {port.dtype} {list(port.shape)}"
                )
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            words = _difference(a, b, module.rounds)
            if words is None or _is_noise(part, given, place, a, b):
                continue
            name = _first_wrong(part, module, given) or module.outputs[place].name
            raise EngineError(f"a value of '{name}' {words}")


# How far f32 sums in another order may be from eager's, relative to the largest number.
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1e-1}
_ROUNDED = 0.2  # of bf16, f16 and 8-bit codes: root mean squares


def _difference(ours: torch.Tensor, eager: torch.Tensor, rounds: bool) -> str | None:
    """Say how two results differ by more than their precision allows, None if they do not."""
    if ours.shape != eager.shape:
        return f"has shape {list(ours.shape)}, in PyTorch {list(eager.shape)}"
    if not eager.is_floating_point():
        wrong = (ours != eager) if not rounds else torch.zeros(())
    else:
        a, b = ours.double(), eager.double()
        finite = b.isfinite()
        numbers = b[finite]
        if rounds:
            size = float(numbers.square().mean().sqrt()) if len(numbers) else 0.0
            gap = a[finite] - numbers
            if float(gap.square().mean().sqrt() if len(gap) else 0.0) <= _ROUNDED * size:
                return None
            wrong = (a - b).abs() > _ROUNDED * size
        else:
            tolerance = _TOLERANCES.get(eager.dtype, 1e-4)
            size = float(numbers.abs().max()) if len(numbers) else 0.0
            close = finite & ((a - b).abs() <= tolerance * size)
            wrong = ~(close | (a == b) | (a.isnan() & b.isnan()))
    if not wrong.any():
        return None
    place = wrong.nonzero()[0].tolist()
    at = tuple(place)
    return f"is {ours[at].item():.6g} at {place}, in PyTorch {eager[at].item():.6g}"


def _is_noise(part: GraphModule, given: Any, place: int, ours: Any, eager: Any) -> bool:
    """Say whether PyTorch's own result moves as much when its inputs move by their rounding.

    So it is where nearly equal numbers are subtracted, such as a mean from equal numbers.
    """
    if not eager.is_floating_point() or ours.shape != eager.shape:
        return False

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x.clone()
        wave = torch.arange(x.numel(), device=x.device).reshape(x.shape).cos().to(x.dtype)
        return x + x * wave * (4 * torch.finfo(x.dtype).eps)

    leaves = pytree.tree_leaves(part(*pytree.tree_map_only(torch.Tensor, moved, given)))
    other = [v for v in leaves if v is not None][place]
    if not (ours.isfinite() & other.isfinite() & eager.isfinite()).all():
        return False
    return float((ours - eager).abs().max()) <= 4 * float((other - eager).abs().max())


class _Record(Interpreter):
    """Keep what each node returned, before anything writes to it."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node; keep its tensor."""
        result = super().run_node(n)
        if n.op.startswith("call_") and isinstance(result, torch.Tensor):
            self.values[n] = result.clone()
        return result


def _first_wrong(part: GraphModule, module: LoweredModule, given: Any) -> str | None:
    """Name the first node whose value, asked of an engine that returns all, is not PyTorch's."""
    record = _Record(part)
    record.run(*pytree.tree_map_only(torch.Tensor, torch.clone, given))
    graph, copies = Graph(), {}
    graph.graph_copy(part.graph, copies)
    graph.output(tuple(copies[node] for node in record.values))
    try:
        options = EngineOptions(module.options.backend, module.options.precision)
        found = engine_module(GraphModule(part, graph), options)(*given)
    except LoweringError:
        return None
    for (node, eager), ours in zip(record.values.items(), found, strict=True):
        if ours.dtype != eager.dtype or _difference(ours, eager, module.rounds):
            return node.name
    return None
