"""Which other Pythons are on this machine? For what differs from one version to the next."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@functools.cache
def found() -> list[Path]:
    """Return one interpreter for each version that is here, this one among them.

    They are looked for on the path, and beside this one, where tools that install several keep
    them. None of them needs to have a package.
    """
    here = Path(sys.base_prefix)
    candidates = [path for path in here.parent.glob("*/bin/python3") if path.is_file()]
    candidates += [Path(p) for p in map(shutil.which, (f"python{v}" for v in VERSIONS)) if p]
    by_version = {version_of(Path(sys.executable)): Path(sys.executable)}
    for path in candidates:
        version = version_of(path)
        if version in VERSIONS:
            by_version.setdefault(version, path)
    return [by_version[version] for version in sorted(by_version, key=VERSIONS.index)]


def version_of(python: Path) -> str:
    """Return ``3.12`` for such an interpreter, nothing for what does not start."""
    words = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return ""
    return ran.stdout.strip()
