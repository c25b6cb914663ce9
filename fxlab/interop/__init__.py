"""How do programs come in from torch.fx, torch.export and torch.compile, and go out again?

The paper's point (sections 1 and 7) is that many tools share one small program format. A graph of
torch.fx has the same six opcodes as ours, so `from_torch_fx` and `to_torch_fx` copy node by node:
names, order, types, meta and state stay; what torch calls `stack_trace` and `from_node` is `source`
and `from` here. `graph_to_json` and `graph_from_json` write a graph as plain data and read it back
without ever importing or running anything that the data names: see `fxlab.interop.targets`.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.fx.graph
import torch.fx.node
import torch.fx.traceback

from fxlab.core.codegen import CodeGen
from fxlab.core.errors import (
    FxlabError,
    LintError,
    RewriteError,
    TimelineError,
    call_site,
    is_users,
)  # fmt: skip
from fxlab.core.graph import Graph, _enter_region, _exit_region
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import OPCODES, Node, _new_id, map_arg, target_text
from fxlab.interop.targets import Opaque, attribute_names, function_table, method_names
from fxlab.tracing.pytrees import PyTreeCodeGen, PyTreeInfo

__all__ = [
    "DynamoRecorder",
    "Opaque",
    "TensorShape",
    "from_exported",
    "from_torch_fx",
    "graph_from_json",
    "graph_to_json",
    "to_torch_fx",
]

_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


# -- torch.fx ----------------------------------------------------------------------------------


def from_torch_fx(gm: torch.fx.GraphModule) -> GraphModule:
    """Return a torch.fx GraphModule as one of fxlab; `gm` is not changed, its state is shared.

    Names, order, types, meta and the form of inputs and outputs (pytrees) are kept; meta's
    `stack_trace` is read into `source`, `from_node` into `from`.

    Args:
        gm: torch's GraphModule.

    Raises:
        RewriteError: it is no torch.fx.GraphModule.

    >>> import torch
    >>> theirs = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> print(from_torch_fx(theirs).graph)
    graph():
        %x : [num_users=1] = placeholder[target=x]
        %relu : [num_users=1] = call_function[target=torch.relu](args = (%x,), kwargs = {})
        %add : [num_users=1] = call_function[target=operator.add](args = (%relu, 1), kwargs = {})
        return add
    """
    if not isinstance(gm, torch.fx.GraphModule):
        raise RewriteError(
            f"from_torch_fx takes a torch.fx.GraphModule, got {torch.typename(gm)}",
            where=call_site(), hint="for a model: fxlab.symbolic_trace(model)",
        )  # fmt: skip
    graph = Graph()
    _copy_nodes(gm.graph, graph, torch.fx.node.map_arg, _meta_from_torch)
    for node in graph.nodes:
        if isinstance(node.target, _Enter):
            node.args = (node.target.factory, *node.args)
            node.target = _enter_region
    _placeholders_first(graph)
    codegen: Any = gm.graph._codegen
    if type(codegen) is torch.fx.graph._PyTreeCodeGen:
        info = codegen.pytree_info
        graph.set_codegen(PyTreeCodeGen(PyTreeInfo(list(info.orig_args), *info[1:3])))
    elif type(codegen) is not torch.fx.graph.CodeGen:
        warnings.warn(
            f"the code generator {type(codegen).__name__} of the torch.fx module was not taken "
            "over: the new forward takes and returns what the graph's nodes say",
            stacklevel=2,
        )
    new = GraphModule(gm, graph, gm.__class__.__name__)
    new.meta.update(gm.meta)
    return new.train(gm.training) if new.training != gm.training else new


def to_torch_fx(gm: GraphModule) -> torch.fx.GraphModule:
    """Return one of our GraphModules as torch.fx's; the way back of `from_torch_fx`.

    What torch.fx cannot say is kept as far as it goes: a region stays a pair of calls (registered
    with torch.fx as having an effect), a keyword-only parameter becomes an ordinary one.

    Args:
        gm: ours; it is not changed, its state is shared.
    """
    graph = torch.fx.Graph()
    torch.fx.node.has_side_effect(_exit_region)
    _copy_nodes(gm.graph, graph, map_arg, _meta_to_torch)
    for node in graph.nodes:
        if node.target is _enter_region:
            node.target, node.args = _Enter.of(node.args[0]), node.args[1:]
    codegen = gm.graph._codegen
    if isinstance(codegen, PyTreeCodeGen) and codegen.pytree_info is not None:
        info = torch.fx.graph._PyTreeInfo(*codegen.pytree_info)
        graph.set_codegen(torch.fx.graph._PyTreeCodeGen(info))
    elif type(codegen) is not CodeGen:
        warnings.warn(
            f"torch.fx does not know the code generator {type(codegen).__name__}; the module "
            "takes and returns what the graph's nodes say",
            stacklevel=2,
        )
    new = torch.fx.GraphModule(gm, graph, type(gm).__name__)
    new.meta.update(gm.meta)
    return new


def from_exported(program: torch.export.ExportedProgram) -> GraphModule:
    """Return an exported program as a GraphModule that takes and returns what the model did.

    Parameters and buffers, which an exported program passes as inputs, are read from the module
    again (`get_attr`). The nodes call aten operators and have shapes (`meta["val"]`).

    Args:
        program: what ``torch.export.export`` returned.
    """
    return from_torch_fx(program.module(check_guards=False))


class _Enter:
    """Enters one kind of region: torch.fx's code cannot name a class such as torch.no_grad."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory
        self.__name__ = self.__qualname__ = f"enter_{factory.__name__}"
        self.__module__ = __name__

    @staticmethod
    @functools.cache
    def of(factory: Callable[..., Any]) -> _Enter:
        """Return the one of a factory, registered with torch.fx as having an effect."""
        enter = _Enter(factory)
        torch.fx.node.has_side_effect(enter)
        return enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _enter_region(self.factory, *args, **kwargs)


