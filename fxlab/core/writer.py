"""How is one value written as Python, so that it comes back as the same value?

The expressions of generated code, and the names in them. In the ordinary case they read as torch.fx
prints them. Where names could meet, parameters keep theirs, locals step aside for parameters,
globals step aside for both. What has no exact literal is bound to a global by identity (the
constant table), so that no `repr` of an object is ever executed.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import enum
import functools
import inspect
import keyword
import math
import operator
import types
import typing
import unicodedata
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from .errors import CodegenError
from .graph import _Namespace
from .node import Argument, Node, holds_node, immutable_dict, immutable_list, lookup, qualified_name

_INFIX = {getattr(operator, name): symbol for name, symbol in {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^", "matmul": "@",
    "eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">=",
}.items()}  # fmt: skip
_PREFIX = {operator.pos: "+", operator.neg: "-", operator.invert: "~"}
_KINDS = [kind.name for kind in inspect._ParameterKind]  # in the order that Python wants
_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
_DEEPEST_ARGUMENT = 80  # CPython refuses about 100 nested brackets
_NOT_NAMES = frozenset((*keyword.kwlist, "__debug__"))
_LITERALS = frozenset((bool, str, bytes, type(None)))
_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload,
              torch._ops.OpOverloadPacket)  # fmt: skip
_ROOTS = {"torch": torch, "operator": operator}


def is_name(text: str) -> bool:
    """Say whether source code can use `text` as a name and mean exactly it.

    A keyword cannot be used, nor can what Python's parser would normalise to another name.

    >>> is_name("relu"), is_name("class"), is_name("0"), is_name(chr(0xFB01))
    (True, False, False, False)
    """
    plain = text.isascii() or unicodedata.is_normalized("NFKC", text)
    return plain and text.isidentifier() and text not in _NOT_NAMES


@functools.lru_cache(8192)
def attribute_text(base: str, path: str, getter: str = "getattr") -> str:
    """Return an expression that reads an attribute of an attribute ... of `base`.

    >>> attribute_text("self", "layer1.0.conv")
    'getattr(self.layer1, "0").conv'
    """
    for part in path.split("."):
        text = f'"{part}"' if part.isalnum() else repr(part)
        base = f"{base}.{part}" if is_name(part) else f"{getter}({base}, {text})"
    return base


class Writer:
    """Writes the expressions of one function; owns its names.

    Args:
        nodes: the Nodes in order.
        root: how the code would like to call the module.
        reserved: names that the head of the function uses besides those of the placeholders.
    """

    def __init__(self, nodes: Iterable[Node], root: str, reserved: Iterable[str] = ()) -> None:
        self.nodes = list(nodes)
        self.current: Node | None = None
        self.globals: dict[str, Any] = {}
        self._space = _Namespace()
        self.taken = self._space._used_names
        self.taken.update(reserved)
        self._name_locals(root)
        self.torch, self.getattr = self.bind("torch", torch), self.bind("getattr", getattr)

    # -- names ----------------------------------------------------------------------------------

    def _name_locals(self, root: str) -> None:
        """Fix the name of each parameter and local: parameters first, then whoever is free."""
        inputs = {node: str(node._target) for node in self.nodes if node._op == "placeholder"}
        owner = {t.lstrip("*"): node for node, t in reversed(inputs.items())}
        self.taken.update(filter(is_name, owner))
        self.parameters: dict[Node, tuple[str, str]] = {}
        for node, target in inputs.items():
            name = target.lstrip("*")
            kind = _KINDS[(1, 2, 4)[min(len(target) - len(name), 2)]]
            if not is_name(name) or owner[name] is not node:
                name = self._space.create_name(node._name)
            self.parameters[node] = name, node.meta.get("param_kind", kind)
        self.root = self._space.create_name(root)
        self.local: dict[Node, str] = {}
        for node in self.nodes:
            name = node._name
            own = node._op == "placeholder" and self.parameters[node][0] == name
            if not own and (name in self.taken or not is_name(name)):
                name = self._space.create_name(name)
            self.taken.add(name)
            self.local[node] = name

    def bind(self, hint: str, obj: Any) -> str:
        """Return the global name of an object; no parameter or local can shadow it."""
        name = self._space.create_name(hint, obj)
        self.globals[name] = obj
        return name

    def callee(self, fn: Any) -> str:
        """Return an expression for a function, class or operator."""
        path = qualified_name(fn)
        root, _, rest = path.partition(".")
        if root in _ROOTS and lookup(_ROOTS[root], rest, None) is fn:
            return f"{self.bind(root, _ROOTS[root])}.{rest}"
        return self.bind(path, fn)

    # -- expressions ----------------------------------------------------------------------------

    def value(self, arg: Argument, depth: int = 0) -> str:
        """Return an expression whose value is `arg`, of the same type."""
        kind: type[Any] = type(arg)  # pyright: ignore[reportUnknownVariableType]
        if kind in _LITERALS:
            return repr(arg)
        if kind is int:
            return repr(arg) if -(1 << 1000) < arg < 1 << 1000 else hex(arg)
        if kind is float:
            if math.isfinite(arg):
                return repr(arg)
            name = "nan" if math.isnan(arg) else "inf"
            return ("-" if arg < 0 else "") + self.bind(name, getattr(math, name))
        if isinstance(arg, Node):
            return self.local.get(arg) or self.refuse(
                f"{arg._name} is not in this graph", "a node of the same graph")  # fmt: skip
        if depth > _DEEPEST_ARGUMENT and isinstance(arg, (tuple, list, dict, slice, frozenset)):
            if holds_node(arg):
                self.refuse("it is nested too deeply", f"{_DEEPEST_ARGUMENT} levels at most")
            return self.bind("_nested", arg)
        if kind is tuple or kind is list or kind is immutable_list:
            inner = ", ".join([self.value(a, depth + 1) for a in arg])
            return f"[{inner}]" if kind is not tuple else f"({inner}{',' * (len(arg) == 1)})"
        if kind is dict or kind is immutable_dict:
            value, inner = self.value, depth + 1
            return "{" + ", ".join([f"{value(k)}: {value(v, inner)}" for k, v in arg.items()]) + "}"
        if kind is slice or kind is range:
            parts = [self.value(a, depth + 1) for a in (arg.start, arg.stop, arg.step)]
            return f"{self.bind(kind.__name__, kind)}({', '.join(parts)})"
        return self._object(arg, kind, depth)

    def _object(self, arg: Any, kind: Any, depth: int) -> str:
        """Return an expression for what is no plain literal; the last resort is the table."""
        whole: Any = arg
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return f"{self.torch}.{str(arg).removeprefix('torch.')}"
        if kind is torch.device:
            index = "" if arg.index is None else f", index={arg.index}"
            return f"{self.bind('device', torch.device)}(type={arg.type!r}{index})"
        if kind is complex and not any(mark in repr(arg) for mark in ("inf", "nan", "-0")):
            return repr(arg)
        if kind is set or kind is frozenset:
            items = ", ".join(sorted([self.value(a, depth + 1) for a in whole]))
            text = f"{{{items}}}" if items else f"{self.bind('set', set)}()"
            return text if kind is set else f"{self.bind('frozenset', frozenset)}({text})"
        if isinstance(arg, enum.Enum) and is_name(arg.name or ""):
            if getattr(kind, arg.name, None) is arg:
                return f"{self.callee(kind)}.{arg.name}"
        elif isinstance(arg, tuple) and (kind is torch.Size or hasattr(kind, "_make")):
            inner = ", ".join([self.value(a, depth + 1) for a in whole])
            if "_fields" in vars(kind) and "__new__" in vars(kind):
                return f"{self.callee(kind)}({inner})"
            maker = f"{self.torch}.Size" if kind is torch.Size else f"{self.callee(kind)}._make"
            return f"{maker}([{inner}])"
        elif isinstance(arg, _CALLABLES):
            return self.callee(arg)
        elif holds_node(arg):
            self.refuse(f"it is a {kind.__name__} of nodes", "a plain tuple, list or dict")
        return self.bind("Ellipsis" if arg is ... else f"_{kind.__name__}".lower(), arg)

    def refuse(self, what: str, expected: str, hint: str = "") -> NoReturn:
        """Raise the error for what Python cannot express."""
        where = self.current._name if self.current is not None else "a node"
        raise CodegenError(f"{where} cannot be written as Python: {what}", node=self.current,
                           expected=expected, hint=hint)  # fmt: skip

    def operand(self, arg: Argument) -> str:
        """Return an expression that can stand left of `**`, a dot or a bracket."""
        text = self.value(arg)
        return f"({text})" if text[0] == "-" or text[0].isdigit() else text

    def arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        """Return the text between the parentheses of a call."""
        local, value = self.local, self.value
        parts = [local.get(a) or value(a) if type(a) is Node else value(a) for a in args]
        for key, arg in kwargs.items() if kwargs else ():
            text = value(arg)
            parts.append(f"{key} = {text}" if is_name(key) else f"**{{{key!r}: {text}}}")
        return ", ".join(parts)

    def annotation(self, kind: Any) -> str:
        """Return an expression for a type annotation; evaluating it gives an equal object."""
        if kind is None or isinstance(kind, str):
            return repr(kind)
        if kind is type(None) or kind is ...:
            return self.bind("NoneType" if kind is not ... else "Ellipsis", kind)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is None and isinstance(kind, type):
            return self.callee(kind)
        if args and all(isinstance(a, type) or a is ... for a in args):
            union = origin in (typing.Union, types.UnionType)
            alias = "Union" if union else getattr(kind, "_name", None)
            base: Any = getattr(typing, alias, origin) if alias else origin
            if base[args] == kind and type(base[args]) is type(kind):
                name = self.bind(f"typing_{alias}" if alias else base.__name__, base)
                return f"{name}[{','.join(map(self.annotation, args))}]"
        return self.bind(f"_annotation_{str(kind).split(' at 0x')[0][:40]}", kind)

    # -- right-hand sides -----------------------------------------------------------------------

    def expression(self, node: Node) -> str:
        """Return the right-hand side of a Node's statement."""
        self.current = node
        op, target, args, kwargs = node._op, node._target, node._args, node._kwargs
        if op == "call_function":
            return self._call(target, args, kwargs)
        if op == "call_method":
            if not args:
                self.refuse("a method needs its object", "args[0], whose method is called")
            method = f"{self.operand(args[0])}.{target}"
            if not is_name(target):  # one name, dots or not
                method = f"{self.getattr}({self.operand(args[0])}, {target!r})"
            return f"{method}({self.arguments(args[1:], kwargs)})"
        path = attribute_text(self.root, target, self.getattr)
        return path if op == "get_attr" else f"{path}({self.arguments(args, kwargs)})"

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a call of a function, or its operator form."""
        if not kwargs and type(target) is types.BuiltinFunctionType:
            if len(args) == 2:
                if target in _INFIX:
                    left, symbol = self.value(args[0]), _INFIX[target]
                    left = f"({left})" if symbol == "**" and left[0] == "-" else left
                    return f"{left} {symbol} {self.value(args[1])}"
                if target is operator.getitem:
                    return f"{self.operand(args[0])}[{self.value(args[1])}]"
                if target is getattr and type(args[1]) is str and is_name(args[1]):
                    return f"{self.operand(args[0])}.{args[1]}"
            elif len(args) == 1 and target in _PREFIX:
                return f"{_PREFIX[target]}{self.value(args[0])}"
        return f"{self.callee(target)}({self.arguments(args, kwargs)})"

    def parameter(self, node: Node) -> str:
        """Return the text of one parameter: stars, name, annotation, default."""
        self.current = node
        name, kind = self.parameters[node]
        note = f" : {self.annotation(node._type)}" if node._type is not None else ""
        default = f" = {self.value(node._args[0])}" if node._args else ""
        return f"{_STARS.get(kind, '')}{name}{note}{default}"

    def parameter_list(self) -> list[str]:
        """Return all parameters, in the order in which Python wants their kinds."""
        order = sorted(self.parameters, key=lambda n: _KINDS.index(self.parameters[n][1]))
        texts: list[str] = []
        previous, optional = "", ""
        for node in order:
            name, kind = self.parameters[node]
            if previous == "POSITIONAL_ONLY" != kind:
                texts.append("/")
            if kind == "KEYWORD_ONLY" and previous not in (kind, "VAR_POSITIONAL"):
                texts.append("*")
            texts.append(self.parameter(node))
            if optional and not node._args and kind in _KINDS[:2]:
                self.refuse(f"{name} has no default but stands behind {optional}, which has one",
                            "parameters without a default first")  # fmt: skip
            previous, optional = kind, name if node._args else optional
        return [*texts, "/"] if previous == "POSITIONAL_ONLY" else texts

    def default(self, node: Node) -> Any:
        """Return a default as the user wrote it, not the immutable copy that a Node keeps."""
        kept, frozen = node.meta.get("param_default"), node._args[0]
        same = isinstance(frozen, (tuple, list, dict)) and kept == frozen
        return kept if same else node._args[0]
