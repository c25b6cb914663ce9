"""1.3: why does a program not trace, and what is the way out that fits?

Five programs, each of which asks a traced value for something that only a run can tell. An answer
says what was asked and hands back a captured program. The judge runs it beside the original on
inputs that go every way, and looks whether a pass could see inside (paper, section 5.3; Figure 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxlab.core.graph_module import GraphModule
from fxlab.core.node import target_text
from fxlab.interop.targets import function_table
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.judge import kind_of, unequal
from fxlab.teach.limits import AnswerError

WORDS = ("branch", "count", "unpack", "number", "state")


def gate(x: torch.Tensor) -> torch.Tensor:
    """Squash a tensor one way or another, by the sign of its mean."""
    if x.mean() > 0:
        return torch.sigmoid(x)
    return torch.tanh(x)


def steps(x: torch.Tensor, n: int) -> torch.Tensor:
    """Apply the same step n times."""
    for _ in range(n):
        x = torch.tanh(x) + 1
    return x


def settle(x: torch.Tensor) -> torch.Tensor:
    """Halve a tensor until no value is larger than 1."""
    while x.abs().max() > 1:
        x = x / 2
    return x


def rows(x: torch.Tensor) -> torch.Tensor:
    """Make a matrix of a tensor with any number of dimensions."""
    first, *_ = x.shape
    return x.reshape(first, -1)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Subtract the mean."""
    return x - float(x.mean())


PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    one.__name__: one for one in (gate, steps, settle, rows, spread)
}
_WHY = {"gate": "branch", "steps": "count", "settle": "branch", "rows": "unpack",
        "spread": "number"}  # fmt: skip
_ASKED = {
    "gate": "`if` asks whether x.mean() > 0, by the value of a tensor",
    "steps": "`range` asks how often to repeat, by the value of an argument",
    "settle": "`while` asks whether to go on, by the value of a tensor",
    "rows": "`first, *_ = x.shape` asks how many values there are to take apart",
    "spread": "`float` asks for a number of Python's",
}


def entry(answer: Callable[[str], Any], name: str, inputs: list[Any]) -> dict[str, Any]:
    """Return the student's word for a program, and what the captured program does.

    Args:
        answer: my_capture.
        name: Of the program.
        inputs: Tensors; the captured program is run on each.

    Returns:
        {"why", "outputs": tensor or the error's text for each input, "hidden": names of calls that
        no pass can see into, "code"}.
    """
    value = answer(name)
    if not isinstance(value, tuple) or len(value) != 2:
        raise AnswerError("type", f"for {name} it returned {kind_of(value)}: return (why, gm)")
    why, gm = value
    if not isinstance(gm, GraphModule):
        raise AnswerError(
            "type", f"for {name} the second value is {kind_of(gm)}, not the captured GraphModule"
        )
    outputs = []
    more = (3,) * (len(gm.graph.find_nodes(op="placeholder")) - 1)  # n, where it was kept
    for x in inputs:
        with torch.no_grad():
            try:
                outputs.append(gm(x.clone(), *more))
            except Exception as error:
                line = (str(error).strip().splitlines() or [""])[0][:200]
                outputs.append(f"{type(error).__name__}: {line}")
    return {
        "why": str(why),
        "outputs": outputs,
        "hidden": [node.name for node in gm.graph.nodes if _hides(node, gm)],
        "code": str(gm.code).strip(),
    }


def _hides(node: Any, gm: GraphModule) -> bool:
    if node.op == "call_module":
        return not type(gm.get_submodule(node.target)).__module__.startswith("torch.nn.")
    if node.op != "call_function" or node.target is torch._assert:
        return False  # the check that a fixed argument still has its value
    return function_table(target_text(node.target)) is not node.target


def _judge_why(args: tuple[Any, ...], value: Any) -> Finding | None:
    name, word = args[0], value["why"]
    if word == _WHY[name]:
        return None
    if word not in WORDS:
        return Finding(f"{word!r} is none of the words: {', '.join(WORDS)}")
    return Finding(f"{name} stops for another reason than {word!r}: look which line of it the "
                   "TraceError quotes, and what that line needs to know")  # fmt: skip


