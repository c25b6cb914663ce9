"""Playing with passes: lists, edits, undo, and errors that cost nothing."""

import gc
import linecache

import ipywidgets
import pytest
import torch
from torch import nn

import fxlab
from fxlab.explorer.playground import edited, entry_of
from fxlab.passes import dce, fuse_conv_bn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)))


def relu_to_tanh(gm):
    """Edit in place: call tanh instead of relu."""
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh


def fails(gm):
    """Edit in place, then raise."""
    next(iter(gm.graph.nodes)).name = "renamed"
    raise ValueError("on purpose")


@pytest.fixture
def playground():
    return fxlab.Playground(Net().eval(), (torch.randn(1, 3, 8, 8),), [fuse_conv_bn])


def names(playground) -> list[str]:
    return [span.name for span in playground.timeline.passes]


def test_it_runs_its_passes_at_once(playground):
    assert names(playground) == ["trace", "fuse_conv_bn"]
    assert playground.error is None


def test_passes_are_added_moved_switched_off_and_removed(playground):
    playground.add("dce")
    playground.add(relu_to_tanh)
    assert names(playground)[1:] == ["fuse_conv_bn", "dce", "relu_to_tanh"]
    playground.move(2, -1)
    assert names(playground)[1:] == ["fuse_conv_bn", "relu_to_tanh", "dce"]
    playground.switch(0, False)
    assert names(playground)[1:] == ["relu_to_tanh", "dce"]
    playground.remove(1)
    assert playground.passes == ["dce"]


def test_a_closed_playground_leaves_no_widget_behind_and_a_run_closes_the_lines_before():
    kept = ipywidgets.widgets.widget._instances
    before = set(kept)
    playground = fxlab.Playground(Net().eval(), (torch.randn(1, 3, 8, 8),), [fuse_conv_bn])
    there = len(kept)
    for _ in range(3):
        playground.switch(0, False)
        playground.switch(0, True)
    assert len(kept) == there
    fxlab.explore(Net().eval()).close()
    playground.close()
    assert set(kept) == before


def test_undo_and_redo_go_through_the_changes(playground):
    playground.add(dce)
    playground.switch(0, False)
    playground.undo()
    assert names(playground)[1:] == ["fuse_conv_bn", "dce"]
    playground.undo()
    assert names(playground)[1:] == ["fuse_conv_bn"]
    playground.redo()
    assert names(playground)[1:] == ["fuse_conv_bn", "dce"]
    playground.add(relu_to_tanh)
    playground.redo()
    assert names(playground)[1:] == ["fuse_conv_bn", "dce", "relu_to_tanh"]


def test_the_text_of_an_edited_pass_is_known_as_long_as_the_pass_is():
    old = entry_of(relu_to_tanh)
    known = set(linecache.cache)
    new = edited(old, old.source.replace("torch.tanh", "torch.sigmoid"))
    with pytest.raises(ValueError, match="defines no function"):
        edited(new, "def another(gm):\n    pass\n")
    (place,) = linecache.cache.keys() - known
    assert "".join(linecache.getlines(place)) == new.source
    del new
    gc.collect()
    assert not linecache.cache.keys() - known


def test_an_edited_pass_runs_and_its_history_is_compared_with_the_old_one(playground):
    playground.add(relu_to_tanh)
    source = playground._state.entries[1].source
    playground.edit(1, source.replace("torch.tanh", "torch.sigmoid"))
    assert playground.error is None
    last = playground.timeline.steps[-1]
    assert "sigmoid" in last.sentence
    assert "sigmoid" in playground.timeline.source_of(last.where[0])[1].text
    assert "sigmoid" in str(playground.difference)


@pytest.mark.parametrize("text", ["def relu_to_tanh(gm:", "x = 1", "def other(gm): pass"])
def test_a_text_that_is_no_pass_is_refused_and_changes_nothing(playground, text):
    playground.add(relu_to_tanh)
    before = playground.timeline
    playground.edit(1, text)
    assert playground.error is not None
    assert playground.timeline is before


def test_a_pass_that_raises_leaves_the_last_good_story_and_says_why(playground):
    before = playground.timeline
    playground.add(fails)
    assert playground.timeline is before
    assert isinstance(playground.error, ValueError)
    assert "on purpose" in playground._message.value
    playground.undo()
    assert playground.error is None


def test_a_message_is_text_whatever_the_error_says(playground):
    def odd(gm):
        raise ValueError("<img src=x onerror=alert(1)>")

    playground.add(odd)
    assert "&lt;img src=x" in playground._message.value
    assert "<img" not in playground._message.value


def test_an_interrupted_pass_leaves_the_last_good_story(playground):
    def endless(gm):
        raise KeyboardInterrupt

    before = playground.timeline
    playground.add(endless)
    assert playground.timeline is before
    assert isinstance(playground.error, KeyboardInterrupt)


def test_models_are_chosen_by_name():
    x = torch.randn(2, 3)
    playground = fxlab.Playground({"relu": nn.ReLU(), "linear": (nn.Linear(3, 2), (x,))})
    assert playground.timeline.title == "ReLU"
    playground.choose("linear")
    assert playground.timeline.title == "Linear"
    assert playground._model.value == "linear"


def test_the_story_is_exported_as_a_page(playground, tmp_path):
    assert "fuse_conv_bn" in playground.export(tmp_path / "p.html").read_text()


def test_the_controls_do_what_the_methods_do(playground):
    box = playground._list.children[0].children[0]
    assert isinstance(box, ipywidgets.Checkbox)
    box.value = False
    assert playground.passes == []
    playground._kinds.value = "dce"
    next(b for b in playground._bar.children if getattr(b, "description", "") == "add").click()
    assert playground.passes == ["dce"]
    next(b for b in playground._bar.children if getattr(b, "description", "") == "undo").click()
    assert playground.passes == []
