"""Models of Keras 3 on a mesh of 2 x 2 devices; see keras_3_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

from tfdist.compat.keras import VARIABLE

SCENARIOS = "keras_3_scenarios.py"
JOBS = {"keras_3": Job("mesh", {"batch": 2, "model": 2}, env={VARIABLE: "0"})}


def test_mesh_of_keras_3(scenario):
    scenario.check()
