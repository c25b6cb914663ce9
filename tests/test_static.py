"""What is seen without a kernel: the static copy, pictures, text, and the page that steps alone."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fxlab
from fxlab.explorer import timeline_of
from fxlab.explorer.drawing import Story, animated_svg, still_svg, strip_svg
from fxlab.explorer.page import (
    html_page,
    viewer_source,
    without_values,
    write_html,
    write_png,
    write_svg,
)
from fxlab.explorer.static import LIMIT, static_html, text_table, verdicts
from fxlab.explorer.view import shape_bytes, view
from fxlab.models import resnet50
from fxlab.passes import dce, fuse_conv_bn

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "a'\"\n`b&amp;",
    "x" * 10_000,
    "]]>\x00\x07",
)
ALLOWED = {"details", "summary", "p", "b", "img", "table", "tr", "th", "td", "br", "div"}


class Tags(HTMLParser):
    """Every element of an HTML text with its attributes, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


class Bottle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.short = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)) + self.short(x))


@pytest.fixture(scope="module")
def timeline():
    torch.manual_seed(0)
    return timeline_of(Bottle().eval(), [fuse_conv_bn, dce], (torch.randn(1, 3, 8, 8),))


@pytest.fixture(scope="module")
def data(timeline):
    return view(timeline)


@pytest.fixture(scope="module")
def resnet_data():
    gm = fxlab.symbolic_trace(resnet50().eval())
    with fxlab.record(gm) as recorded:
        fuse_conv_bn(gm)
    return view(recorded)


