"""Make the parts of README that come from running something: the example's output, the picture,
the table of differences. `python tests/readme.py` writes them; tests/test_readme.py compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

import torch

from tests.differences import DIFFERENCES

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "notebooks" / "images" / "explorer.svg"


def example(text: str) -> tuple[str, str]:
    """Return README's first Python block and what it prints."""
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    out = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
    ):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return code, out.getvalue()


def differences() -> str:
    """Return the table of deliberate differences as Markdown."""
    rows = ["| kind | torch.fx 2.13 | fxlab | why |", "|---|---|---|---|"]
    for d in DIFFERENCES:
        cells = (d.name, d.torch_fx, d.fxlab, d.why)
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(rows)


def picture() -> str:
    """Draw the step of a fold in which a batch norm goes, with the kit's own exporter."""
    import fxlab
    from fxlab.models import resnet50
    from fxlab.passes import fuse_conv_bn

    torch.manual_seed(0)
    gm = fxlab.symbolic_trace(resnet50().eval().layer1[0])
    with fxlab.record(gm, inputs=(torch.zeros(1, 64, 56, 56),)) as timeline:
        fuse_conv_bn(gm)
    with tempfile.TemporaryDirectory() as folder:
        return Path(timeline.to_svg(Path(folder) / "explorer.svg", 3)).read_text(encoding="utf-8")


def filled(text: str) -> str:
    """Return README's text with its generated parts made anew."""
    _, output = example(text)
    for name, body in (("output", f"```\n{output}```"), ("differences", differences())):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(pattern, lambda m, b=body: m[1] + b + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
