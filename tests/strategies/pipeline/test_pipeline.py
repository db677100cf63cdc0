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
from scenario_plugin import selected

TOLERANCE = 1e-5
_SCRIPT = Path(__file__).with_name("run_pipeline.py")
_NAMES = list(models.CASES)
#: What another case has as well: a layer among others, or a schedule with another model.
_LONG = (
    *("skips", "skips-recompute", "skips-one-stage", "tokens", "norms", "nested", "frozen"),
    *("frozen_norm", "sum_loss", "legacy", "nested-interleaved", "eager", "float64", "own_layers"),
)
_TIMEOUT_S = 560

# The first case waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, dict]:
    """Runs the selected cases in one process: those of a model share what one device makes."""
    out = tmp_path_factory.mktemp("pipeline") / "results.json"
    finished = subprocess.run(
        [sys.executable, str(_SCRIPT), str(out), *selected(request, "case")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert out.exists(), finished.stdout[-3000:] + finished.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.long if n in _LONG else ()) for n in _NAMES]
)
def test_equals_one_device(case, results):
    result = results[case]
    assert "error" not in result, result["error"]
    wrong = {
        what: difference
        for what, difference in result["differences"].items()
        if math.isnan(difference) or difference > TOLERANCE
    }
    assert not wrong
    stages = models.CASES[case].get("stages", 2)
    assert len(result["devices"]) == stages, result["devices"]