def _copy_nodes(
    old: Any, new: Any, map_nodes: Callable[..., Any], map_meta: Callable[[dict[str, Any]], Any]
) -> None:
    """Fill the empty graph `new` with the nodes of `old` under the same names."""
    made: dict[Any, Any] = {}
    for node in old.nodes:
        args = map_nodes(node.args, made.__getitem__)
        kwargs = map_nodes(node.kwargs, made.__getitem__)
        copy = new.create_node(node.op, node.target, args, dict(kwargs), node.name, node.type)
        if copy.name != node.name:
            copy.name = node.name
            new._graph_namespace._used_names.add(node.name)
        copy.meta = map_meta(node.meta)
        made[node] = copy


def _placeholders_first(graph: Graph) -> None:
    """Move parameters before everything else: torch.export puts get_attr nodes between them."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    behind = False
    for node in list(graph.nodes):
        behind = behind or node is first
        if behind and node.op == "placeholder" and first is not None:
            first.prepend(node)


def _meta_from_torch(meta: dict[str, Any]) -> dict[str, Any]:
    meta = dict(meta)
    trace = meta.get("stack_trace")
    if isinstance(trace, str) and "source" not in meta:
        frames = [(file, int(line), name) for file, line, name in _FRAME.findall(trace)]
        if trace == _trace_text(frames[::-1]):
            del meta["stack_trace"]  # nothing but the frames: to_torch_fx writes it again
        else:
            frames = [f for f in frames if is_users(f[0])] or frames
        if frames:
            meta["source"] = tuple(frames[::-1][:4])
    found: list[dict[str, Any]] = []
    level = list(meta.get("from_node") or ())
    for source in level:  # nearest first: the list grows by each source's own sources
        level += source.from_node
        ours = source.pass_name.startswith("fxlab ")
        found.append({
            "id": source.graph_id if ours else _new_id(), "name": source.name,
            "op": source.pass_name[6:] if ours else "", "target": source.target,
        })  # fmt: skip
    if found and "from" not in meta:
        meta["from"] = tuple(found[:8])
        if all(a["op"] for a in found):
            del meta["from_node"]
    return meta


def _meta_to_torch(meta: dict[str, Any]) -> dict[str, Any]:
    meta = dict(meta)
    frames = meta.get("source")
    if frames:
        del meta["source"]
        meta.setdefault("stack_trace", _trace_text(frames))
    ancestors = [a for a in meta.pop("from", ()) if a["op"]]
    if ancestors:
        sources = [torch.fx.traceback.NodeSource._from_dict({
            "name": a["name"], "target": a["target"], "graph_id": a["id"],
            "pass_name": f"fxlab {a['op']}", "action": "create", "from_node": [],
        }) for a in ancestors]  # fmt: skip
        meta["from_node"] = [*sources, *meta.get("from_node", ())]
    return meta


def _trace_text(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return frames, innermost first, as torch writes a stack trace."""
    return "\n".join(f'  File "{file}", line {line}, in {name}'
                     for file, line, name in reversed(frames))  # fmt: skip


