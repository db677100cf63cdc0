"""Pipelines against one device: models that cross, share, mask, freeze, normalize, recompute."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pipeline_models as models
import pytest

TOLERANCE = 1e-5
_SCRIPT = Path(__file__).with_name("run_pipeline.py")
_NAMES = list(models.CASES)
# Each job stays well below the time that a test has.
_JOBS = [_NAMES[start : start + 5] for start in range(0, len(_NAMES), 5)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs the job of a case when the first of its cases is asked for."""
    done: dict[str, dict] = {}

    def of(case: str) -> dict:
        if case not in done:
            job = next(job for job in _JOBS if case in job)
            done.update({name: {"error": "the job did not finish"} for name in job})
            out = tmp_path_factory.mktemp("pipeline") / "results.json"
            finished = subprocess.run(
                [sys.executable, str(_SCRIPT), str(out), *job],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert out.exists(), finished.stdout[-3000:] + finished.stderr[-3000:]
            done.update(json.loads(out.read_text()))
        return done[case]

    return of


@pytest.mark.parametrize("case", _NAMES)
def test_equals_one_device(case, results):
    result = results(case)
    assert "error" not in result, result["error"]
    wrong = {
        what: difference
        for what, difference in result["differences"].items()
        if math.isnan(difference) or difference > TOLERANCE
    }
    assert not wrong
    stages = models.CASES[case].get("stages", 2)
    assert len(result["devices"]) == stages, result["devices"]
