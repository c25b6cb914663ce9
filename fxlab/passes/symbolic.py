"""Shape propagation with sizes that have names (section 6.3 names it as work in progress then).

The walk is the same as with numbers. What differs is the input: fake tensors have no data, and
their sizes are symbols that torch's operators compute with. Where the program asks a question
about a size ("is N equal to 4?") the answer that holds for the example is taken and written down
as a guard (`guards.py`): the result is right for all sizes, of 1 or more, that satisfy the guards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxlab.core.graph_module import GraphModule
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node
from fxlab.passes.base import copy_sharing_tensors
from fxlab.passes.guards import Guard, code_of, fewest, guards_of, holds, size_text
from fxlab.passes.shape_prop import (
    ShapeError,
    ShapeProp,
    TensorMetadata,
    need_inputs,
    quiet_fakes,
    without_packed,
)

__all__ = ["propagate_symbolic"]


def propagate_symbolic(
    gm: GraphModule, inputs: Sequence[Any], dynamic: Mapping[str, Mapping[int, str]]
) -> list[str]:
    """Write shapes with symbols on the nodes of ``gm`` (in place, meta only); return the guards.

    A size of 1 in an example counts as 2, since a batch of one is meant to stand for any; where
    the program then fails or the example itself breaks a guard (a mask of batch 1 that is
    broadcast), it counts as 1.

    Args:
        gm: The module to analyse; it is never run on data.
        inputs: One example for each placeholder.
        dynamic: For each placeholder's name (or its node's), dimension -> symbol.

    Returns:
        Each condition on the sizes that the shapes rely on, as an expression of Python.

    Raises:
        ShapeError: ``dynamic`` names no such placeholder or dimension, gives two sizes one symbol,
            or a node does not run.
    """
    _check_names(gm, inputs, dynamic)
    need_inputs(gm, inputs)
    named = _named_dimensions(gm, inputs, dynamic)
    example = _example(inputs, named)
    first: ShapeError | None = None
    for sizes in _readings(example):
        walk = _Walk(gm, inputs, named, sizes)
        try:
            walk.run()
        except ShapeError as error:
            first = first or error
            continue
        guards = walk.fewest_guards()
        if sizes == example or walk.is_right(guards, example):
            return [guard.text for guard in guards]
    raise first or ShapeError("the example's own sizes break what the program asks of them")


def _named_dimensions(
    gm: GraphModule, inputs: Sequence[Any], dynamic: Mapping[str, Mapping[int, str]]
) -> list[dict[int, str]]:
    """Return for each input the names of its dimensions, counted from the front."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    found = []
    for node, value in zip(placeholders, inputs, strict=False):
        dims = dynamic.get(str(node.target), dynamic.get(node.name, {}))
        rank = value.dim() if isinstance(value, torch.Tensor) else 1
        found.append({dim % rank: name for dim, name in dims.items()})
    return found


def _example(inputs: Sequence[Any], named: Sequence[Mapping[int, str]]) -> dict[str, int]:
    """Return the sizes that the example has for the names."""
    sizes: dict[str, int] = {}
    for value, dims in zip(inputs, named, strict=False):
        for dim, name in dims.items():
            size = value.shape[dim]
            if max(sizes.setdefault(name, size), 2) != max(size, 2):
                raise ShapeError(
                    f"{name} names sizes that differ in the examples: {sizes[name]} and {size}",
                    hint="give each its own symbol, or examples where they agree",
                )
    return sizes


