"""What the tests of the mesh look at, in a process of its own: it has four logical CPUs.

Usage: python mesh_scenarios.py OUT_JSON
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.errors import TfdistError
from tfdist.strategies.mesh import operations, register_layer
from tfdist.strategies.mesh.model import MeshModel
from tfdist.training.engine.binding import known_of

L = keras.layers
RNG = np.random.default_rng(0)
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def mesh(batch, model, **options):
    return tfdist.strategy("mesh", batch=batch, model=model, **options)


def compiled(inputs, outputs, optimizer=None, loss="mse"):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or keras.optimizers.Adam(0.01, epsilon=1e-3), loss, metrics=["mae"])
    return model


def mlp(optimizer=None):
    inputs = keras.Input((6,))
    x = L.Dense(16, "tanh")(inputs)
    x = L.Dense(16, "tanh")(x)
    return compiled(inputs, L.Dense(2)(x), optimizer)


def rows(count, *shape):
    return RNG.normal(size=(count, *shape)).astype(np.float32)


def difference(a, b):
    return max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))


# Memory -----------------------------------------------------------------------------------------


def held_bytes(variables):
    """What they hold now: to read them would bring their slices together."""
    held = (tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables)
    return sum(value.numpy().nbytes for value in held)


@scenario
def memory():
    def model_fn():
        inputs = keras.Input((1024,))
        x = inputs
        for _ in range(5):
            x = L.Dense(1440, "tanh")(x)
        return compiled(inputs, L.Dense(8)(x))

    with mesh(1, 2, keep_host_copy=False) as strategy:
        model = strategy.build(model_fn)
        state = known_of(model, MeshModel, "a test").state
        kernel = model.layers[1].kernel
        slot = state.slots[id(kernel), "m"]
        whole = sum(np.prod(v.shape) for v in model.weights) * 4 * 3
        devices = [[part.device for part in s.slices] for s in (state.of(kernel), slot)]
        before = model.get_weights()
        host = held_bytes(model.weights)
        model.fit(rows(8, 1024), rows(8, 8), verbose=0)
        model.predict(rows(8, 1024), verbose=0)
        model.evaluate(rows(8, 1024), rows(8, 8), verbose=0)
        after = held_bytes(model.weights)
        described = strategy.describe(model, global_batch_size=8)
        return {
            "described": [described.bytes_per_device, described.measured_bytes],
            "whole": int(whole),
            "per_device": sorted(state.bytes_per_device().values()),
            "slices": [list(part.shape) for part in state.of(kernel).slices],
            "slots": [list(part.shape) for part in slot.slices],
            "held": [len(state.of(v).held) for v in (kernel, model.layers[-1].bias)],
            "devices": devices,
            "host": [host, after],
            "readable": [list(w.shape) for w in before] == [list(v.shape) for v in model.weights],
            "moved": difference(before, model.get_weights()),
        }


# Exactness --------------------------------------------------------------------------------------


class Composite(L.Layer):
    """Sublayers, a weight of its own, and operators."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = L.Dense(16, "tanh")
        self.back = L.Dense(8)

    def build(self, shape):
        self.scale = self.add_weight(shape=(1, shape[-1]), initializer="ones", name="scale")
        super().build(shape)

    def call(self, x, training=None):
        y = self.back(self.dense(x)) * 2.0 + x * self.scale
        if training:
            y = y + 0.1
        return tf.concat([y, -x], axis=-1)[:, :12] - tf.reduce_mean(x, axis=-1, keepdims=True)


class Twice(L.Layer):
    """A layer of the user's with a conversion of the user's."""

    def call(self, x):
        return tf.add(*[tf.raw_ops.Identity(input=x)] * 2)


@register_layer(Twice)
def _twice(context, layer, x):
    return context.local(lambda x: x + x, [x], x.shape.dims)


def images():
    inputs = keras.Input((9, 9, 3))
    x = L.ZeroPadding2D(1)(inputs)
    x = L.Conv2D(16, 3, activation="elu", kernel_regularizer="l2")(x)
    x = L.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = L.BatchNormalization(momentum=0.9)(x)
    x = L.LeakyReLU()(x)
    x = L.AveragePooling2D()(x)
    y = L.Conv2D(16, 1)(x)
    z = L.Conv2D(16, 3, dilation_rate=2, padding="same")(x)
    x = L.Concatenate()([L.Multiply()([y, z]), L.Average()([y, z]), L.Subtract()([y, z])])
    x = L.GlobalMaxPooling2D()(x)
    return compiled(inputs, L.Dense(2)(x)), rows(30, 9, 9, 3)


def normalized():
    """Channels whole and split; with and without each weight."""
    inputs = keras.Input((6, 6, 3))
    x = L.BatchNormalization(momentum=0.9, scale=False)(inputs)
    x = L.BatchNormalization(momentum=0.8, epsilon=1e-6)(L.Conv2D(16, 3)(x))
    x = L.BatchNormalization(momentum=0.7, center=False)(L.Conv2D(4, 1, activation="tanh")(x))
    x = L.BatchNormalization(momentum=0.9)(L.Flatten()(x))
    return compiled(inputs, L.Dense(2)(x)), rows(30, 6, 6, 3)


