"""How does a program keep nested inputs and outputs when its graph has only flat ones?

A fixed value given for an argument (`concrete_args`) may be a dict or tuple with placeholders in
it; then each leaf is a placeholder of its own, and generated code takes the structure apart and
puts the result's together again (torch's pytrees). The paper's graphs are flat in the same way:
section 4.2 leaves structures to the arguments of Nodes.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch.utils import _pytree as pytree

from fxlab.core import patches
from fxlab.core.codegen import CodeGen
from fxlab.core.errors import CodegenError
from fxlab.core.node import Argument
from fxlab.core.proxy import Proxy
from fxlab.core.tracer import PH, Tracer


def install() -> None:
    """Let a trace with structures among its fixed arguments write code that has them too."""
    CodeGen.structured = flattened
    if _install not in patches.installers:
        patches.installers.append(_install)


def _install() -> None:
    patches._set(pytree.TreeSpec, "flatten_up_to", _flatten_up_to)


_original: Any = pytree.TreeSpec.flatten_up_to


@functools.wraps(_original)
def _flatten_up_to(spec: pytree.TreeSpec, tree: Any) -> list[Any]:
    """Take a structure apart; a Proxy in the place of a dict, list or tuple is read part by part.

    So a module whose code has structured inputs can be part of a module that is traced.
    """
    return _original(spec, tree if patches.current_tracer() is None else _opened(spec, tree))


def _opened(spec: pytree.TreeSpec, tree: Any) -> Any:
    kind = pytree.SUPPORTED_NODES.get(spec.type)
    if spec.is_leaf() or kind is None:
        return tree
    if isinstance(tree, Proxy):
        if spec.type not in (dict, OrderedDict, list, tuple):
            return tree
        keys = range(spec.num_children) if spec.type in (list, tuple) else spec.context
        parts: Any = [cast(Any, tree)[key] for key in keys]
    elif type(tree) is spec.type:
        parts = kind.flatten_fn(tree)[0]
    else:
        return tree
    pairs = zip(spec.children(), parts, strict=False)
    opened = [_opened(child, part) for child, part in pairs]
    return kind.unflatten_fn(opened, spec.context) if len(opened) == spec.num_children else tree


def flattened(tracer: Tracer, fn: Any, spec: Any, names: list[str]) -> Callable[..., Any]:
    """Return `fn` on flat inputs and outputs; generated code flattens and rebuilds them.

    `spec` is the structure of the inputs, `names` are those of the generated function.
    """
    codegen = tracer.graph._codegen = PyTreeCodeGen(PyTreeInfo(names, spec, None))

    def flat(*values: Any) -> Any:
        result = fn(*pytree.tree_unflatten(list(values), spec))
        leaves, out_spec = pytree.tree_flatten(result)
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)
        return leaves

    flat.__fxlab_flat__ = True  # type: ignore[attr-defined]
    flat.__annotations__ = {}
    return flat


class PyTreeInfo(NamedTuple):
    """What pytree inputs and outputs look like: parameter names and the two structures."""

    orig_args: list[str]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec | None


class PyTreeCodeGen(CodeGen):
    """Writes a function whose parameters are nested structures; its placeholders are leaves."""

    def __init__(self, pytree_info: PyTreeInfo) -> None:
        super().__init__()
        self.pytree_info = pytree_info

    def __getstate__(self) -> dict[str, Any]:
        specs = self.pytree_info[1:]
        made = [s and (pytree.tree_unflatten(range(s.num_leaves), s),) for s in specs]
        return {**self.__dict__, "pytree_info": [self.pytree_info.orig_args, *made]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, *structures = state["pytree_info"]
        specs: Any = [s if s is None else pytree.tree_structure(s[0]) for s in structures]
        self.__dict__.update(state, pytree_info=PyTreeInfo(names, *specs))

    def process_inputs(self, *args: Any) -> Any:
        """Return the leaves of the inputs, in the order of the placeholders."""
        children = self.pytree_info.in_spec.children()[self.pytree_info.orig_args[:1] == ["self"] :]
        if self._split_kwargs() or len(children) != len(args):
            return pytree.arg_tree_leaves(*args)
        pairs = zip(children, args, strict=True)
        return [leaf for child, arg in pairs for leaf in child.flatten_up_to(arg)]

    def process_outputs(self, outputs: Any) -> Any:
        """Put the output's leaves back into the structure that the traced function returned."""
        spec = self.pytree_info.out_spec
        leaves = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return outputs if spec is None else pytree.tree_unflatten(leaves, spec)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *,
                   expanded_def: bool = False) -> str:  # fmt: skip
        """Return the `def` line with the original parameters, and the line that unpacks them."""
        names, spec = self.pytree_info.orig_args, self.pytree_info.in_spec
        bound = names[:1] == ["self"]
        rest, texts = iter(free_vars), list[str]()
        wanted = sum(child.num_leaves for child in spec.children()[bound:])
        if (given := len([v for v in free_vars if v not in ("*", "/")])) < wanted:
            raise CodegenError(
                f"the graph has {given} placeholders, and the structure of its arguments {wanted} "
                "places", expected="a placeholder for each place, read or not",
                hint="graph.set_codegen(fxlab.CodeGen()) takes one argument a placeholder instead",
            )  # fmt: skip
        for name, child in zip(names[bound:], spec.children()[bound:], strict=False):
            group: list[str] = []
            while len(group) < child.num_leaves:
                text = next(rest)
                (texts if text in ("*", "/") else group).append(text)
            _, default, value = group[0].partition(" = ") if group else ("", "", "")
            first = group[0].lstrip("*").partition(" ")[0] if group else name
            own = group[0].replace(first, name, 1) if child.is_leaf() else name + default + value
            texts.append(own)
        if self._split_kwargs():
            texts = names[bound:]
        head = super().gen_fn_def(texts, maybe_return_annotation, expanded_def=expanded_def)
        leaves = [v for v in free_vars if v not in ("*", "/")]
        return head + self.gen_var_bindings(names, leaves, expanded_def) if leaves else head

    def open_inputs(self, names: list[str]) -> dict[str, Any]:
        """Return those of the named inputs that are structures, with all places open."""
        known, spec, _ = self.pytree_info
        if self._split_kwargs():
            return {}
        values = pytree.tree_unflatten([PH] * spec.num_leaves, spec)
        found = zip(known, spec.children(), values, strict=False)
        return {name: value for name, child, value in found
                if name in names and not child.is_leaf()}  # fmt: skip

    def module_fields(self) -> dict[str, Any]:
        """Return the structures, which the code reads from the module."""
        return {"_in_spec": self.pytree_info.in_spec, "_out_spec": self.pytree_info.out_spec}

    def _reserved(self) -> list[str]:
        return [name for name in self.pytree_info.orig_args if name != "self"]

    def _split_kwargs(self) -> bool:
        """Say whether the inputs are (positional ones, keyword ones), as torch.export has them."""
        spec = self.pytree_info.in_spec
        return spec.type is tuple and [child.type for child in spec.children()] == [tuple, dict]

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Return the line that binds each placeholder's local to its leaf."""
        spec, root = self.pytree_info.in_spec, self._root
        leaves = [v.split(":")[0].split("=")[0].strip(" *") for v in free_vars]
        if fn_args[:1] == ["self"]:
            fn_args, leaves = [root, *fn_args[1:]], [root, *leaves]
        structure = f"({''.join(name + ', ' for name in fn_args)})"
        if self._split_kwargs():
            count, keys = spec.child(0).num_children, spec.child(1).context
            pairs = [f"{k!r}: {v}" for k, v in zip(keys, fn_args[count:], strict=False)]
            structure = f"(({''.join(a + ', ' for a in fn_args[:count])}), {{{', '.join(pairs)}}})"
        return f"\n    {', '.join(leaves)}, = {root}._in_spec.flatten_up_to({structure})"

    def generate_output(self, output_args: Argument, *, descs: Any = None,
                        repr_fn: Callable[[Any], str] = repr) -> str:  # fmt: skip
        """Return the `return` statement; the leaves go back into their structure."""
        if self.pytree_info.out_spec is None:
            return super().generate_output(output_args, repr_fn=repr_fn)
        return f"return {self._root}._out_spec.unflatten({repr_fn(output_args)})"
