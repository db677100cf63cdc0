"""``shard="weights"``: weights of blocks in parts, each rank with its own.

The scenarios stand in shard_weights_scenarios.py.
"""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "shard_weights_scenarios.py"
JOBS = {
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2),
    "multi_worker": Job("multi_worker", ranks=2, only_named=True),
}


def test_on(scenario):
    scenario.check()
