"""Every public name says what it is and has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect
import json
import re

import pytest
import torch

from tests.reference import EXAMPLES, GUIDES, entries, examples, pages

torch.set_num_threads(1)
ENTRIES = entries()
EXTRA = examples()
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_public_name_has_a_docstring_of_its_own_and_an_example(entry):
    assert entry.text, f"{entry.name} has no docstring"
    assert entry.has_example or entry.name in EXTRA, (
        f"{entry.name}: write an example into its docstring, or into {EXAMPLES.name}"
    )


@pytest.mark.parametrize("name", [name for name in EXTRA if name])
def test_every_example_beside_a_docstring_runs_and_is_of_a_public_name(name):
    assert name in {entry.name for entry in ENTRIES}
    test = doctest.DocTestParser().get_doctest(EXTRA[""] + EXTRA[name], {}, name, EXAMPLES.name, 0)
    told: list[str] = []
    results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    assert results.failed == 0, "".join(told)
    assert results.attempted > EXTRA[""].count(">>>")


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if inspect.isfunction(e.value)], ids=lambda entry: entry.name
)
def test_a_function_of_many_parameters_explains_them(entry):
    names = [n for n in inspect.signature(entry.value).parameters if n not in ("self", "args")]
    if len(names) > 3:
        assert "Args:" in entry.text, f"{entry.name} has {len(names)} parameters and no Args"


@pytest.mark.parametrize("name", pages())
def test_a_page_is_made_from_what_the_code_says_today(name):
    assert (GUIDES / name).read_text("utf-8") == pages()[name], "run: python -m tests.reference"


GUIDE_FILES = sorted(p for p in GUIDES.glob("*") if p.suffix in (".md", ".ipynb"))


@pytest.mark.parametrize("path", GUIDE_FILES, ids=lambda path: path.name)
def test_every_link_of_a_guide_leads_to_a_file(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for target in re.findall(r"\]\((?!http)([^)#\s]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted(GUIDES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_guide_was_executed_from_top_to_bottom(path):
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(o["output_type"] != "error" for cell in cells for o in cell["outputs"])


def test_readme_leads_to_every_guide():
    text = (GUIDES.parent.parent / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in GUIDE_FILES if f"notebooks/guides/{path.name}" not in text] == []


def test_no_page_holds_a_place_of_the_machine_that_wrote_it():
    for page in ("reference.md", "coming_from_torch_fx.md"):
        text = (GUIDES / page).read_text(encoding="utf-8")
        assert not re.search(r"<module |\.so\b|/lib/python| at 0x", text)
