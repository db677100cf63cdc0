"""How records of a stream are dealt and mixed: shares, evenness, and how far a record travels."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.records.writing.streams.shards import MixingBuffer, ShardDeal, SplitPattern


def test_shares_are_exact_in_every_block():
    pattern = SplitPattern({"a": 5, "b": 1}, seed=0)
    numbers = np.concatenate([pattern.next(count) for count in (1, 7, 100, 1092)])
    blocks = numbers.reshape(-1, 6)
    assert (blocks.sum(axis=1) == 1).all()
    assert len(np.unique(blocks.argmax(axis=1))) == 6


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.1), (np.pi, 1.0), (1.0,)])
def test_shares_of_any_kind(shares):
    pattern = SplitPattern(dict(zip("abc", shares, strict=False)), seed=1)
    counts = np.bincount(pattern.next(30_000), minlength=len(shares))
    assert np.abs(counts - 30_000 * np.array(shares) / sum(shares)).max() <= 1


def test_shards_get_as_many_records():
    deal = ShardDeal(7, seed=0, split=0)
    dealt = [deal.next() for _ in range(7 * 50 + 3)]
    assert set(np.bincount(dealt)) == {50, 51}
    assert dealt[:7] != dealt[7:14]


def test_records_leave_a_buffer_far_from_where_they_came():
    buffer, left = MixingBuffer(seed=0, split=0), []
    for number in range(2000):
        buffer.add(number.to_bytes(4, "little"))
        if len(buffer) > 500:
            left.append(int.from_bytes(buffer.take(), "little"))
    while len(buffer):
        left.append(int.from_bytes(buffer.take(), "little"))
    assert sorted(left) == list(range(2000))
    assert buffer.bytes == 0
    away = np.abs(np.array(left) - np.arange(2000))
    assert away.mean() > 250
