"""What the parts of exercise 5.2 share: the programs, and programs described as plain data.

Observers and int8 layers are no modules that a grader would take from a student's process, so what
an answer made crosses as rows: one a node, arguments as places in the list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxlab
from fxlab.core.errors import FxlabError
from fxlab.core.interpreter import Interpreter
from fxlab.core.node import Node, target_text
from fxlab.passes.quantize.modules import Int8Linear, Quantize
from fxlab.passes.quantize.observers import MinMaxObserver, Observer, PerChannelMinMaxObserver
from fxlab.passes.quantize.prepare import prepare
from fxlab.passes.quantize.qconfig import QConfig
from fxlab.teach.exercise import Finding
from fxlab.teach.limits import AnswerError, safe_text

# ------------------------------------------------------------------------------------ the programs


class One(nn.Module):
    """A single layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return self.fc(x)


class Keyword(One):
    """The layer is called with a keyword."""

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return self.fc(input=x)


class Two(nn.Module):
    """Two layers, a ReLU between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return self.fc2(torch.relu(self.fc1(x)))


class Fan(nn.Module):
    """Two layers, and something else, read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        h = torch.tanh(x)
        return self.left(h) * self.right(h) + h


class Again(nn.Module):
    """One layer is called twice, on values of different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return self.fc(20 * self.fc(x))


class TwoInputs(nn.Module):
    """A program with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fx, self.fy = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return self.fx(x) + self.fy(y)


class NoLayer(nn.Module):
    """Nothing to quantize."""

    def forward(self, x: Tensor) -> Tensor:
        """Return f32[N, 3] or f32[N, 4] of f32[N, 4]."""
        return torch.relu(x) + 1


def program(make: Callable[[], nn.Module], inputs: int = 1, seed: int = 0) -> tuple[Any, list]:
    """Return a traced model in eval mode and three batches for it, a tuple of arguments each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():  # channels of different width, as trained ones have
            width = torch.linspace(0.2, 2.0, len(parameter))
            parameter.data.mul_(width.reshape([-1] + [1] * (parameter.dim() - 1)))
            parameter.requires_grad_(False)
        batches = [
            tuple(torch.randn(5, 4) * size + 0.3 for _ in range(inputs)) for size in (1.0, 2.0, 0.5)
        ]
    return fxlab.symbolic_trace(model), batches


def kits_prepare(gm: Any) -> Any:
    """Return what the kit's first phase makes of ``gm``, with observers that keep extremes."""
    return prepare(gm, QConfig(activation=MinMaxObserver, weight=PerChannelMinMaxObserver))


