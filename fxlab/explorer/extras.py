"""What is said where a package is missing that an extra brings?"""

from __future__ import annotations


def missing(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """Return the error that says which extra brings what `what` needs."""
    return ModuleNotFoundError(
        f"{what} needs {error.name}: pip install 'fxlab[lab]'", name=error.name
    )
