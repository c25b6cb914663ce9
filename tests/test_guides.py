"""The guides' pass and Tracer do what they say of themselves, on more programs than theirs."""

from __future__ import annotations

import json
import linecache
import operator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxlab
from fxlab.passes import as_pass, report

GUIDES = Path(__file__).resolve().parent.parent / "notebooks" / "guides"


def made_in(notebook: str, name: str) -> Any:
    """Run the one cell that defines a name, and return what it defines."""
    cells = json.loads((GUIDES / notebook).read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    marks = (f"@as_pass\ndef {name}(", f"class {name}(")
    (text,) = [text for text in texts if any(mark in text for mark in marks)]
    place = {"operator": operator, "torch": torch, "fxlab": fxlab, "as_pass": as_pass,
             "report": report}  # fmt: skip
    linecache.cache[notebook] = (len(text), None, text.splitlines(keepends=True), notebook)
    exec(compile(text, notebook, "exec"), place)
    return place[name]


@pytest.mark.parametrize("exponent", [2.0, True, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_guides_pass_leaves_an_exponent_alone_that_is_not_the_integer_two(exponent, dtype):
    gm = fxlab.symbolic_trace(lambda x: x**exponent)
    x = torch.tensor([1, 2, 3], dtype=dtype)
    before = gm(x)
    made_in("own_pass.ipynb", "square_to_product")(gm)
    assert operator.pow in [node.target for node in gm.graph.nodes]
    assert gm(x).dtype == before.dtype
    assert torch.equal(gm(x), before)


def test_the_guides_pass_changes_the_dtype_of_booleans_alone_and_the_check_says_so():
    def square(x):
        return x**2

    pass_ = made_in("own_pass.ipynb", "square_to_product")
    verdicts = {}
    for dtype in (torch.int64, torch.float32, torch.bool):
        gm = fxlab.symbolic_trace(square)
        with fxlab.record(gm, inputs=(torch.ones(3, dtype=dtype),)) as timeline:
            pass_(gm)
        verdicts[dtype] = timeline.passes[0].same_output["verdict"]
    assert verdicts == {torch.int64: "identical", torch.float32: "identical",
                        torch.bool: "different"}  # fmt: skip


def test_the_guides_tracer_answers_the_check_of_a_rank_and_no_other_branch():
    tracer = made_in("own_tracer.ipynb", "TakesChecks")

    def rank(x):
        if x.dim() != 4:
            raise ValueError
        return x * 2

    assert next(node.op for node in tracer().trace(rank).nodes) == "placeholder"
    for other in (
        lambda x: x if x.any() else -x,
        lambda x: x if x.sum() != 0 else -x,
        lambda x: x if x.dim() == 4 else -x,
    ):
        with pytest.raises(fxlab.TraceError):
            tracer().trace(other)
