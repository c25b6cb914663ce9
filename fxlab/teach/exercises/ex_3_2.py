"""3.2: does the pass fold each batch norm that may be folded, and leave alone those that may not?

The program afterwards must compute what it did before, in float64 and with statistics as if
trained, keep as many batch norms as the kit's own ``fuse_conv_bn`` keeps (paper, section 6.2.2),
and leave the model that was traced as it was. Each neighbourhood of a convolution and a batch norm
is one behaviour. A graded course draws which layer it is that stands before the batch norm.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import module_calls
from fxlab.passes.fuse import NORMS, fuse_conv_bn
from fxlab.passes.shape_prop import shape_prop
from fxlab.teach.comparing import Reference
from fxlab.teach.exercise import Case, Exercise, Finding, Part, Property
from fxlab.teach.judge import edited, run, unequal
from fxlab.teach.programs import SHAPES, fill, layer, programs
from fxlab.teach.variants import forms

PLAIN, READER, SHARED = "plain pairs", "a second reader", "a shared convolution"
BATCH, NO_PAIR, COMMON = "statistics of the batch", "no pair", "a shared batch norm"
MODEL, ANY = "the model is left as it was", "any program"
Wiring = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """Which pair is folded.

    Attributes:
        layer: The layer before the batch norm.
        norm: The batch norm.
        word: What the layer is called in a sentence.
        shape: Of the generated programs, a key of `SHAPES`.
        make: Makes the layer: (width, bias) -> layer that keeps the shape.
    """

    layer: type[nn.Module]
    norm: type[nn.Module]
    word: str
    shape: str
    make: Callable[[int, bool], nn.Module]

    def inputs(self, width: int) -> list[torch.Tensor]:
        """Return an input of a program of this kind: f64[2, width, ...]."""
        rest = (5, 5) if self.shape == "image" else ()
        return [torch.randn(4, width, *rest, dtype=torch.float64)]


CONV = Kind(
    nn.Conv2d, nn.BatchNorm2d, "convolution", "image",
    lambda width, bias: nn.Conv2d(width, width, 3, padding=1, bias=bias),
)  # fmt: skip
TRANSPOSED = Kind(
    nn.ConvTranspose2d, nn.BatchNorm2d, "transposed convolution", "image",
    lambda width, bias: nn.ConvTranspose2d(width, width, 3, padding=1, bias=bias),
)  # fmt: skip
LINEAR = Kind(
    nn.Linear, nn.BatchNorm1d, "Linear", "flat",
    lambda width, bias: nn.Linear(width, width, bias=bias),
)  # fmt: skip


class Net(nn.Module):
    """Two layers and three batch norms, wired as a case asks."""

    def __init__(self, kind: Kind, wiring: Wiring, width: int = 2, **options: Any) -> None:
        super().__init__()
        self.layer1 = kind.make(width, True)
        self.layer2 = kind.make(width, False)
        self.bn1 = kind.norm(width, **options)
        self.bn2 = kind.norm(width, affine=False)
        self.bn3 = kind.norm(width)
        self.relu = nn.ReLU()
        self.wiring = wiring

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers as ``wiring`` says; f64[n, width, ...] in and out."""
        return self.wiring(self, x)


def net(kind: Kind, wiring: Wiring, training: bool = False, **options: Any) -> tuple[GraphModule]:
    """Return the traced Net in float64, with numbers as if trained, as the arguments of a case."""
    model = fill(Net(kind, wiring, **options)).double().train(training)
    return (symbolic_trace(model).train(training),)


def entry(answer: Any, gm: GraphModule) -> dict[str, GraphModule]:
    """Run the pass.

    Returns:
        {"program": the edited program, "model": a program that has the modules that were given}
    """
    # The layers as the traced model has them, under their paths; no copy of the program, which a
    # recording would show as edits.
    graph = Graph()
    x = graph.placeholder("x")
    for path in module_calls(gm):
        graph.call_module(path, (x,))
    graph.output(x)
    model = GraphModule(gm, graph)
    return {"program": edited(answer, gm), "model": model}


