"""How well shuffled reading mixes, where the buffer holds far less than the data."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.records.reading import source
from tfdist.records.reading.reader import read
from tfdist.records.writing.writer import write

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
