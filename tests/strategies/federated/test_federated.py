"""Federated learning on TFF: federated_scenarios.py. Its fit is in tests/conformance too."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "federated_scenarios.py"
JOBS = {"federated": Job("federated")}


def test_scenario(scenario):
    scenario.check()
