"""What changes the meaning of operations without being one, and how does it get into the graph?

`with torch.no_grad():`, `torch.set_default_dtype(...)` and `module.training` take no traced value,
so a tracer does not see them, and the graph would compute something else (the paper leaves state
out, section 5.6). While somebody traces, regions become a pair of enter and exit nodes, switches
become calls, and the training flag becomes a `get_attr` that is read when the graph runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxlab.core import patches
from fxlab.core.capture import Calls, watchers
from fxlab.core.errors import FxlabError, call_site, is_users
from fxlab.core.graph import Graph, _enter_region, _exit_region
from fxlab.core.node import Node
from fxlab.core.patches import current_tracer
from fxlab.core.proxy import Proxy
from fxlab.core.purity import has_side_effect
from fxlab.core.tracer import Tracer
from fxlab.tracing.bytecode import steps
from fxlab.tracing.hooks import in_a_hook
from fxlab.tracing.questions import after

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
    torch.random.manual_seed, torch.random.seed, torch.set_rng_state,
    torch.random.get_rng_state, torch.random.initial_seed, torch.cuda.manual_seed,
    torch.cuda.manual_seed_all, torch.use_deterministic_algorithms, torch.set_num_threads,
    torch.set_float32_matmul_precision, torch.set_flush_denormal,
]  # fmt: skip
_ASKED: list[Any] = [
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled,
    torch.get_default_dtype, torch.get_autocast_dtype, torch.are_deterministic_algorithms_enabled,
]  # fmt: skip
"""What tells the state of a switch now, and not when the graph runs."""
_enter_code = TorchDispatchMode.__enter__.__code__
_enter = types.FunctionType(_enter_code, TorchDispatchMode.__enter__.__globals__)
for _function in (*_SWITCHES, *_RECORDED):
    has_side_effect(_function)


def install() -> None:
    """Put these patches in with those of every trace."""
    if _install not in patches.installers:
        patches.installers.append(_install)
        watchers.append(watch)
        Calls.once_more = staticmethod(_without_flags)


def _install() -> None:
    patches._undo.append((_forget_stand_ins, _rules_of_compile()))
    patches._set(Module, "training", _training)
    for function in (*_SWITCHES, *_RECORDED):
        if isinstance(function, types.FunctionType):  # its code: wherever it was imported
            code = patches._hand_over(_switch(function), _codes[function])
            patches._set(function, "__code__", code)
        else:
            patches._set(torch, function.__name__, _switch(function))
    init = _noting(torch.set_grad_enabled.__init__, _grad_switched)
    patches._set(torch.set_grad_enabled, "__init__", _with_plain(init))
    for kind in (torch.autocast, torch.inference_mode):
        patches._set(kind, "__init__", _with_plain(kind.__init__))
    code = patches._hand_over(_mode_entered, _enter_code)
    patches._set(TorchDispatchMode.__enter__, "__code__", code)
    patches.replace(torch.__dict__, _STAND_INS)
    # torch.nn.functional's way to some of them
    patches.replace(cast(Any, vars)(torch._VF), _FLAG_TAKERS)
    for kind in _REGIONS:
        patches._set(kind, "__enter__", _noting(kind.__enter__, _entered))
        patches._set(kind, "__exit__", _noting(kind.__exit__, _left))


@contextlib.contextmanager
def watch(tracer: Tracer) -> Iterator[None]:
    """Put back what the program switched while it was traced."""
    tracer._notes["no flags"] = tracer.__dict__.pop("_no_flags", False)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
        if "regions" in tracer._notes:
            _erase_empty_regions(tracer.graph)
        _warn_of_modes(tracer)
    finally:
        torch._C._set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(None if context is None else context.device)


def _rules_of_compile() -> int:
    """Return how much torch.compile has found out of torch's functions; 0 if it was not used."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    return 0 if rules is None else rules.get_torch_obj_rule_map.cache_info().currsize


def _forget_stand_ins(before: int) -> None:
    """Let torch.compile look at torch's functions again if it first did while somebody traced."""
    if _rules_of_compile() > before:
        sys.modules["torch._dynamo.trace_rules"].get_torch_obj_rule_map.cache_clear()


def _erase_empty_regions(graph: Graph) -> None:
    for node in list(graph.nodes):
        enter = node.prev
        if node.target is _exit_region and enter.target is _enter_region:
            graph.erase_node(node)
            graph.erase_node(enter)


