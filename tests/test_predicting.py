"""Predict mode: what fits a guess, and what a copy without a kernel may show."""

from __future__ import annotations

import pytest
import torch

import fxlab
from fxlab.passes import dce
from fxlab.teach import predict


def clamp_relu(gm):
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            with gm.graph.inserting_after(node):
                clamp = gm.graph.call_function(torch.clamp, (node,), {"max": 1})
            node.replace_all_uses_with(
                clamp, delete_user_cb=lambda user, new=clamp: user is not new
            )


def recorded(pass_, program):
    gm = fxlab.symbolic_trace(program)
    with fxlab.record(gm) as timeline:
        pass_(gm)
    return timeline


def test_a_guess_is_an_edit_of_a_row_and_a_right_one_goes_on():
    shown = predict(recorded(clamp_relu, lambda x: torch.relu(x).neg()))
    assert shown.guess("erase", "relu").startswith("Not next. What comes: ") and shown.step == 0
    assert shown.guess("create", "clamp").startswith("Yes: ") and shown.step == 1
    assert shown.guess("reroute", "relu").startswith("Yes: ") and shown.step == 2
    assert shown.guess("erase", "relu") == "This was the last step."


def test_any_edit_of_the_same_match_fits_and_one_of_a_later_match_does_not():
    timeline = recorded(clamp_relu, lambda x: torch.relu(torch.relu(x)))
    assert predict(timeline).guess("reroute", "relu").startswith("Yes: ")
    assert predict(timeline).guess("create", "clamp_1").startswith("Not next")


def test_neither_text_nor_static_copy_tell_what_comes():
    shown = predict(recorded(dce, lambda x: (torch.relu(x).neg(), x + 1)[1]))
    for text in (repr(shown), shown.static_html()):
        assert "erases" not in text and "What comes next?" in text
    shown.step = 1
    assert "step 1" in repr(shown) and "neg" not in repr(shown)


def test_an_explorer_may_be_given_and_an_unknown_edit_is_refused():
    shown = predict(fxlab.explore(lambda x: torch.relu(x)))
    assert shown.predict and shown.guess("create", "x").startswith("Yes: ")
    with pytest.raises(ValueError, match="create, reroute"):
        shown.guess("delete", "x")
