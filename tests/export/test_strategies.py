"""The model of every strategy exports: its weights are gathered first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

pytestmark = pytest.mark.timeout(300)
_FILE = Path(__file__).with_name("export_scenarios.py")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("mesh", {"batch": 1, "model": 2, "keep_host_copy": False}),
        ("pipeline", {"stages": 2}),
        ("mirrored", {"devices": 2}),
    ],
)
def test_a_model_exports_live_and_from_its_file(strategy, options, tmp_path):
    Job(_FILE, tmp_path, strategy, options, timeout_s=280).check("live_and_saved")
