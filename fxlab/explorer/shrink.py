"""What is the smallest program on which a pass still breaks?

A bug report with a 177-node model is read by nobody; one with three nodes is. `shrink` cuts the
tail of a program, then its head, then single operations, as long as the pass still breaks in the
same way (delta debugging; Zeller and Hildebrandt, 2002). A value that is cut off becomes an input,
with the numbers that it had in the whole program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxlab.core.errors import ExerciseError, RewriteError
from fxlab.core.graph import Graph
from fxlab.core.graph_module import GraphModule
from fxlab.core.node import Node
from fxlab.explorer.nearness import compare, error_text, largest, rounded_once
from fxlab.explorer.sameness import converted, execute, private_copy
from fxlab.explorer.script import script_text

Check = Callable[..., Any]
EDGES = ("placeholder", "output")


@dataclass(repr=False)
class Shrunk:
    """The smallest program found. Printing it gives a summary and its code.

    Attributes:
        gm: The program, before the pass.
        inputs: Its arguments.
        failure: How the pass breaks on it.
        before, after: How many operations the whole program and this one have.
    """

    gm: GraphModule
    inputs: tuple[Any, ...]
    failure: str
    before: int
    after: int
    pass_: Any
    check: Any

    def __repr__(self) -> str:
        """The same as its text."""
        return str(self)

    def __str__(self) -> str:
        name = pass_name(self.pass_)
        return (
            f"{name} breaks on {self.after} of {self.before} operations: {self.failure}\n"
            f"{self.gm.code.strip()}"
        )

    def save(self, path: str | Path) -> Path:
        """Write a script that shows the failure: the program, its weights, the pass, the check.

        Args:
            path: Where to; weights and inputs of more than 100 KB go to a file beside it.

        Raises:
            RewriteError: A module or function in the program has no name under which a script
                could import it.
        """
        return script_text(self, Path(path))


def shrink(
    gm: GraphModule,
    pass_: Callable[..., Any],
    check: Check | None = None,
    inputs: Sequence[Any] = (),
) -> Shrunk:
    """Find the smallest part of `gm` on which a pass still breaks.

    Args:
        gm: The program before the pass; it is left as it is.
        pass_: Edits a GraphModule in place, or returns another one.
        check: Says whether the pass was right. Called as `check(after)`, `check(before, after)` or
            `check(before, after, inputs)`, by how many parameters it has; it fails if it returns
            something false (None counts as passed) or raises. By default both programs must
            compute the same, up to rounding. Since the program shrinks, a check that holds numbers
            of the whole model fits none of its parts.
        inputs: Arguments of `gm`.

    Returns:
        A `Shrunk`: `.gm`, `.inputs`, `.failure`, and `.save("bug.py")`.

    Raises:
        ExerciseError: The pass does not break on the whole program.

    Example:
        >>> import fxlab
        >>> def swaps(gm):
        ...     for node in gm.graph.nodes:
        ...         if node.target is torch.relu:
        ...             node.target = torch.neg
        >>> gm = fxlab.symbolic_trace(lambda x: torch.sin(torch.relu(torch.cos(x)) + 1))
        >>> found = shrink(gm, swaps, inputs=(torch.ones(2),))
        >>> [node.name for node in found.gm.graph.nodes]
        ['cos', 'relu', 'output']
    """
    search = _Search(gm, pass_, check, tuple(inputs))
    search.run()
    nodes = sum(node.op not in EDGES for node in gm.graph.nodes)
    small, small_inputs = search.best
    after = sum(node.op not in EDGES for node in small.graph.nodes)
    return Shrunk(small, small_inputs, search.failure, nodes, after, pass_, check)


class _Search:
    """One search: which nodes to return, and which to make inputs."""

    def __init__(
        self, gm: GraphModule, pass_: Callable[..., Any], check: Check | None, inputs: tuple
    ) -> None:
        if not isinstance(gm, GraphModule):
            raise RewriteError(
                f"shrink needs a GraphModule of fxlab, got {type(gm).__name__}",
                hint="fxlab.interop.from_torch_fx(gm)",
            )
        self.gm, self.pass_, self.check = gm, pass_, check
        self.nodes = list(gm.graph.nodes)
        self.values: dict[Node, Any] = {}
        private = private_copy(gm, None)
        kept: dict[Any, Any] = {}
        execute(private, converted(inputs, None), {}, kept)
        for new, old in zip(private.graph.nodes, self.nodes, strict=True):
            if new in kept:
                self.values[old] = kept[new]
        self.kind = self.failure = ""
        self.best = (gm, inputs)
        kind, self.failure = self.verdict(gm, inputs)
        if not kind:
            raise ExerciseError(
                f"{pass_name(pass_)} does not break on this program with these inputs",
                expected="a check that fails on the whole program",
                hint="give the check and the inputs with which the failure was seen",
            )
        self.kind = kind

    def verdict(self, gm: GraphModule, inputs: tuple[Any, ...]) -> tuple[str, str]:
        """How the pass breaks: a kind ("" for not at all) and words."""
        from fxlab.passes.base import copy_sharing_tensors

        try:
            after = copy_sharing_tensors(gm)
            result = self.pass_(after)
            result = getattr(result, "graph_module", result)
            after = after if result is None or not hasattr(result, "graph") else result
            exact = getattr(self.pass_, "min_sqnr_db", None) is None
            return answer_of(self.check, gm, after, inputs, exact)
        except Exception as error:  # the pass under test
            first = (str(error).strip().splitlines() or [""])[0]
            return f"raises {type(error).__name__}", f"{type(error).__name__}: {first}"[:300]

    def build(
        self, outputs: list[Node], cut: set[Node]
    ) -> tuple[GraphModule, tuple[Any, ...]] | None:
        """The program that computes `outputs`, with the nodes in `cut` as inputs."""
        needed: set[Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if node not in cut:
                    stack.extend(node.all_input_nodes)
        graph = Graph()
        made: dict[Node, Node] = {}
        inputs = []
        for node in self.nodes:
            if node not in needed:
                continue
            if node in cut or node.op == "placeholder":
                if node not in self.values:
                    return None
                made[node] = graph.create_node("placeholder", node.name, name=node.name)
                inputs.append(self.values[node])
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(made[outputs[0]] if len(outputs) == 1 else tuple(made[n] for n in outputs))
        return GraphModule(self.gm, graph), converted(tuple(inputs), None)

    def tries(self, outputs: list[Node], cut: set[Node]) -> bool:
        """Whether the pass still breaks there in the same way; if so it is the best so far."""
        try:
            built = self.build(outputs, cut)
            if built is None:
                return False
            gm, inputs = built
            gm.graph.lint()
            gm(*converted(inputs, None))
        except Exception:  # a part that does not run by itself is no smaller example
            return False
        kind, failure = self.verdict(gm, inputs)
        if kind != self.kind:
            return False
        self.best, self.failure = (gm, inputs), failure
        return True

    def run(self) -> None:
        """Cut the tail, the head, then whatever else can go."""
        computed = [n for n in self.nodes if n.op not in EDGES]
        returned = self.gm.graph.output_node().all_input_nodes
        outputs = self.fewest_outputs(list(returned))
        if not outputs or not self.tries(outputs, set()):
            return
        outputs = self.cut_tail(outputs, computed)
        cut = self.cut_head(outputs, computed)
        cut = self.cut_each(outputs, cut, computed)
        for node in [n for n in computed if n not in cut]:
            # A part of what is left may do: halving passes over it where failing is not monotone.
            if node not in outputs and self.tries([node], cut):
                outputs, cut = [node], self.cut_each([node], cut, computed)
                break
        self.cut_joins(outputs, cut)

    def cut_joins(self, outputs: list[Node], cut: set[Node]) -> None:
        """Return what an output reads instead of it: two values may only meet further down."""
        queue = list(outputs)
        while queue:
            node = queue.pop(0)
            inputs = [n for n in node.all_input_nodes if n.op not in EDGES and n not in cut]
            tried = list(dict.fromkeys([n for n in outputs if n is not node] + inputs))
            if node in outputs and inputs and self.tries(tried, cut):
                outputs = tried
                queue += inputs

    def fewest_outputs(self, outputs: list[Node]) -> list[Node]:
        """One output if one is enough."""
        for node in outputs:
            if len(outputs) > 1 and self.tries([node], set()):
                return [node]
        return outputs

    def cut_tail(self, outputs: list[Node], computed: list[Node]) -> list[Node]:
        """Return an earlier node instead, found by halving."""
        good = outputs
        low, high = 0, len(computed) - 1
        while low < high:
            middle = (low + high) // 2
            if self.tries([computed[middle]], set()):
                good, high = [computed[middle]], middle
            else:
                low = middle + 1
        return good

    def cut_head(self, outputs: list[Node], computed: list[Node]) -> set[Node]:
        """Make the values that cross a line into inputs: the lowest line that still fails."""
        cut: set[Node] = set()
        low, high = 0, len(computed)
        while low < high:
            middle = (low + high + 1) // 2
            tried = set(computed[:middle]) - set(outputs)
            if self.tries(outputs, tried):
                cut, low = tried, middle
            else:
                high = middle - 1
        return cut

    def cut_each(self, outputs: list[Node], cut: set[Node], computed: list[Node]) -> set[Node]:
        """Make further nodes into inputs, in chunks and then one by one."""
        left = [n for n in computed if n not in cut and n not in outputs]
        size = max(1, len(left) // 2)
        while left and size:
            for start in range(0, len(left), size):
                chunk = left[start : start + size]
                if not cut.issuperset(chunk) and self.tries(outputs, cut | set(chunk)):
                    cut = cut | set(chunk)
            left = [n for n in left if n not in cut]
            size //= 2
        return cut


def answer_of(
    check: Check | None,
    before: GraphModule,
    after: Any,
    inputs: tuple[Any, ...],
    exact: bool = True,
) -> tuple[str, str]:
    """What a check says: a kind of failure ("" for none) and words.

    Args:
        check: Called with as many of the others as it takes; None compares the outputs.
        before: The program before the pass.
        after: And after it.
        inputs: Of both.
        exact: Whether the pass promised the same numbers and types, and not a ratio.
    """
    if check is None:
        old = run_fresh(before, inputs)
        new = run_fresh(after, inputs)
        problem, error, allowed = compare(old, new, dtypes=exact)
        scale = largest(old) or 1.0
        share, limit = error / scale, max(allowed / scale, 1e-12)
        if exact and problem is None and share <= limit and error:
            # A recording's rule: in float64 a small mistake shows beside rounding.
            try:
                old, new = run_wide(before, inputs), run_wide(after, inputs)
            except Exception:  # float64 is a wish
                pass
            else:
                problem, error, _ = compare(old, new)
                share, limit = error / (largest(old) or 1.0), rounded_once(before, after)
        if problem is None and share <= limit:
            return "", ""
        off = (
            f"off by {error_text(share)} of the largest value where {error_text(limit)} is allowed"
        )
        return "another output", problem or f"the output is {off}"
    try:
        given = inspect.signature(check).parameters.values()
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)
    except (TypeError, ValueError):
        count = 1
    arguments = {1: (after,), 2: (before, after)}.get(count, (before, after, inputs))
    try:
        answer = check(*arguments)
    except AssertionError as error:
        first = (str(error).strip().splitlines() or ["it does not hold"])[0]
        return "the check", f"the check: {first}"[:300]
    return ("", "") if answer is None or answer else ("the check", "the check returned False")


def run_fresh(gm: Any, inputs: tuple[Any, ...]) -> Any:
    """Run a module without leaving traces in it or in the inputs."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return private_copy(gm, None)(*converted(inputs, None))


def run_wide(gm: Any, inputs: tuple[Any, ...]) -> Any:
    """Run a module in float64; every random node draws from the same seed."""
    wide = torch.float64
    return execute(private_copy(gm, wide), converted(inputs, wide), {}, dtype=wide)


def pass_name(pass_: Any) -> str:
    """The name of a pass, partial or not."""
    while isinstance(pass_, functools.partial):
        pass_ = pass_.func
    return getattr(pass_, "__name__", None) or type(pass_).__name__
