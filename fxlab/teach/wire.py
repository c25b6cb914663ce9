"""What crosses the pipe between a grader and the process that runs a student's code?

Plain data and tensors: JSON with the tensors' raw bytes behind it. Reading it never runs anybody's
code: nothing is unpickled or evaluated, functions and module classes come from closed tables
(torch's operators as `fxlab.interop` lists them, the layers of torch.nn, the kit's own, and what an
exercise marks with `known`), and a module is its class, its plain attributes and its tensors. Both
sides may be read by the other without trust.
"""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import functools
import importlib
import inspect
import json
import math
import struct
from typing import Any, BinaryIO, TypeVar

import torch
from torch import nn

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, target_text
from fxlab.interop import graph_from_json, graph_to_json
from fxlab.interop.targets import Opaque

LARGEST = 256 << 20  # bytes of one message
DEEPEST = 60  # nesting of a value
_HEAD = struct.Struct(">QQ")  # bytes of JSON, bytes of tensors
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_KIT = ("observers", "modules", "qat")  # of fxlab.passes.quantize
_BUILTINS = (
    "dict list tuple set slice len max min sum abs round int float bool range sorted".split()
)
_known: dict[str, Any] = {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS}
_T = TypeVar("_T")


class WireError(Exception):
    """A value can't be sent, or what arrived is no message of ours."""


def known(thing: _T) -> _T:
    """Mark a function, module class or dataclass of an exercise as one that may cross the pipe.

    Both sides import the exercise, so its name is enough. Usable as decorator.
    """
    _known[f"{thing.__module__}.{thing.__qualname__}"] = thing  # type: ignore[attr-defined]
    return thing


@functools.cache
def _classes() -> dict[str, Any]:
    found = [one for one in vars(nn).values() if inspect.isclass(one)]
    found.append(nn.modules.linear.NonDynamicallyQuantizableLinear)  # inside MultiheadAttention
    for room in _KIT:
        module = importlib.import_module(f"fxlab.passes.quantize.{room}")
        found += [
            one
            for one in vars(module).values()
            if inspect.isclass(one) and one.__module__ == module.__name__
        ]
    return {
        f"{one.__module__}.{one.__qualname__}": one
        for one in found
        if issubclass(one, nn.Module) or dataclasses.is_dataclass(one) or one.__name__ == "Packed"
    }


def _class(name: Any) -> Any:
    found = _known.get(name) or _classes().get(name) if isinstance(name, str) else None
    if not inspect.isclass(found):
        raise WireError(f"{name!r} is not in the table of classes")
    return found


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# -- writing ---------------------------------------------------------------------------------------


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.blobs: list[bytes] = []
        self.length = 0
        self.seen: dict[int, int] = {}
        self.modules: dict[int, int] = {}
        self.alive: list[Any] = []  # what `seen` names by id must stay

    def value(self, value: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise WireError(f"it is nested more than {DEEPEST} deep")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, torch.Size):
            return {"size": [int(one) for one in value]}
        if isinstance(value, tuple):
            return {"tuple": [self.value(one, depth + 1) for one in value]}
        if isinstance(value, dict):
            pairs = value.items()
            return {"dict": [[self.value(part, depth + 1) for part in pair] for pair in pairs]}
        if isinstance(value, list):
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, set | frozenset):
            parts = [self.value(one, depth + 1) for one in value]
            return {"set": sorted(parts, key=lambda part: json.dumps(part, sort_keys=True))}
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, slice):
            return {
                "slice": [self.value(p, depth + 1) for p in (value.start, value.stop, value.step)]
            }
        if isinstance(value, nn.Module):
            return self.module(value, depth)
        if isinstance(value, bool | int | float | str):  # a subclass of one of them
            base = next(b for b in (bool, int, float, str) if isinstance(value, b))
            return self.value(base(value), depth)
        name = _name_of(kind)
        if name in _known or name in _classes():
            if not dataclasses.is_dataclass(value):
                return {"new": name}
            fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            return {"data": name, "fields": self.value(fields, depth + 1)}
        function = target_text(value) if callable(value) and not isinstance(value, type) else ""
        if function and _function(function) is value:
            return {"function": function}
        if isinstance(value, Node):
            raise WireError(f"it holds the node {value.name}: give its name instead")
        raise WireError(f"it holds a {kind.__name__}, which can't leave its process")

    def tensor(self, value: torch.Tensor) -> Any:
        if id(value) in self.seen:
            return {"tensor": self.seen[id(value)]}
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise WireError(f"it holds a tensor of layout {value.layout} on {value.device}")
        plain = value.detach().to("cpu").contiguous()
        size = plain.numel() * plain.element_size()
        if self.length + size > LARGEST:
            raise WireError(f"its tensors have more than {LARGEST >> 20} MB")
        self.alive += [value, plain]
        number = self.seen[id(value)] = len(self.tensors)
        self.tensors.append({
            "dtype": str(value.dtype), "shape": list(value.shape), "at": self.length, "bytes": size,
            "parameter": isinstance(value, nn.Parameter), "gradient": value.requires_grad,
        })  # fmt: skip
        self.blobs.append(ctypes.string_at(plain.data_ptr(), size) if size else b"")
        self.length += size
        return {"tensor": number}

    def module(self, module: nn.Module, depth: int) -> Any:
        if id(module) in self.modules:
            return {"same": self.modules[id(module)]}
        number = self.modules[id(module)] = len(self.modules)
        graph = isinstance(module, GraphModule)
        kind = _name_of(type(module))
        if not graph and kind not in _known and kind not in _classes():
            raise WireError(f"it holds a {type(module).__name__}, which is no layer of torch.nn")
        state = dict(vars(module))
        for name in [name for name in state if "_hooks" in name]:
            if state.pop(name) and name.endswith("_hooks"):
                raise WireError(f"a {type(module).__name__} in it has hooks")
        parts = {name: state.pop(f"_{name}") for name in ("parameters", "buffers", "modules")}
        plain = {}
        for name, value in state.items():
            own = name.startswith("_") and not isinstance(value, torch.Tensor)
            if graph and (own or name in ("meta", "shape_env", "graph")):
                continue
            if name in _FRAME:
                continue
            plain[name] = self.value(value, depth + 1)
        entry = {
            "class": "GraphModule" if graph else kind,
            "number": number,
            "name": type(module).__name__,
            "attributes": plain,
            **{key: [[n, self.value(v, depth + 1)] for n, v in part.items()]
               for key, part in parts.items()},
            "temporary": sorted(module._non_persistent_buffers_set),
        }  # fmt: skip
        if isinstance(module, GraphModule):
            _only_known(module)
            entry["graph"] = _bare(graph_to_json(module.graph))
        return {"module": entry}


