"""What runs in the process of a student's code?

It gets the notebook's cells and then calls, and answers each with a value or an error; both cross
as `wire.py` writes them. It sets its own limits of CPU time and memory before it runs the first
line of the student's. On Linux one server (`serve`) imports torch once and forks a process for each
exercise of each student; elsewhere every exercise starts a Python of its own. Either way no two
exercises share a process. This keeps honest mistakes apart; it is no sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.teach import slicing, variants, wire
from fxlab.teach.exercise import exercises, part
from fxlab.teach.limits import AnswerError, Guard, functions_of

MEMORY = 2 << 30  # bytes that an answer may take beyond what the process has at the start
SECONDS = 5.0  # CPU seconds of one call
TOTAL = 60  # CPU seconds of all calls of one exercise
_DIES_WITH_PARENT, _ADOPTS_ORPHANS = 1, 36  # of prctl


class Answers:
    """Serves one exercise: `start` with the cells, then `call` as often as asked."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.guard = Guard("")
        self.part: Any = None

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Define the answer from the notebook's cells."""
        variants.use_course(request["course"])
        owner, self.part = part(request["part"])
        asks = self.part.asks or owner.asks
        self.guard = Guard(self.part.id, asks, request["seconds"], cpu=True)
        cells: list[str] = request["cells"]
        found, broken = slicing.statements(cells)
        chosen = slicing.answer(found, self.part.name, request["marked"])
        if not chosen:
            return {"error": self._missing(cells, broken, request["marked"])}
        space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        failed = self.guard.call(slicing.run, chosen, cells, space)
        if self.part.name not in space:
            error = failed[-1][1] if failed else NameError(self.part.name)
            told = self.guard.explained(error)
            sentence = f"the cell that defines {self.part.name} stops: {told.sentence}"
            return {"error": {"kind": "missing", "sentence": sentence, "trace": told.trace}}
        self.answer = space[self.part.name]
        return {"ready": True, "shape": shape_of(chosen, self.part.name)}

    def _missing(
        self, cells: list[str], broken: dict[int, str], marked: int | None
    ) -> dict[str, Any]:
        name = self.part.name
        sentence = f"no cell of the notebook defines {name}"
        for number, why in broken.items():
            if number == marked or f"{name}(" in cells[number] or f"{name} " in cells[number]:
                sentence = f"the cell that should define {name} can't be read: {why}"
        return {"kind": "missing", "sentence": sentence, "trace": ""}

    def call(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Call the answer once."""
        random.seed(0)
        torch.manual_seed(0)
        _limit_call(self.guard.seconds + 2)
        return {"value": self.guard.call(self.part.entry, self.answer, *args)}

    def respond(self, message: bytearray) -> bytes:
        """The response to one request."""
        answer: dict[str, Any]
        try:
            request = wire.decode(message)
            answer = self.start(request) if request["do"] == "start" else self.call(request["args"])
        except AnswerError as error:
            answer = {"error": told(error)}
        except MemoryError:
            answer = {"error": told(AnswerError("memory", "it ran out of memory"))}
        answer["printed"] = str(self.guard.printed)
        try:
            return wire.encode(answer)
        except wire.WireError as error:
            wrong = AnswerError("type", f"what it returned can't be judged: {error}")
            return wire.encode({"error": told(wrong), "printed": ""})


def told(error: AnswerError) -> dict[str, Any]:
    """An AnswerError as plain data."""
    finding = error.finding
    data: dict[str, Any] = {"kind": error.kind, "sentence": error.sentence, "trace": error.trace}
    if finding is not None:
        actual = finding.actual
        data |= {"node": finding.node, "actual": None if actual is None else str(actual)}
    return data


def shape_of(chosen: list[slicing.Statement], name: str) -> list[str]:
    """An answer's normalised syntax, one token a node of the tree, for `--similar`."""
    import ast

    tokens = []
    for one in chosen:
        if isinstance(one.node, ast.Import | ast.ImportFrom):
            continue
        for node in ast.walk(one.node):
            word = type(node).__name__
            if isinstance(node, ast.Attribute):
                word += "." + node.attr
            if not isinstance(node, ast.Load | ast.Store | ast.Constant | ast.Name):
                tokens.append(word)
    return tokens[:4000]


def respond_until_closed(reading: BinaryIO, writing: BinaryIO, memory: int) -> None:
    """Answer requests until the other side is gone."""
    answers = Answers()
    limit(memory)
    warnings.simplefilter("ignore")
    while True:
        try:
            message = wire.receive(reading)
        except (EOFError, OSError, wire.WireError):
            return
        wire.send(writing, answers.respond(message))


def limit(memory: int) -> None:
    """Set the limits of this process, as far as the system has them."""
    torch.set_num_threads(1)
    try:
        import resource
    except ImportError:  # not on Windows: the grader's own clock remains
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + TOTAL, used + TOTAL + 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_call(seconds: float) -> None:
    """Let the system end this process if a call computes on where no Python line is reached."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(time.process_time() + seconds) + 1
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _quiet() -> None:
    """Send what is written past Python's own streams to nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def die_with_parent() -> None:
    """Let the system end this process when its parent is gone (Linux)."""
    _prctl(_DIES_WITH_PARENT, 9)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(control: socket.socket) -> None:
    """Fork a process for each channel that arrives over `control`, one after the other."""
    die_with_parent()
    _prctl(_ADOPTS_ORPHANS, 1)
    exercises()
    warm()
    control.sendall(b"ready\n")
    loaded: set[str] = set()
    while True:
        request, channels, _, _ = socket.recv_fds(control, 65536, 1)
        if not request:
            return
        order = json.loads(request)
        if new := set(order["loads"]) - loaded:
            _load(new)
            loaded |= new
        pid = os.fork()
        if pid == 0:
            _child(control, channels[0], order)
        os.close(channels[0])
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _end_all(pid)
        control.sendall(json.dumps({"ended": status}).encode() + b"\n")


def warm() -> None:
    """Fill the tables that the first call of any answer would fill, once for all forks.

    Nothing of a student's has been read before, and nothing here computes with tensors: a thread
    of torch's would be missing in the forks.
    """
    for owner in exercises():
        for one in owner.parts:
            for name in one.asks or owner.asks:
                functions_of(name)
    graph = Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    gm: Any = wire.decode(wire.encode(GraphModule(torch.nn.Module(), graph)))
    gm.graph.lint()
    str(gm.code)
    _load(set())


def _load(names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # what is not here fails in the call that asks
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the forks stays shared


def _child(control: socket.socket, channel: int, order: dict[str, Any]) -> None:
    try:
        os.setsid()
        die_with_parent()
        control.close()
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
        with socket.socket(fileno=channel) as own:
            respond_until_closed(own.makefile("rb"), own.makefile("wb"), order["memory"])
    finally:
        os._exit(0)


def _end_all(pid: int) -> None:
    """End what a student's process left behind: its group, then orphans that came to us."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for _ in range(1000):
        children = _children()
        if not children:
            return
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    try:
        path = Path(f"/proc/self/task/{os.getpid()}/children")
        return [int(one) for one in path.read_text(encoding="ascii").split()]
    except OSError:
        return []


def main() -> None:
    """Run as `python -m fxlab.teach.process`: "server FD", "socket FD MEMORY" or "pipes MEMORY"."""
    kind, *rest = sys.argv[1:]
    if kind == "pipes":
        descriptors = [os.dup(0), os.dup(1)]
        if sys.platform == "win32":
            import msvcrt

            for descriptor in descriptors:
                msvcrt.setmode(descriptor, os.O_BINARY)
        reading, writing = os.fdopen(descriptors[0], "rb"), os.fdopen(descriptors[1], "wb")
        _quiet()
        respond_until_closed(reading, writing, int(rest[0]))
        return
    with socket.socket(fileno=int(rest[0])) as own:
        _quiet()
        if kind == "server":
            serve(own)
        else:
            respond_until_closed(own.makefile("rb"), own.makefile("wb"), int(rest[1]))


if __name__ == "__main__":
    main()
