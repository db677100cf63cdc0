"""The loss scale of an optimizer in half precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.optimizers import inner_of
from tfdist.keras.version import IS_KERAS_3


def asks_whether_finite(optimizer: Any) -> bool:
    """Whether ``optimizer`` has a loss scale that follows the gradients: in Keras 3 each does."""
    is_wrapper = inner_of(optimizer) is not optimizer
    return is_wrapper if IS_KERAS_3 else getattr(optimizer, "dynamic", False)


def loss_scale_state(optimizer: Any) -> list[tf.Variable]:
    """Returns what a dynamic loss scale consists of; empty without one, and where it is told of in
    ``variables_of``."""
    if IS_KERAS_3 or not asks_whether_finite(optimizer):
        return []
    return [optimizer._loss_scale.current_loss_scale, optimizer._loss_scale.counter]


def is_undone_in_update(optimizer: Any) -> bool:
    """Whether ``optimizer`` takes gradients for those of a scaled loss, as Keras 3 does."""
    scale = getattr(optimizer, "loss_scale_factor", None)
    return IS_KERAS_3 and (asks_whether_finite(optimizer) or scale is not None)


def unscaled(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns what ``gradients_of`` has found without the loss scale, which Keras 2 has undone."""
    scale = getattr(optimizer, "dynamic_scale", getattr(optimizer, "loss_scale_factor", None))
    if not IS_KERAS_3 or scale is None:
        return list(gradients)
    factor = 1 / tf.convert_to_tensor(scale, tf.float32)
    return [
        None if gradient is None else tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)
        for gradient in gradients
    ]


def update_loss_scale(
    optimizer: Any, is_finite: tf.Tensor, own: Callable[[Any], tf.Variable]
) -> None:
    """Counts a step in the dynamic loss scale of ``optimizer``; on each replica.

    Args:
        is_finite: whether the gradients of all replicas are, bool [].
        own: returns that of a variable which this replica has.
    """
    if IS_KERAS_3:
        scale, count = own(optimizer.dynamic_scale), own(optimizer.step_counter)
        grows = count >= optimizer.dynamic_growth_steps - 1
        scale.assign(scale * tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5))
        count.assign(tf.where(is_finite & ~grows, count + 1, 0))
        return
    optimizer._loss_scale.update([tf.where(is_finite, 0.0, float("nan"))])


def counts_step(is_finite: tf.Tensor | None) -> Any:
    """Returns how many steps one counts as: Keras 3 leaves out those that its loss scale skips."""
    return tf.cast(is_finite, tf.int64) if IS_KERAS_3 and is_finite is not None else 1
