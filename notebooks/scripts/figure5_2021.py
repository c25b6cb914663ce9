"""Print Figure 5's three counts from the versions that the paper's authors probably used.

Needs Python 3.9; in an environment of its own::

    python3.9 -m venv figure5
    figure5/bin/pip install torch==1.10.0 torchvision==0.11.1 "numpy<2"
    figure5/bin/python figure5_2021.py

The counts are printed lines of each IR: 2614, 860, 445. The nodes behind them are 1861, 857, 444.
"""

from __future__ import annotations

import warnings

import torch
import torch.fx
from torch import nn
from torchvision.models import resnet50


class NoLeaves(torch.fx.Tracer):
    """Trace through every module, and answer the checks of batch norm with "nothing wrong"."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Treat no module as a leaf."""
        return False

    def to_bool(self, obj: torch.fx.Proxy) -> bool:
        """Answer no: the only branches on values are checks that raise."""
        return False


def nodes_of(block) -> int:
    """Count the nodes of a TorchScript block, nested blocks included."""
    return sum(1 + sum(nodes_of(inner) for inner in n.blocks()) for n in block.nodes())


def count_script() -> tuple:
    """Return (lines, nodes) of torch.jit.script: _forward_impl, inlined, constants not pooled."""
    method = torch.jit.script(resnet50())._c._get_method("_forward_impl")
    graph = method.graph.copy()
    torch._C._jit_pass_inline(graph)
    return str(graph).count("\n"), nodes_of(graph)


def count_trace() -> tuple:
    """Return (lines, nodes) of torch.jit.trace, the model in train mode."""
    traced = torch.jit.trace(resnet50().train(), torch.randn(1, 3, 224, 224), check_trace=False)
    return str(traced.inlined_graph).count("\n"), nodes_of(traced.inlined_graph)


def count_fx() -> tuple:
    """Return (lines, nodes) of torch.fx without leaves, its dead checks eliminated."""
    graph = NoLeaves().trace(resnet50().eval())
    graph.eliminate_dead_code()
    return len(str(graph).splitlines()), len(graph.nodes)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print("torch", torch.__version__)
    for name, count in (("script", count_script), ("trace", count_trace), ("fx", count_fx)):
        lines, nodes = count()
        print(f"{name:8} {lines:5} lines {nodes:5} nodes")
    default = torch.fx.symbolic_trace(resnet50())
    print(f"fx, default tracer: {len(default.graph.nodes)} nodes")
