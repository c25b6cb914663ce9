"""Which answers look like one another?

Two answers are compared by their normalised syntax: names, constants and order of imports are left
out. Pieces that most of the class has (the stub, the usual loop) count for nothing. A pair is a
reason to talk with two students, never for points: short answers are alike by themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

PIECE = 6  # tokens
SHORTEST = 40  # tokens; below it all answers look alike
ALIKE = 0.85


def pairs(marks: Mapping[str, Sequence[Any]]) -> list[tuple[str, str, str, float]]:
    """List the pairs of similar answers.

    Args:
        marks: Student -> what came out of each part; `id` and `shape` are read.

    Returns:
        (part, student, other, similarity from 0 to 1), the most similar first.

    Example:
        >>> from types import SimpleNamespace as M
        >>> one, other = [f"A{k}" for k in range(60)], [f"B{k}" for k in range(60)]
        >>> found = pairs({"a": [M(id="2.2", shape=one)], "b": [M(id="2.2", shape=one)],
        ...                "c": [M(id="2.2", shape=other)]})
        >>> found
        [('2.2', 'a', 'b', 1.0)]
    """
    answers: dict[str, dict[str, set[tuple[str, ...]]]] = defaultdict(dict)
    for student, own in marks.items():
        for mark in own:
            if len(mark.shape) >= SHORTEST:
                shape = mark.shape
                pieces = {tuple(shape[k : k + PIECE]) for k in range(len(shape) - PIECE + 1)}
                answers[mark.id][student] = pieces
    found = []
    for id, own in answers.items():
        common = Counter(piece for pieces in own.values() for piece in pieces)
        most = max(2, len(own) // 2)
        rare = {
            student: {piece for piece in pieces if common[piece] <= most}
            for student, pieces in own.items()
        }
        students = sorted(rare)
        for k, one in enumerate(students):
            for other in students[k + 1 :]:
                both = len(rare[one] & rare[other])
                either = len(rare[one] | rare[other])
                if either >= 10 and both / either >= ALIKE:
                    found.append((id, one, other, round(both / either, 3)))
    return sorted(found, key=lambda pair: (-pair[3], pair))
