"""Keras' own cases for distributed models, stated anew in keras_correctness_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("keras_correctness_scenarios.py")
_NAMES = tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE))
# Steps on ranks are those of replicas: what is left is what two processes must agree on.
_OF_RANKS = (
    "binary_metrics_of_a_saturated_sigmoid",
    "images_with_synchronized_batch_normalization",
    "lstm_that_keeps_its_state",
)
# To a pipeline all recurrent layers are layers like others, and long to trace.
_OF_STAGES = tuple(name for name in _NAMES if name not in ("gru", "lstm_in_mixed_precision"))
#: strategy -> its options, ranks, and the scenarios that say most about it.
_ENGINES = {
    "mirrored": ({"devices": 2}, 1, _NAMES),
    "horovod": ({"stall_timeout_s": 20}, 2, _OF_RANKS),
    "mesh": ({"batch": 2, "model": 1}, 1, _NAMES),
    "pipeline": ({"stages": 2, "microbatches": 2}, 1, _OF_STAGES),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {
        name: Job(_FILE, tmp_path_factory.mktemp(name), name, options, ranks=ranks, only=names)
        for name, (options, ranks, names) in _ENGINES.items()
    }


@pytest.mark.parametrize(
    ("strategy", "name"), [(s, name) for s, (_, _, names) in _ENGINES.items() for name in names]
)
def test_a_case_of_keras(strategy, name, jobs):
    jobs[strategy].check(name)
