"""What about tensors that the traced program makes itself?

`torch.zeros(x.shape[0])` and `torch.rand(3)` must run anew in each call, so they are recorded.
Every other such tensor becomes a constant of the graph, as in the paper (section 4.1): that is
right as long as nobody writes into it. When the program does, each call must have a tensor of its
own: the constant is cloned where it is first read, and from there on everything that is done with
it is recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext, _device_constructors

from fxlab.core import patches
from fxlab.core.capture import watchers
from fxlab.core.node import Node
from fxlab.core.patches import current_tracer, find_proxy
from fxlab.core.proxy import Proxy
from fxlab.core.purity import effect
from fxlab.core.tracer import Tracer, recorded

_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")
_FRESH = (*_RANDOM, "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye",
          "tensor")  # fmt: skip
_SHARING = ("as_tensor", "from_numpy")
_TAKE_A_DEVICE = _device_constructors()  # torch keeps this set: it must not see our stand-ins
_ABOUT_SHAPE = frozenset(
    "size dim numel nelement stride __len__ is_floating_point is_complex element_size "
    "is_contiguous storage_offset get_device untyped_storage".split()
)


def install() -> None:
    """Let every trace record factories, and look at what is written into constants."""
    if _install not in patches.installers:
        patches.installers.append(_install)
        watchers.append(watch)
        recorded.append(look)


def _install() -> None:
    names = (*_FRESH, *_SHARING)
    patches.replace(torch.__dict__, {name: _factory(getattr(torch, name)) for name in names})


@functools.cache
def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in that records a call with a Proxy or random numbers in it."""
    name = function.__name__

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return function(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        if proxy is None and (name not in _RANDOM or kwargs.get("generator") is not None):
            made = function(*args, **kwargs)
            if name in _FRESH:
                tracer._notes.setdefault("made", {})[id(made)] = made
            return made
        tracer = tracer if proxy is None else proxy.tracer
        kwargs = {**kwargs, **_device(function, kwargs)}
        return tracer.create_proxy("call_function", function, args, kwargs)

    stand_in.__fxlab_original__ = function  # type: ignore[attr-defined]
    return stand_in


def _device(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the device that a `with torch.device(...)` around the call gives it, as a keyword."""
    modes = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if not modes or modes[-1] is default or function not in _TAKE_A_DEVICE:
        return {}
    return {} if kwargs.get("device") is not None else {"device": modes[-1].device}


class _Written(TorchFunctionMode):
    """Records what is done with constants that the program writes into; on from the first write."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.proxies: dict[int, Any] = {}
        self.memory: set[int] = set()

    def own(self, path: str, tensor: torch.Tensor) -> None:
        """Give the constant at `path` a clone, and let it stand for the tensor from now on."""
        tracer, graph = self.tracer, self.tracer.graph
        first, *others = [n for n in graph.find_nodes(op="get_attr") if n.target == path]
        with graph.inserting_after(first):
            clone = graph.call_method("clone", (first,))
        clone.meta.update(first.meta)
        for node in (first, *others):
            node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
        for node in others:
            graph.erase_node(node)
        tracer._notes[path] = clone
        self.proxies[id(tensor)] = tracer.proxy(clone)
        self.memory.add(_memory(tensor))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if current_tracer() is not self.tracer:
            return func(*args, **(kwargs or {}))
        given, name = (args, kwargs or {}), getattr(func, "__name__", "")
        leaves = [v for v in pytree.tree_leaves(given) if type(v) is torch.Tensor]
        mine = [v for v in leaves if id(v) in self.proxies]
        if not mine or name in _ABOUT_SHAPE:
            return func(*args, **given[1])
        proxy = self.proxies[id(mine[0])]
        if name in ("__get__", "__set__"):
            value, attribute = func(*args) if name == "__get__" else None, func.__self__.__name__
            if value is not None and not isinstance(value, torch.Tensor):
                return value
            access = getattr if name == "__get__" else setattr
            parts = (proxy, attribute, *args[1:][: name == "__set__"])
            return self.tracer.create_proxy("call_function", access, parts, {})
        if name == "unbind" and args[1:] in ((), (0,)):  # iteration
            return tuple([proxy[i] for i in range(len(mine[0]))])
        if name in vars(Proxy) and mine[0] is args[0]:  # operators, and what Python wants to know
            return vars(Proxy)[name](proxy, *args[1:])
        args, kwargs = pytree.tree_map(lambda v: self.proxies.get(id(v), v), given)
        return Proxy.__torch_function__(func, types, args, kwargs)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Stand around a trace; say at its end which written memory is still shared by all calls."""
    mode = tracer._notes["written"] = _Written(tracer)
    try:
        yield
    finally:
        if mode.proxies:
            mode.__exit__(None, None, None)
    graph = tracer.graph
    for node in graph.find_nodes(op="get_attr") if graph._constants else ():
        value = graph._constants.get(str(node.target))
        if isinstance(value, torch.Tensor):
            shared = node.target not in tracer._notes and _memory(value) in mode.memory
            for user in node.users:
                if shared or _writes(tracer, user, node):
                    place = (*user.meta.get("source", ()), None)[0]
                    tracer.warn(
                        "constant",
                        f"{user.name} reads or writes a tensor that was made outside or while "
                        "tracing and that the program writes into: all calls of the graph share "
                        "it, and what was computed of it before is fixed; begin with "
                        "x.new_zeros(...), torch.zeros_like(x)",
                        place,
                    )


def look(tracer: Tracer, node: Node) -> None:
    """Look at a Node that was just recorded: does it write into a tensor that the program made?"""
    mode: _Written = tracer._notes["written"]
    made = tracer._notes.get("made", {})
    for source in node.all_input_nodes:
        value = tracer.graph._constants.get(str(source.target)) if source.op == "get_attr" else None
        if id(value) in made and _writes(tracer, node, source):
            if not mode.proxies:
                mode.__enter__()
            mode.own(str(source.target), made[id(value)])


def _writes(tracer: Tracer, node: Node, into: Node) -> bool:
    written = node.args[:1] == (into,) or node.kwargs.get("out") is into
    return written and "writes" in (effect(node, tracer.root) or "")
