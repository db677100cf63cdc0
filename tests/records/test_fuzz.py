"""Manifests and shards that are damaged at random are read as written, or refused in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

import fuzzing

#: Mutations of each kind of file and reader; thousands outside the suite.
CASES = int(os.environ.get("FUZZ_CASES", "6"))


@pytest.mark.timeout(600 + 20 * CASES)
def test_no_damage_is_a_traceback_a_crash_or_a_wrong_record():
    report = fuzzing.fuzz(Path(__file__).with_name("fuzz_records.py"), CASES, seed=1)
    print(report)
    assert len(report.counts) == 15
    assert not report.bad, "\n".join(report.bad)
