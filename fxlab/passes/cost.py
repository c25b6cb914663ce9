"""What does a program cost: operations, bytes moved, bytes held (section 6.3)?

The paper's authors feed such numbers into a simulator of devices that do not exist yet. One walk
over the graph on fake tensors (shapes without data) is enough: each node is run, and every
operator that torch dispatches on the way is looked up in torch's own table of FLOP formulas, its
inputs and outputs are added up as memory traffic, and its new storages as live memory until the
last reader is done, with what its kernel holds for its own time (`scratch.py`). Nothing is
computed, so a model of gigabytes is costed in milliseconds.
"""

from __future__ import annotations

import html
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.passes.base import kind, report, undisturbed
from fxlab.passes.flops import formula_of, uncounted
from fxlab.passes.scratch import Scratch, has_rule, scratch_of
from fxlab.passes.shape_prop import ShapeError, need_inputs, quiet_fakes, shape_text

__all__ = ["Cost", "NodeCost", "cost"]

aten = torch.ops.aten
# These read the rows that the index names, not the whole table.
_GATHERS = (aten.embedding, aten.index_select, aten.gather, aten.index)
_PRODUCTS = (aten.mm, aten.bmm)
_ALLOCATIONS = (aten.empty, aten.empty_strided, aten.new_empty, aten.empty_like)


@dataclass
class NodeCost:
    """The cost of one node.

    Attributes:
        name: The node's name.
        kind: What it runs: a function's name, a method's, or a module's class.
        shape: The shape text of its value.
        flops: Multiplications and additions, counted separately, of matrix products and
            convolutions, as torch.utils.flop_counter counts them. Element by element work is 0.
        bytes_read: Bytes of all inputs, parameters included, of the operators that it runs.
        bytes_written: Bytes of all results; a view writes none.
        live_bytes: The most bytes held at one moment while it runs (inputs of the program and
            parameters not counted).
        parameters: Elements of the parameters that it owns or reads.
        caveats: Which of the numbers ("flops", "live_bytes") is only the least there is, and why.
        beyond_torch: Of ``flops``, those of kernels that torch.utils.flop_counter counts as 0 (an
            LSTM, the fast path of a transformer's layer), by kernel; see `fxlab.passes.flops`.
    """

    name: str
    kind: str
    shape: str = ""
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    live_bytes: int = 0
    parameters: int = 0
    caveats: dict[str, str] = field(default_factory=dict)
    beyond_torch: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOP for each byte moved; 0 when nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclass
class Cost:
    """The cost of a program: one row a node, in graph order, and the totals.

    Attributes:
        rows: The nodes' costs.
        parameters: Elements of all parameters, each counted once.
        parameter_bytes: Their bytes.
        input_bytes: Bytes of the program's inputs.
    """

    rows: list[NodeCost] = field(default_factory=list)
    parameters: int = 0
    parameter_bytes: int = 0
    input_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOP of one call, multiplications and additions counted separately."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes_read(self) -> int:
        """Bytes read by all operators of one call."""
        return sum(row.bytes_read for row in self.rows)

    @property
    def bytes_written(self) -> int:
        """Bytes written by all operators of one call."""
        return sum(row.bytes_written for row in self.rows)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one call allocates at one moment, beyond inputs and parameters."""
        return max((row.live_bytes for row in self.rows), default=0)

    @property
    def intensity(self) -> float:
        """FLOP for each byte moved, over the whole program."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0

    @property
    def caveats(self) -> dict[str, dict[str, str]]:
        """The caveats of the rows that have one, by node; they hold for the totals too."""
        return {row.name: row.caveats for row in self.rows if row.caveats}

    def __getitem__(self, name: str) -> NodeCost:
        """Return the row of the node of that name."""
        return next(row for row in self.rows if row.name == name)

    def _table(self) -> list[list[str]]:
        head = ["node", "kind", "shape", "FLOP", "B read", "B written", "B live", "FLOP/B"]
        body = [
            [
                *(r.name, r.kind, r.shape),
                *_amounts(r.flops, r.bytes_read, r.bytes_written, r.live_bytes, r.caveats),
                f"{r.intensity:.1f}",
            ]
            for r in self.rows
        ]
        least = [what for caveats in self.caveats.values() for what in caveats]
        totals = _amounts(self.flops, self.bytes_read, self.bytes_written, self.peak_bytes, least)
        total = ["total", "", "", *totals, f"{self.intensity:.1f}"]
        return [head, *body, total]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            left = [cell.ljust(w) for cell, w in zip(row[:3], widths, strict=False)]
            right = [cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join(left + right))
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        least = [f">= {note}" for note in self._least()]
        return [f"{self.parameters:,} parameters", *least, *self._beyond_torch()]

    def _beyond_torch(self) -> list[str]:
        """Say in which nodes, and by which kernels, the FLOP are more than torch's counter's."""
        return [
            f"{row.name}: {amount(flops)} FLOP of {kernel}, which torch's counter does not know"
            for row in self.rows
            for kernel, flops in row.beyond_torch.items()
        ]

    def _least(self) -> list[str]:
        """Say for each caveat once in which nodes it holds."""
        nodes: dict[str, list[str]] = {}
        for name, caveats in self.caveats.items():
            for what, why in caveats.items():
                nodes.setdefault(f"{what}: {why}", []).append(name)
        return [f"{text} ({', '.join(names)})" for text, names in nodes.items()]

    def _repr_html_(self) -> str:
        table, lines = self._table(), []
        for number, row in enumerate(table):
            tag = "th" if number in (0, len(table) - 1) else "td"
            sides = ["left"] * 3 + ["right"] * (len(row) - 3)
            cells = [
                f"<{tag} style='text-align:{side}'>{html.escape(cell)}</{tag}>"
                for side, cell in zip(sides, row, strict=True)
            ]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        notes = "<br>".join(html.escape(note) for note in self._notes())
        return f"<table>{''.join(lines)}</table><p>{notes}</p>"


