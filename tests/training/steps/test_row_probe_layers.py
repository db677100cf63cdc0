"""A layer that sees several rows of a batch is found, its neighbours are not."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.training.steps.row_probe import coupling_layers_of, explained
from tfdist.training.steps.row_probe_layers import own_layers, parted

layers = keras.layers
_SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64))


class MeanOfBatch(layers.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


class Counting(layers.Layer):
    """Counts its rows, as a normalization of one's own moves its statistics."""

    def build(self, shape):
        self.rows = self.add_weight(name="rows", shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


class OfTraining(layers.Layer):
    def call(self, x, training=False):
        return x - tf.reduce_mean(x, 0) if training else x


class OfAllReplicas(layers.Layer):
    """Is given the rows of all replicas, in a step of one's own."""

    def call(self, x):
        return x - tf.reduce_mean(tfdist.all_gather(x), 0)


class OfRows(layers.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, -1, keepdims=True)


class Noisy(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Breaks(layers.Layer):
    def call(self, x):
        if x.shape[0] is not None:
            raise RuntimeError("not with such rows")
        return x


def summed(x):
    return tf.cumsum(x)


def of(*middle) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), *middle, layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("middle", "found"),
    [
        ((MeanOfBatch(name="a"), OfRows(name="b"), MeanOfBatch(name="c")), ["a", "c"]),
        ((OfTraining(name="a"),), ["a"]),
        ((layers.Lambda(summed, name="a"),), ["a"]),
        ((Counting(), OfRows()), []),
        ((Noisy(),), []),
        ((OfAllReplicas(),), []),
        ((Breaks(),), []),
        # Those of Keras are known.
        ((layers.BatchNormalization(), layers.Dropout(0.5)), []),
    ],
)
def test_ones_own_layers(middle, found):
    model = of(*middle)
    before = model.get_weights()
    assert coupling_layers_of(model, _SPEC) == found
    for ours, theirs in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not any("call" in vars(layer) for layer in model.layers), "nothing is left on a layer"


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4), MeanOfBatch(name="inside")

    def call(self, x):
        return self.second(self.first(x))


class CouplingItself(Subclassed):
    def call(self, x):
        return self.first(x) / tf.reduce_sum(tf.abs(self.first(x)))


def test_a_subclassed_model_is_not_named_for_a_layer_in_it():
    model = Subclassed()
    assert coupling_layers_of(model, _SPEC) == ["inside"]
    [told] = explained(model, _SPEC)
    assert told.startswith("layer 'inside' looks at several rows of a batch")


def test_what_a_model_does_between_its_layers():
    model = CouplingItself()
    assert coupling_layers_of(model, _SPEC) == [model.name]


def test_a_layer_that_is_called_twice():
    inputs, twice = keras.Input((3,)), MeanOfBatch(name="twice")
    model = keras.Model(inputs, twice(layers.Dense(3)(twice(inputs))))
    x = tf.random.stateless_normal([6, 3], (1, 2))
    [found] = parted(model, x, [slice(0, 2), slice(2, 6)], own_layers(model))
    assert found.name == "twice"
    assert 0.01 < found.difference < 2


def test_keras_own_layers_can_be_tried():
    model = of(layers.BatchNormalization(name="norm"), layers.LayerNormalization())
    x = tf.random.stateless_normal([6, 3], (1, 2))
    found = parted(model, x, [slice(0, 2), slice(2, 6)], model.layers)
    assert [each.name for each in found] == ["norm"]


def test_a_layer_behind_text_is_tried():
    inputs = keras.Input((3,), dtype="string")
    known = layers.StringLookup(vocabulary=["0"], output_mode="multi_hot")(inputs)
    moved = MeanOfBatch(name="of_batch")(known)
    spec = (tf.TensorSpec([None, 3], tf.string), tf.TensorSpec([None], tf.float32))
    assert coupling_layers_of(keras.Model(inputs, moved), spec) == ["of_batch"]
