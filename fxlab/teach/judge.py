"""What do the judges of several exercises ask, and in which words do they say it?

Two kinds of helpers. `edited`, `returned` and `whole` run where the student's code runs: they call
an answer as an exercise says ("edit in place", "return a new module") and refuse what can't be
judged. The others run on the trusted side and compare programs by what they compute, never by
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node, target_text
from fxlab.core.purity import effect
from fxlab.teach.exercise import Finding
from fxlab.teach.limits import AnswerError


def edited(answer: Callable[..., Any], gm: GraphModule, *args: Any) -> GraphModule:
    """Call an answer that edits `gm` in place; it may return `gm` or None.

    Returns:
        The program after it: `gm`, well formed.

    Raises:
        AnswerError: It returned something else, or the graph is not well formed.
    """
    value = answer(gm, *args)
    value = getattr(value, "graph_module", value)  # a PassResult
    if value is not None and value is not gm:
        what = "another GraphModule" if isinstance(value, GraphModule) else kind_of(value)
        raise AnswerError(
            "type", f"it returned {what}: edit the module that it was given, and return that"
        )
    return whole(gm)


def returned(answer: Callable[..., Any], gm: GraphModule, *args: Any) -> GraphModule:
    """Call an answer that returns a new module.

    Raises:
        AnswerError: It returned None, the wrong type, `gm` itself, or a graph that is not well
            formed.
    """
    value = answer(gm, *args)
    value = getattr(value, "graph_module", value)
    if value is gm:
        raise AnswerError("type", "it returned the module that it was given: return a new one")
    return whole(value)


def whole(value: Any) -> GraphModule:
    """Return a GraphModule if it is one and well formed.

    Raises:
        AnswerError: It isn't; the sentence names the node.
    """
    if not isinstance(value, GraphModule):
        hint = ": did you forget `return gm`?" if value is None else ", a GraphModule was asked for"
        raise AnswerError("type", f"it returned {kind_of(value)}{hint}")
    problem = ill_formed(value)
    if problem is not None:
        error = AnswerError("lint", problem.sentence)
        error.finding = problem
        raise error
    return value


def kind_of(value: Any) -> str:
    """`None`, `a Graph`, `an int`: for sentences."""
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, torch.fx.GraphModule):
        name = "torch.fx.GraphModule"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def ill_formed(gm: GraphModule) -> Finding | None:
    """Say what is wrong with a graph in the words of the usual mistake, or None."""
    seen: set[Node] = set()
    nodes = set(gm.graph.nodes)
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            if source is node:
                sentence = (
                    f"replace_all_uses_with also rewired the node you inserted: {node.name} reads "
                    "itself. Give it its argument back, or insert it after the rerouting"
                )
            elif source not in nodes:
                sentence = (
                    f"{node.name} reads {source.name}, which is not in the graph any more: reroute "
                    "the readers first, erase afterwards"
                )
            elif source not in seen:
                sentence = (
                    f"{node.name} reads {source.name}, which comes after it: insert a node with "
                    "graph.inserting_before(reader) or inserting_after(what it reads)"
                )
            else:
                continue
            return Finding(sentence, node.name, actual=str(gm.graph))
        seen.add(node)
    try:
        gm.graph.lint()
        gm.recompile()
        str(gm.code)
    except FxlabError as error:
        return Finding(f"the graph fails lint: {error.message}", actual=str(gm.graph))
    return None


def dead(gm: GraphModule) -> Node | None:
    """The first node that nobody reads and that has no effect, or None."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and not node.users and not effect(node, gm):
            return node
    return None


def run(gm: Any, inputs: Sequence[Any], seed: int = 0) -> dict[str, Any]:
    """What a program does on copies of the inputs: outputs, what it wrote into inputs and state.

    Args:
        gm: A module; its state is put back afterwards.
        inputs: Its arguments.
        seed: Of the random numbers that it may draw.

    Returns:
        {"output", "inputs", "state", "random"}; "random" is the next random number.
    """
    before = {name: one.clone() for name, one in gm.state_dict().items()}
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            output = detached(gm(*copies))
            return {
                "output": output,
                "inputs": copies,
                "state": {name: one.clone() for name, one in gm.state_dict().items()},
                "random": torch.rand(()),
            }
        finally:
            for name, tensor in gm.state_dict().items():
                tensor.copy_(before[name])


