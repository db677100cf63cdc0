"""What Keras finds behind an output stays behind its copies and parts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.training.model.logits import changed, logits_of

#: A row whose probabilities round to 0 and 1, and three that are cut off.
_LOGITS = np.float32([[0, 60, -60], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
_CLIPPED = -np.log(1e-7)


def cut(tensor):
    return tensor[:1]


def in_graph(function):
    return tf.function(function, autograph=False)


def eager(function):
    return function


@pytest.mark.parametrize(
    ("activate", "runs"),
    [
        (keras.activations.softmax, eager),
        (keras.activations.softmax, in_graph),
        (tf.nn.softmax, in_graph),
        (keras.layers.Softmax(), in_graph),
    ],
)
def test_crossentropy_starts_at_the_logits_of_a_part(activate, runs):
    @runs
    def loss(logits):
        return keras.losses.sparse_categorical_crossentropy([2], changed(cut, activate(logits)))

    assert float(loss(tf.constant(_LOGITS))[0]) == pytest.approx(120)


@pytest.mark.parametrize("runs", [eager, in_graph])
def test_the_gradient_is_that_of_the_whole(runs):
    def loss(logits, change):
        y_pred = change(keras.activations.sigmoid(logits))
        return tf.reduce_mean(keras.losses.binary_crossentropy(tf.ones_like(y_pred), y_pred))

    @runs
    def gradient():
        logits = tf.constant([[-60.0], [1.0]])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(logits)
            whole = loss(logits, lambda y: y)
            joined = loss(logits, lambda y: changed(lambda *r: tf.concat(r, 0), y[:0], y))
            parts = loss(logits, lambda y: changed(lambda y: y[:2], y))
        return [tape.gradient(value, logits) for value in (whole, parts, joined)]

    whole, parts, joined = gradient()
    np.testing.assert_array_equal(whole, parts)
    # A part that had lost its logits loses them for all: it is clipped, and has no gradient.
    assert float(whole[0, 0]) == pytest.approx(-0.5)
    assert float(joined[0, 0]) == 0


def test_an_operation_stays_one_for_the_loss_that_looks_for_it():
    """Keras takes a Softmax for binary crossentropy as it is, where it has not marked it."""

    @in_graph
    def losses(logits):
        y_pred = tf.nn.softmax(logits)[:, :2]
        softmax = tf.nn.softmax(logits)
        given = [softmax, changed(tf.identity, softmax)]
        return [keras.losses.binary_crossentropy(tf.ones_like(y), y) for y in (y_pred, *given)][1:]

    whole, copied = losses(tf.constant(_LOGITS))
    np.testing.assert_array_equal(whole, copied)
    assert np.max(whole) <= _CLIPPED + 1e-3


def test_where_there_are_none_a_change_is_a_change():
    tensor = tf.constant(_LOGITS)
    assert logits_of(tensor) is None
    assert logits_of(None) is None
    np.testing.assert_array_equal(changed(cut, tensor), _LOGITS[:1])
