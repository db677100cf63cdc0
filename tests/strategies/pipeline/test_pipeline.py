"""Pipelines against one device: models that cross, share, mask, freeze, normalize, recompute."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pipeline_models as models
import pytest
from scenario_plugin import selected

from tfdist.compat.keras import VARIABLE

TOLERANCE = 1e-5
_SCRIPT = Path(__file__).with_name("run_pipeline.py")
_NAMES = list(models.CASES)
#: What another case has as well: a layer among others, or a schedule with another model.
_LONG = (
    *("skips", "skips-recompute", "skips-one-stage", "tokens", "norms", "nested", "frozen"),
    *("frozen_norm", "sum_loss", "legacy", "nested-interleaved", "eager", "float64", "own_layers"),
)
#: Those that plain Keras 3 trains as Keras 2 does, and shows the same of when it is not traced.
_OF_KERAS_3 = (
    *("skips", "skips-1f1b", "skips-interleaved", "skips-recompute", "skips-one-stage", "norms"),
    *("norms-recompute", "tokens", "tokens-recompute", "shared", "sum_loss", "clipped"),
    *("nested_norms", "frozen", "frozen-kept", "eager", "recurrent"),
)
_TIMEOUT_S = 560

# The first case waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, dict]:
    """Runs the selected cases in one process: those of a model share what one device makes."""
    return _run(selected(request, "case"), tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_keras_3(request, tmp_path_factory) -> dict[str, dict]:
    return _run(selected(request, "of_keras_3"), tmp_path_factory, **{VARIABLE: "0"})


def _run(chosen: Iterable[str], tmp_path_factory: Any, **environ: str) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("pipeline") / "results.json"
    finished = subprocess.run(
        [sys.executable, str(_SCRIPT), str(out), *chosen],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | environ,
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
    _check(case, results[case])


@pytest.mark.long
@pytest.mark.parametrize("of_keras_3", _OF_KERAS_3)
def test_keras_3_equals_one_device(of_keras_3, results_of_keras_3):
    _check(of_keras_3, results_of_keras_3[of_keras_3])


def _check(case: str, result: dict) -> None:
    assert "error" not in result, result["error"]
    wrong = {
        what: difference
        for what, difference in result["differences"].items()
        if math.isnan(difference) or difference > TOLERANCE
    }
    assert not wrong
    stages = models.CASES[case].get("stages", 2)
    assert len(result["devices"]) == stages, result["devices"]
