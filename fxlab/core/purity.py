"""Which operations can be erased, repeated or moved without anybody noticing?

The one table of effects, asked by dead-code elimination, common-subexpression elimination, constant
folding, scheduling and fusion alike. The paper leaves mutation undefined (section 5.6); here an
operation is pure only if the table says so, and every "no" comes with its reason, for reports.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from .graph import _enter_region, _exit_region
from .node import Node, lookup, target_text

_F = TypeVar("_F", bound=Callable[..., Any])

_side_effectful_functions: dict[Any, str] = {
    **dict.fromkeys((_enter_region, _exit_region), "opens or closes a region"),
    **dict.fromkeys((operator.setitem, operator.delitem), "writes into its first argument"),
    **dict.fromkeys((print, input, open, exec, eval), "talks to the world outside"),
    **dict.fromkeys((setattr, delattr), "changes an object"),
    next: "advances an iterator",
    **dict.fromkeys((torch._assert, torch._assert_async), "checks a promise at run time"),
    **dict.fromkeys((torch.manual_seed, torch.seed), "sets the random state"),
    **dict.fromkeys((torch._C._set_grad_enabled, torch.set_num_threads,
                     torch.set_default_dtype), "sets a global switch"),
    **dict.fromkeys((torch.amp._enter_autocast, torch.amp._exit_autocast),
                    "opens or closes a region"),
    torch.save: "writes a file",
}  # fmt: skip
_torch_effects = frozenset(_side_effectful_functions) - {
    print, input, open, exec, eval, setattr, delattr, next, torch.save,
}  # fmt: skip
_registered: set[Any] = set()
_pure: set[Any] = set()

_INPLACE_OPERATORS = {getattr(operator, name) for name in (
    "iadd iand iconcat ifloordiv ilshift imod imul imatmul ior ipow irshift isub itruediv ixor"
).split()}  # fmt: skip
_CHANGES_CONTAINER = frozenset(
    "append extend insert pop remove clear sort reverse update setdefault popitem discard write "
    "send add_module register_hook register_post_accumulate_grad_hook backward retain_grad "
    "__setitem__ __delitem__ __setattr__ share_memory_".split()
)
_READS_CONTAINER = frozenset(
    "keys values items get copy format join split strip startswith endswith index union numerator "
    "__call__ __getitem__ __len__ __contains__ encode lower upper replace difference tolist "
    "intersection denominator real imag bit_length".split()
)
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial "
    "poisson binomial rrelu gumbel_softmax".split()
)
_RANDOM_IF_TRAINING = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "
    "rrelu fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention".split()
)
_PURE_MODULES = ("torch", "_operator", "operator", "math", "builtins", "itertools", "functools",
                 "collections", "numpy", "fxlab", "typing", "enum", "dataclasses")  # fmt: skip


def has_side_effect(fn: _F) -> _F:
    """Say that a function has an effect, so that no pass erases its calls. Usable as decorator."""
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
    op = node._op
    if op == "call_function":
        return _function_effect(node, impure_random)
    if op == "call_method":
        return _method_effect(node, impure_random)
    if op == "call_module":
        return _module_effect(node, gm, impure_random)
    return None if op == "get_attr" else "it is part of the program's interface"


def _function_effect(node: Node, impure_random: bool) -> str | None:
    target = node._target
    try:
        kind = _kinds.get(target)
    except TypeError:
        return f"{target_text(target)} is not known to be pure"
    if kind is None:
        kind = _kinds[target] = _classify(target)
    fixed, random, training = kind
    if target in _registered:
        return f"{target_text(target)} was registered with has_side_effect"
    if target in _pure:
        return None
    if fixed is not None:
        return fixed
    if random and impure_random and (not training or _is_training(node)):
        return f"{target_text(target)} draws random numbers"
    kwargs = node._kwargs
    if kwargs:
        if kwargs.get("out") is not None:
            return "writes into its out= argument"
        if kwargs.get("inplace") is True:
            return "writes into its input in place (inplace=True)"
    if target in _MAY_WRITE:
        return _MAY_WRITE[target](node)
    return None


def _classify(target: Any) -> tuple[str | None, bool, bool]:
    """Return (effect whatever the arguments, draws random numbers, only when training)."""
    if target in _side_effectful_functions:
        return _side_effectful_functions[target], False, False
    name = target_text(target)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        overload = target if isinstance(target, OpOverload) else getattr(target, "default", None)
        schema = getattr(overload, "_schema", None)
        if schema is not None and schema.is_mutable:
            return f"{name} writes into an argument (its schema says so)", False, False
        random = torch.Tag.nondeterministic_seeded in getattr(overload, "tags", ())
        return None, random, False
    if target in _INPLACE_OPERATORS:
        return f"{name} writes into its first argument if that is a tensor or list", False, False
    short = getattr(target, "__name__", "") or ""
    module = (getattr(target, "__module__", None) or name).split(".")[0]
    if module not in _PURE_MODULES:
        return f"{name} is user code that is not known to be pure", False, False
    if short.endswith("_") and not short.endswith("__") and module == "torch":
        return f"{short} writes into its input in place", False, False
    if short == "_assert_is_none" or short.startswith(("set_", "_set_")):
        return f"{short} checks or sets something at run time", False, False
    training = short in _RANDOM_IF_TRAINING
    return None, module == "torch" and (training or short in _RANDOM), training


_kinds: dict[Any, tuple[str | None, bool, bool]] = {}


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    if name in node._kwargs:
        return node._kwargs[name]
    return node._args[position] if len(node._args) > position else default


def _is_training(node: Node) -> bool:
    """Say whether a random function draws: an unknown (traced) flag counts as yes."""
    name = getattr(node._target, "__name__", "")
    if name == "scaled_dot_product_attention":
        return _argument(node, 4, "dropout_p", 0.0) != 0.0
    position, default = (3, False) if name == "rrelu" else (2, True)
    return _argument(node, position, "training", default) is not False


def _norm_effect(node: Node) -> str | None:
    training = _argument(node, 5, "training", False)
    if _argument(node, 1, "running_mean", None) is None or training is False:
        return None
    return "updates running statistics (training)"


_MAY_WRITE: dict[Any, Callable[[Node], str | None]] = {
    F.batch_norm: _norm_effect,
    torch.batch_norm: _norm_effect,
    F.instance_norm: lambda n: (
        "updates running statistics" if _argument(n, 1, "running_mean", None) is not None
        and _argument(n, 5, "use_input_stats", True) is not False else None
    ),
    F.embedding: lambda n: (
        "renormalises the table (max_norm)" if _argument(n, 3, "max_norm", None) else None
    ),
}  # fmt: skip
for _name, _position in (("relu", 1), ("relu6", 1), ("hardswish", 1), ("silu", 1), ("mish", 1),
                         ("selu", 1), ("elu", 2), ("celu", 2), ("leaky_relu", 2), ("dropout", 3),
                         ("hardtanh", 3), ("threshold", 3), ("hardsigmoid", 1)):  # fmt: skip
    _MAY_WRITE.setdefault(
        getattr(F, _name),
        lambda n, p=_position: (
            "writes into its input in place (inplace=True)"
            if _argument(n, p, "inplace", False) is True else None
        ),
    )  # fmt: skip


def _method_effect(node: Node, impure_random: bool) -> str | None:
    name = str(node._target)
    if name in _CHANGES_CONTAINER:
        return f"{name} changes its object"
    if hasattr(torch.Tensor, name):
        if name.endswith("_") and not name.endswith("__"):
            return f"{name} writes into its input in place"
        if name.startswith("__i") and name[3:-2] in _INPLACE_NAMES:
            return f"{name} writes into its input in place"
        if impure_random and name in _RANDOM:
            return f"{name} draws random numbers"
        return "writes into its out= argument" if node._kwargs.get("out") is not None else None
    if name in _READS_CONTAINER or name.startswith("__"):
        return None
    return f"the method {name} is not known to be pure"


_INPLACE_NAMES = frozenset(fn.__name__[1:] for fn in _INPLACE_OPERATORS)


def _module_effect(node: Node, gm: Any, impure_random: bool) -> str | None:
    owner = gm if gm is not None else node.graph.owning_module
    if owner is None:
        return "its module is not known (the graph belongs to no GraphModule)"
    try:
        module = lookup(owner, str(node._target))
    except AttributeError:
        return f"its module {node._target!r} does not exist"
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
    if hasattr(graph, "_graph_namespace") and hasattr(graph, "owning_module"):
        for inner in graph.nodes:
            reason = None if inner._op in ("placeholder", "output", "call_module") else effect(
                inner, module, impure_random=impure_random)  # fmt: skip
            if reason is not None:
                return f"{inner._name} inside it: {reason}"
        return None
    if not kind.__module__.startswith(("torch.nn.", "torch.ao.", "fxlab.")):
        return f"{kind.__name__} is user code that is not known to be pure"
    if getattr(module, "inplace", False) is True:
        return "writes into its input in place (inplace=True)"
    if getattr(module, "max_norm", None) is not None and hasattr(module, "num_embeddings"):
        return "renormalises its table (max_norm)"
    if module.training:
        if getattr(module, "running_mean", None) is not None:
            return "updates running statistics (train mode)"
        if impure_random and (isinstance(module, torch.nn.modules.dropout._DropoutNd)
                              or kind.__name__ in ("RReLU", "FractionalMaxPool2d",
                                                   "FractionalMaxPool3d")):  # fmt: skip
            return "draws random numbers (train mode)"
        if impure_random and getattr(module, "dropout", 0) and isinstance(
            getattr(module, "dropout", 0), float
        ):
            return "draws random numbers (dropout in train mode)"
    return None


def torch_effect(node: Node) -> str | None:
    """Return torch.fx's own, narrower answer: what its `eliminate_dead_code` keeps."""
    if node._op in ("placeholder", "output"):
        return "interface"
    if node._op == "call_module" and node.graph.owning_module is not None:
        module = lookup(node.graph.owning_module, str(node._target))
        return "marked" if getattr(module, "_is_impure", False) else None
    if node._op != "call_function":
        return None
    if node._target in _torch_effects or node._target in _registered:
        return "registered"
    if isinstance(node._target, (OpOverload, OpOverloadPacket)):
        return _function_effect(node, True)
    return "random" if getattr(node._target, "__name__", "") in _RANDOM and getattr(
        node._target, "__module__", None) in (None, "torch") else None  # fmt: skip
