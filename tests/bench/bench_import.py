"""How long does ``import fxlab`` take beside ``import torch``? In turns, in fresh processes.

Bar: a median ratio of at most 1.10.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

REPEATS = 11
BAR = 1.10


# pip compiles what it installs; where Python may not write byte code, a checkout would be compiled
# at every import, and that would be measured.
COMPILED = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds(statement: str) -> float:
    """Time ``statement`` in a new interpreter, start-up included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=COMPILED)
    return time.perf_counter() - start


def main() -> int:
    """Print the ratio; return 1 above the bar."""
    seconds("import fxlab")  # fills the file cache and writes byte code
    pairs = [(seconds("import torch"), seconds("import fxlab")) for _ in range(REPEATS)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    low, high = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    print(f"import torch {low:.2f} s, import fxlab {high:.2f} s, ratio {ratio:.3f} (bar {BAR})")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
