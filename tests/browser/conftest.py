"""Real servers and a real browser: JupyterLab and Notebook 7 on loopback, the system's Chromium.

One server serves both front ends, with a folder, settings and trust database of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clocks import HANGS

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOW = "no Chromium here; to run the browser tests: apt-get install chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("FXLAB_REQUIRE_BROWSER") == "1":
            pytest.fail(HOW)
        pytest.skip(HOW)
    return found


@pytest.fixture(scope="session")
def browser(chromium, tmp_path_factory):
    """A headless Chromium with a new, empty profile."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        profile = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=FLAGS, viewport={"width": 1400, "height": 900}
        )
        yield context
        context.close()


@dataclass
class Watched:
    """A page, every request that it made, and every error that it met."""

    page: object
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def outside(self, *allowed: str) -> list[str]:
        """Requests that left this machine (or left the page, when nothing is allowed)."""
        inner = ("data:", "blob:", "about:", *allowed)
        return [url for url in self.requests if not url.startswith(inner)]


@pytest.fixture
def tab(browser) -> Iterator[Watched]:
    page = browser.new_page()
    page.set_default_timeout(1000 * HANGS)
    watched = Watched(page)
    page.on("request", lambda request: watched.requests.append(request.url))
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    yield watched
    page.close()


@dataclass
class Server:
    """A running Jupyter server that serves JupyterLab and Notebook 7."""

    url: str
    root: Path

    def address(self, host: str, notebook: str) -> str:
        return (
            f"{self.url}/lab/tree/{notebook}?reset"
            if host == "lab"
            else f"{self.url}/notebooks/{notebook}"
        )

    def write(self, name: str, cells: list[str]) -> str:
        """Put a notebook into the server's folder; its name."""
        content = {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
            },
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell-{k}",
                    "metadata": {},
                    "execution_count": None,
                    "outputs": [],
                    "source": cell,
                }
                for k, cell in enumerate(cells)
            ],
        }
        (self.root / name).write_text(json.dumps(content))
        return name


@pytest.fixture(scope="session")
def server(chromium, tmp_path_factory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "work"
    root.mkdir()
    settings = home / "settings" / "@jupyter-widgets" / "jupyterlab-manager"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text('{"saveState": true}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
    }
    command = [
        *(sys.executable, "-m", "jupyter_server", "--allow-root", "--no-browser"),
        *("--ip=127.0.0.1", f"--port={port}", f"--ServerApp.root_dir={root}"),
        *(
            "--IdentityProvider.token=",
            "--ServerApp.password=",
            "--ServerApp.disable_check_xsrf=True",
        ),
        *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
        *(
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ),
    ]
    process = subprocess.Popen(
        command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = (home / "server.log").open("w")
    drain = None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "is running at" in line:
                break
        else:
            pytest.fail("the Jupyter server did not start:\n" + "".join(said))
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=log)
        yield Server(f"http://127.0.0.1:{port}", root)
    finally:
        process.terminate()
        try:
            process.wait(HANGS)
        except subprocess.TimeoutExpired:  # a busy machine: its kernels take their time
            process.kill()
            process.wait(60)
        process.stdout.close()
        if drain is not None:
            drain.wait(HANGS)
        log.close()


WAIT = """
const until = async (look) => {
  for (;;) {
    const found = look();
    if (found) return found;
    await new Promise((go) => setTimeout(go, 40));
  }
};
const panel = await until(() => {
  const app = window.jupyterapp;
  const widget = app && app.shell.currentWidget;
  return widget && widget.sessionContext && widget.context.path === NAME && widget;
});
await panel.context.ready;
"""


class Notebook:
    """A notebook that is open in a tab."""

    def __init__(self, tab: Watched, server: Server, host: str, name: str) -> None:
        self.page, self.name, self.server = tab.page, name, server
        self.page.goto(server.address(host, name))
        self._run("")

    def _run(self, script: str, argument: object = None) -> object:
        script = f"const NAME = {json.dumps(self.name)}; {WAIT} {script}"
        return self.page.evaluate(f"async (argument) => {{ {script} }}", argument)

    def run_all(self) -> None:
        """Run every cell and wait until the last one is done."""
        self._run(
            """
            await panel.sessionContext.ready;
            const session = await until(() => panel.sessionContext.session);
            await session.kernel.info;
            await jupyterapp.commands.execute("notebook:run-all-cells");
            """
        )

    def execute(self, code: str) -> str:
        """Run code in the kernel; what it printed."""
        return self._run(
            """
            let text = "";
            const future = panel.sessionContext.session.kernel.requestExecute({ code: argument });
            future.onIOPub = ({ content }) => { if (content.text) text += content.text; };
            await future.done;
            return text.trim();
            """,
            code,
        )

    def theme(self, name: str) -> None:
        """Switch the front end's theme."""
        self._run(
            "await jupyterapp.commands.execute('apputils:change-theme', argument);", {"theme": name}
        )

    def save(self) -> None:
        """Save the notebook, widget state included."""
        self._run("await panel.context.save();")

    def restart(self) -> None:
        """Restart its kernel, as a person does from the menu; wait until it answers."""
        self._run(
            """
            const { kernel } = panel.sessionContext.session;
            await kernel.restart();
            await kernel.requestKernelInfo();
            """
        )

    def stop(self) -> None:
        """Shut its kernel down."""
        self._run("await panel.sessionContext.ready; await panel.sessionContext.shutdown();")


@pytest.fixture(scope="session")
def timeline():
    """Batch norms folded into the convolutions of a small network, then a pass without work."""
    import torch

    from fxlab.explorer import timeline_of
    from fxlab.passes import dce, fuse_conv_bn

    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv, self.bn = torch.nn.Conv2d(width, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
            self.relu = torch.nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.bn(self.conv(x)))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Block(3)
            self.body = torch.nn.Sequential(Block(8), Block(8), Block(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.body(x) + x

    x = torch.randn(1, 3, 16, 16)
    return timeline_of(Net().eval(), [fuse_conv_bn, dce], (x,))


@pytest.fixture(scope="session")
def story_file(timeline, tmp_path_factory) -> Path:
    """The timeline on disk, for kernels to read."""
    path = tmp_path_factory.mktemp("story") / "story.json"
    timeline.to_json(path)
    return path
