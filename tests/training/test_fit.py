"""fit, evaluate and predict on every strategy; the scenarios stand in fit_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("fit_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return {
        "single": Job(_FILE, folder("single"), "single"),
        "mirrored": Job(_FILE, folder("mirrored"), "mirrored", {"devices": 2}),
        "horovod": Job(_FILE, folder("horovod"), "horovod", {"stall_timeout_s": 20}, ranks=2),
    }


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("strategy", ["single", "mirrored", "horovod"])
def test_fit(strategy, name, jobs):
    jobs[strategy].check(name)