@functools.cache
def _noting(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a stand-in that lets `note` record a call of a user's, and then does it."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        frame = sys._getframe(1)
        if frame.f_code is _PLAIN_CODE:
            frame = cast(Any, frame.f_back)
        if tracer is not None and (note is _left or _by_user(frame)):
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
        seeds = "seed" in function.__name__ and function is not torch.random.initial_seed
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


def _state_asked(tracer: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    if not tracer._notes.get("regions"):  # inside one of the program's own it is known
        tracer.warn("switch", f"torch.{original.__name__}() was asked while tracing, and that "
                    "answer is fixed in the graph")  # fmt: skip


def _mode_entered(mode: Any) -> Any:
    tracer = current_tracer()
    if tracer is not None and _by_user(sys._getframe(2)):
        tracer.warn("dispatch", f"a {type(mode).__name__} sees what is done with tensors, and not "
                    "what is recorded: the graph runs without it")  # fmt: skip
    return _enter(mode)


def _left(tracer: Any, original: Any, region: Any, *exc: Any) -> None:
    open_now = tracer._notes.get("regions")
    if open_now and open_now[-1][0] is region:
        _, node = open_now.pop()
        arg = (Proxy(node, tracer),)  # also when the program leaves by an exception
        tracer.create_proxy("call_function", _exit_region, arg, {}, f"{node.name}_exit")


def _decorated(raw: Any) -> Any:
    """Return the public function that `contextlib.contextmanager` made of a generator."""
    return functools.reduce(getattr, raw.__qualname__.split("."), sys.modules[raw.__module__])


class TrainingFlag:
    """`module.training` while tracing: a get_attr as an argument; asked for its value, a bool.

    It is no int, so no function of C takes it for a number and says nothing.
    """

    __slots__ = ("path", "value")

    def __init__(self, value: bool, path: str) -> None:
        self.value, self.path = value, path

    __class__ = property(lambda self: bool)  # pyright: ignore

    def __fx_create_arg__(self, tracer: Any) -> Node:
        return tracer.create_node("get_attr", self.path, (), {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return func(*_plain(args), **_plain(kwargs or {}))
        args, kwargs = pytree.tree_map(
            lambda v: tracer.proxy(v.__fx_create_arg__(tracer)) if type(v) is cls else v,
            (args, kwargs or {}),
        )
        return Proxy.__torch_function__(func, types, args, kwargs)


def _fix(value: bool, path: str, frame: Any = None) -> bool:
    """Return the value of a flag that a user's line makes use of, and say that it is fixed."""
    tracer = current_tracer()
    while frame is not None and frame.f_code.co_filename == patches.__file__:
        frame = frame.f_back  # what stands in for a function that may be recorded
    if tracer is not None and (frame is None or is_users(frame.f_code.co_filename)):
        tracer.warn("training", f"a branch on {path} was fixed to {value}: train() and eval() of "
                    "the traced module do not change it")  # fmt: skip
    return value


def _plain(values: Any, by_whom: int | None = 2) -> Any:
    """Return values with the flags in them fixed; said if the caller's caller is a user's line."""
    if not _holds_flag(values):
        return values
    frame = None if by_whom is None else sys._getframe(by_whom)
    return pytree.tree_map(
        lambda v: _fix(v.value, v.path, frame) if type(v) is TrainingFlag else v, values
    )


def _holds_flag(values: Any) -> bool:
    return any(type(v) is TrainingFlag for v in pytree.tree_leaves(values))


def _asking(name: str) -> Callable[..., Any]:
    """Return a method that does with the flag what is done with the bool, and says so."""
    plain: Any = getattr(bool, name, None)

    def asked(flag: TrainingFlag, *args: Any) -> Any:
        if any(isinstance(a, (Proxy, torch.Tensor)) for a in args):
            return NotImplemented  # it is theirs to do, and recorded
        value = _fix(flag.value, flag.path, sys._getframe(1))
        return plain(value, *_plain(args)) if name not in _BINARY else _BINARY[name](value, *args)

    return asked


_BINARY: dict[str, Callable[[Any, Any], Any]] = {}
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    _operator = getattr(operator, f"__{_name}__")
    _BINARY[f"__{_name}__"] = _operator
    _BINARY[f"__r{_name}__"] = lambda a, b, do=_operator: do(b, a)
for _name in "eq ne lt le gt ge".split():
    _BINARY[f"__{_name}__"] = getattr(operator, _name)
_UNARY = ("bool int index float repr str format hash neg pos abs invert round trunc floor ceil "
          "divmod").split()  # fmt: skip
for _name in (*(f"__{name}__" for name in _UNARY), *_BINARY):
    setattr(TrainingFlag, _name, _asking(_name))


@functools.cache
def _is_asked(code: types.CodeType, at: int) -> bool:
    """Say whether what the instruction at an offset reads is asked by `is` or `type()`."""
    before = [step.argval for step in steps(code) if step.offset < at][-3:]
    asks_is = any("IS_OP" in [step.opname for step in rest[:2]] for rest in after(code, at))
    return asks_is or "type" in before


@functools.cache
def _taking_flags(function: Any) -> Callable[..., Any]:
    """Return a stand-in for a function that accepts only a bool: with a flag it is recorded."""

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        given = (*args, *kwargs.values())
        if tracer is None or not any(type(v) is TrainingFlag for v in given):
            return function(*args, **kwargs)
        proxy = patches.find_proxy(args, kwargs)
        tracer = tracer if proxy is None else proxy.tracer
        return tracer.create_proxy("call_function", function, args, kwargs)

    stand_in.__fxlab_original__ = function  # type: ignore[attr-defined]
    return stand_in


_TAKE_FLAGS = {
    name: getattr(torch, name)
    for name in (
        "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
        "feature_alpha_dropout feature_alpha_dropout_ native_dropout batch_norm instance_norm "
        "native_batch_norm rrelu rrelu_ lstm gru rnn_tanh rnn_relu std var std_mean var_mean "
        "sort argsort topk"
    ).split()
    if hasattr(torch, name)
}


_FLAG_TAKERS = {name: _taking_flags(function) for name, function in _TAKE_FLAGS.items()}
_STAND_INS = {**_FLAG_TAKERS, **{f.__name__: _noting(f, _state_asked) for f in _ASKED}}


@functools.cache
def _with_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for a region's `__init__` that gets the bool for a flag."""

    @functools.wraps(original)
    def stand_in(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *_plain(args), **_plain(kwargs))

    return stand_in


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
    if path is None or in_a_hook(tracer, sys._getframe(1)):
        return value
    path, frame = f"{path}.training" if path else "training", sys._getframe(1)
    if tracer._notes.get("no flags"):
        return _fix(value, path)
    if _is_asked(frame.f_code, frame.f_lasti):  # these ask no method
        return _fix(value, path, frame)
    tracer._notes["flags"] = True
    for function, names in tracer._notes.pop("asks_is", {}).items():
        code = patches._hand_over(_with_bools(function, names), function.__code__)
        patches._set(function, "__code__", code)
    if "create_proxy" not in vars(tracer) and type(tracer).create_proxy is not Tracer.create_proxy:
        patches._set(tracer, "create_proxy", functools.partial(_with_proxies, tracer.create_proxy))
    return TrainingFlag(value, path)


def _with_proxies(record: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any,
                  **named: Any) -> Proxy:  # fmt: skip
    """Record an operation by a create_proxy of somebody's own: it sees flags as Proxies."""

    def seen(value: Any) -> Any:
        return record("get_attr", value.path, (), {}) if type(value) is TrainingFlag else value

    args, kwargs = pytree.tree_map(seen, (args, kwargs))
    return record(kind, target, args, kwargs, *more, **named)


def _without_flags(tracer: Tracer, error: Exception) -> bool:
    """Say whether a program that raised may have wanted a bool: then it gets bools, which is said.

    `json.dumps(self.training)`: functions of C that know a bool by its type ask no method.
    """
    cause = error.__cause__ or error
    wanted = isinstance(cause, (TypeError, AttributeError)) and not isinstance(cause, FxlabError)
    tracer.__dict__["_no_flags"] = again = wanted and "flags" in tracer._notes
    return again


def _with_bools(function: types.FunctionType, names: Iterable[str]) -> Callable[..., Any]:
    """Return a stand-in for a function that asks `is True`: what it asks, it gets as a bool.

    Args:
        function: a user's.
        names: the variables that it compares; one that is no parameter may hold any of them.
    """
    original = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(original)
    asked = signature.parameters.keys()
    asked = set(names) if asked >= set(names) else set(asked)

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if current_tracer() is None or not _holds_flag((args, kwargs)):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        for name in asked & given.arguments.keys():
            given.arguments[name] = _plain(given.arguments[name], None)
        return original(*given.args, **given.kwargs)

    return stand_in


def _set_training(mod: Module, value: Any) -> None:
    fields, tracer = mod.__dict__, current_tracer()
    new, old = value.value if type(value) is TrainingFlag else value, fields.get("training", value)
    fields["training"] = new
    if tracer is not None and new is not old:
        tracer._notes.setdefault("modes", {}).setdefault(mod, (old, call_site(1, True)))


def _warn_of_modes(tracer: Tracer) -> None:
    """Say whose mode the program changes and puts back; what it leaves changed is told as state."""
    for module, (old, where) in tracer._notes.get("modes", {}).items():
        path = tracer._paths().get(module)
        if path is not None and where and module.__dict__.get("training") is old:
            tracer.warn("mode", f"the program changes the mode of {path or 'the model'} by train() "
                        "or eval() and puts it back: the graph does neither", where[0])  # fmt: skip


_PLAIN_CODE = _with_plain(watch).__code__
_training = property(_get_training, _set_training, lambda mod: mod.__dict__.pop("training"))
