"""How do live objects become the plain data of a timeline?

Arguments, targets and module state are written as values of the schema in `timeline.py`: nodes as
row numbers, what JSON knows as itself, anything else as its shown form. File names become relative
here, so that a story never tells whose machine it was recorded on.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxlab.core.errors import cell_name
from fxlab.core.node import Node, target_text
from fxlab.display import shape_text
from fxlab.explorer.timeline import Place, Source

MAX_DEPTH = 40
MAX_TEXT = 10_000
MAX_BITS = 10_000  # Python neither writes nor reads an int of more than 4,300 digits
SAMPLES = 16
WINDOW = 60
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}")
PACKAGE = Path(__file__).resolve().parent.parent
ABSOLUTE = re.compile(r"(?<![\w.<])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"<>|,()]+){2,}")
RowOf = Callable[[Any], int]


def is_node(value: Any) -> bool:
    """Whether a value is a Node, fxlab's or torch.fx's."""
    return isinstance(value, (Node, torch.fx.Node))


def encode(value: Any, row_of: RowOf, depth: int = 0) -> Any:
    """A live argument as a value of the schema.

    Args:
        value: Anything that may stand in a Node's arguments.
        row_of: Gives the row number of a Node.
        depth: How deep inside an aggregate it stands.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        bits = value.bit_length()
        return value if bits <= MAX_BITS else {"text": f"<an integer of {bits:,} bits>"}
    if kind is float:
        return value if math.isfinite(value) else {"text": repr(value)}
    if kind is str:
        return value if len(value) <= MAX_TEXT else {"text": repr(value[:MAX_TEXT]) + "..."}
    if is_node(value):
        return {"row": row_of(value)}
    if isinstance(value, list | tuple | dict | slice):
        if depth >= MAX_DEPTH:
            return {"text": "...", "rows": [row_of(node) for node in nodes_in(value)]}
        if isinstance(value, list):
            return [encode(one, row_of, depth + 1) for one in value]
        if isinstance(value, tuple):
            return {"tuple": [encode(one, row_of, depth + 1) for one in value]}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return {"slice": [encode(one, row_of, depth + 1) for one in parts]}
        pairs = value.items()
        return {"dict": [[encode(part, row_of, depth + 1) for part in pair] for pair in pairs]}
    return {"text": shown_form(value)}


def nodes_in(value: Any) -> list[Any]:
    """The Nodes inside an argument of any depth, in order; no recursion."""
    found, stack = [], [value]
    while stack:
        one = stack.pop()
        if is_node(one):
            found.append(one)
        elif isinstance(one, dict):
            stack.extend(reversed(list(one.values())))
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif isinstance(one, slice):
            stack.extend((one.step, one.stop, one.start))
    return found


def shown_form(value: Any) -> str:
    """A short text for an object that JSON does not know; a hostile repr is no harm."""
    if isinstance(value, torch.Tensor):
        return f"tensor({shape_text(value)})"
    if isinstance(value, type) or inspect.isroutine(value):
        return target_text(value)
    try:
        text = repr(value)
    except Exception:  # somebody's __repr__; the story goes on without it
        text = f"<{type(value).__name__}>"
    text = scrubbed(ADDRESS.sub("at ...", text))
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def annotation(value: Any) -> str:
    """A type annotation in short, "" for none."""
    if value is None:
        return ""
    if isinstance(value, type) and not hasattr(value, "__args__"):
        return value.__name__
    return shown_form(value).replace("typing.", "")


