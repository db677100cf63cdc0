"""What numbers of a user's own step are over the rows of a batch, as its graph shows it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.training.layers.replica_step import RunningStep
from tfdist.training.steps.row_numbers import HIDDEN, MEAN, OTHER, RowNumbers


@tf.function
def of_a_function(x):
    return tf.reduce_mean(x)


def num_rows(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def spread(x):
    return tf.reduce_max(x) - tf.reduce_min(x)


_NUMBERS = {
    "a mean": (tf.reduce_mean, MEAN),
    "of rows": (lambda x: tf.reduce_sum(x) / num_rows(x), MEAN),
    "of a loss of Keras": (lambda x: keras.losses.MeanSquaredError()(x, 2 * x), MEAN),
    "terms": (lambda x: tf.reduce_mean(x) + 0.1 * tf.reduce_mean(tf.abs(x)) + 1.0, MEAN),
    "a sum": (tf.reduce_sum, "sum"),
    "a maximum": (tf.reduce_max, "maximum"),
    "a part of a sum": (lambda x: 0.5 * tf.reduce_sum(x) / 8, "sum"),
    "sums of rows and a number": (lambda x: tf.reduce_sum(x) + 1, OTHER),
    "a penalty of rows": (lambda x: 0.1 * tf.reduce_sum(x * x) / num_rows(x), MEAN),
    "by a part": (lambda x: tf.reduce_sum(x) * (1 / num_rows(x)), MEAN),
    "by a root of rows": (lambda x: tf.reduce_sum(x) / tf.sqrt(num_rows(x)), OTHER),
    "by a guarded count": (lambda x: tf.reduce_sum(x) / tf.maximum(num_rows(x), 1), MEAN),
    "one of two": (lambda x: tf.where(tf.constant(True), tf.reduce_mean(x), 0.0), MEAN),
    "weighed terms": (
        lambda x: tf.tensordot(tf.stack([tf.reduce_mean(x)] * 2), tf.constant([0.5, 2.0]), 1),
        MEAN,
    ),
    "a part of several": (lambda x: tf.unstack(tf.stack([tf.reduce_mean(x), 1.0]))[0], MEAN),
    "of Python": (
        lambda x: tf.ensure_shape(tf.numpy_function(np.mean, [x], tf.float32), []),
        HIDDEN,
    ),
    "terms of many weights": (
        lambda x: sum([tf.nn.l2_loss(tf.ones(1)) for _ in range(1500)], tf.reduce_mean(x)),
        MEAN,
    ),
    "a spread": (spread, OTHER),
    "a root": (lambda x: tf.sqrt(tf.reduce_mean(x)), OTHER),
    "a perplexity": (lambda x: tf.exp(tf.reduce_mean(x)), OTHER),
    "a ratio": (lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(x), OTHER),
    "the first row": (lambda x: x[0, 0], OTHER),
    "a function": (lambda x: 2 * of_a_function(x), HIDDEN),
    "a constant": (lambda x: tf.exp(tf.constant(2.0)), None),
}


@pytest.mark.parametrize("name", _NUMBERS)
def test_a_number(name):
    number, join = _NUMBERS[name]
    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, [None, 3])
        running = RunningStep(None, tf.constant(0.5), tf.constant([1, 2]))
        assert RowNumbers(running).join_of(number(rows)) == join


def test_a_loss_of_a_number_for_each_row_is_their_sum():
    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, [None, 3])
        numbers = RowNumbers(RunningStep(None, tf.constant(0.5), tf.constant([1, 2])))
        assert numbers.is_off(tf.reduce_mean(rows, 1))
        assert numbers.is_off(tf.reduce_sum(rows))
        assert not numbers.is_off(tf.stack([tf.reduce_mean(rows), 1.0]))


def test_what_all_replicas_have_is_alike_whatever_is_made_of_it():
    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, [None, 3])
        running = RunningStep(None, tf.constant(0.5), tf.constant([1, 2]))
        gathered = running.settle(tf.identity(rows), "fixed")
        numbers = RowNumbers(running)
        assert numbers.join_of(tf.reduce_sum(gathered @ tf.transpose(gathered))) is None
        assert numbers.join_of(tf.reduce_sum(rows @ tf.transpose(gathered))) == "sum"
