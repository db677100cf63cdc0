"""Batches that were given as they are: to look at the first one changes nothing of what is read."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.feed.keras_feed import GivenBatches, GivenStream, counted


def _drawn():
    """Two passes, of which each has an order and noise of its own."""
    rows = tf.data.Dataset.range(12).shuffle(12, seed=3).batch(3)
    return rows.map(lambda rows: tf.cast(rows, tf.float32) + tf.random.uniform([], seed=1))


def _read(stream, *ranges):
    return [batch.numpy() for first, count in ranges for batch in stream.read(first, count)]


@pytest.mark.parametrize("begun_at", [0, 4])
def test_the_first_batch_is_looked_at_and_read(begun_at):
    tf.random.set_seed(5)
    expected = _read(GivenStream(_drawn().repeat(), begun_at), (begun_at + 1, 3), (begun_at + 4, 3))
    tf.random.set_seed(5)
    stream = GivenStream(_drawn().repeat(), begun_at)
    assert len(stream.first()) == 3
    np.testing.assert_array_equal(_read(stream, (begun_at + 1, 3), (begun_at + 4, 3)), expected)
    assert stream.first() is None


def test_what_is_read_once_is_read_once():
    drawn = []

    def records():
        for number in range(4):
            drawn.append(number)
            yield [number]

    once = tf.data.Dataset.from_generator(records, output_signature=tf.TensorSpec([1], tf.int64))
    stream = GivenStream(once, 0)
    np.testing.assert_array_equal(stream.first(), [0])
    np.testing.assert_array_equal(_read(stream, (0, 4)), [[0], [1], [2], [3]])
    assert drawn == [0, 1, 2, 3]
    assert GivenBatches(once).first() is None


def test_data_that_ends_before_its_steps_says_so():
    stream = GivenStream(tf.data.Dataset.range(4).batch(2), 0)
    stream.first()
    with pytest.raises(tf.errors.InvalidArgumentError, match="data that ended before"):
        _read(stream, (0, 3))


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_batches_that_are_not_as_many_as_counted(steps):
    batches = counted(tf.data.Dataset.range(10).batch(3).map(lambda x: (x,)), steps, "steps")
    read = []
    told = "more batches" if steps == 3 else "fewer batches"
    refused = pytest.raises(tf.errors.InvalidArgumentError, match=f"come with steps.*{told}")
    with contextlib.nullcontext() if steps == 4 else refused:
        for (batch,) in batches:
            read.append(batch.numpy().tolist())
    of_steps = {3: 2, 4: 4, 5: 3}[steps]  # All but the last one, unless it is.
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]][:of_steps]
