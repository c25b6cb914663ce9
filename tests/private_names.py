"""Every private name of torch that the package uses, why, and what happens when it goes.

Private names may change in any release. `python -m tests.private_names` lists which of them the
installed torch has not; tests/test_private_names.py holds the table to the code by parsing it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Private name -> (what it is for, what to do when it goes).
PRIVATE = {
    "torch._C": (
        "type of a scripted method, in isinstance",
        "the class of torch.jit's methods; without TorchScript nothing to tell apart",
    ),
    "torch._C._dynamo": (
        "torch.compile passes over the call that all GraphModules share, to the code of each",
        "leave it out: after eight GraphModules torch.compile gives up, and edits go unseen",
    ),
    "torch._C._dispatch_has_kernel": (
        "does an operator have a rule for aliases of its own",
        "believe the operator's schema",
    ),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        "does an operator have a rule for aliases of its own",
        "believe the operator's schema",
    ),
    "torch._C._select_conv_backend": (
        "which kernel a convolution takes, for the memory that it holds for its time",
        "a cost says that the memory of convolutions is the least there is",
    ),
    "torch._C._set_grad_enabled": (
        "the function that a no_grad region is recorded as",
        "torch.set_grad_enabled, as torch.fx's own region does",
    ),
    "torch._GLOBAL_DEVICE_CONTEXT": (
        "which default device a model set while it was traced",
        "torch.get_default_device, without telling who set it",
    ),
    "torch._VF": (
        "dropout and its kin in torch.nn.functional take a training flag while somebody traces",
        "trace constants through torch.dropout: through torch.nn.functional it is a TypeError",
    ),
    "torch._assert": ("the assertion that concrete_args record", "a function of ours that asserts"),
    "torch._assert_async": ("known to have an effect", "drop the entry: nobody records it then"),
    "torch._dispatch": (
        "run a shape rule in Python for named sizes",
        "name no sizes: dynamic=None",
    ),
    "torch._dynamo": ("the source of a named size, for ShapeEnv", "a source of our own"),
    "torch._library": (
        "which operators have an effect that their schema does not tell",
        "nothing to do: the schema and has_side_effect are believed",
    ),
    "torch.fx.node._side_effectful_functions": (
        "functions registered with torch.fx's has_side_effect have an effect here too",
        "nothing to do: only fxlab's own registry is asked",
    ),
    "torch.utils._sympy": (
        "how torch writes whole-number division and remainder in sizes",
        "guards are shown in sympy's words",
    ),
    "torch._empty_affine_quantized": (
        "hand codes to fbgemm without rounding them again",
        "torch.quantize_per_tensor of the dequantized codes",
    ),
    "torch._empty_per_channel_affine_quantized": (
        "hand a weight's codes to fbgemm without a copy of them",
        "torch.quantize_per_channel of the dequantized codes",
    ),
    "torch._ops": (
        "types of torch's operators (OpOverload and its packet)",
        "type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)",
    ),
    "torch._subclasses": (
        "fake tensors: shapes without data",
        "meta tensors, and real data where a kernel has no shape rule",
    ),
    "torch.amp.autocast_mode._enter_autocast": (
        "autocast as a region of the graph",
        "a context of our own",
    ),
    "torch.amp.autocast_mode._exit_autocast": ("the same", "a context of our own"),
    "torch.cpu._is_vnni_supported": (
        "does this CPU add int8 products without saturating",
        "assume that it does not: the reduced range",
    ),
    "torch.fx._symbolic_trace": (
        "torch.fx's is-tracing flag",
        "set nothing: libraries then ask less",
    ),
    "torch.fx._symbolic_trace._wrapped_fns_to_patch": (
        "functions registered with torch.fx.wrap are leaves here too",
        "fxlab.wrap only",
    ),
    "torch.fx._symbolic_trace._wrapped_methods_to_patch": (
        "the same, for methods",
        "fxlab.wrap only",
    ),
    "torch.fx.graph._PyTreeCodeGen": (
        "take over the signature of an exported program",
        "flat inputs and outputs",
    ),
    "torch.fx.graph._PyTreeInfo": ("the same, on the way back", "flat inputs and outputs"),
    "torch.fx.traceback.NodeSource._from_dict": ("give provenance back to torch", "leave it out"),
    "torch.nn.modules.batchnorm._BatchNorm": (
        "every kind of batch norm at once",
        "BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm",
    ),
    "torch.nn.modules.dropout._DropoutNd": (
        "every kind of dropout at once",
        "Dropout, Dropout1d, Dropout2d, Dropout3d, AlphaDropout, FeatureAlphaDropout",
    ),
    "torch.nn.modules.loss._Loss": ("every kind of loss at once", "list the losses"),
    "torch.ops.mkldnn._convolution_pointwise": (
        "convolution, addition and ReLU in one kernel",
        "leave the program folded",
    ),
    "torch.ops.mkldnn._convolution_pointwise_": (
        "the same, the sum written into the second value",
        "leave the program folded",
    ),
    "torch.ops.mkldnn._reorder_convolution_weight": (
        "weights in the kernel's own layout, ahead of time",
        "leave the program folded",
    ),
    "torch.overrides._get_current_function_mode_stack": (
        "is a mode of the user's above ours",
        "assume that there is none",
    ),
    "torch.utils._device": ("a default device is a mode of its own", "ask for no default device"),
    "torch.utils._device._device_constructors": (
        "torch's list of functions that make tensors",
        "a list of ours",
    ),
    "torch.utils._mode_utils": (
        "measuring a layer's engines is hidden from whoever counts a call",
        "torch._C._DisableTorchDispatch, or let it be counted once",
    ),
    "torch.utils._python_dispatch": (
        "watch which operators a node dispatches, for its cost",
        "count modules and functions by formula",
    ),
    "torch.utils._pytree": (
        "nested inputs and outputs, with what users registered there",
        "torch.utils.pytree when it is public; a walk over tuples, lists and dicts",
    ),
}


def is_private(name: str) -> bool:
    """Tell whether a dotted name of torch has a private part (dunder names are Python's)."""
    return any(p.startswith("_") and not p.startswith("__") for p in name.split(".")[1:])


def used(source: str) -> set[str]:
    """Name the private names of torch that ``source`` imports or reads, as dotted paths.

    Names that an ``import`` brings in are followed (``from torch.utils import _pytree as pytree``).
    """
    tree = ast.parse(source)
    known = {"torch": "torch"}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.name)
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole)
                known[alias.asname or alias.name] = whole
    found |= set(chains(tree, known))
    private = {name for name in found if is_private(name)}
    # torch.a._b and torch.a._b.c are one entry: what is behind a private name is private as well.
    return {shortest(name) for name in private}


