"""How does a Graph become Python source again, and what does each line of it stand for?

Section 4.3 of the paper: code generation writes source text, compiles it and installs it as
`forward`; there is no runtime of its own. In the ordinary case the text is the one torch.fx prints.
Where names could meet, it is made to mean what the graph means: parameters keep their names,
locals step aside for parameters, globals step aside for both, and whatever has no exact literal is
bound to a global by identity (the constant table), so that no `repr` of an object is ever executed.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import keyword
import linecache
import math
import operator
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .errors import CodegenError
from .graph import _enter_region, _exit_region, shape_text
from .node import Argument, Node, immutable_dict, immutable_list, qualified_name

TransformCodeFunc = Callable[[list[str]], list[str]]
Row = tuple[str, "Node | None"]

_INFIX = {getattr(operator, name): symbol for name, symbol in {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^", "matmul": "@",
    "eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">=",
}.items()}  # fmt: skip
_PREFIX = {operator.pos: "+", operator.neg: "-", operator.invert: "~"}
_KINDS = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY",
          "VAR_KEYWORD")  # fmt: skip
_DEEPEST_ARGUMENT = 80  # CPython refuses about 100 nested brackets
_DEEPEST_REGION = 15  # ... and more than 20 nested blocks
_NOT_NAMES = frozenset((*keyword.kwlist, "__debug__"))
_LITERALS = frozenset((bool, str, bytes, type(None)))
_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload,
              torch._ops.OpOverloadPacket)  # fmt: skip
_not_word = re.compile(r"\W+", re.ASCII)
_counter = re.compile(r"# COUNTER: (\d+)")
_torch_paths: dict[int, tuple[Any, str]] = {}


def is_name(text: str) -> bool:
    """Say whether source code can use `text` as a name and mean exactly it.

    A keyword cannot be used, nor can what Python's parser would normalise to another name.

    >>> is_name("relu"), is_name("class"), is_name("0"), is_name(chr(0xFB01))
    (True, False, False, False)
    """
    if not text.isidentifier() or text in _NOT_NAMES:
        return False
    return text.isascii() or unicodedata.is_normalized("NFKC", text)


def attribute_text(base: str, parts: Iterable[str], getter: str = "getattr") -> str:
    """Return an expression that reads an attribute of an attribute ... of `base`.

    >>> attribute_text("self", ["layer1", "0", "conv"])
    'getattr(self.layer1, "0").conv'
    """
    for part in parts:
        if is_name(part):
            base = f"{base}.{part}"
        else:
            text = f'"{part}"' if part.isalnum() else repr(part)
            base = f"{getter}({base}, {text})"
    return base


@dataclass
class PythonCode:
    """A Graph as Python source, and what is needed to run it and to find one's way in it.

    `src` holds the text and `globals` the objects that its global names stand for. `defaults` maps
    a parameter to the very object that is its default; `lines` holds the Node (or None) of each
    line after the `def` line, which is line `_prologue_start` of `src`.
    """

    src: str
    globals: dict[str, Any]
    lines: list[Node | None] = field(default_factory=list)
    _prologue_start: int = 0
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def lineno_map(self) -> dict[int, Node]:
        """Line of `src`, counted from 1 -> the Node that it computes."""
        start = self._prologue_start + 1
        return {i: node for i, node in enumerate(self.lines, start) if node is not None}

    @property
    def _lineno_map(self) -> dict[int, int | None]:
        """torch.fx's form: line counted from the `def` line -> position of the Node, or None."""
        graph = next((node.graph for node in self.lines if node is not None), None)
        position = {node: i for i, node in enumerate(graph.nodes)} if graph is not None else {}
        return {i: position.get(node) for i, node in enumerate(self.lines, 1)}  # type: ignore[arg-type]

    def node_at(self, line: int) -> Node | None:
        """Return the Node that a line of `src` (from 1) computes, or None."""
        index = line - self._prologue_start - 1
        return self.lines[index] if 0 <= index < len(self.lines) else None


