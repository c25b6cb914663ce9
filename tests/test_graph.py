"""The IR: edits, order, users, listeners, undo, copies, dead code, text."""

import copy
import operator

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

import fxlab
from fxlab import Graph, LintError, RewriteError
from fxlab.explorer.undo import undo
from fxlab.passes.base import made_by
from tests.clocks import own_seconds, times_as_long


def chain(n=3):
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [x]
    for _ in range(n):
        nodes.append(graph.call_function(torch.relu, (nodes[-1],)))
    graph.output(nodes[-1])
    return graph, nodes


ARGUMENTS = {
    "flat": lambda a, b, c: ((a, b, 1, c, a), {}),
    "a list": lambda a, b, c: (([a, b, c, 2.0, a], 0), {}),
    "a list of lists": lambda a, b, c: (([a, [b, (c, a)], slice(a, None)], {"k": [a, c]}), {}),
    "keywords": lambda a, b, c: ((), {"tensors": [a, b, c], "out": a, "dim": 0}),
    "many": lambda a, b, c: (([a, b, c] * 10, a), {"k": {"a": (b, [c] * 20)}}),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("change", ["ab", "ad", "bd", "db", "aa"])
def test_rerouting_one_input_leaves_what_torch_fx_leaves(kind, change):
    def rerouted(module, by):
        graph = module.Graph()
        nodes = {name: graph.placeholder(name) for name in "abcd"}
        args, kwargs = ARGUMENTS[kind](*[nodes[name] for name in "abc"])
        call = graph.call_function(torch.cat, args, kwargs)
        graph.output(call)
        old, new = (nodes[name] for name in change)
        if by == "all":
            old.replace_all_uses_with(new)
        else:
            call.replace_input_with(old, new)
        graph.lint()
        users = [[user.name for user in node.users] for node in nodes.values()]
        return str((call.args, call.kwargs, call.all_input_nodes, users))

    for by in ("all", "one"):
        assert rerouted(fxlab, by) == rerouted(torch.fx, by)


def test_rerouting_the_inputs_of_one_node_one_by_one_is_no_slower_than_in_torch_fx():
    def seconds(module, n=600):
        graph = module.Graph()
        x = graph.placeholder("x")
        old, new = ([graph.call_function(torch.relu, (x,)) for _ in range(n)] for _ in range(2))
        graph.output(graph.call_function(torch.cat, (old,)))
        return own_seconds(
            lambda: [a.replace_all_uses_with(b) for a, b in zip(old, new, strict=True)]
        )

    assert times_as_long(lambda: seconds(fxlab), lambda: seconds(torch.fx)) < 1.1


def test_names_are_those_of_torch_fx():
    def build(module):
        g = module.Graph()
        wishes = (
            "relu relu relu_1 relu sum class a.b.c 1x x_5 x_5 x é _ _1 conv1 conv1 "
            "layer1.0.conv1 a-b x_05"
        ).split()
        wishes.append("")
        return [g.create_node("call_function", torch.relu, (), name=w).name for w in wishes]

    assert build(fxlab) == build(torch.fx)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet="ab_10.é if", max_size=6), max_size=20))
def test_any_sequence_of_wishes_gives_torch_fxs_names(wishes):
    names = []
    for module in (fxlab, torch.fx):
        g = module.Graph()
        names.append([g.create_node("call_function", torch.relu, (), name=w).name for w in wishes])
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0])


def test_users_and_inputs_follow_every_change_of_arguments():
    graph, (x, a, b, c) = chain()
    b.args = (x,)
    assert list(x.users) == [a, b] and not a.users and b.all_input_nodes == [x]
    c.kwargs = {"input": [a, {"k": slice(x, None)}]}
    assert c.all_input_nodes == [b, a, x] and c in x.users
    c.update_arg(0, a)
    c.update_kwarg("input", None)
    assert c.all_input_nodes == [a] and list(a.users) == [c] and not b.users
    c.insert_arg(0, x)
    assert c.args == (x, a)
    with pytest.raises(RewriteError, match="out of range"):
        c.insert_arg(9, x)
    graph.lint()


