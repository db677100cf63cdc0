"""Several replicas with Keras 3; tests/conformance compares all strategies that take it."""

from __future__ import annotations

from scenario_plugin import Job

from tfdist.compat.keras import VARIABLE

SCENARIOS = "keras_3_scenarios.py"
_KERAS_3 = {VARIABLE: "0"}
_FLOAT16 = {"devices": 2, "precision": "mixed_float16"}
JOBS = {
    "single": Job("single", env=_KERAS_3, only_named=True),
    "mirrored": Job("mirrored", {"devices": 2}, env=_KERAS_3),
    "mixed_float16": Job("mirrored", _FLOAT16, env=_KERAS_3, only_named=True),
    "horovod": Job("horovod", ranks=2, env=_KERAS_3, only_named=True),
}


def test_replicas_are_one_device(scenario):
    scenario.check()
