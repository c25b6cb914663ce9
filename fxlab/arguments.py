"""What may a word of the command line be: a file to write, a folder, a number?

These are types for argparse: each returns what the word means, or refuses it in a line before
anything is run, so that nobody waits for an hour to learn that the table can't be written.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from pathlib import Path


def new_file(text: str) -> Path:
    """Return a path to which a file can be written; what is there already is left as it is.

    Raises:
        ArgumentTypeError: If it is a folder, has no folder, or can't be written.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise ArgumentTypeError(f"{text} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ArgumentTypeError(f"{text}: there is no folder {path.parent}")
        if path.is_file():
            path.open("ab").close()
        elif not os.path.lexists(path):
            path.touch()
            path.unlink()
    except OSError as error:
        raise ArgumentTypeError(f"{text} can't be written: {error.strerror}") from error
    return path


def new_file_in_new_folders(text: str) -> Path:
    """As `new_file`, for a command that makes the folders which are not there yet."""
    path = Path(text)
    if folder(str(path.parent)).is_dir():
        return new_file(text)
    return path


def folder(text: str) -> Path:
    """Return the path of a folder, or of one that can be made.

    Raises:
        ArgumentTypeError: If something on the way there is a file.
    """
    path = Path(text)
    try:
        for place in (path, *path.parents):
            if place.is_dir():
                break
            if os.path.lexists(place):
                raise ArgumentTypeError(f"{place} is no folder; give the name of one")
    except OSError as error:
        raise ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path


def count(text: str) -> int:
    """Return a number, 0 or more."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text}: give a number, 0 or more")
    return int(text)


def count_from_one(text: str) -> int:
    """Return a number, 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text}: give a number, 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """Return a time that something may take."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text}: give seconds, more than 0, like 2.5")
    return value