def test_reroute_rewrites_all_users_and_tells_which():
    graph, (x, a, b, _c) = chain()
    assert a.replace_all_uses_with(x) == [b]
    assert not a.users and b.args == (x,)
    graph.erase_node(a)
    graph.lint()
    assert x.meta["from"][0]["name"] == "relu"


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_users_can_be_given_a_value_instead_of_a_node(fx):
    for value in (5, None, "x", (1, [2.0]), torch.ones(2)):
        gm = fx.symbolic_trace(lambda x: (torch.relu(x) + 1, torch.abs(x)))
        _, relu, add, absolute, output = gm.graph.nodes
        assert relu.replace_all_uses_with(value) == [add]
        assert repr(add.args) == repr((value, 1)) and not relu.users
        add.replace_input_with(relu, 7)  # it is read no more
        assert repr(add.args) == repr((value, 1))
        absolute.replace_all_uses_with((relu, add), delete_user_cb=lambda user: user.op == "output")
        assert set(output.all_input_nodes) == {relu, add} and not absolute.users
        gm.graph.lint()
    output.replace_input_with(add, 3)
    gm.graph.erase_node(add)
    gm.recompile()
    x = torch.randn(3)
    first, (relued, three) = gm(x)
    assert first == 3 and torch.equal(relued, x.relu()) and three == 3


def test_a_node_that_was_built_from_what_it_replaces_can_be_left_alone():
    graph, (_x, a, _b, _c) = chain()
    with graph.inserting_after(a):
        new = graph.call_function(torch.neg, (a,))
    a.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    graph.lint()
    a.replace_all_uses_with(new)
    with pytest.raises(LintError, match="reads itself"):
        graph.lint()


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_erasing_a_node_twice_warns_and_does_nothing(fx):
    gm = fx.symbolic_trace(lambda x: (torch.relu(x), x.neg())[1])
    (relu,) = (node for node in gm.graph.nodes if node.target is torch.relu)
    gm.graph.erase_node(relu)
    with pytest.warns(UserWarning, match="erased"):
        gm.graph.erase_node(relu)
    assert [node.name for node in gm.graph.nodes] == ["x", "neg", "output"]
    gm.graph.lint()


@pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])
def test_changing_a_list_or_dict_of_a_node_is_a_type_error_as_in_torch_fx(fx):
    graph = fx.Graph()
    node = graph.call_function(torch.sum, ([1, 2],), {"how": {"a": 1}})
    for change in (lambda: node.args[0].append(3), lambda: node.kwargs["how"].update(b=2)):
        with pytest.raises(TypeError):
            change()
    assert node.args == ([1, 2],) and node.kwargs == {"how": {"a": 1}}


def test_torch_fx_s_own_lists_and_dicts_become_fxlab_s():
    from torch.fx.immutable_collections import immutable_dict, immutable_list

    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.sum, (x, immutable_list([0, 1])))
    node.kwargs = {"how": immutable_dict(a=immutable_list([1]))}
    assert type(node.args[1]) is type(node.kwargs["how"]["a"]) is fxlab.node.immutable_list
    graph.output(node)
    code = fxlab.GraphModule(torch.nn.Module(), graph).code
    assert "torch.sum(x, [0, 1], how = {'a': [1]})" in code


def test_erasing_a_node_that_is_read_is_refused_and_names_the_readers():
    graph, (_, a, _b, _c) = chain()
    with pytest.raises(RewriteError, match="relu_1") as info:
        graph.erase_node(a)
    assert isinstance(info.value, RuntimeError) and "replace_all_uses_with" in str(info.value)
    graph.lint()


def test_nodes_inserted_after_a_node_keep_their_order():
    graph, (x, _a, _, _) = chain()
    with graph.inserting_after(x):
        one = graph.call_function(torch.neg, (x,))
        two = graph.call_function(torch.neg, (one,))
    assert [n.name for n in graph.nodes][:3] == ["x", "neg", "neg_1"] and two.prev is one
    with graph.inserting_before(one):
        graph.call_function(torch.abs, (x,))
        with graph.inserting_before():
            graph.placeholder("first")
        graph.call_function(torch.abs, (x,))
    assert [n.name for n in graph.nodes][:5] == ["first", "x", "abs_1", "abs_2", "neg"]
    graph.lint()


