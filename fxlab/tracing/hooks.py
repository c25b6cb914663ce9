"""Is it the program that asks, or the tracer that traces it?

A tracer of one's own (its hooks are the paper's way to customise capture, section 4.1) looks at the
Proxies that it is given and may run a module to see what it gives. What its hooks find out is fixed
in no graph, and what they run is no part of the program. (`Tracer._hooks` is another list: of the
frames between a line of the program and the Node that it makes.)
"""

from __future__ import annotations

import functools
import types
from typing import Any

_HOOKS = ("create_proxy", "create_node", "create_arg", "proxy", "to_bool", "iter", "keys",
          "getattr", "is_leaf_module", "path_of_module")  # fmt: skip


def in_a_hook(tracer: Any, frame: types.FrameType | None) -> bool:
    """Say whether a frame runs inside one of the tracer's hooks; forwards run in call_module."""
    hooks = _codes(type(tracer))
    while frame is not None and frame.f_code not in hooks:
        frame = frame.f_back
    return frame is not None


@functools.cache
def _codes(kind: type) -> frozenset[Any]:
    found = (vars(one).get(name) for one in kind.__mro__ for name in _HOOKS)
    return frozenset(getattr(hook, "__code__", None) for hook in found)
