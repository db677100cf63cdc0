"""How many shards there are when nobody says it."""

from __future__ import annotations

import numpy as np

from tfdist.records import write
from tfdist.records.writing import shard_files
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.shard_files import frame_bytes, shards_for


def test_from_100_to_200_megabytes_each():
    for megabytes in (600, 750, 1000, 3000, 150_000):
        assert 100 <= megabytes / shards_for(megabytes * 1e6) <= 200
    assert [shards_for(size) for size in (0, 1e6, 5e8)] == [4, 4, 4]


def test_bytes_of_a_record_are_those_of_the_files(tmp_path):
    fixed = (np.zeros((60, 9), np.float32), np.zeros(60))
    ragged = ([[*range(5)]] * 30 + [[*range(300, 315)]] * 30, np.zeros(60))
    for number, source in enumerate((fixed, ragged)):
        manifest = write(source, tmp_path / str(number), split="train=1")
        size = manifest.splits["train"].bytes / 60
        assert abs(frame_bytes(read_raw(source)) - size) < 0.02 * size


def test_each_split_gets_its_own_number(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "_SHARD_BYTES", 1000)
    source = (np.zeros((600, 9), np.float32), np.zeros(600))
    manifest = write(source, tmp_path / "data")
    shards = {name: len(split.shards) for name, split in manifest.splits.items()}
    assert shards["train"] > shards["validation"] > 4
    for split in manifest.splits.values():
        assert all(500 < shard.bytes < 1500 for shard in split.shards)
    told = write(source, tmp_path / "told", num_shards=2)
    assert all(len(split.shards) == 2 for split in told.splits.values())
