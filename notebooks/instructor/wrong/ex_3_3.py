"""Plausible wrong answers to 3.3: a check that can't see the bug, or sees one where none is."""

import copy

import torch

import fxlab
from fxlab.teach.exercises import ex_3_3, foreign


def _recorded(gm, pass_):
    with fxlab.record(gm) as timeline:
        pass_(gm)
    return timeline


def wrong_a_first_failure(gm, x):
    # Blames the middle of the first match, which is right.
    wanted = gm(x)
    timeline = _recorded(gm, foreign.fold_scales)
    for step in timeline.steps:
        if not torch.allclose(timeline.module(step.index)(x), wanted):
            return step


def wrong_a_last_edit(gm, x):
    return _recorded(gm, foreign.fold_scales).steps[-1].code


def wrong_a_compared_afterwards(gm, x):
    timeline = _recorded(gm, foreign.fold_scales)
    wanted = gm(x)
    return timeline.bisect(lambda candidate: torch.allclose(candidate(x), wanted))


def wrong_a_told_by_hand(gm, x):
    # The last suspect: it was read off one printout and is one edit late.
    wanted = gm(x)
    timeline = _recorded(gm, foreign.fold_scales)
    found = timeline.bisect(lambda candidate: torch.allclose(candidate(x), wanted))
    return timeline.steps[found.step.index].code


def wrong_a_forgotten_return(gm, x):
    wanted = gm(x)
    timeline = _recorded(gm, foreign.fold_scales)
    timeline.bisect(lambda candidate: torch.allclose(candidate(x), wanted))


def wrong_a_to_the_last_bit(gm, x):
    # A right fold rounds differently.
    wanted = gm(x)
    timeline = _recorded(gm, foreign.fold_scales)
    return timeline.bisect(lambda candidate: torch.equal(candidate(x), wanted))


def wrong_a_delegation(gm, x):
    return ex_3_3.truth(foreign.fold_scales, gm)[2]


def wrong_b_this_input(gm, x):
    wanted = gm(x)
    timeline = _recorded(gm, foreign.merge_repeats)
    return timeline.bisect(lambda candidate: torch.allclose(candidate(x), wanted))


def wrong_b_shapes_only(gm, x):
    wide = 10 * torch.randn_like(x)
    wanted = gm(wide)
    timeline = _recorded(gm, foreign.merge_repeats)
    return timeline.bisect(lambda candidate: candidate(wide).shape == wanted.shape)


def wrong_b_first_edit(gm, x):
    return _recorded(gm, foreign.merge_repeats).steps[0]


def wrong_b_delegation(gm, x):
    return ex_3_3.truth(foreign.merge_repeats, gm)[2]


def wrong_c_one_call(gm, x):
    wanted = copy.deepcopy(gm)(x)
    timeline = _recorded(gm, foreign.drop_unread)
    return timeline.bisect(lambda candidate: torch.allclose(copy.deepcopy(candidate)(x), wanted))


def wrong_c_no_copy(gm, x):
    # Each frame's two calls change the buffer that the next frame reads.
    first = copy.deepcopy(gm)
    wanted = [first(x), first(x)]
    timeline = _recorded(gm, foreign.drop_unread)
    return timeline.bisect(lambda candidate: all(torch.equal(candidate(x), one) for one in wanted))


def wrong_c_spoilt_start(gm, x):
    # The reference is taken from gm itself, which then begins where the two calls left it.
    wanted = [gm(x), gm(x)]
    timeline = _recorded(gm, foreign.drop_unread)

    def check(candidate):
        candidate = copy.deepcopy(candidate)
        return all(torch.equal(candidate(x), one) for one in wanted)

    return timeline.bisect(check)


def wrong_c_delegation(gm, x):
    return ex_3_3.truth(foreign.drop_unread, gm)[2]
