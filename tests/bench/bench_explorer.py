"""The explorer's bars, on real timelines in a real Chromium; medians.

Run as ``python tests/bench/bench_explorer.py``. Key press to paint is from the event to the frame
after it; first paint is Python's share (view, packing, static copy, widget) plus the browser's,
from the story's bytes to the first frame. Without Chromium only Python's share is measured.
"""

from __future__ import annotations

import base64
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fxlab
from fxlab.explorer.lanes import layout
from fxlab.explorer.page import html_page
from fxlab.explorer.static import static_html
from fxlab.explorer.view import pack, view
from fxlab.explorer.widget import Explorer
from fxlab.models import resnet50
from fxlab.passes import fuse_conv_bn

torch.set_num_threads(1)
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PAINT = """async (key) => {
  const grid = document.querySelector(".f-grid"), times = [];
  grid.focus();
  for (let k = 0; k < 40; k++) {
    const start = performance.now();
    grid.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = done;
      channel.port2.postMessage(0);
    }));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[20];
}"""
# Opens the story again in the page, from its bytes to the frame after it is ready.
OPEN = """async () => {
  const times = [];
  for (let k = 0; k < 7; k++) {
    const root = document.createElement("div");
    root.className = "fxl";
    document.body.prepend(root);
    const start = performance.now();
    await window.openStory(root);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - start);
    root.remove();
  }
  return times.sort((a, b) => a - b)[3];
}"""


def chain(count: int, swaps: int) -> fxlab.Timeline:
    """A story of `count` nodes in which `swaps` of them are replaced, three steps each."""
    graph = fxlab.Graph()
    last = earlier = graph.placeholder("x")
    for k in range(count - 2):
        if k % 9 == 8:
            last, earlier = graph.call_function(torch.add, (last, earlier)), last
        else:
            last = graph.call_function(torch.relu, (last,))
    graph.output(last)
    gm = fxlab.GraphModule(nn.Module(), graph)
    with fxlab.record(gm) as timeline:
        for node in [n for n in gm.graph.nodes if n.target is torch.relu][:swaps]:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.gelu, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    return timeline


def fusion() -> fxlab.Timeline:
    """ResNet-50's batch norms folded into its convolutions."""
    gm = fxlab.symbolic_trace(resnet50().eval())
    with fxlab.record(gm) as timeline:
        fuse_conv_bn(gm)
    return timeline


def median_ms(work, repeats: int = 7) -> float:
    """Milliseconds of one call, the median of several."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def line(what: str, value: float, unit: str, bar: str) -> None:
    """Print one measurement beside its bar."""
    print(f"{what:<58} {value:9.1f} {unit:<3} {bar}")


def saved_bytes(explorer: Explorer) -> int:
    """What one explorer adds to a saved notebook, with its two outputs."""
    total = 0
    for value in explorer.get_state().values():
        total += (
            len(base64.b64encode(value)) if isinstance(value, bytes) else len(json.dumps(value))
        )
    data, _ = explorer._repr_mimebundle_()
    return total + len(json.dumps(data))


def in_browser(stories: dict[str, fxlab.Timeline]) -> None:
    """Measure key to paint and first paint in Chromium."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        print("no Chromium here (apt-get install chromium): nothing measured in a browser")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        for name, timeline in stories.items():
            data = view(timeline)
            page = browser.new_page(viewport={"width": 1240, "height": 760}, bypass_csp=True)
            path = Path(folder) / "story.html"
            path.write_text(html_page(data), encoding="utf-8")
            script = path.read_text(encoding="utf-8")
            at = script.index("open(root, story.dataset.story, ")
            again = "window.openStory = (to) => open(to, story.dataset.story, { step: 0 });\n"
            script = script[:at] + again + script[at:]
            start = script.index('<meta http-equiv="Content-Security-Policy"')
            path.write_text(script[:start] + script[script.index(">", start) + 1 :], "utf-8")
            page.goto(path.as_uri())
            page.wait_for_selector("[data-ready]")
            line(f"{name}: bytes to first paint, in the browser", page.evaluate(OPEN), "ms", "")
            line(
                f"{name}: key to paint, from the start",
                page.evaluate(PAINT, "ArrowRight"),
                "ms",
                "",
            )
            page.keyboard.press("End")
            line(f"{name}: key to paint, from the end", page.evaluate(PAINT, "ArrowLeft"), "ms", "")
            page.close()
        browser.close()


def main() -> None:
    """Print every measurement."""
    rows = [[row - 1] if row else [] for row in range(10_000)]
    line("lanes of 10,000 rows", median_ms(lambda: layout(rows)), "ms", "bar 30")
    story = fusion()
    story.check_all()

    def python_share() -> None:
        data = view(story)
        pack(data)
        static_html(data)

    line("ResNet-50's fusion: view, packing, static copy", median_ms(python_share), "ms", "")
    line("ResNet-50's fusion: a whole Explorer", median_ms(lambda: Explorer(story)), "ms", "")
    small = chain(200, 10)
    size = saved_bytes(Explorer(small))
    line(f"20 explorers of 200 nodes x {len(small)} steps", 20 * size / 1e6, "MB", "bar 3")
    stories = {
        "ResNet-50's fusion": story,
        "500 nodes": chain(500, 100),
        "5,000 nodes": chain(5_000, 1_000),
        "10,000-node chain": chain(10_000, 10),
    }
    print("bars: first paint 400 ms (ResNet-50, both shares), 1,000 ms (5,000 nodes);")
    print("      key to paint 50 ms (500 nodes), 100 ms (5,000 nodes)")
    in_browser(stories)


if __name__ == "__main__":
    main()
