"""What did the paper claim, how sure are we of each number, and how does this machine compare?

Reed, DeVito, He, Ussery and Ansel, "torch.fx: Practical Program Capture and Transformation for
Deep Learning in Python", MLSys 2022, arXiv 2112.08429. Its eight figures and five tables stand here
as data; every number carries a mark that says where it comes from (``MARKS``). The second half
measures two programs against each other, judges the ratio by a rule, and draws "paper | this
machine": ratios are compared, seconds only listed, and what could not run is an empty slot that
says why. A ratio has one interval (``READING``): it is drawn, printed in brackets, and judged.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxlab import bars
from fxlab.surroundings import tidy as tidy

MARKS = {
    "READ-v1": "read in the first version of the paper, 15 December 2021",
    "READ-CR": "read in a later text, very probably the camera-ready",
    "READ-src": "read in a public source repository",
    "CALC": "arithmetic on numbers that were read",
    "GEOM": "measured from the vector drawing of a figure",
    "MEASURED": "run by us: counts and equality are solid, times rough",
    "INFER": "a deduction of ours",
}


@dataclass(frozen=True)
class Fact:
    """A number of the paper, or about it.

    Attributes:
        value: The number.
        unit: Its unit; empty for a count or a ratio.
        mark: Where it comes from: a key of ``MARKS``.
        note: What one must know to read it right.
    """

    value: float
    unit: str
    mark: str
    note: str = ""


class Ratio(NamedTuple):
    """A ratio and the interval that goes with it; 1 means no difference.

    Example:
        >>> print(Ratio(2.0, 1.6, 2.5), Ratio(2.0, 1.6, 2.5).turned)
        2.00x [1.60, 2.50] 0.50x [0.40, 0.62]
    """

    value: float
    low: float
    high: float

    @property
    def turned(self) -> Ratio:
        """One over it: of a speed-up, the height of the bar."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


READING = (
    "A number like 1.18x [0.99, 1.40] is the ratio of two mean run times. The brackets, and the "
    "whisker of a bar, are that ratio divided and multiplied by 1 + r, where r is its relative "
    "standard deviation: sqrt(a^2 + b^2) for a and b of the two programs' runs. It is made alike "
    "from the paper's table and from the runs here; two ratios agree when these intervals overlap. "
    "It tells how the runs of one process scatter: those of another process, on the same machine "
    "too, may lie outside."
)

WHISKERS = "Above a bar: its speed-up. Whiskers: the ratio, up and down by its standard deviation."


def spread(base: float, base_stdev: float, new: float, new_stdev: float) -> Ratio:
    """Give a speed-up the interval that all figures draw, print and judge by (``READING``).

    Args:
        base: Mean seconds before the transform.
        base_stdev: Standard deviation of the same.
        new: Mean seconds after the transform.
        new_stdev: Standard deviation of the same.

    Example:
        >>> print(spread(2.0231, 0.23050, 1.7166, 0.25091))
        1.18x [0.99, 1.40]
    """
    factor = 1 + math.hypot(base_stdev / base, new_stdev / new)
    return Ratio(base / new, base / new / factor, base / new * factor)


@dataclass(frozen=True)
class Row:
    """One line of Appendix B, C or D: the run time of two programs, in seconds.

    Attributes:
        label: What the line is about: a batch size, a device, a model.
        base: Mean seconds before the transform.
        base_stdev: Standard deviation of the same; the number of trials is not stated.
        new: Mean seconds after the transform.
        new_stdev: Standard deviation of the same.
        mark: Where the four numbers come from.
        open: What the paper does not say about the line; "" if nothing that matters.

    Example:
        >>> row = APPENDIX_C[1]
        >>> row.label, round(row.speedup.value, 3), f"{row.reduction:.1%}"
        ('CPU, threaded', 1.407, '28.9%')
    """

    label: str
    base: float
    base_stdev: float
    new: float
    new_stdev: float
    mark: str = "READ-v1"
    open: str = ""

    @property
    def speedup(self) -> Ratio:
        """Seconds before over seconds after, with its interval: see ``READING``."""
        return spread(self.base, self.base_stdev, self.new, self.new_stdev)

    @property
    def normalized(self) -> Ratio:
        """Seconds after over seconds before: the height of the bar in the paper's figure.

        The paper draws another error bar there, as tall as one program's stdev over its mean.
        """
        return self.speedup.turned

    @property
    def reduction(self) -> float:
        """The part of the time that the transform saves."""
        return 1 - self.new / self.base

    def __str__(self) -> str:
        about = f"{self.label}, {self.open}" if self.open else self.label
        return (
            f"{about}: {self.base} s (stdev {self.base_stdev}) -> "
            f"{self.new} s (stdev {self.new_stdev}), {self.speedup}"
        )


