"""Every error of the core, raised by the mistake that it teaches about.

`python -m tests.gallery` prints them all for a human to read; tests/test_gallery.py holds that each
has its parts. A case is a function without arguments that raises.
"""

from __future__ import annotations

import pickle
import types
import warnings
from collections.abc import Callable

import torch
from torch import nn

import fxlab
from fxlab import Graph, GraphModule

CASES: dict[str, Callable[[], object]] = {}


def case(fn: Callable[[], object]) -> Callable[[], object]:
    """Put a function into the gallery."""
    CASES[fn.__name__] = fn
    return fn


def trace(fn, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fxlab.symbolic_trace(fn, **options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.hidden = [nn.Linear(2, 2)]


@case
def a_branch_on_a_value():
    def forward(x):
        if x.sum() > 0:
            return x
        return -x

    trace(forward)


@case
def a_branch_on_a_setting():
    trace(lambda x, reverse: x.flip(0) if reverse else x)


@case
def a_branch_in_a_submodule():
    class Inner(nn.Module):
        def forward(self, x):
            return x if x.mean() > 0 else -x

    trace(nn.Sequential(Inner()))


@case
def a_loop_over_rows():
    trace(lambda x: [row + 1 for row in x])


@case
def a_star_call():
    trace(lambda x: x.view(*x.shape))


@case
def a_double_star_call():
    trace(lambda x, options: torch.sum(x, **options))


@case
def a_length():
    trace(lambda x: x / len(x))


@case
def a_range():
    def forward(x):
        for _ in range(x.size(0)):
            x = x + 1
        return x

    trace(forward)


@case
def an_int():
    trace(lambda x: x + int(x.max()))


@case
def a_float():
    trace(lambda x: x * float(x.mean()))


@case
def a_round():
    trace(lambda x: round(x.mean()))


@case
def a_membership():
    trace(lambda x: x if 3 in x else -x)


@case
def a_proxy_as_a_key():
    trace(lambda x: {x: 1})


@case
def an_attribute_deleted():
    def forward(x):
        del x.grad
        return x

    trace(forward)


@case
def a_module_in_a_plain_list():
    class M(Model):
        def forward(self, x):
            return self.hidden[0](x)

    trace(M())


@case
def a_parameter_of_nobody():
    w = nn.Parameter(torch.zeros(2))
    trace(lambda x: x + w)


@case
def a_wrapper_around_the_model():
    trace(nn.DataParallel(nn.Linear(2, 2)))


@case
def a_value_that_is_no_program():
    trace(3)


@case
def a_builtin_without_signature():
    trace(torch.relu)


@case
def concrete_args_of_another_name():
    trace(lambda x, n: x, concrete_args={"m": 1})


@case
def concrete_args_of_another_number():
    trace(lambda x, n: x, concrete_args=(1,))


@case
def a_proxy_of_an_earlier_trace():
    kept = types.SimpleNamespace()  # a list would be put back
    trace(lambda x: (setattr(kept, "x", x), x)[1])
    trace(lambda y: torch.add(y, kept.x))


@case
def a_traced_program_that_differs():
    trace(lambda x: x + 1 if isinstance(x, torch.Tensor) else x - 1, check=(torch.zeros(1),))


@case
def wrap_of_a_number():
    fxlab.wrap(3)


def chain():
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_function(torch.neg, (a,)))
    return graph, x, a


@case
def erasing_what_is_read():
    graph, _, a = chain()
    graph.erase_node(a)


@case
def erasing_from_another_graph():
    graph, _, _ = chain()
    graph.erase_node(chain()[2])


@case
def a_missing_comma():
    graph, x, _ = chain()
    graph.call_function(torch.relu, x)


@case
def a_function_by_its_name():
    graph, x, _ = chain()
    graph.call_function("relu", (x,))


@case
def an_unknown_opcode():
    Graph().create_node("call", torch.relu)


@case
def a_node_that_reads_itself():
    graph, _, a = chain()
    a.args = (a,)
    graph.lint()


@case
def a_value_used_before_it_is_made():
    graph, x, a = chain()
    a.append(x)
    graph.lint()


@case
def two_outputs():
    graph, x, _ = chain()
    graph.output(x)
    graph.lint()


@case
def a_module_that_is_not_there():
    gm = trace(nn.Sequential(nn.ReLU()))
    gm.graph.find_nodes(op="call_module")[0].target = "7"
    gm.graph.lint()


@case
def a_state_that_is_no_module():
    GraphModule(3, chain()[0])


@case
def a_lambda_in_a_pickle():
    gm = trace(nn.Sequential(nn.ReLU()))
    node = gm.graph.find_nodes(op="call_module")[0]
    node.op, node.target = "call_function", lambda x: x  # type: ignore[assignment]
    pickle.dumps(gm)


@case
def a_pattern_without_a_place():
    gm = trace(lambda x: torch.relu(x))
    fxlab.replace_pattern(gm, lambda x: x, lambda x: x)


@case
def a_pass_that_visits_its_own_insertions():
    gm = trace(lambda x: torch.relu(x))
    with fxlab.record(gm, max_growth=3):
        for node in gm.graph.nodes:
            if node.target is torch.relu:
                with gm.graph.inserting_after(node):
                    gm.graph.call_function(torch.relu, (node,))


def message(name: str) -> fxlab.FxlabError:
    """Return the error that a case raises."""
    try:
        CASES[name]()
    except fxlab.FxlabError as error:
        return error
    raise AssertionError(f"{name} raised nothing")


if __name__ == "__main__":
    for name in CASES:
        error = message(name)
        print(f"--- {name.replace('_', ' ')}: {type(error).__name__}\n{error}\n")
