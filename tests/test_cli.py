"""The command line says what it finds, passes on what is not its own, and exits as documented."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from fxlab import cli

ROOT = Path(__file__).resolve().parent.parent


def wait_for(port: int, deadline: float) -> None:
    """Return when somebody on this machine listens at ``port``."""
    with socket.socket() as attempt:
        while attempt.connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline


def test_doctor_names_every_part_and_its_version(capsys):
    assert cli.main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].startswith("2.")
    assert lines["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {"ipywidgets", "anywidget", "jupyterlab", "dot", "onnx"} <= lines.keys()


def test_doctor_prints_the_same_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in findings] == [f.name for f in cli.surroundings()]


def test_doctor_tells_nobody_where_it_runs(capsys):
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert str(Path.home()) not in text.replace("\n", " ")
    assert str(ROOT) not in text


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_a_wrong_command_line_exits_with_2_and_shows_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: fxlab" in capsys.readouterr().err


def test_without_the_lab_extra_each_missing_part_comes_with_its_remedy():
    # -S leaves site-packages out, so no distribution is found: as in an environment without extras.
    code = (
        "import runpy, sys; cli = runpy.run_path(sys.argv[1]);sys.exit(cli['main'](sys.argv[2:]))"
    )
    command = [sys.executable, "-S", "-c", code, str(ROOT / "fxlab/cli.py")]
    told = subprocess.run([*command, "lab"], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert 'python -m pip install "fxlab[lab]"' in told.stderr
    assert "Traceback" not in told.stderr
    text = subprocess.run([*command, "doctor"], capture_output=True, text=True, check=True).stdout
    assert "onnxruntime                   missing; for lowering to a device" in text


def test_the_first_lecture_is_found_from_a_folder_below_the_project(monkeypatch, tmp_path):
    lecture = tmp_path / cli.START
    lecture.parent.mkdir()
    lecture.write_text("{}")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert cli.start_notebook() == lecture


def test_lab_serves_the_first_lecture_and_passes_options_on_to_jupyterlab(tmp_path):
    lecture = tmp_path / cli.START
    lecture.parent.mkdir()
    lecture.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=t"]
    server = subprocess.Popen(
        [sys.executable, "-m", "fxlab.cli", "lab", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    too_late = threading.Timer(90, server.kill)  # ends the loop below
    too_late.start()
    try:
        assert server.stderr is not None
        address = f"http://127.0.0.1:{port}/lab/tree/notebooks/00_start.ipynb"
        assert any(address in line for line in server.stderr)
        wait_for(port, time.monotonic() + 30)  # it says its address just before it listens
        with urllib.request.urlopen(f"{address}?token=t", timeout=30) as page:
            assert page.status == 200
        stored = f"http://127.0.0.1:{port}/api/contents/notebooks/00_start.ipynb?token=t"
        with urllib.request.urlopen(stored, timeout=30) as page:
            assert json.load(page)["type"] == "notebook"
    finally:
        too_late.cancel()
        server.kill()
        server.communicate()
