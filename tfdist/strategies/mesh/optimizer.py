"""Keras' own optimizers on slices of weights: which of them are right there, and how."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.training.model.refusals import ELEMENTWISE_NAMES, is_elementwise


def check_optimizer(optimizer: Any) -> None:
    """Checks that ``optimizer`` is right on slices.

    Raises:
        ModelError: it is not elementwise, or an option of it is not known on a mesh.
    """
    # Whatever else wraps an optimizer is a class of the user's own.
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        optimizer = keras.optimizers.inner_of(optimizer)
    if not is_elementwise(optimizer):
        raise ModelError(
            "an optimizer on a mesh must update each element of a weight by itself, unlike one "
            "that works on whole layers (LAMB, Adafactor), one that counts its variables "
            "(Nadam), or a class of your own",
            received=type(optimizer).__module__.partition(".src")[0]
            + f" {type(optimizer).__name__}",
            mend=f"Choose one of tf.keras.optimizers: {ELEMENTWISE_NAMES}",
        )
    if waits := keras.optimizers.asks_whether_to_update(optimizer, [keras.optimizers.WAITS]):
        raise ModelError(
            "an optimizer on a mesh must update in each step",
            received=f"{type(optimizer).__name__} with {waits}",
            mend=f"Leave out {waits}",
        )
    if optimizer.use_ema:
        raise ModelError(
            "an optimizer on a mesh must keep no averages of weights",
            received=f"{type(optimizer).__name__} with use_ema=True",
            mend="Leave out use_ema",
        )


def unscaled(optimizer: Any, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of the loss itself, for those of the scaled one."""
    found = keras.optimizers.without_factor(optimizer, gradients)
    return keras.loss_scale.unscaled(optimizer, found)


def exclude_slices(optimizer: Any, slices_of: dict[str, list[Any]]) -> None:
    """Carries ``exclude_from_weight_decay(var_list=...)`` over from weights to their slices.

    Args:
        slices_of: key of a weight -> its slices.
    """
    parts = [
        part for key in keras.optimizers.without_decay(optimizer) for part in slices_of.get(key, [])
    ]
    keys = [keras.optimizers.key_of(optimizer, part) for part in parts]
    keras.optimizers.leave_out_of_decay(optimizer, keys)


def clip(
    optimizer: Any, gradients: list[list[tf.Tensor]], squares: list[tf.Tensor]
) -> list[list[tf.Tensor]]:
    """Clips as Keras does, by the norms of whole gradients.

    Args:
        gradients: of each weight, one slice for each device.
        squares: squared norm of each weight's whole gradient; not read when clipping by value.
    """
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        limit = optimizer.clipnorm
        scales = [limit / tf.maximum(tf.sqrt(square), limit) for square in squares]
    elif optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        limit = optimizer.global_clipnorm
        scales = [limit / tf.maximum(tf.sqrt(tf.add_n(squares)), limit)] * len(gradients)
    elif optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue
        return [[tf.clip_by_value(g, -limit, limit) for g in slices] for slices in gradients]
    else:
        return gradients
    return [
        [tf.math.scalar_mul(tf.cast(scale, g.dtype), g) for g in slices]
        for slices, scale in zip(gradients, scales, strict=True)
    ]


def squared_norms(gradients: list[list[tf.Tensor]], replications: list[float]) -> list[tf.Tensor]:
    """Returns the squared norm of each weight's whole gradient.

    Args:
        replications: of each weight, how many devices hold the same slice.
    """
    return [
        tf.add_n([tf.reduce_sum(tf.square(g)) for g in slices]) / replication
        for slices, replication in zip(gradients, replications, strict=True)
    ]
