"""Steps of a user's own on several replicas; the scenarios stand in own_steps_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "own_steps_scenarios.py"
JOBS = {
    "mirrored": Job("mirrored", {"devices": 2}),
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2),
    "multi_worker": Job("multi_worker", ranks=2),
}


def test_own_steps(scenario):
    scenario.check()
