"""Every registered strategy against one device. A new engine joins by adding a row."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conformance_cases as cases
import pytest

from tfdist.strategies import REGISTRY

TOLERANCE = 1e-5
_SCRIPT = Path(__file__).with_name("run_cases.py")
_TIMEOUT_S = 560

# The first case of a row waits for the whole job, on a machine that may be busy.
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a strategy is run.

    Attributes:
        strategy: its registered name.
        options: of the strategy.
        launcher: arguments before the script; empty where one process is all.
        num_replicas: what the strategy must report, so that no row compares one device to itself.
        models: that the row is for; the strategy's own tests say why it refuses others.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    num_replicas: int
    models: tuple[str, ...] = cases.MODELS

    @property
    def cases(self) -> list[str]:
        return [case for case in cases.CASES if case.split("-")[1] in self.models]

    def __str__(self) -> str:
        return self.strategy if self.models == cases.MODELS else f"{self.strategy} {self.models[0]}"


def _launched(strategy: str, workers: int) -> tuple[str, ...]:
    arguments = f"-m tfdist launch --strategy {strategy} --workers {workers} --"
    return (sys.executable, *arguments.split())


ROWS = (
    Row(strategy="single", num_replicas=1),
    Row(strategy="mirrored", options={"devices": 2}, num_replicas=2),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 20},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
    ),
    Row(strategy="multi_worker", launcher=_launched("multi_worker", workers=2), num_replicas=2),
    # Steps of one worker follow one another; several are asynchronous (tests/strategies).
    Row(
        strategy="parameter_server",
        launcher=_launched("parameter_server", workers=1),
        num_replicas=1,
    ),
    Row(strategy="mesh", options={"batch": 2, "model": 2}, num_replicas=2),
    # One replica, divided: tests/strategies/pipeline asserts that its stages are on two devices.
    Row(strategy="pipeline", options={"stages": 2, "microbatches": 4}, num_replicas=1),
    # A round is a step on all records. BatchNormalization on several clients is not one device's.
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 3},
        num_replicas=3,
        models=("mlp", "two_inputs"),
    ),
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 1, "batch_norm": "average"},
        num_replicas=1,
        models=("convnet",),
    ),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Runs all cases of a row in one job, when the first of them is asked for."""
    done: dict[str, dict] = {}

    def of(row: Row) -> dict:
        if str(row) not in done:
            out = tmp_path_factory.mktemp(row.strategy) / "results.json"
            arguments = [row.strategy, json.dumps(row.options), json.dumps(row.cases), str(out)]
            script = [sys.executable, str(_SCRIPT), *arguments]
            done[str(row)] = {}  # A job that failed is not run once more for each case.
            finished = subprocess.run(
                [*row.launcher, *script],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            assert out.exists(), finished.stdout[-3000:] + finished.stderr[-3000:]
            done[str(row)] = json.loads(out.read_text())
        return done[str(row)]

    return of


def test_every_registered_strategy_has_a_row():
    assert {row.strategy for row in ROWS} == set(REGISTRY)


def test_the_rows_of_a_strategy_have_every_case():
    for name in REGISTRY:
        covered = [case for row in ROWS if row.strategy == name for case in row.cases]
        assert sorted(covered) == sorted(cases.CASES)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_has_as_many_replicas_as_it_says(row, results):
    assert results(row)["num_replicas"] == row.num_replicas


@pytest.mark.parametrize(
    ("row", "case"), [pytest.param(r, c, id=f"{r}-{c}") for r in ROWS for c in r.cases]
)
def test_equals_one_device(row, case, results):
    result = results(row)[case]
    assert "error" not in result, result["error"]
    wrong = {
        what: difference
        for what, difference in result["differences"].items()
        if math.isnan(difference) or difference > TOLERANCE
    }
    assert not wrong
