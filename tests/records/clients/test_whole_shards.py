"""Shards read in one go: every byte counts, and damage is named."""

from __future__ import annotations

import dataclasses
import gzip

import numpy as np
import pytest
from crc32c import crc32c

from tfdist.errors import CorruptShardError
from tfdist.records import write
from tfdist.records.clients.shard_store import read_examples, read_rows


@pytest.fixture(params=["none", "gzip"])
def written(request, tmp_path):
    """The folder, the first shard and the manifest of 20 records."""
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    options = {"num_shards": 2, "split": "train=1", "compression": request.param}
    manifest = write((x, np.arange(20) % 3), tmp_path / "data", **options)
    return tmp_path / "data", manifest.splits["train"].shards[0], manifest


def test_rows_and_examples_are_the_same_bytes(written):
    rows = read_rows(*written)
    _, shard, manifest = written
    assert rows.shape == (shard.records, manifest.layout.record_bytes)
    assert [row.tobytes() for row in rows] == read_examples(*written)
    slot = manifest.layout.slots["x"]
    values = rows[:, slot.offset : slot.offset + slot.bytes].copy().view(np.float32)
    assert {tuple(row) for row in values} < {(3.0 * n, 3.0 * n + 1, 3.0 * n + 2) for n in range(20)}


@pytest.mark.parametrize("read", [read_rows, read_examples])
@pytest.mark.parametrize("position", [0, 20, -1])
def test_any_changed_byte_is_found(written, read, position):
    path = written[0] / written[1].file
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptShardError, match=written[1].file):
        read(*written)


@pytest.mark.parametrize("read", [read_rows, read_examples])
def test_short_missing_and_miscounted_shards(written, read):
    folder, shard, manifest = written
    more = dataclasses.replace(shard, records=shard.records + 1)
    with pytest.raises(CorruptShardError, match="has 10 records, the manifest says 11"):
        read(folder, more, manifest)
    path = folder / shard.file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptShardError, match=shard.file):
        read(*written)
    path.unlink()
    with pytest.raises(CorruptShardError, match="missing"):
        read(*written)


def test_gzip_files_that_were_put_together_are_read_whole(written):
    folder, shard, manifest = written
    rows = read_rows(*written)
    path = folder / shard.file
    plain = (
        path.read_bytes() if manifest.compression == "none" else gzip.decompress(path.read_bytes())
    )
    cut = 3 * manifest.layout.frame_bytes
    content = gzip.compress(plain[:cut]) + gzip.compress(plain[cut:])
    path.write_bytes(content)
    put = dataclasses.replace(shard, bytes=len(content), checksum=f"{crc32c(content):08x}")
    of_others = dataclasses.replace(manifest, compression="gzip")
    assert read_rows(folder, put, of_others).tobytes() == rows.tobytes()
    assert read_examples(folder, put, of_others) == [row.tobytes() for row in rows]
