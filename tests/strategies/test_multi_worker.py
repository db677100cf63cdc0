"""multi_worker: its options, and what only it has; the scenarios stand beside."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist.errors import OptionError

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("multi_worker_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"communication": "mpi"}, "Known: auto, ring, nccl"),
        ({"bytes_per_pack": 0}, "bytes_per_pack must be a whole number"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"stall_timeout_s": 0}, "stall_timeout_s must be at least 1"),
        ({"start_timeout_s": "soon"}, "start_timeout_s must be at least 1"),
        ({"sync_batch_norm": False}, "unknown option of strategy 'multi_worker'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        tfdist.strategy("multi_worker", **options)


def test_a_parameter_server_is_no_worker(monkeypatch):
    from tfdist.topology import tf_config

    monkeypatch.setenv("TF_CONFIG", tf_config([("worker", "a:1"), ("ps", "a:2")], 1))
    with pytest.raises(OptionError, match="has workers only"):
        tfdist.strategy("multi_worker").start()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("multi_worker")
    return Job(_FILE, folder, "multi_worker", {"stall_timeout_s": 3}, ranks=2)


@pytest.mark.parametrize("name", _NAMES)
def test_on_two_workers(name, job):
    job.check(name)