def towers():
    """A normalization that is called six times, once in inference, on channels whole and split."""
    inputs = keras.Input((6, 6, 16))
    conv, norm = L.Conv2D(16, 3, padding="same"), L.BatchNormalization(momentum=0.7)
    second = L.Conv2D(16, 1, activation="tanh")(inputs)
    ends = [norm(inputs), L.Activation("tanh")(norm(conv(inputs))), norm(norm(conv(second)))]
    ends.append(norm(second, training=False))
    x = L.GlobalAveragePooling2D()(norm(L.Concatenate(axis=1)(ends)))
    return compiled(inputs, L.Dense(2)(x)), rows(30, 6, 6, 16)


def sequences():
    inputs = keras.Input((6, 8))
    mask = keras.Input((6, 6), dtype="bool")
    x = L.Conv1D(16, 3, padding="causal")(inputs)
    x = L.TimeDistributed(L.Dense(8, "tanh"))(x)
    x = L.MultiHeadAttention(2, 4)(x, inputs, attention_mask=mask)
    x = L.Softmax()(L.Reshape((3, 16))(x))
    model = compiled([inputs, mask], L.Dense(2)(L.Flatten()(x)))
    masks = np.tile(np.tril(np.ones((6, 6), bool)), (30, 1, 1))
    return model, (rows(30, 6, 8), masks)


def nested():
    inner_inputs = keras.Input((8,))
    inner = keras.Model(inner_inputs, L.Dense(16, "tanh")(inner_inputs))
    inputs = keras.Input((8,))
    x = Composite()(inputs)
    x = Twice()(L.Dense(8)(x))
    x = L.Add()([inner(x), inner(inputs)])
    # Fixed to inference by its place, not by its name.
    fixed = keras.Sequential([keras.Input((16,)), L.Dropout(0.5), L.BatchNormalization()])
    x = L.Dropout(0.5)(fixed(x, False), False)
    return compiled(inputs, L.Dense(2)(x), keras.optimizers.SGD(0.05, momentum=0.9)), rows(30, 8)


class Words(L.Layer):
    """As Keras' own example of a transformer embeds: a mask of its own, positions that are told."""

    def build(self, shape):
        self.words = L.Embedding(20, 16)
        self.places = L.Embedding(shape[1], 16, activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, ids):
        return self.words(ids) + self.places(tf.range(ids.shape[1]))

    def compute_mask(self, ids, mask=None):
        return tf.not_equal(ids, 0)


class Joined(L.Layer):
    """Takes as many tensors as it is given."""

    def call(self, first, *others):
        for other in others:
            first = first + other
        return first


class Pooled(L.Layer):
    """Reads a mask that it is given, by its place."""

    def call(self, x, mask):
        return tf.reduce_sum(x * tf.cast(mask, x.dtype)[..., tf.newaxis], 1)


def masked_by_ones_own():
    """Masks of a layer of the user's, one that a call is given, and one that None ends."""
    ids = keras.Input((6,), dtype="int64")
    x = Words()(ids)
    pooled = L.GlobalAveragePooling1D()(x)
    x = L.LSTM(4, return_sequences=True)(L.Dense(16)(x), mask=tf.greater(ids, 4))
    last = L.LSTM(4)(x)
    unmasked = L.LSTM(4)(x, mask=None)
    # Of a tensor of its own: there Keras takes the mask off for all that read it.
    inner = keras.Sequential([keras.Input((6, 4)), L.LSTM(4)])(L.Dense(4)(x), mask=None)
    own = Pooled()(x, tf.greater(ids, 2))
    y = L.Dense(2)(L.Concatenate()([pooled, last, Joined()(unmasked, inner, own)]))
    given = RNG.integers(1, 20, (30, 6)) * (np.arange(6) < RNG.integers(1, 7, (30, 1)))
    return compiled(ids, y), given


class Tokens(L.Layer):
    """A class token, and positions as a constant range."""

    def __init__(self, length, width, **options):
        super().__init__(**options)
        self.length = length
        self.positions = L.Embedding(length + 1, width)

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")
        super().build(shape)

    def call(self, patches):
        token = tf.broadcast_to(self.token, [tf.shape(patches)[0], 1, patches.shape[-1]])
        tokens = tf.concat([token, patches], axis=1)
        return tokens + self.positions(tf.range(start=0, limit=self.length + 1, delta=1))


