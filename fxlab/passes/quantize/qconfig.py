"""Which operation is quantized, and how? A mapping from nodes to a QConfig.

A QConfig says how to observe activations and weights. A QConfigMapping says which operations get
which: by module path, by pattern of the path, by module class or function, or all. The most
specific entry wins; ``None`` leaves an operation in float. Names are those of
``torch.ao.quantization``, so what is learnt here carries over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxlab.core.errors import FxlabError
from fxlab.passes.quantize.observers import (
    HistogramObserver,
    MovingAverageMinMaxObserver,
    Observer,
    PerChannelMinMaxObserver,
)

__all__ = [
    "QConfig",
    "QConfigMapping",
    "default_qconfig",
    "default_qat_qconfig",
    "simulated_qconfig",
]


@dataclass(frozen=True)
class QConfig:
    """How to observe: two functions without arguments that make an observer each.

    Args:
        activation: makes the observer of an activation; affine, unsigned codes.
        weight: makes the observer of a weight; symmetric, signed codes, zero point 0.
        tables: where a function of one element (selu, sigmoid, ...) becomes a table of 256 codes:
            "ends" where its result leaves the int8 region as float, "all", or "none". A table
            between two layers is fast, but rounds once more: before the function and after it.
        learn_scale: (training) let the scale of activations be learnt with the weights.
    """

    activation: Callable[[], Observer]
    weight: Callable[[], Observer]
    tables: str = "ends"
    learn_scale: bool = False


def activation_bits() -> int:
    """Return 8, or 7 where the CPU adds products of bytes in 16 bits, which could overflow.

    CPUs with VNNI (and everything newer) add them in 32 bits.
    """
    try:
        return 8 if torch.cpu._is_vnni_supported() or not _is_x86() else 7
    except AttributeError:  # an older torch does not say
        return 8


def _is_x86() -> bool:
    import platform

    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def default_qconfig() -> QConfig:
    """Return the QConfig for calibration: histogram for activations, each channel for weights."""
    return QConfig(
        activation=partial(HistogramObserver, bits=activation_bits()),
        weight=PerChannelMinMaxObserver,
    )


def default_qat_qconfig(learn_scale: bool = False) -> QConfig:
    """Return the QConfig for training.

    Ranges are moving averages, since they drift while weights change; a learnt scale begins at the
    best cut of the first batch.

    Args:
        learn_scale: let the scale of activations be learnt with the weights.
    """
    return QConfig(
        activation=partial(_training_observer(learn_scale), bits=activation_bits()),
        weight=PerChannelMinMaxObserver,
        learn_scale=learn_scale,
    )


def _training_observer(learn_scale: bool) -> Callable[..., Observer]:
    if learn_scale:
        return HistogramObserver
    return partial(MovingAverageMinMaxObserver, averaging=0.05)


def simulated_qconfig(
    weight_bits: int, activation_bits: int = 8, *, qat: bool = False, learn_scale: bool = False
) -> QConfig:
    """Return a QConfig with fewer bits, kept in 8-bit storage: the error of 4 bits, not the speed.

    Args:
        weight_bits: of each weight, 2 to 8.
        activation_bits: of each activation, 2 to 8.
        qat: observe with moving averages, for training.
        learn_scale: (training) learn the scale of activations with the weights.

    Example:
        >>> simulated_qconfig(4).weight().quant_max
        7
    """
    observer = _training_observer(learn_scale) if qat else HistogramObserver
    return QConfig(
        activation=partial(observer, bits=activation_bits),
        weight=partial(PerChannelMinMaxObserver, bits=weight_bits),
        learn_scale=learn_scale,
    )


@dataclass
class QConfigMapping:
    """Which QConfig an operation gets. Every ``set_`` returns the mapping, so calls chain.

    A ``qconfig`` of None leaves the operation in float. What is more special wins: names, then
    regexes, then object types, then the one for all.

    Attributes:
        global_: For what nothing else is said of.
        object_types: By module class, function, or a method's name.
        names: By dotted path of a module; those inside it follow.
        regexes: By a regular expression that the whole path matches.

    Example:
        >>> mapping = QConfigMapping().set_global(default_qconfig()).set_module_name("head", None)
        >>> mapping.find("head", None) is None, mapping.find("body.0", None) is None
        (True, False)
    """

    global_: QConfig | None = None
    object_types: dict[Any, QConfig | None] = field(default_factory=dict)
    names: dict[str, QConfig | None] = field(default_factory=dict)
    regexes: dict[str, QConfig | None] = field(default_factory=dict)

    def set_global(self, qconfig: QConfig | None) -> QConfigMapping:
        """Set what every other operation gets."""
        self.global_ = qconfig
        return self

    def set_object_type(self, kind: Any, qconfig: QConfig | None) -> QConfigMapping:
        """Set what ``kind``, a module class, a function, or a method's name, gets."""
        self.object_types[kind] = qconfig
        return self

    def set_module_name(self, path: str, qconfig: QConfig | None) -> QConfigMapping:
        """Set what the module at ``path`` and all modules inside it get."""
        self.names[path] = qconfig
        return self

    def set_module_name_regex(self, pattern: str, qconfig: QConfig | None) -> QConfigMapping:
        """Set what modules get whose whole path matches ``pattern``; the first entry wins."""
        self.regexes[pattern] = qconfig
        return self

    def find(self, path: str, kind: Any) -> QConfig | None:
        """Return the QConfig of an operation: path, then pattern, then kind, then global."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.names:
                return self.names[prefix]
        for pattern, qconfig in self.regexes.items():
            if re.fullmatch(pattern, path):
                return qconfig
        return self.object_types.get(kind, self.global_)


def as_mapping(qconfig: QConfig | QConfigMapping | None, default: QConfig) -> QConfigMapping:
    """Return a mapping of what the caller gave: nothing, one QConfig, or a mapping."""
    if qconfig is None or isinstance(qconfig, QConfig):
        return QConfigMapping(global_=qconfig or default)
    if isinstance(qconfig, QConfigMapping):
        return qconfig
    raise FxlabError(
        f"qconfig is a {type(qconfig).__name__}",
        expected="a QConfig, a QConfigMapping, or None for the default",
        right="prepare(gm, QConfigMapping().set_global(default_qconfig()))",
    )
