"""Each row of the table of differences is true: torch.fx does the one, fxlab the other."""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx.subgraph_rewriter import replace_pattern as torch_replace

import fxlab
from tests.differences import DIFFERENCES

ROWS: dict[str, Callable[[], None]] = {}
X = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def row(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(fn: Callable[[], None]) -> Callable[[], None]:
        ROWS[name] = fn
        return fn

    return register


def both(program: Any) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.fx.symbolic_trace(copy.deepcopy(program)), fxlab.symbolic_trace(program)


@row("in-place operators")
def _() -> None:
    def program(x):
        x += 1
        return x

    theirs, ours = both(program)
    a, b = X.clone(), X.clone()
    theirs(a), ours(b)
    assert torch.equal(a, X) and torch.equal(b, X + 1)


@row("order of readers")
def _() -> None:
    for gm, moved in zip(both(lambda x: (x + 1, x * 2)), (True, False), strict=True):
        x, add, mul, _ = gm.graph.nodes
        add.args = (x, 3)
        assert list(x.users) == ([mul, add] if moved else [add, mul])
        mul.args = (add, 2)
        mul.args = (x, 2)
        assert list(x.users) == [add, mul]


@row("item assignment")
def _() -> None:
    def program(x):
        x[0] = 1
        return x

    with pytest.raises(TypeError):
        torch.fx.symbolic_trace(program)
    assert fxlab.symbolic_trace(program)(X.clone())[0].tolist() == [1, 1]


@row("regions")
def _() -> None:
    def program(x):
        with torch.no_grad():
            y = x * 2
        return y

    theirs, ours = both(program)
    x = X.clone().requires_grad_()
    assert theirs(x).requires_grad and not ours(x).requires_grad
    assert "with torch" in ours.code


@row("global switches")
def _() -> None:
    def program(x):
        torch.manual_seed(3)
        return x + torch.rand(2)

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    ours = fxlab.symbolic_trace(program)
    assert torch.equal(torch.random.get_rng_state(), before)
    theirs = torch.fx.symbolic_trace(program)
    assert not torch.equal(torch.random.get_rng_state(), before)
    assert "seed" not in theirs.code and "manual_seed(3)" in ours.code


@row("training flag")
def _() -> None:
    theirs, ours = both(nn.Dropout(1.0))
    assert theirs.eval()(X).abs().sum() == 0
    assert torch.equal(ours.eval()(X), X)


@row("buffers")
def _() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2))

        def forward(self, x):
            return x + self.table.sum()

    theirs, ours = both(Model())
    if "table" in theirs.state_dict():
        theirs.load_state_dict({"table": torch.zeros(2)})
    ours.load_state_dict({"table": torch.zeros(2)})
    assert torch.equal(theirs(X), X + 2) and torch.equal(ours(X), X)


@row("errors of the tracer")
def _() -> None:
    def program(x):
        return len(x)

    with pytest.raises(RuntimeError) as theirs:
        torch.fx.symbolic_trace(program)
    with pytest.raises(fxlab.TraceError) as ours:
        fxlab.symbolic_trace(program)
    assert isinstance(ours.value, (RuntimeError, TypeError))
    assert __file__ in str(ours.value) and __file__ not in str(theirs.value)


@row("refusals in other words")
def _() -> None:
    def program(x):
        return torch.vmap(torch.sin)(x)

    with pytest.raises(ValueError) as theirs:
        torch.fx.symbolic_trace(program)
    with pytest.raises(fxlab.TraceError) as ours:
        fxlab.symbolic_trace(program)
    assert __file__ in str(ours.value) and __file__ not in str(theirs.value)


@row("what is lost is said")
def _() -> None:
    def program(x):
        return x + 1 if isinstance(x, torch.Tensor) else x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.fx.symbolic_trace(program)
    with pytest.warns(fxlab.TraceWarning, match="isinstance"):
        gm = fxlab.symbolic_trace(program)
    assert gm.meta["trace_warnings"]


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


@row("autograd Functions")
def _() -> None:
    theirs, ours = both(lambda x: Sevenfold.apply(x))
    x = X.clone().requires_grad_()
    slopes = [torch.autograd.grad(gm(x).sum(), x)[0][0, 0].item() for gm in (theirs, ours)]
    assert slopes == [2, 7] and torch.equal(theirs(x), ours(x))


@row("shapes at trace time")
def _() -> None:
    def program(x):
        n, *rest = x.shape
        return x.view(n * rest[0])

    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(program)
    assert fxlab.symbolic_trace(program, example_inputs=(X,))(X).shape == (4,)


@row("factories of Proxies")
def _() -> None:
    for program in (lambda x: torch.zeros(x.shape[0], 4), lambda x: torch.tensor(x.size(0))):
        with pytest.raises(TypeError):
            torch.fx.symbolic_trace(program)
        assert torch.equal(fxlab.symbolic_trace(program)(X), program(X))


