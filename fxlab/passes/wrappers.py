"""How is a function made fit for a list of passes?

torch.fx's small helpers around its pass managers, for code that uses them. `PassManager` of this
kit takes functions as they are: one that edits its argument and returns None, one that returns a
module, and one that returns a PassResult.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from fxlab.core.errors import RewriteError
from fxlab.passes.base import PassResult

__all__ = [
    "inplace_wrapper",
    "log_hook",
    "loop_pass",
    "pass_result_wrapper",
    "these_before_those_pass_constraint",
]

logger = logging.getLogger(__name__)


def pass_result_wrapper(fn: Callable) -> Callable[..., PassResult | None]:
    """Return ``fn`` as a function of one module that returns a PassResult with modified=True.

    A PassResult of ``fn``'s own is handed on; for anything but a module or None it is None.

    Example:
        >>> import fxlab, torch
        >>> def nothing(gm): pass
        >>> pass_result_wrapper(nothing)(fxlab.symbolic_trace(torch.nn.ReLU())).modified
        True
    """

    @functools.wraps(fn)
    def wrapped(gm: nn.Module) -> PassResult | None:
        result = fn(gm)
        if isinstance(result, PassResult):
            return result
        changed = gm if result is None else result
        return PassResult(changed, True) if isinstance(changed, nn.Module) else None

    if not inspect.isfunction(fn):
        wrapped.__name__ = type(fn).__name__
    return wrapped


def inplace_wrapper(fn: Callable) -> Callable:
    """Return ``fn`` as a function that returns its first argument, which ``fn`` edits.

    Example:
        >>> inplace_wrapper(lambda found: found.append(1))([])
        [1]
    """

    @functools.wraps(fn)
    def wrapped(gm: Any, *args: Any, **kwargs: Any) -> Any:
        fn(gm, *args, **kwargs)
        return gm

    return wrapped


def log_hook(fn: Callable, level: int = logging.INFO) -> Callable:
    """Return ``fn`` as a function that also logs what it returns.

    Args:
        fn: Any function.
        level: Of the log's entry.

    Example:
        >>> log_hook(max)(1, 2)
        2
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        logger.log(level, "%s returned %s", getattr(fn, "__name__", fn), result)
        return result

    return wrapped


def loop_pass(
    base_pass: Callable,
    n_iter: int | None = None,
    predicate: Callable[[Any], bool] | None = None,
) -> Callable:
    """Return ``base_pass`` as a function that runs it several times, each on the last result.

    Args:
        base_pass: A function of one argument that returns its successor.
        n_iter: How often, at least 1; or:
        predicate: Goes on as long as it is true of the result.

    Raises:
        RewriteError: Neither or both are given, or ``n_iter`` is less than 1.

    Example:
        >>> loop_pass(lambda n: n * 2, n_iter=3)(1)
        8
        >>> loop_pass(lambda n: n * 2, predicate=lambda n: n < 9)(1)
        16
    """
    if (n_iter is None) == (predicate is None) or (n_iter is not None and n_iter < 1):
        raise RewriteError(
            f"loop_pass got n_iter={n_iter} and predicate={predicate}",
            expected="exactly one of them; n_iter is at least 1",
        )

    @functools.wraps(base_pass)
    def wrapped(source: Any) -> Any:
        done = 0
        while done < n_iter if n_iter is not None else predicate is not None and predicate(source):
            source, done = base_pass(source), done + 1
        return source

    return wrapped


def these_before_those_pass_constraint(these: Callable, those: Callable) -> Callable:
    """Return a constraint: ``these`` comes before ``those``, however either is wrapped.

    Example:
        >>> follows = these_before_those_pass_constraint(min, max)
        >>> follows(min, max), follows(loop_pass(max, 2), min)
        (True, False)
    """
    return lambda a, b: inspect.unwrap(a) is not those or inspect.unwrap(b) is not these
