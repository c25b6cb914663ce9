"""Which sizes are not known before a program runs?

An engine is built for the sizes of the examples (section 6.4 of the paper). Those that follow the
batch it computes; those that follow the batch only within limits (``x[:4]``), or the numbers in
a tensor (``x[x > 0]``), it cannot know, and what has them stays in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from fxlab.backends.values import External
from fxlab.core.node import Node
from fxlab.core.purity import effect

if TYPE_CHECKING:
    from fxlab.backends.onnx import Emitter

__all__ = ["BY_VALUES", "VARIES", "depend_on_values", "follows_sometimes"]

VARIES = "sizes_vary"  # in the meta of a node whose sizes are not known before it runs: why
BY_VALUES = "its sizes depend on values"


def follows_sometimes(metas: Sequence[Any]) -> bool:
    """Say whether a size was equal for two batches and is not for a third, or an axis goes.

    Args:
        metas: ``meta["tensor_meta"]`` of one node, for each batch.
    """
    if any(hasattr(meta, "dtype") for meta in metas):
        shapes = [tuple(getattr(meta, "shape", ())) for meta in metas]
        if len({len(shape) for shape in shapes}) > 1:
            return True
        columns = list(zip(*shapes, strict=True))
        return any(c[0] == c[1] and (len(set(c)) > 1 or c[0] == 0) for c in columns)
    if all(isinstance(meta, (tuple, list)) for meta in metas):
        same = len({len(meta) for meta in metas}) == 1
        return not same or any(map(follows_sometimes, zip(*metas, strict=True)))
    return False


def depend_on_values(node: Node, emitter: Emitter) -> bool:
    """Say whether what PyTorch will return may have other sizes for other numbers.

    Args:
        node: a node that is left to PyTorch.
        emitter: whose walk has come to it.
    """
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    if node.op == "get_attr" or (shape is not None and len(shape) == 0):
        return False
    if any(value.meta.get(VARIES) == BY_VALUES for value in node.all_input_nodes):
        return True
    if effect(node, emitter.program) is not None:
        return False
    args, kwargs = emitter.fetch_args_kwargs_from_env(node)
    if any(isinstance(leaf, External) for leaf in pytree.tree_leaves((args, kwargs))):
        return False
    target = emitter.fetch_attr(str(node.target)) if node.op == "call_module" else node.target
    try:
        emitter.ctx._run_fake(node.op, target, args, kwargs, "fake")
    except (DynamicOutputShapeException, DataDependentOutputException):
        return True
    except Exception:  # what cannot be asked without numbers
        return False
    return False
