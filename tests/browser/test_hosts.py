"""The explorer in JupyterLab and in Notebook 7: keys, traits, saving, no request to elsewhere."""

import io
import json
import shutil

import pytest
from nbformat import read, sign
from PIL import Image, ImageStat

from tests.browser.conftest import ROOT, Notebook

SHOW = """\
from fxlab import Timeline
from fxlab.explorer import Explorer
explorer = Explorer(Timeline.from_json({path!r}), step=0)
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

    def has(selector: str) -> bool:
        return page.locator(selector).count() > 0

    page.keyboard.press("End")
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    row = page.locator(".f-row.selected .nm")
    page.locator(".f-row", has_text="stem_bn = ").click()
    for key, expected in [
        ("i", "stem_conv"),
        ("u", "stem_bn"),
        ("u", "stem_relu"),
        ("u", "body_0_conv"),
        ("i", "stem_relu"),
        ("u", "body_0_conv"),
        ("ArrowUp", "stem_relu"),
        ("ArrowDown", "body_0_conv"),
        ("i", "stem_relu"),
        ("u", "body_0_conv"),
        ("i", "stem_relu"),
    ]:
        page.keyboard.press(key)
        assert row.inner_text() == expected, key
    for key, expected in [
        ("u", "body_0_conv"),
        ("Shift+U", "add"),
        ("Shift+U", "body_0_conv"),
        ("i", "stem_relu"),
        ("Shift+I", "stem_relu"),
    ]:
        page.keyboard.press(key)
        assert row.inner_text() == expected, key
    page.keyboard.press("ArrowUp")
    assert row.inner_text() == "stem_bn"
    page.keyboard.press("n")
    changed = step()
    assert int(changed) > fuse.first
    page.keyboard.press("n")
    assert int(step()) > int(changed)
    page.keyboard.press("Shift+N")
    assert step() == changed
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    page.keyboard.press("Enter")
    assert has(".f-row.fold")
    page.keyboard.press("Enter")
    assert not has(".f-row.fold")
    page.keyboard.press("c")
    assert "gaps closed" in page.locator(".f-legend").inner_text()
    page.keyboard.press("c")
    page.keyboard.press("/")
    page.keyboard.type("relu")
    assert page.locator(".f-found").inner_text().startswith("1 of")
    page.keyboard.press("Enter")
    assert page.locator(".f-found").inner_text().startswith("2 of")
    page.keyboard.press("Shift+Enter")
    assert page.locator(".f-found").inner_text().startswith("1 of")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.classList.contains('f-grid')")
    page.keyboard.press("p")
    assert has(".fxl.predicting .f-guess button")
    page.keyboard.press("p")
    page.keyboard.press("?")
    assert page.locator(".f-help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("w")
    window = page.viewport_size
    box = page.locator(".fxl.wall").bounding_box()
    assert (box["x"], box["y"]) == (0, 0)
    assert (box["width"], box["height"]) == (window["width"], window["height"])
    page.keyboard.press("Escape")
    assert not has(".fxl.wall")
    copy = page.locator("details:has(> img[src^='data:image/svg'])").first
    copy.locator("summary").first.click()
    for theme, dark in (("Light", False), ("Dark", True), ("Light", False)):
        notebook.theme(f"JupyterLab {theme}")
        page.wait_for_selector(f".fxl[data-theme={theme.lower()}]")
        picture = Image.open(io.BytesIO(copy.locator("img").screenshot())).convert("L")
        ground = ImageStat.Stat(picture).median[0]
        assert ground < 60 if dark else ground > 200, theme
    copy.locator("summary").first.click()
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    page.wait_for_selector(".f-pane img")
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    grid.focus()
    assert page.locator(".fxl").count() == 1
    assert page.evaluate("document.activeElement.classList.contains('f-grid')")
    page.keyboard.press("Escape")
    assert not page.evaluate("document.activeElement.closest('.fxl')")
    notebook.stop()
    assert tab.outside(*local(server)) == []


@pytest.mark.parametrize("host", ["lab", "notebook"])
def test_an_explorer_goes_on_when_its_kernel_was_restarted(server, tab, host, story_file):
    name = server.write(f"restart-{host}.ipynb", [SHOW.format(path=str(story_file))])
    notebook = Notebook(tab, server, host, name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    tab.errors.clear()
    notebook.restart()
    page.locator(".f-grid").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator(".f-slider").input_value() == "3"
    assert page.locator(".f-row.selected").count() == 1
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    page.locator(".f-pane", has_text="kernel that showed this has gone").wait_for()
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    page.keyboard.press("End")
    assert tab.errors == []
    notebook.stop()


@pytest.mark.parametrize("host", ["lab", "notebook"])
def test_the_first_lecture_runs_and_its_explorers_step(server, tab, host):
    name = f"start-{host}.ipynb"
    shutil.copy(ROOT / "notebooks" / "00_start.ipynb", server.root / name)
    notebook = Notebook(tab, server, host, name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    shown = page.locator(".fxl[data-ready]").first
    shown.scroll_into_view_if_needed()
    shown.locator(".f-grid").focus()
    before = shown.locator(".f-row.live").count()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    shown.locator(".f-row.live").nth(before + 1).wait_for()
    assert shown.locator(".f-row.live").count() == before + 2
    assert shown.locator(".f-row.plus.strong").count() == 1
    notebook.stop()
    assert tab.outside(*local(server)) == []


def test_the_playground_runs_an_edited_pass_and_compares_both_histories(server, tab):
    cell = """\
import torch, fxlab
def swap(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh

def forward(x):
    return torch.relu(x) + 1

playground = fxlab.Playground({"forward": forward}, passes=[swap])
playground"""
    name = server.write("playground.ipynb", [cell])
    notebook = Notebook(tab, server, "lab", name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    page.get_by_text("source of swap").click()
    text = page.locator(".jp-OutputArea textarea")
    text.fill(text.input_value().replace("torch.tanh", "torch.sigmoid"))
    text.blur()
    page.get_by_role("button", name="run edited").click()
    said = page.locator("pre[role=status]", has_text="sigmoid")
    said.wait_for()
    assert "tanh" in said.inner_text()
    page.wait_for_selector(".fxl[data-ready]")
    page.locator(".f-grid").focus()
    page.keyboard.press("End")
    assert "sigmoid" in page.locator(".f-sentence").inner_text()
    notebook.stop()
    assert tab.outside(*local(server)) == []


def test_saved_notebooks_tell_their_story_trusted_or_not_with_and_without_state(
    server, tab, story_file
):
    name = server.write("saved.ipynb", [SHOW.format(path=str(story_file))])
    notebook = Notebook(tab, server, "lab", name)
    notebook.run_all()
    page = tab.page
    page.wait_for_selector(".fxl[data-ready]")
    notebook.save()
    notebook.stop()
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
            again = Notebook(tab, server, "lab", case)
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
            again.stop()
    assert tab.outside(*local(server)) == []