def recurrent():
    """Layers with and without a mask, sequences and states from one to the other."""
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(16, 16, mask_zero=True)(ids)
    x = L.Bidirectional(L.GRU(8, return_sequences=True))(x)
    lstm = L.LSTM(8, return_sequences=True, return_state=True, recurrent_regularizer="l2")
    y, *states = lstm(x)
    z = L.LSTM(8, go_backwards=True)(L.TimeDistributed(L.Dense(8, "tanh"))(y), initial_state=states)
    a = L.RNN(L.StackedRNNCells([L.GRUCell(4), L.SimpleRNNCell(4)]), unroll=True)(x)
    b = L.SimpleRNN(4)(L.Masking()(L.Concatenate()([y, x])))
    return compiled(ids, L.Dense(2)(L.Concatenate()([z, a, b]))), RNG.integers(0, 16, (30, 6))


def masked():
    """A mask that goes through attention and pooling, and one that reaches loss and metrics."""
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(8, 16, mask_zero=True)(ids)
    y = L.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(L.Add()([x, y]))
    pooled = L.Dense(4)(L.GlobalAveragePooling1D()(L.Dense(16, "gelu")(x)))
    x = L.Dense(16, "tanh")(L.Dropout(0.0)(x)) * 1.0  # An operator ends a mask.
    x = L.Concatenate()([x, L.RepeatVector(6)(pooled)])
    again = L.Add()([L.Dense(2)(x), L.Embedding(8, 2, mask_zero=True)(ids)])
    first = L.Masking()(L.Dense(2)(x))
    return compiled(ids, L.Average()([again, first])), RNG.integers(0, 8, (30, 6))


def reshaped():
    """Layers that each device computes whole, images and sequences."""
    images = keras.Input((8, 8, 3))
    x = L.SeparableConv2D(
        8,
        3,
        padding="same",
        activation="elu",
        depthwise_regularizer="l2",
        pointwise_regularizer="l1",
    )(images)
    x = L.UnitNormalization()(L.GroupNormalization(4)(x))
    x = L.Conv2DTranspose(4, 3, strides=2)(L.Cropping2D(1)(x))
    x = L.CenterCrop(6, 6)(L.Resizing(9, 9)(L.PReLU()(x)))
    x = L.Conv3D(4, 2)(L.Reshape((6, 6, 2, 2))(x))
    x = L.GlobalAveragePooling3D()(L.UpSampling3D()(x))
    y = L.Reshape((12, 16))(images)
    y = L.SeparableConv1D(8, 3)(L.UpSampling1D()(L.Conv1DTranspose(4, 3)(y)))
    y = L.ConvLSTM1D(4, 2)(L.Reshape((13, 2, 8))(L.DepthwiseConv1D(1)(y)))
    x = L.Concatenate()([x, L.Flatten()(y)])
    return compiled(images, L.Dense(2)(L.Dense(16, "tanh")(x))), rows(30, 8, 8, 3)


def vision():
    """Patches as in Keras' own example: cut by a convolution, a class token, constant positions."""
    inputs = keras.Input((8, 8, 3))
    x = L.Reshape((4, 16))(L.Conv2D(16, 4, strides=4)(inputs))
    x = Tokens(4, 16)(x)
    y = L.LayerNormalization()(x)
    x = L.Add()([x, L.MultiHeadAttention(2, 8)(y, y)])
    return compiled(inputs, L.Dense(2)(x[:, 0])), rows(30, 8, 8, 3)


