"""Why did a rewrite find nothing? While recording, searches for a pattern that fail are explained.

A pass that calls `replace_pattern` and matches nowhere changes nothing and says nothing. The
recorder notes such searches, and at the pass's end asks `fxlab.explain_mismatch` how far the
pattern came and what stopped it; the answer stands among what the pass left alone.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from fxlab.explorer.encode import scrubbed
from fxlab.explorer.sentences import named, short
from fxlab.passes.matcher import SubgraphMatcher

if TYPE_CHECKING:
    from fxlab.explorer.record import Recorder

_lock = threading.Lock()
_active: list[Searches] = []
_original: list[Any] = []
LIMIT = 5  # explained searches a pass


class Searches:
    """Notes for one recorder the patterns that its thread looked for and did not find."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.fruitless: list[tuple[Any, Any]] = []

    def listen(self) -> None:
        """Begin to note; the first of the process wraps the matcher's `match`."""
        with _lock:
            if not _active:
                _original.append(SubgraphMatcher.match)
                SubgraphMatcher.match = _noting(SubgraphMatcher.match)  # type: ignore[method-assign]
            _active.append(self)

    def stop(self) -> None:
        """Note no more; the last one takes the wrapper out."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    SubgraphMatcher.match = _original.pop()  # type: ignore[method-assign]

    def explain(self, gm: Any) -> list[str]:
        """One sentence for each pattern that was not found in `gm` since the last call."""
        from fxlab.passes.explain import explain_mismatch

        found, self.fruitless = self.fruitless, []
        told: dict[str, None] = {}
        for matcher, graph in found[:LIMIT]:
            if graph is not gm.graph:
                continue
            normalize = bool(getattr(matcher, "normalize", False))
            with self.recorder.quiet():
                answer = explain_mismatch(matcher.pattern, gm, normalize=normalize)
            if not answer.matches:
                told[scrubbed(sentence(matcher.pattern, answer))] = None
        return list(told)


def sentence(pattern: Any, answer: Any) -> str:
    """`the pattern add, relu was not found: 1 of 2 operations; at relu_1: ...; try ...`."""
    edges = ("placeholder", "output")
    names = named([node.name for node in pattern.nodes if node.op not in edges])
    text = (
        f"the pattern {names} was not found: {len(answer.matched)} of {answer.operations} matched"
    )
    where = getattr(answer.node, "name", "")
    text += f"; stopped{f' at {short(where, 40)}' if where else ''}: {answer.reason}"
    return f"{text}; try {answer.hint}" if answer.hint else text


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def match(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, graph, *args, **kwargs)
        if not found:
            for listener in _active:
                recorder = listener.recorder
                mine = threading.get_ident() == recorder.thread and not recorder.paused
                if mine and graph in recorder.watched:
                    listener.fruitless.append((self, graph))
        return found

    return match