class DynamoRecorder:
    """A `torch.compile` backend that keeps what Dynamo captured, and runs it as it is.

    Attributes:
        captured: one GraphModule of fxlab for each piece that Dynamo cut the program into.

    >>> import torch
    >>> recorder = DynamoRecorder()
    >>> compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=recorder)
    >>> _ = compiled(torch.ones(2))
    >>> [node.op for node in recorder.captured[0].graph.nodes]
    ['placeholder', 'call_function', 'call_function', 'output']
    >>> torch._dynamo.reset()
    """

    def __init__(self) -> None:
        self.captured: list[GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Keep a copy of the captured graph; return the function that Dynamo is to call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a code generator of Dynamo's own is of no interest
            self.captured.append(from_torch_fx(gm))
        return gm.forward


# -- plain data --------------------------------------------------------------------------------

_VERSION = 1
_DEEPEST = 64
_WORDS: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_ANNOTATIONS = {"torch.Tensor": torch.Tensor, "int": int, "float": float, "bool": bool, "str": str}


class TensorShape(NamedTuple):
    """What is known of a value that was read from JSON; `meta["tensor_meta"]` of a loaded Node.

    Attributes:
        shape: its sizes.
        dtype: its dtype.
    """

    shape: torch.Size
    dtype: torch.dtype


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return a Graph as plain data that `json.dumps` writes: nodes, arguments, shapes, sources.

    State (parameters, modules) is not part of it, only the paths that lead there.

    Args:
        graph: the Graph; it is not changed.

    >>> import torch, fxlab
    >>> data = graph_to_json(fxlab.symbolic_trace(lambda x: torch.relu(x)).graph)
    >>> data["nodes"][1]["target"], data["nodes"][1]["args"]
    ('torch.relu', [{'node': 'x'}])
    """
    nodes = []
    for node in graph.nodes:
        opaque = node.target if isinstance(node.target, Opaque) else None
        entry = {
            "name": node.name,
            "op": opaque.op if opaque else node.op,
            "target": opaque.text if opaque else target_text(node.target),
            "args": [_encode(a) for a in node.args],
            "kwargs": {k: _encode(v) for k, v in node.kwargs.items()},
            "meta": _meta_to_json(node),
        }
        kind = next((k for k, v in _ANNOTATIONS.items() if v is node.type), None)
        nodes.append({**entry, "type": kind} if kind else entry)
    return {"format": "fxlab.graph", "version": _VERSION, "nodes": nodes}


def graph_from_json(data: Any) -> Graph:
    """Return the Graph that `graph_to_json` wrote, from anybody's file.

    Functions and methods are looked up in a closed table (torch's operators, Tensor's methods,
    `operator`, `math`, `getattr` of a tensor's attributes). Whatever else is named becomes a call
    of an `Opaque`, which shows and does not run. Nothing is imported or evaluated.

    Args:
        data: the dict, or its JSON text.

    Raises:
        TimelineError: the data is not such a graph; the message names the node and the reason.
    """
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise TimelineError(f"this is not JSON: {error}") from None
    _need(isinstance(data, dict), "", "a graph is a JSON object", data)
    _need(data.get("version") == _VERSION, "", f"version {_VERSION}", data.get("version"))
    entries: Any = data.get("nodes")
    _need(isinstance(entries, list), "", "a list of nodes", entries)
    graph = Graph()
    made: dict[str, Node] = {}
    for i, entry in enumerate(entries or ()):
        where = f"node {i}"
        _need(isinstance(entry, dict), where, "an object", entry)
        name = entry.get("name")
        where = f"node {name!r}" if isinstance(name, str) else where
        _need(isinstance(name, str) and name.isidentifier(), where, "a name", name)
        _need(name not in made, where, "a name that no other node has", name)
        _need(entry.get("op") in OPCODES, where, " | ".join(OPCODES), entry.get("op"))
        args: Any = entry.get("args", [])
        kwargs: Any = entry.get("kwargs", {})
        _need(isinstance(args, list), where, "args as a list", args)
        _need(isinstance(kwargs, dict), where, "kwargs as an object", kwargs)
        args = tuple([_decode(a, made, where, 0) for a in args])
        kwargs = {k: _decode(v, made, where, 0) for k, v in kwargs.items()}
        target, text = _target(entry, args, kwargs), entry.get("target")
        _need(isinstance(text, str), where, "a target as text", text)
        op = "call_function" if isinstance(target, Opaque) else entry["op"]
        kind = entry.get("type")
        kind = _ANNOTATIONS.get(kind) if isinstance(kind, str) else None
        try:
            node = graph.create_node(op, target, args, kwargs, name, kind)
        except FxlabError as error:
            raise TimelineError(f"{where}: {error.message}") from error
        if node.name != name:
            node.name = name
        node.meta.update(_meta_from_json(entry.get("meta", {}), where))
        made[name] = node
    try:
        graph.lint()
    except LintError as error:
        raise TimelineError(f"the graph is not well formed: {error.message}") from error
    return graph


def _need(right: bool, where: str, expected: str, got: Any) -> None:
    if not right:
        text = repr(got)
        raise TimelineError(
            f"{where + ': ' if where else ''}this is no graph of fxlab",
            expected=f"{expected}, got {text if len(text) < 80 else text[:77] + '...'}",
        )


def _target(entry: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a node calls or reads, by the closed table; an Opaque when it is not there."""
    op, text = entry["op"], entry.get("target")
    if not isinstance(text, str):
        return text
    if op == "call_function":
        known = function_table(text)
        if known is getattr:
            named = len(args) == 2 and isinstance(args[0], Node) and not kwargs
            known = getattr if named and args[1] in attribute_names() else None
        return known if known is not None else Opaque(op, text)
    if op == "call_method":
        tensor = bool(args) and isinstance(args[0], Node)
        return text if tensor and text in method_names() else Opaque(op, text)
    if op in ("get_attr", "call_module"):
        parts = text.split(".")
        return text if all(p and not p.startswith("__") for p in parts) else Opaque(op, text)
    return text if text.lstrip("*").isidentifier() else entry["name"]


def _encode(value: Any) -> Any:
    """Return an argument as plain data; what has no form of its own as its opaque text."""
    if isinstance(value, Node):
        return {"node": value.name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if abs(value) < float("inf") else {"float": repr(value)}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, torch.Size):
        return {"size": [_encode(v) for v in value]}
    if type(value) is tuple:
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is ...:
        return {"ellipsis": True}
    if callable(value) and function_table(target_text(value)) is value:
        return {"function": target_text(value)}
    if isinstance(value, Opaque):
        return {"opaque": value.text}
    return {"opaque": target_text(value) if callable(value) else f"<{torch.typename(value)}>"}


def _fits(kind: str, content: Any) -> bool:
    """Say whether an aggregate has a list of the right length."""
    count = {"slice": 3, "complex": 2}.get(kind)
    return isinstance(content, list) and (count is None or len(content) == count)


def _decode(value: Any, made: dict[str, Node], where: str, depth: int) -> Any:
    """Return the argument that `_encode` wrote."""
    _need(depth < _DEEPEST, where, f"arguments nested at most {_DEEPEST} deep", "more")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value

    def inner(part: Any) -> Any:
        return _decode(part, made, where, depth + 1)

    if isinstance(value, list):
        return [inner(v) for v in value]
    _need(isinstance(value, dict) and len(value) == 1, where, "an argument", value)
    kind, content = next(iter(dict[Any, Any](value).items()))
    if kind == "node":
        _need(isinstance(content, str) and content in made, where, "an earlier node", content)
        return made[content]
    if kind in ("tuple", "size", "slice", "dict", "complex"):
        _need(_fits(kind, content), where, f"a list in a {kind}", content)
    try:
        if kind == "tuple":
            return tuple([inner(v) for v in content])
        if kind == "size":
            sizes = tuple([inner(v) for v in content])
            return torch.Size(sizes) if all(type(s) is int for s in sizes) else sizes
        if kind == "slice":
            return slice(*[inner(v) for v in content])
        if kind == "dict":
            return {inner(k): inner(v) for k, v in content}
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*[float(v) for v in content])
        if kind == "torch":
            return _WORDS[content]
        if kind == "device":
            return torch.device(content)
        if kind == "ellipsis":
            return ...
        if kind == "function":
            return function_table(content) or Opaque("call_function", str(content))
        if kind == "opaque":
            return Opaque("", str(content))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, TimelineError):
            raise
    _need(False, where, "an argument", value)
    return None


