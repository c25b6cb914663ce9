"""How are bars drawn that have an interval, and what stands where a bar is missing?

A figure of the paper is a row of groups. Bars differ by hatch and label, not by colour alone; each
has a whisker and a word above it; and where nothing could be measured stands the reason, once for
all neighbours that lack the same.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Fill and hatch of each series. The first two are the paper and its method here; what has another
# meaning has another style.
STYLES = (
    ("0.85", ""),
    ("#8ab6d6", "//"),
    ("#c7dfae", ".."),
    ("#f3d3a0", "xx"),
    ("#d9c4e8", "\\\\"),
)
WIDTH = 8.8  # inches: read in a notebook without being made smaller
FONT = 8  # points, for what is smaller than a title
_LETTER = 0.068  # inches that a letter of that size takes, about


@dataclass(frozen=True)
class Bar:
    """One bar, or the reason why there is none.

    Attributes:
        label: What stands below it; neighbours of one group that have the same share it.
        style: Its place in ``STYLES``.
        ends: Its height, and from where to where its whisker reaches; or the reason, as text.
        text: What stands above it.
    """

    label: str
    style: int
    ends: tuple[float, float, float] | str
    text: str = ""


def panel(axes: Any, groups: Sequence[Sequence[Bar]], legend: Mapping[int, str]) -> None:
    """Draw groups of bars into ``axes``.

    Args:
        axes: Of matplotlib.
        groups: Left to right. The first line of several that all labels of a group have in common
            is its name, and stands below once, for neighbouring groups of that name too.
        legend: Style -> what it means.
    """
    from matplotlib.patches import Patch

    inches = WIDTH * 0.92 / (sum(map(len, groups)) + 0.6 * len(groups))
    places: dict[float, str] = {}
    names: list[tuple[str, float, float]] = []
    start, top = 0.0, 1.2
    for group in groups:
        bars = [(start + i, bar) for i, bar in enumerate(group)]
        name = _name(group)
        if name:
            names.append((name, start, bars[-1][0]))
        for label, same in itertools.groupby(bars, key=lambda one: one[1].label):
            places[_middle(list(same))] = label.partition("\n")[2] if name else label
        for reason, same in itertools.groupby(bars, key=_what_is_missing):
            run = list(same)
            if reason:
                _say(axes, _middle(run), reason, len(run) * inches)
            top = max([top, *(_draw(axes, x, bar) for x, bar in run)])
        start += len(group) + 0.6
    axes.axhline(1.0, color="0.3", lw=0.8, ls="--")
    axes.set_xticks(list(places), list(places.values()), fontsize=FONT)
    _below(axes, names, max((text.count("\n") + 1 for text in places.values()), default=1))
    axes.set_xlim(-0.8, start - 0.8)
    axes.set_ylim(0, 1.25 * top)
    handles = [
        Patch(facecolor=STYLES[i][0], hatch=STYLES[i][1], edgecolor="0.2", label=name)
        for i, name in legend.items()
    ]
    axes.legend(handles=handles, fontsize=FONT, loc="upper center", ncols=4, frameon=False)


def _name(group: Sequence[Bar]) -> str:
    """Return the line that heads all labels of the group, if it heads any; else ""."""
    heads = {bar.label.partition("\n")[0] for bar in group}
    return heads.pop() if len(heads) == 1 and any("\n" in bar.label for bar in group) else ""


def _below(axes: Any, names: Sequence[tuple[str, float, float]], lines: int) -> None:
    """Write names of groups, each (name, first place, last place), below ``lines`` of labels."""
    ticks = {}
    for name, same in itertools.groupby(names, key=lambda one: one[0]):
        run = list(same)
        ticks[(run[0][1] + run[-1][2]) / 2] = name
    if ticks:
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(list(ticks), list(ticks.values()), minor=True)
        axes.tick_params(axis="x", which="minor", length=0, pad=6 + lines * 1.35 * FONT)


def _middle(run: Sequence[tuple[float, Bar]]) -> float:
    return (run[0][0] + run[-1][0]) / 2


def _what_is_missing(one: tuple[float, Bar]) -> str:
    """Return why the bar is missing, which neighbours may have in common; "" if it is not."""
    return one[1].ends if isinstance(one[1].ends, str) else ""


def _say(axes: Any, x: float, reason: str, inches: float) -> None:
    """Write why bars are missing: across where there is room for words, else upright."""
    across = inches > 1.4
    text = textwrap.fill(reason, int(inches / _LETTER) if across else 30)
    style = {"ha": "center", "va": "bottom", "fontsize": FONT, "rotation": 0 if across else 90}
    axes.text(x, 0.04, text, **style)


def _draw(axes: Any, x: float, bar: Bar) -> float:
    """Draw a bar, if there is one, and return how high its whisker reaches."""
    if isinstance(bar.ends, str):
        return 0.0
    color, hatch = STYLES[bar.style % len(STYLES)]
    height, low, high = bar.ends
    axes.bar(x, height, 0.94, color=color, hatch=hatch, edgecolor="0.2")
    axes.errorbar(x, height, yerr=[[height - low], [high - height]], color="0.1", capsize=3, lw=1)
    label = axes.text(x, high + 0.02, bar.text, fontsize=FONT, ha="center", va="bottom")
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    return high
