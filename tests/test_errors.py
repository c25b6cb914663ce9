"""The texts of errors: composed in one place, with node, line, expectation and remedy."""

import pickle

import pytest
import torch

import fxlab
from fxlab.core import errors

KINDS = [v for v in vars(errors).values()
         if isinstance(v, type) and issubclass(v, errors.FxlabError)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_pickles_with_its_fields(kind):
    error = kind("what", node="%relu", where=(__file__, 1, "f"), expected="e", hint=["a", "b"],
                 wrong="x", right="y")  # fmt: skip
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.__dict__ == error.__dict__


def test_the_text_has_every_part_in_order():
    error = fxlab.RewriteError(
        "what happened", node="%relu", where=(__file__, 3, "f"), expected="this",
        hint=["one", "two"], wrong="a", right="b",
    )  # fmt: skip
    parts = ["what happened", "at node: %relu", f"at {__file__}:3, in f", "expected: this",
             "try 1: one", "try 2: two", "wrong:", "right:"]  # fmt: skip
    places = [str(error).index(part) for part in parts]
    assert places == sorted(places)


def test_a_hostile_repr_cannot_hide_an_error():
    class Bad:
        def __repr__(self):
            raise RuntimeError("boom")

    graph = fxlab.Graph()
    x = graph.placeholder("x")
    n = graph.call_function(torch.add, (x, Bad()))
    graph.call_function(torch.relu, (n,))
    with pytest.raises(fxlab.RewriteError, match="add"):
        graph.erase_node(n)


def test_the_call_site_is_the_users_line_also_for_folders_named_like_torch(tmp_path):
    folder = tmp_path / "torch_geometric" / "torch"
    folder.mkdir(parents=True)
    file = folder / "nn.py"
    file.write_text("def f(x):\n    return x.relu()\n")
    space = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    node = fxlab.symbolic_trace(space["f"]).graph.find_nodes(op="call_method")[0]
    assert node.meta["source"][0] == (str(file), 2, "f")
