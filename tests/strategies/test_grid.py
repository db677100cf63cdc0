"""Strategies inside of strategies: each rank of horovod holds a model in stages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist import topology
from tfdist.errors import OptionError
from tfdist.strategies import spec_of
from tfdist.topology import Topology

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("grid_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    options = {"stages": 2, "microbatches": 3, "replicas": "horovod"}
    return Job(_FILE, tmp_path_factory.mktemp("grid"), "pipeline", options, ranks=2)


@pytest.mark.parametrize("name", _NAMES)
def test_on_two_ranks_with_two_stages(name, job):
    job.check(name)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("pipeline", {"replicas": "mirrored"}, r"found 'mirrored'.* Choose one of horovod"),
        ("horovod", {"replicas": "horovod"}, "strategy 'horovod', whose processes are replicas"),
        (
            "pipeline",
            {"replicas": "horovod", "batch_norm": "per_microbatch"},
            "batch_norm must be 'synchronized' with replicas",
        ),
        (
            "pipeline",
            {"replicas": "horovod", "freeze_until": "a", "frozen_cache": "memory"},
            "frozen_cache must be left out with replicas",
        ),
    ],
)
def test_what_cannot_be_is_one_line(name, options, match):
    with pytest.raises(OptionError, match=match) as caught:
        tfdist.strategy(name, **options)
    assert "\n" not in str(caught.value)


def test_it_is_started_as_its_ranks_are():
    spec = spec_of("pipeline", {"replicas": "horovod"})
    assert (spec.launchers, spec.sagemaker) == (("mpi", "gloo"), "mpi")
    assert not spec.is_elastic
    assert spec_of("pipeline", {"stages": 2}).launchers == ()


def test_ranks_that_may_be_lost_hold_whole_models(monkeypatch):
    monkeypatch.setattr(topology, "current", lambda: Topology(elastic_workers=2))
    with pytest.raises(OptionError, match="an elastic job must have strategy horovod alone"):
        tfdist.strategy("pipeline", replicas="horovod").start()