# The paper normalizes, so it names no unit for Appendix B; that the numbers are seconds follows
# from the other two tables. Batch 256 is in the table and not in Figure 6.
APPENDIX_B = (
    Row("batch 1", 0.0777, 0.00079, 0.0222, 0.0008),
    Row("batch 16", 0.1980, 0.0104, 0.0639, 0.0057),
    Row("batch 64", 0.3995, 0.0204, 0.2585, 0.0129),
    Row("batch 128", 0.6717, 0.0228, 0.5369, 0.0413),
    Row("batch 256", 1.2307, 0.0874, 1.1157, 0.0686),
)
_OPEN = "batch not stated"
APPENDIX_C = (
    Row("GPU", 0.1887, 0.00048, 0.1777, 0.00049, open=_OPEN),
    Row("CPU, threaded", 0.2996, 0.02835, 0.2129, 0.03491, open=_OPEN),
    Row("CPU, one thread", 2.0231, 0.23050, 1.7166, 0.25091, open=_OPEN),
)
APPENDIX_D = (
    Row("ResNet50", 0.2443, 0.00119, 0.0662, 0.00022, open=_OPEN),
    Row("LearningToPaint", 0.0068, 0.0003, 0.0044, 0.0001, open=_OPEN),
)

# Figure 5. What the paper counted are the printed lines of each IR, not its nodes. It says neither
# that nor how it counted; the notes are what made all three come out.
IR_LINES = {
    "torch.jit.script": Fact(2614, "lines", "READ-v1", "forward inlined, constants apart"),
    "torch.jit.trace": Fact(860, "lines", "READ-v1", "the model in train mode"),
    "torch.fx": Fact(445, "lines", "READ-v1", "a tracer that treats no module as a leaf"),
}
# Run elsewhere, on 1 December 2026: notebooks/scripts/figure5_2021.py with torch 1.10.0 and
# torchvision 0.11.1 on Python 3.9. It printed the lines above, all three, and these nodes.
IR_NODES_2021 = {
    "torch.jit.script": Fact(1861, "nodes", "MEASURED", "_forward_impl inlined, constants apart"),
    "torch.jit.trace": Fact(857, "nodes", "MEASURED", "model in train mode"),
    "torch.fx": Fact(444, "nodes", "MEASURED", "267 get_attr, 175 call_function"),
    "torch.fx, default tracer": Fact(177, "nodes", "MEASURED", "158 call_module"),
}

# What the other figures show can be counted as well: nodes, after a capture or a transform.
COUNTS = {
    "Figure 1": {"as traced": Fact(4, "nodes", "READ-v1")},
    "Figure 2": {
        "relu left": Fact(0, "calls", "INFER", "a listing, not run in the paper"),
        "gelu": Fact(1, "calls", "INFER", "a listing, not run in the paper"),
    },
    "Figure 3": {"captured again": Fact(5, "nodes", "READ-v1")},
    "Figure 4": {},  # a listing, not run in the paper
    "Figure 5": IR_LINES,
    "Table A": {"opcodes": Fact(6, "opcodes", "READ-v1")},
}

FACTS = {
    "quantization: prepare": Fact(0.044, "s", "READ-CR"),
    "quantization: calibrate": Fact(0.590, "s", "READ-CR"),
    "quantization: convert": Fact(3.8, "s", "READ-CR"),
    "fusion: the transform": Fact(0.081, "s", "READ-CR", "mostly arithmetic on the parameters"),
    "fusion: transform and harness": Fact(150, "lines", "READ-v1", "of Python; fewer than these"),
    "fusion: rtol": Fact(1e-5, "", "READ-CR", "does not hold in float32; it does in float64"),
    "fusion: atol": Fact(1e-8, "", "READ-CR"),
    "fusion: nodes before": Fact(177, "nodes", "MEASURED"),
    "fusion: nodes after": Fact(124, "nodes", "MEASURED", "53 batch norms gone"),
    "scheduling: throughput gained": Fact(0.09, "", "READ-CR", "at most; no configuration given"),
    "TensorRT: trials": Fact(30, "", "READ-v1", "ResNet50; no other count is stated"),
}