class PaddedAttention(L.Layer):
    """Attention that sees no padding: its mask is made of ids, and a causal one of a shape."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = L.MultiHeadAttention(2, 8)
        self.second = L.MultiHeadAttention(2, 8)

    def call(self, x, ids):
        is_token = tf.not_equal(ids, 0)
        y = self.first(x, x, attention_mask=is_token[:, tf.newaxis, :])
        rows, length = tf.shape(x)[0], tf.shape(x)[1]
        past = tf.range(length)[:, None] >= tf.range(length)
        return x + self.second(y, y, attention_mask=tf.tile(past[None], [rows, 1, 1]))


def padded():
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(16, 16)(ids)
    y = PaddedAttention()(x, ids)
    y = y * tf.cast(ids > 0, tf.float32)[..., tf.newaxis]
    # Both cast whole numbers, as Keras' do.
    of_numbers = L.Dense(8, "tanh")(L.Concatenate()([L.BatchNormalization()(ids), L.Dense(4)(ids)]))
    x = L.Concatenate()([L.Flatten()(y), of_numbers])
    return compiled(ids, L.Dense(2)(x)), RNG.integers(0, 16, (30, 6))


def clipped():
    inputs = keras.Input((5,), dtype="int32")
    x = L.Flatten()(L.Embedding(16, 8)(inputs))
    optimizer = keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return compiled(inputs, L.Dense(2)(L.Dense(16, "tanh")(x)), optimizer), RNG.integers(
        0, 16, (30, 5)
    )


#: (batch, model) -> what is trained on it. A mesh with both axes does all that one with one does.
EXACT = {
    (2, 2): (
        *(images, sequences, nested, vision, padded, clipped, recurrent, masked, reshaped),
        *(towers, masked_by_ones_own),
    ),
    (1, 2): (nested, clipped, images, normalized, masked, towers),
}


@scenario
def exact(*wanted):
    """All of EXACT, or those that are wanted, each as "images 2x2"."""
    result = {}
    for (batch, model), models in EXACT.items():
        with mesh(batch, model) as strategy:
            for make in models:
                if wanted and f"{make.__name__} {batch}x{model}" not in wanted:
                    continue
                _, x = make()
                y = rows(30, *make()[0].output_shape[1:])
                report = tfdist.verify(
                    lambda make=make: make()[0], (x, y), strategy, steps=4, global_batch_size=8
                )
                result[f"{make.__name__} {batch}x{model}"] = report.difference
    return result


class Scaled(L.Layer):
    def __init__(self):
        super().__init__(name="scaled")
        self.dense, self.factor = L.Dense(6), 1.0

    def call(self, x):
        return self.factor * self.dense(x)


@scenario
def settings_of_layers():
    """Those of a composite layer may be set after the build; its weights are read by no step."""

    def model_fn():
        inputs = keras.Input((6,))
        return compiled(inputs, L.Dense(2)(Scaled()(inputs)))

    x = rows(8, 6)
    with mesh(2, 1) as strategy:
        model = strategy.build(model_fn)
        model.fit(x, rows(8, 2), verbose=0)
        read = len(known_of(model, MeshModel, "a test").host._traced_reads)
        model.get_layer("scaled").factor = 0.5
        model.compile("sgd", "mse")
        found = model.predict(x, verbose=0)
        expected = model_fn()
        expected.set_weights(model.get_weights())
        expected.get_layer("scaled").factor = 0.5
        return {"difference": difference([found], [expected.predict(x, verbose=0)]), "read": read}


@scenario
def layout():
    with mesh(1, 2, layout={"first/kernel": ("model", None)}) as strategy:

        def model_fn():
            inputs = keras.Input((6,))
            x = L.Dense(16, "tanh", name="first")(inputs)
            return compiled(inputs, L.Dense(2)(L.Dense(16, name="second")(x)))

        report = tfdist.verify(model_fn, (rows(30, 6), rows(30, 2)), strategy, steps=4)
        description = strategy.describe(strategy.build(model_fn), global_batch_size=8)
        return {
            "difference": report.difference,
            "splits": {row.path: row.split for row in description.weights},
            "collectives": [[c.kind, c.axis, c.count] for c in description.collectives],
        }


# Mixed precision --------------------------------------------------------------------------------


def mixed_images():
    """All kinds of weights: those of layers, of a composite, and of a layer left in float32."""
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(16, 3, activation="elu")(inputs)
    x = L.AveragePooling2D()(L.BatchNormalization(momentum=0.9)(x))
    x = Composite()(L.Dense(8, "gelu")(L.Flatten()(x)))
    x = L.Dense(16, "tanh", dtype="float32")(x)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=1.0)
    if keras.mixed_precision.global_policy().name == "mixed_float16":
        # Far too much: as many steps are left out as it takes to halve it.
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2**30)
    return compiled(inputs, L.Dense(2)(x), optimizer), rows(30, 8, 8, 3)


def mixed_tokens():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(16, 16)(inputs)
    y = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
    return compiled(inputs, L.Dense(2)(L.Flatten()(x))), RNG.integers(0, 16, (30, 6))


@scenario
def mixed(*wanted):
    result = {}
    cases = (
        ("mixed_bfloat16", mixed_tokens),
        ("mixed_float16", mixed_images),  # Keras' LayerNormalization has no float16 on CPUs.
    )
    for policy, make in cases:
        if wanted and f"{policy} {make.__name__}" not in wanted:
            continue
        keras.mixed_precision.set_global_policy(policy)
        try:
            reference, x = make()
            reference.run_eagerly = True  # Nothing is traced, which takes longer than its steps.
            start, data = reference.get_weights(), (x, rows(30, 2))
            first = reference.predict(x, verbose=0)
            reference.fit(*data, batch_size=8, epochs=6, shuffle=False, verbose=0)
            folder = Path(tempfile.mkdtemp())

            def fit(batch, model, epochs, *, make=make, data=data, folder=folder, **options):
                with mesh(batch, model) as strategy:
                    built = strategy.build(lambda: make()[0])
                    found = built.predict(data[0], verbose=0)
                    feed = strategy.dataset(data, global_batch_size=8, training=False)
                    keep = tfdist.Checkpoints(folder, **options)
                    built.fit(feed, epochs=epochs, callbacks=[keep], verbose=0)
                return built, found

            def restarted(*args, make=make, start=start, **options):
                return fit(*args, make=lambda: (_with_weights(make()[0], start), None), **options)

            _, found = restarted(1, 2, 3)
            resumed, _ = fit(2, 2, 6, resume=True)
            result[f"{policy} {make.__name__}"] = {
                "dtypes": [found.dtype.name, first.dtype.name],
                "prediction": difference([found.astype("float32")], [first.astype("float32")]),
                "weights": difference(resumed.get_weights(), reference.get_weights()),
                "moved": difference(start, reference.get_weights()),
                "loss_scales": [
                    float(getattr(model.optimizer, "loss_scale", 1))
                    for model in (resumed, reference)
                ],
            }
        finally:
            keras.mixed_precision.set_global_policy("float32")
    return result


def _with_weights(model, weights):
    model.set_weights(weights)
    return model


# Files ------------------------------------------------------------------------------------------


class SetsRate(keras.callbacks.Callback):
    """Lowers the learning rate, which what is written from then on has."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.004


