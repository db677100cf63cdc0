"""Measured costs of layers, and cuts that go by them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.errors import OptionError
from tfdist.strategies.pipeline.measure import measure
from tfdist.training.model.layer_calls import graph_of

layers = keras.layers
ROWS = 3


class Nap(layers.Layer):
    """Costs what no estimate can know."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def nap(x: np.ndarray) -> np.ndarray:
            time.sleep(0.02)
            return x

        y = tf.numpy_function(nap, [x], x.dtype, stateful=False)
        return tf.ensure_shape(y, x.shape)


def measured(*given: Any, shape: tuple = (6,)) -> Any:
    return measure(
        graph_of(keras.Sequential([keras.Input(shape), *given]), needed_by="it", otherwise="not"),
        ROWS,
    ).costs


def test_time_is_that_of_the_layer():
    dense, nap, last = measured(layers.Dense(6), Nap(), layers.Dense(6))
    assert nap.forward_s >= 0.02 > max(dense.forward_s, last.forward_s)


def test_kept_bytes_are_those_that_the_way_back_reads():
    # The way back of a sum reads nothing; that of the product after it reads the sum.
    inputs = keras.Input((6,))
    x = layers.Dense(6, name="first")(inputs)
    outputs = layers.Dense(5, "tanh", name="last")(layers.Add(name="sum")([x, inputs]))
    costs = measure(
        graph_of(keras.Model(inputs, outputs), needed_by="it", otherwise="not"), ROWS
    ).costs
    assert [cost.kept_bytes for cost in costs] == [0, 4 * ROWS * 6, 4 * ROWS * 5]


def test_layers_before_all_that_is_trained_have_no_way_back():
    frozen = layers.Dense(6, trainable=False)
    cost, *_ = measured(frozen, layers.Dense(2))
    # Its output is kept all the same: the gradient of the next layer's weights reads it.
    assert (cost.backward_s, cost.kept_bytes) == (0, 4 * ROWS * 6)


def test_statistics_stay_as_they_were():
    norm = layers.BatchNormalization(momentum=0.5)
    measured(layers.Dense(6), norm)
    assert np.array_equal(norm.moving_mean, np.zeros(6))
    assert np.array_equal(norm.moving_variance, np.ones(6))


def test_a_layer_may_read_a_tensor_twice():
    inputs = keras.Input((4, 6))
    outputs = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    graph = graph_of(keras.Model(inputs, outputs), needed_by="it", otherwise="not")
    (cost,) = measure(graph, ROWS).costs
    assert cost.kept_bytes > 0


def test_sizes_must_be_known():
    with pytest.raises(OptionError, match="fixed shape"):
        measured(layers.Dense(6), shape=(None, 6))
