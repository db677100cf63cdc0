"""Shards as a source: the same records, in other shards."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import CorruptShardError, DataError, OptionError
from tfdist.records import check, load_manifest, write
from tfdist.records.format.encoding import cut_frames


@pytest.fixture(scope="module", params=["fixed", "varying"])
def shards(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "data"
    x = np.arange(60, dtype=np.float32)
    ragged = [[*range(n % 4 + 1)] for n in range(60)]
    source = x if request.param == "fixed" else {"x": x, "tokens": ragged}
    write((source, np.arange(60) % 200), folder, num_shards=2)
    return folder


def frames(folder, split):
    paths = sorted(folder.glob(f"{split}-*"))
    return [frame for path in paths for frame in cut_frames(path.read_bytes())[0]]


def test_records_stay_what_they_are_and_in_their_splits(tmp_path, shards):
    manifest = write(shards, tmp_path / "new", num_shards=5, seed=3)
    old = load_manifest(shards)
    assert check(tmp_path / "new") == []
    assert (manifest.schema, manifest.layout) == (old.schema, old.layout)
    assert {name: len(split.shards) for name, split in manifest.splits.items()} == {
        "train": 5,
        "validation": 5,
    }
    for split in ("train", "validation"):
        assert sorted(frames(tmp_path / "new", split)) == sorted(frames(shards, split))
        assert frames(tmp_path / "new", split) != frames(shards, split)
        assert manifest.splits[split].class_counts == old.splits[split].class_counts


def test_one_split_is_divided(tmp_path, shards):
    options = {"split": "a=3,b=2", "num_shards": 2, "compression": "gzip"}
    manifest = write(f"{shards}/train", tmp_path / "new", **options)
    assert check(tmp_path / "new") == []
    assert [split.records for split in manifest.splits.values()] == [30, 20]
    counts = {}
    for split in manifest.splits.values():
        counts |= split.class_counts
    assert counts == load_manifest(shards).splits["train"].class_counts
    again = write(tmp_path / "new", tmp_path / "again", num_shards=1)
    assert (again.compression, check(tmp_path / "again")) == ("none", [])
    everything = frames(tmp_path / "again", "a") + frames(tmp_path / "again", "b")
    assert sorted(everything) == sorted(frames(shards, "train"))


def test_what_cannot_be_asked_of_shards(tmp_path, shards):
    for options in ({"stratify": True}, {"clients": 2}, {"label": "x"}):
        with pytest.raises(OptionError, match="records stay as they are"):
            write(shards, tmp_path / "new", **options)
    with pytest.raises(DataError, match="splits train, validation"):
        write(f"{shards}/test", tmp_path / "new")
    write((np.zeros(9), np.zeros(9)), tmp_path / "fed", split="train=1", clients=3)
    with pytest.raises(DataError, match="dealt to 3 clients"):
        write(tmp_path / "fed", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("source", ["", "/train"])
def test_not_into_their_own_folder(shards, source):
    with pytest.raises(DataError, match="must not be written into their own source"):
        write(f"{shards}{source}", shards / "train")


def test_a_damaged_shard_is_named(tmp_path):
    write((np.zeros((20, 3)), np.zeros(20)), tmp_path / "data", split="train=1", num_shards=1)
    path = next((tmp_path / "data").glob("*.tfrecord"))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match="train-00000-of-00001"):
        write(tmp_path / "data", tmp_path / "new")
    assert not (tmp_path / "new").exists()
