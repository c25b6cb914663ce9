"""What stands in for a value while a program is traced?

A `Proxy` wraps a Node and is duck-typed (paper, sections 4.1 and 5.1): every operator, method, free
torch function and module call on it becomes a new Node instead of a result. What Python insists on
knowing now (a branch, a length, an index) it cannot answer: it asks the tracer, which knows only
what example inputs or parameters tell, and otherwise raises an error that teaches.
"""

from __future__ import annotations

import copy
import dis
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import is_tensor_method_or_property

from . import errors
from .graph import Graph
from .node import Node, leaves

if TYPE_CHECKING:
    from .tracer import TracerBase

_UNPACK = dis.opmap["UNPACK_SEQUENCE"]
_COMPARISONS = frozenset(getattr(operator, name) for name in (
    "eq", "ne", "lt", "le", "gt", "ge", "not_", "and_", "or_"))  # fmt: skip
_SHAPE_NAMES = frozenset("shape size dim ndim numel nelement stride dtype device layout".split())
_UNKNOWN = object()


class Proxy:
    """A value of the traced program that is not there yet; `node` is the Node that will make it.

    A pass may wrap a Node by hand, `Proxy(node)`, and write ordinary expressions with it; the Nodes
    go to the graph's insertion point.

    >>> import fxlab
    >>> graph = fxlab.Graph()
    >>> y = Proxy(graph.placeholder("x")) * 2 + 1
    >>> y.node.target, y.node.args[1]
    (<built-in function add>, 1)
    """

    node: Node
    tracer: TracerBase

    def __init__(self, node: Node, tracer: TracerBase | None = None) -> None:
        if tracer is None:
            from .tracer import GraphAppendingTracer

            tracer = GraphAppendingTracer(node.graph)
        fields = self.__dict__
        fields["tracer"], fields["node"] = tracer, node

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """torch.fx's Proxy, since model libraries ask `isinstance(x, torch.fx.Proxy)`."""
        frame = sys._getframe(1)
        code = frame.f_code
        if errors.is_users(code.co_filename) or code.co_name == "is_tensor":
            self.tracer._asked_class(self, frame)
        return torch.fx.Proxy

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self.__dict__['node']._name})"
        self.tracer._texts.add(text)
        return text

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __getattr__(self, k: str) -> Any:
        if k[:2] == "__" and k[-2:] == "__" and not hasattr(torch.Tensor, k):
            raise AttributeError(f"{type(self).__name__} has no {k}")
        return Attribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("node", "tracer") or not hasattr(torch.Tensor, name):
            self.__dict__[name] = value
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_proxy, (type(self), self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        if not self.tracer._tracing:
            return self
        return self.tracer.create_proxy("call_function", copy.deepcopy, (self,), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Proxy:
        """Record the call of the value itself."""
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        code, at = frame.f_code.co_code, frame.f_lasti
        if 0 <= at < len(code) and code[at] == _UNPACK:
            return iter([self[i] for i in range(code[at + 1])])
        return self.tracer.iter(self)

    def __bool__(self) -> bool:
        if self.tracer.trace_asserts and _is_assert(sys._getframe(1)):
            from .tracer import assert_fn

            self.tracer.create_proxy("call_function", assert_fn, (self,), {})
            return True
        return self.tracer.to_bool(self)

    def keys(self) -> Any:
        """Return what the tracer makes of `proxy.keys()`, which `**proxy` calls."""
        return self.tracer.keys(self)

    def __contains__(self, item: Any) -> bool:
        return _refuse(self, "in")

    def __delattr__(self, name: str) -> None:
        raise errors.TraceAttributeError(
            f"an attribute of {self} cannot be deleted while tracing", node=self.node,
            hint="set it to None, which is recorded")  # fmt: skip

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        tracer = _one_tracer(args, kwargs, orig_method)
        how, name = _kind_of(orig_method)
        if how == "method":
            return tracer.create_proxy("call_method", name, args, kwargs)
        if how == "script":
            return tracer.create_proxy("call_method", name, (orig_method.owner, *args), kwargs)
        return tracer.create_proxy("call_function", orig_method, args, kwargs, name)


def _new_proxy(cls: type, fields: dict[str, Any]) -> Any:
    proxy = object.__new__(cls)
    proxy.__dict__.update(fields)
    return proxy


@functools.cache
def _kind_of(function: Any) -> tuple[str, str]:
    if isinstance(function, torch._C.ScriptMethod):
        return "script", function.name
    if is_tensor_method_or_property(function):
        return "method", function.__name__
    return "function", Graph._target_to_str(function)


def _one_tracer(args: Any, kwargs: Any, function: Any) -> Any:
    """Return the tracer of the Proxies in some arguments; two different ones are an error."""
    higher_order = isinstance(function, torch._ops.HigherOrderOperator)
    found: dict[int, Any] = {}
    for leaf in leaves(args, kwargs):
        if isinstance(leaf, Proxy):
            tracer = leaf.__dict__["tracer"]
            found[id(tracer)] = tracer
        elif higher_order and callable(leaf) and not isinstance(leaf, (type, torch.nn.Module)):
            raise errors.TraceRuntimeError(
                f"{function} got the function {leaf!r}: symbolic tracing cannot look into it",
                hint="capture with torch.export and fxlab.interop.from_exported")  # fmt: skip
    if len(found) != 1:
        raise errors.TraceRuntimeError(
            f"{getattr(function, '__name__', function)} got Proxies of {len(found)} tracers",
            hint="a Proxy that was kept from an earlier trace cannot be used again")  # fmt: skip
    return next(iter(found.values()))


def _is_assert(frame: Any) -> bool:
    """Say whether a frame is about to test the condition of an `assert` statement."""
    steps = list(dis.get_instructions(frame.f_code))
    at = next((i for i, s in enumerate(steps) if s.offset >= frame.f_lasti), len(steps))
    for i in range(at, min(at + 3, len(steps) - 1)):
        if "IF_TRUE" in steps[i].opname:
            return any(s.opname == "LOAD_ASSERTION_ERROR" or s.argval == "AssertionError"
                       for s in steps[i + 1 : i + 3])  # fmt: skip
    return False


_ASKED: dict[str, tuple[type[errors.TraceError], str]] = {
    "bool": (errors.TraceError, "a branch (if, while, and, or, not, assert) needs to know {p} now"),
    "iter": (errors.TraceIterError, "{p} was iterated (a loop, a *star call, a = *b, list(...)): "
             "its length is not known"),
    "keys": (errors.TraceError, "{p} was unpacked (**x): its keys are not known"),
    "len": (errors.TraceLenError, "len({p}) was asked for: its length is not known"),
    "index": (errors.TraceIndexError, "{p} was used where Python needs an int now (range, a list "
              "index, a slice of a list or tensor)"),
    "in": (errors.TraceTypeError, "`in` on {p} would have to search its values now"),
    **{name: (errors.TraceTypeError, f"{name}({{p}}) needs its value now")
       for name in ("int", "float", "complex", "round")},
}  # fmt: skip
"""What Python may insist on knowing now -> the error that says no, and its first words."""


def _asked(what: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method by which Python asks: the answer from the known value, or an error."""

    def method(self: Proxy, *args: Any) -> Any:
        known = self.tracer.concrete(self, "its length" if what == "len" else "its value")
        return answer(known, *args) if known is not _UNKNOWN else _refuse(self, what)

    return method


for _name, _answer in (("len", len), ("int", int), ("float", float), ("complex", complex),
                       ("round", round), ("index", operator.index)):  # fmt: skip
    setattr(Proxy, f"__{_name}__", _asked(_name, _answer))


def _refuse(proxy: Proxy, what: str) -> Any:
    """Raise the taught error for something that Python wants to know of a Proxy now."""
    node, tracer, (kind, text) = proxy.node, proxy.tracer, _ASKED[what]
    text = text.format(p=f"Proxy({node.name})")
    error = kind(f"{text}, but symbolically traced values have none", node=node,
                 hint=_ways_out(node, tracer, what))  # fmt: skip
    tracer._raised.append(error)
    raise error


def asks_shape(node: Node) -> bool:
    """Say whether a Node asks a tensor for its shape or the like."""
    name = node._args[1:2] if node._target is getattr else (node._target,)
    return isinstance(name[0], str) and name[0] in _SHAPE_NAMES and node._op[:4] == "call"


def _ways_out(node: Node, tracer: Any, what: str) -> list[str]:
    """Return the remedies that apply to this Node, the likeliest first."""
    ancestors, todo = {node: None}, [node]
    while todo and len(ancestors) < 200:
        for source in todo.pop().all_input_nodes:
            if source not in ancestors:
                ancestors[source] = None
                todo.append(source)
    inputs = [n for n in ancestors if n.op == "placeholder"]
    shaped = any(map(asks_shape, ancestors))
    hints = []
    if shaped and not tracer._examples:
        hints.append("give the tracer example inputs, which make ranks and sizes known: "
                     "symbolic_trace(model, example_inputs=(x,))")  # fmt: skip
    if inputs and all(n.op == "placeholder" or n.target in _COMPARISONS for n in ancestors):
        name = str(inputs[0].target)
        hints.append(f"if {inputs[0].name} is a setting and no tensor, fix its value: "
                     f"symbolic_trace(model, concrete_args={{{name!r}: ...}})")  # fmt: skip
    if what == "bool" and not shaped:
        hints.append("compute both sides and choose: torch.where(condition, a, b)")
    if what in ("iter", "len") and not shaped:
        hints.append("index it instead: x[0], x[1]; or a, b = x, which records as many reads")
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        hints.append(f"keep the module {path} ({getattr(kind, '__name__', kind)}) whole: "
                     "is_leaf_module of your Tracer returns True for it")  # fmt: skip
    hints.append("move these lines into a function and mark it with fxlab.wrap: its call is "
                 "recorded, its body is not traced")  # fmt: skip
    return hints


class Attribute(Proxy):
    """`proxy.name`: a method if it is called next, else recorded as a getattr when first used."""

    def __init__(self, root: Proxy, attr: str) -> None:
        fields = self.__dict__
        fields["root"], fields["attr"] = root, attr
        fields["tracer"] = root.__dict__["tracer"]
        fields["_node"] = None

    @property
    def node(self) -> Node:  # type: ignore[override]
        """The getattr Node; made on first use, since most attributes are method calls."""
        if self.__dict__["_node"] is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            self.__dict__["_node"] = made.node
        return self.__dict__["_node"]

    def __repr__(self) -> str:
        text = f"Attribute({self.root!r}.{self.attr})"
        self.tracer._texts.add(text)
        return text

    def __call__(self, *args: Any, **kwargs: Any) -> Proxy:
        """Record a method call; no getattr is made."""
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class ParameterProxy(Proxy):
    """A parameter or buffer whose shape is answered at once instead of being recorded."""

    def __init__(self, tracer: Any, node: Node, name: str, param: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.__dict__["param"], self.__dict__["name"] = param, name


for _name in ("shape", "ndim"):
    setattr(ParameterProxy, _name, property(lambda self, n=_name: getattr(self.param, n)))
for _name in ("size", "dim", "numel", "nelement"):
    setattr(ParameterProxy, _name, lambda self, *a, n=_name, **k: getattr(self.param, n)(*a, **k))

magic_methods = (
    "eq ne lt gt le ge pos neg invert abs add mul sub mod floordiv truediv divmod lshift rshift "
    "and or xor getitem matmul pow").split()  # fmt: skip
reflectable = "add sub mul floordiv truediv divmod mod pow matmul lshift rshift and or xor".split()
inplace_methods = [f"i{name}" for name in reflectable if name != "divmod"]


def _record(name: str, step: int = 1, statement: bool = False) -> Callable[..., Any]:
    """Return a method that records an operator; a step of -1 turns the operands round."""
    function: Any = divmod if name == "divmod" else getattr(
        operator, name + "_" * (name in ("and", "or")))  # fmt: skip

    def method(self: Proxy, *args: Any) -> Any:
        made = self.tracer.create_proxy("call_function", function, (self, *args)[::step], {})
        return None if statement else made

    return method


for _name in (*magic_methods, *inplace_methods):
    setattr(Proxy, f"__{_name}__", _record(_name))
for _name in reflectable:
    setattr(Proxy, f"__r{_name}__", _record(_name, -1))
for _name in ("setitem", "delitem"):
    setattr(Proxy, f"__{_name}__", _record(_name, statement=True))
Proxy.__hash__ = object.__hash__  # type: ignore[method-assign]