@row("tensor constants")
def _() -> None:
    class Model(nn.Module):
        def forward(self, x):
            return x + torch.ones(2)

    first, second = Model(), Model()
    theirs, ours = torch.fx.symbolic_trace(first), fxlab.symbolic_trace(second)
    assert hasattr(first, "_tensor_constant0") and not hasattr(second, "_tensor_constant0")
    assert torch.equal(theirs(X), ours(X))


@row("tensors that the program writes into")
def _() -> None:
    def program(x):
        h = torch.zeros(2)
        h += x[0]
        return h

    theirs, ours = both(program)
    assert torch.equal(theirs(X), X[0]) and torch.equal(theirs(X), 2 * X[0])
    assert torch.equal(ours(X), X[0]) and torch.equal(ours(X), X[0])


@row("generators of random numbers")
def _() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs, ours = both(lambda x: x + torch.rand(2, generator=generator))
    assert torch.equal(theirs(X), theirs(X)) and not torch.equal(ours(X), ours(X))


@row("edits and code")
def _() -> None:
    results = []
    for gm in both(lambda x: torch.relu(x)):
        next(n for n in gm.graph.nodes if n.target is torch.relu).target = torch.neg
        results.append(gm(X))
    assert torch.equal(results[0], torch.relu(X)) and torch.equal(results[1], -X)


@row("submodules named like a GraphModule's own")
def _() -> None:
    def built(fx: Any, name: str) -> Any:
        graph = fx.Graph()
        graph.output(graph.call_module(name, (graph.placeholder("x"),)))
        return fx.GraphModule({name: nn.ReLU()}, graph)

    with pytest.raises(TypeError):
        built(torch.fx, "recompile")(X)
    assert torch.equal(built(torch.fx, "original_type")(X), X.relu())
    for name in ("recompile", "_compile", "_edit", "_original", "original_type"):
        with pytest.raises(fxlab.core.errors.RewriteError, match=name):
            built(fxlab, name)


@row("inserting after a node")
def _() -> None:
    orders = []
    for gm in both(lambda x: torch.relu(x)):
        relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
        with gm.graph.inserting_after(relu):
            gm.graph.call_function(torch.sin, (relu,))
            gm.graph.call_function(torch.cos, (relu,))
        orders.append([n.name for n in gm.graph.nodes][2:4])
    assert orders == [["cos", "sin"], ["sin", "cos"]]


@row("dead code")
def _() -> None:
    def program(x):
        x.add_(1)
        return x

    theirs, ours = both(program)
    assert theirs.graph.eliminate_dead_code() and not ours.graph.eliminate_dead_code()
    assert ours.graph.eliminate_dead_code(torch.fx.Node.is_impure)


@row("lint")
def _() -> None:
    for lab in (torch.fx, fxlab):
        graph = lab.Graph()
        y = graph.call_function(torch.relu, (graph.placeholder("x"),))
        graph.placeholder("late")
        graph.output(y)
        if lab is torch.fx:
            graph.lint()
        else:
            with pytest.raises(fxlab.LintError, match="late"):
                graph.lint()


@row("copies and pickles")
def _() -> None:
    kept = []
    for gm in both(nn.Sequential(nn.ReLU())):
        node = next(n for n in gm.graph.nodes if n.op == "call_module")
        node.name, node.meta["note"] = "mine", 5
        gm.recompile()
        again = pickle.loads(pickle.dumps(gm))
        kept.append([(n.name, n.meta.get("note")) for n in again.graph.nodes][1])
    assert kept[0] != ("mine", 5) and kept[1] == ("mine", 5)


