"""How is a small program written down as a script that anybody can run?

`Shrunk.save` uses it: generated code for the program, plain constructor calls for its modules,
weights and inputs as data that `torch.load(weights_only=True)` reads, the pass and the check by
import or by their source.
"""

from __future__ import annotations

import ast
import base64
import functools
import importlib
import inspect
import io
import textwrap
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxlab.core.errors import RewriteError

if TYPE_CHECKING:
    from fxlab.explorer.shrink import Shrunk

INLINE = 100_000  # bytes of weights and inputs that stand in the script itself

TEMPLATE = '''"""{summary}

Run it: python {name}
"""

{imports}


class Program(nn.Module):
    """{before} operations, cut down to {after} by fxlab.shrink."""

    def __init__(self):
        super().__init__()
{modules}

{forward}


{data}
program = Program()
program.load_state_dict(saved["state"])
program.eval()
for path, training in saved["training"].items():
    program.get_submodule(path).training = training
inputs = saved["inputs"]

{pass_}

{check}

if __name__ == "__main__":
    before = fxlab.symbolic_trace(program)
    after = fxlab.symbolic_trace(program)
    returned = {pass_name}(after)
    after = getattr(returned, "graph_module", returned) or after
    print(before.code)
    print(after.code)
{judge}
'''

COMPARE = """    old, new = before(*inputs), after(*inputs)
    torch.testing.assert_close(new, old)
    print("the pass is right on this program")"""


def script_text(small: Shrunk, path: Path) -> Path:
    """Write the script; see `Shrunk.save`."""
    gm = small.gm
    code = gm.graph.python_code("self")
    imports = ["import base64", "import io", "import torch", "import fxlab", "from torch import nn"]
    imports += [line for name, value in code.globals.items() if (line := import_line(name, value))]
    modules, state = constructors(gm)
    training = {name: module.training for name, module in gm.named_modules()}
    buffer = io.BytesIO()
    torch.save({"state": state, "inputs": list(small.inputs), "training": training}, buffer)
    payload = buffer.getvalue()
    if len(payload) > INLINE:
        beside = path.with_suffix(".pt")
        beside.write_bytes(payload)
        data = f'saved = torch.load(__file__[:-3] + ".pt", weights_only=True)  # {beside.name}'
    else:
        text = "\n".join(textwrap.wrap(base64.b64encode(payload).decode(), 96))
        data = f'data = """\n{text}\n"""\n'
        data += "saved = torch.load(io.BytesIO(base64.b64decode(data)), weights_only=True)"
    pass_text, pass_call = callable_text(small.pass_)
    check_text, judge = "", COMPARE
    if small.check is not None:
        check_text, check_call = callable_text(small.check)
        count = len(inspect.signature(small.check).parameters)
        arguments = {1: "after", 2: "before, after"}.get(count, "before, after, inputs")
        judge = f"    answer = {check_call}({arguments})\n    assert answer is None or answer"
    path.write_text(
        TEMPLATE.format(
            summary=f"{pass_call} breaks here: {small.failure}".replace('"""', "'''"),
            name=path.name,
            imports="\n".join(dict.fromkeys(imports)),
            before=small.before,
            after=small.after,
            modules=textwrap.indent("\n".join(modules) or "pass", " " * 8),
            forward=textwrap.indent(code.src.strip(), " " * 4),
            data=data,
            pass_=pass_text,
            pass_name=pass_call,
            check=check_text,
            judge=judge,
        ),
        encoding="utf-8",
    )
    return path


def import_line(name: str, value: Any) -> str:
    """The import under which a global of generated code is found again, "" where none is needed."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return f"{name} = {value}"
    if isinstance(value, torch.device):
        return f"{name} = torch.device({str(value)!r})"
    if isinstance(value, float):
        return f'{name} = float("{value}")'
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module == "builtins" and attribute == name:
        return ""
    if module and "." not in attribute:
        try:
            if getattr(importlib.import_module(module), attribute, None) is value:
                return f"from {module} import {attribute} as {name}"
        except ImportError:
            pass
    raise RewriteError(
        f"the program uses {name}, which a script could not import",
        hint="define it in a file of its own, so that it has a module and a name",
    )


def constructors(gm: nn.Module) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Lines that build every submodule, parameter and buffer, and the state to load into them."""
    lines = []
    for path, module in gm.named_modules():
        owner, _, name = checked_path(path).rpartition(".")
        own = f'self.get_submodule("{path}")' if path else "self"
        built = bool(path) and not module._modules and type(module) is not nn.Module
        if path:
            base = f'self.get_submodule("{owner}")' if owner else "self"
            what = constructor(path, module) if built else "nn.Module()"
            lines.append(f'{base}.add_module("{name}", {what})')
        if not built:  # a container: what it holds itself is made by hand
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    text = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    text = f"nn.Parameter({text})" if kind == "parameter" else text
                    lines.append(f'{own}.register_{kind}("{name}", {text})')
    return lines, gm.state_dict()


def checked_path(path: str) -> str:
    """The path as it is; one with quotes can't be written."""
    if '"' in path or "\\" in path or "\n" in path:
        raise RewriteError(f"the module path {path!r} can't be written into a script")
    return path


def constructor(path: str, module: nn.Module) -> str:
    """`nn.Conv2d(3, 8, kernel_size=(3, 3))`, when the module's own text is such a call."""
    kind = type(module)
    text = f"nn.{kind.__name__}({module.extra_repr()})"
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(value)
        known = getattr(nn, kind.__name__, None) is kind
    except (SyntaxError, ValueError, AssertionError):
        known = False
    if not known:
        raise RewriteError(
            f"self.{path} is a {kind.__name__}, whose text is no constructor call of torch.nn",
            hint="the shrunk program itself is in .gm; save that with torch.save",
        )
    return text


def callable_text(function: Any) -> tuple[str, str]:
    """The lines that make a pass or check known to the script, and the name to call it by."""
    while isinstance(function, functools.partial):
        function = function.func
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    importable = module and module != "__main__" and name.isidentifier()
    if importable and module.partition(".")[0] in ("fxlab", "torch"):
        return f"from {module} import {name}", name
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError) as error:
        raise RewriteError(
            f"the source of {name or function!r} can't be read, so no script can be written",
            hint="define the pass and the check with def in a file or a notebook cell",
        ) from error
    own = getattr(function, "__name__", "")
    if own == "<lambda>" or not own.isidentifier():
        raise RewriteError(
            "a lambda can't be written into a script", hint="define the pass and the check with def"
        )
    return source, own
