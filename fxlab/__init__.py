"""fxlab: program capture and transformation, made visible.

The whole way in one example: capture a function, look at its IR, read the code that is generated
from it, change it, run it.

>>> import torch, fxlab
>>> def program(x):
...     return torch.relu(x).neg()
>>> gm = fxlab.symbolic_trace(program)
>>> print(gm.graph)
graph():
    %x : [num_users=1] = placeholder[target=x]
    %relu : [num_users=1] = call_function[target=torch.relu](args = (%x,), kwargs = {})
    %neg : [num_users=1] = call_method[target=neg](args = (%relu,), kwargs = {})
    return neg
>>> for node in gm.graph.nodes:
...     if node.target is torch.relu:
...         node.target = torch.nn.functional.gelu
>>> print(gm.code.strip())
def forward(self, x):
    relu = torch._C._nn.gelu(x);  x = None
    neg = relu.neg();  relu = None
    return neg
>>> gm(torch.zeros(2))
tensor([-0., -0.])

Capture is in `fxlab.core.tracer`, the six opcodes in `fxlab.core.node`, the graph and its edits in
`fxlab.core.graph`, Python again in `fxlab.core.codegen`. Transforms are in `fxlab.passes`;
`fxlab.explore(model, passes=[...])` shows every edit that they make.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import display, passes  # noqa: F401 - display adds methods to the core's classes
from .aliases import install as _install_aliases
from .core.codegen import CodeGen
from .core.errors import (
    CodegenError,
    EditLimitError,
    ExerciseError,
    FxlabError,
    LintError,
    LoweringError,
    RewriteError,
    TimelineError,
    TraceError,
    TraceWarning,
)
from .core.graph import Graph
from .core.graph_module import GraphModule
from .core.interpreter import Interpreter, Transformer
from .core.node import Node, map_aggregate, map_arg
from .core.proxy import Attribute, ParameterProxy, Proxy
from .core.purity import has_side_effect
from .core.tracer import (
    PH,
    GraphAppendingTracer,
    Tracer,
    TracerBase,
    wrap,
)
from .passes.explain import explain_mismatch
from .passes.matcher import SubgraphMatcher
from .passes.rewriter import replace_pattern, replace_pattern_with_filters
from .tracing import ProxyableClassMeta, symbolic_trace, wrapped

if TYPE_CHECKING:  # these come when they are first used: `_LATER`
    from .explorer import Timeline, explore
    from .explorer.playground import Playground
    from .explorer.record import record
    from .explorer.shrink import shrink
    from .explorer.widget import Explorer

__version__ = "0.1.0"
__all__ = [
    "PH", "Attribute", "CodeGen", "CodegenError", "EditLimitError", "ExerciseError", "Explorer",
    "FxlabError", "Graph", "GraphAppendingTracer", "GraphModule", "Interpreter", "LintError",
    "LoweringError", "Node", "ParameterProxy", "Playground", "Proxy", "ProxyableClassMeta",
    "RewriteError", "SubgraphMatcher", "Timeline", "TimelineError", "TraceError", "TraceWarning",
    "Tracer", "TracerBase", "Transformer", "explain_mismatch", "explore", "has_side_effect",
    "map_aggregate", "map_arg", "passes", "record", "replace_pattern",
    "replace_pattern_with_filters", "shrink", "symbolic_trace", "wrap", "wrapped",
]  # fmt: skip

_LATER = {
    "record": "fxlab.explorer.record", "explore": "fxlab.explorer", "Timeline": "fxlab.explorer",
    "shrink": "fxlab.explorer.shrink", "Explorer": "fxlab.explorer.widget",
    "Playground": "fxlab.explorer.playground",
}  # fmt: skip
_PACKAGES = ("backends", "explorer", "interop", "models", "paper", "teach")


def __getattr__(name: str) -> Any:
    """Import what needs more than torch when it is first used."""
    if name in _LATER:
        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'fxlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those that are imported later too."""
    return sorted({*globals(), *__all__, *_PACKAGES})


_install_aliases(__name__)
