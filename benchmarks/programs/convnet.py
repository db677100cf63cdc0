"""The convnets of federated rounds, for programs in environments of their own, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def convnet(keras: Any, shape: Sequence[int], blocks: Sequence[Sequence[int] | int]) -> Any:
    """Returns a model for ten classes, not compiled.

    Args:
        keras: the package.
        shape: of an image.
        blocks: filters of convolutions before a pooling, or units of a dense layer.
    """
    layers = keras.layers
    model = keras.Sequential([keras.Input(tuple(shape))])
    for block in blocks:
        if isinstance(block, int):
            model.add(layers.Flatten())
            model.add(layers.Dense(block, activation="relu"))
            continue
        for filters in block:
            model.add(layers.Conv2D(filters, 3, activation="relu"))
        model.add(layers.MaxPool2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    return model
