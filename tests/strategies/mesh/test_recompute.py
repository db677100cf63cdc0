"""``recompute`` on a mesh."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "recompute_scenarios.py"
JOBS = {"2x2": Job("mesh", {"batch": 2, "model": 2, "recompute": "blocks"})}


def test_blocks_computed_again(scenario):
    scenario.check()
