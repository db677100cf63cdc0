"""Federated learning on TFF: federated_scenarios.py. Its fit is in tests/conformance too."""

from __future__ import annotations

from scenario_plugin import Job

from tfdist.compat.keras import VARIABLE

SCENARIOS = "federated_scenarios.py"
JOBS = {
    "federated": Job("federated"),
    "keras_3": Job("federated", env={VARIABLE: "0"}, only_named=True),
}


def test_scenario(scenario):
    scenario.check()
