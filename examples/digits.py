"""A small convnet for images of handwritten digits: uint8 [8, 8, 1] in 0..16, 10 classes."""

from tensorflow import keras
from tensorflow.keras import layers


def model_fn() -> keras.Model:
    """Returns a compiled model; it scales its inputs itself, so raw images give right answers."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(64, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("gelu"),
            layers.Flatten(),
            layers.Dense(64, activation="gelu"),
            layers.Dense(10),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
