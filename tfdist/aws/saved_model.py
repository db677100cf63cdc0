"""The model that an endpoint serves, and what an evaluation must know of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.records.format.schema import Schema
from tfdist.strategies.base import called, clone

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf


def plain(model_fn: Any, weights: list[np.ndarray]) -> tf.keras.Model:
    """Returns an ordinary Keras model with ``weights``, untouched by any strategy."""
    import tensorflow as tf

    model = clone(model_fn) if isinstance(model_fn, tf.keras.Model) else called(model_fn)
    model.set_weights(weights)
    return model


def describe(model: tf.keras.Model, schema: Schema) -> dict[str, Any]:
    """Returns what evaluation must know of the outputs: problem, classes, and whether logits.

    ``problem`` is "multiclass", "binary", "regression", or None for anything else.
    """
    label = schema.class_label
    labels = schema.of_role("label")
    outputs = model.output_shape
    problem = None
    if isinstance(outputs, tuple) and len(outputs) == 2:
        if label is not None:
            problem = "multiclass" if outputs[-1] > 1 else "binary"
        elif len(labels) == 1 and set(labels[0].read_shape) <= {1}:
            problem = "regression" if outputs[-1] == 1 else None
    return {
        "problem": problem,
        "from_logits": bool(getattr(model.loss, "from_logits", False)),
        "classes": None if label is None or label.classes is None else list(label.classes),
    }
