"""Strategies inside of strategies: each rank holds a model in stages, or on a mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scenario_plugin import Job

import tfdist
from tfdist import topology
from tfdist.cli import saved_weights
from tfdist.errors import OptionError
from tfdist.records.writing.writer import write
from tfdist.strategies import REPLICAS, spec_of
from tfdist.topology import Topology

MODELS = Path(__file__).parents[1] / "cli" / "models.py"
SCENARIOS = "grid_scenarios.py"
JOBS = {
    "stages": Job("pipeline", {"stages": 2, "microbatches": 3, "replicas": "horovod"}, ranks=2),
    "stages_of_workers": Job(
        "pipeline", {"stages": 2, "microbatches": 3, "replicas": "multi_worker"}, ranks=2
    ),
    "mesh": Job(
        "mesh",
        {"batch": 1, "model": 2, "replicas": "horovod"},
        ranks=2,
        only_named=True,
    ),
    "mesh_of_workers": Job(
        "mesh",
        {"batch": 1, "model": 2, "replicas": "multi_worker"},
        ranks=2,
        only_named=True,
    ),
}


def test_on_two_ranks(scenario):
    scenario.check()


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("pipeline", {"replicas": "mirrored"}, "Choose one of horovod, multi_worker"),
        ("horovod", {"replicas": "horovod"}, "strategy 'horovod', whose processes are replicas"),
        ("horovod", {"replicas": "multi_worker"}, "strategy 'horovod', whose processes are repl"),
        ("pipeline", {"shard": "optimizer"}, "shard must go with replicas"),
        ("mesh", {"batch": 2, "shard": "optimizer"}, "shard must go with replicas"),
        ("mesh", {"replicas": "horovod", "shard": "weights"}, "divides the weights of each rank"),
        (
            "pipeline",
            {"replicas": "horovod", "shard": "weights"},
            "divides the weights of each rank",
        ),
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
    spec = spec_of("mesh", {"replicas": "multi_worker"})
    assert (spec.launchers, spec.sagemaker) == (("tasks",), "multi_worker_mirrored_strategy")
    assert spec_of("pipeline", {"stages": 2}).launchers == ()


@pytest.mark.parametrize("replicas", REPLICAS)
def test_ranks_that_may_be_lost_hold_whole_models(monkeypatch, replicas):
    monkeypatch.setattr(topology, "current", lambda: Topology(elastic_workers=2))
    with pytest.raises(OptionError, match=f"horovod alone.*with replicas='{replicas}'"):
        tfdist.strategy("pipeline", replicas=replicas).start()


def test_workers_that_hold_models_must_know_each_other(monkeypatch):
    monkeypatch.setattr(topology, "current", lambda: Topology(world_size=2, launcher="mpi"))
    with pytest.raises(OptionError, match=r"must know each other's addresses.*started by mpi"):
        tfdist.strategy("pipeline", replicas="multi_worker").start()


@pytest.mark.long
@pytest.mark.timeout(560)
def test_a_training_goes_on_between_engines(run_cli, tmp_path):
    """Of workers, then of Horovod, then on one device: as it does without any grid."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 50)
    x = (rng.normal(size=(50, 8)) + y[:, None]).astype(np.float32)
    write((x, y), tmp_path / "shards", split="train=1")
    grid = ("pipeline", "-o", "microbatches=2", "-o")
    two, alone = ("--workers", 2), ("single",)
    ways = {
        "divided": [
            (*grid, "replicas=multi_worker", "-o", "shard=optimizer", *two),
            (*grid, "replicas=horovod", *two),
            alone,
        ],
        "whole": [("multi_worker", *two), ("multi_worker", *two), alone],
    }
    for output, strategies in ways.items():
        for epochs, strategy in enumerate(strategies, start=1):
            done = run_cli(
                *("train", "--resume", "--model", f"{MODELS}:mlp", "--data", tmp_path / "shards"),
                *("--output", tmp_path / output, "--epochs", epochs, "--global-batch-size", 8),
                *("--strategy", *strategy),
            )
            assert done.returncode == 0, done.stderr
    found, expected = (saved_weights.read(tmp_path / output / "model.keras") for output in ways)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
