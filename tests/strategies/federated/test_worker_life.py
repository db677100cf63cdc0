"""No worker_binary is left behind, however the process ends that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scenario_plugin import selected
from tiers import long

_SCRIPT = Path(__file__).with_name("fit_until_killed.py")
_WAYS = {
    "returned": ("return", None),
    "raised": ("raise", None),
    "os._exit": ("exit", None),
    "SIGINT": ("wait", signal.SIGINT),
    "SIGTERM": ("wait", signal.SIGTERM),
    "SIGKILL": ("wait", signal.SIGKILL),
}
_START_TIMEOUT_S = 150

pytestmark = [pytest.mark.honest_start, pytest.mark.timeout(_START_TIMEOUT_S + 60)]


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Starts those that are selected together: what takes long is the import of TensorFlow."""
    folder = tmp_path_factory.mktemp("life")
    started = {}
    for name in selected(request, "name"):
        file = folder / f"{name}.pid"
        with (folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), _WAYS[name][0], str(file)],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started[name] = (process, file)
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


def is_alive(pid):
    try:
        process = psutil.Process(pid)
        return "worker_binary" in process.cmdline()[0] and process.status() != "zombie"
    except (psutil.NoSuchProcess, IndexError):
        return False


@pytest.mark.parametrize("name", ["SIGINT", *long(*(name for name in _WAYS if name != "SIGINT"))])
def test_no_worker_is_left(name, jobs):
    process, file = jobs[name]
    way, number = _WAYS[name]
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not file.exists():
        log = file.with_suffix(".log")
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)
    worker = int(file.read_text())
    if number is not None:
        assert is_alive(worker)
        process.send_signal(number)
    process.wait(timeout=30)
    codes = {"return": 0, "raise": 1, "exit": 3}
    if way in codes:
        assert process.returncode == codes[way]
    deadline = time.monotonic() + 10
    while is_alive(worker):
        assert time.monotonic() < deadline, f"worker {worker} outlived its parent"
        time.sleep(0.05)
