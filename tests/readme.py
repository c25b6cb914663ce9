"""Make the parts of README that come from something else: Binder's badge, what the two examples
print, the picture, the paper's exhibits, the map of the lectures, the table of differences.
`python -m tests.readme` writes them, and the guides of tests/reference.py; tests/test_readme.py
compares.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import torch

import fxlab
from fxlab import cli, evidence
from tests import places, reference
from tests.differences import DIFFERENCES

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "notebooks" / "images" / "explorer.svg"


def example(text: str) -> tuple[str, str]:
    """Return README's first Python block and what it prints."""
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    out = io.StringIO()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        os.chdir(folder)
        try:
            exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
        finally:
            os.chdir(here)
    return code, out.getvalue()


def own(text: str) -> str:
    """Return what the command prints that README gives for a model and a pass of one's own.

    The Python blocks of that section are the file and a cell of a notebook, which is run after it.
    """
    section = text.partition("## Your model, your pass\n")[2].partition("\n## ")[0]
    source, cell = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    command = re.search(r"```sh\nfxlab (.*?)\n```", section).group(1)
    out = io.StringIO()
    here, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        Path(folder, "mine.py").write_text(source, encoding="utf-8")
        os.chdir(folder)
        try:
            code = cli.main(shlex.split(command))
            exec(cell, {"fxlab": fxlab, **vars(sys.modules["mine"])})
        finally:
            os.chdir(here)
            sys.path[:] = path
            sys.modules.pop("mine", None)
    assert code == 0, code
    return out.getvalue()


def differences() -> str:
    """Return the table of deliberate differences as Markdown."""
    rows = ["| kind | torch.fx 2.13 | fxlab | why |", "|---|---|---|---|"]
    for d in DIFFERENCES:
        cells = (d.name, d.torch_fx, d.fxlab, d.why)
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(rows)


def exhibits() -> str:
    """Return what ``fxlab paper --markdown`` prints, with links to the lectures."""
    rows = evidence.overview(evidence.saved())
    for row in rows:
        row["lecture"] = f"[{row['lecture']}](notebooks/{row['lecture']}.ipynb)"
        row.pop("section")
    notes = evidence.footnotes(rows)
    return "\n\n".join([evidence.markdown(rows), *notes])


def exercises() -> dict[str, list[str]]:
    """List the ids of the exercises by the lecture after which they come."""
    found: dict[str, list[str]] = {}
    if importlib.util.find_spec("fxlab.teach") is not None:
        from fxlab import teach
        from fxlab.teach.words import lecture_of

        stems = {path.name[:2]: path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
        for exercise in teach.exercises():
            found.setdefault(stems[lecture_of(exercise.id)], []).append(exercise.id)
    return found


def first_cell(notebook: Path) -> tuple[str, dict[str, str]]:
    """Return the title of a lecture and the rows of the table in its first cell."""
    text = "".join(json.loads(notebook.read_text("utf-8"))["cells"][0]["source"])
    title = text.splitlines()[0].removeprefix("# ")
    return title, dict(re.findall(r"^\| ([a-z ,]+) \| (.+) \|$", text, flags=re.M))


def order(lectures: list[Path]) -> list[Path]:
    """Return the lectures in the order in which they name each other as the next."""
    after = {}
    for path in lectures:
        row = first_cell(path)[1]["before, after"]
        after[path.name] = re.findall(r"\((\w+\.ipynb)\)", row.partition("next:")[2])
    named = {name for names in after.values() for name in names}
    name: str | None = next(path.name for path in lectures if path.name not in named)
    chain: list[Path] = []
    while name is not None:
        chain.append(next(path for path in lectures if path.name == name))
        name = next(iter(after[name]), None)
    return chain


def lectures() -> str:
    """Return the map of the lectures, in the order of the course."""
    measured = json.loads((ROOT / "tests" / "lectures.json").read_text("utf-8"))
    by_lecture = exercises()
    rows = []
    for path in order(sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))):
        title, about = first_cell(path)
        needs = measured.get(path.stem, {})
        rows.append(
            {
                "lecture": f"[{title}](notebooks/{path.name})",
                "paper": about["paper"].rpartition("MLSys 2022, ")[2],
                "exercises": ", ".join(by_lecture.get(path.stem, [])),
                "read in": about["time"],
                "runs in": f"{needs['seconds']:.0f} s" if needs else "",
                "takes": f"{needs['megabytes']} MB" if needs else "",
            }
        )
    return evidence.markdown(rows)


def picture() -> str:
    """Draw the step of a fold in which a batch norm goes, with the kit's own exporter."""
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
    parts = {
        "binder": places.badge(),
        "output": f"```\n{output}```",
        "own": f"```\n{own(text)}```",
        "paper": exhibits(),
        "lectures": lectures(),
        "differences": differences(),
    }
    for name, body in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(?<=\n)(<!-- end -->)"
        text = re.sub(pattern, lambda m, b=body: m[1] + b + "\n" + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
    reference.write()
