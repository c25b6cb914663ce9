"""Wrong answers to 2.5, each plausible; the check must tell each its sentence."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxlab


def _ints(x):
    return x * torch.clamp(x + 3, 0, 6) / 6


def _floats(x):
    return x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0


def _hardswish(x):
    return F.hardswish(x)


def _rewrite(gm, patterns=(_ints, _floats), normalize=True):
    matches = []
    for pattern in patterns:
        matches += fxlab.replace_pattern(gm, pattern, _hardswish, normalize=normalize)
    return matches or fxlab.explain_mismatch(patterns[0], gm, normalize=normalize)


def wrong_by_spelling(gm):
    """Match what is spelled like the pattern only."""
    return _rewrite(gm, normalize=False)


def wrong_ints_only(gm):
    """Take it that 3.0 matches 3."""
    return _rewrite(gm, patterns=(_ints,))


def wrong_any_constant(gm):
    """Let every constant match."""
    found = fxlab.replace_pattern_with_filters(
        gm, _ints, _hardswish, ignore_literals=True, normalize=True
    )
    return found or fxlab.explain_mismatch(_ints, gm, normalize=True)


def wrong_two_parameters(gm):
    """Give the pattern a parameter for each place where x stands."""
    matches = []
    for three, six in ((3, 6), (3.0, 6.0)):
        matches += fxlab.replace_pattern(
            gm,
            lambda x, y, three=three, six=six: y * torch.clamp(x + three, six - six, six) / six,
            lambda x, y: F.hardswish(x),
            normalize=True,
        )
    return matches or fxlab.explain_mismatch(_ints, gm, normalize=True)


def wrong_silent(gm):
    """Return the empty list as it is."""
    matches = []
    for pattern in (_ints, _floats):
        matches += fxlab.replace_pattern(gm, pattern, _hardswish, normalize=True)
    return matches


def wrong_half_a_pattern(gm):
    """Forget the division."""

    def pattern(x):
        return x * torch.clamp(x + 3, 0, 6)

    matches = fxlab.replace_pattern(gm, pattern, _hardswish, normalize=True)
    return matches or fxlab.explain_mismatch(pattern, gm, normalize=True)


def wrong_delegation(gm):
    """Call torch.fx's."""
    return torch.fx.replace_pattern(gm, _ints, _hardswish)
