"""How does code that was written for torch.fx's module paths find its way here?

`from torch.fx.graph_module import GraphModule` has its counterpart `from fxlab.graph_module import
GraphModule`. Such a path is a module without a file: it stands in `sys.modules` under its name and
looks a name up in the real modules when somebody asks. There is no import hook, and nothing is
imported before it is used. Names that know nothing of a graph (schemas of operators, tensor types)
are torch.fx's own. The paper's appendix has no paths; these are torch.fx's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

_PATHS: dict[str, tuple[str, str]] = {
    # path below fxlab: (the modules that hold the names, torch.fx's public names); a module is one
    # of fxlab's, but for those that begin with torch
    "node": ("core.node core.purity", "Node map_arg map_aggregate has_side_effect"),
    "graph": ("core.graph core.codegen", "PythonCode CodeGen Graph"),
    "graph_module": ("core.graph_module", "GraphModule"),
    "proxy": ("core.proxy core.tracer core.errors", "TracerBase GraphAppendingTracer TraceError "
              "Proxy Attribute ParameterProxy Scope"),
    "_symbolic_trace": ("tracing core.tracer core.proxy core.errors", "PHBase PHWithMeta PH "
                        "Tracer wrap symbolic_trace ProxyableClassMeta is_fx_tracing "
                        "is_fx_symbolic_tracing"),
    "interpreter": ("core.interpreter", "Interpreter Transformer"),
    "subgraph_rewriter": ("passes.rewriter", "Match replace_pattern replace_pattern_with_filters "
                          "ReplacedPatterns"),
    "immutable_collections": ("core.node", "immutable_list immutable_dict"),
    "annotate": ("torch.fx.annotate", "annotate"),
    "operator_schemas": ("torch.fx.operator_schemas", "ArgsKwargsPair check_for_mutable_operation "
                         "get_signature_for_torch_op create_type_hint type_matches "
                         "normalize_function normalize_module"),
    "tensor_type": ("torch.fx.tensor_type", "Dyn TensorType is_consistent is_more_precise"),
    "passes.pass_manager": ("passes.manager passes.wrappers", "PassManager inplace_wrapper "
                            "log_hook loop_pass this_before_that_pass_constraint "
                            "these_before_those_pass_constraint"),
    "passes.infra": ("", "pass_base pass_manager partitioner"),
    "passes.infra.pass_base": ("passes.base", "PassBase PassResult"),
    "passes.infra.pass_manager": ("passes.manager passes.wrappers passes.base", "PassManager "
                                  "pass_result_wrapper this_before_that_pass_constraint"),
    "passes.infra.partitioner": ("passes.partition", "CapabilityBasedPartitioner Partition"),
    "passes.operator_support": ("passes.partition", "OperatorSupport "
                                "OperatorSupportBase create_op_support chain any_chain OpSupports"),
    "passes.split_module": ("passes.split", "split_module"),
    "passes.utils": ("", "matcher_utils"),
    "passes.utils.matcher_utils": ("passes.matcher", "SubgraphMatcher InternalMatch"),
}  # fmt: skip


# Private names of torch.fx that packages import: of helpers that know names, functions and Modules
# only, torch.fx's own serve; the others are public here.
_HELPERS = {
    "node": "_get_qualified_name _type_repr",
    "graph": "_is_from_torch _snake_case",
    "graph_module": "_assign_attr _copy_attr _del_attr _get_attr _has_attr",
}
_PUBLIC_HERE = {"graph._PyTreeCodeGen": "tracing.pytrees", "graph._PyTreeInfo": "tracing.pytrees"}


class _Alias(types.ModuleType):
    """A module that finds each name in another one, when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        package, _, path = self.__name__.partition(".")
        homes, names = _PATHS[path]
        if name == "__all__":
            return [n for n in names.split() if homes]
        if not (name.startswith("__") and name.endswith("__")):
            if name in names.split() and not homes:
                return sys.modules[f"{self.__name__}.{name}"]
            for home in homes.split():
                real = home if home.startswith("torch.") else f"{package}.{home}"
                if importlib.util.find_spec(real) is None:
                    continue
                value = getattr(importlib.import_module(real), name, self)
                if value is not self:
                    return value
        if name in _HELPERS.get(path, "").split():
            return getattr(importlib.import_module(f"torch.fx.{path}"), name)
        if f"{path}.{name}" in _PUBLIC_HERE:
            home = importlib.import_module(f"{package}.{_PUBLIC_HERE[f'{path}.{name}']}")
            return getattr(home, name.lstrip("_"))
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_PATHS[self.__name__.partition(".")[2]][1].split()})


def install(package: str) -> None:
    """Make torch.fx's module paths importable below `package`; called once by its `__init__`.

    A name that the package has already (a function, a real module) stays what it is.
    """
    for path in _PATHS:
        name = f"{package}.{path}"
        if name in sys.modules:
            continue
        module = sys.modules[name] = _Alias(name, f"torch.fx's path; finds its names in {package}.")
        parent, _, last = name.rpartition(".")
        home = sys.modules.get(parent)
        if home is not None and last not in vars(home):
            setattr(home, last, module)
