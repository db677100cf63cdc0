"""The models on which Keras 2 checks tf.distribute (its keras/distribute folder), stated anew.

Each is trained, judged and asked for predictions on a strategy and on one device. What a strategy
cannot train it refuses, in words that a case holds it to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from one_device import assert_near, assert_same_results, equals_one_device
from scenarios import scenario
from tensorflow import keras

from tfdist.errors import TfdistError

ROWS, GLOBAL_BATCH_SIZE, EPOCHS = 21, 8, 2
WORDS, LENGTH = 20, 10
_UNKNOWN_TO_A_MESH = {"mesh": "has no conversion"}
layers = keras.layers


def compare(
    strategy: Any,
    model_fn: Callable[[], keras.Model],
    x: Any,
    y: Any,
    *,
    refused: Mapping[str, str] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Args:
    refused: name of a strategy -> what its refusal says.
    """
    if strategy.name in (refused or {}):
        feed = strategy.dataset((x, y), global_batch_size=GLOBAL_BATCH_SIZE, seed=2)
        # Keras itself refuses what cannot be made on its replicas.
        with pytest.raises((TfdistError, ValueError), match=refused[strategy.name]):
            strategy.build(model_fn).fit(feed, epochs=EPOCHS, verbose=0)
        return
    size = {"global_batch_size": GLOBAL_BATCH_SIZE}
    model, reference = equals_one_device(
        strategy, model_fn, (x, y), **size, epochs=EPOCHS, tolerance=tolerance
    )
    judged = strategy.dataset((x, y), **size, training=False)
    found = model.evaluate(judged, verbose=0, return_dict=True)
    assert_same_results(found, reference.evaluate(x, y, verbose=0, return_dict=True), tolerance)
    predicted = model.predict(x, batch_size=GLOBAL_BATCH_SIZE, verbose=0)
    assert_near([predicted], [reference.predict(x, verbose=0)], tolerance)


# Dense layers ------------------------------------------------------------------------------------


def line() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).uniform(size=(ROWS, 1)).astype(np.float32)
    return x, 3 * x


def hidden() -> list[Any]:
    regularizer = keras.regularizers.L2(1e-4)
    return [
        layers.Dense(10, "relu"),
        layers.Dense(10, "relu", kernel_regularizer=regularizer),
        layers.Dense(10, "relu"),
        layers.Dense(1),
    ]


@scenario
def dense_layers(strategy, folder):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), *hidden()])
        model.compile(keras.optimizers.SGD(0.05), keras.losses.mean_squared_error, ["mse"])
        return model

    compare(strategy, model_fn, *line())


@scenario("mirrored")
def outputs_of_rank_1(strategy, folder):
    """Keras gives one number for all rows of them; of the last row, a replica has none."""

    def model_fn():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse", ["mae"])
        return model

    x, y = line()
    equals_one_device(strategy, model_fn, (x[:17], y[:17, 0]), global_batch_size=GLOBAL_BATCH_SIZE)


@scenario(long=True)
def dense_layers_in_a_class(strategy, folder):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = hidden()

        def call(self, x):
            for layer in self.hidden:
                x = layer(x)
            return x

    def model_fn():
        model = Own()
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.05), keras.losses.mean_squared_error, ["mse"])
        return model

    refused = dict.fromkeys(("mesh", "pipeline"), "must have a Functional or Sequential model")
    compare(strategy, model_fn, *line(), refused=refused)


@scenario("mirrored", "horovod", "mesh", "pipeline")
def binary_metrics_of_a_saturated_sigmoid(strategy, folder):
    def model_fn():
        ones = {"kernel_initializer": "ones"}
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3, "relu", **ones),
                layers.Dense(1, "sigmoid", **ones),
            ]
        )
        metrics = ["accuracy", keras.metrics.BinaryAccuracy()]
        model.compile(keras.optimizers.SGD(1e-3), "binary_crossentropy", metrics)
        return model

    # Logits of 60: one minus such a probability is 0 in float32, and the loss is 60.
    x = np.full((ROWS, 4), 5, np.float32)
    compare(strategy, model_fn, x, np.zeros((ROWS, 1), np.float32), tolerance=2e-5)


# Images ------------------------------------------------------------------------------------------


