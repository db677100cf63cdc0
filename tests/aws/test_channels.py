"""Which data reaches which host."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.aws.channels import Shape, balance, channels, shapes
from tfdist.aws.config import ChannelConfig
from tfdist.errors import DataError, OptionError
from tfdist.records import write

ROOT = "s3://bucket/prefix"
SHARDED = ChannelConfig(distribution="ShardedByS3Key")


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    x = np.zeros((103, 4), np.float32)
    out = tmp_path_factory.mktemp("data") / "shards"
    manifest = write((x, np.zeros(103, np.int64)), out, split="train=3,validation=1", num_shards=4)
    return shapes(manifest)


def made(splits, wanted, hosts=2, processes=2):
    return channels(splits, wanted, ROOT, hosts=hosts, processes_per_host=processes)


def test_the_manifest_and_the_splits(splits):
    found = made(splits, {"train": SHARDED})
    assert [(c.name, c.uri, c.mode, c.distribution) for c in found] == [
        ("manifest", f"{ROOT}/manifest/", "File", "FullyReplicated"),
        ("train", f"{ROOT}/train/", "File", "ShardedByS3Key"),
        ("validation", f"{ROOT}/validation/", "File", "FullyReplicated"),
    ]


def test_pipes_are_not_shared_by_processes(splits):
    names = [c.name for c in made(splits, {"train": ChannelConfig(mode="Pipe")}, processes=3)]
    assert names == ["manifest", "train_r0", "train_r1", "train_r2", "validation"]


def test_more_channels_than_aws_allows(splits):
    pipe = ChannelConfig(mode="Pipe")
    with pytest.raises(OptionError, match="at most 20 channels"):
        made(splits, {"train": pipe, "validation": pipe}, processes=10)


@pytest.mark.parametrize("hosts", [3, 5, 8])
def test_shards_divide_by_hosts(splits, hosts):
    wanted = -(-4 // hosts) * hosts
    with pytest.raises(DataError, match=f"tfdist shard --num-shards {wanted}"):
        made(splits, {"train": SHARDED}, hosts=hosts)


def test_balance_is_the_worst_case(splits):
    assert splits["train"].shard_records == (20, 19, 19, 19)
    assert balance(splits["train"], 2)[0] == pytest.approx(39 * 2 / 77)
    assert balance(Shape(4, "none"), 2) is None


def test_hosts_that_would_wait_for_one_are_refused():
    uneven = {"train": Shape(4, "none", (10, 10, 10, 10), (100, 400, 100, 100))}
    with pytest.raises(DataError, match=r"1.43 in bytes"):
        made(uneven, {"train": SHARDED})
    made(uneven, {})


def test_compressed_shards_do_not_come_through_pipes():
    with pytest.raises(DataError, match="must not be compressed"):
        made({"train": Shape(4, "gzip")}, {"train": ChannelConfig(mode="Pipe")})


def test_unknown_splits(splits):
    with pytest.raises(OptionError, match="Choose among train, validation"):
        made(splits, {"trian": SHARDED})
    with pytest.raises(DataError, match="a split 'train'"):
        made({"validation": splits["validation"]}, {})
