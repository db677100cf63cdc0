"""Shards that lie apart from their manifest, as files or through named pipes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import CorruptShardError, DataError, TfdistError
from tfdist.records import adopt, explain_read_error, load_manifest, open_records, write
from tfdist.records.reading import pipes
from tfdist.records.reading.stored import Stored

NUM = 103
X = np.random.default_rng(0).integers(0, 256, (NUM, 5), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """103 records in 4 shards: three of 26 and one of 25."""
    out = tmp_path_factory.mktemp("data") / "shards"
    write((X, np.arange(NUM)), out, split="train=1", num_shards=4)
    return out


def shard_bytes(folder, numbers=range(4)):
    shards = load_manifest(folder).splits["train"].shards
    return b"".join((folder / shards[number].file).read_bytes() for number in numbers)


@pytest.fixture
def agent(tmp_path, folder):
    """Plays the cloud's agent: ``agent(data, passes)`` makes pipes and writes data into each."""
    threads = []

    def write_all(path, data):
        with contextlib.suppress(BrokenPipeError), open(path, "wb") as pipe:
            pipe.write(data)

    def start(data, passes=1, **options):
        for number in range(passes):
            path = tmp_path / f"train_{number}"
            os.mkfifo(path)
            # A daemon: a pipe that the test never opens must not keep the process alive.
            threads.append(threading.Thread(target=write_all, args=(path, data), daemon=True))
            threads[-1].start()
        return Stored(
            manifest=folder, split="train", folder=tmp_path / "train", pipes=True, **options
        )

    return start


def labels(records, start=0, stop=None, *, shuffle=False, epoch=0, size=10):
    stop = records.num_records if stop is None else stop
    batches = records.batches(start, stop, size, shuffle=shuffle, seed=0, epoch=epoch)
    return [int(y) for _, batch in batches for y in batch]


def in_order(folder):
    return labels(open_records(folder))


def test_each_pass_reads_the_next_pipe(folder, agent):
    records = open_records(agent(shard_bytes(folder), passes=3), cache=False)
    assert records.num_records == NUM
    assert labels(records) == in_order(folder)
    assert labels(records, 30, 95) == in_order(folder)[30:95]
    shuffled = labels(records, shuffle=True)
    assert sorted(shuffled) == list(range(NUM))
    assert shuffled != in_order(folder)


@pytest.mark.parametrize("cache", [False, True])
def test_numbers_are_those_of_the_records_in_batches(folder, agent, cache):
    records = open_records(agent(shard_bytes(folder), passes=3), cache=cache)
    order = in_order(folder)
    for shuffle in (False, True):
        batches = records.numbers(0, NUM, 10, shuffle=shuffle, seed=0, epoch=2)
        numbers = np.concatenate(list(batches.as_numpy_iterator()))
        found = labels(records, shuffle=shuffle, epoch=2)
        assert [order[number] for number in numbers] == found


def test_epochs_inside_flat_map_read_a_pipe_each(folder, agent):
    records = open_records(agent(shard_bytes(folder), passes=2), cache=False)
    epochs = tf.data.Dataset.range(2).flat_map(
        lambda epoch: records.batches(0, NUM, 10, shuffle=True, seed=0, epoch=epoch)
    )
    read = [int(y) for _, batch in epochs for y in batch]
    assert sorted(read[:NUM]) == sorted(read[NUM:]) == list(range(NUM))
    assert read[:NUM] != read[NUM:]


def test_a_small_part_is_kept_and_read_once(folder, agent):
    records = open_records(agent(shard_bytes(folder)))
    for _ in range(3):
        assert labels(records, 10, 90) == in_order(folder)[10:90]


def test_padding_is_no_pass(folder, agent):
    records = open_records(agent(shard_bytes(folder)), cache=False)
    labels(records)
    assert labels(records, 0, 1) == in_order(folder)[:1]


def test_divided_pipes_tell_which_shards_came(folder, agent):
    # In another order than the manifest's: a host gets what it gets.
    stored = agent(shard_bytes(folder, (3, 1)), passes=2, divided=True, reader=1, readers=2)
    records = open_records(stored, cache=False)
    assert records.num_records == 25 + 26
    assert records.readers == (1, 2)
    order = in_order(folder)
    assert labels(records) == order[78:103] + order[26:52]


