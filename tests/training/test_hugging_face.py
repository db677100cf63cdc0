"""HuggingFace's models on several replicas; the scenarios stand in hugging_face_scenarios.py."""

from __future__ import annotations

import pytest
from scenario_plugin import Job

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
SCENARIOS = "hugging_face_scenarios.py"
JOBS = {
    "single": Job("single"),
    "mirrored": Job("mirrored", {"devices": 2}),
    "horovod": Job("horovod", {"stall_timeout_s": 60}, ranks=2),
    # Its steps are those of the others; only its losses and exchanges are its own.
    "multi_worker": Job("multi_worker", ranks=2, only_named=True),
}


def test_hugging_face(scenario):
    scenario.check()
