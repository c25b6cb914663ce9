"""README says what is so: its example prints what stands there, table and picture are current."""

import re

import pytest

from tests.readme import PICTURE, ROOT, filled, picture

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_there_and_the_table_is_the_one_of_the_tests():
    assert filled(TEXT) == TEXT, "run: python -m tests.readme"


def test_the_picture_is_what_the_exporter_draws_today():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python -m tests.readme"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))))
def test_every_path_that_is_linked_exists(target):
    assert (ROOT / target).exists()


def test_the_example_has_at_most_twelve_lines():
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_what_is_ones_own_comes_before_the_tables_and_in_six_lines():
    section = TEXT.partition("## Your model, your pass\n")[2].partition("\n## ")[0]
    source, cell = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(list(filter(None, source.splitlines()))) <= 6 and len(cell.splitlines()) == 1
    assert "fxlab show mine.py:" in section and "explore(model, passes=[" in section
    assert TEXT.index(section) < TEXT.index("\n|")
    for guide in ("own_pass", "own_tracer", "coming_from_torch_fx", "reference", "timeline"):
        assert TEXT.index(f"](notebooks/guides/{guide}.") < TEXT.index("<!-- differences -->")
