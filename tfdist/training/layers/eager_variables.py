"""What Keras makes within a model's first step, made before it.

TensorFlow traces a function that has made variables once more in its second call, so a step that
finds them all there begins in half the time.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.layers.losses import uses_compiled_loss


def make_slots(model: tf.keras.Model) -> None:
    """Makes the variables of the optimizer; legacy optimizers make theirs in the first step."""
    with model.distribute_strategy.scope(), keras.steps.training_as_compiled(model):
        keras.optimizers.build(model.optimizer, model.trainable_variables)


def make_metrics(model: tf.keras.Model, y_pred: Any, y: Any) -> None:
    """Makes the variables of losses and metrics.

    Args:
        model: compiled.
        y_pred: its outputs, symbolic ones too.
        y: labels, or tf.TensorSpec of labels, [batch, ...].
    """
    make_loss(model, y_pred)
    keras.losses.build_metrics(model, y_pred, y)


def make_loss(model: tf.keras.Model, y_pred: Any) -> None:
    """Makes the variables of compiled losses; of Keras 3 ``make_known_metrics`` has made all."""
    if uses_compiled_loss(model):
        keras.losses.build_loss(model, y_pred)


def steps_are_keras_own(model: tf.keras.Model) -> bool:
    """Whether it is Keras that tells compiled losses and metrics of batches."""
    return not keras.layers.written_anew(
        model, "train_step", "test_step", "compute_loss", "compute_metrics"
    )


def make_known_metrics(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> None:
    """Makes those variables where outputs are known and steps are Keras' own.

    Args:
        element_spec: of a batch, (x[, y[, sample_weight]]).
    """
    symbolic = getattr(model, "output", None)  # Models of their own class have none.
    is_own = steps_are_keras_own(model)
    with model.distribute_strategy.scope():
        if not is_own and not keras.layers.can_be_called(model):
            return  # Steps of the user's own make what they need.
        if keras.steps.build_all(model, element_spec):
            return
        if symbolic is not None and is_own and len(element_spec) > 1:
            make_metrics(model, symbolic, element_spec[1])
