"""Running a list of passes, and stopping at the first one that breaks the program.

A transform that is wrong rarely fails where it is wrong: the graph still runs, and an accuracy is
lower a week later. PassManager therefore runs each pass on a copy, and after it asks three
questions: is the graph well formed (lint), does the program still compute the same numbers as the
input program, and what does it cost now? The first pass that breaks one is named, and the program
before it is kept.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxlab.core.errors import FxlabError
from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import symbolic_trace
from fxlab.passes.base import (
    PassResult,
    Report,
    copy_sharing_tensors,
    made_by,
    pass_name,
    undisturbed,
)
from fxlab.passes.shape_prop import shape_text

__all__ = [
    "Difference",
    "PassError",
    "PassManager",
    "PassRow",
    "compare",
    "this_before_that_pass_constraint",
]

# How far the output may be from the input program's, relative to its largest element, by the
# dtype of the parameters: a fold rounds them once more, and depth multiplies that. Run in float64,
# right folds of float32 weights are off by 2e-7 (resnet50), one that forgot eps by 5e-5 and more.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WIDE_RTOL = {**RTOL, torch.float32: 1e-5}


class PassError(FxlabError, RuntimeError):
    """A pass raised, left a graph that is not well formed, or changed what the program computes.

    Attributes:
        pass_name: The pass that broke the program.
        graph_module: The program before that pass, intact.
        rows: One PassRow for each pass that ran, the broken one last if it finished.
    """

    pass_name: str = ""
    graph_module: GraphModule | None = None
    rows: tuple[PassRow, ...] = ()


@dataclass(frozen=True)
class Difference:
    """How far one output is from another.

    Attributes:
        max_abs: Largest absolute difference of two elements.
        max_rel: ``max_abs`` divided by the largest absolute element of the reference.
        sqnr_db: Power of the reference over power of the difference, in decibel.
        precision: In which dtype both programs ran.
        same_structure: False when the outputs are not made of the same parts and shapes.
        types: What is returned in another dtype, in words; "" when nothing is. The numbers
            above do not look at that.
    """

    max_abs: float
    max_rel: float
    sqnr_db: float
    precision: str = ""
    same_structure: bool = True
    types: str = ""

    def __str__(self) -> str:
        if not self.same_structure:
            return "the output has another structure"
        if self.types:
            return self.types
        if self.max_abs == 0:
            return f"identical ({self.precision})"
        return (
            f"max abs {self.max_abs:.2g}, max rel {self.max_rel:.2g}, "
            f"SQNR {self.sqnr_db:.0f} dB ({self.precision})"
        )


def compare(reference: Any, other: Any, precision: str = "") -> Difference:
    """Return how far ``other`` is from ``reference``: nests of tensors, compared in float64.

    That they are of other dtypes is said in ``types``, beside the numbers.

    Args:
        reference: What is right: tensors of any shapes and dtypes, in tuples, lists and dicts.
        other: What is judged.
        precision: In which dtype both were computed, for the text of the result.

    Example:
        >>> compare(torch.ones(2), torch.tensor([1.0, 1.5])).max_abs
        0.5
    """
    ours, structure = pytree.tree_flatten(reference)
    theirs, other_structure = pytree.tree_flatten(other)
    broken = Difference(math.inf, math.inf, -math.inf, precision, same_structure=False)
    if structure != other_structure:
        return broken
    max_abs = scale = signal = noise = 0.0
    types = ""
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, torch.Tensor):
            if a is not b and a != b:
                return broken
            continue
        if not isinstance(b, torch.Tensor) or a.shape != b.shape:
            return broken
        if a.dtype != b.dtype:
            types = types or f"it returns {shape_text(b)} where {shape_text(a)} was returned"
        a, b = _wide(a), _wide(b)
        # Two infinities of one sign, or two NaN, are the same answer.
        same = (a == b) | (a.isnan() & b.isnan())
        delta = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        finite = a.nan_to_num(0.0, 0.0, 0.0)
        if a.numel():
            max_abs = max(max_abs, float(delta.max()))
            scale = max(scale, float(finite.abs().max()))
        signal += float(finite.square().sum())
        noise += float(delta.square().sum())
    ratio = signal / noise if noise else math.inf
    sqnr = 10 * math.log10(ratio) if 0 < ratio < math.inf else -math.inf if ratio == 0 else ratio
    relative = max_abs / scale if scale else (0.0 if max_abs == 0 else math.inf)
    return Difference(max_abs, relative, sqnr, precision, types=types)


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    value = value.dequantize() if value.is_quantized else value.to_dense()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


@dataclass(frozen=True)
class PassRow:
    """One pass of one run.

    Attributes:
        name: The pass's.
        modified: Whether it changed something.
        seconds: Wall time.
        nodes_before: How many nodes there were.
        nodes_after: How many there are.
        cost_before: A `Cost`; None when PassManager has no inputs.
        cost_after: Likewise.
        difference: From the output of the input program; None when PassManager has no inputs.
        report: What the pass left in ``gm.meta["reports"]``, if anything.
    """

    name: str
    modified: bool
    seconds: float
    nodes_before: int
    nodes_after: int
    cost_before: Any = None
    cost_after: Any = None
    difference: Difference | None = None
    report: Report | None = None

    def __str__(self) -> str:
        what = "changed nothing" if not self.modified else f"{self.seconds * 1e3:.0f} ms"
        line = f"{self.name:<24} {self.nodes_before:>5} -> {self.nodes_after:<5} nodes  {what}"
        if self.cost_before and self.cost_after:
            before, after = self.cost_before.flops, self.cost_after.flops
            line += f"  {before / 1e9:.3g} -> {after / 1e9:.3g} GFLOP"
        return line if self.difference is None else f"{line}  {self.difference}"


def this_before_that_pass_constraint(this: Callable, that: Callable) -> Callable:
    """Return a constraint: in the list, ``this`` comes before ``that``."""
    return lambda a, b: not (a is that and b is this)


@dataclass
class PassManager:
    """Run passes in order on a copy of a program, checking each; torch.fx's class, and more.

    Args:
        passes: Functions or PassBase objects. Each edits its argument (returns None) or returns a
            GraphModule or a PassResult.
        constraints: Functions of two passes, False when the first must not come before the second.
        steps: Run the list up to so many times, until nothing changes.
        run_checks_after_each_pass: Run the function given to ``add_checks`` after each pass too.
        suppress_check_failures: Go on when a numeric check fails; its row still says so.
        inputs: Example inputs. With them each program is compared with the input program, in
            float64 where it allows that, and costs are computed. After a pass that changes numbers
            on purpose, or one whose failure was suppressed, its program takes the input's place:
            no pass is blamed for another's numbers.
        rtol: Largest difference allowed, relative to the largest element of the output; by
            default 1e-9 for float64 parameters, 1e-5 for float32 (1e-4 where the program does not
            run in float64), 1e-2 and 5e-2 for halves. The output's dtypes must be the same too.
        min_sqnr_db: Ask for this signal-to-noise ratio instead of ``rtol``, for all passes; what
            is returned may then be of another dtype.

    Example:
        >>> import fxlab
        >>> from fxlab.passes import fuse_conv_bn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        >>> manager = PassManager([fuse_conv_bn], inputs=(torch.randn(1, 3, 8, 8),))
        >>> result = manager(fxlab.symbolic_trace(model))
        >>> result.modified, len(result.graph_module.graph.nodes)
        (True, 3)
    """

    passes: list[Callable] = field(default_factory=list)
    constraints: list[Callable] = field(default_factory=list)
    steps: int = 1
    run_checks_after_each_pass: bool = False
    suppress_check_failures: bool = False
    inputs: Sequence[Any] | None = field(default=None, kw_only=True)
    rtol: float | None = field(default=None, kw_only=True)
    min_sqnr_db: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # torch.fx takes None for each of these; and the lists are changed by add_pass.
        self.passes = list(self.passes or [])
        self.constraints = list(self.constraints or [])
        self.steps = self.steps or 1
        self.rows: list[PassRow] = []
        self._validated = False
        self._check: Callable[[nn.Module], None] | None = None

    def add_pass(self, _pass: Callable) -> None:
        """Append ``_pass`` to the list."""
        self.passes.append(_pass)
        self._validated = False

    def add_constraint(self, constraint: Callable) -> None:
        """Add a constraint on the order of the passes."""
        self.constraints.append(constraint)
        self._validated = False

    def add_checks(self, check: Callable[[nn.Module], None]) -> None:
        """Set ``check``, a function of one module that raises when something is wrong with it.

        Raises:
            TypeError: It takes another number of arguments.
        """
        if len(inspect.signature(check).parameters) != 1:
            raise TypeError("a check of a PassManager takes one argument, the module")
        self._check = check

    def check(self, module: nn.Module) -> None:
        """Run the function given to ``add_checks``, if any, on ``module``."""
        if self._check is not None:
            self._check(module)

    def validate_constraints(self) -> None:
        """Look whether the list, in its order, keeps all constraints.

        Raises:
            RuntimeError: It breaks one; the message names the two passes.
        """
        for i, first in enumerate(self.passes):
            for later in self.passes[i + 1 :]:
                if not all(constraint(first, later) for constraint in self.constraints):
                    raise RuntimeError(
                        f"{pass_name(first)} must not run before {pass_name(later)}; "
                        "solve_constraints() finds an order"
                    )
        self._validated = True

    def solve_constraints(self) -> None:
        """Put the passes in an order that keeps all constraints; keep the given one where free.

        Raises:
            RuntimeError: There is no such order.
        """
        left = list(self.passes)
        order: list[Callable] = []
        while left:
            ready = (
                p
                for p in left
                if all(c(p, q) for c in self.constraints for q in left if q is not p)
            )
            chosen = next(ready, None)
            if chosen is None:
                names = ", ".join(map(pass_name, left))
                raise RuntimeError(f"the constraints on {names} form a circle")
            order.append(chosen)
            left = [p for p in left if p is not chosen]
        self.passes = order
        self._validated = True

    def __call__(self, module: nn.Module) -> PassResult:
        """Run the passes on a copy of ``module`` (traced if it is no GraphModule).

        Returns:
            The last program, and whether any pass changed anything. ``self.rows`` has one row for
            each pass that ran.

        Raises:
            PassError: Naming the first pass that raised, broke the graph, or changed the numbers.
        """
        if not self._validated:
            self.solve_constraints()
        gm = module if isinstance(module, GraphModule) else symbolic_trace(module)
        self.check(gm)
        self.rows = []
        reference = None
        if self.inputs is not None:
            reference = run_wide(gm, self.inputs), _run_as_given(gm, self.inputs)
        current, changed = copy_sharing_tensors(gm), False
        for _ in range(self.steps):
            changed_now = False
            for pass_ in self.passes:
                current, modified, reference = self._run(pass_, current, reference)
                changed_now |= modified
            changed |= changed_now
            if not changed_now:
                break
        return PassResult(current, changed)

    def _run(self, pass_: Callable, before: GraphModule, reference: Any) -> tuple[Any, bool, Any]:
        """Run one pass on a copy of ``before``.

        Returns:
            The new program, whether it changed, and what the next one is held to.
        """
        name = pass_name(pass_)
        work = copy_sharing_tensors(before)
        versions = [(t, t._version) for t in _tensors(before)]
        version, start = work.graph.version, time.perf_counter()
        try:
            with made_by(name):
                result = pass_(work)
            after, modified = _unpack(result, work, version)
            seconds = time.perf_counter() - start
            after.graph.lint()
            if self.run_checks_after_each_pass:
                self.check(after)
            if any(t._version != v for t, v in versions):
                raise RuntimeError(f"{name} wrote into a tensor; a pass installs a new one")
            difference, returned = None, reference
            if reference is not None and self.inputs is not None:
                (wide, _), given = reference
                output, precision = run_wide(after, self.inputs)
                # A run in float64 does not show what the program itself returns.
                plain = _run_as_given(after, self.inputs)
                types, returned = compare(given, plain).types, ((output, precision), plain)
                difference = replace(compare(wide, output, precision), types=types)
        except Exception as error:
            raise self._error(name, before, f"{type(error).__name__}: {error}") from error
        costs = (None, None) if self.inputs is None else (self._cost(before), self._cost(after))
        self.rows.append(
            PassRow(
                name,
                modified,
                seconds,
                len(before.graph.nodes),
                len(after.graph.nodes),
                *costs,
                difference,
                after.meta.get("reports", {}).get(name),
            )
        )
        wrong = difference is not None and not self._allows(pass_, after, difference)
        if wrong and not self.suppress_check_failures:
            raise self._error(name, before, f"the output is not the input program's: {difference}")
        # Numbers that were to change, or are known to be wrong, are no later pass's doing.
        changed = wrong or (self.min_sqnr_db is None and _asked_sqnr(pass_) is not None)
        return after, modified, returned if changed else reference

    def _allows(self, pass_: Callable, gm: GraphModule, difference: Difference) -> bool:
        asked = self.min_sqnr_db if self.min_sqnr_db is not None else _asked_sqnr(pass_)
        if asked is not None:
            return difference.sqnr_db >= asked
        rtol = self.rtol
        if rtol is None:
            table = WIDE_RTOL if difference.precision == "float64" else RTOL
            limits = (table.get(t.dtype, 0.0) for t in _tensors(gm))
            rtol = max(limits, default=table[torch.float32])
        return difference.max_rel <= rtol and not difference.types

    def _cost(self, gm: GraphModule) -> Any:
        from fxlab.passes.cost import cost

        return cost(gm, *(self.inputs or ()))

    def _error(self, name: str, before: GraphModule, what: str) -> PassError:
        done = ", ".join(row.name for row in self.rows) or "none"
        error = PassError(
            f"the pass {name} broke the program: {what}",
            expected="a well-formed graph with the output of the input program",
            hint=(
                f"passes that ran before it: {done}",
                f"error.graph_module is the program before {name}; "
                f"record(error.graph_module) and timeline.bisect find the edit",
            ),
        )
        error.pass_name, error.graph_module, error.rows = name, before, tuple(self.rows)
        return error

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no pass has run"


def run_wide(gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, str]:
    """Run a copy of ``gm``, in float64 where it allows that; return the output and the precision.

    Random numbers start from the same seed each time; the global generator is left as it was.
    """
    try:
        arguments = pytree.tree_map(_double, tuple(inputs))
        return _run_once(copy_sharing_tensors(gm, torch.Tensor.double), arguments), "float64"
    except Exception:
        # Quantized kernels, packed weights and casts written into the program know no float64.
        return _run_as_given(gm, inputs), "as given"


def _run_as_given(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    return _run_once(copy_sharing_tensors(gm, torch.clone), tuple(inputs))


def _run_once(program: GraphModule, arguments: tuple[Any, ...]) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        with undisturbed(program, arguments) as given:
            # The state that it may return is put back, so the values are kept now.
            return pytree.tree_map_only(torch.Tensor, torch.clone, program(*given))


def _double(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _unpack(result: Any, work: GraphModule, version: int) -> tuple[GraphModule, bool]:
    if result is None or result is work:
        return work, work.graph.version != version
    if hasattr(result, "graph_module"):
        return result.graph_module, bool(result.modified)
    if not isinstance(result, GraphModule):
        raise TypeError(
            f"it returned a {type(result).__name__}; "
            "a pass returns a GraphModule, a PassResult or None (edited in place)"
        )
    return result, True


def _tensors(gm: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*gm.parameters(), *gm.buffers()) if t.is_floating_point()]


def _asked_sqnr(pass_: Callable) -> float | None:
    while hasattr(pass_, "func"):
        pass_ = pass_.func
    return getattr(pass_, "min_sqnr_db", None)
