"""How are the cases of one part run, and what do they say?

The one place that decides points: `check` runs it with a call in the kernel, `grade` with a call
over a pipe. Arguments are made and results judged here, never where the student's code runs (in a
notebook both are the same process; a grader keeps them apart). A property's arguments come from
hypothesis, the same ones each time, and are cut down to the smallest that fails.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.teach.exercise import Case, Finding, Part, Property
from fxlab.teach.limits import AnswerError, graphs_in, safe_text

SHRINK_CALLS = 150  # calls after the first failure of a property; a count, so that runs agree
Caller = Callable[[tuple[Any, ...]], Any]


@dataclass
class CaseResult:
    """What came out of one case.

    Attributes:
        behaviour: What it belongs to.
        title: The case's own title.
        status: "pass", "fail", "error", "todo" or "not run" (a limit ended the check before).
        sentence: Why it is not a pass.
        finding: The graphs behind the sentence, or None.
        trace: The student's lines of a traceback, or "".
        args: The arguments it happened on, untouched, or None.
        edits: Whether the answer edited a program that it was given, or made one.
    """

    behaviour: str
    title: str
    status: str
    sentence: str = ""
    finding: Finding | None = None
    trace: str = ""
    args: tuple[Any, ...] | None = None
    edits: bool = False


@dataclass
class Failure:
    """One call that went wrong: its arguments, why, what was raised, whether there are edits."""

    args: tuple[Any, ...]
    finding: Finding
    error: AnswerError | None = None
    edits: bool = False


_STATUS = {"judged": "fail", "lint": "fail", "type": "fail", "todo": "todo"}
_ENDS = ("todo", "asked", "time", "memory", "lost", "missing")  # the other cases would say the same


def examine(
    part: Part,
    call: Caller,
    cases: Iterable[Case | Property] | None = None,
    behaviour: str | None = None,
    run: Callable[[Any, Caller], Failure | None] | None = None,
) -> list[CaseResult]:
    """Run cases in order; a stub, a time-out or a refusal ends the run.

    A behaviour that a hand-made case found wrong is not run on generated programs as well.

    Args:
        part: Whose cases.
        call: Gets the arguments of one call and returns what `part.entry` returned.
        cases: The cases to run; the part's public ones when None.
        behaviour: Run the cases of this behaviour only.
        run: Runs one case; a grader has one that remembers what it knows from other students.
    """
    run = run or run_case
    results: list[CaseResult] = []
    over: AnswerError | None = None
    failed: set[str] = set()
    for case in part.cases() if cases is None else cases:
        if behaviour is not None and case.behaviour != behaviour:
            continue
        if over is not None:
            status = "todo" if over.kind == "todo" else "not run"
            results.append(CaseResult(case.behaviour, case.title, status, over.sentence))
            continue
        result = CaseResult(case.behaviour, case.title, "pass")
        results.append(result)
        told = case.behaviour if isinstance(case, Property) else case.after
        if told in failed:
            result.status = "not run"  # a case before it says it more plainly
            continue
        try:
            failure = run(case, call)
        except AnswerError as error:
            failure = Failure((), error.finding or Finding(error.sentence), error)
        if failure is None:
            continue
        error = failure.error
        kind = error.kind if error is not None else "judged"
        result.status = _STATUS.get(kind, "error")
        result.sentence, result.finding = failure.finding.sentence, failure.finding
        result.args, result.edits = failure.args, failure.edits
        failed.add(case.behaviour)
        if error is not None:
            result.sentence, result.trace = error.sentence, error.trace
            over = error if kind in _ENDS else None
    return results


def points_of(part: Part, results: list[CaseResult]) -> dict[str, int]:
    """Behaviour -> points earned: all of it when all its cases passed, else none."""
    earned = {}
    for behaviour, points in part.points.items():
        own = [one for one in results if one.behaviour == behaviour]
        earned[behaviour] = points if own and all(r.status == "pass" for r in own) else 0
    return earned


def run_case(case: Case | Property, call: Caller) -> Failure | None:
    """Run one case; return what went wrong, on a property's smallest failing arguments."""
    if isinstance(case, Property):
        return _run_property(case, call)
    return attempt(case, case.args(), case.args(), call)


