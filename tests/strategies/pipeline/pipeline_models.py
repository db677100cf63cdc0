"""Models that put a pipeline to the test, each with its data and options.

Activations are smooth, as in the conformance cases: a kink enlarges rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_RECORDS = 53
GLOBAL_BATCH_SIZE = 12

# case -> options beside stages=2, microbatches=3; tracing takes the longer the more there are.
CASES: dict[str, dict[str, Any]] = {
    "skips": {},
    "skips-1f1b": {"schedule": "1f1b", "stages": 4, "microbatches": 4},
    "skips-interleaved": {"schedule": "interleaved", "microbatches": 4},
    "skips-recompute": {"recompute": "blocks", "schedule": "1f1b"},
    "skips-one-stage": {"stages": 1},
    "norms": {},
    "norms-recompute": {"recompute": "blocks", "stages": 3},
    "tokens": {"schedule": "1f1b"},
    "tokens-recompute": {"recompute": "blocks"},
    "two_outputs": {"schedule": "1f1b", "stages": 3},
    "own_layers": {"schedule": "1f1b", "stages": 3},
    "shared": {"schedule": "1f1b"},
    "sum_loss": {},
    "clipped": {"schedule": "1f1b"},
    "legacy": {},
    "nested": {"cut_after": "twice/wide"},
    "nested_norms": {"cut_after": "middle/second"},
    "nested-interleaved": {"schedule": "interleaved", "microbatches": 4},
    "frozen": {"freeze_until": "middle"},
    "frozen-kept": {"freeze_until": "middle", "frozen_cache": "memory", "schedule": "1f1b"},
    "frozen_norm": {"schedule": "1f1b"},
    "eager": {},
    "recurrent": {"schedule": "1f1b"},
    "float64": {},
}


def kind(case: str) -> str:
    return case.partition("-")[0]


def arrays(case: str) -> tuple[Any, Any, Any]:
    """Returns (x, y, sample_weight)."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.2, 3.0, NUM_RECORDS).astype(np.float32)
    y = rng.integers(0, 3, NUM_RECORDS)
    if kind(case) in ("tokens", "recurrent"):
        return rng.integers(0, 20, (NUM_RECORDS, 7)), y, weights
    if kind(case) in ("norms", "frozen_norm", "nested_norms"):
        return rng.normal(size=(NUM_RECORDS, 6, 6, 2)).astype(np.float32), y, weights
    x = rng.normal(size=(NUM_RECORDS, 8)).astype(np.float32)
    if kind(case) == "own_layers":
        return x, {"main": y}, weights
    if kind(case) == "two_outputs":
        return x, {"side": x[:, :1] ** 2, "main": y}, weights
    return x, y, weights


