"""Where do the edges go when node i is drawn on the row of code line i?

The explorer draws a graph beside its generated code, the way a version-control log draws branches:
every value gets a lane from the row that makes it to the last row that reads it. Lanes are packed
by live interval, so the number of lanes crossing a row is the number of values alive there, and the
gutter is a picture of memory (the live values that the analyses of the paper's section 6.3 count).
One sweep over the rows; `viewer.js` does the same sweep, and a test holds the two together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LANES = 14
"""Lanes drawn apart. What is beyond shares a bundle: 300 parameters must not push the code away."""


@dataclass(slots=True)
class Layout:
    """Lanes of one frame.

    Attributes:
        lane: For each row the lane of its glyph and of its value; -1 for a row that is not live.
        end: For each row the last row that reads it, or itself when nothing does.
        live: For each row the number of values that are alive after it.
        width: Number of lanes used.
        back: Pairs (reader, producer) where the reader does not stand after its producer.
    """

    lane: list[int]
    end: list[int]
    live: list[int]
    width: int
    back: list[tuple[int, int]] = field(default_factory=list)


def layout(
    inputs: Sequence[Sequence[int] | None],
    leaf: Sequence[bool] | None = None,
    limit: int = MAX_LANES,
) -> Layout:
    """Pack the values of a frame into lanes.

    A row takes over the lowest lane among those of its inputs that end here, so that a chain is a
    straight line; otherwise the lowest lane that is free. It costs one heap operation a row.

    Args:
        inputs: For each row the rows that it reads, or None for a row that only holds its place
            (a ghost, or a node that does not exist yet).
        leaf: For each row whether it is a parameter or an attribute. Only looked at when more than
            `limit` lanes are needed: then these go to the right of all computed values.
        limit: Lanes that fit.

    Returns:
        The layout; `lane`, `end` and `live` have one entry for each row.

    Example:
        >>> layout([[], [0], [1], [0, 2]]).lane  # x; a = f(x); b = g(a); c = x + b
        [0, 1, 1, 0]
    """
    count = len(inputs)
    end = list(range(count))
    back: list[tuple[int, int]] = []
    for row, read in enumerate(inputs):
        for producer in read or ():
            if producer < row:
                end[producer] = row
            else:
                back.append((row, producer))
    lane, width = _pack(inputs, end, None, 0)
    if width > limit and leaf is not None and any(leaf):
        computed, inner = _pack(inputs, end, [not is_leaf for is_leaf in leaf], 0)
        given, width = _pack(inputs, end, list(leaf), inner)
        lane = [c if c >= 0 else g for c, g in zip(computed, given, strict=True)]
    return Layout(lane, end, _alive(inputs, end), width, back)


def _pack(
    inputs: Sequence[Sequence[int] | None], end: list[int], chosen: list[bool] | None, first: int
) -> tuple[list[int], int]:
    """Give lanes from `first` on to the chosen rows; return them and how many are used in all."""
    lane = [-1] * len(inputs)
    free: list[int] = []
    width = first
    unread = -1  # lane of the row before, when nothing reads that row
    for row, read in enumerate(inputs):
        if unread >= 0:
            heapq.heappush(free, unread)
            unread = -1
        if read is None:
            continue
        ending: list[int] = []
        for producer in read:
            if producer < row and end[producer] == row:
                mine = lane[producer]
                if mine >= 0 and mine not in ending:
                    ending.append(mine)
        if chosen is None or chosen[row]:
            if len(ending) == 1:
                mine = ending.pop()
            elif ending:
                mine = min(ending)
                ending.remove(mine)
            elif free:
                mine = heapq.heappop(free)
            else:
                mine = width
                width += 1
            lane[row] = mine
            if end[row] == row:
                unread = mine
        for ended in ending:
            heapq.heappush(free, ended)
    return lane, width


def _alive(inputs: Sequence[Sequence[int] | None], end: list[int]) -> list[int]:
    """Count for each row the values made at or before it that a later row still reads."""
    change = [0] * (len(inputs) + 1)
    for row, last in enumerate(end):
        if inputs[row] is not None and last > row:
            change[row] += 1
            change[last] -= 1
    alive, total = [], 0
    for row in range(len(inputs)):
        total += change[row]
        alive.append(total)
    return alive
