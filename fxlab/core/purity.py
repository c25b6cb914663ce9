"""Which operations can be erased, repeated or moved without anybody noticing?

The one table of effects, asked by dead-code elimination, common-subexpression elimination, constant
folding, scheduling and fusion alike. The paper leaves mutation undefined (section 5.6); here an
operation is pure only if the table says so, and every "no" comes with its reason, for reports.
"""

# torch has no types for much of what the table names.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.amp import autocast_mode

from .graph import Graph, _enter_region, _exit_region
from .node import Node, lookup, target_text

_F = TypeVar("_F", bound=Callable[..., Any])

_EFFECTS: dict[str, tuple[Any, ...]] = {
    "opens or closes a region": (_enter_region, _exit_region, autocast_mode._enter_autocast,
                                 autocast_mode._exit_autocast),
    "writes into its first argument": (operator.setitem, operator.delitem),
    "talks to the world outside": (print, input, open, exec, eval, torch.save),
    "changes an object": (setattr, delattr, next),
    "checks a promise at run time": (torch._assert, torch._assert_async),  # pyright: ignore
    "sets a global switch": (torch.manual_seed, torch.seed, torch._C._set_grad_enabled,
                             torch.use_deterministic_algorithms),
}  # fmt: skip
_side_effectful_functions = {fn: reason for reason, fns in _EFFECTS.items() for fn in fns}
_registered: set[Any] = set()
_torchs_registry: Any = lookup(torch, "fx.node._side_effectful_functions", ())
_told: Any = lookup(torch, "_library.utils.is_impure", None)
_pure: set[Any] = set()
_INPLACE_OPERATORS = {getattr(operator, name) for name in (
    "iadd iand iconcat ifloordiv ilshift imod imul imatmul ior ipow irshift isub itruediv ixor"
).split()}  # fmt: skip
_INPLACE_NAMES = {"__setitem__", "__delitem__", *(f"__{f.__name__}__" for f in _INPLACE_OPERATORS)}
_READS = {*dir(tuple), *dir(frozenset), *dir(types.MappingProxyType), *dir(str), *dir(int)}
_CHANGES = frozenset[str]().union(*map(dir, (list, set, dict))) - _READS - {"add"} | frozenset((
    "write send add_module register_hook register_post_accumulate_grad_hook backward retain_grad "
    "__setattr__ __delattr__ share_memory_").split())  # fmt: skip
_RANDOM = frozenset((
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial "
    "poisson binomial rrelu gumbel_softmax").split())  # fmt: skip
_SWITCHES = {"scaled_dot_product_attention": "dropout_p"} | dict.fromkeys(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "
    "rrelu fractional_max_pool2d fractional_max_pool3d".split(), "training")  # fmt: skip
"""Functions that draw random numbers -> the parameter that switches that off."""
_PURE_MODULES = frozenset("torch _operator operator math builtins itertools functools collections "
                          "numpy fxlab typing enum dataclasses".split())  # fmt: skip


def has_side_effect(fn: _F) -> _F:
    """Say that a function has an effect, so that no pass erases its calls. Usable as decorator.

    Args:
        fn: the function; it is returned as it is.
    """
    _registered.add(fn)
    _pure.discard(fn)
    return fn


def pure(fn: _F) -> _F:
    """Say that a function or module class of yours has no effect. Usable as decorator."""
    _pure.add(fn)
    _registered.discard(fn)
    return fn


def effect(node: Node, gm: Any = None, *, impure_random: bool = True) -> str | None:
    """Return why erasing or repeating a Node could be noticed, or None if it is pure.

    Args:
        node: the Node in question.
        gm: the module in which targets are looked up; by default the graph's owner.
        impure_random: whether drawing random numbers (which moves the random state) counts.

    >>> import fxlab
    >>> g = fxlab.symbolic_trace(lambda x: x.add_(1)).graph
    >>> effect(g.find_nodes(op="call_method")[0])
    'add_ writes into its input in place'
    """
    if node._op == "call_function":
        return _function_effect(node, impure_random)
    if node._op == "call_method":
        return _method_effect(node, impure_random)
    if node._op == "call_module":
        return _module_effect(node, gm, impure_random)
    return None if node._op == "get_attr" else "it is part of the program's interface"


def _function_effect(node: Node, impure_random: bool) -> str | None:
    target: Any = node._target
    name = target_text(target)
    try:
        fixed, switch = _classify(target)
    except TypeError:  # it has no hash
        return f"{name} is not known to be pure"
    if target in _registered or (fixed is None and target in _torchs_registry):
        return f"{name} was registered with has_side_effect"
    if target in _pure or fixed is not None:
        return None if target in _pure else fixed
    drawing = switch is not None and (not switch or _argument(node, switch) not in (False, None))
    if drawing and impure_random:
        return f"{name} draws random numbers"
    if node._kwargs.get("out") is not None:
        return "writes into its out= argument"
    return _writes(functools.partial(_argument, node))


