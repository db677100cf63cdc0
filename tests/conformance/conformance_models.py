"""The models on which the strategies that divide a model prove themselves: 20 steps, one device's.

Each is a function of no arguments that returns a compiled model, and makes its data; weights are
drawn from the global seed. What a step is worth (learning rate, batch, size of the images) is
chosen so that one device repeats itself within the tolerance when its first weights change by one
part in 10^7: where it does not, the rounding of float32 decides, and equality proves nothing.
Activations are smooth for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS = 20
NUM_CLASSES = 10
#: The largest difference of a step's loss, and of a weight after the last step (float32).
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 5e-6, 1e-5


@dataclass(frozen=True)
class ProofModel:
    """A model and its data.

    Attributes:
        model_fn: returns it, compiled.
        x, y: some batches; y: int64 [records] or [records, time] in [0, NUM_CLASSES).
        global_batch_size: of a step; it divides the records.
    """

    model_fn: Callable[[], Any]
    x: np.ndarray
    y: np.ndarray
    global_batch_size: int


def mlp() -> ProofModel:
    def model_fn() -> Any:
        from tensorflow import keras

        inputs = keras.Input((12,))
        x = keras.layers.Dense(32, "tanh", kernel_regularizer="l2")(inputs)
        x = keras.layers.LayerNormalization()(keras.layers.Dense(32, "gelu")(x))
        return _compiled(inputs, keras.layers.Dense(NUM_CLASSES)(x))

    return ProofModel(model_fn, *_records(64, (12,)), 16)


def convnet() -> ProofModel:
    """With BatchNormalization; smooth activations."""

    def model_fn() -> Any:
        from tensorflow import keras

        layers = keras.layers
        inputs = keras.Input((12, 12, 3))
        x = inputs
        for filters in (16, 32):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.BatchNormalization(momentum=0.9)(x)
            x = layers.AveragePooling2D()(layers.Activation("elu")(x))
        x = layers.Dense(32, "tanh")(layers.Flatten()(x))
        return _compiled(inputs, layers.Dense(NUM_CLASSES)(x))

    return ProofModel(model_fn, *_records(64, (12, 12, 3)), 16)


def transformer() -> ProofModel:
    """Two causal blocks over tokens; a label for each token."""
    vocabulary, length, width = 32, 12, 32

    def model_fn() -> Any:
        from tensorflow import keras

        layers = keras.layers
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width)(inputs)
        for _ in range(2):
            x = _block(keras, x, heads=4, causal=True)
        return _compiled(inputs, layers.Dense(NUM_CLASSES)(layers.LayerNormalization()(x)))

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (64, length)).astype(np.int32)
    return ProofModel(model_fn, tokens, rng.integers(0, NUM_CLASSES, (64, length)), 16)


def vit() -> ProofModel:
    """A Vision Transformer with a class token. Dosovitskiy et al. 2020, arXiv:2010.11929."""
    width, patch = 32, 4

    def model_fn() -> Any:
        import tensorflow as tf
        from tensorflow import keras

        layers = keras.layers

        class Tokens(layers.Layer):
            """patches: [batch, n, width] -> [batch, 1 + n, width], each with its position."""

            def build(self, shape: Any) -> None:
                self.token = self.add_weight("token", (1, 1, shape[-1]))
                self.positions = self.add_weight(
                    "positions", (1, 1 + shape[1], shape[-1]), initializer="random_normal"
                )
                super().build(shape)

            def call(self, patches: Any) -> Any:
                token = tf.tile(self.token, [tf.shape(patches)[0], 1, 1])
                return tf.concat([token, patches], axis=1) + self.positions

        inputs = keras.Input((16, 16, 3))
        x = layers.Conv2D(width, patch, strides=patch)(inputs)
        x = Tokens()(layers.Reshape((-1, width))(x))
        for _ in range(2):
            x = _block(keras, x, heads=4, causal=False)
        x = layers.LayerNormalization()(x)[:, 0]
        return _compiled(inputs, layers.Dense(NUM_CLASSES)(x))

    return ProofModel(model_fn, *_records(64, (16, 16, 3)), 16)


def resnet50v2() -> ProofModel:
    """Keras' own, 23.6 million weights, on small images; to be compared in float64.

    In float32 a change of the first weights by 1e-7 alters the first gradient by 1e-2: a few of
    10^7 inputs of ReLU lie so near to 0 that they fall on its other side. After 20 steps one device
    then differs from itself by 0.2 in the loss, whatever the learning rate. In float64 kinks are a
    billion times rarer.
    """
    size = 33  # The last layers still see 2x2 places.

    def model_fn() -> Any:
        from tensorflow import keras

        model = keras.applications.ResNet50V2(
            weights=None,
            classes=NUM_CLASSES,
            input_shape=(size, size, 3),
            classifier_activation=None,
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(3e-4, momentum=0.9), loss)
        return model

    return ProofModel(model_fn, *_records(32, (size, size, 3)), 8)


#: name -> function that makes the model and its data.
PROOF_MODELS: dict[str, Callable[[], ProofModel]] = {
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
    "vit": vit,
    "resnet50v2": resnet50v2,
}


def _block(keras: Any, x: Any, *, heads: int, causal: bool) -> Any:
    """A transformer block with normalization first."""
    layers, width = keras.layers, x.shape[-1]
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    x = layers.Add()([x, y])
    y = layers.Dense(2 * width, "gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


def _compiled(inputs: Any, outputs: Any) -> Any:
    from tensorflow import keras

    model = keras.Model(inputs, outputs)
    # Adam divides by the root of the gradient: a large epsilon keeps rounding small.
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _records(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, *shape)).astype(np.float32), rng.integers(0, NUM_CLASSES, count)