@dataclass(frozen=True)
class Claim:
    """A number that the paper's text gives, beside what its own table gives.

    Attributes:
        figure: The figure that the sentence is about.
        said: The number in the text.
        table: The number that follows from the table, by ``CALC``.
        quantity: What both are.
        reading: Why they differ, or that they agree.
    """

    figure: int
    said: float
    table: float
    quantity: str
    reading: str


CLAIMS = (
    Claim(6, 3.3, 3.50, "speed-up, at most", "the best row of the table, batch 1, is 3.50"),
    Claim(7, 0.06, 0.058, "time saved on the GPU", "they agree"),
    Claim(7, 0.40, 0.289, "time saved on the CPU, threaded", "the text has the speed-up minus one"),
    Claim(
        7, 0.18, 0.152, "time saved on the CPU, one thread", "the text has the speed-up minus one"
    ),
    Claim(8, 3.7, 3.69, "speed-up of ResNet50", "they agree"),
    Claim(8, 1.54, 1.545, "speed-up of LearningToPaint", "they agree"),
)


@dataclass(frozen=True)
class Opcode:
    """One line of the tables A.1 and A.2: an opcode, what it means and what its fields hold."""

    name: str
    meaning: str
    target: str
    arguments: str


APPENDIX_A = (
    Opcode("placeholder", "an input of the function", "the parameter's name", "a default, if any"),
    Opcode("get_attr", "read an attribute", "its dotted path in the module tree", "none"),
    Opcode("call_function", "call a function", "the Python callable", "as in Python"),
    Opcode(
        "call_method", "call a method of args[0]", "the method's name", "as in Python, self first"
    ),
    Opcode("call_module", "call a module", "its dotted path in the module tree", "without self"),
    Opcode("output", "return args[0]", '"output"', "the value, nested as it may be"),
)


@dataclass(frozen=True)
class Exhibit:
    """A figure or a table of the paper, and where to meet it here.

    Attributes:
        title: "Figure 7", "Table B".
        section: The paper's section.
        claim: What it shows or says, in our words.
        number: The paper's number, as text; empty for a listing.
        trap: Where the paper contradicts itself or leaves something open; may be empty.
        notebook: The lecture that reproduces it.
        minutes: How long that lecture takes to read.
    """

    title: str
    section: str
    claim: str
    number: str
    trap: str
    notebook: str
    minutes: int

    @property
    def evidence(self) -> str:
        """The exhibit that the lecture measures for this one: a table of seconds has its figure."""
        figures = {"B": "Figure 6", "C": "Figure 7", "D": "Figure 8"}
        letter = self.title.removeprefix("Table ")[0]
        return figures.get(letter, self.title.split(".")[0])