def test_erasing_and_inserting_while_iterating_is_allowed():
    graph, _ = chain(5)
    for node in graph.nodes:
        if node.target is torch.relu:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    assert len(graph.nodes) == 2
    graph.lint()


def test_nodes_compare_by_their_place():
    graph, (x, a, b, c) = chain()
    assert x < a < b < c and sorted([c, a, x]) == [x, a, c]
    x.append(c)
    assert c < a
    for _ in range(200):
        with graph.inserting_after(x):
            n = graph.call_function(torch.neg, (x,))
        assert x < n < c
    assert sorted(graph.nodes) == list(graph.nodes)


def test_find_nodes_follows_edits():
    graph, (_x, a, b, _c) = chain()
    assert len(graph.find_nodes(op="call_function", target=torch.relu)) == 3
    a.target = torch.neg
    assert graph.find_nodes(op="call_function", target=torch.neg) == [a]
    b.replace_all_uses_with(a)
    graph.erase_node(b)
    assert b not in graph.find_nodes(op="call_function", target=torch.relu)
    assert [n.name for n in graph.find_nodes(op="placeholder")] == ["x"]


def test_arguments_are_immutable_and_say_how_to_change_them():
    graph, (x, *_rest) = chain()
    n = graph.call_function(torch.cat, ([x, x],), {"dim": 0})
    with pytest.raises(NotImplementedError, match=r"\[\*node.args\[0\], value\]"):
        n.args[0].append(x)
    with pytest.raises(NotImplementedError, match=r"\{\*\*node.kwargs, name: value\}"):
        n.kwargs["dim"] = 1
    new = list(n.args[0])
    new.append(x)
    n.args = (new,)
    assert n.args == ([x, x, x],) and type(n.args[0]) is not list


def test_arguments_nested_a_thousand_deep_need_no_recursion():
    graph, (x, *_) = chain()
    deep = x
    for _ in range(1500):
        deep = (deep,)
    n = graph.call_function(operator.getitem, (deep, 0))
    assert n.all_input_nodes == [x]
    m = graph.call_function(operator.getitem, ([1], 0))
    m.args = fxlab.map_arg(n.args, lambda node: node)
    assert m.all_input_nodes == [x]


EDITS = {
    "create": lambda g, n: g.call_function(torch.neg, (n[0],)),
    "erase": lambda g, n: g.erase_node(g.call_function(torch.neg, (n[0],))),
    "move": lambda g, n: n[0].append(n[0].next.next),
    "args": lambda g, n: setattr(n[2], "args", (n[0],)),
    "target": lambda g, n: setattr(n[1], "target", torch.neg),
    "type": lambda g, n: setattr(n[1], "type", torch.Tensor),
    "rename": lambda g, n: setattr(n[1], "name", "act"),
    "reroute": lambda g, n: n[1].replace_all_uses_with(n[0]),
}


@pytest.mark.parametrize("kind", EDITS)
def test_each_primitive_counts_tells_its_listeners_and_can_be_undone(kind):
    graph, nodes = chain()
    events = []
    version = graph.version
    text = str(graph)
    graph.add_listener(lambda *event: events.append(event))
    EDITS[kind](graph, nodes)
    assert graph.version > version
    assert events[-1][0] == kind and events[-1][1] is graph
    for event in reversed(list(events)):
        undo(event[0], graph, *event[2:])
    assert str(graph) == text
    graph.lint()


def test_without_a_listener_nothing_is_told_and_after_removal_no_more():
    graph, (x, *_) = chain()
    events = []
    listener = lambda *event: events.append(event)  # noqa: E731
    graph.add_listener(listener)
    graph.remove_listener(listener)
    graph.call_function(torch.neg, (x,))
    assert events == [] and not graph._watched


