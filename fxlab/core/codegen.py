"""How does a Graph become Python source again, and what does each line of it stand for?

Section 4.3 of the paper: code generation writes source text, compiles it and installs it as
`forward`; there is no runtime of its own. `writer.py` writes the expressions; here are the
statements, the signature, and the hooks by which a `CodeGen` of your own changes them. In the
ordinary case the text is the one torch.fx prints.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .graph import _enter_region, _exit_region
from .node import Argument, Node
from .writer import Writer

TransformCodeFunc = Callable[[list[str]], list[str]]
Row = tuple[str, "Node | None"]
_DEEPEST_REGION = 15  # CPython refuses more than 20 nested blocks
_counter = re.compile(r"# COUNTER: (\d+)")


@dataclass
class PythonCode:
    """A Graph as Python source, and what is needed to run it and to find one's way in it.

    `src` holds the text and `globals` the objects that its global names stand for. `defaults` maps
    a parameter to the very object that is its default; `lines` holds the Node (or None) of each
    line after the `def` line, which is line `_prologue_start` of `src`; `places` the line of
    each place in the compiled code, once somebody asked.
    """

    src: str
    globals: dict[str, Any]
    lines: list[Node | None] = field(default_factory=list[Node | None])
    _prologue_start: int = 0
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[int, int | None] = field(default_factory=dict[int, int | None], repr=False)

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


def last_uses(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return for each Node the values that nobody reads after it."""
    dead: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in reversed(list(nodes)):
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

    comments: type[Any]  # fxlab/display: what verbose code shows besides
    structured: Callable[..., Any]  # fxlab/tracing: for traces with nested inputs and outputs

    def __init__(self) -> None:
        self._body_transformer: TransformCodeFunc | None = None
        self._recompiled_with: TransformCodeFunc | None = None
        self._func_name, self._root = "forward", "self"

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *,
                   expanded_def: bool = False) -> str:  # fmt: skip
        """Return the `def` line (and lines below it that unpack inputs).

        Args:
            free_vars: the parameters as text, with annotation and default, without the module.
            maybe_return_annotation: " -> T" or "".
            expanded_def: one parameter per line.
        """
        parameters = [self._root, *free_vars]
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        text = f"\n{lines}" if expanded_def else ", ".join(parameters)
        return f"def {self._func_name}({text}){maybe_return_annotation}:"

    def generate_output(self, output_args: Argument, *, descs: Any = None,
                        repr_fn: Callable[[Any], str] = repr) -> str:  # fmt: skip
        """Return the `return` statement, not indented.

        Args:
            output_args: what the output Node returns.
            descs: torch.fx's descriptions of outputs; not shown.
            repr_fn: writes a value as an expression.
        """
        return f"return {repr_fn(output_args)}"

    def process_inputs(self, *args: Any) -> Any:
        """Turn `args` of the generated function into one value per placeholder."""
        return args

    def process_outputs(self, outputs: Any) -> Any:
        """Turn `outputs`, the output Node's value, into what the generated function returns."""
        return outputs

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Return (name, object) pairs that the hooks' own text needs."""
        return []

    def open_inputs(self, names: list[str]) -> dict[str, Any]:
        """Return those of the inputs `names` that are structures, with placeholders in them."""
        return {}

    def module_fields(self) -> dict[str, Any]:
        """Return attributes of the module that the hooks' own text reads."""
        return {}

    def _reserved(self) -> list[str]:
        return []

    def _gen_python_code(
        self, nodes: Iterable[Node], root_module: str = "self", namespace: Any = None, *, verbose:
        bool = False, expanded_def: bool = False, delete_values: bool = True, **options: Any,
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
            CodegenError: naming the Node that cannot be written, or an unknown option.
        """
        comments = self.comments(options)
        writer = Writer(nodes, root_module, reserved=self._reserved())
        self._root = writer.root
        dead = last_uses(writer.nodes) if delete_values else None
        rows, returns = self._rows(writer, dead, comments if verbose else None)
        extra = {"expanded_def": True} if expanded_def else {}
        head = self.gen_fn_def(writer.parameter_list(), returns, **extra)
        if self._body_transformer is not None:
            rows = self._transformed(self._body_transformer, rows, writer.nodes)
        writer.globals.update(self.additional_globals())
        text = "\n\n\n" + "\n    ".join([head, *(row[0] for row in rows)]) + "\n"
        inputs = writer.parameters.items()
        defaults = {name: writer.default(node) for node, (name, _) in inputs if node._args}
        lines = [node for _, node in rows]
        return PythonCode(text, writer.globals, lines, 4 + head.count("\n"), defaults)

    def _rows(self, writer: Writer, dead: dict[Node, list[Node]] | None,
              shown: Any) -> tuple[list[Row], str]:  # fmt: skip
        """Return the statements, each with its Node, and the return annotation."""
        rows: list[Row] = []
        regions: list[tuple[Node, int]] = []
        returns, local = "", writer.local
        for node in writer.nodes:
            op, target, name = node._op, node._target, local[node]
            writer.current, indent = node, "    " * len(regions)
            if shown is not None and op != "placeholder":
                rows += [(indent + note, node) for note in shown.above(node)]
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
            elif target is _exit_region:
                if not regions or node._args[:1] != (regions[-1][0],):
                    writer.refuse("it leaves a region that is not the innermost", "nested pairs")
                if regions.pop()[1] == len(rows):
                    rows.append((indent + "pass", node))
            else:
                note = "" if node._type is None else f" : {writer.annotation(node._type)}"
                note = note if shown is None else shown.beside(node) or note
                text = f"{indent}{name}{note} = {writer.expression(node)}"
                ends = [] if dead is None else [*dead.get(node, ()), *[node] * (not node.users)]
                text += f";  {' = '.join(map(local.__getitem__, ends))} = None" if ends else ""
                rows.append((text, node))
        if regions:
            writer.current = regions[-1][0]
            writer.refuse("its region is never left", "an exit for each enter")
        return rows or [("pass", None)], returns

    def _return(self, writer: Writer, node: Node) -> str:
        """Return the `return` statement; an override without `repr_fn` sees Nodes by their repr."""
        value = node._args[0] if node._args else None
        plain = getattr(self.generate_output, "__func__", None) is CodeGen.generate_output
        if plain or "repr_fn" in inspect.signature(self.generate_output).parameters:
            return self.generate_output(value, repr_fn=writer.value)
        for n in node._input_nodes:
            n._repr_fn = writer.local.__getitem__  # type: ignore[assignment]
        try:
            return self.generate_output(value)
        finally:
            for n in node._input_nodes:
                n._repr_fn = None

    def _region(self, writer: Writer, node: Node, depth: int) -> str:
        """Return what stands behind `with` for a region's enter Node."""
        if depth >= _DEEPEST_REGION:
            writer.refuse("too many regions inside one another", f"{_DEEPEST_REGION} at most")
        factory, *args = node._args
        text = f"{writer.value(factory)}({writer.arguments(args, node._kwargs)})"
        read = any(user._target is not _exit_region for user in node.users)
        return f"{text} as {writer.local[node]}" if read else text

    @staticmethod
    def _transformed(transform: TransformCodeFunc, rows: list[Row], nodes: list[Node]) -> list[Row]:
        """Run a registered transformer; marks like torch.fx's carry the Nodes through it."""
        place: dict[Any, int] = {node: i for i, node in enumerate(nodes)}
        marks = [(f"# COUNTER: {place.get(node, 0)}\n", f"{text}\n") for text, node in rows]
        new: list[Row] = []
        current: Node | None = None
        for text in "".join(transform([line for pair in marks for line in pair])).split("\n"):
            mark = _counter.search(text)
            if mark is not None:
                current = nodes[int(mark.group(1))] if nodes else None
            elif text.strip():
                new.append((text, current))
        return new or [("pass", None)]
