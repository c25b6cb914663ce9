"""Which edit broke the program, and what did another history do differently?

A right pass is wrong in the middle of every match: the weights are folded already, the batch norm
is still there. So failing is not monotone, and a binary search would accuse right edits.
`bisect` looks for the last run of failing frames that never passes again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fxlab.core import graph as core_graph
from fxlab.core.errors import RewriteError, TimelineError
from fxlab.explorer.record import Recorder
from fxlab.explorer.sentences import article, short
from fxlab.explorer.timeline import Step, Timeline

if TYPE_CHECKING:
    from fxlab.explorer.history import RecordedTimeline

Check = Callable[[Any], Any]


@dataclass(repr=False)
class Bisection:
    """What `timeline.bisect` found. Printing it gives the text.

    Attributes:
        step: The step from which on the check never passes again; None if it passes at the end.
        last_good: The index of the last frame that passed (0 is the start), or None.
        suspects: The edits from `step` until the pass turns to another match.
        healed: How many runs of failing frames before it passed again later.
        skipped: How many frames were no valid graph, and so could not be checked.
        failure: What the check said or raised in the last frame.
        made: The step that made the node which `step` makes others read, if it did that.
    """

    step: Step | None
    last_good: int | None
    suspects: list[Step] = field(default_factory=list)
    healed: int = 0
    skipped: int = 0
    failure: str = ""
    made: Step | None = None

    def __repr__(self) -> str:
        """The same as its text: a notebook shows the finding, not its fields."""
        return str(self)

    def __str__(self) -> str:
        extra = ""
        if self.healed:
            again = "once" if self.healed == 1 else f"{self.healed} times"
            extra = f" (it failed and passed again {again} on the way, as in the middle of an edit)"
        if self.step is None:
            return f"nothing broke for good: the check passes at the end{extra}"
        lines = [f"broken for good from step {self.step.index} on{extra}:"]
        for one in self.suspects:
            place = f"{one.where[0].file}:{one.where[0].line}" if one.where else "by snapshot"
            lines.append(f"  {one.code}  {one.sentence}  [{place}]")
        if self.made is not None:
            lines.append(f"  what is read now was made at {self.made.code}  {self.made.sentence}")
        if self.failure:
            lines.append(f"  the check: {self.failure}")
        if self.last_good is None:
            lines.append("  no frame passed, not even the start: is the check right?")
        return "\n".join(lines)


def bisect(timeline: RecordedTimeline, check: Check) -> Bisection:
    """See `RecordedTimeline.bisect`."""
    verdicts: list[bool | None] = []
    failure = ""
    for index in range(len(timeline.steps) + 1):
        passed, failure = judge(timeline, check, index)
        verdicts.append(passed)
    known = [index for index, one in enumerate(verdicts) if one is not None]
    skipped = len(verdicts) - len(known)
    runs = sum(
        1 for one, other in pairwise(known)
        if verdicts[one] is False and verdicts[other]
    )  # fmt: skip
    if not known or verdicts[known[-1]]:
        return Bisection(None, known[-1] if known else None, [], runs, skipped)
    good = next((index for index in reversed(known) if verdicts[index]), None)
    failing = [index for index in known if verdicts[index] is False and index > (good or -1)]
    # Frames in between may be ill formed: the edit that spoilt them is among the suspects.
    begin = max(1, (good or 0) + 1)
    begin = failing[0] if failing[0] >= begin and good is None else begin
    if begin == 0 or not timeline.steps:
        return Bisection(None, None, [], runs, skipped, failure)
    step = timeline.steps[begin - 1]
    made = maker_of(timeline, step)
    return Bisection(step, good, suspects(timeline, begin), runs, skipped, failure, made)


@contextmanager
def unheard() -> Iterator[None]:
    """Let no open recording hear what is made for a check: it is no edit of the pass."""
    recorders = [getattr(hook, "__self__", None) for hook in core_graph.graph_created_hooks]
    with ExitStack() as stack:
        for recorder in recorders:
            if isinstance(recorder, Recorder) and not recorder.paused:
                stack.enter_context(recorder.quiet())
        yield


def maker_of(timeline: Timeline, step: Step) -> Step | None:
    """The step that created the node which a reroute makes others read."""
    row = (step.edit.after or {}).get("to") if step.edit.kind == "reroute" else None
    for earlier in reversed(timeline.steps[: step.index - 1]):
        if row is not None and earlier.edit.kind == "create" and earlier.edit.row == row:
            return earlier
    return None


def judge(timeline: RecordedTimeline, check: Check, index: int) -> tuple[bool | None, str]:
    """Whether the check passes in a frame; None where there is nothing to check."""
    step = timeline.steps[index - 1] if index else None
    if step is not None and not step.well_formed:
        return None, ""
    try:
        with unheard():
            gm = timeline.module(index)
    except TimelineError:
        return None, ""
    try:
        with unheard():
            answer = check(gm)
    except Exception as error:  # a check may assert, and a broken program may fail to run
        text = str(error).strip().splitlines()
        return False, f"{type(error).__name__}: {text[0] if text else ''}"[:200]
    try:
        passed = answer is None or bool(answer)
    except Exception as error:
        raise RewriteError(
            f"the check returned {article(type(answer).__name__)}, which is neither true nor false",
            expected="True or False (or an exception) for a GraphModule",
            right="timeline.bisect(lambda gm: torch.allclose(gm(x), wanted))",
        ) from error
    return passed, "" if passed else "it returned False"


def suspects(timeline: Timeline, begin: int) -> list[Step]:
    """The edits from step `begin` until the pass turns to another match.

    A pass turns to another match when its line goes back, as in the next round of its loop.
    """
    steps = timeline.steps
    chosen = [steps[begin - 1]]
    for step in steps[begin:]:
        before = chosen[-1]
        if step.pass_index != before.pass_index or not step.where or not before.where:
            break
        same_function = step.where[0][::2] == before.where[0][::2]
        if same_function and step.where[0].line <= before.where[0].line:
            break
        chosen.append(step)
    return chosen


@dataclass(repr=False)
class HistoryDifference:
    """How two histories of an edited pass differ. Printing it gives the text.

    Attributes:
        first: Index of the first step that differs, here and there; None if there is none.
        only_here: Steps of the first history that the other has not.
        only_there: Steps of the other that the first has not.
        lines: Lines of the last programs that differ: (row name, here, there); "" is no such row.
    """

    first: tuple[int, int] | None
    only_here: list[Step]
    only_there: list[Step]
    lines: list[tuple[str, str, str]]

    def __repr__(self) -> str:
        """The same as its text."""
        return str(self)

    def __str__(self) -> str:
        if self.first is None and not self.lines:
            return "the two histories are alike"
        text = []
        if self.first is not None:
            text.append(f"they part at step {self.first[0]} here, {self.first[1]} there")
        text += [f"- {act(step)}" for step in self.only_here[:20]]
        text += [f"+ {act(step)}" for step in self.only_there[:20]]
        rest = len(self.only_here[20:]) + len(self.only_there[20:])
        if rest:
            text.append(f"  and {rest} more steps")
        for name, here, there in self.lines[:20]:
            was, now = (short(line) or "not there" for line in (here, there))
            text.append(f"  in the end {short(name, 40)}: {was}  ->  {now}")
        return "\n".join(text)


def diff(one: Timeline, other: Timeline) -> HistoryDifference:
    """Compare two histories; rows are matched by name, for their numbers are a recording's own."""
    a, b = [act(step) for step in one.steps], [act(step) for step in other.steps]
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    here, there = middle(a[start : len(a) - end], b[start : len(b) - end])
    first = (start + 1, start + 1) if len(a) != len(b) or start < len(a) else None
    return HistoryDifference(
        first,
        [one.steps[start + index] for index in here],
        [other.steps[start + index] for index in there],
        last_lines(one, other),
    )


