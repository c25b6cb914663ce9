"""Random modules, traced, edited at random, copied, pickled, regenerated, and run against eager.

hypothesis writes modules as source text: operators, methods, functions, in-place statements,
submodules inside submodules, containers, keyword arguments, regions and constants of every kind.
Every value is a float tensor of shape (4, 4), so that any statement may follow any other.
"""

from __future__ import annotations

import copy
import operator
import os
import pickle
import random
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxlab

EXAMPLES = 3000 if os.environ.get("FXLAB_LONG") else 300

CONSTANTS = ["0", "1", "-2", "0.5", "-1.5", "3.0", "True", "1e-3", "-0.0", "1e30", "2"]
VALUES = """
{a} + {b} | {a} - {c} | {c} - {a} | {a} * {b} | {c} * {a} | {a} / ({b} * {b} + 1) | -{a} | +{a} | abs({a})
{a} @ {b} | {a} ** 2 | {a} // 2 | {a} % 3 | 2 // ({a} * {a} + 1) | ({a} > {b}).float() | ({a} == {a}).to({a}.dtype)
(({a} > 0) & ~({b} > 0)).float() | (({a} > 0) ^ ({b} > {c})).float() | ({a} <= {c}) * {b} | ({a} != {b}) | 1.0 * {a}
torch.tanh({a}) | torch.relu({a}) | torch.sigmoid(input={a}) | torch.add({a}, {b}, alpha={c}) | torch.sub({a}, other={b})
torch.where({a} > 0, {a}, {b}) | torch.clamp({a}, min=-1, max=2) | torch.clamp({a}, -1.5) | torch.maximum({a}, {b})
torch.cat([{a}[:2], {b}[2:]]) | torch.cat(({a}[:, :1], {b}[:, 1:]), dim=1) | torch.stack([{a}[i] for i in range(4)])
torch.stack([{a}[0], {b}[1], {a}[2], {b}[-1]], 0) | torch.einsum("ij,jk->ik", {a}, {b}) | torch.addmm({a}, {b}, {a})
torch.flip({a}, [0]) | torch.roll({a}, shifts=(1,), dims=(0,)) | torch.tril({a}) + torch.triu({b}, 1) | torch.zeros_like({a}) + {b}
torch.full_like({a}, {c}) | torch.transpose({a}, 0, 1) | torch.nan_to_num({a}) | torch.sum({a}, 0, True) + {b}
torch.zeros({a}.shape[0], 4) + {a} | torch.arange({a}.size(1)) * {b} | torch.ones(4, 4, dtype=torch.float32) * {a}
{a}.sigmoid() | {a}.t() | {a}.transpose(1, 0) | {a}.softmax(dim=-1) | {a}.mean(1, keepdim=True) * {b} | {a}.max(dim=0)[0] + {b}
{a}.max(1).values + {b} | {a}.view(2, 8).view(4, 4) | {a}.reshape(-1).reshape({b}.shape) | {a}.flatten().unflatten(0, (4, 4))
{a}.unsqueeze(0).squeeze(0) | {a}.clone() | {a}.contiguous() | {a}.detach() | {a}.double().float() | {a}.to(torch.float64).to(dtype=torch.float32)
{a}.masked_fill({a} > 0.5, {c}) | {a}.masked_fill(mask={b} > 0, value=1.0) | {a}.chunk(2)[0].repeat(2, 1) | {a}.expand(4, 4) * {b}
{a}.sum() + {b} | {a}.size(0) * {b} | {a}.shape[1] + {b} | {a}.numel() / 16 * {b} | {a}.T | {a}.add({b}).mul({c}) | {a}.clamp(max={c})
{a}.clone().add_({b}) | {a}.clone().mul_({c}) | {a}.clone().zero_() + {b} | {a}.clone().fill_({c}) | {a}.gather(1, ({b} > 0).long())
{a}[[3, 2, 1, 0]] | {a}[:, [1, 0, 3, 2]] | {a}[None][0] | {a}[..., 0:4] | {a}[slice(None), ::1] | {a}[torch.tensor([1, 1, 0, 2])]
{a}[0] + {b} | {a}[1:2] * {b} | {a}[:, -1:] - {b} | {a}[{b}.size(0) - 1] + {b} | torch.split({a}, [1, 3])[1].sum(0) + {b}
F.relu({a}) | F.gelu({a}) | F.softmax({a}, dim=1) | F.layer_norm({a}, (4,)) | F.layer_norm({a}, normalized_shape=[4], eps=1e-3)
F.pad({a}[:, :3], (0, 1), value={c}) | F.pad({a}[:, :2], [1, 1], mode="constant") | F.normalize({a}, dim=0) | F.leaky_relu({a}, negative_slope=0.2)
F.dropout({a}, 0.5, training=False) | F.linear({a}, {b}) | F.linear({a}, {b}, bias={a}[0]) | F.avg_pool2d({a}[None, None], 3, 1, 1)[0, 0]
sum([{a}, {b}, {a}]) | max(2, 3) * {a} | [{a}, {b}][1] | {{"k": {a}, "l": [{b}]}}["l"][0] | (lambda v: v * 2)({a}) | ({a}, {c})[0]
helper({a}, {b}) | helper({a}, {b}, factor={c}) | helper(second={a}, first={b}) | leaf({a}, {c}) | leaf({a}, scale={c}) | leaf({a}, options=[{c}, ({b}, None)])
self.linear({a}) | self.act({a}) | self.layers[0]({a}) | self.layers[1](input={a}) | self.table["k"]({a}) | self.norm({a}) | self.weight * {a}
{a} + self.buffer | {a} + self.shift[0] | F.linear({a}, self.linear.weight, self.linear.bias) | {a} * self.factor | self.weight.sum() + {a} | self.method({a}, {c})
operator.add({a}, {b}) | operator.mul({a}, {c}) | operator.getitem({a}, slice(0, 4)) | {a}.__radd__({b}) | getattr({a}, "T") | {a} + torch.tensor([1.0, 2.0, 3.0, 4.0])
"""  # noqa: E501 - a table
TEMPLATES = [part.strip() for line in VALUES.strip().splitlines() for part in line.split(" | ")]
STATEMENTS = [
    "{v} = {a}.clone()\n{v} += {b}",
    "{v} = {a} * 1\n{v} -= {c}",
    "{v} = {a}.clone()\n{v}[0] = {c}",
    "{v} = {a}.clone()\n{v}[:, 1] = {b}[:, 0]",
    "{v} = {a}.clone()\n{v}[{v} > 1] = 0.5",
    "with torch.no_grad():\n    {v} = {a} * {b}",
    "with torch.enable_grad():\n    {v} = torch.tanh({a})\n    {v} = {v} + {b}",
    "{v}, rest = {a}.chunk(2)\n{v} = torch.cat([rest, {v}])",
    "n, c = {a}.shape\n{v} = {b}.reshape(n, c)",
    "{v} = {a}\nfor i in range(2):\n    {v} = {v} * 0.5 + i",
    "items = [{a}, {b}]\nitems.append(items[0] + items[1])\n{v} = items[-1]",
    "torch.exp({a})\n{v} = {b}",
    "{v} = torch.empty_like({a}).copy_({b})",
]
OUTPUTS = [
    "{a}", "({a}, {b})", "[{a}, {b}]", "{{'a': {a}, 'b': [{b}, ({a}, None)]}}", "{a}, 3, None",
    "({a}, 'text', 2.5, True)", "Pair({a}, [{b}])", "{{1: {a}, 'x': {{'y': ({b},)}}}}", "({a},)",
]  # fmt: skip


