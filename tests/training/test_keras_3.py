"""Several replicas with Keras 3; tests/conformance compares all strategies that take it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tfdist.compat.keras import VARIABLE
from tfdist.compat.versions import lane

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

pytestmark = [
    pytest.mark.timeout(580),  # The first scenario of a job waits for all.
    pytest.mark.skipif(lane() != "modern", reason="this TensorFlow has no Keras 3"),
]
_FILE = Path(__file__).with_name("keras_3_scenarios.py")
_OF_FLOAT16 = ("a_gradient_that_overflows_on_one_replica",)
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)
_NAMES = tuple(name for name in _NAMES if name not in _OF_FLOAT16)
_KERAS_3 = {VARIABLE: "0"}


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("mirrored")
    return Job(_FILE, folder, "mirrored", {"devices": 2}, only=_NAMES, env=_KERAS_3)


@pytest.mark.parametrize("name", _NAMES)
def test_replicas_are_one_device(name, mirrored):
    mirrored.check(name)


@pytest.mark.parametrize("name", _OF_FLOAT16)
def test_mixed_precision(name, tmp_path):
    options = {"devices": 2, "precision": "mixed_float16"}
    Job(_FILE, tmp_path, "mirrored", options, only=_OF_FLOAT16, env=_KERAS_3).check(name)


@pytest.mark.parametrize("options", [{"recompute": "blocks"}, {"shard": "optimizer"}])
def test_what_needs_keras_2_is_refused(options, tmp_path):
    name = "losses_of_layers_stay_with_their_replica"
    job = Job(_FILE, tmp_path, "single", options, only=(name,), env=_KERAS_3)
    with pytest.raises(
        AssertionError, match=f"recompute and shard must have a model of Keras 2.*{VARIABLE}=1"
    ):
        job.check(name)
