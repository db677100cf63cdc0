"""Tasks on other hosts, through a stand-in for ssh: what starts there ends there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from tiers import long

sys.path.append(str(Path(__file__).parent))
from sshd import Server

pytestmark = pytest.mark.timeout(120)

RANK = (
    "import json, os, signal, sys, time\n"
    "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
)
WAITS = RANK + "print('up', flush=True); time.sleep(600)"
WHERE = ("--strategy", "multi_worker", "--hosts", "node1,node2:2", "--workers", "3")


@pytest.fixture
def sshd():
    with tempfile.TemporaryDirectory(prefix="h") as folder:  # A socket's name is short.
        server = Server(Path(folder))
        yield server
        server.close()


@pytest.fixture
def launch(sshd, traces):
    """Starts ``tfdist launch`` of some Python, with the test's token as an argument."""

    def start(code: str, *more: str, where: tuple[str, ...] = WHERE, **options):
        command = [sys.executable, "-m", "tfdist", "launch", *where, "--"]
        return subprocess.Popen(
            [*command, sys.executable, "-c", code, traces.token, *more],
            env=sshd.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


def wait_until_up(job: subprocess.Popen, ranks: int = 3) -> None:
    assert sorted(job.stdout.readline() for _ in range(ranks)) == [
        f"[{rank}] up\n" for rank in range(ranks)
    ]


def test_arguments_folder_and_environment_come_as_they_are(launch, tmp_path):
    folder = tmp_path / 'it\'s a "folder" of $HOME; `x`'
    folder.mkdir()
    given = ["$(touch made)", "; touch made", "`touch made`", "a b", "*", '"', "'", "\\n", "ä\n!"]
    code = RANK + (
        "print(json.dumps([rank, sys.argv[2:], os.getcwd(), len(os.environ['TFDIST_SECRET'])]))"
    )
    job = launch(code, *given, cwd=folder)
    stdout, stderr = job.communicate(timeout=60)
    assert (job.returncode, stderr) == (0, "")
    told = sorted(json.loads(line[4:]) for line in stdout.splitlines())
    assert told == [[rank, given, str(folder), 32] for rank in range(3)]
    assert list(folder.iterdir()) == []


def test_a_secret_is_in_no_list_of_processes(launch, traces):
    job = launch(WAITS)
    wait_until_up(job)
    ranks = [p for p in traces.alive() if p.cmdline()[1:2] == ["-c"] and "TF_CONFIG" in p.environ()]
    secrets = {process.environ()["TFDIST_SECRET"] for process in ranks}
    (secret,) = secrets
    assert not [p for p in traces.alive() if any(secret in word for word in p.cmdline())]
    job.terminate()
    job.communicate(timeout=60)


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)], ids=str
)
def test_the_first_failing_rank_ends_the_others(launch, traces, end, code):
    job = launch(RANK + f"{end} if rank == 2 else time.sleep(600)")
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == code, stderr
    assert stderr.startswith(f"tfdist: rank 2 ended with exit code {code}")
    traces.wait_for(0)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), *long((signal.SIGTERM, 143), (signal.SIGINT, 130))]
)
def test_nothing_outlives_a_signal(launch, traces, number, code):
    # One that does not heed SIGTERM.
    job = launch(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAITS}")
    wait_until_up(job)
    os.kill(job.pid, number)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == code
    assert "Traceback" not in stderr
    traces.wait_for(0)


def test_a_host_that_drops_is_named(launch, sshd, traces):
    job = launch(WAITS)
    wait_until_up(job)
    sshd.drop("node2")
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 2
    assert stderr.count("\n") == 1, stderr
    assert "but found the loss of node2 with its ranks 1, 2, of which ssh says: Conn" in stderr
    traces.wait_for(0)


def test_an_ssh_that_is_killed_ends_its_ranks(launch, sshd, traces):
    job = launch(WAITS)
    wait_until_up(job)
    below = psutil.Process(job.pid).children(recursive=True)
    (ssh,) = (process for process in below if "node2" in process.cmdline())
    ssh.kill()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "the loss of node2 with its ranks 1, 2" in stderr
    traces.wait_for(0)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("--hosts", "node1,nowhere.invalid"), "found nowhere.invalid, of which ssh says: Could"),
        *long((("--hosts", "node1,me@nowhere.invalid"), "found me@nowhere.invalid, of which ssh")),
    ],
)
def test_a_host_that_is_none_is_one_line(launch, traces, where, words):
    job = launch(WAITS, where=("--strategy", "multi_worker", *where))
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 2
    assert stderr.count("\n") == 1, stderr
    assert words in stderr
    traces.wait_for(0)


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("exit 0", "node1, of which ssh says: exit code 0"),
        ("echo 'python: not found' >&2; exit 127", "of which ssh says: python: not found"),
        ("printf '😀%.0s' $(seq 600) >&2; exit 1", "of which ssh says: 😀😀"),  # Of 12 bytes each.
    ],
)
def test_a_host_that_runs_something_else_is_one_line(launch, sshd, shell, words, tmp_path):
    own = Path(sshd.environ["PATH"].split(os.pathsep)[0], "ssh")
    own.write_text(f"#!/bin/sh\n{shell}\n")
    job = launch("", where=("--strategy", "multi_worker", "--hosts", "node1:2"))
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 2, stderr
    assert stderr.count("\n") == 1, stderr
    assert words in stderr


def test_a_host_that_never_answers_is_named_by_its_ranks(launch, sshd, traces):
    own = Path(sshd.environ["PATH"].split(os.pathsep)[0], "ssh")
    own.write_text(f"#!/bin/sh\nexec sleep 600 # {traces.token}\n")
    where = ("--strategy", "multi_worker", "--hosts", "node1:2", "--start-timeout", "2")
    job = launch("", where=where)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "within 2 s, but found no sign of life from ranks 0, 1 of 2" in stderr
    traces.wait_for(0)


def test_a_lost_worker_beside_parameter_servers_is_done_without(launch):
    code = (
        "import json, os\ntask = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "os.kill(os.getpid(), 9) if task == {'type': 'worker', 'index': 1} else print(task['type'])"
    )
    where = ("--strategy", "parameter_server", "--hosts", "node1:2,node2:2")
    job = launch(code, where=where)
    stdout, stderr = job.communicate(timeout=60)
    assert (job.returncode, stderr) == (0, "")
    assert sorted(stdout.splitlines()) == ["[0] chief", "[1] worker", "[3] ps"]
