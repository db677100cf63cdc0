"""The place of a process, from recorded environments."""

from __future__ import annotations

import json

import pytest

from tfdist.errors import OptionError
from tfdist.topology import Topology, from_environ, tf_config

MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "a",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
}
SAGEMAKER = {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}
GLOO = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1"}
TASKS = [("chief", "a:1"), ("worker", "a:2"), ("worker", "b:1"), ("ps", "b:2")]


def test_one_process_without_a_launcher():
    assert from_environ({"PATH": "/bin"}) == Topology()
    assert from_environ({}).is_chief


def test_mpirun():
    place = from_environ(MPIRUN)
    assert place == Topology(
        world_size=4, rank=3, local_rank=1, local_size=2, launcher="mpi", role="worker"
    )
    assert not place.is_chief


def test_what_stands_closest_to_the_process_tells_its_place():
    """All five at once, and each of the others as the one before it is taken away."""
    sources = {
        "tf_config": {"TF_CONFIG": tf_config(TASKS, 0)},
        "gloo": GLOO,
        "mpi": MPIRUN,
        "sagemaker": SAGEMAKER,
        "slurm": SLURM,
    }
    for launcher in list(sources):
        everything = {key: value for source in sources.values() for key, value in source.items()}
        assert from_environ(everything).launcher == launcher
        del sources[launcher]


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK must be less"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "no OMPI_COMM_WORLD_RANK"),
        (GLOO | {"HOROVOD_RANK": "1.0"}, "HOROVOD_RANK"),
        (GLOO | {"HOROVOD_SIZE": "0"}, "HOROVOD_SIZE"),
    ],
)
def test_a_rank_that_cannot_be_is_named(environ, variable):
    with pytest.raises(OptionError, match=variable):
        from_environ(environ)


@pytest.mark.parametrize("rank", range(len(TASKS)))
def test_a_cluster_that_mpirun_started(rank):
    place = from_environ(MPIRUN | {"TF_CONFIG": tf_config(TASKS, rank)})
    role, address = TASKS[rank]
    assert (place.launcher, place.world_size, place.rank) == ("tf_config", 4, rank)
    assert (place.role, place.addresses[rank]) == (role, address)
    assert (place.local_rank, place.local_size) == (rank % 2, 2)
    assert place.roles == ("chief", "worker", "worker", "ps")
    assert place.num_workers == 2


def test_a_cluster_without_a_chief_counts_from_its_first_worker():
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    assert from_environ({"TF_CONFIG": json.dumps(config)}).is_chief


def test_what_tf_config_holds_is_what_tensorflow_reads():
    assert json.loads(tf_config(TASKS, 2)) == {
        "cluster": {"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["b:2"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        '{"task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 5}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0.5}}',
        '{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": [1, 2]}, "task": {"type": "worker", "index": 0}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:100],
)
def test_a_tf_config_that_cannot_be_read_is_shown(text):
    with pytest.raises(OptionError, match="TF_CONFIG") as caught:
        from_environ({"TF_CONFIG": text})
    assert text[:100] in str(caught.value)
