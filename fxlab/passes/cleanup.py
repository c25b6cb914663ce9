"""Three clean-ups: nodes that nobody reads, nodes that say the same, nodes known in advance.

A graph without control flow makes each a single walk (section 5.5). The walk is the easy part.
What decides is what an operation may do besides returning its value: write into its input, draw a
random number, stand inside a ``with`` block. ``fxlab.core.purity`` says what has an effect,
``alias.py`` what shares memory, and each pass reports what it left alone for which of the two.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node, map_arg
from fxlab.core.purity import effect
from fxlab.passes.alias import Memory
from fxlab.passes.base import as_pass, regions, report
from fxlab.passes.shape_prop import need_graph, shape_text
from fxlab.passes.unused import erase_unread

__all__ = ["const_fold", "cse", "dce"]

# Memory as it was found: no two calls promise the same numbers.
_UNINITIALIZED = frozenset(("empty", "empty_like", "empty_strided", "new_empty"))
_FEW = 16
_LITERALS = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


@as_pass
def dce(gm: GraphModule) -> GraphModule:
    """Edit ``gm`` in place: erase nodes that nobody reads and that have no effect; return ``gm``.

    One walk from the end is enough: when a node is reached, all its readers have been decided.

    Args:
        gm: The program. No shapes are needed.

    Example:
        >>> import fxlab
        >>> def f(x):
        ...     unused = torch.relu(x) + 1
        ...     return x * 2
        >>> print(dce(fxlab.symbolic_trace(f)).meta["reports"]["dce"])
        dce: 2 changed, 0 left alone
          erased add: nothing read it
          erased relu: nothing read it
    """
    need_graph(gm)
    changed, kept = [], []

    def keep(node: Node) -> bool:
        reason = effect(node, gm)
        if reason is None:
            changed.append(f"erased {node.name}: nothing read it")
        else:
            kept.append(f"{node.name} kept: {reason}")
        return reason is not None

    erase_unread(gm.graph, keep)
    return _finish(gm, "dce", changed, kept)


@as_pass
def cse(gm: GraphModule) -> GraphModule:
    """Edit ``gm`` in place: let equal computations be made once; return ``gm``.

    Two nodes are equal when opcode, target and arguments are (constants by type and value), both
    are pure, no effect and no border of a ``with`` block stands between them, and nobody writes
    into the value. A program that returned two equal tensors then returns one twice.

    Args:
        gm: The program. No shapes are needed.

    Example:
        >>> import fxlab
        >>> gm = cse(fxlab.symbolic_trace(lambda x: torch.relu(x) + torch.relu(x)))
        >>> [node.name for node in gm.graph.nodes][1:]
        ['relu', 'add', 'output']
    """
    need_graph(gm)
    memory = Memory(gm)
    region = regions(gm)
    seen: dict[Any, Node] = {}
    changed, kept = [], []
    effects_before = 0
    same: dict[Node, Node] = {}  # repeated nodes that a node of many inputs still reads
    for node in list(gm.graph.nodes):
        if same and any(i in same for i in node.all_input_nodes):
            args, kwargs = node.args, node.kwargs
            node.args, node.kwargs = (map_arg(a, lambda n: same.get(n, n)) for a in (args, kwargs))
        if node.op in ("placeholder", "output"):
            continue
        reason = effect(node, gm)
        if reason and effect(node, gm, impure_random=False):
            effects_before += 1  # what was read before may have been written to since
        key = (region[node], effects_before, *fingerprint(node))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if not reason and node.op != "get_attr":
            reason = _unequal_for_memory(first, node, memory)
        if reason:
            kept.append(f"{node.name} kept beside {first.name}: {reason}")
            continue
        # Each rerouting writes a reader's arguments anew: those of a reader with many, only once.
        node.replace_all_uses_with(first, lambda user: len(user._input_nodes) <= _FEW)
        changed.append(f"{node.name} was {first.name} again")
        if node.users:
            same[node] = first
        else:
            gm.graph.erase_node(node)
    for node in reversed(same):
        gm.graph.erase_node(node)
    return _finish(gm, "cse", changed, kept)


def _unequal_for_memory(first: Node, node: Node, memory: Memory) -> str | None:
    if first in memory.written or node in memory.written:
        return "one of them may be written to in place, so each needs memory of its own"
    if getattr(node.target, "__name__", node.target) in _UNINITIALIZED:
        return "its memory is not initialized"
    return None


def fingerprint(node: Node) -> tuple[Any, ...]:
    """Return a hashable text of what ``node`` computes: equal for two nodes that do the same.

    Constants count by type and value (1, 1.0 and True are three), objects by identity.
    """
    tokens: list[Any] = [node.op, _constant(node.target)]
    stack: list[Any] = [dict(sorted(node.kwargs.items())), node.args]
    while stack:
        value = stack.pop()
        if isinstance(value, Node):
            tokens.append(value)
        elif isinstance(value, (tuple, list)):
            tokens.append((type(value), len(value)))
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            tokens.append((dict, tuple(map(_constant, value))))
            stack.extend(reversed(value.values()))
        elif isinstance(value, slice):
            tokens.append(slice)
            stack.extend((value.step, value.stop, value.start))
        else:
            tokens.append(_constant(value))
    return tuple(tokens)


def _constant(value: Any) -> Any:
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # 0.0 == -0.0, and nan != nan; as text they are right
    if isinstance(value, (int, str, bytes, type(None), torch.dtype, torch.device, type)):
        return type(value), value
    return type(value), id(value)


@as_pass
def const_fold(gm: GraphModule, *, max_bytes: int = 64 << 20) -> GraphModule:
    """Edit ``gm`` in place: compute what depends on no input, once, now; return ``gm``.

    A tensor found this way becomes a buffer ``_folded_k``; a number goes into its readers'
    arguments. Computed from a parameter, it no longer follows later changes of the parameter: in
    train mode, parameters that need a gradient are therefore no constants.

    Args:
        gm: The module.
        max_bytes: A tensor larger than this is left to be computed, and the report says so.

    Example:
        >>> import fxlab
        >>> class Tied(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.randn(2, 3))
        ...     def forward(self, x):
        ...         return x @ self.w.t()
        >>> print(const_fold(fxlab.symbolic_trace(Tied().eval())).meta["reports"]["const_fold"])
        const_fold: 1 changed, 0 left alone
          t folded: f32[3, 2]
    """
    need_graph(gm)
    constant, kept = _constants(gm)
    changed = []
    values = _Values(gm)
    names = (f"_folded_{k}" for k in itertools.count())
    for node in list(gm.graph.nodes):
        readers = [user for user in node.users if user not in constant]
        if node not in constant or node.op == "get_attr" or not readers:
            continue
        try:
            value = values.of(node)
        except Exception as error:
            kept.append(f"{node.name} kept: it fails when computed now: {error}")
            continue
        if isinstance(value, torch.Tensor):
            if value.nbytes > max_bytes:
                kept.append(f"{node.name} kept: {shape_text(value)} would add {value.nbytes} bytes")
                continue
            name = next(n for n in names if not hasattr(gm, n))
            gm.register_buffer(name, value.detach(), persistent=True)
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.get_attr(name))
            changed.append(f"{node.name} folded: {shape_text(value)}")
        elif isinstance(value, _LITERALS):
            for reader in readers:
                swap = {node: value}
                reader.args = map_arg(reader.args, lambda n, swap=swap: swap.get(n, n))
                reader.kwargs = map_arg(reader.kwargs, lambda n, swap=swap: swap.get(n, n))
            changed.append(f"{node.name} folded: {value!r}")
        else:
            kept.append(f"{node.name} kept: a {type(value).__name__} cannot be stored")
    for node in reversed(list(gm.graph.nodes)):
        if node in constant and not node.users:
            gm.graph.erase_node(node)
    return _finish(gm, "const_fold", changed, kept)


def _constants(gm: GraphModule) -> tuple[set[Node], list[str]]:
    """Return the nodes whose value depends on no input, and why some others are not among them."""
    memory = Memory(gm)
    region = regions(gm)
    constant: set[Node] = set()
    kept = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            reason = _not_fixed(node, gm, memory)
            if reason is None:
                constant.add(node)
        elif node.op in ("placeholder", "output") or not constant.issuperset(node.all_input_nodes):
            continue
        else:
            reason = effect(node, gm) or _not_foldable(node, memory, region)
            if reason is None:
                constant.add(node)
            else:
                kept.append(f"{node.name} kept: {reason}")
    return constant, kept


def _not_fixed(node: Node, gm: GraphModule, memory: Memory) -> str | None:
    owner, _, name = node.target.rpartition(".")
    value = getattr(gm.get_submodule(owner), name, None)
    if not isinstance(value, torch.Tensor):
        return "train() and eval() change it" if name == "training" else "it is no tensor"
    if node in memory.written:
        return "the program writes into it"
    trained = gm.training and value.requires_grad
    return "it is being trained" if trained else None


def _not_foldable(node: Node, memory: Memory, region: dict[Node, int]) -> str | None:
    if node in memory.written:
        return "it may be written to in place"
    if node in memory.returned:
        return "it is returned, and each call must return memory of its own"
    if region[node]:
        return "a with block begins before it, and may change what it computes"
    if getattr(node.target, "__name__", node.target) in _UNINITIALIZED:
        return "its memory is not initialized"
    return None


class _Values(Interpreter):
    """Compute constant nodes on demand, each once."""

    def of(self, node: Node) -> Any:
        stack = [node]
        with torch.no_grad():
            while stack:
                current = stack[-1]
                missing = [i for i in current.all_input_nodes if i not in self.env]
                if missing:
                    stack.extend(missing)
                    continue
                if current not in self.env:
                    self.env[current] = self.run_node(current)
                stack.pop()
        return self.env[node]


def _finish(gm: GraphModule, name: str, changed: list[str], kept: list[str]) -> GraphModule:
    gm.graph.lint()
    gm.recompile()
    report(gm, name, changed, kept)
    return gm
