"""An epoch that begins in its middle reads nothing that lies before it, and is the same epoch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

from tfdist.errors import CorruptShardError
from tfdist.records import load_manifest, open_records, write
from tfdist.records.format import intact
from tfdist.records.format.files import Sums
from tfdist.records.format.offsets import OFFSETS_NAME
from tfdist.records.reading import shard_source, source
from tfdist.training.feed.feed import Feed

NUM = 240
SHARDS = 12
SIZE = 8


def content(number):
    """Tokens of which a record has between 200 and 300: some 500 bytes."""
    return np.random.default_rng(number).integers(1000, 9000, 200 + number % 101).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same records: of one layout, and of different lengths, also compressed."""
    parent = tmp_path_factory.mktemp("data")
    labels = np.arange(NUM)
    options = {"num_shards": SHARDS, "split": "train=1"}
    write((np.zeros((NUM, 500), np.uint8), labels), parent / "fixed", **options)
    tokens = {"tokens": [content(number) for number in range(NUM)]}
    write((tokens, labels), parent / "varied", **options)
    write((tokens, labels), parent / "gzip", compression="gzip", **options)
    for path in parent.rglob("*.tfrecord*"):
        os.utime(path, (1e9, 1e9))  # What has just been written is summed more than once.
    return parent


@pytest.fixture(params=["varied", *long("fixed")])
def folder(request, folders):
    return folders / request.param


@pytest.fixture(params=[1, 4], ids=["one by one", "interleaved"])
def cycle(request, monkeypatch):
    """Few records in the shuffle buffer, so that most of an epoch is behind its middle."""
    monkeypatch.setattr(source, "_SHUFFLE_BUFFER_BYTES", 10_000)
    monkeypatch.setattr(shard_source, "_INTERLEAVE_BYTES", 0 if request.param > 1 else 1 << 40)


class Read:
    """The bytes that this process has taken out of files since it was made."""

    def __init__(self):
        self._before = self._now()

    @staticmethod
    def _now():
        with open("/proc/self/io") as file:
            return int(dict(line.split(": ") for line in file)["rchar"])

    @property
    def bytes(self):
        return self._now() - self._before


