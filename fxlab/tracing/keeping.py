"""What did the traced program write into the model, and how is it put back?

A graph holds operations on traced values, and a write into `self` is none; the paper leaves state
undefined (section 5.6). What a module holds is kept before its forward runs with Proxies, and
compared and put back afterwards: the user's model is left exactly as it was.
"""

from __future__ import annotations

import collections
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fxlab.core import patches
from fxlab.core.errors import Frame, call_site
from fxlab.core.graph import Graph
from fxlab.core.node import Node
from fxlab.core.proxy import Proxy
from fxlab.core.state import peek
from fxlab.core.tracer import Tracer, TracerBase
from fxlab.tracing.questions import Facts

CONTAINERS = frozenset((dict, list, set))
_USED = frozenset((types.FunctionType, torch.Generator))
_PLAIN = frozenset((bool, int, float, str, type(None), collections.OrderedDict, torch.dtype))
_OWN = frozenset(vars(Module()))
_OWN_PARTS = sum(type(value) not in _PLAIN for value in vars(Module()).values())
_DEEP = CONTAINERS | {collections.deque, collections.defaultdict, collections.Counter}
_MOST = 5000  # values of a model that are looked into
_MOST_BYTES = 2**28  # of a tensor that is copied
MEMBERS = frozenset(
    "parameters named_parameters buffers named_buffers state_dict load_state_dict get_parameter "
    "get_buffer _parameters _buffers __dict__ vars".split()
)
"""Names by which a program reaches parameters and buffers themselves, and no Proxies of them."""
_MISSING = object()
_setattr, _delattr = (
    types.FunctionType(f.__code__, f.__globals__, closure=f.__closure__)
    for f in (Module.__setattr__, Module.__delattr__)
)


_handle_code = RemovableHandle.__init__.__code__
_init_handle = types.FunctionType(_handle_code, RemovableHandle.__init__.__globals__)


class Kept(NamedTuple):
    """What one module held before a trace.

    Attributes:
        module: The module.
        path: Its dotted path.
        fields: Its `__dict__`.
        containers: (container, a copy, name) of each dict, list, set or deque in it, however deep,
            and of the `__dict__` of objects; the name is that of its attribute.
        tensors: (name, tensor, its data, its version) of each that is no parameter and no buffer.
        others: The functions and generators of random numbers in it, which its code may use.
    """

    module: Module
    path: str
    fields: dict[str, Any]
    containers: list[tuple[Any, Any, str]]
    tensors: list[tuple[str, torch.Tensor, torch.Tensor, Any]]
    others: list[Any]


def install() -> None:
    """See, in every trace, where an attribute of a module is set or deleted."""
    if _install not in patches.installers:
        patches.installers.append(_install)


def _install() -> None:
    for method, handler in ((Module.__setattr__, _set_attribute), (Module.__delattr__, _drop)):
        patches._set(method, "__code__", patches._hand_over(handler, method.__code__))
    code = patches._hand_over(_hooked, _handle_code)
    patches._set(RemovableHandle.__init__, "__code__", code)


def _hooked(handle: RemovableHandle, hooks_dict: Any, *, extra_dict: Any = None) -> None:
    """Note a hook that the traced program registers."""
    _init_handle(handle, hooks_dict, extra_dict=extra_dict)
    tracer = patches.current_tracer()
    if tracer is not None:
        place = call_site(1, True)
        tracer._notes.setdefault("hooks", []).append((handle, hooks_dict, place))


def _touch(module: Module) -> None:
    """Keep what a module held before a trace first sets one of its attributes."""
    tracer = patches.current_tracer()
    if tracer is not None:
        tracer._notes.setdefault("touched", {}).setdefault(module, vars(module).copy())


def _set_attribute(module: Module, name: str, value: Any) -> None:
    _touch(module)
    _setattr(module, name, value)


def _drop(module: Module, name: str) -> None:
    _touch(module)
    _delattr(module, name)


def inlined(tracer: Tracer) -> list[Module]:
    """Return the modules whose own code may run: not torch's leaves, nor its Sequential.

    Of those, `_set_attribute` tells when somebody sets an attribute.
    """
    is_leaf: dict[type, bool] = {}
    found: list[Module] = []
    for module in tracer._paths():
        kind = type(module)
        leaf = is_leaf.get(kind)
        if leaf is None:
            leaf = is_leaf[kind] = kind is torch.nn.Sequential or tracer.is_leaf_type(kind)
        if not leaf:
            found.append(module)
    return found


def keep(tracer: Tracer, modules: list[Module]) -> list[Kept]:
    """Keep what modules hold; the containers in it are copied."""
    paths, kept, seen = tracer._paths(), list[Kept](), set[int]()
    for module in modules:
        fields = module.__dict__.copy()
        own = fields.values()
        new = Kept(module, paths[module], fields, [], [], [])
        if sum([type(v) not in _PLAIN for v in own]) != _OWN_PARTS:
            own = [fields[name] for name in _OWN & fields.keys()]
            _keep_inside([(k, v) for k, v in fields.items() if k not in _OWN], new, seen)
        new.containers.extend([(v, v.copy(), "") for v in own if type(v) in CONTAINERS])
        kept.append(new)
    return kept


def members(tracer: Tracer) -> list[Kept]:
    """Keep the parameters and buffers of the model."""
    kept = [Kept(m, path, vars(m).copy(), [], [], []) for m, path in tracer._paths().items()]
    for part in kept:
        for name, value in (*part.module._parameters.items(), *part.module._buffers.items()):
            if value is not None and not is_lazy(value):
                part.tensors.append((name, value, value.detach(), version_of(value)))
    return kept


