"""Shape propagation with sizes that have names (section 6.3 names it as work in progress then).

The walk is the same as with numbers. What differs is the input: fake tensors have no data, and
their sizes are symbols that torch's operators compute with. Where the program asks a question
about a size ("is N equal to 4?") the answer that holds for the example is taken and written down
as a guard: the result is right for every size that satisfies the guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.passes.shape_prop import ShapeError, ShapeProp, TensorMetadata, quiet_fakes

__all__ = ["propagate_symbolic"]


def propagate_symbolic(
    gm: GraphModule, inputs: Sequence[Any], dynamic: Mapping[str, Mapping[int, str]]
) -> list[str]:
    """Write shapes with symbols on the nodes of ``gm`` (in place, meta only); return the guards.

    Args:
        gm: The module to analyse; it is never run on data.
        inputs: One example for each placeholder. A symbolic size counts as at least 2, since torch
            treats 0 and 1 as cases of their own.
        dynamic: For each placeholder's name (or its node's), dimension -> symbol.

    Returns:
        One sentence for each condition on the symbols that the program relies on.

    Raises:
        ShapeError: ``dynamic`` names no such placeholder or dimension, gives two sizes one symbol,
            or a node does not run.
    """
    import sympy
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv(duck_shape=False)
    names: dict[str, Any] = {}

    def symbol(name: str, size: int) -> Any:
        if name not in names:
            source = ConstantSource(name)
            hint = max(size, 2)
            expr = env.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
            names[name] = env.create_symintnode(expr, hint=hint, source=source)
        elif names[name].node.hint != max(size, 2):
            raise ShapeError(
                f"{name} names sizes that differ in the examples: "
                f"{names[name].node.hint} and {size}",
                hint="give each its own symbol, or examples where they agree",
            )
        return names[name]

    _check_names(gm, inputs, dynamic)
    fake_mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=False):
        dims = dynamic.get(str(node.target), dynamic.get(node.name, {}))
        if not isinstance(value, torch.Tensor):
            fakes.append(value)
            continue
        dims = {dim % value.dim(): name for dim, name in dims.items()}
        sizes = [symbol(dims[i], s) if i in dims else s for i, s in enumerate(value.shape)]
        with fake_mode:
            fakes.append(torch.empty(sizes, dtype=value.dtype, device=value.device))
    plain_symbols = {size.node._expr: sympy.Symbol(n, integer=True) for n, size in names.items()}

    def text(size: Any) -> Any:
        if isinstance(size, int):
            return size
        expr = env.replace(size.node.expr if isinstance(size, torch.SymInt) else size)
        expr = expr.xreplace(plain_symbols)
        return int(expr) if expr.is_Integer else str(expr)

    try:
        with torch.no_grad(), fake_mode, enable_python_dispatcher(), quiet_fakes():
            ShapeProp(gm).run(*fakes)
    except ShapeError as error:
        error.rename({str(old): str(new) for old, new in plain_symbols.items()})
        raise
    finally:
        for node in gm.graph.nodes:
            if "tensor_meta" in node.meta:
                node.meta["tensor_meta"] = _plain(node.meta["tensor_meta"], text)
    fixed = {size.node._expr: n for n, size in names.items() if size.node._expr in env.replacements}
    guards = [f"{n} == {text(s)}, or the program takes another way" for s, n in fixed.items()]
    for guard in env.guards:
        asked_by = guard.sloc.framework_loc
        if getattr(asked_by, "filename", "").endswith("fake_impls.py"):
            continue  # a kernel is chosen by the size of the batch; the shapes are the same
        if not fixed.keys() & guard.expr.free_symbols:
            guards.append(f"{guard.expr.xreplace(plain_symbols)}")
    return list(dict.fromkeys(guards))


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
