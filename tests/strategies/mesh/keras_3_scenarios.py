"""What a mesh does with models of Keras 3, against plain Keras 3 on one device."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_same_weights, equals_one_device
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError
from tfdist.keras.trackables import unknown_variables
from tfdist.strategies.mesh.model import MeshModel
from tfdist.training.engine.binding import known_of

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(21, 8, 4)).astype(np.float32), RNG.integers(0, 3, 21)
IDS = RNG.integers(0, 20, (21, 8)).astype(np.int32)


def compiled(inputs: Any, x: Any, optimizer: Any = None) -> keras.Model:
    x = layers.Dense(16, "tanh", name="before")(layers.Flatten(name="flat")(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax", name="last")(x))
    optimizer = optimizer or keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Scaled(layers.Layer):
    """Layers and a weight in a call of its own, one layer of it in inference."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.inner = layers.Dense(16, "relu", name="inner")
        self.norm = layers.BatchNormalization(name="norm")

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(16,), initializer="ones", name="scale")
        self.inner.build(shape)
        self.norm.build((*shape[:-1], 16))

    def call(self, x: Any) -> Any:
        return x + self.norm(self.inner(x), training=False) * self.scale


def tokens() -> keras.Model:
    """A table whose ids repeat, attention, and operations between layers."""
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 16, name="table")(inputs)
    attention = layers.MultiHeadAttention(4, 4, use_bias=False, name="attention")
    x = layers.LayerNormalization(name="first")(x + attention(x, x, use_causal_mask=True))
    x = Scaled(name="scaled")(x)
    # In training all the same: a model of Keras 3 tells that to all of its layers.
    x = layers.BatchNormalization(name="told")(x, training=False)
    x = ops.concatenate([ops.mean(x * 0.5, axis=1), ops.max(x[:, 1:], axis=-1)], axis=-1)
    return compiled(inputs, ops.reshape(ops.relu(x), (-1, 23, 1)))


@scenario
def a_table_attention_and_operations(strategy: Any, folder: Path) -> None:
    model, reference = equals_one_device(strategy, tokens, (IDS, Y), global_batch_size=8)
    table = known_of(model, MeshModel, "a test").state.of(model.weights[0])
    assert [tuple(part.shape) for part in table.held] == [(10, 16), (10, 16)]
    found = model.evaluate(IDS, Y, batch_size=8, verbose=0)
    assert found == pytest.approx(reference.evaluate(IDS, Y, batch_size=8, verbose=0), abs=1e-5)
    expected = reference.predict(IDS, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.predict(IDS, batch_size=8, verbose=0), expected, atol=1e-5)


def others() -> keras.Model:
    ids, inputs = keras.Input((8,), dtype="int32"), keras.Input((8, 4))
    masked = layers.Embedding(20, 16, mask_zero=True, name="table")(ids)
    x = layers.Conv1D(16, 3, padding="causal", name="conv")(inputs)
    x = layers.DepthwiseConv2D((1, 3), name="depthwise")(layers.Reshape((1, 8, 16), name="2d")(x))
    parts = [
        layers.LSTM(8, name="memory")(masked),
        layers.GlobalAveragePooling1D(name="average")(masked),
        layers.GlobalMaxPooling2D(name="pool")(x),
    ]
    x = layers.Concatenate(name="all")(parts)
    return compiled([ids, inputs], x, keras.optimizers.SGD(0.1, momentum=0.9))


@scenario(long=True)
def other_layers_and_masks(strategy: Any, folder: Path) -> None:
    equals_one_device(strategy, others, ((IDS, X), Y), global_batch_size=8)


def dropping(seed: int = 3) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8, 4))
    return compiled(inputs, layers.Dropout(0.5, name="drop")(inputs))


@scenario
def dropout_goes_on_from_a_checkpoint(strategy: Any, folder: Path) -> None:
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    def fit(make: Any, *callbacks: Any) -> keras.Model:
        model = strategy.build(make)
        feed = strategy.dataset((X, Y), global_batch_size=8)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(feed, epochs=2, callbacks=list(callbacks), verbose=0)
        return model

    unbroken = fit(dropping)
    assert unknown_variables(unbroken) == []  # Of which a file would be told to lack them.
    fit(dropping, tfdist.Checkpoints(folder, every_steps=1), Break())
    assert_same_weights(fit(lambda: dropping(4), tfdist.Checkpoints(folder, resume=True)), unbroken)
    other = fit(lambda: dropping(4)).get_weights()
    assert np.abs(other[0] - unbroken.get_weights()[0]).max() > 1e-3