def cost(gm: GraphModule, *inputs: Any) -> Cost:
    """Return what one call of ``gm`` costs (``gm`` is left as it is, but for its report).

    FLOPs agree with ``torch.utils.flop_counter`` but for kernels of which it knows nothing, such
    as an LSTM: those are counted here, and named in the report (``beyond_torch``). The program
    runs on fake tensors; one that asks for data (``item()``, kernels without a shape rule) is run
    on the inputs themselves instead, and the report says so. Memory is that of a call on a CPU
    without gradients; where a kernel takes more than can be predicted, or has no formula, the row,
    the table and the report say that the number is a bound.

    Args:
        gm: The module, in the mode (train or eval) that is to be costed.
        *inputs: Example inputs, for their shapes and dtypes.

    Returns:
        A Cost. Printing it gives a table; a notebook shows it as one.

    Example:
        >>> import fxlab
        >>> c = cost(fxlab.symbolic_trace(torch.nn.Linear(100, 10)), torch.randn(4, 100))
        >>> c.flops, c.peak_bytes, c.parameters
        (8000, 160, 1010)
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    need_inputs(gm, inputs)
    try:
        walk = _CostWalk(gm, FakeTensorMode(allow_non_fake_inputs=True))
        walk.measure(inputs)
        kept = []
    except Exception as error:
        walk = _CostWalk(gm, None)
        walk.measure(inputs)
        cause = error.__cause__ or error
        kept = [f"run on real data: {type(cause).__name__} on fake tensors"]
    result = walk.cost
    result.parameters = sum(p.numel() for p in gm.parameters())
    result.parameter_bytes = sum(_nbytes(p) for p in gm.parameters())
    result.input_bytes = sum(_nbytes(t) for t in _tensors_of(inputs))
    kept += [f"at least, {note}" for note in result._least()]
    facts: dict[str, Any] = {"flops": result.flops, "peak_bytes": result.peak_bytes}
    facts["beyond_torch"] = result._beyond_torch()
    report(gm, "cost", [], kept, **facts)
    return result


class _CostWalk(Interpreter):
    """Run each node with a counter that watches the operators it dispatches."""

    def __init__(self, gm: GraphModule, fake_mode: Any) -> None:
        super().__init__(gm)
        self.gm = gm
        self.fake_mode = fake_mode
        self.cost = Cost()

    def measure(self, inputs: tuple[Any, ...]) -> None:
        with undisturbed(self.gm, inputs) as given:
            self._measure(given)

    def _measure(self, inputs: tuple[Any, ...]) -> None:
        fake = self.fake_mode
        if fake is not None:
            inputs = pytree.tree_map_only(torch.Tensor, fake.from_tensor, inputs)
        state = [*self.module.parameters(), *self.module.buffers()]
        self.counter = _Counter(_tensors_of(inputs) + state)
        with torch.no_grad(), fake or nullcontext(), quiet_fakes():
            self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        row = NodeCost(n.name, kind(n, self.module), parameters=_parameters(n, self.module))
        self.cost.rows.append(row)
        self.counter.begin(row)
        try:
            with self.counter:
                result = super().run_node(n)
        except Exception as error:
            raise ShapeError(f"{n.name} does not run on these inputs: {error}", node=n) from error
        row.shape = shape_text(result)
        return result


class _Counter(TorchDispatchMode):
    """Add each dispatched operator to the current row: FLOP, bytes, storages alive."""

    def __init__(self, owned: list[torch.Tensor]) -> None:
        super().__init__()
        self.row = NodeCost("", "")
        self.product = 0  # storage of the matrix product that the row made last
        self.live: list[tuple[StorageWeakRef, int]] = []
        self.live_bytes = 0
        # What the caller holds is not this call's: inputs, parameters, buffers.
        self.known = {t.untyped_storage()._cdata for t in owned if t.layout == torch.strided}

    def begin(self, row: NodeCost) -> None:
        self.row = row
        self.product = 0
        self._drop_dead()
        row.live_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        whole = packet in flop_registry or has_rule(packet) or formula_of(func) is not None
        if not whole and packet is not torch.ops.prim.device:
            with self:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        out = func(*args, **kwargs)
        if packet in flop_registry:
            self.row.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif (formula := formula_of(func)) is not None:
            found = formula(args, out)
            self.row.flops += found
            mine, name = self.row.beyond_torch, func.name()
            mine[name] = mine.get(name, 0) + found
        elif why := uncounted(func):
            self.row.caveats.setdefault("flops", why)
        if any(t.is_nested for t in _tensors_of((args, kwargs, out))):
            scratch = Scratch(0, "what a kernel holds for nested tensors is not known here")
        else:
            scratch = scratch_of(packet, args, out)
        if scratch.caveat:
            self.row.caveats.setdefault("live_bytes", scratch.caveat)
        self._count(func, packet, _tensors_of((args, kwargs)), _tensors_of(out), scratch)
        return out

    def _count(
        self,
        func: Any,
        packet: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        scratch: Scratch,
    ) -> None:
        sources = {_storage(t) for t in inputs}
        fresh = [t for t in outputs if t.layout == torch.strided and _storage(t) not in sources]
        is_view = not fresh and not func._schema.is_mutable
        if getattr(func, "is_view", False) or is_view:
            return
        written = sum(_nbytes(t) for t in outputs)
        if packet not in _ALLOCATIONS:
            read = {id(t): _nbytes(t) for t in inputs}
            if packet in _GATHERS:
                read = {id(t): min(_nbytes(t), written) for t in inputs}
            self.row.bytes_read += sum(read.values())
            self.row.bytes_written += written
        self._drop_dead()
        for t in fresh:
            storage = _storage(t)
            if storage not in self.known:
                self.known.add(storage)
                memory = t.untyped_storage()
                size = max(memory.nbytes(), scratch.kept)
                self.live.append((StorageWeakRef(memory), size))
                self.live_bytes += size
        # While the kernel runs its result is as large as it is, whatever is kept of it later.
        held = self.live_bytes - max(0, scratch.kept - sum(_nbytes(t) for t in fresh))
        if packet in _PRODUCTS:
            self.product = _storage(outputs[0])
        elif packet is aten.add and _storage(inputs[0]) == self.product and inputs[-1].dim() == 1:
            # Within one node that is the bias of a linear layer: where nobody watches, it is added
            # in place, and the product is not there beside the sum.
            held -= _nbytes(outputs[0])
        self.row.live_bytes = max(self.row.live_bytes, held + scratch.bytes)

    def _drop_dead(self) -> None:
        alive = []
        for reference, size in self.live:
            if reference.expired():
                self.known.discard(reference.cdata)
                self.live_bytes -= size
            else:
                alive.append((reference, size))
        self.live = alive


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


def _nbytes(t: torch.Tensor) -> int:
    """Return the bytes that reading ``t`` once moves; an expanded tensor is as big as its data."""
    size = t.numel() * t.element_size()
    return min(size, t.untyped_storage().nbytes()) if t.layout == torch.strided else size


def _parameters(node: Node, gm: torch.nn.Module) -> int:
    if node.op == "call_module":
        return sum(p.numel() for p in gm.get_submodule(node.target).parameters())
    if node.op == "get_attr":
        owner, _, name = node.target.rpartition(".")
        value = getattr(gm.get_submodule(owner), name, None)
        return value.numel() if isinstance(value, torch.nn.Parameter) else 0
    return 0


def _amounts(flops: int, read: int, written: int, live: int, least: Collection[str]) -> list[str]:
    """Write four numbers; ``least`` names those that are lower bounds."""
    bounds = [">=" if what in least else "" for what in ("flops", "", "", "live_bytes")]
    numbers = (flops, read, written, live)
    return [bound + amount(number) for bound, number in zip(bounds, numbers, strict=True)]


def amount(value: float) -> str:
    """Return a number with a decimal prefix: 8178892800 -> ``8.18G``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}"
