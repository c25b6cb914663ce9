"""Tracing with care: what a trace may know, what it loses, and whether its result is right.

`fxlab.core.tracer` records what a program does. Around it stands what capture itself (paper,
section 4.1) does without: `known.py` answers what Python insists on knowing from parameters and
example inputs, `advice.py` tells the ways out when it can't, `switches.py` gets regions, global
switches and the training flag into the graph, `factories.py` the tensors that a program makes for
itself, `losses.py` says what did not get there and puts the user's model back (with `keeping.py`,
`outside.py`, `asking.py`, and `questions.py`, which reads code), `leaves.py` and `pytrees.py` keep
calls and structures whole, `stars.py` calls what has *args and **kwargs, `check.py` compares the
result with the original. This import hangs them into every trace.
"""

from __future__ import annotations

from . import advice, factories, known, leaves, losses, pytrees, stars, switches
from .check import symbolic_trace
from .leaves import ProxyableClassMeta, wrapped

__all__ = ["ProxyableClassMeta", "symbolic_trace", "wrapped"]

for _part in (advice, factories, known, leaves, losses, pytrees, stars, switches):
    _part.install()