def _meta_to_json(node: Node) -> dict[str, Any]:
    meta = node.meta
    found: dict[str, Any] = {}
    if meta.get("source"):
        found["source"] = [list(frame) for frame in meta["source"]]
    if meta.get("from"):
        found["from"] = [dict(a) for a in meta["from"]]
    if isinstance(meta.get("made_by"), str):
        found["made_by"] = meta["made_by"]
    if meta.get("nn_module_stack"):
        found["nn_module_stack"] = [
            [str(key), str(path), kind if isinstance(kind, str) else torch.typename(kind)]
            for key, (path, kind, *_) in meta["nn_module_stack"].items()
        ]
    value: Any = next((meta[k] for k in ("tensor_meta", "val", "example_value") if k in meta), None)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        sizes = [s if type(s) is int else str(s) for s in value.shape]
        found["tensor"] = {"shape": sizes, "dtype": str(value.dtype)}
    return found


def _meta_from_json(data: Any, where: str) -> dict[str, Any]:
    """Return what a Node's meta says; parts of another form are left out, they only inform."""
    _need(isinstance(data, dict), where, "meta as an object", data)
    meta: dict[str, Any] = {}
    try:
        if "source" in data:
            meta["source"] = tuple((str(f), int(n), str(fn)) for f, n, fn in data["source"])
        if "from" in data:
            meta["from"] = tuple(
                {"id": int(a["id"]), **{k: str(a[k]) for k in ("name", "op", "target")}}
                for a in data["from"]
            )[:8]
        if "made_by" in data:
            meta["made_by"] = str(data["made_by"])
        if "nn_module_stack" in data:
            meta["nn_module_stack"] = {
                str(key): (str(path), str(kind)) for key, path, kind in data["nn_module_stack"]
            }
        if "tensor" in data and all(type(s) is int for s in data["tensor"]["shape"]):
            dtype: Any = _WORDS.get(data["tensor"]["dtype"])
            meta["tensor_meta"] = TensorShape(torch.Size(data["tensor"]["shape"]), dtype)
    except (TypeError, ValueError, KeyError) as error:
        _need(False, where, "meta as graph_to_json writes it", error)
    return meta
