"""Whatever becomes of the files of a training, they are read as written or refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

import fuzzing

READERS = Path(__file__).with_name("fuzz_runs.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kinds", "cases"),
    [
        (["config.json, resume", "history.csv, curves"], 100),
        (["checkpoint, data", "checkpoint, index", "checkpoint, list"], 8),
    ],
    ids=["text", "checkpoints"],
)
def test_damaged_files_of_a_training(kinds, cases):
    report = fuzzing.fuzz(READERS, cases, seed=0, kinds=kinds)
    assert not report.bad, report.bad
