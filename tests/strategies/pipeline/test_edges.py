"""Few rows, mixed precision and files, and Keras 3, on two stages; see edge_scenarios.py."""

from __future__ import annotations

from scenario_plugin import Job

from tfdist.compat.keras import VARIABLE

SCENARIOS = "edge_scenarios.py"
_OPTIONS = {"stages": 2, "microbatches": 4}
JOBS = {
    "pipeline": Job("pipeline", _OPTIONS),
    "keras_3": Job("pipeline", _OPTIONS, env={VARIABLE: "0"}, only_named=True),
}


def test_edge(scenario):
    scenario.check()
