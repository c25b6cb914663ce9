"""What does a student see after a check?

A `Result` is a card: its status first and in words, each public case, and for the first wrong one
the smallest failing program drawn as the explorer draws it, with expected and actual code as a
diff. The same content is plain text and HTML; the HTML has inline styles only, no script, so it
survives an untrusted notebook. "Public checks passed" is the most that it ever says.
"""

from __future__ import annotations

import base64
import copy
import difflib
import html
import sys
from dataclasses import dataclass, field
from typing import Any

from fxlab.core.errors import ExerciseError
from fxlab.core.graph_module import GraphModule
from fxlab.teach.examine import CaseResult
from fxlab.teach.exercise import Case, Finding, part

WORDS = {
    "todo": "not written yet",
    "pass": "public checks passed",
    "fail": "not yet: a check failed",
    "error": "not yet: your code stopped",
}
_MARKS = {"pass": "ok", "fail": "wrong", "error": "stopped", "todo": "to do", "not run": "not run"}
_INK = {"pass": "#0b6637", "fail": "#a8201a", "error": "#a8201a", "todo": "#4f5b6d"}


@dataclass
class Result:
    """What a check says.

    Attributes:
        id: Such as "2.2" or "2.1a".
        title: The exercise's.
        status: "todo", "pass", "fail" or "error".
        points: What was earned.
        out_of: What could be.
        behaviours: Behaviour -> (points earned, points possible).
        cases: What came out of each case.
        printed: The beginning of what the answer printed.
        seconds: What the check took.
        answer: What was checked.
        entry: What the exercise's entry point is: it calls the answer on a case.
    """

    id: str
    title: str
    status: str
    points: int
    out_of: int
    behaviours: dict[str, tuple[int, int]]
    cases: list[CaseResult]
    printed: str = ""
    seconds: float = 0.0
    answer: Any = field(default=None, repr=False)
    entry: Any = field(default=None, repr=False)

    def __bool__(self) -> bool:
        """Whether all public checks passed."""
        return self.status == "pass"

    @property
    def first(self) -> CaseResult | None:
        """The first case that is not right: the card explains this one."""
        return next((one for one in self.cases if one.status in ("fail", "error")), None)

    @property
    def sentence(self) -> str:
        """What is wrong, in one sentence; "" when nothing is."""
        if self.status == "todo":
            return (
                f"write your answer in the cell above, then run this cell again; hint({self.id!r})"
            )
        return self.first.sentence if self.first is not None else ""

    def show(self) -> int:
        """Show the card and return the points, which is what nbgrader reads from the cell."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None and ipython is not None:
            ipython.display.display(self)
        else:
            print(self)
        return self.points

    def explore(self) -> Any:
        """Step through what the answer does to the smallest failing program, edit by edit.

        Returns:
            An Explorer; when everything passed, of the first case's program.

        Raises:
            ExerciseError: The exercise gives no program to the answer.
        """
        args = self._failing_args()
        if self.entry is None or not any(isinstance(one, GraphModule) for one in args):
            raise ExerciseError(
                f"{self.id}: there is no program to step through",
                hint="explore() shows what an answer does to a GraphModule that it is given",
            )
        return stepped(self.entry, self.answer, args)

    def compare(self) -> Any:
        """Show your pass beside the kit's: both histories, and the time on a large program.

        Returns:
            A `Comparison`; it is no grade.

        Raises:
            ExerciseError: The checks have not passed, or the kit has no pass of this kind.
        """
        from fxlab.teach.comparing import compare

        if not self or self.answer is None:
            raise ExerciseError(f"{self.id}: compare an answer that has passed its checks")
        return compare(self.id, self.answer)

    def _failing_args(self) -> tuple[Any, ...]:
        if self.first is not None:
            return self.first.args or ()
        cases = part(self.id)[1].cases()
        return next((case.args() for case in cases if isinstance(case, Case)), ())

    # -- the card --------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"{self.id} {self.title}: {WORDS[self.status]} ({self.points} of {self.out_of})"]
        if self.sentence:
            lines.append(f"  {self.sentence}")
        if self.status != "todo":
            for one in self.cases:
                lines.append(f"  [{_MARKS[one.status]}] {one.behaviour}: {one.title}")
                if one.status in ("fail", "error") and one.sentence != self.sentence:
                    lines.append(f"        {one.sentence}")
        if self.first is not None:
            lines += [f"  | {line}" for line in self.first.trace.splitlines()]
            lines += _finding_text(self.first.finding)
        if self.status == "fail" and self._steppable():
            lines.append(f"  step through it: {self._again()}.explore()")
        if self.printed:
            lines.append("  your code printed: " + self.printed[:300].replace("\n", "\n    "))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        ink = _INK[self.status]
        head = f"{self.id} {self.title}: {WORDS[self.status]}"
        out = [
            f'<div style="border:1px solid {ink};border-left:6px solid {ink};padding:8px 12px;'
            'border-radius:4px">',
            f'<p style="margin:0"><b style="color:{ink}">{_e(head)}</b> '
            f"({self.points} of {self.out_of} points)</p>",
        ]
        if self.sentence:
            out.append(f'<p style="margin:6px 0">{_e(self.sentence)}</p>')
        if self.status != "todo":
            said = self.sentence
            rows = "".join(_case_row(one, one.sentence == said) for one in self.cases)
            out.append(f'<ul style="margin:6px 0">{rows}</ul>')
        if self.first is not None:
            if self.first.trace:
                out.append(f'<pre style="{_PRE}">{_e(self.first.trace)}</pre>')
            out.append(finding_html(self.first.finding))
        if self.printed:
            out.append(f"<details><summary>your code printed</summary>"
                       f'<pre style="{_PRE}">{_e(self.printed)}</pre></details>')  # fmt: skip
        if self.status == "fail" and self.first is not None and self._steppable():
            out.append(f'<p style="margin:6px 0"><code>{_e(self._again())}.explore()</code> steps '
                       "through it.</p>")  # fmt: skip
        if self and self.answer is not None and _comparable(self.id):
            out.append(f'<p style="margin:6px 0"><code>{_e(self._again())}.compare()</code> shows '
                       "it beside the kit's own pass.</p>")  # fmt: skip
        out.append("</div>")
        return "".join(out)

    def _again(self) -> str:
        """The call that makes this result again, as a student writes it."""
        return f'check("{self.id}", {part(self.id)[1].name})'

    def _steppable(self) -> bool:
        """Whether there is something to see: a pass that edited the program it failed on."""
        return self.first is not None and self.first.edits


class _Returned(BaseException):
    """The answer has returned: what the check does afterwards is none of its steps."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def stepped(entry: Any, answer: Any, args: tuple[Any, ...]) -> Any:
    """An Explorer of what an answer does to the first program among its arguments.

    Args:
        entry: The part's: it calls the answer as the exercise says.
        answer: The student's function; the recording ends when it returns. Of a class, whose
            methods `entry` calls, everything is shown.
        args: What the answer is called with; they stay as they are.
    """
    from fxlab.explorer import explore

    place = next(k for k, one in enumerate(args) if isinstance(one, GraphModule))

    def until_it_returns(*given: Any, **named: Any) -> Any:
        raise _Returned(answer(*given, **named))

    def your_answer(gm: GraphModule) -> Any:
        rest = list(copy.deepcopy(args))
        rest[place] = gm
        try:
            value = entry(answer if isinstance(answer, type) else until_it_returns, *rest)
        except _Returned as over:
            value = getattr(over.value, "graph_module", over.value)
        return value if isinstance(value, GraphModule) else None

    your_answer.__name__ = getattr(answer, "__name__", "your_answer")
    return explore(args[place], passes=[your_answer])


