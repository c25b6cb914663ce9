"""Does the program still compute the same, and if not, where does it begin to differ?

The second of the explorer's two verdicts (the other, well formed, is in `wellformed.py`). At a
pass boundary the program is run on the given inputs and held to the program that the pass was
given, which is the verdict on the pass, and to the first program, which is told where it is worse:
in float64 where both allow it, so that a rounding error cannot pass for a bug nor hide one. Nodes
are paired by ancestry (`meta["from"]`). A node agrees if it computes what it did, or what a node
did whose readers it took over; the first one that does neither, with inputs that agree, is named.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxlab.core.graph import MISSING, Graph
from fxlab.core.graph_module import GraphModule
from fxlab.display import shape_text
from fxlab.explorer.ancestry import ancestor_ids, node_id
from fxlab.explorer.encode import nodes_in
from fxlab.explorer.nearness import (
    STRICT,
    compare,
    error_text,
    largest,
    relative,
    rounded_once,
    tolerance,
    without_data,
)
from fxlab.explorer.sentences import short

if TYPE_CHECKING:
    from fxlab.explorer.record import Recorder, Span

JUMP = 100.0
NAME = 40  # characters of a name that are shown


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """A copy of inputs with its floating tensors in `dtype` (None: as they are)."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        new = leaf.detach().clone()
        return new.to(dtype) if dtype is not None and new.is_floating_point() else new

    return pytree.tree_map(one, value)


def private_copy(gm: Any, dtype: torch.dtype | None) -> Any:
    """A copy of a module that may be run: what it writes (running statistics) hits nobody.

    Args:
        gm: A GraphModule.
        dtype: Floating buffers are converted to it. Parameters are shared: `execute` converts each
            for the call that needs it, so that a large model is never there twice.
    """
    if runs_its_own_way(gm):
        return shell_copy(gm, dtype)
    memo: dict[int, Any] = {}
    for module in gm.modules():
        plain = [one for one in vars(module).values() if isinstance(one, torch.Tensor)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *plain):
            if tensor is None or id(tensor) in memo:
                continue
            shared = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = tensor if shared else converted(tensor, dtype)
    return copy.deepcopy(gm, memo)


def shell_copy(gm: Any, dtype: torch.dtype | None) -> Any:
    """A copy of a module tree, class by class, for classes whose own way to copy is not known."""
    shells = {id(one): object.__new__(type(one)) for one in gm.modules()}
    for module in gm.modules():
        new = shells[id(module)]
        for name, value in vars(module).items():
            own = isinstance(value, dict)
            new.__dict__[name] = dict(value) if own else value
        for table in (new.__dict__["_parameters"], new.__dict__["_buffers"]):
            for name, tensor in table.items():
                if tensor is not None:
                    fresh = converted(tensor, dtype)
                    trains = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(fresh, tensor.requires_grad) if trains else fresh
        for name, child in module._modules.items():
            new.__dict__["_modules"][name] = None if child is None else shells[id(child)]
    return shells[id(gm)]