def detached(value: Any) -> Any:
    """A copy of nested tensors that later writes don't reach."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        made = [detached(one) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: detached(one) for key, one in value.items()}
    return value


def unequal(expected: Any, actual: Any, tolerance: float = 1e-5, name: str = "the output") -> str:
    """Say how two values differ, "" when they don't.

    Args:
        expected: Tensors, numbers, texts, and lists, tuples and dicts of them.
        actual: The other one.
        tolerance: Largest difference allowed, relative to the largest expected number.
        name: What the value is called in the sentence.
    """
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return f"{name} is {kind_of(actual)}, expected a tensor"
        if expected.shape != actual.shape:
            return f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}"
        if expected.dtype != actual.dtype:
            return f"{name} is {actual.dtype}, expected {expected.dtype}"
        if expected.numel() == 0 or torch.equal(expected, actual):
            return ""
        one, other = expected.double(), actual.double()
        both = torch.isfinite(one) & torch.isfinite(other)
        if not torch.equal(one[~both].nan_to_num(), other[~both].nan_to_num()):
            return f"{name} has inf or nan in other places"
        if not both.any():
            return ""
        gap = (one[both] - other[both]).abs().max().item()
        scale = max(one[both].abs().max().item(), 1e-12)
        if gap <= tolerance * max(scale, 1.0):
            return ""
        return f"{name} differs by up to {gap:.2g} where the largest number is {scale:.2g}"
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple) or len(expected) != len(actual):
            count = f"{len(actual)} values" if isinstance(actual, list | tuple) else kind_of(actual)
            return f"{name} is {count}, expected {len(expected)} values"
        for k, (one, other) in enumerate(zip(expected, actual, strict=True)):
            if text := unequal(one, other, tolerance, f"{name}[{k}]"):
                return text
        return ""
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or set(expected) != set(actual):
            keys = sorted(map(str, actual)) if isinstance(actual, dict) else kind_of(actual)
            return f"{name} has {keys}, expected {sorted(map(str, expected))}"
        for key, one in expected.items():
            if text := unequal(one, actual[key], tolerance, f"{name}[{key!r}]"):
                return text
        return ""
    if isinstance(expected, float) and isinstance(actual, int | float):
        near = abs(expected - actual) <= tolerance * max(abs(expected), 1.0)
        return "" if near or expected == actual else f"{name} is {actual}, expected {expected}"
    return "" if expected == actual else f"{name} is {actual!r}, expected {expected!r}"


def same_program(
    expected: Any, actual: Any, inputs: Sequence[Any], tolerance: float = 1e-5, seed: int = 0
) -> str:
    """Say what two programs do differently on the inputs, "" when nothing can be noticed.

    Compared are the outputs, what each wrote into its inputs and into its state, and how many
    random numbers it drew.
    """
    one = run(expected, inputs, seed)
    try:
        other = run(actual, inputs, seed)
    except Exception as error:  # the other program is an answer: it may raise anything
        text = (str(error).strip().splitlines() or [""])[0][:200]
        return f"running the result raises {type(error).__name__}: {text}"
    if text := unequal(one["output"], other["output"], tolerance):
        return text
    for k, (mine, theirs) in enumerate(zip(one["inputs"], other["inputs"], strict=True)):
        if text := unequal(mine, theirs, tolerance, f"what is written into input {k}"):
            return text
    for name in one["state"].keys() & other["state"].keys():
        mine, theirs = one["state"][name], other["state"][name]
        if text := unequal(mine, theirs, tolerance, f"what is written into {name}"):
            return text
    if not torch.equal(one["random"], other["random"]):
        return "another count of random numbers is drawn"
    return ""


def target_of(node: Node) -> str:
    """What a node calls or reads, as text: comparable between two copies of a program."""
    return f"{node.op} {target_text(node.target)}"


def counts(gm: GraphModule, keep: Callable[[Node], Any] = lambda _: True) -> Counter[str]:
    """How often each target occurs among the nodes for which `keep` is true, output left out."""
    return Counter(target_of(node) for node in gm.graph.nodes if node.op != "output" and keep(node))


def was_read(gm: GraphModule, name: str) -> str:
    """The name of a reader that a node had in `gm`, "" when nobody read it."""
    for node in gm.graph.nodes:
        if node.name == name:
            return next((reader.name for reader in node.users), "")
    return ""


def tuples(strategy: Any) -> Any:
    """A strategy of argument tuples with one argument."""
    return strategy.map(lambda value: (value,))
