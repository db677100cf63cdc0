"""Threads that read a Sequence's batches: side by side, in order, and not too far ahead."""

from __future__ import annotations

import threading

import pytest

from tfdist.training.feed.read_ahead import ReadAhead


def test_two_read_at_a_time_and_order_stays():
    both = threading.Barrier(2, timeout=30)

    def read(number):
        both.wait()  # One alone would wait for ever.
        return number

    numbers = [3, 1, 2, 0]
    assert list(ReadAhead(workers=2).read(read, numbers)) == numbers


@pytest.mark.parametrize("workers", [0, 1])
def test_without_workers_each_is_read_when_it_is_asked_for(workers):
    seen = []
    found = ReadAhead(workers=workers).read(lambda number: seen.append(number), range(3))
    next(found)
    assert seen == [0]


def test_they_are_only_so_far_ahead_and_end_with_the_reader():
    seen = []
    found = ReadAhead(workers=2, max_queue_size=3).read(lambda n: seen.append(n) or n, range(100))
    assert [next(found), next(found)] == [0, 1]
    found.close()
    assert len(seen) <= 6
    assert not [t for t in threading.enumerate() if t.name.startswith("tfdist-read-ahead")]


def test_what_a_batch_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        list(ReadAhead(workers=2).read(lambda number: 1 // (1 - number), range(3)))
