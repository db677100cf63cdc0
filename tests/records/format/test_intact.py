"""Shards are known from others while TensorFlow reads them, and each file is summed once."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import tensorflow as tf
from crc32c import crc32c
from PIL import Image

import tfdist
from tfdist.errors import CorruptShardError, DataError
from tfdist.records import open_records, write
from tfdist.records.format import files, intact
from tfdist.records.format.encoding import mask

NUM = 72  # in the first split: 24 a shard
SHARD = "train-00001-of-00003.tfrecord"
OTHER = "train-00002-of-00003.tfrecord"


def write_shards(folder, seed=0, **options):
    x = np.random.default_rng(5).integers(0, 256, (NUM * 6 // 5, 7), np.uint8)
    write((x, np.arange(len(x))), folder, num_shards=3, seed=seed, **options)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "data")


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Shards whose sums are awaited before they are read, and those that are summed beside it."""
    if request.param == "large":
        monkeypatch.setattr(intact, "_AWAITED_BYTES", 0)


@pytest.fixture
def images(tmp_path):
    for number in range(12):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number * 20).save(path)
    write(tmp_path / "photos", tmp_path / "images", num_shards=1, split="train=1")
    return tmp_path / "images"


def stream(records, shuffle=False, epoch=0, batch_size=8):
    """Returns the class ids of an epoch that is streamed; a fit takes as many batches, no more."""
    batches = iter(
        records.batches(0, records.num_records, batch_size, shuffle=shuffle, seed=0, epoch=epoch)
    )
    try:
        steps = -(-records.num_records // batch_size)
        return np.concatenate([next(batches)[1].numpy() for _ in range(steps)])
    except tf.errors.OpError as error:
        raise records.explain(error) or error from error


@pytest.mark.parametrize("shuffle", [False, True])
def test_right_shards_are_read_whole(folder, size, shuffle):
    records = open_records(folder / "train", cache=False)
    epochs = [stream(records, shuffle, epoch) for epoch in range(2)]
    assert len({int(y) for y in epochs[0]}) == NUM
    assert sorted(epochs[0]) == sorted(epochs[1])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shard_of_another_seed(folder, tmp_path, size, shuffle):
    """Of the right name and size; every record has a right checksum of its own."""
    other = write_shards(tmp_path / "other", seed=1)
    (folder / SHARD).write_bytes((other / SHARD).read_bytes())
    with pytest.raises(CorruptShardError, match=rf"{SHARD}: has checksum"):
        stream(open_records(folder / "train", cache=False), shuffle)
    with pytest.raises(CorruptShardError, match=rf"{SHARD}: has checksum"):
        stream(open_records(folder / "train"), shuffle)  # kept in memory


def test_two_shards_that_changed_places(folder, size):
    first, second = (folder / name for name in (SHARD, OTHER))
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(CorruptShardError, match="has checksum"):
        stream(open_records(folder / "train", cache=False))


def test_a_shard_cut_between_two_records_after_it_was_opened(folder, size):
    records = open_records(folder / "train", cache=False)
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 24 * 10])
    with pytest.raises(CorruptShardError, match=f"{SHARD}: has 10 records, the manifest says 24"):
        stream(records)


@pytest.mark.parametrize("moment", ["between epochs", "while it is read"])
def test_a_shard_replaced(folder, tmp_path, size, moment):
    other = write_shards(tmp_path / "other", seed=1)
    records = open_records(folder / "train", cache=False)
    if moment == "between epochs":
        stream(records)
        os.replace(other / SHARD, folder / SHARD)
        with pytest.raises(CorruptShardError, match=f"{SHARD}: has checksum"):
            stream(records, epoch=1)
        return
    batches = iter(records.batches(0, NUM, 1, shuffle=False, seed=0, epoch=0))
    for _ in range(30):  # Inside the second shard.
        next(batches)
    os.replace(other / SHARD, folder / SHARD)
    with pytest.raises(tf.errors.OpError) as raised:
        list(batches)
    assert f"{SHARD}: has checksum" in str(records.explain(raised.value))