def sample(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Some 16 of a tensor's numbers, at even distances; () where they can't be read."""
    try:
        plain = tensor.data
        count = plain.numel()
        if count <= SAMPLES:
            return (plain.tolist(),)
        if not plain.is_contiguous():
            return tuple(plain.reshape(-1)[:SAMPLES].tolist())
        return tuple(plain.as_strided((SAMPLES,), (count // SAMPLES,)).tolist())
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, meta, quantized, fake
        return ()


def checksum(tensor: torch.Tensor) -> str:
    """A short hash of `sample`."""
    return hashlib.blake2s(repr(sample(tensor)).encode(), digest_size=4).hexdigest()


def state_json(value: Any) -> dict[str, Any] | None:
    """A module, tensor or attribute as the schema's {"text", "tensors", "inner"}."""
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        inner = [path for path, _ in value.named_modules() if path]
        inner += [name for name, _ in tensors]
        return {
            "text": type(value).__name__,
            "tensors": {name: [shape_text(one), checksum(one)] for name, one in tensors[:64]},
            **({"inner": inner} if inner else {}),
        }
    if isinstance(value, torch.Tensor):
        return {"text": "tensor", "tensors": {"": [shape_text(value), checksum(value)]}}
    return {"text": shown_form(value)}


def relative_file(file: str) -> str:
    """A file name without anything of the machine: `fxlab/passes/fuse.py`, `In[7]`, `model.py`."""
    cell = cell_name(file)
    if cell is not None:
        return cell
    if file.startswith("<"):
        return re.sub(r"[\d.]+(?=>$)", "", file)
    path = Path(file)
    parts = path.parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) :])
    for base, prefix in ((PACKAGE, "fxlab"), (Path.cwd(), "")):
        if path.is_relative_to(base):
            return (Path(prefix) / path.relative_to(base)).as_posix()
    return path.name


def scrubbed(text: str) -> str:
    """A text with every absolute path in it made relative."""
    return ABSOLUTE.sub(lambda found: relative_file(found[0]), text)


class Places:
    """Collects the places that a story cites, and the source text of each."""

    def __init__(
        self,
        places: dict[Place, str | None],
        sources: dict[str, Source],
        lines: dict[str, list[str]] | None = None,
    ) -> None:
        self.places, self.sources = places, sources
        self.known: dict[tuple[str, int, str], Place] = {}
        self.stacks: dict[Any, tuple[Place, ...]] = {}
        self.lines: dict[str, list[str]] = dict(lines or {})

    def keep(self, file: str) -> None:
        """Read a file's lines now, before anybody edits it."""
        if file not in self.lines:
            self.lines[file] = linecache.getlines(file)

    def cite(self, frame: tuple[str, int, str]) -> Place:
        """The place of a frame `(file, line, function)`; its function's text is stored once."""
        place = self.known.get(frame)
        if place is None:
            file, line, function = frame
            place = self.known[frame] = Place(relative_file(file), line, function)
            self.places[place] = self._source(file, line, function, place.file)
        return place

    def cite_all(self, frames: Any) -> tuple[Place, ...]:
        """The places of some frames; equal stacks share one tuple."""
        frames = tuple(frames)
        places = self.stacks.get(frames)
        if places is None:
            places = tuple([self.cite(tuple(frame)) for frame in frames])
            self.stacks[frames] = places
        return places

    def _source(self, file: str, line: int, function: str, shown: str) -> str | None:
        self.keep(file)
        lines = self.lines[file]
        if not 0 < line <= len(lines):
            return None
        start, end = function_span(lines, line, function)
        text = "".join(lines[start - 1 : end])
        key = hashlib.blake2s(f"{shown}:{start}:{text}".encode(), digest_size=6).hexdigest()
        self.sources[key] = Source(shown, start, text)
        return key

    def function_source(self, function: Any) -> str | None:
        """The source key of a function or class given as an object, or None."""
        function = inspect.unwrap(function) if callable(function) else function
        code = getattr(function, "__code__", None) or getattr(
            vars(type(function)).get("__call__"), "__code__", None
        )
        if code is None:
            return None
        file, line = code.co_filename, code.co_firstlineno
        return self._source(file, line, code.co_name, relative_file(file))


def function_span(lines: list[str], line: int, function: str) -> tuple[int, int]:
    """First and last line number of the function of that name that holds `line`.

    Module code, lambdas and what cannot be found give a window around the line.
    """
    head = re.compile(rf"\s*(async\s+)?def\s+{re.escape(function)}\s*[\(\[]|\s*@")
    here = _indent(lines[line - 1])
    if function.isidentifier():
        for start in range(line, 0, -1):
            text = lines[start - 1]
            if head.match(text) and (start == line or _indent(text) < here or "@" in text):
                block = _block(lines[start - 1 :])
                if start + block > line and f"def {function}" in "".join(
                    lines[start - 1 : start - 1 + block]
                ):
                    while start > 1 and lines[start - 2].lstrip().startswith("@"):
                        start, block = start - 1, block + 1
                    return start, start - 1 + block
    return max(1, line - WINDOW), min(len(lines), line + WINDOW)


def _block(lines: list[str]) -> int:
    try:
        return len(inspect.getblock(lines))
    except (SyntaxError, IndentationError):
        return 1


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
