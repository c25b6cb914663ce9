"""What a clock says on a machine that others use too: never how long, only how much longer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

HANGS = 500  # seconds after which a process is ended: no busy machine takes so long, a test may 600


def own_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that this thread worked, whatever others did meanwhile.

    Collections are left out: they walk all that the tests before left in the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start
    finally:
        if enabled:
            gc.enable()


def times_as_long(many: Callable[[], float], few: Callable[[], float], rounds: int = 7) -> float:
    """Return the least seconds of ``many`` over the least of ``few``, measured in turns.

    A neighbour only makes a run longer: the least of several is the program's own, and what slows
    the machine for a while slows both.
    """
    few()  # the first warms up
    pairs = [(many(), few()) for _ in range(rounds)]
    return min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs)
