"""Whatever becomes of the files of a training, they are read as written or refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

import fuzzing


@pytest.mark.timeout(300)
def test_damaged_files_of_a_training():
    report = fuzzing.fuzz(Path(__file__).with_name("fuzz_runs.py"), 40, seed=0)
    assert not report.bad, report.bad
