"""Few rows, mixed precision and files, on two stages; see edge_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from scenarios import Job

# The first scenario waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("edge_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    options = {"stages": 2, "microbatches": 4}
    return Job(_FILE, tmp_path_factory.mktemp("edges"), "pipeline", options)


@pytest.mark.parametrize("name", _NAMES)
def test_edge(job, name):
    job.check(name)