def _readings(example: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes that the example may stand for: no 1, then one 1, then as it is."""
    ones = [name for name, size in example.items() if size == 1]
    most = {name: max(size, 2) for name, size in example.items()}
    yield most
    if len(ones) > 1:
        yield from ({**most, name: 1} for name in ones)
    if ones:
        yield {**most, **dict.fromkeys(ones, 1)}


class _Walk:
    """One walk with symbols, and walks with numbers to see what holds."""

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        named: Sequence[Mapping[int, str]],
        sizes: Mapping[str, int],
    ) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.gm, self.inputs, self.named, self.sizes = gm, inputs, named, sizes
        # With 0 and 1 as numbers like others, whatever torch takes for granted is a guard.
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.numbers = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.ground: tuple[GraphModule, Any] | None = None
        self.symbols: dict[str, Any] = {}
        self.names: dict[Any, str] = {}
        for name, size in sizes.items():
            source = ConstantSource(name)
            expr = self.env.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
            self.symbols[name] = self.env.create_symintnode(expr, hint=size, source=source)
            self.names[expr] = name
        self.tried: dict[tuple[int, ...], bool] = {}

    def _fakes(self, mode: Any, sizes: Mapping[str, Any]) -> list[Any]:
        """Return inputs without data, with these sizes in the place of the names."""
        fakes = []
        for value, dims in zip(self.inputs, self.named, strict=False):
            if isinstance(value, torch.Tensor):
                shape = [sizes[dims[i]] if i in dims else s for i, s in enumerate(value.shape)]
                with mode:
                    device = mode if isinstance(mode, torch.device) else value.device
                    value = torch.empty(shape, dtype=value.dtype, device=device)
            fakes.append(value)
        return fakes

    def run(self) -> None:
        """Walk with symbols, and leave metadata with their names on the nodes."""
        from torch._dispatch.python import enable_python_dispatcher

        walk = _Shapes(self.gm)
        fakes = self._fakes(self.mode, self.symbols)
        try:
            with torch.no_grad(), self.mode, enable_python_dispatcher(), quiet_fakes(), _Loops():
                walk.run(*fakes)
        except ShapeError as error:
            error.rename({str(symbol): name for symbol, name in self.names.items()})
            raise
        finally:
            for node in self.gm.graph.nodes:
                if "tensor_meta" in node.meta:
                    node.meta["tensor_meta"] = _plain(node.meta["tensor_meta"], self._text)
        self.claims = {
            node.name: [[self._claim(size) for size in shape] for shape in shapes]
            for node, shapes in walk.shapes.items()
        }

    def _expr(self, size: Any) -> Any:
        return self.env.replace(size.node.expr if isinstance(size, torch.SymInt) else size)

    def _text(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        expr = self._expr(size)
        return int(expr) if expr.is_Integer else size_text(expr, self.names)

    def _claim(self, size: Any) -> Callable[..., int] | None:
        """Return a claimed size as a function of the sizes, None if only data can tell it."""
        return (
            (lambda *sizes: size)
            if isinstance(size, int)
            else code_of(self._expr(size), self.names)
        )

    def fewest_guards(self) -> list[Guard]:
        """Return what the claimed shapes rely on."""
        import sympy

        asked = [guard.expr for guard in self.env.guards]
        asked += [
            sympy.Eq(symbol, self.env.replacements[symbol], evaluate=False)
            for symbol in self.names
            if symbol in self.env.replacements
        ]
        guards = [guard for expr in asked for guard in guards_of(expr, self.names)]
        return fewest(guards, tuple(self.sizes.values()), self._works)

    def is_right(self, guards: Sequence[Guard], example: Mapping[str, int]) -> bool:
        """Say whether the example, too, satisfies the guards and has the shapes claimed."""
        given = tuple(max(size, 1) for size in example.values())
        if not all(holds(guard, given) for guard in guards):
            return False
        return self._works(given) or not self._works(tuple(self.sizes.values()))

    def _works(self, point: tuple[int, ...]) -> bool:
        """Say whether the program runs with these sizes and has the shapes that are claimed."""
        if self.ground is None:
            # Tensors on torch's device without data are the quickest; not every program runs there.
            with contextlib.suppress(Exception):  # a module that cannot be copied
                meta = torch.device("meta")
                self.ground = _without_data(self.gm, meta), meta
            if self.ground is None or not self._runs(tuple(self.sizes.values())):
                self.ground = self.gm, self.numbers
        if point not in self.tried:
            self.tried[point] = self._runs(point)
        return self.tried[point]

    def _runs(self, point: tuple[int, ...]) -> bool:
        assert self.ground
        gm, mode = self.ground
        try:
            fakes = self._fakes(mode, dict(zip(self.sizes, point, strict=True)))
            with torch.no_grad(), mode, quiet_fakes(), _Loops():
                _Trial(gm, self.claims, point).run(*fakes)
        except Exception:  # whatever a program raises at sizes it is not made for
            return False
        return True


def _without_data(gm: GraphModule, meta: torch.device) -> GraphModule:
    """Return a copy of the program, all its tensors on the device that keeps no data."""
    twin = copy_sharing_tensors(gm).to(meta)
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = value.to(meta)
    return twin


class _Shapes(ShapeProp):
    """Shape propagation that keeps the shapes of each node as torch has them."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.shapes: dict[Node, list[torch.Size]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.shapes[n] = _shapes_of(result)
        return result


class _Trial(Interpreter):
    """Run on numbers, and stop where a shape is another one than claimed."""

    def __init__(self, gm: GraphModule, claims: Mapping[str, Any], point: Sequence[int]) -> None:
        super().__init__(gm)
        self.claims, self.point = claims, point

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        found, claimed = _shapes_of(result), self.claims[n.name]
        if [len(shape) for shape in found] != [len(shape) for shape in claimed]:
            raise ShapeError(f"{n.name} has other dimensions than claimed", node=n)
        for shape, sizes in zip(found, claimed, strict=True):
            for size, claim in zip(shape, sizes, strict=True):
                if claim is None or not isinstance(size, int):
                    continue  # only data can tell
                if claim(*self.point) != size:
                    raise ShapeError(f"{n.name} has another shape than claimed", node=n)
        return result


def _shapes_of(value: Any) -> list[torch.Size]:
    leaves = pytree.tree_leaves(without_packed(value))
    return [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Loops(TorchFunctionMode):
    """The shapes of recurrent layers in one step: torch walks through them time step by time step.

    A step for each element of time would make that size a number. An LSTM needs no help: torch
    has a kernel for it that is one step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.gru, torch.rnn_tanh, torch.rnn_relu):
            return func(*args, **(kwargs or {}))  # type: ignore[misc]
        # data, state, weights, ... or, of packed sequences: data, batch sizes, state, weights, ...
        packed = isinstance(args[2], torch.Tensor)
        x, state = args[0], args[2 if packed else 1]
        both = args[-1] if packed else args[-2]
        width = state.shape[-1] * (2 if both else 1)
        return x.new_empty((*x.shape[:-1], width)), torch.empty_like(state)


def _plain(meta: Any, text: Callable[[Any], Any]) -> Any:
    """Return ``meta`` with integers and text in the place of torch's symbolic integers."""
    if isinstance(meta, TensorMetadata):
        shape, stride = ([text(size) for size in sizes] for sizes in (meta.shape, meta.stride))
        return meta._replace(shape=tuple(shape), stride=tuple(stride))
    if isinstance(meta, (list, tuple)):
        return type(meta)(_plain(part, text) for part in meta)
    if isinstance(meta, dict):
        return {key: _plain(part, text) for key, part in meta.items()}
    return text(meta) if isinstance(meta, torch.SymInt) else meta


def _check_names(
    gm: GraphModule, inputs: Sequence[Any], dynamic: Mapping[str, Mapping[int, str]]
) -> None:
    inputs_of_graph = gm.graph.find_nodes(op="placeholder")
    placeholders = {n.name: i for i, n in enumerate(inputs_of_graph)}
    placeholders |= {str(n.target): i for i, n in enumerate(inputs_of_graph)}
    if not isinstance(dynamic, Mapping):
        first = next(iter(placeholders), "x")
        raise ShapeError(
            f"dynamic is {dynamic!r}",
            expected="a dict from inputs to dicts from dimensions to the names of sizes",
            right=f"dynamic={{{first!r}: {{0: 'N'}}}}",
        )
    for name, dims in dynamic.items():
        words = isinstance(dims, Mapping) and all(map(_is_symbol, dims, dims.values()))
        if not words:
            raise ShapeError(
                f"dynamic has {dims!r} for {name!r}",
                expected="a dict from dimensions to the names of sizes",
                right=f"dynamic={{{name!r}: {{0: 'N'}}}}",
            )
        if name not in placeholders:
            raise ShapeError(
                f"dynamic names {name!r}, and the graph has no such input",
                expected=f"one of {', '.join(placeholders) or 'no inputs'}",
            )
        index = placeholders[name]
        example = inputs[index] if index < len(inputs) else None
        if not isinstance(example, torch.Tensor):
            given = "has no example" if index >= len(inputs) else f"is a {type(example).__name__}"
            raise ShapeError(
                f"dynamic names sizes of {name!r}, which {given}",
                expected="an example tensor, for its other sizes and its dtype",
            )
        rank = example.dim()
        for dim in dims:
            if not -rank <= dim < rank:
                raise ShapeError(
                    f"dynamic names dimension {dim} of {name!r}, whose example has {rank}",
                    expected=f"a dimension from 0 to {rank - 1}" if rank else "",
                )
        if len({dim % rank for dim in dims}) < len(dims):
            raise ShapeError(f"dynamic names one dimension of {name!r} twice: {dims!r}")


def _is_symbol(dim: Any, name: Any) -> bool:
    return isinstance(dim, int) and isinstance(name, str) and bool(name)
