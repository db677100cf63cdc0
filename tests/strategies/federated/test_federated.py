"""Federated learning on TFF: federated_scenarios.py. Its fit is in tests/conformance too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from scenarios import Job

# The first scenario waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("federated_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(_FILE, tmp_path_factory.mktemp("federated"), "federated")


@pytest.mark.parametrize("name", _NAMES)
def test_scenario(name, job):
    job.check(name)
