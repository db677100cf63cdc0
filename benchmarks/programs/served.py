"""The models that ``benchmarks/serve.py`` has served, and how programs by hand read requests."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

SIDE = 96
NUMBERS = tuple("abcdefgh")
COLOURS = ("blue", "green", "red")


def photos() -> Any:
    """Returns MobileNetV2 of photos in 10 classes, with random weights."""
    from tensorflow import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIDE, SIDE, 3), name="image")
    x = keras.layers.Rescaling(1 / 127.5, -1.0)(inputs)
    network = keras.applications.MobileNetV2(input_tensor=x, weights=None, classes=10)
    return _compiled(keras.Model(inputs, network.output))


def table() -> Any:
    """Returns a small model of eight numbers and a colour."""
    from tensorflow import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    features = keras.Input((len(NUMBERS),), name="features")
    colour = keras.Input((), dtype="int64", name="colour")
    x = layers.Concatenate()([features, layers.Embedding(len(COLOURS), 4)(colour)])
    for _ in range(2):
        x = layers.Dense(64, "relu")(x)
    inputs = {"features": features, "colour": colour}
    return _compiled(keras.Model(inputs, layers.Dense(2, "softmax")(x)))


def _compiled(model: Any) -> Any:
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def read_photos(instances: list[dict[str, str]]) -> Any:
    import tensorflow as tf

    files = (base64.b64decode(instance["b64"]) for instance in instances)
    return tf.stack([tf.io.decode_jpeg(file, 3) for file in files])


def read_table(instances: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    numbers = [[instance[name] for name in NUMBERS] for instance in instances]
    colours = [COLOURS.index(instance["colour"]) for instance in instances]
    return {"features": np.array(numbers, np.float32), "colour": np.array(colours, np.int64)}


def traced(model: Any) -> Any:
    """Returns the model as a function of batches of any size, which is traced once."""
    import tensorflow as tf

    as_read = {"image": tf.uint8}
    spec = {
        given.name: tf.TensorSpec(given.shape, as_read.get(given.name, given.dtype))
        for given in model.inputs
    }
    alone = next(iter(spec.values())) if len(spec) == 1 else spec
    return tf.function(lambda x: model(x, training=False), input_signature=[alone])


READERS = {"photos": read_photos, "table": read_table}