def norms(gm: GraphModule) -> list[Node]:
    """Return the calls of batch norms, in graph order."""
    calls = (n for n in gm.graph.nodes if n.op == "call_module")
    return [n for n in calls if isinstance(gm.get_submodule(str(n.target)), NORMS)]


def _judge(kind: Kind, args: tuple[Any, ...], value: Any) -> Finding | None:
    (given,) = args
    program = value["program"]
    layers = (m for m in given.modules() if isinstance(m, (kind.norm, kind.layer)))
    widths = [n for m in layers for name, n in vars(m).items()
              if name in ("num_features", "in_channels", "in_features")]  # fmt: skip
    inputs = kind.inputs(widths[0] if widths else 3)
    right = copy.deepcopy(given)
    if kind.layer is nn.Linear:  # which is folded where its output is known to be a matrix
        shape_prop(right, *inputs)
    fuse_conv_bn(right)
    if text := _different(given, program, inputs):
        return Finding(_why(kind, given, program, right) or text, expected=right, actual=program)
    wanted = {bn.name for bn in norms(right)}
    kept = [bn for bn in norms(program) if bn.name not in wanted]
    if kept:
        bn = next((n for n in kept if not n.users), kept[0])
        why = "nobody reads it any more: erase it"
        if bn.users:
            layer = bn.all_input_nodes[0].name
            why = f"it may be folded: {layer} is a {kind.word} that only {bn.name} reads"
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


def _why(kind: Kind, given: GraphModule, program: GraphModule, right: GraphModule) -> str:
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
        if not isinstance(called, kind.layer):
            what = type(called).__name__ if called else source.op
            return (
                f"{bn.name} is folded, and what it reads, {source.name}, is no {kind.word}: {what}"
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
                f"{kind.word} has new weights already. Look the layer up anew for each fold, with "
                "gm.get_submodule"
            )
    made = {node.name: node for node in program.graph.nodes if node.op == "call_module"}
    for bn in gone:
        source = bn.all_input_nodes[0]
        if source.name in made:
            wanted, now = (
                gm.get_parameter(f"{node.target}.weight")
                for gm, node in ((right, source), (program, made[source.name]))
            )
            if text := unequal(wanted, now, 1e-9, f"the weight of {source.name}"):
                return f"{bn.name} reads {source.name}, whatever stands before it, and {text}"
    return ""


def _judge_model(kind: Kind, args: tuple[Any, ...], value: Any) -> Finding | None:
    (given,) = args
    for name, tensor in given.state_dict().items():
        now = value["model"].state_dict().get(name)
        if now is None or unequal(tensor, now, 0.0):
            return Finding(
                f"{name} of the model that was traced is changed: its modules are shared with the "
                "program. Put a new module in the place of the old one (gm.set_submodule), and "
                "write into no tensor",
            )
    return _judge(kind, args, value)


# The wirings are functions of (net, x), so that one class serves all cases.


def _pair(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.layer1(x))


def _two_pairs(net: Net, x: torch.Tensor) -> Any:
    return net.bn2(net.layer2(net.relu(net.bn1(net.layer1(x)))))


def _in_reverse(net: Net, x: torch.Tensor) -> Any:
    # The nodes of the two pairs stand interleaved: who reads whom is what counts.
    one, other = net.layer1(x), net.layer2(x)
    return net.bn1(other) + net.bn3(one)


