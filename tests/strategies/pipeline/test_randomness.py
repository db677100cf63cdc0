"""Dropout in a pipeline: numbers of the step and the microbatch, the same when computed again."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import randomness

layers = keras.layers
NUM = 22


def model_fn(recurrent: bool = False) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5, 8))
    x = layers.GaussianNoise(0.3)(layers.Dense(8, "tanh", name="first")(inputs))
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, dropout=0.4)(x, x)])
    shared = layers.Dropout(0.5)
    x = shared(layers.Dense(8, "tanh")(shared(x)))
    x = layers.GRU(6, dropout=0.3, recurrent_dropout=0.2)(x) if recurrent else x[:, 0]
    model = keras.Model(inputs, layers.Dense(3)(layers.AlphaDropout(0.2)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss)
    return model


def fit(epochs: int = 2, callbacks: Any = None, make: Any = model_fn, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(NUM, 5, 8)).astype(np.float32), rng.integers(0, 3, NUM)
    settings = {"stages": 1, "microbatches": 4} | options
    with tfdist.strategy("pipeline", **settings) as strategy:
        model = strategy.build(make)
        feed = strategy.dataset(data, global_batch_size=8)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(feed, epochs=epochs, callbacks=callbacks, verbose=0)
    return model.get_weights()


def largest(one: list, other: list) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected():
    return fit()


def test_recomputed_and_kept_activations_train_alike(expected):
    assert largest(expected, fit(recompute="blocks")) < 1e-6
    assert largest(expected, fit(recompute="blocks", schedule="1f1b")) < 1e-6
    # Without dropout they would part.
    assert largest(expected, fit(microbatches=2)) > 1e-3


@pytest.mark.long
def test_recurrent_layers_drop_alike_too():
    def make() -> keras.Model:
        return model_fn(recurrent=True)

    assert largest(fit(1, make=make), fit(1, make=make, recompute="blocks")) < 1e-6


@pytest.mark.long
def test_recompute_in_several_chunks():
    interleaved = {"schedule": "interleaved"}
    assert largest(fit(**interleaved), fit(**interleaved, recompute="blocks")) < 1e-6


@pytest.mark.long
def test_dropout_after_frozen_layers_that_are_kept():
    frozen = {"freeze_until": "first"}
    assert largest(fit(**frozen), fit(**frozen, frozen_cache="memory", recompute="blocks")) < 1e-6


@pytest.mark.long
def test_a_resumed_fit_draws_what_the_unbroken_one_would(expected, tmp_path):
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    fit(callbacks=[tfdist.Checkpoints(tmp_path, every_steps=1), Break()])
    resumed = fit(callbacks=[tfdist.Checkpoints(tmp_path, resume=True)])
    assert largest(expected, resumed) < 1e-6


def test_numbers_are_others_in_each_step_microbatch_chunk_layer_and_draw():
    model = keras.Sequential([keras.Input((4000,)), layers.Dropout(0.25), layers.Dropout(0.25)])
    randomness.put_on(Binding(model, Alone()))
    ones = tf.ones((1, 4000))

    def drawn(step: int, number: int, chunk: int) -> list[np.ndarray]:
        with randomness.microbatch(tf.constant([7, step]), number, chunk):
            one, other = model.layers
            return [layer(ones, training=True).numpy() for layer in (one, one, other)]

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    masks = [mask for place in places for mask in drawn(*place)]
    assert len({mask.tobytes() for mask in masks}) == 3 * len(places)
    for mask in masks:
        assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / 0.75)}
        assert abs(np.mean(mask) - 1) < 0.05
    for first, second in zip(drawn(0, 1, 0), drawn(0, 1, 0), strict=True):
        assert np.array_equal(first, second)


def test_layers_that_draw_by_themselves_are_refused_with_recompute():
    class Noise(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + tf.random.normal(tf.shape(x))

    def make() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((5, 8)), Noise(name="own"), layers.Flatten(), layers.Dense(3)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    fit(make=make)
    with pytest.raises(OptionError, match=r"own.*random_normal"):
        fit(make=make, recompute="blocks")


def test_layers_that_draw_by_themselves_draw_others_for_each_microbatch():
    class Noise(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + tf.random.normal((1, 8))

    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((8,)), Noise(), layers.Activation("linear")])
        model.compile("sgd", "mse")
        return model

    zeros = np.zeros((8, 8), np.float32)
    with tfdist.strategy("pipeline", stages=1, microbatches=4) as strategy:
        feed = strategy.dataset((zeros, zeros), global_batch_size=8, training=False)
        noise = strategy.build(make).predict(feed, verbose=0)
    assert np.array_equal(noise[0], noise[1])
    assert not np.array_equal(noise[1], noise[2])
