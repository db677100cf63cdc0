"""The model of every strategy exports: its weights are gathered first."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "export_scenarios.py"
JOBS = {
    "mesh": Job("mesh", {"batch": 1, "model": 2, "keep_host_copy": False}),
    "pipeline": Job("pipeline", {"stages": 2}),
    "mirrored": Job("mirrored", {"devices": 2}),
}


def test_a_model_exports_live_and_from_its_file(scenario):
    scenario.check()
