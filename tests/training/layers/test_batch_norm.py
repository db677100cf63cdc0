"""BatchNormalization over the shares of several replicas, without any engine.

Its fit on real engines is compared in tests/conformance and test_fit.py.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding
from tfdist.training.layers.batch_norm import layers_of, put_on, shared_step
from tfdist.training.layers.batch_statistics import local_sums, normalized

keras = tf.keras
RNG = np.random.default_rng(0)


class Threads(Alone):
    """Replicas that are threads of this process; each waits for all at a sum."""

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas
        self._barrier = threading.Barrier(num_replicas, timeout=30)
        self._values = []

    def sum(self, tensor, name):
        self._values.append(tensor)
        self._barrier.wait()
        total = tf.add_n(self._values)
        if self._barrier.wait() == 0:
            self._values = []
        self._barrier.wait()
        return total


def in_threads(shares, shape, real=None, **options):
    """Runs one layer per share in a train step; returns [(layer, output)]."""
    together = Threads(len(shares))
    results = [None] * len(shares)
    models = []
    for _ in shares:
        model = keras.Sequential([keras.Input(shape), keras.layers.BatchNormalization(**options)])
        put_on(Binding(model, together), synchronized=True)
        models.append(model)

    def run(index):
        with shared_step(is_real=tf.constant(real[index] if real else True)):
            results[index] = models[index](shares[index], training=True).numpy()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [(model.layers[0], output) for model, output in zip(models, results, strict=True)]


@pytest.mark.parametrize("shape", [(4,), (3, 4), (5, 3, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.7, "scale": False}, {"axis": 1}], ids=str)
def test_uneven_shares_have_the_statistics_of_the_whole(shape, options):
    x = RNG.normal(3, 2, (7, *shape)).astype(np.float32)
    alone = keras.layers.BatchNormalization(**options)
    expected = alone(x, training=True).numpy()
    replicas = in_threads([x[:5], x[5:]], shape, **options)
    np.testing.assert_allclose(np.concatenate([out for _, out in replicas]), expected, atol=1e-5)
    for layer, _ in replicas:
        np.testing.assert_allclose(layer.moving_mean, alone.moving_mean, atol=1e-6)
        np.testing.assert_allclose(layer.moving_variance, alone.moving_variance, atol=1e-5)


def test_rows_of_padding_are_left_out():
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    alone = keras.layers.BatchNormalization()
    expected = alone(x, training=True).numpy()
    (layer, output), _ = in_threads([x, 1e6 * x[:1]], (3,), real=[True, False])
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, alone.moving_mean, atol=1e-6)


def test_frozen_layers_and_inference_reduce_nothing():
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])

    class Never(Alone):
        def sum(self, tensor, name):
            raise AssertionError("nothing is to be reduced")

    put_on(Binding(model, Never()), synchronized=True)
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    before = model.get_weights()
    with shared_step(is_real=tf.constant(True)):
        model(x, training=False)
        model.layers[0].trainable = False
        model(x, training=True)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.layers[0].trainable = True
    model(x, training=True)  # Outside of a step it is Keras' own.
    assert not np.array_equal(model.get_weights()[2], before[2])


def test_layers_of_nested_models_are_found():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.BatchNormalization()])
    assert len(layers_of(model)) == 2


def test_a_mask_that_would_be_ignored_is_refused():
    masked = [keras.layers.Masking(), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3, 2)), *masked])
    put_on(Binding(model, Alone()), synchronized=True)
    with shared_step(is_real=tf.constant(True)), pytest.raises(ModelError, match="with a mask"):
        model(np.ones((4, 3, 2), np.float32), training=True)


OPTIONS = [{}, {"scale": False}, {"center": False}, {"axis": 1}, {"axis": [1, 2]}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_one_device(options):
    """They are written out in batch_statistics: first and second ones, in parts of a batch."""
    layer = keras.layers.BatchNormalization(dtype="float64", epsilon=0.1, **options)
    layer.build((None, 3, 2, 4))
    for weight in layer.weights:
        weight.assign(tf.exp(tf.random.stateless_normal(weight.shape, [1, 2], dtype="float64")))
    x, weights = (tf.constant(RNG.normal(1, 2, (5, 3, 2, 4))) for _ in range(2))

    def in_parts(x):
        parts = tf.split(x, [3, 2])
        padding = local_sums(layer, 1e6 * parts[0], is_real=tf.constant(False))
        total = tf.add_n([padding, *(local_sums(layer, part) for part in parts)])
        return tf.concat([normalized(layer, part, total) for part in parts], 0)

    def whole(x):
        return keras.layers.BatchNormalization.call(layer, x, training=True)

    def gradients(forward):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = forward(x)
                loss = tf.reduce_sum(weights * tf.sin(y))
            first = inner.gradient(loss, [x, *layer.trainable_weights])
            penalty = tf.add_n([tf.reduce_sum(tf.square(g)) for g in first])
        return [y, *first, *outer.gradient(penalty, [x, *layer.trainable_weights])]

    for ours, theirs in zip(gradients(in_parts), gradients(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
