"""Real workers of TensorFlow, placed by Slurm's variables, by SageMaker's, and by --hosts.

None of these has a TF_CONFIG; this machine plays all hosts.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(280)

VERIFY = """
import sys
sys.path.append(sys.argv[1])
import models, tfdist

with tfdist.strategy("auto", stall_timeout_s=60) as strategy:
    report = tfdist.verify(models.mlp, sys.argv[2], strategy, steps=5)
if report is not None:
    print(report.exact, strategy.topology.addresses)
"""


class Task:
    """One process, as a cluster would start it; what it prints goes to files."""

    def __init__(self, number: int, command: list[object], environ: dict[str, str], folder: Path):
        self._files = [folder / f"task-{number}.{name}" for name in ("stdout", "stderr")]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def wait(self) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr."""
        return self.process.wait(timeout=240), *(file.read_text() for file in self._files)


@contextlib.contextmanager
def tasks(command: list[object], environs: list[dict[str, str]], folder: Path) -> Iterator[list]:
    started = []
    try:
        for number, environ in enumerate(environs):
            started.append(Task(number, command, environ, folder))
        yield [task.wait() for task in started]
    finally:
        for task in started:
            if task.process.poll() is None:
                task.process.kill()
                task.process.wait()


def slurm(size: int) -> list[dict[str, str]]:
    """What srun tells each task of a step on this machine; the job's number chooses the ports."""
    return [
        {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": str(size),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_NTASKS": str(size),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        for rank in range(size)
    ]


def train(model_file: Path, shards: Path, output: Path, *options: str) -> list[object]:
    return [
        *("train", "--model", f"{model_file}:mlp", "--data", shards, "--output", output),
        *("--strategy", "multi_worker", "--epochs", "2", "--global-batch-size", "64", *options),
    ]


def assert_trained_by_two(folder: Path) -> None:
    with (folder / "history.csv").open(newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]
    summary = json.loads((folder / "metrics.json").read_text())
    assert (summary["strategy"], summary["workers"], summary["replicas"]) == ("multi_worker", 2, 2)
    assert summary["data_wait"] is not None
    assert (folder / "model.keras").is_file()


def test_commands_that_srun_has_started_are_one_training(model_file, shards, tmp_path):
    command = ["-m", "tfdist", *train(model_file, shards, tmp_path / "run")]
    with tasks(command, slurm(2), tmp_path) as ended:
        (code, stdout, stderr), (other_code, other_stdout, other_stderr) = ended
    assert code == 0, stderr
    assert other_code == 0, other_stderr
    assert_trained_by_two(tmp_path / "run")
    assert stdout.count("epoch 1/2") == 1
    assert "epoch" not in other_stdout
    assert "Traceback" not in stderr + other_stderr


@pytest.mark.long
def test_tasks_of_srun_are_parameter_servers_too(model_file, shards, tmp_path):
    options = ("--strategy", "parameter_server", "--ps", "1")
    command = ["-m", "tfdist", *train(model_file, shards, tmp_path / "run", *options)]
    with tasks(command, slurm(3), tmp_path) as ended:
        (code, _, stderr), *others = ended
    assert code == 0, stderr
    assert [other[:2] for other in others] == [(0, ""), (0, "")], others
    summary = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (summary["strategy"], summary["workers"]) == ("parameter_server", 1)


@pytest.mark.long
def test_verify_on_tasks_of_srun(model_file, shards, tmp_path):
    command = ["-m", "tfdist", "verify", "--model", f"{model_file}:mlp", "--data", shards]
    command += ["--strategy", "multi_worker", "--steps", "5"]
    with tasks(command, slurm(2), tmp_path) as ended:
        (code, stdout, stderr), (other_code, other_stdout, other_stderr) = ended
    assert code == 0, stderr
    assert other_code == 0, other_stderr
    assert "multi_worker on 2 replicas is equal" in stdout
    assert other_stdout == ""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def with_evaluator(ports: list[int]) -> list[dict[str, str]]:
    """What a TFJob tells two workers, and the evaluator that stands beside their cluster."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    tasks = [("worker", 0), ("worker", 1), ("evaluator", 0)]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}
        for role, index in tasks
    ]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_an_evaluator_evaluates_each_checkpoint_beside_the_training(
    run_cli, model_file, shards, tmp_path
):
    output = tmp_path / "run"
    command = train(model_file, shards, output, "--checkpoint-every", "2", "--resume")
    environs = with_evaluator(free_ports(2))
    with tasks(["-m", "tfdist", *command], environs, tmp_path) as ended:
        (code, _, stderr), other, (own_code, stdout, own_stderr) = ended
    assert (code, other[0], own_code) == (0, 0, 0), stderr + other[2] + own_stderr
    assert_trained_by_two(output)
    evaluated = rows_of(output / "evaluations.csv")
    assert "evaluated after epoch 2  loss" in stdout
    last, expected = evaluated[-1], rows_of(output / "history.csv")[-1]
    assert (last["epoch"], last["step"]) == ("2", "0")
    for name in ("loss", "accuracy"):
        assert float(last[name]) == pytest.approx(float(expected[f"val_{name}"]), abs=1e-5)

    # Started again, it has nothing left to do.
    again = run_cli(*command, env={**os.environ, **environs[2]})
    assert again.returncode == 0, again.stderr
    assert "evaluated" not in again.stdout
    assert rows_of(output / "evaluations.csv") == evaluated


def test_what_an_evaluator_cannot_do_is_one_line(run_cli, model_file, shards, tmp_path):
    env = {**os.environ, **with_evaluator([1, 2])[2]}
    at_all = train(model_file, shards / "train", tmp_path / "run")
    verify = ("verify", "--model", f"{model_file}:mlp", "--data", shards, "--strategy", "single")
    for command, told in (
        (at_all, "must have a split called validation or test"),
        (train(model_file, shards, "s3://bucket/run"), "must be a folder that both see"),
        (verify, "the evaluator of a TF_CONFIG must run tfdist train"),
    ):
        done = run_cli(*command, env=env)
        assert done.returncode == 2, done.stdout + done.stderr
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_script_on_two_hosts_of_sagemaker(model_file, shards, tmp_path):
    hosts = ["127.0.0.2", "127.0.0.3"]  # Two names of this machine.
    environs = [{"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host} for host in hosts]
    command = ["-c", VERIFY, model_file.parent, shards / "train"]
    with tasks(command, environs, tmp_path) as ended:
        (code, stdout, stderr), (other_code, other_stdout, other_stderr) = ended
    assert code == 0, stderr
    assert other_code == 0, other_stderr
    chosen, verdict = stdout.splitlines()
    assert chosen.startswith("tfdist: strategy 'multi_worker', because sagemaker")
    assert verdict == "True ('127.0.0.2:12000', '127.0.0.3:12001')"
    assert other_stdout == ""


@pytest.mark.long
def test_hosts_reached_over_ssh(run_cli, over_ssh, model_file, shards, tmp_path):
    command = train(model_file, shards, tmp_path / "run", "--hosts", "127.0.0.2,127.0.0.3")
    done = run_cli(*command, env=over_ssh, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert_trained_by_two(tmp_path / "run")


def test_a_rehearsal_starts_its_own_processes(run_cli, model_file, shards):
    command = ("rehearse", "--model", f"{model_file}:mlp", "--data", shards)
    where = ("--strategy", "multi_worker", "--kill", "rank=1,step=2")
    done = run_cli(*command, *where, env={**os.environ, **slurm(2)[1]})
    assert (done.returncode, done.stdout) == (2, "")
    assert "a rehearsal must be started once" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_horovod_that_srun_has_not_connected_is_refused(run_cli, model_file, shards, tmp_path):
    """Without MPI's support in srun each task would be a job of its own, and train alone."""
    command = ["train", "--model", f"{model_file}:mlp", "--data", shards, "--strategy", "horovod"]
    env = {**os.environ, **slurm(2)[0]}
    done = run_cli(*command, "--output", tmp_path / "run", env=env)
    assert done.returncode == 2, done.stderr
    assert "but found 1 ranks, where slurm names 2" in done.stderr
    assert not (tmp_path / "run").exists()
