"""A part of a dataset runs the maps on its own records, and has the rows that it always had."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.records import open_records
from tfdist.records.reading.elementwise import elementwise
from tfdist.training.feed.feed import Feed

NUM = 46
X = np.arange(NUM * 3, dtype=np.float32).reshape(NUM, 3)
ROWS = tf.data.Dataset.from_tensor_slices((X, np.arange(NUM)))


class Counted:
    """A map function that tells of which records it ran, in Python."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, y):
        def python(x, y):
            self.seen.append(int(y))
            return x * 2

        doubled = tf.numpy_function(python, [x, y], tf.float32)
        if y % 2 == 0:  # AutoGraph rewrites this.
            doubled += 1.0
        return tf.ensure_shape(doubled, [3]), y


def rows_of(feed, skip=0):
    """Returns the class ids of each step, without padding."""
    return [
        [int(label) for label in y[: int(share[0])]]
        for (_, y), share in feed.epochs(2, 4, skip_steps=skip)
    ]


def feeds(dataset, parts, **options):
    records = open_records(dataset, cache=False)
    return [
        Feed(records=records, global_batch_size=8, parts=parts, part=part, **options)
        for part in range(parts)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("parallel", [None, tf.data.AUTOTUNE])
def test_ranks_run_the_map_once_for_each_record(shuffle, parallel):
    counted = Counted()
    dataset = ROWS.map(counted, num_parallel_calls=parallel).batch(7).prefetch(2)
    parts = feeds(dataset, 2, shuffle=shuffle)
    counted.seen.clear()
    read = [label for feed in parts for step in rows_of(feed) for label in step]
    assert sorted(read) == sorted([*range(NUM)] * 2)  # Two epochs.
    assert sorted(counted.seen) == sorted([*range(NUM)] * 2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rows_are_those_of_a_pipeline_that_runs_whole(shuffle, monkeypatch):
    from tfdist.records.reading import source
    from tfdist.records.reading.elementwise import Elementwise

    dataset = ROWS.map(Counted()).map(lambda x, y: (x - 3.0, y))
    now = [list(feed.epochs(0, 2, skip_steps=1)) for feed in feeds(dataset, 3, shuffle=shuffle)]
    monkeypatch.setattr(source, "elementwise", Elementwise)
    before = [list(feed.epochs(0, 2, skip_steps=1)) for feed in feeds(dataset, 3, shuffle=shuffle)]
    tf.nest.map_structure(np.testing.assert_array_equal, now, before)


def test_a_resumed_epoch_runs_the_map_on_what_is_left():
    counted = Counted()
    (feed,) = feeds(ROWS.map(counted), 1, shuffle=True)
    whole = rows_of(feed)
    counted.seen.clear()
    assert rows_of(feed, skip=4) == whole[4:]
    assert len(counted.seen) == 2 * NUM - 4 * 8


def test_records_are_counted_without_the_map():
    counted = Counted()
    kept = ROWS.filter(lambda x, y: y != 5).map(counted)
    assert kept.cardinality() == tf.data.UNKNOWN_CARDINALITY
    records = open_records(kept, cache=False)
    assert records.num_records == NUM - 1
    assert len(counted.seen) < NUM
    assert records.is_repeated


@pytest.mark.parametrize(
    ("dataset", "maps", "is_costly"),
    [
        (ROWS, 0, False),
        (ROWS.map(lambda x, y: (x, y)), 1, False),
        (
            ROWS.map(lambda x, y: (x, y))
            .shuffle(5, seed=1, reshuffle_each_iteration=False)
            .map(lambda x, y: (y, x)),
            1,
            True,
        ),
        (tf.data.Dataset.zip((ROWS, ROWS)).map(lambda a, b: a).prefetch(1), 1, False),
        (ROWS.map(lambda x, y: (x + tf.random.uniform([3], seed=1), y)), 0, True),
        (ROWS.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False), 0, True),
        (ROWS.enumerate().map(lambda n, row: row).cache(), 0, True),
        (ROWS.map(lambda x, y: {"x": x, "y": y}).map(lambda row: row["x"]), 2, False),
    ],
)
def test_what_is_taken_off(dataset, maps, is_costly):
    found = elementwise(dataset)
    assert (len(found.maps), found.is_costly) == (maps, is_costly)
    whole = found.mapped(found.base)
    if maps:
        tf.nest.map_structure(np.testing.assert_array_equal, list(whole), list(dataset))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_record_has_the_noise_that_it_has_in_a_pass_of_its_own(parts, nested):
    """As in each epoch of plain Keras, and as where the records are kept in memory."""

    def noisy(x, y):
        return x + tf.random.normal(tf.shape(x), seed=1), y

    dataset = ROWS.map(tf.function(noisy) if nested else noisy)
    expected = np.array([x for x, _ in dataset.as_numpy_iterator()])
    for skip in (0, 2):
        seen = []
        for feed in feeds(dataset, parts, shuffle=True):
            for (x, y), share in feed.epochs(2, 5, skip_steps=skip):
                own = slice(int(share[0]))
                np.testing.assert_array_equal(x[own], expected[y[own]])
                seen += y[own].numpy().tolist()
        assert len(seen) == 3 * NUM - 8 * skip
