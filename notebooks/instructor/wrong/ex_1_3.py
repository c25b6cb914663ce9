"""Plausible wrong answers to 1.3."""

import torch

import fxlab
from fxlab.teach.exercises.ex_1_3 import gate, rows, settle, spread, steps


def _right(name):
    if name == "gate":
        both = lambda x: torch.where(x.mean() > 0, torch.sigmoid(x), torch.tanh(x))  # noqa: E731
        return "branch", fxlab.symbolic_trace(both)
    if name == "steps":
        return "count", fxlab.symbolic_trace(steps, concrete_args={"n": 3})
    if name == "settle":
        with fxlab.wrapped(settle):
            return "branch", fxlab.symbolic_trace(lambda x: settle(x))
    if name == "rows":
        return "unpack", fxlab.symbolic_trace(rows, example_inputs=(torch.zeros(2, 3, 4),))
    return "number", fxlab.symbolic_trace(lambda x: x - x.mean())


def wrong_one_side(name):
    """Take one side of a branch."""
    if name == "gate":
        return "branch", fxlab.symbolic_trace(lambda x: torch.sigmoid(x))
    return _right(name)


def wrong_all_wrapped(name):
    """Wrap whatever does not trace."""
    programs = {
        "gate": lambda x: gate(x),
        "settle": lambda x: settle(x),
        "rows": lambda x: rows(x),
        "spread": lambda x: spread(x),
    }
    if name == "steps":
        return _right(name)
    with fxlab.wrapped(gate, settle, rows, spread):
        return _right(name)[0], fxlab.symbolic_trace(programs[name])


def wrong_unrolled(name):
    """Unroll a loop as often as seems enough."""

    def three_times(x):
        for _ in range(3):
            x = torch.where(x.abs().max() > 1, x / 2, x)
        return x

    return ("branch", fxlab.symbolic_trace(three_times)) if name == "settle" else _right(name)


def wrong_one_batch(name):
    """Write down the sizes of the example."""
    if name == "rows":
        return "unpack", fxlab.symbolic_trace(lambda x: x.reshape(2, -1))
    return _right(name)


def wrong_wrong_word(name):
    """Take a count for a branch."""
    why, gm = _right(name)
    return "branch" if name == "steps" else why, gm


def wrong_baked_number(name):
    """Bake the number of one input."""
    if name == "spread":
        mean = float(torch.randn(2, 3).mean())
        return "number", fxlab.symbolic_trace(lambda x: x - mean)
    return _right(name)


def wrong_delegation(name):
    """Let TorchScript do it."""
    if name == "settle":
        whole = torch.jit.script(settle)
        return "branch", fxlab.symbolic_trace(lambda x: whole(x))
    return _right(name)
