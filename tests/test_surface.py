"""Every public name of torch.fx is in fxlab, with a signature that the same calls fit."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

import fxlab
from tests.differences import DIFFERENCES, MISSING, markdown

MODULES = (
    "node",
    "graph",
    "graph_module",
    "proxy",
    "_symbolic_trace",
    "interpreter",
    "subgraph_rewriter",
    "immutable_collections",
    "annotate",
    "operator_schemas",
    "tensor_type",
    "passes.shape_prop",
    "passes.infra.pass_base",
    "passes.infra.pass_manager",
    "passes.infra.partitioner",
    "passes.operator_support",
    "passes.pass_manager",
    "passes.split_module",
    "passes.utils.matcher_utils",
)
CHOSEN = {  # modules without an __all__ of use
    "passes.infra.partitioner": ("CapabilityBasedPartitioner",),
    "passes.split_module": ("split_module",),
}


def public_names(module: Any) -> list[str]:
    """The names that a module of torch.fx declares, or else defines, without an underscore."""
    declared = getattr(module, "__all__", None)
    if declared:
        return list(declared)
    own = module.__name__
    return [n for n, v in vars(module).items()
            if n[0] != "_" and getattr(v, "__module__", None) == own]  # fmt: skip


def surface() -> Iterator[tuple[str, str, str]]:
    """Yield (module path, class or function, member or "")."""
    for path in MODULES:
        module = importlib.import_module(f"torch.fx.{path}")
        for name in CHOSEN.get(path) or public_names(module):
            yield path, name, ""
            value = getattr(module, name)
            if inspect.isclass(value):
                for member in vars(value):
                    if not member.startswith("_"):
                        yield path, name, member


def importable(path: str) -> bool:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        return False
    return True


def test_every_module_path_is_here_or_named_as_an_exception_in_the_guide():
    guide = (Path(__file__).parent.parent / "notebooks/guides/coming_from_torch_fx.md").read_text()
    paths = {m.name for m in pkgutil.iter_modules(torch.fx.__path__) if m.name[0] != "_"}
    missing = {path for path in paths if not importable(f"fxlab.{path}")}
    assert missing == {"config", "experimental", "traceback"}
    assert all(f"`torch.fx.{path}`" in guide for path in missing)


def full_name(path: str, name: str, member: str) -> str:
    return f"{path}.{name}" + (f".{member}" if member else "")


def signature(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


def misfits(theirs: Any, ours: Any) -> list[str]:
    """Say which calls that fit torch.fx's signature would not fit ours."""
    old, new = signature(theirs), signature(ours)
    if old is None or new is None:
        return []
    kinds = {p.kind for p in new.parameters.values()}
    any_keyword, any_position = (
        inspect.Parameter.VAR_KEYWORD in kinds,
        inspect.Parameter.VAR_POSITIONAL in kinds,
    )
    places = [
        p.name
        for p in new.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    found = []
    for place, p in enumerate(old.parameters.values()):
        if p.name.startswith("_") or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        mine = new.parameters.get(p.name)
        if p.name == "self":
            continue
        if mine is None:
            found += [] if any_keyword else [f"no parameter {p.name}"]
            continue
        at_place = place < len(places) and places[place] == p.name
        if p.kind is p.POSITIONAL_OR_KEYWORD and not (at_place or any_position):
            found.append(f"{p.name} is at another position")
        if p.default is not p.empty and mine.default is p.empty:
            found.append(f"{p.name} has no default")
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in old.parameters.values())
    for p in new.parameters.values():
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if needed and p.name not in old.parameters and not takes_all:
            found.append(f"{p.name} is needed here and unknown there")
    return found


