"""The viewer itself, in an exported page from disk with the network off."""

import io
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageStat
from torch import nn

import fxlab
from fxlab.explorer import timeline_of
from fxlab.explorer.drawing import Story
from fxlab.explorer.page import write_html
from fxlab.explorer.view import view
from fxlab.passes import dce

ROWS = """() => [...document.querySelectorAll(".f-row")].map((row) => ({
  index: Number(row.dataset.index), classes: [...row.classList],
  top: row.getBoundingClientRect().top,
  name: row.querySelector(".nm") && row.querySelector(".nm").textContent,
  mark: row.querySelector(".f-mark").textContent,
  line: row.querySelector(".f-line").textContent,
  label: row.getAttribute("aria-label") })).sort((a, b) => a.index - b.index)"""

# Contrast of every text on the screen against the nearest background that is painted.
CONTRAST = """() => {
  const parse = (text) => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return found.length < 4 ? [...found, 1] : found;
  };
  const linear = (v) => (v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const out = [];
  for (const one of document.querySelectorAll(".fxl *")) {
    const texts = [...one.childNodes].filter((node) => node.nodeType === 3);
    const style = getComputedStyle(one), ink = parse(style.color);
    if (!texts.some((node) => node.textContent.trim())) continue;
    if (!one.getBoundingClientRect().width) continue;
    if (one.closest("svg") || style.visibility === "hidden" || ink[3] === 0) continue;
    let ground = one;
    const paper = (element) => parse(getComputedStyle(element).backgroundColor);
    while (ground.parentElement && paper(ground)[3] === 0) ground = ground.parentElement;
    const [low, high] = [light(ink), light(paper(ground))].sort((a, b) => a - b);
    out.push([(high + 0.05) / (low + 0.05), one.className, one.textContent.slice(0, 40)]);
  }
  return out.sort((a, b) => a[0] - b[0]);
}"""
MINUS, TIMES = "\u2212", "\u00d7"


@pytest.fixture
def show(browser, tab, tmp_path):
    """Open a timeline's exported page, at its start, with the network off; a handle on it."""

    def opened(timeline, dark=False, size=(1240, 760), **values):
        path = write_html(timeline, tmp_path / "story.html", **{"step": 0, **values})
        page = tab.page
        browser.set_offline(True)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.goto(path.as_uri())
        page.wait_for_selector(".fxl[data-ready]")

        def press(*keys):
            for key in keys:
                page.keyboard.press(key)

        return SimpleNamespace(
            page=page,
            press=press,
            rows=lambda: page.evaluate(ROWS),
            text=lambda name: page.locator(f".f-{name}").inner_text(),
            step=lambda: int(page.locator(".f-slider").input_value()),
            requests=tab.requests,
            errors=tab.errors,
        )

    yield opened
    browser.set_offline(False)


@pytest.fixture(scope="module")
def fuse(timeline):
    return next(span for span in timeline.passes if span.name == "fuse_conv_bn")


def chain(count, edits):
    gm = fxlab.GraphModule(nn.Module(), fxlab.Graph())
    last = gm.graph.placeholder("x")
    for _ in range(count - 2):
        last = gm.graph.call_function(torch.relu, (last,))
    gm.graph.output(last)
    with fxlab.record(gm) as recorded:
        for node in list(gm.graph.nodes)[1 : 1 + edits]:
            node.target = torch.sigmoid
    return recorded


def test_an_exported_page_steps_offline_by_keyboard(show, timeline):
    shown = show(timeline)
    shown.press("ArrowRight", "ArrowRight")
    assert shown.step() == 2
    assert shown.text("sentence") == timeline.steps[1].sentence
    shown.page.wait_for_url("**#2")  # shortly after: an address that changes costs time
    shown.press("End")
    assert shown.step() == len(timeline)
    assert all(url.startswith(("file:", "data:")) for url in shown.requests)
    assert shown.errors == []


def test_a_page_opens_before_the_first_edit_of_the_first_pass(show, timeline, fuse):
    shown = show(timeline, step=None)
    assert shown.step() == fuse.first - 1 > 0
    assert len(shown.rows()) > 5
    shown.press("Home")
    shown.page.wait_for_url("**#0")
    shown.page.reload()
    shown.page.wait_for_selector(".fxl[data-ready]")
    assert shown.step() == 0  # the address keeps the start too


def test_a_chip_goes_to_the_first_step_of_its_pass_and_then_to_its_last(show, timeline, fuse):
    shown = show(timeline)
    chip = shown.page.locator(".f-chip").filter(has_text="fuse_conv_bn")
    for step in (fuse.first, fuse.last, fuse.first):
        chip.click()
        assert shown.step() == step