_PRE = "margin:6px 0;padding:6px;overflow-x:auto;background:#f4f6f8;color:#1a2233"


def _comparable(id: str) -> bool:
    from fxlab.teach.comparing import reference

    return reference(id) is not None


def _e(text: str) -> str:
    return html.escape(text, quote=True)


def _case_row(one: CaseResult, explained: bool) -> str:
    text = f"<b>{_MARKS[one.status]}</b> {_e(one.behaviour)}: {_e(one.title)}"
    if one.status in ("fail", "error") and not explained:
        text += f"<br>{_e(one.sentence)}"
    return f"<li>{text}</li>"


def code_of(program: Any) -> str:
    """A program's generated code; of a text the text, "" for nothing."""
    if program is None:
        return ""
    if isinstance(program, GraphModule):
        try:
            return program.code.strip()
        except Exception:  # a graph that can't be written as code is shown as a list of nodes
            return str(program.graph)
    return str(program)


def diff_of(finding: Finding) -> list[str]:
    """Expected and actual code as the lines of a diff; [] unless there are both."""
    expected, actual = code_of(finding.expected), code_of(finding.actual)
    if not expected or not actual:
        return []
    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), "expected", "yours", lineterm="", n=20
    )
    return list(lines)


def _finding_text(finding: Finding | None) -> list[str]:
    if finding is None:
        return []
    lines = []
    if finding.graph is not None:
        lines += [
            "  the program:",
            *[f"    {line}" for line in code_of(finding.graph).splitlines()],
        ]
    diff = diff_of(finding)
    for title, one in (("expected", finding.expected), ("yours", finding.actual)):
        if one is not None and not diff:
            lines += [f"  {title}:", *[f"    {line}" for line in code_of(one).splitlines()]]
    return lines + [f"    {line}" for line in diff]


def finding_html(finding: Finding | None) -> str:
    """The program drawn, and expected and actual code."""
    if finding is None:
        return ""
    out = []
    if isinstance(finding.graph, GraphModule):
        out.append(f'<p style="margin:6px 0 0">the program</p>{picture(finding.graph)}')
    elif finding.graph is not None:
        out.append(f'<pre style="{_PRE}">{_e(str(finding.graph))}</pre>')
    diff = diff_of(finding)
    if diff:
        rows = "".join(_diff_row(line) for line in diff[2:])
        out.append('<p style="margin:6px 0 0">expected (-) and yours (+)</p>'
                   f'<pre style="{_PRE}">{rows}</pre>')  # fmt: skip
    else:
        for title, one in (("expected", finding.expected), ("yours", finding.actual)):
            if one is not None:
                out.append(f'<p style="margin:6px 0 0">{title}</p>'
                           f'<pre style="{_PRE}">{_e(code_of(one))}</pre>')  # fmt: skip
    return "".join(out)


def _diff_row(line: str) -> str:
    style = {"+": "color:#0b6637", "-": "color:#a8201a"}.get(line[:1], "")
    return f'<span style="{style}">{_e(line)}</span>\n'


def picture(gm: GraphModule, limit: int = 40) -> str:
    """A program as the explorer draws it: an `<img>` that needs no script."""
    from fxlab.explorer import timeline_of
    from fxlab.explorer.drawing import Story, still_svg
    from fxlab.explorer.view import view

    drawn = still_svg(Story(view(timeline_of(gm))), 0, limit=limit)
    packed = base64.b64encode(drawn.encode("utf-8")).decode("ascii")
    alt = _e(" ; ".join(line.strip() for line in code_of(gm).splitlines())[:400])
    return f'<img alt="{alt}" style="max-width:100%" src="data:image/svg+xml;base64,{packed}">'
