"""A student's cells in JupyterLab and in Notebook 7: card, table, a link to the work."""

import io
import zipfile

import pytest

from tests.browser.conftest import Notebook

CELLS = [
    "from fxlab.teach import check, hint, progress, save\n\n\ndef my_dce(gm):\n    return gm",
    'check("2.2", my_dce).show()',
    'hint("2.2")',
    "progress()",
    "save()",
]


@pytest.mark.parametrize("host", ["lab", "notebook"])
def test_card_table_and_a_link_that_downloads_the_work(server, tab, host):
    name = server.write(f"work-{host}.ipynb", CELLS)
    notebook = Notebook(tab, server, host, name)
    notebook.run_all()
    page = tab.page
    card = page.locator(".jp-OutputArea-output", has_text="2.2 Dead code elimination").first
    card.wait_for()
    assert "not yet" in card.inner_text() and "relu is still there" in card.inner_text()
    page.locator(".jp-OutputArea-output", has_text="2.2, hint").wait_for()
    row = page.locator(".jp-OutputArea-output tr", has_text="Dead code elimination")
    row.wait_for()
    assert "not right yet" in row.inner_text() and "1 of 6" in row.inner_text()
    link = page.locator(".jp-OutputArea-output a", has_text="fxlab-work-")
    link.wait_for()
    with page.expect_download() as found:
        link.click()
    with zipfile.ZipFile(io.BytesIO(found.value.path().read_bytes())) as archive:
        assert {name, "fxlab_progress.json"} <= set(archive.namelist())
    notebook.stop()
