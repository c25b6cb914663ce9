"""What stands in for a value while a program is traced?

A `Proxy` wraps a Node and is duck-typed (paper, sections 4.1 and 5.1): every operator, method, free
torch function and module call on it becomes a new Node instead of a result. What Python insists on
knowing now (a branch, a length, an index) it cannot answer: it asks the tracer, which knows only
what example inputs or parameters tell, and otherwise raises an error that teaches.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import dis
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import overrides

from . import errors
from .node import Node, leaves

if TYPE_CHECKING:
    from .tracer import TracerBase

_UNPACK = dis.opmap["UNPACK_SEQUENCE"]
_SHAPE_NAMES = frozenset("shape size dim ndim numel nelement stride dtype device layout".split())
_is_method: Callable[[Any], bool] = functools.cache(
    overrides.is_tensor_method_or_property)  # pyright: ignore  # fmt: skip
UNKNOWN = object()
"""Stands for a value that nobody knows while tracing."""

answers: list[Callable[[TracerBase, Proxy, str], Any]] = []
"""Asked in turn for a value that Python insists on now: (tracer, proxy, what) -> it or UNKNOWN."""
probes: list[Callable[[TracerBase, Proxy, str, types.FrameType], None]] = []
"""Told when a frame asks a Proxy for its class (""), its text or hash (`TEXT`, `HASH`), or for an
attribute that no tensor has or that is `doubtful` (the name): (tracer, proxy, name, frame)."""
TEXT, HASH = "__repr__", "__hash__"
doubtful: set[str] = set()
"""Attributes of tensors that may be None."""
advisers: list[Callable[[Node, TracerBase, str], list[str]]] = []
"""Asked for hints when a Proxy must refuse what Python wants (the protocol's name)."""


class Proxy:
    """A value of the traced program that is not there yet; `node` is the Node that will make it.

    A pass may wrap a Node by hand, `Proxy(node)`, and write ordinary expressions with it; the Nodes
    go to the graph's insertion point.

    Args:
        node: the Node that makes the value.
        tracer: records what is done with it; by default one that appends to `node.graph`.

    >>> import fxlab
    >>> graph = fxlab.Graph()
    >>> y = Proxy(graph.placeholder("x")) * 2 + 1
    >>> y.node.target, y.node.args[1]
    (<built-in function add>, 1)
    """

    node: Node
    tracer: TracerBase
    __array_ufunc__ = None  # `array * proxy` is the Proxy's own; numpy's functions refuse it

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
        if errors.is_users(code.co_filename) or code.co_name in ("is_tensor", "__instancecheck__"):
            _probe(self, "", frame)
        return torch.fx.Proxy

    def __repr__(self) -> str:
        return _text(self, f"{type(self).__name__}({self.__dict__['node']._name})")

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __hash__(self) -> int:
        _probe(self, HASH, sys._getframe(1))
        return id(self)

    def __getattr__(self, k: str) -> Any:
        if k in doubtful or not hasattr(torch.Tensor, k):
            if k[:2] == "__" and k[-2:] == "__":
                raise AttributeError(f"{type(self).__name__} has no {k}")
            _probe(self, k, sys._getframe(1))
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
        code, at, parts = frame.f_code.co_code, frame.f_lasti, cast(Any, self)
        if 0 <= at < len(code) and code[at] == _UNPACK:
            return iter([parts[i] for i in range(code[at + 1])])
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

    def __delattr__(self, name: str) -> None:
        raise errors.TraceAttributeError(
            f"an attribute of {self} cannot be deleted while tracing", node=self.node,
            hint="set it to None, which is recorded")  # fmt: skip

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        tracer = _one_tracer(args, kwargs, orig_method)
        if isinstance(orig_method, torch._C.ScriptMethod):
            args = (orig_method.owner, *args)
            return tracer.create_proxy("call_method", orig_method.name, args, kwargs)
        if _is_method(orig_method):
            return tracer.create_proxy("call_method", orig_method.__name__, args, kwargs)
        return tracer.create_proxy("call_function", orig_method, args, kwargs)


def _new_proxy(cls: type, fields: dict[str, Any]) -> Any:
    proxy = cast(Any, object).__new__(cls)
    proxy.__dict__.update(fields)
    return proxy


def _probe(proxy: Proxy, name: str, frame: types.FrameType) -> None:
    for probe in probes:
        probe(proxy.tracer, proxy, name, frame)


def _text(proxy: Proxy, text: str) -> str:
    proxy.tracer._texts.add(text)
    _probe(proxy, TEXT, sys._getframe(2))
    return text


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
    steps = [s for s in dis.get_instructions(frame.f_code) if s.offset >= frame.f_lasti][:5]
    at = next((i for i, s in enumerate(steps[:3], 1) if "IF_TRUE" in s.opname), len(steps))
    # A global's name, and since 3.14 a common constant's.
    return any(s.opname == "LOAD_ASSERTION_ERROR" or ("AssertionError" in (s.argval, s.argrepr)
               and s.opname != "LOAD_CONST") for s in steps[at : at + 2])  # fmt: skip


_numpy = operator.methodcaller("numpy")
_ASKED: dict[str, tuple[type[errors.TraceError], str, Callable[..., Any] | None]] = {
    "bool": (errors.TraceError,
             "a branch (if, while, and, or, not, assert) needs to know {p} now", None),
    "iter": (errors.TraceIterError, "{p} was iterated (a loop, a *star call, a = *b, list(...)), "
             "which needs its length", None),
    "keys": (errors.TraceError, "{p} was unpacked (**x), which needs its keys", None),
    "contains": (errors.TraceTypeError, "`in` on {p} searches its values", operator.contains),
    "len": (errors.TraceLenError, "len({p}) was asked for", len),
    "index": (errors.TraceIndexError, "{p} was used where Python needs an int now (range, a list "
              "index, a slice of a list or tensor)", operator.index),
    "array": (errors.TraceTypeError, "numpy asked for the values of {p}", _numpy),
    **{kind.__name__: (errors.TraceTypeError, f"{kind.__name__}({{p}}) needs its value now", kind)
       for kind in (int, float, complex, round)},
}  # fmt: skip
"""What Python may insist on knowing now -> the error that says no, its first words, the answer."""


def _asked(what: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method by which Python asks: the answer from the known value, or an error."""

    def method(self: Proxy, *args: Any) -> Any:
        known = self.tracer.concrete(self, "its length" if what == "len" else "its value")
        return answer(known, *args) if known is not UNKNOWN else refuse(self, what)

    return method


for _name, (_, _, _answer) in _ASKED.items():
    if _answer is not None:
        setattr(Proxy, f"__{_name}__", _asked(_name, _answer))


def refuse(proxy: Proxy, what: str) -> Any:
    """Raise the taught error for something that Python wants to know of a Proxy now."""
    node, tracer, (kind, text) = proxy.node, proxy.tracer, _ASKED[what][:2]
    text = text.format(p=f"Proxy({node.name})")
    hints = [hint for adviser in advisers for hint in adviser(node, tracer, what)]
    error = kind(f"{text}, and a symbolically traced value does not tell", node=node, hint=hints)
    tracer._raised.append(error)
    raise error


def asks_shape(node: Node) -> bool:
    """Say whether a Node asks a tensor for its shape or the like."""
    name = node._args[1:2] if node._target is getattr else (node._target,)
    return isinstance(name[0], str) and name[0] in _SHAPE_NAMES and node._op[:4] == "call"


class Attribute(Proxy):
    """`proxy.name`: a method if it is called next, else recorded as a getattr when first used.

    Args:
        root: the Proxy that was asked.
        attr: the attribute's name.
    """

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
        return _text(self, f"Attribute({self.root!r}.{self.attr})")

    def __call__(self, *args: Any, **kwargs: Any) -> Proxy:
        """Record a method call; no getattr is made."""
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class ParameterProxy(Proxy):
    """A parameter or buffer whose shape is answered at once instead of being recorded.

    Args:
        tracer: records what is done with it.
        node: its get_attr Node.
        name: its dotted path.
        param: the tensor itself, of any shape and dtype.
    """

    def __init__(self, tracer: Any, node: Node, name: str, param: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.__dict__["param"], self.__dict__["name"] = param, name


def _of_parameter(name: str) -> property:
    return property(lambda self: getattr(self.__dict__["param"], name), doc=f"The tensor's {name}.")


for _name in ("shape", "ndim", "size", "dim", "numel", "nelement"):
    setattr(ParameterProxy, _name, _of_parameter(_name))

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
