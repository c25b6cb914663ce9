"""A passed answer beside the kit's own pass: histories, edits, time."""

from __future__ import annotations

import pytest

from fxlab.core.errors import ExerciseError
from fxlab.core.purity import effect
from fxlab.teach import check, comparing


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(comparing, "NODES", 60)


def my_dce(gm):
    for node in reversed(list(gm.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not effect(node):
            gm.graph.erase_node(node)
    gm.graph.lint()


def test_both_histories_and_three_times_are_shown():
    found = check("2.2", my_dce).compare()
    assert found.edits == (2, 2)
    assert list(found.milliseconds) == ["yours", "the kit's", "torch.fx's"]
    assert all(ms > 0 for ms in found.milliseconds.values())
    for text in (repr(found), found._repr_html_()):
        assert "your pass: 2 edits" in text and "no grade" in text and "erases neg" in text
        assert "<script" not in text
    assert "my_dce" in found.yours.passes[0].name or found.yours.steps[0].where


def test_a_pass_that_takes_too_long_is_stopped_and_said_so(monkeypatch):
    monkeypatch.setattr(comparing, "SECONDS", 2.0)

    def slow(gm):
        my_dce(gm)
        while len(gm.graph.nodes) > 20:
            pass

    assert comparing.compare("2.2", slow).milliseconds["yours"] is None


@pytest.mark.parametrize("id", ["2.1a", "2.2", "2.3", "2.4"])
def test_the_kits_pass_runs_on_both_programs_as_an_answer_does(id):
    against = comparing.reference(id)
    from fxlab.teach.exercise import part

    entry = part(id)[1].entry
    for args in (against.small(), against.large(60)):
        before = len(args[0].graph.nodes)
        after = entry(against.kit, *args)
        assert len(after.graph.nodes) != before


def test_what_has_no_pass_to_compare_with_says_so():
    with pytest.raises(ExerciseError, match=r"1\.2: the kit has no pass"):
        comparing.compare("1.2", object)


def test_only_a_passed_answer_is_compared():
    with pytest.raises(ExerciseError, match="passed"):
        check("2.2", lambda gm: gm).compare()
