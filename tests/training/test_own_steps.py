"""Steps of a user's own on several replicas; the scenarios stand in own_steps_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("own_steps_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    def job(strategy: str, options: dict, ranks: int = 1) -> Job:
        return Job(_FILE, tmp_path_factory.mktemp(strategy), strategy, options, ranks=ranks)

    return {
        "mirrored": job("mirrored", {"devices": 2}),
        "horovod": job("horovod", {"stall_timeout_s": 20}, ranks=2),
        "multi_worker": job("multi_worker", {}, ranks=2),
    }


@pytest.mark.parametrize("strategy", ["mirrored", "horovod", "multi_worker"])
@pytest.mark.parametrize("name", _NAMES)
def test_own_steps(strategy, name, jobs):
    jobs[strategy].check(name)
