"""Every kind of damage is found, with file, record and offset."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError, OptionError
from tfdist.records import check, load_manifest, write

SHARD = "train-00001-of-00002.tfrecord"


@pytest.fixture
def folder(tmp_path):
    x = np.arange(40 * 30, dtype=np.uint8).reshape(40, 30)
    write((x, np.arange(40) % 3), tmp_path / "data", num_shards=2)
    return tmp_path / "data"


@pytest.fixture
def gzip_folder(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 5000), np.uint8)
    write((x, np.arange(40) % 3), tmp_path / "gz", num_shards=2, compression="gzip")
    return tmp_path / "gz"


def frame_bytes(folder):
    return load_manifest(folder).layout.record_bytes + 16


def edit(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(data) or data))


def flip(position, bit=0):
    def change(data):
        data[position] ^= 1 << bit

    return change


def test_clean(folder, gzip_folder):
    assert check(folder) == []
    assert check(gzip_folder) == []


def test_a_flipped_bit_of_the_data(folder):
    start = 3 * frame_bytes(folder)
    edit(folder / SHARD, flip(start + 20))
    (fault,) = check(folder)
    assert (fault.file, fault.record, fault.offset) == (SHARD, 3, start)
    assert "data" in fault.reason
    assert str(fault) == f"{SHARD}, record 3, byte {start}: {fault.reason}"


@pytest.mark.parametrize("position", [0, 8])
def test_a_flipped_bit_of_the_length_and_the_records_behind_it(folder, position):
    size = frame_bytes(folder)
    edit(folder / SHARD, flip(2 * size + position))
    edit(folder / SHARD, flip(5 * size + 20))
    first, second = check(folder)
    assert (first.record, first.offset) == (2, 2 * size)
    assert "length" in first.reason
    assert (second.record, second.offset) == (5, 5 * size)


def test_a_flipped_bit_of_the_checksum(folder):
    size = frame_bytes(folder)
    edit(folder / SHARD, flip(2 * size - 1))
    (fault,) = check(folder)
    assert (fault.record, fault.offset) == (1, size)


@pytest.mark.parametrize("kept", [5, 12, 30])
def test_truncation(folder, kept):
    size = frame_bytes(folder)
    edit(folder / SHARD, lambda data: data[: 4 * size + kept])
    (fault,) = check(folder)
    assert (fault.record, fault.offset) == (4, 4 * size)
    assert "ends inside" in fault.reason


def test_truncation_between_two_records(folder):
    edit(folder / SHARD, lambda data: data[: 4 * frame_bytes(folder)])
    (fault,) = check(folder)
    assert fault.record is None
    assert "has 4 records, the manifest says 16" in fault.reason


def test_an_empty_shard(folder):
    (folder / SHARD).write_bytes(b"")
    (fault,) = check(folder)
    assert "has 0 records" in fault.reason


def test_missing_and_foreign_shards(folder):
    (folder / SHARD).rename(folder / "other.tfrecord.gz")
    missing, foreign = check(folder)
    assert (missing.file, foreign.file) == (SHARD, "other.tfrecord.gz")
    assert "missing" in missing.reason
    assert "does not name" in foreign.reason


def test_swapped_records_spoil_the_checksum_alone(folder):
    size = frame_bytes(folder)
    edit(folder / SHARD, lambda data: data[size : 2 * size] + data[:size] + data[2 * size :])
    (fault,) = check(folder)
    assert fault.record is None
    assert "checksum" in fault.reason


def test_another_count_in_the_manifest(folder):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value["splits"]["train"]["shards"][1]["records"] += 1
    value["splits"]["train"]["records"] += 1
    del value["checksum"], value["layout"]
    path.write_text(json.dumps(value))
    (fault,) = check(folder)
    assert "has 16 records, the manifest says 17" in str(fault)


def test_several_faults_are_all_named(folder):
    for record in (0, 7, 15):
        edit(folder / SHARD, flip(record * frame_bytes(folder) + 13))
    assert [fault.record for fault in check(folder)] == [0, 7, 15]


def test_one_split_alone(folder):
    edit(folder / SHARD, flip(20))
    (folder / "foreign.tfrecord").write_text("")
    assert check(folder, "validation") == []
    assert len(check(folder, "train")) == 1
    with pytest.raises(OptionError, match="Choose one of train, validation"):
        check(folder, "test")


def test_a_damaged_length_of_images_ends_the_shard(tmp_path):
    for number in range(6):
        path = tmp_path / "images" / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number * 40).save(path)
    write(tmp_path / "images", tmp_path / "data", num_shards=1)
    shard = tmp_path / "data" / "train-00000-of-00001.tfrecord"
    edit(shard, flip(0))
    (fault,) = check(tmp_path / "data")
    assert (fault.record, fault.offset) == (0, 0)


class TestGzip:
    shard = f"{SHARD}.gz"

    def test_flipped_bit(self, gzip_folder):
        size = frame_bytes(gzip_folder)
        edit(gzip_folder / self.shard, flip(8 * size))
        fault = check(gzip_folder)[0]
        assert fault.file == self.shard
        assert fault.record in (7, 8)
        assert fault.offset == fault.record * size

    def test_truncation(self, gzip_folder):
        edit(gzip_folder / self.shard, lambda data: data[: len(data) // 2])
        (fault,) = check(gzip_folder)
        assert "too early" in fault.reason
        assert fault.record == fault.offset // frame_bytes(gzip_folder)

    def test_only_the_trailer_is_missing(self, gzip_folder):
        edit(gzip_folder / self.shard, lambda data: data[:-4])
        (fault,) = check(gzip_folder)
        assert "too early" in fault.reason

    def test_bytes_behind_the_end(self, gzip_folder):
        edit(gzip_folder / self.shard, lambda data: data + b"more")
        assert len(check(gzip_folder)) == 1

    def test_not_gzip(self, gzip_folder):
        (gzip_folder / self.shard).write_bytes(b"plain text")
        (fault,) = check(gzip_folder)
        assert (fault.record, fault.offset) == (0, 0)
        assert "gzip" in fault.reason

    def test_wrong_data_in_a_whole_stream(self, gzip_folder):
        path = gzip_folder / self.shard
        plain = bytearray(zlib.decompress(path.read_bytes(), 31))
        plain[frame_bytes(gzip_folder) + 100] ^= 4
        packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        path.write_bytes(packer.compress(plain) + packer.flush())
        (fault,) = check(gzip_folder)
        assert (fault.record, fault.offset) == (1, frame_bytes(gzip_folder))


def test_progress_counts_every_byte(folder):
    seen = []
    check(folder, progress=seen.append)
    manifest = load_manifest(folder)
    assert sum(seen) == sum(split.bytes for split in manifest.splits.values())


def test_no_manifest(tmp_path):
    with pytest.raises(DataError, match=r"manifest\.json"):
        check(tmp_path)