def labels(folder, skip, *, shuffle, start=0, stop=NUM):
    records = open_records(folder, cache=False)
    batches = records.batches(
        start, stop, SIZE, shuffle=shuffle, seed=3, epoch=2, skip_batches=skip
    )
    return [int(label) for _, y in batches for label in y]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_the_rest_is_what_a_whole_epoch_has_there(folder, cycle, shuffle):
    whole = labels(folder, 0, shuffle=shuffle)
    assert sorted(whole) == list(range(NUM))
    for skip in (1, 11, NUM // SIZE - 1):
        assert labels(folder, skip, shuffle=shuffle) == whole[skip * SIZE :]


@pytest.mark.parametrize("kind", ["varied", "gzip"])
def test_a_part_that_begins_inside_a_shard(folders, kind, cycle):
    for shuffle in (False, True):
        whole = labels(folders / kind, 0, shuffle=shuffle, start=67, stop=151)
        assert len(set(whole)) == 84
        assert labels(folders / kind, 4, shuffle=shuffle, start=67, stop=151) == whole[4 * SIZE :]


def test_a_fit_of_several_epochs_that_is_resumed_in_one_of_them(folders, cycle):
    """There the number of steps to leave out is a tensor."""
    feed = Feed(
        records=open_records(folders / "varied", cache=False),
        global_batch_size=16,
        parts=2,
        part=1,
        shuffle=True,
    )
    whole = [y.numpy().tolist() for (_, y), _ in feed.epochs(1, 3)]
    resumed = [y.numpy().tolist() for (_, y), _ in feed.epochs(1, 3, skip_steps=9)]
    assert resumed == whole[9:]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_what_lies_before_is_not_read(folder, cycle, shuffle, monkeypatch):
    stored = load_manifest(folder).splits["train"].bytes

    def bytes_read(skip):
        monkeypatch.setattr(intact, "sums", Sums())  # As in a new process.
        before = Read()
        labels(folder, skip, shuffle=shuffle)
        return before.bytes

    bytes_read(0)  # What is read once alone: modules.
    whole, tail = bytes_read(0), bytes_read(int(0.9 * NUM / SIZE))
    assert whole > 2 * stored  # Each file is read, and summed.
    # A tenth of the records, and the sums of all files that they are of: in order the last two,
    # shuffled also those of the records that have waited in the buffer.
    assert tail < (0.6 if shuffle else 0.45) * stored


def test_a_record_in_a_large_shard_is_reached_without_those_before_it(folders, monkeypatch):
    monkeypatch.setattr(intact, "_AWAITED_BYTES", 0)
    records = open_records(folders / "varied", cache=False)
    read = records._source._numbered.read
    read(np.array([19]))
    before = Read()
    (record,) = read(np.array([19]))
    assert before.bytes < 2 * len(record) + 1000


class TestIndex:
    @pytest.fixture
    def folder(self, tmp_path, folders):
        for path in (folders / "varied").iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    def test_only_records_of_different_lengths_have_one(self, folders):
        assert (folders / "varied" / OFFSETS_NAME).is_file()
        assert not (folders / "fixed" / OFFSETS_NAME).exists()
        assert not (folders / "gzip" / OFFSETS_NAME).exists()

    def damaged(self, folder, other, how):
        path = folder / OFFSETS_NAME
        content = bytearray(path.read_bytes())
        if how == "missing":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif how == "foreign":
            path.write_bytes((other / OFFSETS_NAME).read_bytes())
        elif how == "no index":
            path.write_bytes(os.urandom(len(content)))
        else:
            content[{"its table": 30, "its lengths": -5}[how]] ^= 1
            path.write_bytes(content)

    @pytest.mark.parametrize(
        "how", ["missing", "cut", "foreign", *long("no index", "its table", "its lengths")]
    )
    def test_a_wrong_one_is_of_no_consequence(self, folder, tmp_path_factory, cycle, how):
        other = tmp_path_factory.mktemp("other") / "data"
        if how == "foreign":
            tokens = {"tokens": [content(number + 7) for number in range(NUM)]}
            write((tokens, np.arange(NUM)), other, num_shards=SHARDS, split="train=1")
        whole = labels(folder, 0, shuffle=True)
        self.damaged(folder, other, how)
        assert labels(folder, 20, shuffle=True) == whole[20 * SIZE :]
        in_order = labels(folder, 0, shuffle=False)
        assert labels(folder, 7, shuffle=False) == in_order[7 * SIZE :]

    def test_lengths_that_two_records_have_exchanged(self, folder, monkeypatch):
        """As if the index were right by all its checksums, and wrong."""
        whole = labels(folder, 0, shuffle=False)
        records = open_records(folder, cache=False)
        offsets = records._source._numbered._offsets
        right = offsets._indexed

        def exchanged(shard):
            lengths = right(shard)
            lengths[[3, 4]] = lengths[[4, 3]]
            return lengths

        monkeypatch.setattr(offsets, "_indexed", exchanged)
        batches = records.batches(4, NUM, SIZE, shuffle=False, seed=0, epoch=0)
        assert [int(label) for _, y in batches for label in y] == whole[4:]


def test_damage_is_named_in_an_epoch_that_begins_in_its_middle(tmp_path, folders, cycle):
    for path in (folders / "varied").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / load_manifest(tmp_path).splits["train"].shards[5].file
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    records = open_records(tmp_path, cache=False)
    order = [
        int(n)
        for n in np.concatenate(
            list(records.numbers(0, NUM, SIZE, shuffle=True, seed=3, epoch=2).as_numpy_iterator())
        )
    ]
    skip = max(0, order.index(6 * NUM // SHARDS - 1) // SIZE - 1)
    with pytest.raises(tf.errors.OpError) as raised:
        list(records.batches(0, NUM, SIZE, shuffle=True, seed=3, epoch=2, skip_batches=skip))
    explained = records.explain(raised.value)
    assert isinstance(explained, CorruptShardError)
    assert f"{path.name}, record 19" in str(explained)


def test_a_shard_of_another_seed_is_known_from_the_middle_on(tmp_path, folders):
    """Each of its records is intact."""
    for path in (folders / "fixed").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first, second = sorted(tmp_path.glob("*.tfrecord"))[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    records = open_records(tmp_path, cache=False)
    with pytest.raises(tf.errors.OpError) as raised:
        list(records.batches(0, NUM, SIZE, shuffle=True, seed=3, epoch=2, skip_batches=1))
    assert "has checksum" in str(records.explain(raised.value))
