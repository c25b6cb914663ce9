"""3.2: does the pass fold each batch norm that may be folded, and leave alone those that may not?

The program afterwards must compute what it did before, in float64 and with statistics as if
trained, keep as many batch norms as the kit's own ``fuse_conv_bn`` keeps (paper, section 6.2.2),
and leave the model that was traced as it was. Each neighbourhood of a convolution and a batch norm
is one behaviour.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import module_calls
from fxlab.passes.fuse import NORMS, fuse_conv_bn
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import edited, run, unequal
from fxlab.teach.programs import fill, layer, programs

PLAIN, READER, SHARED = "plain pairs", "a second reader", "a shared convolution"
BATCH, NO_PAIR, COMMON = "statistics of the batch", "no pair", "a shared batch norm"
MODEL, ANY = "the model is left as it was", "any program"
Wiring = Callable[..., Any]


class Net(nn.Module):
    """Two convolutions and three batch norms, wired as a case asks."""

    def __init__(self, wiring: Wiring, width: int = 2, **options: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, **options)
        self.bn2 = nn.BatchNorm2d(width, affine=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.wiring = wiring

    def forward(self, x: torch.Tensor) -> Any:
        """Run the layers as ``wiring`` says; f64[n, width, h, w] in and out."""
        return self.wiring(self, x)


def net(wiring: Wiring, training: bool = False, **options: Any) -> tuple[GraphModule]:
    """Return the traced Net in float64, with numbers as if trained, as the arguments of a case."""
    model = fill(Net(wiring, **options)).double().train(training)
    return (symbolic_trace(model).train(training),)


def entry(answer: Any, gm: GraphModule) -> dict[str, GraphModule]:
    """Run the pass.

    Returns:
        {"program": the edited program, "model": the program over the modules that were given}
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    model = GraphModule(gm, graph)
    return {"program": edited(answer, gm), "model": model}


def norms(gm: GraphModule) -> list[Node]:
    """Return the calls of batch norms, in graph order."""
    calls = (n for n in gm.graph.nodes if n.op == "call_module")
    return [n for n in calls if isinstance(gm.get_submodule(str(n.target)), NORMS)]


def _judge(args: tuple[Any, ...], value: Any) -> Finding | None:
    (given,) = args
    program = value["program"]
    right = fuse_conv_bn(copy.deepcopy(given))
    layers = (m for m in given.modules() if isinstance(m, (*NORMS, nn.Conv2d)))
    widths = [m.in_channels if isinstance(m, nn.Conv2d) else m.num_features for m in layers]
    inputs = [torch.randn(2, widths[0] if widths else 3, 5, 5, dtype=torch.float64)]
    if text := _different(given, program, inputs):
        return Finding(_why(given, program, right) or text, expected=right, actual=program)
    wanted = {bn.name for bn in norms(right)}
    kept = [bn for bn in norms(program) if bn.name not in wanted]
    if kept:
        bn = next((n for n in kept if not n.users), kept[0])
        why = "nobody reads it any more: erase it"
        if bn.users:
            conv = bn.all_input_nodes[0].name
            why = f"it may be folded: {conv} is a convolution that only {bn.name} reads"
        return Finding(
            f"{bn.name} is still there, and {why}", node=bn.name, expected=right, actual=program
        )
    return None


def _different(given: GraphModule, program: GraphModule, inputs: list[torch.Tensor]) -> str:
    """Say how outputs differ, or the running statistics that a call leaves behind; else ""."""
    before = {name: value.clone() for name, value in given.state_dict().items()}
    one, other = run(given, inputs), run(program, inputs)
    if text := unequal(one["output"], other["output"], 1e-9):
        return text
    for name, value in one["state"].items():
        if not torch.equal(value, before[name]):
            now = other["state"].get(name)
            if now is None:
                return f"each call updates {name}, which is gone: in train mode leave it alone"
            if text := unequal(value, now, 1e-9, f"{name} after the call"):
                return text
    return ""


