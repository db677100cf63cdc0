"""Shards and models that the tests of several verbs train on."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tfdist.cli.main import main
from tfdist.records.writing.writer import write


@pytest.fixture(scope="session")
def model_file() -> Path:
    return Path(__file__).with_name("models.py")


@pytest.fixture
def shards(tmp_path) -> Path:
    """200 records to train on (a tail of 8 in batches of 64), 40 to validate on, 10 to test on."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 250)
    x = (rng.normal(size=(250, 8)) + y[:, None]).astype(np.float32)
    write((x, y), tmp_path / "shards", split="train=20,validation=4,test=1", num_shards=3)
    return tmp_path / "shards"


@pytest.fixture
def tfdist(monkeypatch, capsys, tmp_path):
    """Runs the command in an empty folder: returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["tfdist", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def over_ssh(tmp_path):
    """The environment of a stand-in for ssh that runs the remote command here.

    Its environment is as bare as sshd's, and each host has a temporary folder of its own, as on two
    machines. Their names are short: that of a socket holds 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        ssh = tmp_path / "ssh"
        ssh.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f'own="{folder}/$1"; mkdir "$own"; shift\n'
            'exec env -i TMPDIR="$own" PATH=/usr/bin:/bin OMPI_ALLOW_RUN_AS_ROOT=1 '
            'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        yield {**os.environ, "PATH": path, "TF_MARK": "a b", "SECRET": "s"}
