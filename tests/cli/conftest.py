"""Shards and models that the tests of several verbs train on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tfdist.cli.main import main
from tfdist.records.writer import write


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
