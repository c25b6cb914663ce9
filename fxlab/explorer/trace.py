"""How does a trace happen, operation by operation?

Symbolic tracing (paper section 4.1) runs the model's own Python with Proxies, and every operation
on one adds a node. `trace_timeline` records that as a story of one step per operation, beside the
line of the model that did it. A model that cannot be traced ends the story with the taught error,
on the line that stopped it.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from typing import Any

from fxlab.core.errors import FxlabError, call_site
from fxlab.explorer.encode import relative_file, scrubbed
from fxlab.explorer.events import Boundary, Event, Span, Watched
from fxlab.explorer.given import as_inputs, check_model
from fxlab.explorer.history import RecordedTimeline
from fxlab.explorer.record import Recorder

INSIDE = ("fxlab/core/", "fxlab/tracing/", "fxlab/explorer/", "site-packages/torch/", "<frozen ")
FxlabFrames = tuple[tuple[str, int, str], ...]


def trace_timeline(
    model: Any,
    inputs: Sequence[Any] | None = None,
    *,
    concrete_args: dict[str, Any] | None = None,
    repeats: int = 0,
) -> RecordedTimeline:
    """Trace a model and return the story of it, one step per recorded operation.

    Args:
        model: A Module or a function.
        inputs: Example inputs: shapes are shown, and later passes are judged with them.
        concrete_args: As in `fxlab.symbolic_trace`.
        repeats: As in `record`: how many runs time the program after the trace and each pass.

    Returns:
        A timeline that can go on: `timeline.run(pass_)`. If the model could not be traced its
        last step is of kind `error` and `timeline.failure` is the exception.
    """
    from fxlab.core.tracer import symbolic_trace

    check_model(model, "trace_timeline")
    inputs = as_inputs(model, inputs)
    # Not of a module: a submodule of it may be called so.
    title = (model if inspect.isroutine(model) else type(model)).__name__
    recorder = Recorder(inputs)
    recorder.max_edits, recorder.repeats = 10_000_000, repeats
    timeline = RecordedTimeline(title, recorder)
    span = Span("trace", "trace", 0, Boundary(None))
    recorder.spans.append(span)
    recorder.open = span
    recorder.listen()
    gm, failure = None, None
    options = {} if inputs is None else {"example_inputs": tuple(inputs)}
    try:
        gm = symbolic_trace(model, concrete_args, **options)
    except Exception as error:  # the model's own errors too: they are the last step
        failure = error
    finally:
        recorder.stop()
    recorder.max_edits = 100_000 + len(recorder.events)
    graph = gm.graph if gm is not None else traced_graph(recorder)
    keep_only(recorder, graph)
    if gm is not None:
        recorder.close(span, gm)
    if failure is not None:
        add_error(recorder, graph, failure)
        span.last, span.end, recorder.open = len(recorder.events), Boundary(graph), None
        timeline.failure = recorder.error = failure
    return timeline


def traced_graph(recorder: Recorder) -> Any:
    """The graph that a failed trace was filling: the one that most events are about."""
    from fxlab.core.graph import Graph

    counts: dict[Any, int] = {}
    for event in recorder.events:
        counts[event.graph] = counts.get(event.graph, 0) + 1
    graph = max(counts, key=lambda one: counts[one], default=None)
    return graph if graph is not None else Graph()


def keep_only(recorder: Recorder, graph: Any) -> None:
    """Make the traced graph p0, and forget the events of helper graphs."""
    watched = recorder.watched.get(graph) or Watched(graph)
    watched.how, watched.original = None, True
    recorder.watched = {graph: watched}
    recorder.events = [
        event
        for event in recorder.events
        if event.graph is graph and event.kind not in ("module", "attr")
    ]


def add_error(recorder: Recorder, graph: Any, error: BaseException, undone: str = "") -> None:
    """Append the step that tells of an exception, on the line that raised it.

    Args:
        recorder: It goes to the end of its events.
        graph: The program that the step is about.
        error: The exception.
        undone: What became of the edits, such as `its edits were undone`.
    """
    kind = type(error).__name__
    text = str(error).strip() or kind
    message = getattr(error, "message", "") or text.splitlines()[0]
    if not isinstance(error, FxlabError) and message != kind:
        message = f"{kind}: {message}"
    if undone and "undone" not in message:
        message = f"{message}; {undone}"
    hints = [str(one) for one in getattr(error, "hint", ())]
    fields = {"text": scrubbed(text), "type": kind, "hints": hints}
    after = {"json": fields, "text": f"stops: {scrubbed(message)}"}
    recorder.events.append(Event("error", graph, None, None, after, error_frames(error)))


def add_undone(recorder: Recorder, error: BaseException | None) -> bool:
    """End the story of a block that raised with a step that says so, in its last span."""
    assert error is not None
    edits = [event for event in recorder.events if event.kind not in ("value", "error")]
    before = len(recorder.spans) > 1 or (recorder.spans and recorder.spans[-1].first)
    whose = "all edits of the block" if before else "its edits"
    add_error(recorder, recorder.current.graph, error, f"{whose} were undone" if edits else "")
    if recorder.spans and recorder.spans[-1].last is not None:
        recorder.spans[-1].last = len(recorder.events)
    return True


def error_frames(error: BaseException) -> FxlabFrames:
    """Where an exception came from, in files outside the kit's core and explorer."""
    if isinstance(error, FxlabError) and error.where:
        return error.where
    frames = traceback.extract_tb(error.__traceback__)
    outside = [
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in reversed(frames)
        if not relative_file(frame.filename).startswith(INSIDE)
    ]
    return tuple(outside[:4]) or call_site()
