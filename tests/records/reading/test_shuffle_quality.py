"""How well shuffled reading mixes, where the buffer holds far less than the data."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.records.reading import source
from tfdist.records.reading.reader import open_records, read
from tfdist.records.writing.writer import write
from tfdist.training.feed.feed import Feed

_RECORDS, _SHARDS, _HELD = 4000, 16, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards whose records are numbered, and the order in which they lie there."""
    path = tmp_path_factory.mktemp("mixed") / "data"
    numbers = np.arange(_RECORDS)
    write(({"x": numbers.astype(np.float32)}, numbers % 4), path, num_shards=_SHARDS, split="t=1")
    return path, _order(path, shuffle=False)


def _order(path, **options):
    batches = read(path / "t", batch_size=100, cache=False, **options)
    return np.concatenate([x.numpy() for x, _ in batches]).astype(int)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_records_leave_their_shard_and_their_neighbours(folder, seed, monkeypatch):
    path, stored = folder
    size = (path / f"t-00000-of-{_SHARDS:05d}.tfrecord").stat().st_size * _SHARDS // _RECORDS
    monkeypatch.setattr(source, "_SHUFFLE_BUFFER_BYTES", _HELD * size)
    place = np.empty(_RECORDS, int)
    place[stored] = np.arange(_RECORDS)
    found = place[_order(path, shuffle=True, seed=seed)]  # Where each record was stored.
    assert sorted(found) == list(range(_RECORDS))
    away = np.abs(found - np.arange(_RECORDS)).mean() / _RECORDS
    assert away > 0.3, "a third is what a perfect shuffle has"
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.01, "who stood side by side"
    shards = found // (_RECORDS // _SHARDS)
    assert np.mean([len(np.unique(batch)) for batch in shards.reshape(-1, 100)]) > 5
    # Each shard is spread over more than the buffer holds.
    assert min(np.ptp(np.flatnonzero(shards == shard)) for shard in range(_SHARDS)) > _HELD


@pytest.mark.parametrize("cache", [True, False])
def test_records_of_two_processes_meet_by_chance(folder, cache):
    path, _ = folder
    records = open_records(path / "t", cache=cache)

    def read_by(part, **options):
        feed = Feed(
            records=records, global_batch_size=100, parts=2, part=part, shuffle=True, **options
        )
        batches = [x.numpy()[: share[0]] for (x, _), share in feed.epochs(0, 2)]
        return np.concatenate(batches).astype(int)

    first, second = read_by(0), read_by(1)
    half = _RECORDS // 2
    assert np.unique(first).size == np.unique(second).size == half
    assert not set(first) & set(second)
    # Of a record of one part, the other part's record beside it in epochs 0 and 1.
    beside = {}
    for own, other in zip(first, second, strict=True):
        beside.setdefault(own, []).append(other)
    again = np.mean([before == after for before, after in beside.values()])
    assert again < 0.01, "they would meet in every epoch if both parts had one order"
    alone = Feed(records=records, global_batch_size=100, parts=2, shuffle=True).on_one_device()
    merged = np.concatenate([x.numpy() for x, _ in alone.epochs(0, 1)]).astype(int)
    pairs = [p.reshape(-1, 50) for p in (first[:half], second[:half])]
    assert np.array_equal(merged, np.concatenate(pairs, 1).ravel())


def test_the_random_numbers_of_a_record_do_not_depend_on_who_reads_it(folder):
    path, _ = folder

    def noise(x, y, seed):
        import tensorflow as tf

        return x, tf.random.stateless_uniform((), seed)

    records = open_records(path / "t", record_fn=noise)

    def drawn(parts):
        of_all = {}
        for part in range(parts):
            feed = Feed(
                records=records, global_batch_size=100, parts=parts, part=part, shuffle=True
            )
            for (x, noises), share in feed.epochs(3, 4):
                rows = int(share[0])
                own = (tensor.numpy()[:rows].tolist() for tensor in (x, noises))
                of_all |= zip(*own, strict=True)
        return of_all

    assert drawn(1) == drawn(2)