class _Writer:
    """Writes the expressions of one function; owns its names.

    Args:
        nodes: the Nodes in order.
        root: how the code would like to call the module.
        display: write for a reader: never raise, whatever state the graph is in.
    """

    def __init__(self, nodes: Iterable[Node], root: str, display: bool = False) -> None:
        self.nodes, self.display = list(nodes), display
        self.current: Node | None = None
        self.globals: dict[str, Any] = {}
        self._bound: dict[int, str] = {}
        self._name_locals(root)
        self.torch, self.getattr = self.bind("torch", torch), self.bind("getattr", getattr)

    # -- names ----------------------------------------------------------------------------------

    def _name_locals(self, root: str) -> None:
        """Fix the name of each parameter and local: parameters first, then whoever is free."""
        self.taken = taken = set[str]()
        self.parameters: dict[Node, tuple[str, str]] = {}
        for node in self.nodes:
            if node._op == "placeholder":
                target = str(node._target)
                name = target.lstrip("*")
                kind = node.meta.get("param_kind")
                if kind not in _KINDS:
                    kind = _KINDS[(1, 2, 4)[min(len(target) - len(name), 2)]]
                if not is_name(name) or name in taken:
                    name = self._free(node._name)
                taken.add(name)
                self.parameters[node] = name, kind
        self.root = self._free(root)
        taken.add(self.root)
        self.local: dict[Node, str] = {}
        for node in self.nodes:
            name = node._name
            if (name in taken or not is_name(name)) and (
                node._op != "placeholder" or self.parameters[node][0] != name
            ):
                name = self._free(name)
            taken.add(name)
            self.local[node] = name

    def _free(self, hint: str, obj: Any = None) -> str:
        """Return a name like `hint` that no parameter, local, global or (other) builtin has."""
        if not is_name(hint):
            hint = _not_word.sub("_", hint) or "_unnamed"
            hint = hint if is_name(hint) else f"_{hint}"
        name, number = hint, 0
        while name in self.taken or getattr(builtins, name, obj) is not obj:
            number += 1
            name = f"{hint}_{number}"
        return name

    def bind(self, hint: str, obj: Any) -> str:
        """Return the global name of an object; no parameter or local can shadow it."""
        name = self._bound.get(id(obj))
        if name is None:
            name = self._bound[id(obj)] = self._free(hint, obj)
            self.taken.add(name)
            self.globals[name] = obj
        return name

    def callee(self, fn: Any) -> str:
        """Return an expression for a function, class or operator."""
        known = _torch_paths.get(id(fn))
        if known is not None:
            return f"{self.torch}.{known[1]}"
        path = qualified_name(fn)
        if path.startswith("torch.") and _resolves(torch, path[6:], fn):
            _torch_paths[id(fn)] = fn, path[6:]
            return f"{self.torch}.{path[6:]}"
        if path.startswith("operator.") and _resolves(operator, path[9:], fn):
            return f"{self.bind('operator', operator)}.{path[9:]}"
        return self.bind(path, fn)

    # -- expressions ----------------------------------------------------------------------------

    def value(self, arg: Argument, depth: int = 0) -> str:
        """Return an expression whose value is `arg`, of the same type."""
        kind = type(arg)
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
                f"{arg._name} is not in this graph", "a node of the same graph",
                "graph.lint() names every such node", arg._name)  # fmt: skip
        if depth > _DEEPEST_ARGUMENT and isinstance(arg, (tuple, list, dict, slice, frozenset)):
            if _holds_node(arg):
                return self.refuse("it is nested too deeply", f"{_DEEPEST_ARGUMENT} levels at most")
            return self.bind("_nested", arg)
        if kind is tuple:
            inner = ", ".join([self.value(a, depth + 1) for a in arg])
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if kind is list or kind is immutable_list:
            return "[" + ", ".join([self.value(a, depth + 1) for a in arg]) + "]"
        if kind is dict or kind is immutable_dict:
            value, inner = self.value, depth + 1
            return "{" + ", ".join([f"{value(k)}: {value(v, inner)}" for k, v in arg.items()]) + "}"
        if kind is slice:
            parts = [self.value(a, depth + 1) for a in (arg.start, arg.stop, arg.step)]
            return f"{self.bind('slice', slice)}({', '.join(parts)})"
        return self._object(arg, kind, depth)

    def _object(self, arg: Any, kind: type, depth: int) -> str:
        """Return an expression for what is no plain literal; the last resort is the table."""
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return f"{self.torch}.{str(arg).removeprefix('torch.')}"
        if kind is torch.device:
            index = "" if arg.index is None else f", index={arg.index}"
            return f"{self.bind('device', torch.device)}(type={arg.type!r}{index})"
        if kind is complex and not any(mark in repr(arg) for mark in ("inf", "nan", "-0")):
            return repr(arg)
        if kind is range:
            return f"{self.bind('range', range)}({arg.start}, {arg.stop}, {arg.step})"
        if kind is set or kind is frozenset:
            items = ", ".join(sorted([self.value(a, depth + 1) for a in arg]))
            text = f"{{{items}}}" if items else f"{self.bind('set', set)}()"
            return text if kind is set else f"{self.bind('frozenset', frozenset)}({text})"
        if isinstance(arg, enum.Enum) and is_name(arg.name or ""):
            if getattr(kind, arg.name, None) is arg:
                return f"{self.callee(kind)}.{arg.name}"
        elif isinstance(arg, tuple) and (kind is torch.Size or hasattr(kind, "_make")):
            inner = ", ".join([self.value(a, depth + 1) for a in arg])
            if "_fields" in vars(kind) and "__new__" in vars(kind):
                return f"{self.callee(kind)}({inner})"
            maker = f"{self.torch}.Size" if kind is torch.Size else f"{self.callee(kind)}._make"
            return f"{maker}([{inner}])"
        elif isinstance(arg, _CALLABLES):
            return self.callee(arg)
        elif isinstance(arg, (tuple, list, dict)) and _holds_node(arg):
            return self.refuse(f"it is a {kind.__name__} of nodes", "a plain tuple, list or dict")
        return self.bind("Ellipsis" if arg is ... else f"_{kind.__name__}".lower(), arg)

    def refuse(self, what: str, expected: str, hint: str = "", shown: str = "...") -> str:
        """Raise the error for what Python cannot express; a reader gets `shown` instead."""
        if self.display:
            return shown
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
        for key, arg in kwargs.items():
            parts.append(
                f"{key} = {value(arg)}" if is_name(key) else f"**{{{key!r}: {value(arg)}}}"
            )
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
            base = getattr(typing, alias, origin) if alias else origin
            if base[args] == kind and type(base[args]) is type(kind):
                name = self.bind(f"typing_{alias}" if alias else origin.__name__, base)
                return f"{name}[{','.join(map(self.annotation, args))}]"
        return self.bind(f"_annotation_{str(kind)[:40]}", kind)

    # -- right-hand sides -----------------------------------------------------------------------

    def expression(self, node: Node) -> str:
        """Return the right-hand side of a Node's statement."""
        self.current = node
        op, target, args, kwargs = node._op, node._target, node._args, node._kwargs
        if op == "call_function":
            return self._call(target, args, kwargs)
        if op == "call_method":
            if not args:
                return self.refuse("a method needs its object", "args[0], whose method is called")
            method = attribute_text(self.operand(args[0]), (target,), self.getattr)  # type: ignore[arg-type]
            return f"{method}({self.arguments(args[1:], kwargs)})"
        path = attribute_text(self.root, target.split("."), self.getattr)  # type: ignore[union-attr]
        return path if op == "get_attr" else f"{path}({self.arguments(args, kwargs)})"

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a call of a function, or its operator form."""
        if not kwargs and type(target) is types.BuiltinFunctionType:
            if len(args) == 2:
                symbol = _INFIX.get(target)
                if symbol is not None:
                    left = self.value(args[0])
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
        text = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(kind, "") + name
        if node._type is not None:
            text += f" : {self.annotation(node._type)}"
        return f"{text} = {self.value(node._args[0])}" if node._args else text

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
                            "parameters without a default first",
                            "give it a default, or move its placeholder with prepend")  # fmt: skip
            previous, optional = kind, name if node._args else optional
        return [*texts, "/"] if previous == "POSITIONAL_ONLY" else texts

    def default(self, node: Node) -> Any:
        """Return a default as the user wrote it, not the immutable copy that a Node keeps."""
        kept, frozen = node.meta.get("param_default"), node._args[0]
        same = isinstance(frozen, (immutable_list, immutable_dict)) and kept == frozen
        return kept if same else frozen


def _resolves(root: Any, path: str, obj: Any) -> bool:
    """Say whether a dotted path from a module leads to this very object."""
    for part in path.split("."):
        root = getattr(root, part, None) if is_name(part) else None
    return root is obj


def _holds_node(arg: Any) -> bool:
    """Say whether a Node stands anywhere inside an argument, however deep."""
    stack = [arg]
    while stack:
        a = stack.pop()
        if isinstance(a, Node):
            return True
        if isinstance(a, (tuple, list, set, frozenset)):
            stack.extend(a)
        elif isinstance(a, dict):
            stack.extend(a.values())
        elif isinstance(a, slice):
            stack += a.start, a.stop, a.step
    return False


def _comments(node: Node, options: dict[str, Any], last: Any) -> list[str]:
    """Return the comment lines above a statement: its source line if new, and chosen meta."""
    notes, source = [], node.meta.get("source")
    if source and source != last and options.get("sources", True):
        file, line, function = source[0]
        code = linecache.getline(file, line).strip()
        notes = [f"# File: {file}:{line} in {function}, code: {code}"]
    keys = [key for key in options.get("additional_meta") or () if key in node.meta]
    return notes + [" ".join(f"# {key}: {node.meta[key]}".split("\n")) for key in keys]


def _shape(node: Node, options: dict[str, Any]) -> str:
    """Return dtype and shape behind a name, as a string annotation, or ""."""
    text, value = shape_text(node), node.meta.get("val", node.meta.get("tensor_meta"))
    for name in ("stride", "device"):
        if text and options.get(f"include_{name}"):
            part = getattr(value, name, "")
            text += str(part() if callable(part) else part)
    paint = "\033[34m{}\033[0m" if options.get("colored") else "{}"
    return f': "{paint.format(text)}"' if text else ""


def _last_uses(nodes: list[Node]) -> dict[Node, list[Node]]:
    """Return for each Node the values that nobody reads after it."""
    dead: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in reversed(nodes):
        for source in node._input_nodes:
            if source not in seen:
                seen.add(source)
                dead.setdefault(node, []).append(source)
    return dead


class CodeGen:
    """Writes a Graph as the source of one function; subclasses change its head or its return.

    The hooks are torch.fx's: `gen_fn_def`, `generate_output`, `process_inputs`, `process_outputs`,
    `additional_globals`. `Graph.set_codegen` installs one.
    """

    def __init__(self) -> None:
        self._body_transformer: TransformCodeFunc | None = None
        self._func_name = "forward"
        self._root = "self"

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        """Return the `def` line (and lines below it that unpack inputs).

        Args:
            free_vars: the parameters as text, with annotation and default, without the module.
            maybe_return_annotation: " -> T" or "".
            expanded_def: one parameter per line.
        """
        parameters = [self._root, *free_vars]
        text = ", ".join(parameters)
        if expanded_def:
            text = "\n" + "".join(f"    {parameter},\n" for parameter in parameters)
        return f"def {self._func_name}({text}){maybe_return_annotation}:"

    def generate_output(
        self, output_args: Argument, *, descs: Any = None, repr_fn: Callable[[Any], str] = repr
    ) -> str:
        """Return the `return` statement, not indented.

        Args:
            output_args: what the output Node returns.
            descs: torch.fx's descriptions of outputs; not shown.
            repr_fn: writes a value as an expression.
        """
        return f"return {repr_fn(output_args)}"

    def process_inputs(self, *args: Any) -> Any:
        """Turn the arguments of the generated function into one value per placeholder."""
        return args

    def process_outputs(self, outputs: Any) -> Any:
        """Turn the output Node's value into what the generated function returns."""
        return outputs

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Return (name, object) pairs that the hooks' own text needs."""
        return []

    def _gen_python_code(
        self, nodes: Iterable[Node], root_module: str = "self", namespace: Any = None,
        *, verbose: bool = False, expanded_def: bool = False, delete_values: bool = True,
        **options: Any,
    ) -> PythonCode:  # fmt: skip
        """Write the function.

        Args:
            nodes: the Nodes in order.
            root_module: how the code calls the module.
            namespace: torch.fx's parameter, not needed.
            verbose: comment each statement with its source line and the shape of its value.
            expanded_def: one parameter per line.
            delete_values: drop each value behind its last use (`x = None`).
            options: what `verbose` shows besides: `include_stride`, `include_device`, `colored`,
                `additional_meta` (a list of keys).

        Raises:
            CodegenError: naming the Node that cannot be written.
        """
        writer = _Writer(nodes, root_module)
        self._root = writer.root
        dead = _last_uses(writer.nodes) if delete_values else None
        rows, returns = self._rows(writer, dead, options if verbose else None)
        extra = {"expanded_def": True} if expanded_def else {}
        head = self.gen_fn_def(writer.parameter_list(), returns, **extra)
        if self._body_transformer is not None:
            rows = self._transformed(self._body_transformer, rows, writer.nodes)
        writer.globals.update(self.additional_globals())
        text = "\n\n\n" + "\n    ".join([head, *(row[0] for row in rows)]) + "\n"
        defaults = {name: writer.default(node) for node, (name, _) in writer.parameters.items()
                    if node._args}  # fmt: skip
        lines = [node for _, node in rows]
        return PythonCode(text, writer.globals, lines, 4 + head.count("\n"), defaults)

    def _rows(
        self, writer: _Writer, dead: dict[Node, list[Node]] | None, shown: dict[str, Any] | None
    ) -> tuple[list[Row], str]:
        """Return the statements, each with its Node, and the return annotation."""
        rows: list[Row] = []
        regions: list[tuple[Node, int]] = []
        returns, indent, source, local = "", "", None, writer.local
        for node in writer.nodes:
            op, target, name = node._op, node._target, local[node]
            writer.current = node
            if shown is not None and op != "placeholder":
                rows += [(indent + note, node) for note in _comments(node, shown, source)]
                source = node.meta.get("source", source)
            if op == "placeholder":
                parameter = writer.parameters[node][0]
                if parameter != name:
                    rows.append((f"{name} = {parameter}", node))
            elif op == "output":
                returns = f" -> {writer.annotation(node._type)}" if node._type is not None else ""
                rows.append((indent + self._return(writer, node), node))
            elif target is _enter_region and node._args:
                rows.append((f"{indent}with {self._region(writer, node, len(regions))}:", node))
                regions.append((node, len(rows)))
                indent += "    "
            elif target is _exit_region:
                if not regions or node._args[:1] != (regions[-1][0],):
                    writer.refuse("it leaves a region that is not the innermost one",
                                  "pairs that nest like with blocks")  # fmt: skip
                if regions and regions.pop()[1] == len(rows):
                    rows.append((indent + "pass", node))
                indent = indent[4:]
            else:
                note = "" if node._type is None else f" : {writer.annotation(node._type)}"
                note = note if shown is None else _shape(node, shown) or note
                text = f"{indent}{name}{note} = {writer.expression(node)}"
                if dead is not None:
                    names = [local[n] for n in dead.get(node, ())]
                    if not node.users:
                        names.append(name)
                    if names:
                        text = f"{text};  {' = '.join(names)} = None"
                rows.append((text, node))
        if regions:
            writer.current = regions[-1][0]
            writer.refuse("its region is never left", "an exit for each enter")
        return rows or [("pass", None)], returns

    def _return(self, writer: _Writer, node: Node) -> str:
        """Return the `return` statement; an override without `repr_fn` sees Nodes by their repr."""
        value = node._args[0] if node._args else None
        if "repr_fn" in inspect.signature(self.generate_output).parameters:
            return self.generate_output(value, repr_fn=writer.value)
        for n in node._input_nodes:
            n._repr_fn = writer.local.__getitem__
        try:
            return self.generate_output(value)
        finally:
            for n in node._input_nodes:
                n._repr_fn = None

    def _region(self, writer: _Writer, node: Node, depth: int) -> str:
        """Return what stands behind `with` for a region's enter Node."""
        writer.current = node
        if depth >= _DEEPEST_REGION:
            writer.refuse("too many regions inside one another", f"{_DEEPEST_REGION} at most")
        factory, *args = node._args
        text = f"{writer.value(factory)}({writer.arguments(args, node._kwargs)})"
        read = any(user._target is not _exit_region for user in node.users)
        return f"{text} as {writer.local[node]}" if read else text

    @staticmethod
    def _transformed(transform: TransformCodeFunc, rows: list[Row], nodes: list[Node]) -> list[Row]:
        """Run a registered transformer; marks like torch.fx's carry the Nodes through it."""
        position: dict[Any, int] = {node: i for i, node in enumerate(nodes)}
        marked: list[str] = []
        for text, node in rows:
            marked += [f"# COUNTER: {position.get(node, 0)}\n", text + "\n"]
        new: list[Row] = []
        current: Node | None = None
        for text in "".join(transform(marked)).split("\n"):
            mark = _counter.search(text)
            if mark is not None:
                current = nodes[int(mark.group(1))] if nodes else None
            elif text.strip():
                new.append((text, current))
        return new or [("pass", None)]

    def display_lines(self, graph: Any, shapes: bool = False) -> dict[Node | None, str]:
        """Return one line per Node for a reader: no deletions, and never an error.

        A placeholder shows its parameter, a region's enter Node its `with` line. The key None
        holds the `def` line. It works in the middle of a pass, on a graph that is not well formed.

        Args:
            graph: the Graph to show.
            shapes: put dtype and shape behind the name where meta knows them.
        """
        writer = _Writer(graph.nodes, "self", display=True)
        self._root = writer.root
        rows, returns = CodeGen._rows(self, writer, None, {"sources": False} if shapes else None)
        text: dict[Node | None, str] = dict.fromkeys(writer.nodes, "# end of with")
        text[None] = CodeGen.gen_fn_def(self, writer.parameter_list(), returns)
        text.update({node: line for line, node in rows if node is not None})
        text.update({node: writer.parameter(node) for node in writer.parameters})
        return text


