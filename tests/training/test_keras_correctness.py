"""Keras' own cases for distributed models, stated anew in keras_correctness_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

SCENARIOS = "keras_correctness_scenarios.py"
JOBS = {
    "mirrored": Job("mirrored", {"devices": 2}),
    # Steps on ranks are those of replicas: what names it is what two processes must agree on.
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2, only_named=True),
    "mesh": Job("mesh", {"batch": 2, "model": 1}),
    # To it all recurrent layers are layers like others, and long to trace.
    "pipeline": Job("pipeline", {"stages": 2, "microbatches": 2}),
}


def test_a_case_of_keras(scenario):
    scenario.check()
