"""Two workers with neither MPI nor Horovod: what a plain installation can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdist.cli import saved_weights

# To Python these packages are not there.
HIDE = """
import sys
from importlib.machinery import PathFinder

class WithoutMpi(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in {"horovod", "mpi4py"}
        return None if is_hidden else super().find_spec(name, path, target)

sys.meta_path = [WithoutMpi if each is PathFinder else each for each in sys.meta_path]
"""


@pytest.fixture
def plain(tmp_path):
    """Runs ``tfdist`` with a Python that has no programs beside it, and sees neither package."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join([str(tmp_path / "hide"), *filter(None, sys.path)])
    environ = {"PATH": str(python.parent), "PYTHONPATH": path, "HOME": str(tmp_path)}

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(python), *map(str, arguments)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )

    return run


def test_nothing_of_mpi_is_there(plain):
    code = (
        "import importlib.util, shutil; "
        "print([importlib.util.find_spec(name) for name in ('horovod', 'mpi4py')], "
        "[shutil.which(name) for name in ('mpirun', 'horovodrun', 'ssh')])"
    )
    assert plain("-c", code).stdout == "[None, None] [None, None, None]\n"
    done = plain("-m", "tfdist", "launch", "--strategy", "horovod", "--", "x")
    assert (done.returncode, "must have the program mpirun" in done.stderr) == (2, True)


@pytest.mark.timeout(500)
@pytest.mark.long
def test_workers_and_servers_reach_the_weights_of_one_process(plain, model_file, shards, tmp_path):
    """In batches of all records, so that their order tells nothing."""
    weights = {}
    for name, where in {
        "single": ("--strategy", "single"),
        "multi_worker": ("--workers", "2"),
        "parameter_server": ("--strategy", "parameter_server", "--workers", "1"),
    }.items():
        folder = tmp_path / name
        done = plain(
            *("-m", "tfdist", "train", "--model", f"{model_file}:mlp", "--data", shards),
            *("--output", folder, "--epochs", "3", "--global-batch-size", "200", *where),
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((folder / "metrics.json").read_text())["strategy"] == name
        weights[name] = saved_weights.read(Path(folder, "model.keras"))
        if name == "multi_worker":
            assert "because 2 workers were asked for, and horovod is not" in done.stdout
    for name in ("multi_worker", "parameter_server"):
        assert weights[name].keys() == weights["single"].keys()
        for key, value in weights["single"].items():
            np.testing.assert_allclose(weights[name][key], value, rtol=0, atol=1e-5)
