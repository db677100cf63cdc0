"""What a container is told, and what each of its processes reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfdist.aws.container import Container
from tfdist.errors import OptionError
from tfdist.topology import Topology


def environ(hosts=("algo-1",), **channels):
    """As SageMaker's toolkit writes it; channels are (mode, distribution)."""
    return {
        "SM_HOSTS": json.dumps(hosts),
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DIR": "/opt/ml/output",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_INPUT_DATA_CONFIG": json.dumps(
            {
                name: {"TrainingInputMode": mode, "S3DistributionType": distribution}
                for name, (mode, distribution) in channels.items()
            }
        ),
        **{f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in channels},
    }


WHOLE = ("File", "FullyReplicated")
SHARDED = ("FastFile", "ShardedByS3Key")
PLACE = Topology(world_size=4, rank=3, local_rank=1, local_size=2, launcher="mpi")


def test_files_that_every_host_has():
    container = Container.from_environ(environ(manifest=WHOLE, train=WHOLE))
    source = container.source("train", PLACE)
    assert source.folder == Path("/opt/ml/input/data/train")
    assert source.manifest == Path("/opt/ml/input/data/manifest")
    assert (source.pipes, source.divided) == (False, False)
    assert container.source("validation", PLACE) is None


def test_keys_that_hosts_share_are_divided_by_local_rank():
    container = Container.from_environ(environ(("algo-1", "algo-2"), manifest=WHOLE, train=SHARDED))
    source = container.source("train", PLACE)
    assert (source.divided, source.reader, source.readers) == (True, 1, 2)


def test_one_host_has_all_sharded_keys():
    container = Container.from_environ(environ(manifest=WHOLE, train=SHARDED))
    assert not container.source("train", PLACE).divided


def test_each_process_of_a_host_reads_pipes_of_its_own():
    pipe = ("Pipe", "FullyReplicated")
    container = Container.from_environ(environ(manifest=WHOLE, train_r0=pipe, train_r1=pipe))
    source = container.source("train", PLACE)
    assert source.pipes
    assert source.folder == Path("/opt/ml/input/data/train_r1")


def test_a_missing_variable_is_named():
    told = environ(manifest=WHOLE)
    del told["SM_MODEL_DIR"]
    with pytest.raises(OptionError, match=r"no SM_MODEL_DIR.*rehearse"):
        Container.from_environ(told)


def test_a_job_without_a_manifest():
    container = Container.from_environ(environ(train=WHOLE))
    with pytest.raises(OptionError, match="the channels train"):
        container.source("train", PLACE)
