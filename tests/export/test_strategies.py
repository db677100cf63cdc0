"""The model of every strategy exports: its weights are gathered first."""

from __future__ import annotations

import pytest
from scenario_plugin import Job

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import EngineMissingError

SCENARIOS = "export_scenarios.py"
JOBS = {
    "mesh": Job("mesh", {"batch": 1, "model": 2, "keep_host_copy": False}),
    "pipeline": Job("pipeline", {"stages": 2}),
    "mirrored": Job("mirrored", {"devices": 2}),
    "keras_3": Job("mirrored", {"devices": 2}, env={VARIABLE: "0"}, only_named=True),
}


def test_a_model_exports_live_and_from_its_file(scenario):
    scenario.check()


def test_models_of_keras_3_are_not_made_smaller(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(EngineMissingError, match=r"export\.prune must have models of Keras 2"):
        tfdist.export.__getattr__("prune")