@scenario
def files():
    folder = Path(tempfile.mkdtemp())
    data = rows(30, 6), rows(30, 2)
    keras.utils.set_random_seed(1)
    reference = mlp()
    reference.run_eagerly = True
    start = reference.get_weights()
    reference.fit(*data, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[SetsRate()])
    expected = reference.get_weights()

    def fit(batch, model, epochs, *, keep_host_copy=True, **options):
        with mesh(batch, model, keep_host_copy=keep_host_copy) as strategy:
            built = strategy.build(mlp)
            built.set_weights(start)
            feed = strategy.dataset(data, global_batch_size=8, training=False)
            keep = tfdist.Checkpoints(folder / "checkpoints", **options)
            callbacks = [keep] if options else [SetsRate(), keep]
            built.fit(feed, epochs=epochs, callbacks=callbacks, verbose=0)
            return strategy, built

    strategy, built = fit(1, 2, 2, keep_host_copy=False)
    strategy.save(built, folder / "model.keras")
    _, resumed = fit(2, 1, 4, resume=True)
    loaded = keras.models.load_model(folder / "model.keras")
    loaded.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    half = keras.models.load_model(folder / "model.keras")
    half.save_weights(folder / "weights")  # In TensorFlow's format, with the optimizer's slots.
    half.save_weights(folder / "half.weights.h5")
    mlp().save(folder / "new.keras")  # From which a model comes with an optimizer that is built.
    new = keras.models.load_model(folder / "new.keras")
    new.load_weights(folder / "half.weights.h5")
    new.fit(*data, batch_size=8, shuffle=False, verbose=0)
    one = mlp()  # Without slots yet, so that Keras leaves out those of such a file.
    one.load_weights(folder / "half.weights.h5")
    one.fit(*data, batch_size=8, shuffle=False, verbose=0)
    with mesh(1, 2) as strategy:
        from_file = strategy.build(lambda: keras.models.load_model(folder / "model.keras"))
        read = strategy.build(mlp)
        read.load_weights(folder / "weights")
        for model in (from_file, read):
            feed = strategy.dataset(data, global_batch_size=8, training=False)
            model.fit(feed, epochs=2, verbose=0)
        without_slots = strategy.build(mlp)
        without_slots.load_weights(folder / "half.weights.h5")
        without_slots.fit(feed, verbose=0)
        begun = difference(without_slots.get_weights(), one.get_weights())
        with_slots = strategy.build(lambda: keras.models.load_model(folder / "new.keras"))
        with_slots.load_weights(folder / "half.weights.h5")
        with_slots.fit(feed, verbose=0)
        begun = max(begun, difference(with_slots.get_weights(), new.get_weights()))
        spares = keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=1.0)
        spares.exclude_from_weight_decay(var_names=["bias"])
        one = mlp()
        one.compile(spares, "mse")
        one.fit(*data, batch_size=8, verbose=0)
        given = strategy.build(one)
        given.fit(feed, verbose=0)
        one.fit(*data, batch_size=8, shuffle=False, verbose=0)
    return {
        "a model object gone on with": difference(given.get_weights(), one.get_weights()),
        "a loaded model gone on with": difference(from_file.get_weights(), expected),
        "weights read before a step": begun,
        "weights read with their slots": difference(read.get_weights(), expected),
        "resumed on another mesh": difference(resumed.get_weights(), expected),
        "gone on with in plain Keras": difference(loaded.get_weights(), expected),
        "weights of the layers": difference(
            [w for layer in resumed.layers for w in layer.get_weights()], expected
        ),
    }


