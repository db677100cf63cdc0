"""Few rows, mixed precision and files, on two stages; see edge_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "edge_scenarios.py"
JOBS = {"pipeline": Job("pipeline", {"stages": 2, "microbatches": 4})}


def test_edge(scenario):
    scenario.check()
