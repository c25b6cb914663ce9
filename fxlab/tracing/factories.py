"""What about tensors that the traced program makes itself?

`torch.zeros(x.shape[0])` and `torch.rand(3)` must run anew in each call, so they are recorded.
Every other such tensor becomes a constant of the graph, as in the paper (section 4.1): that is
right as long as nobody writes into it. When the program does, each call must have memory of its
own: the constant is cloned where it is first read, and from there on everything that is done with
it, or with a view of it, is recorded.
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
from fxlab.core.errors import is_torchs
from fxlab.core.node import Node
from fxlab.core.patches import current_tracer, find_proxy
from fxlab.core.proxy import Proxy
from fxlab.core.purity import effect
from fxlab.core.tracer import Tracer, recorded
from fxlab.tracing.keeping import version_of
from fxlab.tracing.known import writes_into
from fxlab.tracing.questions import reachable
from fxlab.tracing.switches import TrainingFlag

_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson",
           "rand_like", "randn_like", "randint_like")  # fmt: skip
_FRESH = (*_RANDOM, "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye",
          "tensor", "zeros_like", "ones_like", "empty_like", "full_like")  # fmt: skip
_TAKE_A_DEVICE = _device_constructors()  # torch keeps this set: it must not see our stand-ins
_NAMES = {f.__name__ for f in _TAKE_A_DEVICE if vars(torch).get(f.__name__) is f}
_NAMES |= {*_FRESH, "from_numpy"}
_ABOUT_SHAPE = frozenset(
    "size dim numel nelement stride __len__ is_floating_point is_complex element_size "
    "is_contiguous storage_offset get_device untyped_storage is_inference data_ptr".split()
)


def install() -> None:
    """Let every trace record factories, and look at what is written into constants."""
    if _install not in patches.installers:
        patches.installers.append(_install)
        watchers.append(watch)
        recorded.append(look)


def _install() -> None:
    patches.replace(torch.__dict__, {name: _factory(getattr(torch, name)) for name in _NAMES})


@functools.cache
def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in that records a call with a Proxy or random numbers in it."""
    name, code = function.__name__, getattr(function, "__code__", None)
    if code is not None and not is_torchs(code.co_filename):
        return function  # the caller put something else there, which does it in its own way

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return function(*args, **kwargs)
        proxy = find_proxy(args, kwargs)
        flags = any(type(v) is TrainingFlag for v in (*args, *kwargs.values()))
        if (
            proxy is None
            and not flags
            and (name not in _RANDOM or _is_its_own(tracer, kwargs.get("generator")))
        ):
            made = function(*args, **kwargs)
            if name in _RANDOM:
                tracer.warn(
                    "generator",
                    f"the numbers that torch.{name} drew from a generator that the program made "
                    "are fixed in the graph: keep the generator on the model, or draw without one",
                )
            if name in _FRESH:
                tracer._notes.setdefault("made", {})[_memory(made)] = made
            return made
        tracer = tracer if proxy is None else proxy.tracer
        kwargs = {**kwargs, **_device(function, kwargs)}
        return tracer.create_proxy("call_function", function, args, kwargs)

    stand_in.__fxlab_original__ = function  # type: ignore[attr-defined]
    return stand_in


