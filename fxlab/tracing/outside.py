"""What did the traced program change outside of its model?

Globals that it writes and random numbers that it draws are not in the graph (the paper leaves
effects out, section 5.6). Which globals it could write is read from the code of its functions;
generators of random numbers are compared only if a name in that code may draw.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from fxlab.core import patches
from fxlab.core.tracer import Tracer
from fxlab.tracing.keeping import CONTAINERS, equal, first_line, refill
from fxlab.tracing.questions import Facts, contents

_MISSING = object()


class Outside:
    """What some functions could change outside of a model, as it was before.

    Args:
        shown: The users' functions that a trace goes through -> what their code shows.
        held: What the model holds; generators of random numbers among it.
        forwards: Each class of modules whose forward may run -> that.

    Attributes:
        generators: Each generator of random numbers that was there before -> its state.
    """

    def __init__(
        self, shown: dict[types.FunctionType, Facts], held: list[Any], forwards: dict[type, Any]
    ) -> None:
        self._globals = list(_globals(shown))
        self._inner = [held for function in shown for held in _inner(function)]
        self._inner += [held for pair in forwards.items() for held in _of_class(*pair)]
        self._drawn = _random_states() if any(facts.draws for facts in shown.values()) else {}
        cells = [cell for function in shown for cell in function.__closure__ or ()]
        given = [value for _, _, value, _ in self._globals] + contents(cells) + held
        generators = [g for g in given if isinstance(g, torch.Generator)]
        self.generators = {g: g.get_state() for g in generators}

    def warn_of_draws(self, tracer: Tracer) -> None:
        """Say which generators were drawn from."""
        now = _random_states() if self._drawn else {}
        for name, old in self._drawn.items():
            if now[name] != old:
                tracer.warn(
                    "random " + name,
                    f"the program draws random numbers from {name} that are fixed in the graph: "
                    "take them from torch.rand and the like, which are recorded",
                    first_line(tracer.root_function),
                )

    def put_back(self, tracer: Tracer) -> None:
        """Put back generators, and globals that hold a Proxy now; say which were written."""
        for generator, state in self.generators.items():
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
                tracer.warn(
                    "random generator",
                    "the program draws random numbers from a generator into a tensor that is fixed "
                    "in the graph: draw them by torch.rand(..., generator=...) and the like",
                    first_line(tracer.root_function),
                )
        for function, name, value, copy in self._globals:
            table = function.__globals__
            now = table.get(name, _MISSING)
            if now is value and (copy is None or equal(value, copy)):
                continue
            text = f"the program writes to the global {name}, and the graph does not do it"
            if patches.find_proxy(list(now) if isinstance(now, set) else now) is not None:
                text += "; it was put back, since it held a Proxy"
                table[name] = value
                if copy is not None:
                    refill(value, copy)
            tracer.warn("global " + name, text, first_line(function))
        for function, name, value, copy, cell in self._inner:
            now = (*contents([cell] if cell else []), value)[0]
            if now is value and (copy is None or equal(value, copy)):
                continue
            text = f"the program writes to {name}, a default value, a variable of an outer function"
            text += f" or class of {function.__name__}, and the graph does not do it"
            if patches.find_proxy(list(now) if isinstance(now, set) else now) is not None:
                text += "; it was put back, since it held a Proxy"
                if cell is not None:
                    cell.cell_contents = value
                if copy is not None:
                    refill(value, copy)
            tracer.warn("inner " + name, text, first_line(function))


def _globals(shown: dict[types.FunctionType, Facts]) -> Iterator[tuple[Any, ...]]:
    """Yield (function, name, value, copy) for what these functions could change of their globals.

    A name that they assign, or a list, dict, set or generator of random numbers that they read.
    """
    for function, facts in shown.items():
        table = function.__globals__
        for name in facts.names & table.keys():
            value = table[name]
            if type(value) in CONTAINERS:
                yield function, name, value, value.copy()
            elif name in facts.stored or type(value) is torch.Generator:
                yield function, name, value, None


def _inner(function: types.FunctionType) -> Iterator[tuple[Any, ...]]:
    """Yield (function, name, value, copy, cell) of closure variables, and of default values."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, value, cell) for name, cell in cells for value in contents([cell])]
    held += [(name, value, None) for name, value in zip(names, defaults, strict=True)]
    held += [(name, value, None) for name, value in (function.__kwdefaults__ or {}).items()]
    for name, value, cell in held:
        if cell is not None or type(value) in CONTAINERS:
            copy = value.copy() if type(value) in CONTAINERS else None
            yield function, name, value, copy, cell


def _of_class(kind: type, forward: Any) -> Iterator[tuple[Any, ...]]:
    """Yield (forward, name, value, copy, None) of the containers that classes have."""
    users = isinstance(forward, types.FunctionType)
    for owner in kind.__mro__[: kind.__mro__.index(torch.nn.Module)] if users else ():
        for name, value in vars(owner).items():
            if type(value) in CONTAINERS and name[:2] != "__":
                yield forward, name, value, value.copy(), None


def _random_states() -> dict[str, Any]:
    """Return the state of each global generator of random numbers, to be compared."""
    states: dict[str, Any] = {"random": random.getstate()}
    states["torch"] = torch.random.get_rng_state().numpy().tobytes()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), rest)
    return states