@pytest.fixture(scope="module")
def hostile_data():
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in HOSTILE:
                self.add_module(name, nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for child in self.children():
                x = child(x)
            return x

    return view(timeline_of(Hostile(), [dce]))


def picture_of(static: str) -> str:
    (packed,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', static)
    return base64.b64decode(packed).decode("utf-8")


def test_a_frame_of_the_view_is_the_frame_of_the_timeline(timeline, data):
    story = Story(data)
    for index in range(len(timeline) + 1):
        frame = timeline.frame(index)
        shown = {line.row: line for line in story.lines(index) if line.state == "live"}
        assert list(shown) == list(frame.rows)
        for row, line in shown.items():
            assert line.name == frame.name(row)
            assert frame.line(row) in line.text
            assert line.inputs == frame.inputs(row)


def test_untouched_rows_keep_their_line_through_a_pass(data):
    story = Story(data)
    for span in data["passes"]:
        if span["kind"] == "pass" and not span["quiet"]:
            orders = {
                tuple(line.row for line in story.lines(index))
                for index in range(span["first"], span["last"] + 1)
            }
            assert len(orders) == 1


def test_marks_are_strong_in_their_own_step_and_faint_afterwards(timeline, data):
    story = Story(data)
    (erased,) = [step.index for step in timeline.steps if step.edit.kind == "erase"]
    row = timeline.steps[erased - 1].edit.row

    def line(index):
        return next(line for line in story.lines(index) if line.row == row)

    assert (line(erased - 1).state, line(erased - 1).mark) == ("live", "")
    assert (line(erased).state, line(erased).mark, line(erased).strong) == ("ghost", "-", True)
    assert (line(erased + 1).mark, line(erased + 1).strong) == ("-", False)


def test_the_static_copy_stays_below_24_kilobytes(data, resnet_data, hostile_data):
    for one in (data, resnet_data, hostile_data):
        assert len(static_html(one).encode()) <= LIMIT


def test_the_static_copy_has_a_picture_and_a_table_for_each_pass(timeline, data):
    html = static_html(data)
    assert html.startswith("<details")
    assert "<details open" not in html
    for span in timeline.passes:
        assert f"<b>{span.name}</b>" in html
    for step in timeline.steps:
        if step.edit.kind == "erase":
            assert step.code in html
    assert re.search(r'<img alt="[^"]+erases|<img alt="[^"]+', html)


def test_the_static_copy_says_in_words_what_its_picture_shows_and_once(timeline, data):
    (erased,) = [step for step in timeline.steps if step.edit.kind == "erase"]
    html = static_html(data, step=erased.index)
    head = f"step {erased.index} of {len(timeline)} ({erased.code}). {erased.sentence}"
    told = "well formed: yes; same output: not checked inside a pass"
    assert html.count(f"<p>{head}<br>{told}</p>") == 1
    assert erased.sentence not in picture_of(html) and "placeholder" not in picture_of(html)
    assert erased.sentence in still_svg(Story(data), erased.index)
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    with fxlab.record(gm) as broken:
        relu = list(gm.graph.nodes)[1]
        relu.args = (list(gm.graph.nodes)[2],)
        relu.args = (next(iter(gm.graph.nodes)),)
    assert "<br>well formed: no: relu reads add" in static_html(view(broken), step=1)
    assert "<br>well formed: yes; same output: not checked</p>" in static_html(view(broken), step=2)
    traced = static_html(data, step=1)
    assert "<br>well formed: yes</p>" in traced


def test_what_the_static_copy_leaves_out_is_counted_and_says_where_it_is(resnet_data):
    html = static_html(resnet_data)
    shown = html.count(f">{resnet_data['passes'][0]['name']}:")
    (more,) = re.findall(r"<p>(\d+) more steps", html)
    assert shown + int(more) == len(resnet_data["steps"])
    assert "to_html" in html
    assert "rows above" in picture_of(html) or "rows below" in picture_of(html)


def test_the_static_copy_is_what_a_sanitizer_lets_through(data, hostile_data):
    for one in (data, hostile_data):
        for tag, attributes in Tags(static_html(one)).found:
            assert tag in ALLOWED
            assert set(attributes) <= {"alt", "src", "style", "class"}
            assert (attributes.get("src") or "data:image/svg+xml").startswith("data:image/svg+xml")


def test_hostile_names_stay_text_in_every_rendering(hostile_data):
    page = html_page(hostile_data)
    for text in (static_html(hostile_data), page):
        assert "<img src=x" not in text
        assert "<script>alert" not in text
    ElementTree.fromstring(still_svg(Story(hostile_data), len(hostile_data["steps"])))
    assert "alert(1)" in still_svg(Story(hostile_data), 2)
    assert max(map(len, text_table(hostile_data).splitlines())) < 400


def test_the_text_table_names_every_pass_and_step(timeline, data):
    text = text_table(data)
    for step in timeline.steps:
        assert step.sentence in text
    assert "dce" in text


def test_the_two_verdicts_are_never_one(timeline, data):
    fuse = next(span for span in timeline.passes if span.name == "fuse_conv_bn")
    assert verdicts(data, fuse.first) == ("yes", "not checked inside a pass")
    formed, same = verdicts(data, fuse.last)
    assert formed == "yes"
    assert same.startswith(("identical", "rounding"))


def test_pictures_are_well_formed_svg_without_script(data):
    story = Story(data)
    steps = range(len(data["steps"]) + 1)
    for text in (still_svg(story, 3), strip_svg(story, steps), animated_svg(story, steps)):
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        assert "<script" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_an_animation_ends_and_stays_on_its_last_step(data):
    text = animated_svg(Story(data), range(4))
    assert "infinite" not in text
    assert text.count("forwards") == 1
    assert text.rindex("forwards") > text.rindex("step-end")


def test_pictures_are_written_of_any_step(timeline, tmp_path):
    write_svg(timeline, tmp_path / "a.svg", 2)
    write_svg(timeline, tmp_path / "b.svg", steps=range(2, 5), animate=True)
    write_png(timeline, tmp_path / "c.png", 2)
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "animation" in (tmp_path / "b.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(IndexError, match="steps 0"):
        write_svg(timeline, tmp_path / "d.svg", 10_000)


def test_one_step_is_one_step():
    data = view(timeline_of(Bottle().eval()))
    span = {**data["passes"][0], "first": 1, "last": 1}
    short = {**data, "steps": data["steps"][:1], "passes": [span]}
    for text in (text_table(short), static_html(short)):
        assert "1 step" in text
        assert "1 steps" not in text


def test_the_page_loads_nothing_and_allows_one_script(data):
    page = html_page(data)
    assert not re.search(r"""(src|href)=["']?(http|//)""", page)
    assert "default-src 'none'" in page
    assert page.count("<script") == 1


def test_a_page_of_resnet50s_fusion_is_below_a_megabyte(resnet_data):
    assert len(html_page(resnet_data)) < 1_000_000


def test_a_public_page_has_no_values_and_says_so(tmp_path):
    x = torch.full((1, 3, 8, 8), 123456.0)
    timeline = timeline_of(Bottle().eval(), None, (x,))
    plain = write_html(timeline, tmp_path / "plain.html").read_text()
    public = write_html(timeline, tmp_path / "public.html", share="public").read_text()
    assert "Public copy" in public and "Public copy" not in plain
    assert "123456" not in public and "1.23e+05" not in public
    with pytest.raises(ValueError, match="public"):
        write_html(timeline, tmp_path / "x.html", share="all")


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum().item()


def doubles(gm):
    (total,) = gm.graph.find_nodes(op="call_method", target="sum")
    with gm.graph.inserting_after(total):
        twice = gm.graph.call_function(torch.add, (total, total))
    total.replace_all_uses_with(twice)
    twice.args = (total, total)


def raises(gm):
    raise ValueError("the sum is 123456")


def raises_when_run(gm):
    (total,) = gm.graph.find_nodes(op="call_method", target="sum")
    total.target = "no_such_method_123456"


@pytest.mark.parametrize("pass_", [doubles, raises, raises_when_run])
def test_what_a_verdict_or_an_error_quotes_is_not_in_a_public_page(tmp_path, pass_):
    timeline = timeline_of(Sums(), [pass_], (torch.tensor([123450.0, 6.0]),))
    data = view(timeline)
    secret = re.compile(r"123456\b|246912")
    told = (
        {key: data[key] for key in ("error", "passes")},
        [(s["t"], s.get("v")) for s in data["steps"]],
    )
    assert secret.search(json.dumps(told))
    page = write_html(timeline, tmp_path / "public.html", share="public").read_text()
    public = without_values(data)
    hidden = (
        {key: public[key] for key in ("error", "passes")},
        [(s["t"], s.get("v")) for s in public["steps"]],
    )
    if pass_ is not raises_when_run:  # whose secret is in the program
        assert not secret.search(json.dumps(hidden)) and not secret.search(page)
    assert ("ValueError" in page) == (pass_ is raises)
    assert "AttributeError: " not in json.dumps(hidden)


def test_a_public_page_of_a_trace_that_fails_keeps_the_error_that_the_kit_wrote(tmp_path):
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    timeline = timeline_of(Branch())
    page = write_html(timeline, tmp_path / "public.html", share="public").read_text()
    assert "stops: a branch" in page and "is no tensor" not in page


def test_the_viewer_stays_within_its_budget():
    from fxlab.explorer.page import HERE
    from fxlab.explorer.widget import packed_viewer

    written = [(HERE / name).read_bytes() for name in ("viewer.js", "viewer.css")]
    assert sum(map(len, written)) <= 64 * 1024
    assert max(len(line) for text in written for line in text.decode().splitlines()) <= 120
    assert sum(len(part.encode()) for part in packed_viewer()) <= 40 * 1024
    assert all(part.strip() for part in viewer_source())


def test_timelines_without_steps_or_rows_are_shown():
    gm = fxlab.symbolic_trace(Bottle())
    with fxlab.record(gm) as empty:
        pass
    data = view(empty)
    assert "start" in static_html(data)
    assert Story(data).lines(0)
    assert text_table(data)
    assert "<svg" in still_svg(Story(data), 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2, 3]", 24),
        ("i64[4]", 32),
        ("f16[]", 2),
        ("b8[3]", 3),
        ("f32[s0, 3]", None),
        ("", None),
    ],
)
def test_bytes_are_read_off_a_shape(text, size):
    assert shape_bytes(text) == size


def test_a_match_ends_before_the_pass_comes_back_to_a_line_that_it_left(resnet_data):
    span = resnet_data["passes"][-1]
    counts = [step["n"] for step in resnet_data["steps"][span["first"] - 1 : span["last"]]]
    assert counts == [4] * (len(counts) - 3) + [3, 2, 1]


def test_a_deleted_module_is_a_step_about_the_row_that_called_it(timeline, data):
    gone = next(
        s for s in timeline.steps if s.edit.kind == "module" and s.edit.after["value"] is None
    )
    row = data["steps"][gone.index - 1]["r"]
    line = next(one for one in Story(data).lines(gone.index) if one.row == row)
    assert line.state == "ghost"
    assert line.text.startswith("bn")


def test_what_a_chip_warns_of_is_a_failed_check():
    def swaps(gm):
        for node in gm.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.tanh

    shown = view(timeline_of(lambda x: torch.relu(x) + 1, [swaps, dce], (torch.ones(3),)))
    assert [span["bad"] for span in shown["passes"]] == ["", "another output", ""]
    assert shown["passes"][1]["same"]["name"] == "relu"
    assert shown["passes"][2]["same"]["text"] == "identical; still different since swaps"
    for text in (text_table(shown), static_html(shown)):
        assert text.count("still different since swaps") == 1


def test_a_chip_says_not_well_formed_of_the_pass_that_did_it_and_later_ones_since_when():
    def breaks(gm):
        (output,) = gm.graph.find_nodes(op="output")
        output.append(output.args[0])

    def keeps(gm):
        "Edit nothing."

    timeline = timeline_of(lambda x: torch.relu(x + 1), [breaks, keeps, keeps], (torch.ones(3),))
    data = view(timeline)
    assert [one["bad"] for one in data["passes"]] == [
        "",
        "not well formed and another output",
        "",
        "",
    ]
    problem = timeline.steps[-1].problem
    strips = [one["strip"] for one in data["passes"]]
    assert f"well formed: no: {problem}" in strips[1]
    assert all("not well formed since breaks" in one for one in strips[2:])
    assert not any(problem in note for one in data["passes"] for note in one["kept"])
    for text in (text_table(data), static_html(data)):
        assert "not well formed since breaks" in text


def test_work_that_is_not_counted_has_no_number(data):
    flops = next(one for one in data["metrics"] if one["id"] == "flops")
    letters = {str(row[0]): row[4] for row in data["rows"]}
    assert {letters[row] for row in flops["values"]} == {"conv", "short"}
    assert "not counted" in flops["tip"]
