"""The explorer in JupyterLab and in Notebook 7: keys, traits, saving, no request to elsewhere."""

import json

import pytest
from nbformat import read, sign

from tests.browser.conftest import Notebook

SHOW = """\
from fxlab import Timeline
from fxlab.explorer import Explorer
explorer = Explorer(Timeline.from_json({path!r}))
explorer"""


def local(server):
    return server.url + "/", server.url.replace("http", "ws") + "/"


@pytest.mark.parametrize("host", ["lab", "notebook"])
def test_keys_step_the_explorer_and_traits_work_both_ways(server, tab, host, story_file, timeline):
    name = server.write(
        f"keys-{host}.ipynb", [SHOW.format(path=str(story_file)), "'the cell below'"]
    )
    notebook = Notebook(tab, server, host, name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    grid = page.locator(".f-grid")
    grid.focus()
    fuse = next(span for span in timeline.passes if span.name == "fuse_conv_bn")

    def step() -> str:
        return page.locator(".f-slider").input_value()

    for key, expected in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("PageDown", fuse.first - 1),
        ("Shift+ArrowRight", fuse.last),
        ("PageUp", fuse.first - 1),
        ("End", len(timeline)),
        ("Home", 0),
        ("n", 1),
        ("PageDown", fuse.first - 1),
        ("ArrowRight", fuse.first),
    ]:
        page.keyboard.press(key)
        assert step() == str(expected), key
    assert timeline.steps[fuse.first - 1].sentence == page.locator(".f-sentence").inner_text()
    erase = next(step for step in timeline.steps if step.edit.kind == "erase")
    for _ in range(erase.index - fuse.first):
        page.keyboard.press("ArrowRight")
    assert page.locator(".f-row.ghost.strong").count() == 1
    page.keyboard.press("ArrowDown")
    chosen = page.locator(".f-row.selected .nm").first.inner_text()
    code = "print(explorer.step, explorer.selection)"
    for _ in range(50):  # the front end holds a change back until the last one is acknowledged
        if (seen := notebook.execute(code)) == f"{erase.index} {chosen}":
            break
    assert seen == f"{erase.index} {chosen}"
    notebook.execute(f"_ = explorer.goto({timeline.steps[0].code!r})")
    page.wait_for_function("document.querySelector('.f-slider').value === '1'")
    assert page.locator(".fxl").count() == 1
    assert page.evaluate("document.activeElement.classList.contains('f-grid')")
    page.keyboard.press("Escape")
    assert not page.evaluate("document.activeElement.closest('.fxl')")
    assert tab.outside(*local(server)) == []


def test_saved_notebooks_tell_their_story_trusted_or_not_with_and_without_state(
    server, tab, story_file
):
    name = server.write("saved.ipynb", [SHOW.format(path=str(story_file))])
    notebook = Notebook(tab, server, "lab", name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    notebook.save_and_stop()
    saved = json.loads((server.root / name).read_text())
    assert "widgets" in saved["metadata"], "the widget's state was not saved"
    notary = sign.NotebookNotary(data_dir=str(server.root.parent / "data"))
    for trusted in (True, False):
        for state in (True, False):
            copy = json.loads(json.dumps(saved))
            case = f"saved-{trusted}-{state}.ipynb"
            copy["metadata"]["case"] = case
            if not state:
                del copy["metadata"]["widgets"]
            path = server.root / case
            path.write_text(json.dumps(copy))
            if trusted:
                notary.sign(read(path, 4))
            else:
                notary.unsign(read(path, 4))
            Notebook(tab, server, "lab", case)
            static = page.locator("details:visible:has(> img[src^='data:image/svg'])").first
            static.wait_for()
            static.locator("summary").first.click()
            static.locator("img").wait_for()
            assert static.locator("img").evaluate("(image) => image.decode().then(() => true)")
            assert static.locator("img").evaluate("(image) => image.naturalWidth") > 100
            assert "fuse_conv_bn" in static.inner_text()
            live = page.locator(".fxl[data-ready]:visible")
            if trusted and state:
                live.wait_for()
                page.locator(".f-grid:visible").focus()
                page.keyboard.press("End")
                assert page.locator(".f-row.ghost:visible").count() > 0
            else:
                assert live.count() == 0
    assert tab.outside(*local(server)) == []