Pair = namedtuple("Pair", "left right")


def helper(first, second, factor=2):
    """An ordinary function: it is traced through."""
    return first * factor - second


def leaf(x, scale=1.0, options=None):
    """A wrapped function: it is one call in the graph."""
    extra = options[1][0] if options else 0
    return x * float(scale) + extra


fxlab.wrap("leaf")


def identity(x):
    """What random edits insert."""
    return x


class Base(nn.Module):
    """The state that every generated module has."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.layers = nn.ModuleList([nn.Tanh(), nn.Linear(4, 4, bias=False)])
        self.table = nn.ModuleDict({"k": nn.Hardtanh()})
        self.norm = nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("buffer", torch.randn(4))
        self.shift = (torch.tensor([0.25, 0.5, 0.75, 1.0]), "note")
        self.factor = 1.25
        for i, child in enumerate(children):
            self.add_module(f"child{i}", child)

    def method(self, x, amount=1):
        return self.act(x) + amount


@st.composite
def bodies(draw: Any, children: int) -> str:
    """Draw the statements of a forward(self, x, y, scale=2.0)."""
    names, lines = ["x", "y"], []
    for i in range(draw(st.integers(1, 9))):
        pick = st.sampled_from(names)
        constant = st.sampled_from([*CONSTANTS, "scale"])
        fields = {"a": draw(pick), "b": draw(pick), "c": draw(constant), "v": f"v{i}"}
        kind = draw(st.integers(0, 9))
        if children and kind == 0:
            child = draw(st.integers(0, children - 1))
            how = draw(st.sampled_from(["", ", scale={c}", ", **{{'scale': {c}}}"]))
            lines.append(f"v{i} = self.child{child}({{a}}, {{b}}{how})".format(**fields))
        elif kind in (1, 2):
            lines.append(draw(st.sampled_from(STATEMENTS)).format(**fields))
        else:
            value = draw(st.sampled_from(TEMPLATES)).format(**fields)
            lines.append(f"v{i} = {value}\nv{i} = v{i} * 1.0 if {kind} == 9 else v{i}")
        names.append(f"v{i}")
    last = names[-1]
    output = "{a}" if children < 0 else draw(st.sampled_from(OUTPUTS))
    lines.append("return " + output.format(a=last, b=draw(st.sampled_from(names))))
    return "\n".join(lines)


@st.composite
def modules(draw: Any, depth: int = 2) -> tuple[nn.Module, str]:
    """Draw a module and its source; inner modules return one tensor."""
    inner = [draw(modules(depth=depth - 1)) for _ in range(draw(st.integers(0, 2)) if depth else 0)]
    body = draw(bodies(len(inner)))
    if depth < 2:
        body = body.rsplit("return", 1)[0]
        names = [line.split(" = ")[0].strip() for line in body.splitlines() if " = " in line]
        tensors = [n for n in names if n.startswith("v") and n[1:].isdigit()]
        body += f"return {tensors[-1] if tensors else 'x'}"
    source = "def forward(self, x, y, scale=2.0):\n    " + body.replace("\n", "\n    ")
    namespace: dict[str, Any] = {}
    exec(source, globals(), namespace)
    kind = type("Generated", (Base,), {"forward": namespace["forward"]})
    return kind([child for child, _ in inner]), "\n".join([source, *(text for _, text in inner)])


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def check(run: Any, expected: Any, text: str) -> None:
    args = inputs()
    result = run(*args)
    assert same(result, expected[0]), f"{text}\ngot {result}\nexpected {expected[0]}"
    assert same(args, expected[1]), f"{text}\nthe inputs were changed otherwise"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b)
            and (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def edit(gm: fxlab.GraphModule, choices: random.Random) -> str:
    """Make one random edit that keeps the meaning; return what it was."""
    graph = gm.graph
    calls = [n for n in graph.nodes if n.op.startswith("call_") and "region" not in str(n.target)]
    kind = choices.choice("identity duplicate rename rewrite dce move target swap".split())
    node = choices.choice(calls) if calls else None
    if node is None:
        return "nothing to edit"
    pure = not any(n.is_impure() for n in graph.nodes if n.op.startswith("call_"))
    if kind == "identity":
        with graph.inserting_after(node):
            new = graph.call_function(identity, (node,))
        node.replace_all_uses_with(new, lambda user: user is not new)
    elif kind == "duplicate" and not node.is_impure() and pure:
        with graph.inserting_after(node):
            new = graph.node_copy(node, lambda n: n)
        for user in list(node.users)[::2]:
            user.replace_input_with(node, new)
    elif kind == "rename":
        node.name = graph._graph_namespace.create_name(
            choices.choice(["class", "x", "a b", "torch"])
        )
    elif kind == "rewrite":
        fxlab.replace_pattern(gm, lambda v: torch.tanh(v), lambda v: v.tanh())
        fxlab.replace_pattern(gm, lambda v, w: v * w, lambda v, w: torch.mul(v, w))
        fxlab.replace_pattern(gm, lambda v: F.relu(v), lambda v: torch.relu(v), normalize=True)
    elif kind == "dce":
        graph.eliminate_dead_code()
    elif kind == "move" and pure and node.users:
        min(node.users).prepend(node)
    elif kind == "target":
        for n in calls:
            if n.target is torch.relu and not n.kwargs:
                n.target = F.relu
    elif kind == "swap" and node.target is operator.add and pure:
        node.args = (node.args[1], node.args[0])
    return f"{kind} {node.name}"


@pytest.mark.timeout(6 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 300,
    suppress_health_check=list(HealthCheck),
)
@given(modules(), st.integers(0, 2**32))
def test_random_modules_keep_their_meaning(drawn: tuple[nn.Module, str], seed: int) -> None:
    model, source = drawn
    args = inputs()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = (model(*args), args)
    except (RuntimeError, TypeError, IndexError):  # a program that eager cannot run says nothing
        return
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", fxlab.TraceWarning)
        gm = fxlab.symbolic_trace(model)
        gm.graph.lint()
        text = f"{source}\n{gm.code}"
        check(gm, expected, text)
        assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
        check(fxlab.Interpreter(gm).run, expected, text)
        check(copy.deepcopy(gm), expected, text)
        check(pickle.loads(pickle.dumps(gm)), expected, text)
        check(fxlab.Transformer(gm).transform(), expected, text)
        check(fxlab.symbolic_trace(gm), expected, text)
        done = []
        choices = random.Random(seed)
        for _ in range(choices.randint(1, 5)):
            done.append(edit(gm, choices))
            gm.graph.lint()
        text = f"{source}\n{gm.code}\nedits: {done}"
        check(gm, expected, text)
        check(fxlab.Interpreter(gm).run, expected, text)
        check(pickle.loads(pickle.dumps(copy.deepcopy(gm))), expected, text)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_generator_reaches_every_kind_of_program() -> None:
    templates = " ".join([*TEMPLATES, *STATEMENTS])
    for part in ("self.layers", "helper(", "leaf(", "+=", "no_grad", "[0] =", "alpha=", "einsum"):
        assert part in templates
    assert len(TEMPLATES) > 120
