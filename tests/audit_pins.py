"""Are the pins exact, needed, and without a known hole?

``python -m tests.audit_pins`` checks constraints.txt and Binder's requirements against what the
project asks for and against `FIRST_SAFE`, what was published by September 2026, and then asks
pip-audit (``pip install pip-audit``; it needs a network) for what was published since.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PINNED = ("constraints.txt", "binder/requirements.txt")
# The first version without the holes that were published of it, and the latest of these. Read in
# public advisories and in the changes that answered them; not all packages were looked up.
FIRST_SAFE = {
    "bleach": ("6.4.0", "GHSA-gj48-438w-jh9v"),
    "filelock": ("3.20.3", "GHSA-qmgc-5h2g-mvrw"),
    "fonttools": ("4.61.0", "CVE-2025-66034"),
    "h11": ("0.16.0", "CVE-2025-43859"),
    "idna": ("3.15", "CVE-2026-45409"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "jupyter-core": ("5.8.1", "CVE-2025-30167"),
    "jupyter-server": ("2.20.0", "CVE-2026-44727"),
    "jupyterlab": ("4.6.2", "CVE-2026-73415"),
    "mako": ("1.3.12", "CVE-2026-44307"),
    "mistune": ("3.3.3", "CVE-2026-49851"),
    "nbconvert": ("7.17.1", "CVE-2026-39377"),
    "notebook": ("7.5.6", "CVE-2026-42557"),
    "onnx": ("1.21.0", "CVE-2026-27489"),
    "pillow": ("12.3.0", "CVE-2026-55798"),
    "protobuf": ("6.33.5", "CVE-2026-0994"),
    "pygments": ("2.20.0", "CVE-2026-4539"),
    "pytest": ("9.0.3", "CVE-2025-71176"),
    "requests": ("2.33.0", "CVE-2026-25645"),
    "soupsieve": ("2.8.4", "CVE-2026-49477"),
    "torch": ("2.13.0", "CVE-2025-3000"),
    "tornado": ("6.5.8", "GHSA-wwv5-g3v4-889x"),
    "urllib3": ("2.7.0", "CVE-2026-44432"),
}


def pins(path: str = "constraints.txt") -> dict[str, Requirement]:
    """Read a file of pins: name -> pin."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line.strip() and line[0] not in "#-"]
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
    for path in PINNED:
        for name, pin in pins(path).items():
            operators = [specifier.operator for specifier in pin.specifier]
            if pin.url is not None:
                found.append(f"{name}: comes from an address: {pin.url}")
            elif operators != ["=="] or "*" in str(pin.specifier):
                found.append(f"{name}: not an exact version: {pin}")
            else:
                found += hole(name, str(pin.specifier).removeprefix("=="))
    found += [f"{name}: needed and not pinned" for name in sorted(needed() - known.keys())]
    return found


def hole(name: str, version: str) -> list[str]:
    """Say what is known of a version; nothing if it has none of the holes in `FIRST_SAFE`."""
    safe, advisory = FIRST_SAFE.get(name, ("0", ""))
    if Version(version) >= Version(safe):
        return []
    return [f"{name} {version}: {advisory} is mended in {safe}"]


def main() -> int:
    """Print the problems; then let pip-audit look for known vulnerabilities."""
    found = problems()
    good = f"{len(pins())} pins, each exact; all that is needed is pinned; none of the holes of "
    good += f"{len(FIRST_SAFE)} packages that were published by September 2026"
    print("\n".join(found) or good)
    if importlib.util.find_spec("pip_audit") is None:
        print("holes published since: not looked for; python -m pip install pip-audit, then again")
        return int(bool(found))
    # Strict: a package that its database does not answer for is no package without a hole.
    words = [sys.executable, "-m", "pip_audit", "--strict", "--no-deps", "--disable-pip", "-r"]
    ran = subprocess.run([*words, str(ROOT / "constraints.txt")], check=False)
    return int(bool(found) or ran.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