def attempt(
    case: Case | Property, args: tuple[Any, ...], fresh: tuple[Any, ...], call: Caller
) -> Failure | None:
    """Call the answer on `args` and judge what it returned by the equal `fresh` ones."""
    graphs = graphs_in(args)
    before = [graph.version for graph in graphs]
    try:
        value = call(args)
    except AnswerError as error:
        finding = error.finding or Finding(error.sentence)
        finding.graph = finding.graph or first_graph(fresh)
        edits = before != [graph.version for graph in graphs]
        return Failure(fresh, finding, error, edits)
    finding = judged(case, fresh, value)
    made = bool(graphs) and isinstance(value, GraphModule)
    edits = made or before != [graph.version for graph in graphs]
    return None if finding is None else Failure(fresh, finding, edits=edits)


def judged(case: Case | Property, args: tuple[Any, ...], value: Any) -> Finding | None:
    """What the judge says; a judge that stumbles over the value is a finding too."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the value is a program of somebody's, and may warn
        torch.manual_seed(0)
        try:
            finding = case.judge(args, value)
        except Exception as error:  # the value is anybody's: it may break any of the judge's steps
            text = error.message if isinstance(error, FxlabError) else safe_text(error)
            first = (text.strip().splitlines() or ["no message"])[0][:300]
            name = type(error).__name__
            finding = Finding(f"what your answer returned can't be used: {name}: {first}")
            finding.actual = value if isinstance(value, GraphModule) else None
    if finding is not None and finding.graph is None:
        finding.graph = first_graph(args)
    return finding


def first_graph(value: Any) -> GraphModule | None:
    """The first GraphModule among arguments."""
    graphs = graphs_in(value)
    return graphs[0].owning_module if graphs else None


def size_of(args: tuple[Any, ...]) -> int:
    """How large a failing input is to a reader: its nodes, or else the length of its text."""
    nodes = sum(len(graph.nodes) for graph in graphs_in(args))
    return nodes or len(repr(args))


def _run_property(case: Property, call: Caller) -> Failure | None:
    """Run a property; return what went wrong on its smallest failing arguments."""
    smallest: Failure | None = None
    left = SHRINK_CALLS
    ended = False

    def test(args: tuple[Any, ...]) -> None:
        nonlocal smallest, left, ended
        if ended or left <= 0:
            return
        left -= smallest is not None
        failure = attempt(case, copy.deepcopy(args), copy.deepcopy(args), call)
        if failure is None:
            return
        ended = failure.error is not None and failure.error.kind in _ENDS
        # Of equal sizes the last: hypothesis goes to simpler and simpler ones.
        if smallest is None or ended or size_of(failure.args) <= size_of(smallest.args):
            smallest = failure
        raise AssertionError(case.title)

    generate(case, test)
    return smallest


def generate(case: Property, test: Callable[[tuple[Any, ...]], None]) -> None:
    """Call `test` with a property's arguments, the same ones in each process, and shrink.

    Raises:
        ModuleNotFoundError: hypothesis is not installed.
    """
    import hypothesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.configuration import set_hypothesis_home_dir
    from hypothesis.errors import HypothesisException

    set_hypothesis_home_dir(tempfile.gettempdir())  # nothing is written beside the notebook
    profile = settings(
        max_examples=case.examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[*HealthCheck],  # type: ignore[arg-type]
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )

    def given(args: tuple[Any, ...]) -> None:
        test(args)

    runner = profile(hypothesis.given(case.args())(given))
    # The smallest failure was kept as it passed by: hypothesis's own report isn't needed.
    with contextlib.suppress(AssertionError, HypothesisException):
        runner()
