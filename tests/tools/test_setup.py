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
    "-m compileall "*) ;;
    "-m tfdist install horovod --wheels "*)
        echo "horovod $(env | grep -o '^HOROVOD_.*' | LC_ALL=C sort | tr '\\n' ' ')" >>"$FAKE_LOG"
        [ "${FAKE_FAILURE:-}" != horovod ] ;;
    *" --editable .") echo "install tfdist" >>"$FAKE_LOG" ;;
    *" install "*) echo "install lists" >>"$FAKE_LOG"; [ "${FAKE_FAILURE:-}" != install ] ;;
    *) exit 99 ;;
esac
"""
INSTALLS = [*["install lists"] * 3, "install tfdist", "horovod "]


class Clone:
    """A copy of what the script reads, with a Python that only records."""

    def __init__(self, folder: Path):
        self.folder = folder / "clone"
        for name in ("tools", "requirements", "tfdist/cli"):
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
        lane = {"LANE": "oldest", "VENV": ".venv", "PYTHON": str(self.python)}
        env |= {**lane, "FAKE_LOG": str(self.log), **environ}
        command = ["bash", str(self.folder / "tools" / "setup.sh")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done, self.log.read_text().splitlines()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_everything_is_installed_once(clone):
    done, asked = clone.setup()
    assert done.returncode == 0, done.stderr
    assert asked == ["venv", *INSTALLS]
    done, asked = clone.setup()
    assert (done.returncode, done.stdout, asked) == (0, "setup: nothing to do\n", [])


def test_the_python_of_an_environment_holds_until_another_is_given(clone, tmp_path):
    clone.setup()
    done, asked = clone.setup(PYTHON="")
    assert (done.stdout, asked) == ("setup: nothing to do\n", [])
    other = shutil.copy(clone.python, tmp_path / "other-python")
    assert clone.setup(PYTHON=str(other))[1] == INSTALLS  # Of the same version: kept.
    done, asked = clone.setup(PYTHON="")
    assert (done.stdout, asked) == ("setup: nothing to do\n", [])


@pytest.mark.parametrize(
    "name", ["requirements/dev.txt", "requirements/lanes/oldest.txt", "setup.cfg"]
)
def test_a_change_is_noticed(clone, name):
    clone.setup()
    with open(clone.folder / name, "a") as file:
        file.write("\n")
    assert clone.setup()[1] == INSTALLS
    assert clone.setup()[1] == []


def test_the_other_lane_stands_beside_it_and_what_is_its_own_changes_nothing(clone):
    clone.setup()
    with open(clone.folder / "requirements/lanes/modern.txt", "a") as file:
        file.write("\n")
    assert clone.setup()[1] == []
    modern = {"LANE": "modern", "VENV": ".venv-modern", "FAKE_VERSION": "3.12"}
    assert clone.setup(**modern)[1] == ["venv", *INSTALLS]
    assert clone.setup(**modern)[1] == []
    assert clone.setup()[1] == []


def test_an_environment_of_the_other_lane_is_made_anew(clone):
    clone.setup()
    packages = clone.folder / ".venv/lib/python3.11/site-packages"
    (packages / "tensorflow-2.16.2.dist-info").mkdir(parents=True)
    assert clone.setup(HOROVOD_WITH_MPI="1")[1][0] != "venv"
    assert clone.setup(LANE="modern")[1][0] == "venv"


def test_the_environment_of_another_clone_is_left_to_it(clone, tmp_path):
    clone.setup()
    (tmp_path / "other").mkdir()
    other = Clone(tmp_path / "other")
    (other.folder / ".venv").symlink_to(clone.folder / ".venv")
    done, asked = other.setup()
    assert (done.returncode, asked) == (1, [])
    assert f"is that of {clone.folder}. Remove the link" in done.stderr


def test_build_variables_pass_through_and_hold(clone):
    clone.setup()
    _, asked = clone.setup(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_WITHOUT_GLOO="1")
    given = "horovod HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITHOUT_GLOO=1 "
    assert asked[-1] == given
    # `make test` in a shell without the variables keeps that build.
    assert clone.setup()[1] == []
    with open(clone.folder / "setup.cfg", "a") as file:
        file.write("\n")
    assert clone.setup()[1][-1] == given
    # Others given: another build. Those that matter only at run time change nothing.
    _, asked = clone.setup(HOROVOD_WITH_MPI="1")
    assert asked[-1] == "horovod HOROVOD_WITH_MPI=1 "
    assert clone.setup(HOROVOD_FUSION_THRESHOLD="1")[1] == []


@pytest.mark.parametrize("phase", ["install", "horovod"])
def test_an_interrupted_set_up_is_taken_up_again(clone, phase):
    done, _ = clone.setup(FAKE_FAILURE=phase)
    assert done.returncode == 1
    assert "setup: failed" in done.stderr
    assert not (clone.folder / ".venv" / ".tfdist-setup").exists()
    done, asked = clone.setup()
    assert done.returncode == 0
    assert asked == INSTALLS


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"PYTHON": "no-such-python"}, "there is no 'no-such-python'"),
        ({"FAKE_VERSION": "3.12"}, "Python 3.11 is needed for the oldest lane"),
        ({"LANE": "modern", "FAKE_VERSION": "3.10"}, "Python 3.11 or 3.12 or 3.13 is needed"),
        ({"LANE": "newest"}, "LANE must be modern or oldest, but found 'newest'"),
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
