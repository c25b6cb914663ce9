"""The table of effects: every kind of effect has its reason, ordinary operations have none."""

import operator

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.core.purity import effect, pure


def only(fn, *modules):
    gm = fxlab.symbolic_trace(fn)
    return [n for n in gm.graph.nodes if n.op.startswith("call")][-1]


def user_function(x):
    return x


EFFECTS = {
    "method in place": lambda x: x.add_(1),
    "method setting grad": lambda x: x.requires_grad_(),
    "function in place": lambda x: torch.relu_(x),
    "inplace flag": lambda x: F.relu(x, inplace=True),
    "inplace positional": lambda x: F.relu(x, True),
    "out argument": lambda x: torch.add(x, x, out=x),
    "item assignment": lambda x: operator.setitem(x, 0, 1),
    "in-place operator": lambda x: operator.iadd(x, 1),
    "assert": lambda x: torch._assert(x, "no"),
    "random": lambda x: torch.rand_like(x),
    "random method": lambda x: x.bernoulli_(),
    "dropout training": lambda x: F.dropout(x, 0.5),
    "batch norm training": lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2), training=True),
    "mutable aten": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "mutable aten, its overload not said": lambda x: torch.ops.aten.add_(x, x),
    "random aten": lambda x: torch.ops.aten.rand_like(x),
    "method of a container": lambda x: x.difference_update(x),
    "setattr": lambda x: setattr(x, "grad", None),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_has_a_reason(name):
    node = only(EFFECTS[name])
    assert effect(node)


PURE = {
    "relu": lambda x: F.relu(x), "add": lambda x: x + 1, "method": lambda x: x.neg(),
    "dropout eval": lambda x: F.dropout(x, 0.5, training=False), "size": lambda x: x.shape,
    "aten": lambda x: torch.ops.aten.relu.default(x), "packet": lambda x: torch.ops.aten.add(x, x),
    "method of a text": lambda x: x.casefold(), "getitem": lambda x: x[0],
    "norm eval": lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2)),
    "math": lambda x: __import__("math").sqrt(x), "cat": lambda x: torch.cat([x, x]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "layer norm": lambda x: F.layer_norm(x, (2,)), "to": lambda x: x.to(torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_an_ordinary_operation_is_pure(name):
    assert effect(only(PURE[name])) is None


@pytest.mark.parametrize(
    ("module", "has"),
    [
        (nn.ReLU(), False), (nn.ReLU(inplace=True), True), (nn.BatchNorm2d(2), True),
        (nn.BatchNorm2d(2).eval(), False), (nn.Dropout(), True), (nn.Dropout().eval(), False),
        (nn.Linear(2, 2), False), (nn.BatchNorm2d(2, track_running_stats=False), False),
    ],
)  # fmt: skip
def test_a_module_is_asked_for_its_mode(module, has):
    root = nn.Sequential(module)
    root.training = module.training
    gm = fxlab.symbolic_trace(root)
    assert (effect(gm.graph.find_nodes(op="call_module")[0]) is not None) == has


def test_user_code_counts_as_impure_until_it_is_declared_pure():
    with fxlab.wrapped(user_function):
        node = only(lambda x: user_function(x))
    assert "user code" in effect(node)
    pure(user_function)
    assert effect(node) is None
    fxlab.has_side_effect(user_function)
    assert "registered" in effect(node) and node.is_impure()


def test_random_numbers_can_be_allowed():
    node = only(EFFECTS["random"])
    assert node.is_impure() and not node.is_impure(impure_random=False)


def test_an_operator_that_torch_fx_keeps_for_its_effect_is_kept():
    """All of torch's operators, asked one by one; its rule is wider here, never narrower."""
    kept = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        try:
            packet = getattr(getattr(torch.ops, space), op)
            found = [packet, getattr(packet, overload or "default")]
        except (AttributeError, RuntimeError):  # its library is not loaded
            continue
        for target in found:
            calls = []
            for fx in (torch.fx, fxlab):
                graph = fx.Graph()
                calls.append(graph.call_function(target, (graph.placeholder("x"),)))
            if calls[0].is_impure():
                kept.append(str(target))
                assert effect(calls[1]) is not None, target
    assert len(kept) > 1000 and "aten._assert_async.msg" in kept


def test_what_torch_fx_registers_as_having_an_effect_has_one():
    for target in torch.fx.node._side_effectful_functions:
        call = fxlab.Graph().call_function(target)
        assert effect(call) is not None, target


def test_an_assertion_in_an_exported_program_is_no_dead_code():
    class Checked(nn.Module):
        def forward(self, x):
            torch.ops.aten._assert_async.msg(x.min() > 0, "must be positive")
            return x + 1

    gm = fxlab.symbolic_trace(Checked())
    fxlab.passes.dce(gm)
    assert torch.equal(gm(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="must be positive"):
        gm(-torch.ones(4))
