"""Where does the time go? Measured seconds of each node (section 6.3).

The same walk as shape propagation with a clock around each node. An Interpreter costs some
microseconds a node more than the generated code, so small programs look slower than they are:
``seconds`` is what the nodes took, ``call_seconds`` what a call of the module takes.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.passes.base import kind, report, undisturbed
from fxlab.passes.shape_prop import ShapeError, need_inputs

__all__ = ["NodeTime", "Profile", "profile"]


@dataclass(frozen=True)
class NodeTime:
    """Measured time of one node: median and standard deviation over the repeats, in seconds.

    Attributes:
        name: The node's name.
        kind: What it runs.
        seconds: The median.
        stdev: The standard deviation.
        samples: Seconds of each repeat.
    """

    name: str
    kind: str
    seconds: float
    stdev: float
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Profile:
    """Measured times of a program, one row a node in graph order.

    Attributes:
        rows: The nodes.
        call_seconds: Median time of calling the module itself.
        repeats: How often each was run.
        threads: torch's number of threads.
        call_samples: Seconds of each call.
    """

    rows: tuple[NodeTime, ...]
    call_seconds: float
    repeats: int
    threads: int
    call_samples: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Sum of the nodes' medians."""
        return sum(row.seconds for row in self.rows)

    def __getitem__(self, name: str) -> NodeTime:
        """Return the row of the node of that name."""
        return next(row for row in self.rows if row.name == name)

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of each kind of node, the largest first."""
        total: dict[str, float] = {}
        for row in self.rows:
            total[row.kind] = total.get(row.kind, 0.0) + row.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def samples_by_kind(self) -> dict[str, tuple[float, ...]]:
        """Return for each kind the seconds of all its nodes together, a number a repeat."""
        runs: dict[str, list[tuple[float, ...]]] = {}
        for row in self.rows:
            runs.setdefault(row.kind, []).append(row.samples)
        return {kind: tuple(map(sum, zip(*rows, strict=True))) for kind, rows in runs.items()}

    def slowest(self, count: int = 10) -> list[NodeTime]:
        """Return the ``count`` slowest nodes, the slowest first."""
        return sorted(self.rows, key=lambda row: -row.seconds)[:count]

    def __str__(self) -> str:
        longest = max((row.seconds for row in self.rows), default=0.0) or 1.0
        width = max((len(row.name) for row in self.rows), default=4)
        lines = [
            f"{row.name:<{width}}  {row.seconds * 1e6:>9.1f} us  "
            + "#" * round(40 * row.seconds / longest)
            for row in self.rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), self._caption()])

    def _repr_html_(self) -> str:
        longest = max((row.seconds for row in self.rows), default=0.0) or 1.0
        style = "background:#4c78a8;height:10px"
        rows = "".join(
            f"<tr><td>{html.escape(row.name)}</td><td>{html.escape(row.kind)}</td>"
            f"<td style='text-align:right'>{row.seconds * 1e6:.1f} us</td>"
            f"<td style='min-width:240px;text-align:left'>"
            f"<div style='{style};width:{240 * row.seconds / longest:.0f}px'></div></td></tr>"
            for row in self.rows
        )
        return f"<table>{rows}</table><p>{html.escape(self._caption())}</p>"

    def _caption(self) -> str:
        return (
            f"nodes {self.seconds * 1e3:.3g} ms, one call {self.call_seconds * 1e3:.3g} ms; "
            f"medians of {self.repeats}, {self.threads} thread{'s' * (self.threads != 1)}"
        )


def profile(
    gm: GraphModule,
    *inputs: Any,
    repeats: int = 7,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure each node of ``gm`` (in place: only ``node.meta["columns"]`` is written).

    The explorer shows the seconds as bars: explore the timeline of a ``record`` around this call.

    Args:
        gm: The module. It runs ``2 * (warmup + repeats)`` times, without gradients.
        *inputs: Its inputs.
        repeats: Runs that count; the median is kept.
        warmup: Runs before, which do not count.
        clock: What to read before and after. ``time.process_time`` leaves out the time in which
            other programs had the core; it is right for one thread on a CPU only.

    Returns:
        A Profile; printing it gives a table with bars.

    Raises:
        ValueError: ``repeats`` is less than 1, or ``warmup`` less than 0.
        TypeError: ``gm`` is no GraphModule.
        ShapeError: A node does not run on the inputs, or these are too many or too few.
    """
    import statistics  # with fractions and decimal behind it, too slow for every import of fxlab

    need_inputs(gm, inputs)
    if repeats < 1 or warmup < 0:
        text = f"repeats is {repeats} and warmup {warmup}"
        raise ValueError(f"{text}; at least one run must count, and none or more go before")
    walk = _Clock(gm, clock)
    calls = []
    with torch.no_grad():
        for i in range(warmup + repeats):
            if i == warmup:
                walk.samples.clear()
                calls.clear()
            with undisturbed(gm, inputs) as given:
                walk.run(*given)
            with undisturbed(gm, inputs) as given:
                start = clock()
                gm(*given)
                calls.append(clock() - start)
    rows = []
    for node in gm.graph.nodes:
        samples = walk.samples.get(node, [0.0] * repeats)
        seconds = statistics.median(samples)
        node.meta["columns"] = {**node.meta.get("columns", {}), "seconds": seconds}
        spread = statistics.stdev(samples) if len(samples) > 1 else 0.0
        rows.append(NodeTime(node.name, kind(node, gm), seconds, spread, tuple(samples)))
    middle, threads = statistics.median(calls), torch.get_num_threads()
    result = Profile(tuple(rows), middle, repeats, threads, tuple(calls))
    report(gm, "profile", [], [], seconds=result.seconds, call_seconds=result.call_seconds)
    return result


class _Clock(Interpreter):
    def __init__(self, gm: GraphModule, clock: Callable[[], float]) -> None:
        super().__init__(gm)
        self.clock = clock
        self.samples: dict[Node, list[float]] = {}
        self._on_gpu = any(p.is_cuda for p in gm.parameters())

    def run_node(self, n: Node) -> Any:
        start = self.clock()
        try:
            result = super().run_node(n)
        except Exception as error:
            raise ShapeError(f"{n.name} does not run on these inputs: {error}", node=n) from error
        if self._on_gpu:
            # A kernel on a GPU has only been queued when the call returns.
            torch.cuda.synchronize()
        self.samples.setdefault(n, []).append(self.clock() - start)
        return result