class _PyTreeInfo(NamedTuple):
    """What pytree inputs and outputs look like: parameter names and the two structures."""

    orig_args: list[str]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec | None


class _PyTreeCodeGen(CodeGen):
    """Writes a function whose parameters are nested structures; its placeholders are leaves."""

    def __init__(self, pytree_info: _PyTreeInfo) -> None:
        super().__init__()
        self.pytree_info: _PyTreeInfo = pytree_info

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pytree_info": [
            (pytree.tree_unflatten(range(x.num_leaves), x),) if isinstance(x, pytree.TreeSpec) else x
            for x in self.pytree_info]}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, *structures = state["pytree_info"]
        specs = [s if s is None else pytree.tree_structure(s[0]) for s in structures]
        self.__dict__.update(state, pytree_info=_PyTreeInfo(names, *specs))

    def process_inputs(self, *args: Any) -> Any:
        """Return the leaves of the inputs."""
        return pytree.arg_tree_leaves(*args)

    def process_outputs(self, outputs: Any) -> Any:
        """Put the output's leaves back into the structure that the traced function returned."""
        spec = self.pytree_info.out_spec
        leaves = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return outputs if spec is None else pytree.tree_unflatten(leaves, spec)

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        """Return the `def` line with the original parameters, and the line that unpacks them."""
        names = [name for name in self.pytree_info.orig_args if name != "self"]
        head = super().gen_fn_def(names, maybe_return_annotation, expanded_def=expanded_def)
        leaves = [v for v in free_vars if v not in ("*", "/")]
        return head + self.gen_var_bindings(names, leaves, expanded_def) if leaves else head

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Return the line that binds each placeholder's local to its leaf."""
        spec = self.pytree_info.in_spec
        kinds = [child.type for child in spec.children()] if spec.type is tuple else []
        structure = f"({''.join(name + ', ' for name in fn_args)})"
        if kinds == [tuple, dict]:
            count, keys = spec.child(0).num_children, spec.child(1).context
            pairs = [f"{k!r}: {v}" for k, v in zip(keys, fn_args[count:], strict=False)]
            structure = f"(({''.join(a + ', ' for a in fn_args[:count])}), {{{', '.join(pairs)}}})"
        leaves = [v.split(":")[0].split("=")[0].strip(" *") for v in free_vars]
        return f"\n    {', '.join(leaves)}, = {self._root}._in_spec.flatten_up_to({structure})"

    def generate_output(
        self, output_args: Argument, *, descs: Any = None, repr_fn: Callable[[Any], str] = repr
    ) -> str:
        """Return the `return` statement; the leaves go back into their structure."""
        if self.pytree_info.out_spec is None:
            return super().generate_output(output_args, repr_fn=repr_fn)
        return f"return {self._root}._out_spec.unflatten({repr_fn(output_args)})"