_FRAME = frozenset(("_non_persistent_buffers_set", "_is_full_backward_hook"))


def _only_known(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, Opaque):
            name = target_text(node.target)
            if _function(name) is not node.target:
                raise WireError(
                    f"it calls {name}, which is none of torch's or Python's functions: use those"
                )


def _bare(graph: dict[str, Any]) -> dict[str, Any]:
    """Graph JSON without provenance: places in files are nobody's business on the other side."""
    for node in graph["nodes"]:
        meta = node["meta"]
        node["meta"] = {"tensor": meta["tensor"]} if "tensor" in meta else {}
    return graph


def encode(value: Any) -> bytes:
    """A value as a message.

    Raises:
        WireError: It holds what can't be sent; the sentence begins with "it".
    """
    writer = _Writer()
    try:
        data = {"value": writer.value(value), "tensors": writer.tensors}
        text = json.dumps(data, separators=(",", ":")).encode()
    except (RecursionError, ValueError) as error:
        raise WireError(f"it can't be written as JSON: {error}") from None
    if len(text) + writer.length > LARGEST:
        raise WireError(f"it is larger than {LARGEST >> 20} MB")
    return b"".join([_HEAD.pack(len(text), writer.length), text, *writer.blobs])


# -- reading ---------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, tensors: Any, blob: memoryview) -> None:
        if not isinstance(tensors, list):
            raise WireError("a message has a list of tensors")
        self.entries, self.blob = tensors, blob
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: dict[Any, nn.Module] = {}

    def value(self, data: Any, depth: int = 0) -> Any:
        if depth > 3 * DEEPEST:
            raise WireError("a message is nested too deep")
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, list):
            return [self.value(one, depth + 1) for one in data]
        if not isinstance(data, dict) or not data:
            raise WireError("a value is no value of ours")
        if len(data) == 2 and set(data) == {"data", "fields"}:
            return self.record(data, depth)
        kind, content = next(iter(data.items()))
        if len(data) != 1:
            raise WireError(f"a value has the keys {sorted(map(str, data))[:5]}")
        if kind == "tensor":
            return self.tensor(content)
        if kind == "module":
            return self.module(content, depth)
        if kind == "same":
            return self.modules[content]
        if kind == "float":
            return float(content)
        if kind == "dtype":
            return _DTYPES[content]
        if kind == "device":
            return torch.device(content)
        if kind == "function":
            return _function(content)
        if kind == "new":
            return _class(content)() if _class(content).__name__ == "Packed" else None
        if not isinstance(content, list):
            raise WireError(f"a {kind} is no list")
        parts = [self.value(one, depth + 1) for one in content]
        if kind == "tuple":
            return tuple(parts)
        if kind == "size":
            return torch.Size(parts)
        if kind == "set":
            return set(parts)
        if kind == "slice":
            return slice(*parts)
        if kind == "dict":
            return dict(parts)
        raise WireError(f"there is no kind of value {kind!r}")

    def record(self, data: Any, depth: int) -> Any:
        kind, fields = _class(data["data"]), self.value(data["fields"], depth + 1)
        if not dataclasses.is_dataclass(kind) or not isinstance(fields, dict):
            raise WireError(f"{data['data']!r} is no dataclass")
        make: Any = kind
        return make(**fields)

    def tensor(self, number: Any) -> torch.Tensor:
        if number in self.tensors:
            return self.tensors[number]
        entry = self.entries[number]
        dtype, shape = _DTYPES[entry["dtype"]], [int(one) for one in entry["shape"]]
        at, size = int(entry["at"]), int(entry["bytes"])
        count = math.prod(shape)
        if min([at, size, *shape], default=0) < 0 or at + size > len(self.blob):
            raise WireError("a tensor lies outside its message")
        if count * torch.empty((), dtype=dtype).element_size() != size:
            raise WireError("a tensor has another size than its shape says")
        if size:
            raw = bytearray(self.blob[at : at + size])
            made = torch.frombuffer(raw, dtype=dtype).clone().reshape(shape)
        else:
            made = torch.empty(shape, dtype=dtype)
        gradient = bool(entry.get("gradient")) and (dtype.is_floating_point or dtype.is_complex)
        if entry.get("parameter"):
            made = nn.Parameter(made, requires_grad=gradient)
        elif gradient:
            made.requires_grad_()
        self.tensors[number] = made
        return made

    def module(self, data: Any, depth: int) -> nn.Module:
        graph = data["class"] == "GraphModule"
        kind = nn.Module if graph else _class(data["class"])
        if not issubclass(kind, nn.Module):
            raise WireError(f"{data['class']!r} is no module")
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        self.modules[data["number"]] = made
        for name, value in data["attributes"].items():
            checked(name)
            if callable(getattr(kind, name, None)):
                raise WireError(f"{name} is a method of {kind.__name__}")
            made.__dict__[name] = self.value(value, depth + 1)
        for key in ("parameters", "buffers", "modules"):
            part: dict[str, Any] = getattr(made, f"_{key}")
            wanted = nn.Module if key == "modules" else torch.Tensor
            for name, value in data[key]:
                value = self.value(value, depth + 1)
                if value is not None and not isinstance(value, wanted):
                    raise WireError(f"{name} is no {wanted.__name__}")
                part[checked(name)] = value
        made._non_persistent_buffers_set = {checked(name) for name in data["temporary"]}
        if not graph:
            return made
        return self.modules.setdefault(("graph", data["number"]), self.graph(data, made))

    def graph(self, data: Any, root: nn.Module) -> GraphModule:
        read = graph_from_json(data["graph"])
        for node in read.nodes:
            target = node.target
            if isinstance(target, Opaque) and target.op == "call_function":
                node.target = _known.get(target.text, target)
        name = data["name"]
        made = GraphModule(root, read, name if str(name).isidentifier() else "GraphModule")
        for name, value in vars(root).items():
            if isinstance(value, torch.Tensor):  # a plain one stays plain: no buffer
                made._buffers.pop(name, None)
                made.__dict__[name] = value
            elif not name.startswith("_") and name not in vars(made):
                made.__dict__[name] = value
        for name, value in (*root._modules.items(), *root._buffers.items()):
            # What the graph doesn't read stays with it too: an answer may have left it there.
            if not hasattr(made, name) and isinstance(value, nn.Module):
                made.add_module(name, value)
            elif not hasattr(made, name) and not isinstance(value, nn.Module):
                made.register_buffer(name, value)
        made.training = root.training
        self.modules[data["number"]] = made
        return made