def copies(kept: list[Kept], code: Iterable[Facts]) -> dict[int, torch.Tensor | None]:
    """Return id -> a copy of each tensor that is kept; None if no code may write or it is large."""
    held = {id(tensor): data for part in kept for _, tensor, data, _ in part.tensors}
    most = _MOST_BYTES if any(facts.writes for facts in code) else -1
    sizes = {key: data.numel() * data.element_size() for key, data in held.items()}
    return {key: data.clone() if sizes[key] <= most else None for key, data in held.items()}


def _keep_inside(todo: list[tuple[str, Any]], kept: Kept, seen: set[int]) -> None:
    """Keep what values of a module hold; of objects but Python's and torch's, their attributes."""
    kept.others.extend([value for _, value in todo if type(value) in _USED])
    for name, value in todo:  # grows meanwhile
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or len(seen) > _MOST:
            continue
        seen.add(id(value))
        parts: Any = ()
        if kind is torch.Tensor:
            kept.tensors.append((name, value, value.detach(), version_of(value)))
        elif kind in _DEEP:
            kept.containers.append((value, value.copy(), name))
            parts = value.values() if isinstance(value, dict) else value
        elif kind is tuple:
            parts = value
        elif kind is types.SimpleNamespace or not (
            issubclass(kind, _WHOLE) or kind.__module__.partition(".")[0] in _NOT_USERS
        ):
            parts = [getattr(value, "__dict__", None)]
        todo += [(name, part) for part in parts]


_WHOLE = (type, Module, torch.Tensor, Graph, Node, Proxy, TracerBase)
_NOT_USERS = sys.stdlib_module_names | {"torch"}


def put_back(tracer: Tracer, before: list[Kept]) -> None:
    """Put back what the program changed of the model since `keep`, and say so."""
    for part in before:
        if part.tensors:
            _put_back_tensors(tracer, part)
    for handle, table, where in tracer._notes.get("hooks", ()):
        left = handle.id in table
        handle.remove()
        inlined = any(table is value for part in before for value in part.fields.values())
        if where and (left or not inlined):
            text = "the program registers a hook while it runs, and the graph does not do it"
            tracer.warn("hook", text, where[0])
    changed = [part for part in before if _is_changed(part)]
    paths = tracer._paths()
    for module, fields in tracer._notes.get("touched", {}).items():
        known = module not in paths or any(module is part.module for part in before)
        if not known and not equal(vars(module), fields):
            changed.append(Kept(module, paths[module], fields, [], [], []))
    reads = _tensors_read(tracer) if changed else []
    for part in changed:
        _restore(tracer, part)
    for node, value in reads:
        now = peek(tracer.root, str(node.target))
        if now is not value and isinstance(value, torch.Tensor):  # made by the program: kept
            node.target = tracer._keep_constant("_tensor_constant", value)


def _is_changed(part: Kept) -> bool:
    if not equal(part.module.__dict__, part.fields):
        return True
    return any((now or old) and not equal(now, old) for now, old, _ in part.containers)


def _put_back_tensors(tracer: Tracer, part: Kept) -> None:
    for name, tensor, data, version in part.tensors:
        if version_of(tensor) != version:
            copy, written = tracer._notes["held"][id(tensor)], version_of(data) != version
            with torch.no_grad():
                tensor.data = data  # if others were set
                if written and copy is not None:
                    tensor.copy_(copy)
            where = f"{part.path}.{name}" if part.path else name
            lost = written and copy is None
            tracer.warn(
                "written",
                f"the program writes into the tensor {where}, and the graph does not; it was "
                f"{'not put back (it is too large)' if lost else 'put back'}: only what is a "
                "parameter or buffer (register_buffer) and reached as an attribute is traced",
                first_line(tracer.root_function),
            )


def _tensors_read(tracer: Tracer) -> list[tuple[Node, Any]]:
    """Return the Nodes that read an attribute of the model, each with what it is now."""
    nodes = tracer.graph.find_nodes(op="get_attr")
    kept = tracer.graph._constants
    return [(n, peek(tracer.root, str(n.target))) for n in nodes if n.target not in kept]


def version_of(tensor: torch.Tensor) -> Any:
    """Return what is another one if a tensor was written into, or given other data.

    Torch does not count writes in inference mode.
    """
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return (where, None if tensor.is_inference() else tensor._version)


def equal(a: Any, b: Any) -> bool:
    """Say whether two containers hold the same objects (not equal ones: `==` would be recorded)."""
    if isinstance(a, dict):
        return [*a] == [*b] and all(map(operator.is_, a.values(), b.values()))
    return a == b if type(a) is set else len(a) == len(b) and all(map(operator.is_, a, b))


def refill(value: Any, copy: Any) -> None:
    """Give a container what its copy holds."""
    value.clear()
    value.extend(copy) if hasattr(value, "extend") else value.update(copy)


def _restore(tracer: Tracer, part: Kept) -> None:
    now, fields, path = vars(part.module), part.fields, part.path
    changed = [k for k in (*now, *fields) if now.get(k, _MISSING) is not fields.get(k, _MISSING)]
    now.clear()
    now.update(fields)
    for value, copy, name in part.containers:
        if not equal(value, copy):
            changed += [name] if name else [k for k, v in fields.items() if v is value]
            refill(value, copy)
    names = ", ".join(f"{path}.{k}" if path else k for k in dict.fromkeys(changed))
    tracer.warn(
        "state",
        f"the program writes to {names} of the model; the model was put back, and the graph does "
        "not do it",
        first_line(getattr(type(part.module), "forward", None)),
    )


def first_line(function: Any) -> Frame | None:
    """Return where a function begins."""
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)
