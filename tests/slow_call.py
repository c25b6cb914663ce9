"""A blocking call of a server in another process, work beside it, and how much they overlap."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import nn

import fxlab
from fxlab.core.purity import pure
from fxlab.passes.schedule import hoist_async
from tests.clocks import HANGS

SECONDS = 0.02  # of the call and of the work
Span = tuple[float, float]

_line: list = []  # the connection to the server, and its process id
_spans: dict[str, Span] = {}


def _serve(connection: Connection, seconds: float) -> None:
    while (key := connection.recv()) is not None:
        time.sleep(seconds)
        connection.send((os.getpid(), key * 2))


@contextmanager
def server() -> Iterator[multiprocessing.process.BaseProcess]:
    """Start a server that takes `SECONDS` for an answer; end it afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, SECONDS), daemon=True)
    process.start()
    _line[:] = [ours, process.pid]
    try:
        ask(0.0)  # it has started
        yield process
    finally:
        ours.send(None)
        process.join(HANGS)


def ask(key: float) -> float:
    """A blocking call of the server at the other end of the line."""
    connection, pid = _line
    start = time.perf_counter()
    connection.send(key)
    answered_by, value = connection.recv()
    _spans["call"] = start, time.perf_counter()
    assert answered_by == pid != os.getpid()
    return value


@pure
def busy(x: torch.Tensor) -> torch.Tensor:
    """Work of `SECONDS` on this processor: sleeps would not compete for it."""
    start = time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        x = torch.tanh(x @ x)
    _spans["work"] = start, time.perf_counter()
    return x


def _work_then_ask(x: torch.Tensor, key: float) -> tuple[torch.Tensor, float]:
    y = busy(x)
    return y, ask(key)


def programs() -> tuple[fxlab.GraphModule, fxlab.GraphModule]:
    """Return the program ``(x, key) -> (y, answer)`` as it is written, and hoisted."""
    tracer = fxlab.Tracer(autowrap_functions=(ask, busy))
    made = [fxlab.GraphModule(nn.Module(), tracer.trace(_work_then_ask)) for _ in range(2)]
    return made[0], hoist_async(made[1], ask)


def share_at_once(run: Callable[[], object]) -> float:
    """Run a program; return the time in which call and work ran at once, over the shorter one.

    By the clock at their starts and ends: what else the machine does makes both longer, and is not
    taken for a call that waits.
    """
    run()
    call, work = _spans["call"], _spans["work"]
    together = min(call[1], work[1]) - max(call[0], work[0])
    return max(0.0, together) / min(call[1] - call[0], work[1] - work[0])
