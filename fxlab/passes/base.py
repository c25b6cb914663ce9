"""What makes a function a pass, and what a pass leaves behind.

The paper's case studies (section 6) are passes: functions that take a GraphModule and edit it, or
build a new one. This file holds the little that they share: the decorator that signs the nodes a
pass makes, the report of what it changed *and what it left alone and why*, and torch.fx's
``PassBase`` and ``PassResult``. ``manager.py`` runs a list of passes and checks each.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxlab.core.graph import _enter_region, _exit_region, _makers
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, lookup
from fxlab.core.purity import effect

# What opens or closes a region: the core's own pairs, and what foreign graphs carry.
REGION_BORDERS = frozenset(
    (
        _enter_region,
        _exit_region,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch._C._set_grad_enabled,
    )
)

__all__ = [
    "PassBase",
    "PassResult",
    "Report",
    "as_pass",
    "called_as_a_whole",
    "copy_sharing_tensors",
    "copy_without_weights",
    "is_read",
    "kind",
    "made_by",
    "module_calls",
    "pass_name",
    "regions",
    "report",
    "undisturbed",
]


@contextlib.contextmanager
def made_by(name: str) -> Iterator[None]:
    """Mark the Nodes that this thread creates meanwhile with `meta["made_by"] = name`."""
    outer, _makers.name = _makers.name, name
    try:
        yield
    finally:
        _makers.name = outer


class PassResult(NamedTuple):
    """What a pass may return.

    Attributes:
        graph_module: The module to go on with.
        modified: Whether anything changed.
    """

    graph_module: nn.Module
    modified: bool


class PassBase(ABC):
    """A pass as a class, for passes that carry settings or check conditions.

    Subclasses write ``call``. Calling the object runs ``requires``, ``call``, ``ensures``.
    """

    def __call__(self, graph_module: GraphModule) -> PassResult | None:
        """Check the conditions, run the pass, check the promises; return what ``call`` returns."""
        self.requires(graph_module)
        with made_by(type(self).__name__):
            result = self.call(graph_module)
        after: Any = graph_module if result is None else result.graph_module
        self.ensures(after)
        return result

    @abstractmethod
    def call(self, graph_module: GraphModule) -> PassResult | None:
        """Transform ``graph_module``; return a PassResult, or None when edited in place."""

    def requires(self, graph_module: GraphModule) -> None:  # noqa: B027  (a hook, empty by default)
        """Raise if ``graph_module`` is not what the pass can work on."""

    def ensures(self, graph_module: GraphModule) -> None:  # noqa: B027  (a hook, empty by default)
        """Raise if ``graph_module`` is not what the pass promises."""


class Report(dict):
    """What one run of a pass did: ``changed`` and ``kept`` are lists of sentences.

    A dict that holds text and numbers only, so it goes to JSON as it is; printing it gives a few
    lines. Passes may add facts of their own: ``report["folded"]``.

    Example:
        >>> print(Report(name="dce", changed=["erased relu"], kept=["add_ kept: in-place"]))
        dce: 1 changed, 1 left alone
          erased relu
          left alone: add_ kept: in-place
    """

    @property
    def changed(self) -> list[str]:
        """One sentence for each thing the pass changed."""
        return self["changed"]

    @property
    def kept(self) -> list[str]:
        """One sentence for each thing it looked at and left alone, with the reason."""
        return self["kept"]

    def __str__(self) -> str:
        head = f"{self['name']}: {len(self.changed)} changed, {len(self.kept)} left alone"
        facts = [
            f"{k}: {f'{v:.4g}' if isinstance(v, float) else v}"
            for k, v in self.items()
            if k not in ("name", "changed", "kept") and v
        ]
        kept = [f"left alone: {sentence}" for sentence in self.kept]
        return "\n  ".join([head, *facts, *self.changed, *kept])


def report(
    gm: GraphModule,
    name: str,
    changed: Iterable[str] = (),
    kept: Iterable[str] = (),
    **facts: Any,
) -> Report:
    """Store the report of pass ``name`` in ``gm.meta["reports"][name]`` and return it.

    Args:
        gm: The module that the pass edited, or the new one that it returns.
        name: The pass's name.
        changed: One sentence for each change.
        kept: One sentence for each thing left alone: "bn2 kept: conv2 has 2 users".
        **facts: More, as text, numbers, lists and dicts.
    """
    result = Report(name=name, changed=list(changed), kept=list(kept), **facts)
    gm.meta.setdefault("reports", {})[name] = result
    return result


def as_pass(function: Callable | None = None, *, min_sqnr_db: float | None = None) -> Callable:
    """Mark ``function(gm, ...)`` as a pass: nodes it makes carry ``meta["made_by"]``.

    Args:
        function: The pass. It edits its first argument in place or returns another module.
        min_sqnr_db: For passes that change numbers on purpose (mixed precision, quantization):
            the signal-to-noise ratio in decibel that PassManager asks of the output instead of
            equality.

    Example:
        >>> @as_pass
        ... def rename_nothing(gm):
        ...     "Edit in place: nothing."
        >>> rename_nothing.is_pass
        True
    """
    if function is None:
        return functools.partial(as_pass, min_sqnr_db=min_sqnr_db)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with made_by(function.__name__):
            return function(*args, **kwargs)

    run.is_pass = True  # type: ignore[attr-defined]
    run.min_sqnr_db = min_sqnr_db  # type: ignore[attr-defined]
    return run


def pass_name(pass_: Callable) -> str:
    """Return what to call ``pass_``: a function's name, a partial's function's, or the class's."""
    while isinstance(pass_, functools.partial):
        pass_ = pass_.func
    return getattr(pass_, "__name__", None) or type(pass_).__name__


def copy_sharing_tensors(
    gm: GraphModule, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> GraphModule:
    """Return a deep copy of ``gm`` that shares its tensors; ``gm`` is left as it is.

    Graph and submodules are new objects, so a pass may edit them at will; parameters, buffers and
    tensor constants are the same ones, so the copy costs little memory.

    Args:
        gm: The module to copy.
        convert: Puts another tensor in the place of each: ``torch.Tensor.double`` gives a
            float64 copy.
    """
    memo: dict[int, Any] = {}
    for module in gm.modules():
        plain = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        tensors = [*module._parameters.values(), *module._buffers.values(), *plain]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _converted(tensor, convert) if convert else tensor
    return copy.deepcopy(gm, memo)


def _converted(tensor: torch.Tensor, convert: Callable) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    new = convert(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


@contextlib.contextmanager
def undisturbed(gm: GraphModule, inputs: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Give inputs on which ``gm`` may run to be looked at; afterwards its state is as before.

    A program without effects is given ``inputs`` themselves. One that writes in place gets clones,
    and the parameters, buffers and plain tensors that it may write to are put back at the end.
    What a module of the user's changes beyond tensors (a counter) is not undone.

    Args:
        gm: The program.
        inputs: Its arguments; tensors in tuples, lists and dicts are cloned too.

    Example:
        >>> import fxlab
        >>> x = torch.zeros(2)
        >>> gm = fxlab.symbolic_trace(lambda x: x.add_(1))
        >>> with undisturbed(gm, (x,)) as given:
        ...     gm(*given)
        tensor([1., 1.])
        >>> x
        tensor([0., 0.])
    """
    calls = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    impure = [n for n in calls if effect(n, gm, impure_random=False)]
    if not impure:
        yield tuple(inputs)
        return
    clones: dict[int, torch.Tensor] = {}

    def clone(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in clones:  # one tensor given twice stays one
            new = value.detach().clone()
            clones[id(value)] = new.requires_grad_(value.requires_grad)
        return clones[id(value)]

    given = pytree.tree_map_only(torch.Tensor, clone, tuple(inputs))
    state = _tensors_within_reach(gm, impure)
    # What is packed for a kernel (another layout than strided) is never written in place.
    saved = {id(t): (t, t.detach().clone()) for _, _, t in state if t.layout is torch.strided}
    try:
        yield given
    finally:
        for holder, name, tensor in state:
            holder[name] = tensor
        for tensor, before in saved.values():
            # A version counter misses what is written through .data, so values are compared.
            if not tensor.is_meta and not torch.equal(tensor, before):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(before)


def _tensors_within_reach(
    gm: GraphModule, impure: Iterable[Node]
) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return the tensors that get_attr nodes read or impure modules own, and where each is."""
    modules: list[nn.Module] = []
    read: dict[nn.Module, set[str]] = {}
    for node in (*impure, *gm.graph.find_nodes(op="get_attr")):
        if node.op not in ("call_module", "get_attr"):
            continue
        owner, _, name = node.target.rpartition(".")
        try:
            holder = lookup(gm, owner) if owner else gm
            found = getattr(holder, name)
        except AttributeError:
            continue  # running it will say so, and where
        if isinstance(found, nn.Module):
            modules.append(found)
        elif isinstance(holder, nn.Module):
            read.setdefault(holder, set()).add(name)
    # None: all tensors of that module.
    names: dict[nn.Module, set[str] | None] = dict(read)
    names.update((part, None) for module in modules for part in module.modules())
    return [
        (holder, name, value)
        for module, wanted in names.items()
        for holder in (module._parameters, module._buffers, vars(module))
        for name, value in holder.items()
        if isinstance(value, torch.Tensor) and (wanted is None or name in wanted)
    ]


def module_calls(gm: GraphModule) -> dict[str, list[Node]]:
    """Return the nodes that call each submodule path, in graph order."""
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
    return calls


def regions(gm: GraphModule) -> dict[Node, int]:
    """Return a number for each node: equal for two nodes when no border of a region is between.

    A region is a ``with`` block that was captured (no_grad, autocast, ...). What computes inside
    one may mean something else outside, so no pass merges or moves across its border.
    """
    numbers, current = {}, 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in REGION_BORDERS:
            current += 1
        numbers[node] = current
    return numbers


def kind(node: Node, gm: nn.Module) -> str:
    """Return what ``node`` runs, in a word: a module's class, a function's or method's name."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    if node.op == "call_function":
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target) if node.op == "call_method" else node.op


def copy_without_weights(module: nn.Module) -> Any:
    """Return a shallow copy with dictionaries of its own, so that new weights stay in the copy."""
    new = copy.copy(module)
    for name, value in list(vars(new).items()):
        if isinstance(value, dict):
            object.__setattr__(new, name, value.copy())
    return new


def called_as_a_whole(path: str, calls: dict[str, list[Node]]) -> str | None:
    """Return the module around ``path`` that the graph also calls, if any: it is not ours."""
    parts = path.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts))]
    return next((p for p in prefixes if p in calls), None)


def is_read(path: str, reads: set[str]) -> bool:
    """Say whether a get_attr node reads ``path`` or something below it."""
    return any(target == path or target.startswith(path + ".") for target in reads)
