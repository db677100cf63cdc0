"""The layers that a layer consists of, and their variables."""

from __future__ import annotations

import tensorflow as tf


def layers_in(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """Returns ``layer`` and all layers inside of it or of a model, at any depth.

    ``layer.submodules`` would fail on recurrent layers with dropout, whose cache of masks it
    cannot walk through; Keras' own walk has no public name.
    """
    return list(layer._flatten_layers())


def variables_in(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Returns the weights of ``layer`` that are variables.

    Keras counts a vocabulary among the weights of a lookup layer: a table, which has no shape.
    """
    return [weight for weight in layer.weights if isinstance(weight, tf.Variable)]
