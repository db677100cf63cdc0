"""What is read from a disk is never run, and no argument is read by a shell."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tfdist", "sagemaker", "benchmarks", "examples", "tools")
# What can run code that is in its input -> where it may stand, since the input is our own.
RUNS_ITS_INPUT = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OWN_INPUT = {
    # A folder that this user alone can enter, made by the one process and read by the other.
    "tfdist/launch/notebook.py": {"cloudpickle"},
    "tfdist/launch/notebook_rank.py": {"cloudpickle"},
    # From rank to rank of one job, as Horovod does it.
    "tfdist/strategies/multi_worker_tasks.py": {"pickle"},
}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def sources() -> Iterator[tuple[str, ast.AST]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path.relative_to(ROOT).as_posix(), node


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def keyword(call: ast.Call, name: str) -> object:
    """Returns the literal value of an argument, an empty string when there is none."""
    found = [k.value for k in call.keywords if k.arg == name]
    return getattr(found[0], "value", None) if found else ""


def test_nothing_from_a_disk_is_unpickled():
    found: dict[str, set[str]] = {}
    for file, node in sources():
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            if used := {name.partition(".")[0] for name in names} & RUNS_ITS_INPUT:
                found.setdefault(file, set()).update(used)
    assert found == OWN_INPUT


def test_whoever_reads_files_refuses_code_in_them():
    calls = [(file, node) for file, node in sources() if isinstance(node, ast.Call)]
    for file, call in calls:
        name, where = name_of(call), f"{file}:{call.lineno}"
        assert name not in {"eval", "exec"} or isinstance(call.func, ast.Attribute), where
        assert name != "enable_unsafe_deserialization", where
        assert keyword(call, "safe_mode") in ("", True), where
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if (owner, name) in {("np", "load"), ("numpy", "load")}:
            assert keyword(call, "allow_pickle") is False, where
        assert (owner, name) not in {("yaml", "load"), ("yaml", "unsafe_load")}, where
    assert any(name_of(call) == "load" for _, call in calls), "nothing was looked at"


def test_no_source_asks_for_a_shell():
    for file, node in sources():
        if isinstance(node, ast.Call):
            where = f"{file}:{node.lineno}"
            assert keyword(node, "shell") in ("", False), where
            owner = getattr(getattr(node.func, "value", None), "id", "")
            is_shell = owner in {"os", "subprocess", "asyncio"} and name_of(node) in SHELLS
            assert not is_shell, where


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "how", [("single",), ("horovod", "--controller", "mpi"), ("horovod", "--controller", "gloo")]
)
def test_arguments_come_as_they_were_given(run_cli, how, tmp_path):
    given = ["$(touch made)", "; touch made", "| touch made", "`touch made`", "a b", "*", '"', "'"]
    code = "import sys; print(sys.argv[1:])"
    done = run_cli("launch", "--strategy", *how, "--", "python", "-c", code, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert lines == [str(given)] * (1 if how[0] == "single" else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_nothing_listens_on_the_network(traces, controller):
    """Not even what is told to. With TensorFlow, test_mishaps.py and test_stalls.py look."""
    up = (
        "import socket, time; own = [socket.create_server(('', 0)), "
        "socket.create_server(('::', 0), family=socket.AF_INET6)]; "
        "[socket.create_connection(each.getsockname()[:2]) for each in own]; "
        "print('up', flush=True); time.sleep(600)"
    )
    launch = ("-m", "tfdist", "launch", "--controller", controller)
    with subprocess.Popen(
        [sys.executable, *launch, "--", "python", "-c", up, traces.token],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert "up" in job.stdout.readline()
        assert "up" in job.stdout.readline()
        found = traces.listening_on_all()
        job.terminate()
        assert job.wait(timeout=30) == 143
    assert found == set()
    assert traces.alive() == []
