"""Blocks that a mesh computes again: the weights of one device, the same numbers, nothing kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near, equals_one_device, pair
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies.mesh import register_layer
from tfdist.strategies.mesh.model import MeshModel
from tfdist.training.engine.binding import known_of

layers = keras.layers
RNG = np.random.default_rng(0)
CLASSES = "sparse_categorical_crossentropy"
# Batches of 8 leave a tail that the devices cannot divide evenly.
IMAGES = RNG.normal(size=(21, 6, 6, 3)).astype(np.float32)
WORDS = RNG.integers(0, 16, (21, 6)).astype(np.int32)
ROWS, Y = RNG.normal(size=(21, 8)).astype(np.float32), RNG.integers(0, 3, 21)


def compiled(inputs: Any, outputs: Any, optimizer: Any = None) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or keras.optimizers.Adam(0.01, epsilon=1e-3), CLASSES, ["accuracy"])
    return model


def other(strategy: Any, **options: Any) -> Any:
    """Returns a mesh of the same shape with other options."""
    made = tfdist.strategy(strategy.name, batch=2, model=2, **options)
    made.start()
    return made


def again(model: Any) -> list[str]:
    """Returns what a built model computes again."""
    segments = known_of(model, MeshModel, "this test").segments
    return [part.name for part in segments.parts if part.repeats]


def dense(*inner: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), *inner, layers.Dense(3, "softmax", name="out")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CLASSES)
    return model


def tanhs() -> keras.Model:
    return dense(*(layers.Dense(16, "tanh", name=f"d{n}") for n in range(8)))


@scenario
def a_convnet_whose_statistics_move_once(strategy, folder):
    def model_fn():
        inputs = x = keras.Input((6, 6, 3))
        for filters in (16, 4, 16):
            l2 = keras.regularizers.L2(1e-2)
            x = layers.Conv2D(filters, 3, padding="same", activity_regularizer=l2)(x)
            x = layers.Activation("elu")(layers.BatchNormalization(momentum=0.9)(x))
        return compiled(inputs, layers.Dense(3, "softmax")(layers.GlobalAveragePooling2D()(x)))

    model, _ = equals_one_device(strategy, model_fn, (IMAGES, Y))
    assert sum("batch_normalization" in name for name in again(model)) > 0


@scenario(long=True)
def a_transformer_whose_clipping_looks_at_words(strategy, folder):
    def block(name: str) -> keras.Model:
        inputs = keras.Input((6, 16))
        y = layers.LayerNormalization()(inputs)
        x = inputs + layers.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
        y = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.Add()([x, layers.Dense(16)(y)]), name=name)

    def model_fn():
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(16, 16, name="words")(inputs)
        for name in "abcd":
            x = block(name)(x)
        outputs = layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(x))
        return compiled(inputs, outputs, keras.optimizers.SGD(0.5, global_clipnorm=0.2))

    model, _ = equals_one_device(strategy, model_fn, (WORDS, Y))
    assert [name.partition("/")[0] for name in again(model)] == list("abcd")
    first = other(strategy, recompute=["words", "a"])
    model, _ = equals_one_device(first, model_fn, (WORDS, Y))
    assert [name.partition("/")[0] for name in again(model)] == ["words", "a"]


@scenario
def a_mask_and_a_saturated_last_layer(strategy, folder):
    """The loss starts at the logits of the last layer, which is computed again here."""

    def model_fn():
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(16, 16, mask_zero=True)(inputs)
        x = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
        x = layers.GlobalAveragePooling1D(name="pool")(x)
        large = keras.initializers.RandomNormal(stddev=300)
        outputs = layers.Dense(3, "softmax", name="out", kernel_initializer=large)(x)
        return compiled(inputs, outputs, keras.optimizers.SGD(1e-3))

    last = other(strategy, recompute="attention,pool,out")
    model, _ = equals_one_device(last, model_fn, (WORDS, Y), tolerance=1e-4)
    assert again(model) == ["attention", "pool", "out"]


@scenario
def the_same_units_drop_out(strategy, folder):
    trains_as_without(
        strategy,
        lambda: dense(layers.Dense(16), *(layers.Dropout(0.5) for _ in range(4)), layers.Dense(16)),
    )


@scenario
def mixed_precision_with_its_loss_scale(strategy, folder):
    def model_fn():  # Keras itself gives the optimizer a loss scale.
        return dense(*(layers.Dense(16, "tanh") for _ in range(6)), layers.Dropout(0.2))

    trains_as_without(strategy, model_fn, precision="mixed_float16")


def trains_as_without(strategy: Any, model_fn: Any, **options: Any) -> None:
    """Trains on a mesh with and without; one device would draw other numbers, and round others."""
    weights = []
    for recompute in ("none", "blocks"):
        keras.utils.set_random_seed(1)
        own = other(strategy, recompute=recompute, **options)
        model = own.build(model_fn)
        start = model.get_weights()
        model.fit(own.dataset((ROWS, Y), global_batch_size=8), epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert again(model)
    assert_near(*weights, tolerance=1e-6)
    assert max(np.max(np.abs(a - b)) for a, b in zip(start, weights[0], strict=True)) > 1e-2


@scenario
def nothing_of_a_block_is_kept(strategy, folder):
    """Each gradient of a tanh reads the one of the second time, but for those of the last block."""
    model, _ = pair(strategy, tanhs)
    assert again(model) == ["d0 to d2", "d3 to d5"]
    steps = known_of(model, MeshModel, "this test").steps
    ops: list[tf.Operation] = []

    def trace(batch: int, logs: Any) -> None:
        batch = tf.constant(ROWS[:8]), tf.constant(Y[:8]), None
        ops.extend(steps.train.get_concrete_function(*batch).graph.get_operations())

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=trace)
    model.fit(ROWS[:8], Y[:8], batch_size=8, callbacks=[callback], verbose=0)
    made = [op.name for op in ops if op.type == "Tanh"]
    read = {op.inputs[0].op.name for op in ops if op.type == "TanhGrad"}
    # A layer split by columns computes it on four devices, one by rows on two; they take turns.
    num_first, num_again, num_last = 4 * (4 + 2), (4 + 2 + 4) + (2 + 4 + 2), 4 + 2
    assert len(made) == num_first + num_again
    assert [name for name in made[:num_first] if name in read] == made[:num_first][-num_last:]


@scenario
def what_is_sent_again_is_told(strategy, folder):
    def reduced(own: Any) -> int:
        rows = own.describe(own.build(tanhs), global_batch_size=8).collectives
        return sum(row.count for row in rows)

    assert reduced(strategy) > reduced(other(strategy))


@scenario
def evaluation_and_files_are_as_without(strategy, folder):
    model, reference = pair(strategy, tanhs)
    assert_near([model.evaluate(ROWS, Y, verbose=0)], [reference.evaluate(ROWS, Y, verbose=0)])
    strategy.save(model, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert_near(loaded.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0))


class Noise(layers.Layer):
    """It draws numbers by itself."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@register_layer(Noise)
def _noise(context, layer, x):
    return context.local(lambda x: x + tf.random.normal(tf.shape(x)), [x], x.shape.dims)


@scenario
def what_cannot_be_is_one_line(strategy, folder):
    named = other(strategy, recompute=["noise", "before"])
    model = named.build(lambda: dense(layers.Dense(16, name="before"), Noise(name="noise")))
    with pytest.raises(OptionError, match="must draw the same random numbers each time"):
        model.fit(ROWS, Y, batch_size=8, verbose=0)
    with pytest.raises(OptionError, match=r"layer in recompute.*Did you mean 'd4'"):
        other(strategy, recompute="dd4").build(tanhs)
    with pytest.raises(OptionError, match="recompute must be 'none', 'blocks', or names of layers"):
        tfdist.strategy("mesh", recompute=True)