def checked(name: Any) -> str:
    """The name of an attribute, if it may be set from a message."""
    own = ("forward", "graph", "code", "_parameters", "_buffers", "_modules", *_FRAME)
    if not isinstance(name, str) or name.startswith("__") or name in own or "_hooks" in name:
        raise WireError(f"{name!r} can't be set from a message")
    return name


def _function(name: Any) -> Any:
    from fxlab.interop.targets import function_table

    return _known.get(name) or function_table(name) if isinstance(name, str) else None


def decode(message: bytes | bytearray) -> Any:
    """The value of a message, whoever wrote it.

    Raises:
        WireError: It is no message of ours; nothing was run to find that out.
    """
    try:
        text_size, blob_size = _HEAD.unpack_from(message)
        view = memoryview(message)[_HEAD.size :]
        if text_size + blob_size != len(view):
            raise WireError("a message has another length than it says")
        data = json.loads(bytes(view[:text_size]))
        return _Reader(data["tensors"], view[text_size:]).value(data["value"])
    except FxlabError as error:
        raise WireError(error.message) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
            RuntimeError, struct.error, OverflowError) as error:  # fmt: skip
        raise WireError(f"a message can't be read: {type(error).__name__}: {error}") from None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(message)
    stream.flush()


def receive(stream: BinaryIO) -> bytearray:
    """Read one message.

    Raises:
        EOFError: The other side is gone.
        WireError: It is longer than allowed.
    """
    head = _read(stream, _HEAD.size)
    length = sum(_HEAD.unpack(head))
    if length > LARGEST:
        raise WireError(f"a message is longer than {LARGEST >> 20} MB")
    return head + _read(stream, length)


def _read(stream: BinaryIO, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        part = stream.read(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return found
