"""parameter_server: its options, what only it has, and what ends with what."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tensorflow as tf
from scenario_plugin import Job

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import OptionError
from tfdist.launch.tf_cluster import _free_ports
from tfdist.strategies.parameter_server.steps import AsynchronousSteps
from tfdist.topology import tf_config

# Trainings that are struck wait twice for what comes, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
SCENARIOS = "parameter_server_scenarios.py"
JOBS = {
    "parameter_server": Job(
        "parameter_server", {"min_shard_bytes": 32}, launch="--workers 2 --ps 2"
    ),
    "keras_3": Job(
        "parameter_server",
        {"min_shard_bytes": 32},
        launch="--workers 2 --ps 2",
        env={VARIABLE: "0"},
        only_named=True,
    ),
}
_FAULTS = Path(__file__).with_name("parameter_server_faults.py")
_TASKS = ("chief", "worker", "worker", "ps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_shard_bytes": 0}, "min_shard_bytes must be a whole number"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"stall_timeout_s": 0}, "stall_timeout_s must be a number of seconds, at least 1"),
        ({"start_timeout_s": "soon"}, "start_timeout_s must be a number of seconds, at least 1"),
        ({"precision": "mixed_float16"}, "Choose precision='mixed_bfloat16'"),
        ({"accumulate_steps": 2}, "option of strategy 'parameter_server' must be a known one"),
        ({"ps": 2}, "option of strategy 'parameter_server' must be a known one"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        tfdist.strategy("parameter_server", **options)


@pytest.mark.parametrize("roles", [(), ("worker", "worker"), ("chief", "worker")], ids=str)
def test_a_cluster_without_all_roles_is_refused(monkeypatch, roles):
    config = tf_config([(role, f"a:{n}") for n, role in enumerate(roles)], 0) if roles else ""
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(OptionError, match=r"without .*ps in its TF_CONFIG.*tfdist launch"):
        tfdist.strategy("parameter_server").start()


def test_on_two_workers_and_two_servers(scenario):
    scenario.check()


class Training:
    """A training under ``tfdist launch``, whose processes a test can strike."""

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.pids: dict[int, int] = {}
        self.output = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.output += line
                if found := re.search(r"pid (\d+) (\d+)", line):
                    self.pids[int(found[1])] = int(found[2])
                self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.output, timeout=280), self.output

    def strike(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def end(self) -> int:
        code = self.process.wait(timeout=120)
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) for pid in self.pids.values()):
            assert time.monotonic() < deadline, "a process has outlived its job"
            time.sleep(0.1)
        return code


@contextlib.contextmanager
def training(folder: Path, epochs: int, *launch: str) -> Iterator[Training]:
    arguments = ["launch", "--strategy", "parameter_server", "--workers", "2", *launch, "--"]
    script = [sys.executable, str(_FAULTS), str(folder), str(epochs), "0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "tfdist", *arguments, *script],
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        started = Training(process)
        try:
            yield started
        finally:
            if process.poll() is None:
                process.terminate()


def _environ(config: str | None = None) -> dict[str, str]:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return env if config is None else env | {"TF_CONFIG": config}


@pytest.mark.parametrize("has_lost_a_worker", [True, False])
def test_results_that_go_with_a_lost_worker_are_done_without(has_lost_a_worker):
    """Its step is taken, and the worker lost before the chief has fetched what it showed."""

    def result(*_, **__):
        raise tf.errors.UnavailableError(None, None, "Connection refused [Op:Identity]")

    watch = SimpleNamespace(
        result=result, explain=lambda error: None, has_lost_a_worker=has_lost_a_worker
    )
    steps = AsynchronousSteps(None, SimpleNamespace(metric_names={}), None, watch, 2)
    steps._flying.append((None, 3, False))
    steps._logs = {"loss": 1.0}
    with contextlib.nullcontext() if has_lost_a_worker else pytest.raises(tf.errors.OpError):
        steps._land()
    assert not steps._flying
    assert steps._logs == {"loss": 1.0}


def test_a_lost_worker_is_survived_and_a_stopped_one_is_named(tmp_path):
    with training(tmp_path, 20) as running:
        running.wait_for("step 5\n")
        running.strike(2, signal.SIGKILL)
        running.wait_for("rank 2 (worker 1 at ")
        running.wait_for("step 40\n")
        running.strike(1, signal.SIGSTOP)
        assert running.end() == 1
    assert "is lost; the others take over its steps" in running.output
    assert "but found rank 1 (worker 0 at " in running.output
    assert " silent for" in running.output


def test_a_lost_server_ends_the_job_and_a_restart_goes_on(tmp_path):
    with training(tmp_path, 4, "--max-restarts", "1") as running:
        running.wait_for("step 15\n")
        running.strike(3, signal.SIGKILL)
        assert running.end() == 0, running.output
    assert "rank 3 ended with exit code 137 (SIGKILL)" in running.output
    # Checkpoints are written after the steps 4, 8 and 10 of each epoch.
    first = re.search(r"step (\d+)\n", running.output.split("restart 1 of 1")[1])
    assert first[1] in {"15", "19"}
    assert "trained 40 steps" in running.output


@pytest.mark.long
@pytest.mark.honest_start
def test_tasks_end_with_a_chief_that_is_killed_without_a_launcher(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(_TASKS))]
    tasks = list(zip(_TASKS, addresses, strict=True))
    processes = [
        subprocess.Popen(
            [sys.executable, str(_FAULTS), str(tmp_path), "50", "0.1"],
            env=_environ(tf_config(tasks, rank)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(tasks))
    ]
    try:
        for line in processes[0].stdout:
            if line == "step 5\n":
                processes[0].kill()
        for rank, process in enumerate(processes[1:], start=1):
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 1
            assert f"rank {rank} ({_TASKS[rank]} " in output
            assert "has lost the chief" in output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_a_missing_task_is_named(monkeypatch):
    """The chief waits before TensorFlow does, in a process of its own: it takes the devices."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(_TASKS))]
    tasks = list(zip(_TASKS, addresses, strict=True))
    program = (
        "import sys, tfdist\n"
        "from tfdist.errors import LaunchError\n"
        "try: tfdist.strategy('parameter_server', start_timeout_s=1).start()\n"
        "except LaunchError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=_environ(tf_config(tasks, 0)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    for rank in (1, 2, 3):
        assert f"rank {rank} ({addresses[rank]})" in done.stdout, done.stderr
    assert "within 1 s" in done.stdout
