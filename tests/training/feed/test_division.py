"""The even split: every row falls to one part, in order; for ints, arrays and tensors alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.feed.division import even_share, or_padding

SPLITS = list(itertools.product((0, 1, 2, 7, 12, 13), (1, 2, 3, 5, 8)))


@pytest.mark.parametrize(("of", "parts"), SPLITS)
def test_every_row_falls_to_one_part(of, parts):
    shares = [even_share(of, parts, part) for part in range(parts)]
    assert [row for begin, rows in shares for row in range(begin, begin + rows)] == [*range(of)]
    each = [rows for _, rows in shares]
    assert each == sorted(each, reverse=True)
    assert each[0] - each[-1] <= 1
    begins, of_all = even_share(of, parts, np.arange(parts))
    assert [*zip(begins, of_all, strict=True)] == shares


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_tensors_fall_as_ints_do(dtype):
    for of, parts in SPLITS:
        for part in range(parts):
            begin, rows = expected = even_share(of, parts, part)
            for number in (part, tf.constant(part, dtype)):
                found = even_share(tf.constant(of, dtype), parts, number)
                assert [one.dtype for one in found] == [dtype, dtype]
                assert tuple(one.numpy() for one in found) == expected
                padded = or_padding(*found)
                assert [one.dtype for one in padded] == [dtype, dtype]
                assert tuple(one.numpy() for one in padded) == or_padding(begin, rows)


def test_ints_stay_ints_so_that_shapes_are_static():
    assert or_padding(*even_share(5, 3, 1)) == (2, 4)
    assert or_padding(*even_share(2, 3, 2)) == (0, 1)  # A row of padding.
    assert all(type(one) is int for one in or_padding(*even_share(5, 3, 1)))