FAULTS = {
    "cut in a record": (lambda data: data[:-40], "the stream ends"),
    "cut in a header": (lambda data: data + data[:5], "more bytes"),
    "cut between shards": (lambda data: data[: len(data) // 103 * 52], "0 of 12 bytes"),
    "a changed byte": (lambda data: data[:20] + b"?" + data[21:], "record 0, byte 0: the data"),
    "a changed length": (lambda data: b"?" + data[1:], "the length does not match"),
    "more than there is": (lambda data: data * 2, "more bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_as_it_was_written_is_named(folder, agent, fault):
    damage, message = FAULTS[fault]
    records = open_records(agent(damage(shard_bytes(folder))), cache=False)
    with pytest.raises(tf.errors.OpError) as raised:
        labels(records)
    explained = explain_read_error(raised.value, records)
    assert isinstance(explained, CorruptShardError)
    assert message in str(explained)


def test_damage_is_named_when_a_part_is_loaded(folder, agent):
    with pytest.raises(CorruptShardError, match="the stream ends"):
        labels(open_records(agent(shard_bytes(folder)[:-1])))


def test_files_of_others_come_in_the_order_of_their_names(tmp_path, folder, agent):
    files = tmp_path / "files"
    files.mkdir()
    names = [f"part-{number}.tfrecord" for number in (1, 2, 10, 11)]
    for name, info in zip(names, load_manifest(folder).splits["train"].shards, strict=True):
        shutil.copy(folder / info.file, files / name)
    assert [info.file for info in adopt(files).splits["train"].shards] == names
    data = b"".join((files / name).read_bytes() for name in sorted(names))
    records = open_records(replace(agent(data), manifest=files), cache=False)
    assert sorted(labels(records)) == list(range(NUM))


def test_shards_in_another_order_are_refused(folder, agent):
    with pytest.raises(CorruptShardError, match="of no shard of the manifest"):
        labels(open_records(agent(shard_bytes(folder, (1, 0, 2, 3)))))


def test_damage_among_divided_shards_is_found_at_once(folder, agent):
    with pytest.raises(CorruptShardError, match="does not match its checksum"):
        open_records(agent(shard_bytes(folder, (1,))[:-1] + b"?", divided=True))


@pytest.mark.parametrize("made", [False, True], ids=["no pipe", "a pipe that nobody writes"])
def test_silence_is_an_error(folder, tmp_path, monkeypatch, made):
    monkeypatch.setattr(pipes, "_TIMEOUT_S", 0.2)
    if made:
        os.mkfifo(tmp_path / "train_0")
    stored = Stored(manifest=folder, split="train", folder=tmp_path / "train", pipes=True)
    with pytest.raises(TfdistError, match=r"must give data within 0\.2 s"):
        labels(open_records(stored))


def test_compressed_shards_do_not_come_through_pipes(tmp_path):
    write((X, np.arange(NUM)), tmp_path / "gzip", split="train=1", compression="gzip")
    stored = Stored(manifest=tmp_path / "gzip", split="train", folder=tmp_path / "t", pipes=True)
    with pytest.raises(DataError, match="must not be compressed"):
        open_records(stored)


@pytest.fixture
def apart(folder, tmp_path):
    """Shards 1 and 2 in a folder without a manifest."""
    for shard in load_manifest(folder).splits["train"].shards[1:3]:
        shutil.copy(folder / shard.file, tmp_path)
    return Stored(manifest=folder, split="train", folder=tmp_path, divided=True)


def test_divided_files(folder, apart):
    assert labels(open_records(apart)) == in_order(folder)[26:78]


def test_a_damaged_file_apart_from_its_manifest_is_named(folder, apart):
    name = load_manifest(folder).splits["train"].shards[2].file
    data = bytearray((apart.folder / name).read_bytes())
    data[20] ^= 1
    (apart.folder / name).write_bytes(data)
    with pytest.raises(CorruptShardError, match=name):
        labels(open_records(apart))


def test_a_host_without_shards(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    stored = Stored(manifest=folder, split="train", folder=tmp_path / "empty", divided=True)
    with pytest.raises(DataError, match="every host must have at least one shard"):
        open_records(stored)


def test_an_unknown_split(folder, tmp_path):
    with pytest.raises(DataError, match="Choose one of train"):
        open_records(Stored(manifest=folder, split="trian", folder=tmp_path))
