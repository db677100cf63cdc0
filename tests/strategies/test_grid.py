"""Strategies inside of strategies: each rank of horovod holds a model in stages, or on a mesh."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist import topology
from tfdist.compat import versions
from tfdist.compat.versions import lane
from tfdist.errors import EngineMissingError, OptionError
from tfdist.strategies import spec_of
from tfdist.topology import Topology

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("grid_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)
#: Those of a mesh alone, of stages alone, and of both.
_MESH_ALONE = (
    "slices_of_all_ranks",
    "a_divided_batch_in_each_rank",
    "a_masked_output_is_refused",
)
_BOTH = (
    "statistics_of_all_ranks",
    "sums_over_rows",
    "a_loss_of_ones_own_that_is_no_number_of_no_rows",
    "words_that_are_looked_up",
    "clipped_tables_of_words_and_of_positions",
    "one_batch",
    "batches_that_keras_takes",
    "a_fit_goes_on_on_another_grid",
    "the_file_is_keras_own",
)
_OF_STAGES = tuple(name for name in _NAMES if name not in _MESH_ALONE)
_OF_A_MESH = (*_MESH_ALONE, *_BOTH)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    options = {"stages": 2, "microbatches": 3, "replicas": "horovod"}
    folder = tmp_path_factory.mktemp("grid")
    return Job(_FILE, folder, "pipeline", options, ranks=2, only=_OF_STAGES)


@pytest.mark.parametrize("name", _OF_STAGES)
def test_on_two_ranks_with_two_stages(name, job):
    job.check(name)


@pytest.fixture(scope="module")
def mesh_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    options = {"batch": 1, "model": 2, "replicas": "horovod"}
    folder = tmp_path_factory.mktemp("mesh")
    return Job(_FILE, folder, "mesh", options, ranks=2, only=_OF_A_MESH)


@pytest.mark.skipif(lane() != "modern", reason="refused there: see the next test")
@pytest.mark.parametrize("name", _OF_A_MESH)
def test_on_two_ranks_with_a_mesh(name, mesh_job):
    mesh_job.check(name)


def test_a_mesh_on_ranks_is_refused_on_an_older_tensorflow(monkeypatch):
    monkeypatch.setattr(versions, "tensorflow_version", lambda: "2.14.1")
    with pytest.raises(EngineMissingError, match=r"must have TensorFlow 2\.16"):
        tfdist.strategy("mesh", model=2, replicas="horovod").start()


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