def _by_keyword(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(input=net.layer1(x))


def _second_reader(net: Net, x: torch.Tensor) -> Any:
    y = net.layer1(x)
    return net.bn1(y) + y


def _returned_too(net: Net, x: torch.Tensor) -> Any:
    y = net.layer1(x)
    return net.bn1(y), y


def _called_twice(net: Net, x: torch.Tensor) -> Any:
    return net.bn3(net.layer1(net.bn1(net.layer1(x))))


def _one_call_without(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.layer1(x)) + torch.relu(net.layer1(x))


def _relu_between(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.relu(net.layer1(x)))


def _norm_first(net: Net, x: torch.Tensor) -> Any:
    return net.layer1(net.bn1(x))


def _method_between(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.layer1(x).abs())


def _common(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.layer1(x)) + net.bn1(net.layer2(x))


def _common_once(net: Net, x: torch.Tensor) -> Any:
    return net.bn1(net.layer1(x)) + net.bn1(x)


def _in_a_row(net: Net, x: torch.Tensor) -> Any:
    return net.bn3(net.bn1(net.layer1(x)))


def _cases(kind: Kind) -> Iterator[Case | Property]:
    judge, judge_model = partial(_judge, kind), partial(_judge_model, kind)
    a = f"a {kind.word}"
    for behaviour, title, wiring, options in (
        (PLAIN, "one pair", _pair, {}),
        (PLAIN, "two pairs, one without bias, one without gamma and beta", _two_pairs, {}),
        (PLAIN, "two pairs whose nodes stand interleaved", _in_reverse, {}),
        (PLAIN, "a call with a keyword argument", _by_keyword, {}),
        (READER, f"{a} is added to its batch norm", _second_reader, {}),
        (READER, f"{a} is returned, too", _returned_too, {}),
        (SHARED, f"{a}, called twice, two batch norms", _called_twice, {}),
        (SHARED, f"{a}, called twice, one batch norm", _one_call_without, {}),
        (BATCH, "no running statistics", _pair, {"track_running_stats": False}),
        (BATCH, "train mode", _pair, {"training": True}),
        (NO_PAIR, "the batch norm reads the input", _norm_first, {}),
        (NO_PAIR, "a ReLU stands between", _relu_between, {}),
        (NO_PAIR, "a method stands between", _method_between, {}),
        (COMMON, "one batch norm behind two layers", _common, {}),
        (COMMON, f"one batch norm, only one of its calls behind {a}", _common_once, {}),
    ):
        yield Case(behaviour, title, partial(net, kind, wiring, **options), judge)
    yield Case(ANY, "two batch norms in a row", partial(net, kind, _in_a_row), judge)
    for title, wiring in (("one pair", _pair), ("two pairs", _two_pairs)):
        yield Case(MODEL, title, partial(net, kind, wiring), judge_model)
    chains, webs = partial(_chains, kind), partial(_webs, kind)
    yield Property(NO_PAIR, "any chain of layers", chains, judge, examples=15)
    yield Property(ANY, "layers in any order, some called again", webs, judge, examples=35)


def _chains(kind: Kind) -> Any:
    """Make a strategy of chains: each value is read once, each layer called once."""
    from hypothesis import strategies as st

    def build(kinds: list[str]) -> tuple[GraphModule]:
        graph, root = Graph(), nn.Module()
        value = graph.placeholder("x")
        for k, name in enumerate(kinds):
            width = SHAPES[kind.shape][1]
            made = kind.make(width, True) if name == "layer" else layer(name, kind.shape)
            root.add_module(f"{name}{k}", fill(made, k))
            value = graph.call_module(f"{name}{k}", (value,))
        graph.output(value)
        return (GraphModule(root.double().eval(), graph).eval(),)

    return st.lists(st.sampled_from(["bn", "layer", "relu"]), min_size=2, max_size=6).map(build)


def _webs(kind: Kind) -> Any:
    first = "linear" if kind.shape == "flat" else "conv"

    def ours(gm: GraphModule) -> tuple[GraphModule]:
        for path, module in list(gm.named_modules()):
            if isinstance(module, nn.Conv2d) and kind.layer is not nn.Conv2d:
                gm.set_submodule(path, fill(kind.make(module.in_channels, True), 1).eval())
        return (gm.double(),)

    layers = (first, "bn", first, "bn", "relu")
    return programs(most=5, shape=kind.shape, layers=layers, shared=True).map(ours)


def make(kind: Kind) -> Exercise:
    """Return the exercise about this pair of layers."""
    name, word = kind.layer.__name__, kind.word
    return Exercise(
        id="3.2",
        title="The fusion pass, including the four cases that must be left alone",
        level=3,
        minutes=45,
        idea="The algebra is in the modules, which pairs may be folded is in the graph: a pass "
        "needs both, and most of it is saying no (section 6.2.2).",
        needs=("fold", "fuse", "state of a GraphModule", "reroute", "erase", "reader"),
        teaches=("shared module",),
        hints=(
            "Lecture 07, 'The pass', steps through the four edits of one pair, and 'What must be "
            "left alone' has a reason for each that stays. The question before each fold: would "
            f"anybody notice that the {word}'s value, or its weights, are others now?",
            "For each call of a batch norm, over a list of the nodes: find the node that it reads. "
            f"Go on to the next unless that is a call of a {name}, this call is its only reader, "
            f"the {word}'s path is called once in the whole graph, and the batch norm has running "
            "statistics and is in eval mode. Then: new layer, set_submodule, reroute, erase.",
            "How often a path is called, on another example: Counter(n.target for n in "
            "gm.graph.nodes if n.op == 'call_module')['act'] is the number of calls of self.act. "
            "Count before you begin to erase. And fold_conv_bn(layer, bn), which you may call, "
            "gives a new layer.",
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
                cases=partial(_cases, kind),
                wrong={
                    "no_readers": "also reads, and wants without the batch norm",
                    "no_calls": "the one weight can't be right for all calls",
                    "train_mode": "uses the statistics of the batch at hand",
                    "node_before": f"is no {word}",
                    "in_place": "of the model that was traced is changed",
                    "not_erased": "nobody reads it any more: erase it",
                    "module_gone": "fails lint",
                    "positional": "IndexError",
                    "old_layer": "Look the layer up anew",
                },
                stub="def my_fuse(gm):\n"
                f'    """Edit ``gm`` in place: fold each batch norm into the {name} before it.\n'
                "\n"
                "    It is left alone where folding would be wrong. The program computes the\n"
                "    same afterwards; the traced model's own modules and tensors stay as they\n"
                "    were.\n"
                '    """',
            ),
        ),
    )


