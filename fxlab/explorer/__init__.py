"""Watching a program change: record edits, step through them, judge what they did.

`fxlab.record` and `fxlab.explore` are the two calls that people come for. Nothing here imports
ipywidgets or anywidget before a widget is asked for, so `record` works in a plain script.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxlab.core.errors import RewriteError, call_site
from fxlab.core.graph_module import GraphModule
from fxlab.explorer.given import as_inputs, as_passes, check_model, pass_name
from fxlab.explorer.history import RecordedTimeline
from fxlab.explorer.record import record, title_of
from fxlab.explorer.sentences import article, named
from fxlab.explorer.shrink import shrink
from fxlab.explorer.timeline import Timeline
from fxlab.explorer.trace import add_error, trace_timeline

if TYPE_CHECKING:
    from fxlab.explorer.widget import Explorer

__all__ = [
    "Explorer",
    "RecordedTimeline",
    "Timeline",
    "explore",
    "record",
    "shrink",
    "timeline_of",
    "trace_timeline",
]


def __getattr__(name: str) -> Any:
    """Import the widget when it is first asked for."""
    if name == "Explorer":
        return importlib.import_module("fxlab.explorer.widget").Explorer
    raise AttributeError(f"module 'fxlab.explorer' has no attribute {name!r}")


def explore(
    x: Any,
    passes: Sequence[Callable[..., Any]] | None = None,
    inputs: Sequence[Any] | None = None,
    *,
    strict: bool = False,
    repeats: int = 0,
    **view: Any,
) -> Explorer:
    """Show a program, and what passes do to it, edit by edit.

    Args:
        x: A model or function (it is traced, which is the first thing shown), a GraphModule of
            fxlab or torch.fx, an exported program (`torch.export`), or a `Timeline`.
        passes: Run one after the other, each recorded and judged. They work on a copy that shares
            tensors: `x` stays as it is.
        inputs: Example inputs, in a tuple or by parameter in a dict: shapes and costs are shown,
            and each pass is held to the output of the program that it was given; where the first
            program's was another one, that is told too. Without passes, the run itself is shown
            node by node.
        strict: Raise what a trace or a pass raises, instead of showing it as the last step.
        repeats: Time the program before and after each pass on the inputs: the median of so many
            runs, in seconds. 0 measures nothing.
        **view: Handed to the Explorer: `step`, `selection`, `wall`, `predict`.

    Returns:
        An Explorer; `explorer.timeline` is the story, `explorer.error` what went wrong or None.
    """
    timeline = timeline_of(x, passes, inputs, repeats)
    failure = getattr(timeline, "failure", None)
    if strict and failure is not None:
        raise failure
    from fxlab.explorer.widget import Explorer

    explorer = Explorer(timeline, **view)
    explorer.error = failure
    return explorer


def timeline_of(
    x: Any,
    passes: Sequence[Callable[..., Any]] | None = None,
    inputs: Sequence[Any] | None = None,
    repeats: int = 0,
) -> Timeline:
    """Return the story that `explore` shows, without the widget.

    Args:
        x: As in `explore`.
        passes: As in `explore`.
        inputs: As in `explore`.
        repeats: As in `explore`.

    Returns:
        A Timeline; a recorded one's `failure` is what went wrong, or None.

    Raises:
        RewriteError: `x` is none of what `explore` shows.
    """
    if isinstance(x, Timeline):
        return x
    check_model(x, "explore")
    chosen = as_passes(passes)
    if not isinstance(x, torch.export.ExportedProgram):
        inputs = as_inputs(x, inputs)
    if isinstance(x, torch.export.ExportedProgram):
        from fxlab.interop import from_exported

        gm = from_exported(x)
        inputs = as_inputs(gm, inputs)
        timeline = _opened(gm, inputs, "exported program", repeats)
    elif isinstance(x, GraphModule | torch.fx.GraphModule):
        timeline = _opened(_private(x), inputs, title_of(x), repeats)
    elif isinstance(x, nn.Module) or callable(x):
        timeline = trace_timeline(x, inputs, repeats=repeats)
    else:
        raise RewriteError(
            f"explore can't show {article(type(x).__name__)}",
            where=call_site(),
            expected="a model, a function, a GraphModule, an exported program, or a Timeline",
        )
    if timeline.failure is None:
        _run_all(timeline, chosen, inputs)
    else:
        _not_run(timeline, chosen)
    return timeline


def _private(gm: Any) -> Any:
    """A copy that passes may edit; its tensors are the same ones."""
    from fxlab.passes.base import copy_sharing_tensors

    return copy_sharing_tensors(gm)


def _opened(gm: Any, inputs: Sequence[Any] | None, title: str, repeats: int) -> RecordedTimeline:
    """A timeline of a ready program, without steps yet."""
    recording = record(gm, inputs, repeats=repeats)
    recording.recorder.block = ("", "")
    recording.recorder.start(gm)
    recording.recorder.stop()
    return RecordedTimeline(title, recording.recorder)


def _not_run(timeline: RecordedTimeline, passes: list[Callable[..., Any]]) -> None:
    """Say in the step that stopped the story which passes were not run."""
    if passes:
        events = timeline.recorder.events
        told = f"{events[-1].after['text']}; not run: {named([pass_name(one) for one in passes])}"
        events[-1] = events[-1]._replace(after={**events[-1].after, "text": told})
        timeline._seen = None


def _run_all(
    timeline: RecordedTimeline, passes: list[Callable[..., Any]], inputs: Sequence[Any] | None
) -> None:
    """Run the passes; the first that raises is undone and ends the story."""
    recorder = timeline.recorder
    for position, pass_ in enumerate(passes):
        begin = len(recorder.events)
        try:
            timeline.run(pass_)
        except Exception as error:  # shown as the last step; `strict` raises it again
            recorder.give_up(begin)
            graph = recorder.current.graph
            edited = len(recorder.events) > begin
            add_error(recorder, graph, error, "its edits were undone" if edited else "")
            recorder.spans[-1].last = len(recorder.events)
            timeline.failure = error
            _not_run(timeline, passes[position + 1 :])
            return
    if not passes and inputs is not None and recorder.reference.problem is None:
        timeline.execute(*inputs)
