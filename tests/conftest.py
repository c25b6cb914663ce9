"""What many tests share: random numbers from a seed, and an environment with torch alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parent.parent

with contextlib.suppress(ModuleNotFoundError):  # where torch is alone
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "fxlab",
        deadline=None,
        derandomize=not os.environ.get("FXLAB_LONG"),
        suppress_health_check=[HealthCheck.too_slow],  # that is the machine's fault
    )
    settings.load_profile("fxlab")


def seed() -> None:
    """Begin the sequences of random numbers anew."""
    torch.manual_seed(0)
    random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let what a module draws be the same whichever modules were read before."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what a test draws be the same whichever tests ran before."""
    seed()


def distributions_of(name: str) -> list[importlib.metadata.Distribution]:
    """List the distribution ``name`` and all that it needs without extras."""
    pending, found = [name], {}
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        needs = [Requirement(text) for text in found[name].requires or []]
        pending += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return list(found.values())


def link_torch_into(folder: Path) -> None:
    """Make torch and what it needs importable from ``folder``, without another installation."""
    for distribution in distributions_of("torch"):
        for top in {Path(str(path)).parts[0] for path in distribution.files or []}:
            target = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in an environment that has torch and what torch needs, and the project."""
    folder = tmp_path_factory.mktemp("bare")
    link_torch_into(folder)
    (folder / "fxlab").symlink_to(ROOT / "fxlab")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        # -S: no site-packages; the folder above stands for them.
        return subprocess.run(
            [sys.executable, "-S", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS,
        )

    return run
