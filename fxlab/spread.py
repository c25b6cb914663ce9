"""How long does something take here, how sure is that, and how is it drawn?

The paper has no bars for its analyses, nor for designs of capture: what a lecture measures of them
has only itself to be compared with. Each number is a median with its 95 % bootstrap interval (bars
beside the paper's have that of `paper.spread`: the paper gives no samples), measured in turns, with
repeats that are fixed before the run; the caption names units, repeats, threads and machine, and
what could not run is an empty place that says why.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxlab.paper import Ratio, _median_interval, machine

__all__ = ["caption", "draw", "in_turns", "interval", "listed"]

Found = Sequence[float] | float | str

_STYLES = (("#8ab6d6", "//"), ("0.85", ""), ("#c7dfae", ".."), ("#f3d3a0", "xx"))


def in_turns(
    programs: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    calls: int = 1,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, ...]]:
    """Time programs in turns, a, b, c, a, b, c, so that what disturbs one disturbs all.

    Args:
        programs: What to call, by name.
        repeats: Timed rounds; fixed beforehand.
        calls: Calls in a row for one sample, for programs that are too short for a clock.
        warmup: Rounds that are not timed.
        clock: What to read before and after.

    Returns:
        For each program the seconds of one call, a sample a round.

    Raises:
        ValueError: If ``repeats`` or ``calls`` is less than 1, or ``warmup`` less than 0.

    Example:
        >>> len(in_turns({"nothing": lambda: None}, repeats=3)["nothing"])
        3
    """
    if repeats < 1 or calls < 1 or warmup < 0:
        raise ValueError(
            f"a measurement needs a run: repeats={repeats}, calls={calls}, warmup={warmup}"
        )
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(warmup + repeats):
        for name, program in programs.items():
            start = clock()
            for _ in range(calls):
                program()
            if turn >= warmup:
                samples[name].append((clock() - start) / calls)
    return {name: tuple(runs) for name, runs in samples.items()}


def interval(values: Sequence[float]) -> Ratio:
    """Return the median of ``values`` and its 95 % bootstrap interval, the same each time.

    Example:
        >>> interval([3.0, 1.0, 2.0])
        Ratio(value=2.0, low=1.0, high=3.0)
    """
    return _median_interval(values)


def _ends(found: Found) -> Ratio | None:
    if isinstance(found, str):
        return None
    return Ratio(found, found, found) if isinstance(found, (int, float)) else interval(found)


def _said(found: Found, scale: float) -> str:
    """Write a number as it stands beside its bar: a count has no interval."""
    if isinstance(found, str):
        return found
    if isinstance(found, (int, float)):
        return f"{found * scale:g}"
    value, low, high = (one * scale for one in interval(found))
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def listed(found: Mapping[str, Found], unit: str, scale: float = 1.0) -> str:
    """List what a figure shows, as text.

    Args:
        found: Samples, a count, or the reason why there is neither; by name.
        unit: Of the numbers, after they were multiplied by ``scale``.
        scale: 1e6 for microseconds from seconds.

    Example:
        >>> found = {"trace": [1e-6, 2e-6, 3e-6], "jax": "not installed"}
        >>> print(listed(found, "us", 1e6))
        trace  2 [1, 3] us, 3 repeats
        jax    not installed
    """
    width = max(map(len, found), default=0)
    lines = []
    for name, one in found.items():
        text = _said(one, scale)
        if not isinstance(one, str):
            text += f" {unit}"
            text += "" if isinstance(one, (int, float)) else f", {len(one)} repeats"
        lines.append(f"{name:{width}}  {text}")
    return "\n".join(lines)


def draw(
    axes: Any,
    series: Mapping[str, Mapping[str, Found]],
    *,
    unit: str,
    scale: float = 1.0,
) -> None:
    """Draw bars that lie, each with its interval and its number, into ``axes`` of matplotlib.

    Args:
        axes: Where to draw.
        series: Name of a series -> name of a bar -> samples, a count, or a reason. All series have
            the same bars; they differ by hatch, and a legend names them when there are several.
        unit: What the axis shows, with its unit.
        scale: What the numbers are multiplied by.
    """
    names = list(dict.fromkeys(name for found in series.values() for name in found))
    height = 0.8 / len(series)
    ends = [_ends(one) for found in series.values() for one in found.values()]
    longest = max((end.high * scale for end in ends if end is not None), default=1.0)
    for index, (label, found) in enumerate(series.items()):
        color, hatch = _STYLES[index % len(_STYLES)]
        for place, name in enumerate(names):
            y = place + (index - (len(series) - 1) / 2) * height
            one = found.get(name, "not measured")
            end = _ends(one)
            x = 0.0
            if end is not None:
                value, low, high = (number * scale for number in end)
                axes.barh(y, value, height, color=color, hatch=hatch, ec="0.2")
                if not isinstance(one, (int, float)):
                    whiskers = [[value - low], [high - value]]
                    axes.errorbar(value, y, xerr=whiskers, color="0.1", capsize=3, lw=1)
                x = high
            axes.annotate(_said(one, scale), (x, y), (4, 0), textcoords="offset points",
                          va="center", fontsize=8)  # fmt: skip
        axes.barh(0, 0, 0, color=color, hatch=hatch, ec="0.2", label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.set_xlim(0, 1.6 * longest)  # room for the number beside the longest bar
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False, loc="lower right")


def caption(figure: Any, words: str) -> None:
    """Write below a ``matplotlib.figure.Figure`` how it was measured, and on which machine.

    Args:
        figure: The figure, with ``layout="constrained"``.
        words: "medians of 7 repeats with their 95 % intervals"; the machine follows.
    """
    letters = int(figure.get_figwidth() * 17)
    figure.supxlabel(textwrap.fill(f"{words}; {machine()}", letters), fontsize=7)
