"""What may be written to a terminal, and where does it go?"""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any


def plain(text: str) -> str:
    """Return what may go to a terminal: a name of somebody's model must not move its cursor."""
    return re.sub(
        r"[^\n\t -~\xa0-\U0010ffff]|[\ud800-\udfff\u202a-\u202e\u2066-\u2069]", "\ufffd", text
    )


def say(text: str) -> None:
    """Tell somebody who waits what is being done."""
    if sys.stderr is not None:  # else print would take the standard output
        print(plain(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print what a program reads: one JSON value, and nothing else, on standard output."""
    print(json.dumps(value, indent=2), flush=True)


def write_any_letter() -> None:
    """Write a letter that the terminal's or the pipe's encoding lacks as Python writes it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