def run(prepared: Any, batches: Iterable[tuple]) -> Any:
    """Run a program on batches, a tuple of arguments each; return the program."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return prepared


def why_raised(unseen: list[str], found: dict, wrong: Any) -> Finding | None:
    """Hold an error to what the docstring promises of it."""
    said = f"{found['kind']}: {found['raised']}"
    if found["kind"] != "ValueError":
        return wrong(
            f"no batch came, and it raised {said}. A ValueError is promised: ask "
            "observer.problem() first, and raise a ValueError that names the value"
        )
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", found["raised"]) for name in unseen):
        return wrong(
            f"it raised {said}. That does not name the value whose observer saw no data: here it "
            f"is {unseen[0]}, the node that the observer reads"
        )
    return None


# ------------------------------------------------------------------------------ rows of plain data


def rows_of(gm: Any) -> list[dict[str, Any]]:
    """Describe a program: one row a node, arguments as places in this list, no names in it."""
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def shown(value: Any) -> Any:
        if isinstance(value, Node):
            return {"row": place.get(value, -1)}
        if isinstance(value, (list, tuple)):
            return [shown(one) for one in value]
        if isinstance(value, dict):
            return {str(key): shown(one) for key, one in value.items()}
        return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)

    rows = []
    for node in nodes:
        module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        rows.append(
            {
                "name": node.name,
                "op": node.op,
                "target": "" if node.op in ("placeholder", "output") else target_text(node.target),
                "kind": type(module).__name__ if module is not None else "",
                "linear": isinstance(module, nn.Linear),
                "observer": isinstance(module, Observer),
                "args": shown(list(node.args)),
                "kwargs": shown(dict(node.kwargs)),
                "reads": [place.get(value, -1) for value in node.all_input_nodes],
            }
        )
    return rows


def described(gm: Any, inputs: Iterable[tuple]) -> dict[str, Any]:
    """Describe what an answer made: its rows, its code, its outputs.

    Raises:
        AnswerError: The program can't be run.
    """
    try:
        with torch.no_grad():
            outputs = [gm(*batch) for batch in inputs]
    except Exception as error:  # the program is an answer: it may raise anything
        raise _cannot_run(gm, error) from None
    return {"rows": rows_of(gm), "code": gm.code.strip(), "outputs": outputs}


def _cannot_run(gm: Any, error: Exception) -> AnswerError:
    """Say that the program failed, not the answer, and why where the reason is a usual one."""
    text = (error.message if isinstance(error, FxlabError) else safe_text(error)).strip()
    first = (text.splitlines() or ["no message"])[0][:200]
    sentence = f"the program that your code made raises {type(error).__name__}: {first}"
    problem = AnswerError("type", sentence)
    problem.finding = Finding(sentence, actual=gm.code.strip())
    modules = {n: gm.get_submodule(str(n.target)) for n in gm.graph.find_nodes(op="call_module")}
    for node, module in modules.items():
        if not isinstance(module, Int8Linear):
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if module.weight.dtype != torch.int8:
            reason = "the codes of a weight are int8: use PerChannelMinMaxObserver"
        elif source is None or not isinstance(modules.get(source), Quantize):
            reason = "this call reads float: each call needs its own Quantize and Int8Linear"
        else:
            continue
        problem.sentence = f"{node.name} calls {node.target}, and {reason} ({sentence})"
        problem.finding = Finding(problem.sentence, node.name, actual=gm.code.strip())
        break
    return problem


def without_observers(rows: list[dict]) -> list[tuple]:
    """Return what is left of a program when each observer is replaced by what it reads."""
    kept = [i for i, row in enumerate(rows) if not row["observer"]]
    new_place = {old: new for new, old in enumerate(kept)}

    def value_of(place: int) -> int:
        for _ in rows:
            if place < 0 or not rows[place]["observer"] or not rows[place]["reads"]:
                break
            place = rows[place]["reads"][0]
        return new_place.get(place, -1)

    def settled(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"row"}:
            return {"row": value_of(value["row"])}
        if isinstance(value, dict):
            return {key: settled(one) for key, one in value.items()}
        return [settled(one) for one in value] if isinstance(value, list) else value

    return [
        (rows[i]["op"], rows[i]["target"], settled(rows[i]["args"]), settled(rows[i]["kwargs"]))
        for i in kept
    ]


# -------------------------------------------------------------------- what is right, by running it


class Ranges(Interpreter):
    """Runs the float program and keeps the range of what each linear layer reads."""

    def __init__(self, gm: Any) -> None:
        super().__init__(gm)
        self.ranges: dict[Node, tuple[float, float]] = {}

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Note the range of a layer's input."""
        value = super().call_module(target, args, kwargs)
        if isinstance(self.fetch_attr(target), nn.Linear):
            (node,) = self.node.all_input_nodes
            seen = args[0] if args else kwargs["input"]
            low, high = self.ranges.get(node, (float("inf"), float("-inf")))
            self.ranges[node] = min(low, float(seen.min())), max(high, float(seen.max()))
        return value

    def run_node(self, n: Node) -> Any:
        """Remember whose turn it is."""
        self.node = n
        return super().run_node(n)


class Reference(Interpreter):
    """Runs a calibrated program as integers would: inputs and weights rounded to their codes.

    Args:
        gm: the program.
        bias: whether layers add their bias.
        codes: whether layers round their inputs.
    """

    def __init__(self, gm: Any, bias: bool = True, codes: bool = True) -> None:
        super().__init__(gm)
        self.bias, self.codes = bias, codes

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Skip observers; run layers on what codes can represent."""
        module = self.fetch_attr(target)
        if isinstance(module, Observer):
            return args[0]
        if isinstance(module, nn.Linear):
            (source,) = self.node.all_input_nodes
            observer: Any = self.fetch_attr(source.target)
            x = args[0] if args else kwargs["input"]
            x = observer.qparams().fake_quantize(x) if self.codes else x
            weight = weight_qparams(module).fake_quantize(module.weight)
            bias = module.bias.double() if self.bias and module.bias is not None else None
            return F.linear(x.double(), weight.double(), bias).float()
        return super().call_module(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        """Remember whose turn it is."""
        self.node = n
        return super().run_node(n)


def weight_qparams(layer: nn.Linear) -> Any:
    """Return the scales of a layer's weight, one an output channel."""
    observer = PerChannelMinMaxObserver()
    observer(layer.weight.detach())
    return observer.qparams()
