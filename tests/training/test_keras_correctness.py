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
_STRATEGIES = {
    "mirrored": ({"devices": 2}, 1),
    "horovod": ({"stall_timeout_s": 20}, 2),
    "mesh": ({"batch": 2, "model": 1}, 1),
    "pipeline": ({"stages": 2, "microbatches": 2}, 1),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {
        name: Job(_FILE, tmp_path_factory.mktemp(name), name, options, ranks=ranks)
        for name, (options, ranks) in _STRATEGIES.items()
    }


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_a_case_of_keras(strategy, name, jobs):
    jobs[strategy].check(name)
