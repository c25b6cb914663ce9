"""The checks passed: how does the answer compare with the kit's own pass?

Two histories of the same small program side by side, edit by edit, and the time that each takes on
a program of 8,000 nodes, with torch.fx's beside it where it has such a pass. It is no grade: fewer
edits are not better edits, and milliseconds depend on the machine.
"""

from __future__ import annotations

import html
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fxlab.core.errors import ExerciseError
from fxlab.core.graph_module import GraphModule
from fxlab.teach.exercise import part
from fxlab.teach.limits import AnswerError, Guard

NODES = 8_000
SECONDS = 20.0  # for one run on the large program
SHOWN = 30  # steps of each history


@dataclass(frozen=True)
class Reference:
    """What an answer is compared with; `COMPARE = {part id: Reference(...)}` in an exercise file.

    Attributes:
        kit: The kit's own pass, called as the answer is.
        small: Makes arguments for `Part.entry`; a GraphModule among them is what is edited.
        large: The same with about n nodes.
        torch_fx: torch.fx's pass: gets torch.fx's form of that GraphModule. None: it has none.
    """

    kit: Callable[..., Any]
    small: Callable[[], tuple[Any, ...]]
    large: Callable[[int], tuple[Any, ...]]
    torch_fx: Callable[[torch.fx.GraphModule], Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """What `Result.compare` shows.

    Attributes:
        id: The part's.
        yours: The recording of your pass on the small program: `fxlab.explore(it.yours)`.
        kits: The recording of the kit's.
        edits: (yours, the kit's): how many edits each made.
        milliseconds: Whose pass -> its time on 8,000 nodes, or None when it was stopped.
    """

    id: str
    yours: Any
    kits: Any
    edits: tuple[int, int]
    milliseconds: dict[str, float | None] = field(default_factory=dict)

    def _times(self) -> str:
        texts = [
            f"{who}: {f'{ms:,.0f} ms' if ms is not None else f'stopped after {SECONDS:g} s'}"
            for who, ms in self.milliseconds.items()
        ]
        return f"on {NODES:,} nodes: {'; '.join(texts)}. This is no grade"

    def _columns(self) -> list[tuple[str, list[str]]]:
        columns = []
        for name, timeline in (("your pass", self.yours), ("the kit's", self.kits)):
            sentences = [step.sentence for step in timeline.steps]
            more = len(sentences) - SHOWN
            shown = sentences[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
            columns.append((f"{name}: {len(sentences)} edits", shown))
        return columns

    def __repr__(self) -> str:
        lines = [self.id]
        for title, sentences in self._columns():
            lines += [title, *(f"  {sentence}" for sentence in sentences)]
        return "\n".join([*lines, self._times()])

    def _repr_html_(self) -> str:
        left = 'style="text-align:left;vertical-align:top"'
        heads, cells = [], []
        for title, sentences in self._columns():
            heads.append(f"<th {left}>{html.escape(title)}</th>")
            items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
            cells.append(f"<td {left}><ol>{items}</ol></td>")
        table = f"<table><tr>{''.join(heads)}</tr><tr>{''.join(cells)}</tr></table>"
        return f"{table}<p>{html.escape(self._times())}</p>"


def reference(id: str) -> Reference | None:
    """Return what answers to a part are compared with, or None."""
    owner, asked = part(id)
    module = importlib.import_module(asked.entry.__module__)
    return getattr(module, "COMPARE", {}).get(asked.id) if owner.parts else None


def compare(id: str, answer: Callable[..., Any]) -> Comparison:
    """Record an answer and the kit's pass on the same small program, and time both on a large one.

    Args:
        id: The part's.
        answer: The student's function, which has passed its checks.

    Raises:
        ExerciseError: The kit has no pass of this kind, or the answer fails here.
    """
    asked, against = part(id)[1], reference(id)
    if against is None:
        raise ExerciseError(f"{id}: the kit has no pass of its own to compare with")
    guard = Guard(asked.id, seconds=SECONDS)
    try:
        yours = _recorded(asked.entry, answer, against, guard)
    except AnswerError as error:
        raise ExerciseError(f"{id}: {error.sentence}") from None
    kits = _recorded(asked.entry, against.kit, against, guard)
    times = {
        "yours": _milliseconds(asked.entry, answer, against, guard),
        "the kit's": _milliseconds(asked.entry, against.kit, against, guard),
    }
    if against.torch_fx is not None:
        times["torch.fx's"] = _theirs(against)
    return Comparison(asked.id, yours, kits, (len(yours.steps), len(kits.steps)), times)


def _recorded(
    entry: Callable[..., Any], pass_: Callable[..., Any], against: Reference, guard: Guard
) -> Any:
    from fxlab.explorer.record import record

    args = against.small()
    gm = next(one for one in args if isinstance(one, GraphModule))
    with record(gm) as timeline:
        guard.call(entry, pass_, *args)
    return timeline


def _milliseconds(
    entry: Callable[..., Any], pass_: Callable[..., Any], against: Reference, guard: Guard
) -> float | None:
    try:
        # The arguments are hidden from the guard, which would listen to every edit of a graph.
        return _median(
            lambda args: guard.call(lambda: entry(pass_, *args)), lambda: against.large(NODES)
        )
    except AnswerError:
        return None


def _theirs(against: Reference) -> float | None:
    from fxlab.interop import to_torch_fx

    assert against.torch_fx is not None
    run = against.torch_fx

    def make() -> torch.fx.GraphModule:
        args = against.large(NODES)
        return to_torch_fx(next(one for one in args if isinstance(one, GraphModule)))

    return _median(run, make)


def _median(run: Callable[[Any], Any], make: Callable[[], Any]) -> float:
    """The median of three runs, or the first when it takes longer than a second."""
    times: list[float] = []
    while len(times) < 3 and (not times or times[0] < 1.0):
        given = make()
        begin = time.perf_counter()
        run(given)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)
