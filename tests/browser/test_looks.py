"""How the explorer looks: pictures kept as references, compared with a tolerance."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageFilter, ImageStat

from fxlab.explorer.page import write_html

HERE = Path(__file__).parent / "reference"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_explorer_looks_as_it_did(tab, timeline, tmp_path, scheme):
    """Fonts differ a little between machines, so blurred pictures are compared.

    FXLAB_UPDATE_REFERENCES=1 writes the references anew.
    """
    fuse = next(span for span in timeline.passes if span.name == "fuse_conv_bn")
    path = write_html(timeline, tmp_path / "s.html", step=fuse.first + 2, selection="stem_relu")
    page = tab.page
    page.set_viewport_size({"width": 1240, "height": 640})
    page.emulate_media(color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_selector(".fxl[data-ready]")
    taken = Image.open(io.BytesIO(page.locator(".fxl").screenshot())).convert("RGB")
    reference = HERE / f"explorer-{scheme}.png"
    if os.environ.get("FXLAB_UPDATE_REFERENCES") == "1":
        HERE.mkdir(exist_ok=True)
        taken.quantize(220).save(reference, optimize=True)
    kept = Image.open(reference).convert("RGB")
    assert abs(kept.width - taken.width) <= 4 and abs(kept.height - taken.height) <= 24
    size = (310, 160)
    blurred = [one.resize(size).filter(ImageFilter.GaussianBlur(3)) for one in (kept, taken)]
    difference = ImageStat.Stat(ImageChops.difference(*blurred))
    assert max(difference.mean) <= 6, difference.mean
