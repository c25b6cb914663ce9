"""How does a program leave the notebook: as source code and a file of its tensors?

`gm.to_folder(path)` writes a package that needs torch and what the program imports, but not fxlab:
the generated code of the paper's section 4.3 as a file that can be read, edited and shared.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import qualified_name

_SOURCE = '''"""Written by GraphModule.to_folder; state.pt holds what this code needs."""
from pathlib import Path

import torch
{imports}

_STATE = Path(__file__).parent / "state.pt"
globals().update(torch.load(_STATE, weights_only=False)["objects"])


{source}


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.__dict__.update(torch.load(_STATE, weights_only=False)["state"])

    forward = {function}
'''


def _import_text(name: str, value: Any) -> str:
    """Return an import statement that binds `name` to a module, class or function, or ""."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    module, _, attribute = qualified_name(value).rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return f"from {module} import {attribute} as {name}" if found is value else ""


def to_folder(self: GraphModule, folder: str | Path, module_name: str = "FxModule") -> None:
    """Write the module as a package: readable source, and its state beside it.

    `from <folder> import <module_name>` then gives a class whose instances compute the same.

    Args:
        self: the module.
        folder: made if it is not there; it can be moved afterwards.
        module_name: the name of the class.
    """
    folder, code = Path(folder), self._python_code()
    folder.mkdir(exist_ok=True, parents=True)
    imports = {name: _import_text(name, value) for name, value in code.globals.items()}
    objects = {name: code.globals[name] for name, text in imports.items() if not text}
    read = {str(node.target).split(".")[0] for node in self.graph.nodes}
    names = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
    kept = {*names, *read, "_in_spec", "_out_spec"}
    state = {name: value for name, value in vars(self).items() if name in kept}
    torch.save({"state": state, "objects": objects}, folder / "state.pt")
    source = _SOURCE.format(
        name=module_name,
        imports="\n".join(sorted(filter(None, imports.values()))),
        source=code.src.strip(),
        function=self.graph._codegen._func_name,
    )
    (folder / "module.py").write_text(source, encoding="utf-8")
    (folder / "__init__.py").write_text("from .module import *\n", encoding="utf-8")
