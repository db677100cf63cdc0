"""Updates of weights that lie on several devices, each computed where its weight lies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist import keras


@contextlib.contextmanager
def updates_where_weights_lie(optimizer: Any) -> Iterator[None]:
    """Has ``optimizer`` compute the update of a weight on the device of that weight.

    Keras names no device, so that TensorFlow computes all of them on the first one: gradients and
    slots of the others would travel there, and back, in each step.
    """
    inner = keras.optimizers.inner_of(optimizer)
    if isinstance(inner, tf.keras.optimizers.legacy.Optimizer):
        yield  # Whose updates are operations of TensorFlow's own, which lie with their variables.
        return
    update = inner.update_step

    def update_there(gradient: Any, variable: Any, *rate: Any) -> Any:
        with tf.device(keras.tensors.raw(variable).device):
            return update(gradient, variable, *rate)

    with keras.layers.replaced(inner, update_step=update_there):
        yield
