"""Exit with 1 unless a JUnit report shows browser tests that passed and none that was skipped."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def browser_cases(report: str) -> tuple[int, int]:
    """Count (passed, skipped) among the cases under tests/browser of a JUnit ``report``."""
    cases = [
        case
        for case in ElementTree.fromstring(report).iter("testcase")
        if "tests.browser" in case.get("classname", "")
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - skipped, skipped


def main(path: str) -> int:
    """Judge the report at ``path``."""
    ran, skipped = browser_cases(Path(path).read_text(encoding="utf-8"))
    print(f"browser tests: {ran} ran, {skipped} skipped")
    return 0 if ran and not skipped else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