class WithOwnMemory(operations.MeshDevices):
    """Logical CPUs that share nothing, like GPUs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.share_memory = False


@scenario
def dropout():
    def model_fn():
        inputs = keras.Input((6,))
        x = L.Dropout(0.3)(L.Dense(16, "tanh")(L.Dropout(0.5)(L.Dense(16, "tanh")(inputs))))
        return compiled(inputs, L.Dense(2)(x))

    with mesh(2, 2) as strategy, mock.patch.object(operations, "MeshDevices", WithOwnMemory):
        model = strategy.build(model_fn)
        start = model.get_weights()
        model.fit(rows(30, 6), rows(30, 2), batch_size=8, epochs=2, verbose=0)
        unequal = []
        for variable in model.weights:
            slices = [
                part.numpy().tolist()
                for part in known_of(model, MeshModel, "a test").state.of(variable).slices
            ]
            # Devices 0, 2 and 1, 3 hold the same part of the weights.
            if slices[0] != slices[2] or slices[1] != slices[3]:
                unequal.append(variable.name)
        return {"moved": difference(start, model.get_weights()), "unequal": unequal}


@scenario
def dropout_of_rows():
    """The features of a row lie on two devices, and drop out together."""

    def dropped(_, y_pred):
        return tf.reduce_mean(tf.cast(tf.equal(y_pred, 0), tf.float32))

    def torn(_, y_pred):
        zeros = tf.reduce_mean(tf.cast(tf.equal(y_pred, 0), tf.float32), axis=-1)
        return tf.reduce_mean(tf.cast((zeros > 0) & (zeros < 1), tf.float32))

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), L.Dense(16, kernel_initializer="ones")])
        model.add(L.Dropout(0.5, noise_shape=(None, 1)))
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[dropped, torn])
        return model

    with mesh(2, 2) as strategy:
        ones = np.ones((64, 4), np.float32), np.ones((64, 16), np.float32)
        history = strategy.build(model_fn).fit(*ones, batch_size=64, verbose=0).history
        return {name: history[name][-1] for name in ("dropped", "torn")}


@scenario
def callbacks():
    folder = Path(tempfile.mkdtemp())
    data, held_out = (rows(30, 6), rows(30, 2)), (rows(9, 6), rows(9, 2))
    reference = mlp()
    start = reference.get_weights()
    results = []
    with mesh(2, 2) as strategy:
        for name, model in (("keras", reference), ("mesh", strategy.build(mlp))):
            model.set_weights(start)
            stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
            history = model.fit(
                *data,
                batch_size=8,
                epochs=6,
                shuffle=False,
                validation_data=held_out,
                verbose=0,
                callbacks=[
                    stop,
                    keras.callbacks.ModelCheckpoint(folder / f"{name}.h5", save_weights_only=True),
                    keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1)),
                    keras.callbacks.TensorBoard(folder / name, histogram_freq=1),
                ],
            ).history
            kept = mlp()
            kept.load_weights(folder / f"{name}.h5")
            results.append((history, model.get_weights(), kept.get_weights()))
    (history, weights, kept), (other, other_weights, other_kept) = results
    return {
        "epochs": [len(history["loss"]), len(other["loss"])],
        "val_loss": float(np.max(np.abs(np.subtract(history["val_loss"], other["val_loss"])))),
        "weights": difference(weights, other_weights),
        "kept": difference(kept, other_kept),
    }


class SetsWeights(keras.callbacks.Callback):
    """Sets weights in each way that callbacks do, and reads what it had set after a step on it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self._kernels = [layer.kernel for layer in self.model.layers if hasattr(layer, "kernel")]

        @tf.function
        def shrink():
            for kernel in self._kernels:
                kernel.assign(kernel * 0.9)

        self._shrink = shrink

    def on_train_batch_end(self, batch, logs=None):
        first, last = self._kernels[0], self.model.layers[-1]
        if batch == 0:  # As pruning does.
            self._kernels[1].assign(0.1 * np.ones(self._kernels[1].shape, np.float32))
            kernel = first.numpy()
            first.assign(np.where(np.abs(kernel) < 0.05, 0, kernel))
            last.set_weights([weight * 0.8 for weight in last.get_weights()])
        elif batch == 1:  # As the critic of a WGAN.
            for weight in self.model.trainable_weights:
                weight.assign(tf.clip_by_value(weight, -0.3, 0.3))
        elif batch == 2:
            first.assign_add(0.01 * tf.ones_like(first))
            first.scatter_nd_update([[0, 0]], [0.5])
        else:
            self._shrink()
        self.seen.append([weight.numpy() for weight in self.model.weights])


def _told_as_keras_tells(results, data, options, name, seen=0.0):
    """Notes how far what a callback sees, and what comes of it, is from plain Keras.

    seen: what counts as none, beside which both round.
    """
    fit = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    reference, told = mlp(), SetsWeights()
    start = reference.get_weights()
    reference.fit(*data, callbacks=[told], **fit)
    with mesh(2, 2, **options) as strategy:
        model, heard = strategy.build(mlp), SetsWeights()
        model.set_weights(start)
        model.fit(*data, callbacks=[heard], **fit)
        pairs = zip(told.seen, heard.seen, strict=True)
        apart = max(difference(a, b) for a, b in pairs)
        results[f"seen, {name}"] = 0.0 if apart <= seen else apart
        apart = difference(reference.get_weights(), model.get_weights())
        results[f"trained, {name}"] = 0.0 if apart <= seen else apart


@scenario
def weights_of_callbacks():
    data, results = (rows(30, 6), rows(30, 2)), {}
    _told_as_keras_tells(results, data, {"keep_host_copy": True}, "host copy")
    _told_as_keras_tells(results, data, {"keep_host_copy": False}, "no host copy")
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        _told_as_keras_tells(results, data, {"keep_host_copy": False}, "mixed", seen=1e-2)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return results


