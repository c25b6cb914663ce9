"""Which functions may a file name, so that reading the file can never run anybody's code?

A graph or a timeline that came by mail names its operations as text. This file holds the closed
table by which such names become functions: torch's operators (as torch itself lists what can be
overridden), aten operators on tensors and numbers, Tensor's methods, `operator`, `math`, and
`getattr` with a tensor's plain attributes. A name that is not here becomes an `Opaque`.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from fxlab.core.errors import RewriteError, call_site
from fxlab.core.graph import _enter_region, _exit_region
from fxlab.core.node import target_text

_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace logspace normal ones ones_like "
    "rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor zeros "
    "zeros_like tril_indices triu_indices atleast_1d result_type is_tensor is_floating_point"
).split()
_REGIONS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode,
            torch.autocast, torch.amp.autocast, torch.profiler.record_function)  # fmt: skip
_NOT_FUNCTIONS = {"autocast", "lobpcg"}
_NOT_OPERATORS = {"attrgetter", "itemgetter", "methodcaller", "call"}
_NOT_METHODS = set(
    "apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook retain_grad "
    "share_memory_ set_ storage untyped_storage storage_type data_ptr const_data_ptr module_load "
    "record_stream pin_memory numpy type".split()
)
_ATTRIBUTES = frozenset(
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_nested T mT H mH real imag grad data".split()
)
_ATEN = re.compile(r"torch\.ops\.aten\.([a-z][a-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)")
_ATEN_TEXTS = frozenset(
    "approximate reduction rounding_mode reduce mode padding padding_mode indexing ord p UPLO "
    "driver pad_mode interpolation_mode side equation".split()
)


class Opaque:
    """A function that a file named and the table does not hold: it shows, and refuses to run.

    Attributes:
        op: the opcode in the file.
        text: the target in the file.
    """

    def __init__(self, op: str, text: str) -> None:
        self.op, self.text = op, text
        self.__name__ = re.sub(r"\W+", "_", text, flags=re.ASCII)[-80:] or "opaque"
        self.__qualname__ = self.__name__
        self.__module__ = "opaque"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise RewriteError(
            f"{self.text!r} came from a file and is not in the kit's table: it can be shown, "
            "not run",
            where=call_site(),
            hint="put the function there yourself: node.target = your_function",
        )

    def __repr__(self) -> str:
        return f"Opaque({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and (self.op, self.text) == (other.op, other.text)

    def __hash__(self) -> int:
        return hash((self.op, self.text))


def function_table(name: str) -> Callable[..., Any] | None:
    """Return the function that a file may call under this name, or None.

    >>> function_table("torch.relu") is torch.relu, function_table("os.system")
    (True, None)
    """
    if not isinstance(name, str):
        return None
    found = _functions().get(name)
    aten = _ATEN.fullmatch(name)
    return _aten(*aten.groups()) if found is None and aten else found


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    spaces = (torch, torch.functional, F, torch.linalg, torch.fft, torch.special)
    overridable = torch.overrides.get_overridable_functions()
    functions = [fn for space in spaces for fn in overridable.get(space, ())]
    functions += [getattr(torch, name) for name in _FACTORIES]
    functions += [getattr(operator, n) for n in operator.__all__ if n not in _NOT_OPERATORS]
    functions += [getattr(math, n) for n in dir(math) if callable(getattr(math, n)) and n[0] != "_"]
    functions += [*_REGIONS, _enter_region, _exit_region, getattr]
    table: dict[str, Callable[..., Any]] = {}
    for fn in functions:
        name = getattr(fn, "__name__", "_")
        if fn in _REGIONS or fn in (_enter_region, _exit_region) or not (
            name.startswith("_") or name in _NOT_FUNCTIONS
        ):  # fmt: skip
            table.setdefault(target_text(fn), fn)
    return table


@functools.cache
def _aten(name: str, overload: str) -> Callable[..., Any] | None:
    """Return an aten operator that takes tensors, numbers and known words, and returns tensors."""
    packet = getattr(torch.ops.aten, name, None)
    op = (
        getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    )
    if not isinstance(op, torch._ops.OpOverload):
        return None
    schema = op._schema
    plain = re.compile(r"(Optional\[)?(List\[)?(Optional\[)?"
                       r"(Tensor|int|float|bool|number|SymInt|Device)\]*")  # fmt: skip
    for argument in schema.arguments:
        text = argument.type.annotation_str
        word = argument.name in _ATEN_TEXTS and "str" in text
        if not word and not plain.fullmatch(text):
            return None
    return op if all("Tensor" in r.type.annotation_str for r in schema.returns) else None


@functools.cache
def method_names() -> frozenset[str]:
    """Return the names of Tensor's methods that a file may call."""
    methods = torch.overrides.get_overridable_functions()[torch.Tensor]
    names = {getattr(method, "__name__", "_") for method in methods}
    return frozenset(n for n in names if not n.startswith("_") and n not in _NOT_METHODS) | {"item"}


def attribute_names() -> frozenset[str]:
    """Return the attributes of a tensor that a file may read with `getattr`."""
    return _ATTRIBUTES
