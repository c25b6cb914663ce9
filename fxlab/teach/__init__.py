"""Exercises that explain: what does a student call, and what does a teacher?

A student's notebook imports `check`, `hint`, `progress`, `save`, `restore`, `predict` and `word`;
`fxlab release` and `fxlab grade` are `release` and `grade` here. An exercise is data
(`exercise.py`); `examine.py` runs its cases, `limits.py` calls an answer in the kernel and
`process.py` in a process of its own, `result.py` shows what came out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import exercises as _folder  # noqa: F401  (or it would hide `exercises` below)

if TYPE_CHECKING:
    from .exercise import Exercise

_LATER = {
    "NotDone": "exercise", "Exercise": "exercise", "Part": "exercise",
    "Case": "exercise", "Property": "exercise", "Finding": "exercise",
    "check": "checking", "Result": "result", "hint": "keeping", "progress": "keeping",
    "save": "keeping", "restore": "keeping", "predict": "predicting", "word": "words",
    "release": "releasing", "grade": "grading", "replay": "replaying",
    "use_course": "variants",
}  # fmt: skip
__all__ = ["exercises", *_LATER]


def exercises() -> list[Exercise]:
    """List every exercise, sorted by id."""
    return importlib.import_module(f"{__name__}.exercise").exercises()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _LATER:
        value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fxlab.teach' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
