"""How long would a program take on a device, one that may not exist (section 6.3)?

The paper's in-house simulator needs three numbers of a device: how many FLOP a second, how many
bytes a second, how many bytes of memory. The roofline model takes it from there: a node cannot be
faster than its arithmetic, nor faster than its memory traffic, so it takes the longer of the two,

    seconds = max(flops / flops_per_second, bytes / bytes_per_second) + launch_seconds

and the program takes the sum. The model knows no caches and no overlap; ``calibrate`` measures the
three numbers of the machine at hand with two micro-benchmarks, so prediction can meet clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fxlab.passes.cost import Cost, NodeCost, amount

__all__ = ["Device", "NodePrediction", "Prediction", "calibrate"]


@dataclass(frozen=True)
class NodePrediction:
    """The predicted time of one node, and what bounds it: "compute", "memory" or "launch"."""

    name: str
    seconds: float
    bound: str
    intensity: float


@dataclass(frozen=True)
class Prediction:
    """What a device would need for a program.

    Its text gives the share of the whole nodes that one thing bounds; each launch is in its node's.

    Attributes:
        device: The device.
        rows: One prediction a node, in graph order.
        peak_bytes: Parameters, inputs and the most bytes that the run itself holds.
    """

    device: Device
    rows: tuple[NodePrediction, ...]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Time of one call, the nodes one after the other."""
        return sum(row.seconds for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether the device's memory holds the program."""
        return self.peak_bytes <= self.device.memory_bytes

    def __str__(self) -> str:
        share = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
        for row in self.rows:
            share[row.bound] += row.seconds
        total = self.seconds or 1.0
        parts = ", ".join(f"{bound} {s / total:.0%}" for bound, s in share.items() if s)
        launches = sum(self.device.launch_seconds for row in self.rows if row.seconds)
        # Less than half a percent is not worth the words.
        alone = f"; all launches together {launches / total:.0%}" if launches > total / 200 else ""
        memory = f"{amount(self.peak_bytes)}B of {amount(self.device.memory_bytes)}B"
        verdict = "" if self.fits else "; does not fit"
        return (
            f"{self.device.name}: {self.seconds * 1e3:.3g} ms (nodes bound by {parts}{alone}), "
            f"memory {memory}{verdict}"
        )


@dataclass(frozen=True)
class Device:
    """A device as the roofline model sees it.

    Args:
        name: What to call it.
        flops_per_second: Peak arithmetic, multiplications and additions counted separately.
        bytes_per_second: Peak memory traffic.
        memory_bytes: Memory.
        launch_seconds: Fixed cost of each node that moves or computes anything.

    Raises:
        ValueError: A number that must be positive is not.

    Example:
        >>> Device("chip", 1e12, bytes_per_second=1e11, memory_bytes=1 << 30).ridge
        10.0
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("flops_per_second", "bytes_per_second", "memory_bytes"):
            value = getattr(self, field)
            if not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(
                    f"{self.name}: {field} is {value!r}; a device needs a number greater than 0"
                )
        value = self.launch_seconds
        if not (isinstance(value, (int, float)) and value >= 0):
            raise ValueError(f"{self.name}: launch_seconds is {value!r}; 0 is the least")

    @property
    def ridge(self) -> float:
        """The arithmetic intensity (FLOP/byte) at which compute and memory take the same time."""
        return self.flops_per_second / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """Return the FLOP a second that the roofline allows at ``intensity`` FLOP/byte."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)

    def node_seconds(self, row: NodeCost) -> tuple[float, str]:
        """Return the predicted seconds of one node, ``row`` of a `Cost`, and what bounds it."""
        compute = row.flops / self.flops_per_second
        memory = row.bytes_moved / self.bytes_per_second
        work = max(compute, memory)
        if work == 0:
            return 0.0, "launch"
        bound = "compute" if compute >= memory else "memory"
        return work + self.launch_seconds, bound if work >= self.launch_seconds else "launch"

    def predict(self, cost: Cost) -> Prediction:
        """Return time and memory that a program of this ``cost`` would take.

        Raises:
            TypeError: ``cost`` is no Cost.
        """
        if not isinstance(cost, Cost):
            raise TypeError(
                f"{self.name}: predict takes a Cost and was given a {type(cost).__name__}; "
                "count it first: device.predict(fxlab.passes.cost(gm, *inputs))"
            )
        rows = []
        for row in cost.rows:
            seconds, bound = self.node_seconds(row)
            rows.append(NodePrediction(row.name, seconds, bound, row.intensity))
        peak = cost.parameter_bytes + cost.input_bytes + cost.peak_bytes
        return Prediction(self, tuple(rows), peak)


def calibrate(name: str = "this machine", repeats: int = 7) -> Device:
    """Return this machine's CPU as a Device, measured at torch's current number of threads.

    Two micro-benchmarks: a 3x3 convolution of 64 channels for arithmetic, and a multiplication of
    25 MB for memory. The launch cost is that of a ReLU of one element. The fastest of ``repeats``
    counts, since a roof is what can be reached; a second in all.

    Args:
        name: The Device's.
        repeats: How often each is run.

    Raises:
        ValueError: ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least one run must count")
    x, w = torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3)
    big, result, small = torch.randn(6 << 20), torch.empty(6 << 20), torch.randn(1)
    flops = 2 * 64 * 64 * 9 * 56 * 56
    with torch.no_grad():
        conv = _fastest_seconds(lambda: F.conv2d(x, w, padding=1), repeats)
        copy = _fastest_seconds(lambda: torch.mul(big, 2, out=result), repeats)
        ten = _fastest_seconds(lambda: [torch.relu(small) for _ in range(10)], 10 * repeats)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such call on Windows
        memory = float("inf")
    return Device(name, flops / conv, 2 * big.nbytes / copy, memory, ten / 10)


def _fastest_seconds(work: Callable[[], Any], repeats: int) -> float:
    return fastest({"work": work}, repeats)["work"]


def fastest(
    candidates: dict[str, Callable[[], Any]], repeats: int, between: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Return the smallest seconds of each candidate, measured in turns; ``between`` is not timed.

    With one thread the clock is the process's own: what others do on the machine does not count.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for work in candidates.values():
        work()
    for _ in range(repeats):
        for name, work in candidates.items():
            if between is not None:
                between()
            start = clock()
            work()
            samples[name].append(clock() - start)
    return {name: min(times) for name, times in samples.items()}
