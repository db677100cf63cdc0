"""Several replicas with Keras 3; tests/conformance compares all strategies that take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_plugin import Job, Run

from tfdist.compat.keras import VARIABLE

SCENARIOS = "keras_3_scenarios.py"
_KERAS_3 = {VARIABLE: "0"}
_FLOAT16 = {"devices": 2, "precision": "mixed_float16"}
JOBS = {
    "mirrored": Job("mirrored", {"devices": 2}, env=_KERAS_3),
    "mixed_float16": Job("mirrored", _FLOAT16, env=_KERAS_3, only_named=True),
    "horovod": Job("horovod", ranks=2, env=_KERAS_3, only_named=True),
}


def test_replicas_are_one_device(scenario):
    scenario.check()


@pytest.mark.timeout(580)
@pytest.mark.parametrize("options", [{"recompute": "blocks"}, {"shard": "optimizer"}])
def test_what_needs_keras_2_is_refused(options, tmp_path):
    name = "losses_of_layers_stay_with_their_replica"
    job = Job("single", options, env=_KERAS_3)
    run = Run(job, Path(__file__).with_name(SCENARIOS), tmp_path, (name,))
    with pytest.raises(
        pytest.fail.Exception,
        match=f"recompute, shard and offload must have a model of Keras 2.*{VARIABLE}=1",
    ):
        run.check(name)