@row("signatures")
def _() -> None:
    def program(x, *, y: int = 2):
        return x + y

    theirs, ours = (inspect.signature(gm.forward) for gm in both(program))
    assert theirs.parameters["y"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert ours.parameters["y"].kind is inspect.Parameter.KEYWORD_ONLY


@row("constants in code")
def _() -> None:
    class Odd(int):
        def __repr__(self) -> str:
            return "1 +"

    for lab in (torch.fx, fxlab):
        graph = lab.Graph()
        graph.output(graph.call_function(operator.add, (graph.placeholder("x"), Odd(3))))
        if lab is torch.fx:
            with pytest.raises(SyntaxError):
                lab.GraphModule(nn.Module(), graph)
        else:
            assert torch.equal(lab.GraphModule(nn.Module(), graph)(X), X + 3)


@row("containers in outputs")
def _() -> None:
    theirs, ours = both(lambda x: OrderedDict(a=x))
    assert type(theirs(X)) is dict and type(ours(X)) is OrderedDict


@row("place of a replacement")
def _() -> None:
    def program(x):
        y = torch.neg(x)
        x.add_(1)
        return y * 1

    theirs, ours = both(program)
    torch_replace(theirs, lambda x: torch.neg(x), lambda x: x * -1)
    fxlab.replace_pattern(ours, lambda x: torch.neg(x), lambda x: x * -1)
    assert torch.equal(theirs(X.clone()), -X - 1) and torch.equal(ours(X.clone()), -X)


@row("matches that cannot be one step")
def _() -> None:
    def program(x):
        y = torch.neg(x)
        x.add_(1)
        return torch.exp(y)

    theirs, ours = both(program)
    assert (
        len(torch_replace(theirs, lambda x: torch.exp(torch.neg(x)), lambda x: torch.exp(-x))) == 1
    )
    assert not fxlab.replace_pattern(
        ours, lambda x: torch.exp(torch.neg(x)), lambda x: torch.exp(-x)
    )
    assert not torch.equal(theirs(X.clone()), torch.exp(-X))
    assert torch.equal(ours(X.clone()), torch.exp(-X))


@row("replacements that share memory")
def _() -> None:
    def program(x):
        y = x.clone()
        y.add_(1)
        return x + 0

    theirs, ours = both(program)
    assert torch_replace(theirs, lambda x: x.clone(), lambda x: x)
    assert not fxlab.replace_pattern(ours, lambda x: x.clone(), lambda x: x)
    assert torch.equal(theirs(X.clone()), X + 1) and torch.equal(ours(X.clone()), X)


@row("matches back to back")
def _() -> None:
    def program(x):
        return torch.cat([torch.cat([x, x]).neg(), torch.cat([x, x])])

    def pattern(t):
        return torch.cat(t)

    theirs, ours = both(lambda x: torch.cat([torch.cat([x, x]), x]))
    try:
        torch_replace(theirs, pattern, lambda t: torch.cat(t, 0))
        theirs.graph.lint()
        right = True
    except RuntimeError:
        right = False
    assert not right
    assert len(fxlab.replace_pattern(ours, pattern, lambda t: torch.cat(t, 0))) == 2
    ours.graph.lint()
    assert program is not None and ours(X).shape == (6, 2)


@row("arguments in patterns")
def _() -> None:
    def program(x, n):
        return x[:n]

    theirs, ours = both(program)
    assert not torch_replace(theirs, program, lambda x, n: x.narrow(0, 0, n))
    assert len(fxlab.replace_pattern(ours, program, lambda x, n: x.narrow(0, 0, n))) == 1
    assert torch.equal(ours(X, 1), X[:1])


@row("unusable patterns")
def _() -> None:
    theirs, ours = both(lambda x: torch.relu(x))
    with pytest.raises(KeyError):
        torch_replace(theirs, lambda x, y: torch.relu(x), lambda x, y: x)
    with pytest.raises(fxlab.RewriteError, match="takes y"):
        fxlab.replace_pattern(ours, lambda x, y: torch.relu(x), lambda x, y: x)


@row("constants of a replacement")
def _() -> None:
    theirs, ours = both(lambda x: torch.relu(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_replace(theirs, lambda x: torch.relu(x), lambda x: x + torch.ones(2))
    fxlab.replace_pattern(ours, lambda x: torch.relu(x), lambda x: x + torch.ones(2))
    with pytest.raises(AttributeError):
        theirs(X)
    assert torch.equal(ours(X), X + 1)


@row("names in parts")
def _() -> None:
    from torch.fx.passes.split_module import split_module as torch_split

    def program(x):
        return (x + 1).relu() + 2

    theirs, ours = both(program)
    found = []
    for split, gm in ((torch_split, theirs), (fxlab.passes.split_module, ours)):
        number = {node: i // 3 for i, node in enumerate(gm.graph.nodes)}
        parts = split(gm, gm, number.__getitem__)
        found.append([n.name for n in parts.submod_1.graph.nodes if n.op == "call_function"])
    assert found == [["add"], ["add_1"]]


@row("pass manager")
def _() -> None:
    older = importlib.import_module("torch.fx.passes.pass_manager").PassManager
    newer = importlib.import_module("torch.fx.passes.infra.pass_manager").PassManager
    ours_newer = importlib.import_module("fxlab.passes.infra.pass_manager").PassManager
    ours_older = importlib.import_module("fxlab.passes.pass_manager").PassManager

    def to_neg(gm):
        (relu,) = (node for node in gm.graph.nodes if node.target is torch.relu)
        relu.target = torch.neg
        gm.recompile()
        return gm

    def wrapped(gm):
        return importlib.import_module("torch.fx.passes.infra.pass_base").PassResult(
            to_neg(gm), True
        )

    for manager, its_pass in ((newer, wrapped), (older, to_neg)):
        theirs, ours = both(lambda x: torch.relu(x))
        result = manager([its_pass])(theirs)
        edited = result if manager is older else result.graph_module
        assert torch.equal(edited(X), -X) and torch.equal(theirs(X), -X)
        for kept in (ours_newer, ours_older):
            result = kept([to_neg])(ours)
            assert result.modified and torch.equal(result.graph_module(X), -X)
            assert torch.equal(ours(X), X.relu())


@pytest.mark.parametrize("name", [d.name for d in DIFFERENCES])
def test_row_is_true(name: str) -> None:
    ROWS[name]()


def test_every_check_has_its_row() -> None:
    assert set(ROWS) == {d.name for d in DIFFERENCES}
    assert F.relu is not None
