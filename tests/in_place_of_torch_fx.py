"""Load code that was written for torch.fx with fxlab in its place.

`load("torch.fx.passes.split_module")` reads that module's installed source, puts `fxlab` where it
says `torch.fx`, and runs it under a name of its own; torch's own modules stay as they are. Modules
that such a source imports from the folders in `REWRITTEN` are loaded the same way; everything else
comes from torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path

import torch
import torch.fx

import fxlab

REWRITTEN = {"torch.fx": "fxlab_as_fx", "torch.ao.quantization": "fxlab_as_ao"}
# Each holds a registry or state that exists once in a process, or is about torch's own tracing.
TORCHS_OWN = re.compile(
    r"torch\.fx\.(config|traceback|_(?!lazy_graph_module).*|experimental\.(_config|proxy_tensor|symbolic_shapes|sym_node"
    r"|recording|validator|_backward_state))$"
    r"|torch\.ao\.quantization\.(?!fx\b|quantize_fx)|torch\.ao\.quantization\.fx\._decomposed"
)
# The files of torch.fx that fxlab stands for, name by name.
STOOD_FOR = (
    "_symbolic_trace graph graph_module immutable_collections interpreter node proxy "
    "subgraph_rewriter"
).split()
_BARE = {"torch.fx.passes", "torch.fx.experimental"}  # packages whose __init__ only lists names


def _rewritten(name: str) -> str:
    for old, new in REWRITTEN.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        for old, new in REWRITTEN.items():
            if name.startswith(new + "."):
                theirs = old + name[len(new) :]
                break
        else:
            return None
        spec = importlib.util.find_spec(theirs)
        if spec is None:
            return None
        package = spec.submodule_search_locations is not None
        made = importlib.machinery.ModuleSpec(name, self, origin=theirs, is_package=package)
        made.loader_state = spec.origin
        return made

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        spec = module.__spec__
        if TORCHS_OWN.match(spec.origin):
            sys.modules[spec.name] = importlib.import_module(spec.origin)
            return
        if spec.origin in _BARE:
            return
        source = Path(spec.loader_state).read_text(encoding="utf-8")
        for old, new in REWRITTEN.items():
            source = re.sub(rf"\b{re.escape(old)}\b", new, source)
        scope = module.__dict__
        scope.update({"torch": torch, **{new: sys.modules[new] for new in REWRITTEN.values()}})
        exec(compile(source, f"<{spec.origin} on fxlab>", "exec", dont_inherit=True), scope)


def _package(name: str, like: types.ModuleType, ours: object = None) -> types.ModuleType:
    """Make a module with the names of `like`, each as `ours` has it or else as torch has it."""
    made = types.ModuleType(name)
    for key, value in vars(like).items():
        if not key.startswith("__"):
            setattr(made, key, getattr(ours, key, value))
    made.__path__ = []
    sys.modules[name] = made
    return made


def install() -> None:
    """Make the packages that stand for torch.fx and torch.ao.quantization; once a process."""
    if REWRITTEN["torch.fx"] in sys.modules:
        return
    mine = REWRITTEN["torch.fx"]
    package = _package(mine, torch.fx, fxlab)
    for name in STOOD_FOR:
        theirs = importlib.import_module(f"torch.fx.{name}")
        ours = importlib.import_module(f"fxlab.{name}")
        setattr(package, name, _package(f"{mine}.{name}", theirs, ours))
    _package(REWRITTEN["torch.ao.quantization"], importlib.import_module("torch.ao.quantization"))
    sys.meta_path.insert(0, _Finder())


def load(name: str) -> types.ModuleType:
    """Return torch's module `name`, run on fxlab instead of torch.fx.

    Raises:
        ImportError: there is no such module, or it imports a name that fxlab does not have.
    """
    install()
    return importlib.import_module(_rewritten(name))