def test_the_units_of_small_numbers_stand_apart_too(show):
    story = timeline_of(lambda x: x + 1, None, (torch.zeros(2, 2),))
    shown = show(story, step=len(story))
    shown.page.locator(".f-menu summary").click()
    shown.page.get_by_label("bytes", exact=True).check()
    texts = shown.page.locator(".f-row .f-metric span").all_inner_texts()
    assert "16 B" in texts or "48 B" in texts
    assert all(re.fullmatch(r"\d[\d.]* (B|kB|ns|µs|ms|s)", text) for text in texts), texts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_without_javascript_a_page_has_its_title_its_passes_and_says_what_it_needs(
    browser, tab, timeline, fuse, tmp_path, scheme
):
    path = write_html(timeline, tmp_path / "story.html")
    context = tab.page.context.browser.new_context(java_script_enabled=False, color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    told = page.locator("#fxl").inner_text()
    assert page.locator("#fxl h1").inner_text() == timeline.title
    assert all(span.name in told for span in timeline.passes)
    assert "needs JavaScript to step" in told
    picture = Image.open(io.BytesIO(page.locator("#static img").screenshot())).convert("L")
    ground = ImageStat.Stat(picture).median[0]
    assert ground < 60 if scheme == "dark" else ground > 200
    box = page.locator("#fxl h1").bounding_box()
    assert box["y"] < 200 and box["height"] > 10
    context.close()
    tab.page.goto(path.as_uri())
    tab.page.wait_for_selector(".fxl[data-ready]")
    assert tab.page.locator("#fxl h1").count() == 0


def test_the_page_and_the_static_drawing_show_the_same_facts(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    story = Story(view(timeline))
    for step in range(fuse.first, fuse.last + 1):
        lines = story.lines(step)
        rows = shown.rows()
        assert len(rows) == len(lines)
        for row, line in zip(rows, lines, strict=True):
            assert line.state in row["classes"]
            assert row["mark"].replace(MINUS, "-") == line.mark
            assert ("strong" in row["classes"]) == line.strong
            if "…" not in row["line"]:
                assert row["line"] == ("" if line.state == "empty" else line.text)
        assert shown.text("sentence") == timeline.steps[step - 1].sentence
        shown.press("ArrowRight")


def test_no_untouched_row_moves_inside_a_pass(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    places = {row["name"]: row["top"] for row in shown.rows()}
    for _ in range(fuse.last - fuse.first):
        shown.press("ArrowRight")
        for row in shown.rows():
            assert places.get(row["name"], row["top"]) == row["top"]


def test_rows_source_lines_and_pass_lines_light_each_other(show, timeline, fuse):
    shown = show(timeline, step=fuse.last)
    page = shown.page
    page.locator(".f-row.ghost").first.hover()
    assert page.locator(".f-source:not(.f-user) .lit").count() >= 1
    page.mouse.move(5, 5)
    page.locator(".f-source:not(.f-user) .did").first.hover()
    assert page.locator(".f-row.lit").count() >= 1
    shown.press("ArrowDown", "ArrowDown", "ArrowDown")
    page.locator(".f-user .now").hover()
    assert page.locator(".f-row.lit").count() >= 1
    assert page.locator(".f-user .now.lit").count() == 1
    page.mouse.move(5, 5)
    page.locator(".f-row", has_text="stem_relu = ").click()
    page.mouse.move(5, 5)
    assert page.locator(".f-source:not(.f-user) .lit").count() >= 1


def test_inputs_and_readers_have_marks_of_their_own_and_keys_follow_them(show, timeline, fuse):
    shown = show(timeline, step=fuse.first, selection="stem_bn")
    page = shown.page
    assert page.locator(".f-row:has(.f-badge.in) .nm").all_inner_texts() == ["stem_conv"]
    assert page.locator(".f-row:has(.f-badge.out) .nm").all_inner_texts() == ["stem_relu"]
    shown.press("i")
    assert page.locator(".f-row.selected .nm").inner_text() == "stem_conv"
    shown.press("u", "u")
    assert page.locator(".f-row.selected .nm").inner_text() == "stem_relu"


def test_a_row_says_what_it_came_from_and_counts_itself_if_it_was_there(show, timeline, fuse):
    shown = show(timeline, step=fuse.last, selection="stem_conv")
    assert "came from stem_conv + stem_bn" in shown.text("detail")
    assert shown.page.locator("path.ribbon").count() == 1

    def exchange(gm, old, other):
        (node,) = gm.graph.find_nodes(op="call_function", target=old)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(other, node.args)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)

    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    with fxlab.record(gm) as recorded:
        exchange(gm, torch.relu, torch.tanh)
        exchange(gm, torch.tanh, torch.sigmoid)
    told = show(recorded, step=3, selection="tanh").text("detail").splitlines()
    assert "came from relu" in told
    told = show(recorded, step=6, selection="sigmoid").text("detail").splitlines()
    assert "came from tanh \N{LEFTWARDS ARROW} relu" in told


def test_modules_fold_repeats_fold_to_one_and_hidden_rows_are_counted(show, timeline, fuse):
    shown = show(timeline, step=fuse.first, selection="body_1_bn")
    page = shown.page
    before = len(shown.rows())
    shown.press("Enter")
    fold = page.locator(".f-row.fold")
    assert "rows folded" in fold.inner_text()
    hidden = int(re.search(r"(\d+) rows folded", shown.text("legend"))[1])
    assert len(shown.rows()) == before - hidden + 1
    shown.press("Enter")
    assert len(shown.rows()) == before
    page.get_by_role("button", name="fold all modules", exact=True).click()
    folded = page.locator(".f-row.fold").all_inner_texts()
    assert any("body" in text for text in folded)
    page.locator(".f-row.fold .nm", has_text="body").click()
    assert any(f"{TIMES}3" in text for text in page.locator(".f-row.fold").all_inner_texts())


def test_a_step_inside_a_fold_marks_the_fold_and_opens_nothing(show, timeline, fuse):
    shown = show(timeline, step=fuse.first - 1)
    shown.page.get_by_role("button", name="fold all modules", exact=True).click()
    count = len(shown.rows())
    erase = next(step for step in timeline.steps if step.edit.kind == "erase")
    for _ in range(erase.index - fuse.first + 1):
        shown.press("ArrowRight")
    assert shown.step() == erase.index
    assert len(shown.rows()) == count
    assert f"{MINUS}1" in shown.page.locator(".f-row.fold").first.inner_text()


def test_rows_that_a_step_leaves_alone_are_not_made_anew_and_all_are_in_order(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    shown.page.evaluate("for (const row of document.querySelectorAll('.f-row')) row.kept = true")
    shown.press("ArrowRight")
    order = """() => [...document.querySelectorAll(".f-row")].map((row) => row.dataset.index)"""
    kept = shown.page.evaluate(
        "() => [...document.querySelectorAll('.f-row')].filter((row) => row.kept).length"
    )
    assert kept >= len(shown.rows()) - 4
    assert shown.page.evaluate(order) == [str(k) for k in range(len(shown.rows()))]
    long = show(chain(3_000, 2))
    grid = long.page.locator(".f-grid")
    for top in (240, 10_000, 9_900, 10_050, 0):
        grid.evaluate("(grid, top) => { grid.scrollTop = top; }", top)
        first = max(0, top // 24 - 4)
        at = "(first) => document.querySelector('.f-row').dataset.index === first"
        long.page.wait_for_function(at, arg=str(first))
        found = [int(k) for k in long.page.evaluate(order)]
        assert found == list(range(first, first + len(found))) and len(found) > 20


def test_search_finds_names_targets_opcodes_and_lines_and_goes_on(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    page = shown.page
    shown.press("/")
    page.keyboard.type("_bn")
    assert "1 of" in shown.text("found") and "found" in shown.text("found")
    first = page.locator(".f-row.selected .nm").inner_text()
    shown.press("Enter")
    assert page.locator(".f-row.selected .nm").inner_text() != first
    page.locator(".f-search").fill("call_function")
    assert page.locator(".f-row.hit").count() == 1
    code = timeline.steps[fuse.first + 1].code
    page.locator(".f-search").fill(code)
    shown.press("Enter")
    assert shown.step() == fuse.first + 2
    shown.press("Escape", "ArrowRight")
    assert shown.step() == fuse.first + 3


def test_the_gaps_of_a_pass_can_be_closed(show, timeline, fuse):
    shown = show(timeline, step=fuse.last)
    ghosts = [row for row in shown.rows() if "ghost" in row["classes"]]
    assert ghosts
    shown.press("c")
    assert not [row for row in shown.rows() if "faint" in row["classes"] and row["mark"] == MINUS]
    shown.press("c")
    assert len([row for row in shown.rows() if "ghost" in row["classes"]]) == len(ghosts)


def test_a_prediction_is_right_for_any_edit_of_the_match_and_answered_by_the_sentence(
    show, timeline, fuse
):
    shown = show(timeline, step=fuse.first - 1, predict=True)
    page = shown.page
    text = page.locator(".fxl").inner_text()
    assert timeline.steps[fuse.first - 1].sentence not in text
    assert not page.locator(".f-row.empty").count()
    page.locator(".f-row", has_text="stem_bn = ").click()
    page.get_by_role("button", name="guess: erase at the selected row").click()
    assert shown.text("guess").startswith("Yes: ")
    page.get_by_role("button", name="show the next step").click()
    assert shown.step() == fuse.first
    page.locator(".f-row", has_text="x").first.click()
    page.get_by_role("button", name="guess: move at the selected row").click()
    assert timeline.steps[fuse.first].sentence in shown.text("guess")
    page.get_by_role("button", name="show the next step").click()
    line = timeline.steps[fuse.first + 1].where[0].line
    page.locator(".f-source:not(.f-user) .f-code-line", has=page.locator(f"text='{line}'")).click()
    assert shown.text("guess").startswith("Yes: ")


@pytest.mark.parametrize("dark", [False, True])
def test_wall_mode_fills_the_window_in_large_type(show, timeline, fuse, dark):
    timeline.notes[fuse.first + 2] = "look at the readers"
    try:
        shown = show(timeline, dark=dark, size=(1280, 720), step=fuse.first + 2)
    finally:
        del timeline.notes[fuse.first + 2]
    shown.press("w")
    sizes = shown.page.evaluate(
        """() => {
          const px = (name) => parseFloat(getComputedStyle(document.querySelector(name)).fontSize);
          const root = document.querySelector(".fxl").getBoundingClientRect();
          const grid = document.querySelector(".f-grid").getBoundingClientRect();
          const seen = [...document.querySelectorAll(".f-row")].filter((row) => {
            const box = row.getBoundingClientRect();
            return box.bottom > grid.top + 1 && box.top < grid.bottom - 1;
          });
          return { code: px(".f-row .f-line"), source: px(".f-source"), sentence: px(".f-sentence"),
            rows: seen.length, root: [root.left, root.top, root.width, root.height],
            note: document.querySelector(".f-note").getBoundingClientRect().bottom };
        }"""
    )
    assert sizes["code"] >= 24 and sizes["source"] >= 24 and sizes["sentence"] >= 28
    assert 6 <= sizes["rows"] <= 14
    assert sizes["root"] == [0, 0, 1280, 720]
    assert sizes["note"] <= 720
    worst = shown.page.evaluate(CONTRAST)
    assert worst[0][0] >= 7, worst[:5]
    shown.press("Escape")
    assert not shown.page.locator(".fxl.wall").count()


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_the_contrast_of_aa(show, timeline, fuse, dark):
    shown = show(timeline, dark=dark, step=fuse.first + 3, selection="stem_relu")
    assert shown.page.locator(f".fxl[data-theme={'dark' if dark else 'light'}]").count() == 1
    worst = shown.page.evaluate(CONTRAST)
    assert len(worst) > 60
    assert worst[0][0] >= 4.5, worst[:5]
    shown.press("?")
    assert shown.page.evaluate(CONTRAST)[0][0] >= 4.5


def test_narrow_windows_stack_the_source_above_the_rows(show, timeline, fuse):
    shown = show(timeline, size=(800, 900), step=fuse.first)
    place = "(name) => document.querySelector(name).getBoundingClientRect()"
    source = shown.page.evaluate(f"({place})('.f-left').bottom")
    assert source <= shown.page.evaluate(f"({place})('.f-right').top") + 1
    shown.page.set_viewport_size({"width": 320, "height": 900})
    shown.press("ArrowRight")
    wide = shown.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 320
    boxes = [one.bounding_box() for one in shown.page.locator(".f-head > *").all()]
    assert len(boxes) > 2
    for left, right in pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"] + 1
    assert max(box["height"] for box in boxes) < 40
    assert shown.page.locator(".f-row").count() > 5


@pytest.mark.parametrize("wide", [800, 600])
def test_a_long_program_in_a_narrow_window_scrolls_in_its_own_pane(show, wide):
    shown = show(chain(2_000, 3), size=(wide, 700))
    assert shown.page.locator(".fxl").bounding_box()["height"] < 1000
    assert shown.page.locator(".f-row").count() < 60
    shown.press("End", "ArrowUp")
    assert shown.page.locator(".f-row.selected").count() == 1
    assert shown.page.locator(".f-grid").evaluate("(grid) => grid.scrollTop") > 0
    shown.press("w")
    assert shown.page.locator(".f-row").count() < 60


def test_the_line_that_made_an_edit_is_seen_whole_and_from_its_first_line_on(show, timeline, fuse):
    def long_line(gm):
        for node in list(gm.graph.find_nodes(op="call_function")):
            node.args, unused = (*node.args[:1], node.args[0]), "a long line " + "of words " * 20
        return unused and gm

    gm = fxlab.symbolic_trace(lambda x: x + 1)
    with fxlab.record(gm) as recorded:
        long_line(gm)
    line = show(recorded, step=1).page.locator(".f-source").first.locator(".f-code-line.now")
    assert line.bounding_box()["height"] > 30
    assert line.evaluate("(one) => one.scrollWidth <= one.parentElement.clientWidth")
    box = show(timeline, step=fuse.last).page.locator(".f-source").first
    tops = box.evaluate("(one) => [one.scrollTop, ...[...one.children].map((k) => k.offsetTop)]")
    assert tops[0] > 0 and min(abs(top - tops[0]) for top in tops[1:]) <= 1


def test_the_first_view_says_how_to_step_unless_there_are_no_steps(show, timeline):
    assert show(timeline).text("sentence").endswith("Right: the next step.")
    empty = show(timeline_of(fxlab.symbolic_trace(lambda x: x + 1)))
    assert empty.text("sentence") == "start: GraphModule, 3 nodes."


def test_buttons_are_large_enough_for_a_finger_and_a_tap_selects(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    sizes = shown.page.evaluate(
        """() => [...document.querySelectorAll(".f-foot button, .f-top button")]
          .filter((b) => !b.hidden).map((b) => [b.offsetWidth, b.offsetHeight, b.textContent])"""
    )
    assert all(width >= 44 and height >= 44 for width, height, _ in sizes), sizes
    shown.page.locator(".f-row", has_text="stem_conv = ").click()
    assert shown.page.locator(".f-row.selected .nm").inner_text() == "stem_conv"


def test_rows_are_a_treegrid_and_the_sentence_is_a_live_region(show, timeline, fuse):
    shown = show(timeline, step=fuse.first, selection="stem_bn")
    grid = shown.page.get_by_role("treegrid")
    assert int(grid.get_attribute("aria-rowcount")) == len(shown.rows())
    active = grid.get_attribute("aria-activedescendant")
    row = shown.page.locator(f"#{active}")
    assert row.get_attribute("aria-label").endswith("reads stem_conv; read by stem_relu")
    assert row.get_attribute("aria-selected") == "true"
    assert shown.page.locator(".f-sentence").get_attribute("aria-live") == "polite"


def test_tab_and_escape_leave(show, timeline):
    shown = show(timeline)
    for _ in range(40):
        shown.press("Tab")
        if not shown.page.evaluate("!!document.activeElement.closest('.fxl')"):
            break
    else:
        pytest.fail("Tab does not leave the explorer")
    shown.page.locator(".f-grid").focus()
    shown.press("Escape")
    assert not shown.page.evaluate("!!document.activeElement.closest('.fxl')")


def test_only_the_rows_in_view_are_in_the_page(show):
    shown = show(chain(10_000, 30))
    assert shown.page.locator(".f-row").count() < 80
    assert shown.page.get_by_role("treegrid").get_attribute("aria-rowcount") == "10000"
    shown.press("ArrowRight", "End")
    assert shown.page.locator(".f-row.tilde.strong").count() == 1
    shown.page.locator(".f-grid").evaluate("(grid) => { grid.scrollTop = 200000; }")
    # Not wait_for_function: the page's own policy forbids evaluating text while it waits.
    shown.page.locator(".f-row[data-index^='83']").first.wait_for()
    assert shown.errors == []


def test_a_large_program_opens_folded_its_parameters_too(show):
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(120)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layers(x))

    exported = torch.export.export(Many(), (torch.randn(2, 4),))
    shown = show(timeline_of(exported))
    texts = [row["line"] for row in shown.rows()]
    assert len(texts) < 12
    assert any("parameters" in text and "240 rows folded" in text for text in texts)
    assert any("layers" in text and "120 rows folded" in text for text in texts)


def test_hostile_names_are_shown_as_text(show):
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("<img src=x onerror=alert(1)>", "</script>", "a'\"\n`b", "y" * 10_000):
                self.add_module(name, nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for child in self.children():
                x = child(x)
            return x

    shown = show(timeline_of(Hostile(), [dce]))
    shown.page.on("dialog", lambda dialog: pytest.fail("a model's name ran"))
    for _ in range(6):
        shown.press("ArrowRight", "ArrowDown")
    assert shown.page.locator(".fxl img").count() == 0
    assert any("<img src=x onerror=alert(1)>" in row["label"] for row in shown.rows())
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 1240
    assert shown.errors == []


def test_a_trace_that_fails_ends_on_its_line_with_the_remedies(show):
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            if y.sum() > 0:
                return y
            return -y

    shown = show(timeline_of(Branch()))
    shown.press("End")
    assert "torch.where" in shown.text("change")
    assert shown.text("sentence").count("a branch") == 1 and "a branch" not in shown.text("change")
    assert "if y.sum() > 0" in shown.page.locator(".f-code-line.now").inner_text()


def test_an_ill_formed_step_says_which_row_reads_what_is_gone(show):
    gm = fxlab.GraphModule(nn.Module(), fxlab.Graph())
    x = gm.graph.placeholder("x")
    first = gm.graph.call_function(torch.relu, (x,))
    second = gm.graph.call_function(torch.sigmoid, (first,))
    gm.graph.output(second)
    with fxlab.record(gm) as recorded:
        x.append(second)
        first.append(second)
    shown = show(recorded)
    for step in recorded.steps:
        shown.press("ArrowRight")
        verdict = shown.text("verdicts")
        assert ("well formed: yes" in verdict) == step.well_formed
        if not step.well_formed:
            assert step.problem in verdict
            assert shown.page.locator(".f-lanes .bad").count() >= 1
    assert not all(step.well_formed for step in recorded.steps)


def test_timelines_of_no_step_and_of_one_node_are_shown(show):
    def one(x):
        return x

    shown = show(timeline_of(one))
    shown.press("End", "ArrowUp", "n", "i", "u", "Enter", "c")
    gm = fxlab.symbolic_trace(nn.ReLU())
    with fxlab.record(gm) as empty:
        pass
    shown = show(empty)
    shown.press("ArrowRight", "End", "PageDown", "n", "ArrowDown", "Enter", "c", "p", "p")
    assert shown.step() == 0
    assert shown.errors == []


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop_me = nn.Identity()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.cat([x, y, torch.relu(x)], dim=0)
        return self.drop_me(z).amax(dim=1) + z.amax(dim=0).sum() + x.sum()


def removes_identity(gm):
    for node in list(gm.graph.nodes):
        if node.target == "drop_me":
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            gm.delete_submodule("drop_me")


def swaps_relu(gm):
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh


@pytest.fixture(scope="module")
def wrong():
    inputs = (torch.randn(3, 3), torch.randn(3, 3))
    return timeline_of(Wide().eval(), [removes_identity, swaps_relu], inputs)


def test_a_failed_check_is_on_the_chip_and_the_first_diverging_row_is_a_click_away(show, wrong):
    shown = show(wrong, step=len(wrong))
    page = shown.page
    chips = page.locator(".f-chip").all_inner_texts()
    assert [("another output" in text) for text in chips] == [False, False, True]
    assert wrong.passes[2].same_output["name"] == "relu"
    page.get_by_role("button", name="fold all modules", exact=True).click()
    page.get_by_role("button", name="show relu").click()
    assert page.locator(".f-row.selected .nm").inner_text() == "relu"


def test_the_end_of_a_pass_that_deletes_a_module_shows_the_row_that_called_it(show, wrong):
    last = wrong.passes[1].last
    assert wrong.steps[last - 1].edit.kind == "module"
    shown = show(wrong, step=last)
    assert "drop_me" in shown.page.locator(".f-row.about .f-line").inner_text()
    assert "Identity" in shown.text("change")


def test_next_change_says_when_there_is_none(show, wrong):
    shown = show(wrong, step=len(wrong))
    shown.press("n")
    assert shown.step() == len(wrong)
    assert shown.text("found").strip() == "no later change"
    shown.page.locator(".f-row", has_text="sum_1 = ").click()
    shown.press("n")
    assert shown.text("found") == "no later change of sum_1"
    shown.press("Home", "Shift+N")
    assert shown.text("found").startswith("no earlier change")


def test_shift_goes_through_the_inputs_and_the_users_of_one_row(show, wrong):
    shown = show(wrong, step=wrong.passes[0].last, selection="cat")
    row = shown.page.locator(".f-row.selected .nm")
    seen = []
    for key in ("i", "Shift+I", "Shift+I", "Shift+I"):
        shown.press(key)
        seen.append(row.inner_text())
    assert seen == ["x", "y", "relu", "x"]
    assert shown.text("found").startswith("1 of 3")
    seen = []
    for key in ("u", "Shift+U", "Shift+U", "Shift+U"):
        shown.press(key)
        seen.append(row.inner_text())
    assert seen == ["relu", "cat", "sum_2", "relu"]
    shown.press("Home", "End")
    shown.page.locator(".f-row", has_text="y").first.click()
    shown.press("i")
    assert shown.text("found") == "reads nothing"


def test_the_divider_is_moved_by_hand_and_by_keys(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    page = shown.page

    def width() -> float:
        return page.locator(".f-left").bounding_box()["width"]

    before, split = width(), page.get_by_role("separator", name="width of the source")
    box = split.bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 154, box["y"] + 50, steps=3)
    page.mouse.up()
    assert abs(width() - before - 150) < 12
    split.focus()
    shown.press("ArrowLeft")
    assert abs(width() - before - 110) < 16
    assert shown.step() == fuse.first


def test_columns_have_heads_over_their_numbers_and_uncounted_work_has_no_number(
    show, timeline, fuse
):
    shown = show(timeline, step=fuse.first)
    page = shown.page
    heads = {one.inner_text(): one.bounding_box() for one in page.locator(".f-heads > *").all()}
    assert "FLOPs" in heads and "shape" in heads
    conv = page.locator(".f-row", has_text="stem_conv = ")
    assert abs(conv.locator(".f-metric").bounding_box()["x"] - heads["FLOPs"]["x"]) <= 1
    assert abs(conv.locator(".f-shape").bounding_box()["x"] - heads["shape"]["x"]) <= 1
    assert conv.locator(".f-metric").inner_text()
    assert not page.locator(".f-row", has_text="stem_relu = ").locator(".f-metric").inner_text()
    assert "not counted" in page.locator(".f-heads .f-metric").get_attribute("title")


def test_a_line_is_elided_only_for_want_of_room_and_a_selected_one_is_shown_whole(show, timeline):
    gm = fxlab.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with fxlab.record(gm) as plain:
        list(gm.graph.nodes)[1].name = "a_name_that_is_long_enough_to_need_most_of_the_width"
    shown = show(plain, size=(1400, 800))
    assert not [row for row in shown.rows() if "…" in row["line"]]
    narrow = show(timeline, size=(940, 800), step=timeline.passes[1].first)
    cut = next(row for row in narrow.rows() if "…" in row["line"])
    narrow.page.locator(f".f-row[data-index='{cut['index']}']").click()
    line = narrow.page.locator(".f-row.selected .f-line")
    assert "…" not in line.inner_text()
    assert line.evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_a_small_program_takes_less_height_than_a_long_one(show, wrong):
    heights = [
        show(one).page.locator(".f-main").bounding_box()["height"] for one in (wrong, chain(60, 1))
    ]
    assert heights[0] < heights[1] <= 580


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_has_the_classic_picture_of_each_passs_end_and_it_does_not_glare(
    show, timeline, fuse, dark
):
    shown = show(timeline, dark=dark, step=fuse.last)
    page = shown.page
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    picture = page.locator(".f-pane img")
    picture.wait_for()
    assert picture.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 100
    assert picture.get_attribute("alt") == f"graph of step {fuse.last}"
    shown.press("ArrowLeft")
    assert f"as of step {fuse.first - 1}" in shown.text("pane")
    box = page.locator(".f-pane").bounding_box()
    corner = {"x": box["x"] + 14, "y": box["y"] + 40, "width": 4, "height": 4}
    seen = Image.open(io.BytesIO(page.screenshot(clip=corner))).convert("L").getpixel((1, 1))
    assert seen < 90 if dark else seen > 200
    page.get_by_role("button", name="the classic box-and-arrow picture").click()
    assert page.locator(".f-row").count() > 5


def test_a_run_shows_each_value_small_and_a_public_copy_shows_none(show):
    x = torch.arange(12.0).reshape(3, 4)
    story = timeline_of(lambda x: torch.relu(x - 6), None, (x,))
    shown = show(story, step=story.passes[1].first + 1)
    image = shown.page.locator(".f-thumb")
    size = image.evaluate("(one) => one.decode().then(() => [one.naturalWidth, one.naturalHeight])")
    assert size == [4, 3]
    assert shown.page.locator(".f-hist path").count() == 16
    public = show(story, step=story.passes[1].first + 1, share="public")
    assert public.page.locator(".f-thumb, .f-hist").count() == 0
    assert public.text("sentence") == "sub is f32[3, 4]; 48 B live"


def test_a_trace_opens_beside_the_models_source(show, wrong):
    shown = show(wrong, step=0)
    assert "model source" in shown.text("head")
    assert "def forward" in shown.page.locator(".f-source").first.inner_text()
    assert "pass source" in show(wrong, step=wrong.passes[1].first).text("head")


@pytest.mark.parametrize(
    ("place", "name", "dark", "light"),
    [
        ("body", "data-jp-theme-light", "false", "true"),
        ("body", "data-vscode-theme-kind", "vscode-dark", "vscode-light"),
        ("body", "data-vscode-theme-kind", "vscode-high-contrast", "vscode-high-contrast-light"),
        ("documentElement", "theme", "dark", "light"),
    ],
)
def test_light_and_dark_follow_the_host(show, timeline, place, name, dark, light):
    shown = show(timeline)
    for value, theme in ((dark, "dark"), (light, "light"), (dark, "dark")):
        shown.page.evaluate(
            "([place, name, value]) => document[place].setAttribute(name, value)",
            [place, name, value],
        )
        shown.page.locator(f".fxl[data-theme={theme}]").wait_for()


def test_many_parameters_open_folded_even_in_a_small_program(show):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    shown = show(timeline_of(torch.export.export(model, (torch.randn(2, 4),))))
    texts = [row["line"] for row in shown.rows()]
    assert any("parameters" in text and "16 rows folded" in text for text in texts)
    assert sum("aten.linear" in text for text in texts) == 8


def test_of_a_long_line_the_path_to_a_module_is_elided_first(show, timeline):
    shown = show(timeline, size=(940, 800), step=timeline.passes[0].last)
    lines = {row["name"]: row["line"] for row in shown.rows()}
    assert lines["body_1_conv"] == "body_1_conv = ….conv(body_0_relu)"
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    traced = fxlab.symbolic_trace(model)
    long = "a_name_as_long_as_names_of_deep_modules_are"
    list(traced.graph.nodes)[1].name = long
    lines = {row["name"]: row["line"] for row in show(timeline_of(traced), size=(940, 800)).rows()}
    assert lines[long] == f'{long} = …, "0")(input_1)'
    exported = timeline_of(torch.export.export(model, (torch.randn(2, 4),)))
    lines = {row["name"]: row["line"] for row in show(exported, size=(940, 800)).rows()}
    assert lines["linear"].startswith("linear = ….linear.default(input")
    wide = show(timeline, size=(1900, 800), step=timeline.passes[0].last)
    assert (
        'getattr(self.body, "1").conv(body_0_relu)' in wide.page.locator(".f-canvas").inner_text()
    )


def test_nothing_that_a_mouse_steps_with_moves_between_steps(show, timeline, fuse):
    for width in (1000, 1400, 620):
        shown = show(timeline, size=(width, 1200), step=0)
        on = shown.page.get_by_role("button", name="one step on (Right)")
        before = on.bounding_box()
        x, y = before["x"] + before["width"] / 2, before["y"] + before["height"] / 2
        track = shown.page.locator(".f-slider").bounding_box()
        top = shown.page.locator(".f-grid").bounding_box()["y"]
        for step in range(1, fuse.last + 1):
            shown.page.mouse.click(x, y)
            assert shown.step() == step, width
        assert on.bounding_box() == before
        assert shown.page.locator(".f-slider").bounding_box() == track
        assert shown.page.locator(".f-grid").bounding_box()["y"] == top


def test_what_a_row_came_from_is_not_told_before_it_happens(show, timeline, fuse):
    old = next(
        step
        for step in timeline.steps
        if step.edit.kind == "reroute" and timeline.name(step.edit.row, fuse.first) == "body_0_bn"
    )
    shown = show(timeline, step=old.index - 1, selection="body_0_conv")
    ribbon, told = shown.page.locator("path.ribbon"), shown.page.locator(".f-arc")
    assert "came from" not in shown.text("detail")
    assert ribbon.count() == 0 and not told.is_visible()
    shown.press("ArrowRight")
    assert "came from body_0_conv + body_0_bn" in shown.text("detail")
    assert ribbon.count() == 1 and told.is_visible()
    shown.press("ArrowLeft")
    assert "came from" not in shown.text("detail") and ribbon.count() == 0


def test_an_erased_row_speaks_of_the_past(show, timeline, fuse):
    erase = next(step for step in timeline.steps if step.edit.kind == "erase")
    shown = show(timeline, step=erase.index - 1, selection="stem_bn")
    assert shown.page.locator(".f-badge").count() > 0
    assert "reads" in shown.text("detail")
    shown.press("ArrowRight")
    assert f"erased at step {erase.index}; read stem_conv" in shown.text("detail")
    assert "read by" not in shown.text("detail")
    assert shown.page.locator(".f-badge").count() == 0
    label = shown.page.locator(".f-row.selected").get_attribute("aria-label")
    assert label.endswith("; read stem_conv")
    shown.press("Home")
    assert "not at this step" in shown.text("detail")


@pytest.mark.parametrize(("width", "height"), [(1000, 470), (1000, 580), (1400, 580)])
def test_the_current_lines_are_whole_in_view_and_among_ten_where_there_is_room(
    show, timeline, fuse, width, height
):
    shown = show(timeline, size=(width, 900), step=fuse.first, selection="stem_conv")
    shown.page.evaluate(f"document.querySelector('.f-main').style.height = '{height}px'")
    shown.press("ArrowRight", "ArrowLeft")
    look = """async () => {
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const pane = document.querySelector(".f-left").getBoundingClientRect();
      return [...document.querySelectorAll(".f-source")].map((box) => {
        const line = box.querySelector(".now").getBoundingClientRect();
        const { top } = box.getBoundingClientRect(), end = top + box.clientHeight;
        const row = parseFloat(getComputedStyle(box).lineHeight);
        return [line.top - top, Math.min(end, pane.bottom) - line.bottom, box.clientHeight / row];
      });
    }"""
    for _ in range(fuse.last - fuse.first + 1):
        (*source, lines), (*user, _) = shown.page.evaluate(look)
        assert min(source + user) >= -0.5
        assert lines >= (10 if height > 500 else 4)
        shown.press("ArrowRight")


def test_a_wrapped_current_line_keeps_its_indentation(show, timeline, fuse):
    shown = show(timeline, size=(940, 900), step=fuse.first)
    place = """() => {
      const code = document.querySelector(".f-source .now").children[1];
      const text = code.firstChild, range = document.createRange();
      const left = (k) => { range.setStart(text, k); range.setEnd(text, k + 1);
        return range.getBoundingClientRect(); };
      const first = text.data.search(/\\S/), rows = new Map();
      for (let k = first; k < text.length; k++) {
        const { top, left: x } = left(k);
        if (!rows.has(top)) rows.set(top, x);
      }
      return [...rows.values()];
    }"""
    shown.page.evaluate("document.querySelector('.fxl').style.setProperty('--left', '24%')")
    wrapped = 0
    for _ in range(fuse.last - fuse.first):
        first, *others = shown.page.evaluate(place)
        wrapped += len(others)
        assert all(other > first for other in others)
        shown.press("ArrowRight")
    assert wrapped


def test_an_empty_start_says_how_to_begin(show):
    shown = show(timeline_of(lambda x: torch.relu(x) + 1), step=0)
    assert "Right: first step" in shown.rows()[0]["line"]
    shown.press("ArrowRight")
    assert not any("first step" in row["line"] for row in shown.rows())


def test_the_legend_names_only_what_is_in_view(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    pale = shown.page.locator(".f-pale")
    assert not pale.is_visible()
    shown.press("ArrowRight", "ArrowRight")
    assert pale.is_visible()


def test_chips_and_callers_say_what_they_are(show, timeline, fuse):
    shown = show(timeline, step=fuse.first)
    count = fuse.last - fuse.first + 1
    name = f"pass fuse_conv_bn, {count} steps"
    assert shown.page.get_by_role("button", name=name).count() == 1
    first, *callers = shown.page.locator(".f-frame").all_inner_texts()
    assert not first.startswith("called at")
    assert callers and all(text.startswith("called at ") for text in callers)


def test_the_keys_stand_on_one_line_each_with_the_close_button_inside(show, timeline):
    shown = show(timeline, size=(1400, 900))
    shown.press("?")
    rows = shown.page.evaluate(
        """() => [...document.querySelectorAll(".f-help dt")].map((term) => {
          const range = document.createRange();
          range.selectNodeContents(term);
          return range.getClientRects().length;
        })"""
    )
    assert rows and max(rows) == 1
    outer = shown.page.locator(".f-help").bounding_box()
    close = shown.page.locator(".f-help button").bounding_box()
    assert close["y"] + close["height"] <= outer["y"] + outer["height"] - 4
    assert close["x"] + close["width"] <= outer["x"] + outer["width"] - 4


def test_a_search_begins_with_the_row_of_that_very_name(show):
    def forward(x):
        for _ in range(12):
            x = torch.relu(x)
        return x

    story = timeline_of(forward)
    shown = show(story, step=len(story), selection="relu_11")
    page = shown.page
    shown.press("/")
    page.keyboard.type("relu_1")
    selected = page.locator(".f-row.selected .nm")
    seen = [(selected.inner_text(), shown.text("found"))]
    for _ in range(3):
        shown.press("Enter")
        seen.append((selected.inner_text(), shown.text("found")))
    assert seen == [
        ("relu_1", "1 of 3 found"),
        ("relu_10", "2 of 3 found"),
        ("relu_11", "3 of 3 found"),
        ("relu_1", "1 of 3 found"),
    ]


def test_the_classic_picture_marks_what_the_step_changed():
    from fxlab.explorer.diagram import timeline_dot

    gm = fxlab.symbolic_trace(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    )
    with fxlab.record(gm) as recorded:
        fxlab.passes.fuse_conv_bn(gm)
    marked = {}
    for step in recorded.steps:
        lines = timeline_dot(recorded, step.index).source.splitlines()
        marked[step.edit.kind, step.index] = [line for line in lines if "penwidth=4" in line]
    assert not any("penwidth=4" in line for line in timeline_dot(recorded, 0).source.splitlines())
    (weights,) = marked["module", 1]
    assert "_0" in weights and "fillcolor" in weights and "dashed" not in weights
    (reader,) = marked["reroute", 2]
    assert "_2" in reader
    (gone,) = marked["erase", 3]
    assert "_1" in gone and "dashed" in gone