def _judge_capture(args: tuple[Any, ...], value: Any) -> Finding | None:
    name, inputs = args
    program = PROGRAMS[name]
    for x, got in zip(inputs, value["outputs"], strict=True):
        right = program(x, 3) if name == "steps" else program(x)
        text = unequal(right, got) if isinstance(got, torch.Tensor) else f"it raises {got}"
        if text:
            return Finding(_sentence(name, x, text), actual=value["code"])
    if value["hidden"] and name != "settle":
        return Finding(
            f"{name} hides its operations in the call {value['hidden'][0]}, where no pass sees "
            "them: capture it so that they are nodes", actual=value["code"],
        )  # fmt: skip
    return None


def _sentence(name: str, x: torch.Tensor, text: str) -> str:
    shape = list(x.shape)
    if name == "gate":
        side = "positive" if x.mean() > 0 else "not positive"
        return f"on an input whose mean is {side} the captured gate is wrong: {text}"
    if name == "settle":
        most = x.abs().max().item()
        return f"on an input with values up to {most:.3g} the captured settle is wrong: {text}"
    if name == "rows":
        return f"on an input of shape {shape} the captured rows is wrong: {text}"
    return f"the captured {name} is wrong on an input of shape {shape}: {text}"


def _inputs(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = random(2, 3)
    return {
        "gate": [x.abs(), -x.abs(), x],
        "steps": [x, random(4)],
        "settle": [x.tanh(), x.tanh() + 2, x * 1000, x * 1e30],
        "rows": [random(2, 3, 4), random(5, 3, 4), random(1, 6, 2)],
        "spread": [x, x + 10, random(4)],
    }[name]


def _cases() -> Iterator[Case]:
    for name in PROGRAMS:
        yield Case(name, f"{name}: why", lambda name=name: (name, []), _judge_why)
        yield Case(
            name, f"{name}: captured", lambda name=name: (name, _inputs(name)), _judge_capture
        )


EXERCISE = Exercise(
    id="1.3",
    title="Say why it doesn't trace, and mend it",
    level=2,
    minutes=30,
    idea="A trace stops where Python needs a value that only a run can tell; each of the ways out "
    "costs something else (section 5.3, Figure 4).",
    needs=(
        "trace",
        "proxy",
        "control flow",
        "specialization",
        "concrete_args",
        "wrap",
        "leaf module",
    ),
    teaches=("ways out",),
    hints=(
        "Lecture 04 shows the same five kinds on other programs, and its table 'Five ways out, "
        "side by side' says what each costs. Trace each program first and read which of its lines "
        "the TraceError quotes.",
        "Ask of each: is the thing that Python wants to know the same in each call? Then fix it. "
        "Can both sides be computed? Then choose with a tensor. Is there a tensor operation that "
        "needs no number of Python's? Then change the line. If nothing of that is true, keep the "
        "function whole.",
        "On another example, flip from lecture 04: `with fxlab.wrapped(flip): gm = "
        "fxlab.symbolic_trace(lambda x: flip(x))` records flip as one call. The lambda matters: "
        "what is traced itself is never a leaf.",
    ),
    asks=("torch.jit.script", "torch.jit.trace", "torch.export.export", "torch.fx.symbolic_trace"),
    parts=(
        Part(
            id="1.3",
            name="my_capture",
            points=dict.fromkeys(PROGRAMS, 2),
            entry=entry,
            cases=_cases,
            wrong={
                "one_side": "on an input whose mean is not positive the captured gate is wrong",
                "all_wrapped": "gate hides its operations in the call",
                "unrolled": "the captured settle is wrong",
                "one_batch": "on an input of shape [5, 3, 4] the captured rows is wrong",
                "wrong_word": "steps stops for another reason than 'branch'",
                "baked_number": "the captured spread is wrong",
            },
            stub='def my_capture(name):\n    """Return (why, gm): what `name` asks of a traced '
            'value, and the captured program."""',
        ),
    ),
)
