"""What divides a model or its optimizer, on real kinds of models: Keras' losses and weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import conformance_models
import pytest

_SCRIPT = Path(__file__).with_name("run_proof.py")
_TIMEOUT_S = 900
pytestmark = [pytest.mark.long, pytest.mark.timeout(_TIMEOUT_S + 20)]

_SMALL = ("mlp", "convnet", "transformer", "vit")
#: strategy, its options, models, precision
ROWS = (
    ("mesh", {"batch": 1, "model": 2}, ("transformer", "vit"), "float32"),
    ("mesh", {"batch": 1, "model": 2, "recompute": "blocks"}, ("transformer",), "float32"),
    ("mesh", {"batch": 2, "model": 2}, _SMALL, "float32"),
    ("pipeline", {"stages": 2, "microbatches": 4}, _SMALL, "float32"),
    (
        "pipeline",
        {"stages": 2, "microbatches": 4, "schedule": "1f1b", "recompute": "blocks"},
        ("transformer", "vit"),
        "float32",
    ),
    ("mirrored", {"devices": 2, "shard": "optimizer"}, ("transformer",), "float32"),
    ("mesh", {"batch": 1, "model": 2}, ("resnet50v2",), "float64"),
    ("pipeline", {"stages": 2, "microbatches": 2}, ("resnet50v2",), "float64"),
)
CASES = [
    (strategy, "x".join(map(str, options.values())), model, floatx)
    for strategy, options, models, floatx in ROWS
    for model in models
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple, dict]:
    """Runs all rows in one process: one device trains each model once for all of them."""
    out = tmp_path_factory.mktemp("proof") / "results.json"
    finished = subprocess.run(
        [sys.executable, str(_SCRIPT), json.dumps(ROWS), str(out)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert out.exists(), finished.stdout[-3000:] + finished.stderr[-3000:]
    return dict(zip(CASES, json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_twenty_steps_are_those_of_one_device(case, results):
    result = results[case]
    assert "error" not in result, result["error"]
    assert result["moved"] > 0.05  # Steps that do nothing are equal everywhere.
    assert result["loss"] <= conformance_models.LOSS_TOLERANCE
    assert result["weights"] <= conformance_models.WEIGHT_TOLERANCE