def build(case: str) -> Any:
    """Returns the compiled model of a case."""
    from tensorflow import keras

    inputs, outputs = _LAYERS.get(kind(case), _dense)(keras, keras.layers)
    model = keras.Model(inputs, outputs)
    options: dict[str, Any] = {
        "optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    if case == "sum_loss":
        options["loss"] = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        options["optimizer"] = keras.optimizers.SGD(0.005, momentum=0.9)
    if case == "clipped":
        options["optimizer"] = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    if case == "legacy":
        options["optimizer"] = keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    if case == "own_layers":
        options |= {"loss": {"main": options["loss"]}, "metrics": {"main": "accuracy"}}
    if case == "two_outputs":
        options["loss"] = {"side": "mse", "main": options["loss"]}
        options |= {"loss_weights": {"side": 0.3, "main": 2.0}, "metrics": {"main": "accuracy"}}
    model.compile(**options, run_eagerly=case == "eager")
    return model


def _dense(keras: Any, layers: Any) -> tuple[Any, Any]:
    x = inputs = keras.Input((8,))
    for name in ("first", "middle", "last"):
        x = layers.Dense(8, "tanh", name=name, kernel_regularizer="l2")(x)
    return inputs, layers.Dense(3)(x)


def _skips(keras: Any, layers: Any) -> tuple[Any, Any]:
    """Tensors that pass over whole stages, operators, losses of weights and of activations."""
    inputs = keras.Input((8,))
    x = start = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
    for _ in range(3):
        y = layers.Dense(8, "gelu", activity_regularizer=keras.regularizers.L2(0.02))(x)
        x = layers.LayerNormalization()(x + y * 0.5)
    x = layers.Concatenate()([x, start, inputs])
    return inputs, layers.Dense(3, kernel_regularizer="l1")(x)


def _norms(keras: Any, layers: Any) -> tuple[Any, Any]:
    inputs = keras.Input((6, 6, 2))
    x = layers.BatchNormalization(momentum=0.9)(inputs)
    x = layers.Conv2D(4, 3, padding="same")(x)
    a = layers.BatchNormalization(momentum=0.8, scale=False)(x)
    b = layers.BatchNormalization(momentum=0.8, center=False)(layers.Activation("tanh")(x))
    x = layers.Conv2D(4, 3, strides=2, activation="gelu")(a + b)
    x = layers.Dense(6)(layers.Flatten()(x))
    return inputs, layers.Dense(3)(layers.BatchNormalization(momentum=0.9)(x))


def _tokens(keras: Any, layers: Any) -> tuple[Any, Any]:
    """Sparse gradients, and a mask that crosses the cut: token 0 is padding."""
    inputs = keras.Input((7,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    y = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(layers.Add()([x, y]))
    x = layers.Dense(8, "gelu")(x)
    return inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x))


def _recurrent(keras: Any, layers: Any) -> tuple[Any, Any]:
    inputs = keras.Input((7,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    return inputs, layers.Dense(3)(layers.LSTM(8)(x))


def _two_outputs(keras: Any, layers: Any) -> tuple[Any, Any]:
    """One output comes out of an early stage, out of the order of the model's outputs."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh")(inputs)
    side = layers.Dense(1, name="side")(x)
    for _ in range(3):
        x = layers.Dense(8, "tanh")(x)
    return inputs, {"main": layers.Dense(3, name="main")(x), "side": side}


def _own_layers(keras: Any, layers: Any) -> tuple[Any, Any]:
    """Layers with an ``if``, a loss and gradients of their own.

    A gradient of zeros would be NaN behind the two outputs without a loss; Keras takes none there.
    """
    import tensorflow as tf

    class Own(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
            if tf.reduce_sum(tf.abs(x)) > 0:  # Of every batch, however divided.
                x = x * 1.5
            return doubled_back(x)

    @tf.custom_gradient
    def doubled_back(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda gradient: 2 * gradient

    @tf.custom_gradient
    def unit_back(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda gradient: gradient / tf.norm(gradient)

    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh")(inputs)
    early = layers.Lambda(unit_back, name="early")(x)
    for _ in range(3):
        x = Own()(layers.Dense(8, "tanh")(x))
    late = layers.Dense(2, "softmax", name="late")(layers.Lambda(unit_back)(x))
    return inputs, {"early": early, "main": layers.Dense(3, name="main")(x), "late": late}


def _shared(keras: Any, layers: Any) -> tuple[Any, Any]:
    """One layer at both ends of the model: its gradients come from two stages."""
    inputs = keras.Input((8,))
    tied = layers.Dense(8, "tanh", kernel_regularizer="l2")
    x = layers.Dense(8, "tanh")(tied(inputs))
    return inputs, layers.Dense(3)(tied(layers.Dense(8, "tanh")(x)))


def _nested(keras: Any, layers: Any) -> tuple[Any, Any]:
    """Models in models, with losses of their own: one is called twice, one in inference."""
    pair = keras.Input((8,)), keras.Input((8,))
    twice = keras.Model(
        pair,
        layers.Dense(8, "tanh", kernel_regularizer="l2")(
            layers.Dense(16, "gelu", name="wide", activity_regularizer="l2")(
                pair[0] * 0.5 + pair[1]
            )
        ),
        name="twice",
    )
    settled = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "tanh"), layers.BatchNormalization()], name="settled"
    )
    deep = keras.Sequential([keras.Input((8,)), settled, layers.Dense(6, "tanh")], name="inner")
    inputs = keras.Input((8,))
    x = twice([inputs, layers.Dense(8)(inputs)])
    # By its place, not by the name of ``training``.
    return inputs, layers.Dense(3)(deep(twice([x, inputs]), False))


def _frozen_norm(keras: Any, layers: Any) -> tuple[Any, Any]:
    inputs = keras.Input((6, 6, 2))
    norm = layers.BatchNormalization()
    norm.trainable = False
    x = norm(layers.Conv2D(4, 3, activation="tanh")(inputs))
    x = layers.BatchNormalization()(x, training=False)
    return inputs, layers.Dense(3)(layers.Flatten()(x))


def _nested_norms(keras: Any, layers: Any) -> tuple[Any, Any]:
    middle = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            layers.BatchNormalization(momentum=0.8),
            layers.Conv2D(4, 3, activation="gelu", name="second"),
            layers.BatchNormalization(momentum=0.8),
        ],
        name="middle",
    )
    inputs = keras.Input((6, 6, 2))
    x = middle(layers.Conv2D(4, 3, padding="same")(inputs))
    return inputs, layers.Dense(3)(layers.Flatten()(x))


_LAYERS = {
    "nested_norms": _nested_norms,
    "skips": _skips,
    "norms": _norms,
    "tokens": _tokens,
    "recurrent": _recurrent,
    "two_outputs": _two_outputs,
    "own_layers": _own_layers,
    "shared": _shared,
    "nested": _nested,
    "frozen_norm": _frozen_norm,
}