@pytest.mark.parametrize("where", list(surface()), ids=lambda where: full_name(*where))
def test_public_name_is_here_with_a_compatible_signature(where: tuple[str, str, str]) -> None:
    path, name, member = where
    full = full_name(*where)
    if full in MISSING or full_name(path, name, "") in MISSING:
        ours = importlib.import_module(f"fxlab.{path}")
        owner = getattr(ours, name, None)
        assert not hasattr(owner if member else ours, member or name), "it is here: drop the row"
        return
    theirs = getattr(importlib.import_module(f"torch.fx.{path}"), name)
    ours = getattr(importlib.import_module(f"fxlab.{path}"), name)
    if member:
        holder = ours() if full.startswith("graph.Graph.") else ours  # some are of the instance
        assert hasattr(holder, member), f"{full} is missing"
        theirs, ours = getattr(theirs, member), getattr(ours, member, None)
        if isinstance(theirs, property) or not callable(theirs):
            return
    assert not misfits(theirs, ours), f"{full}{signature(ours)}"


def test_top_level_names_are_the_same_objects_under_every_path() -> None:
    for name in torch.fx.__all__:
        assert getattr(fxlab, name) is not None
    assert importlib.import_module("fxlab.node").Node is fxlab.Node
    assert importlib.import_module("fxlab.passes.utils.matcher_utils").SubgraphMatcher is (
        fxlab.SubgraphMatcher
    )


def test_alias_modules_import_in_every_spelling() -> None:
    import fxlab.graph_module
    import fxlab.passes.infra.pass_base as base
    import fxlab.subgraph_rewriter as rewriter
    from fxlab import node
    from fxlab.immutable_collections import immutable_list
    from fxlab.passes.utils import matcher_utils

    assert fxlab.graph_module.GraphModule is fxlab.GraphModule
    assert rewriter.replace_pattern is fxlab.replace_pattern
    assert node.map_arg is fxlab.map_arg
    assert immutable_list([1]) == [1]
    assert matcher_utils.SubgraphMatcher is fxlab.SubgraphMatcher
    assert base.PassResult is fxlab.passes.PassResult
    assert "Node" in dir(node)
    namespace: dict[str, Any] = {}
    exec("from fxlab.graph import *", namespace)
    assert namespace["Graph"] is fxlab.Graph
    with pytest.raises(AttributeError, match=r"fxlab\.node.*no_such_name"):
        _ = node.no_such_name
    with pytest.raises(ImportError):
        exec("from fxlab.node import no_such_name")
    for path in MODULES:
        assert not hasattr(importlib.import_module(f"fxlab.{path}"), "no_such_name"), path
    assert type(sys.modules["fxlab.node"]).__name__ == "_Alias"


def test_private_helpers_that_packages_import_are_here() -> None:
    from fxlab.graph import _PyTreeCodeGen, _PyTreeInfo, _snake_case
    from fxlab.graph_module import _assign_attr, _copy_attr, _get_attr
    from fxlab.node import _get_qualified_name, _type_repr

    assert _get_qualified_name(torch.relu) == "torch.relu" and _type_repr(int) == "int"
    assert _snake_case("MaxPool") == "max_pool"
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    gm = fxlab.symbolic_trace(model)
    _assign_attr(torch.nn.ReLU(), gm, "0.1")
    assert isinstance(_get_attr(gm, "0.1"), torch.nn.ReLU)
    other = torch.nn.Module()
    _copy_attr(gm, other, "0.0.weight")
    assert other.get_submodule("0.0").weight is model[0][0].weight
    graph = fxlab.symbolic_trace(lambda x: x, concrete_args={"x": (fxlab.PH, fxlab.PH)}).graph
    assert type(graph._codegen) is _PyTreeCodeGen
    assert type(graph._codegen.pytree_info) is _PyTreeInfo


def test_differences_are_one_table_with_a_reason_each() -> None:
    names = [d.name for d in DIFFERENCES]
    assert len(names) == len(set(names))
    assert all(d.torch_fx and d.fxlab and d.why for d in DIFFERENCES)
    assert all(MISSING.values())
    assert markdown().count("\n") == len(DIFFERENCES) + 1
    known = {full_name(*where) for where in surface()}
    assert set(MISSING) <= known, "a row for a name that torch.fx does not have"