# Refusals ---------------------------------------------------------------------------------------


def sequential(*layers, shape=(6,), batch_size=None, **options):
    model = keras.Sequential([keras.Input(shape, batch_size), *layers])
    model.compile(options.pop("optimizer", "adam"), "mse", **options)
    return model


def functional(between):
    def make():
        inputs = keras.Input((4, 6))
        return compiled(inputs, L.Dense(16)(between(inputs)))

    return make


class AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x * 2.0


class DropsPath(L.Layer):
    def call(self, x, training=None):
        if not training:
            return x
        return x * tf.cast(tf.random.uniform([]) >= 0.5, x.dtype)


class Repeats(L.Layer):
    """Adds as many rows as it likes, not as many as the batch has."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")
        super().build(shape)

    def call(self, x):
        return x + tf.tile(self.token, [8, 1, 1])


class Mean(keras.regularizers.Regularizer):
    def __call__(self, x):
        return tf.reduce_mean(x)


class OfItsOwn(keras.Model):
    """A submodel that is only known by its call, as those of HuggingFace are."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = L.Dense(16)

    def call(self, x):
        return self.dense(x)


@scenario
def refusals():
    cases = {
        "rnn": (lambda: sequential(L.LSTM(16, dropout=0.5), L.Dense(16), shape=(4, 6)), {}),
        "stateful": (
            lambda: sequential(L.GRU(16, stateful=True), shape=(4, 6), batch_size=8),
            {},
        ),
        "no layer": (lambda: sequential(L.GaussianNoise(0.1), L.Dense(16)), {}),
        "adafactor": (
            lambda: sequential(L.Dense(16), optimizer=keras.optimizers.Adafactor()),
            {},
        ),
        "nadam": (lambda: sequential(L.Dense(16), optimizer="nadam"), {}),
        "legacy": (
            lambda: sequential(L.Dense(16), optimizer=keras.optimizers.legacy.Adam()),
            {},
        ),
        "ema": (
            lambda: sequential(L.Dense(16), optimizer=keras.optimizers.Adam(use_ema=True)),
            {},
        ),
        "regularizer": (lambda: sequential(L.Dense(16, kernel_regularizer=Mean()), L.Dense(2)), {}),
        "activation": (lambda: sequential(L.Dense(16, activation=lambda x: x[::-1])), {}),
        "eagerly": (lambda: sequential(L.Dense(16), run_eagerly=True), {}),
        "nothing matches": (mlp, {"layout": {"conv.*": (None, "model")}}),
        "rank": (mlp, {"layout": {"kernel": ("model",)}}),
        "axis": (mlp, {"layout": {"kernel": (None, "modle")}}),
        "divides": (lambda: sequential(L.Dense(15)), {"layout": {"kernel": (None, "model")}}),
        "constraint": (
            lambda: sequential(L.Dense(16, kernel_constraint="max_norm"), L.Dense(2)),
            {},
        ),
        "added loss": (lambda: sequential(L.Dense(16), AddsLoss(), L.Dense(2)), {}),
        "mask": (
            lambda: sequential(L.Masking(), L.BatchNormalization(), L.Flatten(), shape=(4, 6)),
            {},
        ),
        "noise": (lambda: sequential(L.Dropout(0.5, noise_shape=(1, 6)), L.Dense(16)), {}),
        "unknown shape": (
            lambda: sequential(L.Dense(16), L.Dense(2), shape=(None, 4)),
            {},
        ),
        "nothing to split": (lambda: sequential(L.Dense(5)), {}),
        "no graph": (lambda: sequential(OfItsOwn(name="encoder"), L.Dense(16)), {}),
        "repeated": (lambda: sequential(Repeats(), L.Dense(16), shape=(4, 6)), {}),
        "draws in a call": (lambda: sequential(DropsPath(), L.Dense(16)), {}),
        "draws between": (functional(lambda x: x + tf.random.normal(tf.shape(x))), {}),
        "always in training": (functional(lambda x: L.Dropout(0.5)(x, training=True)), {}),
        "inner activity": (
            functional(lambda x: L.TimeDistributed(L.Dense(16, activity_regularizer="l2"))(x)),
            {},
        ),
        "over the rows": (functional(lambda x: tf.nn.softmax(x, axis=0)), {}),
        "sparse": (
            lambda: compiled(*(lambda x: (x, L.Dense(16)(x)))(keras.Input((6,), sparse=True))),
            {},
        ),
        "joins rows": (functional(lambda x: tf.reshape(x, [-1, 6])), {}),
        "takes rows apart": (functional(lambda x: tf.reshape(x, [2, -1, 6])), {}),
        "rows of zeros": (
            functional(lambda x: tf.concat([x, tf.zeros([tf.shape(x)[0], 1, 6])], 1)),
            {},
        ),
        "of no layer": (functional(lambda x: x * tf.Variable(1.0)), {}),
    }

    def by_hand():
        model = mlp()
        variables = model.trainable_variables
        gradients = [tf.zeros_like(variable) for variable in variables]
        with mesh(1, 2) as strategy:
            strategy.build(lambda: model).optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )

    def clipped_table():
        inputs = keras.Input((6,), dtype="int64")
        x = L.Flatten()(L.Embedding(16, 8)(inputs))
        with mesh(1, 2) as strategy:
            sgd = keras.optimizers.SGD(clipvalue=0.1)
            model = strategy.build(lambda: compiled(inputs, L.Dense(16)(x), sgd))
            model.fit(np.zeros((8, 6), np.int64), rows(8, 16), verbose=0)

    def compiled_again():
        with mesh(1, 2) as strategy:
            model = strategy.build(mlp)
            first = model.optimizer
            for optimizer in (first, "sgd", first):
                model.compile(optimizer, "mse")

    cases["compiled again"] = (compiled_again, {})
    cases["by hand"] = (by_hand, {})
    cases["clipped table"] = (clipped_table, {})
    result = {}
    for name, (model_fn, options) in cases.items():
        try:
            with mesh(1, 2, **options) as strategy:
                strategy.build(model_fn)
            result[name] = "accepted"
        except TfdistError as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


