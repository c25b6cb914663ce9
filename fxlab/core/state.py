"""What does a GraphModule hold besides its Graph, and where does it get it from?

A GraphModule shares what its Graph reads and calls with the Module that was traced, and nothing
else; Modules that are only on the way to it are replaced by empty ones, so that an edit of the one
is never an edit of the other.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import RewriteError
from .graph import MISSING, Graph
from .node import leaves


class _MissingTarget(RewriteError, AttributeError):
    """A Node reads something that the root does not have."""


def peek(module: Any, path: str) -> Any:
    """Return what a Module itself holds at a dotted path, or MISSING; nothing is computed."""
    for part in path.split("."):
        fields = getattr(module, "__dict__", {})
        for table in ("_modules", "_parameters", "_buffers"):
            if part in fields.get(table, ()):
                module = fields[table][part]
                break
        else:
            module = fields.get(part, MISSING)
    return module


def install(to: nn.Module, name: str, value: Any, persistent: bool = True) -> None:
    """Set an attribute; a tensor that is no Parameter becomes a buffer."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        to.register_buffer(name, value, persistent)
    else:
        setattr(to, name, value)


def _targets(graph: Graph, to: nn.Module) -> dict[str, Any]:
    """Return the paths that a Graph reads or calls, each with its first Node."""
    read = [n for n in reversed(graph.nodes) if n._op in ("call_module", "get_attr")]
    for node in read:
        name = str(node._target).partition(".")[0]
        own = hasattr(type(to), name) and not hasattr(nn.Module, name)
        if own or name in ("_graph", "_original", "meta"):
            raise RewriteError(f"the model has {name!r}, which is a name of GraphModule's own",
                               node=node, hint=f"call {name!r} otherwise in the model")  # fmt: skip
    return {str(n._target): n for n in reversed(read)} | {str(n._target): n for n in read}


def _missing(node: Any, root: str) -> _MissingTarget:
    return _MissingTarget(
        f"{node._name} refers to {node._target!r}, which {root} does not have", node=node,
        hint="the target is a dotted path from the root; add what it names to the root first",
    )  # fmt: skip


def copy_from_module(root: nn.Module, to: nn.Module, graph: Graph) -> None:
    """Share what the Graph needs; Modules that are only on the way are replaced by empty ones."""
    for path, node in _targets(graph, to).items():
        if path in graph._constants and not hasattr(root, path):
            install(to, path, graph._constants[path])
            continue
        source, copied = root, to
        *prefix, name = path.split(".")
        try:
            for part in prefix:
                source = getattr(source, part)
                made = copied._modules.get(part)
                if made is None and isinstance(source, nn.Module):
                    made = copied._modules[part] = nn.Module()
                    made.training = source.training
                if made is None or made is source:
                    setattr(copied, part, source)
                    break
                copied = made
            else:
                hidden = getattr(source, "_non_persistent_buffers_set", ())
                install(copied, name, getattr(source, name), name not in hidden)
        except AttributeError as error:
            raise _missing(node, f"the root ({type(root).__name__})") from error


def copy_from_dict(root: dict[str, Any], to: nn.Module, graph: Graph) -> None:
    """Take values by path; short paths first, so that `a` does not wipe out `a.b`."""
    root = {**graph._constants, **root}
    for path, node in sorted(_targets(graph, to).items(), key=lambda item: item[0].count(".")):
        if path not in root:
            raise _missing(node, "the dict given as root")
        *prefix, name = path.split(".")
        module: Any = to
        for part in prefix:
            if getattr(module, part, None) is None:
                setattr(module, part, nn.Module())
            module = getattr(module, part)
        install(module, name, root[path])


def look_at(root: nn.Module) -> tuple[type | None, dict[str, Any]]:
    """Return the type of a traced Module and its plain attributes: what can be read through."""
    if "_original" in vars(root):
        return root._original  # type: ignore[return-value]
    plain = {k: v for k, v in vars(root).items() if k[:1] != "_" and _is_plain(v)}
    return (None if type(root) is nn.Module else type(root)), plain


def _is_plain(value: Any) -> bool:
    whole: Any = value
    parts = leaves(list(whole) if isinstance(value, set) else whole)
    return not any(isinstance(part, (nn.Module, torch.Tensor)) for part in parts)