def images() -> tuple[np.ndarray, np.ndarray]:
    """Classes far apart: a few steps of this rate saturate the softmax."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 28, 28, 3))
    y = rng.integers(0, 10, ROWS)
    x = centres[y] + rng.normal(scale=0.1, size=(ROWS, 28, 28, 3))
    return x.astype(np.float32), y.astype(np.float32)[:, None]


def convnet(norms: int) -> keras.Model:
    """norms: BatchNormalization layers side by side, whose outputs are added."""
    inputs = keras.Input((28, 28, 3))
    regularizer = keras.regularizers.L2(1e-4)
    x = layers.Conv2D(16, 3, strides=4, kernel_regularizer=regularizer)(inputs)
    if norms:
        normalized = [layers.BatchNormalization(synchronized=norms > 1)(x) for _ in range(norms)]
        x = layers.Add()(normalized) if norms > 1 else normalized[0]
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10, "softmax")(x))
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        ["sparse_categorical_accuracy"],
    )
    return model


@scenario(long=True)
def images_without_normalization(strategy, folder):
    compare(strategy, lambda: convnet(0), *images(), tolerance=1e-4)


@scenario(long=True)
def images_with_batch_normalization(strategy, folder):
    compare(strategy, lambda: convnet(1), *images(), tolerance=1e-4)


@scenario("mirrored", "horovod", "mesh", "pipeline")
def images_with_synchronized_batch_normalization(strategy, folder):
    compare(strategy, lambda: convnet(2), *images(), tolerance=1e-4)


# Words -------------------------------------------------------------------------------------------


def words(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of 5 to 10 words, 0 where they have ended, in two kinds of their own words."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, ROWS)
    x = rng.integers(1, WORDS // 2, (ROWS, LENGTH)) + (WORDS // 2 * y)[:, None]
    return (x * (np.arange(LENGTH) < rng.integers(5, 11, (ROWS, 1)))).astype(np.int32), y


def of_words(middle: list[Any], head: list[Any], *, rows: int | None = None) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), batch_size=rows, dtype="int32"),
            layers.Embedding(WORDS, 10),
            *middle,
            *head,
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        ["sparse_categorical_accuracy"],
    )
    return model


@scenario
def embedding(strategy, folder):
    def model_fn():
        return of_words([layers.GlobalAveragePooling1D()], [layers.Dense(2, "softmax")])

    compare(strategy, model_fn, *words())


@scenario
def embedding_with_a_layer_for_each_time(strategy, folder):
    def model_fn():
        each = layers.TimeDistributed(layers.Dense(4))
        return of_words([each, layers.GlobalAveragePooling1D()], [layers.Dense(2, "softmax")])

    compare(strategy, model_fn, *words())


@scenario(long=True)
def siamese_embedding(strategy, folder):
    def model_fn():
        table = layers.Embedding(
            WORDS, 10, embeddings_initializer=keras.initializers.RandomUniform(0, 1)
        )
        inputs = [keras.Input((LENGTH,), dtype="int32", name=f"words_{side}") for side in "ab"]
        means = [layers.GlobalAveragePooling1D()(table(side)) for side in inputs]
        model = keras.Model(inputs, layers.Dot(axes=1, normalize=True)(means))
        model.compile(keras.optimizers.SGD(0.1), "mse", ["mse"])
        return model

    (a, kind_a), (b, kind_b) = words(0), words(1)
    y = np.where(kind_a == kind_b, 1, -1).astype(np.float32)[:, None]
    compare(strategy, model_fn, {"words_a": a, "words_b": b}, y, refused=_UNKNOWN_TO_A_MESH)


def of_rnn(make: Callable[[], Any], **options: Any) -> keras.Model:
    return of_words([make()], [layers.Dense(2), layers.Softmax(dtype="float32")], **options)


@scenario("mirrored", "mesh", long=True)
def gru(strategy, folder):
    model_fn = lambda: of_rnn(lambda: layers.GRU(4))  # noqa: E731
    compare(strategy, model_fn, *words())


@scenario(long=True)
def lstm(strategy, folder):
    model_fn = lambda: of_rnn(lambda: layers.LSTM(4))  # noqa: E731
    compare(strategy, model_fn, *words())


@scenario("mirrored", "mesh", long=True)
def lstm_in_mixed_precision(strategy, folder):
    def model_fn():
        before = keras.mixed_precision.global_policy()
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            return of_rnn(lambda: layers.LSTM(4))
        finally:
            keras.mixed_precision.set_global_policy(before)

    compare(strategy, model_fn, *words(), tolerance=2e-3)


@scenario("mirrored", "horovod", "mesh", "pipeline")
def lstm_that_keeps_its_state(strategy, folder):
    model_fn = lambda: of_rnn(  # noqa: E731
        lambda: layers.LSTM(4, stateful=True), rows=GLOBAL_BATCH_SIZE
    )
    refused = dict.fromkeys(("mirrored", "horovod", "pipeline", "mesh"), "(?i)state")
    compare(strategy, model_fn, *words(), refused=refused)
