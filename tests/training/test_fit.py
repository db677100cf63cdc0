"""fit, evaluate and predict on every strategy; the scenarios stand in fit_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "fit_scenarios.py"
JOBS = {
    # Steps on one device are Keras' own: what names it are the loops around them.
    "single": Job("single", only_named=True),
    "mirrored": Job("mirrored", {"devices": 2}),
    # What two processes must agree on, and what each has of its own.
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2, only_named=True),
}


def test_fit(scenario):
    scenario.check()
