"""Write the guides that are made from something: docstrings, tables of the tests, the schema.

The docstrings are the reference. Where one has no example (the core is kept short), there is one in
``tests/reference_examples.md``. ``python -m tests.reference`` writes the pages of notebooks/guides
that `pages` lists; tests/test_reference.py runs the examples and compares.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxlab import evidence
from tests import places
from tests.differences import DIFFERENCES

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "tests" / "reference_examples.md"
GUIDES = ROOT / "notebooks" / "guides"
# Where public names are, in the order of the page; what the front door has is named there alone.
MODULES = (
    "fxlab",
    "fxlab.passes",
    "fxlab.passes.quantize",
    "fxlab.explorer",
    "fxlab.interop",
    "fxlab.backends",
    "fxlab.models",
    "fxlab.evidence",
    "fxlab.teach",
)


@dataclass(frozen=True)
class Entry:
    """One public name: where it is, what it is, and what its own docstring says."""

    name: str
    value: Any
    text: str

    @property
    def has_example(self) -> bool:
        return ">>>" in self.text


def entries() -> list[Entry]:
    """List the public names of the kit, each once."""
    found: dict[int, Entry] = {}
    for home in MODULES:
        module = importlib.import_module(home)
        for word in module.__all__:
            value = getattr(module, word)
            if inspect.ismodule(value) or id(value) in found:
                continue
            own = value.__doc__ if inspect.isclass(value) or callable(value) else comment(value)
            found[id(value)] = Entry(f"{home}.{word}", value, inspect.cleandoc(own or ""))
    return list(found.values())


def comment(value: Any) -> str:
    """Say what a constant is, by its type's own words only if it is no plain number or text."""
    return f"The constant {value!r}." if isinstance(value, int | str) else type(value).__doc__ or ""


def examples() -> dict[str, str]:
    """Read the examples by name; under the empty name, what all of them start from."""
    found: dict[str, str] = {}
    for part in EXAMPLES.read_text(encoding="utf-8").split("\n## "):
        name = part.splitlines()[0].strip() if found else ""
        code = re.search(r"```python\n(.*?)```", part, flags=re.DOTALL)
        assert code is not None, name
        found[name] = code[1]
    return found


def signature(value: Any) -> str:
    """Return the parameters of a function or class as written, empty if it has none to show."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"<module '([\w.]+)'[^>]*>", r"\1", text)  # its file is another one elsewhere
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"'([^']*)'", r"\1", text))


def reference() -> str:
    """Write the reference as Markdown."""
    more = examples()
    lines = [
        "# Reference",
        "",
        "Every public name, from its docstring; made by `python -m tests.reference`. Beyond these,"
        " every public name of `torch.fx` is here too, with the same meaning.",
        "",
        "Examples that stand under a docstring start from this:",
        "",
        f"```python\n{more[''].strip()}\n```",
    ]
    home = ""
    for entry in entries():
        module, _, word = entry.name.rpartition(".")
        if module != home:
            home = module
            lines += ["", f"## {home}"]
        lines += ["", f"### {word}", ""]
        if callable(entry.value):
            lines += [f"```python\n{word}{signature(entry.value)}\n```", ""]
        lines += [f"```text\n{entry.text}\n```"]
        if entry.name in more:
            lines += ["", f"```python\n{more[entry.name].strip()}\n```"]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


def coming_from_torch_fx() -> str:
    """Write what somebody must know who has code for torch.fx."""
    rows = [
        {"kind": d.name, "torch.fx 2.13": d.torch_fx, "fxlab": d.fxlab, "why": d.why}
        for d in DIFFERENCES
    ]
    return f"""# Coming from torch.fx

Made by `python -m tests.reference` from `tests/differences.py`, which the tests go by.

```python
import fxlab as fx  # instead of: import torch.fx as fx
```

Every public name of `torch.fx` is here with the same meaning, and so are the paths of its modules
(`fxlab.graph`, `fxlab.operator_schemas`, ...). Not here: `torch.fx.experimental`, and
`torch.fx.traceback` and `torch.fx.config`, which hold notes and switches of torch's own tracers.
Of `torch.fx.passes` there are `shape_prop`, `pass_manager`, `operator_support`, `split_module`,
`infra` and `utils.matcher_utils`.

Code that edits graphs needs no other change: the files of `torch.fx.passes`,
`torch.fx.experimental` and `torch.ao.quantization.fx`, read with `fxlab` where they say `torch.fx`,
load, and the passes and the quantizer in them make the programs that they make on torch.fx
(`tests/test_in_place_of_torch_fx.py`). Only what fuses partitions there (`utils.fuser_utils`) wants
a private table of torch.fx's Graph: use `fxlab.passes.CapabilityBasedPartitioner`.

## What to do with what you have

| you have | do |
|---|---|
| a `torch.fx.GraphModule` | give it to `fxlab.record` or `fxlab.explore` as it is |
| a pass written for torch.fx | likewise, or `fxlab show --pass file.py:name` |
| a graph that a tool of torch's wants | `fxlab.interop.to_torch_fx(gm)` |
| torch's graph, for a pass of this kit | `fxlab.interop.from_torch_fx(gm)` |
| an exported program | `fxlab.interop.from_exported(program)` |
| functions registered with `torch.fx.wrap` | nothing: a trace here honours them |

## Where the two differ, on purpose

{evidence.markdown(rows)}
"""


def timeline() -> str:
    """Write the schema of a saved timeline, from the docstring that the code goes by."""
    from fxlab.explorer import timeline as module

    intro, schema = (module.__doc__ or "").split("\n\n", 2)[1:]
    schema = schema.replace("::\n", "\n")
    blocks, text = [], []
    for line in schema.splitlines():
        if line.startswith("    ") or (not line and text and text[-1].startswith("    ")):
            text.append(line)
        else:
            blocks.append(text)
            text = [line]
    parts = []
    for block in [*blocks, text]:
        head = [line for line in block if not line.startswith("    ")]
        code = [line[4:] for line in block if line.startswith("    ")]
        parts.append(" ".join(line for line in head if line).replace("{", "`{").replace("}", "}`"))
        if code:
            parts.append("```text\n" + "\n".join(code) + "\n```")
    return (
        "\n\n".join(
            [
                "# The timeline file",
                "What `timeline.to_json(path)` writes and `fxlab.Timeline.from_json(path)` reads;"
                " also what `fxlab show --json path` writes. Made by"
                " `python -m tests.reference` from `fxlab/explorer/timeline.py`.",
                " ".join(intro.split()),
                *(part for part in parts if part),
                "A file that breaks a rule is refused with a `TimelineError` that names the place."
                " Nothing in a file is imported, called or unpickled: see [security](security.md).",
            ]
        )
        + "\n"
    )


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "reference.md": reference(),
        "coming_from_torch_fx.md": coming_from_torch_fx(),
        "timeline.md": timeline(),
        "elsewhere.md": places.page(),
    }


def write() -> None:
    """Write every page anew."""
    GUIDES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (GUIDES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