def _words(kind: Kind) -> tuple[tuple[str, str], ...]:
    """Return what turns the master's cells, about Conv2d, into those of another kind."""
    return (
        ("Conv2d", kind.layer.__name__),
        ("BatchNorm2d", kind.norm.__name__),
        ("convolution", kind.word),
    )


EXERCISE = make(CONV)
VARIANTS = forms(make, {kind.layer.__name__: kind for kind in (CONV, LINEAR, TRANSPOSED)}, _words)


def _many_pairs(count: int) -> tuple[GraphModule]:
    """Return a chain of convolutions and batch norms of about ``count`` nodes, as arguments."""
    graph, root = Graph(), nn.Module()
    value = graph.placeholder("x")
    for k in range(count // 2):
        root.add_module(f"conv{k}", nn.Conv2d(1, 1, 1))
        root.add_module(f"bn{k}", nn.BatchNorm2d(1))
        value = graph.call_module(f"bn{k}", (graph.call_module(f"conv{k}", (value,)),))
    graph.output(value)
    return (GraphModule(root.eval(), graph).eval(),)


def _theirs(gm: torch.fx.GraphModule) -> None:
    with warnings.catch_warnings():  # its module warns when it is imported
        warnings.simplefilter("ignore")
        from torch.fx.experimental.optimization import fuse
    fuse(gm)


COMPARE = {
    "3.2": Reference(
        kit=fuse_conv_bn,
        small=partial(net, CONV, _two_pairs),
        large=_many_pairs,
        torch_fx=_theirs,
    )
}
