"""Is what was given a program, are these its inputs, and are those passes? Said before any work.

A class instead of an instance, a scripted module or a dict of inputs would each fail somewhere
inside the tracer, far from what is to be done about it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxlab.core.errors import RewriteError, call_site
from fxlab.explorer.sentences import article


def check_model(x: Any, caller: str) -> None:
    """Refuse what looks like a model and is none.

    Args:
        x: What was given.
        caller: The function's name, for the advice.

    Raises:
        RewriteError: `x` is a class, a scripted module, or a Module that defines no `forward`.
    """
    if isinstance(x, type):
        raise RewriteError(
            f"this is a class, and its constructor is no program: {x.__name__}",
            where=call_site(),
            expected="an instance of it",
            right=f"{caller}({x.__name__}())",
        )
    if isinstance(x, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise RewriteError(
            f"{article(type(x).__name__)} holds compiled code, which no Proxy can go through",
            where=call_site(),
            hint="trace the module before scripting it",
        )
    # Looked up without asking: a GraphModule's forward is compiled when it is asked for.
    forward = inspect.getattr_static(type(x), "forward", None)
    if isinstance(x, nn.Module) and forward is nn.Module.forward and "forward" not in vars(x):
        raise RewriteError(
            f"{article(type(x).__name__)} says nowhere what it computes: it has no forward",
            where=call_site(),
            hint="define forward in its class",
        )


def as_inputs(x: Any, inputs: Any) -> tuple[Any, ...] | None:
    """Example inputs as a tuple of positional arguments.

    Args:
        x: The model, function or GraphModule that takes them.
        inputs: A tensor, a sequence, a dict by the names of parameters, or None.

    Raises:
        RewriteError: A dict whose keys don't fit, or name a keyword-only parameter.
    """
    if inputs is None or isinstance(inputs, torch.Tensor):
        return None if inputs is None else (inputs,)
    if not isinstance(inputs, Mapping):
        return tuple(inputs)
    function = x.forward if isinstance(x, nn.Module) else x
    try:
        bound = inspect.signature(function).bind(**inputs)
        if bound.kwargs:
            bound.apply_defaults()
        problem = f"{', '.join(bound.kwargs)} can be given by name only" if bound.kwargs else ""
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise RewriteError(
            f"inputs is a dict that does not fit the parameters: {problem}",
            where=call_site(),
            expected="a tuple of arguments, or a dict whose keys are parameters",
            hint="an argument that is a dict itself: inputs=({...},)",
        )
    return bound.args


def as_passes(passes: Any) -> list[Callable[..., Any]]:
    """Passes as a list of functions.

    Args:
        passes: One pass, a sequence of them, or None.

    Raises:
        RewriteError: One of them can't be called, such as the name of a pass.
    """
    single = callable(passes) or isinstance(passes, str)
    several: Any = passes or ()
    chosen: list[Any] = [passes] if single else list(several)
    for pass_ in chosen:
        if not callable(pass_):
            raise RewriteError(
                f"{pass_!r:.60} is {article(type(pass_).__name__)}, and a pass is a function",
                where=call_site(),
                expected="a function of a GraphModule, which edits it or returns another one",
                right="from fxlab.passes import dce; explore(model, passes=[dce])",
            )
    return chosen


def pass_name(pass_: Any) -> str:
    """What a pass is called in a story."""
    while not hasattr(pass_, "__name__") and hasattr(pass_, "func"):  # functools.partial
        pass_ = pass_.func
    return getattr(pass_, "__name__", None) or type(pass_).__name__


def title_of(gm: Any) -> str:
    """The name of the class that was captured."""
    original = getattr(gm, "original_type", None)
    return getattr(original, "__name__", None) or type(gm).__name__.removesuffix("Impl")