def execute(
    gm: Any,
    inputs: Sequence[Any],
    keys: dict[Any, int],
    keep: dict[Any, Any] | None = None,
    shapes: dict[Any, str] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Run a module node by node; a random node draws by its key, not by its place in the order.

    Args:
        gm: A GraphModule that may be run (see `private_copy`).
        inputs: Its arguments.
        keys: A number for each node; equal numbers give equal random draws.
        keep: Filled with a copy of each node's value, when given.
        shapes: Filled with the shape text of each node's value, when given.
        dtype: What parameters are converted to for the call that reads them; None leaves them.
    """
    tensors = (*gm.parameters(), *gm.buffers())
    devices = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
    if keep is None and runs_its_own_way(gm):
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            return gm(*inputs)
    from fxlab.core.interpreter import Interpreter

    base: Any = Interpreter if isinstance(gm.graph, Graph) else torch.fx.Interpreter

    class Runner(base):
        """Seeds each node and keeps its value."""

        def run_node(self, n: Any) -> Any:
            torch.manual_seed(keys.get(n, 0) & 0x7FFFFFFF)
            called = gm.get_submodule(n.target) if n.op == "call_module" else None
            with widened(called, dtype):
                value = super().run_node(n)
            if n.op == "get_attr" and isinstance(value, nn.Parameter):
                value = converted(value, dtype)
            if keep is not None:
                keep[n] = converted(value, None)
            if shapes is not None:
                shapes[n] = shape_text(value)
            return value

    with torch.random.fork_rng(devices), torch.no_grad():
        return Runner(gm).run(*inputs)


@contextmanager
def widened(module: nn.Module | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Give a module's floating parameters another dtype meanwhile."""
    changed = []
    for one in module.modules() if module is not None and dtype is not None else ():
        for name, tensor in one._parameters.items():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                changed.append((one, name, tensor))
    made: dict[int, nn.Parameter] = {}
    for one, name, tensor in changed:
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(tensor.detach().to(dtype), requires_grad=False)
        setattr(one, name, made[id(tensor)])  # an LSTM keeps a list of them besides
    try:
        yield
    finally:
        for one, name, tensor in changed:
            setattr(one, name, tensor)


def plain_attributes(gm: nn.Module) -> dict[str, dict[str, Any]]:
    """The numbers and words in each module, such as a norm's `eps`: no event tells their edits."""
    kinds = (bool, int, float, str)
    return {
        path: {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k[0] != "_"}
        for path, module in gm.named_modules()
    }


def runs_its_own_way(gm: Any) -> bool:
    """Whether a class of somebody's between this module and GraphModule has its own call."""
    for kind in type(gm).__mro__[1:]:
        if kind in (GraphModule, torch.fx.GraphModule):
            return False
        if "__call__" in vars(kind) or "forward" in vars(kind):
            return True
    return False


@dataclass
class Run:
    """One program on the inputs: what it returns in its own types, and in float64 when asked."""

    gm: Any
    keys: dict[Any, int]
    native: Any = None
    problem: str | None = None
    shapes: list[tuple[Any, str]] = field(default_factory=list)
    wide: Any = MISSING


class Reference:
    """A program at a pass boundary and what it computes: what later ones are held to.

    A recorder has two: the first program, and the one that the pass in hand was given.

    Args:
        gm: The GraphModule as it is now.
        inputs: Its arguments.
        events: How many events led here.
        run: The run of it that is known already.
    """

    def __init__(
        self, gm: Any, inputs: Sequence[Any], events: int = 0, run: Run | None = None
    ) -> None:
        self.gm, self.graph = gm, gm.graph
        self.is_first = run is None
        self.inputs = converted(tuple(inputs), None) if run is None else tuple(inputs)
        self.ids = {node_id(node): node for node in self.graph.nodes}
        self.keys = {node: node_id(node) for node in self.graph.nodes} if run is None else run.keys
        self.events = events
        self.plain = plain_attributes(gm)
        self.since = ""  # the pass since which another output is returned than at first
        self.asked_db = math.inf  # what passes that change numbers on purpose have promised
        self.run = run or self._first_run(gm)
        self.problem = self.run.problem
        self.native = self.run.native

    def _first_run(self, gm: Any) -> Run:
        """The run that a recording begins with; what the user's program raises is told."""
        run = Run(gm, self.keys)
        try:
            if isinstance(gm, GraphModule):
                inspect.signature(gm.forward).bind(*self.inputs)
            self._execute(run)
        except Exception as error:
            first = str(error).strip().splitlines()
            what = f"{type(error).__name__}: {first[0] if first else ''}"[:300]
            run.problem = f"the program fails on the inputs ({what})"
            return run
        if without_data(run.native):
            run.problem = "what the program returns has no numbers (a meta or fake tensor)"
            return run
        self._widen(run)
        return run

    def run_later(self, gm: Any) -> Run:
        """Run a later program; its nodes draw random numbers as those they stand for did."""
        numbers = {node_id(node): key for node, key in self.keys.items()}
        pairs = self.pairs(gm.graph)
        keys = {n: numbers.get(ids[0], ids[0]) if ids else node_id(n) for n, ids in pairs.items()}
        run = Run(gm, keys)
        try:
            self._execute(run)
        except Exception as error:  # a broken pass is a verdict, not an end
            first = (str(error).strip().splitlines() or [""])[0]
            run.problem = f"it fails to run ({type(error).__name__}: {first})"
        return run

    def _execute(self, run: Run) -> None:
        shapes: dict[Any, str] = {}
        private, inner, nodes = self._private(run.gm, None, run.keys)
        run.native = execute(private, converted(self.inputs, None), inner, shapes=shapes)
        run.shapes = [(nodes[new], text) for new, text in shapes.items()]

    def _widen(self, run: Run, plain: dict[str, dict[str, Any]] | None = None) -> Any:
        """What a run returns in float64, or None where it can't; found out once."""
        if run.wide is MISSING:
            try:
                private, inner, _ = self._private(run.gm, torch.float64, run.keys, plain)
                given = converted(self.inputs, torch.float64)
                run.wide = execute(private, given, inner, dtype=torch.float64)
            except Exception:  # float64 is a wish; a program that can't is compared as it is
                run.wide = None
        return run.wide

    def _wide(self, recorder: Recorder) -> Any:
        """What this program returned in float64, or None; it may have been edited since."""
        if self.run.wide is MISSING:
            try:
                base, keys, _ = self._as_it_was(recorder)
            except Exception:  # its numbers are gone: as it is, then
                self.run.wide = None
            else:
                self.run.wide = self._widen(Run(base, keys), self.plain)
        return self.run.wide

    def _as_it_was(self, recorder: Recorder) -> tuple[Any, dict[Any, int], dict[Any, Any]]:
        """This program built anew, its nodes' numbers, and which node stands for which."""
        from fxlab.explorer.rebuild import rebuild

        base, made = rebuild(recorder, self.graph, self.events)
        return base, {made[node]: key for node, key in self.keys.items() if node in made}, made

    def _private(
        self,
        gm: Any,
        dtype: torch.dtype | None,
        keys: dict[Any, int],
        plain: dict[str, dict[str, Any]] | None = None,
    ) -> tuple[Any, dict[Any, int], dict[Any, Any]]:
        """A copy that may be run, its nodes' numbers, and the node that each was copied from."""
        private = private_copy(gm, dtype)
        modules = dict(private.named_modules())
        for path, values in (plain or {}).items():
            if path in modules:
                vars(modules[path]).update(values)
        nodes = dict(zip(private.graph.nodes, gm.graph.nodes, strict=True))
        return private, {new: keys[old] for new, old in nodes.items() if old in keys}, nodes

    def pairs(self, graph: Any) -> dict[Any, list[int]]:
        """For each node of a later program, the ids of this program's nodes it stands for.

        A node that was there already stands for itself, and for those whose readers it took over.
        """
        alive = {node_id(node) for node in graph.nodes}
        found = {}
        for node in graph.nodes:
            own = node_id(node)
            ancestors = [one for one in ancestor_ids(node) if one in self.ids]
            if own in self.ids:
                found[node] = [own, *(one for one in ancestors if one not in alive)]
            else:
                found[node] = ancestors
        return found

    def judge(self, recorder: Recorder, run: Run, asked_db: float = math.inf) -> dict[str, Any]:
        """The verdict on a later program, held to this one.

        Args:
            recorder: Whose events lead from this program to that one.
            run: What the later program returned.
            asked_db: The signal-to-noise ratio in decibel that was promised instead of the same
                numbers.
        """
        if self.problem is not None:
            if self.is_first:
                return verdict("refused", f"not checked: {self.problem}")
            return verdict("not checked", "not checked: the program that it was given does not run")
        if run.problem is not None:
            return verdict("different", f"different: {run.problem}"[:400])
        gm, native = run.gm, run.native
        events = recorder.events[self.events :]
        written = next((e.after["path"] for e in events if e.after is not None
                        and e.after.get("written")), None)  # fmt: skip
        exact = math.isinf(asked_db)  # else another type may be what was promised
        problem, error, allowed = compare(self.native, native, dtypes=exact)
        if problem is None and error == 0.0:
            return verdict("identical", "identical", 0.0, allowed)
        if problem is None and not exact:
            return signal_verdict(self.native, native, asked_db, error)
        strict = not any(event.kind in ("module", "attr") for event in events)
        before = self._wide(recorder)
        wide = self._widen(run) if before is not None else None
        largest_native = largest(self.native) or 1.0
        share, limit = error / largest_native, allowed / largest_native
        as_given = problem is not None or math.isinf(error)
        decided = ""
        if wide is not None and not as_given:  # float64 decides: it tells a mistake from rounding
            problem, error, _ = compare(before, wide)
            scale = largest(before) or 1.0
            share = error / scale
            limit = STRICT if strict else rounded_once(self.gm, gm)
            allowed = limit * scale
            decided = " in float64" if strict else " in float64, for weights made anew"
        elif wide is None:  # the types' own rounding decided: say so, and why
            which = "new" if before is not None else "first" if self.is_first else "given"
            decided = f" in {self._own_type()}: the {which} program does not run in float64"
        allows = f"where {error_text(limit)} is allowed{decided}"
        measured = f"{error_text(share)} of the largest value {allows}"
        if problem is None and share <= limit:
            return verdict("rounding", f"rounding: {measured}", error, allowed)
        measured = problem or f"off by {measured}"
        if written is not None:
            text = (
                f"different: {measured}; the first node can't be found, because "
                f"{short(written, NAME)} was written over in place"
            )
            return verdict("different", text, error, allowed)
        node, told, notes = self.first_divergence(recorder, run, strict, as_given)
        text = "; ".join([f"different, first at {told}: {measured}", *notes])
        return verdict("different", text, error, allowed, node)

    def first_divergence(
        self, recorder: Recorder, run: Run, strict: bool, as_given: bool = False
    ) -> tuple[Any, str, list[str]]:
        """The first node, in the order of the later program, whose value is another one.

        Args:
            recorder: Whose events lead from this program to the later one.
            run: The run of the later one.
            strict: Whether no weight was made anew.
            as_given: What differs shows in the program's own types, so look there.

        Returns:
            The node or None; what to call it, with what it reads or replaces; and notes: which
            nodes no node of this program matches, and which draw random numbers.
        """
        base, base_keys, made = self._as_it_was(recorder)
        gm, pairs = run.gm, self.pairs(run.gm.graph)
        narrow = as_given or self._wide(recorder) is None
        for dtype in (None,) if narrow else (torch.float64, None):
            try:
                old = self._values(base, dtype, base_keys, self.plain)
                new = self._values(gm, dtype, run.keys)
                break
            except Exception:  # float64 is a wish
                continue
        else:
            return None, "the output", []
        before = {node_id(node): old[made[node]] for node in made if made[node] in old}
        wide = dtype is not None
        limit, floor = self._limits(gm, strict, wide)
        node, unpaired = diverging(gm.graph, pairs, before, new, limit, floor, dtypes=not wide)
        notes = [f"without a partner: {shortened(unpaired)}"] if unpaired else []
        other = {one: ~key for one, key in base_keys.items()}
        drawn = drawing(base.graph, old, self._values(base, dtype, other, self.plain))
        if drawn:
            mode = "train mode; compare after eval()" if base.training else "each with its own seed"
            notes.append(f"random numbers are drawn by {shortened(drawn)} ({mode})")
        if node is None:
            return None, "the output", notes
        first = {node_id(one): two for one, two in made.items()}
        was = [first[one] for one in pairs[node] if one in first]
        return node, short(node.name, NAME) + turned(node, was, node_id(node) in self.ids), notes

    def _own_type(self) -> str:
        """The type of the output whose rounding is allowed the most, as `f32`."""
        leaves = (one for one in pytree.tree_leaves(self.native) if isinstance(one, torch.Tensor))
        coarsest = max((one.dtype for one in leaves), key=tolerance, default=torch.float32)
        return shape_text(torch.empty(0, dtype=coarsest)).partition("[")[0]

    def _limits(self, gm: Any, strict: bool, wide: bool) -> tuple[float, float]:
        """What a node may be off by, and what it may be off by though its inputs agree."""
        if wide and strict:
            return STRICT, STRICT
        if wide:
            limit = rounded_once(self.gm, gm)
            return limit, max(STRICT, limit / 10)
        leaves = [one for one in pytree.tree_leaves(self.native) if isinstance(one, torch.Tensor)]
        limit = max((tolerance(one.dtype) for one in leaves), default=0.0)
        return limit, max(STRICT, limit / JUMP)

    def _values(
        self,
        gm: Any,
        dtype: torch.dtype | None,
        keys: dict[Any, int],
        plain: dict[str, dict[str, Any]] | None = None,
    ) -> dict[Any, Any]:
        private, inner, nodes = self._private(gm, dtype, keys, plain)
        kept: dict[Any, Any] = {}
        execute(private, converted(self.inputs, dtype), inner, kept, dtype=dtype)
        return {nodes[node]: value for node, value in kept.items()}


def judge_pass(recorder: Recorder, span: Span) -> dict[str, Any]:
    """The verdict on a pass, held to the program that it was given.

    Beside it, under `first`, stands the verdict against the first program, and the text tells of it
    where it is worse. What the pass has made is what the next one is given.
    """
    first, given = recorder.reference, recorder.given
    assert first is not None and given is not None
    if first.problem is not None:
        return {**first.judge(recorder, first.run), "first": None}
    asked = getattr(span.function, "min_sqnr_db", None) or math.inf
    first.asked_db = min(first.asked_db, asked)
    run = given.run_later(span.result)
    if first.run.wide is None:
        run.wide = None
    elif span.result.graph is given.graph and len(recorder.events) == given.events:
        run.wide = given.run.wide
    own = given.judge(recorder, run, asked)
    whole = own if given is first else first.judge(recorder, run, first.asked_db)
    recorder.given = Reference(span.result, first.inputs, len(recorder.events), run)
    name = short(span.name or "the edits before", NAME)
    known, first.since = first.since, ""
    if whole["verdict"] == "different":
        first.since = known or name
        if known:
            still = "still " if own["verdict"] != "different" else ""
            own = {**own, "text": f"{own['text']}; {still}different since {known}"}
        elif own["verdict"] != "different":
            told = f"from the first program it is {whole['text']}"
            own = {**own, "text": f"{own['text']}; {told}"}
    elif known:
        own = {**own, "text": f"{own['text']}; the output of the first program again"}
    return {**own, "first": None if given is first else whole}


def diverging(
    graph: Any,
    pairs: dict[Any, list[int]],
    before: dict[int, Any],
    after: dict[Any, Any],
    limit: float,
    floor: float,
    dtypes: bool = False,
) -> tuple[Any, list[str]]:
    """The first node that diverges: beyond `limit`, or `floor` and 100 times worse than inputs."""
    errors: dict[Any, float] = {}
    unpaired = []
    for node in graph.nodes:
        if node not in after:
            continue
        inherited = max((errors.get(one, 0.0) for one in node.all_input_nodes), default=0.0)
        partners = [before[one] for one in pairs.get(node, ()) if one in before]
        if not partners:
            errors[node] = inherited
            if node.op not in ("placeholder", "output"):
                unpaired.append(node.name)
            continue
        error = min(relative(one, after[node], dtypes) for one in partners)
        errors[node] = error
        jumped = error > JUMP * inherited and error > floor
        if error > limit or jumped:
            return node, unpaired
    return None, unpaired


def drawing(graph: Any, one: dict[Any, Any], other: dict[Any, Any]) -> list[str]:
    """The nodes that draw random numbers: other seeds, another value, though the inputs agree."""
    differ = {node for node in one if relative(one[node], other[node]) > 0}
    return [n.name for n in graph.nodes if n in differ and differ.isdisjoint(n.all_input_nodes)]


def turned(node: Any, was: Sequence[Any], itself: bool) -> str:
    """How a node came to compute something else: `, which reads conv where it read bn`.

    Args:
        node: A node of the later program.
        was: The nodes of the first program that it stands for.
        itself: Whether the first of them is the node as it was.
    """
    if not itself:
        other = was[0].name if was else node.name
        return f", in place of {short(other, NAME)}" if other != node.name else ""
    read, reads = ([one.name for one in nodes_in((n.args, n.kwargs))] for n in (was[0], node))
    if len(read) != len(reads):
        return ""
    pairs = [(a, b) for a, b in zip(reads, read, strict=True) if a != b]
    if not pairs:
        return ""
    return f", which reads {short(pairs[0][0], NAME)} where it read {short(pairs[0][1], NAME)}"


def shortened(names: Sequence[str]) -> str:
    """Up to four names in a row."""
    kept = [short(name, NAME) for name in names[:4]]
    return ", ".join(kept) + (", ..." if len(names) > 4 else "")


def signal_verdict(old: Any, new: Any, asked: float, error: float) -> dict[str, Any]:
    """The verdict after a pass that changes numbers on purpose: signal to noise, in decibel."""
    from fxlab.passes.manager import compare as measure

    ratio = measure(old, new).sqnr_db
    fits = ratio >= asked
    text = f"{'rounding' if fits else 'different'}: SQNR {ratio:.0f} dB where {asked:g} dB is asked"
    return verdict("rounding" if fits else "different", text, error)


def verdict(
    kind: str,
    text: str,
    error: float | None = None,
    allowed: float | None = None,
    node: Any = None,
) -> dict[str, Any]:
    """The verdict's fields; `node` becomes a row when the story is written."""
    finite = error if error is not None and math.isfinite(error) else None
    return {"verdict": kind, "error": finite, "allowed": allowed, "node": node, "text": text}
