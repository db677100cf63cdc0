"""multi_worker: its options, and what only it has; the scenarios stand beside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf
from scenario_plugin import Job

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import OptionError
from tfdist.strategies.multi_worker.cluster import Cluster
from tfdist.strategies.multi_worker.strategy import check_place
from tfdist.topology import Topology, from_environ, tf_config

SCENARIOS = "multi_worker_scenarios.py"
JOBS = {
    "multi_worker": Job("multi_worker", {"stall_timeout_s": 3}, ranks=2),
    "keras_3": Job("multi_worker", ranks=2, env={VARIABLE: "0"}, only_named=True),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"communication": "mpi"}, "Choose one of auto, ring, nccl"),
        ({"bytes_per_pack": 0}, "bytes_per_pack must be a whole number"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"stall_timeout_s": 0}, "stall_timeout_s must be a number of seconds, at least 1"),
        ({"start_timeout_s": "soon"}, "start_timeout_s must be a number of seconds, at least 1"),
        ({"comunication": "ring"}, "option of strategy 'multi_worker' must be a known one"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        tfdist.strategy("multi_worker", **options)


def test_places_without_workers_that_know_each_other_are_refused():
    check_place(Topology())
    for rank in range(2):
        cluster = tf_config([("worker", "a:1"), ("ps", "a:2")], rank)
        with pytest.raises(OptionError, match="must have workers only"):
            check_place(from_environ({"TF_CONFIG": cluster}))
    with pytest.raises(OptionError, match="rank 1 of 2, started by mpi"):
        check_place(Topology(world_size=2, rank=1, launcher="mpi"))


def test_a_forgotten_srun_is_told(monkeypatch, capsys):
    monkeypatch.setattr("os.environ", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"})
    check_place(Topology())
    assert "srun did not start this process" in capsys.readouterr().err


def test_a_name_of_the_users_own_is_no_lost_worker():
    node = (
        '[[{{node heartbeat/MatMul}}]]\nDetected at node heartbeat\n  File "heartbeat/a.py", line 1'
    )
    place = SimpleNamespace(_stall=None, process=0, _addresses=(), _watch=None)
    for text, is_lost in ((f"OOM {node}", False), (f"task 1: missed heartbeats {node}", True)):
        error = tf.errors.ResourceExhaustedError(None, None, text)
        assert (Cluster.explain(place, error) is not None) == is_lost


def test_on_two_workers(scenario):
    scenario.check()
