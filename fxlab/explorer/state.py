"""What does a GraphModule hold, and how is a change of it noticed and taken back?

Fusion's real act is new weights, so state is part of the story. `State` remembers modules and
tensors by path from one look to the next; a version and a sample of its numbers tell whether
somebody wrote into a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxlab.core.graph import MISSING
from fxlab.explorer.encode import sample


class State:
    """What a GraphModule holds: module and tensor by path, told apart from one look to the next."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Any] = {}
        self.prints: dict[str, Any] = {}
        self.paths: dict[int, str] = {}
        self.look()

    def look(self) -> None:
        """Take in what is there now."""
        self.modules, self.tensors = look_at(self.root)
        self.paths = {id(module): path for path, module in reversed(self.modules.items())}
        self.prints = {path: fingerprint(one) for path, one in self.tensors.items()}

    def note(self, path: str, value: Any) -> None:
        """Take in one edit that was heard, so that a comparison does not find it again."""
        old = self.modules.get(path)
        if value is not None and value is old:
            return
        if old is not None:
            modules, tensors = look_at(old, f"{path}.")
            for one in modules:
                self.paths.pop(id(self.modules.pop(one, None)), None)
            for one in tensors:
                self.tensors.pop(one, None)
        self.tensors.pop(path, None)
        if isinstance(value, nn.Module):
            modules, tensors = look_at(value, f"{path}.")
            self.modules.update(modules)
            self.paths.update({id(one): key for key, one in reversed(modules.items())})
            self.tensors.update(tensors)
            # What a pass has just made is told apart by its version only: that is quick.
            self.prints.update(
                {k: (one._version, None) for k, one in tensors.items() if one is not None}
            )
        elif isinstance(value, torch.Tensor):
            self.tensors[path] = value
            self.prints[path] = (value._version, None)

    def differences(self) -> list[tuple[str, str, Any, Any]]:
        """Edits that were not noted, the outermost only: (module or attr, path, old, new)."""
        modules, tensors = look_at(self.root)
        told: list[tuple[str, str, Any, Any]] = []
        if modules == self.modules and tensors.keys() == self.tensors.keys():
            pairs = zip(tensors.values(), (self.tensors[path] for path in tensors), strict=True)
            if all(one is other for one, other in pairs):
                return told
        for kind, old, new in (
            ("module", self.modules, modules),
            ("attr", self.tensors, tensors),
        ):
            for path in [*old, *(one for one in new if one not in old)]:
                one, other = old.get(path, MISSING), new.get(path, MISSING)
                inside = any(path.startswith(f"{above}.") for _, above, _, _ in told)
                if one is not other and not inside:
                    told.append((kind, path, one, other))
        return told

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that hold other numbers than when they were noted."""
        found = []
        for path, tensor in look_at(self.root)[1].items():
            version, numbers = self.prints.get(path) or (None, None)
            if tensor is None or self.tensors.get(path) is not tensor or version is None:
                continue
            if tensor._version != version or (numbers is not None and sample(tensor) != numbers):
                found.append((path, tensor))
        return found


def fingerprint(tensor: torch.Tensor | None) -> tuple[int, Any] | None:
    """What changes when somebody writes into a tensor: its version, and a sample of its numbers."""
    if tensor is None or tensor.is_inference():
        return None
    return tensor._version, sample(tensor)


def look_at(
    root: nn.Module, prefix: str = ""
) -> tuple[dict[str, nn.Module], dict[str, torch.Tensor | None]]:
    """Every submodule and every parameter and buffer below `root`, by path."""
    modules: dict[str, nn.Module] = {}
    tensors: dict[str, torch.Tensor | None] = {}
    stack = [(prefix, root)]
    while stack:
        base, module = stack.pop()
        modules[base[:-1]] = module
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                tensors[base + name] = tensor
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{base}{name}.", child))
    return modules, tensors


def module_names(gm: Any, state: State) -> dict[str, str]:
    """What the targets of `gm`'s graph can name: submodules, parameters, buffers, attributes."""
    names = {path: type(module).__name__ for path, module in state.modules.items() if path}
    names.update(dict.fromkeys(state.tensors, "tensor"))
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.target not in names and resolves(gm, node.target):
            names[node.target] = "attribute"
    return names


def resolves(root: Any, path: str) -> bool:
    """Whether a dotted path names something below `root`."""
    for atom in path.split("."):
        if not hasattr(root, atom):
            return False
        root = getattr(root, atom)
    return True


def set_state(root: nn.Module, path: str, value: Any) -> None:
    """Put a module, tensor or attribute at a path, or take it away, without telling anybody."""
    owner_path, _, name = path.rpartition(".")
    owner: Any = root
    for atom in owner_path.split(".") if owner_path else ():
        owner = owner._modules.get(atom) if isinstance(owner, nn.Module) else None
        if owner is None:
            return
    tables = (owner._modules, owner._parameters, owner._buffers, vars(owner))
    kept_in = next((table for table in tables if name in table), None)
    if isinstance(value, nn.Module):
        table = owner._modules
    elif isinstance(value, nn.Parameter):
        table = owner._parameters
    elif value is None and kept_in is not None:
        table = kept_in
    elif isinstance(value, torch.Tensor) and kept_in is not vars(owner):
        table = owner._buffers
    else:
        table = vars(owner)
    if kept_in is not None and (value is MISSING or kept_in is not table):
        del kept_in[name]
    if value is not MISSING:
        table[name] = value
