"""For which sizes do symbolic shapes hold? The conditions, few and readable.

torch writes a guard down whenever it asks something about a size. All of them together are enough,
and most are beside the point: they choose a kernel or a layout, and the shapes are the same either
way. Which ones matter is tried out: a guard is told if the program, run on shapes without data at
sizes that break this guard alone, fails or has other shapes. So each guard is a condition on which
the shapes hang, and a reader can put numbers into it: it is an expression of Python.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

__all__ = ["Guard", "code_of", "fewest", "guards_of", "holds", "size_text"]

Sizes = Mapping[str, int]
_NAMES: dict[str, Any] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "int": int,
}
_TRIES = 5
"""Sizes at which a guard is tried before it is called beside the point."""
_POINTS = 4000


class Guard(NamedTuple):
    """A condition on sizes: its text, and the same as code over the names in their order."""

    text: str
    code: Any


def size_text(expr: Any, names: Mapping[Any, str]) -> str:
    """Return a size, or a condition on sizes, as an expression of Python.

    Args:
        expr: sympy's, with torch's functions in it.
        names: What to call each symbol.
    """
    import sympy
    from sympy.printing.precedence import PRECEDENCE
    from sympy.printing.str import StrPrinter

    product = PRECEDENCE["Mul"]

    class Printer(StrPrinter):
        printmethod = "_no_such_method"  # torch's functions bring along how they print

        def parenthesize(self, item: Any, level: int, strict: bool = False) -> str:
            if type(item).__name__ not in _OPERATORS:
                return super().parenthesize(item, level, strict)
            text = self._print(item)
            return f"({text})" if product < level or (not strict and product == level) else text

        def _binary(self, expr: Any) -> str:
            left, right = expr.args[:2]
            first = self.parenthesize(left, product, strict=not left.is_Mul)
            if type(left).__name__ in _OPERATORS:
                first = f"({self._print(left)})"
            second = self.parenthesize(right, product)
            sign = _OPERATORS[type(expr).__name__]
            return f"{first}{sign}{second}" if sign == "//" else f"{first} {sign} {second}"

        _print_FloorDiv = _print_CleanDiv = _print_Mod = _print_PythonMod = _binary
        _print_IntTrueDiv = _print_FloatTrueDiv = _binary

        def _print_Relational(self, expr: Any) -> str:
            left, right = map(self._print, expr.args)
            return f"{left} {expr.rel_op} {right}"

        def _call(self, expr: Any) -> str:
            name = _CALLS[type(expr).__name__]
            return f"{name}({', '.join(sorted(map(self._print, expr.args)))})"

        _print_Max = _print_Min = _print_CeilToInt = _print_FloorToInt = _call
        _print_ceiling = _print_floor = _print_TruncToInt = _call

        def _print_Identity(self, expr: Any) -> str:
            return self._print(expr.args[0])

        _print_ToFloat = _print_Identity

    # Terms are sorted by the names that the reader knows.
    known = {s: sympy.Symbol(n, integer=True, positive=s.is_positive) for s, n in names.items()}
    return Printer().doprint(expr.xreplace(known))


_OPERATORS = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "IntTrueDiv": "/",
              "FloatTrueDiv": "/"}  # fmt: skip
_CALLS = {"Max": "max", "Min": "min", "CeilToInt": "ceil", "FloorToInt": "floor",
          "ceiling": "ceil", "floor": "floor", "TruncToInt": "int"}  # fmt: skip


def guards_of(condition: Any, names: Mapping[Any, str]) -> list[Guard]:
    """Return a condition of sympy's as guards, each as simple as it is found here.

    Args:
        condition: A relation, or several that hold together.
        names: What to call each symbol; the guards' code takes the sizes in this order.
    """
    import sympy

    if condition in (True, sympy.true):
        return []
    if isinstance(condition, sympy.And):
        return [guard for part in condition.args for guard in guards_of(part, names)]
    condition = _simple(condition)
    if condition in (True, sympy.true):
        return []
    return [Guard(size_text(condition, names), code_of(condition, names))]


def code_of(expr: Any, names: Mapping[Any, str]) -> Callable[..., Any] | None:
    """Return ``expr`` as a function of the sizes, in the order of ``names``.

    None if something is in it that has no name here: a size that only data tell, a function of
    torch's that no Python operator stands for.
    """
    letters = {symbol: f"_{i}" for i, symbol in enumerate(names)}
    if not expr.free_symbols <= letters.keys():
        return None
    try:
        return eval(f"lambda {', '.join(letters.values())}: {size_text(expr, letters)}", _NAMES)
    except SyntaxError:
        return None


def _simple(condition: Any) -> Any:
    """Return the condition with its numbers on the right, and a remainder where it asks for one."""
    import sympy as untyped
    from torch.utils._sympy.functions import FloorDiv, Mod

    sympy: Any = untyped
    if not isinstance(condition, sympy.core.relational.Relational) or any(
        side.is_Boolean or not side.is_integer for side in condition.args
    ):
        return condition
    relation, difference = type(condition), sympy.expand(condition.lhs - condition.rhs)
    content, rest = difference.as_content_primitive()
    number, terms = rest.as_coeff_add()
    if relation in (sympy.Eq, sympy.Ne):
        for part in difference.atoms(FloorDiv):
            left_over = part.args[0] - part.args[1] * part
            if rest in (sympy.expand(left_over), sympy.expand(-left_over)):
                return relation(Mod(*part.args, evaluate=False), 0, evaluate=False)
    elif not number.is_Integer or not content.is_positive:
        return condition
    left = [t for t in terms if not t.could_extract_minus_sign()]
    right = [-t for t in terms if t.could_extract_minus_sign()]
    if not left:
        flipped = type(relation(0, 1, evaluate=False).reversed)
        left, right, number, relation = right, left, -number, flipped
    if right:
        more, less = max(number, 0), max(-number, 0)
        return relation(sympy.Add(*left, more), sympy.Add(*right, less), evaluate=False)
    if relation is sympy.StrictGreaterThan:
        relation, number = sympy.GreaterThan, number - 1
    elif relation is sympy.StrictLessThan:
        relation, number = sympy.LessThan, number + 1
    elif relation is sympy.Ne and left == [*condition.free_symbols] and number == -1:
        relation, number = sympy.GreaterThan, number - 1  # a size is 1 or more
    whole, least = sympy.Add(*left), -number
    if relation is sympy.GreaterThan and isinstance(whole, FloorDiv):
        base, divisor = (cast("Any", part) for part in whole.args)
        if divisor.is_Integer and divisor.is_positive:
            return _simple(sympy.GreaterThan(base, divisor * least, evaluate=False))
    return relation(whole, least, evaluate=False)


def holds(guard: Guard, sizes: Sequence[int]) -> bool:
    """Say whether the guard holds for these sizes, in the order of the names it was made for."""
    if guard.code is None:
        return True
    try:
        return bool(guard.code(*sizes))
    except (ZeroDivisionError, OverflowError):
        return False
    except (NameError, TypeError, ValueError):  # a function that has no name here
        return True


def fewest(
    guards: Iterable[Guard],
    example: Sequence[int],
    works: Callable[[tuple[int, ...]], bool],
) -> list[Guard]:
    """Return those guards on which something hangs.

    Left out is what follows from the others, and what changes nothing: where it alone is broken,
    the program runs at every size that was tried and has the shapes that are claimed.

    Args:
        guards: All that were asked, in their order.
        example: The sizes of the walk that asked.
        works: Whether the program runs at some sizes and has the shapes that are claimed.
    """
    left = list({guard.text: guard for guard in guards}.values())
    if not left:
        return left
    numbers = {int(n) for guard in left for n in re.findall(r"\b\d+\b", guard.text)}
    points = _points(example, numbers)
    table = {g.text: [holds(g, point) for point in points] for g in left}
    can_try, tried = works(tuple(example)), {}
    order = sorted(left, key=lambda g: (-len(g.text), -left.index(g)))  # first the wordiest
    for guard in order:
        others = [table[g.text] for g in left if g is not guard]
        broken = [
            point
            for i, point in enumerate(points)
            if not table[guard.text][i] and all(other[i] for other in others)
        ]
        if guard.code is None or (broken and not can_try):
            continue
        # Sizes that were tried for another guard cost nothing.
        known = [point for point in tried if point in set(broken)][:_TRIES]
        fresh = _spread(broken, example, _TRIES - len(known) // 2)
        if all(works(point) for point in (*known, *fresh)):
            left.remove(guard)
        tried.update(dict.fromkeys(fresh))
    return _kept_right(left, order, points, table, example, works) if can_try else left


def _kept_right(
    left: list[Guard],
    order: list[Guard],
    points: list[tuple[int, ...]],
    table: Mapping[str, list[bool]],
    example: Sequence[int],
    works: Callable[[tuple[int, ...]], bool],
) -> list[Guard]:
    """Put guards back until the program works wherever it is tried and all of them hold."""
    gone = [guard for guard in reversed(order) if guard not in left]
    while gone:
        fine = [i for i in range(len(points)) if all(table[g.text][i] for g in left)]
        # Where most of what was left out is broken, a mistake shows first.
        fine.sort(key=lambda i: sum(table[g.text][i] for g in gone))
        tried = [points[i] for i in fine[: 2 * _TRIES]]
        tried += _spread([points[i] for i in fine], example)
        wrong = next((point for point in tried if not works(point)), None)
        if wrong is None:
            break
        back = next((g for g in gone if not holds(g, wrong)), None)
        if back is None:
            break
        gone.remove(back)
        left = [g for g in reversed(order) if g in left or g is back]
    return left


def _points(example: Sequence[int], numbers: Iterable[int]) -> list[tuple[int, ...]]:
    """Return sizes to try: small ones, those around the example, and some at random.

    Args:
        example: The sizes of the walk.
        numbers: What the program compares sizes with; near these things change.
    """
    count, rng = len(example), random.Random(0)
    side = max(2, int(_POINTS ** (1 / count)) if count > 1 else 400)
    found = dict.fromkeys([tuple(example)])
    number = min(side**count, 2 * _POINTS)
    for i in range(number):
        found[tuple(i // side**k % side + 1 for k in range(count))] = None
    for position, size in enumerate(example):  # one alone, the others as they are
        for value in (*range(1, 41), *range(max(1, size - 4), 2 * size + 5)):
            found[(*example[:position], value, *example[position + 1 :])] = None
    likely = sorted({1, 2, 3, *example, *(n for n in numbers if 0 < n < 10_000)})
    for _ in range(min(_POINTS, len(likely) ** count)):
        few = rng.sample(range(count), rng.randint(1, count))
        found[tuple(rng.choice(likely) if k in few else s for k, s in enumerate(example))] = None
    top = max(example)
    for _ in range(_POINTS // 2):
        reach = rng.choice((4, 12, 40, 2 * top + 2))
        found[tuple(rng.randint(1, reach) for _ in example)] = None
    return list(found)


def _spread(
    points: list[tuple[int, ...]], example: Sequence[int], number: int = _TRIES
) -> list[tuple[int, ...]]:
    """Choose some points that differ: the nearest to the example, the extremes, some between."""
    if len(points) <= number:
        return points

    def distance(point: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(point, example, strict=True))

    by_size = sorted(points, key=lambda point: (math.prod(point), point))
    chosen = {min(points, key=distance): None, by_size[0]: None, by_size[-1]: None}
    rng = random.Random(len(points))
    while len(chosen) < number:
        chosen[rng.choice(points)] = None
    return list(chosen)
