"""Are the pins exact, needed, and without a known hole?

``python -m tests.audit_pins`` checks constraints.txt against what the project asks for, and then
asks pip-audit (``pip install pip-audit``; it needs a network) for known vulnerabilities.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def pins() -> dict[str, Requirement]:
    """Read constraints.txt: name -> pin."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def needed(extras: tuple[str, ...] = ("", "lab", "lower", "teach", "dev")) -> set[str]:
    """Name every distribution that the project and what it needs ask for, here and now."""
    pending, found = [("fxlab", extras)], set()
    while pending:
        name, wanted = pending.pop()
        try:
            asked = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, asked):
            marks = [{"extra": extra} for extra in wanted or ("",)]
            if requirement.marker and not any(requirement.marker.evaluate(m) for m in marks):
                continue
            key = canonicalize_name(requirement.name)
            more = ("", *requirement.extras)
            if key not in found or requirement.extras:
                found.add(key)
                if key != "fxlab":
                    pending.append((key, more))
    return found - {"fxlab", "setuptools", "pip"}  # the last two come with an environment


def problems() -> list[str]:
    """Say what is wrong with the pins, without asking anybody."""
    found = []
    known = pins()
    for name, pin in known.items():
        operators = [specifier.operator for specifier in pin.specifier]
        if operators != ["=="] or "*" in str(pin.specifier):
            found.append(f"{name}: not an exact version: {pin}")
        if pin.url is not None:
            found.append(f"{name}: comes from an address: {pin.url}")
    found += [f"{name}: needed and not pinned" for name in sorted(needed() - known.keys())]
    return found


def main() -> int:
    """Print the problems; then let pip-audit look for known vulnerabilities."""
    found = problems()
    print("\n".join(found) or f"{len(pins())} pins, each exact; all that is needed is pinned")
    if importlib.util.find_spec("pip_audit") is None:
        print("known vulnerabilities: not looked for; python -m pip install pip-audit, then again")
        return int(bool(found))
    words = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-r"]
    ran = subprocess.run([*words, str(ROOT / "constraints.txt")], check=False)
    return int(bool(found) or ran.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