def _is_its_own(tracer: Any, generator: Any) -> bool:
    """Say whether a generator was made by the program: then each call has it in its first state."""
    known = tracer._notes.get("generators", ())
    return generator is not None and not any(generator is g for g in known)


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
        self.clones: dict[int, Node] = {}
        """Memory -> the clone that each call has instead."""
        self.views: dict[int, tuple[torch.Tensor, Any]] = {}
        self.reads: dict[int, dict[Node, None]] = {}
        """Memory -> the Nodes that read a constant in it, as far as they were seen."""
        self.versions: dict[Node, tuple[torch.Tensor, Any]] = {}
        """Node that reads a constant -> that, and how often it had been written into by then."""

    def own(self, base: torch.Tensor) -> None:
        """Give each call a clone of `base`; every read of that memory so far reads the clone."""
        tracer, graph, memory = self.tracer, self.tracer.graph, _memory(base)
        readers = self.readers(memory)
        path = tracer._tensor_paths().get(id(base)) or tracer._keep_constant(
            "_tensor_constant", base
        )
        tracer._tensor_paths()[id(base)] = path
        with graph.inserting_before(readers[0]):
            clone = graph.call_method("clone", (graph.get_attr(path),))
        for node in (clone, clone.args[0]):
            node.meta.update(readers[0].meta)
        self.clones[memory] = clone
        self.views[id(base)] = base, tracer.proxy(clone)

    def see(self, node: Node) -> torch.Tensor | None:
        """Note a Node that reads a constant; return that."""
        value = (
            self.tracer.graph._constants.get(str(node.target)) if node.op == "get_attr" else None
        )
        if not isinstance(value, torch.Tensor):
            return None
        self.reads.setdefault(_memory(value), {})[node] = None
        return value

    def readers(self, memory: int) -> list[Node]:
        """Return the Nodes that read a constant in this memory."""
        return [node for node in self.reads.get(memory, ()) if not node._erased]

    def replace(self, memory: int) -> None:
        """Let the clone stand for the constant in what reads this memory."""
        graph, clone = self.tracer.graph, self.clones[memory]
        for node in self.readers(memory):
            if node is not clone.args[0]:
                with graph.inserting_before(node):
                    new = self.view(graph._constants[str(node.target)], clone)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        self.reads[memory] = {}

    def view(self, tensor: torch.Tensor, clone: Node) -> Node:
        """Return the Node of a view like `tensor` into the clone."""
        base = self.tracer.graph._constants[str(clone.args[0].target)]
        how = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if how == (tuple(base.shape), base.stride(), base.storage_offset()):
            return clone
        return clone.graph.call_method("as_strided", (clone, *how))

    def proxy(self, tensor: Any) -> Any:
        """Return what stands for a value from now on: a Proxy if its memory is written to."""
        if type(tensor) is not torch.Tensor or _memory(tensor) not in self.clones:
            return tensor
        if id(tensor) not in self.views:
            made = self.view(tensor, self.clones[_memory(tensor)])
            self.views[id(tensor)] = tensor, self.tracer.proxy(made)
        return self.views[id(tensor)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, name = (args, kwargs or {}), getattr(func, "__name__", "")
        if current_tracer() is not self.tracer or name in _ABOUT_SHAPE:
            return func(*args, **given[1])
        if name in ("__get__", "__set__"):
            proxy, attribute = self.proxy(args[0]), func.__self__.__name__
            value = func(*args) if name == "__get__" or proxy is args[0] else None
            if proxy is args[0] or not (value is None or isinstance(value, torch.Tensor)):
                return value
            access = getattr if name == "__get__" else setattr
            parts = (proxy, attribute, *args[1:][: name == "__set__"])
            return self.tracer.create_proxy("call_function", access, parts, {})
        args, kwargs = pytree.tree_map(self.proxy, given)
        if find_proxy(args, kwargs) is None:
            return func(*args, **given[1])
        proxy = args[0] if args else None
        if isinstance(proxy, Proxy) and proxy is not given[0][0]:
            if name == "unbind" and args[1:] in ((), (0,)):  # iteration
                return tuple([args[0][i] for i in range(len(given[0][0]))])
            if name in vars(Proxy):  # operators, and what Python wants to know
                return vars(Proxy)[name](*args)
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
        if mode.clones:
            mode.__exit__(None, None, None)
    if mode.clones:
        mode.reads.clear()
        for node in tracer.graph.find_nodes(op="get_attr"):
            mode.see(node)
    for memory in mode.clones:
        mode.replace(memory)
    held = tracer._notes.get("held", ())  # those are put back, and said
    for node, (value, version) in mode.versions.items():
        seen = id(value) in held or _memory(value) in mode.clones
        if version_of(value) != version and not seen:
            reader = next(iter(node.users), node)
            tracer.warn(
                "constant",
                f"the program writes into a tensor after {reader.name} has read it, and the graph "
                "reads what it is in the end: write before that, or make a new tensor",
                (*reader.meta.get("source", ()), None)[0],
            )
    graph = tracer.graph
    for node in graph.find_nodes(op="get_attr") if graph._constants else ():
        value: Any = graph._constants.get(str(node.target))
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            reader = next(iter(node.users), node)
            tracer.warn(
                "computed",
                f"{reader.name} reads what the program computed from parameters that are no "
                "Proxies (parameters(), a list, a global), and that is fixed in the graph: reach "
                "them as attributes of their modules",
                (*reader.meta.get("source", ()), None)[0],
            )
        for user in node.users if node.target in graph._constants else ():
            if writes_into(user, node, tracer.root) and (
                "user code" not in str(effect(user, tracer.root)) or _may_write(user.target)
            ):
                place = (*user.meta.get("source", ()), None)[0]
                tracer.warn(
                    "constant",
                    f"{user.name} writes into a tensor that was made outside of the program, or of "
                    "other tensors while tracing: all calls of the graph share it, and what was "
                    "computed of it before is fixed; begin with torch.zeros(...), "
                    "x.new_zeros(...), torch.zeros_like(x)",
                    place,
                )


def _may_write(function: Any) -> bool:
    """Say whether the code of a user's function, or of one that it calls, may write somewhere."""
    return any(facts.writes for facts in reachable((function, object)).values())


def look(tracer: Tracer, node: Node) -> None:
    """Look at a Node that was just recorded: does it write into a tensor that the program made?"""
    mode: _Written = tracer._notes["written"]
    made = tracer._notes.get("made", {})
    for source in node.all_input_nodes:
        value = mode.see(source)
        if value is not None:
            mode.versions.setdefault(source, (value, version_of(value)))
        base = None if value is None else made.get(_memory(value))
        if base is not None and writes_into(node, source, tracer.root):
            if not mode.clones:
                mode.__enter__()
            if _memory(base) not in mode.clones:
                mode.own(base)
            mode.replace(_memory(base))
