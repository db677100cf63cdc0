"""The models, data and optimizers that every strategy must train as one device does.

Activations are smooth: a ReLU whose input rounds to the other side of its kink makes float32 runs
part on any two devices, which says nothing about a strategy.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

GLOBAL_BATCH_SIZE = 12
NUM_CLASSES = 3

MODELS = ("mlp", "convnet", "two_inputs")
# name -> (records, with sample weights); 48 divides by the batch, 49 leaves a tail of 1.
DATA = {"even": (48, False), "tail_of_1": (49, False), "weights": (53, True)}
OPTIMIZERS = ("momentum", "adam")

TRAIN_CASES = tuple(
    f"train-{model}-{data}-{optimizer}"
    for model, optimizer, data in itertools.product(MODELS, OPTIMIZERS, DATA)
)
OTHER_CASES = (
    *(f"evaluate-{model}" for model in MODELS),
    *(f"predict-{model}" for model in MODELS),
    "class_weight-mlp",
    "resume-convnet",
    "save-convnet",
)
CASES = (*TRAIN_CASES, *OTHER_CASES)


def arrays(model: str, num_records: int, weighted: bool, seed: int = 0) -> tuple[Any, ...]:
    """Returns (x, y[, sample_weight]); y: int64 [num_records] in [0, NUM_CLASSES)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(num_records, *shape)).astype(np.float32)

    x = {
        "mlp": lambda: normal(6),
        "convnet": lambda: rng.integers(0, 256, (num_records, 8, 8, 1), np.uint8),
        "two_inputs": lambda: {"left": normal(4), "right": normal(2, 3)},
    }[model]()
    y = rng.integers(0, NUM_CLASSES, num_records)
    if not weighted:
        return x, y
    return x, y, rng.uniform(0.2, 3.0, num_records).astype(np.float32)


def build(model: str, optimizer: str) -> Any:
    """Returns the compiled Keras model; weights are drawn from the global seed."""
    from tensorflow import keras

    inputs, outputs = {"mlp": _mlp, "convnet": _convnet, "two_inputs": _two_inputs}[model](keras)
    built = keras.Model(inputs, outputs)
    built.compile(
        {
            "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            # Adam divides by the root of the gradient: a large epsilon keeps rounding small.
            "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
        }[optimizer](),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", auc_of_class_zero()],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )
    return built


def auc_of_class_zero() -> Any:
    """Returns the AUC of "is it class 0": a metric whose mean over replicas would be wrong."""
    from tensorflow import keras

    class AucOfClassZero(keras.metrics.AUC):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_true == 0, y_pred[:, :1], sample_weight)

    return AucOfClassZero(name="auc")


def _mlp(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    x = layers.Dense(16, "gelu", activity_regularizer=keras.regularizers.L2(1e-2))(x)
    return inputs, layers.Dense(NUM_CLASSES, "softmax")(x)


def _convnet(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Conv2D(16, 3, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("elu")(x)
    x = layers.Conv2D(16, 3, strides=2, activation="tanh")(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(16)(x)
    x = layers.BatchNormalization(momentum=0.9, scale=False)(x)
    return inputs, layers.Dense(NUM_CLASSES, "softmax")(x)


def _two_inputs(keras: Any) -> tuple[Any, Any]:
    layers = keras.layers
    left = keras.Input((4,), name="left")
    right = keras.Input((2, 3), name="right")
    a = layers.Dense(16, "tanh")(left)
    b = layers.Dense(16, "elu")(layers.Flatten()(right))
    joined = layers.LayerNormalization()(layers.Concatenate()([a, b]))
    return [left, right], layers.Dense(NUM_CLASSES, "softmax")(joined)
