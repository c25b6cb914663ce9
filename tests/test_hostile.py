"""Whatever a model is called, its texts stay texts: in pages, pictures, tables and a terminal.

Programs are generated whose names, functions, arguments, modules and reports hold markup, quotes,
line ends, escape sequences and what else parsers trip over. An output must then have the elements
that it has for a harmless program, and nothing else. ``FXLAB_FUZZ_MINUTES=10`` looks longer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxlab
from fxlab import evidence
from fxlab.explorer import timeline_of
from fxlab.explorer.diagram import graph_dot, layout_program, render
from fxlab.explorer.drawing import Story, still_svg
from fxlab.explorer.page import html_page
from fxlab.explorer.static import static_html, text_table
from fxlab.explorer.view import view
from fxlab.passes import report

MINUTES = float(os.environ.get("FXLAB_FUZZ_MINUTES", "0"))
PIECES = [
    "<script>alert(1)</script>", "</script>", "<img src=x onerror=alert(1)>", "<!--", "-->", "]]>",
    "<svg onload=alert(1)>", '" onmouseover="alert(1)', "' onclick='alert(1)", "</title>",
    "javascript:alert(1)", "&lt;b&gt;", "&#60;b&#62;", "\\n", "\\", "\\N\\G", "`", "```", "|", "**",
    "[a](b)", "$x$", "{{7*7}}", "%s%n", "\n", "\r\n", "\t", "\x00", "\x07", "\x1b[31m",
    "\x1b]0;t\x07", "\x9b31m", "\u202e", "\u2028", "\ud800", "\ufeff", "é", "名", "\U0001f600",
    " " * 50, "x" * 500, "-->]]></style>", "</text>", "]]",
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join),
    st.text(max_size=20),
)


# What moves a terminal's cursor, or turns the direction in which a line is read.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Tags(HTMLParser):
    """The elements of an HTML text, and the names of their attributes, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.scripts += tag == "script"
        self.attributes |= {name for name, _ in attrs}
        for _, value in attrs:
            assert not (value or "").strip().lower().startswith("javascript:")


class Harmless(nn.Module):
    """Has what the generated programs have, under plain names."""

    def __init__(self, module: str = "plain") -> None:
        super().__init__()
        while hasattr(self, module):  # a module is not called as a method is
            module += "_"
        self.add_module(module, nn.ReLU())


def program(words: list[str]) -> fxlab.GraphModule:
    """Make a program that says each of five words in another place."""
    module, node, function, key, value = words
    root = Harmless(module.replace(".", "_") or "m")

    def custom(x: Any, **options: Any) -> Any:
        return x

    custom.__name__ = custom.__qualname__ = function
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    x = graph.call_module(next(iter(root._modules)), (x,))
    x = graph.create_node("call_function", torch.relu, (x,), {}, node or "n")
    x = graph.call_function(custom, (x, value), {key: value})
    graph.output(x)
    gm = fxlab.GraphModule(root, graph, class_name="M")
    gm.graph.lint()
    return gm


def story(words: list[str]) -> Any:
    """Record a pass over that program, whose report and sentence say the words too."""

    def pass_(gm: Any) -> None:
        node = next(n for n in gm.graph.nodes if n.target is torch.relu)
        node.target = torch.tanh
        node.name = words[3] or "renamed"
        report(gm, "pass_", [words[0]], [words[1]])

    pass_.__name__ = words[2]
    return timeline_of(program(words), [pass_])


PLAIN = ["module", "node", "function", "key", "value"]


@pytest.fixture(scope="module")
def plain() -> dict[str, Tags]:
    """The elements of each output for a harmless program."""
    data = view(story(PLAIN))
    return {"page": Tags(html_page(data)), "copy": Tags(static_html(data))}


def elements_of(svg: str) -> tuple[set[str], set[str]]:
    """Name the elements of an SVG text and their attributes; it must be well-formed XML."""
    found = list(ElementTree.fromstring(svg.encode("utf-8", "replace")).iter())
    return {e.tag for e in found}, {name for e in found for name in e.attrib}


def check(words: list[str], plain: dict[str, Tags]) -> None:
    """Write everything that can be written of such a program, and look at it as a reader would."""
    timeline = story(words)
    data = view(timeline)
    for name, text in (("page", html_page(data)), ("copy", static_html(data))):
        tags = Tags(text)
        assert tags.elements <= plain[name].elements, name
        assert tags.attributes <= plain[name].attributes, name
        assert tags.scripts == plain[name].scripts, name
    usual = elements_of(still_svg(Story(view(story(PLAIN))), 1))
    found = elements_of(still_svg(Story(data), 1))
    assert found[0] <= usual[0] and found[1] <= usual[1]
    assert not CONTROL.search(text_table(data))
    again = json.loads(timeline.to_json())
    assert fxlab.Timeline.from_json(json.dumps(again)).to_json() == timeline.to_json()
    rows = [{"a": words[0], words[1]: words[2]}]
    lines = evidence.markdown(rows).splitlines()
    assert len(lines) == 3 and not any("<" in line.replace("&lt;", "") for line in lines)
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines} == {len(rows[0]) + 1}


five = st.lists(texts, min_size=5, max_size=5)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(five)
def test_no_text_of_a_model_becomes_markup_or_moves_the_cursor(plain, words):
    check(words, plain)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MINUTES, reason="looks as long as FXLAB_FUZZ_MINUTES says")
def test_no_text_found_in_minutes_does_either(plain):
    end = time.monotonic() + 60 * MINUTES
    chosen = settings(max_examples=100, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
    rounds = 0
    while time.monotonic() < end:
        chosen(given(five)(lambda words: check(words, plain)))()
        rounds += 1
    assert rounds


@pytest.mark.parametrize("name", ["__name__", "__qualname__", "__code__", "__wrapped__", "func"])
def test_a_submodule_is_not_taken_for_what_python_keeps_under_its_name(name):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, name)(x)

    timeline = timeline_of(Net(), [fxlab.passes.dce], (torch.ones(2),))
    assert timeline.failure is None and timeline.title == "Net"
    assert timeline.passes[-1].same_output["verdict"] == "identical"
    assert fxlab.Timeline.from_json(timeline.to_json()).title == "Net"


@pytest.mark.skipif(layout_program() is None, reason="needs a graphviz program")
@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_the_classic_picture_has_one_box_for_each_node_whatever_it_is_called(piece):
    gm = program([piece] * 5)
    svg = render(graph_dot(gm))
    root = ElementTree.fromstring(svg.encode())
    boxes = [e for e in root.iter() if e.get("class") == "node"]
    assert len(boxes) == len(gm.graph.nodes)
    assert {e.tag.rpartition("}")[2] for e in root.iter()} <= {
        "svg", "g", "title", "polygon", "path", "text", "ellipse",
    }  # fmt: skip


def test_a_page_says_in_its_head_that_only_its_own_script_may_run():
    page = html_page(view(story(PLAIN)))
    head = page.index("<head>")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy.start() - head < 200
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";") if " " in rule.strip())
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]


def test_a_terminal_gets_no_escape_sequence_from_a_model(tmp_path):
    source = (
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.add_module('a\\x1b[31mred', nn.ReLU())\n\n"
        "    def forward(self, x):\n        return next(self.children())(x)\n"
    )
    (tmp_path / "net.py").write_text(source)
    for command in (
        ["show", "net.py:Net"],
        ["trace", "net.py:Net", "--graph"],
        ["trace", "net.py:Net"],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "fxlab.cli", *command],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "\x1b" not in ran.stdout + ran.stderr, command
