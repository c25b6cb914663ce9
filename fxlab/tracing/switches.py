"""What changes the meaning of operations without being one, and how does it get into the graph?

`with torch.no_grad():`, `torch.set_default_dtype(...)` and `module.training` take no traced value,
so a tracer does not see them, and the graph would compute something else (the paper leaves state
out, section 5.6). While somebody traces, regions become a pair of enter and exit nodes, switches
become calls, and the training flag becomes a `get_attr` that is read when the graph runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module

from fxlab.core import patches
from fxlab.core.capture import watchers
from fxlab.core.errors import is_users
from fxlab.core.graph import _enter_region, _exit_region
from fxlab.core.node import Node
from fxlab.core.patches import current_tracer
from fxlab.core.proxy import Proxy
from fxlab.core.purity import has_side_effect
from fxlab.core.tracer import Tracer

_REGIONS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    torch.no_grad: lambda r: (), torch.enable_grad: lambda r: (),
    torch.set_grad_enabled: lambda r: (r.mode,), torch.inference_mode: lambda r: (r.mode,),
    torch.autocast: lambda r: (r.device, r.fast_dtype, r._enabled, r._cache_enabled),
    torch.autograd.profiler.record_function: lambda r: (r.name, r.args),
    contextlib._GeneratorContextManager: lambda r: (),
}  # fmt: skip
"""The class of a region -> the arguments that make one like a given one."""

_SWITCHES: list[Any] = [torch.set_default_dtype, torch.set_default_device]
"""Done while tracing too, since constants are made meanwhile; put back when the trace ends."""
_RECORDED: list[Any] = [
    torch.random.manual_seed, torch.random.seed, torch.set_rng_state, torch.cuda.manual_seed,
    torch.cuda.manual_seed_all, torch.use_deterministic_algorithms, torch.set_num_threads,
    torch.set_float32_matmul_precision, torch.set_flush_denormal,
]  # fmt: skip
for _function in (*_SWITCHES, *_RECORDED):
    has_side_effect(_function)


def install() -> None:
    """Put these patches in with those of every trace."""
    if _install not in patches.installers:
        patches.installers.append(_install)
        watchers.append(watch)


def _install() -> None:
    patches._set(Module, "training", _training)
    for function in (*_SWITCHES, *_RECORDED):
        if isinstance(function, types.FunctionType):  # its code: wherever it was imported
            code = patches._hand_over(_switch(function), _codes[function])
            patches._set(function, "__code__", code)
        else:
            patches._set(torch, function.__name__, _switch(function))
    patches._set(torch.set_grad_enabled, "__init__",
                 _noting(torch.set_grad_enabled.__init__, _grad_switched))  # fmt: skip
    for kind in _REGIONS:
        patches._set(kind, "__enter__", _noting(kind.__enter__, _entered))
        patches._set(kind, "__exit__", _noting(kind.__exit__, _left))


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Put back what the program switched while it was traced."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(None if context is None else context.device)


@functools.cache
def _noting(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a stand-in that lets `note` record a call of a user's, and then does it."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is not None and (note is _left or _by_user(sys._getframe(1))):
            note(tracer, original, *args, **kwargs)
        return original(*args, **kwargs)

    return stand_in


def _by_user(frame: Any) -> bool:
    """Say whether a user's line, a decorator on their function or generated code did this."""
    file = frame.f_code.co_filename
    return is_users(file) or file.endswith("contextlib.py") or file.startswith("<eval_with_key>")


_codes = {f: f.__code__ for f in (*_SWITCHES, *_RECORDED) if isinstance(f, types.FunctionType)}


@functools.cache
def _switch(function: Any) -> Callable[..., Any]:
    """Return a stand-in that records a user's call of a switch; most are not thrown meanwhile."""
    original, depth = function, 1
    if function in _codes:
        original = types.FunctionType(
            _codes[function],
            function.__globals__,
            None,
            function.__defaults__,
            function.__closure__,
        )
        original.__kwdefaults__ = function.__kwdefaults__
        depth = 2

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        # torch._dynamo puts a function of its own around manual_seed, so who calls tells nothing.
        seeds = "seed" in function.__name__
        if tracer is not None and (seeds or _by_user(sys._getframe(depth))):
            made = tracer.create_proxy("call_function", function, args, kwargs)
            if function not in _SWITCHES:
                return made
        return original(*args, **kwargs)

    return stand_in


def _grad_switched(tracer: Any, original: Any, region: Any, mode: bool) -> None:
    call = tracer.create_proxy("call_function", torch._C._set_grad_enabled, (mode,), {})
    region._fxlab_call = call.node  # until it is entered: then it is a region, and no switch


def _entered(tracer: Any, original: Any, region: Any) -> None:
    kind, arguments = next(kv for kv in _REGIONS.items() if isinstance(region, kv[0]))
    maker, args, kwargs = kind, arguments(region), {}
    if kind is contextlib._GeneratorContextManager:
        raw = region.func
        if not raw.__module__.startswith("torch."):
            return  # the program's own: its body is traced like the rest
        maker, args, kwargs = _decorated(raw), region.args, region.kwds
    call: Node | None = getattr(region, "_fxlab_call", None)
    if call is not None and not call._erased:
        tracer.graph.erase_node(call)
    made = tracer.create_proxy("call_function", _enter_region, (maker, *args), kwargs,
                               maker.__name__)  # fmt: skip
    tracer._notes.setdefault("regions", []).append((region, made.node))


def _left(tracer: Any, original: Any, region: Any, *exc: Any) -> None:
    open_now = tracer._notes.get("regions")
    if open_now and open_now[-1][0] is region:
        _, node = open_now.pop()
        arg = (Proxy(node, tracer),)  # also when the program leaves by an exception
        tracer.create_proxy("call_function", _exit_region, arg, {}, f"{node.name}_exit")


def _decorated(raw: Any) -> Any:
    """Return the public function that `contextlib.contextmanager` made of a generator."""
    return functools.reduce(getattr, raw.__qualname__.split("."), sys.modules[raw.__module__])


class TrainingFlag(int):
    """`module.training` while tracing: true or false in a branch, a get_attr as an argument."""

    path: str

    def __bool__(self) -> bool:
        tracer = current_tracer()
        if tracer is not None and is_users(sys._getframe(1).f_code.co_filename):
            tracer.warn("training", f"a branch on {self.path} was fixed to {int(self) == 1}: "
                        "train() and eval() of the traced module do not change it")  # fmt: skip
        return int(self) == 1

    def __fx_create_arg__(self, tracer: Any) -> Node:
        return tracer.create_node("get_attr", self.path, (), {})


def _get_training(mod: Module) -> Any:
    fields = mod.__dict__
    if "training" not in fields:
        raise AttributeError("training")
    tracer, value = current_tracer(), fields["training"]
    # nn.Module's own bookkeeping wants the bool.
    if tracer is None or type(value) is not bool or (
        sys._getframe(1).f_code.co_filename == torch.nn.modules.module.__file__
    ):  # fmt: skip
        return value
    path = tracer._paths().get(mod)
    if path is None:
        return value
    flag = TrainingFlag(value)
    flag.path = f"{path}.training" if path else "training"
    return flag


def _set_training(mod: Module, value: Any) -> None:
    mod.__dict__["training"] = bool(value) if type(value) is TrainingFlag else value


_training = property(_get_training, _set_training, lambda mod: mod.__dict__.pop("training"))