LINE = re.compile(r"\S*:\d+ ")


def act(step: Step) -> str:
    """What a step did, without its line: an edited pass has its lines elsewhere."""
    found = LINE.match(step.sentence) if step.where else None
    return step.sentence[found.end() :] if found else step.sentence


def middle(a: Sequence[str], b: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of what is only in `a` and only in `b`; by counting where they are very long."""
    if len(a) * len(b) > 4_000_000:
        surplus, lack = Counter(a) - Counter(b), Counter(b) - Counter(a)
        return take(a, surplus), take(b, lack)
    here: list[int] = []
    there: list[int] = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            here.extend(range(i, j))
            there.extend(range(k, m))
    return here, there


def take(facts: Sequence[str], counts: Counter[str]) -> list[int]:
    """The indices of the first so many of each fact."""
    found = []
    for index, one in enumerate(facts):
        if counts[one] > 0:
            counts[one] -= 1
            found.append(index)
    return found


def last_lines(one: Timeline, other: Timeline) -> list[tuple[str, str, str]]:
    """The lines of the two last programs that differ."""
    here, there = lines_of(one), lines_of(other)
    names = dict.fromkeys([*here, *there])
    return [
        (name, here.get(name, ""), there.get(name, ""))
        for name in names
        if here.get(name) != there.get(name)
    ]


def lines_of(timeline: Timeline) -> dict[str, str]:
    """Row name -> line of the last program."""
    frame = timeline.frame(len(timeline.steps))
    return {state.name: frame.line(row) for row, state in frame.rows.items()}
