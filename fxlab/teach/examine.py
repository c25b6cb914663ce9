"""How are the cases of one part run, and what do they say?

The one place that decides points: `check` runs it with a call in the kernel, `grade` with a call
over a pipe. Arguments are made and results judged here, never where the student's code runs (in a
notebook both are the same process; a grader keeps them apart). A property's arguments come from
hypothesis, the same ones each time, and are cut down to the smallest that fails.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import tempfile
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
    """

    behaviour: str
    title: str
    status: str
    sentence: str = ""
    finding: Finding | None = None
    trace: str = ""


def examine(
    part: Part,
    call: Caller,
    cases: Iterable[Case | Property] | None = None,
    behaviour: str | None = None,
) -> list[CaseResult]:
    """Run cases in order; a stub, a time-out or a refusal ends the run.

    Args:
        part: Whose cases.
        call: Gets the arguments of one call and returns what `part.entry` returned.
        cases: The cases to run; the part's public ones when None.
        behaviour: Run the cases of this behaviour only.
    """
    results: list[CaseResult] = []
    over: AnswerError | None = None
    for case in part.cases() if cases is None else cases:
        if behaviour is not None and case.behaviour != behaviour:
            continue
        if over is not None:
            status = "todo" if over.kind == "todo" else "not run"
            results.append(CaseResult(case.behaviour, case.title, status, over.sentence))
            continue
        try:
            if isinstance(case, Property):
                finding = _run_property(case, call)
            else:
                finding = _run_case(case, call)
        except AnswerError as error:
            status = {"todo": "todo", "lint": "fail", "type": "fail"}.get(error.kind, "error")
            result = CaseResult(case.behaviour, case.title, status, error.sentence)
            result.trace = error.trace
            result.finding = error.finding
            results.append(result)
            if error.kind in ("todo", "asked", "time", "lost"):
                over = error
            continue
        status = "pass" if finding is None else "fail"
        sentence = "" if finding is None else finding.sentence
        results.append(CaseResult(case.behaviour, case.title, status, sentence, finding))
    return results


def points_of(part: Part, results: list[CaseResult]) -> dict[str, int]:
    """Behaviour -> points earned: all of it when all its cases passed, else none."""
    earned = {}
    for behaviour, points in part.points.items():
        own = [one for one in results if one.behaviour == behaviour]
        earned[behaviour] = points if own and all(r.status == "pass" for r in own) else 0
    return earned


def _run_case(case: Case, call: Caller) -> Finding | None:
    args = case.args()
    try:
        value = call(args)
    except AnswerError as error:
        if error.finding is None:
            error.finding = Finding(error.sentence, graph=first_graph(case.args()))
        raise
    return judged(case, case.args(), value)


def judged(case: Case | Property, args: tuple[Any, ...], value: Any) -> Finding | None:
    """What the judge says; a judge that stumbles over the value is a finding too."""
    with torch.random.fork_rng(devices=[]):
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


def _run_property(case: Property, call: Caller) -> Finding | None:
    """Run a property; return the finding on its smallest failing arguments."""
    if importlib.util.find_spec("hypothesis") is None:
        raise ModuleNotFoundError("checks need hypothesis", name="hypothesis")
    import hypothesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.configuration import set_hypothesis_home_dir
    from hypothesis.errors import HypothesisException

    set_hypothesis_home_dir(tempfile.gettempdir())  # nothing is written beside the notebook
    best: list[tuple[int, Finding, AnswerError | None]] = []
    calls_left = SHRINK_CALLS
    over: list[AnswerError] = []

    def attempt(args: tuple[Any, ...]) -> Finding | None:
        try:
            return judged(case, copy.deepcopy(args), call(copy.deepcopy(args)))
        except AnswerError as error:
            if error.kind in ("todo", "asked", "time", "lost"):
                over.append(error)
            finding = error.finding or Finding(error.sentence, graph=first_graph(args))
            finding.graph = finding.graph or first_graph(args)
            best.append((size_of(args), finding, error))
            raise

    def test(args: tuple[Any, ...]) -> None:
        nonlocal calls_left
        if over or calls_left <= 0:
            return
        calls_left -= bool(best)
        finding = attempt(args)
        if finding is not None:
            best.append((size_of(args), finding, None))
            raise AssertionError(case.title)

    profile = settings(
        max_examples=case.examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    runner = profile(hypothesis.given(case.args())(test))
    # The smallest failure was kept as it passed by: hypothesis's own report isn't needed.
    with contextlib.suppress(AssertionError, AnswerError, HypothesisException):
        runner()
    if not best:
        return None
    best.reverse()  # of equal sizes the last: hypothesis goes to simpler and simpler ones
    _, finding, error = min(best, key=lambda one: one[0])
    if over:
        raise over[0]
    if error is not None:
        error.finding = finding
        raise error
    return finding