@scenario
def ids_of_no_row():
    """Of a table that devices divide, of which none holds such a row, and of a whole one."""
    ids, y = np.zeros((8, 6), np.int64), np.zeros((8, 2), np.float32)
    ids[5, 1] = 2**32 + 1  # Row 1, were it cut to int32.
    told = []
    for axes in ((2, 2), (2, 1)):
        with mesh(*axes) as strategy:
            inputs = keras.Input((6,), dtype="int64")
            x = L.Flatten()(L.Embedding(16, 4, name="words")(inputs))
            model = strategy.build(lambda x=x, inputs=inputs: compiled(inputs, L.Dense(2)(x)))
            start = model.get_weights()
            calls = [
                functools.partial(model.fit, ids, y, batch_size=8, verbose=0),
                functools.partial(model.predict, ids, verbose=0),
                functools.partial(model.train_on_batch, ids, y),
            ]
            for call in calls:
                try:
                    call()
                    told.append("accepted")
                except TfdistError as error:
                    told.append(str(error))
            if difference(start, model.get_weights()):
                told.append("weights that moved")
    return told


@scenario
def outputs_of_one_tensor():
    x, y = rows(16, 4), (np.zeros((16, 2), np.float32), np.ones((16, 2), np.float32))
    result = {}
    for activation in (None, "sigmoid"):

        def model_fn(activation=activation):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((4,))
            z = L.Dense(16, "tanh")(inputs)
            z = L.Dense(2, activation)(z)
            again = z if activation else L.Activation("linear")(z)
            loss = "binary_crossentropy" if activation else "mse"
            model = keras.Model(inputs, [z, again])
            model.compile(keras.optimizers.SGD(0.1), loss, loss_weights=[1.0, 0.5])
            return model

        found = []
        for strategy in (tfdist.strategy("single"), mesh(2, 2)):
            with strategy:
                model = strategy.build(model_fn)
                model.fit(strategy.dataset((x, y), global_batch_size=8), epochs=2, verbose=0)
                found.append(model.get_weights())
        result[str(activation)] = difference(*found)
    return result


@scenario
def outputs_without_a_loss():
    """What moves the weights of such outputs, and how far from where one device moves all."""

    def model_fn():
        keras.utils.set_random_seed(1)
        ids = keras.Input((3,), dtype="int32")
        x = L.Dense(16, "tanh")(L.Flatten()(L.Embedding(8, 4)(ids)))
        second = L.Flatten()(L.Embedding(8, 4, name="unused")(ids))
        outputs = {
            "told": L.Dense(4, name="told")(x),
            "unused": L.Dense(4, "softmax", name="decayed")(second),
            "regular": L.Dense(4, kernel_regularizer="l2", use_bias=False, name="regular")(x),
        }
        model = keras.Model(ids, outputs)
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=1e-3, global_clipnorm=0.1)
        model.compile(optimizer, {"told": "mse", "unused": None, "regular": "mse"})
        return model

    x, y = RNG.integers(0, 8, (16, 3)), {"told": rows(16, 4)}  # And no labels of another one.
    found = []
    for strategy in (tfdist.strategy("single"), mesh(1, 2)):
        with strategy:
            model = strategy.build(model_fn)
            before = model.get_weights()
            model.fit(x, y, batch_size=8, epochs=2, verbose=0)
            found.append(model.get_weights())
    moved = [
        variable.name
        for variable, was, now in zip(model.weights, before, found[1], strict=True)
        if difference([was], [now]) > 0
    ]
    return {"moved": moved, "difference": difference(*found)}


def main(out, *wanted):
    with mesh(2, 2):
        pass  # All four devices must be there before any of them is used.
    results = {}
    for name, function in SCENARIOS.items():
        keras.utils.set_random_seed(0)
        try:
            results[name] = function(*(wanted if name in ("exact", "mixed") else ()))
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