def test_the_same_bytes_in_a_new_file_are_right(folder):
    records = open_records(folder / "train", cache=False)
    before = stream(records)
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(data)
    np.testing.assert_array_equal(stream(records), before)


def test_each_file_is_summed_once(folder, monkeypatch):
    for path in folder.iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    summed = []
    real = files.crc32c
    monkeypatch.setattr(files, "crc32c", lambda data, value: summed.append(1) or real(data, value))
    for _ in range(2):
        records = open_records(folder / "train", cache=False)
        for epoch in range(3):
            stream(records, True, epoch)
    assert len(summed) == 3


def test_a_file_that_has_just_been_written_is_not_remembered(tmp_path):
    """It may be written again within the same tick of the clock."""
    sums, path = files.Sums(), tmp_path / "file"
    path.write_bytes(b"one")
    at = path.stat()
    assert sums.of(path) == f"{crc32c(b'one'):08x}"
    path.write_bytes(b"two")
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert sums.of(path) == f"{crc32c(b'two'):08x}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "missing"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_shard_that_is_no_file(folder, size, kind, opened):
    """A pipe that nobody writes into would be waited for without end."""
    records = open_records(folder / "train", cache=False) if opened else None
    path = folder / SHARD
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(CorruptShardError, match=SHARD):
        stream(records or open_records(folder / "train", cache=False))


@pytest.mark.parametrize("length", [2**36, 2**63, 2**64 - 5])
def test_tensorflow_never_sees_a_length_that_is_longer_than_the_file(images, size, length):
    """It makes room for it first, and dies: the checksum of the length is right."""
    path = images / "train-00000-of-00001.tfrecord"
    data = bytearray(path.read_bytes())
    header = struct.pack("<Q", length)
    data[:12] = header + struct.pack("<I", mask(crc32c(header)))
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match="record 0, byte 0: the file ends inside"):
        stream(open_records(images, cache=False))


def test_no_checkpoint_is_written_within_an_epoch_of_wrong_records(tmp_path, monkeypatch):
    """Of large shards, which are read while they are summed."""
    from tfdist.records.reading import reader

    folder, other = write_shards(tmp_path / "data"), write_shards(tmp_path / "other", seed=1)
    (folder / SHARD).write_bytes((other / SHARD).read_bytes())
    monkeypatch.setattr(intact, "_AWAITED_BYTES", 0)
    monkeypatch.setattr(reader, "TABLE_BYTES", 0)

    def model_fn():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(7,))])
        model.compile("sgd", "mse")
        return model

    with tfdist.strategy("single") as strategy:
        model = strategy.build(model_fn)
        train = strategy.dataset(folder / "train", global_batch_size=4)
        keep = tfdist.Checkpoints(tmp_path / "ckpt", every_steps=1)
        with pytest.raises(DataError, match=SHARD):
            model.fit(train, epochs=1, verbose=0, callbacks=[keep])
    steps = [path.stem for path in (tmp_path / "ckpt").glob("ckpt-*.index")]
    # The right shards come first or not, as they are shuffled: those steps may be kept.
    assert all(int(name.partition("-")[2]) < 18 for name in steps)


def test_damaged_validation_records_are_named_too(folder, tmp_path, monkeypatch):
    from tfdist.records.reading import reader

    monkeypatch.setattr(reader, "TABLE_BYTES", 0)
    other = write_shards(tmp_path / "other", seed=1)
    name = "validation-00001-of-00003.tfrecord"

    def model_fn():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(7,))])
        model.compile("sgd", "mse")
        return model

    with tfdist.strategy("single") as strategy:
        model = strategy.build(model_fn)
        train = strategy.dataset(folder / "train", global_batch_size=8)
        test = strategy.dataset(folder / "validation", global_batch_size=8, training=False)
        (folder / name).write_bytes((other / name).read_bytes())
        loops = (
            lambda: model.fit(train, validation_data=test, verbose=0),
            lambda: model.evaluate(test, verbose=0),
            lambda: model.predict(test, verbose=0),
        )
        for loop in loops:
            with pytest.raises(CorruptShardError, match=f"{name}: has checksum"):
                loop()