def _why(given: GraphModule, program: GraphModule, right: GraphModule) -> str:
    """Say what was folded that may not be, or how two folds got in each other's way; else ""."""
    calls = module_calls(given)
    left, keep = ({n.name for n in norms(gm)} for gm in (program, right))
    gone = [n for n in norms(given) if n.name not in left]
    for bn in gone:
        if bn.name not in keep:
            continue
        norm, source = given.get_submodule(str(bn.target)), bn.all_input_nodes[0]
        if norm.training or norm.running_mean is None:
            return (
                f"{bn.name} is folded, and it uses the statistics of the batch at hand, which "
                "nobody knows before"
            )
        called = source.op == "call_module" and given.get_submodule(str(source.target))
        if not isinstance(called, nn.Conv2d):
            what = type(called).__name__ if called else source.op
            return (
                f"{bn.name} is folded, and what it reads, {source.name}, is no convolution: {what}"
            )
        if len(calls[str(source.target)]) > 1:
            return (
                f"{bn.name} is folded into {source.target}, which is called "
                f"{len(calls[str(source.target)])} times: the one weight can't be right for all "
                "calls, so leave it alone"
            )
        if len(source.users) > 1:
            others = ", ".join(user.name for user in source.users if user is not bn)
            return (
                f"{bn.name} is folded into {source.name}, which {others} also reads, and wants "
                "without the batch norm: leave it alone"
            )
    for bn in gone:
        if bn.all_input_nodes[0] in gone:
            return (
                f"{bn.name} stands behind {bn.all_input_nodes[0].name}: when it is folded, the "
                "convolution has new weights already. Look the layer up anew for each fold, with "
                "gm.get_submodule"
            )
    return ""


def _judge_model(args: tuple[Any, ...], value: Any) -> Finding | None:
    (given,) = args
    for name, tensor in given.state_dict().items():
        now = value["model"].state_dict().get(name)
        if now is None or unequal(tensor, now, 0.0):
            return Finding(
                f"{name} of the model that was traced is changed: its modules are shared with the "
                "program. Put a new module in the place of the old one (gm.set_submodule), and "
                "write into no tensor",
            )
    return _judge(args, value)


# The wirings are functions of (net, x), so that one class serves all cases.


def _pair(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.conv1(x))


def _two_pairs(net: Net, x: torch.Tensor) -> Any:
    return net.bn2(net.conv2(net.relu(net.bn1(net.conv1(x)))))


def _in_reverse(net: Net, x: torch.Tensor) -> Any:
    # The nodes of the two pairs stand interleaved: who reads whom is what counts.
    one, other = net.conv1(x), net.conv2(x)
    return net.bn1(other) + net.bn3(one)