EXHIBITS = (
    Exhibit("Figure 1", "4.1", "a function traced, its nodes and its code",
            "4 nodes", "", "01_capture", 35),
    Exhibit("Figure 2", "4.3", "relu replaced by gelu in nine lines",
            "no relu left", "it loses keyword arguments", "02_transform", 35),
    Exhibit("Figure 3", "4.3", "a transformed program captured again",
            "5 nodes", "", "03_recapture", 20),
    Exhibit("Figure 4", "5.5", "a shape that a loop makes dynamic",
            "", "it is not run in the paper", "04_limits", 30),
    Exhibit("Figure 5", "6.1", "ResNet50 is smaller in this IR",
            "2614 / 860 / 445", "printed lines, the trace in train mode; nodes: 1861 / 857 / "
            "444 with no leaf modules, 177 with them", "05_ir_size", 25),
    Exhibit("Figure 6", "6.2.1", "int8 DeepRecommender is faster",
            "up to 3.3x", "the table's best is 3.50x; no layer sizes", "06_quantization", 45),
    Exhibit("Figure 7", "6.2.2", "folding batch norm saves time",
            "6 % / 40 % / 18 %", "its table: 5.8 / 28.9 / 15.2 %; no batch size; "
            "the paper's interval for one thread contains 1", "07_fusion", 30),
    Exhibit("Figure 8", "6.4", "TensorRT runs the lowered program faster",
            "3.7x, 1.54x", "precision not stated; float32 is unlikely", "08_lowering", 40),
    Exhibit("Table A.1", "A", "what the six opcodes mean",
            "6", "", "01_capture", 35),
    Exhibit("Table A.2", "A", "what their arguments are",
            "6", "call_function's target is no self", "01_capture", 35),
    Exhibit("Table B", "B", "seconds behind Figure 6",
            "5 rows", "the first stdev is drawn ten times as tall", "06_quantization", 45),
    Exhibit("Table C", "C", "seconds behind Figure 7",
            "3 rows", "CPU and GPU are hardly of one batch size", "07_fusion", 30),
    Exhibit("Table D", "D", "seconds behind Figure 8",
            "2 rows", "batch not stated", "08_lowering", 40),
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where numbers were measured: what the caption of an honest figure names."""

    cpu: str
    cores: float
    threads: int
    gpu: str
    system: str
    python: str
    torch: str
    date: str

    def __str__(self) -> str:
        return self.described()

    def described(self, threads: Iterable[int] = ()) -> str:
        """Say it for a caption, with the numbers of threads that the measurements had.

        Example:
            >>> "; 1 and 2 threads; " in machine().described([2, 1, 2])
            True
        """
        used = sorted({*threads} - {0}) or [self.threads]
        cores = f"{self.cores:g} core{'s' * (self.cores != 1)} granted"
        count = f"{' and '.join(map(str, used))} thread{'s' * (used != [1])}"
        parts = [self.cpu, cores, count, self.gpu or "no GPU", self.system]
        return "; ".join([*parts, f"Python {self.python}", f"torch {self.torch}", self.date])


def cores_granted() -> float:
    """Count the cores that this process may use: by its affinity and its control group's quota.

    Example:
        >>> 0 < cores_granted() <= os.cpu_count()
        True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    group = Path("/sys/fs/cgroup")
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((group / name).read_text("ascii") for name in files).split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # no such group, or "max": no quota
            continue
        if quota > 0:
            cores = min(cores, quota / period)
    return cores


def machine() -> Machine:
    """Describe this machine for a caption.

    Example:
        >>> machine().torch == torch.__version__
        True
    """
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor that Linux gives no name
    return Machine(
        cpu=cpu,
        cores=cores_granted(),
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        system=platform.system(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
    )


@dataclass(frozen=True)
class Pair:
    """Two programs timed in turns on this machine.

    Attributes:
        base: Seconds of each run before the transform.
        new: Seconds of each run after it; ``new[i]`` ran right after ``base[i]``.
        threads: How many torch had; 0 if nobody knows.

    Example:
        >>> print(Pair((2.0, 4.0, 6.0), (1.0, 2.0, 3.0)).speedup)
        2.00x [1.17, 3.41]
        >>> Pair((2.0, 4.0, 6.0), (1.0, 2.0, 3.0)).median
        Ratio(value=2.0, low=2.0, high=2.0)
    """

    base: tuple[float, ...]
    new: tuple[float, ...]
    threads: int = 0

    @property
    def speedup(self) -> Ratio:
        """Seconds before over seconds after, with its interval: see ``READING``."""
        return spread(*_mean_and_stdev(self.base), *_mean_and_stdev(self.new))

    @property
    def normalized(self) -> Ratio:
        """The inverse of ``speedup``: the height of a bar."""
        return self.speedup.turned

    @property
    def median(self) -> Ratio:
        """The median ratio of neighbours, with its 95 % bootstrap interval.

        What disturbs both neighbours does not move it. It is listed and not judged by: from the
        paper's means and standard deviations nobody can make the like.
        """
        return _median_interval([a / b for a, b in zip(self.base, self.new, strict=True)])

    def __str__(self) -> str:
        base, new = (
            f"{mean:.4f} s (stdev {stdev:.4f})"
            for mean, stdev in map(_mean_and_stdev, (self.base, self.new))
        )
        middle = self.median
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        return (
            f"{base} -> {new}, {self.speedup}, {_repeats([self])}{threads}; median of neighbours "
            f"{middle.value:.2f}x, 95 % between {middle.low:.2f} and {middle.high:.2f}"
        )


def _mean_and_stdev(runs: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(runs), statistics.stdev(runs) if len(runs) > 1 else 0.0


def _repeats(pairs: Iterable[Pair]) -> str:
    """Say how often each program ran."""
    counts = sorted({len(pair.base) for pair in pairs})
    text = " to ".join(map(str, counts if len(counts) < 3 else (counts[0], counts[-1])))
    return f"{text} repeat{'s' * (counts != [1])}"


def _median_interval(values: Sequence[float], draws: int = 2000) -> Ratio:
    """Give the median and its 95 % interval by the bootstrap, the same for the same values."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]
    return Ratio(statistics.median(values), low, high)


def measure(
    base: Callable[[], Any],
    new: Callable[[], Any],
    *,
    repeats: int,
    warmup: int = 2,
    calls: int = 1,
) -> Pair:
    """Time two programs in turns: a, b, a, b, so that what disturbs one disturbs the other.

    Args:
        base: Runs the program before the transform; it returns when the work is done.
        new: Runs the program after it.
        repeats: Timed runs of each; fixed beforehand, not until the answer pleases.
        warmup: Runs of each that are not timed.
        calls: Calls that make up one run, for what is over too soon to be timed alone.

    Returns:
        The seconds of one call, for every run.

    Raises:
        ValueError: If ``repeats`` or ``calls`` is less than 1, or ``warmup`` less than 0.

    Example:
        >>> pair = measure(lambda: None, lambda: None, repeats=3)
        >>> len(pair.base), len(pair.new)
        (3, 3)
    """
    if repeats < 1 or warmup < 0 or calls < 1:
        given = f"repeats={repeats}, warmup={warmup}, calls={calls}"
        raise ValueError(f"a measurement needs a run: {given}")
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(warmup + repeats):
        for program, runs in zip((base, new), seconds, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                program()
            if turn >= warmup:
                runs.append((time.perf_counter() - start) / calls)
    return Pair(tuple(seconds[0]), tuple(seconds[1]), torch.get_num_threads())


def verdict(
    paper: Ratio | float, here: Ratio | float | None, *, differs: Sequence[str] = ()
) -> str:
    """Judge this machine's number against the paper's, by rule.

    It asks first whether the two can be compared. Two counts are *exact* when equal. Two ratios
    *agree* when their intervals overlap; if not, they may still be on the same side of 1.

    Args:
        paper: The paper's ratio, or a count.
        here: The number measured here; None when nothing ran.
        differs: What is known not to be the same: "device", "precision", "kernel", "size". What
            the paper leaves open is swept, and is none of these.

    Returns:
        "exact" or "different" for counts; "agrees", "same direction" or "opposite" for ratios;
        "not comparable (...)" for either, with what differs.

    Example:
        >>> verdict(445, 445)
        'exact'
        >>> verdict(Ratio(1.18, 0.96, 1.40), Ratio(1.5, 1.3, 1.7))
        'agrees'
        >>> verdict(Ratio(3.69, 3.66, 3.72), Ratio(1.6, 1.5, 1.7), differs=["device", "kernel"])
        'not comparable (device, kernel)'
    """
    if here is None:
        return "not comparable (nothing ran here)"
    if differs:
        return f"not comparable ({', '.join(differs)})"
    if not isinstance(paper, Ratio) or not isinstance(here, Ratio):
        a = paper.value if isinstance(paper, Ratio) else paper
        b = here.value if isinstance(here, Ratio) else here
        return "exact" if a == b else "different"
    if paper.low <= here.high and here.low <= paper.high:
        return "agrees"
    return "same direction" if (paper.value - 1) * (here.value - 1) > 0 else "opposite"


@dataclass(frozen=True)
class Slot:
    """One place on the axis of a figure: this machine's bar, and the paper's that it goes with.

    Attributes:
        label: What ran here, as on the axis; the paper's bar has the label of its own row.
        paper: The paper's row; None where it has none. Neighbours that go with one row share its
            bar: what the paper leaves open has one bar there and several here.
        here: The paper's method on this machine, or the reason why it could not run.
        beyond: Other methods on this machine, by name, or the reason for each.
        differs: What keeps ``here`` from being compared with ``paper``: see `verdict`.
    """

    label: str
    paper: Row | None = None
    here: Pair | str = "not run"
    beyond: Mapping[str, Pair | str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Judge ``here`` against ``paper``."""
        if self.paper is None:
            return "not comparable (not in the paper)"
        here = self.here.speedup if isinstance(self.here, Pair) else None
        return verdict(self.paper.speedup, here, differs=self.differs)

    @property
    def pairs(self) -> list[Pair]:
        """All that was measured for it."""
        return [found for found in (self.here, *self.beyond.values()) if isinstance(found, Pair)]


def table(slots: Sequence[Slot]) -> str:
    """List the numbers behind a figure: each slot, its seconds, ratios and verdict, as text.

    Example:
        >>> print(table([Slot("GPU", APPENDIX_C[0], "no GPU here")]))  # doctest: +ELLIPSIS
        GPU
          paper, GPU, batch not stated: 0.1887 s (stdev 0.00048) -> ..., 1.06x [1.06, 1.07]
          the paper's method here: no GPU here
          verdict: not comparable (nothing ran here)
    """
    lines = []
    for slot in slots:
        lines.append(slot.label.replace("\n", ", "))
        if slot.paper is not None:
            lines.append(f"  paper, {slot.paper}")
        lines.append(f"  the paper's method here: {slot.here}")
        lines += [f"  beyond the paper, {name}: {pair}" for name, pair in slot.beyond.items()]
        lines.append(f"  verdict: {slot.verdict}")
    return "\n".join(lines)


def draw(slots: Sequence[Slot], title: str, *, names: tuple[str, str], caption: str = "") -> Any:
    """Draw "paper | this machine": run time after over before, lower is faster.

    Paper and machine differ by hatch and label, not by colour alone. Every bar has the interval by
    which it is judged (``READING``) and its speed-up above. What the paper did not do stands in a
    second panel. Repeats, threads and machine are named at the foot.

    Args:
        slots: The places on the axis, left to right.
        title: Of the figure.
        names: The two programs: ("unfused", "fused").
        caption: What else to say at the foot.

    Returns:
        A ``matplotlib.figure.Figure``, which a notebook shows as a picture.

    Raises:
        ImportError: If matplotlib is not installed (it comes with ``fxlab[lab]``).
    """
    from matplotlib.figure import Figure

    beyond = list(dict.fromkeys(name for slot in slots for name in slot.beyond))
    panels = 2 if beyond else 1
    figure = Figure(figsize=(bars.WIDTH, 0.9 + 3.2 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    bars.panel(axes[0], _beside_the_paper(slots), {0: "paper", 1: "the paper's method here"})
    for one in axes:
        one.set_ylabel(f"run time, {names[1]} / {names[0]}")
    if beyond:
        legend = dict(enumerate(beyond, 2))
        bars.panel(axes[1], [_beyond_the_paper(slot, legend) for slot in slots], legend)
        axes[1].set_title("beyond the paper", fontsize="medium")
        axes[0].set_title("the paper's experiment", fontsize="medium")
        high = max(one.get_ylim()[1] for one in axes)
        for one in axes:
            one.set_ylim(0, high)
    figure.suptitle(title)
    pairs = [pair for slot in slots for pair in slot.pairs]
    parts = [caption] if caption else []
    if pairs:
        parts.append(f"{_repeats(pairs)}, taken in turns")
    parts.append(machine().described(pair.threads for pair in pairs))
    words = f"{'; '.join(parts)}. {WHISKERS}"
    figure.supxlabel(textwrap.fill(words, 130), fontsize=bars.FONT)
    return figure


def _beside_the_paper(slots: Sequence[Slot]) -> list[list[bars.Bar]]:
    """Put the bar of each of the paper's rows before those that go with it here."""
    groups = []
    for row, same in itertools.groupby(slots, key=lambda slot: slot.paper):
        group = []
        if row is not None:
            label = "\n".join(filter(None, (row.label, row.open.replace(" ", "\n", 1))))
            group.append(bar(label, 0, row))
        groups.append(group + [bar(slot.label, 1, slot.here) for slot in same])
    return groups


def _beyond_the_paper(slot: Slot, legend: Mapping[int, str]) -> list[bars.Bar]:
    """Draw a method that was not tried for the slot as missing for the slot's own reason."""
    reason = slot.here if isinstance(slot.here, str) else "not measured"
    return [bar(slot.label, i, slot.beyond.get(name, reason)) for i, name in legend.items()]


def bar(label: str, style: int, found: Row | Pair | str) -> bars.Bar:
    """Make the bar of a measurement for `fxlab.bars.panel`: interval as judged, speed-up above."""
    if isinstance(found, str):
        return bars.Bar(label, style, found)
    return bars.Bar(label, style, found.normalized, f"{found.speedup.value:.2f}x")
