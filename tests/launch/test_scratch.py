"""Temporary files of a job are gone when it is, whoever is killed; those of its user are not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tfdist.launch import local, scratch, supervisor

pytestmark = pytest.mark.timeout(120)

# Ranks that share memory through Open MPI, without TensorFlow, and then wait.
RANK = """
import ctypes, sys, tempfile, time
tempfile.NamedTemporaryFile(prefix="__autograph_generated_file", suffix=".py", delete=False)
tempfile.NamedTemporaryFile(prefix=sys.argv[1], delete=not "KEEP" in sys.argv)
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
print("up", flush=True)
time.sleep(600 if "WAIT" in sys.argv else 0)
mpi.MPI_Finalize()
"""


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    """The temporary folder of this test alone: other tests run beside it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start(token: str, *arguments: str) -> subprocess.Popen:
    library = Path(sys.prefix) / "lib"
    launch = [sys.executable, "-m", "tfdist", "launch", "--strategy", "horovod", "--workers", "2"]
    return subprocess.Popen(
        [*launch, "--", sys.executable, "-c", RANK, token, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(library)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def job_folders(traces) -> set[Path]:
    """Returns the folders of the job, as its guard was told them."""
    words = [word for process in traces.alive() for word in process.cmdline()]
    return {Path(word.partition("=")[2]) for word in words if word.startswith("--temporary=")}


WHO = {
    "rank": lambda words: words[1:2] == ["-c"],
    "mpirun": lambda words: any(word.endswith("/mpirun") for word in words[:2]),
    "guard": lambda words: "tfdist.launch.cleanup" in words,
    "launcher": lambda words: words[1:4] == ["-m", "tfdist", "launch"],
}


@pytest.mark.parametrize("who", WHO)
def test_nothing_is_left_whoever_is_killed(traces, own_folder, who):
    with start(traces.token, "WAIT") as job:
        assert "up" in job.stdout.readline()
        assert "up" in job.stdout.readline()
        folders = job_folders(traces)
        assert len(folders) == 2
        assert any(any(folder.rglob("vader*")) for folder in folders)
        assert any(any(folder.glob("__autograph*")) for folder in folders)
        for process in traces.alive():
            if WHO[who](process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                break
        job.stdout.read()
        job.wait(timeout=60)
    traces.wait_for(0)
    deadline = time.monotonic() + 10
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [folder for folder in folders if folder.exists()] == []


def test_what_another_ctrl_c_interrupts_leaves_nothing(traces, own_folder, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted_end(guard: subprocess.Popen) -> None:
        supervisor._kill_tree(guard)
        interrupt()

    monkeypatch.setattr(supervisor, "_end", interrupted_end)
    code = "import time; print('up', flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        supervisor.run(local.job([sys.executable, "-c", code, traces.token]), on_line=interrupt)
    traces.wait_for(0)
    assert list(own_folder.iterdir()) == []


def test_what_keras_leaves_of_a_save_that_failed_goes(own_folder):
    job = scratch.Scratch()
    (Path(job.paths[0]) / "tmpabc" / "assets").mkdir(parents=True)
    mine = Path(job.paths[0]) / "tmpmine" / "assets"
    mine.mkdir(parents=True)
    (mine / "kept").touch()
    job.close()
    assert [path.name for path in Path(job.paths[0]).iterdir()] == ["tmpmine"]
    assert (mine / "kept").exists()


def test_a_users_own_files_stay(traces, own_folder):
    with start(traces.token, "KEEP") as job:
        job.stdout.read()
        assert job.wait(timeout=60) == 0
    (folder,) = own_folder.glob("tfdist-job-*")
    assert len(list(folder.glob(f"{traces.token}*"))) == 2
    assert len(list(folder.iterdir())) == 2


def only_the_users_are_left(folders: set[Path], token: str) -> bool:
    """Says whether one folder is left, with the files that the two ranks kept."""
    left = [[path.name for path in folder.iterdir()] for folder in folders if folder.exists()]
    return len(left) == 1 and [name.startswith(token) for name in left[0]] == [True, True]


def test_the_next_job_removes_what_a_lost_one_has_left(traces, own_folder):
    """Its launcher and its guard killed together, and all ranks."""
    with start(traces.token, "WAIT", "KEEP") as job:
        assert "up" in job.stdout.readline()
        assert "up" in job.stdout.readline()
        folders = job_folders(traces)
        with start(traces.token) as beside:  # It leaves those of a living job alone.
            beside.stdout.read()
            assert beside.wait(timeout=60) == 0
        assert all(any(folder.iterdir()) for folder in folders)
        for who in ("launcher", "guard"):
            for process in traces.alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if WHO[who](process.cmdline()):
                        process.suspend()  # So that neither sees the other's end.
        for process in traces.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    traces.wait_for(0)
    assert all(folder.exists() for folder in folders)
    foreign = own_folder / "tfdist-job-other"  # As made by another program, or an earlier version.
    foreign.mkdir()
    (foreign / "tfdist-x").touch()
    deadline = time.monotonic() + 20  # The last process that holds a folder may end a little later.
    while not only_the_users_are_left(folders, traces.token) and time.monotonic() < deadline:
        scratch.Scratch().close()
        time.sleep(0.2)
    assert only_the_users_are_left(folders, traces.token)
    assert (foreign / "tfdist-x").exists()


def test_other_hosts_are_not_told_a_folder_of_this_one(own_folder):
    own = scratch.Scratch()
    try:
        told = [own.given_to({}, is_local=is_local) for is_local in (True, False)]
    finally:
        own.close()
    assert [any("backing_directory" in name for name in each) for each in told] == [True, False]
    assert [each["TMPDIR"] for each in told] == [own.paths[0]] * 2
