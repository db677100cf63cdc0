"""Federated learning on TFF. Its fit is in tests/conformance too."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios import Job, load

_FILE = Path(__file__).with_name("federated_scenarios.py")

pytestmark = pytest.mark.timeout(580)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(_FILE, tmp_path_factory.mktemp("federated"), "federated")


@pytest.mark.parametrize("name", list(load(_FILE)))
def test_scenario(name, job):
    job.check(name)
