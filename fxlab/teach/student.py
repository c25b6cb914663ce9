"""How does a grader talk to a student's code without ever running any of it itself?

A `Student` is the trusted end of one process that holds one answer. Every request has a limit of
time; when it is over the process and all that it started are ended and the call says so. What
comes back is read by `wire.decode`, which trusts nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fxlab.teach import process, wire
from fxlab.teach.exercise import Finding
from fxlab.teach.limits import AnswerError

WALL = 5  # a call that waits instead of computing may take so many times its CPU seconds
FORKS = sys.platform == "linux"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def _environment() -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


class Server:
    """A process that has torch imported and forks one process for each answer (Linux only)."""

    def __init__(self) -> None:
        self.control, other = socket.socketpair()
        command = [sys.executable, "-m", "fxlab.teach.process", "server", str(other.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[other.fileno()], env=_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        other.close()
        self.lines = self.control.makefile("rb")
        self.lines.readline()  # "ready"

    def fork(
        self, folder: str, memory: int, loads: tuple[str, ...] = ()
    ) -> tuple[socket.socket, int]:
        """A channel to a new process, which has the modules `loads` imported, and its pid."""
        mine, theirs = socket.socketpair()
        order = json.dumps({"folder": folder, "memory": memory, "loads": loads})
        socket.send_fds(self.control, [order.encode()], [theirs.fileno()])
        theirs.close()
        return mine, json.loads(self.lines.readline())["pid"]

    def wait(self) -> int:
        """Wait until the last forked process and all that it started are gone.

        Returns:
            Its exit status; minus a signal's number if one ended it.
        """
        return json.loads(self.lines.readline())["ended"]

    def close(self) -> None:
        """End the server."""
        self.lines.close()
        self.control.close()
        self.process.kill()
        self.process.wait()


class Student:
    """One process with one answer in it. A context manager.

    Args:
        server: Forks the process; None: it is a Python of its own.
        files: Files that the process may read, copied to a temporary folder; its working folder.
        seconds: CPU seconds of one call.
        memory: Bytes beyond what torch itself takes.
        loads: Modules that the server has to have imported, see `Part.loads`.
    """

    def __init__(
        self,
        server: Server | None = None,
        files: tuple[Path, ...] = (),
        seconds: float = process.SECONDS,
        memory: int = process.MEMORY,
        loads: tuple[str, ...] = (),
    ) -> None:
        self.server, self.seconds, self.printed = server, seconds, ""
        self.shape: list[str] = []
        self.folder = tempfile.mkdtemp(prefix="fxlab-")
        for file in files:
            with contextlib.suppress(OSError):
                shutil.copy(file, self.folder)
        self.python: subprocess.Popen[Any] | None = None
        self.socket: socket.socket | None = None
        self.pid, self.late, self.ended, self.status = 0, False, False, 0
        if server is not None:
            self.socket, self.pid = server.fork(self.folder, memory, loads)
        else:
            self._start_python(memory)
        if self.socket is not None:
            self.reading: BinaryIO = self.socket.makefile("rb")
            self.writing: BinaryIO = self.socket.makefile("wb")

    def _start_python(self, memory: int) -> None:
        base = [sys.executable, "-m", "fxlab.teach.process"]
        common: dict[str, Any] = {"env": _environment(), "cwd": self.folder}
        if os.name == "posix":
            self.socket, other = socket.socketpair()
            self.python = subprocess.Popen(
                [*base, "socket", str(other.fileno()), str(memory)],
                pass_fds=[other.fileno()], start_new_session=True, **common,
            )  # fmt: skip
            other.close()
        else:
            self.python = subprocess.Popen(
                [*base, "pipes", str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, **common,
            )  # fmt: skip
            self.reading = self.python.stdout  # type: ignore[assignment]
            self.writing = self.python.stdin  # type: ignore[assignment]
        assert self.python is not None
        self.pid = self.python.pid

    @property
    def wall(self) -> float:
        """Seconds after which a call is ended that waits, or computes on a busy machine."""
        return max(self.seconds * WALL, 10.0)

    def __enter__(self) -> Student:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def kill(self) -> None:
        """End the process and what it started; whoever waits for its answer gets none."""
        if os.name == "posix":
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        if self.python is not None:
            self.python.kill()
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and remove its folder."""
        if self.ended:
            return
        self.ended = True
        self.kill()
        for stream in (self.reading, self.writing):
            with contextlib.suppress(OSError):
                stream.close()
        if self.socket is not None:
            self.socket.close()
        if self.python is not None:
            self.status = self.python.wait()
        elif self.server is not None:
            self.status = self.server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        part: str,
        cells: list[str],
        marked: int | None = None,
        course: int | None = None,
    ) -> None:
        """Define the answer of a part from a notebook's code cells.

        Args:
            part: The part's id.
            cells: Source of each code cell.
            marked: Number of the cell that carries the part's nbgrader id.
            course: Number of the course whose variants were handed out, or None.

        Raises:
            AnswerError: No cell defines it, or its cell stops.
        """
        request = {"do": "start", "part": part, "cells": cells, "marked": marked,
                   "seconds": self.seconds, "course": course}  # fmt: skip
        # A Python of its own has to import torch first.
        extra = 0 if self.server is not None else 120
        found = self.read(self.exchange(wire.encode(request), extra))
        self.shape = [str(one) for one in found.get("shape") or ()][:4000]

    def call(self, args: tuple[Any, ...]) -> Any:
        """What the answer returns for these arguments.

        Raises:
            AnswerError: It raised, took too long, or its process ended.
        """
        return self.read(self.exchange(call_message(args))).get("value")

    def exchange(self, message: bytes, extra: float = 0) -> bytes:
        """Send one request and return the bytes of the response.

        Raises:
            AnswerError: The time was over, or the process ended.
        """
        if self.ended:
            raise AnswerError("lost", "its process ended before")
        timer = threading.Timer(self.wall + extra, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            wire.send(self.writing, message)
            response = wire.receive(self.reading)
        except (EOFError, OSError, ValueError):
            raise self._lost() from None
        except wire.WireError as error:
            raise AnswerError("type", f"what it returned can't be judged: {error}") from None
        finally:
            timer.cancel()
        return bytes(response)

    def read(self, response: bytes) -> dict[str, Any]:
        """What a response says.

        Raises:
            AnswerError: It says that the answer could not be called to its end.
        """
        try:
            answer = wire.decode(response)
        except wire.WireError as error:
            raise AnswerError("type", f"what it returned can't be judged: {error}") from None
        if not isinstance(answer, dict):
            raise AnswerError("type", "what it returned can't be judged")
        self.printed = text_of(answer.get("printed"))
        error = answer.get("error")
        if not isinstance(error, dict):
            return answer
        kind = text_of(error.get("kind"))
        found = AnswerError(kind, text_of(error.get("sentence")), text_of(error.get("trace")))
        if error.get("actual") is not None:
            actual = text_of(error["actual"])
            found.finding = Finding(found.sentence, text_of(error.get("node")), actual=actual)
        raise found

    def _let_it_end(self) -> None:
        """Give a process that is ending by itself the time to, so that its status is its own."""
        if self.python is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.python.wait(2)
            return
        for _ in range(100):
            try:
                os.kill(self.pid, 0)
            except OSError:
                return
            time.sleep(0.02)

    def _give_up(self) -> None:
        self.late = True
        self.kill()

    def _lost(self) -> AnswerError:
        if not self.late:
            self._let_it_end()
        self.close()
        if self.late:
            sentence = f"no answer within {self.wall:g} s: it was stopped"
            return AnswerError("time", sentence)
        name = signal.Signals(-self.status).name if self.status < 0 else ""
        if name == "SIGXCPU":
            sentence = f"stopped after {self.seconds:g} CPU s, inside one call of a library"
            return AnswerError("time", sentence)
        how = f"by {name}" if name else f"with exit code {self.status}"
        return AnswerError("lost", f"its process ended {how}: your code left Python or crashed it")


def call_message(args: tuple[Any, ...]) -> bytes:
    """The request that calls an answer."""
    return wire.encode({"do": "call", "args": args})


def text_of(value: Any) -> str:
    """A short text from the other side, whatever it sent."""
    return value[:4000] if isinstance(value, str) else ""
