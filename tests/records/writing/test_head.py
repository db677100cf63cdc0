"""The first records of a split, written as shards of their own."""

from __future__ import annotations

import json

import pytest

import tfdist
from tfdist.records.format.checking import check
from tfdist.records.format.encoding import value_of
from tfdist.records.format.manifest import load_manifest
from tfdist.records.writing.shard_folders import write_head


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_they_are_those_of_the_split_over_its_shards(tmp_path, compression):
    """Of 12 records in 3 shards, 5 and then all: whole shards, in the order of the split."""
    rows = [{"size": float(number), "label": number % 2} for number in range(12)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tmp_path / "data"
    tfdist.records.write(
        *(tmp_path / "table.jsonl", data), split="train=1", num_shards=3, compression=compression
    )
    manifest = load_manifest(data)
    paths = [data / shard.file for shard in manifest.splits["train"].shards]
    (size,) = manifest.schema.of_role("input")
    every = write_head(paths, manifest, "train", 99, tmp_path / "all")
    assert sorted(float(value_of(record, size)[0]) for record in every) == list(range(12))
    for count in (5, 99):
        folder = tmp_path / f"head-{count}"
        assert write_head(paths, manifest, "train", count, folder) == every[:count]
        assert check(folder) == []
        assert load_manifest(folder).splits["train"].records == min(count, 12)
