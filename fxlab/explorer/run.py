"""How is a pass, or the program itself, run inside a recording?

`run_pass` gives a pass its own name in the story. A run is a story too: one step per executed node
(paper section 6.3, an Interpreter that looks at values). Each step holds the value's shape and
numbers in short, what was freed behind it, and how many bytes were alive then.
"""

from __future__ import annotations

import base64
import functools
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlab.core.graph import Graph
from fxlab.display import shape_text
from fxlab.explorer.events import Event
from fxlab.explorer.given import as_passes, pass_name
from fxlab.explorer.nearness import without_data
from fxlab.explorer.record import Recorder
from fxlab.explorer.sameness import converted, private_copy
from fxlab.explorer.sentences import article
from fxlab.passes.base import made_by

BINS = 16
SAMPLE = 200_000
THUMB = 16  # pixels a side
THUMBS = 1_000  # a longer run has no thumbnails, which would be most of its story


def record_run(recorder: Recorder, gm: Any, inputs: Sequence[Any]) -> Any:
    """Run `gm` node by node and append one step per node; return what it returns.

    Args:
        recorder: The steps go there, as a span of kind `run`.
        gm: A GraphModule; a private copy of it is run, so its buffers stay as they are.
        inputs: Its arguments.
    """
    from fxlab.core.interpreter import Interpreter

    span = recorder.begin("run", "run")
    private = private_copy(gm, None)
    live_nodes = dict(zip(private.graph.nodes, gm.graph.nodes, strict=True))
    memory = Memory(private.graph)
    few = len(live_nodes) <= THUMBS
    seconds: list[tuple[Any, float]] = []
    alive: list[tuple[Any, float]] = []
    base: Any = Interpreter if isinstance(gm.graph, Graph) else torch.fx.Interpreter

    class Watcher(base):
        """Notes every value."""

        def run_node(self, n: Any) -> Any:
            start = time.perf_counter()
            value = super().run_node(n)
            spent = time.perf_counter() - start
            freed = [live_nodes[one] for one in memory.take(n, value)]
            fields = {**statistics(value), "live_bytes": memory.bytes, "seconds": spent}
            if few:
                fields["thumbnail"] = thumbnail(value)
            node = live_nodes[n]
            seconds.append((node, spent))
            alive.append((node, float(memory.bytes)))
            after = {"json": fields, "text": "", "freed": freed}
            where = node.meta.get("source", ())
            recorder.events.append(Event("value", gm.graph, node, None, after, where))
            return value

    failure = None
    result = None
    with torch.no_grad():
        try:
            result = Watcher(private).run(*converted(tuple(inputs), None))
        except Exception as error:  # the program's own error is the last step
            from fxlab.explorer.trace import add_error

            failure = error
            add_error(recorder, gm.graph, error)
    span.columns = {"seconds": seconds, "live_bytes": alive}
    span.result, span.last, span.end = gm, len(recorder.events), recorder.boundary(gm)
    recorder.open = None
    if failure is not None:
        raise failure
    return result


class Memory:
    """Which values are alive, and how many bytes their storages hold (views count once)."""

    def __init__(self, graph: Any) -> None:
        self.dies: dict[Any, list[Any]] = {}
        last: dict[Any, Any] = {}
        for node in graph.nodes:
            last[node] = node
            for source in node.all_input_nodes:
                last[source] = node
        for node, reader in last.items():
            self.dies.setdefault(reader, []).append(node)
        self.held: dict[Any, list[int]] = {}
        self.storages: dict[int, list[int]] = {}
        self.bytes = 0

    def take(self, node: Any, value: Any) -> list[Any]:
        """Count a new value in and those out that nobody reads later; return the latter."""
        keys = []
        parameter = node.op == "get_attr"
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and not parameter and node.op != "output":
                key, size = storage_of(leaf)
                keys.append(key)
                counts = self.storages.setdefault(key, [0, size])
                if counts[0] == 0:
                    self.bytes += size
                counts[0] += 1
        self.held[node] = keys
        freed = [] if node.op == "output" else self.dies.get(node, [])
        for one in freed:
            for key in self.held.pop(one, ()):
                counts = self.storages[key]
                counts[0] -= 1
                if counts[0] == 0:
                    self.bytes -= counts[1]
        return [one for one in freed if one is not node]


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A key and the bytes of a tensor's storage."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or id(tensor), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, fake
        return id(tensor), tensor.numel() * tensor.element_size()


def statistics(value: Any) -> dict[str, Any]:
    """Shape, dtype and numbers in short of one value; null where there are none."""
    tensor = next((one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)), None)
    fields: dict[str, Any] = {
        "shape": shape_text(value),
        "dtype": "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        "min": None,
        "mean": None,
        "max": None,
        "histogram": [],
        "bytes": sum(
            one.numel() * one.element_size()
            for one in pytree.tree_leaves(value)
            if isinstance(one, torch.Tensor)
        ),
    }
    empty = tensor is None or tensor.numel() == 0 or without_data(tensor)
    if tensor is None or empty or tensor.is_complex() or tensor.is_sparse:
        return fields
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)].to(torch.float64)
    finite = flat[flat.isfinite()]
    fields["odd"] = int(flat.numel() - finite.numel())
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        fields.update(min=low, mean=float(finite.mean()), max=high)
        counts = torch.histc(finite, BINS, low, high if high > low else low + 1)
        fields["histogram"] = [int(one) for one in counts]
    return fields


def thumbnail(value: Any) -> str | None:
    """A small grey picture of a value's last two dimensions: a PNG in base64, or None.

    Args:
        value: Anything; pictured is its first tensor, at index 0 of all other dimensions. The
            smallest number is black, the largest white, infinities and NaN count as 0.
    """
    tensor = next((one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)), None)
    plain = tensor is not None and tensor.layout == torch.strided and not without_data(tensor)
    if tensor is None or not plain or tensor.is_complex() or tensor.dim() < 2 or not tensor.numel():
        return None
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    flat = tensor.detach()[(0,) * (tensor.dim() - 2)].to("cpu", torch.float32)
    flat = torch.nan_to_num(flat, 0.0, 0.0, 0.0)
    height, width = (min(THUMB, size) for size in flat.shape)
    small = torch.nn.functional.adaptive_avg_pool2d(flat[None, None], (height, width))[0, 0]
    low, high = float(small.min()), float(small.max())
    pixels = ((small - low) * (255 / (high - low) if high > low else 0)).to(torch.uint8)
    lines = b"".join(b"\0" + bytes(line) for line in pixels.tolist())
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return base64.b64encode(png).decode("ascii")


def run_pass(recorder: Recorder, pass_: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run one pass inside a recording and return the module to go on with."""
    inner = as_passes([pass_])[0]
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = pass_name(pass_)
    if recorder.live:
        return _run_span(recorder, name, inner, pass_, args, kwargs)
    recorder.listen()
    try:
        return _run_span(recorder, name, inner, pass_, args, kwargs)
    finally:
        recorder.stop()


def _run_span(recorder: Recorder, name: str, inner: Any, pass_: Any, args: Any, kwargs: Any) -> Any:
    span = recorder.begin(name, function=inner)
    gm = recorder.current
    with made_by(name):
        result = pass_(gm, *args, **kwargs)
    result = getattr(result, "graph_module", result)
    if result is None or not hasattr(result, "graph"):
        if result is not None:
            what = article(type(result).__name__)
            span.unmatched.append(
                f"{name} returned {what}, which is no GraphModule: shown is what it did to the "
                "module that it was given"
            )
        result = gm
    recorder.close(span, result)
    return result