def test_a_copy_keeps_names_order_types_meta_and_user_attributes():
    graph, (x, a, *_) = chain()
    a.meta["note"] = "kept"
    a.tag = 7
    a.type = torch.Tensor
    x.name = "odd_name"
    new = copy.deepcopy(graph)
    assert str(new) == str(graph)
    b = list(new.nodes)[1]
    assert b.meta["note"] == "kept" and b.tag == 7 and b.id != a.id
    assert b.meta["from"][0]["id"] == a.id
    assert new.create_node("call_function", torch.relu, ()).name == "relu_3"
    new.erase_node(list(new.nodes)[-1])
    new.lint()


def test_graph_copy_and_node_copy_map_arguments():
    graph, _ = chain()
    host = Graph()
    y = host.placeholder("y")
    value = host.graph_copy(graph, {next(iter(graph.nodes)): y})
    host.output(value)
    host.lint()
    assert [n.name for n in host.nodes] == ["y", "relu", "relu_1", "relu_2", "output"]


def test_made_by_marks_the_nodes_of_one_thread():
    graph, (x, *_) = chain()
    with made_by("my_pass"):
        n = graph.call_function(torch.neg, (x,))
    assert n.meta["made_by"] == "my_pass"
    assert "made_by" not in graph.call_function(torch.neg, (x,)).meta


def test_bad_nodes_are_refused_with_what_is_expected():
    graph = Graph()
    with pytest.raises(RewriteError, match="callable"):
        graph.create_node("call_function", "relu", ())
    with pytest.raises(ValueError, match="a str"):
        graph.create_node("call_method", torch.relu, ())
    with pytest.raises(RewriteError, match="opcode"):
        graph.create_node("call_func", torch.relu, ())
    x = graph.placeholder("x")
    with pytest.raises(RewriteError, match="comma"):
        graph.call_function(torch.relu, x)
    other, (y, *_) = chain()
    with pytest.raises(RewriteError, match="another graph"):
        graph.erase_node(y)
    with pytest.raises(RewriteError):
        x.append(y)
    with pytest.raises(RewriteError), graph.inserting_before(y):
        pass
    assert len(other.nodes) == 5


def test_the_printed_table_holds_every_node():
    graph, _ = chain()
    text = graph.print_tabular(print_output=False)
    assert text.splitlines()[0].split() == ["opcode", "name", "target", "args", "kwargs"]
    assert len(text.splitlines()) == len(graph.nodes) + 2


def test_printing_is_torch_fxs_line_for_line():
    def f(x, y: torch.Tensor = None, k=3):
        return {"a": torch.cat([x, x], dim=k).relu(), "b": (x[0:2], x[..., None])}

    assert str(fxlab.symbolic_trace(f).graph) == str(torch.fx.symbolic_trace(f).graph)


def test_dead_code_goes_and_effects_stay():
    def f(x):
        y = x.clone()
        dead = y * 2  # noqa: F841
        y.add_(1)
        torch.neg(x, out=y)
        print("seen", end="")
        return y

    gm = fxlab.symbolic_trace(f)
    assert gm.graph.eliminate_dead_code()
    assert not gm.graph.find_nodes(op="call_function", target=operator.mul)
    assert gm.graph.find_nodes(op="call_method", target="add_")
    assert gm.graph.find_nodes(op="call_function", target=torch.neg)
    x = torch.ones(2)
    assert torch.equal(gm(x), f(x))
    assert not gm.graph.eliminate_dead_code()
    assert gm.graph.eliminate_dead_code(torch.fx.Node.is_impure)


def test_garbage_is_freed_without_waiting_for_a_cycle_of_weights():
    import gc
    import weakref

    gm = fxlab.symbolic_trace(torch.nn.Linear(2, 2))
    gm(torch.zeros(1, 2))
    ref = weakref.ref(gm)
    del gm
    gc.collect()
    assert ref() is None


def test_arguments_can_be_asked_for_in_the_order_of_the_signature():
    gm = fxlab.symbolic_trace(lambda x: torch.nn.functional.relu(inplace=False, input=x))
    (relu,) = gm.graph.find_nodes(op="call_function")
    (x,) = gm.graph.find_nodes(op="placeholder")
    found = relu.normalized_arguments(gm, normalize_to_only_use_kwargs=True)
    assert tuple(found) == ((), {"input": x, "inplace": False})
    assert x.normalized_arguments(gm) is None