def chains(tree: ast.AST, known: dict[str, str]) -> Iterator[str]:
    """Yield every attribute chain that begins with a name of torch, whole, or looked up by text."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="lookup" | "getattr"),
                args=[owner, ast.Constant(value=str(text)), *_],
            ) if (start := dotted(owner, known)) is not None:
                yield f"{start}.{text}"
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            whole = dotted(node, known)
            if whole is not None:
                yield whole


def dotted(value: ast.AST, known: dict[str, str]) -> str | None:
    """Return the dotted name of an attribute chain that begins with a known name, else None."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if isinstance(value, ast.Name) and value.id in known:
        return ".".join([known[value.id], *reversed(parts)])
    return None


def shortest(name: str) -> str:
    """Cut a dotted name behind its private parts: what a private module has is one entry."""
    parts = name.split(".")
    last = next(i for i, p in enumerate(parts[1:], 1) if p.startswith("_"))
    while last + 1 < len(parts) and parts[last + 1].startswith("_"):
        last += 1
    return ".".join(parts[: last + 1])


def in_package() -> dict[str, set[str]]:
    """List private name -> files of the package that use it."""
    names: dict[str, set[str]] = {}
    for path in sorted((ROOT / "fxlab").rglob("*.py")):
        for name in used(path.read_text(encoding="utf-8")):
            names.setdefault(name, set()).add(path.relative_to(ROOT / "fxlab").as_posix())
    return names


def exists(name: str) -> bool:
    """Tell whether the installed torch has it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


if __name__ == "__main__":
    missing = [name for name in PRIVATE if not exists(name)]
    for name in missing:
        print(f"{name} is gone ({PRIVATE[name][0]}); instead: {PRIVATE[name][1]}")
    sys.exit(1 if missing else 0)