def decoding() -> keras.Model:
    """Masks that Keras 3 hands to no recurrent layer with states, and attention to nothing."""
    ids, other = keras.Input((8,), dtype="int32"), keras.Input((8, 4))
    inner_inputs = [keras.Input((8, 4)), keras.Input((8, 4))]
    both = layers.Add(name="both")(inner_inputs)
    inner = keras.Model(inner_inputs, layers.Dense(4, name="of_both")(both), name="inner")
    words = layers.Embedding(20, 4, mask_zero=True, name="words")(ids)
    state = layers.Dense(6, name="state")(layers.Flatten(name="rows")(other))
    x = layers.GRU(6, name="memory")(words, initial_state=state)
    allowed = ops.cast(ops.expand_dims(other[:, :, 0] > 0.4, axis=-1), "bool")
    seen = layers.MultiHeadAttention(2, 4, dropout=0.1, name="attention")
    looked = seen(inner([other, other * 2.0]), other, attention_mask=allowed)
    looked = layers.GlobalAveragePooling1D(name="looked")(looked)
    return compiled([ids, other], layers.Concatenate(name="all")([x, looked]))


@scenario
def masks_of_keras_3(strategy: Any, folder: Path) -> None:
    ids = np.where(IDS % 3, IDS, 0)
    model = strategy.build(decoding)
    plain = decoding()
    plain.set_weights(model.get_weights())
    found, expected = (m.predict([ids, X], batch_size=8, verbose=0) for m in (model, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # No layer reads weights on the host when Keras builds the model on symbols.
    model.fit([ids, X], Y, batch_size=8, verbose=0)
    assert not known_of(model, MeshModel, "a test").host._traced_reads


@scenario
def a_table_in_mixed_precision(strategy: Any, folder: Path) -> None:
    """Its rows are cast, not the table: Adam squares those of equal ids apart."""

    def made() -> keras.Model:
        inputs = keras.Input((8,), dtype="int32")
        x = layers.Embedding(4, 16, dtype="mixed_bfloat16", name="table")(inputs)
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
        return compiled(inputs, layers.Activation("linear", dtype="float32")(x), optimizer)

    model, plain = strategy.build(made), made()
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        each.fit(IDS % 4, Y, batch_size=8, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@scenario
def what_a_mesh_does_not_do_with_keras_3_is_refused(strategy: Any, folder: Path) -> None:
    def lora() -> keras.Model:
        model = compiled(inputs := keras.Input((4,)), layers.Dense(16, name="low")(inputs))
        model.get_layer("low").enable_lora(2)
        return model

    def masked() -> keras.Model:
        inputs = keras.Input((8,), dtype="int32")
        x = layers.Embedding(20, 16, mask_zero=True, name="table")(inputs)
        return compiled(inputs, layers.MultiHeadAttention(4, 4, name="attention")(x, x))

    def of(layer: Any, optimizer: Any = None) -> Any:
        return lambda: compiled(inputs := keras.Input((8, 4)), layer(inputs), optimizer)

    waiting = keras.optimizers.SGD(gradient_accumulation_steps=2)
    refused = {
        r"'low' \(Dense\): it has LoRA": lora,
        r"'attention' \(MultiHeadAttention\): it follows a mask": masked,
        r"'norm' .*: it has rms_scaling": of(
            layers.LayerNormalization(rms_scaling=True, name="norm")
        ),
        r"'near' .*: it has sliding_window": of(
            lambda x: layers.MultiHeadAttention(4, 4, sliding_window=2, name="near")(x, x)
        ),
        r"'sum' \(CumSum\)|'cumsum' \(Cumsum\)": of(lambda x: ops.cumsum(x, axis=1)),
        r"'mean' .* works over the rows": of(lambda x: x - ops.mean(x, axis=0, keepdims=True)),
        r"SGD with gradient_accumulation_steps": of(lambda x: x, waiting),
    }
    for words, make in refused.items():
        keras.backend.clear_session()
        with pytest.raises(ModelError, match=words):
            strategy.build(make)


@scenario(long=True)
def files_and_verify(strategy: Any, folder: Path) -> None:
    model = strategy.build(tokens)
    model.fit(IDS, Y, batch_size=8, verbose=0)
    expected = model.predict(IDS, verbose=0)
    strategy.save(model, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras", custom_objects={"Scaled": Scaled})
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), expected, atol=1e-5)
    feed = tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(8)
    again = strategy.build(loaded)
    for each in (again, model):  # Both go on from the same moments.
        each.fit(feed, verbose=0)
    assert_same_weights(again, model)
    report = tfdist.verify(tokens, (IDS, Y), strategy, steps=3, global_batch_size=8)
    assert report.exact, str(report)