def _writes(get: Callable[[str], Any]) -> str | None:
    """Return what a function of torch, or a module, writes into by what its parameters say."""
    if get("inplace") is True:
        return "writes into its input in place (inplace=True)"
    if get("max_norm") is not None:
        return "renormalises its table (max_norm)"
    training = get("training") or get("use_input_stats")  # None where there is no such parameter
    if get("running_mean") is not None and training is not None and training is not False:
        return "updates running statistics (train mode)"
    return None


@functools.cache
def _classify(target: Any) -> tuple[str | None, str | None]:
    """Return the effect that a function has whatever its arguments, and if it draws random numbers.

    The latter is the name of the parameter that can switch it off, "" if none can, else None.
    """
    name, short = target_text(target), getattr(target, "__name__", "") or ""
    module = (getattr(target, "__module__", None) or name).split(".")[0]
    if target in _side_effectful_functions:
        return _side_effectful_functions[target], None
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        if isinstance(target, OpOverloadPacket):  # its overloads agree, but for those with out=
            names: list[str] = target.overloads()
            target = getattr(target, "default" if "default" in names else names[0])  # pyright: ignore
        if target._schema.is_mutable:
            return f"{name} writes into an argument (its schema says so)", None
        if not target._schema.returns or (_told and _told(target, impure_random=False)):
            return f"{name} is called for its effect (it returns nothing, or torch says so)", None
        return None, "" if torch.Tag.nondeterministic_seeded in target.tags else None
    if target in _INPLACE_OPERATORS:
        return f"{name} writes into its first argument if that is a tensor or list", None
    if module not in _PURE_MODULES:
        return f"{name} is user code that is not known to be pure", None
    if short.endswith("_") and not short.endswith("__") and module == "torch":
        return f"{short} writes into its input in place", None
    if short.startswith(("set_", "_set_")):
        return f"{short} sets something at run time", None
    switch = _SWITCHES.get(short, "" if short in _RANDOM else None)
    return None, switch if module == "torch" else None


_BUILTINS = {"batch_norm": "input weight bias running_mean running_var training",
             "rrelu": "input lower upper training",
             "scaled_dot_product_attention": "query key value attn_mask dropout_p"}  # fmt: skip
"""Parameters of functions of torch that have no signature for Python; else those of dropout."""


@functools.cache
def _parameters(target: Any) -> dict[str, tuple[int, Any]]:
    """Return the parameters of a function: name -> (position, default)."""
    try:
        found = [(p.name, p.default) for p in inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):
        names = _BUILTINS.get(getattr(target, "__name__", ""), "input p training").split()
        found = [(name, None) for name in names]
    return {name: (i, default) for i, (name, default) in enumerate(found)}


def _argument(node: Node, name: str) -> Any:
    """Return what a call gives for a parameter, or its default."""
    place, default = _parameters(node._target).get(name, (len(node._args), None))
    return node._kwargs.get(name, node._args[place] if place < len(node._args) else default)


def _method_effect(node: Node, impure_random: bool) -> str | None:
    name = str(node._target)
    of_tensor, in_place = hasattr(torch.Tensor, name), name[-1:] == "_" and name[-2:] != "__"
    if (of_tensor and in_place) or name in _INPLACE_NAMES:
        return f"{name} writes into its input in place"
    if name in _CHANGES:
        return f"{name} changes its object"
    if not of_tensor:
        known = name in _READS or name.startswith("__")
        return None if known else f"the method {name} is not known to be pure"
    if impure_random and name in _RANDOM:
        return f"{name} draws random numbers"
    return "writes into its out= argument" if node._kwargs.get("out") is not None else None


def _module_effect(node: Node, gm: Any, impure_random: bool) -> str | None:
    owner = gm if gm is not None else node.graph.owning_module
    module: Any = lookup(owner, node._target, None)
    if module is None:
        return f"its module {node._target!r} is not known here"
    for part in module.modules():
        reason = _one_module(part, impure_random)
        if reason is not None:
            return reason if part is module else f"{type(part).__name__} inside it: {reason}"
    return None


def _one_module(module: torch.nn.Module, impure_random: bool) -> str | None:
    kind = type(module)
    if getattr(module, "_is_impure", False):
        return "it is marked _is_impure"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks"
    if kind in _pure:
        return None
    graph = getattr(module, "graph", None)
    if isinstance(graph, Graph):
        for inner in graph.nodes:
            plain = inner._op in ("placeholder", "output", "call_module")
            reason = None if plain else effect(inner, module, impure_random=impure_random)
            if reason is not None:
                return f"{inner._name} inside it: {reason}"
        return None
    if not kind.__module__.startswith(("torch.nn.", "torch.ao.", "fxlab.")):
        return f"{kind.__name__} is user code that is not known to be pure"
    dropout = getattr(module, "dropout", 0)
    draws = isinstance(module, _RANDOM_MODULES) or (isinstance(dropout, float) and dropout)
    if draws and module.training and impure_random:
        return "draws random numbers (train mode)"
    return _writes(lambda name: getattr(module, name, None))


_RANDOM_MODULES = (torch.nn.modules.dropout._DropoutNd, torch.nn.RReLU,
                   torch.nn.FractionalMaxPool2d, torch.nn.FractionalMaxPool3d)  # fmt: skip