def _by_keyword(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(input=net.conv1(x))


def _second_reader(net: Net, x: torch.Tensor) -> Any:
    y = net.conv1(x)
    return net.bn1(y) + y


def _returned_too(net: Net, x: torch.Tensor) -> Any:
    y = net.conv1(x)
    return net.bn1(y), y


def _called_twice(net: Net, x: torch.Tensor) -> Any:
    return net.bn3(net.conv1(net.bn1(net.conv1(x))))


def _one_call_without(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.conv1(x)) + torch.relu(net.conv1(x))


def _relu_between(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.relu(net.conv1(x)))


def _norm_first(net: Net, x: torch.Tensor) -> Any:
    return net.conv1(net.bn1(x))


def _method_between(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.conv1(x).abs())


def _common(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.conv1(x)) + net.bn1(net.conv2(x))


def _common_once(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.conv1(x)) + net.bn1(x)


def _cases() -> Iterator[Case | Property]:
    for behaviour, title, wiring, options in (
        (PLAIN, "one pair", _pair, {}),
        (PLAIN, "two pairs, one without bias, one without gamma and beta", _two_pairs, {}),
        (PLAIN, "two pairs whose nodes stand interleaved", _in_reverse, {}),
        (PLAIN, "a call with a keyword argument", _by_keyword, {}),
        (READER, "the convolution is added to its batch norm", _second_reader, {}),
        (READER, "the convolution is returned, too", _returned_too, {}),
        (SHARED, "one convolution, called twice, two batch norms", _called_twice, {}),
        (SHARED, "one convolution, called twice, one batch norm", _one_call_without, {}),
        (BATCH, "no running statistics", _pair, {"track_running_stats": False}),
        (BATCH, "train mode", _pair, {"training": True}),
        (NO_PAIR, "the batch norm reads the input", _norm_first, {}),
        (NO_PAIR, "a ReLU stands between", _relu_between, {}),
        (NO_PAIR, "a method stands between", _method_between, {}),
        (COMMON, "one batch norm behind two convolutions", _common, {}),
        (COMMON, "one batch norm, only one of its calls behind a convolution", _common_once, {}),
    ):
        make = lambda wiring=wiring, options=options: net(wiring, **options)  # noqa: E731
        yield Case(behaviour, title, make, _judge)
    for title, wiring in (("one pair", _pair), ("two pairs", _two_pairs)):
        yield Case(MODEL, title, lambda wiring=wiring: net(wiring), _judge_model)
    yield Property(NO_PAIR, "any chain of layers", _chains, _judge, examples=15)
    yield Property(ANY, "layers in any order, some called again", _webs, _judge, examples=25)


def _chains() -> Any:
    """Make a strategy of chains: each value is read once, each layer called once."""
    from hypothesis import strategies as st

    def build(kinds: list[str]) -> tuple[GraphModule]:
        graph, root = Graph(), nn.Module()
        value = graph.placeholder("x")
        for k, kind in enumerate(kinds):
            root.add_module(f"{kind}{k}", layer(kind, seed=k))
            value = graph.call_module(f"{kind}{k}", (value,))
        graph.output(value)
        return (GraphModule(root.double().eval(), graph).eval(),)

    return st.lists(st.sampled_from(["bn", "conv", "relu"]), min_size=2, max_size=6).map(build)


def _webs() -> Any:
    layers = ("conv", "bn", "conv", "bn", "relu")
    strategy = programs(most=6, shape="image", layers=layers, shared=True)
    return strategy.map(lambda gm: (gm.double(),))


EXERCISE = Exercise(
    id="3.2",
    title="The fusion pass, including the four cases that must be left alone",
    level=3,
    minutes=45,
    idea="The algebra is in the modules, which pairs may be folded is in the graph: a pass needs "
    "both, and most of it is saying no (section 6.2.2).",
    needs=("fold", "fuse", "state of a GraphModule", "reroute", "erase", "reader"),
    teaches=("shared module",),
    hints=(
        "Lecture 07, 'The pass', steps through the four edits of one pair, and 'What must be left "
        "alone' has a reason for each that stays. The question before each fold: would anybody "
        "notice that the convolution's value, or its weights, are others now?",
        "For each call of a batch norm, over a list of the nodes: find the node that it reads. Go "
        "on to the next unless that is a call of a Conv2d, this call is its only reader, the "
        "convolution's path is called once in the whole graph, and the batch norm has running "
        "statistics and is in eval mode. Then: new layer, set_submodule, reroute, erase.",
        "How often a path is called, on another example: Counter(n.target for n in gm.graph.nodes "
        "if n.op == 'call_module')['act'] is the number of calls of self.act. Count before you "
        "begin to erase. And fold_conv_bn(conv, bn), which you may call, gives a new layer.",
    ),
    asks=(
        "fxlab.passes.fuse.fuse_conv_bn",
        "fxlab.passes.optimize.optimize_for_inference",
        "torch.fx.experimental.optimization.fuse",
        "torch.fx.experimental.optimization.optimize_for_inference",
    ),
    parts=(
        Part(
            id="3.2",
            name="my_fuse",
            points={
                PLAIN: 3,
                READER: 2,
                SHARED: 2,
                BATCH: 2,
                NO_PAIR: 1,
                COMMON: 1,
                MODEL: 1,
                ANY: 1,
            },
            entry=entry,
            cases=_cases,
            wrong={
                "no_readers": "also reads, and wants without the batch norm",
                "no_calls": "the one weight can't be right for all calls",
                "train_mode": "uses the statistics of the batch at hand",
                "node_before": "is no convolution",
                "in_place": "of the model that was traced is changed",
                "not_erased": "nobody reads it any more: erase it",
                "module_gone": "fails lint",
                "positional": "IndexError",
                "old_layer": "Look the layer up anew",
            },
            stub="def my_fuse(gm):\n"
            '    """Edit ``gm`` in place: fold each batch norm into the Conv2d before it.\n'
            "\n"
            "    It is left alone where folding would be wrong. The program computes the same\n"
            "    afterwards; the traced model's own modules and tensors are left as they were.\n"
            '    """',
        ),
    ),
)
