"""What is the smallest program on which a pass still breaks?"""

from __future__ import annotations

from typing import Any


def shrink(gm: Any, pass_: Any, check: Any = None, inputs: Any = ()) -> Any:
    """Placeholder until the search is written."""
    raise NotImplementedError
